"""Several runs of `Staged` on different rows, merged into one posterior.

    p(z | all rows)  ~  prior(z) product over w of  pi_w(z) / prior(z)
    log Z  =  sum over w of log Z_w  +  log Z of this product

Each worker w runs `Staged` from the prior. What it finds is summarised as between stages, by a
mixture with the prior in the background: pi_w. One more stage of nested sampling starts from pi_1,
with the others over the prior as its likelihood. It evaluates no row, with two exceptions: each
worker's own rows give the scores at the worker's points, and the weights of some draws. What
mixtures cannot represent is lost once for each worker. Where workers disagree the product lies in
the tails of all of them, where mixtures are worst: with the same rows, successive stages lose less.

At the end draws from the merged mixture are weighted by all rows, as in `Staged`: `log_evidence` is
by these weights, and `nats_left` is the divergence to the posterior. Above two nats the claimed
error is infinite, because no stage is begun again. (With `most_lost=np.inf` nothing is weighted.)
Each worker has labelled exchangeable members (`inference.reading.density`) in its own way, so that
a vector is relabelled for each.

    drivers = [Driver(Staged(model)) for part in parts]   # each runs on its part, anywhere
    Driver(MergedStages(drivers)).run(key, x, y)          # all rows, for the weights at the end
    driver.update(x, y)                                   # further stages, as of `Staged`

`MergedStages.of(Driver(Staged(model)), key, parts, cluster=client)` runs a driver on each part, as
a task of a cluster. A driver can be pickled.

Center (2009), "Learning complex classification models from large data sets", on several processors.
Cost: a stage of `Staged` with (workers x components x size^2) in place of the rows; a gradient of a
worker's rows for each of its points; and four draws for each dimension, at least 200, by all rows.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from inference.kernels.nested.state import evidence
from inference.kernels.staged.kernel import (
    Stage,
    Staged,
    StagedReading,
    account_of,
    key_of,
    stage_points,
)
from inference.kernels.staged.search import NEAR, LabelledMixture, StageArrays, Start
from inference.kernels.staged.weighing import Account, Evidence, unweighed
from inference.maths.host import Array, generator, key_data
from inference.maths.normal_mixture import Mixture
from inference.program.program import Program
from inference.reading.density import relabel
from inference.reading.stage_rows import StageData, row_dim
from inference.run.driver import Driver, each_run

__all__ = ["MergedStages", "Part", "Product"]


@dataclass(frozen=True)
class Product(Start):
    """Starts from the posterior of the first worker; the likelihood is the others' over the prior.

    A mixture of workers is a `LabelledMixture` whose arrays are stacked; other mixtures are those
    of stages of rows.
    """

    def densities(self, arrays: StageArrays) -> Callable:
        """A function of a vector: log density of the first, and of the others over the prior."""
        if not isinstance(arrays.mixture, LabelledMixture):
            return super().densities(arrays)
        program = self.split.program.with_arguments(**arrays.rows)
        first = _first(arrays.mixture).mixture
        others = jax.tree.map(lambda leaf: leaf[1:], arrays.mixture)

        def densities(z: Array) -> tuple[Array, Array]:
            each = jax.vmap(lambda worker: self._over_prior(worker, z, program))(others)
            log_prior = self.split.densities(z, program)[0]
            return self.defensive.log_density(first, z, log_prior), jnp.sum(each)

        return densities

    def _over_prior(self, worker: LabelledMixture, z: Array, program: Program) -> Array:
        """Log density over prior of one worker, the same at all relabelled copies of a vector.

        The worker knows the canonical copy, at which the prior of all copies counts.
        """
        log_copies = 0.0 if self.exchange is None else self.exchange.log_copies
        z = relabel(self.exchange, z[None], worker.reference)[0]
        log_prior = self.split.densities(z, program)[0] + log_copies
        return self.defensive.log_density(worker.mixture, z, log_prior) - log_prior

    def draws(
        self, rng: np.random.Generator, num_draws: int, given: tuple[Mixture, LabelledMixture]
    ) -> np.ndarray:
        """Draws from the posterior of the first worker."""
        mixture, proposal = given
        is_workers = isinstance(mixture, LabelledMixture)
        return super().draws(
            rng, num_draws, (_first(mixture).mixture if is_workers else mixture, proposal)
        )


def _first(workers: LabelledMixture) -> LabelledMixture:
    return jax.tree.map(lambda leaf: leaf[0], workers)


class Part(NamedTuple):
    """A run of `Staged` that has finished."""

    kernel: Staged
    state: Stage
    reading: StagedReading
    data: StageData


class MergedStages(Staged):
    """One posterior of several that were learned in stages from different rows.

    Args:
        parts: drivers of `Staged` that have finished, or a `Part` each, of one model with the same
            settings.
        settings: of `Staged`, where they differ from those of the first part.
    """

    _start = Product

    def __init__(self, parts: Sequence[Any], **settings: Any):
        if len(parts) < 2:
            raise ValueError(f"parts: found {len(parts)}, wanted two or more drivers of Staged.")
        self.parts = tuple(_part(number, part) for number, part in enumerate(parts))
        first = self.parts[0].kernel
        of_parts = {part.kernel.sampler.rename for part in self.parts}
        if len(of_parts | {settings.get("rename", first.sampler.rename)}) > 1:
            raise ValueError(
                "rename: found True and False among the parts and the settings; wanted one of them "
                "for all."
            )
        names = ("summary", "num_clumps", "background", "most_lost", "num_walkers")
        of_first = {name: getattr(first, name) for name in names}
        of_first |= vars(first.sampler) | {"num_stages": 1}
        super().__init__(**of_first | settings)

    @classmethod
    def of(
        cls,
        driver: Driver,
        rng_key: int | Array,
        parts: Sequence[tuple | Callable[[], tuple]],
        *,
        cluster: Any = None,
        **settings: Any,
    ) -> "MergedStages":
        """Learns each part by a driver of its own, and merges them.

        Args:
            driver: of `Staged`; is copied for each part, and in its `checkpoint` each part has a
                folder of its own.
            rng_key: an integer or a JAX key; part i has the key `fold_in(rng_key, i)`.
            parts: positional arguments of the model for each part, or a function that returns
                them. On a cluster it is called by the worker, so that rows may be read there.
            cluster: as for `Driver`: each part is a task.
            settings: as for `MergedStages`.
        """
        key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key

        def prepared(number: int, part: Any) -> tuple[Driver, Any, Any]:
            own = copy(driver)
            if driver.checkpoint is not None:
                own.checkpoint = Path(driver.checkpoint).absolute() / f"part_{number}"
            return own, random.fold_in(key, number), part

        each = [prepared(number, part) for number, part in enumerate(parts)]
        with each_run(cluster, ((), {}), each, folder=driver.checkpoint) as runs:
            return cls([_part(number, own) for number, (own, _) in enumerate(runs)], **settings)

    def read(self, program: Program) -> tuple[StagedReading, StageData]:
        """Reads the model, which must be that of the parts, with as many rows as they had."""
        is_double = bool(jax.config.jax_enable_x64)
        for number, part in enumerate(self.parts):
            was_double = part.reading.nesting.split.dtype == np.float64
            if was_double != is_double:
                raise ValueError(
                    f"parts, number {number}: the run began with jax_enable_x64={was_double}, and "
                    f"now it is {is_double}; set it back."
                )
        reading, data = super().read(program)
        learned, found = sum(int(part.state.num_rows) for part in self.parts), int(data.num_rows)
        if learned != found:
            raise ValueError(
                f"plate {row_dim(program)!r}: found {found} rows, and the parts have learned from "
                f"{learned}; wanted the rows of all parts."
            )
        for number, part in enumerate(self.parts):
            part.reading.check_alike(program, asked=f"parts, number {number}")
        return reading, data

    def init(self, rng_key: Array, reading: StagedReading, data: StageData) -> Stage:
        """The stage that merges the parts."""
        rng = generator(rng_key)
        found = [self._learned(rng, part, reading) for part in self.parts]
        each, accounts = zip(*found, strict=True)
        mixture = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
        one = np.zeros(1, np.int32)  # a program cannot have no row
        num_rows = np.asarray(sum(part.state.num_rows for part in self.parts), np.int32)
        nothing, start = reading.search.nothing, reading.search.start
        arrays = StageArrays(mixture, reading.rows.cut(data, one))
        densities = lambda z: start.nested_values(arrays, nothing, z)[:2]
        in_type = lambda *own: np.asarray(sum(own), start.split.dtype)
        return Stage(
            nest=reading.nesting.started(rng, start.draws, (mixture, nothing), densities, False),
            mixture=mixture,
            proposal=nothing,
            rows=one,
            later=np.zeros((0, 0), np.int32),
            num_left=np.zeros((), np.int32),
            num_rows=num_rows,
            num_weighed=num_rows if self.most_lost == np.inf else np.zeros_like(num_rows),
            weighed=unweighed(start.split.dtype),
            before=jax.tree.map(in_type, *accounts),
            stage=np.asarray(sum(part.state.stage + 1 for part in self.parts) - 1, np.int32),
            rng_key=key_data(rng),
        )

    def _next_stage(self, state: Stage, reading: StagedReading, data: StageData) -> Stage:
        return super()._next_stage(state, reading, data) if self.needs_host(state) else state

    def _next_weighed(
        self,
        state: Stage,
        reading: StagedReading,
        data: StageData,
        found: LabelledMixture,
        before: Account,
    ) -> Stage:
        """Ends the run, whatever the divergence.

        At `NEAR` nats or more the claimed error is infinite.

        An estimate of the divergence from n weighted draws is at most log n. So where few draws
        have all of the weight, the true divergence, and with it the error, may be anything.
        """
        weighed, spent = reading.weighing.by_all(key_of(state, 4), state, found, data)
        if not weighed.lost.nats[0] < NEAR:
            weighed = weighed._replace(variance=np.inf)
        account = state.before
        account = account._replace(num_evaluations=account.num_evaluations + float(spent))
        return state._replace(num_weighed=state.num_rows, weighed=weighed, before=account)

    def _learned(
        self, rng: np.random.Generator, part: Part, reading: StagedReading
    ) -> tuple[LabelledMixture, Account]:
        own, data = part.reading, part.data
        state = jax.device_get(part.state)
        points, log_weight, spent = stage_points(state, own, data)
        mixture = reading.search.family.fitted(rng, points, log_weight, self.num_clumps)
        account = account_of(rng, state, own, mixture, data, spent)
        before = state.before.then(account)
        # the weighted evidence is that of all rows of the worker; the correction and the loss of
        # the last mixture are in its account
        if state.weighed.is_there:
            correction = account.nested.log_evidence - evidence(state.nest)[0]
            corrected = Evidence(
                state.weighed.log_evidence + correction, state.weighed.variance, account.nested.lost
            )
            before = before._replace(corrected=corrected)
        return reading.search.labelled(rng, mixture), before


def _part(number: int, part: Any) -> Part:
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
