"""Predictions of a particle filter for new rows.

They are the density of a row under each class, imputed entries, and draws of new rows. The
probabilities that the particles give to the next row's group are first summed into one share for
each table row (`log_shares`), because particles share most groups and many new rows use the sum.

Cost: O(grid x classes x particles x groups), and for each new row
O(grid x classes x table rows x columns).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn import logsumexp
from jaxtyping import Float, Int

from inference.kernels.particle_filter.particles import (
    BLOCK,
    Groups,
    Rules,
    block_scores,
    log_places,
)
from inference.program.compiling import is_traced
from inference.program.interpreting import interpreted
from inference.reading.crp_mixture import PartitionRows

__all__ = ["Place", "drawn_places", "log_classes", "log_shares", "mean_rows", "new_rows"]

BATCH = 16  # new rows that are scored at once
CHUNK = 1024  # rows of one call of compiled code
Place = tuple[Array, Array, Array]  # a group: point of the grid, table, row of the table


def log_classes(rules: Rules, state: Any, rows: dict[str, np.ndarray]) -> Any:
    """Returns log p(class, row | rows seen), [row, class].

    All numbers of rows share one compiled program.

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        rows: New rows, by site.
    """
    log_share, num_rows = log_shares(rules, state), len(next(iter(rows.values())))
    found = []
    for begin in range(0, num_rows, CHUNK):
        size = min(CHUNK, num_rows - begin)
        cut = lambda leaf, begin=begin, size=size: np.concatenate(
            [leaf[begin : begin + size], np.zeros((CHUNK - size, *leaf.shape[1:]), leaf.dtype)]
        )
        of_chunk = _log_classes(
            rules, state.groups, log_share, jax.tree.map(cut, rows), np.int32(size)
        )
        found.append((of_chunk if is_traced(state) else np.asarray(of_chunk))[:size])
    return jnp.concatenate(found) if is_traced(state) else np.concatenate(found)


@partial(jax.jit, static_argnums=0)
def _log_classes(
    rules: Rules,
    groups: Groups,
    log_share: Float[Array, "point class table_row"],
    rows: dict[str, Array],
    num_rows: Int[Array, ""],
) -> Float[Array, "row class"]:
    """`log_classes` of a chunk; the batches after its last row are not computed."""
    one = lambda x: logsumexp(log_share + _scores(rules, groups, x), axis=(0, 2))

    def score(
        number: Int[Array, ""], found: Float[Array, "row class"]
    ) -> Float[Array, "row class"]:
        cut = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * BATCH, BATCH)
        return jax.lax.dynamic_update_slice_in_dim(
            found, jax.vmap(one)(jax.tree.map(cut, rows)), number * BATCH, axis=0
        )

    nothing = jnp.zeros((CHUNK, log_share.shape[1]), log_share.dtype)
    return jax.lax.fori_loop(0, -(-num_rows // BATCH), score, nothing)


@partial(jax.jit, static_argnums=0)
def drawn_places(
    rules: Rules, state: Any, log_share: Array, rows: PartitionRows, rng_key: Array
) -> tuple[Array, Place]:
    """Draws a class and a group for each new row, given its observed entries.

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        log_share: Of `log_shares`.
        rows: New rows; a row whose label is not -1 keeps it.
        rng_key: For the draws.
    """

    def one(row):
        key, label, x = row
        found = _of_class(log_share + _scores(rules, state.groups, x), label)
        point, cls, at = jnp.unravel_index(random.categorical(key, found.ravel()), found.shape)
        table = jnp.zeros_like(cls) if state.groups.slot.shape[1] == 1 else cls
        return cls, (point, table, at)

    keys = random.split(rng_key, len(rows.labels))
    return jax.lax.map(one, (keys, rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def mean_rows(rules: Rules, state: Any, log_share: Array, rows: PartitionRows) -> dict[str, Array]:
    """Returns the mean of every entry given the observed ones, {site: [row, column, ...]}.

    A site of codes has the probability of each code instead, [row, column, code].

    Args:
        rules: The settings of the run.
        state: The state of the filter.
        log_share: Of `log_shares`.
        rows: New rows; a label other than -1 is used.
    """
    # [point, table, row of the table, column, ...]
    means = rules.each(lambda family, hyper: family.mean_row(hyper), state.groups.hyper)
    is_joint = state.groups.slot.shape[1] == 1

    def one(row):
        label, x = row
        log_weight = _of_class(log_share + _scores(rules, state.groups, x), label)
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


def _of_class(
    log_weight: Float[Array, "point class table_row"], label: Int[Array, ""]
) -> Float[Array, "point class table_row"]:
    """Log weights [point, class, table row], with -inf for other classes than a known label."""
    is_possible = (label < 0) | (jnp.arange(log_weight.shape[1]) == label)
    return jnp.where(is_possible[None, :, None], log_weight, -jnp.inf)


def log_shares(rules: Rules, state: Any) -> Array:
    """Returns log probabilities of the next row's class and group, [point, class, table row].

    They include the log probability of the point of the grid.

    Args:
        rules: The settings of the run.
        state: The state of the filter.
    """
    if is_traced(state):
        return _log_shares(rules, state)
    leaves, form = jax.tree.flatten(state)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _interpreted_shares(rules, form, shapes, jax.config.jax_enable_x64)(state)


@lru_cache(maxsize=8)
def _interpreted_shares(rules: Rules, form: Any, shapes: tuple, x64: bool) -> Callable:
    like = jax.tree.unflatten(form, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return interpreted(partial(_log_shares, rules), like)


def _log_shares(rules: Rules, state: Any) -> Array:

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


def _scores(rules: Rules, groups: Groups, x: dict[str, Array]) -> Array:
    """Log predictive density of a row in every group, [point, table, table row]."""

    def at(groups: Groups) -> Array:
        tables = jnp.zeros((), jnp.int32), len(groups.slot)
        return block_scores(rules, groups.cache, tables, jnp.max(groups.used), x, BLOCK)

    return jax.lax.map(at, groups)
