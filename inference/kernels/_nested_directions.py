"""Directions of a walk: as long as the mode is wide along them, and without the point that the walk begins at.

A direction is the difference of two live points of the mode, or a Normal vector with the standard deviation of each latent number in the
mode. Differences follow a mode that is narrow in an oblique direction; Normal vectors reach where the differences of few points do not.
Either is cut to a random part of the latent numbers, from a single one to all: where contours are neither round nor oblique, as those of a
mixture, steps in a few numbers go further.

The origin of a walk is never one of the two points. On the line through its own place and another point a walk would be spread evenly,
where volume grows with the distance to that point: it would end too near to it, where the likelihood is too high. (With all differences
alike, the evidence of a Normal of 32 numbers came out 5 nats too large with 100 live points and 17 with 50, at a claimed error of 1 and
with ranks of insertion that looked even.)
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

__all__ = ["Around", "direction", "spread_of"]


class Around(NamedTuple):
    """What each lane sees: the live points of its mode."""

    points: Array  # [point, size], mode by mode
    first: Array  # [lane]: where its mode begins
    count: Array  # [lane]: points of its mode
    own: Array  # [lane]: the place of its origin in the mode
    spread: Array  # [lane, size]: standard deviations of the mode


def spread_of(z: Array, mode: Array, num_modes: int) -> Array:
    """Standard deviations [mode, size] of the points of each mode."""
    sums = lambda values: jnp.zeros((num_modes, *values.shape[1:]), z.dtype).at[mode].add(values)
    count = jnp.maximum(sums(jnp.ones((len(z), 1), z.dtype)), 1)
    away = z - (sums(z) / count)[mode]
    return jnp.sqrt(sums(away**2) / count)


def direction(rng_key: Array, around: Around) -> Array:
    """[lane, size], as long as the standard deviation of the mode along it."""
    pair_key, which_key, normal_key, part_key = random.split(rng_key, 4)
    normal = around.spread * random.normal(normal_key, around.spread.shape, around.spread.dtype)
    is_pair = random.bernoulli(which_key, 0.5, around.count.shape) & (around.count > 2)
    whole = jnp.where(is_pair[:, None], _difference(pair_key, around) / np.sqrt(2), normal)
    part = _part(part_key, whole)
    return jnp.where(part, whole, 0.0) / jnp.sqrt(part.sum(1, keepdims=True).astype(whole.dtype))


def _difference(rng_key: Array, around: Around) -> Array:
    """Of two points of the mode, neither of them the origin."""
    others = jnp.maximum(around.count - 1, 1)
    share = random.uniform(rng_key, (2, len(others)), around.points.dtype)
    one = (share[0] * others).astype(jnp.int32)
    other = (one + 1 + (share[1] * (others - 1)).astype(jnp.int32)) % others
    at = lambda place: around.points[around.first + (around.own + 1 + place) % around.count]
    return at(one) - at(other)


def _part(rng_key: Array, whole: Array) -> Array:
    """Which latent numbers change: one that is given, and others, so that their number is as often small as large."""
    number_key, other_key, one_key = random.split(rng_key, 3)
    num_lanes, size = whole.shape
    number = jnp.exp(random.uniform(number_key, (num_lanes, 1), whole.dtype) * np.log(size))
    one = random.randint(one_key, (num_lanes, 1), 0, size)
    return (random.uniform(other_key, whole.shape, whole.dtype) < number / size) | (jnp.arange(size) == one)
