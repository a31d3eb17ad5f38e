"""Moves of nested sampling: a walk of slice samplings that leaves the prior above a limit of the
likelihood as it is.

Each lane goes from its own point along directions of its own, straight ones or those of another
chart. An interval of fixed width is laid at random over the point, a place in it is drawn, and
where that is not in the slice (prior above its height, likelihood above the limit) the interval is
cut there. Lanes do not wait for each other: one that has found its place goes on to its next
direction at once, so a round is one evaluation of every lane.

Before it walks a lane may be offered draws of the prior itself. The first above the limit is what
it wants, with no memory of where it began; while the limit is low that is cheaper than a walk. Each
draw is offered once; where there are none left, a lane walks.

Neal (2003), "Slice sampling", without stepping out; Skilling (2006) for the label that orders
points of equal likelihood.

Directions of a walk: as long as the mode is wide along them, and without the point that the walk
begins at.

A direction is the difference of two live points of the mode, or a Normal vector with the standard
deviation of each latent number in the mode. Differences follow a mode that is narrow in an oblique
direction; Normal vectors reach where the differences of few points do not. Either is cut to a
random part of the latent numbers, from a single one to all: where contours are neither round nor
oblique, as those of a mixture, steps in a few numbers go further.

The origin of a walk is never one of the two points. On the line through its own place and another
point a walk would be spread evenly, where volume grows with the distance to that point: it would
end too near to it, where the likelihood is too high. (With all differences alike, the evidence of a
Normal of 32 numbers came out 5 nats too large with 100 live points and 17 with 50, at a claimed
error of 1 and with ranks of insertion that looked even.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

__all__ = [
    "STRAIGHT",
    "Around",
    "Chart",
    "Ended",
    "Limit",
    "Points",
    "Walk",
    "centre_of",
    "direction",
    "is_above",
    "spread_of",
    "walk",
]


class Points(NamedTuple):
    """Points with what is known of them; every field has the same first axis."""

    z: Array  # [point, size]
    log_prior: Array
    log_likelihood: Array
    label: Array  # from 0 to 1: orders points of equal likelihood


class Limit(NamedTuple):
    """What a point must be above, for each lane."""

    log_likelihood: Array
    label: Array


class Chart(NamedTuple):
    """Lines through points, which may bend: a step along one keeps volume in coordinates of the
    chart's own.
    """

    # points [lane, size] that are steps [lane] from others, along directions
    at: Callable[[Array, Array, Array], Array]
    # of points [lane, size]: log of the volume of z that a volume in the chart comes to
    log_stretch: Callable[[Array], Array]


STRAIGHT = Chart(
    lambda z, along, step: z + step[:, None] * along, lambda z: jnp.zeros(len(z), z.dtype)
)


class Ended(NamedTuple):
    """Where the lanes have come to, and what it took."""

    at: Points
    halfway: Array  # [lane, size]: after half of the steps
    num_evaluations: Array
    num_offered: Array
    # vectors that are no number, of those in the slice: none is gone to, as if the likelihood were
    # 0
    num_nan: Array


class Walk(NamedTuple):
    """Where the lanes are."""

    at: Points
    halfway: Array  # [lane, size]: z after half of the steps
    along: Array  # [lane, size], or what the chart takes for it: the direction
    place: Array  # steps that are done; below -1 while there are offers left
    low: Array
    high: Array
    height: Array  # of the slice, under the log prior in the chart
    num_evaluations: Array
    num_offered: Array
    num_nan: Array
    round: Array


def is_above(log_likelihood: Array, label: Array, limit: Limit) -> Array:
    """Likelihood first, then label; NaN is above nothing."""
    return (log_likelihood > limit.log_likelihood) | (
        (log_likelihood == limit.log_likelihood) & (label > limit.label)
    )


def walk(
    rng_key: Array,
    densities: Callable,
    start: Points,
    limit: Limit,
    turn: Callable,
    num_steps: int | Array,
    width: float,
    chart: Chart = STRAIGHT,
    offers: Array | None = None,
    first: int | Array = 0,
    num_offers: int | Array = 0,
) -> Ended:
    """Each lane `num_steps` steps along directions [lane, size] that `turn(key)` draws, whose
    length is the unit of `width`. A lane that finds one of up to `num_offers` of `offers` [offer,
    size], from the `first` on, above the limit takes it instead, all at once and with nothing
    halfway.
    """
    num_lanes, dtype = len(start.z), start.z.dtype
    loop_key, label_key = random.split(rng_key)
    least = 8 * jnp.finfo(dtype).eps * width  # an interval that holds the point alone

    def opened(uniform: Array, log_prior: Array) -> tuple[Array, Array, Array]:
        low = -width * uniform[0]
        return low, low + width, log_prior + jnp.log(uniform[1])

    def offered(state: Walk) -> tuple[Array, Array]:
        """Whether each lane is offered something, and what."""
        if offers is None or not len(offers):
            return jnp.zeros(num_lanes, bool), state.at.z
        is_waiting = state.place < -1
        next_one = first + state.num_offered + jnp.cumsum(is_waiting) - 1
        return is_waiting & (next_one < len(offers)), offers[jnp.minimum(next_one, len(offers) - 1)]

    def round_of_all(state: Walk) -> Walk:
        key, turn_key = random.split(random.fold_in(loop_key, state.round))
        uniform = random.uniform(key, (3, num_lanes), dtype, minval=jnp.finfo(dtype).tiny)
        is_active, (is_offer, offer) = state.place < num_steps, offered(state)
        step = state.low + (state.high - state.low) * uniform[2]
        z = jnp.where(is_offer[:, None], offer, chart.at(state.at.z, state.along, step))
        log_prior, log_likelihood = jax.vmap(densities)(z)
        in_slice = jnp.where(
            is_offer, jnp.isfinite(log_prior), log_prior + chart.log_stretch(z) >= state.height
        )
        label = jnp.where(is_offer, uniform[2], state.at.label)
        found = in_slice & is_above(log_likelihood, label, limit) & is_active
        at = Points(
            jnp.where(found[:, None], z, state.at.z),
            jnp.where(found, log_prior, state.at.log_prior),
            jnp.where(found, log_likelihood, state.at.log_likelihood),
            state.at.label,
        )
        low, high = jnp.where(step < 0, step, state.low), jnp.where(step < 0, state.high, step)
        goes_on, taken = found | (is_active & ~is_offer & (high - low < least)), found & is_offer
        new_low, new_high, new_height = opened(uniform[:2], at.log_prior + chart.log_stretch(at.z))
        place = jnp.where(is_offer, state.place, jnp.maximum(state.place, -1))
        place = jnp.where(taken, num_steps, place + (goes_on | is_offer).astype(place.dtype))
        return Walk(
            at,
            jnp.where(((place <= num_steps // 2) | taken)[:, None], at.z, state.halfway),
            jnp.where(goes_on[:, None], turn(turn_key), state.along),
            place,
            jnp.where(goes_on, new_low, low),
            jnp.where(goes_on, new_high, high),
            jnp.where(goes_on, new_height, state.height),
            state.num_evaluations + jnp.sum(is_active, dtype=jnp.int32),
            state.num_offered + jnp.sum(is_offer, dtype=jnp.int32),
            state.num_nan
            + jnp.sum(
                is_active & (jnp.isnan(log_prior) | in_slice & jnp.isnan(log_likelihood)),
                dtype=jnp.int32,
            ),
            state.round + 1,
        )

    # The first round finds the start itself, and opens the first interval: so the loop alone has
    # code for directions.
    zero = jnp.zeros(num_lanes, dtype)
    before = jnp.full(num_lanes, -1, jnp.int32) - num_offers
    counts = 4 * (jnp.zeros((), jnp.int32),)
    along = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(turn, rng_key)
    )
    state = Walk(
        start, start.z, along, before, zero, zero, jnp.full(num_lanes, -jnp.inf, dtype), *counts
    )
    state = jax.lax.while_loop(lambda state: jnp.any(state.place < num_steps), round_of_all, state)
    lowest = jnp.where(
        state.at.log_likelihood == limit.log_likelihood, limit.label, jnp.zeros_like(limit.label)
    )
    label = lowest + (1 - lowest) * random.uniform(label_key, (num_lanes,), dtype)
    return Ended(
        state.at._replace(label=label),
        state.halfway,
        state.num_evaluations,
        state.num_offered,
        state.num_nan,
    )


class Around(NamedTuple):
    """What each lane sees: the live points of its mode."""

    points: Array  # [point, size], mode by mode
    first: Array  # [lane]: where its mode begins
    count: Array  # [lane]: points of its mode
    own: Array  # [lane]: the place of its origin in the mode
    spread: Array  # [lane, size]: standard deviations of the mode


def centre_of(z: Array, mode: Array, num_modes: int) -> Array:
    """Means [mode, size] of the points of each mode."""
    count = jnp.zeros((num_modes, 1), z.dtype).at[mode].add(1)
    return jnp.zeros((num_modes, z.shape[1]), z.dtype).at[mode].add(z) / jnp.maximum(count, 1)


def spread_of(z: Array, mode: Array, num_modes: int) -> Array:
    """Standard deviations [mode, size] of the points of each mode."""
    away = z - centre_of(z, mode, num_modes)[mode]
    return jnp.sqrt(centre_of(away**2, mode, num_modes))


def direction(rng_key: Array, around: Around) -> Array:
    """[lane, size], as long as the standard deviation of the mode along it."""
    normal_key, uniform_key = random.split(rng_key)
    (num_lanes, size), dtype = around.spread.shape, around.spread.dtype
    # at once: each call is code that takes long to compile
    share = random.uniform(uniform_key, (5 + size, num_lanes), dtype)
    normal = around.spread * random.normal(normal_key, (num_lanes, size), dtype)
    is_pair = (share[0] < 0.5) & (around.count > 2)
    whole = jnp.where(is_pair[:, None], _difference(share[1:3], around) / np.sqrt(2), normal)
    part = _part(share[3:], size)
    return jnp.where(part, whole, 0.0) / jnp.sqrt(part.sum(1, keepdims=True).astype(dtype))


def _difference(share: Array, around: Around) -> Array:
    """The difference of two points of the mode that are not the origin, chosen by numbers [2,
    lane] from 0 to 1.
    """
    others = jnp.maximum(around.count - 1, 1)
    one = (share[0] * others).astype(jnp.int32)
    other = (one + 1 + (share[1] * (others - 1)).astype(jnp.int32)) % others
    at = lambda place: around.points[around.first + (around.own + 1 + place) % around.count]
    return at(one) - at(other)


def _part(share: Array, size: int) -> Array:
    """Which latent numbers change [lane, size]: one that is given, and others, so that their number
    is as often small as large; by numbers [2 + size, lane] from 0 to 1.
    """
    number = jnp.exp(share[0] * np.log(size))
    one = (share[1] * size).astype(jnp.int32)
    return (share[2:].T * size < number[:, None]) | (jnp.arange(size) == one[:, None])
