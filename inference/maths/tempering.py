"""Likelihood tempering: the next exponent, MCMC moves, and the error of the evidence.

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
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from inference.maths.resampling import effective_size
from inference.maths.slice_walk import (
    Limit,
    Particles,
    deviations_by_mode,
    direction,
    walk,
)

__all__ = [
    "GENERATIONS",
    "Families",
    "MoveReport",
    "after_step",
    "new_families",
    "next_exponent",
    "slice_moves",
    "tempered",
    "variance_of",
]

GENERATIONS = 8  # steps after which particles found new families


class Families(NamedTuple):
    """The genealogy, and the variance of log Z."""

    family: Int[Array, " particle"]
    added: Float[Array, " family"]  # since the families were founded
    variance: Array  # by the families before
    age: Array


def tempered(log_likelihood: Array, power: Array) -> Array:
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
        return effective_size(log_weight - logsumexp(log_weight)) >= least_ess * size

    def bisect(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        even = is_even(middle)
        return jnp.where(even, middle, low), jnp.where(even, high, middle)

    _, step = jax.lax.fori_loop(0, 60, bisect, (jnp.zeros_like(exponent), one - exponent))
    reached = jnp.maximum(exponent + step, jnp.nextafter(exponent, one))
    return jnp.where(is_even(one - exponent), one, jnp.minimum(reached, one))


def new_families(size: int, variance: Array) -> Families:
    """Each of `size` particles founds a family; `variance` is that of the families before."""
    family, zero = jnp.arange(size, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return Families(family, jnp.zeros(size, variance.dtype), variance, zero)


def after_step(
    families: Families, weight: Float[Array, " particle"], parent: Int[Array, " particle"]
) -> Families:
    """The families after a step with normalised weights, and its resampling."""
    added = families.added.at[families.family].add(weight - 1 / len(weight))
    old = Families(families.family[parent], added, families.variance, families.age + 1)
    new = new_families(len(weight), variance_of(old))
    return jax.tree.map(
        lambda old_leaf, leaf: jnp.where(old.age < GENERATIONS, old_leaf, leaf), old, new
    )


def variance_of(families: Families) -> Array:
    """The estimated variance of log Z so far."""
    return families.variance + jnp.sum(families.added**2)


class MoveReport(NamedTuple):
    """The cost of the moves of a step, and how far they went."""

    halfway: Array  # mean square distance after half of the steps, over that after all
    num_steps: Array  # of each walk
    evaluations: Array
    num_nan: Array
    passes: Array


def slice_moves(
    rng_key: Array,
    before: Particles,
    parent: Int[Array, " particle"],
    densities: Callable,
    *,
    num_sweeps: float,
    memory: float,
) -> tuple[Particles, MoveReport]:
    """Resampled particles after slice-sampling walks that leave the first density invariant.

    A pass takes as many steps as all passes before it together. Directions are differences of the
    particles before resampling, without the parent.

    Args:
        rng_key: a JAX key.
        before: the particles before resampling.
        parent: the particle that each is a copy of.
        densities: a function of a vector that returns the log density that walks leave invariant,
            and the log likelihood.
        num_sweeps: sweeps of the coordinates at least.
        memory: the correlation with its start that a walk may keep; it goes on, for up to 5 more
            passes, while it keeps more.
    """
    (count, size), dtype = before.z.shape, before.z.dtype
    start = jax.tree.map(lambda leaf: leaf[parent], before)
    one_mode = jnp.zeros(count, jnp.int32)
    deviation = deviations_by_mode(start.z, one_mode, 1)[one_mode]
    turn = partial(
        direction,
        points=before.z,
        first=one_mode,
        count=one_mode + count,
        own=parent,
        deviation=deviation,
    )
    no_limit = Limit(jnp.full_like(before.log_likelihood, -jnp.inf), jnp.zeros_like(before.label))
    tiny = jnp.finfo(dtype).tiny
    distance = lambda z: jnp.mean(((z - start.z) / jnp.maximum(deviation, tiny)) ** 2)
    least = max(1, round(num_sweeps * size / 2))

    def goes_on(carry: tuple[Particles, MoveReport]) -> Array:
        # with a correlation c left after all steps, the square distance after half of them is
        # 1 / (1 + sqrt(c)) of that after all
        _, report = carry
        kept = jnp.clip(1 / report.halfway - 1, 0, 1)
        return (report.passes < 2) | ((kept > np.sqrt(memory)) & (report.passes < 7))

    def one_pass(carry: tuple[Particles, MoveReport]) -> tuple[Particles, MoveReport]:
        at, report = carry
        num_steps = jnp.maximum(report.num_steps, least)
        pass_key = random.fold_in(rng_key, report.passes)
        new = walk(pass_key, densities, at, no_limit, turn, num_steps, 4.0)
        return new.at, MoveReport(
            distance(at.z) / jnp.maximum(distance(new.at.z), tiny),
            report.num_steps + num_steps,
            report.evaluations + new.num_evaluations,
            report.num_nan + new.num_nan,
            report.passes + 1,
        )

    zero = jnp.zeros((), jnp.int32)
    first = start, MoveReport(jnp.zeros((), dtype), zero, zero, zero, zero)
    return jax.lax.while_loop(goes_on, one_pass, first)
