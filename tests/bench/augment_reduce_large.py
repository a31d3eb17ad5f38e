"""Augment and reduce on sparse rows, generated ones of the sizes of large data sets or a copy at
hand: memory, time, and what is learned.

    uv run python -m tests.bench.augment_reduce_large million        # 200 000 rows, 100 000 columns, a million classes
    uv run python -m tests.bench.augment_reduce_large amazoncat      # as many rows, columns, classes, rows a step as AmazonCat-13K
    uv run python -m tests.bench.augment_reduce_large eurlex         # or EURLex-4K

Columns of a row are drawn from one of 200 topics, and a class belongs to a topic. Classes answer to
100 combinations of the columns, or to the columns themselves where these are few. `--steps 5000`
changes the number of steps.

    uv run python -m tests.bench.augment_reduce_large eurlex --train train.txt --test test.txt

takes the rows from files of the Extreme Classification Repository. Of the labels of a row the first
is its class; rows without one, and test rows of a class that was not learned from, are left out.
"""

import argparse
import resource
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from scipy import sparse
from sklearn.datasets import load_svmlight_file

from gallery import AugmentReduceClassifier

__all__ = ["Size", "generated", "main", "repository_rows"]

TOPICS = 200
AT_ONCE = 1000  # rows of a prediction, whose classes are all told


class Size(NamedTuple):
    """The sizes of a data set and of a step on it."""

    rows: int
    columns: int
    length: int  # columns of a row that are not 0
    classes: int
    batch_size: int
    num_negatives: int
    steps: int
    rank: int | None


SIZES = {
    "million": Size(200_000, 100_000, 20, 1_000_000, 128, 100, 5_000, 100),
    "eurlex": Size(15_539, 5_000, 236, 896, 379, 50, 100_000, None),
    "amazoncat": Size(1_186_239, 203_882, 71, 2_919, 1987, 60, 5_970, 100),
}


def generated(
    rng: np.random.Generator, num_rows: int, size: Size
) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows, and their classes; of the classes of a topic, few are frequent (Zipf), so that there
    is something to learn of them.
    """
    topic = rng.integers(0, TOPICS, num_rows)
    columns = topic[:, None] + TOPICS * rng.integers(
        0, size.columns // TOPICS, (num_rows, size.length)
    )
    of_topic = (size.classes - 1 - topic) // TOPICS + 1
    y = topic + TOPICS * (rng.zipf(1.5, num_rows) % of_topic)
    starts = size.length * np.arange(num_rows + 1)
    x = sparse.csr_matrix(
        (np.ones(columns.size, np.float32), columns.ravel(), starts), (num_rows, size.columns)
    )
    x.sum_duplicates()
    return x, y.astype(np.int32)


def repository_rows(path: Path) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows and their first labels, of a file: its first line has the numbers of rows, columns
    and labels.
    """
    with path.open("rb") as file:
        num_rows, num_columns, _ = map(int, file.readline().split())
        x, labels = load_svmlight_file(
            file, n_features=num_columns, dtype=np.float32, multilabel=True, zero_based=True
        )
    if x.shape[0] != num_rows:
        raise ValueError(f"{path}: found {x.shape[0]} rows, and its first line says {num_rows}.")
    has = np.array([i for i, own in enumerate(labels) if own], int)
    return sparse.csr_matrix(x[has]), np.array([int(min(labels[i])) for i in has])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    told = parser.parse_args()
    if (told.train is None) != (told.test is None):
        parser.error("--train and --test: wanted both, or none")
    size = SIZES[told.size]
    if told.train is None:
        rng = np.random.default_rng(0)
        learn(
            size,
            told.steps,
            *generated(rng, size.rows, size),
            *generated(rng, 200, size),
            of_topics=True,
        )
        return
    (x, y), (new_x, new_y) = repository_rows(told.train), repository_rows(told.test)
    classes, codes = np.unique(y, return_inverse=True)
    known = np.isin(new_y, classes)
    size = size._replace(classes=len(classes))
    learn(
        size,
        told.steps,
        x,
        codes.astype(np.int32),
        new_x[known],
        np.searchsorted(classes, new_y[known]),
        of_topics=False,
    )


def learn(
    size: Size, steps: int | None, x, y: np.ndarray, new_x, new_y: np.ndarray, of_topics: bool
) -> None:
    """A line of the table."""
    classifier = AugmentReduceClassifier(
        num_classes=size.classes,
        rank=size.rank,
        batch_size=size.batch_size,
        num_negatives=size.num_negatives,
        max_iter=steps or size.steps,
        random_state=0,
    )
    started = perf_counter()
    classifier.fit(x, y)
    seconds, memory = (
        perf_counter() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    shares = (np.bincount(y, minlength=size.classes) + 0.1) / (len(y) + 0.1 * size.classes)
    own, right = [], []
    for start in range(0, len(new_y), AT_ONCE):
        log_probs, classes = (
            classifier.predict_log_proba(new_x[start : start + AT_ONCE]),
            new_y[start : start + AT_ONCE],
        )
        own.append(log_probs[np.arange(len(classes)), classes])
        best = log_probs.argmax(1)
        right.append(best % TOPICS == classes % TOPICS if of_topics else best == classes)
    final = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = "topic right" if of_topics else "accuracy"
    print(
        "| classes | steps | s | GiB to learn | GiB with predictions | test log likelihood | by "
        f"shares of classes | all alike | {what} |"
    )
    print(9 * "|---" + "|")
    print(
        f"| {size.classes} | {classifier.n_iter_} | {seconds:.0f} | {memory:.2f} | {final:.2f} | "
        f"{np.concatenate(own).mean():.2f} "
        f"| {np.log(shares[new_y]).mean():.2f} | {-np.log(size.classes):.2f} | "
        f"{np.concatenate(right).mean():.2f} |"
    )


if __name__ == "__main__":
    main()
