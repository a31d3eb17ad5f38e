"""Predictions of a filter: class probabilities, imputation, draws of particles and of new rows.

The probabilities that the particles give to the next row's group are first summed into one share
for each table row, because particles share most groups and many new rows use the sum.

Cost: O(grid x classes x particles x groups), and for each new row
O(grid x classes x table rows x columns).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.nn import logsumexp

from inference.kernels.particle_filter.particles import (
    BLOCK,
    Groups,
    Rules,
    block_scores,
    log_places,
)
from inference.reading.crp_mixture import PartitionRows

__all__ = ["Place", "drawn_particles", "drawn_places", "log_classes", "mean_rows", "new_rows"]

BATCH = 16  # new rows that are scored at once
Place = tuple[Array, Array, Array]  # a group: point of the grid, table, row of the table


@partial(jax.jit, static_argnums=0)
def log_classes(rules: Rules, state: Any, rows: PartitionRows) -> Array:
    """Returns log p(class, row | rows seen), [row, class].

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        rows: New rows; their labels are not used.
    """
    log_share = _log_shares(rules, state)
    one = lambda x: logsumexp(log_share + _scores(rules, state, x), axis=(0, 2))
    return jax.lax.map(one, rows.values, batch_size=BATCH)


@partial(jax.jit, static_argnums=(2, 3))
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


@partial(jax.jit, static_argnums=0)
def drawn_places(
    rules: Rules, state: Any, rows: PartitionRows, rng_key: Array
) -> tuple[Array, Place]:
    """Draws a class and a group for each new row, given its observed entries.

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        rows: New rows; a row whose label is not -1 keeps it.
        rng_key: For the draws.
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
def mean_rows(rules: Rules, state: Any, rows: PartitionRows) -> dict[str, Array]:
    """Returns the mean of every entry given the observed ones, {site: [row, column, ...]}.

    For codes it is the probability of each, [row, column, code].

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        rows: New rows; a label other than -1 is used.
    """
    # [point, table, row of the table, column, ...]
    means = rules.each(lambda family, hyper: family.mean_row(hyper), state.groups.hyper)
    log_share, is_joint = _log_shares(rules, state), state.groups.slot.shape[1] == 1

    def one(row):
        label, x = row
        log_weight = _of_class(log_share + _scores(rules, state, x), label)
        weight = jax.nn.softmax(log_weight, axis=(0, 1, 2))
        by_table = jnp.sum(weight, axis=1, keepdims=True) if is_joint else weight
        return jax.tree.map(lambda mean: jnp.tensordot(by_table, mean, 3), means)

    return jax.lax.map(one, (rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def new_rows(rules: Rules, state: Any, place: Place, rng_key: Array) -> dict[str, Array]:
    """Draws a row from the predictive distribution of each group, {site: [row, column, ...]}.

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        place: The group of each row.
        rng_key: For the draws.
    """
    hyper = jax.tree.map(lambda leaf: leaf[place], state.groups.hyper)
    keys = dict(zip(hyper, random.split(rng_key, len(hyper)), strict=True))
    return rules.each(lambda family, mine, key: family.draw_row(key, mine), hyper, keys)


def _of_class(log_weight: Array, label: Array) -> Array:
    """Log weights [point, class, table row], with -inf for other classes than a known label."""
    is_possible = (label < 0) | (jnp.arange(log_weight.shape[1]) == label)
    return jnp.where(is_possible[None, :, None], log_weight, -jnp.inf)


def _log_shares(rules: Rules, state: Any) -> Array:
    """Log probability of the next row's place in the tables, [point, class, table row].

    It is joint: of a point of the grid, and of the class and the group of the row.
    """

    def at(leaves: tuple[Groups, Any, Array]) -> Array:
        groups, seating, weights = leaves
        prior, classes = (seating, weights, state.class_count), jnp.arange(len(weights))
        log_weight, slot = groups.log_weight, jnp.moveaxis(groups.slot[:, :, 0], 0, 1)
        if len(groups.slot) < len(weights):
            slot = groups.slot[0]
            places = log_weight[0][:, None, None] + log_places(
                rules, groups, prior, jnp.asarray(-1)
            )
        else:
            of_class = lambda label: (
                log_weight[label][:, None] + log_places(rules, groups, prior, label)[:, 0]
            )
            places = jnp.moveaxis(jax.vmap(of_class)(classes), 0, 1)
        nowhere = jnp.full((len(weights), groups.count.shape[1]), -jnp.inf, places.dtype)
        where = classes[:, None], slot  # [particle, class, group]
        largest = jnp.maximum(nowhere.at[where].max(places), jnp.finfo(places.dtype).min)
        return largest + jnp.log(
            jnp.zeros_like(nowhere).at[where].add(jnp.exp(places - largest[where]))
        )

    found = jax.lax.map(at, (state.groups, state.seating, state.class_weights))
    return jax.nn.log_softmax(state.log_points())[:, None, None] + found


def _scores(rules: Rules, state: Any, x: dict[str, Array]) -> Array:
    """Log predictive density of a row in every group, [point, table, table row]."""

    def at(groups: Groups) -> Array:
        tables = jnp.zeros((), jnp.int32), len(groups.slot)
        return block_scores(rules, groups.cache, tables, jnp.max(groups.used), x, BLOCK)

    return jax.lax.map(at, state.groups)
