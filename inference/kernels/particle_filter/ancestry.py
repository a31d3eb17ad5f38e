"""The genealogy of the particles, from which their partitions are read.

Each row of data stores the parent and the choice of every particle; the partitions are read
backwards from the last row. So a row costs the same whatever went before. Where past rows change
their groups (`rejuvenate`) the partitions themselves are stored, and each row reorders them. A
choice is coded as group * classes + class, which does not depend on the room for groups.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Int

from inference.program.compiling import QUICKLY

__all__ = [
    "Genealogy",
    "drawn",
    "drawn_particles",
    "empty",
    "filters",
    "in_order",
    "joined",
    "partitions",
    "record",
]


class Genealogy(NamedTuple):
    """Parents and choices; tables that are not kept have no rows."""

    parent: Array  # [row, grid, particle]; without rows where `code` holds the partitions
    code: Array  # [row, grid, particle]
    link: Array  # [grid, class, particle]: particles that a joint particle was made of by `join`
    joined: Array  # rows before the filters of the classes were joined; -1 before that


def empty(
    num_rows: int, num_grid: int, num_classes: int, num_particles: int, *, joint: bool, whole: bool
) -> Genealogy:
    """Returns a genealogy without rows.

    Args:
        num_rows: Rows that there is room for.
        num_grid: Points of the grid.
        num_classes: Number of classes.
        num_particles: Particles at each point of the grid.
        joint: Whether one filter holds all classes from the start.
        whole: Whether the partitions themselves are stored.
    """
    table = lambda rows: jnp.zeros((rows, num_grid, num_particles), jnp.int32)
    particle = jnp.arange(num_particles, dtype=jnp.int32)
    link = jnp.broadcast_to(particle, (num_grid, num_classes, num_particles))
    joined = jnp.asarray(0 if joint else -1, jnp.int32)
    return Genealogy(table(0 if whole else num_rows), table(num_rows), link, joined)


def record(
    genealogy: Genealogy,
    row: Int[Array, ""],
    parent: Int[Array, "grid particle"],
    code: Int[Array, "grid particle"],
) -> Genealogy:
    """Returns the genealogy with one more row.

    Args:
        genealogy: The genealogy before.
        row: Number of the row.
        parent: Parent of each particle.
        code: Class and group of the row in each particle.
    """
    if not len(genealogy.code):
        return genealogy
    if len(genealogy.parent):
        # This update is made in place, a scatter is not.
        put = lambda table, entry: jax.lax.dynamic_update_index_in_dim(table, entry, row, 0)
        return genealogy._replace(
            parent=put(genealogy.parent, parent), code=put(genealogy.code, code)
        )
    num_classes = genealogy.link.shape[1]
    moved = jnp.take_along_axis(
        genealogy.code, jnp.broadcast_to(parent, genealogy.code.shape), axis=2
    )
    is_moved = (genealogy.joined >= 0) | (genealogy.code % num_classes == code[0, 0] % num_classes)
    return genealogy._replace(code=jnp.where(is_moved, moved, genealogy.code).at[row].set(code))


def joined(
    genealogy: Genealogy, link: Int[Array, "grid class particle"], row: Int[Array, ""]
) -> Genealogy:
    """Returns the genealogy of joint particles.

    Args:
        genealogy: The genealogy before.
        link: The particle of each class that a joint particle is made of.
        row: Number of the first row of the joint particles.
    """
    if len(genealogy.code) and not len(genealogy.parent):
        at = jnp.moveaxis(link, 1, 0)[genealogy.code[:, 0, 0] % link.shape[1]]
        genealogy = genealogy._replace(code=jnp.take_along_axis(genealogy.code, at, axis=2))
    return genealogy._replace(link=link, joined=jnp.asarray(row, jnp.int32))


@jax.jit
def partitions(genealogy: Genealogy, seen: Array) -> tuple[Array, Array, Array]:
    """Returns the class, the group and the ancestor of every row, each [row, grid, particle].

    The particles are those after the last row. Where the classes have filters of their own,
    particle p of a row is particle p of the filter of its class.

    Args:
        genealogy: The genealogy.
        seen: Number of rows so far; the entries of later rows mean nothing.
    """
    num_rows, num_grid, num_particles = genealogy.code.shape
    num_classes = genealogy.link.shape[1]
    if not len(genealogy.parent):
        itself = jnp.broadcast_to(jnp.arange(num_particles), genealogy.code.shape)
        return genealogy.code % num_classes, genealogy.code // num_classes, itself
    grid, particle = jnp.arange(num_grid)[:, None], jnp.arange(num_particles)
    own = jnp.broadcast_to(particle, genealogy.link.shape).astype(jnp.int32)

    def back(carry, row):
        joint, each = carry
        each = jnp.where(
            row == genealogy.joined - 1,
            jnp.take_along_axis(genealogy.link, joint[:, None].repeat(num_classes, 1), axis=2),
            each,
        )
        is_joint = (genealogy.joined >= 0) & (row >= genealogy.joined)
        parent, code = genealogy.parent[row], genealogy.code[row]
        # In filters of their own classes all codes of a row have its class.
        own_class = code[0, 0] % num_classes
        at = jnp.where(is_joint, joint, each[:, own_class])
        found = (code[grid, at] % num_classes, code[grid, at] // num_classes, at)
        up = parent[grid, at]
        moved = row < seen
        joint = jnp.where(moved & is_joint, up, joint)
        each = jnp.where(moved & ~is_joint, each.at[:, own_class].set(up), each)
        return (joint, each), found

    start = jnp.broadcast_to(particle, (num_grid, num_particles)).astype(jnp.int32)
    _, found = jax.lax.scan(back, (start, own), jnp.arange(num_rows, dtype=jnp.int32), reverse=True)
    return found


def filters(cls: np.ndarray, num_filters: int) -> np.ndarray:
    """Returns the filter of each row, [row]: that of its class where each class has its own.

    Args:
        cls: Classes, [row, grid, particle].
        num_filters: Number of filters.
    """
    return cls[:, 0, 0] if num_filters > 1 else np.zeros(len(cls), int)


def drawn(
    genealogy: Genealogy, seen: Array, point: np.ndarray, particle: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the class and the group of every row, each [draw, row].

    Args:
        genealogy: The genealogy.
        seen: Number of rows so far.
        point: Points of the grid, [draw].
        particle: Particles, [draw, filter].
    """
    cls, group, _ = (np.asarray(part)[: int(seen)] for part in partitions(genealogy, seen))
    at = np.arange(len(cls)), point[:, None], particle[:, filters(cls, particle.shape[1])]
    return cls[at], group[at] if len(genealogy.parent) else in_order(cls[at], group[at])


@partial(jax.jit, static_argnums=(2, 3), compiler_options=QUICKLY)
def drawn_particles(
    rng_key: Array, state: Any, num_draws: int, is_joint: bool
) -> tuple[Array, Array, Array]:
    """Returns points of the grid [draw], particles [draw, table] and class shares [draw, class].

    Args:
        rng_key: For the draws.
        state: The state of the filter.
        num_draws: Number of draws.
        is_joint: Whether one filter holds all classes.
    """
    keys = random.split(rng_key, 3)
    point = random.categorical(keys[0], state.log_points(), shape=(num_draws,))
    particle = random.categorical(keys[1], state.groups.log_weight[point], axis=-1)
    count = state.class_count
    if is_joint:
        slot = state.groups.slot[point, 0, particle[:, 0]]
        sizes = state.groups.count[point[:, None, None], 0, slot]
        count = jnp.sum(sizes, axis=-1).astype(count.dtype)
    weights = state.class_weights[point]
    shares = random.dirichlet(keys[2], weights + jnp.broadcast_to(count, weights.shape))
    return point, particle, shares


def in_order(cls: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns groups in order of appearance within each class, [draw, row].

    Rows that are redrawn leave gaps in the numbers, and groups out of order.

    Args:
        cls: Classes, [draw, row].
        group: Groups, [draw, row].
    """
    found = np.empty_like(group)
    for draw, (classes, groups) in enumerate(zip(cls, group, strict=True)):
        for each in np.unique(classes):
            rows = classes == each
            _, first, inverse = np.unique(groups[rows], return_index=True, return_inverse=True)
            found[draw, rows] = np.argsort(np.argsort(first))[inverse]
    return found
