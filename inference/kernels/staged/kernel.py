"""Learning in stages: some rows at a time, each stage starting from a summary of those before.

    pi_0 = prior,   pi_{s+1}(z)  ~  pi_s(z) p(rows of stage s | z) / Z_s,   log Z = sum of log Z_s

A stage is nested sampling that starts from pi_s and takes its own rows alone as likelihood. What it
finds is summarised by a mixture with the prior in the background, which is pi_{s+1}: a Normal
mixture in unconstrained space, fitted to the points and to the scores of their posterior
(`inference.maths.normal_mixture`), or the paper's, on Hilbert curves (`hilbert_clumps`). So the
likelihood of a row is computed only where earlier rows leave something to find out.

A stage first searches for a proposal q_s near its posterior (`search`). Nested sampling of
(likelihood pi_s / q_s) from q_s, with a fifth of pi_s in q_s, is as exact as from pi_s, with less
information and a smaller error; most new points are then independent draws. Where draws show that
no mixture is near, nested sampling starts from pi_s.

What a mixture cannot represent is lost to later stages. Weighted draws measure the loss in nats
(`weighing.Loss`): it is in the error of the evidence, as `summary_error`, and `summary_loss` is the
mean over the mixtures, which `diagnostics.report` judges. The posterior of few rows is often far
from any mixture. Where the loss would be above `most_lost`, a stage doubles its rows.
Whenever the rows of a run have doubled, and at its end, draws are weighted by all of them
(`weighing`). The `log_evidence` of several stages is by these weights, `nested_log_evidence` the
sum over the stages (with `nested_summary_error` in its error), and `nats_left` the divergence from
the mixture to the posterior of all rows. Where that is large, Normals by batch and match replace
the mixture, or the run begins again with the rows so far as its first stage. The weights do not see
a mode that no component is near to, so the first stage must have enough rows to show the modes.

`Driver(Staged(model, num_stages=20)).run(key, x, y)` deals the rows out at random;
`driver.update(x, y)` is one more stage, at any later time. The rest is as in `NestedSampler`.

The paper has exploration by several states, exploitation of what was fitted, clumps on Hilbert
codes (`summary="code"`) and EM. Unlike in the paper, each model order is learned by itself
(`inference.orders`).

Center (2009), "Learning complex classification models from large data sets". Cost: each stage as
`NestedSampler` on its rows, with the information that is left to it; for q_s some gradients for
each dimension, in the first stage some hundred for each walker, and again where a stage takes more
rows; between stages a gradient for each point and a fit of the mixture; four draws for each
dimension, at least 200, by all rows, some three times in a run; and a stage of all rows so far
where a run begins again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from inference.kernels.nested.kernel import NestedSampler, Nesting
from inference.kernels.nested.state import evidence, information_of
from inference.kernels.staged.hilbert_clumps import HilbertClumps
from inference.kernels.staged.search import (
    FAR,
    Begin,
    LabelledMixture,
    Search,
    StageArrays,
    Start,
)
from inference.kernels.staged.weighing import (
    Account,
    Evidence,
    Loss,
    Weighed,
    Weighing,
    background_correction,
    forgotten,
    loss_of,
    no_loss,
    unweighed,
)
from inference.maths.host import Array, generator, key_data
from inference.maths.normal_mixture import Defensive, FitPoints, Mixture, NormalSummary, Summary
from inference.program.program import Program
from inference.program.sites import (
    StructureError,
    check_setting,
    check_whole,
    is_between,
    is_number,
    is_whole,
)
from inference.reading.stage_rows import (
    StageData,
    StageRows,
    check_at_end,
    check_finished,
    known,
    padded,
    room_for,
    taken,
)
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = [
    "Stage",
    "StageReport",
    "Staged",
    "StagedReading",
    "account_of",
    "key_of",
    "row_evaluations",
    "stage_points",
]

SUMMARIES: dict[str, Summary] = {"state": NormalSummary(), "code": HilbertClumps()}


class Stage(NamedTuple):
    """The state of a run."""

    nest: Any  # Nest; None where nothing has begun
    mixture: Mixture  # of pi_s; without components in the first stage
    proposal: LabelledMixture  # q_s; without components where nested sampling starts from pi_s
    rows: Int[Array, " row"]  # of this stage, padded
    later: Int[Array, "stage row"]  # of all stages but the first, padded
    num_left: Array  # stages to come
    num_rows: Array  # of all stages so far, this one included
    num_weighed: Array  # rows at the last weighting by all rows
    weighed: Weighed  # by all rows, at the end
    before: Account
    stage: Array
    rng_key: Array


class StageReport(NamedTuple):
    """What a step reports."""

    insertion_rank: Array
    log_volume: Array  # of this stage
    log_evidence: Array  # of all stages so far
    stage: Array
    halfway: Array
    evaluations: Array
    num_nan: Array


@dataclass(frozen=True)
class StagedReading:
    """What was read of a model, and the parts of a stage that work on it."""

    nesting: Nesting
    rows: StageRows
    search: Search
    weighing: Weighing

    def more(self, program: Program) -> "tuple[StagedReading, StageData]":
        """The reading and data of more rows of the same model."""
        self.check_alike(program)
        return self, self.rows.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments that have an entry for each row."""
        return self.rows.names

    def check_alike(self, program: Program, asked: str = "update") -> None:
        """Refuses rows of another model, and rows that tell exchangeable members apart."""
        self.rows.check_alike(program, asked)
        exchange = self.nesting.exchange
        if exchange and not exchange.proved(program):
            raise StructureError(
                f"plate {exchange.plate!r}: so far its members were exchangeable, and with these "
                "rows they are not. Begin again, with rows that tell them apart in the first "
                "stage, or with rename=False."
            )


class Staged(Algorithm):
    """Nested sampling of `model` in stages.

    Args:
        model: as for `NestedSampler`; its data are rows of one plate.
        num_stages: parts into which the rows of a run are dealt at random; an update is one more
            stage.
        summary: the family of mixtures between stages: "state", Normal mixtures in unconstrained
            space; "code", the paper's `HilbertClumps`; or such an object.
        num_clumps: the most components of a mixture; None: 8 of "state", 64 of "code".
        background: share of the prior in what a stage starts from. With more of it, modes are found
            sooner that the mixture misses; with less, later rows may lead further away before what
            earlier rows said is forgotten.
        most_lost: nats that the mixture of a stage may lose. Where it would lose more, the stage
            doubles its rows, from those to come; np.inf: it never does, and nothing is weighted by
            all rows. An update has no rows to come, and is not weighted.
        num_walkers: the most walkers of the search in a stage; None: four for each dimension, at
            least 50; 0: no search. With "code" there is none.
        settings: of `NestedSampler`.
    """

    report = "nested"
    draws_at_end = True
    command = Command(
        {"num_live": 100, "num_sweeps": 2.0, "tolerance": 0.01, "track_modes": True},
        {"num_warmup": None, "num_chains": 2},
        learns_on=True,
    )

    def __init__(
        self,
        model: Any,
        *,
        num_stages: int = 10,
        summary: str | Summary = "state",
        num_clumps: int | None = None,
        background: float = 0.02,
        most_lost: float = 0.05,
        num_walkers: int | None = None,
        **settings: Any,
    ):
        self.model, self.sampler = model, NestedSampler(model, **settings)
        is_known = summary in SUMMARIES if isinstance(summary, str) else hasattr(summary, "over")
        check_setting(is_known, " or ".join(map(repr, SUMMARIES)), summary=summary)
        self.summary, self._family = summary, SUMMARIES.get(summary, summary)
        num_clumps = self._family.usual_components if num_clumps is None else num_clumps
        check_whole(1, num_stages=num_stages, num_clumps=num_clumps)
        check_setting(
            is_between(background, 0, 1), "a number between 0 and 1", background=background
        )
        is_count = num_walkers is None or (
            is_whole(num_walkers) and (num_walkers == 0 or num_walkers >= 20)
        )
        check_setting(is_count, "None, 0, or an integer, at least 20", num_walkers=num_walkers)
        check_setting(
            is_number(most_lost) and most_lost > 0, "a number above 0", most_lost=most_lost
        )
        self.num_stages, self.num_clumps = int(num_stages), int(num_clumps)
        self.num_walkers = None if num_walkers is None else int(num_walkers)
        self.background, self.most_lost = background, most_lost

    def read(self, program: Program) -> tuple[StagedReading, StageData]:
        """Prior, likelihood and rows, proved."""
        rows = StageRows.of(program, self.num_stages)
        nesting = Nesting.of(self.sampler, program)
        rows.prove(nesting.split)
        start = self._start(
            nesting.split,
            Defensive(self._family.over(nesting.split.blocks), self.background),
            nesting.exchange,
            rows.axis,
        )
        search = Search(start, rows, self.num_clumps, self.num_walkers)
        reading = StagedReading(nesting, rows, search, Weighing(search, self.most_lost))
        return reading, rows.data(program)

    _start = Start  # what stages start from

    def init(self, rng_key: Array, reading: StagedReading, data: StageData) -> Stage:
        """The first stage, from the prior."""
        rng = generator(rng_key)
        rows, later = reading.rows.dealt(rng, self.num_stages, data)
        nothing = reading.search.nothing
        zero = np.zeros((), reading.nesting.split.dtype)
        count, none = np.zeros((), np.int32), Evidence(zero, zero, no_loss(zero.dtype))
        nowhere = Stage(
            nest=None,
            mixture=nothing.mixture,
            proposal=nothing,
            rows=rows[:0],
            later=later,
            num_left=count + np.int32(self.num_stages - 1),
            num_rows=count,
            num_weighed=count,
            weighed=unweighed(zero.dtype),
            before=Account(none, none, zero, zero),
            stage=count - np.int32(1),
            rng_key=key_data(rng),
        )
        return self._started(nowhere, rows, reading, data, Begin(nothing))

    def step(
        self, rng_key: Array, state: Stage, reading: StagedReading, data: StageData
    ) -> tuple[Stage, StageReport]:
        """One step of the nested sampling of this stage."""
        rows = {name: jnp.asarray(column)[state.rows] for name, column in data.columns.items()}
        densities = reading.search.start.nested_densities(
            StageArrays(state.mixture, rows, is_row=state.rows >= 0), state.proposal
        )
        nest, info = reading.nesting.shrunk(rng_key, state.nest, densities)
        report = StageReport(
            info.insertion_rank,
            info.log_volume,
            state.before.corrected.log_evidence + info.log_evidence,
            state.stage,
            info.halfway,
            info.evaluations,
            info.num_nan,
        )
        return state._replace(nest=nest), report

    def finished(self, state: Stage) -> Array:
        """Whether the last stage is over, and draws were weighted by all rows."""
        is_last = (state.num_left == 0) & (state.num_weighed >= state.num_rows)
        return self.sampler.finished(state.nest) & is_last

    def needs_host(self, state: Stage) -> Array:
        """Whether the sampler needs the host, or a stage is at its end."""
        is_at_end = self.sampler.finished(state.nest) & ~self.finished(state)
        return self.sampler.needs_host(state.nest) | is_at_end

    def on_host(
        self, states: Sequence[Stage], reading: StagedReading, data: StageData
    ) -> Sequence[Stage]:
        """What the sampler needs (new offers, room for dead points), or else the next stage."""
        states = [jax.device_get(state) for state in states]
        if any(self.sampler.needs_host(state.nest) for state in states):
            given = [(state.mixture, state.proposal) for state in states]
            drawing, nests = reading.search.start.draws, [state.nest for state in states]
            nests = reading.nesting.on_host(nests, drawing, given)
            return [state._replace(nest=nest) for state, nest in zip(states, nests, strict=True)]
        return [self._next_stage(state, reading, data) for state in states]

    def updated(
        self, state: Stage, reading: StagedReading, data: StageData, before: StageData
    ) -> Stage:
        """More rows: one more stage, which is not weighted by all rows."""
        state = jax.device_get(state)
        check_finished(state, self.finished(state))
        found, account = self._summarised(state, reading, before)
        total = state.before.then(account)
        if state.weighed.is_there:
            found = reading.search.labelled(key_of(state, 3), found).mixture
            total = total._replace(corrected=state.weighed.evidence)
        state = self._next_from(
            state, np.arange(int(data.num_rows), dtype=np.int32), reading, data, found, total
        )
        return state._replace(num_weighed=state.num_rows)

    # The next stage.

    def _next_stage(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        """The next stage; or this one with more rows, where its mixture loses too much."""
        check_at_end(self.needs_host(state))
        found, account = self._summarised(state, reading, data)
        before = state.before.then(account)
        if state.num_left > 0 and self._is_too_much(account.nested.lost):
            more = _taking_more(state, before.num_evaluations)
            return self._started(*more, reading, data, Begin(LabelledMixture(found)))
        if reading.weighing.is_due(state):
            return self._next_weighed(
                state, reading, data, reading.search.labelled(key_of(state, 3), found), before
            )
        return self._next_from(*taken(state, 1), reading, data, found, before)

    def _next_weighed(
        self,
        state: Stage,
        reading: StagedReading,
        data: StageData,
        found: LabelledMixture,
        before: Account,
    ) -> Stage:
        """The next stage, or the end, after weighting by all rows so far.

        Where the divergence is large, and remains so after a refit of the mixture, all rows so far
        are the first stage again.
        """
        weighing = reading.weighing
        weighed, spent = weighing.by_all(key_of(state, 4), state, found, data)
        if state.num_left > 0 and not weighing.is_fine(weighed):
            refit, weighed, more = weighing.refitted(key_of(state, 5), state, found, weighed, data)
            before, spent = before if refit is found else before.refitted(weighed), spent + more
            found = refit
        before = before._replace(num_evaluations=before.num_evaluations + float(spent))
        if not weighing.is_fine(weighed):
            rows, zeros = weighing.so_far(state, data), jax.tree.map(np.zeros_like, state.before)
            again = state._replace(
                mixture=reading.search.nothing.mixture,
                before=zeros._replace(num_evaluations=before.num_evaluations),
                num_rows=np.zeros_like(state.num_rows),
                rows=rows[:0],
            )
            return self._started(again, rows, reading, data, weighing.begin_again(found, weighed))
        state = state._replace(num_weighed=state.num_rows)
        if state.num_left > 0:
            before = before._replace(corrected=weighed.evidence)
            return self._next_from(*taken(state, 1), reading, data, found.mixture, before)
        of_nest = row_evaluations(state) - state.before.num_evaluations
        return state._replace(
            weighed=weighed,
            before=state.before._replace(num_evaluations=before.num_evaluations - of_nest),
        )

    def _next_from(
        self,
        state: Stage,
        rows: Array,
        reading: StagedReading,
        data: StageData,
        found: Mixture,
        before: Account,
    ) -> Stage:
        state = state._replace(
            mixture=found,
            before=before,
            rows=state.rows[:0],
            weighed=unweighed(reading.nesting.split.dtype),
        )
        return self._started(state, rows, reading, data, Begin(LabelledMixture(found)))

    def _is_too_much(self, lost: Loss) -> bool:
        """Whether a mixture loses too much; it does where the loss is NaN."""
        return self.most_lost < np.inf and not lost.nats[0] <= self.most_lost

    def _started(
        self, state: Stage, more: Array, reading: StagedReading, data: StageData, begin: Begin
    ) -> Stage:
        """Starts a stage of the state's rows and `more`, after the search for its proposal.

        Where the proposal would lose too much as a mixture between stages, or where none was
        accepted although one was not far, the stage takes more rows before any nested sampling. The
        search then begins at all peaks that the fewer rows had, and anywhere else, because the
        highest peak of few rows need not be near that of more.
        """
        search = reading.search
        rows = np.concatenate([known(state.rows), more])
        dtype, count = search.start.split.dtype, state.num_rows + np.int32(len(more))
        in_type = lambda leaf: np.asarray(leaf, dtype)
        state = state._replace(
            rows=padded(rows, room_for(len(rows))),
            num_rows=count,
            before=jax.tree.map(in_type, state.before),
            weighed=jax.tree.map(in_type, state.weighed),
        )
        if not len(state.mixture.log_weight) or self.most_lost == np.inf:
            state = state._replace(num_weighed=count)
        rng = key_of(state, 0)
        arrays = search.arrays(state.mixture, data, rows)
        proposal, spent, peaks, left = search.searched(rng, arrays, begin)
        if state.num_left > 0 and not begin.is_final:
            has_few = self.most_lost < left < FAR
            if len(proposal.log_weight):
                z, log_weight = search.weighted_draws(rng, arrays, proposal)
                spent += len(z)
                has_few = self._is_too_much(loss_of(log_weight, count))
            if has_few:
                total = state.before.num_evaluations + spent * len(rows)
                return self._started(
                    *_taking_more(state, total),
                    reading,
                    data,
                    Begin(LabelledMixture(state.mixture), peaks),
                )
        nest = reading.nesting.started(
            rng,
            search.start.draws,
            (state.mixture, proposal),
            lambda z: search.start.nested_values(arrays, proposal, z)[:2],
            not len(state.mixture.log_weight) and not len(proposal.reference.location),
        )
        nest = nest._replace(num_evaluations=nest.num_evaluations + np.int32(round(spent)))
        return state._replace(nest=nest, proposal=proposal, stage=state.stage + np.int32(1))

    def _summarised(
        self, state: Stage, reading: StagedReading, data: StageData
    ) -> tuple[Mixture, Account]:
        points, log_weight, spent = stage_points(state, reading, data)
        found = reading.search.family.fitted(
            key_of(state, 1), points, log_weight, self.num_clumps, state.proposal.mixture
        )
        return found, account_of(key_of(state, 2), state, reading, found, data, spent)

    # What the tree holds.

    def draw(
        self, rng_key: Array, state: Stage, reading: StagedReading, data: StageData, num_draws: int
    ) -> dict[str, Array]:
        """Draws of `NestedSampler` in the last stage."""
        return self.sampler.draw(rng_key, state.nest, reading.nesting, {}, num_draws)

    def results(self, state: Stage, reading: StagedReading, data: StageData) -> Results:
        """Results of `NestedSampler` in the last stage, with evidence and cost of all stages.

        The number of stages includes those that were begun again.
        """
        state = jax.device_get(state)
        found = self.sampler.results(state.nest, reading.nesting, {})
        log_evidence, error = _stage_evidence(state, reading)
        weighed, num_rows = state.weighed, state.num_rows
        corrected, nested = state.before.corrected, state.before.nested
        weighed_or = lambda by_weights, otherwise: by_weights if weighed.is_there else otherwise
        summed, summed_error = (
            corrected.log_evidence + log_evidence,
            corrected.error(num_rows, error),
        )
        attrs = {
            "log_evidence": weighed_or(weighed.log_evidence, summed),
            "log_evidence_se": weighed_or(np.sqrt(weighed.variance), summed_error),
            "nested_log_evidence": nested.log_evidence + log_evidence,
            "nested_log_evidence_se": nested.error(num_rows, error),
            "nested_summary_error": nested.lost.error(num_rows),
            "information": state.before.information + found.attrs["information"],
            "summary_error": weighed_or(0.0, corrected.lost.error(num_rows)),
            "summary_loss": corrected.lost.nats[0] / max(corrected.lost.count, 1),
            "nats_left": weighed_or(weighed.lost.nats[0], np.nan),
            "num_stages": state.stage + 1,
            "num_row_evaluations": row_evaluations(state),
            "num_clumps": np.isfinite(state.mixture.log_weight).sum(),
        }
        return found._replace(attrs=found.attrs | attrs)


def _taking_more(state: Stage, num_evaluations: Array) -> tuple[Stage, Array]:
    """The state before its stage, with the evaluations so far, and rows that double its own."""
    before = state.before._replace(num_evaluations=num_evaluations)
    number = -(-len(known(state.rows)) // len(known(state.later[0])))
    return taken(state._replace(before=before), number)


def key_of(state: Stage, number: int) -> np.random.Generator:
    """The generator of one use in a stage, by the number of the use, the stage, and the rows."""
    own = int(state.num_rows), int(state.stage) + 1, number
    return np.random.default_rng([*np.asarray(state.rng_key), *own])


def stage_points(
    state: Stage, reading: StagedReading, data: StageData
) -> tuple[FitPoints, Array, int]:
    """The points of a stage that a mixture is fitted to, their log weights, and evaluations."""
    z, log_weight = reading.nesting.points(state.nest)
    arrays = reading.search.arrays(state.mixture, data, known(state.rows))
    points, spent = reading.search.fit_points(z, arrays)
    return points, log_weight, spent


def account_of(
    rng_key: Any,
    state: Stage,
    reading: StagedReading,
    found: Mixture,
    data: StageData,
    spent: int,
) -> Account:
    """The account of a stage that is summarised by a mixture.

    Args:
        rng_key: a JAX key, or a generator of NumPy.
        state: at the end of the stage.
        reading: of the model.
        found: the mixture.
        data: the rows.
        spent: evaluations of all rows of the stage, for the points of the mixture.
    """
    rows = known(state.rows)
    z, log_weight = reading.search.weighted_draws(
        rng_key, reading.search.arrays(state.mixture, data, rows), LabelledMixture(found)
    )
    log_evidence, error = _stage_evidence(state, reading)
    correction = background_correction(reading.search.start, found, z, log_weight)
    own = Evidence(log_evidence + correction, error**2, loss_of(log_weight, state.num_rows))
    evaluations = row_evaluations(state) - state.before.num_evaluations
    evaluations = evaluations + float((spent + len(z)) * len(rows))
    return Account(own, own, information_of(state.nest), evaluations)


def row_evaluations(state: Stage) -> Array:
    """Evaluations of the density of one row, in all stages so far."""
    before = state.before.num_evaluations
    if isinstance(state.mixture, LabelledMixture):  # of workers: no row is looked at
        return before
    return before + state.nest.num_evaluations.astype(before.dtype) * len(known(state.rows))


def _stage_evidence(state: Stage, reading: StagedReading) -> tuple[Array, Array]:
    log_evidence, error = evidence(state.nest)
    points = reading.nesting.points(state.nest)
    return log_evidence, np.hypot(error, forgotten(reading.search.start, state.mixture, *points))
