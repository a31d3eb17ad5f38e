"""Gibbs sweep over a truncated stick-breaking mixture of conjugate blocks.

A sweep draws the parameters of all groups given the rows, then all rows given the groups. The
mathematics is that of `CoordinateAscent`, with values in place of expectations. Both kernels share
the messages and the sums over rows (`inference.kernels.coordinate_ascent.rows`), and the conjugate
updates of sticks and blocks (`inference.kernels.coordinate_ascent.posterior`). At known values an
update is a complete conditional.

What can be integrated out is, and is drawn again before anything depends on it:

- The group of a row is drawn with the row's missing entries and soft labels integrated out. With
  more than two classes, only the last soft label of a row with missing entries is integrated out.
- Pairs of groups exchange their places in the order of the sticks by Metropolis moves, with the
  sticks integrated out. So the chain moves between the modes that label switching makes.
- The concentration is drawn given the sticks up to the last group with rows. The shared mean and
  precision of the experts are drawn given the experts whose rows have labels. Sticks and experts
  beyond those are drawn from their prior at the new values.
- The soft labels of rows without a label are not used.

Cost of a sweep over n rows, K groups and D entries of a row: 2 n K D^2 + K D^3; for rows with m
missing entries, n K m^3 / 2 more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import betaln
from jaxtyping import Float, Int
from numpyro.distributions.util import clamp_probs

from inference.kernels.conditional_gibbs.route import Route
from inference.kernels.coordinate_ascent.draws import (
    cut,
    draw_blocks,
    draw_common,
    draw_incomplete,
    draw_normal,
)
from inference.kernels.coordinate_ascent.posterior import (
    Shape,
    agreement,
    blocks_of,
    concentration_given,
    expert_sums,
    gathered,
    group_messages_at,
    message_at,
    shape_of,
    statistics_of,
    sticks_given,
)
from inference.kernels.coordinate_ascent.rows import (
    Message,
    RowBucket,
    SufficientSums,
    class_masks,
    complete_posterior,
    incomplete_given_soft,
    lay_out,
    message_to,
)
from inference.kernels.coordinate_ascent.start import column_means, start_groups
from inference.maths.host import generator
from inference.program.compiling import once
from inference.program.program import Program
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import common_posterior, known_weights, weights_posterior
from inference.reading.stick_mixture.read import assignment_and_rows, gaps
from inference.reading.stick_mixture.structure import Assignment, Prior, StickLevel, with_class_axis

__all__ = ["MixtureRoute", "draw_groups", "draw_sticks", "reordered"]

Values = Mapping[str, Array]


class MixtureRoute(Route):
    """Draws all sites of a mixture; reads the model and proves the reading.

    Args:
        program: the model with its data.
    """

    name, fields, drawn = "mixture", ("num_groups",), (("assignment of rows", "conjugate mixture"),)

    def __init__(self, program: Program):
        self.found, self.rows = found, _ = assignment_and_rows(program)
        self.shape = shape_of(self.rows)
        self.statistics, _ = statistics_of(found, self.rows)
        self.not_identified = tuple(sorted(found.by_number))
        self.buckets = lay_out(self.rows, self.statistics, str(jnp.result_type(float)))
        self.prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), found.prior)
        self.num_tasks = int(np.prod(program.sites[found.sticks].shape[:-1]))
        self._few_rows, start = found.rows(found.few), found.start(found.few, 0)
        self._few_values = once(found.few.constrain, start)(start)

    def start(self, rng_key: Array) -> dict[str, Array]:
        """Start values of the groups, missing entries and soft labels of the rows.

        Groups are found by k-means. Missing entries are at the means of their columns, soft labels
        at the signs that the labels give them.
        """
        found, rows = self.found, self.rows
        rng = generator(rng_key)
        group, share = start_groups(rows, self.statistics, found, self.num_tasks, "kmeans", rng)
        values: dict[str, Any] = {found.z: group}
        if found.upper and share is not None:
            values[found.upper.site] = share.argmax(-1)
        if found.holes:
            values[found.holes] = column_means(rows.features)[tuple(rows.holes.T)]
        if found.experts:
            values[found.experts.soft] = rows.signs.T
        like = found.few.sites  # of as many axes; those of rows are shorter
        return {
            name: jnp.asarray(
                value if np.ndim(value) == len(like[name].shape) else value[0], like[name].dtype
            )
            for name, value in values.items()
        }

    def data(self, program: Program) -> tuple[RowBucket, ...]:
        """The rows of the program that was read."""
        return self.buckets

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: tuple[RowBucket, ...]
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """All sites after a sweep, the residual of the reading there, and the model."""
        group_key, row_key = random.split(rng_key)
        sums = self.sums(values, data)
        groups = draw_groups(group_key, self.found, self.shape, self.prior, values, sums)
        values = {**values, **groups}
        values = values | self._draw_rows(row_key, values, data)
        return values, [self.residual(values)], program

    def recorded(self, values: Values, log_joint: Any) -> tuple[Array, Array]:
        """The number of groups that have rows, and minus the log joint."""
        group = self.found.group_of_rows(values, jnp.asarray(self.rows.task))
        return jnp.sum(jnp.bincount(group, length=self.found.num_groups) > 0), -log_joint(values)

    def residual(self, values: Values) -> Array:
        """The largest gap between the model and the reading, on some rows, at these values.

        `values` has all sites that belong to groups; those of rows are not used.
        """
        own = {
            name: at if name in self.found.of_rows else values[name]
            for name, at in self._few_values.items()
        }
        each = gaps(self.found, self.found.few, self._few_rows, self.prior, own)
        return jnp.max(jnp.stack([gap.astype(float) for gap in each.values()]))

    def sums(self, values: Values, data: tuple[RowBucket, ...]) -> SufficientSums:
        """Sufficient statistics of the rows of each group of each task."""
        z, filled, soft = values[self.found.z], self._filled(values), self._soft(values)
        num_rows, groups = len(z), jnp.arange(self.found.num_own, dtype=z.dtype)

        def add(total: SufficientSums, chunk: RowBucket) -> tuple[SufficientSums, None]:
            at = jnp.minimum(chunk.row, num_rows - 1)
            is_hole = jnp.arange(chunk.missing.shape[1])[None] < chunk.num_missing[:, None]
            u = _with_missing(
                chunk, jnp.where(is_hole, jnp.take_along_axis(filled[at], chunk.missing, 1), 0)
            )
            is_own = (z[at][:, None] == groups[None]) & (chunk.row < num_rows)[:, None]
            weight, is_asked = is_own.astype(u.dtype), class_masks(chunk.signs[0]).all
            moments = jnp.einsum("pk,pi,pj->kij", weight, u, u)
            products = jnp.einsum("pk,pc,pi->cki", weight, soft[at] * is_asked[None], u)
            of_asked = is_asked[:, None, None, None] * moments[None]
            columns = chunk.statistics.T @ weight
            own = SufficientSums(moments, of_asked, products, columns, jnp.zeros((), u.dtype))
            return total.plus_task(own, chunk.task), None

        size, classes = self.shape.num_entries, self.rows.signs.shape[1]
        zeros = lambda *shape: jnp.zeros((self.num_tasks, *shape))
        total = SufficientSums(
            zeros(len(groups), size, size),
            zeros(classes, len(groups), size, size),
            zeros(classes, len(groups), size),
            zeros(self.statistics.shape[1], len(groups)),
            jnp.zeros(()),
        )
        for bucket in data:
            total, _ = lax.scan(add, total, bucket)
        return total

    def _filled(self, values: Values) -> Array:
        filled, holes = jnp.zeros(self.rows.features.shape), self.found.holes
        return filled.at[tuple(self.rows.holes.T)].set(values[holes]) if holes else filled

    def _soft(self, values: Values) -> Array:
        experts = self.found.experts
        return (
            with_class_axis(values[experts.soft], 2).T
            if experts
            else jnp.zeros(self.rows.signs.shape)
        )

    def _draw_rows(
        self, rng_key: Array, values: Values, data: tuple[RowBucket, ...]
    ) -> dict[str, Array]:
        found, before = self.found, self._soft(values)
        message = message_at(found, self.shape, values)
        z, filled, soft = values[found.z], jnp.zeros(self.rows.features.shape), before

        def draw_chunk(part: tuple[Array, RowBucket]) -> tuple[Array, Array, Array]:
            key, chunk = part
            of_rows = before[jnp.minimum(chunk.row, len(before) - 1)]
            return _draw_chunk(key, message_to(message, chunk.task), chunk, of_rows)

        for i, bucket in enumerate(data):
            keys = random.split(random.fold_in(rng_key, i), len(bucket.row))
            group, value, label = lax.map(draw_chunk, (keys, bucket))
            z = z.at[bucket.row].set(group.astype(z.dtype), mode="drop")
            filled = filled.at[bucket.row[..., None], bucket.missing].add(value, mode="drop")
            soft = soft.at[bucket.row].set(label, mode="drop")
        drawn = {found.z: z}
        if found.holes:
            drawn[found.holes] = filled[tuple(self.rows.holes.T)]
        if found.experts:
            drawn[found.experts.soft] = soft.T.reshape(values[found.experts.soft].shape)
        return drawn


def _with_missing(chunk: RowBucket, value: Array) -> Array:
    return chunk.entries.at[jnp.arange(len(value))[:, None], chunk.missing].add(value)


def _draw_chunk(
    rng_key: Array, message: Message, chunk: RowBucket, before: Array
) -> tuple[Array, Array, Array]:
    """Groups, missing entries and soft labels of rows, given their soft labels before."""
    group_key, hole_key, soft_key = random.split(rng_key, 3)
    if chunk.missing.shape[1]:
        num = max(before.shape[1] - 1, 0)
        others = (before * class_masks(chunk.signs[0]).others[None])[:, :num]
        known = jnp.broadcast_to(others[:, :, None], (*others.shape, len(message.const)))
        scores = incomplete_given_soft(message, chunk, known, jnp.zeros_like(known)).log_rho
        group = random.categorical(group_key, scores)
        experts = message.answers[:, group].swapaxes(0, 1)
        _, value, _ = draw_incomplete(hole_key, message, chunk, others, others, experts, group)
    else:
        group = random.categorical(group_key, complete_posterior(message, chunk).log_joint.T)
        experts = message.answers[:, group].swapaxes(0, 1)
        value = jnp.zeros(chunk.missing.shape, message.const.dtype)
    loc = jnp.einsum("pci,pi->pc", experts, _with_missing(chunk, value))
    return group, value, cut(loc, jnp.ones_like(loc), chunk.signs).sample(soft_key)


# All that belongs to groups, given the sums over their rows.


def draw_groups(
    rng_key: Array,
    found: Assignment,
    shape: Shape,
    prior: Prior,
    values: Values,
    sums: SufficientSums,
) -> dict[str, Array]:
    """Draws all sites that do not belong to rows: sticks, shared groups, parameters, experts.

    Groups may be renumbered, so the groups of rows have to be drawn next.

    Args:
        rng_key: a key.
        found: the sites of the mixture.
        shape: sizes of its blocks.
        prior: parameters of the priors.
        values: the values of all sites before.
        sums: sufficient statistics of the rows of each group of each task.
    """
    order_key, stick_key, upper_key, block_key, *expert_keys = random.split(rng_key, 7)
    one, lower = shape.num_features, found.lower
    count = sums.moments[:, :, one, one]
    concentration = _concentration(lower, prior.concentration, values)
    order = _orders(order_key, found, count, concentration)
    sums = _in_order(sums, order)
    new = _draw_level(stick_key, lower, prior.concentration, values, sums.moments[:, :, one, one])
    by_group, share = order[0], None
    if found.upper:
        own, by_group = _draw_upper(upper_key, found, shape, prior, values, sums)
        new |= own
        share = found.share_at(new)
    sums = gathered(sums, share)
    keys = random.split(block_key, 1 + len(found.columns))
    new |= draw_blocks(found, *blocks_of(found, shape, prior, sums), iter(keys))[0]
    if found.experts:
        before = with_class_axis(values[found.experts.weights], 3)[:, by_group]
        new |= _draw_experts(expert_keys, found, shape, prior, before, sums)
    return new


def _concentration(level: StickLevel, prior: Any, values: Values) -> Array:
    return values[level.concentration] if level.concentration else prior[0]


def reordered(
    rng_key: Array, count: Float[Array, "row group"], concentration: Array
) -> Int[Array, " group"]:
    """A new order of the groups, by Metropolis exchanges of pairs with the sticks integrated out.

    Args:
        rng_key: a key.
        count: members of each group; one row for each set of sticks.
        concentration: of the sticks.
    """
    size = count.shape[1]
    log_prior = lambda order: jnp.sum(betaln(*sticks_given(count[:, order], concentration)))

    def exchange(i: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        order, now = at
        pair_key, accept_key = random.split(random.fold_in(rng_key, i))
        one, other = random.randint(pair_key, (2,), 0, size)
        proposed = order.at[one].set(order[other]).at[other].set(order[one])
        then = log_prior(proposed)
        is_taken = jnp.log(random.uniform(accept_key, dtype=then.dtype)) < then - now
        return jnp.where(is_taken, proposed, order), jnp.where(is_taken, then, now)

    start = jnp.arange(size)
    # two exchanges for each group
    return lax.fori_loop(0, 2 * size, exchange, (start, log_prior(start)))[0]


def draw_sticks(
    rng_key: Array, prior: Any, count: Float[Array, "row group"], concentration: Array
) -> tuple[Array, Array]:
    """Draws the sticks [row, stick] and their concentration.

    Args:
        rng_key: a key.
        prior: shape and rate of the concentration's Gamma prior; an infinite rate fixes it.
        count: members of each group; one row for each set of sticks.
        concentration: its value before.
    """
    stick_key, concentration_key, rest_key = random.split(rng_key, 3)
    log_taken, log_left = _log_beta(stick_key, *sticks_given(count, concentration))
    # the sticks behind the last group with members depend on the new concentration alone
    is_used = jnp.cumsum(count[:, ::-1], 1)[:, ::-1][:, :-1] > 0
    a, b = concentration_given(prior, log_left, is_used)
    concentration = jnp.where(jnp.isinf(b), a, random.gamma(concentration_key, a) / b)
    rest, _ = _log_beta(rest_key, *sticks_given(jnp.zeros_like(count), concentration))
    return clamp_probs(jnp.exp(jnp.where(is_used, log_taken, rest))), concentration


def _log_beta(
    rng_key: Array,
    concentration1: Float[Array, "row stick"],
    concentration0: Float[Array, "row stick"],
) -> Float[Array, "2 row stick"]:
    """Logarithms of a Beta variable x and of 1 - x, which may round to 0."""
    both = jnp.stack(jnp.broadcast_arrays(concentration1, concentration0))
    drawn = random.loggamma(rng_key, both)
    return drawn - jnp.logaddexp(*drawn)[None]


def _orders(
    rng_key: Array, found: Assignment, count: Float[Array, "task group"], concentration: Array
) -> Int[Array, "task group"]:
    """The new order of groups [task, group]; without an upper level, one order for all tasks."""
    if found.upper:
        each = lambda key, one: reordered(key, one[None], concentration)
        return jax.vmap(each)(random.split(rng_key, len(count)), count)
    order = jnp.arange(count.shape[1])
    if _is_exchangeable(found):
        order = reordered(rng_key, count, concentration)
    return jnp.broadcast_to(order[None], count.shape)


def _is_exchangeable(found: Assignment) -> bool:
    assert found.prior is not None
    return all(
        np.allclose(leaf, leaf[:1], rtol=1e-6)
        for leaf in jax.tree.leaves((found.prior.columns, found.prior.features))
    )


def _in_order(sums: SufficientSums, order: Array) -> SufficientSums:
    def of_task(
        order: Int[Array, " group"], moments: Float[Array, "group entry entry"], *others: Array
    ) -> tuple[Array, ...]:
        return moments[order], *(part[:, order] for part in others)

    return SufficientSums(*jax.vmap(of_task)(order, *sums[:-1]), sums.bound)


def _draw_level(
    rng_key: Array, level: StickLevel, prior: Any, values: Values, count: Array
) -> dict[str, Array]:
    V, concentration = draw_sticks(rng_key, prior, count, _concentration(level, prior, values))
    new = {level.sticks: V.reshape(values[level.sticks].shape)}
    return new | ({level.concentration: concentration} if level.concentration else {})


def _draw_upper(
    rng_key: Array,
    found: Assignment,
    shape: Shape,
    prior: Prior,
    values: Values,
    sums: SufficientSums,
) -> tuple[dict[str, Array], Array]:
    """Draws the sites of the upper level, and the new order of the shared groups.

    The sites are the shared group of each group of a task, and the sticks of the shared groups.
    """
    level = found.upper
    assert level is not None
    index_key, order_key, stick_key = random.split(rng_key, 3)
    U = values[level.sticks]
    scores = agreement(group_messages_at(found, shape, values), sums, shape.num_features)
    scores = scores + log_sticks(jnp.log(U), jnp.log1p(-U))[None, None]
    index = random.categorical(index_key, scores)
    count = jnp.sum(jax.nn.one_hot(index, found.num_groups, dtype=U.dtype), (0, 1))[None]
    order = jnp.arange(found.num_groups)
    if _is_exchangeable(found):
        order = reordered(order_key, count, _concentration(level, prior.upper, values))
    new = _draw_level(stick_key, level, prior.upper, values, count[:, order])
    return new | {level.site: jnp.argsort(order)[index].astype(values[level.site].dtype)}, order


def _draw_experts(
    keys: Sequence[Array],
    found: Assignment,
    shape: Shape,
    prior: Prior,
    before: Array,
    sums: SufficientSums,
) -> dict[str, Array]:
    """Draws the shared mean and precision of the experts, and then all weights.

    The mean and the precision are given the old weights of the groups with labels.
    """
    experts = found.experts
    assert experts is not None
    assert prior.experts is not None
    has_labels = sums.asked[:, :, shape.num_features, shape.num_features] > 0
    common = common_posterior(prior.experts, known_weights(before), has_labels)
    new, known, _ = draw_common(found, common, keys[:2])
    w, _ = draw_normal(weights_posterior(known, *expert_sums(shape, sums)), keys[2])
    return new | {experts.weights: w.reshape(found.few.sites[experts.weights].shape)}
