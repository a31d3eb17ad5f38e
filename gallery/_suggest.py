"""Which entries to ask for next: those that are uncertain, and not all for the same reason.

    chosen = most_informative(draws, noise, n)                          # pivoted Cholesky: uncertain given the ones chosen before
    chosen = most_informative(draws, noise, n, is_correlated=False)     # largest standard deviation, whatever the others say

`draws` [draw, entry] of the entries' predictors stand for their covariance. Once an entry is
chosen, the rest is conditioned on a noisy look at it: with D the centred draws and d their column
there, the covariance D'D becomes D'(1 - d d' / (d'd + noise)) D.

Cost: draws x entries for each one that is chosen.
"""

import numpy as np

__all__ = ["most_informative"]


def most_informative(
    draws: np.ndarray, noise: float, n: int, *, is_correlated: bool = True
) -> np.ndarray:
    """Indices of n entries, the best one first; `noise` is the variance of an entry beside its
    predictor.
    """
    left = (draws - draws.mean(0)) / np.sqrt(max(len(draws) - 1, 1))
    variance = np.sum(left**2, axis=0)
    if not is_correlated:
        return np.argsort(-variance, kind="stable")[:n]
    chosen: list[int] = []
    for _ in range(min(n, left.shape[1])):
        best = int(
            np.argmax(np.where(np.isin(np.arange(len(variance)), chosen), -np.inf, variance))
        )
        chosen.append(best)
        column, seen = left[:, best], variance[best]
        if seen > 0:  # a square root of 1 - d d' / (d'd + noise)
            left -= np.outer(column, column @ left) * ((1 - np.sqrt(noise / (seen + noise))) / seen)
        variance = np.sum(left**2, axis=0)
    return np.array(chosen)
