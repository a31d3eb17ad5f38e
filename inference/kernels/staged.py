"""Learning in stages: a part of the rows at a time, each stage starting from a summary of those before.

    pi_0 = prior,      pi_{s+1}(z)  ~  pi_s(z) p(rows of stage s | z) / Z_s,      log Z = sum over s of log Z_s

A stage is a run of nested sampling that draws from pi_s and looks at its own rows alone; what it finds is summarised by clumps with the
prior in the background, and that is pi_{s+1}. Clumps are Normals in unconstrained space (`_clumps`), fitted to the points and to the slopes
of their posterior, or the paper's own, on the Hilbert curves of the sites (`_code_clumps`). So the likelihood of a row is only ever
computed where earlier rows have left something to be found out. What the clumps cannot say is lost for good, and the errors of the stages
add up: the claimed error is that of the nested sampling alone. So the first stage must have rows enough to show what there is to find: an
arrangement that it settles for by chance, such as two clusters taken for one, stays (such a table is in `tests/bench/nested.md`).

A stage explores before: walkers go from pi_s to where its rows are likely (`_exploration`), what they have found is summarised as q_s, and
nested sampling goes over it: from q_s, a fifth of it pi_s itself, of likelihood x pi_s / q_s. That is as right as from pi_s, with less to
find out, and so a smaller error: what walkers have missed is found as ever, by a fifth of the live points. Where draws from q_s show that
clumps cannot say what was found (a quarter of them must be effective), nested sampling goes from pi_s.

`Driver(Staged(model, num_stages=20)).run(key, x, y)` deals the rows out at random; `driver.update(x, y)` is one more stage, at any later
time. The state says which rows a stage has, the program what is in them: a run goes on from its state in any process. The rest is as in
`NestedSampler`.

Center (2009), "Learning complex classification models from large data sets". Cost: each stage as `NestedSampler` on its rows alone, with
the information that they add to those before; between stages a gradient for each point, and a fit of clumps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference._once import once
from inference.exchangeable import MOST_NAMED
from inference.kernels._clumps import StateClumps
from inference.kernels._code_clumps import CodeClumps
from inference.kernels._exploration import Walkers, explored
from inference.kernels._nested_moves import Points
from inference.kernels._nested_names import for_all_places, together
from inference.kernels._stages import ByStages, check_counts
from inference.kernels._summary import Backed, Mixture, Told
from inference.kernels.nested_sampler import Nest, NestedSampler
from inference.program import Program
from inference.protocol import Results
from inference.split import Split

__all__ = ["Stage", "StageReport", "Staged", "Start"]

SUMMARIES = {"state": lambda split: StateClumps(split.size), "code": lambda split: CodeClumps(split.blocks)}
FEWEST, USUAL, EACH = 20, 50, 4  # walkers: at least; by default at least, and for each latent number
BEHIND_SEARCH = 0.2  # share of what a stage starts from in what its walkers have found: a fifth of an e-fold, should they miss something
BELIEVED = 0.25  # share of draws from what walkers have found that must be effective: walks over a bad approximation are long
SEARCH_SWEEPS = 1.0  # of a walker at each exponent: it need not forget where it was
GRADIENT = 3  # evaluations, which one costs
CHUNK = 500  # points, whose slopes are computed in one go
NUM_CLUMPS = {"state": 8, "code": 64}  # of those on circles it takes more


class Start(NamedTuple):
    """What a stage starts from; equal where split and summary are."""

    split: Split
    backed: Backed

    def __call__(self, given: tuple[Mixture, dict[str, Array]]) -> Callable:
        """At clumps, with the rows of a stage."""
        clumps, rows = given
        return self.densities(clumps, self.split.program.with_arguments(**rows))

    def densities(self, clumps: Mixture, program: Program) -> Callable:
        """The logarithms of pi_s, and of the likelihood."""

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, log_likelihood = self.split.densities(z, program)
            return (self.backed.log_density(clumps, z, log_prior) if len(clumps.log_weight) else log_prior), log_likelihood

        return densities


class Stage(NamedTuple):
    """Where a run stands."""

    nest: Nest
    clumps: Mixture  # what the stages before have found; no place for one in the first
    sampled: Mixture  # what walkers have found in this stage; no place for one where there are none
    rows: Array  # of this stage
    later: Array  # [stage, row]: of all stages but the first
    num_left: Array  # stages to come
    num_rows: Array  # of all stages so far, this one included
    log_evidence: Array  # of the stages before
    variance: Array  # of its error
    num_evaluations: Array  # of one row each, in the stages before
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


class Staged(ByStages, NestedSampler):
    """Nested sampling of `model` in stages.

    :param model: as for `NestedSampler`; its data are rows of one plate.
    :param num_stages: parts into which the rows of a run are dealt at random; an update is one more stage.
    :param summary: between stages: "state", clumps with all correlations in unconstrained space; "code", clumps on the circles of codes,
        one for each site.
    :param num_clumps: the most clumps between stages; None: 8 in space, 64 on circles, of which it takes more.
    :param background: share of the prior in what is between stages.
    :param num_walkers: that explore each stage; None: four for each latent number, at least 50; 0: none. The first stage of a model with
        more than five members without names is not explored.
    :param settings: of `NestedSampler`.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_stages: int = 10,
        summary: str = "state",
        num_clumps: int | None = None,
        background: float = 0.02,
        num_walkers: int | None = None,
        **settings: Any,
    ):
        super().__init__(model, **settings)
        if summary not in SUMMARIES:
            raise ValueError(f"summary: found {summary!r}, wanted {' or '.join(map(repr, SUMMARIES))}.")
        num_clumps = NUM_CLUMPS[summary] if num_clumps is None else num_clumps
        check_counts(num_stages=num_stages, num_clumps=num_clumps)
        if not 0 < background < 1:
            raise ValueError(f"background: found {background!r}, wanted a number between 0 and 1.")
        if num_walkers is not None and (type(num_walkers) is not int or not (num_walkers == 0 or num_walkers >= FEWEST)):
            raise ValueError(f"num_walkers: found {num_walkers!r}, wanted None, 0, or an integer, at least {FEWEST}.")
        self.num_stages, self.summary, self.num_clumps, self.background = num_stages, summary, num_clumps, background
        self.num_walkers = num_walkers

    def init(self, rng_key: Array, program: Program) -> Any:
        """The first stage, from the prior."""
        nest_key, deal_key, rng_key = random.split(rng_key, 3)
        rows, later = self._dealt(deal_key, program)
        self._read(program)
        self.row_arguments = tuple(self._by_row(program))
        none = self._backed.summary.nothing(0)
        nest, sampled = self._begun(nest_key, none, self._own(program, rows))
        zero, count = jnp.zeros((), nest.live.z.dtype), jnp.zeros((), jnp.int32)
        return Stage(
            nest=nest,
            clumps=none,
            sampled=sampled,
            rows=rows,
            later=later,
            num_left=count + self.num_stages - 1,
            num_rows=count + len(rows),
            log_evidence=zero,
            variance=zero,
            num_evaluations=zero,
            stage=count,
            rng_key=random.key_data(rng_key),
        )

    @property
    def _backed(self) -> Backed:
        return Backed(SUMMARIES[self.summary](self.split), self.background)

    def data(self, program: Program) -> dict[str, Array]:
        """All rows; a step takes its own."""
        return {name: jnp.asarray(program.arguments[name]) for name in self.row_arguments}

    def step(self, rng_key: Array, state: Any, program: Any) -> tuple[Any, Any]:
        """One step of the nested sampling of this stage."""
        own = self.split.program.with_arguments(**{name: value[state.rows] for name, value in program.items()})
        nest, info = self._shrunk(rng_key, state.nest, self._densities(state.clumps, own, state.sampled))
        log_evidence = state.log_evidence + info.log_evidence
        return state._replace(nest=nest), StageReport(
            info.insertion_rank, info.log_volume, log_evidence, state.stage, info.halfway, info.evaluations
        )

    def _begun(self, rng_key: Array, clumps: Mixture, program: Program) -> tuple[Nest, Mixture]:
        """Live points of a stage, and what its walkers have found, where that is what nested sampling goes over."""
        walk_key, fit_key, start_key = random.split(rng_key, 3)

        def start(sampled: Mixture) -> Nest:
            draw, densities = self._draw_from(clumps, sampled), self._densities(clumps, program, sampled)
            return self._started(start_key, draw, densities, not len(clumps.log_weight))

        nothing = self._backed.summary.nothing(0)
        if not self._size_of_search(clumps):
            return start(nothing), nothing
        found = self._searched(walk_key, clumps, program)
        told, spent = self._told(self._alike(found.at.z, clumps), clumps, program)
        sampled = self._backed.summary.fitted(fit_key, told, jnp.zeros(len(told.z)), self.num_clumps)
        nest, searched = start(sampled), found.evaluations + spent
        if _effective_share(nest.live.log_likelihood) < BELIEVED:
            searched, sampled, nest = searched + nest.num_evaluations, nothing, start(nothing)
        return nest._replace(num_evaluations=nest.num_evaluations + searched), sampled

    def _size_of_search(self, clumps: Mixture) -> int:
        """Walkers of a stage; none where members in all places are too many to be looked at."""
        if self.exchange and not len(clumps.log_weight) and self.exchange.count > MOST_NAMED:
            return 0
        return max(USUAL, EACH * self.split.size) if self.num_walkers is None else self.num_walkers

    def _searched(self, rng_key: Array, clumps: Mixture, program: Program) -> Walkers:
        draw_key, walk_key = random.split(rng_key)
        keys = random.split(draw_key, self._size_of_search(clumps))
        drawn, densities = once(jax.vmap(self._draw_from(clumps)), keys)(keys), self._densities(clumps, program)
        z = drawn[jnp.isfinite(drawn).all(1)]
        log_prior, log_likelihood = once(jax.vmap(densities), z)(z)
        self._check_start(np.asarray(log_likelihood), min(self.num_live, len(keys)))
        start = Points(z, log_prior, log_likelihood, jnp.zeros_like(log_prior))
        rows = {name: program.arguments[name] for name in self.row_arguments}
        return explored(walk_key, start, Start(self.split, self._backed), (clumps, rows), SEARCH_SWEEPS)

    def _alike(self, z: Array, clumps: Mixture) -> Array:
        """Members in the same places: in the first stage they have no names."""
        if not self.exchange or len(clumps.log_weight):
            return z
        for reference in (self.exchange.first_reference, self.exchange.reference):
            z = together(self.exchange, z, reference(z))
        return z

    def _densities(self, clumps: Mixture, program: Program, sampled: Mixture | None = None) -> Callable:
        """What nested sampling draws from, and the rest of prior times likelihood."""
        start = Start(self.split, self._backed).densities(clumps, program)
        if sampled is None or not len(sampled.log_weight):
            return start

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, log_likelihood = start(z)
            log_sampled = self._behind(clumps).log_density(sampled, z, log_prior)
            return log_sampled, log_likelihood + log_prior - log_sampled

        return densities

    def _behind(self, clumps: Mixture) -> Backed:
        """Of what walkers find: in the first stage members of a plate may change places."""
        own = self._backed.summary
        return Backed(own if len(clumps.log_weight) else for_all_places(own, self.exchange), BEHIND_SEARCH)

    def _draw_from(self, clumps: Mixture, sampled: Mixture | None = None) -> Callable:
        has_clumps, has_sampled = len(clumps.log_weight), sampled is not None and len(sampled.log_weight)
        before = (lambda key: self._backed.draw(key, clumps, self.split.draw)) if has_clumps else self.split.draw
        return (lambda key: self._behind(clumps).draw(key, sampled, before)) if has_sampled else before

    def finished(self, state: Any) -> Array:
        """After the last stage."""
        return super().finished(state.nest) & (state.num_left == 0)

    def is_full(self, state: Any) -> Array:
        """Whether the host is needed: for room, or for the next stage."""
        return super().is_full(state.nest) | (super().finished(state.nest) & (state.num_left > 0))

    def grown(self, state: Any, program: Program) -> Any:
        """More room, or the next stage."""
        if super().is_full(state.nest):
            return state._replace(nest=super().grown(state.nest, program))
        return self._gone_on(state, program, super().finished(state.nest))

    def _next(self, state: Stage, program: Program, rows: Array, before: Program) -> Stage:
        key = random.fold_in(random.wrap_key_data(state.rng_key), int(state.stage))
        fit_key, start_key = random.split(key)
        told, log_weight, num_evaluations = self._found_out(state, before)
        clumps = self._backed.summary.fitted(fit_key, told, log_weight, self.num_clumps)
        log_evidence, error = self._evidence(state.nest)
        nest, sampled = self._begun(start_key, clumps, self._own(program, rows))
        return state._replace(
            nest=nest,
            clumps=clumps,
            sampled=sampled,
            rows=rows,
            num_rows=state.num_rows + len(rows),
            log_evidence=state.log_evidence + log_evidence,
            variance=state.variance + error**2,
            num_evaluations=num_evaluations,
            stage=state.stage + 1,
        )

    def _found_out(self, state: Stage, program: Program) -> tuple[Told, Array, Array]:
        """All points of a stage with what is told of them, their log weights, and evaluations so far, of one row each."""
        z, log_weight = self._together(state.nest)
        told, spent = self._told(z, state.clumps, self._own(program, state.rows))
        return told, log_weight, self._row_evaluations(state) + spent * len(state.rows)

    def _told(self, z: Array, clumps: Mixture, program: Program) -> tuple[Told, int]:
        """Points with the slopes of the posterior, for a summary that asks for them; and evaluations that these took."""
        if not self._backed.summary.asks_for_slopes:
            return Told(z), 0
        rows = {name: program.arguments[name] for name in self.row_arguments}
        parts = [z[at : at + CHUNK] for at in range(0, len(z), CHUNK)]
        parts[-1] = jnp.pad(parts[-1], ((0, CHUNK - len(parts[-1])), (0, 0)), mode="edge")  # what is compiled serves for all
        slope = jnp.concatenate([self._slopes(self.split, part, clumps, rows) for part in parts])
        return Told(z, slope[: len(z)]), GRADIENT * len(z)

    @partial(jax.jit, static_argnums=(0, 1))
    def _slopes(self, split: Split, z: Array, clumps: Mixture, rows: dict[str, Array]) -> Array:
        """Gradients of the log posterior at vectors, one at a time: all rows are in each. Compiled anew where another run has read the
        model with other settings, which are constants of the code: `split` is that of the kernel."""
        densities = self._densities(clumps, split.program.with_arguments(**rows))
        return jax.lax.map(jax.grad(lambda z: sum(densities(z))), z)

    def _row_evaluations(self, state: Stage) -> Array:
        return state.num_evaluations + state.nest.num_evaluations.astype(state.num_evaluations.dtype) * len(state.rows)

    def draw(self, rng_key: Array, state: Any, program: Program, num_draws: int) -> dict[str, Array]:
        """As `NestedSampler`, of the last stage."""
        return super().draw(rng_key, state.nest, program, num_draws)

    def results(self, state: Any, program: Program) -> Results:
        """As `NestedSampler`, of the last stage; evidence and cost of all."""
        is_finished = self.finished(state)
        found = self._found(state.nest, is_finished)
        log_evidence, error = self._evidence(state.nest)
        attrs = {
            "log_evidence": state.log_evidence + log_evidence,
            "log_evidence_se": jnp.where(is_finished, jnp.sqrt(state.variance + error**2), jnp.nan),
            "num_stages": state.stage + 1,
            "num_row_evaluations": self._row_evaluations(state),
            "num_clumps": jnp.isfinite(state.clumps.log_weight).sum(),
        }
        return found._replace(attrs=found.attrs | attrs)


def _effective_share(log_weight: Array) -> float:
    """Of draws with these weights, how many count."""
    weight = np.exp(np.asarray(log_weight) - np.max(log_weight))
    return weight.sum() ** 2 / np.sum(weight**2) / len(weight)
