"""Predictions of saved runs: draws of the posterior, class probabilities, entries of a matrix.

Some kernels know more than the draws of their run hold. Those runs are repeated, which gives the
same state.
"""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random
from jax.scipy.special import logsumexp

from gallery._links import Gaussian
from gallery._standardise import Standardiser
from gallery.commands.inputs import Inputs, read_inputs
from gallery.commands.models import find_model, in_precision, make_kernel
from gallery.commands.request import Request, is_table
from inference import CoordinateAscent, Driver, ParticleFilter, Program
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from inference.program.compiling import compiled
from inference.reading.crossed import chunks
from inference.reading.stick_mixture.read import read_assignment

__all__ = [
    "REFITTED",
    "draws_of",
    "entries_link",
    "has_predictive",
    "mixture_probabilities",
    "predicted_entries",
    "predictive_probabilities",
    "refitted_probabilities",
]

REFITTED = ("CoordinateAscent", "ParticleFilter")


def draws_of(tree: xr.DataTree, without: Collection[str] = ()) -> dict[str, Array]:
    """Return the posterior draws of all chains, [draw, ...].

    Args:
        tree: a saved run.
        without: dimensions; variables that have one of them are left out.
    """
    each = {
        str(name): values.transpose("chain", "draw", ...).values
        for name, values in tree["posterior"].to_dataset().items()
        if not set(without) & set(values.dims)
    }
    return {
        name: jnp.asarray(values.reshape(-1, *values.shape[2:])) for name, values in each.items()
    }


def refitted_probabilities(
    tree: xr.DataTree, x: np.ndarray, by_row: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return class probabilities of new rows from a repeated run. Cost: that of the fit.

    Args:
        tree: a saved run of a kernel in `REFITTED`.
        x: standardised features [row, feature].
        by_row: other arguments of the model with one entry a row, such as the task.

    Returns:
        p(class | row), [row, class].
    """
    inputs = _inputs_of(tree)
    driver_options = inputs.options.driver
    driver = Driver(
        make_kernel(inputs.kernel, inputs.entry.model, **inputs.options.kernel),
        **{
            key: driver_options[key]
            for key in ("num_warmup", "num_chains")
            if key in driver_options
        },
        num_samples=0,
        progress_bar=False,
    )
    with in_precision(inputs.kernel, inputs.arguments):
        again = driver.run(inputs.request.seed, **inputs.arguments)
        if not np.isclose(_evidence(again), _evidence(tree), rtol=1e-5, atol=0):
            raise ValueError(
                f"predict: the fit of {inputs.request.data_name} was repeated and gives another "
                "evidence: the run ended early, or the data or the model have changed. Fit anew."
            )
        program = Program(inputs.entry.model, **inputs.arguments)
        return _normalised(_joint(driver, program, x, by_row))


def mixture_probabilities(tree: xr.DataTree, x: np.ndarray) -> np.ndarray:
    """Return class probabilities of new rows from draws of `ConditionalGibbs`.

    Args:
        tree: a saved run.
        x: standardised features [row, feature].

    Returns:
        p(class | row), [row, class]. Cost: that of a sweep over the new rows for each draw.
    """
    inputs = _inputs_of(tree)
    with in_precision(inputs.kernel, inputs.arguments):
        program = Program(inputs.entry.model, **inputs.arguments)
        given = AssignmentDraws(inputs.entry.model, read_assignment(program))
        new = _with_each_label(program, x, {})
        found = given.predict(draws_of(tree), new).log_label
        return _normalised(np.asarray(found, float).reshape(-1, len(x)).T)


def has_predictive(tree: xr.DataTree) -> bool:
    """Return whether the module of the run's model has a function `predict`."""
    return _predict(find_model(tree.attrs["model"]).model) is not None


def predictive_probabilities(tree: xr.DataTree, x: np.ndarray) -> np.ndarray:
    """Return class probabilities of new rows by the function `predict` of the model's module.

    Args:
        tree: a saved run.
        x: standardised features [row, feature].

    Returns:
        p(class | row), [row, class], averaged over at most 400 draws.
    """
    inputs = _inputs_of(tree)
    model, arguments = inputs.entry.model, inputs.arguments
    if np.isnan(x).any():
        raise ValueError(
            f"predict: {inputs.entry.name} takes no missing features, and "
            f"{int(np.isnan(x).any(1).sum())} rows have some"
        )
    own = inspect.signature(model).parameters
    settings = {name: value for name, value in arguments.items() if name not in own}
    with jax.enable_x64(True):
        every = draws_of(tree)
        size = len(next(iter(every.values())))
        thinned = np.linspace(0, size - 1, min(size, 400)).astype(int)
        draws = {name: values[thinned] for name, values in every.items()}
        predict: Any = _predict(model)
        return np.asarray(predict(random.key(0), draws, np.asarray(arguments["x"]), x, **settings))


def entries_link(tree: xr.DataTree) -> Gaussian:
    """Return the link that standardised the entries of a run."""
    shift, scale = (float(tree.attrs.get(*each)) for each in (("shift", 0.0), ("scale", 1.0)))
    return Gaussian(Standardiser(shift, scale))


def predicted_entries(
    tree: xr.DataTree, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of entries of a matrix, noise included.

    One value of each entry is drawn for each draw of the posterior.

    Args:
        tree: a saved run.
        rows: row of each entry.
        columns: column of each entry.
    """
    model, given = find_model(tree.attrs["model"]).model, json.loads(tree.attrs["arguments"])
    for place, size in zip((rows, columns), given["shape"], strict=True):
        if len(place) and not 0 <= place.min() <= place.max() < size:
            raise ValueError(
                f"predict: found row or column {place.min()} .. {place.max()}, wanted 0 .. "
                f"{size - 1}, those of the fit"
            )
    draws = draws_of(tree)
    one_entry = Program(model, row=np.zeros(1, int), column=np.zeros(1, int), **given)
    if absent := sorted(set(one_entry.latent[:-1]) - set(draws)):
        raise ValueError(
            f"predict: the run has no draws of {', '.join(absent)}; it was fitted by a kernel or "
            "with a link that has none"
        )
    keys = random.split(random.key(0), len(jax.tree.leaves(draws)[0]))

    def at(row: Array, column: Array) -> Array:
        program = Program(model, row=row, column=column, **given)
        return jax.lax.map(
            lambda one: program.trace(*one)[program.latent[-1]]["value"],
            (draws, keys),
            batch_size=64,
        )

    index = np.asarray(chunks(len(rows), 8192))
    draw = compiled(at, rows[index[0]], columns[index[0]])
    parts = [np.asarray(draw(rows[chunk], columns[chunk])) for chunk in index]
    drawn = np.concatenate(parts, axis=1)[:, : len(rows)]
    return entries_link(tree).restore_moments(drawn.mean(axis=0), drawn.std(axis=0))


def _inputs_of(tree: xr.DataTree) -> Inputs:
    """The inputs of the fit, read again."""
    request = Request.from_json(tree.attrs["command"])
    if is_table(request.data) and not Path(request.data).is_file():
        raise ValueError(
            "predict: the kernel needs the rows of the fit again; the table of the fit, "
            f"{request.data}, must be where it was."
        )
    return read_inputs(request)


def _predict(model: Callable) -> Callable | None:
    return vars(sys.modules[model.__module__]).get("predict")


def _with_each_label(program: Program, x: np.ndarray, by_row: Mapping[str, np.ndarray]) -> Program:
    """The model on new rows, repeated for each class: all with the first, all with the second."""
    times = program.arguments["num_classes"]
    more = {name: np.tile(value, times) for name, value in by_row.items()}
    return program.with_arguments(
        x=np.tile(x, (times, 1)), y=np.repeat(np.arange(times), len(x)), **more
    )


def _evidence(tree: xr.DataTree) -> float:
    """The log-evidence of a run, or the ELBO of its best replicate."""
    if "log_evidence" in tree.attrs:
        return float(tree.attrs["log_evidence"])
    return float(tree["sample_stats"].to_dataset()["elbo"].isel(step=-1).max())


def _joint(
    driver: Driver, program: Program, x: np.ndarray, by_row: Mapping[str, np.ndarray]
) -> np.ndarray:
    """log p(class, row) [row, class], up to a constant for each row."""
    kernel, states, reading = driver.kernel, driver.states, driver.reading
    if isinstance(kernel, ParticleFilter):  # replicates are weighted by their evidence
        new = program.with_arguments(x=x, y=np.full(len(x), -1))
        each = [
            kernel.log_classes(state, reading, new)
            + float(logsumexp(state.log_prior + state.log_evidence))
            for state in states
        ]
        return np.asarray(logsumexp(np.stack(each), axis=0), float)
    assert isinstance(kernel, CoordinateAscent)
    best = max(states, key=lambda state: float(state.elbo))
    found = kernel.predict(best, reading, _with_each_label(program, x, by_row)).log_label
    return np.asarray(found, float).reshape(-1, len(x)).T


def _normalised(joint: np.ndarray) -> np.ndarray:
    return np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True))
