"""The model against its formula, the meaning of its sites, and simulation-based calibration; the
same tests of a model with a planted bug fail.
"""

import numpy as np
import numpyro
import pytest
from jax import random
from numpyro.infer import NUTS
from scipy import stats

from diagnostics import sbc, with_kernel
from gallery.pages.text.mine import CARD, mine, simulate
from inference import Program

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DATA = simulate(random.key(0), num_rows=10, num_features=1)
VALUES = {"intercept": np.array(0.3), "weights": np.array([-0.7]), "noise": np.array(1.2)}


def formula(intercept, weights, noise):
    """The log joint, a row after the other."""
    rows = zip(np.asarray(DATA["x"]), np.asarray(DATA["y"]), strict=True)
    prior = stats.norm.logpdf(intercept, 0, 10) + stats.norm.logpdf(weights).sum()
    prior += stats.halfnorm.logpdf(noise, scale=10)
    return prior + sum(stats.norm.logpdf(y, intercept + x @ weights, noise) for x, y in rows)


def test_log_joint_is_the_formula():
    found = Program(mine, **DATA).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(**VALUES), rtol=1e-6)
    assert abs(found - formula(**VALUES | {"noise": 1.3})) > 0.1  # another noise would be seen


def test_the_card_describes_every_site():
    assert set(CARD.sites) == set(Program(mine, **DATA).sites)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False)])
def test_calibration(scale, is_right):
    """The fit is of the model, or of one with half of its log densities."""
    kernel = lambda model: NUTS(numpyro.handlers.scale(model, scale=scale))
    fit = with_kernel(kernel, num_warmup=100, num_samples=62, thinning=2)
    assert sbc(mine, fit, **DATA, num_replicates=100).passed == is_right
