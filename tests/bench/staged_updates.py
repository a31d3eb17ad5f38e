"""What an update forgets whose rows lead away from those before, against the exact answer:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    python -m tests.bench.staged_updates [--background 1e-6] [--shifts 0 1 1.2 1.4 2 6]

Twenty numbers, Normal(mean, 1) with a mean of Normal(0, 10), updated by twenty that are so much
further. A line a shift: how far the log-evidence is off and the claimed error, how far the
posterior mean is off in standard deviations, and what the report says.
"""

import argparse

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

from diagnostics import report
from inference import Driver, Staged

EACH, WIDE = 20, 10.0


def level(x):
    """Known exactly."""
    mean = numpyro.sample("mean", dist.Normal(0.0, WIDE))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def line(shift: float, background: float) -> str:
    """The line of one run."""
    x = np.random.default_rng(0).normal(size=2 * EACH) + np.repeat([0.0, shift], EACH)
    driver = Driver(
        Staged(level, num_stages=1, num_live=100, background=background),
        num_samples=500,
        progress_bar=False,
    )
    driver.run(0, x[:EACH])
    driver.update(x[EACH:])
    tree, precision = driver.tree(), len(x) + WIDE**-2
    off = tree.attrs["log_evidence"] - stats.multivariate_normal(
        np.zeros(len(x)), np.eye(len(x)) + WIDE**2
    ).logpdf(x)
    away = (float(tree["posterior"]["mean"].mean()) - x.sum() / precision) * precision**0.5
    return (
        f"shift {shift:g}: {off:+.2f} ± {tree.attrs['log_evidence_se']:.2f}, mean off by "
        f"{away:+.1f}, {report(tree).conclusion}"
    )


def main() -> None:
    """The lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--background", type=float, default=0.02)
    parser.add_argument("--shifts", type=float, nargs="+", default=[0, 1, 1.2, 1.4, 2, 6])
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for shift in given.shifts:
        print(line(shift, given.background), flush=True)


if __name__ == "__main__":
    main()
