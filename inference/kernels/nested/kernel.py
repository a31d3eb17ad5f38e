"""Nested sampling of any model with continuous latent sites.

    evidence  =  sum over dead points of  likelihood x (prior volume of the point's shell)

`num_live` points are drawn from the prior. A step removes the lowest of them, a batch at a time. In
their place come copies of surviving points (`state`), each of which walks by slice sampling
through the prior above the likelihood of the last point that died (`inference.maths.slice_walk`).
Independent draws from the prior (`nesting`) replace the copies as long as they cost fewer
evaluations than a walk. Twice in an e-fold of prior volume the sampler looks for separate modes
(`state`); each has points and a volume of its own from then on. Modes that are copies of each other
by label switching are one, because live points are relabelled (`inference.reading.density`). Prior
volumes are simulated (`state`), and the spread of the simulated evidences is the error of the
log-evidence.

Prior and likelihood are read off the model and proved (`inference.reading.density`). A likelihood
that is constant, or has plateaus, is fine: points of equal likelihood are ordered by a random
label. Numbers have JAX's default precision. In float32 the errors are as good, but a log-likelihood
of 1e5 is rounded to about .01: use `jax.enable_x64(True)` for many rows.

Cost: evaluations of the model = num_live x (information in nats + 5) x steps of a walk x about 2,
and num_live^2 x size for each e-fold.

Skilling (2006); Feroz, Hobson and Bridges (2009) for modes; Center (2009), "Learning complex
classification models from large data sets".
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array

from inference.kernels.nested.nesting import Nesting, Settings, Shrinkage
from inference.kernels.nested.state import (
    Nest,
    all_points,
    evidence,
    information_of,
    particles,
    remaining,
)
from inference.maths.resampling import resampled
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between, is_number, is_whole
from inference.reading.density import site_values
from inference.run.protocol import Algorithm, Results

__all__ = ["NestedSampler"]


class NestedSampler(Algorithm):
    """Nested sampling of `model`.

    Args:
        model: a NumPyro model whose latent sites are continuous and have proper priors.
        num_live: live points; the error of the log-evidence is about sqrt(information / num_live).
        batch: points that are replaced in a step; None: a tenth of the live points.
        num_sweeps: sweeps of the coordinates in a walk, at first and at least.
        memory: the correlation with its start that a walk may keep; while walks keep more they
            become longer. 1: they stay as they are. (The check "walks" of `diagnostics.report`
            finds walks that keep much more.)
        tolerance: the run ends when the live points hold less than this share of the evidence.
        track_modes: whether separate modes get points and volumes of their own.
        rename: whether exchangeable members of a plate (`inference.reading.density`), such as the
            clusters of a mixture, are relabelled, so that modes which are copies of each other by
            label switching are one.
    """

    report = "nested"

    def __init__(
        self,
        model: Any,
        *,
        num_live: int = 500,
        batch: int | None = None,
        num_sweeps: float = 3.0,
        memory: float = 0.25,
        tolerance: float = 0.01,
        track_modes: bool = True,
        rename: bool = True,
    ):
        check_whole(20, num_live=num_live)
        batch = max(1, num_live // 10) if batch is None else batch
        check_setting(
            is_whole(batch) and 1 <= batch <= num_live // 2,
            f"an integer from 1 to num_live / 2 = {num_live // 2}",
            batch=batch,
        )
        check_setting(is_between(num_sweeps, 0, np.inf), "a number above 0", num_sweeps=num_sweeps)
        check_setting(
            is_number(memory) and 0 < memory <= 1, "a number above 0, up to 1", memory=memory
        )
        check_setting(is_between(tolerance, 0, 1), "a number between 0 and 1", tolerance=tolerance)
        self.model = model
        self.settings = Settings(
            int(num_live), int(batch), num_sweeps, memory, tolerance, track_modes, rename
        )
        vars(self).update(self.settings._asdict())  # the driver records attributes of the kernel

    def read(self, program: Program) -> tuple[Nesting, dict[str, Array]]:
        """Prior and likelihood, proved, and the arrays among the arguments of the model.

        Where the model needs to know their values, the arrays stay constants of the program, and
        none is returned.
        """
        reading = Nesting.of(self.settings, program)
        split = reading.split
        arrays = {
            name: jnp.asarray(value)
            for name, value in program.arguments.items()
            if isinstance(value, np.ndarray | Array)
        }
        densities = lambda data: split.densities(
            jnp.zeros(split.size), program.with_arguments(**data)
        )
        try:
            jax.eval_shape(densities, arrays)
        except jax.errors.JAXTypeError:  # the model needs the value of an array
            return reading, {}
        return reading, arrays

    def init(self, rng_key: Array, reading: Nesting, data: dict[str, Array]) -> Nest:
        """Live points that are draws from the prior."""
        return reading.started(rng_key, reading.from_prior, None, reading.split.densities)

    def step(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array]
    ) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold a search for modes."""
        program = reading.split.program.with_arguments(**data)
        return reading.shrunk(rng_key, state, lambda z: reading.split.densities(z, program))

    def finished(self, state: Nest) -> Array:
        """Whether the live points hold less than the tolerated share of the evidence."""
        log_left = remaining(state, slice(1))[0]
        return log_left < state.volumes.log_evidence[0] + np.log(self.settings.tolerance)

    def needs_host(self, state: Nest) -> Array:
        """Whether new offers are wanted, or room for dead points."""
        is_full = state.num_dead + self.settings.batch > len(state.dead.mode)
        return state.offers.are_worn | is_full

    def on_host(
        self, states: Sequence[Nest], reading: Nesting, data: dict[str, Array]
    ) -> Sequence[Nest]:
        """New offers where they are worn; else more room for dead points in all replicates."""
        return reading.on_host(states, reading.from_prior, [None] * len(states))

    def draw(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array], num_draws: int
    ) -> dict[str, Array]:
        """Points in proportion to their weights, by systematic resampling, in random order."""
        z, log_weight, _, _ = all_points(state)
        return site_values(
            random.fold_in(rng_key, 1),
            reading.split,
            reading.exchange,
            jnp.asarray(np.asarray(z)[resampled(rng_key, log_weight, num_draws)]),
        )

    def results(self, state: Nest, reading: Nesting, data: dict[str, Array]) -> Results:
        """The evidence, and all points with their weights.

        The error of the log-evidence is NaN before the end, because the likelihood may still rise.
        """
        z, log_weight, log_likelihood, mode = all_points(state)
        log_evidence, error = evidence(state)
        attrs = {
            "log_evidence": log_evidence,
            "log_evidence_se": jnp.where(self.finished(state), error, jnp.nan),
            "information": information_of(state),
            "num_live": self.settings.num_live,
            "num_modes": state.num_modes,
            "num_evaluations": state.num_evaluations,
        }
        found = particles(
            site_values(random.key(0), reading.split, reading.exchange, z),
            log_weight=log_weight,
            log_likelihood=log_likelihood,
            mode=mode,
        )
        return found._replace(attrs=attrs)
