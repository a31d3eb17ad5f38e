"""Archipelago, what is classified: few labelled rows among many, and test rows, of each experiment.

    x, y, x_test, y_test = draw(Cell("5 arms", labels=1), seed=0)      # y is −1 where the label is hidden
    score(probabilities, y_test)                                        # error and mean log score

| data | rows to learn from | test rows |
|---|---|---|
| 3, 4, 5 arms | a pinwheel of 50 points in all, the arms even to one point | 300 an arm |
| 3, 4, 5 arms h | the same with arms that touch: tangential standard deviation 0.25 in place of 0.1
| 300 an arm |
| wine | 89, classes divided evenly | the other 89 |
| oilflow12 | 134, classes divided evenly; 400 of its 1000 rows are taken | 266 |

Real data are standardised by all rows to learn from, with and without label; pinwheels stay as they
are. Of one seed, the rows are the same for any number of labels, and few labels are among many. The
paper draws its labels by class and not, as its model says, at random.
"""

from typing import NamedTuple

import numpy as np

from gallery.datasets import load
from gallery.generators import pinwheel

__all__ = ["CELLS", "DATA", "LABELS", "Cell", "Draw", "Score", "draw", "num_draws", "score"]

LABELS = (1, 2, 4, 8)  # a class
PINWHEELS = {
    f"{arms} arms{' h' * hard}": (arms, 0.25 if hard else 0.1)
    for hard in (False, True)
    for arms in (3, 4, 5)
}
TABLES = {"wine": (89, 89), "oilflow12": (134, 266)}  # rows to learn from, test rows
DATA = (*PINWHEELS, *TABLES)
NUM_POINTS, TEST_PER_ARM = 50, 300
NUM_DRAWS, MANY_DRAWS = 3, 10
# share of the uniform distribution in every forecast, or one certain mistake would be all that a
# log score tells
UNIFORM = 1e-3


class Cell(NamedTuple):
    """A row of the table of results."""

    data: str
    labels: int  # a class


class Draw(NamedTuple):
    """Rows to learn from, y = −1 where the label is hidden, and rows to judge by; classes 0 ..

    K-1, all of them labelled.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Score(NamedTuple):
    """The score of one draw: the error rate, and the mean log probability of the right class.

    The perplexity is exp(−log_score).
    """

    error: float
    log_score: float


CELLS = tuple(Cell(data, labels) for data in DATA for labels in LABELS)


def num_draws(cell: Cell) -> int:
    """More where draws differ most: hard pinwheels with one or two labels."""
    return MANY_DRAWS if cell.data.endswith(" h") and cell.labels <= 2 else NUM_DRAWS


def draw(cell: Cell, seed: int) -> Draw:
    """The rows of one draw; the same arguments give the same rows."""
    if cell.data not in DATA:
        raise ValueError(f"no data {cell.data!r}; there are {', '.join(DATA)}")
    rng = np.random.default_rng([seed, *cell.data.encode()])
    x, y, x_test, y_test = (
        _pinwheel(rng, *PINWHEELS[cell.data]) if cell.data in PINWHEELS else _table(rng, cell.data)
    )
    rank = np.empty(len(y), dtype=int)  # of each row among its class, in random order
    for label in np.unique(y):
        rank[y == label] = rng.permutation(np.count_nonzero(y == label))
    fewest = np.bincount(y).min()
    if not 1 <= cell.labels <= fewest:
        raise ValueError(
            f"labels={cell.labels!r}: {cell.data!r} has classes of {fewest} rows; wanted 1 to "
            f"{fewest}"
        )
    return Draw(x, np.where(rank < cell.labels, y, -1), x_test, y_test)


def _pinwheel(rng: np.random.Generator, num_arms: int, tangential_std: float) -> Draw:
    train, test = rng.integers(2**32, size=2)
    per_arm = -(-NUM_POINTS // num_arms)
    learned = pinwheel(num_arms, per_arm, tangential_std=tangential_std, seed=int(train))
    judged = pinwheel(num_arms, TEST_PER_ARM, tangential_std=tangential_std, seed=int(test))
    last = np.arange(1, num_arms + 1) * per_arm - 1  # point of each arm: the first arms lose theirs
    kept = rng.permutation(
        np.delete(np.arange(len(learned.y)), last[: len(learned.y) - NUM_POINTS])
    )
    return Draw(learned.x[kept], learned.y[kept], judged.x, judged.y)


def _table(rng: np.random.Generator, name: str) -> Draw:
    data, (num_train, num_test) = load(name), TABLES[name]
    taken = rng.permutation(len(data.y))[: num_train + num_test]
    by_class = taken[np.argsort(data.y[taken], kind="stable")]
    # spread evenly over the classes
    learned = np.diff(np.arange(len(taken) + 1) * num_train // len(taken)) == 1
    train, test = rng.permutation(by_class[learned]), by_class[~learned]
    mean, std = data.x[train].mean(0), data.x[train].std(0)
    return Draw(
        (data.x[train] - mean) / std, data.y[train], (data.x[test] - mean) / std, data.y[test]
    )


def score(probabilities: np.ndarray, y: np.ndarray) -> Score:
    """The score of forecasts [row, class]."""
    wanted = (len(y), int(y.max()) + 1)
    if probabilities.shape != wanted or not np.allclose(probabilities.sum(1), 1):
        raise ValueError(
            f"probabilities of shape {probabilities.shape}: wanted {wanted}, rows that sum to one"
        )
    forecast = (1 - UNIFORM) * probabilities + UNIFORM / probabilities.shape[1]
    error = np.mean(probabilities.argmax(1) != y)
    return Score(float(error), float(np.log(forecast[np.arange(len(y)), y]).mean()))
