"""Probabilities among 10 classes of a million, next to those of all.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.augment_reduce_classes [--classes 1000000] [--rows 400]

CPU seconds of `predict_proba`, after a first call that compiles. All classes are told for 50 rows
at a time, for memory.
"""

import argparse
from collections.abc import Callable
from time import process_time

import numpy as np

from gallery import AugmentReduceClassifier

__all__ = ["main"]

AT_ONCE = 50


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of the second call."""
    run()
    started = process_time()
    run()
    return process_time() - started


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=400)
    told = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 50)).astype(np.float32)
    y = rng.integers(0, told.classes, 2000)
    fit = AugmentReduceClassifier(
        num_classes=told.classes, max_iter=20, prior_scale=1.0, random_state=0, progress_bar=False
    ).fit(x, y)
    new, some = rng.normal(size=(told.rows, 50)), np.arange(10) * (told.classes // 10)
    among = seconds(lambda: fit.predict_proba(new, classes=some))
    every = seconds(
        lambda: [
            fit.predict_proba(new[at : at + AT_ONCE]).shape for at in range(0, told.rows, AT_ONCE)
        ]
    )
    print(f"{told.rows} rows: all {every:.3f} s, among 10 {among:.5f} s, ratio {among / every:.2g}")


if __name__ == "__main__":
    main()
