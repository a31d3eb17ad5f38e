"""The horseshoe against its formula, the shrinkage of its weights, and simulation-based
calibration; the same test of a fit with another prior fails.
"""

from functools import partial

import numpy as np
import pytest
from jax import random
from scipy import stats

from diagnostics import sbc, with_kernel
from gallery.datasets import names
from inference import ConditionalGibbs, Program
from zoo.horseshoe import CARD, horseshoe, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DATA = simulate(random.key(0), num_rows=10, num_features=2)
VALUES = {
    "intercept": np.array(0.3),
    "variance": np.array(1.2),
    "xi": np.array(0.8),
    "tau2": np.array(0.4),
    "nu": np.array([0.6, 2.0]),
    "lam2": np.array([0.5, 3.0]),
    "weights": np.array([-0.7, 1.1]),
}


def formula(intercept, variance, xi, tau2, nu, lam2, weights):
    """The log joint, a row after the other."""
    prior = stats.norm.logpdf(intercept, 0, 1000) + stats.invgamma.logpdf(variance, 1)
    prior += stats.invgamma.logpdf(xi, 0.5) + stats.invgamma.logpdf(tau2, 0.5, scale=1 / xi)
    prior += stats.invgamma.logpdf(nu, 0.5).sum()
    prior += stats.invgamma.logpdf(lam2, 0.5, scale=1 / nu).sum()
    prior += stats.norm.logpdf(weights, 0, np.sqrt(variance * tau2 * lam2)).sum()
    rows = zip(np.asarray(DATA["x"]), np.asarray(DATA["y"]), strict=True)
    noise = np.sqrt(variance)
    return prior + sum(stats.norm.logpdf(y, intercept + x @ weights, noise) for x, y in rows)


def test_log_joint_is_the_formula():
    found = Program(horseshoe, **DATA).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(**VALUES), rtol=1e-6)
    assert abs(found - formula(**VALUES | {"tau2": 0.5})) > 0.1  # another scale would be seen


def test_the_card_describes_every_site_and_its_data_are_there():
    assert set(CARD.sites) == set(Program(horseshoe, **DATA).sites)
    assert set(CARD.data) <= set(names())


def test_simulate_returns_arguments_of_the_model():
    data = simulate(random.key(1), num_rows=7, num_features=3, scale=0.2)
    assert (data["x"].shape, data["y"].shape, data["scale"]) == ((7, 3), (7,), 0.2)
    assert set(data) == {"x", "y", "scale"}


def test_scales_are_half_cauchy():
    """So the share 1 / (1 + lam^2) by which a weight shrinks is Beta(1/2, 1/2), a horseshoe."""
    drawn = Program(horseshoe, **DATA | {"scale": 0.1}).draw_prior(random.key(0), 2000)
    lam2, tau2 = np.asarray(drawn["lam2"])[:, 0], np.asarray(drawn["tau2"])
    assert stats.kstest(1 / (1 + lam2), stats.beta(0.5, 0.5).cdf).pvalue > 0.01
    assert stats.kstest(np.sqrt(tau2), stats.halfcauchy(scale=0.1).cdf).pvalue > 0.01
    assert stats.kstest(np.sqrt(tau2), stats.halfcauchy(scale=0.2).cdf).pvalue < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.1, False)])
def test_calibration(scale, is_right):
    """The fit is of the model, or of one whose weights are smaller beforehand."""
    kernel = lambda model: ConditionalGibbs(partial(model, scale=scale))
    fit = with_kernel(kernel, num_warmup=100, num_samples=620, thinning=20)
    assert sbc(horseshoe, fit, **DATA, num_replicates=100).passed == is_right
