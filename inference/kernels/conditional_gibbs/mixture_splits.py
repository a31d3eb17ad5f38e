"""Groups of a mixture that split in two, or merge: a move of many rows at once, for chains whose
rows do not leave their groups one by one.

Two rows are drawn. Rows of one group split it: the first keeps its number, the second takes that of
a group without rows, and the others go to one of the two in an order drawn at random, each by how
probable it is given those that have gone before. Rows of two groups merge them. Missing entries,
soft labels, the concentration and what experts have in common are given; sticks and the parameters
phi of groups are integrated out, so that the target is

    p(z) prod_h m(rows of h),     m(rows) = p(phi) p(rows | phi) / p(phi | rows)  at any phi,                                 (1)

of which the blocks know each factor. The rule of Metropolis and Hastings: a merge can be made in
one way; the split that undoes it has a number to choose among those of groups without rows, and all
choices of rows, whose probabilities are added up on the way.

Dahl (2003), "An improved merge-split sampler for conjugate Dirichlet process mixture models". Cost
of a move of R rows with D entries: R D^3.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.special import betaln
from jax.scipy.stats import norm

from inference.kernels.coordinate_ascent.posterior import (
    Shape,
    agreement,
    blocks_of,
    expert_sums,
    group_messages_at,
    sticks_given,
)
from inference.kernels.coordinate_ascent.rows import Message, SufficientSums
from inference.reading.conjugate.quadratic import Common, precision_of, weights_log_density
from inference.reading.stick_mixture.structure import (
    Assignment,
    Prior,
    values_by_group,
    with_class_axis,
)

__all__ = ["Parted", "SeenRows", "common_at", "log_marginal_at", "split_or_merged"]

Values = Mapping[str, Array]


class SeenRows(NamedTuple):
    """All rows, their missing entries filled."""

    entries: Array  # u, [row, entry]
    statistics: Array  # of the columns [row, statistic]
    soft: Array  # [row, class]
    is_asked: Array  # 0 and 1 [row, class]
    task: Array

    def sums(self, row: Array) -> SufficientSums:
        """Of one row, as one group."""
        u, is_asked = self.entries[row], self.is_asked[row]
        moments = (u[:, None] * u[None])[None]
        products = ((is_asked * self.soft[row])[:, None] * u[None])[:, None]
        return SufficientSums(
            moments,
            is_asked[:, None, None, None] * moments[None],
            products,
            self.statistics[row][:, None],
            jnp.zeros((), u.dtype),
        )


class Parted(NamedTuple):
    """Rows that go, one after the other, to one of two groups."""

    is_second: Array  # [row]
    count: Array  # rows of each [2]
    sums: SufficientSums  # of each [2, ...]
    log_marginal: Array  # of each [2]
    log_choice: Array  # log probability of the choices so far


def split_or_merged(
    rng_key: Array,
    found: Assignment,
    prior: Prior,
    values: Values,
    z: Array,
    rows: SeenRows,
    log_marginal: Callable[[SufficientSums], Array],
) -> Array:
    """The group of each row after one move from `z`.

    All groups have the same prior, and there is no level above.
    """
    pair_key, number_key, part_key, accept_key = random.split(rng_key, 4)
    pair = random.choice(pair_key, len(z), (2,), replace=False)
    first, other = z[pair[0]], z[pair[1]]
    is_split, is_free = first == other, jnp.bincount(z, length=found.num_groups) == 0
    second = jnp.where(
        is_split,
        random.categorical(number_key, jnp.where(is_free, 0.0, -jnp.inf)).astype(z.dtype),
        other,
    )
    is_theirs = (z == first) | (z == other)
    parted = _parted(
        part_key,
        rows,
        log_marginal,
        pair,
        is_theirs,
        jnp.where(is_split, -1, (z == other).astype(jnp.int32)),
    )
    together = jnp.where(is_theirs, first, z)
    apart = jnp.where(parted.is_second, second, together)
    gain = parted.log_marginal.sum() - log_marginal(
        jax.tree.map(lambda leaf: leaf.sum(0), parted.sums)
    )
    log_prior = lambda z: _log_prior(found, prior, values, rows.task, z)
    log_ratio = (
        gain
        + log_prior(apart)
        - log_prior(together)
        - parted.log_choice
        + _log_ways(is_free, is_split)
    )
    is_taken = jnp.log(random.uniform(accept_key, dtype=log_ratio.dtype)) < jnp.where(
        is_split, log_ratio, -log_ratio
    )
    return jnp.where(is_taken, jnp.where(is_split, apart, together), z)


def _log_ways(is_free: Array, is_split: Array) -> Array:
    """Of the numbers that the second group may have: of groups without rows where both are
    together. -inf where there is none.
    """
    return jnp.log(jnp.sum(is_free) + jnp.where(is_split, 0, 1))


def _parted(
    rng_key: Array,
    rows: SeenRows,
    log_marginal: Callable[[SufficientSums], Array],
    pair: Array,
    is_theirs: Array,
    told: Array,
) -> Parted:
    """From the rows of `pair`, one in each group, on; `told` [row] is 0 or 1 where the choice is
    known, -1 where it is to be drawn.
    """
    order_key, choice_key = random.split(rng_key)
    number = jnp.arange(len(is_theirs))
    is_left = is_theirs & (number != pair[0]) & (number != pair[1])
    order = random.permutation(order_key, number)
    order = order[jnp.argsort(~is_left[order], stable=True)]

    def turn(i: Array, at: Parted) -> Parted:
        row = order[i]
        more = jax.tree.map(lambda leaf, own: leaf + own[None], at.sums, rows.sums(row))
        then = jax.vmap(log_marginal)(more)
        log_choice = jax.nn.log_softmax(jnp.log(at.count) + then - at.log_marginal)
        chosen = jnp.where(
            told[row] < 0, random.categorical(random.fold_in(choice_key, i), log_choice), told[row]
        )
        is_chosen = jnp.arange(2) == chosen
        kept = lambda new, old: jnp.where(is_chosen.reshape(2, *(1,) * (new.ndim - 1)), new, old)
        sums = jax.tree.map(kept, more, at.sums)
        marginal, total = kept(then, at.log_marginal), at.log_choice + log_choice[chosen]
        return Parted(
            at.is_second.at[row].set(chosen == 1), at.count + is_chosen, sums, marginal, total
        )

    sums = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(rows.sums(row) for row in pair))
    zero, ones = jnp.zeros((), rows.entries.dtype), jnp.ones(2, rows.entries.dtype)
    start = Parted(number == pair[1], ones, sums, jax.vmap(log_marginal)(sums), zero)
    return lax.fori_loop(0, jnp.sum(is_left), turn, start)


def _log_prior(found: Assignment, prior: Prior, values: Values, task: Array, z: Array) -> Array:
    """Of the groups of the rows, the sticks integrated out."""
    V = jnp.atleast_2d(values[found.sticks])
    count = jnp.zeros((len(V), found.num_groups), V.dtype).at[task, z].add(1)
    concentration = values[found.concentration] if found.concentration else prior.concentration[0]
    return jnp.sum(betaln(*sticks_given(count, concentration)) - betaln(1.0, concentration))


# (1).


def log_marginal_at(
    found: Assignment, shape: Shape, prior: Prior, values: Values, group: Array
) -> Callable[[SufficientSums], Array]:
    """log m of the sums over the rows of a group, up to a number for each row; phi are the
    parameters of `group`, any one that has rows.
    """
    one = lambda leaf: leaf[group][None]
    const, matrix, answers, covariance, columns = group_messages_at(found, shape, values)
    said = Message(
        one(const),
        one(matrix),
        answers[:, group][:, None],
        covariance[:, group][:, None],
        columns[:, group][:, None],
    )
    own = prior._replace(
        columns=jax.tree.map(one, prior.columns), features=jax.tree.map(one, prior.features)
    )
    blocks = [*found.columns, *([found.features] if found.features else [])]
    phi = [jax.tree.map(one, values_by_group(found, block, values)) for block in found.columns]
    phi += [tuple(one(values[name]) for name in found.features.priors)] if found.features else []
    w = with_class_axis(values[found.experts.weights], 3)[:, group] if found.experts else None
    common = common_at(found, prior, values)

    def of_blocks(of_columns: Any, of_features: Any) -> Any:
        """log p(phi), experts left out."""
        hypers = [*of_columns, *([of_features] if found.features else [])]
        return sum(
            jnp.sum(block.family.log_prior(hyper, at))
            for block, hyper, at in zip(blocks, hypers, phi, strict=True)
        )

    log_before = of_blocks(own.columns, own.features)
    if w is not None and common is not None:
        log_before = log_before + jnp.sum(
            norm.logpdf(w, common.loc, 1 / jnp.sqrt(precision_of(common)))
        )

    def log_marginal(sums: SufficientSums) -> Array:
        each = jax.tree.map(lambda leaf: leaf[None], sums)
        log_after = of_blocks(*blocks_of(found, shape, own, sums))
        if w is not None and common is not None:
            log_after = log_after + jnp.sum(
                weights_log_density(common, *expert_sums(shape, sums), w[:, None])
            )
        return agreement(said, each, shape.num_features).sum() + log_before - log_after

    return log_marginal


def common_at(found: Assignment, prior: Prior, values: Values) -> Common | None:
    """What experts have in common, at its values."""
    if found.experts is None or prior.experts is None:
        return None
    _, _, _, loc, precision = found.experts
    infinite = jnp.full_like(prior.experts.loc, jnp.inf)
    zeta = with_class_axis(values[loc], 2) if loc else prior.experts.loc
    return Common(
        zeta,
        infinite,
        with_class_axis(values[precision], 2) if precision else precision_of(prior.experts),
        infinite,
    )
