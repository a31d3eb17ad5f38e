"""Active learning: which entries to observe next, by pivoted Cholesky of their covariance.

    chosen = most_informative(draws, noise, n)
    chosen = most_informative(draws, noise, n, is_correlated=False)     # largest variance alone

The covariance of the entries is estimated by posterior draws [draw, entry] of their predictors. The
entry of largest variance is chosen, and the covariance is conditioned on a noisy observation of it.
With D the centred draws and d the column of the entry, the covariance D'D becomes
D'(1 - d d' / (d'd + noise)) D.

Cost: draws x entries for each chosen entry.
"""

import numpy as np

__all__ = ["most_informative"]


def most_informative(
    draws: np.ndarray, noise: float, n: int, *, is_correlated: bool = True
) -> np.ndarray:
    """Choose entries one after the other, each of largest variance given the ones before.

    Args:
        draws: posterior draws of the predictors, [draw, entry].
        noise: variance of the noise of an entry.
        n: number of entries.
        is_correlated: False: the entries of largest variance.

    Returns:
        Indices of n entries, the best first.
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
