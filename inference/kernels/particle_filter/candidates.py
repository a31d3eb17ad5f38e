"""One row through one filter; past rows redrawn; the filters of the classes joined into one."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.nn import logsumexp

from inference.distributions import ExchangeablePartition
from inference.kernels.particle_filter.groups import Groups, Rules, place, scores, take
from inference.maths.resampling import SCHEMES, Chosen, drawn_choices, systematic_parents

__all__ = [
    "candidates",
    "choose",
    "filter_row",
    "join",
    "join_each",
    "log_class",
    "log_places",
    "redraw",
    "table_of",
]

type Prior = tuple[ExchangeablePartition, Array, Array]  # what `log_places` takes
# groups of a class: most streams have few, and candidates that do not exist cost as much as others
NARROW = 8


def table_of(groups: Groups, label: Array) -> Array:
    """The table that a row belongs to: that of its class, or the only one."""
    return jnp.where(groups.slot.shape[0] > 1, label, 0)


def log_class(rules: Rules, weights: Array, count: Array) -> Array:
    """Log predictive probability of each class, [..., class], after `count` rows of each."""
    if rules.shares == "fixed":
        return jnp.broadcast_to(jnp.log(weights), count.shape)
    if rules.shares is None:
        return jnp.zeros_like(count)
    total = jnp.broadcast_to(weights, count.shape) + count
    return jnp.log(total) - jnp.log(jnp.sum(total, axis=-1, keepdims=True))


def log_places(rules: Rules, groups: Groups, prior: Prior, label: Array) -> Array:
    """Log probability of the next row's class and group given each particle, [particle, class,
    group]; -inf for other classes than `label`.

    `prior` is the rule of seating, the weights of the classes, and how many rows of each class are
    known where classes are apart.
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
    rules: Rules, groups: Groups, prior: Prior, x: dict[str, Array], label: Array
) -> Array:
    """Log probability of class, group and row given each particle, [particle, class, group];
    `prior` and `label` as in `log_places`.
    """
    table = table_of(groups, label)
    return (
        log_places(rules, groups, prior, label)
        + scores(rules, groups, table, x)[groups.slot[table]]
    )


def filter_row(
    rules: Rules,
    groups: Groups,
    is_narrow: Array,
    prior,
    x: dict[str, Array],
    label: Array,
    rng_key: Array,
) -> tuple[Groups, Chosen, Array]:
    """The particles after a row, how they came to be, and the log predictive density of class and
    row.

    `is_narrow` says that the groups beyond `NARROW` are not in use, nor is the next: then they are
    not looked at.
    """
    table, room = table_of(groups, label), groups.slot.shape[-1]

    weighted = groups.log_weight[table][:, None, None] + candidates(rules, groups, prior, x, label)

    def among(width: int) -> tuple[Chosen, Array]:
        chosen, total = choose(rules, weighted[..., :width], rng_key)
        return chosen._replace(choice=chosen.choice // width * room + chosen.choice % width), total

    chosen, total = (
        lax.cond(is_narrow, lambda: among(NARROW), lambda: among(room))
        if room > NARROW
        else among(room)
    )
    return take(rules, groups, table, chosen, x), chosen, total


def choose(rules: Rules, log_weight: Array, rng_key: Array) -> tuple[Chosen, Array]:
    """From log weights [particle, class, group] of all candidates to those that become
    particles, and the log total.
    """
    flat = log_weight.reshape(len(log_weight), -1)
    total = logsumexp(flat)
    return SCHEMES[rules.scheme](rng_key, flat - total), total


def redraw(
    rules: Rules,
    groups: Groups,
    prior,
    x: dict[str, Array],
    label: Array,
    choice: Array,
    rng_key: Array,
) -> tuple[Groups, Array]:
    """Gibbs: takes a row out of the group `choice` [particle] that it is in, and draws its group
    anew given all others.
    """
    table = table_of(groups, label)
    old = Chosen(jnp.arange(len(choice)), choice, groups.log_weight[table], jnp.zeros((), bool))
    groups = place(
        rules, groups, table, old, x, lambda family, hyper, entry: family.remove(hyper, entry), -1
    )
    flat = candidates(rules, groups, prior, x, label).reshape(len(choice), -1)
    new = old._replace(choice=drawn_choices(rng_key, flat))
    return place(
        rules, groups, table, new, x, lambda family, hyper, entry: family.add(hyper, entry), 1
    ), new.choice


def join(rules: Rules, groups: Groups, rng_key: Array) -> tuple[Groups, Array]:
    """One filter of joint particles from the filters of the classes, and the particles of theirs
    that it begins with, [class, particle].

    Given the labels so far the classes are independent, so particles of each, drawn by weight and
    paired at random, are joint draws.
    """
    num_classes, num_particles = groups.slot.shape[:2]
    num_rows = groups.count.shape[1]

    def drawn(key, log_weight):
        draw_key, order_key = random.split(key)
        return random.permutation(order_key, systematic_parents(draw_key, jnp.exp(log_weight)))

    link = jax.vmap(drawn)(random.split(rng_key, num_classes), groups.log_weight)
    # particles that are drawn twice become one with their weight
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
    """`join` at every point of the grid."""
    return jax.vmap(lambda one, rng_key: join(rules, one, rng_key))(groups, rng_keys)
