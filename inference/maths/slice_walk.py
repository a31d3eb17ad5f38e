"""Slice sampling of many particles at once, above a limit of the likelihood.

A walk leaves the prior above the limit invariant. Each particle goes along random directions. On
the line through the particle, an interval of fixed width is placed at random over it, and a point
of the interval is drawn. Where that point is not in the slice (prior above the slice's height,
likelihood above the limit), the interval is shrunk to it. The particles do not wait for each other:
one that has found its next point goes on to its next direction at once, so that a round evaluates
every particle once. Before it walks, a particle may be offered independent draws from the prior,
and takes the first one above the limit. While the limit is low that is cheaper than a walk.

A direction is the difference of two points of the particle's mode, or a Normal vector with the
standard deviation of each coordinate in the mode. Differences follow a mode that is narrow along an
oblique direction; Normal vectors also reach where differences of few points do not. A random subset
of the coordinates is kept, from one to all, because steps in few coordinates go further where
contours are neither round nor oblique, such as those of a mixture.

The start of a walk is never one of the two points. If it were, the walk would be uniform along the
line through the other point, although volume grows with the distance from that point: it would end
too near to it, where the likelihood is too high. (With such differences alone, the log-evidence of
a Normal in 32 dimensions was 5 nats too large with 100 live points, with insertion ranks that
looked uniform.)

Neal (2003), "Slice sampling", without stepping out; Skilling (2006) for the random label that
orders points of equal likelihood.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import erfinv
from jaxtyping import Float, Int

from inference.maths.host import Array

__all__ = [
    "Limit",
    "MoveReport",
    "Particles",
    "Walk",
    "deviations_by_mode",
    "direction",
    "is_above",
    "means_by_mode",
    "slice_moves",
    "walk",
]


class Particles(NamedTuple):
    """Points and what is known of them."""

    z: Float[Array, "particle size"]
    log_prior: Float[Array, " particle"]
    log_likelihood: Float[Array, " particle"]
    label: Float[Array, " particle"]  # from 0 to 1: orders points of equal likelihood


class Limit(NamedTuple):
    """What the likelihood of each particle must be above."""

    log_likelihood: Float[Array, " particle"]
    label: Float[Array, " particle"]


class Walk(NamedTuple):
    """Where the particles are, and the cost so far; the loop's own variables at the end."""

    at: Particles
    halfway: Float[Array, "particle size"]  # z after half of the steps
    num_evaluations: Array
    num_offered: Array
    # points in the slice whose likelihood is NaN, or whose prior is; they count as likelihood 0
    num_nan: Array
    direction: Float[Array, "particle size"]
    step: Int[Array, " particle"]  # steps done; below -1 while there are offers left
    low: Float[Array, " particle"]
    high: Float[Array, " particle"]
    height: Float[Array, " particle"]  # of the slice, under the log prior
    round: Array
    last: Float[Array, " particle"]  # a uniform number that nothing has used


def is_above(log_likelihood: Array, label: Array, limit: Limit) -> Array:
    """Whether points are above a limit: by likelihood, then by label; NaN is above nothing."""
    return (log_likelihood > limit.log_likelihood) | (
        (log_likelihood == limit.log_likelihood) & (label > limit.label)
    )


def walk(
    rng_key: Array,
    densities: Callable,
    start: Particles,
    limit: Limit,
    draw_direction: Callable,
    num_steps: int | Array,
    width: float,
    offers: Float[Array, "offer size"] | None = None,
    first: int | Array = 0,
    num_offers: int | Array = 0,
) -> Walk:
    """Slice sampling of each particle for some steps, or an offer above the limit in its place.

    Args:
        rng_key: a JAX key.
        densities: a function of a vector that returns its log prior and log likelihood.
        start: the particles.
        limit: what their likelihoods must stay above.
        draw_direction: a function of uniform numbers that returns directions [particle, size].
        num_steps: slice-sampling steps of each particle.
        width: of the interval, in units of the length of the direction.
        offers: draws from the prior; each is offered to one particle.
        first: where the offers begin that were not taken yet.
        num_offers: the most offers to a particle; then it walks.
    """
    num_particles, dtype = len(start.z), start.z.dtype
    least = 8 * jnp.finfo(dtype).eps * width  # an interval that holds the point alone

    def offered(state: Walk) -> tuple[Array, Array]:
        if offers is None or not len(offers):
            return jnp.zeros(num_particles, bool), state.at.z
        is_waiting = state.step < -1
        number = first + state.num_offered + jnp.cumsum(is_waiting) - 1
        return is_waiting & (number < len(offers)), offers[jnp.minimum(number, len(offers) - 1)]

    def one_round(state: Walk) -> Walk:
        # all at once, since each call is code that takes long to compile
        numbers = (4 + 5 + 2 * start.z.shape[1], num_particles)
        round_key = random.fold_in(rng_key, state.round)
        uniform = random.uniform(round_key, numbers, dtype, minval=jnp.finfo(dtype).tiny)
        is_active, (is_offer, offer) = state.step < num_steps, offered(state)
        away = state.low + (state.high - state.low) * uniform[2]
        z = jnp.where(is_offer[:, None], offer, state.at.z + away[:, None] * state.direction)
        log_prior, log_likelihood = jax.vmap(densities)(z)
        in_slice = jnp.where(is_offer, jnp.isfinite(log_prior), log_prior >= state.height)
        label = jnp.where(is_offer, uniform[2], state.at.label)
        found = in_slice & is_above(log_likelihood, label, limit) & is_active
        at = Particles(
            jnp.where(found[:, None], z, state.at.z),
            jnp.where(found, log_prior, state.at.log_prior),
            jnp.where(found, log_likelihood, state.at.log_likelihood),
            state.at.label,
        )
        low, high = jnp.where(away < 0, away, state.low), jnp.where(away < 0, state.high, away)
        goes_on, taken = found | (is_active & ~is_offer & (high - low < least)), found & is_offer
        new_low = -width * uniform[0]
        step = jnp.where(is_offer, state.step, jnp.maximum(state.step, -1))
        step = jnp.where(taken, num_steps, step + (goes_on | is_offer).astype(step.dtype))
        is_first_half = (step <= num_steps // 2) | taken
        is_nan = jnp.isnan(log_prior) | in_slice & jnp.isnan(log_likelihood)
        return Walk(
            at,
            jnp.where(is_first_half[:, None], at.z, state.halfway),
            state.num_evaluations + jnp.sum(is_active, dtype=jnp.int32),
            state.num_offered + jnp.sum(is_offer, dtype=jnp.int32),
            state.num_nan + jnp.sum(is_active & is_nan, dtype=jnp.int32),
            jnp.where(goes_on[:, None], draw_direction(uniform[4:]), state.direction),
            step,
            jnp.where(goes_on, new_low, low),
            jnp.where(goes_on, new_low + width, high),
            jnp.where(goes_on, at.log_prior + jnp.log(uniform[1]), state.height),
            state.round + 1,
            uniform[3],
        )

    # The first round finds the start itself and opens the first interval, so that the code for
    # directions is compiled once.
    count, zeros = jnp.zeros((), jnp.int32), jnp.zeros(num_particles, dtype)
    state = Walk(
        start,
        start.z,
        count,
        count,
        count,
        jnp.zeros_like(start.z),
        jnp.full(num_particles, -1, jnp.int32) - num_offers,
        zeros,
        zeros,
        jnp.full(num_particles, -jnp.inf, dtype),
        count,
        zeros,
    )
    end = jax.lax.while_loop(lambda state: jnp.any(state.step < num_steps), one_round, state)
    least_label = jnp.where(
        end.at.log_likelihood == limit.log_likelihood, limit.label, jnp.zeros_like(limit.label)
    )
    label = least_label + (1 - least_label) * end.last
    return end._replace(at=end.at._replace(label=label))


def means_by_mode(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, "mode size"]:
    """The mean of the points of each mode."""
    count = jnp.zeros((num_modes, 1), z.dtype).at[mode].add(1)
    return jnp.zeros((num_modes, z.shape[1]), z.dtype).at[mode].add(z) / jnp.maximum(count, 1)


def deviations_by_mode(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, "mode size"]:
    """The standard deviations of the points of each mode."""
    away = z - means_by_mode(z, mode, num_modes)[mode]
    return jnp.sqrt(means_by_mode(away**2, mode, num_modes))


def direction(
    uniform: Float[Array, "number particle"],
    points: Float[Array, "point size"],
    first: Int[Array, " particle"],
    count: Int[Array, " particle"],
    own: Int[Array, " particle"],
    deviation: Float[Array, "particle size"],
) -> Float[Array, "particle size"]:
    """Random directions, as long as the standard deviation of the mode along them.

    Args:
        uniform: 5 + 2 size numbers above 0 and below 1 for each particle.
        points: from which differences are taken, mode by mode.
        first: where the mode of each particle begins.
        count: points of its mode.
        own: the place in the mode of the point that the walk starts from.
        deviation: standard deviations of its mode.
    """
    size, dtype = deviation.shape[1], deviation.dtype
    even = jnp.maximum(2 * uniform[5 + size :].T - 1, jnp.finfo(dtype).eps - 1)
    normal = deviation * np.sqrt(2) * erfinv(even)
    is_pair = (uniform[0] < 0.5) & (count > 2)
    # two points of the mode that are not the start
    others = jnp.maximum(count - 1, 1)
    one = (uniform[1] * others).astype(jnp.int32)
    other = (one + 1 + (uniform[2] * (others - 1)).astype(jnp.int32)) % others
    at = lambda place: points[first + (own + 1 + place) % count]
    whole = jnp.where(is_pair[:, None], (at(one) - at(other)) / np.sqrt(2), normal)
    # the coordinates that change: a given one, and others, so that small numbers of them are as
    # frequent as large ones
    number = jnp.exp(uniform[3] * np.log(size))
    given = (uniform[4] * size).astype(jnp.int32)
    is_changed = uniform[5 : 5 + size].T * size < number[:, None]
    is_changed |= jnp.arange(size) == given[:, None]
    root = jnp.sqrt(is_changed.sum(1, keepdims=True).astype(dtype))
    return jnp.where(is_changed, whole, 0.0) / root


# Moves of particles that were resampled.


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
        new = walk(
            random.fold_in(rng_key, report.passes), densities, at, no_limit, turn, num_steps, 4.0
        )
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
