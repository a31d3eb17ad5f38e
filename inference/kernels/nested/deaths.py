"""Who dies, and who is copied in its place.

The lowest of all die. So modes have one limit: where walks go from one to another, or a mode is
split that hangs together, the points of all, each with its share of volume, are still draws from
the prior above the limit.

Where modes have come apart and nobody has noticed yet, copies stay in the mode of the point they
are copied from, so that its number of points is one of survivors and of their copies. Which
survivors are copied is therefore not left to chance: they are taken evenly along the longest axis
of their mode, so that parts at its two ends keep their numbers. Each survivor is copied as often as
any other, on average.

Cost of a step: live points x size x turns, and two sorts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from inference.maths.slice_walk import Limit, Points, is_above, spread_of

__all__ = ["Death", "along_axis", "insertion_rank", "lowest", "parents_of"]

NUM_TURNS = 8  # of the power method


class Death(NamedTuple):
    """Who dies, and what the survivors are, in the order of mode and likelihood."""

    order: Array  # [live]: live points, mode by mode, the lowest first
    first: Array  # [mode]: where it begins in this order
    count: Array  # [mode]: live points
    dying: Array  # [mode]
    chosen: Array  # [batch]: live points
    rank: Array  # [batch]: among those of its mode


def lowest(live: Points, mode: Array, count: Array, batch: int) -> Death:
    """The `batch` lowest points of all, of modes with `count` points."""
    order = jnp.lexsort((live.label, live.log_likelihood, mode))
    first = jnp.cumsum(count) - count
    chosen = jnp.lexsort((live.label, live.log_likelihood))[:batch]
    rank = jnp.argsort(order)[chosen] - first[mode[chosen]]
    return Death(order, first, count, jnp.zeros_like(count).at[mode[chosen]].add(1), chosen, rank)


def parents_of(rng_key: Array, z: Array, mode: Array, death: Death, birth_mode: Array) -> Array:
    """[birth]: the live point that each is a copy of, a survivor of its mode.

    `birth_mode` is in rising order.
    """
    survivors = death.count - death.dying
    is_dying = jnp.zeros(len(z), bool).at[death.chosen].set(True)
    order = jnp.lexsort((along_axis(z, mode, len(survivors)), is_dying, mode))
    births = jnp.zeros_like(survivors).at[birth_mode].add(1)
    number = (
        jnp.arange(len(birth_mode), dtype=birth_mode.dtype)
        - (jnp.cumsum(births) - births)[birth_mode]
    )
    offset = random.uniform(rng_key, survivors.shape, z.dtype)[birth_mode]
    share = (number.astype(z.dtype) + offset) / births[birth_mode].astype(z.dtype)
    pick = (share * survivors[birth_mode].astype(z.dtype)).astype(jnp.int32)
    return order[death.first[birth_mode] + jnp.minimum(pick, survivors[birth_mode] - 1)]


def insertion_rank(
    rng_key: Array, live: Points, mode: Array, death: Death, born: Points, birth_mode: Array
) -> Array:
    """[birth]: where each came to lie among the survivors of its mode, as if it had all live
    points.
    """
    num_live, dtype = len(mode), born.z.dtype
    survives = jnp.ones(num_live, bool).at[death.chosen].set(False)
    is_lower = ~is_above(
        live.log_likelihood[None],
        live.label[None],
        Limit(born.log_likelihood[:, None], born.label[:, None]),
    )
    below = jnp.sum(is_lower & survives[None] & (mode[None] == birth_mode[:, None]), axis=1)
    places = ((death.count - death.dying)[birth_mode] + 1).astype(dtype)
    share = (below.astype(dtype) + random.uniform(rng_key, below.shape, dtype)) / places
    return jnp.minimum(jnp.floor(share * num_live), num_live - 1).astype(jnp.int32)


def along_axis(z: Array, mode: Array, num_modes: int) -> Array:
    """[point]: how far each is along the axis along which its mode is longest, when every latent
    number has the spread 1.
    """
    sums = lambda values: jnp.zeros((num_modes, *values.shape[1:]), z.dtype).at[mode].add(values)
    count = jnp.maximum(sums(jnp.ones((len(z), 1), z.dtype)), 1)
    spread = spread_of(z, mode, num_modes)
    y = (z - (sums(z) / count)[mode]) / jnp.maximum(spread, jnp.finfo(z.dtype).tiny)[mode]

    def turned(_: Any, axis: Array) -> Array:
        new = sums(y * jnp.sum(y * axis[mode], 1, keepdims=True))
        return new / jnp.maximum(
            jnp.linalg.norm(new, axis=1, keepdims=True), jnp.finfo(z.dtype).tiny
        )

    farthest = jnp.zeros(num_modes, z.dtype).at[mode].max(jnp.sum(y**2, 1))
    start = sums(jnp.where(jnp.sum(y**2, 1, keepdims=True) >= farthest[mode][:, None], y, 0.0))
    axis = jax.lax.fori_loop(0, NUM_TURNS, turned, start)
    return jnp.sum(y * axis[mode], 1)
