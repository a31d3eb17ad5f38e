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

__all__ = ["Around", "centre_of", "direction", "spread_of"]


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
    share = random.uniform(uniform_key, (5 + size, num_lanes), dtype)  # at once: each call is code that takes long to compile
    normal = around.spread * random.normal(normal_key, (num_lanes, size), dtype)
    is_pair = (share[0] < 0.5) & (around.count > 2)
    whole = jnp.where(is_pair[:, None], _difference(share[1:3], around) / np.sqrt(2), normal)
    part = _part(share[3:], size)
    return jnp.where(part, whole, 0.0) / jnp.sqrt(part.sum(1, keepdims=True).astype(dtype))


def _difference(share: Array, around: Around) -> Array:
    """Of two points of the mode, neither of them the origin, by numbers [2, lane] from 0 to 1."""
    others = jnp.maximum(around.count - 1, 1)
    one = (share[0] * others).astype(jnp.int32)
    other = (one + 1 + (share[1] * (others - 1)).astype(jnp.int32)) % others
    at = lambda place: around.points[around.first + (around.own + 1 + place) % around.count]
    return at(one) - at(other)


def _part(share: Array, size: int) -> Array:
    """Which latent numbers change [lane, size]: one that is given, and others, so that their number is as often small as large; by numbers
    [2 + size, lane] from 0 to 1."""
    number = jnp.exp(share[0] * np.log(size))
    one = (share[1] * size).astype(jnp.int32)
    return (share[2:].T * size < number[:, None]) | (jnp.arange(size) == one[:, None])
