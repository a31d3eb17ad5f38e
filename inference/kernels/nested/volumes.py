"""How much prior volume is left above the limit: what is expected, and histories of what may have
been.

When the lowest of n points of a mode dies, the volume of the mode shrinks by t ~ Beta(n, 1), log t
= -Exponential / n. When a mode falls apart, its parts share its volume as Exponential weights of
its points do. Were the points drawn each by itself, that would be a Dirichlet with their numbers;
but they are copies of others, and each stays in the part of the point it was copied from, if they
came apart before that was noticed. So all that descend from one point, some e-folds ago, have one
weight. Each of several histories draws all of these for itself, so what they say of the evidence
differs by as much as is not known: the error of the log-evidence, the share of each mode included.

The first column is no history: it shrinks by 1 - 1/n and shares in proportion, which makes the
evidence of each mode, and so their sum, unbiased. (The mean of t, n / (n + 1), does not:
likelihoods rise where volumes fall by chance, and with few points a mode that counts for too much
is not made up for by one that counts for too little.)

Skilling (2006), "Nested sampling for general Bayesian computation"; Walter (2017), "Point
process-based Monte Carlo estimation". Cost of a step: histories x (deaths^2 + modes).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import logsumexp

__all__ = ["Shells", "Volumes", "evidence", "remaining", "shared", "shrunk", "started"]

MOST_DROP = 100.0  # of the log volume of a mode whose last point dies


class Volumes(NamedTuple):
    """Expected, and of every history."""

    log_volume: Array  # [mode, 1 + history]: -inf for a mode that there is not
    log_evidence: Array  # [1 + history]: of the dead


class Shells(NamedTuple):
    """What the dead stand for."""

    log_volume: Array  # [death]: expected
    volumes: Volumes


def started(most_modes: int, num_histories: int) -> Volumes:
    """The whole prior in one mode."""
    log_volume = jnp.full((most_modes, 1 + num_histories), -jnp.inf).at[0].set(0.0)
    return Volumes(log_volume, jnp.full(1 + num_histories, -jnp.inf))


def shrunk(
    rng_key: Array, volumes: Volumes, log_likelihood: Array, mode: Array, rank: Array, count: Array
) -> Shells:
    """After the deaths [death], of which each is the lowest but `rank` of the `count` points of
    its mode.
    """
    dtype = volumes.log_volume.dtype
    alive = (count - rank)[:, None].astype(dtype)
    drawn = random.exponential(rng_key, (len(mode), volumes.log_volume.shape[1] - 1), dtype) / alive
    drop = jnp.concatenate([jnp.minimum(-jnp.log1p(-1 / alive), MOST_DROP), drawn], axis=1)
    is_same = mode[:, None] == mode[None, :]
    before = (is_same & (rank[None, :] < rank[:, None])).astype(dtype) @ drop
    log_shell = volumes.log_volume[mode] - before + jnp.log(-jnp.expm1(-drop))
    log_evidence = logsumexp(log_shell + log_likelihood[:, None], axis=0)
    total = jnp.zeros_like(volumes.log_volume).at[mode].add(drop)
    new = Volumes(volumes.log_volume - total, jnp.logaddexp(volumes.log_evidence, log_evidence))
    return Shells(log_shell[:, 0], new)


def shared(
    rng_key: Array, volumes: Volumes, mode: Array, origin: Array, ancestor: Array
) -> Volumes:
    """After modes fell apart: `mode` [live] is where points are now, `origin` [mode] what each mode
    was part of, `ancestor` [live] the point that each descends from.
    """
    log_volume = volumes.log_volume
    drawn = random.exponential(rng_key, (len(mode), log_volume.shape[1] - 1), log_volume.dtype)[
        ancestor
    ]
    each = jnp.concatenate([jnp.ones_like(drawn[:, :1]), drawn], axis=1)
    part = jnp.zeros_like(log_volume).at[mode].add(each)
    whole = jnp.zeros_like(log_volume).at[origin].add(part)[origin]
    log_share = jnp.log(part) - jnp.log(whole)
    return volumes._replace(
        log_volume=jnp.where(part < whole, log_volume[origin] + log_share, log_volume)
    )


def remaining(log_volume: Array, log_likelihood: Array, mode: Array, count: Array) -> Array:
    """log of prior volume [mode, column] times likelihood that the live points stand for,
    [column].
    """
    log_each = log_volume - jnp.log(jnp.maximum(count, 1).astype(log_volume.dtype))[:, None]
    return logsumexp(log_each[mode] + log_likelihood[:, None], axis=0)


def evidence(
    volumes: Volumes, log_likelihood: Array, mode: Array, count: Array
) -> tuple[Array, Array]:
    """The log-evidence with all live points, and its standard error.

    What is unbiased is the evidence, so that its logarithm is too low by half its variance.
    """
    each = jnp.logaddexp(
        volumes.log_evidence, remaining(volumes.log_volume, log_likelihood, mode, count)
    )
    error = jnp.std(each[1:])
    return each[0] + error**2 / 2, error
