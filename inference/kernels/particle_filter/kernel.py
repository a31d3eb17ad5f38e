"""Sequential Monte Carlo over the rows of a mixture whose groups are integrated out.

The evidence Z = p(rows) is estimated by the product over rows of

    sum over particles of weight  x  sum over groups of p(group | partition) p(row | group).

Row by row every particle may put the row into each of its groups, or into a new one. The weights of
all these candidates are exact, and a resampling scheme keeps `num_particles` of them. Z is unbiased
for every scheme and number of particles. With as many particles as there are partitions "optimal"
enumerates them, and everything is exact. The structure of the model is read off its trace and
proved on a few rows (`inference.reading.crp_mixture`): the filter follows an edit of the model, or
refuses it.

- Observed classes are independent: each has a filter of its own. From the first row of unknown
  class on, one filter of joint particles (class and group) replaces them.
- Latent scalars, such as a random concentration or a hyper-parameter of a component, are learned
  over a `grid`: one filter for each point, weighted by prior and evidence.
- `rejuvenate` redraws the groups of that many past rows after each row, by Gibbs steps, so that
  early mistakes are forgotten.
- `shuffle` has each replicate read the rows in an order of its own. Replicates in one order share
  its early mistakes; those in several orders differ by them, which shows in the spread of their
  evidence, and their average predicts better than each.

Cost of a row: O(grid x (T x columns + particles x classes x groups)), whatever the number of rows
before. T is the number of distinct groups in use, about 3 for each particle. Room for groups is
doubled when it is full. Memory: the table of groups, and 8 bytes x grid x particles a row for the
assignments, which `keep_assignments=False` does not store. With `rejuvenate` all past rows are
stored, 4 bytes x grid x particles each, and a row costs O(grid x particles x rows before) more.

Mansinghka, Roy, Rifkin and Tenenbaum (2007), "AClass: an online algorithm for generative
classification"; Fearnhead (2004).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Float, Int

from inference.distributions.partitions import ExchangeablePartition
from inference.kernels.particle_filter.particles import (
    Genealogy,
    Groups,
    Rules,
    drawn_particles,
    drawn_partitions,
    empty_genealogy,
    filter_row,
    filters,
    join_each,
    joined_genealogy,
    partitions,
    record,
    redraw,
    start,
    table_of,
    wider,
)
from inference.kernels.particle_filter.predict import (
    drawn_places,
    log_classes,
    log_shares,
    mean_rows,
    new_rows,
)
from inference.maths.host import generator
from inference.maths.resampling import SCHEMES
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole
from inference.reading.crp_mixture import Partition, PartitionRows, grid_of, read_partition
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = ["FilterData", "FilterReading", "FilterState", "ParticleFilter", "RowReport"]

NUM_GROUPS = 8  # of each class that there is room for at the start; doubled when it is full
NUM_ROWS = 6  # of the table for each particle at the start; doubled when it is full
NUM_KEPT = 1024  # rows of data that there is room for at the least, so that shapes seldom change


class FilterState(NamedTuple):
    """The particles, and what the next rows need."""

    groups: Groups  # [grid, table, ...]
    seating: ExchangeablePartition  # [grid]: the rule by which rows join groups
    class_weights: Array  # [grid, class]
    log_prior: Array  # [grid], normalised
    log_evidence: Array  # [grid]: of all rows so far
    rounding: Array  # [grid]: error of `log_evidence` by rounding, of Kahan's summation
    class_count: Array  # [class]: rows of known class
    genealogy: Genealogy
    past: PartitionRows  # all rows so far where they are redrawn, else none
    seen: Array  # rows so far
    row: Array  # rows so far of the present data
    num_rows: Array  # of the present data
    order: Array  # [row] of the first data, in which they are read; empty: as they come
    next_label: Array  # class of the next row, -1 where it is latent
    rng_key: Array
    points: dict[str, Array]  # values of the latent scalars, {site: [grid]}
    most_groups: Array  # of each class, by the model

    def log_points(self) -> Array:
        """Returns the log weight of each point of the grid, up to a constant."""
        return self.log_prior + (self.log_evidence - self.log_evidence.max()) - self.rounding

    def on_host(self) -> "FilterState":
        """Returns the same state in NumPy arrays."""
        return jax.device_get(self._replace(rng_key=random.key_data(self.rng_key)))

    def place(self, row: Array) -> Array:
        """Returns where the row with this number in the order of reading is in the present data."""
        if not len(self.order):
            return row
        # after an update rows have been seen before those of the present data
        is_in_order = (self.seen == self.row) & (row < len(self.order))
        return jnp.where(is_in_order, self.order[jnp.minimum(row, len(self.order) - 1)], row)

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Returns NumPy values in the order of the data, -1 for rows that were not read yet.

        Args:
            values: In the order of reading, [row, ...].
        """
        if not len(self.order):
            return values
        seen, num_rows = int(self.seen), int(self.seen - self.row + self.num_rows)
        order = np.asarray(self.order)
        found = np.full((num_rows, *values.shape[1:]), -1, values.dtype)
        found[np.concatenate([order, np.arange(len(order), seen)])[:seen]] = values
        return found

    def total_log_evidence(self) -> np.ndarray:
        """Returns the log evidence of all rows so far, with the latent scalars summed out.

        It is the log of the sum over the grid of prior times evidence.
        """
        log_prior, log_evidence, rounding = (
            np.asarray(part, float) for part in (self.log_prior, self.log_evidence, self.rounding)
        )
        return np.logaddexp.reduce(log_prior + log_evidence - rounding)


class FilterData(NamedTuple):
    """The present rows."""

    rows: PartitionRows  # padded to a power of two, so that similar sizes share compiled code
    num_rows: np.ndarray  # not a JAX array, so that predictions may be traced


@dataclass(frozen=True)
class FilterReading:
    """The structure of a model, and the settings that compiled code depends on."""

    partition: Partition
    rules: Rules
    keeps_rows: bool  # whether assignments are kept; the tree then has the rows of all updates

    def more(self, program: Program) -> "tuple[FilterReading, FilterData]":
        """Returns the reading and the data of more rows; raises ValueError for another model."""
        if differences := self.partition.differences(program):
            raise ValueError(
                f"update: more rows of the same model are wanted, but {'; '.join(differences)}."
            )
        return self, self.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """Returns the arguments that have an entry for each row."""
        return self.partition.by_row(programs) if self.keeps_rows else ()

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: the site of the partition, and the site of its classes."""
        return self.partition.attributes

    def data(self, program: Program) -> FilterData:
        """Returns the rows of a program."""
        rows = self.partition.rows(program)
        labels = rows.labels if self.partition.num_classes > 1 else np.zeros_like(rows.labels)
        more = 2 ** int(np.ceil(np.log2(len(labels)))) - len(labels)
        pad = lambda leaf: jax.device_put(
            np.concatenate([leaf, np.zeros((more, *leaf.shape[1:]), leaf.dtype)])
        )
        padded = PartitionRows(
            {site: pad(value) for site, value in _in_precision(rows.values).items()}, pad(labels)
        )
        return FilterData(padded, np.asarray(len(labels), np.int32))

    def bounded(self, num_groups: int) -> int:
        """Returns the number of groups, at most what the model allows."""
        most = self.partition.max_groups
        return num_groups if most is None else min(num_groups, most)


class RowReport(NamedTuple):
    """Statistics that a step records."""

    ess: Array  # effective sample size of the filter that took the row
    resampled: Array
    num_groups: Array  # expected number of groups of that filter
    log_evidence: Array  # of all rows so far


class ParticleFilter(Algorithm):
    """Filters the rows of `model` in the order of the data; `Driver.update` adds more rows.

    Args:
        model: A model with one partition of its rows, by `CRP`, `PitmanYor` or another
            `ExchangeablePartition`, and conjugate components, such as `zoo.load("aclass").model`.
        num_particles: Candidates that each filter keeps after a row.
        resampling: "optimal", "systematic" or "multinomial".
        grid: Values of the model's latent scalars, {"alpha": [0.1, 0.3, 1.0, 3.0]}. Each
            combination is a filter of its own, whose prior probability is the prior density times
            the spacing, normalised.
        rejuvenate: Past rows whose groups are redrawn after each row.
        keep_assignments: Whether the group of every row is stored. With False memory is constant,
            and the posterior has no `z`.
        shuffle: Whether each replicate reads the rows in a random order of its own, those of known
            class first. The rows of an update are read as they come.
    """

    report = "smc"
    draws_at_end = True
    command = Command(
        {"num_particles": 200, "shuffle": True},
        {"num_warmup": None},
        held_out=0.2,
        predicts_by_states=True,
        learns_on=True,
        is_marginal=True,
    )

    def __init__(
        self,
        model: Any,
        *,
        num_particles: int = 40,
        resampling: str = "optimal",
        grid: Mapping[str, Any] | None = None,
        rejuvenate: int = 0,
        keep_assignments: bool = True,
        shuffle: bool = False,
    ):
        check_setting(resampling in SCHEMES, f"one of {sorted(SCHEMES)}", resampling=resampling)
        check_setting(
            isinstance(grid, Mapping | None),
            "the values of latent scalars, such as {'alpha': [0.1, 1.0]}",
            grid=grid,
        )
        check_whole(1, num_particles=num_particles)
        check_whole(0, rejuvenate=rejuvenate)
        if rejuvenate and not keep_assignments:
            raise ValueError(
                "rejuvenate: redraws assignments, so they must be kept; leave keep_assignments at "
                "True."
            )
        self.model, self.num_particles, self.resampling = model, num_particles, resampling
        self.grid = {
            name: np.atleast_1d(np.asarray(values, float)) for name, values in (grid or {}).items()
        }
        self.rejuvenate, self.keep_assignments = rejuvenate, keep_assignments
        self.shuffle = shuffle

    @override
    def read(self, program: Program) -> tuple[FilterReading, FilterData]:
        found = read_partition(program)
        shares = "dirichlet" if found.shares else "fixed" if found.labels else None
        rules = Rules(
            tuple((block.site, block.family) for block in found.blocks), shares, self.resampling
        )
        reading = FilterReading(found, rules, self.keep_assignments)
        return reading, reading.data(program)

    @override
    def init(self, rng_key: Array, reading: FilterReading, data: FilterData) -> FilterState:
        points, log_prior = grid_of(reading.partition, self.grid)
        order = self._order(rng_key, data)
        first = np.asarray(data.rows.labels)[order[0] if len(order) else 0]
        given = points, log_prior, data, order, first, rng_key
        leaves, form = jax.tree.flatten(given)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return jax.device_put(_start(self, reading, bool(first < 0), form, shapes)(*given))

    def _order(self, rng_key: Array, data: FilterData) -> np.ndarray:
        """The order in which the rows are read, of the length of the padded data."""
        num_rows, labels = int(data.num_rows), np.asarray(data.rows.labels)
        if not self.shuffle:
            return np.zeros(0, np.int32)
        order = np.arange(len(labels), dtype=np.int32)
        generator(rng_key).shuffle(order[:num_rows])
        order[:num_rows] = order[:num_rows][np.argsort(labels[order[:num_rows]] < 0, kind="stable")]
        return order

    def _begun(
        self,
        reading: FilterReading,
        points: dict[str, Array],
        log_prior: Float[Array, " grid"],
        data: FilterData,
        order: Int[Array, " row"],
        first: Int[Array, ""],
        rng_key: Array,
        *,
        is_joint: bool,
    ) -> FilterState:
        found = jax.vmap(reading.partition.parameters, axis_size=len(log_prior))(points)
        rows = data.rows
        num_classes, num_grid = reading.partition.num_classes, len(log_prior)
        begin = lambda priors: start(
            reading.rules,
            priors,
            num_tables=1 if is_joint else num_classes,
            num_particles=self.num_particles,
            num_rows=(NUM_ROWS + 2 * self.rejuvenate) * self.num_particles + num_classes,
            num_groups=reading.bounded(NUM_GROUPS),
        )
        num_kept = max(len(rows.labels), NUM_KEPT) if self.keep_assignments else 0
        genealogy = empty_genealogy(
            num_kept,
            num_grid,
            num_classes,
            self.num_particles,
            joint=is_joint,
            whole=self.rejuvenate > 0,
        )
        past = jax.tree.map(
            lambda leaf: jnp.zeros(
                (num_kept if self.rejuvenate else 0, *leaf.shape[1:]), leaf.dtype
            ),
            rows,
        )
        zero = jnp.zeros((), jnp.int32)
        return FilterState(
            jax.vmap(begin)(found.priors),
            found.seating,
            found.class_weights,
            log_prior,
            jnp.zeros_like(log_prior),
            jnp.zeros_like(log_prior),
            jnp.zeros(num_classes, log_prior.dtype),
            genealogy,
            past,
            zero,
            zero,
            jnp.asarray(data.num_rows),
            order,
            first,
            rng_key,
            points,
            jnp.asarray(reading.bounded(np.iinfo(np.int32).max), jnp.int32),
        )

    @override
    def step(
        self, rng_key: Array, state: FilterState, reading: FilterReading, data: FilterData
    ) -> tuple[FilterState, RowReport]:
        labels, at = data.rows.labels, state.place(state.row)
        x, label = jax.tree.map(lambda leaf: leaf[at], data.rows)
        row_key, past_key = random.split(rng_key)
        one = lambda groups, seating, weights, key: filter_row(
            reading.rules, groups, (seating, weights, state.class_count), x, label, key
        )
        groups, chosen, total = _over_grid(
            one, row_key, state.groups, state.seating, state.class_weights
        )
        increment = total - state.rounding  # Kahan's sum
        log_evidence = state.log_evidence + increment
        past = (
            jax.tree.map(
                lambda leaf, new: leaf.at[state.seen].set(new), state.past, PartitionRows(x, label)
            )
            if self.rejuvenate
            else state.past
        )
        next_label = jnp.where(
            state.row + 1 < state.num_rows,
            labels[jnp.minimum(state.place(state.row + 1), len(labels) - 1)],
            0,
        )
        state = state._replace(
            groups=groups,
            log_evidence=log_evidence,
            rounding=(log_evidence - state.log_evidence) - increment,
            class_count=state.class_count.at[label].add(jnp.where(label >= 0, 1, 0)),
            genealogy=record(
                state.genealogy,
                state.seen,
                chosen.parent,
                _code(reading, groups, chosen.choice, label),
            ),
            past=past,
            seen=state.seen + 1,
            row=state.row + 1,
            next_label=next_label,
        )
        if self.rejuvenate:
            redrawn = lambda i, at: self._redrawn(random.fold_in(past_key, i), at, reading)
            state = jax.lax.fori_loop(0, self.rejuvenate, redrawn, state)
        best = jnp.argmax(state.log_points()) if len(state.log_prior) > 1 else 0
        groups, chosen = jax.tree.map(lambda leaf: leaf[best], (state.groups, chosen))
        table = table_of(groups, label)
        weight = jnp.exp(groups.log_weight[table])
        num_groups = jnp.sum(
            groups.count[table][groups.slot[table]] > 0, axis=(-2, -1), dtype=weight.dtype
        )
        return state, RowReport(
            1 / jnp.sum(weight**2),
            chosen.resampled,
            jnp.sum(weight * num_groups),
            jax.nn.logsumexp(state.log_prior + state.log_evidence),
        )

    def _redrawn(self, rng_key: Array, state: FilterState, reading: FilterReading) -> FilterState:
        """Redraws the group of a past row, chosen at random, in every particle."""
        which_key, draw_key = random.split(rng_key)
        i = random.randint(which_key, (), 0, state.seen)
        x, label = jax.tree.map(lambda leaf: leaf[i], state.past)
        num_classes, num_groups = reading.partition.num_classes, state.groups.slot.shape[-1]
        own, group = state.genealogy.code[i] % num_classes, state.genealogy.code[i] // num_classes
        choice = group if state.groups.slot.shape[1] > 1 else own * num_groups + group
        known = state.class_count.at[label].add(jnp.where(label >= 0, -1, 0))
        one = lambda groups, seating, weights, choice, key: redraw(
            reading.rules, groups, (seating, weights, known), x, label, choice, key
        )
        groups, choice = _over_grid(
            one, draw_key, state.groups, state.seating, state.class_weights, choice
        )
        code = state.genealogy.code.at[i].set(_code(reading, groups, choice, label))
        return state._replace(groups=groups, genealogy=state.genealogy._replace(code=code))

    @override
    def finished(self, state: FilterState) -> Array:
        return state.row >= state.num_rows

    @override
    def needs_host(self, state: FilterState) -> Array:
        return jnp.stack(list(self._wants(state).values())).any() & ~self.finished(state)

    @override
    def on_host(
        self, states: Sequence[FilterState], reading: FilterReading, data: FilterData
    ) -> Sequence[FilterState]:
        each = [self._wants(state) for state in states]
        if any(wants["join"] for wants in each):
            return [_joined(state, reading) for state in states]
        if any(wants["genealogy"] for wants in each):
            # Tables that are not kept have no rows, and get none.
            double = lambda leaf: jnp.concatenate([leaf, jnp.zeros_like(leaf)])
            return [
                state._replace(
                    genealogy=state.genealogy._replace(
                        parent=double(state.genealogy.parent), code=double(state.genealogy.code)
                    ),
                    past=jax.tree.map(double, state.past),
                )
                for state in states
            ]
        num_rows, num_groups = states[0].groups.count.shape[-1], states[0].groups.slot.shape[-1]
        num_rows *= 2 if any(wants["table"] for wants in each) else 1
        if any(wants["groups"] for wants in each):
            num_groups = reading.bounded(2 * num_groups)
        grow = jax.vmap(lambda one: wider(one, num_rows, num_groups))
        return [state._replace(groups=grow(state.groups)) for state in states]

    def updated(
        self, state: FilterState, reading: FilterReading, data: FilterData, before: FilterData
    ) -> FilterState:
        """Returns the same filter before the first row of other data."""
        if not self.finished(state):
            raise ValueError(
                f"update: the filter has taken {int(state.row)} of {int(state.num_rows)} rows; "
                "finish the run first, by `extend(1_000_000)`."
            )
        return state._replace(
            row=jnp.zeros_like(state.row),
            num_rows=jnp.asarray(data.num_rows),
            next_label=data.rows.labels[0],
        )

    def _wants(self, state: FilterState) -> dict[str, Array]:
        """Whether the next row may need a larger table, more groups, more rows or a joint filter.

        A row changes at most one group of each particle, and each row redrawn after it two.
        """
        groups, num_changes = state.groups, 1 + 2 * self.rejuvenate
        return {
            "table": jnp.max(groups.used) + num_changes * self.num_particles
            > groups.count.shape[-1],
            "groups": (jnp.max(groups.widest) + 1 + self.rejuvenate > groups.slot.shape[-1])
            & (groups.slot.shape[-1] < state.most_groups),
            "genealogy": jnp.asarray(self.keep_assignments)
            & (state.seen >= len(state.genealogy.code)),
            "join": (state.next_label < 0) & (groups.slot.shape[1] > 1),
        }

    # Predictions. `state` is one of `Driver.states`, `reading` is `Driver.reading`.

    def alike(self, states: Sequence[FilterState]) -> Sequence[FilterState]:
        """Returns replicates whose arrays have the same shapes, so that they share compiled code.

        Args:
            states: The states of all replicates.
        """
        num_rows = max(state.groups.count.shape[-1] for state in states)
        num_groups = max(state.groups.slot.shape[-1] for state in states)
        grow = jax.vmap(lambda one: wider(one, num_rows, num_groups))
        is_full = lambda groups: (
            (groups.count.shape[-1], groups.slot.shape[-1])
            == (
                num_rows,
                num_groups,
            )
        )
        return [
            state if is_full(state.groups) else state._replace(groups=grow(state.groups))
            for state in states
        ]

    def log_classes(self, state: FilterState, reading: FilterReading, program: Program) -> Array:
        """Returns log p(class, row | rows seen) of each row of a program, [row, class].

        Args:
            state: The state of the filter.
            reading: Its reading.
            program: The model with new rows; their labels are not used.
        """
        rows = _in_precision(reading.partition.rows(program).values)
        return log_classes(reading.rules, state, rows)

    def mean_rows(
        self, state: FilterState, reading: FilterReading, program: Program
    ) -> dict[str, Array]:
        """Returns the mean of every entry given the observed ones, {site: [row, column]}.

        A site of codes has the probability of each code instead, [row, column, code].

        Args:
            state: The state of the filter.
            reading: Its reading.
            program: The model with new rows; a known label is used.
        """
        data, log_share = reading.data(program), log_shares(reading.rules, state)
        means = mean_rows(reading.rules, state, log_share, data.rows)
        return jax.tree.map(lambda leaf: leaf[: int(data.num_rows)], means)

    def draw_rows(
        self, rng_key: Array, state: FilterState, reading: FilterReading, program: Program
    ) -> tuple[Array, dict[str, Array]]:
        """Draws a class and a complete row for each row of a program, given its observed entries.

        Args:
            rng_key: For the draws.
            state: The state of the filter.
            reading: Its reading.
            program: The model with new rows; a row may be missing as a whole.
        """
        place_key, row_key = random.split(rng_key)
        data, log_share = reading.data(program), log_shares(reading.rules, state)
        cls, place = drawn_places(reading.rules, state, log_share, data.rows, place_key)
        drawn = cls, new_rows(reading.rules, state, place, row_key)
        return jax.tree.map(lambda leaf: leaf[: int(data.num_rows)], drawn)

    @override
    def draw(
        self,
        rng_key: Array,
        state: FilterState,
        reading: FilterReading,
        data: FilterData,
        num_draws: int,
    ) -> dict[str, Array]:
        found, state = reading.partition, state.on_host()
        joint = state.groups.slot.shape[1] < found.num_classes
        point, particle, shares = drawn_particles(rng_key, state, num_draws, joint)
        drawn: dict[str, Any] = {name: values[point] for name, values in state.points.items()}
        if found.shares:
            drawn[found.shares] = shares
        if self.keep_assignments:
            cls, drawn[found.z] = drawn_partitions(state, point, particle)
            if joint:
                name = found.labels
                drawn[name if name in found.few.latent else f"{name}_unobserved"] = cls
        return drawn

    @override
    def results(self, state: FilterState, reading: FilterReading, data: FilterData) -> Results:
        state = state.on_host()
        slot, count, log_weight = state.groups.slot, state.groups.count, state.groups.log_weight
        point = np.arange(len(slot)).reshape(-1, 1, 1, 1, 1)
        table = np.arange(slot.shape[1]).reshape(-1, 1, 1, 1)
        num_groups = (count[point, table, slot] > 0).sum(-1)
        particles = {"log_weight": log_weight, "num_groups": num_groups}
        dims = {
            "log_weight": ("point", "filter", "particle"),
            "num_groups": ("point", "filter", "particle", "class"),
        }
        groups: dict[str, dict[str, Any]] = {"particles": particles}
        log_weight_of_point = state.log_points().astype(float)
        if self.keep_assignments:
            cls, group, ancestor = partitions(state.genealogy, state.seen)
            order = lambda part: np.moveaxis(state.by_row(part), 0, -1)
            particles |= {"class_of_row": order(cls), "group_of_row": order(group)}
            dims |= dict.fromkeys(("class_of_row", "group_of_row"), ("point", "particle", "row"))
            best = int(np.argmax(log_weight_of_point))
            # [row, particle]
            live = (log_weight[best] > -np.inf)[filters(cls, slot.shape[1])]
            pairs = zip(ancestor[:, best], live, strict=True)
            counts = [len(np.unique(of_row[is_live])) for of_row, is_live in pairs]
            groups["ancestry"] = {"unique_ancestors": state.by_row(np.array(counts))}
            dims["unique_ancestors"] = ("row",)
        if state.points:
            groups["grid"] = {
                **state.points,
                "log_weight_of_point": log_weight_of_point
                - np.logaddexp.reduce(log_weight_of_point),
            }
            dims |= dict.fromkeys(groups["grid"], ("point",))
        return Results(groups, {"log_evidence": float(state.total_log_evidence())}, dims)


def _in_precision(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {site: np.asarray(value, jnp.result_type(float)) for site, value in values.items()}


@lru_cache(maxsize=4)
def _start(
    kernel: ParticleFilter, reading: FilterReading, is_joint: bool, form: Any, shapes: tuple
) -> Callable:
    """The start in NumPy, traced once for all replicates."""
    like = jax.tree.unflatten(form, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return interpreted(partial(kernel._begun, reading, is_joint=is_joint), *like)


def _joined(state: FilterState, reading: FilterReading) -> FilterState:
    keys = random.split(random.fold_in(state.rng_key, state.seen), len(state.log_prior))
    groups, link = join_each(reading.rules, state.groups, keys)
    return state._replace(
        groups=groups, genealogy=joined_genealogy(state.genealogy, link, state.seen)
    )


def _over_grid(function: Any, rng_key: Array, *leaves: Any) -> Any:
    """`function(*leaves, key)` at every point of the grid; a single point is not batched."""
    num_grid = len(jax.tree.leaves(leaves)[0])
    if num_grid > 1:
        return jax.vmap(function)(*leaves, random.split(rng_key, num_grid))
    found = function(*jax.tree.map(lambda leaf: leaf[0], leaves), rng_key)
    return jax.tree.map(lambda leaf: leaf[None], found)


def _code(
    reading: FilterReading,
    groups: Groups,
    choice: Int[Array, "grid particle"],
    label: Int[Array, ""],
) -> Int[Array, "grid particle"]:
    num_classes, num_groups = reading.partition.num_classes, groups.slot.shape[-1]
    if groups.slot.shape[1] > 1 or num_classes == 1:
        return (choice * num_classes + label).astype(jnp.int32)
    return (choice % num_groups * num_classes + choice // num_groups).astype(jnp.int32)
