"""Weibull regression against its formula, its censoring, and simulation-based calibration; the same
test of a fit that takes censored times for events fails.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import NUTS
from scipy import stats

from diagnostics import sbc, with_kernel
from inference import Program
from tests.by_numpy import simulated
from zoo.survival import CARD, simulate, survival

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DATA = simulated(simulate, 0, num_rows=20, num_features=1)
VALUES = {"intercept": np.array(0.3), "slopes": np.array([-0.7]), "shape": np.array(1.6)}


def formula(data, intercept, slopes, shape):
    """The log joint, a row after the other."""
    prior = stats.norm.logpdf(intercept, 0, 10) + stats.norm.logpdf(slopes).sum()
    prior += stats.lognorm.logpdf(shape, 0.5)
    for x, event, t in zip(*(np.asarray(data[n]) for n in ("x", "event", "time")), strict=True):
        row = stats.weibull_min(shape, scale=np.exp(intercept + x @ slopes))
        prior += row.logpdf(t) if event else row.logsf(t)
    return prior


def test_log_joint_is_the_formula():
    data = DATA | {"time": np.linspace(0.1, 5.0, 20)}
    found = Program(survival, **data).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(data, **VALUES), rtol=1e-6)
    unseen = np.asarray(data["event"]).copy()
    unseen[0] = 1 - unseen[0]
    assert abs(found - formula(data | {"event": unseen}, **VALUES)) > 0.1  # would be seen


def test_a_small_probability_to_live_longer_is_not_rounded():
    data = DATA | {"time": np.full(20, 40.0), "event": np.zeros(20, int)}
    found = Program(survival, **data).log_joint(VALUES)
    assert found < -20 * 40
    np.testing.assert_allclose(found, formula(data, **VALUES), rtol=1e-6)


def test_one_number_says_that_all_events_were_seen():
    found = Program(survival, **DATA | {"event": 1}).log_joint(VALUES)
    expected = formula(DATA | {"event": np.ones(20)}, **VALUES)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_card_describes_every_site():
    assert set(CARD.sites) == set(Program(survival, **DATA).sites)


def test_simulate_returns_arguments_of_the_model():
    data = simulated(simulate, 1, num_rows=10, num_features=3, share=0.4)
    assert (data["x"].shape, data["time"].shape) == ((10, 3), (10,))
    assert data["event"].sum() == 4
    ends = np.asarray(data["time"])[np.asarray(data["event"]) == 0]
    assert (ends == np.max(data["time"])).all()  # all are censored at the end of the study


@pytest.mark.slow
@pytest.mark.parametrize(("knows", "is_right"), [(True, True), (False, False)])
def test_calibration(knows, is_right):
    """Times are drawn whole. The study ends at the tenth of 20, and the fit knows which rows it
    has not seen to the end, or takes them for events.
    """
    nuts = with_kernel(NUTS, num_warmup=100, num_samples=62, thinning=2)

    def fit(rng_key, program):
        time = program.arguments["time"]
        end = jnp.sort(time)[9]
        event = time <= end if knows else jnp.ones(len(time), bool)
        return nuts(rng_key, program.with_arguments(event=event, time=jnp.minimum(time, end)))

    whole = {"x": DATA["x"], "event": 1, "time": np.asarray(DATA["time"])}
    latent = lambda program, values: values
    assert sbc(survival, fit, **whole, num_replicates=100, quantities=latent).passed == is_right
