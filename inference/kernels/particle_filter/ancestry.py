"""The partitions of the particles, row by row.

Kept are the parent and the choice of every particle at every row, from which the partitions are
read backwards: a row costs the same whatever went before. Where past rows change their groups
(`rejuvenate`) the partitions themselves are kept, and each row reorders them. A choice is coded as
group * classes + class, so that it does not depend on how much room there is for groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = [
    "History",
    "drawn",
    "empty",
    "filters",
    "in_order",
    "joined",
    "partitions",
    "record",
    "with_room",
]


class History(NamedTuple):
    """One entry a row; of no rows where it is not kept."""

    parent: Array  # [row, grid, particle]; of no rows where `code` holds the partitions as they are
    code: Array  # [row, grid, particle]
    # [grid, class, particle]: the particle of each class's own filter that a joint particle began
    # with
    link: Array
    joined: Array  # rows before the classes were joined; -1 where they are apart


def empty(
    num_rows: int, num_grid: int, num_classes: int, num_particles: int, *, joint: bool, whole: bool
) -> History:
    """Room for `num_rows` rows; `whole` keeps the partitions themselves."""
    table = lambda rows: jnp.zeros((rows, num_grid, num_particles), jnp.int32)
    link = jnp.broadcast_to(
        jnp.arange(num_particles, dtype=jnp.int32), (num_grid, num_classes, num_particles)
    )
    return History(
        table(0 if whole else num_rows),
        table(num_rows),
        link,
        jnp.asarray(0 if joint else -1, jnp.int32),
    )


def record(history: History, row: Array, parent: Array, code: Array) -> History:
    """What the particles [grid, particle] did with a row."""
    if not len(history.code):
        return history
    if len(history.parent):
        # in place, which a scatter is not
        put = lambda table, entry: jax.lax.dynamic_update_index_in_dim(table, entry, row, 0)
        return history._replace(parent=put(history.parent, parent), code=put(history.code, code))
    num_classes = history.link.shape[1]
    moved = jnp.take_along_axis(history.code, jnp.broadcast_to(parent, history.code.shape), axis=2)
    is_moved = (history.joined >= 0) | (history.code % num_classes == code[0, 0] % num_classes)
    return history._replace(code=jnp.where(is_moved, moved, history.code).at[row].set(code))


def joined(history: History, link: Array, row: Array) -> History:
    """From `row` on, joint particles that begin with the particles `link` [grid, class,
    particle] of the classes' own filters.
    """
    if len(history.code) and not len(history.parent):
        at = jnp.moveaxis(link, 1, 0)[history.code[:, 0, 0] % link.shape[1]]
        history = history._replace(code=jnp.take_along_axis(history.code, at, axis=2))
    return history._replace(link=link, joined=jnp.asarray(row, jnp.int32))


def with_room(history: History, num_rows: int) -> History:
    """The same with room for `num_rows` rows."""
    pad = lambda table: (
        jnp.pad(table, ((0, num_rows - len(table)), (0, 0), (0, 0))) if len(table) else table
    )
    return history._replace(parent=pad(history.parent), code=pad(history.code))


@jax.jit
def partitions(history: History, seen: Array) -> tuple[Array, Array, Array]:
    """(class, group, ancestor) of every row, [row, grid, particle], of the particles at the end;
    rows from `seen` on mean nothing.

    Where the classes have filters of their own, particle p of a row is particle p of the filter of
    its class.
    """
    num_rows, num_grid, num_particles = history.code.shape
    num_classes = history.link.shape[1]
    if not len(history.parent):
        itself = jnp.broadcast_to(jnp.arange(num_particles), history.code.shape)
        return history.code % num_classes, history.code // num_classes, itself
    grid, particle = jnp.arange(num_grid)[:, None], jnp.arange(num_particles)
    own = jnp.broadcast_to(particle, history.link.shape).astype(jnp.int32)

    def back(carry, row):
        joint, each = carry
        each = jnp.where(
            row == history.joined - 1,
            jnp.take_along_axis(history.link, joint[:, None].repeat(num_classes, 1), axis=2),
            each,
        )
        is_joint = (history.joined >= 0) & (row >= history.joined)
        parent, code = history.parent[row], history.code[row]
        # Apart, the whole row belongs to one class: that of any of its codes.
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
    """[row]: the filter that tells of a row, that of its class where each class has its own; of
    classes [row, grid, particle].
    """
    return cls[:, 0, 0] if num_filters > 1 else np.zeros(len(cls), int)


def drawn(
    history: History, seen: Array, point: np.ndarray, particle: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(class, group) of every row seen, [draw, row], of points of the grid [draw] and particles
    [draw, filter].
    """
    cls, group, _ = (np.asarray(part)[: int(seen)] for part in partitions(history, seen))
    at = np.arange(len(cls)), point[:, None], particle[:, filters(cls, particle.shape[1])]
    return cls[at], group[at] if len(history.parent) else in_order(cls[at], group[at])


def in_order(cls: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Labels of groups, [draw, row], as they appear within each class: redrawn rows leave gaps
    and other orders.
    """
    found = np.empty_like(group)
    for draw, (classes, groups) in enumerate(zip(cls, group, strict=True)):
        for each in np.unique(classes):
            rows = classes == each
            _, first, inverse = np.unique(groups[rows], return_index=True, return_inverse=True)
            found[draw, rows] = np.argsort(np.argsort(first))[inverse]
    return found
