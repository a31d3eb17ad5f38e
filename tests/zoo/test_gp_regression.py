"""Gaussian-process regression against its formula, its predictions against those of scikit-learn,
and simulation-based calibration; the same test of a model with a planted bug fails.
"""

import numpy as np
import numpyro
import pytest
from numpyro.infer import NUTS
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from diagnostics import sbc, with_kernel
from inference import Program
from tests.by_numpy import by_numpy, simulated
from zoo.gp_regression import CARD, function_at, gp_regression, matern32, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DATA = simulated(simulate, 0, num_rows=12, num_features=2)
VALUES = {
    "intercept": np.array(0.3),
    "amplitude": np.array(1.4),
    "noise": np.array(0.5),
    "lengthscale": np.array([0.6, 2.0]),
}
JITTER = 1e-6


def formula(intercept, amplitude, noise, lengthscale, scale=1.0):
    """The log joint, a covariance after the other."""
    x, y = (np.asarray(DATA[name]) for name in ("x", "y"))
    prior = stats.norm.logpdf(intercept, 0, 10 * scale) + stats.halfnorm.logpdf(amplitude, 0, scale)
    prior += stats.lognorm.logpdf(noise, 1, scale=scale * np.exp(-1))
    prior += stats.invgamma.logpdf(lengthscale, 2, scale=2).sum()
    covariance = np.empty((len(y), len(y)))
    for i, first in enumerate(x):
        for j, second in enumerate(x):
            distance = sum(((first - second) / lengthscale) ** 2)
            own = noise**2 + JITTER * amplitude**2 if i == j else 0.0
            covariance[i, j] = amplitude**2 * np.exp(-distance / 2) + own
    return prior + stats.multivariate_normal(np.full(len(y), intercept), covariance).logpdf(y)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_log_joint_is_the_formula(scale):
    found = Program(gp_regression, **DATA, scale=scale).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(**VALUES, scale=scale), rtol=1e-6)
    other = VALUES | {"lengthscale": VALUES["lengthscale"][::-1]}
    assert abs(found - formula(**other, scale=scale)) > 0.1  # scales of other features are seen


@pytest.mark.parametrize(
    ("options", "kernel"),
    [({}, RBF([0.6, 2.0])), ({"covariance": matern32}, Matern([0.6, 2.0], nu=1.5))],
)
def test_function_at_new_rows_is_that_of_scikit_learn(options, kernel):
    x, y, new = np.asarray(DATA["x"]), np.asarray(DATA["y"]), np.array([[0.1, -0.4], [9.0, 9.0]])
    rival = GaussianProcessRegressor(
        ConstantKernel(1.4**2) * kernel, alpha=0.5**2 + JITTER * 1.4**2, optimizer=None
    ).fit(x, y - 0.3)
    mean, deviation = rival.predict(new, return_std=True)
    found = by_numpy(lambda draw: function_at(new, x, y, draw, **options))(VALUES)
    np.testing.assert_allclose(found[0], mean + 0.3, rtol=1e-5)
    np.testing.assert_allclose(found[1], deviation, rtol=1e-5)
    assert abs(found[1][0] - 1.4) > 0.1  # rows near the data are known better


def test_the_card_describes_every_site():
    assert set(CARD.sites) == set(Program(gp_regression, **DATA).sites)


def test_simulate_returns_arguments_of_the_model():
    data = simulated(simulate, 1, num_rows=7, num_features=3, scale=2.0)
    assert (data["x"].shape, data["y"].shape, data["scale"]) == ((7, 3), (7,), 2.0)
    assert set(data) == {"x", "y", "scale"}


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False)])
def test_calibration(scale, is_right):
    """The fit is of the model, or of one with half of its log densities."""
    kernel = lambda model: NUTS(numpyro.handlers.scale(model, scale=scale), max_tree_depth=6)
    fit = with_kernel(kernel, num_warmup=100, num_samples=62, thinning=2)
    assert sbc(gp_regression, fit, **DATA, num_replicates=100).passed == is_right
