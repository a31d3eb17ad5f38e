"""Particles: resampling, tempering of a likelihood, and the error of the evidence.

A particle filter over assignments has finitely many *candidates* at every row of data: each
particle may put the row into each of its groups. `log_weight` [particle, choice] holds log of
(weight of the particle x probability of the choice and the row).

    optimal        keeps `num_particles` candidates: those of weight at least c as they are, and of
                   the others a systematic sample with weight c, where sum min(q / c, 1) is
                   num_particles. The expected weight of each candidate is its weight, and no scheme
                   with as many particles has less variance (Fearnhead and Clifford 2003). No
                   candidate is kept twice.
    multinomial,   draw particles in proportion to their weights when the effective sample size is
    systematic     below half of them. *Then* each particle chooses its group: the increment of a
                   weight does not depend on the choice, so that the choice comes last.

Cost: O(particles x choices), no sort.

Likelihood tempering raises the exponent of a likelihood by steps, in each of which particles get
weights and are resampled:

    Z  =  product over steps of  mean over particles of w,   w = likelihood ^ (step of the exponent)

The error of log Z is estimated from the genealogy of the particles. At a step a particle adds
(w / mean w - 1) / particles, which sums to 0 over particles. Descendants of one ancestor are alike
as far as the moves have not made them forget it; those of different ancestors are independent. So

    variance of log Z  =  sum over families of  (what the members add, over the steps) ^ 2

(Chan and Lai 2013, whose families descend from the first particles; compare Lee and Whiteley 2018).
Where moves forget everything, its mean is the sum of the variances of the steps with independent
particles; where they forget nothing, a family has added what its founder has. The estimate also
holds for resampling with less variance than multinomial resampling; that of Lee and Whiteley, which
subtracts the pairs of relatives of multinomial resampling, is then too small. Families become few
in time, and the estimate poor. So every 8 steps each particle founds a new family, and
correlations over more steps are ignored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array, Float, Int

from inference.maths.host import generator

__all__ = [
    "GENERATIONS",
    "SCHEMES",
    "Chosen",
    "Families",
    "after_step",
    "bisected",
    "drawn_choices",
    "effective_size",
    "new_families",
    "next_exponent",
    "places_of",
    "resampled",
    "systematic",
    "systematic_parents",
    "tempered",
    "threshold",
    "variance_of",
]


class Chosen(NamedTuple):
    """The particles after a step; a particle of weight -inf is not in use."""

    parent: Int[Array, " particle"]
    choice: Int[Array, " particle"]
    log_weight: Float[Array, " particle"]  # normalised
    resampled: Array  # scalar: whether particles were resampled


def effective_size(log_weight: Array) -> Array:
    """The effective sample size 1 / sum w^2 of normalised weights, over the last axis."""
    return jnp.exp(-jax.nn.logsumexp(2 * log_weight, axis=-1))


def drawn_choices(
    rng_key: Array, log_weight: Float[Array, "particle choice"]
) -> Int[Array, " particle"]:
    """A choice for each particle, in proportion to weights [particle, choice].

    A particle takes one uniform number, so that further choices of weight 0 change no draw.
    """
    reached = jnp.cumsum(jnp.exp(log_weight - jnp.max(log_weight, axis=1, keepdims=True)), axis=1)
    point = random.uniform(rng_key, (len(reached), 1), reached.dtype) * reached[:, -1:]
    return jnp.sum(reached <= point, axis=1, dtype=jnp.int32)


def threshold(weight: Array, num_kept: int) -> Array:
    """The c with sum min(weight / c, 1) = num_kept; 0 where `num_kept` or fewer are positive.

    Each round solves for c with the set of weights above the last c held fixed. The rounds fall
    towards the solution and reach it after finitely many, some five in practice.

    Args:
        weight: normalised weights.
        num_kept: how many candidates are kept.
    """

    def following(c):
        above = weight >= c
        return jnp.sum(jnp.where(above, 0, weight)) / jnp.maximum(
            num_kept - jnp.sum(above, dtype=weight.dtype), 1
        )

    def lower(pair):
        _, c = pair
        return c, jnp.minimum(c, following(c))

    start = (jnp.full((), jnp.inf, weight.dtype), jnp.asarray(1 / num_kept, weight.dtype))
    _, c = jax.lax.while_loop(lambda pair: pair[1] < pair[0], lower, start)
    return jnp.where(jnp.sum(weight > 0) > num_kept, c, 0)


def _optimal(rng_key: Array, log_weight: Array) -> Chosen:
    num_particles = len(log_weight)
    # Ordered by choice first: the systematic pass then spreads over the choices. Ordered by
    # particle it would give the same choice to all particles of equal weight.
    weight = jnp.exp(log_weight).T.ravel()
    c = threshold(weight, num_particles)
    kept = (weight >= c) & (weight > 0)
    num_left = num_particles - jnp.sum(kept)
    rest = jnp.where(kept | (c == 0), 0, weight / jnp.where(c == 0, 1, c))
    # Systematic: a candidate is taken where the running sum passes a point of a grid of width 1
    # with a random offset.
    total = num_left.astype(weight.dtype)
    reached = jnp.minimum(jnp.cumsum(rest), total).at[-1].set(total)
    passed = jnp.floor(reached + random.uniform(rng_key, (), weight.dtype))
    taken = kept | (jnp.diff(passed, prepend=0) > 0)
    order = places_of(taken, num_particles)
    is_used = order < weight.size
    at = jnp.minimum(order, weight.size - 1)
    new = jnp.where(is_used, jnp.maximum(weight[at], c), 0)
    parent, choice = at % num_particles, at // num_particles
    return Chosen(parent, choice, jnp.log(new) - jnp.log(jnp.sum(new)), c > 0)


def places_of(mask: Array, size: int) -> Int[Array, " size"]:
    """The places of the first `size` true entries; the length of the mask where there are fewer."""
    rank = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    place = jnp.arange(len(mask), dtype=jnp.int32)
    return jnp.full(size, len(mask), jnp.int32).at[rank].set(place, mode="drop")


def systematic(weight: Any, start: Any, num_draws: int) -> Any:
    """Indices by systematic resampling, in rising order; by NumPy for its own arrays, else by JAX.

    Args:
        weight: of the particles, up to a constant.
        start: of the grid of points, uniform between 0 and 1: one random number for all draws.
        num_draws: how many indices.
    """
    xp: Any = np if isinstance(weight, np.ndarray) else jnp
    points = (xp.arange(num_draws, dtype=weight.dtype) + start) / num_draws
    reached = xp.cumsum(weight)
    return xp.minimum(xp.searchsorted(reached / reached[-1], points), len(weight) - 1)


def systematic_parents(rng_key: Array, weight: Array) -> Array:
    """Systematic resampling of as many particles as there are, by their normalised weights."""
    start = random.uniform(rng_key, (), weight.dtype)
    return systematic(weight, start, len(weight)).astype(jnp.int32)


def resampled(rng_key: Any, log_weight: Any, num_draws: int) -> np.ndarray:
    """Indices by systematic resampling in float64, in random order; by NumPy.

    Args:
        rng_key: a JAX key, or a generator of NumPy.
        log_weight: of the points, up to a constant.
        num_draws: how many indices.
    """
    rng, known = generator(rng_key), np.asarray(log_weight, float)
    weight = np.exp(known - np.logaddexp.reduce(known))
    return rng.permutation(systematic(weight, rng.random(), num_draws))


def _below_half(parents):
    """The scheme that resamples by `parents` when the effective sample size is below half."""

    def scheme(rng_key: Array, log_weight: Array) -> Chosen:
        parent_key, choice_key = random.split(rng_key)
        total = jax.nn.logsumexp(log_weight, axis=1)
        num_particles = len(total)
        uneven = effective_size(total) < num_particles / 2
        stay = lambda *_: jnp.arange(num_particles, dtype=jnp.int32)
        drawn = jax.lax.cond(uneven, parents, stay, parent_key, jnp.exp(total))
        even = jnp.full_like(total, -jnp.log(jnp.asarray(num_particles, total.dtype)))
        return Chosen(
            drawn,
            drawn_choices(choice_key, log_weight[drawn]),
            jnp.where(uneven, even, total),
            uneven,
        )

    return scheme


SCHEMES = {
    "optimal": _optimal,
    "multinomial": _below_half(
        lambda rng_key, weight: random.choice(rng_key, len(weight), weight.shape, p=weight).astype(
            jnp.int32
        )
    ),
    "systematic": _below_half(systematic_parents),
}


# Tempering.

GENERATIONS = 8  # steps after which particles found new families


class Families(NamedTuple):
    """The genealogy, and the variance of log Z."""

    family: Int[Array, " particle"]
    added: Float[Array, " family"]  # since the families were founded
    variance: Array  # of log Z, by former families
    age: Array  # steps since the families were founded


def tempered(log_likelihood: Float[Array, " particle"], power: Array) -> Float[Array, " particle"]:
    """The log of a likelihood to a power; to the power 0 it is 1 even where it is 0."""
    return jnp.where(power > 0, power * log_likelihood, jnp.zeros_like(log_likelihood))


def next_exponent(
    log_likelihood: Float[Array, " particle"], exponent: Array, least_ess: float
) -> Array:
    """The largest exponent, up to 1, with the effective sample size that is wanted.

    Args:
        log_likelihood: of the particles.
        exponent: the one before.
        least_ess: the effective sample size, as a share of the particles. Where many particles
            have weight 0 and it cannot be reached, the exponent grows by one rounding.
    """
    size, one = len(log_likelihood), jnp.ones_like(exponent)

    def is_even(step: Array) -> Array:
        log_weight = tempered(log_likelihood, step)
        return effective_size(log_weight - jax.nn.logsumexp(log_weight)) >= least_ess * size

    is_uneven = lambda step: ~is_even(step)
    _, step = bisected(is_uneven, jnp.zeros_like(exponent), one - exponent, 60)
    reached = jnp.maximum(exponent + step, jnp.nextafter(exponent, one))
    return jnp.where(is_even(one - exponent), one, jnp.minimum(reached, one))


def bisected(
    is_high: Callable, low: Float[Array, "*batch"], high: Float[Array, "*batch"], num_halvings: int
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The ends of an interval after bisections; `is_high` is true above the root."""

    def bisect(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        above = is_high(middle)
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    return jax.lax.fori_loop(0, num_halvings, bisect, (low, high))


def new_families(size: int, variance: Array) -> Families:
    """Each of `size` particles founds a family; `variance` is that of the families before."""
    family, zero = jnp.arange(size, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return Families(family, jnp.zeros(size, variance.dtype), variance, zero)


def after_step(
    families: Families, weight: Float[Array, " particle"], parent: Int[Array, " particle"]
) -> Families:
    """The families after a step with normalised weights, and its resampling."""
    old = Families(
        families.family[parent],
        families.added.at[families.family].add(weight - 1 / len(weight)),
        families.variance,
        families.age + 1,
    )
    return jax.tree.map(
        lambda old_leaf, leaf: jnp.where(old.age < GENERATIONS, old_leaf, leaf),
        old,
        new_families(len(weight), variance_of(old)),
    )


def variance_of(families: Families) -> Array:
    """The estimated variance of log Z so far."""
    return families.variance + jnp.sum(families.added**2)
