"""Errors of the log of a mean, against their spread over many sets."""

import numpy as np
import pytest

from inference.maths.averages import log_mean, log_mean_error

RNG = np.random.default_rng(1)


def delta(logs):
    """The usual error of a mean, on the log scale."""
    ratio = np.exp(logs - log_mean(logs))
    return np.std(ratio, ddof=1) / np.sqrt(len(logs))


def share_held(error, spread, num=8, times=600):
    """How often two errors hold the mean of `log_mean` over the sets."""
    sets = spread * RNG.normal(size=(times, num))
    means = np.array([log_mean(logs) for logs in sets])
    return np.mean(abs(means - means.mean()) < 2 * np.array([error(logs) for logs in sets]))


def test_a_small_spread_is_divided_by_the_root_of_the_number():
    logs = -500 + 0.01 * RNG.normal(size=50)
    assert log_mean_error(logs) == pytest.approx(np.std(logs, ddof=1) / np.sqrt(50), rel=0.05)
    assert log_mean(logs) == pytest.approx(np.log(np.mean(np.exp(logs + 500))) - 500)


@pytest.mark.parametrize("spread", [0.1, 3.0, 50.0])
def test_two_errors_hold_whatever_the_spread(spread):
    assert share_held(log_mean_error, spread) > 0.87


def test_the_usual_error_does_not_hold():
    assert share_held(delta, 50.0) < 0.2


def test_one_number_tells_no_error_and_nan_is_none():
    assert np.isinf(log_mean_error(np.array([-3.0])))
    assert np.isnan(log_mean_error(np.array([-3.0, np.nan])))
    assert np.isnan(log_mean(np.array([-3.0, np.nan])))
