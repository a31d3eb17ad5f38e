"""One partition of the rows whose groups are integrated out, redrawn row by row.

A row is taken out of its group and put back into group g of class c, or a new one, with probability

    p(c, g | rest)  ~  p(c | classes)  p(g | groups of c)  p(row | rows of g),                                               (1)

its three factors are `log_class`, `log_seating` of the model's partition and the families' `score`,
as in the particle filter.

Cost of a row: O(classes x groups in use x columns) for the scores, which are computed in blocks of
`BLOCK` groups as far as groups are in use, and O(classes x `NARROW`) for the rest, or O(classes x
room) where a class has more groups than that. Where all classes are known only the row's own is
looked at.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from inference.kernels.particle_filter.candidates import log_class
from inference.kernels.particle_filter.groups import Rules, block_scores
from inference.reading.crp_mixture import Parameters, Rows

__all__ = ["FULL", "LOST", "Seats", "Table", "empty", "in_order", "seated", "sweep"]

BLOCK, NARROW = 16, 64
# why a sweep failed: a weight was no number; no room for another group, + the class
LOST, FULL = 1, 2


class Table(NamedTuple):
    """The groups; those without rows hold the prior."""

    count: Array  # [class, group]: rows in it
    hyper: dict[str, Any]  # of each site: the posteriors, [class, group, column, ...]
    cache: dict[str, Any]  # what scores are computed from


class Seats(NamedTuple):
    """Where each row is."""

    cls: Array  # [row]
    group: Array  # [row]; -1 where it is nowhere yet


def empty(rules: Rules, prior: Parameters, num_groups: int) -> Table:
    """No rows yet, and room for `num_groups` groups in each class."""
    wide = lambda leaf: jnp.broadcast_to(
        leaf[:, None], (leaf.shape[0], num_groups, *leaf.shape[1:])
    )
    cache = rules.each(lambda family, hyper: family.cache(hyper), prior.priors)
    count = jnp.zeros((len(prior.class_weights), num_groups), jnp.int32)
    return Table(count, *jax.tree.map(wide, (prior.priors, cache)))


def seated(rules: Rules, prior: Parameters, rows: Rows, seats: Seats, num_groups: int) -> Table:
    """The groups of a partition."""

    def add(table, row):
        cls, group, x = row
        return _put(rules, table, cls, group, x), None

    table, _ = lax.scan(add, empty(rules, prior, num_groups), (*seats, rows.values))
    return table


@partial(jax.jit, static_argnames=("rules", "is_joint"))
def sweep(
    rules: Rules,
    prior: Parameters,
    rows: Rows,
    seats: Seats,
    table: Table,
    rng_key: Array,
    *,
    is_joint: bool,
) -> tuple[Seats, Table, Array]:
    """Every row once, in random order, by (1); rows that are nowhere are put somewhere.

    Last comes 0, `LOST`, or `FULL` + a full class.

    :param is_joint: whether a row of unknown class is put into any class; else every row stays in
    its own.
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


def in_order(seats: Seats, table: Table) -> tuple[Array, Table]:
    """The group of each row [row], numbered by appearance within its class, and the table with
    its groups in that order.
    """
    never = len(seats.cls)
    first = jnp.full(table.count.shape, never).at[seats].min(jnp.arange(never))
    order = jnp.argsort(first, axis=1)
    classes = jnp.arange(len(order))[:, None]
    return jnp.argsort(order, axis=1)[seats], jax.tree.map(lambda leaf: leaf[classes, order], table)


def _redrawn(
    rules: Rules,
    prior: Parameters,
    table: Table,
    label: Array,
    first: Array,
    x: dict[str, Array],
    uniform: Array,
    is_joint: bool,
):
    """Class and group of a row by (1), and 0, `LOST`, or `FULL` + a full class; the room that no
    class uses is not looked at.
    """

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
    table: Table,
    label: Array,
    first: Array,
    x: dict[str, Array],
    width: int,
    is_joint: bool,
) -> tuple[Array, Array]:
    """The logarithm of (1) but for a constant, [class, group] from class `first` on; and [class]
    whether the room cut it short.
    """
    num_classes, room = table.count.shape
    count = lax.dynamic_slice_in_dim(table.count[:, :width], first, num_classes if is_joint else 1)
    size = count.astype(prior.class_weights.dtype)
    num_used = 2 + jnp.max(jnp.where(count > 0, jnp.arange(width), -1))  # and the next group
    scores = block_scores(rules, table.cache, (first, len(count)), num_used, x, BLOCK)[:, :width]
    log_weight = prior.seating.log_seating(size) + scores
    is_possible = (label < 0) | (first + jnp.arange(len(count)) == label)
    if is_joint:
        about_class = log_class(rules, prior.class_weights, jnp.sum(size, axis=1))
        log_weight = log_weight + jnp.where(is_possible, about_class, -jnp.inf)[:, None]
    has_room = prior.seating.max_groups is not None and prior.seating.max_groups <= room
    return log_weight, is_possible & jnp.all(count > 0, axis=1) & (not has_room)


def _drawn(log_weight: Array, uniform: Array) -> tuple[Array, Array]:
    """An index by its weight, never one of weight 0 (rounded sums need not rise); and whether
    there was none to draw.
    """
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    total = jnp.where(weight > 0, jnp.cumsum(weight), 0)
    return jnp.argmax(total > uniform * jnp.max(total)).astype(jnp.int32), ~(jnp.max(total) > 0)


def _put(rules: Rules, table: Table, cls: Array, group: Array, x: dict[str, Array]) -> Table:
    before = _at(table.hyper, cls, group)
    return _written(
        rules,
        table,
        cls,
        group,
        rules.each(lambda family, hyper, entry: family.add(hyper, entry), before, x),
        1,
    )


def _without(
    rules: Rules, prior: Parameters, table: Table, cls: Array, group: Array, x: dict[str, Array]
) -> Table:
    """The table without a row, where it is seated; a group that it was alone in is as the prior,
    not as rounding leaves it.
    """
    is_seated, group = group >= 0, jnp.maximum(group, 0)
    before = _at(table.hyper, cls, group)
    after = rules.each(lambda family, hyper, entry: family.remove(hyper, entry), before, x)
    is_left = table.count[cls, group] > 1
    pick = lambda old, new, first: jnp.where(is_seated, jnp.where(is_left, new, first[cls]), old)
    after = jax.tree.map(pick, before, after, prior.priors)
    return _written(rules, table, cls, group, after, jnp.where(is_seated, -1, 0))


def _at(tree: Any, cls: Array, group: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[cls, group], tree)


def _written(
    rules: Rules, table: Table, cls: Array, group: Array, hyper: dict[str, Any], change: Any
) -> Table:
    """One group replaced.

    The barrier keeps XLA from computing the new values while it writes them, for which it copies
    the table.
    """
    cache = rules.each(lambda family, one: family.cache(one), hyper)
    new = lax.optimization_barrier((hyper, cache))
    write = lambda leaf, value: lax.dynamic_update_slice(
        leaf, value[None, None], (cls, group, *(0,) * value.ndim)
    )
    count = table.count.at[cls, group].add(change)
    return Table(count, *jax.tree.map(write, (table.hyper, table.cache), new))
