"""Means of numbers that are known by their logarithms, such as estimates of an evidence."""

import numpy as np

__all__ = ["log_mean", "log_mean_error"]

NUM_DRAWS = 4000  # of the simulation behind an error


def log_mean(logs: np.ndarray) -> float:
    """Returns the log of the mean of exp(logs)."""
    total = np.logaddexp.reduce(logs) if not np.isnan(logs).any() else np.nan
    return float(total - np.log(len(logs)))


def log_mean_error(logs: np.ndarray) -> float:
    """Returns the standard error of `log_mean`; infinite for a single number, NaN for one of NaN.

    It is the standard deviation of `log_mean` over sets of as many independent Normal numbers that
    vary as these do, found by simulation. For small spreads this is the standard deviation of
    `logs` over the root of their number. For large ones the greatest number decides alone, where
    the variance of exp(logs) says nothing.
    """
    if len(logs) == 1 or not np.isfinite(logs).all():
        return np.nan if np.isnan(logs).any() else np.inf
    normal = np.random.default_rng(0).normal(size=(NUM_DRAWS, len(logs)))
    simulated = np.std(logs, ddof=1) * normal
    return float(np.std(np.logaddexp.reduce(simulated, axis=1)))
