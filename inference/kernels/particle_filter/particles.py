"""Particles over partitions that share their groups, one row through them, and their genealogy.

A particle is a partition of the rows seen so far. Most particles agree on most groups, so every
*distinct* group is one row of a table: its posterior, and what scores are computed from. A particle
is an array of indices into the table. Children that put a row of data into the same group share the
new group; a table row that no particle refers to is free. Row c of the table is the empty group of
class c: its posterior is the prior, and an index to it is a group that has not been opened.

There may be several tables side by side, [table, ...]: one for each class, where the classes are
independent.

Each row of data stores the parent and the choice of every particle; the partitions are read
backwards from the last row. So a row costs the same whatever went before. Where past rows change
their groups (`rejuvenate`) the partitions themselves are stored, and each row reorders them. A
choice is coded as group * classes + class, which does not depend on the room for groups.

Cost of a row of data: O(table rows in use x columns) for the scores, in blocks of `BLOCK`, and
O(particles x classes x groups) for the weights of the candidates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jaxtyping import Float, Int

from inference.distributions.partitions import ExchangeablePartition
from inference.maths.resampling import (
    SCHEMES,
    Chosen,
    drawn_choices,
    places_of,
    systematic_parents,
)
from inference.program.compiling import as_numpy
from inference.reading.conjugate.pairs import ConjugatePair

__all__ = [
    "Genealogy",
    "Groups",
    "Rules",
    "block_scores",
    "candidates",
    "choose",
    "drawn_particles",
    "drawn_partitions",
    "empty_genealogy",
    "filter_row",
    "filters",
    "in_order",
    "join",
    "join_each",
    "joined_genealogy",
    "log_class",
    "log_places",
    "partitions",
    "place",
    "record",
    "redraw",
    "start",
    "table_of",
    "take",
    "wider",
]

BLOCK = 64  # rows of a table that are scored at once

type Prior = tuple[ExchangeablePartition, Array, Array]  # what `log_places` takes


class Rules(NamedTuple):
    """The settings of a run, static where it is compiled."""

    families: tuple[tuple[str, ConjugatePair], ...]  # (site, conjugate pair)
    shares: str | None  # "dirichlet" or "fixed" class probabilities; None: classes are data
    scheme: str  # of resampling

    def each(self, function: Callable, *tables: dict[str, Any]) -> dict[str, Any]:
        """Returns `function(family, *entries)` for each site.

        Args:
            function: A function of a conjugate pair, and of the site's entry in each table.
            tables: Dictionaries with an entry for each site.
        """
        return {
            site: function(family, *(table[site] for table in tables))
            for site, family in self.families
        }


class Groups(NamedTuple):
    """Particles and their groups."""

    slot: Array  # [table, particle, class, group]: rows of the table
    count: Array  # [table, row]: rows of data in a group
    hyper: dict[str, Any]  # posteriors of each site, [table, row, column, ...]
    cache: dict[str, Any]  # what scores are computed from
    log_weight: Array  # [table, particle], normalised; -inf where a particle is not in use
    used: Array  # [table]: no particle refers to rows of the table from this one on
    widest: Array  # [table]: no group of a class is open from this one on


def start(
    rules: Rules,
    priors: dict[str, Any],
    *,
    num_tables: int,
    num_particles: int,
    num_rows: int,
    num_groups: int,
) -> Groups:
    """Returns particles without rows of data.

    Args:
        rules: The settings of the run.
        priors: Hyper-parameters of each site, [class, column, ...].
        num_tables: Tables, over which the classes are distributed.
        num_particles: Particles of each table.
        num_rows: Rows of each table.
        num_groups: Groups of each class that a particle has room for.
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
    # Empty particles are all alike, and "optimal" resampling makes as many as it needs from the
    # candidates of one. Other schemes keep the number of particles.
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


def block_scores(
    rules: Rules,
    cache: dict[str, Any],
    tables: tuple[Array, int],
    num_used: Array,
    x: dict[str, Array],
    block: int,
) -> Array:
    """Returns the log predictive density of a row of data in each group, [table, row of the table].

    It is 0 in the blocks after the first `num_used` rows, which are not computed.

    Args:
        rules: The settings of the run.
        cache: What scores are computed from, [table, row, ...].
        tables: The first table, and the number of tables.
        num_used: Rows of the tables that are in use.
        x: The row of data.
        block: Rows of a table that are scored at once.
    """
    first, num_tables = tables
    room, dtype = jax.tree.leaves(cache)[0].shape[1], jnp.result_type(*jax.tree.leaves(cache))
    block = min(block, room)

    def score(
        number: Int[Array, ""], found: Float[Array, "table row"]
    ) -> Float[Array, "table row"]:
        begin = jnp.minimum(number * block, room - block)
        cut = lambda leaf: lax.dynamic_slice_in_dim(
            lax.dynamic_slice_in_dim(leaf, first, num_tables), begin, block, axis=1
        )
        of_site = rules.each(
            lambda family, mine, entry: family.score(mine, entry), jax.tree.map(cut, cache), x
        )
        return lax.dynamic_update_slice_in_dim(
            found, sum(of_site.values(), start=jnp.zeros((), dtype)), begin, axis=1
        )

    num_blocks = jnp.minimum(-(-num_used // block), -(-room // block))
    return lax.fori_loop(0, num_blocks, score, jnp.zeros((num_tables, room), dtype))


def take(rules: Rules, groups: Groups, table: Array, chosen: Chosen, x: dict[str, Array]) -> Groups:
    """Returns the particles after a row of data, which each puts into the group it has chosen."""
    groups = groups._replace(log_weight=groups.log_weight.at[table].set(chosen.log_weight))
    return place(rules, groups, table, chosen, x, 1)


def place(
    rules: Rules,
    groups: Groups,
    table: Array,
    chosen: Chosen,
    x: dict[str, Array],
    change: int,
) -> Groups:
    """Returns the particles after one row of data joins or leaves a group in each of them.

    Args:
        rules: The settings of the run.
        groups: The particles before.
        table: The table of the row of data.
        chosen: The parent of each particle, and the group that gains or loses the row.
        x: The row of data.
        change: 1 where the group gains the row, -1 where it loses it.
    """
    num_particles, num_classes, num_groups = groups.slot.shape[1:]
    num_rows = groups.count.shape[1]
    slot = groups.slot[table, chosen.parent].reshape(num_particles, -1)
    particle = jnp.arange(num_particles)
    live = chosen.log_weight > -jnp.inf
    old = slot[particle, chosen.choice]
    left = groups.count[table, old] + change

    # All particles that change the same old table row share one new row. The first of them makes
    # it, in a row that no particle refers to.
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
    free = places_of(~is_used, num_particles).astype(slot.dtype)
    source = jnp.zeros_like(old).at[jnp.where(makes, rank, num_particles)].set(old, mode="drop")
    num_new = jnp.sum(makes)
    last_used = jnp.max(jnp.where(is_used, jnp.arange(1, num_rows + 1, dtype=slot.dtype), 0))
    last_new = jnp.where(num_new > 0, free[num_new - 1] + 1, 0)

    # An emptied group is the prior again.
    new = jnp.where(left > 0, free[rank], (chosen.choice // num_groups).astype(slot.dtype))
    slot = (
        slot.at[particle, chosen.choice]
        .set(jnp.where(live, new, old))
        .reshape(groups.slot.shape[1:])
    )
    hyper, cache, count = _changed_rows(rules, groups, table, (num_new, source, free), x, change)
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
    change: int,
):
    """The table after each row of `source`, changed, was written to its row of `free`.

    There are `num_new` such rows. They are written in place, one after the other, because most
    steps make few.
    """
    num_new, source, free = where

    def put(leaf: Array, i: Array, value: Array) -> Array:
        start = (table, free[i], *(0,) * (leaf.ndim - 2))
        return lax.dynamic_update_slice(
            leaf, value[None, None].astype(leaf.dtype), [jnp.asarray(at, jnp.int32) for at in start]
        )

    def make(i, leaves):
        hyper, cache, count = leaves
        # Without the barrier XLA reads the old row again after the write, for which it copies the
        # whole table.
        before = lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[table, source[i]], hyper))
        after = rules.each(lambda family, mine, entry: family.add(mine, entry, change), before, x)
        write = lambda leaf, value: put(leaf, i, value)
        scored = rules.each(lambda family, mine: family.cache(mine), after)
        return (
            jax.tree.map(write, hyper, after),
            jax.tree.map(write, cache, scored),
            put(count, i, count[table, source[i]] + change),
        )

    return lax.fori_loop(0, num_new, make, (groups.hyper, groups.cache, groups.count))


def wider(groups: Groups, num_rows: int, num_groups: int) -> Groups:
    """Returns the same particles with more room.

    Args:
        groups: The particles.
        num_rows: Rows of each table.
        num_groups: Groups of each class.
    """
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


def table_of(groups: Groups, label: Int[Array, ""]) -> Array:
    """Returns the table of a row of data: that of its class, or the only one."""
    return jnp.where(groups.slot.shape[0] > 1, label, 0)


def log_class(
    rules: Rules, weights: Float[Array, " class"], count: Float[Array, "*batch class"]
) -> Array:
    """Returns the log predictive probability of each class, [..., class].

    Args:
        rules: The settings of the run.
        weights: Dirichlet concentration or probability of each class, [class].
        count: Rows of each class so far, [..., class].
    """
    if rules.shares == "fixed":
        return jnp.broadcast_to(jnp.log(weights), count.shape)
    if rules.shares is None:
        return jnp.zeros_like(count)
    total = jnp.broadcast_to(weights, count.shape) + count
    return jnp.log(total) - jnp.log(jnp.sum(total, axis=-1, keepdims=True))


def log_places(rules: Rules, groups: Groups, prior: Prior, label: Int[Array, ""]) -> Array:
    """Returns the log probability of the next row's class and group, [particle, class, group].

    Args:
        rules: The settings of the run.
        groups: The particles.
        prior: The rule of seating, the weights of the classes, and the number of rows of each
            class, which is used where the classes have tables of their own.
        label: Class of the row, or -1; other classes get -inf.
    """
    seating, weights, known = prior
    table = table_of(groups, label)
    size = groups.count[table][groups.slot[table]].astype(weights.dtype)
    if size.shape[1] == len(weights) and len(weights) > 1:
        is_possible = (label < 0) | (jnp.arange(len(weights), dtype=label.dtype) == label)
        about_class = jnp.where(
            is_possible[None], log_class(rules, weights, jnp.sum(size, axis=-1)), -jnp.inf
        )[..., None]
    else:
        about_class = log_class(rules, weights, known)[label]
    return about_class + seating.log_seating(size)


def candidates(
    rules: Rules, groups: Groups, prior: Prior, x: dict[str, Array], label: Int[Array, ""]
) -> Array:
    """Returns the log probability of class, group and row of data, [particle, class, group].

    Args:
        rules: The settings of the run.
        groups: The particles.
        prior: As for `log_places`.
        x: The row of data.
        label: As for `log_places`.
    """
    table = table_of(groups, label)
    scores = block_scores(rules, groups.cache, (table, 1), groups.used[table], x, BLOCK)[0]
    return log_places(rules, groups, prior, label) + scores[groups.slot[table]]


def filter_row(
    rules: Rules,
    groups: Groups,
    prior,
    x: dict[str, Array],
    label: Int[Array, ""],
    rng_key: Array,
) -> tuple[Groups, Chosen, Array]:
    """Returns the particles after a row of data, the choices, and the log predictive density.

    Args:
        rules: The settings of the run.
        groups: The particles before the row.
        prior: As for `log_places`.
        x: The row of data.
        label: As for `log_places`.
        rng_key: For resampling.

    Returns:
        The particles; their parents and groups; log p(class, row | rows before).
    """
    table = table_of(groups, label)
    weighted = groups.log_weight[table][:, None, None] + candidates(rules, groups, prior, x, label)
    chosen, total = choose(rules, weighted, rng_key)
    return take(rules, groups, table, chosen, x), chosen, total


def choose(
    rules: Rules, log_weight: Float[Array, "particle class group"], rng_key: Array
) -> tuple[Chosen, Array]:
    """Resamples: returns the candidates that become particles, and the log of the total weight.

    Args:
        rules: The settings of the run.
        log_weight: Log weights of all candidates, [particle, class, group].
        rng_key: For resampling.
    """
    flat = log_weight.reshape(len(log_weight), -1)
    total = jax.nn.logsumexp(flat)
    return SCHEMES[rules.scheme](rng_key, flat - total), total


def redraw(
    rules: Rules,
    groups: Groups,
    prior,
    x: dict[str, Array],
    label: Int[Array, ""],
    choice: Int[Array, " particle"],
    rng_key: Array,
) -> tuple[Groups, Array]:
    """Returns the particles after a Gibbs step on the group of a past row, and its new group.

    Args:
        rules: The settings of the run.
        groups: The particles.
        prior: As for `log_places`, without the row.
        x: The row of data.
        label: As for `log_places`.
        choice: The class and group of the row in each particle, [particle].
        rng_key: For the new groups.
    """
    table = table_of(groups, label)
    old = Chosen(jnp.arange(len(choice)), choice, groups.log_weight[table], jnp.zeros((), bool))
    groups = place(rules, groups, table, old, x, -1)
    flat = candidates(rules, groups, prior, x, label).reshape(len(choice), -1)
    new = old._replace(choice=drawn_choices(rng_key, flat))
    return take(rules, groups, table, new, x), new.choice


def join(rules: Rules, groups: Groups, rng_key: Array) -> tuple[Groups, Array]:
    """Returns one filter of joint particles, made from the filters of the classes, and its links.

    The links [class, particle] are the particles of each class that a joint particle is made of.
    Given the labels so far the classes are independent. So particles of each class, drawn by weight
    and combined at random, are joint draws.

    Args:
        rules: The settings of the run.
        groups: The filters of the classes, one table each.
        rng_key: For the draws.
    """
    num_classes, num_particles = groups.slot.shape[:2]
    num_rows = groups.count.shape[1]

    def drawn(key, log_weight):
        draw_key, order_key = random.split(key)
        return random.permutation(order_key, systematic_parents(draw_key, jnp.exp(log_weight)))

    link = jax.vmap(drawn)(random.split(rng_key, num_classes), groups.log_weight)
    # Particles that are drawn twice become one with their weight.
    same = jnp.all(link[:, :, None] == link[:, None, :], axis=0)
    weight = jnp.where(
        jnp.argmax(same, axis=1) == jnp.arange(num_particles),
        jnp.sum(same, axis=1) / num_particles,
        0,
    )
    even = jnp.full(num_particles, 1 / num_particles)
    log_weight = jnp.log(weight if rules.scheme == "optimal" else even).astype(
        groups.log_weight.dtype
    )
    slot = jnp.take_along_axis(groups.slot[:, :, 0], link[:, :, None], axis=1)
    classes = jnp.arange(num_classes, dtype=slot.dtype)[:, None, None]
    slot = jnp.where(slot == 0, classes, num_classes + classes * (num_rows - 1) + slot - 1)
    flat = lambda leaf: jnp.concatenate([leaf[:, 0], leaf[:, 1:].reshape(-1, *leaf.shape[2:])])[
        None
    ]
    return (
        Groups(
            jnp.moveaxis(slot, 0, 1)[None].astype(groups.slot.dtype),
            flat(groups.count),
            jax.tree.map(flat, groups.hyper),
            jax.tree.map(flat, groups.cache),
            log_weight[None],
            1 + jnp.max(slot).astype(groups.used.dtype)[None],
            jnp.max(groups.widest, keepdims=True),
        ),
        link,
    )


@partial(jax.jit, static_argnums=0)
def join_each(rules: Rules, groups: Groups, rng_keys: Array) -> tuple[Groups, Array]:
    """Returns `join` at every point of the grid."""
    return jax.vmap(lambda one, rng_key: join(rules, one, rng_key))(groups, rng_keys)


# The genealogy.


class Genealogy(NamedTuple):
    """Parents and choices; tables that are not kept have no rows."""

    parent: Array  # [row, grid, particle]; without rows where `code` holds the partitions
    code: Array  # [row, grid, particle]
    link: Array  # [grid, class, particle]: particles that a joint particle was made of by `join`
    joined: Array  # rows before the filters of the classes were joined; -1 before that


def empty_genealogy(
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


def joined_genealogy(
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


def partitions(genealogy: Genealogy, seen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the class, the group and the ancestor of every row, each [row, grid, particle].

    The particles are those after the last row. Where the classes have filters of their own,
    particle p of a row is particle p of the filter of its class.

    Args:
        genealogy: The genealogy.
        seen: Number of rows so far.
    """
    parent, code = (np.asarray(table)[: int(seen)] for table in genealogy[:2])
    link, joined = np.asarray(genealogy.link), int(genealogy.joined)
    num_classes, particle = link.shape[1], np.arange(code.shape[2], dtype=np.int32)
    ancestor = np.empty_like(code)
    if not len(genealogy.parent):
        ancestor[:] = particle
        return code % num_classes, code // num_classes, ancestor
    joint = np.broadcast_to(particle, code.shape[1:])
    each = np.broadcast_to(particle, link.shape).copy()
    for row in range(len(code) - 1, -1, -1):
        if row == joined - 1:
            each = np.take_along_axis(link, joint[:, None].repeat(num_classes, 1), axis=2)
        if 0 <= joined <= row:
            ancestor[row], joint = joint, np.take_along_axis(parent[row], joint, axis=1)
        else:
            own = code[row, 0, 0] % num_classes  # the class of all codes of the row
            ancestor[row] = each[:, own]
            each[:, own] = np.take_along_axis(parent[row], ancestor[row], axis=1)
    code = np.take_along_axis(code, ancestor, axis=2)
    return code % num_classes, code // num_classes, ancestor


def filters(cls: np.ndarray, num_filters: int) -> np.ndarray:
    """Returns the filter of each row, [row]: that of its class where each class has its own.

    Args:
        cls: Classes, [row, grid, particle].
        num_filters: Number of filters.
    """
    return cls[:, 0, 0] if num_filters > 1 else np.zeros(len(cls), int)


def drawn_partitions(
    state: Any, point: Int[np.ndarray, " draw"], particle: Int[np.ndarray, "draw filter"]
) -> tuple[Int[np.ndarray, "draw row"], Int[np.ndarray, "draw row"]]:
    """Returns the class and the group of every row, each [draw, row].

    Args:
        state: The state of the filter.
        point: Points of the grid, [draw].
        particle: Particles, [draw, filter].
    """
    cls, group, _ = partitions(state.genealogy, state.seen)
    at = np.arange(len(cls)), point[:, None], particle[:, filters(cls, particle.shape[1])]
    cls, group = (state.by_row(part[at].T).T for part in (cls, group))
    is_in_order = len(state.genealogy.parent) and not len(state.order)
    return cls, group if is_in_order else in_order(cls, group)


def drawn_particles(
    rng_key: Array, state: Any, num_draws: int, is_joint: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns points of the grid [draw], particles [draw, table] and class shares [draw, class].

    Args:
        rng_key: For the draws.
        state: The state of the filter.
        num_draws: Number of draws.
        is_joint: Whether one filter holds all classes.
    """
    rng = np.random.default_rng(as_numpy(rng_key))
    point = _drawn(rng, np.broadcast_to(state.log_points(), (num_draws, len(state.log_prior))))
    log_weight = np.asarray(state.groups.log_weight)[point]
    particle = np.stack([_drawn(rng, of_table) for of_table in np.moveaxis(log_weight, 1, 0)], 1)
    weights = np.asarray(state.class_weights)[point]
    count = np.asarray(state.class_count)
    if is_joint:
        slot = np.asarray(state.groups.slot)[point, 0, particle[:, 0]]
        count = np.asarray(state.groups.count)[point[:, None, None], 0, slot].sum(-1)
    shares = rng.standard_gamma(weights + count)
    return point, particle, (shares / shares.sum(1, keepdims=True)).astype(weights.dtype)


def _drawn(rng: np.random.Generator, log_weight: np.ndarray) -> np.ndarray:
    """An index for each row of log weights, [row, index]."""
    reached = np.cumsum(np.exp(log_weight - log_weight.max(1, keepdims=True)), axis=1)
    return (reached <= rng.random((len(reached), 1)) * reached[:, -1:]).sum(1)


def in_order(
    cls: Int[np.ndarray, "draw row"], group: Int[np.ndarray, "draw row"]
) -> Int[np.ndarray, "draw row"]:
    """Returns groups in order of appearance within each class, [draw, row].

    Rows that are redrawn leave gaps in the numbers, and groups out of order. Rows that were not
    read yet stay -1.

    Args:
        cls: Classes, [draw, row].
        group: Groups, [draw, row].
    """
    found = np.full_like(group, -1)
    for draw, (classes, groups) in enumerate(zip(cls, group, strict=True)):
        for each in np.unique(classes[classes >= 0]):
            rows = classes == each
            _, first, inverse = np.unique(groups[rows], return_index=True, return_inverse=True)
            found[draw, rows] = np.argsort(np.argsort(first))[inverse]
    return found
