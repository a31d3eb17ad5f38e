"""One Gibbs sweep over the rows of a partition whose groups are integrated out.

A row is taken out of its group and put into group g of class c, or a new one, with probability

    p(c, g | rest)  ~  p(c | classes)  p(g | groups of c)  p(row | rows of g).                (1)

The three factors are `log_class`, `log_seating` of the model's partition and `score` of the
conjugate pairs, as in the particle filter.

Cost of a row: O(classes x groups in use x columns) for the scores, in blocks of `BLOCK` groups, and
O(classes x `NARROW`) for the weights, or O(classes x room) where a class has more groups than
`NARROW`. Where all classes are known only the row's own class counts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jaxtyping import Int

from inference.kernels.particle_filter.particles import Rules, block_scores, log_class
from inference.reading.crp_mixture import Parameters, PartitionRows

__all__ = ["FULL", "LOST", "GroupTable", "Seats", "empty", "in_order", "seated", "sweep"]

BLOCK = 16  # groups that are scored at once
NARROW = 64  # groups of a class that are weighed while no class has more
LOST = 1  # a sweep failed: no weight of a row is a positive number
FULL = 2  # a sweep failed: class c has no room for another group; the value is FULL + c


class GroupTable(NamedTuple):
    """All groups; a group without rows holds the prior."""

    count: Array  # [class, group]: rows in it
    hyper: dict[str, Any]  # posteriors of each site, [class, group, column, ...]
    cache: dict[str, Any]  # what scores are computed from


class Seats(NamedTuple):
    """The class and the group of each row."""

    cls: Int[Array, " row"]
    group: Int[Array, " row"]  # -1 for a row that has no group yet


def empty(rules: Rules, prior: Parameters, num_groups: int) -> GroupTable:
    """Returns a table without rows.

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        num_groups: Groups of each class that there is room for.
    """
    wide = lambda leaf: jnp.broadcast_to(
        leaf[:, None], (leaf.shape[0], num_groups, *leaf.shape[1:])
    )
    cache = rules.each(lambda family, hyper: family.cache(hyper), prior.priors)
    count = jnp.zeros((len(prior.class_weights), num_groups), jnp.int32)
    return GroupTable(count, *jax.tree.map(wide, (prior.priors, cache)))


def seated(
    rules: Rules, prior: Parameters, rows: PartitionRows, seats: Seats, num_groups: int
) -> GroupTable:
    """Returns the groups of a partition.

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        rows: The data.
        seats: The class and the group of each row.
        num_groups: Groups of each class that there is room for.
    """

    def add(table, row):
        cls, group, x = row
        return _put(rules, table, cls, group, x), None

    table, _ = lax.scan(add, empty(rules, prior, num_groups), (*seats, rows.values))
    return table


@partial(jax.jit, static_argnames=("rules", "is_joint"))
def sweep(
    rules: Rules,
    prior: Parameters,
    rows: PartitionRows,
    seats: Seats,
    table: GroupTable,
    rng_key: Array,
    *,
    is_joint: bool,
) -> tuple[Seats, GroupTable, Array]:
    """Draws the group of every row once, in random order, by (1).

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        rows: The data.
        seats: The class and the group of each row; a row without a group is given one.
        table: The groups.
        rng_key: For the order and the draws.
        is_joint: Whether a row of unknown class may change its class.

    Returns:
        The new classes and groups, the new table, and 0, `LOST`, or `FULL` + a full class.
    """
    order_key, draw_key = random.split(rng_key)
    order = random.permutation(order_key, len(rows.labels))
    uniform = random.uniform(draw_key, order.shape, prior.class_weights.dtype)

    def redraw(carry, row):
        seats, table, failed = carry
        i, uniform = row
        x = {site: value[i] for site, value in rows.values.items()}
        table = _without(rules, prior, table, seats.cls[i], seats.group[i], x)
        first = jnp.zeros_like(rows.labels[i]) if is_joint else rows.labels[i]
        cls, group, why = _redrawn(rules, prior, table, rows.labels[i], first, x, uniform, is_joint)
        seats = Seats(seats.cls.at[i].set(cls), seats.group.at[i].set(group))
        return (seats, _put(rules, table, cls, group, x), jnp.maximum(failed, why)), None

    (seats, table, failed), _ = lax.scan(
        redraw, (seats, table, jnp.zeros((), jnp.int32)), (order, uniform)
    )
    return seats, table, failed


def in_order(seats: Seats, table: GroupTable) -> tuple[Array, GroupTable]:
    """Returns groups in order of appearance within each class, [row], and the table in that order.

    Args:
        seats: The class and the group of each row.
        table: The groups.
    """
    never = len(seats.cls)
    first = jnp.full(table.count.shape, never).at[seats].min(jnp.arange(never))
    order = jnp.argsort(first, axis=1)
    classes = jnp.arange(len(order))[:, None]
    return jnp.argsort(order, axis=1)[seats], jax.tree.map(lambda leaf: leaf[classes, order], table)


def _redrawn(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    label: Array,
    first: Array,
    x: dict[str, Array],
    uniform: Array,
    is_joint: bool,
):
    """A class and a group drawn by (1), and 0, `LOST`, or `FULL` + a full class."""

    def among(width: int):
        log_weight, full = _log_weights(rules, prior, table, label, first, x, width, is_joint)
        place, is_lost = _drawn(log_weight.ravel(), uniform)
        why = jnp.where(is_lost, LOST, jnp.where(jnp.any(full), FULL + first + jnp.argmax(full), 0))
        return first + place // width, place % width, why.astype(jnp.int32)

    room = table.count.shape[1]
    if room <= NARROW:
        return among(room)
    return lax.cond(
        jnp.any(table.count[:, NARROW - 1 :] > 0), lambda: among(room), lambda: among(NARROW)
    )


def _log_weights(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    label: Array,
    first: Array,
    x: dict[str, Array],
    width: int,
    is_joint: bool,
) -> tuple[Array, Array]:
    """The logarithm of (1) up to a constant, [class, group], and which classes are full, [class].

    The classes are those from `first` on. A class is full if it has no room for a new group.
    """
    num_classes, room = table.count.shape
    count = lax.dynamic_slice_in_dim(table.count[:, :width], first, num_classes if is_joint else 1)
    size = count.astype(prior.class_weights.dtype)
    num_used = 2 + jnp.max(jnp.where(count > 0, jnp.arange(width), -1))  # with the next group
    scores = block_scores(rules, table.cache, (first, len(count)), num_used, x, BLOCK)[:, :width]
    log_weight = prior.seating.log_seating(size) + scores
    is_possible = (label < 0) | (first + jnp.arange(len(count)) == label)
    if is_joint:
        about_class = log_class(rules, prior.class_weights, jnp.sum(size, axis=1))
        log_weight = log_weight + jnp.where(is_possible, about_class, -jnp.inf)[:, None]
    has_room = prior.seating.max_groups is not None and prior.seating.max_groups <= room
    return log_weight, is_possible & jnp.all(count > 0, axis=1) & (not has_room)


def _drawn(log_weight: Array, uniform: Array) -> tuple[Array, Array]:
    """An index drawn in proportion to its weight, and whether no weight is positive.

    An index of weight 0 is never drawn, although rounded sums need not increase.
    """
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    total = jnp.where(weight > 0, jnp.cumsum(weight), 0)
    return jnp.argmax(total > uniform * jnp.max(total)).astype(jnp.int32), ~(jnp.max(total) > 0)


def _put(
    rules: Rules, table: GroupTable, cls: Array, group: Array, x: dict[str, Array]
) -> GroupTable:
    before = jax.tree.map(lambda leaf: leaf[cls, group], table.hyper)
    after = rules.each(lambda family, hyper, entry: family.add(hyper, entry), before, x)
    return _written(rules, table, cls, group, after, 1)


def _without(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    cls: Array,
    group: Array,
    x: dict[str, Array],
) -> GroupTable:
    """The table without a row, if the row has a group; an emptied group is the prior again."""
    is_seated, group = group >= 0, jnp.maximum(group, 0)
    before = jax.tree.map(lambda leaf: leaf[cls, group], table.hyper)
    after = rules.each(lambda family, hyper, entry: family.remove(hyper, entry), before, x)
    is_left = table.count[cls, group] > 1
    pick = lambda old, new, first: jnp.where(is_seated, jnp.where(is_left, new, first[cls]), old)
    after = jax.tree.map(pick, before, after, prior.priors)
    return _written(rules, table, cls, group, after, jnp.where(is_seated, -1, 0))


def _written(
    rules: Rules, table: GroupTable, cls: Array, group: Array, hyper: dict[str, Any], change: Any
) -> GroupTable:
    """The table with one group replaced.

    Without the barrier XLA computes the new values while it writes them, for which it copies the
    whole table.
    """
    cache = rules.each(lambda family, one: family.cache(one), hyper)
    new = lax.optimization_barrier((hyper, cache))
    # Indices of one type, which `dynamic_update_slice` wants: constants are int64 with x64.
    index = lambda value: [jnp.asarray(i, jnp.int32) for i in (cls, group, *(0,) * value.ndim)]
    write = lambda leaf, value: lax.dynamic_update_slice(leaf, value[None, None], index(value))
    count = table.count.at[cls, group].add(change)
    return GroupTable(count, *jax.tree.map(write, (table.hyper, table.cache), new))
