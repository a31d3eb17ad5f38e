"""Particles over partitions that share their groups.

A particle is a partition of the rows seen so far. Most particles agree on most groups, so every
*distinct* group is one row of a table (its posterior, and what makes scoring cheap), and a particle
is a row of indices into it. Children that put a row of data into the same group share the new one;
what no particle refers to is free. Row c of the table is the empty group of class c: its posterior
is the prior, and an index to it is a group that has not been opened.

There may be several tables side by side, [table, ...], one for each class where classes cannot
influence each other.

Cost of placing a row of data: O(table rows in use x columns) to score it, in blocks of `BLOCK`,
O(particles x classes x groups) to weigh it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from inference.maths.resampling import Chosen
from inference.reading.conjugate.table import ConjugatePair

__all__ = [
    "Groups",
    "Rules",
    "all_scores",
    "block_scores",
    "place",
    "scores",
    "start",
    "take",
    "wider",
]


BLOCK = 64  # rows of a table that are scored at once


class Rules(NamedTuple):
    """What does not change along a run; static where it is compiled."""

    families: tuple[tuple[str, ConjugatePair], ...]  # (site, family)
    # "dirichlet" or "fixed" probabilities of the classes; None where classes are plain data
    shares: str | None
    scheme: str  # of resampling

    def each(self, function: Callable, *tables: dict[str, Any]) -> dict[str, Any]:
        """`function(family, *entries)` of each site."""
        return {
            site: function(family, *(table[site] for table in tables))
            for site, family in self.families
        }


class Groups(NamedTuple):
    """Particles and their groups."""

    slot: Array  # [table, particle, class, group]: rows of the table
    count: Array  # [table, row]: rows of data in a group
    hyper: dict[str, Any]  # of each site: the posteriors, [table, row, column, ...]
    cache: dict[str, Any]  # what scores are computed from
    log_weight: Array  # [table, particle], normalised; -inf where a particle is not in use
    # [table]: how many rows of the table there is a look at, to see all that are referred to
    used: Array
    # [table]: how many groups of a class there is a look at, to see all that are open
    widest: Array


def start(
    rules: Rules,
    priors: dict[str, Any],
    *,
    num_tables: int,
    num_particles: int,
    num_rows: int,
    num_groups: int,
) -> Groups:
    """Empty partitions; `priors` are hyper-parameters [class, column, ...], dealt out to the
    tables.
    """
    num_classes = jax.tree.leaves(priors)[0].shape[0] // num_tables

    def table(leaf: Array) -> Array:
        first = leaf.reshape(num_tables, num_classes, *leaf.shape[1:])
        rest = jnp.broadcast_to(first[:, :1], (num_tables, num_rows - num_classes, *leaf.shape[1:]))
        return jnp.concatenate([first, rest], axis=1)

    hyper = jax.tree.map(table, priors)
    dtype = jax.tree.leaves(hyper)[0].dtype
    empty = jnp.arange(num_classes, dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(empty, (num_tables, num_particles, num_classes, num_groups))
    # One particle that knows nothing is as good as many; schemes that never make candidates into
    # particles need them all.
    alone = jnp.where(jnp.arange(num_particles) == 0, 0, -jnp.inf).astype(dtype)
    even = jnp.full(num_particles, -jnp.log(num_particles), dtype)
    weight = jnp.broadcast_to(
        alone if rules.scheme == "optimal" else even, (num_tables, num_particles)
    )
    count = jnp.zeros((num_tables, num_rows), jnp.int32)
    used = jnp.full(num_tables, num_classes, jnp.int32)
    return Groups(
        slot,
        count,
        hyper,
        rules.each(lambda family, h: family.cache(h), hyper),
        weight,
        used,
        jnp.zeros_like(used),
    )


def scores(rules: Rules, groups: Groups, table: Array, x: dict[str, Array]) -> Array:
    """Log predictive density of a row of data in every group of a table, [row of the table]; 0
    beyond those that are in use.
    """
    return block_scores(rules, groups.cache, (table, 1), groups.used[table], x, BLOCK)[0]


def all_scores(rules: Rules, groups: Groups, x: dict[str, Array]) -> Array:
    """The same of every table, [table, row of the table]."""
    return block_scores(
        rules,
        groups.cache,
        (jnp.zeros((), jnp.int32), len(groups.slot)),
        jnp.max(groups.used),
        x,
        BLOCK,
    )


def block_scores(
    rules: Rules,
    cache: dict[str, Any],
    tables: tuple[Array, int],
    num_used: Array,
    x: dict[str, Array],
    block: int,
) -> Array:
    """Log predictive density of a row of data in the groups of `tables` (the first, and how many),
    [table, row of the table].

    Block by block as far as groups are in use: 0 in the blocks after the first `num_used` rows.
    """
    first, num_tables = tables
    room, dtype = jax.tree.leaves(cache)[0].shape[1], jnp.result_type(*jax.tree.leaves(cache))
    block = min(block, room)

    def score(number: Array, found: Array) -> Array:
        start = jnp.minimum(number * block, room - block)
        cut = lambda leaf: lax.dynamic_slice_in_dim(
            lax.dynamic_slice_in_dim(leaf, first, num_tables), start, block, axis=1
        )
        of_site = rules.each(
            lambda family, mine, entry: family.score(mine, entry), jax.tree.map(cut, cache), x
        )
        return lax.dynamic_update_slice_in_dim(
            found, sum(of_site.values(), start=jnp.zeros((), dtype)), start, axis=1
        )

    num_blocks = jnp.minimum(-(-num_used // block), -(-room // block))
    return lax.fori_loop(0, num_blocks, score, jnp.zeros((num_tables, room), dtype))


def take(rules: Rules, groups: Groups, table: Array, chosen: Chosen, x: dict[str, Array]) -> Groups:
    """The particles after a row of data, which they put where they have chosen."""
    groups = groups._replace(log_weight=groups.log_weight.at[table].set(chosen.log_weight))
    return place(
        rules, groups, table, chosen, x, lambda family, hyper, entry: family.add(hyper, entry), 1
    )


def place(
    rules: Rules,
    groups: Groups,
    table: Array,
    chosen: Chosen,
    x: dict[str, Array],
    update: Callable,
    change: int,
) -> Groups:
    """Particles descend from `chosen.parent`; in each, the group `chosen.choice` gains a row of
    data (`change` 1) or loses it (-1).
    """
    num_particles, num_classes, num_groups = groups.slot.shape[1:]
    num_rows = groups.count.shape[1]
    slot = groups.slot[table, chosen.parent].reshape(num_particles, -1)
    particle = jnp.arange(num_particles)
    live = chosen.log_weight > -jnp.inf
    old = slot[particle, chosen.choice]
    left = groups.count[table, old] + change

    # One new row for all particles that change the same old one; the first of them makes it, where
    # no particle refers to any more.
    first = (
        jnp.full(num_rows, num_particles)
        .at[jnp.where(live, old, num_rows)]
        .min(particle, mode="drop")[old]
    )
    makes = live & (left > 0) & (first == particle)
    rank = (jnp.cumsum(makes) - 1)[jnp.minimum(first, num_particles - 1)]
    is_used = (
        (jnp.arange(num_rows) < num_classes)
        .at[jnp.where(live[:, None], slot, num_rows).ravel()]
        .set(True, mode="drop")
    )
    free = jnp.searchsorted(jnp.cumsum(~is_used), jnp.arange(1, num_particles + 1)).astype(
        slot.dtype
    )
    source = jnp.zeros_like(old).at[jnp.where(makes, rank, num_particles)].set(old, mode="drop")
    num_new = jnp.sum(makes)
    last_used = jnp.max(jnp.where(is_used, jnp.arange(1, num_rows + 1, dtype=slot.dtype), 0))
    last_new = jnp.where(num_new > 0, free[num_new - 1] + 1, 0)

    # an emptied group is the prior again
    new = jnp.where(left > 0, free[rank], (chosen.choice // num_groups).astype(slot.dtype))
    slot = (
        slot.at[particle, chosen.choice]
        .set(jnp.where(live, new, old))
        .reshape(groups.slot.shape[1:])
    )
    hyper, cache, count = _changed_rows(
        rules, groups, table, (num_new, source, free), x, update, change
    )
    is_open = live[:, None, None] & (slot >= num_classes)
    width = jnp.max(jnp.where(is_open, 1 + lax.broadcasted_iota(jnp.int32, slot.shape, 2), 0))
    return Groups(
        groups.slot.at[table].set(slot),
        hyper=hyper,
        cache=cache,
        count=count,
        log_weight=groups.log_weight,
        used=groups.used.at[table].set(jnp.maximum(last_used, last_new).astype(groups.used.dtype)),
        widest=groups.widest.at[table].set(width.astype(groups.widest.dtype)),
    )


def _changed_rows(
    rules: Rules,
    groups: Groups,
    table: Array,
    where: tuple,
    x: dict[str, Array],
    update: Callable,
    change: int,
):
    """Table with `num_new` rows `free` made of the rows `source`, one after the other: most
    steps make few, and writes are in place.
    """
    num_new, source, free = where

    def put(leaf: Array, i: Array, value: Array) -> Array:
        start = (table, free[i], *(0,) * (leaf.ndim - 2))
        return lax.dynamic_update_slice(
            leaf, value[None, None].astype(leaf.dtype), [jnp.asarray(at, jnp.int32) for at in start]
        )

    def make(i, leaves):
        hyper, cache, count = leaves
        # The barrier keeps XLA from reading the old row twice, the second time after it was
        # overwritten: it would copy the table.
        before = lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[table, source[i]], hyper))
        after = rules.each(update, before, x)
        write = lambda leaf, value: put(leaf, i, value)
        scored = rules.each(lambda family, mine: family.cache(mine), after)
        return (
            jax.tree.map(write, hyper, after),
            jax.tree.map(write, cache, scored),
            put(count, i, count[table, source[i]] + change),
        )

    return lax.fori_loop(0, num_new, make, (groups.hyper, groups.cache, groups.count))


def wider(groups: Groups, num_rows: int, num_groups: int) -> Groups:
    """The same with more room; new slots are not opened, new rows are free."""
    more_rows, more_groups = num_rows - groups.count.shape[1], num_groups - groups.slot.shape[-1]
    empty = jnp.broadcast_to(
        jnp.arange(groups.slot.shape[2], dtype=groups.slot.dtype)[:, None],
        (*groups.slot.shape[:3], more_groups),
    )
    pad = lambda leaf: jnp.concatenate(
        [leaf, jnp.broadcast_to(leaf[:, :1], (leaf.shape[0], more_rows, *leaf.shape[2:]))], axis=1
    )
    return groups._replace(
        slot=jnp.concatenate([groups.slot, empty], axis=-1),
        count=jnp.pad(groups.count, ((0, 0), (0, more_rows))),
        hyper=jax.tree.map(pad, groups.hyper),
        cache=jax.tree.map(pad, groups.cache),
    )
