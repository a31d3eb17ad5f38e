"""Predictions of mixtures, whose groups have a closed form given the rows that were learned from.

Some kernels know more than the draws of their run hold: those are run again, which gives the same
state. `ConditionalGibbs` does not: its draws of all that belongs to groups are in the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jax.scipy.special import logsumexp

from gallery.commands import options
from gallery.commands.entries import draws_of
from gallery.commands.inputs import bind, read_data, scale_features
from gallery.commands.models import find_model, in_precision, kernel_name, make_kernel
from gallery.commands.request import Request, is_table
from inference import CoordinateAscent, Driver, ParticleFilter, Program
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from inference.reading.stick_mixture.read import read_assignment

__all__ = ["REFITTED", "mixture_probabilities", "refitted_probabilities"]

REFITTED = ("CoordinateAscent", "ParticleFilter")


def refitted_probabilities(
    tree: xr.DataTree, x: np.ndarray, by_row: Mapping[str, np.ndarray]
) -> np.ndarray:
    """p(class | row) [row, class] of new rows. Cost: that of the fit.

    :param by_row: what the model is told of each row beside x and y, such as its task.
    """
    entry, name, told, request, arguments = _again(tree)
    settings = {key: told.driver[key] for key in ("num_warmup", "num_chains") if key in told.driver}
    driver = Driver(
        make_kernel(name, entry.model, **told.kernel), **settings, num_samples=0, progress_bar=False
    )
    with in_precision(name, arguments):
        again = driver.run(request.seed, **arguments)
        if not np.isclose(_evidence(again), _evidence(tree), rtol=1e-5, atol=0):
            changed = "the run ended early, or the data or the model have changed"
            raise ValueError(
                f"predict: it fits {request.data_name} again, which gives another evidence: "
                f"{changed}. Fit anew."
            )
        return _normalised(_joint(driver, Program(entry.model, **arguments), x, by_row))


def mixture_probabilities(tree: xr.DataTree, x: np.ndarray) -> np.ndarray:
    """The same by the draws of a run of `ConditionalGibbs`.

    Cost: that of a sweep over the new rows for each draw.
    """
    entry, name, _, _, arguments = _again(tree)
    with in_precision(name, arguments):
        program = Program(entry.model, **arguments)
        given = AssignmentDraws(entry.model, read_assignment(program))
        new = _with_each_label(program, x, {})
        found = given.predict(draws_of(tree), new).log_label
        return _normalised(np.asarray(found, float).reshape(-1, len(x)).T)


def _again(tree: xr.DataTree) -> tuple[Any, str, options.Options, Request, dict[str, Any]]:
    """The model, its kernel, what they were told, and the model's arguments, read as they were
    for the fit.
    """
    request = Request.from_json(tree.attrs["command"])
    entry = find_model(request.model)
    name = kernel_name(entry, request.kernel)
    told = options.split(options.parse(request.options), entry.model, name)
    if is_table(request.data) and not Path(request.data).is_file():
        raise ValueError(
            "predict: it fits the run's model again, for which the table of the fit, "
            f"{request.data}, must be where it was."
        )
    data = read_data(request, entry.model)
    return (
        entry,
        name,
        told,
        request,
        bind(entry.model, entry.name, data, scale_features(data, request.raw), told.model),
    )


def _with_each_label(program: Program, x: np.ndarray, by_row: Mapping[str, np.ndarray]) -> Program:
    """The model on new rows, all of them with the first class, then all with the second, and so
    on.
    """
    times = program.arguments["num_classes"]
    more = {name: np.tile(value, times) for name, value in by_row.items()}
    return program.with_arguments(
        x=np.tile(x, (times, 1)), y=np.repeat(np.arange(times), len(x)), **more
    )


def _evidence(tree: xr.DataTree) -> float:
    """The log-evidence of a run, or the bound of it that its best replicate has found."""
    if "log_evidence" in tree.attrs:
        return float(tree.attrs["log_evidence"])
    return float(tree["sample_stats"].to_dataset()["elbo"].isel(step=-1).max())


def _joint(
    driver: Driver, program: Program, x: np.ndarray, by_row: Mapping[str, np.ndarray]
) -> np.ndarray:
    """log p(class, row) [row, class], but for a constant of the row."""
    kernel, states, reading = driver.kernel, driver.states, driver.reading
    if isinstance(kernel, ParticleFilter):  # replicates count as much as their evidence
        new = program.with_arguments(x=x, y=np.full(len(x), -1))
        each = [
            kernel.log_classes(state, reading, new)
            + float(logsumexp(state.log_prior + state.log_evidence))
            for state in states
        ]
        return np.asarray(logsumexp(np.stack(each), axis=0), float)
    assert isinstance(kernel, CoordinateAscent)
    best = max(states, key=lambda state: float(state.elbo))
    return (
        np.asarray(
            kernel.predict(best, reading, _with_each_label(program, x, by_row)).log_label, float
        )
        .reshape(-1, len(x))
        .T
    )


def _normalised(joint: np.ndarray) -> np.ndarray:
    return np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True))
