"""Many runs of a particle filter side by side, by its own functions: one compilation, and no
driver between the rows.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference import ParticleFilter, Program
from inference.kernels.particle_filter import particles
from inference.kernels.particle_filter.kernel import FilterReading, FilterState
from inference.kernels.particle_filter.particles import join, wider
from tests.inference.partitions import ordered
from zoo.aclass import aclass

__all__ = [
    "answers",
    "check_evidence",
    "filtered",
    "log_evidence",
    "predictive",
    "promoted",
    "read",
    "table",
    "with_settings",
]

# groups in each class, and rows of the table for each particle: more than 8 rows of data fill
ROOM = 12


class promoted:
    """Models promote; the filter itself runs strictly."""

    def __enter__(self):
        self.allowed = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        for each in self.allowed:
            each.__enter__()

    def __exit__(self, *error):
        for each in reversed(self.allowed):
            each.__exit__(*error)


def table(
    x: np.ndarray,
    y: np.ndarray | None = None,
    num_classes: int = 1,
    model: Any = aclass,
    **options: Any,
) -> Program:
    """The model on these rows; without `y` they are of one known class."""
    return Program(
        model, x, np.zeros(len(x), int) if y is None else y, num_classes=num_classes, **options
    )


class Filter(NamedTuple):
    """A kernel, and what it has read of a model."""

    kernel: ParticleFilter
    reading: FilterReading


def read(program: Program, **settings: Any) -> Filter:
    """A filter that has read the model."""
    kernel = ParticleFilter(program.model, **settings)
    with promoted():
        return Filter(kernel, kernel.read(program)[0])


def with_settings(known: Filter, resampling: str = "optimal", **settings: Any) -> Filter:
    """One with other settings, for the same model, which is not read again."""
    kernel = ParticleFilter(known.kernel.model, resampling=resampling, **settings)
    return Filter(
        kernel, replace(known.reading, rules=known.reading.rules._replace(scheme=resampling))
    )


def filtered(this: Filter, program: Program, num_runs: int = 1, seed: int = 0) -> FilterState:
    """The states after all rows, with a leading axis of runs."""
    kernel, reading = this
    with promoted():
        data = reading.data(program)
        state = kernel.init(random.key(seed), reading, data)
    num_rows, num_groups = state.groups.count.shape[-1], state.groups.slot.shape[-1]
    num_rows = max(num_rows, ROOM * kernel.num_particles)
    one = state._replace(
        groups=jax.vmap(
            lambda groups: wider(groups, num_rows, max(num_groups, reading.bounded(ROOM)))
        )(state.groups)
    )
    num_rows = int(state.num_rows)
    unknown = np.flatnonzero(np.asarray(data.rows.labels[:num_rows]) < 0)
    is_joined = len(unknown) > 0 and state.groups.slot.shape[1] > 1
    cut = int(unknown[0]) if is_joined else num_rows
    forward = lambda key, state, start, stop: jax.lax.fori_loop(
        start, stop, lambda t, at: kernel.step(random.fold_in(key, t), at, reading, data)[0], state
    )

    def run(key):
        step_key, join_key = random.split(key)
        before = forward(step_key, one, 0, cut)
        return (
            forward(step_key, _joined(reading, before, join_key), cut, num_rows)
            if is_joined
            else before
        )

    states = jax.jit(jax.vmap(run))(random.split(random.key(seed), num_runs))
    wants = jax.vmap(kernel._wants)(states)
    if jnp.any(wants["table"]) or jnp.any(wants["groups"]):
        raise RuntimeError("ROOM is too little for these rows")
    return states


def _joined(reading: FilterReading, state: FilterState, key: Array) -> FilterState:
    """As `ParticleFilter.on_host` does it."""
    keys = random.split(key, len(state.log_prior))
    groups, link = jax.vmap(lambda one, key: join(reading.rules, one, key))(state.groups, keys)
    return state._replace(
        groups=groups, genealogy=particles.joined_genealogy(state.genealogy, link, state.seen)
    )


def log_evidence(states: FilterState) -> np.ndarray:
    """[run]."""
    return np.logaddexp.reduce(
        np.asarray(states.log_prior) + np.asarray(states.log_evidence), axis=1
    )


def check_evidence(states: FilterState, log_z: float) -> None:
    """The mean of Z-hat / Z over the runs is 1 within three standard errors."""
    ratio = np.exp(log_evidence(states) - log_z)
    assert abs(ratio.mean() - 1) < 3 * ratio.std(ddof=1) / np.sqrt(len(ratio))


def answers(states: FilterState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes and groups [run, point, particle, row] of one joint filter, and their weights,
    those of the runs by their evidence.
    """
    one = lambda i: jax.tree.map(lambda leaf: np.asarray(leaf)[i], states.genealogy)
    each = [particles.partitions(one(i), states.seen[0]) for i in range(len(states.seen))]
    labels, groups, _ = map(np.stack, zip(*each, strict=True))
    last = lambda part: np.moveaxis(part, 1, -1)
    log_weight = np.asarray(
        states.groups.log_weight[:, :, 0] + (states.log_prior + states.log_evidence)[..., None]
    )
    return last(labels), ordered(last(labels), last(groups)), np.exp(log_weight - log_weight.max())


def predictive(this: Filter, states: FilterState, program: Program) -> np.ndarray:
    """log p(class, row | rows seen) of the rows of a program, [run, row, class]."""
    with promoted():
        return np.asarray(
            jax.jit(jax.vmap(lambda state: this.kernel.log_classes(state, this.reading, program)))(
                states
            )
        )
