"""A sweep over a truncated mixture of conjugate blocks: all that belongs to groups given the rows,
then all rows given the groups.

The mathematics is that of `CoordinateAscent`, with values in the place of expectations: what a
block says of a row (`inference.kernels.coordinate_ascent.rows`), the sums over rows that it follows
from, and the parameters that follow (`inference.kernels.coordinate_ascent.posterior`), which of known numbers are those of the complete
conditional. What can be integrated out is, and is drawn again before anything else depends on it:

- the group of a row waits neither for its missing entries nor for its soft labels, which are drawn
  together after it; with more
    than two
  classes the labels of a row with holes wait for one of them, and the others are given;
- what groups are called: two of them change places with their sticks integrated out, several times
  a sweep;
- the concentration sees the sticks up to the last group that has rows, what experts have in common
  those experts whose rows have
    labels;
  the others would tell of nothing but its last value;
- soft labels that no label tells of are seen by nothing;
- groups split and merge with all that belongs to them integrated out (`mixture_splits`), but for
  tasks that share groups by an
    index.

Cost of a sweep over n rows, K groups and D entries of a row: 2 n K D^2, with m holes in a row n K
m^3 / 2 more, K D^3, and `NUM_SPLITS` R D^3 for R rows of two groups.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from inference.kernels.conditional_gibbs.mixture_groups import are_alike, draw_groups_given
from inference.kernels.conditional_gibbs.mixture_splits import (
    SeenRows,
    common_at,
    log_marginal_at,
    split_or_merged,
)
from inference.kernels.conditional_gibbs.route import Route
from inference.kernels.coordinate_ascent.draws import cut, draw_incomplete, draw_normal
from inference.kernels.coordinate_ascent.posterior import (
    expert_sums,
    gathered,
    message_at,
    shape_of,
    statistics_of,
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
from inference.program.compiling import once
from inference.program.program import Program
from inference.reading.conjugate.quadratic import weights_posterior
from inference.reading.stick_mixture.read import gaps, read_assignment
from inference.reading.stick_mixture.structure import with_class_axis

__all__ = ["AssignmentSweep"]

Values = Mapping[str, Array]

NUM_SPLITS = 1  # a sweep; each costs up to half of one, where most rows are of two groups


class AssignmentSweep(Route):
    """What a program's rows need for a sweep; reads the model and proves the reading."""

    name, fields, drawn = "mixture", ("num_groups",), (("assignment of rows", "conjugate mixture"),)

    def __init__(self, program: Program):
        self.found = read_assignment(program)
        self.rows = self.found.rows(program)
        self.shape = shape_of(self.rows)
        self.statistics, _ = statistics_of(self.found, self.rows)
        self.not_identified = tuple(sorted(self.found.by_number))
        self.buckets = lay_out(self.rows, self.statistics, str(jnp.result_type(float)))
        self.prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), self.found.prior)
        self.num_tasks = int(np.prod(program.sites[self.found.sticks].shape[:-1]))
        few = self.found.few
        self._few_rows, start = self.found.rows(few), self.found.start(few, 0)
        self._few_values = once(lambda start: few.constrain(start), start)(start)

    def start(self, rng_key: Array) -> dict[str, Array]:
        """Values of the sites of rows, and of what tasks share: groups by k-means, means of
        columns, soft labels on the right side.
        """
        found, rows = self.found, self.rows
        rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
        group, share = start_groups(rows, self.statistics, found, self.num_tasks, "kmeans", rng)
        values: dict[str, Any] = {found.z: group}
        if found.upper and share is not None:
            values[found.upper.site] = share.argmax(-1)
        if found.holes:
            values[found.holes] = column_means(rows.features)[tuple(rows.holes.T)]
        if found.experts:
            soft = rows.signs.T
            values[found.experts.soft] = (
                soft if len(found.few.sites[found.experts.soft].shape) == 2 else soft[0]
            )
        return {
            name: jnp.asarray(value, found.few.sites[name].dtype) for name, value in values.items()
        }

    def data(self, program: Program) -> tuple[RowBucket, ...]:
        """The rows of the program that was read."""
        return self.buckets

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: tuple[RowBucket, ...]
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """All sites after a sweep, how far the model then is from what was read, and the model."""
        split_key, weight_key, group_key, row_key = random.split(rng_key, 4)
        can_split = self.found.upper is None and are_alike(self.found) and len(self.rows.task) > 1
        if can_split:
            values = {**values, self.found.z: self._regrouped(split_key, values, data)}
        sums = self.sums(values, data)
        if can_split and self.found.experts:
            values = {**values, **self._weights_given(weight_key, values, sums)}
        groups = draw_groups_given(group_key, self.found, self.shape, self.prior, values, sums)
        values = {**values, **groups}
        values = values | self._rows_given(row_key, values, self.message(values), data)
        return values, [self.residual(values)], program

    def _regrouped(self, rng_key: Array, values: Values, data: tuple[RowBucket, ...]) -> Array:
        """The groups of the rows after some of them have split or merged."""
        rows = self._seen(values, data)
        largest = jnp.argmax(jnp.bincount(values[self.found.z], length=self.found.num_groups))
        log_marginal = log_marginal_at(self.found, self.shape, self.prior, values, largest)

        def turn(i: Array, z: Array) -> Array:
            return split_or_merged(
                random.fold_in(rng_key, i), self.found, self.prior, values, z, rows, log_marginal
            )

        return lax.fori_loop(0, NUM_SPLITS, turn, values[self.found.z])

    def _seen(self, values: Values, data: tuple[RowBucket, ...]) -> SeenRows:
        """The rows of all buckets side by side."""
        filled = self._filled(values)
        by_row = lambda width: jnp.zeros((len(self.rows.task), width))
        u, statistics, signs = (
            by_row(self.shape.num_entries),
            by_row(self.statistics.shape[1]),
            by_row(self.rows.signs.shape[1]),
        )
        for bucket in data:
            put = lambda whole, part, row=bucket.row: whole.at[row].set(part, mode="drop")
            u, statistics, signs = (
                put(u, bucket.entries),
                put(statistics, bucket.statistics),
                put(signs, bucket.signs),
            )
        u = u.at[:, : self.shape.num_features].add(filled)
        return SeenRows(
            u,
            statistics,
            self._soft(values),
            (signs != 0).astype(u.dtype),
            jnp.asarray(self.rows.task),
        )

    def _weights_given(
        self, rng_key: Array, values: Values, sums: SufficientSums
    ) -> dict[str, Array]:
        """Of the experts, which were integrated out: what they have in common is as it was."""
        experts, common = self.found.experts, common_at(self.found, self.prior, values)
        assert experts is not None
        assert common is not None
        w, _ = draw_normal(
            weights_posterior(common, *expert_sums(self.shape, gathered(sums, None))), rng_key
        )
        return {experts.weights: w.reshape(values[experts.weights].shape)}

    def num_groups(self, values: Values) -> Array:
        """How many have rows."""
        group = self.found.group_of_rows(values, jnp.asarray(self.rows.task))
        return jnp.sum(jnp.bincount(group, length=self.found.num_groups) > 0)

    def residual(self, values: Values) -> Array:
        """How far the model is, on some of its rows, from what was read, at these values of all
        that belongs to groups.
        """
        own = {
            name: at if name in self.found.of_rows else values[name]
            for name, at in self._few_values.items()
        }
        each = gaps(self.found, self.found.few, self._few_rows, self.prior, own)
        return jnp.max(jnp.stack([gap.astype(float) for gap in each.values()]))

    def message(self, values: Values) -> Message:
        """What the groups of each task say of its rows."""
        return message_at(self.found, self.shape, values)

    def sums(self, values: Values, data: tuple[RowBucket, ...]) -> SufficientSums:
        """Over the rows of each group of a task."""
        z, filled, soft = values[self.found.z], self._filled(values), self._soft(values)
        num_rows, groups = len(z), jnp.arange(self.found.num_own, dtype=z.dtype)

        def add(total: SufficientSums, chunk: RowBucket) -> tuple[SufficientSums, None]:
            at = jnp.minimum(chunk.row, num_rows - 1)
            is_hole = jnp.arange(chunk.missing.shape[1])[None] < chunk.num_missing[:, None]
            u = _with(
                chunk, jnp.where(is_hole, jnp.take_along_axis(filled[at], chunk.missing, 1), 0)
            )
            is_own = ((z[at][:, None] == groups[None]) & (chunk.row < num_rows)[:, None]).astype(
                u.dtype
            )
            moments, is_asked = (
                jnp.einsum("pk,pi,pj->kij", is_own, u, u),
                class_masks(chunk.signs[0]).all,
            )
            products = jnp.einsum("pk,pc,pi->cki", is_own, soft[at] * is_asked[None], u)
            of_asked = is_asked[:, None, None, None] * moments[None]
            own = SufficientSums(
                moments, of_asked, products, chunk.statistics.T @ is_own, jnp.zeros((), u.dtype)
            )
            return total.plus_task(own, chunk.task), None

        total = self._no_rows()
        for bucket in data:
            total, _ = lax.scan(add, total, bucket)
        return total

    def _no_rows(self) -> SufficientSums:
        tasks, groups, size, classes = (
            self.num_tasks,
            self.found.num_own,
            self.shape.num_entries,
            self.rows.signs.shape[1],
        )
        zeros = lambda *shape: jnp.zeros((tasks, *shape))
        columns = zeros(self.statistics.shape[1], groups)
        return SufficientSums(
            zeros(groups, size, size),
            zeros(classes, groups, size, size),
            zeros(classes, groups, size),
            columns,
            jnp.zeros(()),
        )

    def _filled(self, values: Values) -> Array:
        """The missing entries in their places [row, feature]."""
        empty = jnp.zeros(self.rows.features.shape)
        return (
            empty.at[tuple(self.rows.holes.T)].set(values[self.found.holes])
            if self.found.holes
            else empty
        )

    def _soft(self, values: Values) -> Array:
        """Soft labels [row, class]."""
        return (
            with_class_axis(values[self.found.experts.soft], 2).T
            if self.found.experts
            else jnp.zeros((len(self.rows.task), 0))
        )

    def _rows_given(
        self, rng_key: Array, values: Values, message: Message, data: tuple[RowBucket, ...]
    ) -> dict[str, Array]:
        """Groups, missing entries and soft labels of all rows."""
        found, before = self.found, self._soft(values)
        z, filled, soft = values[found.z], jnp.zeros(self.rows.features.shape), before

        def one(part: tuple[Array, RowBucket]) -> tuple[Array, Array, Array]:
            key, chunk = part
            return _drawn(
                key,
                message_to(message, chunk.task),
                chunk,
                before[jnp.minimum(chunk.row, len(before) - 1)],
            )

        for i, bucket in enumerate(data):
            group, value, label = lax.map(
                one, (random.split(random.fold_in(rng_key, i), len(bucket.row)), bucket)
            )
            z = z.at[bucket.row].set(group.astype(z.dtype), mode="drop")
            filled = filled.at[bucket.row[..., None], bucket.missing].add(value, mode="drop")
            soft = soft.at[bucket.row].set(label, mode="drop")
        drawn = {found.z: z}
        if found.holes:
            drawn[found.holes] = filled[tuple(self.rows.holes.T)]
        if found.experts:
            drawn[found.experts.soft] = soft.T.reshape(values[found.experts.soft].shape)
        return drawn


def _with(chunk: RowBucket, value: Array) -> Array:
    """Entries of the rows, the missing ones filled."""
    return chunk.entries.at[jnp.arange(len(value))[:, None], chunk.missing].add(value)


def _drawn(
    rng_key: Array, said: Message, chunk: RowBucket, before: Array
) -> tuple[Array, Array, Array]:
    """Group, missing entries and soft labels of the rows of a chunk; `before` [place, class] are
    the soft labels as they were.
    """
    group_key, hole_key, soft_key = random.split(rng_key, 3)
    if chunk.missing.shape[1]:
        num = max(before.shape[1] - 1, 0)
        others = (before * class_masks(chunk.signs[0]).others[None])[:, :num]
        known = jnp.broadcast_to(others[:, :, None], (*others.shape, len(said.const)))
        group = random.categorical(
            group_key, incomplete_given_soft(said, chunk, known, jnp.zeros_like(known)).log_rho
        )
    else:
        group = random.categorical(group_key, complete_posterior(said, chunk).log_joint.T)
    experts, value = (
        said.answers[:, group].swapaxes(0, 1),
        jnp.zeros(chunk.missing.shape, said.const.dtype),
    )
    if chunk.missing.shape[1]:
        _, value, _ = draw_incomplete(hole_key, said, chunk, others, others, experts, group)
    loc = jnp.einsum("pci,pi->pc", experts, _with(chunk, value))
    return group, value, cut(loc, jnp.ones_like(loc), chunk.signs).sample(soft_key)
