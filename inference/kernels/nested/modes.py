"""Which live points hang together: separated modes get an account of their volume of their own.

Points that are among each other's nearest, in coordinates in which their mode is round, are joined;
what is connected stays together. A mode that falls apart is split, once and for good: its parts
share its volume as they share its points, and from then on new points of a mode are copies of its
own. So what separated modes hold cannot drift. That a mode is split which hangs together after all
does no harm: all walk above one limit, so that two sets of points in one region, each with its
share of the volume, are right as well. (Were each above the limit of its own mode, the lower set
would wander into the places of the higher, which must not come back: volume would grow.)

Cost of a look at n live points: n^2 (size + NEIGHBOURS).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["NEIGHBOURS", "Parts", "parts_of", "roots_of"]

NEIGHBOURS = 7
# neighbours where there is one latent number: among 7 of 200 such points there are two gaps by
# chance
ON_A_LINE = 15


class Parts(NamedTuple):
    """Modes after a look."""

    mode: Array  # [point]
    origin: Array  # [mode]: the mode that it is a part of
    num_modes: Array


def roots_of(z: Array, mode: Array, num_modes: int) -> Array:
    """Factors [mode, size, size] of the covariance of the points of each mode, drawn to the
    common one where a mode has few points.
    """
    size = z.shape[-1]
    member = (mode[None, :] == jnp.arange(num_modes)[:, None]).astype(z.dtype)
    count = jnp.maximum(member.sum(1), 1)[:, None]
    mean = member @ z / count
    away = z - mean[mode]
    products = (away[:, :, None] * away[:, None, :]).reshape(len(z), -1)
    sums = (member @ products).reshape(num_modes, size, size)
    pooled = sums.sum(0) / len(z)
    pooled = pooled + 1e-8 * jnp.diag(jnp.diagonal(pooled) + jnp.finfo(z.dtype).tiny)
    few = 1.0 * size
    return jnp.linalg.cholesky((sums + few * pooled[None]) / (count + few)[..., None])


def parts_of(z: Array, mode: Array, roots: Array, num_modes: Array, least: int) -> Parts:
    """Each mode into its connected parts of `least` points or more; points of smaller ones go
    where the nearest other point is.
    """
    num_points, most = len(z), len(roots)
    points = jnp.arange(num_points, dtype=jnp.int32)
    apart = _distances(z, mode, roots)
    # named by the least of its points
    component = _connected(_joined(apart, NEIGHBOURS if z.shape[1] > 1 else ON_A_LINE))
    size = jnp.zeros(num_points, jnp.int32).at[component].add(1)
    is_large = size[component] >= least
    nearest = jnp.argmin(jnp.where(is_large[None, :], apart, jnp.inf), axis=1)
    component = jnp.where(is_large, component, component[nearest])
    size = jnp.zeros(num_points, jnp.int32).at[component].add(1)
    is_root = (component == points) & is_large
    smallest = jnp.iinfo(jnp.int32).min
    order = jnp.where(is_root, size * num_points - points, smallest)  # ties go to the first
    best = jnp.full(most, smallest).at[mode].max(order)
    is_new = is_root & (order < best[mode])
    number = num_modes - 1 + jnp.cumsum(is_new, dtype=jnp.int32)
    is_new = is_new & (number < most)
    new = jnp.where(is_new, number, mode).astype(mode.dtype)
    origin = (
        jnp.arange(most, dtype=jnp.int32).at[jnp.where(is_new, new, most)].set(mode, mode="drop")
    )
    has_large = best[mode] > smallest
    return Parts(
        jnp.where(has_large, new[component], mode),
        origin,
        num_modes + jnp.sum(is_new, dtype=num_modes.dtype),
    )


def _distances(z: Array, mode: Array, roots: Array) -> Array:
    """[point, point]: squares, where the mode of both is round; infinite between modes, and of a
    point to itself.
    """
    eye = jnp.broadcast_to(jnp.eye(z.shape[-1], dtype=z.dtype), roots.shape)
    inverse = jax.scipy.linalg.solve_triangular(roots, eye, lower=True)
    y = jnp.einsum("nij,nj->ni", inverse[mode], z)
    y = y - y.mean(0, keepdims=True)
    square = jnp.sum(y**2, -1)
    apart = square[:, None] + square[None, :] - 2 * y @ y.T
    is_other = (mode[:, None] == mode[None, :]) & ~jnp.eye(len(z), dtype=bool)
    return jnp.where(is_other, apart, jnp.inf)


def _joined(apart: Array, num_neighbours: int) -> Array:
    """[point, point]: whether each is among the nearest of the other."""
    next_one = lambda _, reach: jnp.min(jnp.where(apart > reach[:, None], apart, jnp.inf), axis=1)
    reach = jax.lax.fori_loop(
        0, num_neighbours, next_one, jnp.full(len(apart), -jnp.inf, apart.dtype)
    )
    near = (apart <= reach[:, None]) & jnp.isfinite(apart)
    return near & near.T


def _connected(joined: Array) -> Array:
    """[point]: the least point that it is connected to."""
    points = jnp.arange(len(joined), dtype=jnp.int32)

    def spread(state):
        least, _ = state
        new = jnp.minimum(least, jnp.min(jnp.where(joined, least[None, :], len(joined)), axis=1))
        new = new[new]
        return new, jnp.any(new != least)

    return jax.lax.while_loop(lambda state: state[1], spread, (points, jnp.array(True)))[0]
