"""What a filter says: draws of its particles; of rows that it has not seen, their density under
each class, what they miss, new ones.

What the particles say of the next row is first summed into one share for each group: they share
most groups, and many rows use the sum. Cost: O(grid x classes x particles x groups), and for each
row O(grid x classes x table rows x columns).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.nn import logsumexp

from inference.kernels.particle_filter.candidates import log_places
from inference.kernels.particle_filter.groups import Groups, Rules, all_scores
from inference.reading.crp_mixture import Rows

__all__ = ["Place", "drawn_particles", "drawn_places", "log_classes", "mean_rows", "new_rows"]

BATCH = 16  # rows that are scored at once
Place = tuple[Array, Array, Array]  # point of the grid, table, row of the table: a group


@partial(jax.jit, static_argnums=0)
def log_classes(rules: Rules, state: Any, rows: Rows) -> Array:
    """log p(class, row | rows seen), [row, class]; the labels of `rows` play no part."""
    log_share = _log_shares(rules, state)
    return jax.lax.map(
        lambda x: logsumexp(log_share + _scores(rules, state, x), axis=(0, 2)),
        rows.values,
        batch_size=BATCH,
    )


@partial(jax.jit, static_argnums=(2, 3))
def drawn_particles(
    rng_key: Array, state: Any, num_draws: int, is_joint: bool
) -> tuple[Array, Array, Array]:
    """Points of the grid [draw], particles [draw, table], and the shares of the classes given
    their partitions [draw, class].
    """
    keys = random.split(rng_key, 3)
    point = random.categorical(keys[0], state.log_points(), shape=(num_draws,))
    particle = random.categorical(keys[1], state.groups.log_weight[point], axis=-1)
    count = state.class_count
    if is_joint:
        slot = state.groups.slot[point, 0, particle[:, 0]]
        count = jnp.sum(state.groups.count[point[:, None, None], 0, slot], axis=-1).astype(
            count.dtype
        )
    weights = state.class_weights[point]
    return (
        point,
        particle,
        random.dirichlet(keys[2], weights + jnp.broadcast_to(count, weights.shape)),
    )


@partial(jax.jit, static_argnums=0)
def drawn_places(rules: Rules, state: Any, rows: Rows, rng_key: Array) -> tuple[Array, Place]:
    """A class and a group drawn for each row, given what the row shows; a row whose label is not
    -1 keeps it.
    """
    log_share = _log_shares(rules, state)

    def one(row):
        key, label, x = row
        found = _of_class(log_share + _scores(rules, state, x), label)
        point, cls, at = jnp.unravel_index(random.categorical(key, found.ravel()), found.shape)
        table = jnp.zeros_like(cls) if state.groups.slot.shape[1] == 1 else cls
        return cls, (point, table, at)

    keys = random.split(rng_key, len(rows.labels))
    return jax.lax.map(one, (keys, rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def mean_rows(rules: Rules, state: Any, rows: Rows) -> dict[str, Array]:
    """The expectation of every entry given those that the row shows (and its label, where that is
    not -1), {site: [row, column, ...]}.

    A code has no mean: of a column of codes it is the probability of each, [row, column, code].
    """
    # [point, table, row of the table, column, ...]
    means = rules.each(lambda family, hyper: family.mean_row(hyper), state.groups.hyper)
    log_share, is_joint = _log_shares(rules, state), state.groups.slot.shape[1] == 1

    def one(row):
        label, x = row
        weight = jax.nn.softmax(
            _of_class(log_share + _scores(rules, state, x), label), axis=(0, 1, 2)
        )
        by_table = jnp.sum(weight, axis=1, keepdims=True) if is_joint else weight
        return jax.tree.map(lambda mean: jnp.tensordot(by_table, mean, 3), means)

    return jax.lax.map(one, (rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def new_rows(rules: Rules, state: Any, place: Place, rng_key: Array) -> dict[str, Array]:
    """A row from the predictive density of each group, {site: [row, column, ...]}."""
    hyper = jax.tree.map(lambda leaf: leaf[place], state.groups.hyper)
    keys = dict(zip(hyper, random.split(rng_key, len(hyper)), strict=True))
    return rules.each(lambda family, mine, key: family.draw_row(key, mine), hyper, keys)


def _of_class(log_weight: Array, label: Array) -> Array:
    """[point, class, row of the table], -inf but for the class of a label that is known."""
    is_possible = (label < 0) | (jnp.arange(log_weight.shape[1]) == label)
    return jnp.where(is_possible[None, :, None], log_weight, -jnp.inf)


def _log_shares(rules: Rules, state: Any) -> Array:
    """Log probability of a point of the grid, and of the next row's class and group, [point,
    class, row of the table].
    """

    def at(leaves: tuple[Groups, Any, Array]) -> Array:
        groups, seating, weights = leaves
        prior, classes = (seating, weights, state.class_count), jnp.arange(len(weights))
        if len(groups.slot) < len(weights):
            places = groups.log_weight[0][:, None, None] + log_places(
                rules, groups, prior, jnp.asarray(-1)
            )
            slot = groups.slot[0]
        else:
            of_class = lambda label: (
                groups.log_weight[label][:, None] + log_places(rules, groups, prior, label)[:, 0]
            )
            places, slot = (
                jnp.moveaxis(jax.vmap(of_class)(classes), 0, 1),
                jnp.moveaxis(groups.slot[:, :, 0], 0, 1),
            )
        nowhere = jnp.full((len(weights), groups.count.shape[1]), -jnp.inf, places.dtype)
        where = classes[:, None], slot  # of each place, [particle, class, group]
        largest = jnp.maximum(nowhere.at[where].max(places), jnp.finfo(places.dtype).min)
        return largest + jnp.log(
            jnp.zeros_like(nowhere).at[where].add(jnp.exp(places - largest[where]))
        )

    found = jax.lax.map(at, (state.groups, state.seating, state.class_weights))
    return jax.nn.log_softmax(state.log_points())[:, None, None] + found


def _scores(rules: Rules, state: Any, x: dict[str, Array]) -> Array:
    """Log predictive density of a row in every group, [point, table, row of the table]."""
    return jax.lax.map(lambda groups: all_scores(rules, groups, x), state.groups)
