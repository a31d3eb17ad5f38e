"""Test of rank uniformity on 0, ..., L: a simultaneous ECDF band with an exact p-value.

For N independent uniform ranks, c_k = #{rank < k} is Binomial(N, k / (L + 1)), k = 1, ..., L. The
statistic is the smallest two-sided tail probability of any c_k. This is the pointwise level at
which the ECDF just touches a simultaneous band. The counts are a Markov chain, c_{k+1} - c_k ~
Binomial(N - c_k, 1 / (L + 1 - k)), so the probability of leaving a band is a sum over paths, and no
simulation is needed. Säilynoja, Bürkner and Vehtari (2022), "Graphical test for discrete
uniformity".

Cost: the table of N L binomial tails, once; a p-value L w^2 for a band of width w, about
6 sqrt(N / 4).
"""

from functools import lru_cache

import numpy as np
from scipy.special import bdtr, bdtrc, gammaln

__all__ = ["band", "holm", "p_value"]


def p_value(ranks: np.ndarray, num_draws: int) -> float:
    """Return the p-value of rank uniformity, exact for finite N and L.

    Args:
        ranks: ranks 0 .. num_draws, [replicate].
        num_draws: L.
    """
    counts = np.searchsorted(np.sort(ranks), np.arange(1, num_draws + 1))
    least = _tails(len(ranks), num_draws)[np.arange(num_draws), counts].min()
    return _leaving(float(least), len(ranks), num_draws)


def band(num_ranks: int, num_draws: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest counts c_1, ..., c_L of ranks with a p-value above `alpha`.

    Args:
        num_ranks: N.
        num_draws: L.
        alpha: the level of the band.

    Returns:
        Two arrays, [L].
    """
    low, high = -300.0, 0.0  # log10 of the pointwise level
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _leaving(10**middle, num_ranks, num_draws) <= alpha else (low, middle)
        )
    return _inside(10**low, num_ranks, num_draws)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Adjust p-values for their number by Holm's procedure.

    Rejecting all that are below alpha rejects a true hypothesis with probability alpha at most.
    """
    largest, adjusted = 0.0, {}
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


@lru_cache(maxsize=16)
def _tails(num_ranks: int, num_draws: int) -> np.ndarray:
    """Two-sided tail probability of each count 0, ..., N at k = 1, ..., L, [k, count]."""
    counts = np.arange(num_ranks + 1)
    levels = np.arange(1, num_draws + 1)[:, None] / (num_draws + 1)
    upper = np.hstack([np.ones((num_draws, 1)), bdtrc(counts[:-1], num_ranks, levels)])
    return np.minimum(1.0, 2 * np.minimum(bdtr(counts, num_ranks, levels), upper))


def _inside(level: float, num_ranks: int, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last count with a tail probability above the level; first > last for none."""
    inside = _tails(num_ranks, num_draws) > level
    first, last = inside.argmax(axis=1), num_ranks - inside[:, ::-1].argmax(axis=1)
    return first, np.where(inside.any(axis=1), last, -1)


@lru_cache(maxsize=4096)
def _leaving(level: float, num_ranks: int, num_draws: int) -> float:
    """P(some c_k has a tail probability of at most `level`): the mass that leaves the band at
    each k, summed over k.
    """
    first, last = _inside(level, num_ranks, num_draws)
    if (first > last).any():
        return 1.0
    log_factorial = gammaln(np.arange(num_ranks + 1) + 1.0)
    left, here, mass = 0.0, np.zeros(1, int), np.ones(1)
    for k in range(num_draws):
        chance = 1 / (num_draws + 1 - k)
        rest, there = num_ranks - here, np.arange(first[k], last[k] + 1)
        more = there - here[:, None]
        possible = (more >= 0) & (more <= rest[:, None])
        step = np.where(possible, more, 0)
        log_pmf = (
            log_factorial[rest][:, None] - log_factorial[step] - log_factorial[rest[:, None] - step]
        )
        log_pmf += step * np.log(chance) + (rest[:, None] - step) * np.log1p(-chance)
        left += mass @ (
            _below(first[k] - here, rest, chance) + _above(last[k] - here, rest, chance)
        )
        here, mass = there, mass @ np.where(possible, np.exp(log_pmf), 0.0)
    return min(float(left), 1.0)


def _below(bound: np.ndarray, size: np.ndarray, chance: float) -> np.ndarray:
    """P(Binomial(size, chance) < bound)."""
    return np.where(
        bound <= 0,
        0.0,
        np.where(bound > size, 1.0, bdtr(np.clip(bound - 1.0, 0, size), size, chance)),
    )


def _above(bound: np.ndarray, size: np.ndarray, chance: float) -> np.ndarray:
    """P(Binomial(size, chance) > bound)."""
    return np.where(
        bound < 0, 1.0, np.where(bound >= size, 0.0, bdtrc(np.clip(bound, 0, size), size, chance))
    )
