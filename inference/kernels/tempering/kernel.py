"""Sequential Monte Carlo over the rows, a stage at a time: the posterior of some rows is where the
next ones start from.

    pi(z)  ~  prior(z) x p(rows of earlier stages | z) x p(rows of this stage | z) ^ e,        e from 0 to 1 in every stage

A step takes e as far as the weights of the particles, p(rows of this stage | z) ^ (difference),
leave a given share of them effective; then it resamples, and every particle walks until it has
forgotten where it was. The mean weights of all steps multiply to the evidence. A walk looks at all
rows so far: with more and more particles the answer is exact. `Staged` looks at the rows of its
stage alone, and what its summary of the others has lost is lost. The error of the log-evidence is
told from the genealogy (`inference.maths.tempering`).

`Driver(DataTempering(model, num_stages=10)).run(key, x, y)` deals the rows out at random;
`driver.update(x, y)` is one more stage, at any later time. All rows so far are in the state, so
that a run goes on from its state in any process.

Prior and likelihood are read off the model and proved (`inference.reading.density`), and so is that
the terms of a row do not depend on other rows.

Cost: evaluations of one row = particles x steps of a walk x about 2 x sum over stages of (rows so
far x exponents of the stage). The arrays of rows double when they are full: up to twice as many are
computed, and little is compiled.

Chopin (2002), "A sequential particle filter method for static models"; Del Moral, Doucet and Jasra
(2006) for the powers; Chan and Lai (2013) for the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.maths.resampling import effective_size, systematic_parents
from inference.maths.slice_walk import Points
from inference.maths.tempering import (
    Families,
    counted,
    founded,
    moved,
    next_exponent,
    powered,
    variance_of,
)
from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between, is_number
from inference.reading.density import Split
from inference.reading.stage_rows import (
    StageData,
    StageRows,
    check_at_end,
    check_finished,
    row_terms,
    taken,
)
from inference.run.protocol import Algorithm, Results

__all__ = ["DataTempering", "Tempered", "TemperingReading", "TemperingReport"]

FEWEST = 20  # particles


class Tempered(NamedTuple):
    """Where a run stands."""

    z: Array  # [particle, size]
    log_before: Array  # [particle]: prior and rows of earlier stages
    log_own: Array  # [particle]: rows of this stage, not to a power
    exponent: Array
    # arguments of all rows so far, those of this stage last; room behind them
    table: dict[str, Array]
    num_before: Array  # rows of earlier stages
    num_rows: Array  # rows so far
    later: Array  # [stage, row]: of the stages to come, places in the data
    num_left: Array  # stages to come
    stage: Array
    log_evidence: Array
    families: Families
    num_evaluations: Array  # of one row each


class TemperingReport(NamedTuple):
    """What a step reports."""

    ess: Array  # effective particles before they were resampled
    log_evidence: Array  # of all rows so far, those of this stage to the exponent
    exponent: Array
    stage: Array
    # of walks: squared distance from their origins after half of the steps, over that after all
    halfway: Array
    sweeps: Array  # of a walk, each of as many steps as there are latent numbers
    evaluations: Array  # of all rows so far
    num_nan: Array  # of them that are NaN, which counts as 0


@dataclass(frozen=True)
class TemperingReading:
    """What was read of a model: prior and likelihood, and its rows."""

    split: Split
    rows: StageRows

    def more(self, program: Program) -> "tuple[TemperingReading, StageData]":
        """More rows of the same model."""
        self.rows.check_alike(program)
        return self, self.rows.data(program)

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments that have an entry for each row."""
        return self.rows.names

    def terms(self, z: Array, program: Program) -> tuple[Array, Array]:
        """log prior, and the log likelihood of each row of a program."""
        return row_terms(self.split, self.rows.axis, z, program)


class DataTempering(Algorithm):
    """Sequential Monte Carlo over the rows of `model`, in stages.

    :param model: a NumPyro model whose latent sites are continuous and have proper priors; its data
    are rows of one plate.
    :param num_stages: parts into which the rows of a run are dealt at random; an update is one more
    stage.
    :param num_particles: the error of the log-evidence is about sqrt(steps / num_particles).
    :param threshold: share of the particles that a step leaves effective.
    :param num_sweeps: sweeps of a walk at least, each of as many steps as there are latent numbers.
    :param memory: the correlation with its origin that a walk may keep: while walks keep more they
    go on. 1: they do not.
    """

    report = "smc"

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
        check_whole(FEWEST, num_particles=num_particles)
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
        rows.prove()
        split = Split(program)
        split.prove()
        return TemperingReading(split, rows), rows.data(program)

    def init(self, rng_key: Array, reading: TemperingReading, data: StageData) -> Tempered:
        """Draws from the prior, before the first stage."""
        draw_key, deal_key = random.split(rng_key)
        rows, later = reading.rows.dealt(deal_key, self.num_stages, data)
        keys = random.split(draw_key, self.num_particles)
        z, log_prior = once(jax.vmap(partial(_drawn, reading)), keys)(keys)
        zero, count = jnp.zeros((), z.dtype), jnp.zeros((), jnp.int32)
        return self._begun(
            Tempered(
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
                families=founded(self.num_particles, zero),
                num_evaluations=zero,
            ),
            reading,
            data,
            rows,
        )

    def _begun(
        self, state: Tempered, reading: TemperingReading, data: StageData, rows: Array
    ) -> Tempered:
        """A stage of these rows, at exponent 0."""
        own = reading.rows.own(data, rows)
        log_own = once(jax.vmap(lambda z: reading.terms(z, own)[1].sum()), state.z)(state.z)
        sites = " and ".join(map(repr, own.observed))
        self._check_start(sites, np.asarray(state.z), np.asarray(log_own), int(state.stage))
        known = int(state.num_rows)
        every = {
            name: np.concatenate([np.asarray(leaf)[:known], own.arguments[name]])
            for name, leaf in state.table.items()
        }
        room = 1 << (known + len(rows) - 1).bit_length()
        # rows as they may be
        fill = lambda leaf: jnp.asarray(
            np.concatenate([leaf, np.repeat(leaf[:1], room - len(leaf), axis=0)])
        )
        return state._replace(
            log_own=log_own,
            exponent=jnp.zeros_like(state.exponent),
            table={name: fill(leaf) for name, leaf in every.items()},
            num_before=state.num_rows,
            num_rows=state.num_rows + len(rows),
            num_evaluations=state.num_evaluations + self.num_particles * len(rows),
        )

    def _check_start(self, sites: str, z: np.ndarray, log_own: np.ndarray, stage: int) -> None:
        count = self.num_particles
        if not np.isfinite(z).all():
            known = np.isfinite(z).all(1).sum()
            raise ValueError(
                f"{known} of {count} draws from the prior are finite; look for a prior that is too "
                "wide for its dtype."
            )
        where = "draws from the prior" if not stage else f"particles before stage {stage + 1}"
        if np.isnan(log_own).any() or np.isposinf(log_own).any():
            what = "NaN" if np.isnan(log_own).any() else "infinite"
            raise ValueError(
                f"site {sites}: its likelihood is {what} at some of {count} {where}; wanted a "
                "number."
            )
        if not np.isfinite(log_own).any():
            raise ValueError(
                f"site {sites}: its likelihood is 0 at all of {count} {where}; wanted some that "
                "the data are possible at."
            )

    def step(
        self, rng_key: Array, state: Tempered, reading: TemperingReading, data: StageData
    ) -> tuple[Tempered, TemperingReport]:
        """One exponent: weights, resampling, moves. Rows that count are in the state."""
        parent_key, walk_key = random.split(rng_key)
        exponent = next_exponent(state.log_own, state.exponent, self.threshold)
        log_weight = self._log_weight(state, exponent)
        log_total = logsumexp(log_weight)
        weight = jnp.exp(log_weight - log_total)
        parent = systematic_parents(parent_key, weight)
        start = Points(
            state.z,
            state.log_before + powered(state.log_own, exponent),
            state.log_own,
            jnp.zeros_like(state.log_own),
        )
        densities = self._densities(state, reading, exponent)
        at, walked = moved(
            walk_key, start, parent, densities, num_sweeps=self.num_sweeps, memory=self.memory
        )
        log_evidence = state.log_evidence + log_total - np.log(self.num_particles)
        rows = state.num_rows.astype(log_evidence.dtype)
        new = state._replace(
            z=at.z,
            log_before=at.log_prior - powered(at.log_likelihood, exponent),
            log_own=at.log_likelihood,
            exponent=exponent,
            log_evidence=log_evidence,
            families=counted(state.families, weight, parent),
            num_evaluations=state.num_evaluations + rows * walked.evaluations.astype(rows.dtype),
        )
        ess = effective_size(log_weight - log_total)
        sweeps = walked.num_steps.astype(rows.dtype) / reading.split.size
        took = walked.halfway, sweeps, walked.evaluations, walked.num_nan
        return new, TemperingReport(ess, log_evidence, exponent, state.stage, *took)

    def _log_weight(self, state: Tempered, exponent: Array) -> Array:
        """Of each particle, for a step to this exponent."""
        return powered(state.log_own, exponent - state.exponent)

    def _powers(self, state: Tempered, exponent: Array) -> Array:
        """[place]: of each row in what a walk leaves as it is."""
        place = jnp.arange(len(next(iter(state.table.values()))))
        of_own = jnp.where(place < state.num_rows, exponent, jnp.zeros_like(exponent))
        return jnp.where(place < state.num_before, jnp.ones_like(exponent), of_own)

    def _densities(self, state: Tempered, reading: TemperingReading, exponent: Array) -> Callable:
        """z to log of what a walk leaves as it is, and the log likelihood of the rows of this
        stage.
        """
        program, power = (
            reading.split.program.with_arguments(**state.table),
            self._powers(state, exponent),
        )
        place = jnp.arange(len(power))
        is_own = (place >= state.num_before) & (place < state.num_rows)

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, by_row = reading.terms(z, program)
            return log_prior + powered(by_row, power).sum(), jnp.where(is_own, by_row, 0.0).sum()

        return densities

    def finished(self, state: Tempered) -> Array:
        """After the last stage."""
        return (state.exponent >= 1) & (state.num_left == 0)

    def needs_host(self, state: Tempered) -> Array:
        """Whether the next stage is to begin."""
        return (state.exponent >= 1) & (state.num_left > 0)

    def on_host(
        self, states: Sequence[Tempered], reading: TemperingReading, data: StageData
    ) -> Sequence[Tempered]:
        """The next of the stages that were dealt."""
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
        """Particles, each as often as others or once more, in random order."""
        place_key, order_key = random.split(rng_key)
        places = (np.arange(num_draws) + float(random.uniform(place_key))) / num_draws
        index = np.minimum((places * self.num_particles).astype(int), self.num_particles - 1)
        return jax.jit(jax.vmap(reading.split.values))(
            state.z[np.asarray(random.permutation(order_key, index))]
        )

    def results(self, state: Tempered, reading: TemperingReading, data: StageData) -> Results:
        """The evidence, and the particles, which have equal weights.

        Before the last stage has finished no error is claimed: NaN.
        """
        error = jnp.where(self.finished(state), jnp.sqrt(variance_of(state.families)), jnp.nan)
        attrs = {
            "log_evidence": state.log_evidence,
            "log_evidence_se": error,
            "num_stages": state.stage + 1,
            "num_row_evaluations": state.num_evaluations,
        }
        values = jax.jit(jax.vmap(reading.split.values))(state.z)
        named = {name.replace("/", "."): value for name, value in values.items()}
        groups = {
            "particles": {
                "log_weight": jnp.full_like(state.log_own, -np.log(self.num_particles)),
                **named,
            }
        }
        return Results(groups, attrs, dict.fromkeys(groups["particles"], ("particle",)))


def _drawn(reading: TemperingReading, rng_key: Array) -> tuple[Array, Array]:
    """A draw from the prior, and the logarithm of its density."""
    z = reading.split.draw(rng_key)
    return z, reading.terms(z, reading.split.program)[0]
