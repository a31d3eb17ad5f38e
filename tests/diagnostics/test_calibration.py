"""Calibration: exact p-values, an exact sampler that passes, planted bugs that fail, right
kernels at the stated rate.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from diagnostics._calibration_band import band, holm, p_value
from diagnostics.calibration import geweke, sbc
from tests.diagnostics.planted import (
    CASES,
    NUM_DRAWS,
    Tiny,
    calibrate,
    exact,
    prior_only,
    repetitions,
)
from tests.inference import models

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bug", [False, True], ids=["correct", "bug"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("test", ["sbc", "geweke"])
def test_planted_bugs_fail_and_their_twins_pass(test, case, bug):
    calibration = calibrate(test, case, bug)
    assert calibration.passed is not bug, calibration.text


def test_exact_draws_pass():
    calibration = sbc(models.normal_mean, exact(), models.Y)
    assert calibration.passed, calibration.text
    assert set(calibration.p_values) == {"mu", "log_likelihood"}
    assert calibration.num_draws == NUM_DRAWS
    assert calibration.num_replicates == 200
    assert calibration.ranks["mu"].min() >= 0
    assert calibration.ranks["mu"].max() <= NUM_DRAWS


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "fit", [exact(2.0), exact(0.5), exact(shift=0.5)], ids=["wide", "narrow", "shifted"]
)
def test_wrong_draws_fail(fit):
    calibration = sbc(models.normal_mean, fit, models.Y)
    assert "mu" in calibration.failed
    assert "FAILED: " in calibration.text


def test_a_fit_that_ignores_its_data_is_seen_by_the_log_likelihood_alone():
    calibration = sbc(models.normal_mean, prior_only, models.Y)
    assert calibration.failed == ["log_likelihood"]


@pytest.mark.slow
def test_a_kernel_that_ignores_its_data_is_seen_by_geweke():
    class Prior(Tiny):
        sites = ("mu",)

        def move(self, rng_key, z, log_joint, y):
            return {"mu": models.SPREAD * random.normal(rng_key)}

    calibration = geweke(models.normal_mean, Prior, models.Y)
    assert "log_likelihood" in calibration.failed
    assert "mu" not in calibration.failed


def test_quantities_of_ones_own():
    quantities = lambda program, values: {"signs": jnp.stack([values["mu"] > 0, values["mu"] < 0])}
    calibration = sbc(models.normal_mean, exact(), models.Y, quantities=quantities)
    assert set(calibration.p_values) == {"signs[0]", "signs[1]"}
    assert calibration.passed, "ties are broken at random"
    with pytest.raises(ValueError, match="quantity 'root': NaN in .* of 50 replicates"):
        sbc(
            models.normal_mean,
            exact(),
            models.Y,
            num_replicates=50,
            quantities=lambda _, values: {"root": jnp.sqrt(values["mu"])},
        )


# The statistic.


@pytest.mark.parametrize(("num_ranks", "num_draws"), [(4, 3), (3, 4), (6, 2), (1, 5)])
def test_p_value_is_exact(num_ranks, num_draws):
    """All equally likely ranks are enumerated: P(p <= t) = t at every attained t."""
    p = np.array(
        [
            p_value(np.array(ranks), num_draws)
            for ranks in itertools.product(range(num_draws + 1), repeat=num_ranks)
        ]
    )
    for attained in np.unique(p):
        assert np.mean(p <= attained * (1 + 1e-9)) == pytest.approx(attained, rel=1e-9)


def test_p_value_is_that_of_a_simulation():
    rng = np.random.default_rng(0)
    uniform = np.array([p_value(rng.integers(0, 32, 100), 31) for _ in range(2000)])
    for level in (0.01, 0.05, 0.3, 0.7):
        assert (
            stats.binomtest(
                int((uniform <= level).sum()), 2000, level, alternative="greater"
            ).pvalue
            > 0.001
        )
        # and it is not much too careful: p-values are discrete
        assert np.mean(uniform <= level) > 0.6 * level


def test_p_value_of_the_extreme_is_right_far_out():
    """All of 20 ranks at one end: no other ranks stray as far, and both ends do."""
    assert p_value(np.zeros(20, int), 9) == pytest.approx(2 * 0.1**20, rel=1e-9)


def test_band_holds_what_the_p_value_passes():
    rng = np.random.default_rng(1)
    low, high = band(60, 15, 0.2)
    inside = []
    for _ in range(300):
        ranks = rng.integers(0, 16, 60)
        counts = (ranks[:, None] < np.arange(1, 16)).sum(axis=0)
        inside.append(((low <= counts) & (counts <= high)).all() == (p_value(ranks, 15) > 0.2))
    assert all(inside)


def test_holm():
    assert holm({"a": 0.02, "b": 0.01, "c": 0.6}) == {
        "a": pytest.approx(0.04),
        "b": pytest.approx(0.03),
        "c": pytest.approx(0.6),
    }


# How often a right kernel fails.


@pytest.mark.slow
@pytest.mark.parametrize("run", ["exact", "sbc", "geweke"])
def test_right_kernels_fail_at_the_stated_rate(run):
    """200 repetitions with 200 replicates each; the failures are no more than the stated rate
    explains.
    """
    total = 200 * 200
    if run == "exact":
        calibration = sbc(
            models.normal_mean, exact(), models.Y, num_replicates=total, batch_size=2000
        )
    else:
        calibration = calibrate(
            run, "a conditional off by a factor 2", False, total, batch_size=2000
        )
    for alpha in (0.01, 0.1):
        failures = sum(not each.passed for each in repetitions(calibration, 200, alpha))
        assert stats.binomtest(failures, 200, alpha, alternative="greater").pvalue > 0.01
        assert failures > 0 or alpha < 0.1
