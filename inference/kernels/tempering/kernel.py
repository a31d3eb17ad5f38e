"""Sequential Monte Carlo over the rows, a stage at a time, by powers of the likelihood.

    pi(z)  ~  prior(z) x p(rows of earlier stages | z) x p(rows of this stage | z) ^ e

In every stage e goes from 0 to 1. A step raises e as far as the importance weights of the
particles, p(rows of this stage | z) ^ (step of e), leave a given effective sample size. Then it
resamples, and every particle walks by slice sampling until it has forgotten its start. The mean
weights of all steps multiply to the evidence. A walk evaluates all rows so far, so that the answer
is exact in the limit of many particles. (`Staged` evaluates the rows of its stage alone, and what
its summary of the others has lost is lost.) The error of the log-evidence is estimated from the
genealogy of the particles (`inference.maths.resampling`).

`Driver(DataTempering(model, num_stages=10)).run(key, x, y)` deals the rows out at random;
`driver.update(x, y)` is one more stage, at any later time. All rows so far are in the state, so
that a run goes on from its state in any process.

Prior and likelihood are read off the model and proved (`inference.reading.density`), and so is that
the likelihood of a row does not depend on other rows.

Cost: evaluations of one row = particles x steps of a walk x about 2 x sum over stages of (rows so
far x exponents of the stage). The arrays of rows double when they are full: up to twice as many
rows are computed, and little is compiled.

Chopin (2002), "A sequential particle filter method for static models"; Del Moral, Doucet and Jasra
(2006) for the powers; Chan and Lai (2013) for the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Float, Int

from inference.maths.host import Array, generator
from inference.maths.resampling import (
    Families,
    after_step,
    effective_size,
    new_families,
    next_exponent,
    resampled,
    systematic_parents,
    tempered,
    variance_of,
)
from inference.maths.slice_walk import Particles, slice_moves
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between, is_number
from inference.reading.density import Split, site_values
from inference.reading.stage_rows import (
    StageData,
    StageRows,
    check_at_end,
    check_finished,
    row_terms,
    taken,
)
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = ["DataTempering", "Tempered", "TemperingReading", "TemperingReport"]


class Tempered(NamedTuple):
    """The state of a run."""

    z: Float[Array, "particle size"]
    log_before: Float[Array, " particle"]  # prior and rows of earlier stages
    log_own: Float[Array, " particle"]  # log likelihood of the rows of this stage
    exponent: Array
    # arguments of all rows so far, those of this stage last; room behind them
    table: dict[str, Array]
    num_before: Array  # rows of earlier stages
    num_rows: Array  # rows so far
    later: Int[Array, "stage row"]  # of the stages to come, places in the data
    num_left: Array  # stages to come
    stage: Array
    log_evidence: Array
    families: Families
    num_evaluations: Array  # of one row each


class TemperingReport(NamedTuple):
    """What a step reports."""

    ess: Array  # effective sample size before the resampling
    log_evidence: Array  # of all rows so far, with those of this stage raised to the exponent
    exponent: Array
    stage: Array
    # mean square distance of walks from their starts after half of the steps, over that after all
    halfway: Array
    sweeps: Array  # of a walk, each of as many steps as there are dimensions
    evaluations: Array  # of all rows so far
    num_nan: Array  # evaluations with a likelihood of NaN, which counts as 0


@dataclass(frozen=True)
class TemperingReading:
    """What was read of a model: prior and likelihood, and its rows."""

    split: Split
    rows: StageRows

    def more(self, program: Program) -> "tuple[TemperingReading, StageData]":
        """The reading and data of more rows of the same model."""
        self.rows.check_alike(program)
        return self, self.rows.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments that have an entry for each row."""
        return self.rows.names

    def terms(self, z: Array, program: Program) -> tuple[Array, Array]:
        """Log prior at a vector, and the log likelihood of each row of a program."""
        return row_terms(self.split, self.rows.axis, z, program)


class DataTempering(Algorithm):
    """Sequential Monte Carlo over the rows of `model`, in stages.

    Args:
        model: a NumPyro model whose latent sites are continuous and have proper priors; its data
            are rows of one plate.
        num_stages: parts into which the rows of a run are dealt at random; an update is one more
            stage.
        num_particles: the error of the log-evidence is about sqrt(steps / num_particles).
        threshold: effective sample size that a step leaves, as a share of the particles.
        num_sweeps: sweeps of the coordinates in a walk, at least.
        memory: the correlation with its start that a walk may keep; while walks keep more they go
            on. 1: they do not.
    """

    report = "smc"
    draws_at_end = True
    command = Command({"num_particles": 200}, {"num_warmup": None, "num_chains": 2})

    def __init__(
        self,
        model: Any,
        *,
        num_stages: int = 10,
        num_particles: int = 500,
        threshold: float = 0.5,
        num_sweeps: float = 3.0,
        memory: float = 0.25,
    ):
        check_whole(1, num_stages=num_stages)
        check_whole(20, num_particles=num_particles)
        check_setting(is_between(threshold, 0, 1), "a number between 0 and 1", threshold=threshold)
        check_setting(is_between(num_sweeps, 0, np.inf), "a number above 0", num_sweeps=num_sweeps)
        check_setting(
            is_number(memory) and 0 < memory <= 1, "a number above 0, up to 1", memory=memory
        )
        self.model, self.num_stages, self.num_particles = model, int(num_stages), int(num_particles)
        self.threshold, self.num_sweeps, self.memory = threshold, num_sweeps, memory

    def read(self, program: Program) -> tuple[TemperingReading, StageData]:
        """Prior, likelihood and rows, proved."""
        rows = StageRows.of(program, self.num_stages)
        program.check()
        split = Split(program)
        split.prove()
        rows.prove(split)
        return TemperingReading(split, rows), rows.data(program)

    def init(self, rng_key: Array, reading: TemperingReading, data: StageData) -> Tempered:
        """Draws from the prior, before the first stage."""
        rng = generator(rng_key)
        rows, later = reading.rows.dealt(rng, self.num_stages, data)
        z = reading.split.draws(rng, self.num_particles)
        log_prior = reading.split.log_priors(z)
        zero, count = jnp.zeros((), z.dtype), jnp.zeros((), jnp.int32)
        nowhere = Tempered(
            z=z,
            log_before=log_prior,
            log_own=jnp.zeros_like(log_prior),
            exponent=zero,
            table={name: column[:0] for name, column in data.columns.items()},
            num_before=count,
            num_rows=count,
            later=later,
            num_left=count + self.num_stages - 1,
            stage=count,
            log_evidence=zero,
            families=new_families(self.num_particles, zero),
            num_evaluations=zero,
        )
        return self._begun(nowhere, reading, data, rows)

    def _begun(
        self, state: Tempered, reading: TemperingReading, data: StageData, rows: Array
    ) -> Tempered:
        cut = reading.rows.cut(data, rows)
        program = reading.split.program.with_arguments(**cut)
        log_likelihood = jax.vmap(lambda z: reading.terms(z, program)[1].sum())
        log_own = interpreted(log_likelihood, state.z)(state.z)
        stage = int(state.stage)
        where = f"particles before stage {stage + 1}" if stage else "draws from the prior"
        reading.split.check_start(state.z, log_own, where)
        known = int(state.num_rows)
        room = 1 << (known + len(rows) - 1).bit_length()

        def extended(name: str) -> Array:
            """A column with the rows of this stage, and room that is filled by the first row."""
            column = np.concatenate([np.asarray(state.table[name])[:known], cut[name]])
            filling = np.repeat(column[:1], room - len(column), axis=0)
            return jnp.asarray(np.concatenate([column, filling]))

        return state._replace(
            log_own=log_own,
            exponent=jnp.zeros_like(state.exponent),
            table={name: extended(name) for name in state.table},
            num_before=state.num_rows,
            num_rows=state.num_rows + len(rows),
            num_evaluations=state.num_evaluations + self.num_particles * len(rows),
        )

    def step(
        self, rng_key: Array, state: Tempered, reading: TemperingReading, data: StageData
    ) -> tuple[Tempered, TemperingReport]:
        """One exponent: weights, resampling, moves. The rows are in the state."""
        parent_key, walk_key = random.split(rng_key)
        exponent = next_exponent(state.log_own, state.exponent, self.threshold)
        log_weight = self._log_weight(state, exponent)
        log_total = jax.nn.logsumexp(log_weight)
        weight = jnp.exp(log_weight - log_total)
        parent = systematic_parents(parent_key, weight)
        start = Particles(
            state.z,
            state.log_before + tempered(state.log_own, exponent),
            state.log_own,
            jnp.zeros_like(state.log_own),
        )
        densities = self._densities(state, reading, exponent)
        settings = {"num_sweeps": self.num_sweeps, "memory": self.memory}
        at, moves = slice_moves(walk_key, start, parent, densities, **settings)
        log_evidence = state.log_evidence + log_total - np.log(self.num_particles)
        rows = state.num_rows.astype(log_evidence.dtype)
        new = state._replace(
            z=at.z,
            log_before=at.log_prior - tempered(at.log_likelihood, exponent),
            log_own=at.log_likelihood,
            exponent=exponent,
            log_evidence=log_evidence,
            families=after_step(state.families, weight, parent),
            num_evaluations=state.num_evaluations + rows * moves.evaluations.astype(rows.dtype),
        )
        ess = effective_size(log_weight - log_total)
        sweeps = moves.num_steps.astype(rows.dtype) / reading.split.size
        took = moves.halfway, sweeps, moves.evaluations, moves.num_nan
        return new, TemperingReport(ess, log_evidence, exponent, state.stage, *took)

    def _log_weight(self, state: Tempered, exponent: Array) -> Array:
        return tempered(state.log_own, exponent - state.exponent)

    def _powers(self, state: Tempered, exponent: Array) -> Float[Array, " row"]:
        place = jnp.arange(len(next(iter(state.table.values()))))
        return jnp.where(
            place < state.num_before,
            jnp.ones_like(exponent),
            jnp.where(place < state.num_rows, exponent, jnp.zeros_like(exponent)),
        )

    def _densities(self, state: Tempered, reading: TemperingReading, exponent: Array) -> Callable:
        """A function of a vector: the log density that walks leave invariant, and `log_own`."""
        program = reading.split.program.with_arguments(**state.table)
        power = self._powers(state, exponent)
        place = jnp.arange(len(power))
        is_own = (place >= state.num_before) & (place < state.num_rows)

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, by_row = reading.terms(z, program)
            return log_prior + tempered(by_row, power).sum(), jnp.where(is_own, by_row, 0.0).sum()

        return densities

    def finished(self, state: Tempered) -> Array:
        """Whether the last stage is over."""
        return (state.exponent >= 1) & (state.num_left == 0)

    def needs_host(self, state: Tempered) -> Array:
        """Whether the next stage is to begin."""
        return (state.exponent >= 1) & (state.num_left > 0)

    def on_host(
        self, states: Sequence[Tempered], reading: TemperingReading, data: StageData
    ) -> Sequence[Tempered]:
        """The next stage of each replicate."""
        for state in states:
            check_at_end(self.needs_host(state))
        return [self._next(*taken(state, 1), reading, data) for state in states]

    def updated(
        self, state: Tempered, reading: TemperingReading, data: StageData, before: StageData
    ) -> Tempered:
        """More rows: one more stage."""
        check_finished(state, self.finished(state))
        return self._next(state, jnp.arange(int(data.num_rows), dtype=jnp.int32), reading, data)

    def _next(
        self, state: Tempered, rows: Array, reading: TemperingReading, data: StageData
    ) -> Tempered:
        state = state._replace(log_before=state.log_before + state.log_own, stage=state.stage + 1)
        return self._begun(state, reading, data, rows)

    def draw(
        self,
        rng_key: Array,
        state: Tempered,
        reading: TemperingReading,
        data: StageData,
        num_draws: int,
    ) -> dict[str, Array]:
        """Particles in random order, each as often as the others or once more."""
        rng = generator(rng_key)
        chosen = np.asarray(state.z)[resampled(rng, np.zeros(self.num_particles), num_draws)]
        return site_values(rng, reading.split, None, chosen)

    def results(self, state: Tempered, reading: TemperingReading, data: StageData) -> Results:
        """The evidence, and the equally weighted particles."""
        attrs = {
            "log_evidence": state.log_evidence,
            "log_evidence_se": jnp.sqrt(variance_of(state.families)),
            "num_stages": state.stage + 1,
            "num_row_evaluations": state.num_evaluations,
        }
        values = site_values(np.random.default_rng(0), reading.split, None, state.z)
        group: dict[str, Any] = {
            "log_weight": jnp.full_like(state.log_own, -np.log(self.num_particles))
        }
        group |= {name.replace("/", "."): value for name, value in values.items()}
        return Results({"particles": group}, attrs, dict.fromkeys(group, ("particle",)))
