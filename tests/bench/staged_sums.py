"""The sum over stages of log-evidences of nested sampling, with nothing weighed by all rows, and
what it claims:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    python -m tests.bench.staged_sums normal mixture --seeds 10
    python -m tests.bench.staged_sums synthetic --rows 20000 --seeds 4

`normal` is that of `staged_explored`, `mixture` that of `staged`, each with its exact evidence;
`synthetic` is that of `staged_tables`, in twenty stages, and there it is the evidence of weights
that sums are held against. A line a run: stages that were made, the sum less the evidence, its
claimed error and the part of it that summaries have, and the same of `log_evidence`. Runs of which
all rows became the first stage have no sum of anything, and count only against an exact evidence.
Another seed deals the rows out in another order.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from inference import Driver, Staged
from tests.bench import staged
from tests.bench.staged_explored import normal_numbers
from tests.bench.staged_tables import TABLES
from zoo.staged_learning import family


class Problem(NamedTuple):
    """What is learned in stages."""

    model: Callable
    rows: tuple
    stages: int
    log_evidence: float | None = None


def normal(num_rows: int) -> Problem:
    """Thirty Normal numbers."""
    exact = normal_numbers()
    return Problem(exact.model, (exact.x,), 10, exact.log_evidence)


def mixture(num_rows: int) -> Problem:
    """Three clusters in the plane."""
    rows = staged.rows(1000)
    return Problem(staged.MODEL, rows, 10, staged.reference(*rows).log_evidence)


def synthetic(num_rows: int) -> Problem:
    """Four clusters in ten dimensions."""
    x, y, count = TABLES["synthetic"](num_rows)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order].astype(int)
    x = (x - x[:count].mean(0)) / x[:count].std(0)
    return Problem(family(4, num_classes=2), (x[:count], y[:count]), 20)


PROBLEMS = {"normal": normal, "mixture": mixture, "synthetic": synthetic}


def learned(problem: Problem, seed: int, points: int) -> dict[str, Any]:
    """What a run says of itself."""
    kernel = Staged(problem.model, num_stages=problem.stages, num_live=points)
    return Driver(kernel, num_samples=100, progress_bar=False).run(seed, *problem.rows).attrs


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="+", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--points", type=int, default=30, help="live points")
    parser.add_argument("--rows", type=int, default=20_000, help="of synthetic")
    parser.add_argument("--single", action="store_true", help="in float32")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", not given.single)
    for name in given.problems:
        problem, z = PROBLEMS[name](given.rows), []
        for seed in range(given.first, given.first + given.seeds):
            found = learned(problem, seed, given.points)
            exact = found["log_evidence"] if problem.log_evidence is None else problem.log_evidence
            off, claimed = found["nested_log_evidence"] - exact, found["nested_log_evidence_se"]
            if problem.log_evidence is not None or found["num_stages"] > 1:
                z.append(off / claimed)
            print(
                f"{name}, seed {seed}: {found['num_stages']:.0f} stages, {off:+.2f} ± "
                f"{claimed:.2f}, of summaries "
                f"{found['nested_summary_error']:.2f}; weighed "
                f"{found['log_evidence'] - exact:+.2f} ± {found['log_evidence_se']:.2f}",
                flush=True,
            )
        if not z:
            raise SystemExit(
                f"{name}: all rows became the first stage in each run; give more --rows."
            )
        print(
            f"{name}: mean z {np.mean(z):+.2f}, rms {np.sqrt(np.mean(np.square(z))):.2f}, largest "
            f"{np.abs(z).max():.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
