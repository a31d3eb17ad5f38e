"""Predictions of saved runs: draws of the posterior, class probabilities, entries of a matrix.

A run holds all that they need: the data, and the final state of a kernel that knows more than its
draws. Neither the table of the fit nor another fit is needed.
"""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random

from gallery._links import Gaussian, Ordered
from gallery._saving import unpacked
from gallery._standardise import Standardiser
from gallery.commands.inputs import saved_inputs
from gallery.commands.kernels import in_precision, make_kernel
from gallery.commands.models import find_model
from inference import CoordinateAscent, ParticleFilter, Program
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from inference.program.compiling import compiled
from inference.reading.crossed import chunks
from inference.reading.stick_mixture.read import read_assignment

__all__ = [
    "draws_of",
    "entries_link",
    "has_predictive",
    "log_scores_of_levels",
    "mixture_probabilities",
    "predicted_entries",
    "predictive_probabilities",
    "state_probabilities",
]


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


def state_probabilities(tree: xr.DataTree, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return class probabilities of new rows from the final states that were saved with a run.

    Args:
        tree: a saved run.
        rows: the arguments of the model with an entry for each new row: features, standardised
            where the fit did so, and others, such as the task.

    Returns:
        p(class | row), [row, class].
    """
    if "states" not in tree.children:
        raise ValueError(
            "predict: the run holds no state of its kernel, as one of another version or one that "
            "an error ended. Fit anew."
        )
    inputs = saved_inputs(tree)
    kernel = make_kernel(inputs.kernel, inputs.entry.model, **inputs.options.kernel)
    with in_precision(inputs.kernel, inputs.arguments):
        program = Program(inputs.entry.model, **inputs.arguments)
        reading, _ = kernel.read(program)
        states = unpacked(tree["states"].to_dataset())
        return _normalised(_joint(kernel, states, reading, program, rows))


def mixture_probabilities(tree: xr.DataTree, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return class probabilities of new rows from draws of `ConditionalGibbs`.

    Args:
        tree: a saved run.
        rows: as in `state_probabilities`.

    Returns:
        p(class | row), [row, class]. Cost: that of a sweep over the new rows for each draw.
    """
    inputs = saved_inputs(tree)
    with in_precision(inputs.kernel, inputs.arguments):
        program = Program(inputs.entry.model, **inputs.arguments)
        given = AssignmentDraws(inputs.entry.model, read_assignment(program))
        found = given.predict(draws_of(tree), _with_each_label(program, rows)).log_label
        return _normalised(np.asarray(found, float).reshape(-1, _size(rows)).T)


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
    inputs = saved_inputs(tree)
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


def entries_link(tree: xr.DataTree) -> Gaussian | Ordered:
    """Return the link that coded the entries of a run."""
    if "levels" in tree.attrs:
        return Ordered(tuple(np.asarray(tree.attrs["levels"]).tolist()))
    shift, scale = (float(tree.attrs.get(*each)) for each in (("shift", 0.0), ("scale", 1.0)))
    return Gaussian(Standardiser(shift, scale))


def predicted_entries(
    tree: xr.DataTree, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of entries of a matrix, noise included.

    One value of each entry is drawn for each draw of the posterior. A row or column without entries
    is drawn from its prior, given the other sites of each draw.

    Args:
        tree: a saved run.
        rows: row of each entry; the number after the last one is a row without entries, where
            rows have names.
        columns: column of each entry, likewise.
    """
    link = entries_link(tree)
    parts = _of_each_draw(tree, (rows, columns), lambda site: site["value"])
    decoded = [link.decoded(part) for part in parts]
    mean, std = (np.concatenate([of(part, axis=0) for part in decoded]) for of in (np.mean, np.std))
    return mean[: len(rows)], std[: len(rows)]


def log_scores_of_levels(
    tree: xr.DataTree, rows: np.ndarray, columns: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return the log probability of levels that were observed, averaged over the draws.

    Args:
        tree: a saved run whose entries are levels.
        rows: row of each entry.
        columns: column of each entry.
        values: the level of each entry.
    """
    link = entries_link(tree)
    assert isinstance(link, Ordered)
    code = np.searchsorted(link.levels, values)
    log_probs = _of_each_draw(
        tree, (rows, columns, code), lambda site, code: site["fn"].log_prob(code)
    )
    each = [np.logaddexp.reduce(part, axis=0) - np.log(len(part)) for part in log_probs]
    return np.concatenate(each)[: len(rows)]


def _of_each_draw(
    tree: xr.DataTree, entries: tuple[np.ndarray, ...], asked: Callable[..., Array]
) -> list[np.ndarray]:
    """What is asked of the site of the entries, for each draw: [draw, entry], in chunks.

    Args:
        tree: a saved run.
        entries: row and column of each, and further arguments of `asked`.
        asked: function of the site of the entries, in the trace of a draw.
    """
    model, given = find_model(tree.attrs["model"]).model, json.loads(tree.attrs["arguments"])
    link = entries_link(tree)
    if isinstance(link, Ordered):
        given = link.settings | given
    sizes, has_names = given["shape"], bool(json.loads(tree.attrs["categories"]))
    for place, size in zip(entries, sizes, strict=False):
        if len(place) and not 0 <= place.min() <= place.max() < size + has_names:
            raise ValueError(
                f"predict: found row or column {place.min()} .. {place.max()}, wanted 0 .. "
                f"{size - 1}, those of the fit"
            )
    has_others = any((place == size).any() for place, size in zip(entries, sizes, strict=False))
    if has_others:
        given |= {"shape": [size + 1 for size in sizes]}
    by_item = [
        str(name)
        for name, values in tree["posterior"].data_vars.items()
        if has_others and {"row", "column"} & set(values.dims)
    ]
    draws = draws_of(tree)
    one_entry = Program(model, row=np.zeros(1, int), column=np.zeros(1, int), **given)
    if absent := sorted(set(one_entry.latent[:-1]) - set(draws)):
        raise ValueError(
            f"predict: the run has no draws of {', '.join(absent)}; it was fitted by a kernel or "
            "with a link that has none"
        )
    keys = random.split(random.key(0), len(jax.tree.leaves(draws)[0]))

    def at(row: Array, column: Array, *more: Array) -> Array:
        program = Program(model, row=row, column=column, **given)

        def answered(one: tuple[dict[str, Array], Array]) -> Array:
            values, key = one
            if by_item:
                values, key = _with_others(program, values, by_item, key)
            return asked(program.trace(values, key)[program.latent[-1]], *more)

        return jax.lax.map(answered, (draws, keys), batch_size=64)

    index = np.asarray(chunks(len(entries[0]), 8192))
    draw = compiled(at, *(each[index[0]] for each in entries))
    return [np.asarray(draw(*(each[chunk] for each in entries))) for chunk in index]


def _with_others(
    program: Program, values: dict[str, Array], by_item: Collection[str], key: Array
) -> tuple[dict[str, Array], Array]:
    """Add to the sites of rows and columns what the prior draws of a row and a column more."""
    prior_key, key = random.split(key)
    common = {name: value for name, value in values.items() if name not in by_item}
    trace = program.trace(common, prior_key)
    longer = {
        name: jnp.concatenate([values[name], trace[name]["value"][len(values[name]) :]])
        for name in by_item
    }
    return common | longer, key


def _predict(model: Callable) -> Callable | None:
    return vars(sys.modules[model.__module__]).get("predict")


def _size(rows: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(rows.values())))


def _with_each_label(program: Program, rows: Mapping[str, np.ndarray]) -> Program:
    """The model on new rows, repeated for each class: all with the first, all with the second."""
    times = program.arguments["num_classes"]
    again = {name: np.concatenate([value] * times) for name, value in rows.items()}
    return program.with_arguments(y=np.repeat(np.arange(times), _size(rows)), **again)


def _joint(
    kernel: Any, states: list[Any], reading: Any, program: Program, rows: Mapping[str, np.ndarray]
) -> np.ndarray:
    """log p(class, row) [row, class], up to a constant for each row."""
    if isinstance(kernel, ParticleFilter):  # the mean over the orders of the rows, as estimators do
        new = program.with_arguments(y=np.full(_size(rows), -1), **rows)
        each = [
            np.asarray(kernel.log_classes(state, reading, new), float)
            for state in kernel.alike([step.state for step in states])
        ]
        return np.logaddexp.reduce([joint - _log_total(joint) for joint in each])
    assert isinstance(kernel, CoordinateAscent)
    found = kernel.predict(states[0], reading, _with_each_label(program, rows)).log_label
    return np.asarray(found, float).reshape(-1, _size(rows)).T


def _normalised(joint: np.ndarray) -> np.ndarray:
    return np.exp(joint - _log_total(joint))


def _log_total(joint: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(joint, axis=1, keepdims=True)
