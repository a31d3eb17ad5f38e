"""All that belongs to the groups of a mixture, given sums over their rows: sticks, shared groups,
parameters, experts; see `mixture` for what is integrated out meanwhile.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import betaln
from numpyro.distributions.util import clamp_probs

from inference.kernels.coordinate_ascent.draws import draw_blocks, draw_common, draw_normal
from inference.kernels.coordinate_ascent.posterior import (
    Shape,
    agreement,
    blocks_of,
    concentration_given,
    expert_sums,
    gathered,
    group_messages_at,
    sticks_given,
)
from inference.kernels.coordinate_ascent.rows import SufficientSums
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import common_posterior, known_weights, weights_posterior
from inference.reading.stick_mixture.structure import Assignment, Prior, StickLevel, with_class_axis

__all__ = ["are_alike", "draw_groups_given", "draw_sticks", "reordered"]

NUM_SWAPS = 2  # pairs of groups that try to change places, for each group

Values = Mapping[str, Array]


def draw_groups_given(
    rng_key: Array,
    found: Assignment,
    shape: Shape,
    prior: Prior,
    values: Values,
    sums: SufficientSums,
) -> dict[str, Array]:
    """New values of all sites that are not of rows, from sums over the rows of each group of a
    task; the number of a group may change, and so the groups of rows have to be drawn next.
    """
    order_key, stick_key, upper_key, block_key, *expert_keys = random.split(rng_key, 7)
    one, new, share = shape.num_features, {}, None
    order = _orders(
        order_key,
        found,
        prior,
        sums.moments[:, :, one, one],
        _concentration(found.lower, prior.concentration, values),
    )
    sums = _in_order(sums, order)
    new |= _of_level(
        stick_key, found.lower, prior.concentration, values, sums.moments[:, :, one, one]
    )
    by_group = order[0]
    if found.upper:
        own, by_group = _shared(upper_key, found, shape, prior, values, sums)
        new |= own
        share = found.share_at(new)
    sums = gathered(sums, share)
    keys = random.split(block_key, 1 + len(found.columns))
    new |= draw_blocks(found, *blocks_of(found, shape, prior, sums), iter(keys))[0]
    if found.experts:
        before = with_class_axis(values[found.experts.weights], 3)[:, by_group]
        new |= _experts(expert_keys, found, shape, prior, before, sums)
    return new


def _concentration(level: StickLevel, prior: Any, values: Values) -> Array:
    return values[level.concentration] if level.concentration else prior[0]


# Sticks.


def reordered(rng_key: Array, count: Array, concentration: Array) -> Array:
    """The same groups under new numbers [group]: pairs change places by the rule of Metropolis,
    with the sticks integrated out.

    `count` [row of sticks, group]: groups have the same number in all rows.
    """
    size = count.shape[1]

    def log_prior(order: Array) -> Array:
        return jnp.sum(betaln(*sticks_given(count[:, order], concentration)))

    def turn(i: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        order, now = at
        pair_key, accept_key = random.split(random.fold_in(rng_key, i))
        one, other = random.randint(pair_key, (2,), 0, size)
        proposed = order.at[one].set(order[other]).at[other].set(order[one])
        then = log_prior(proposed)
        is_taken = jnp.log(random.uniform(accept_key, dtype=then.dtype)) < then - now
        return jnp.where(is_taken, proposed, order), jnp.where(is_taken, then, now)

    start = jnp.arange(size)
    return lax.fori_loop(0, NUM_SWAPS * size, turn, (start, log_prior(start)))[0]


def draw_sticks(
    rng_key: Array, prior: Any, count: Array, concentration: Array
) -> tuple[Array, Array]:
    """Sticks [row, stick] and their concentration, given how many are in each group [row,
    group].
    """
    told_key, concentration_key, rest_key = random.split(rng_key, 3)
    log_taken, log_left = _log_beta(told_key, *sticks_given(count, concentration))
    # of those behind the last group the new concentration says all
    is_told = jnp.cumsum(count[:, ::-1], 1)[:, ::-1][:, :-1] > 0
    a, b = concentration_given(prior, log_left, is_told)
    concentration = jnp.where(jnp.isinf(b), a, random.gamma(concentration_key, a) / b)
    rest, _ = _log_beta(rest_key, *sticks_given(jnp.zeros_like(count), concentration))
    return clamp_probs(jnp.exp(jnp.where(is_told, log_taken, rest))), concentration


def _log_beta(rng_key: Array, concentration1: Array, concentration0: Array) -> tuple[Array, Array]:
    """Logarithms of a Beta variable and of what it leaves, which may be nothing but for its
    logarithm.
    """
    drawn = random.loggamma(
        rng_key, jnp.stack(jnp.broadcast_arrays(concentration1, concentration0))
    )
    taken, left = drawn - jnp.logaddexp(*drawn)[None]
    return taken, left


def _orders(
    rng_key: Array, found: Assignment, prior: Prior, count: Array, concentration: Array
) -> Array:
    """Of the groups of each task [task, own group]; where tasks do not share groups by an index,
    the same for all.
    """
    if found.upper:
        return jax.vmap(lambda key, one: reordered(key, one[None], concentration))(
            random.split(rng_key, len(count)), count
        )
    order = (
        reordered(rng_key, count, concentration) if are_alike(found) else jnp.arange(count.shape[1])
    )
    return jnp.broadcast_to(order[None], count.shape)


def are_alike(found: Assignment) -> bool:
    """Whether all groups have the same prior, so that they may change their numbers."""
    assert found.prior is not None
    return all(
        np.allclose(leaf, leaf[:1], rtol=1e-6)
        for leaf in jax.tree.leaves((found.prior.columns, found.prior.features))
    )


def _in_order(sums: SufficientSums, order: Array) -> SufficientSums:
    """SufficientSums over the rows of each group of a task, the groups of each task in this order."""

    def moved(part: Array, axis: int) -> Array:
        index = order.reshape(len(order), *(1,) * (axis - 1), -1, *(1,) * (part.ndim - axis - 1))
        return jnp.take_along_axis(part, index, axis)

    return SufficientSums(
        moved(sums.moments, 1),
        moved(sums.asked, 2),
        moved(sums.products, 2),
        moved(sums.columns, 2),
        sums.bound,
    )


def _of_level(
    rng_key: Array, level: StickLevel, prior: Any, values: Values, count: Array
) -> dict[str, Array]:
    V, concentration = draw_sticks(rng_key, prior, count, _concentration(level, prior, values))
    new = {level.sticks: V.reshape(values[level.sticks].shape)}
    return new | ({level.concentration: concentration} if level.concentration else {})


# The level above the tasks.


def _shared(
    rng_key: Array,
    found: Assignment,
    shape: Shape,
    prior: Prior,
    values: Values,
    sums: SufficientSums,
) -> tuple[dict[str, Array], Array]:
    """The shared group of each group of a task, and the sticks of these; and the order that they
    now have.
    """
    level = found.upper
    assert level is not None
    index_key, order_key, stick_key = random.split(rng_key, 3)
    U = values[level.sticks]
    agrees = agreement(group_messages_at(found, shape, values), sums, shape.num_features)
    index = random.categorical(
        index_key, agrees + log_sticks(jnp.log(U), jnp.log1p(-U))[None, None]
    )
    count = jnp.sum(jax.nn.one_hot(index, found.num_groups, dtype=U.dtype), (0, 1))[None]
    order = jnp.arange(found.num_groups)
    if are_alike(found):
        order = reordered(order_key, count, _concentration(level, prior.upper, values))
    new = _of_level(stick_key, level, prior.upper, values, count[:, order])
    return new | {level.site: jnp.argsort(order)[index].astype(values[level.site].dtype)}, order


# Experts.


def _experts(
    keys: Any, found: Assignment, shape: Shape, prior: Prior, before: Array, sums: SufficientSums
) -> dict[str, Array]:
    """What they have in common, given the weights as they were of those whose rows have labels;
    then all weights.
    """
    experts = found.experts
    assert experts is not None
    assert prior.experts is not None
    is_told = sums.asked[:, :, shape.num_features, shape.num_features] > 0
    common = common_posterior(prior.experts, known_weights(before), is_told)
    new, known, _ = draw_common(found, common, keys[:2])
    w, _ = draw_normal(weights_posterior(known, *expert_sums(shape, sums)), keys[2])
    return new | {experts.weights: w.reshape(found.few.sites[experts.weights].shape)}
