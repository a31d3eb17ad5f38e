"""What walkers and slopes are worth to a stage.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    python -m tests.bench.staged_explored clusters --table 3 --order 4 --walkers 50 100 200 --seeds
    6 python -m tests.bench.staged_explored normal

`clusters`: a table of `staged_orders`, all rows in one stage of 100 live points; a line a run.
`normal`: thirty unknown numbers in combinations, 1000 rows in ten stages of thirty live points,
against the exact evidence and posterior.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

from inference import Driver, Staged
from tests.bench.staged_orders import ORDERS, table
from zoo.staged_learning import family

SIZE, ROWS, STAGES, POINTS = 30, 1000, 10, 30


def clusters(given: Any) -> None:
    """Evidence and cost of each run."""
    x, y = table(given.table)
    x = (x - x.mean(0)) / x.std(0)
    model = family(given.order, num_classes=2)
    for walkers in given.walkers:
        driver = Driver(
            Staged(model, num_stages=1, num_live=100, num_sweeps=2.0, num_walkers=walkers),
            num_samples=200,
            progress_bar=False,
        )
        for seed in range(given.seeds):
            started, found = process_time(), driver.run(seed, x, y).attrs
            print(
                f"{ORDERS[given.table]} clusters, order {given.order}, {walkers} walkers: log Z "
                f"{found['log_evidence']:.2f} "
                f"± {found['log_evidence_se']:.2f}, "
                f"{found['num_row_evaluations'] / len(x) / 1e6:.2f}e6 likelihoods, "
                f"{process_time() - started:.0f} CPU s",
                flush=True,
            )


class Exact(NamedTuple):
    """A model with rows, and what it says of them."""

    model: Callable
    x: np.ndarray
    mean: np.ndarray
    precision: np.ndarray
    log_evidence: float


def normal_numbers() -> Exact:
    """Thirty of them, in combinations."""
    r = np.random.default_rng(0)
    loading = r.normal(size=(SIZE, SIZE)) / np.sqrt(SIZE)
    x = r.normal(size=(ROWS, SIZE)) + loading @ r.normal(size=SIZE)

    def levels(x):
        with numpyro.plate("column", SIZE):
            level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "x", dist.Normal(jnp.asarray(loading) @ level, 1.0).to_event(1), obs=jnp.asarray(x)
            )

    precision = np.eye(SIZE) + ROWS * loading.T @ loading
    mean = np.linalg.solve(precision, loading.T @ x.sum(0))
    log_evidence = (
        stats.norm.logpdf(x).sum()
        - 0.5 * np.linalg.slogdet(precision)[1]
        + 0.5 * mean @ precision @ mean
    )
    return Exact(levels, x, mean, precision, log_evidence)


def normal(given: Any) -> None:
    """How far the stages end from the exact posterior."""
    exact = normal_numbers()
    for walkers in given.walkers:
        kernel = Staged(exact.model, num_stages=STAGES, num_live=POINTS, num_walkers=walkers)
        tree = Driver(kernel, num_samples=1000, progress_bar=False).run(0, exact.x)
        standard = (tree["posterior"]["level"].values[0] - exact.mean) @ np.linalg.cholesky(
            exact.precision
        )
        found = tree.attrs
        print(
            f"{walkers} walkers: log Z {found['log_evidence'] - exact.log_evidence:+.2f} ± "
            f"{found['log_evidence_se']:.2f}, variance "
            f"{standard.var(0).mean():.2f} of the exact one",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("clusters", "normal"))
    parser.add_argument("--table", type=int, default=3)
    parser.add_argument("--order", type=int, default=4)
    parser.add_argument("--walkers", type=int, nargs="+", default=[0, 120])
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    {"clusters": clusters, "normal": normal}[given.what](given)


if __name__ == "__main__":
    main()
