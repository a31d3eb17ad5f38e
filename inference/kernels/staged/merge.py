"""What workers have learned apart, each from rows of its own, put together.

    p(z | all rows)  ~  prior(z) product over w of  pi_w(z) / prior(z),        log Z = sum over w of log Z_w  +  log Z of this product

Each worker ran `Staged` from the prior; what it has found is summarised as between stages: pi_w,
clumps with the prior in the background. One more stage draws from pi_1 and takes the others, over
the prior, for its likelihood: no row is looked at, but for slopes at the points that a worker has,
and some draws of what is fitted to them, by the worker's own rows. What clumps cannot say is lost,
once for each worker, and where workers disagree the product lies in the tails of all of them, where
clumps say the least: for the same rows, stages one after the other lose less. At the end some draws
of what was put together are weighed by all rows, as those of `Staged` are: `log_evidence` is what
these say, and `nats_left` how far the posterior is from them; above two nats the claimed error is
infinite, for nothing begins again. (With `most_lost=np.inf` nothing is weighed.) Where members may
change places (clusters of a mixture, `inference.reading.exchangeable`), workers have each named
them in a way of their own: a vector is given the places of each.

    drivers = [Driver(Staged(model)) for part in parts]          # each `run` on its part, wherever; a driver can be pickled
    Driver(MergedStages(drivers)).run(key, x, y)                 # all rows, by which the end is weighed
    driver.update(x, y)                                          # from then on stages as ever

Center (2009), "Learning complex classification models from large data sets", of the distribution
among processors. Cost: as a stage of `Staged` with (workers x clumps x size^2) in place of the
rows; a gradient of the rows of a worker for each of its points; and four draws for each latent
number, at least 200, by all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.nested.nesting import evidence_of
from inference.kernels.nested.relabel import Named, together
from inference.kernels.staged.kernel import (
    Stage,
    Staged,
    StagedReading,
    account_of,
    found_out,
    key_of,
    row_evaluations,
)
from inference.kernels.staged.search import NEAR, Start
from inference.kernels.staged.weighing import Account, Evidence, unweighed
from inference.maths.summary import Mixture
from inference.program.program import Program
from inference.reading.density import Split
from inference.reading.exchangeable import Exchangeable
from inference.reading.stage_rows import StageData, row_dim

__all__ = ["MergedStages", "Part", "Product"]

# settings of the first part
SAME = ("summary", "num_clumps", "background", "most_lost", "num_iterations", "num_walkers")


@dataclass(frozen=True)
class Product(Start):
    """What workers have learned, and what later stages start from."""

    def densities(self, clumps: Mixture, program: Program) -> Callable:
        """The logarithms of the first, and of the others over the prior."""
        if not isinstance(clumps, Named):  # a stage of rows
            return super().densities(clumps, program)

        first, others = (
            jax.tree.map(lambda leaf, part=part: leaf[part], clumps) for part in (0, slice(1, None))
        )

        def densities(z: Array) -> tuple[Array, Array]:
            each = jax.vmap(lambda own: self._over_prior(own, z, program))(others)
            return self.backed.log_density(
                first.clumps, z, self.split.densities(z, program)[0]
            ), jnp.sum(each)

        return densities

    def _over_prior(self, own: Named, z: Array, program: Program) -> Array:
        """What one worker has learned of the copy of a vector that it knows: the logarithm of
        density over prior, which is that of all copies.
        """
        log_copies = 0.0 if self.exchange is None else self.exchange.log_copies
        z = together(self.exchange, z[None], own.reference)[0]
        log_prior = self.split.densities(z, program)[0] + log_copies
        return self.backed.log_density(own.clumps, z, log_prior) - log_prior

    def before(self, clumps: Mixture) -> Callable[[Array], Array]:
        """Draws from the first."""
        if not isinstance(clumps, Named):
            return super().before(clumps)
        first = jax.tree.map(lambda leaf: leaf[0], clumps.clumps)
        return lambda key: self.backed.draw(key, first, self.split.draw)


class Part(NamedTuple):
    """A run of `Staged` that has finished."""

    kernel: Staged
    state: Stage
    reading: StagedReading
    data: StageData


class MergedStages(Staged):
    """One posterior of several that were learned in stages from different rows.

    :param parts: drivers of `Staged` that have finished, or a `Part` each, of one model with the
    same settings.
    :param settings: of `Staged`, where they differ from those of the first part.
    """

    def __init__(self, parts: Sequence[Any], **settings: Any):
        if len(parts) < 2:
            raise ValueError(f"parts: found {len(parts)}, wanted two or more drivers of Staged.")
        self.parts = tuple(_part(number, part) for number, part in enumerate(parts))
        first = self.parts[0].kernel
        renames = {part.kernel.sampler.rename for part in self.parts} | {
            settings.get("rename", first.sampler.rename)
        }
        if len(renames) > 1:
            raise ValueError(
                "rename: found True and False among the parts and the settings; wanted one of them "
                "for all."
            )
        own = {name: getattr(first, name) for name in SAME}
        super().__init__(
            first.model, num_stages=1, **own | first.sampler.settings._asdict() | settings
        )

    def read(self, program: Program) -> tuple[StagedReading, StageData]:
        """The model is read and proved, it is that of all parts, and the rows are as many as
        these have learned from.
        """
        is_double = bool(jax.config.jax_enable_x64)
        for number, part in enumerate(self.parts):
            if (was := part.reading.dtype == np.float64) != is_double:
                raise ValueError(
                    f"parts, number {number}: the run began with jax_enable_x64={was}, and now it "
                    f"is {is_double}; set it back."
                )
        reading, data = super().read(program)
        learned, found = sum(int(part.state.num_rows) for part in self.parts), int(data.num_rows)
        if learned != found:
            raise ValueError(
                f"plate {row_dim(program)!r}: found {found} rows, and the parts have learned from "
                f"{learned}; wanted those."
            )
        for number, part in enumerate(self.parts):
            part.reading.check_alike(program, asked=f"parts, number {number}")
        return reading, data

    def _start_of(self, split: Split, exchange: Exchangeable | None) -> Start:
        start = super()._start_of(split, exchange)
        return Product(split, start.backed, exchange)

    def init(self, rng_key: Array, reading: StagedReading, data: StageData) -> Stage:
        """The stage that puts the parts together."""
        fit_key, start_key, rng_key = random.split(rng_key, 3)
        each, accounts = zip(
            *[
                self._learned(random.fold_in(fit_key, number), part, reading)
                for number, part in enumerate(self.parts)
            ],
            strict=True,
        )
        clumps = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        one = jnp.zeros(1, jnp.int32)  # a program cannot have none
        own, num_rows = (
            reading.rows.own(data, one),
            jnp.asarray(sum(part.state.num_rows for part in self.parts)),
        )
        nothing, start = reading.search.nothing, reading.start
        densities = start.rest(clumps, own, nothing)
        return Stage(
            nest=reading.nesting.started(
                start_key, start, (clumps, nothing), densities, is_even=False
            ),
            clumps=clumps,
            sampled=nothing,
            # parts are put together in one turn
            iteration=jnp.asarray(self.num_iterations - 1, jnp.int32),
            rows=one,
            later=jnp.zeros((0, 0), jnp.int32),
            num_left=jnp.zeros((), jnp.int32),
            num_rows=num_rows,
            num_weighed=num_rows if self.most_lost == np.inf else jnp.zeros_like(num_rows),
            weighed=unweighed(reading.dtype),
            before=jax.tree.map(lambda *own: sum(own), *accounts),
            stage=jnp.asarray(sum(part.state.stage + 1 for part in self.parts) - 1),
            rng_key=random.key_data(rng_key),
        )

    def _gone_on(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        """Weighs a replicate when it has come to its end."""
        is_at_end = self.sampler.finished(state.nest) and not self.finished(state)
        return self._next_dealt(state, reading, data) if is_at_end else state

    def _next_weighed(
        self, state: Stage, reading: StagedReading, data: StageData, found: Named, before: Account
    ) -> Stage:
        """The end, whatever is left: where all rows would begin is not known from here.

        Where few draws have all of the weight, more than the logarithm of their number is never
        seen to be left, and the error may be anything.
        """
        weighed, spent = reading.weighing.by_all(key_of(state, 4), state, found, data)
        if not weighed.lost.nats[0] < NEAR:
            weighed = weighed._replace(variance=jnp.full_like(weighed.variance, jnp.inf))
        told = state.before._replace(num_evaluations=state.before.num_evaluations + float(spent))
        return state._replace(num_weighed=state.num_rows, weighed=weighed, before=told)

    def _learned(self, rng_key: Array, part: Part, reading: StagedReading) -> tuple[Named, Account]:
        """What one worker has found, and the account of its stages."""
        fit_key, lost_key, name_key = random.split(rng_key, 3)
        _, state, own, data = part
        told, log_weight, spent = found_out(state, own, data)
        clumps = reading.search.summary.fitted(fit_key, told, log_weight, self.num_clumps)
        evaluations = part.kernel._row_evaluations(state) - state.before.num_evaluations
        account = account_of(lost_key, state, own, clumps, data, evaluations, spent)
        before = state.before.then(account)
        # that is the evidence of all of its rows; `account` has what these clumps lack of that, and
        # lose
        if state.weighed.is_there:
            lacking = account.nested.log_evidence - evidence_of(state.nest)[0]
            log_evidence = state.weighed.log_evidence + lacking
            before = before._replace(
                corrected=Evidence(log_evidence, state.weighed.variance, account.nested.lost)
            )
        return reading.search.named(name_key, clumps), before

    def _row_evaluations(self, state: Stage) -> Array:
        return (
            state.before.num_evaluations
            if isinstance(state.clumps, Named)
            else row_evaluations(state)
        )


def _part(number: int, part: Any) -> Part:
    """What a driver has found; a `Part` as it is."""
    if isinstance(part, Part):
        return part
    kernel = getattr(part, "kernel", None)
    if not isinstance(kernel, Staged):
        raise TypeError(f"parts: number {number} is {part!r}; wanted a Driver of Staged.")
    states = part.states
    if len(states) > 1 or not kernel.finished(states[0]):
        raise ValueError(
            f"parts: number {number} has {len(states)} replicates, or has not finished; wanted one "
            "that has."
        )
    return Part(kernel, states[0], part.reading, part.data)
