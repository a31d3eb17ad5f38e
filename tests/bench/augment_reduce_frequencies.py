"""Augment and reduce with classes drawn in proportion to their frequency: steps to a given bound.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.augment_reduce_frequencies [--classes 100000] [--rows 20000]
    [--steps 6000] [--seeds 3] [--negatives 100]

A table of Zipf's law: class k has a probability in proportion to 1 / k. Each row has a topic, which
its features tell with noise, and half of the rows take their class by the order of its topic. The
bound is over all classes, for the first 1000 rows at their q(eps), every 250 steps. A share is that
of the steps with uniform draws that draws by frequency need for the same bound. Step sizes of
q(eps) decay by the power 0.9; 0.6 is what the estimator takes with draws by frequency.
"""

import argparse
from statistics import mean

import jax.numpy as jnp
import numpy as np

from inference import AugmentReduce, Driver
from inference.kernels.augment_reduce.kernel import _bound_of_rows
from inference.kernels.augment_reduce.weights import Adagrad
from zoo.augment_reduce import augment_reduce

__all__ = ["bounds", "main", "zipf_table"]

TOPICS, BATCH, EVERY, SCORED, AT_ONCE = 20, 128, 250, 1000, 250


def zipf_table(
    rng: np.random.Generator, num_rows: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Features [row, topic] and classes."""
    p = 1 / np.arange(1, num_classes + 1)
    rank = rng.choice(num_classes, num_rows, p=p / p.sum())
    topic, is_of_topic = rng.integers(TOPICS, size=num_rows), rng.random(num_rows) < 0.5
    orders = np.argsort(rng.random((TOPICS, num_classes)), axis=1)
    y = np.where(is_of_topic, orders[topic, rank], rank)
    x = rng.normal(size=(num_rows, TOPICS)) + 2 * np.eye(TOPICS)[topic]
    return x.astype(np.float32), y.astype(np.int32)


def bounds(
    x: np.ndarray, y: np.ndarray, num_classes: int, seed: int, steps: int, **options
) -> np.ndarray:
    """The bound a row after every `EVERY` steps."""
    negatives = options.pop("num_negatives")
    driver = Driver(
        AugmentReduce(augment_reduce, optimizer=Adagrad(), **options),
        num_warmup=EVERY,
        num_samples=0,
        progress_bar=False,
    )
    driver.run(
        seed, x, y, num_classes=num_classes, batch_size=BATCH, num_negatives=negatives,
        prior_scale=1.0,
    )  # fmt: skip
    found = []
    data = driver.kernel.read(driver._last.program)[1]
    while True:
        parts = [
            _bound_of_rows(driver.reading, jnp.arange(at, at + AT_ONCE), driver.states[0], data)
            for at in range(0, SCORED, AT_ONCE)
        ]
        found.append(float(np.concatenate(parts).mean()))
        if len(found) * EVERY >= steps:
            return np.array(found)
        driver.extend(EVERY)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--negatives", type=int, default=100)
    told = parser.parse_args()
    shares: dict[str, list[float]] = {"0.9": [], "0.6": []}
    print("| seed | steps | uniform | by frequency | with decay 0.6 | share | share with 0.6 |")
    print(7 * "|---" + "|")
    for seed in range(told.seeds):
        x, y = zipf_table(np.random.default_rng(seed), told.rows, told.classes)
        uniform, frequent, faster = (
            bounds(
                x, y, told.classes, seed, told.steps,
                frequencies=by, local_decay=decay, num_negatives=told.negatives,
            )
            for by, decay in ((None, 0.9), ("y", 0.9), ("y", 0.6))
        )  # fmt: skip
        for place in np.unique(np.linspace(0, len(uniform) - 1, 4, dtype=int)[1:]):
            for name, curve in (("0.9", frequent), ("0.6", faster)):
                reached = np.flatnonzero(curve >= uniform[place])
                share = (reached[0] + 1) / (place + 1) if len(reached) else np.inf
                shares[name].append(share)
            print(
                f"| {seed} | {EVERY * (place + 1)} | {uniform[place]:.3f} | {frequent[place]:.3f} "
                f"| {faster[place]:.3f} | {shares['0.9'][-1]:.2f} | {shares['0.6'][-1]:.2f} |",
                flush=True,
            )
    for name, each in shares.items():
        print(f"decay {name}: mean share {mean(each):.2f}, largest {max(each):.2f}")


if __name__ == "__main__":
    main()
