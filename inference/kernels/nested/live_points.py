"""Live points: which die, which are copied in their place, and which form separate modes.

The lowest points of all modes die, so that all modes have one limit. Then points of one region
remain draws from the prior above the limit however they are assigned to modes, each mode with its
share of the volume: it does no harm when walks cross from one mode to another, or when a connected
mode was split. (With a limit for each mode, the mode with the lower limit would wander into the
region of the other.)

The point that dies is replaced by a copy of a survivor, which then walks. Until a separation of
modes is noticed, copies stay in the mode of their parent. So parents are not left to chance: they
are taken evenly along the principal axis of the mode, so that parts at its two ends keep their
numbers of points. On average each survivor is copied equally often.

Modes are connected components of the graph of mutual nearest neighbours, in coordinates in which
each mode has unit covariance. A split is final: the parts share the volume as they share the
points, and new points of a mode are copies of its own points from then on, so that the evidence of
separated modes cannot drift.

Cost of a step: live points x size x 8, and two sorts; of a search for modes: live points^2 x (size
+ neighbours).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int

from inference.maths.slice_walk import (
    Limit,
    Particles,
    deviations_by_mode,
    is_above,
    means_by_mode,
)

__all__ = [
    "Death",
    "covariance_roots",
    "insertion_rank",
    "lowest",
    "parents_of",
    "principal_coordinate",
    "split_modes",
]

NEIGHBOURS = 7
# neighbours in one dimension: among 7 of 200 such points there are two gaps by chance
ON_A_LINE = 15


class Death(NamedTuple):
    """Who dies, and the live points sorted by mode and likelihood."""

    order: Int[Array, " live"]  # live points, mode by mode, the lowest first
    first: Int[Array, " mode"]  # where a mode begins in this order
    count: Int[Array, " mode"]  # live points
    dying: Int[Array, " mode"]  # deaths
    chosen: Int[Array, " batch"]  # the live points that die
    rank: Int[Array, " batch"]  # their ranks in their modes


def lowest(
    live: Particles, mode: Int[Array, " live"], count: Int[Array, " mode"], batch: int
) -> Death:
    """The `batch` lowest live points, which die; `count` says how many points modes have."""
    order = jnp.lexsort((live.label, live.log_likelihood, mode))
    first = jnp.cumsum(count) - count
    chosen = jnp.lexsort((live.label, live.log_likelihood))[:batch]
    rank = jnp.argsort(order)[chosen] - first[mode[chosen]]
    return Death(order, first, count, jnp.zeros_like(count).at[mode[chosen]].add(1), chosen, rank)


def parents_of(
    rng_key: Array,
    z: Float[Array, "live size"],
    mode: Int[Array, " live"],
    death: Death,
    birth_mode: Int[Array, " birth"],
) -> Int[Array, " birth"]:
    """The survivor that each birth is a copy of.

    Args:
        rng_key: a JAX key.
        z: the live points.
        mode: of the live points.
        death: who dies.
        birth_mode: the mode of each birth, in rising order.
    """
    survivors = death.count - death.dying
    is_dying = jnp.zeros(len(z), bool).at[death.chosen].set(True)
    order = jnp.lexsort((principal_coordinate(z, mode, len(survivors)), is_dying, mode))
    births = jnp.zeros_like(survivors).at[birth_mode].add(1)
    before = (jnp.cumsum(births) - births)[birth_mode]
    number = jnp.arange(len(birth_mode), dtype=birth_mode.dtype) - before
    offset = random.uniform(rng_key, survivors.shape, z.dtype)[birth_mode]
    share = (number.astype(z.dtype) + offset) / births[birth_mode].astype(z.dtype)
    pick = (share * survivors[birth_mode].astype(z.dtype)).astype(jnp.int32)
    return order[death.first[birth_mode] + jnp.minimum(pick, survivors[birth_mode] - 1)]


def insertion_rank(
    rng_key: Array,
    live: Particles,
    mode: Int[Array, " live"],
    death: Death,
    born: Particles,
    birth_mode: Int[Array, " birth"],
) -> Int[Array, " birth"]:
    """The rank of each birth among the survivors of its mode, scaled to all live points."""
    num_live, dtype = len(mode), born.z.dtype
    survives = jnp.ones(num_live, bool).at[death.chosen].set(False)
    limit = Limit(born.log_likelihood[:, None], born.label[:, None])
    is_lower = ~is_above(live.log_likelihood[None], live.label[None], limit)
    below = jnp.sum(is_lower & survives[None] & (mode[None] == birth_mode[:, None]), axis=1)
    places = ((death.count - death.dying)[birth_mode] + 1).astype(dtype)
    share = (below.astype(dtype) + random.uniform(rng_key, below.shape, dtype)) / places
    return jnp.minimum(jnp.floor(share * num_live), num_live - 1).astype(jnp.int32)


def principal_coordinate(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, " point"]:
    """Points along the first principal axis of their mode, with coordinates scaled to variance 1.

    The axis is found by the power method, from the point that is farthest from the mean.
    """
    tiny = jnp.finfo(z.dtype).tiny
    deviation = jnp.maximum(deviations_by_mode(z, mode, num_modes), tiny)[mode]
    y = (z - means_by_mode(z, mode, num_modes)[mode]) / deviation
    sums = lambda values: jnp.zeros((num_modes, *values.shape[1:]), z.dtype).at[mode].add(values)

    def multiplied(_: int, axis: Array) -> Array:
        new = sums(y * jnp.sum(y * axis[mode], 1, keepdims=True))
        return new / jnp.maximum(jnp.linalg.norm(new, axis=1, keepdims=True), tiny)

    square = jnp.sum(y**2, 1)
    is_farthest = square >= jnp.zeros(num_modes, z.dtype).at[mode].max(square)[mode]
    axis = jax.lax.fori_loop(0, 8, multiplied, sums(jnp.where(is_farthest[:, None], y, 0.0)))
    return jnp.sum(y * axis[mode], 1)


def covariance_roots(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, "mode size size"]:
    """Cholesky factors of the covariance of each mode, shrunk to the common one for few points."""
    size = z.shape[-1]
    member = (mode[None, :] == jnp.arange(num_modes)[:, None]).astype(z.dtype)
    count = jnp.maximum(member.sum(1), 1)[:, None]
    away = z - (member @ z / count)[mode]
    products = (away[:, :, None] * away[:, None, :]).reshape(len(z), -1)
    sums = (member @ products).reshape(num_modes, size, size)
    pooled = sums.sum(0) / len(z)
    pooled = pooled + 1e-8 * jnp.diag(jnp.diagonal(pooled) + jnp.finfo(z.dtype).tiny)
    return jnp.linalg.cholesky((sums + 1.0 * size * pooled[None]) / (count + 1.0 * size)[..., None])


def split_modes(
    z: Float[Array, "point size"],
    mode: Int[Array, " point"],
    roots: Float[Array, "mode size size"],
    num_modes: Array,
    least: int,
) -> tuple[Int[Array, " point"], Int[Array, " mode"], Array]:
    """Each mode split into its connected components.

    Returned are the mode of each point, the mode that each mode was a part of, and their number.

    Args:
        z: the live points.
        mode: of the points.
        roots: Cholesky factors of the covariance of each mode; as many as modes may become.
        num_modes: modes so far.
        least: points of the smallest component that becomes a mode; points of smaller ones join
            the component of the nearest other point.
    """
    num_points, most = len(z), len(roots)
    points = jnp.arange(num_points, dtype=jnp.int32)
    square = _square_distances(z, mode, roots)
    num_neighbours = NEIGHBOURS if z.shape[1] > 1 else ON_A_LINE
    component = _components(_mutual_neighbours(square, num_neighbours))
    size = jnp.zeros(num_points, jnp.int32).at[component].add(1)
    is_large = size[component] >= least
    nearest = jnp.argmin(jnp.where(is_large[None, :], square, jnp.inf), axis=1)
    component = jnp.where(is_large, component, component[nearest])
    size = jnp.zeros(num_points, jnp.int32).at[component].add(1)
    is_first = (component == points) & is_large
    smallest = jnp.iinfo(jnp.int32).min
    # the largest component of a mode keeps its number, the first of them in a tie
    order = jnp.where(is_first, size * num_points - points, smallest)
    best = jnp.full(most, smallest).at[mode].max(order)
    is_new = is_first & (order < best[mode])
    number = num_modes - 1 + jnp.cumsum(is_new, dtype=jnp.int32)
    is_new = is_new & (number < most)
    new = jnp.where(is_new, number, mode).astype(mode.dtype)
    origin = jnp.arange(most, dtype=jnp.int32)
    origin = origin.at[jnp.where(is_new, new, most)].set(mode, mode="drop")
    new_mode = jnp.where(best[mode] > smallest, new[component], mode)
    return new_mode, origin, num_modes + jnp.sum(is_new, dtype=num_modes.dtype)


def _square_distances(z: Array, mode: Array, roots: Array) -> Array:
    """[point, point], whitened by the mode; infinite between modes and of a point to itself."""
    eye = jnp.broadcast_to(jnp.eye(z.shape[-1], dtype=z.dtype), roots.shape)
    y = jnp.einsum("nij,nj->ni", solve_triangular(roots, eye, lower=True)[mode], z)
    y = y - y.mean(0, keepdims=True)
    square = jnp.sum(y**2, -1)
    distance = square[:, None] + square[None, :] - 2 * y @ y.T
    is_other = (mode[:, None] == mode[None, :]) & ~jnp.eye(len(z), dtype=bool)
    return jnp.where(is_other, distance, jnp.inf)


def _mutual_neighbours(square: Array, num_neighbours: int) -> Array:
    next_one = lambda _, reach: jnp.min(jnp.where(square > reach[:, None], square, jnp.inf), axis=1)
    start = jnp.full(len(square), -jnp.inf, square.dtype)
    reach = jax.lax.fori_loop(0, num_neighbours, next_one, start)
    near = (square <= reach[:, None]) & jnp.isfinite(square)
    return near & near.T


def _components(joined: Array) -> Array:
    """[point]: the connected component, by the smallest number of its points."""
    points = jnp.arange(len(joined), dtype=jnp.int32)

    def spread(state):
        least, _ = state
        new = jnp.minimum(least, jnp.min(jnp.where(joined, least[None, :], len(joined)), axis=1))
        new = new[new]
        return new, jnp.any(new != least)

    return jax.lax.while_loop(lambda state: state[1], spread, (points, jnp.array(True)))[0]
