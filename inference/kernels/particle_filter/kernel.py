"""Sequential Monte Carlo over the rows of a mixture whose groups are integrated out.

    Z_n = p(rows 1..n),   the product over rows of   sum over particles of  w  sum over groups of  p(group | partition) p(row | group)

Row by row every particle may put the row into each of its groups or into a new one; the weights of
all these candidates are exact, and a resampling scheme keeps `num_particles` of them. Z is unbiased
for every scheme and number of particles; with as many particles as there are partitions "optimal"
enumerates them, and everything is exact. What the model says is read off its trace and proved on a
few rows (`inference.reading.crp_mixture`): edit the model, and the filter follows or refuses.

- Classes that are observed part the model into independent filters, one each. From the first row of
  unknown class on, one filter of joint particles (class and group) goes on from them.
- Latent scalars (a random concentration, a hyper-parameter of a component) are learned over a
  `grid`: a bank of filters, one a point, weighted by prior and evidence.
- `rejuvenate` redraws the groups of that many past rows after each row, by Gibbs steps: the
  particles forget early mistakes.

Cost a row: O(grid x (T x columns + particles x classes x groups)), T rows in use of the table of
distinct groups (some 3 a particle), whatever the number of rows before; where no particle has
`NARROW` groups of a class, only these many are weighed. Memory: the table, and 8 bytes x grid x
particles a row for the assignments, which `keep_assignments=False` drops. With `rejuvenate` all
past rows and 4 bytes x grid x particles each are kept, and a row costs O(grid x particles x rows
before) more.

Mansinghka, Roy, Rifkin and Tenenbaum (2007), "AClass: an online algorithm for generative
classification"; Fearnhead (2004).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn import logsumexp

from inference.distributions import ExchangeablePartition
from inference.kernels.particle_filter import ancestry as ancestry
from inference.kernels.particle_filter.candidates import NARROW, filter_row, join_each, redraw
from inference.kernels.particle_filter.groups import Groups, Rules, start, wider
from inference.kernels.particle_filter.predict import (
    drawn_particles,
    drawn_places,
    log_classes,
    mean_rows,
    new_rows,
)
from inference.maths.resampling import SCHEMES, effective_size
from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole
from inference.reading.crp_mixture import Partition, Rows, grid_of, read_partition
from inference.run.protocol import Algorithm, Results

__all__ = ["FilterData", "FilterReading", "FilterState", "ParticleFilter", "RowReport"]

NUM_GROUPS = 32  # room at the start, in each class; doubles when it is full
NUM_ROWS = 6  # of the table for each particle, at the start
# rows of data whose assignments there is room for, at least: few rows a call then compile nothing
NUM_KEPT = 1024


class FilterState(NamedTuple):
    """Everything that the filter knows."""

    groups: Groups  # [grid, table, ...]
    seating: ExchangeablePartition  # [grid]: the rule by which rows join groups
    class_weights: Array  # [grid, class]
    log_prior: Array  # [grid], normalised
    log_evidence: Array  # [grid]: of all rows so far
    rounding: Array  # [grid]: how much of it is too much; a sum over very many rows would drift
    class_count: Array  # [class]: rows of known class
    history: ancestry.History
    past: Rows  # all rows so far where they are redrawn, else none
    seen: Array  # rows so far
    row: Array  # rows so far of the data at hand
    num_rows: Array  # of the data at hand
    next_label: Array  # class of the next row, -1 where it is latent
    rng_key: Array
    points: dict[str, Array]  # values of the latent scalars, {site: [grid]}
    most_groups: Array  # in each class, by the model

    def log_points(self) -> Array:
        """Log weight of each point of the grid, up to a number that they share."""
        return self.log_prior + (self.log_evidence - jnp.max(self.log_evidence)) - self.rounding

    def total_log_evidence(self) -> np.ndarray:
        """Of all rows so far, over the grid."""
        log_prior, log_evidence, rounding = (
            np.asarray(part, float) for part in (self.log_prior, self.log_evidence, self.rounding)
        )
        return np.logaddexp.reduce(log_prior + log_evidence - rounding)


class FilterData(NamedTuple):
    """The rows at hand."""

    rows: Rows  # padded to a power of two, so that batches of similar size share their compilation
    num_rows: np.ndarray  # on the host, so that what the filter says of rows may be compiled


@dataclass(frozen=True)
class FilterReading:
    """What the filter needs of a model."""

    partition: Partition
    rules: Rules
    # whether the assignments are kept, so that the tree tells of the rows of all updates
    keeps_rows: bool

    def more(self, program: Program) -> "tuple[FilterReading, FilterData]":
        """Other rows of the same model."""
        if differences := self.partition.differences(program):
            raise ValueError(
                f"update: more rows of the same model are wanted, but {'; '.join(differences)}."
            )
        return self, self.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments that have an entry for each row."""
        return self.partition.by_row(programs) if self.keeps_rows else ()

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: the sites of the partition and of its classes."""
        return self.partition.attributes

    def data(self, program: Program) -> FilterData:
        """The rows of a program."""
        rows = self.partition.rows(program)
        labels = rows.labels if self.partition.num_classes > 1 else np.zeros_like(rows.labels)
        more = 2 ** int(np.ceil(np.log2(len(labels)))) - len(labels)
        pad = lambda leaf: jnp.asarray(
            np.concatenate([leaf, np.zeros((more, *leaf.shape[1:]), leaf.dtype)])
        )
        padded = Rows(
            {site: pad(value.astype(float)) for site, value in rows.values.items()}, pad(labels)
        )
        return FilterData(padded, np.asarray(len(labels), np.int32))

    def bounded(self, num_groups: int) -> int:
        """No more groups than the model allows."""
        most = self.partition.max_groups
        return num_groups if most is None else min(num_groups, most)


class RowReport(NamedTuple):
    """What a step reports."""

    ess: Array  # effective particles of the filter that took the row
    resampled: Array
    num_groups: Array  # expected number of groups of that filter
    log_evidence: Array  # of all rows so far


class ParticleFilter(Algorithm):
    """Filters the rows of `model` in the order of the data; `Driver.update` goes on with more.

    :param model: a model with one partition of its rows, by `CRP`, `PitmanYor` or another
    `ExchangeablePartition`, and conjugate
        components, such as `zoo.load("aclass").model`.
    :param num_particles: candidates that are kept a row, in each filter.
    :param resampling: "optimal", "systematic" or "multinomial".
    :param grid: values of the model's latent scalars, {"alpha": [0.1, 0.3, 1.0, 3.0]}; each
    combination is a filter of its own, and its
        prior probability is the prior density there times the spacing, normalised.
    :param rejuvenate: past rows whose groups are redrawn after each row.
    :param keep_assignments: False forgets which row went where, and with it `z` in the posterior;
    memory is then constant.
    """

    report = "smc"

    def __init__(
        self,
        model: Any,
        *,
        num_particles: int = 40,
        resampling: str = "optimal",
        grid: Mapping[str, Any] | None = None,
        rejuvenate: int = 0,
        keep_assignments: bool = True,
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

    def read(self, program: Program) -> tuple[FilterReading, FilterData]:
        """The partition and its conjugate components, proved, and the rows."""
        found = read_partition(program)
        shares = "dirichlet" if found.shares else "fixed" if found.labels else None
        rules = Rules(
            tuple((block.site, block.family) for block in found.blocks), shares, self.resampling
        )
        reading = FilterReading(found, rules, self.keep_assignments)
        return reading, reading.data(program)

    def init(self, rng_key: Array, reading: FilterReading, data: FilterData) -> FilterState:
        """No rows yet."""
        points, log_prior = grid_of(reading.partition, self.grid)
        begin = once(
            partial(self._begun, reading, is_joint=bool(data.rows.labels[0] < 0)),
            points,
            log_prior,
            data,
            rng_key,
        )
        return begin(points, log_prior, data, rng_key)

    def _begun(
        self,
        reading: FilterReading,
        points: dict[str, Array],
        log_prior: Array,
        data: FilterData,
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
        history = ancestry.empty(
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
            history,
            past,
            zero,
            zero,
            jnp.asarray(data.num_rows),
            rows.labels[0],
            rng_key,
            points,
            jnp.asarray(reading.bounded(np.iinfo(np.int32).max), jnp.int32),
        )

    def step(
        self, rng_key: Array, state: FilterState, reading: FilterReading, data: FilterData
    ) -> tuple[FilterState, RowReport]:
        """One row of data."""
        rows = data.rows
        label, x = (
            rows.labels[state.row],
            {site: value[state.row] for site, value in rows.values.items()},
        )
        row_key, past_key = random.split(rng_key)
        # at all points of the grid, so that they remain one branch
        is_narrow = jnp.max(state.groups.widest) < NARROW
        one = lambda groups, seating, weights, key: filter_row(
            reading.rules, groups, is_narrow, (seating, weights, state.class_count), x, label, key
        )
        groups, chosen, total = _over_grid(
            one, row_key, state.groups, state.seating, state.class_weights
        )
        increment = total - state.rounding  # Kahan's sum
        log_evidence = state.log_evidence + increment
        past = (
            jax.tree.map(lambda leaf, new: leaf.at[state.seen].set(new), state.past, Rows(x, label))
            if self.rejuvenate
            else state.past
        )
        state = state._replace(
            groups=groups,
            log_evidence=log_evidence,
            rounding=(log_evidence - state.log_evidence) - increment,
            class_count=state.class_count.at[label].add(jnp.where(label >= 0, 1, 0)),
            history=ancestry.record(
                state.history,
                state.seen,
                chosen.parent,
                _code(reading, groups, chosen.choice, label),
            ),
            past=past,
            seen=state.seen + 1,
            row=state.row + 1,
            next_label=jnp.where(
                state.row + 1 < state.num_rows,
                rows.labels[jnp.minimum(state.row + 1, len(rows.labels) - 1)],
                0,
            ),
        )
        if self.rejuvenate:
            redrawn = lambda i, at: self._redrawn(random.fold_in(past_key, i), at, reading)
            state = jax.lax.fori_loop(0, self.rejuvenate, redrawn, state)
        best = jnp.argmax(state.log_points())
        return state, self._report(
            state, jax.tree.map(lambda leaf: leaf[best], (state.groups, chosen)), label
        )

    def _report(self, state: FilterState, best: tuple[Groups, Any], label: Array) -> RowReport:
        groups, chosen = best
        table = jnp.where(groups.slot.shape[0] > 1, label, 0)
        log_weight = groups.log_weight[table]
        num_groups = jnp.sum(
            groups.count[table][groups.slot[table]] > 0, axis=(-2, -1), dtype=log_weight.dtype
        )
        expected = jnp.sum(jnp.where(log_weight > -jnp.inf, jnp.exp(log_weight) * num_groups, 0))
        return RowReport(
            effective_size(log_weight),
            chosen.resampled,
            expected,
            logsumexp(state.log_prior + state.log_evidence),
        )

    def _redrawn(self, rng_key: Array, state: FilterState, reading: FilterReading) -> FilterState:
        """A past row, chosen at random, has its group drawn anew in every particle."""
        which_key, draw_key = random.split(rng_key)
        i = random.randint(which_key, (), 0, state.seen)
        label, x = (
            state.past.labels[i],
            {site: value[i] for site, value in state.past.values.items()},
        )
        num_classes, num_groups = reading.partition.num_classes, state.groups.slot.shape[-1]
        own, group = state.history.code[i] % num_classes, state.history.code[i] // num_classes
        choice = group if state.groups.slot.shape[1] > 1 else own * num_groups + group
        known = state.class_count.at[label].add(jnp.where(label >= 0, -1, 0))
        one = lambda groups, seating, weights, choice, key: redraw(
            reading.rules, groups, (seating, weights, known), x, label, choice, key
        )
        groups, choice = _over_grid(
            one, draw_key, state.groups, state.seating, state.class_weights, choice
        )
        code = state.history.code.at[i].set(_code(reading, groups, choice, label))
        return state._replace(groups=groups, history=state.history._replace(code=code))

    def finished(self, state: FilterState) -> Array:
        """When every row was seen."""
        return state.row >= state.num_rows

    def needs_host(self, state: FilterState) -> Array:
        """Whether the next row may find no room, or its class is the first that is not known."""
        return jnp.stack(list(self._wants(state).values())).any() & ~self.finished(state)

    def on_host(
        self, states: Sequence[FilterState], reading: FilterReading, data: FilterData
    ) -> Sequence[FilterState]:
        """One filter for all classes where there was one for each; or twice the room where there is
        none.

        Table and groups double together: replicates are stacked, and one may lack the former where
        another lacks the latter.
        """
        each = [self._wants(state) for state in states]
        if any(wants["join"] for wants in each):
            return [_joined(state, reading) for state in states]
        if any(wants["history"] for wants in each):
            return [self._with_room(state, 2 * len(state.history.code)) for state in states]
        groups = states[0].groups
        num_rows, num_groups = (
            2 * groups.count.shape[-1],
            reading.bounded(2 * groups.slot.shape[-1]),
        )
        grow = jax.vmap(lambda one: wider(one, num_rows, num_groups))
        return [state._replace(groups=grow(state.groups)) for state in states]

    def updated(
        self, state: FilterState, reading: FilterReading, data: FilterData, before: FilterData
    ) -> FilterState:
        """The same filter before the first row of other data."""
        if not self.finished(state):
            raise ValueError(
                f"update: the filter has taken {int(state.row)} of {int(state.num_rows)} rows; let "
                "it go on first, by `extend(1_000_000)`."
            )
        return state._replace(
            row=jnp.zeros_like(state.row),
            num_rows=jnp.asarray(data.num_rows),
            next_label=data.rows.labels[0],
        )

    def _wants(self, state: FilterState) -> dict[str, Array]:
        """What the next row may lack: it opens or changes a group in each particle at most, and
        so do the rows redrawn after it, twice.
        """
        groups, num_changes = state.groups, 1 + 2 * self.rejuvenate
        return {
            "table": jnp.max(groups.used) + num_changes * self.num_particles
            > groups.count.shape[-1],
            "groups": (jnp.max(groups.widest) + 1 + self.rejuvenate > groups.slot.shape[-1])
            & (groups.slot.shape[-1] < state.most_groups),
            "history": jnp.asarray(self.keep_assignments) & (state.seen >= len(state.history.code)),
            "join": (state.next_label < 0) & (groups.slot.shape[1] > 1),
        }

    def _with_room(self, state: FilterState, num_rows: int) -> FilterState:
        pad = lambda leaf: jnp.concatenate(
            [leaf, jnp.zeros((num_rows - len(leaf), *leaf.shape[1:]), leaf.dtype)]
        )
        past = jax.tree.map(pad, state.past) if self.rejuvenate else state.past
        return state._replace(history=ancestry.with_room(state.history, num_rows), past=past)

    # What the filter says of other rows: `state` is one of `Driver.states`, `reading` is
    # `Driver.reading`.

    def log_classes(self, state: FilterState, reading: FilterReading, program: Program) -> Array:
        """log p(class, row | rows seen) of each row of a program's data, [row, class]; its
        labels play no part.
        """
        data = reading.data(program)
        return log_classes(reading.rules, state, data.rows)[: int(data.num_rows)]

    def mean_rows(
        self, state: FilterState, reading: FilterReading, program: Program
    ) -> dict[str, Array]:
        """Expected value of every entry given those that its row shows, and its label where it has
        one, {site: [row, column]}; in columns of codes the probability of each, [row, column,
        code].
        """
        data = reading.data(program)
        return jax.tree.map(
            lambda leaf: leaf[: int(data.num_rows)], mean_rows(reading.rules, state, data.rows)
        )

    def draw_rows(
        self, rng_key: Array, state: FilterState, reading: FilterReading, program: Program
    ) -> tuple[Array, dict[str, Array]]:
        """A class and a whole row for each row of a program's data, given what that shows
        (nothing, where all is missing).
        """
        place_key, row_key = random.split(rng_key)
        data = reading.data(program)
        cls, place = drawn_places(reading.rules, state, data.rows, place_key)
        cut = lambda leaf: leaf[: int(data.num_rows)]
        return cut(cls), jax.tree.map(cut, new_rows(reading.rules, state, place, row_key))

    # What the tree holds.

    def draw(
        self,
        rng_key: Array,
        state: FilterState,
        reading: FilterReading,
        data: FilterData,
        num_draws: int,
    ) -> dict[str, Array]:
        """Partitions of the rows, classes where they are latent, shares of the classes and
        latent scalars, jointly.
        """
        found = reading.partition
        joint = state.groups.slot.shape[1] < found.num_classes
        point, particle, shares = jax.device_get(drawn_particles(rng_key, state, num_draws, joint))
        drawn: dict[str, Any] = {
            name: np.asarray(values)[point] for name, values in state.points.items()
        }
        if found.shares:
            drawn[found.shares] = shares
        if self.keep_assignments:
            cls, drawn[found.z] = ancestry.drawn(state.history, state.seen, point, particle)
            if joint:
                drawn[
                    found.labels
                    if found.labels in found.few.latent
                    else f"{found.labels}_unobserved"
                ] = cls
        return drawn

    def results(self, state: FilterState, reading: FilterReading, data: FilterData) -> Results:
        """The weighted particles as they are, the grid, how many ancestors the particles share
        at each row, and the evidence.
        """
        slot, count, log_weight = (
            np.asarray(part)
            for part in (state.groups.slot, state.groups.count, state.groups.log_weight)
        )
        point, table = (
            np.arange(len(slot)).reshape(-1, 1, 1, 1, 1),
            np.arange(slot.shape[1]).reshape(-1, 1, 1, 1),
        )
        particles = {
            "log_weight": log_weight,
            "num_groups": (count[point, table, slot] > 0).sum(-1),
        }
        dims = {
            "log_weight": ("point", "filter", "particle"),
            "num_groups": ("point", "filter", "particle", "class"),
        }
        groups: dict[str, dict[str, Any]] = {"particles": particles}
        log_weight_of_point = np.asarray(state.log_points(), float)
        if self.keep_assignments:
            seen = int(state.seen)
            cls, group, ancestor = (
                np.asarray(part)[:seen] for part in ancestry.partitions(state.history, state.seen)
            )
            order = lambda part: np.moveaxis(part, 0, -1)
            particles |= {"class_of_row": order(cls), "group_of_row": order(group)}
            dims |= dict.fromkeys(("class_of_row", "group_of_row"), ("point", "particle", "row"))
            best = int(np.argmax(log_weight_of_point))
            # [row, particle]
            live = (log_weight[best] > -np.inf)[ancestry.filters(cls, state.groups.slot.shape[1])]
            each = [
                len(np.unique(of_row[is_live]))
                for of_row, is_live in zip(ancestor[:, best], live, strict=True)
            ]
            groups["ancestry"] = {"unique_ancestors": np.array(each)}
            dims["unique_ancestors"] = ("row",)
        if state.points:
            groups["grid"] = {
                **state.points,
                "log_weight_of_point": log_weight_of_point
                - np.logaddexp.reduce(log_weight_of_point),
            }
            dims |= dict.fromkeys(groups["grid"], ("point",))
        return Results(groups, {"log_evidence": float(state.total_log_evidence())}, dims)


def _joined(state: FilterState, reading: FilterReading) -> FilterState:
    """One filter of joint particles, from the filters of the classes."""
    keys = random.split(random.fold_in(state.rng_key, state.seen), len(state.log_prior))
    groups, link = join_each(reading.rules, state.groups, keys)
    return state._replace(groups=groups, history=ancestry.joined(state.history, link, state.seen))


def _over_grid(function: Any, rng_key: Array, *leaves: Any) -> Any:
    """`function(*leaves, key)` at every point of the grid; a single point pays for no batch."""
    num_grid = len(jax.tree.leaves(leaves)[0])
    if num_grid > 1:
        return jax.vmap(function)(*leaves, random.split(rng_key, num_grid))
    found = function(*jax.tree.map(lambda leaf: leaf[0], leaves), rng_key)
    return jax.tree.map(lambda leaf: leaf[None], found)


def _code(reading: FilterReading, groups: Groups, choice: Array, label: Array) -> Array:
    """Class and group of a row in one number."""
    num_classes, num_groups = reading.partition.num_classes, groups.slot.shape[-1]
    if groups.slot.shape[1] > 1 or num_classes == 1:
        return (choice * num_classes + label).astype(jnp.int32)
    return (choice % num_groups * num_classes + choice // num_groups).astype(jnp.int32)
