"""Augment and reduce on generated sparse rows of the sizes of large data sets: memory, time, and what is learned.

    uv run python -m tests.bench.augment_reduce_large million        # 200 000 rows, 100 000 columns, a million classes
    uv run python -m tests.bench.augment_reduce_large amazoncat      # as many rows, columns, classes, rows a step as AmazonCat-13K
    uv run python -m tests.bench.augment_reduce_large eurlex         # or EURLex-4K

Columns of a row are drawn from one of 200 topics, and a class belongs to a topic. Classes answer to 100 combinations of the columns, or to
the columns themselves where these are few. `--steps 5000` changes the number of steps.
"""

import argparse
import resource
from time import perf_counter
from typing import NamedTuple

import numpy as np
from scipy import sparse

from gallery import AugmentReduceClassifier

__all__ = ["Size", "generated", "main"]

TOPICS = 200


class Size(NamedTuple):
    """Of a data set, and of a step."""

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


def generated(rng: np.random.Generator, num_rows: int, size: Size) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows, and their classes; of the classes of a topic, few are frequent (Zipf), so that there is something to learn of them."""
    topic = rng.integers(0, TOPICS, num_rows)
    columns = topic[:, None] + TOPICS * rng.integers(0, size.columns // TOPICS, (num_rows, size.length))
    of_topic = (size.classes - 1 - topic) // TOPICS + 1
    y = topic + TOPICS * (rng.zipf(1.5, num_rows) % of_topic)
    starts = size.length * np.arange(num_rows + 1)
    x = sparse.csr_matrix((np.ones(columns.size, np.float32), columns.ravel(), starts), (num_rows, size.columns))
    x.sum_duplicates()
    return x, y.astype(np.int32)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--steps", type=int)
    told = parser.parse_args()
    size, rng = SIZES[told.size], np.random.default_rng(0)
    x, y = generated(rng, size.rows, size)
    classifier = AugmentReduceClassifier(
        num_classes=size.classes,
        rank=size.rank,
        batch_size=size.batch_size,
        num_negatives=size.num_negatives,
        max_iter=told.steps or size.steps,
        random_state=0,
    )
    started = perf_counter()
    classifier.fit(x, y)
    seconds, memory = perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    test, classes = generated(rng, 200, size)
    shares = (np.bincount(y, minlength=size.classes) + 0.1) / (len(y) + 0.1 * size.classes)
    log_probs = classifier.predict_log_proba(test)
    own, blind = log_probs[np.arange(200), classes].mean(), np.log(shares[classes]).mean()
    right = (classifier.predict(test) % TOPICS == classes % TOPICS).mean()
    final = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        "| size | steps | s | GiB to learn | GiB with predictions | test log likelihood | by shares of classes | all alike | topic right |"
    )
    print(9 * "|---" + "|")
    print(
        f"| {told.size} | {classifier.n_iter_} | {seconds:.0f} | {memory:.2f} | {final:.2f} | {own:.2f} | {blind:.2f} "
        f"| {-np.log(size.classes):.2f} | {right:.2f} |"
    )


if __name__ == "__main__":
    main()
