"""Augment and reduce on a million classes and a hundred thousand sparse columns, on one machine: memory, time, and what is learned.

    uv run python -m tests.bench.augment_reduce_large [--classes 1000000] [--steps 5000]

Rows have 20 columns of 100 000, drawn from 200 topics; a class belongs to a topic. Classes answer to 100 combinations of the columns.
"""

import argparse
import resource
from time import perf_counter

import numpy as np
from scipy import sparse

from gallery import AugmentReduceClassifier

__all__ = ["generated", "main"]

COLUMNS, TOPICS, LENGTH = 100_000, 200, 20


def generated(rng: np.random.Generator, num_rows: int, num_classes: int) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows, and their classes; of the classes of a topic, few are frequent (Zipf), so that there is something to learn of them."""
    topic = rng.integers(0, TOPICS, num_rows)
    columns = topic[:, None] + TOPICS * rng.integers(0, COLUMNS // TOPICS, (num_rows, LENGTH))
    y = topic + TOPICS * (rng.zipf(1.5, num_rows) % (num_classes // TOPICS))
    places = np.repeat(np.arange(num_rows), LENGTH), columns.ravel()
    return sparse.csr_matrix((np.ones(num_rows * LENGTH, np.float32), places), (num_rows, COLUMNS)), y.astype(np.int32)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=5_000)
    told = parser.parse_args()
    rng = np.random.default_rng(0)
    x, y = generated(rng, 200_000, told.classes)
    classifier = AugmentReduceClassifier(num_classes=told.classes, rank=100, max_iter=told.steps, random_state=0)
    started = perf_counter()
    classifier.fit(x, y)
    seconds, memory = perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    test, classes = generated(rng, 200, told.classes)
    shares = (np.bincount(y, minlength=told.classes) + 0.1) / (len(y) + 0.1 * told.classes)
    log_probs = classifier.predict_log_proba(test)
    own, blind = log_probs[np.arange(200), classes].mean(), np.log(shares[classes]).mean()
    right = (classifier.predict(test) % TOPICS == classes % TOPICS).mean()
    final = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{told.classes} classes, {told.steps} steps, {seconds:.0f} s, {memory:.2f} GiB to learn, {final:.2f} GiB with predictions")
    print(
        f"test log likelihood {own:.2f}, by the shares of the classes {blind:.2f}, all alike {-np.log(told.classes):.2f}; topic {right:.2f}"
    )


if __name__ == "__main__":
    main()
