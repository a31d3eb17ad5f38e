"""Learning in stages: a part of the rows at a time, each stage starting from a summary of those
before.

    pi_0 = prior,      pi_{s+1}(z)  ~  pi_s(z) p(rows of stage s | z) / Z_s,      log Z = sum over s of log Z_s

A stage is a run of nested sampling that draws from pi_s and looks at its own rows alone; what it
finds is summarised by clumps with the prior in the background, and that is pi_{s+1}. Clumps are
Normals in unconstrained space (`inference.maths.normal_mixture`), fitted to the points and to the
slopes of their posterior, or the paper's own, on the Hilbert curves of the sites
(`hilbert_clumps`). So the likelihood of a row is only ever computed where earlier rows have left
something to be found out. What the clumps cannot say is lost to later stages; draws from them, with
their weights, tell how much that is (`inference.maths.summary.Loss`): the claimed error has it as
`summary_error`, and `summary_loss` is nats a summary, which `diagnostics.report` judges. Of few
rows a posterior is not what clumps can say: where they would cost more than `most_lost`, a stage
goes over twice as many rows of those that were dealt out, until they do not. Whenever rows of a run
have doubled, and at its end, some draws are weighed by all of them (`weighing`): `log_evidence` of
several stages is what these say, where `nested_log_evidence` is the sum over stages (with
`nested_summary_error` in its error), and `nats_left` is how far from the posterior of all rows they
are; where that is too much, it is mended, and the sum goes on from there, or a run begins again,
with the rows so far as its first stage. The first must have enough to show what there is to find:
what no clump is near to no weight tells.

A stage explores before (`search`): what is likely of its rows is summarised as q_s, by climbs along
the slopes of the posterior, and nested sampling goes over it: from q_s, a fifth of it pi_s itself,
of likelihood x pi_s / q_s. That is as right as from pi_s, with less to find out, and so a smaller
error; most new points are then draws from it, and walk nowhere. Where draws from q_s show that
clumps cannot say what was found, nested sampling goes from pi_s.

`Driver(Staged(model, num_stages=20)).run(key, x, y)` deals the rows out at random;
`driver.update(x, y)` is one more stage, at any later time. The state says which rows a stage has,
the program what is in them: a run goes on from its state in any process. The rest is as in
`NestedSampler`.

Of the paper: exploration from several states, exploitation from what was fitted, clumps on Hilbert
codes (`summary="code"`) that are contracted, EM, and nested sampling and approximation in turn
(`num_iterations`): each time over what was fitted to the points before. One turn is the default,
for where a search has found the posterior there is nothing left for another; where none is made,
two have errors like those of a search. Not as in the paper: each order that is tried is learned by
itself (`inference.orders`), and terms on the order stand for the others, between parts of the data
that come at different times.

Center (2009), "Learning complex classification models from large data sets". Cost: each stage as
`NestedSampler` on its rows alone, with the information that they add to those before, or that q_s
leaves; for q_s some gradients for each latent number, in the first stage some hundred for each
walker, and again should it take more rows, with as many walkers as come to the highest peak often;
between stages a gradient for each point, and a fit of clumps; four draws for each latent number, at
least 200, by all rows, some three times in a run; and a stage of all rows so far where it begins
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.nested.kernel import NestedSampler
from inference.kernels.nested.nesting import Nesting, evidence_of, is_full
from inference.kernels.nested.relabel import Named
from inference.kernels.nested.state import information_of
from inference.kernels.staged.search import FAR, FEWEST, SUMMARIES, Begin, Search, Start
from inference.kernels.staged.weighing import (
    Account,
    Evidence,
    Weighed,
    Weighing,
    forgotten,
    lacking_of,
    unweighed,
)
from inference.maths.summary import Backed, Loss, Mixture, Told, loss_of, no_loss
from inference.program.program import Program
from inference.program.sites import (
    StructureError,
    check_setting,
    check_whole,
    is_between,
    is_number,
    is_whole,
)
from inference.reading.density import Split
from inference.reading.exchangeable import Exchangeable
from inference.reading.stage_rows import StageData, StageRows, check_at_end, check_finished, taken
from inference.run.protocol import Algorithm, Results

__all__ = [
    "Stage",
    "StageReport",
    "Staged",
    "StagedReading",
    "account_of",
    "found_out",
    "key_of",
    "row_evaluations",
]

NUM_CLUMPS = {"state": 8, "code": 64}  # of those on circles it takes more


class Stage(NamedTuple):
    """Where a run stands."""

    nest: Any  # Nest; None where nothing has begun
    clumps: Mixture  # what the stages before have found; no place for one in the first
    sampled: Named  # q_s; no place for a clump where nested sampling goes from pi_s
    iteration: Array  # of nested sampling and approximation, in this stage
    rows: Array  # of this stage
    later: Array  # [stage, row]: of all stages but the first
    num_left: Array  # stages to come
    num_rows: Array  # of all stages so far, this one included
    num_weighed: Array  # rows by which all that has been found was last weighed
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

    @property
    def start(self) -> Start:
        """What stages start from."""
        return self.search.start

    @property
    def dtype(self) -> Any:
        """The type of the unconstrained vectors."""
        return self.nesting.split.dtype

    def more(self, program: Program) -> "tuple[StagedReading, StageData]":
        """More rows of the same model."""
        self.check_alike(program)
        return self, self.rows.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments that have an entry for each row."""
        return self.rows.names

    def check_alike(self, program: Program, asked: str = "update") -> None:
        """Refuses all but more rows of the same model, of which members that had no names so far
        have none.
        """
        self.rows.check_alike(program, asked)
        exchange = self.nesting.exchange
        if exchange and not exchange.proved(program):
            raise StructureError(
                f"plate {exchange.plate!r}: so far its members might change places, and with these "
                "rows they may not. Begin again, "
                f"with rows that tell them apart in the first stage, or with rename=False."
            )


class Staged(Algorithm):
    """Nested sampling of `model` in stages.

    :param model: as for `NestedSampler`; its data are rows of one plate.
    :param num_stages: parts into which the rows of a run are dealt at random; an update is one more
    stage.
    :param summary: between stages: "state", clumps with all correlations in unconstrained space;
    "code", clumps on the circles of
        codes, one for each site.
    :param num_clumps: the most clumps between stages; None: 8 in space, 64 on circles, of which it
    takes more.
    :param background: share of the prior in what is between stages. With more of it, what clumps
    have missed is found sooner;
        with less, later rows may lead further away before it is all that is left, and what earlier
        rows said is forgotten.
    :param most_lost: nats that the summary of a stage may cost. Where it would cost more, the stage
    takes as many rows more as it
        has, of those to come; np.inf: never, and nothing is weighed by all rows. An update has none
        to come, and is not weighed.
    :param num_iterations: turns of nested sampling and approximation in a stage.
    :param num_walkers: that explore a stage, at most; None: four for each latent number, at least
    50; 0: no stage is explored,
        nor is one with summaries on circles.
    :param settings: of `NestedSampler`.
    """

    report = "nested"

    def __init__(
        self,
        model: Any,
        *,
        num_stages: int = 10,
        summary: str = "state",
        num_clumps: int | None = None,
        background: float = 0.02,
        most_lost: float = 0.05,
        num_iterations: int = 1,
        num_walkers: int | None = None,
        **settings: Any,
    ):
        self.model, self.sampler = model, NestedSampler(model, **settings)
        check_setting(summary in SUMMARIES, " or ".join(map(repr, SUMMARIES)), summary=summary)
        num_clumps = NUM_CLUMPS[summary] if num_clumps is None else num_clumps
        check_whole(1, num_stages=num_stages, num_clumps=num_clumps, num_iterations=num_iterations)
        check_setting(
            is_between(background, 0, 1), "a number between 0 and 1", background=background
        )
        is_count = num_walkers is None or (
            is_whole(num_walkers) and (num_walkers == 0 or num_walkers >= FEWEST)
        )
        check_setting(
            is_count, f"None, 0, or an integer, at least {FEWEST}", num_walkers=num_walkers
        )
        self.num_stages, self.summary, self.num_clumps, self.background = (
            int(num_stages),
            summary,
            int(num_clumps),
            background,
        )
        check_setting(
            is_number(most_lost) and most_lost > 0, "a number above 0", most_lost=most_lost
        )
        self.most_lost, self.num_walkers = (
            most_lost,
            None if num_walkers is None else int(num_walkers),
        )
        self.num_iterations = int(num_iterations)

    def read(self, program: Program) -> tuple[StagedReading, StageData]:
        """Prior, likelihood and rows, proved."""
        rows = StageRows.of(program, self.num_stages)
        nesting = Nesting.of(self.sampler.settings, program)
        rows.prove()
        start = self._start_of(nesting.split, nesting.exchange)
        search = Search(start, nesting, rows, self.num_clumps, self.num_walkers)
        return StagedReading(nesting, rows, search, Weighing(search, self.most_lost)), rows.data(
            program
        )

    def _start_of(self, split: Split, exchange: Exchangeable | None) -> Start:
        return Start(split, Backed(SUMMARIES[self.summary](split), self.background), exchange)

    def init(self, rng_key: Array, reading: StagedReading, data: StageData) -> Stage:
        """The first stage, from the prior."""
        deal_key, rng_key = random.split(rng_key)
        rows, later = reading.rows.dealt(deal_key, self.num_stages, data)
        nothing = reading.search.nothing
        zero, count = jnp.zeros((), reading.dtype), jnp.zeros((), jnp.int32)
        none = Evidence(zero, zero, no_loss(zero.dtype))
        nowhere = Stage(
            nest=None,
            clumps=nothing.clumps,
            sampled=nothing,
            iteration=count,
            rows=rows[:0],
            later=later,
            num_left=count + self.num_stages - 1,
            num_rows=count,
            num_weighed=count,
            weighed=unweighed(reading.dtype),
            before=Account(none, none, zero, zero),
            stage=count - 1,
            rng_key=random.key_data(rng_key),
        )
        return self._started_with(nowhere, rows, reading, data, Begin(nothing))

    def step(
        self, rng_key: Array, state: Stage, reading: StagedReading, data: StageData
    ) -> tuple[Stage, StageReport]:
        """One step of the nested sampling of this stage."""
        own = reading.nesting.program(
            {name: column[state.rows] for name, column in data.columns.items()}
        )
        nest, info = reading.nesting.shrunk(
            rng_key, state.nest, reading.start.rest(state.clumps, own, state.sampled)
        )
        log_evidence = state.before.corrected.log_evidence + info.log_evidence
        report = StageReport(
            info.insertion_rank,
            info.log_volume,
            log_evidence,
            state.stage,
            info.halfway,
            info.evaluations,
            info.num_nan,
        )
        return state._replace(nest=nest), report

    def finished(self, state: Stage) -> Array:
        """After the last stage, when all has been weighed."""
        is_over = self.sampler.finished(state.nest) & ~self._is_to_iterate(state)
        return is_over & (state.num_left == 0) & (state.num_weighed >= state.num_rows)

    def needs_host(self, state: Stage) -> Array:
        """Whether the sampler needs the host, or a stage is at its end."""
        return self.sampler.needs_host(state.nest) | (
            self.sampler.finished(state.nest) & ~self.finished(state)
        )

    def on_host(
        self, states: Sequence[Stage], reading: StagedReading, data: StageData
    ) -> Sequence[Stage]:
        """New offers or more room, or the next turn or stage."""
        nesting = reading.nesting
        if any(state.nest.offers.are_worn for state in states):
            offered = lambda one: one._replace(
                nest=nesting.with_offers(one.nest, reading.start, (one.clumps, one.sampled))
            )
            return [offered(state) if state.nest.offers.are_worn else state for state in states]
        if any(is_full(state.nest, self.sampler.batch) for state in states):
            return [state._replace(nest=nesting.with_more_room(state.nest)) for state in states]
        return [self._gone_on(state, reading, data) for state in states]

    def updated(
        self, state: Stage, reading: StagedReading, data: StageData, before: StageData
    ) -> Stage:
        """More rows: one more stage, which is not weighed by all."""
        check_finished(state, self.finished(state))
        found, account = self._handed_on(state, reading, before)
        total = state.before.then(account)
        if state.weighed.is_there:
            found, total = (
                reading.search.named(key_of(state, 3), found).clumps,
                total.weighed(state.weighed),
            )
        rows = jnp.arange(int(data.num_rows), dtype=jnp.int32)
        state = self._next_from(state, rows, reading, data, found, total)
        return state._replace(num_weighed=state.num_rows)

    # The next turn or stage.

    def _gone_on(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        is_over = self.sampler.finished(state.nest)
        if is_over & self._is_to_iterate(state):
            return self._iterated(state, reading, data)
        check_at_end(is_over & ~self.finished(state))
        return self._next_dealt(state, reading, data)

    def _next_dealt(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        """The next stage; where this one's summary costs too much, this one again with more
        rows.
        """
        found, account = self._handed_on(state, reading, data)
        before = state.before.then(account)
        if state.num_left > 0 and self._costs_too_much(account.nested.lost):
            return self._started_with(
                *_with_more(state, before.num_evaluations), reading, data, Begin(Named(found))
            )
        if reading.weighing.is_due(state):
            return self._next_weighed(
                state, reading, data, reading.search.named(key_of(state, 3), found), before
            )
        return self._next_from(*taken(state, 1), reading, data, found, before)

    def _next_weighed(
        self, state: Stage, reading: StagedReading, data: StageData, found: Named, before: Account
    ) -> Stage:
        """The next stage, or the end; where all rows so far say something else than what was found,
        these again as the first stage, unless it can be mended.
        """
        weighing = reading.weighing
        weighed, spent = weighing.by_all(key_of(state, 4), state, found, data)
        if state.num_left > 0 and not weighing.is_fine(weighed):
            mended, weighed, more = weighing.mended(key_of(state, 5), state, found, weighed, data)
            before, spent = before if mended is found else before.mended(weighed), spent + more
            found = mended
        before = before._replace(num_evaluations=before.num_evaluations + float(spent))
        if not weighing.is_fine(weighed):
            rows = weighing.so_far(state, data)
            begun = jax.tree.map(jnp.zeros_like, state.before)._replace(
                num_evaluations=before.num_evaluations
            )
            nothing = reading.search.nothing.clumps
            again = state._replace(
                clumps=nothing, before=begun, num_rows=jnp.zeros_like(state.num_rows), rows=rows[:0]
            )
            return self._started_with(
                again, rows, reading, data, weighing.begin_again(found, weighed)
            )
        state = state._replace(num_weighed=state.num_rows)
        if state.num_left > 0:
            return self._next_from(
                *taken(state, 1), reading, data, found.clumps, before.weighed(weighed)
            )
        of_nest = self._row_evaluations(state) - state.before.num_evaluations
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
            clumps=found, before=before, rows=state.rows[:0], weighed=unweighed(reading.dtype)
        )
        return self._started_with(state, rows, reading, data, Begin(Named(found)))

    def _costs_too_much(self, lost: Loss) -> bool:
        """As a summary; where nobody knows, too."""
        return self.most_lost < np.inf and not lost.nats[0] <= self.most_lost

    def _started_with(
        self, state: Stage, more: Array, reading: StagedReading, data: StageData, begin: Begin
    ) -> Stage:
        """A stage of the rows that the state has and more of them, from its clumps.

        What may be gone over is looked for from where others were found. Where that costs too much
        as a summary, or is not believed, for clumps are not quite what was found, nested sampling
        is left until there are more rows, of which it is looked for anew, from all peaks that these
        have: what is best of few rows need not be near to what is best of more.
        """
        search = reading.search
        state = state._replace(
            rows=jnp.concatenate([state.rows, more]), num_rows=state.num_rows + len(more)
        )
        if not len(state.clumps.log_weight) or self.most_lost == np.inf:
            state = state._replace(num_weighed=state.num_rows)
        search_key, lost_key, start_key = random.split(key_of(state, 0), 3)
        own = reading.rows.own(data, state.rows)
        sampled, spent, peaks, left = search.searched(search_key, state.clumps, own, begin)
        if state.num_left > 0 and not begin.is_found:
            if len(sampled.log_weight):
                z, log_weight = search.drawn(lost_key, sampled, state.clumps, own)
                spent += len(z)
                has_few = self._costs_too_much(loss_of(log_weight, state.num_rows))
            else:
                has_few = self.most_lost < left < FAR
            if has_few:
                num_evaluations = state.before.num_evaluations + spent * len(state.rows)
                fresh = Begin(Named(state.clumps), peaks)
                return self._started_with(*_with_more(state, num_evaluations), reading, data, fresh)
        state = state._replace(stage=state.stage + 1, iteration=jnp.zeros_like(state.iteration))
        return self._gone_over(start_key, state, reading, sampled, round(spent), own)

    def _gone_over(
        self,
        rng_key: Array,
        state: Stage,
        reading: StagedReading,
        sampled: Named,
        spent: int | Array,
        own: Program,
    ) -> Stage:
        """The nested sampling of a stage at its start, from what was searched for or fitted; and
        evaluations that this took.
        """
        densities = reading.start.rest(state.clumps, own, sampled)
        is_even = not len(state.clumps.log_weight) and not sampled.reference.gives_names
        nest = reading.nesting.started(
            rng_key, reading.start, (state.clumps, sampled), densities, is_even
        )
        return state._replace(
            nest=nest._replace(num_evaluations=nest.num_evaluations + spent), sampled=sampled
        )

    def _is_to_iterate(self, state: Stage) -> Array:
        return state.iteration + 1 < self.num_iterations

    def _iterated(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        """The same stage once more, over what is fitted to its points: what it had found of the
        evidence is left, with its error.
        """
        state = state._replace(iteration=state.iteration + 1)
        fit_key, name_key, start_key = random.split(
            random.fold_in(key_of(state, 6), int(state.iteration)), 3
        )
        told, log_weight, spent = found_out(state, reading, data)
        fitted = reading.search.summary.fitted(
            fit_key, told, log_weight, self.num_clumps, state.sampled.clumps
        )
        sampled = (
            Named(fitted)
            if len(state.clumps.log_weight)
            else reading.search.named(name_key, fitted)
        )
        own = reading.rows.own(data, state.rows)
        return self._gone_over(
            start_key, state, reading, sampled, state.nest.num_evaluations + spent, own
        )

    def _handed_on(
        self, state: Stage, reading: StagedReading, data: StageData
    ) -> tuple[Mixture, Account]:
        """What stands for what a stage has found, and the account of the stage."""
        told, log_weight, spent = found_out(state, reading, data)
        found = reading.search.summary.fitted(
            key_of(state, 1), told, log_weight, self.num_clumps, state.sampled.clumps
        )
        evaluations = self._row_evaluations(state) - state.before.num_evaluations
        return found, account_of(key_of(state, 2), state, reading, found, data, evaluations, spent)

    def _row_evaluations(self, state: Stage) -> Array:
        return row_evaluations(state)

    # What the tree holds.

    def draw(
        self, rng_key: Array, state: Stage, reading: StagedReading, data: StageData, num_draws: int
    ) -> dict[str, Array]:
        """As `NestedSampler`, of the last stage."""
        return self.sampler.draw(rng_key, state.nest, reading.nesting, {}, num_draws)

    def results(self, state: Stage, reading: StagedReading, data: StageData) -> Results:
        """As `NestedSampler`, of the last stage; evidence and cost of all, and how many there were,
        with those that were begun again.
        """
        is_finished = self.finished(state)
        found = self.sampler.found(state.nest, reading.nesting, is_finished)
        log_evidence, error = _of_stage(state, reading)
        before, weighed = state.before, state.weighed
        corrected, nested = (
            before.corrected.error(state.num_rows, error),
            before.nested.error(state.num_rows, error),
        )
        attrs = {
            "log_evidence": jnp.where(
                weighed.is_there, weighed.log_evidence, before.corrected.log_evidence + log_evidence
            ),
            "log_evidence_se": jnp.where(
                is_finished,
                jnp.where(weighed.is_there, jnp.sqrt(weighed.variance), corrected),
                jnp.nan,
            ),
            "nested_log_evidence": before.nested.log_evidence + log_evidence,
            "nested_log_evidence_se": jnp.where(is_finished, nested, jnp.nan),
            "nested_summary_error": before.nested.lost.error(state.num_rows),
            "information": before.information + found.attrs["information"],
            "summary_error": jnp.where(
                weighed.is_there, 0.0, before.corrected.lost.error(state.num_rows)
            ),
            "summary_loss": before.corrected.lost.each,
            "nats_left": jnp.where(weighed.is_there, weighed.lost.nats[0], jnp.nan),
            "num_stages": state.stage + 1,
            "num_row_evaluations": self._row_evaluations(state),
            "num_clumps": jnp.isfinite(state.clumps.log_weight).sum(),
        }
        return found._replace(attrs=found.attrs | attrs)


def _with_more(state: Stage, num_evaluations: Array) -> tuple[Stage, Array]:
    """The stage as it was before it began, but for evaluations so far; and as many rows of those
    to come as it has.
    """
    before = state.before._replace(num_evaluations=num_evaluations)
    return taken(state._replace(before=before), -(-len(state.rows) // state.later.shape[1]))


def key_of(state: Stage, number: int) -> Array:
    """The key of what a stage does under this `number`.

    It follows from the numbers of the stage and of the rows so far.
    """
    of_stage = random.fold_in(
        random.fold_in(random.wrap_key_data(state.rng_key), int(state.num_rows)),
        int(state.stage) + 1,
    )
    return random.fold_in(of_stage, number)


def found_out(state: Stage, reading: StagedReading, data: StageData) -> tuple[Told, Array, int]:
    """All points of a stage with what is told of them, their log weights, and evaluations that
    this took.
    """
    z, log_weight = reading.nesting.points(state.nest)
    told, spent = reading.search.told(z, state.clumps, reading.rows.own(data, state.rows))
    return told, log_weight, spent


def account_of(
    rng_key: Array,
    state: Stage,
    reading: StagedReading,
    found: Mixture,
    data: StageData,
    evaluations: Array,
    spent: int,
) -> Account:
    """The account of a stage that hands on these clumps.

    The next stage starts from them without the share of the background, so its evidence will lack
    that.

    :param evaluations: of the nested sampling.
    :param spent: on the clumps, of all rows of the stage each.
    """
    z, log_weight = reading.search.drawn(
        rng_key, Named(found), state.clumps, reading.rows.own(data, state.rows)
    )
    log_evidence, error = _of_stage(state, reading)
    lacking = lacking_of(reading.start, found, z, log_weight)
    own = Evidence(log_evidence + lacking, error**2, loss_of(log_weight, state.num_rows))
    return Account(
        own,
        own,
        information_of(state.nest),
        evaluations + float((spent + len(z)) * len(state.rows)),
    )


def row_evaluations(state: Stage) -> Array:
    """How often the density of a single row was evaluated, in all stages so far."""
    return state.before.num_evaluations + state.nest.num_evaluations.astype(
        state.before.num_evaluations.dtype
    ) * len(state.rows)


def _of_stage(state: Stage, reading: StagedReading) -> tuple[Array, Array]:
    """Its log-evidence and the error of that."""
    log_evidence, error = evidence_of(state.nest)
    return log_evidence, jnp.hypot(
        error, forgotten(reading.start, state.clumps, *reading.nesting.points(state.nest))
    )
