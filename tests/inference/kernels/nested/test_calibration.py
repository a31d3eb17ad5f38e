"""Simulation-based calibration of the nested sampler, run by the driver: a right one passes, one
with a slip at the same size fails. And its claims in float32.

Draws are exact as the number of live points grows; of two numbers, 50 points leave no bias that
these replicates could see. Cost: two seconds a replicate, most of it to lower the compiled loop
anew for each run.
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from diagnostics.calibration import on_host, sbc
from inference import Driver, NestedSampler
from inference.kernels.nested import kernel as nested
from inference.maths.resampling import resampled
from tests.inference.nests import EXACT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

Y = np.zeros(6)  # only the shape counts


def level(y):
    """A mean and a spread, which depend on each other given the data."""
    spread = numpyro.sample("spread", dist.Gamma(2.0, 2.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


def calibrate(num_replicates):
    kernel = NestedSampler(level, num_live=50)

    def fit(rng_key, program):
        return Driver(kernel, num_samples=15, progress_bar=False).run(rng_key, **program.arguments)

    return sbc(level, on_host(fit), Y, num_replicates=num_replicates)


def test_draws_are_calibrated():
    calibration = calibrate(80)
    assert calibration.passed, calibration.text


def test_a_slip_is_seen(monkeypatch):
    """Weights are nearly even: too many draws from the outskirts."""
    monkeypatch.setattr(
        nested,
        "resampled",
        lambda key, log_weight, count: resampled(key, 0.1 * log_weight, count),
    )
    calibration = calibrate(40)
    assert not calibration.passed, calibration.text


@pytest.mark.parametrize("name", ["line", "two modes"])
def test_float32_suffices(name):
    model, args, exact = EXACT[name]
    jax.clear_caches()  # of float64, in which JAX would look for what it has traced
    with jax.enable_x64(False):
        tree = Driver(
            NestedSampler(model, num_live=200), num_samples=100, num_chains=8, progress_bar=False
        ).run(0, *args)
    z = (tree.attrs["log_evidence_of_replicates"] - exact) / tree.attrs[
        "log_evidence_se_of_replicates"
    ]
    assert {values.dtype for values in tree["posterior"].data_vars.values()} == {
        np.dtype("float32")
    }
    assert np.sqrt(np.mean(z**2)) < 1.7
    assert np.abs(z).max() < 3.7
