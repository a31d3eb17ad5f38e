"""What a filter says: draws of its particles; of rows that it has not seen, their density under each class, what they miss, new ones.

Cost a row: O(grid x classes x (table rows x columns + particles x groups)).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.nn import logsumexp

from inference.conjugate import DirichletCategorical, Family
from inference.kernels._filtering import candidates
from inference.kernels._groups import Groups, Rules
from inference.partition import Rows

__all__ = ["Place", "drawn_particles", "drawn_places", "log_classes", "mean_rows", "new_rows"]

BATCH = 16  # rows that are scored at once
Place = tuple[Array, Array, Array]  # point of the grid, table, row of the table: a group


@partial(jax.jit, static_argnums=0)
def log_classes(rules: Rules, state: Any, rows: Rows) -> Array:
    """log p(class, row | rows seen), [row, class]; the labels of `rows` play no part."""
    return jax.lax.map(lambda x: logsumexp(_log_groups(rules, state, x), axis=(0, 2, 3)), rows.values, batch_size=BATCH)


@partial(jax.jit, static_argnums=(2, 3))
def drawn_particles(rng_key: Array, state: Any, num_draws: int, is_joint: bool) -> tuple[Array, Array, Array]:
    """Points of the grid [draw], particles [draw, table], and the shares of the classes given their partitions [draw, class]."""
    keys = random.split(rng_key, 3)
    point = random.categorical(keys[0], state.log_points(), shape=(num_draws,))
    particle = random.categorical(keys[1], state.groups.log_weight[point], axis=-1)
    count = state.class_count
    if is_joint:
        slot = state.groups.slot[point, 0, particle[:, 0]]
        count = jnp.sum(state.groups.count[point[:, None, None], 0, slot], axis=-1).astype(count.dtype)
    weights = state.class_weights[point]
    return point, particle, random.dirichlet(keys[2], weights + jnp.broadcast_to(count, weights.shape))


@partial(jax.jit, static_argnums=0)
def drawn_places(rules: Rules, state: Any, rows: Rows, rng_key: Array) -> tuple[Array, Place]:
    """A class and a group drawn for each row, given what the row shows; a row whose label is not -1 keeps it."""

    def one(row):
        key, label, x = row
        found = _log_groups(rules, state, x)
        is_possible = (label < 0) | (jnp.arange(found.shape[1]) == label)
        drawn = random.categorical(key, jnp.where(is_possible[None, :, None, None], found, -jnp.inf).ravel())
        point, cls, particle, group = jnp.unravel_index(drawn, found.shape)
        is_joint = state.groups.slot.shape[1] == 1
        table, inner = (jnp.zeros_like(cls), cls) if is_joint else (cls, jnp.zeros_like(cls))
        return cls, (point, table, state.groups.slot[point, table, particle, inner, group])

    keys = random.split(rng_key, len(rows.labels))
    return jax.lax.map(one, (keys, rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def mean_rows(rules: Rules, state: Any, rows: Rows) -> dict[str, Array]:
    """The expectation of every entry given those that the row shows (and its label, where that is not -1), {site: [row, column, ...]}.

    A code has no mean: of a column of codes it is the probability of each, [row, column, code].
    """
    means = rules.each(_expectation, state.groups.hyper)  # [point, table, row of the table, column, ...]

    def one(row):
        label, x = row
        found = _log_groups(rules, state, x)
        is_possible = (label < 0) | (jnp.arange(found.shape[1]) == label)
        weight = jax.nn.softmax(jnp.where(is_possible[None, :, None, None], found, -jnp.inf), axis=(0, 1, 2, 3))
        slot = jnp.moveaxis(state.groups.slot, 3, 2)  # [point, table, class, particle, group]
        slot = slot.reshape(weight.shape)
        point = jnp.arange(slot.shape[0])[:, None, None, None]
        table = (jnp.arange(slot.shape[1]) * (state.groups.slot.shape[1] > 1))[:, None, None]
        share = jnp.zeros(state.groups.count.shape, weight.dtype).at[point, table, slot].add(weight)
        return jax.tree.map(lambda mean: jnp.tensordot(share, mean, 3), means)

    return jax.lax.map(one, (rows.labels, rows.values), batch_size=BATCH)


@partial(jax.jit, static_argnums=0)
def new_rows(rules: Rules, state: Any, place: Place, rng_key: Array) -> dict[str, Array]:
    """A row from the predictive density of each group, {site: [row, column, ...]}."""
    hyper = jax.tree.map(lambda leaf: leaf[place], state.groups.hyper)
    keys = dict(zip(hyper, random.split(rng_key, len(hyper)), strict=True))
    return rules.each(lambda family, mine, key: family.draw_row(key, mine), hyper, keys)


def _expectation(family: Family, hyper: Any) -> Array:
    return family.probabilities(hyper) if isinstance(family, DirichletCategorical) else family.mean_row(hyper)


def _log_groups(rules: Rules, state: Any, x: dict[str, Array]) -> Array:
    """log p(point, class, particle, group, row | rows seen) of one row, [point, class, particle, group]."""
    log_point = jax.nn.log_softmax(state.log_points())
    num_classes = state.class_weights.shape[1]

    def at(leaves: tuple[Groups, Array, Array]) -> Array:
        groups, concentration, weights = leaves
        prior = (concentration, weights, state.class_count)
        if len(groups.slot) == 1 and num_classes > 1:
            joint = groups.log_weight[0][:, None, None] + candidates(rules, groups, prior, x, jnp.asarray(-1))
            return jnp.moveaxis(joint, 1, 0)
        own = lambda label: groups.log_weight[label][:, None] + candidates(rules, groups, prior, x, label)[:, 0]
        return jax.vmap(own)(jnp.arange(num_classes))

    found = jax.lax.map(at, (state.groups, state.concentration, state.class_weights))
    return log_point[:, None, None, None] + found
