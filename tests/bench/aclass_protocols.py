"""AClass, what is classified: training and test rows of each experiment.

    uv run python -m tests.bench.aclass_protocols               # the component that each column of a table takes

    x_train, y_train, x_test, y_test = repetition("synthetic", size=500, missing=0.25, seed=0)
    x_train, y_train, x_test, y_test = repetition("soybean", seed=3)

| protocol | rows |
|---|---|
| synthetic | 4 classes over 100 binary features: mixtures of 4, 10, 5 and 20 components, equal
weights, coins from Beta(½, ½) |
| 20news_w100 | the four groups of boards of 20 Newsgroups by 100 words |
| mnist_pca50 | odd against even digits by the signs of 50 principal components (of 5000 random
images) |
| house_votes, soybean, pima, breast_cancer, zoo_animals | fold `seed` of 10; the next ten seeds are
another shuffle |

The first three are float arrays of 0, 1 and NaN with 500 test rows; `missing` is the share of cells
made NaN at random, in training and test. Of one seed a small training set begins a large one, and
the cells of a small share are among those of a large one. The others are data frames with their own
missing cells, where a column of at most ten values, other than 0 and 1, is a category.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from gallery.datasets import load
from tests.bench.aclass_density import Mixture

__all__ = ["BARS", "TABLES", "Cell", "Repetition", "components", "frame", "repetition"]

NUM_MODES = (4, 10, 5, 20)  # of the synthetic classes
NUM_FEATURES = 100
NUM_TEST = 500
NUM_FOLDS = 10
TABLES = ("house_votes", "soybean", "pima", "breast_cancer", "zoo_animals")
MOST_LEVELS = 10  # a column of more values is a number


class Repetition(NamedTuple):
    """Rows to learn from, and rows to judge by; labels 0 .. K-1."""

    x_train: np.ndarray | pd.DataFrame
    y_train: np.ndarray
    x_test: np.ndarray | pd.DataFrame
    y_test: np.ndarray


class Cell(NamedTuple):
    """A row of a table of results."""

    protocol: str
    size: int | None = None  # of the training set; None in a cross-validation
    missing: float = 0.0


# the smallest error known of an AClass filter, 40 particles at most: to be reached within a
# standard error
BARS = {
    Cell("synthetic", 100, 0.0): 0.048,
    Cell("synthetic", 100, 0.5): 0.109,
    Cell("synthetic", 500, 0.5): 0.004,
    Cell("synthetic", 2000, 0.5): 0.001,
    Cell("20news_w100", 500, 0.0): 0.221,
    Cell("20news_w100", 2000, 0.5): 0.333,
    Cell("mnist_pca50", 500, 0.0): 0.170,
    Cell("mnist_pca50", 2000, 0.0): 0.118,
    Cell("mnist_pca50", 2000, 0.25): 0.193,
    Cell("mnist_pca50", 2000, 0.5): 0.304,
    Cell("house_votes"): 0.036,
}


def repetition(
    protocol: str, size: int | None = None, missing: float = 0.0, seed: int = 0
) -> Repetition:
    """The rows of one repetition; the same arguments give the same rows."""
    if protocol in TABLES:
        if size is not None or missing:
            raise ValueError(
                f"size={size}, missing={missing}: {protocol!r} is cross-validated with its own "
                "missing cells; leave both out"
            )
        return _fold(protocol, seed)
    draws = {"synthetic": _synthetic, "20news_w100": _real, "mnist_pca50": _real}
    if protocol not in draws:
        raise ValueError(f"no protocol {protocol!r}; there are {', '.join((*draws, *TABLES))}")
    if size is None:
        raise ValueError(f"size=None: {protocol!r} wants the number of training rows, such as 500")
    row_rng, cell_rng = np.random.default_rng([seed, *protocol.encode()]).spawn(2)
    x, y = draws[protocol](row_rng, NUM_TEST + size, protocol)
    x = np.where(cell_rng.random(x.shape) < missing, np.nan, x)
    return Repetition(x[NUM_TEST:], y[NUM_TEST:], x[:NUM_TEST], y[:NUM_TEST])


def _synthetic(rng: np.random.Generator, num_rows: int, _: str) -> tuple[np.ndarray, np.ndarray]:
    mixtures = [Mixture.draw(rng, modes, NUM_FEATURES) for modes in NUM_MODES]
    y = rng.integers(len(mixtures), size=num_rows)
    x = np.empty((num_rows, NUM_FEATURES))
    for label, mixture in enumerate(mixtures):
        x[y == label] = mixture.sample(rng, int((y == label).sum()))
    return x, y


def _real(rng: np.random.Generator, num_rows: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = _arrays(name)
    if num_rows > len(y):
        raise ValueError(
            f"size={num_rows - NUM_TEST}: {name!r} has {len(y)} rows, of which {NUM_TEST} are for "
            "the test"
        )
    chosen = rng.permutation(len(y))[:num_rows]
    return x[chosen], y[chosen]


def _fold(name: str, seed: int) -> Repetition:
    """Fold `seed % 10` of shuffle `seed // 10`; every class is spread evenly over the folds."""
    x, y = frame(name)
    shuffle, fold = divmod(seed, NUM_FOLDS)
    order = np.random.default_rng(shuffle).permutation(len(y))
    by_class = order[np.argsort(y[order], kind="stable")]
    test = np.zeros(len(y), dtype=bool)
    test[by_class[fold::NUM_FOLDS]] = True
    train = order[~test[order]]  # in random order: a filter depends on it
    return Repetition(
        x.iloc[train].reset_index(drop=True), y[train], x[test].reset_index(drop=True), y[test]
    )


@cache
def _arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    data = load(name)
    return data.x, data.y


@cache
def frame(name: str) -> tuple[pd.DataFrame, np.ndarray]:
    """A table with columns of floats and of categories (named by their numbers), and the labels."""
    data = load(name)
    columns = {}
    for feature, values in zip(data.feature_names, data.x.T, strict=True):
        codes, levels = pd.factorize(values, sort=True)  # NaN is code -1
        if len(levels) <= MOST_LEVELS and not set(levels) <= {0, 1}:
            columns[feature] = pd.Categorical.from_codes(codes, [f"{level:g}" for level in levels])
        else:
            columns[feature] = values
    return pd.DataFrame(columns), data.y


def components(x: pd.DataFrame) -> dict[str, str]:
    """The component of each column: categorical by dtype, bernoulli where it holds 0, 1 and NaN
    alone, else normal.
    """

    def component(column: pd.Series) -> str:
        if column.dtype == "category":
            return "categorical"
        return "bernoulli" if set(column.dropna()) <= {0, 1} else "normal"

    return {str(name): component(x[name]) for name in x}


if __name__ == "__main__":
    print(
        "| table | rows | classes | cells missing | bernoulli | categorical | normal "
        "|\n|---|---|---|---|---|---|---|"
    )
    for name in TABLES:
        x, y = frame(name)
        found = components(x)
        counts = [
            sum(value == kind for value in found.values())
            for kind in ("bernoulli", "categorical", "normal")
        ]
        print(
            f"| {name} | {len(y)} | {y.max() + 1} | {x.isna().to_numpy().mean():.1%} | "
            f"{' | '.join(map(str, counts))} |"
        )
