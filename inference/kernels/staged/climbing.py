"""From a Normal to the one that the slopes of a log density tell, near to where it was.

    z ~ Normal(mean, covariance),       new covariance  cov(slope)  new covariance  =  cov(z),
                                        new mean  =  mean(z) + new covariance  mean(slope)

Of a Normal density slopes tell which it is from whichever points
(`inference.maths.normal_mixture`); of another they tell one that fits it better, from whose draws
one may go on, for as long as these say that the evidence is higher (the mean of their log weights,
a bound of the log-evidence, rises). A mode near to the start comes out of it, with its covariance
and its share of the evidence, for a few hundred gradients.

Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei and Saul (2024), "Batch and match: black-box
variational inference with a score-based divergence", without their steps back to the Normal before.
Cost: points x rounds x the price of a gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.maths.normal_mixture import Clumps, StateClumps, sharpened
from inference.maths.summary import Summary, Told

__all__ = ["GRADIENT", "Climbed", "climbed", "drawn_from", "is_within", "joined", "sloped"]

MOST_ROUNDS, GAIN = 15, 0.1  # and nats by which a round must raise the bound
GRADIENT = 3  # evaluations, which one costs
NEGLIGIBLE = -7.0  # log of a share of the evidence that is not worth a clump
REACH = 2.0  # deviations in each direction
# nats: what others say of the centre of a clump, less than it says itself, where it says nothing
# new
SAME = 0.7


class Climbed(NamedTuple):
    """Where a climb ended."""

    clump: Clumps  # one
    log_evidence: float  # as its draws see it; -inf where they see nothing
    evaluations: int


def climbed(
    rng_key: Array, start: Clumps, densities_of: Callable, given: Any, num_points: int
) -> Climbed:
    """From one clump, by so many points a round; on the host.

    :param densities_of: the sum of `densities_of(given)` is the log density. What compares equal is
    compiled once.
    """
    best, clump, bound, spent = Climbed(start, -np.inf, 0), start, -np.inf, 0
    for key in random.split(rng_key, MOST_ROUNDS):
        told, log_weight = _looked(key, clump, given, densities_of, num_points)
        spent += GRADIENT * num_points
        here = float(log_weight.mean())
        if not here > bound + GAIN:
            break
        best, bound = Climbed(clump, float(logsumexp(log_weight) - np.log(num_points)), spent), here
        clump = sharpened(clump, told.z, told.slope)
    return best._replace(evaluations=spent)


@partial(jax.jit, static_argnames=("densities_of", "num_points"))
def _looked(
    rng_key: Array, clump: Clumps, given: Any, densities_of: Callable, num_points: int
) -> tuple[Told, Array]:
    """Draws from a clump with slopes, and the logarithms of their weights."""
    summary = StateClumps(clump.mean.shape[1])
    z = jax.vmap(lambda key: summary.draw(key, clump))(random.split(rng_key, num_points))
    value, slope = sloped(z, given, densities_of)
    return Told(z, slope), value - jax.vmap(lambda z: summary.log_density(clump, z))(z)


@partial(jax.jit, static_argnames="densities_of")
def sloped(z: Array, given: Any, densities_of: Callable) -> tuple[Array, Array]:
    """The log density and its slope at vectors, one at a time, for all rows are in each."""
    densities = densities_of(given)
    return jax.lax.map(jax.value_and_grad(lambda z: sum(densities(z))), z)


@partial(jax.jit, static_argnames=("summary", "densities_of", "num_points"))
def drawn_from(
    rng_key: Array,
    summary: Summary,
    clumps: Any,
    given: Any,
    densities_of: Callable,
    num_points: int,
) -> tuple[Array, Array]:
    """Draws from a summary, and the logarithms of their weights."""
    densities = densities_of(given)
    z = jax.vmap(lambda key: summary.draw(key, clumps))(random.split(rng_key, num_points))
    return z, jax.lax.map(lambda z: sum(densities(z)) - summary.log_density(clumps, z), z)


def is_within(z: Array, clump: Clumps) -> bool:
    """Whether a vector is where one clump may have come from: closer than some deviations in
    each direction.
    """
    away = np.asarray(clump.inverse[0] @ (z - clump.mean[0]))
    return bool(away @ away < REACH**2 * (len(away) + 5))


def joined(found: list[Climbed], num_places: int) -> Clumps:
    """Clumps in proportion to their evidence, those that say nothing new left out."""
    nothing, log_share = (
        StateClumps(found[0].clump.mean.shape[1]).nothing,
        np.array([each.log_evidence for each in found]),
    )
    if not np.isfinite(log_share).any():
        return nothing(num_places)
    log_share = log_share - np.logaddexp.reduce(log_share)
    kept: list[int] = []
    for number in np.argsort(-log_share):
        own = found[number].clump
        says = lambda clump: float(StateClumps(own.mean.shape[1]).log_density(clump, own.mean[0]))  # noqa: B023
        if log_share[number] > NEGLIGIBLE and all(
            says(found[other].clump) < says(own) - SAME for other in kept
        ):
            kept.append(int(number))
    kept = kept[:num_places]
    rest = nothing(num_places - len(kept))
    weight = jnp.asarray(log_share[kept] - np.logaddexp.reduce(log_share[kept]))
    whole = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), *[found[number].clump for number in kept], rest
    )
    return whole._replace(log_weight=jnp.concatenate([weight, rest.log_weight]))
