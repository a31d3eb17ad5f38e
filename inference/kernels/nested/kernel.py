"""Nested sampling for any model with continuous latent sites.

    evidence  =  sum over dead points of  likelihood x (prior volume that it stands for)

`num_live` points are drawn from the prior. A step takes the lowest, a batch of them. In their place
come copies of points that are left (`deaths`), each of which walks through the prior above the
likelihood of the last that died (`inference.maths.slice_walk`, `inference.maths.slice_walk`); or
draws from the prior (`nesting`), as long as these reach above it in fewer evaluations than a walk
has steps. Twice in an e-fold of volume the modes are looked at (`modes`): what has come apart has
points and an account of its volume of its own from then on. Modes that are copies of each other,
for members of a plate have no names, are one (`relabel`). Volumes are simulated (`volumes`), and
the spread of the histories is the error of the log-evidence.

Prior and likelihood are read off the model and proved (`inference.reading.density`): edit the
model, and the sampler follows or refuses. Likelihoods that are constant, or flat in places, are no
trouble: points of equal likelihood are ordered by a random label. Numbers are of JAX's default
float. In float32 claimed errors are as good; but log-likelihoods of 1e5 are rounded to some .01:
`jax.enable_x64(True)` for many rows.

Cost: evaluations of the model = num_live x (information in nats + 5) x steps of a walk x about 2;
each e-fold num_live^2 x size on top.

Skilling (2006); Feroz, Hobson and Bridges (2009) for modes; Center (2009), "Learning complex
classification models from large data sets".
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.nested.deaths import Death
from inference.kernels.nested.nesting import (
    FromPrior,
    Nesting,
    Settings,
    Shrinkage,
    evidence_of,
    is_finished,
    is_full,
)
from inference.kernels.nested.relabel import shown
from inference.kernels.nested.state import Dead, Nest, information_of, particles, points_of
from inference.maths.resampling import resampled
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between, is_number, is_whole
from inference.run.protocol import Algorithm, Results

__all__ = ["Dead", "Death", "Nest", "NestedSampler", "Shrinkage"]


class NestedSampler(Algorithm):
    """Nested sampling of `model`.

    :param model: a NumPyro model whose latent sites are continuous and have proper priors.
    :param num_live: live points; the error of the log-evidence is about sqrt(information /
    num_live).
    :param batch: points that are replaced in a step; None: a tenth of the live points.
    :param num_sweeps: sweeps of a walk at first, and at least, each of as many steps as there are
    latent numbers.
    :param memory: the correlation with its origin that a walk may keep: as long as walks keep more
    they grow. 1: they do not
        grow. (The check "walks" of `diagnostics.report` tells of walks that keep much more.)
    :param tolerance: ends when the live points hold less than this share of the evidence.
    :param track_modes: whether modes that come apart become runs of their own.
    :param rename: whether members of a plate that may change places
    (`inference.reading.exchangeable`), such as the clusters of a
        mixture, are put in the places of those of other points, so that modes which are copies of
        each other are one.
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
        is_size = is_whole(batch) and 1 <= batch <= num_live // 2
        check_setting(is_size, f"an integer from 1 to num_live / 2 = {num_live // 2}", batch=batch)
        check_setting(is_between(num_sweeps, 0, np.inf), "a number above 0", num_sweeps=num_sweeps)
        check_setting(
            is_number(memory) and 0 < memory <= 1, "a number above 0, up to 1", memory=memory
        )
        check_setting(is_between(tolerance, 0, 1), "a number between 0 and 1", tolerance=tolerance)
        self.model, self.num_live, self.batch, self.num_sweeps = (
            model,
            int(num_live),
            int(batch),
            num_sweeps,
        )
        self.memory, self.tolerance = memory, tolerance
        self.track_modes, self.rename = track_modes, rename

    @property
    def settings(self) -> Settings:
        """What a sampling goes by."""
        return Settings(
            self.num_live,
            self.batch,
            self.num_sweeps,
            self.memory,
            self.tolerance,
            self.track_modes,
            self.rename,
        )

    def read(self, program: Program) -> tuple[Nesting, dict[str, Array]]:
        """Prior and likelihood, proved, and the arrays among the model's arguments, unless the
        model must look at them.
        """
        reading = Nesting.of(self.settings, program)
        arrays = {
            name: jnp.asarray(value)
            for name, value in program.arguments.items()
            if isinstance(value, np.ndarray | Array)
        }
        split = reading.split
        try:
            jax.eval_shape(
                lambda data: split.densities(jnp.zeros(split.size), program.with_arguments(**data)),
                arrays,
            )
        except jax.errors.JAXTypeError:  # a number was needed
            return reading, {}
        return reading, arrays

    def init(self, rng_key: Array, reading: Nesting, data: dict[str, Array]) -> Nest:
        """Draws from the prior."""
        return reading.started(rng_key, FromPrior(reading.split), None, reading.split.densities)

    def step(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array]
    ) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold a look at the modes."""
        return reading.shrunk(
            rng_key, state, lambda z: reading.split.densities(z, reading.program(data))
        )

    def finished(self, state: Nest) -> Array:
        """When the live points hold next to nothing of the evidence."""
        return is_finished(state, self.tolerance)

    def needs_host(self, state: Nest) -> Array:
        """Whether new offers are wanted, or room for the dead."""
        return state.offers.are_worn | is_full(state, self.batch)

    def on_host(
        self, states: Sequence[Nest], reading: Nesting, data: dict[str, Array]
    ) -> Sequence[Nest]:
        """New offers where they are wanted; else more room for all."""
        if any(state.offers.are_worn for state in states):
            offered = lambda state: reading.with_offers(state, FromPrior(reading.split), None)
            return [offered(state) if state.offers.are_worn else state for state in states]
        return [reading.with_more_room(state) for state in states]

    def draw(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array], num_draws: int
    ) -> dict[str, Array]:
        """Points in proportion to their weights, by systematic resampling, in random order."""
        z, log_weight, _, _ = points_of(state)
        chosen = np.asarray(z)[resampled(rng_key, log_weight, num_draws)]
        return shown(
            random.fold_in(rng_key, 1), reading.split, reading.exchange, jnp.asarray(chosen)
        )

    def results(self, state: Nest, reading: Nesting, data: dict[str, Array]) -> Results:
        """The evidence, and all points with their weights.

        Before the end nobody knows how far up the likelihood still goes, so that the log-evidence
        then has no error: NaN.
        """
        return self.found(state, reading, self.finished(state))

    def found(self, state: Nest, reading: Nesting, is_over: Array) -> Results:
        """What a sampling has found; the log-evidence has an error where that is over."""
        z, log_weight, log_likelihood, mode = points_of(state)
        log_evidence, error = evidence_of(state)
        attrs = {
            "log_evidence": log_evidence,
            "log_evidence_se": jnp.where(is_over, error, jnp.nan),
            "information": information_of(state),
            "num_live": self.num_live,
            "num_modes": state.num_modes,
            "num_evaluations": state.num_evaluations,
        }
        values = shown(random.key(0), reading.split, reading.exchange, z)
        found = particles(values, log_weight=log_weight, log_likelihood=log_likelihood, mode=mode)
        return found._replace(attrs=attrs)
