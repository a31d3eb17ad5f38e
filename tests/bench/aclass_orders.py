"""What helps AClass on small data: other orders of the rows, other seeds, or more particles.

    uv run python -m tests.bench.aclass_orders
    uv run python -m tests.bench.aclass_orders priors

Log scores on new rows, means over the splits of `tests.bench.overview`, of one filter and of
averages over filters that read the rows in several orders, or all in the order of the table.
`priors` compares the model's own prior of numbers with that of the estimator, on standardised
columns: log scores, and log evidences.
"""

import sys
import warnings
from functools import partial

import numpy as np
from sklearn.datasets import load_breast_cancer, load_iris, load_wine

from gallery import AClassClassifier
from gallery._columns import STANDARDISED
from tests.bench.overview import TASKS, Split, cut
from zoo.aclass import normal_inverse_chi2

NAMES = ("digits, signs", "digits, half", "votes, half", "MNIST, signs")
SPLITS = 3
TABLES = {
    "digits, half": TASKS["digits, half"].split,
    "breast cancer": partial(cut, *load_breast_cancer(return_X_y=True), 285),
    "breast cancer, half": partial(cut, *load_breast_cancer(return_X_y=True), 285, missing=0.5),
    "iris": partial(cut, *load_iris(return_X_y=True), 75),
    "wine": partial(cut, *load_wine(return_X_y=True), 89),
}


def log_score(proba: np.ndarray, y: np.ndarray) -> float:
    """The mean log probability of the true classes."""
    return float(np.mean(np.log(np.maximum(proba[np.arange(len(y)), y.astype(int)], 1e-12))))


def by_filter(split: Split, *, shuffle: bool, num_particles: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of eight filters, [filter, row, class], and their log evidences."""
    classifier = AClassClassifier(num_particles, random_state=0, progress_bar=False)
    (classifier.fit if shuffle else classifier.partial_fit)(split.x, split.y)
    program = classifier._program(*classifier._read(split.new_x))
    joint = np.stack(
        [
            np.asarray(classifier._kernel.log_classes(state, classifier._reading, program), float)
            for state in classifier._kernel.alike(classifier._states)
        ]
    )
    log_proba = joint - np.logaddexp.reduce(joint, axis=-1, keepdims=True)
    return np.exp(log_proba), classifier._log_evidences()


def main() -> None:
    """Prints the table."""
    print("| data | particles | filters | one | 2 | 4 | 8 | sd of log evidence |\n|" + "---|" * 8)
    for name in NAMES:
        for num_particles in (10, 40, 160):
            for shuffle in (True, False):
                scores, spreads = [], []
                for seed in range(SPLITS):
                    split = TASKS[name].split(seed)
                    proba, evidence = by_filter(split, shuffle=shuffle, num_particles=num_particles)
                    scores.append(
                        [log_score(proba[:num].mean(0), split.new_y) for num in (1, 2, 4, 8)]
                    )
                    spreads.append(np.std(evidence, ddof=1))
                cells = [f"{score:.3f}" for score in np.mean(scores, 0)]
                what = "several orders" if shuffle else "one order"
                row = [name, str(num_particles), what, *cells, f"{np.mean(spreads):.1f}"]
                print("| " + " | ".join(row) + " |", flush=True)


def priors() -> None:
    """Prints the table of `priors`."""
    head = ["data", "model's prior: log score", "evidence", "a quarter within: log score"]
    print("| " + " | ".join([*head, "evidence"]) + " |\n|" + "---|" * 5)
    for name, split_of in TABLES.items():
        found = []
        for seed in range(SPLITS):
            split = split_of(seed=seed)
            mean, scale = np.nanmean(split.x, 0), np.nanstd(split.x, 0)
            x, new_x = ((each - mean) / scale for each in (split.x, split.new_x))
            for component in (normal_inverse_chi2, STANDARDISED):
                settings = {"component": component, "random_state": 0, "progress_bar": False}
                fitted = AClassClassifier(**settings).fit(x, split.y)
                score = log_score(fitted.predict_proba(new_x), split.new_y)
                found += [score, fitted.log_evidence_]
        cells = np.reshape(found, (SPLITS, 4)).mean(0)
        words = [f"{cell:.0f}" if i % 2 else f"{cell:.3f}" for i, cell in enumerate(cells)]
        print("| " + " | ".join([name, *words]) + " |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["priors"]:
        priors()
    else:
        main()
