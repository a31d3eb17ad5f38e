"""AClass, who it is compared with: classifiers that take missing features, and the table of errors.

    OMP_NUM_THREADS=1 uv run python -m tests.bench.aclass_peers             # ten repetitions of every row of `BARS`, and the tables
    OMP_NUM_THREADS=1 uv run python -m tests.bench.aclass_peers --literal   # the literal filter on `BARS`: most of an hour

A classifier is a callable `(x_train, y_train, x_test) -> labels`; rows are those of
`aclass_protocols.repetition`.

| peer | missing features |
|---|---|
| naive Bayes: Beta(½, ½) coins, Dirichlet(½, ..., ½) categories, normal | left out of the product |
| logistic regression, λ = 0.01: minimises −log p(y ∣ x) + λ/2 ∥w∥² | online mean imputation |
| RLS2: least squares with kernel (1 + x·x')², one against all, each λ by its leave-one-out error |
online mean imputation |
| gradient boosting: scikit-learn's HistGradientBoostingClassifier | its own |

Online mean imputation: a missing feature is the mean of 0.5 and the values seen in earlier rows;
test rows take the means that training ended with. Tables reach the two linear peers as indicators
of the categories and numbers scaled to [0, 1]. Cost for n rows and D features: O(n D), O(n D K) an
iteration, O(n³ + n² D), O(n D K) a tree.
"""

import sys
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from tests.bench.aclass_density import mean_and_error
from tests.bench.aclass_literal import literal
from tests.bench.aclass_protocols import BARS, TABLES, Cell, components, repetition

__all__ = ["PEERS", "Classifier", "error_table", "repetition"]

type Rows = np.ndarray | pd.DataFrame
type Classifier = Callable[[Rows, np.ndarray, Rows], np.ndarray]

SMOOTHING = 0.5  # Beta and Dirichlet prior of naive Bayes
PENALTY = 1e-2  # of logistic regression
PENALTIES = np.logspace(-4, 6, 41)  # among which RLS2 chooses


def naive_bayes(x_train: Rows, y_train: np.ndarray, x_test: Rows) -> np.ndarray:
    """One component a class; unseen features are left out."""
    labels, y = np.unique(y_train, return_inverse=True)
    member = np.eye(len(labels))[y]  # [row, class]
    log_joint = np.log(member.sum(0) + 1)
    (train, levels), (test, _) = _codes(x_train), _codes(x_test)
    discrete = levels > 0
    log_joint = log_joint + _discrete(
        train[:, discrete], member, test[:, discrete], levels[discrete]
    )
    return labels[(log_joint + _normal(train[:, ~discrete], member, test[:, ~discrete])).argmax(1)]


def _codes(x: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Floats with NaN, categories by their codes; and the number of levels of each column, 0 for
    a number.
    """
    if isinstance(x, np.ndarray):
        return x, np.full(x.shape[1], 2)
    columns = [
        x[name].cat.codes.where(x[name].notna()) if x[name].dtype == "category" else x[name]
        for name in x
    ]
    found = components(x).items()
    levels = [
        len(x[name].cat.categories) if kind == "categorical" else 2 * (kind == "bernoulli")
        for name, kind in found
    ]
    return np.column_stack([column.to_numpy(float) for column in columns]), np.array(levels)


def _discrete(
    train: np.ndarray, member: np.ndarray, test: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    """Log probabilities [row, class] of coins and categories."""
    seen = member.T @ ~np.isnan(train)
    score = np.zeros((len(test), member.shape[1]))
    for level in range(max(levels, default=0)):
        share = (SMOOTHING + member.T @ (train == level)) / (SMOOTHING * levels + seen)
        score += (test == level) @ np.log(share).T
    return score


def _normal(train: np.ndarray, member: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Log densities [row, class]; the variance of all rows counts as one row in each class."""
    seen = ~np.isnan(train)
    count = member.T @ seen
    mean = member.T @ np.where(seen, train, 0) / np.maximum(count, 1)
    squares = member.T @ np.where(seen, (train - mean[member.argmax(1)]) ** 2, 0)
    variance = (np.nanvar(train, axis=0) + squares) / (1 + count)
    # [row, class, feature]
    score = -0.5 * ((test[:, None] - mean) ** 2 / variance + np.log(2 * np.pi * variance))
    return np.where(np.isnan(test)[:, None], 0, score).sum(-1)


def logistic_regression(x_train: Rows, y_train: np.ndarray, x_test: Rows) -> np.ndarray:
    """Multinomial, with a free intercept."""
    x_train, x_test = imputed(*as_numbers(x_train, x_test))
    return LogisticRegression(C=1 / PENALTY, max_iter=10_000).fit(x_train, y_train).predict(x_test)


def least_squares(x_train: Rows, y_train: np.ndarray, x_test: Rows) -> np.ndarray:
    """Kernel regression on ±1 with all products of two features, one against all."""
    x_train, x_test = imputed(*as_numbers(x_train, x_test))
    labels = np.unique(y_train)
    targets = np.where(y_train[:, None] == labels, 1.0, -1.0)
    eigenvalues, q = np.linalg.eigh((1 + x_train @ x_train.T) ** 2)
    eigenvalues = np.maximum(eigenvalues, 0)  # below it by rounding
    # [penalty, class]
    errors = np.array(
        [(leave_one_out(eigenvalues, q, targets, penalty) ** 2).mean(0) for penalty in PENALTIES]
    )
    weights = q.T @ targets / (eigenvalues[:, None] + PENALTIES[errors.argmin(0)])
    return labels[((1 + x_test @ x_train.T) ** 2 @ (q @ weights)).argmax(1)]


def leave_one_out(
    eigenvalues: np.ndarray, q: np.ndarray, targets: np.ndarray, penalty: float
) -> np.ndarray:
    """What each row's target is missed by, learned from all other rows: c_i / (G⁻¹)_ii, G = K +
    λ I, c = G⁻¹ y.
    """
    inverse = 1 / (eigenvalues + penalty)
    return q @ (inverse[:, None] * (q.T @ targets)) / (q**2 @ inverse)[:, None]


def gradient_boosting(x_train: Rows, y_train: np.ndarray, x_test: Rows) -> np.ndarray:
    """Trees that send missing features their own way; leaves of 5 rows, for the default of 20
    loses words that are rare.
    """
    trees = HistGradientBoostingClassifier(min_samples_leaf=5, random_state=0)
    # idle threads would burn the CPU that others need
    with threadpool_limits(1, user_api="openmp"):
        return trees.fit(x_train, y_train).predict(x_test)


def imputed(x_train: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Online mean imputation: no row sees itself or a later one."""
    seen = ~np.isnan(x_train)
    totals = 0.5 + np.cumsum(np.where(seen, x_train, 0), axis=0)
    means = totals / (1 + np.cumsum(seen, axis=0))  # after each row
    before = np.vstack([np.full(x_train.shape[1], 0.5), means[:-1]])
    return np.where(seen, x_train, before), np.where(np.isnan(x_test), means[-1], x_test)


def as_numbers(x_train: Rows, x_test: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Categories as indicators, numbers scaled by the training rows to [0, 1]; arrays as they
    are.
    """
    if isinstance(x_train, np.ndarray) and isinstance(x_test, np.ndarray):
        return x_train, x_test
    pairs = [
        _indicators(x_train[name], x_test[name]) or _scaled(x_train[name], x_test[name])
        for name in x_train
    ]
    train, test = zip(*pairs, strict=True)
    return np.hstack(train), np.hstack(test)


def _indicators(*columns: pd.Series) -> list[np.ndarray]:
    """Nothing where the columns hold numbers."""
    codes = [
        column.cat.codes.to_numpy()[:, None] for column in columns if column.dtype == "category"
    ]
    return [
        np.where(each < 0, np.nan, each == np.arange(len(columns[0].cat.categories)))
        for each in codes
    ]


def _scaled(train: pd.Series, test: pd.Series) -> list[np.ndarray]:
    low, high = train.min(), train.max()
    return [
        (column.to_numpy(float)[:, None] - low) / ((high - low) or 1.0) for column in (train, test)
    ]


PEERS: dict[str, Classifier] = {
    "naive Bayes": naive_bayes,
    "logistic regression": logistic_regression,
    "RLS2": least_squares,
    "gradient boosting": gradient_boosting,
}


def error_table(
    classifiers: dict[str, Classifier], cells: Iterable[Cell], repetitions: int = 10
) -> dict[tuple[Cell, str], np.ndarray]:
    """Print the 0-1 loss on the test rows, mean and standard error over repetitions, as a markdown
    table.

    Returns the single losses, `{(cell, name): [repetition]}`; every classifier sees the same
    repetitions.
    """
    print(
        f"| data | missing | rows | {' | '.join(classifiers)} "
        f"|\n|{'---|' * (3 + len(classifiers))}",
        flush=True,
    )
    losses = {}
    for cell in cells:
        drawn = [repetition(*cell, seed=seed) for seed in range(repetitions)]
        for name, classify in classifiers.items():
            wrong = [
                classify(each.x_train, each.y_train, each.x_test) != each.y_test for each in drawn
            ]
            losses[cell, name] = np.array([each.mean() for each in wrong])
        missing = "its own" if cell.size is None else f"{cell.missing:g}"
        results = " | ".join(mean_and_error(losses[cell, name]) for name in classifiers)
        print(
            f"| {cell.protocol} | {missing} | {cell.size or '10 folds'} | {results} |", flush=True
        )
    return losses


if __name__ == "__main__":
    if "--literal" in sys.argv:
        error_table({"literal, P = 1": literal(1), "literal, P = 40": literal(40)}, BARS)
    else:
        error_table(PEERS, dict.fromkeys([*BARS, *map(Cell, TABLES)]))
