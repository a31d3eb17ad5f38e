"""The model against its formula, the meaning of its groups, and simulation-based calibration; the
same test of a model with a planted bug fails.
"""

import jax
import numpy as np
import numpyro
import pytest
from jax import random
from numpyro.infer import NUTS
from scipy import stats
from scipy.special import expit

from diagnostics import sbc, with_kernel
from gallery.datasets import names
from inference import Program
from zoo.varying_slopes import CARD, simulate, varying_slopes

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

with jax.numpy_dtype_promotion("standard"):  # of NumPyro's Bernoulli
    DATA = simulate(random.key(0), num_rows=24, num_features=1, num_tasks=3)
VALUES = {
    "level": np.array(0.3),
    "slopes": np.array([-0.7]),
    "level_spread": np.array(1.2),
    "slope_spread": np.array([0.4]),
    "level_shift": np.array([0.2, -1.0, 0.6]),
    "slope_shift": np.array([[0.5], [-0.1], [2.0]]),
}


def formula(data, level, slopes, level_spread, slope_spread, level_shift, slope_shift):
    """The log joint, a row after the other."""
    prior = stats.norm.logpdf(level, 0, 3) + stats.norm.logpdf(slopes).sum()
    prior += stats.halfnorm.logpdf(level_spread) + stats.halfnorm.logpdf(slope_spread).sum()
    prior += stats.norm.logpdf(level_shift).sum() + stats.norm.logpdf(slope_shift).sum()
    for x, t, y in zip(*(np.asarray(data[name]) for name in ("x", "task", "y")), strict=True):
        logit = level + level_spread * level_shift[t]
        logit += sum(x * (slopes + slope_spread * slope_shift[t]))
        prior += 0 if y < 0 else stats.bernoulli.logpmf(y, expit(logit))
    return prior


@pytest.mark.parametrize("first", [0, 1, -1])
def test_log_joint_is_the_formula(first):
    """Also where the class of a row is unknown."""
    data = DATA | {"y": np.array([first, *DATA["y"][1:]])}
    found = Program(varying_slopes, **data).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(data, **VALUES), rtol=1e-6)
    other = VALUES | {"slope_shift": VALUES["slope_shift"][::-1]}
    assert abs(found - formula(data, **other)) > 0.1  # groups in another order would be seen


def test_the_card_describes_every_site_and_its_data_are_there():
    assert set(CARD.sites) == set(Program(varying_slopes, **DATA).sites)
    without = set(Program(varying_slopes, **DATA, vary=False).sites)
    assert set(CARD.sites) - without == {"slope_spread", "slope_shift"}
    assert set(CARD.data) <= set(names())


def test_simulate_returns_arguments_of_the_model():
    data = simulate(random.key(1), num_rows=7, num_features=3, num_tasks=2, vary=False)
    assert (data["x"].shape, data["y"].shape, data["vary"]) == ((7, 3), (7,), False)
    assert np.bincount(data["task"]).tolist() == [4, 3]
    assert set(np.unique(data["y"])) <= {0, 1}


def test_more_classes_are_refused():
    with pytest.raises(ValueError, match="num_classes: found 3, wanted 2"):
        varying_slopes(**DATA, num_classes=3)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False)])
def test_calibration(scale, is_right):
    """The fit is of the model, or of one with half of its log densities."""
    kernel = lambda model: NUTS(numpyro.handlers.scale(model, scale=scale))
    fit = with_kernel(kernel, num_warmup=100, num_samples=62, thinning=2)
    assert sbc(varying_slopes, fit, **DATA, num_replicates=100).passed == is_right
