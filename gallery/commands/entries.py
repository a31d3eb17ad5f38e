"""Entries of a matrix, for models of rows and columns: what they are told, and what they say of
other entries.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random
from numpyro.distributions import constraints

from gallery._dataset import Dataset
from gallery._entries import Entries, read_entries
from gallery._links import Gaussian, num_told
from gallery.commands.models import find_model
from inference import Program
from inference.program.compiling import compiled
from inference.reading.crossed import chunks

__all__ = [
    "draws_of",
    "entry_arguments",
    "entry_start",
    "entry_unit",
    "item_names",
    "predicted_entries",
    "takes_entries",
    "unit_of",
]

SEED = 0  # of the noise of predicted entries
AT_ONCE = 8192  # entries


def takes_entries(model: Callable) -> bool:
    """Whether a model is one of rows and columns."""
    return {"row", "column", "value", "shape"} <= set(inspect.signature(model).parameters)


def item_names(data: Dataset) -> list[str]:
    """What the columns of a table are called that name the row and the column of an entry."""
    return list(data.categories) or ["row", "column"]


def entry_arguments(data: Dataset) -> dict[str, Any]:
    """Of the model, sorted by row; nothing where the data are no entries."""
    if not {"rows", "cols", "values"} <= set(data.arrays):
        return {}
    sizes = [len(names) for names in data.categories.values()]
    entries = read_entries(
        (data["rows"], data["cols"], data["values"]), (sizes[0], sizes[1]) if sizes else None
    )
    return {
        "row": entries.row,
        "column": entries.column,
        "value": entries.value,
        "shape": entries.shape,
    }


def entry_unit(model: Callable, arguments: dict[str, Any], is_raw: bool) -> Gaussian | None:
    """What real entries are to be standardised by, for priors are of numbers about 1; None where
    they stay as they are.
    """
    if (
        is_raw
        or not takes_entries(model)
        or "value" not in arguments
        or not _are_real(Program(model, **arguments))
    ):
        return None
    return Gaussian.learn(_entries(arguments))


def unit_of(tree: xr.DataTree) -> Gaussian:
    """That of a run."""
    return Gaussian(float(tree.attrs.get("shift", 0.0)), float(tree.attrs.get("scale", 1.0)))


def entry_start(
    model: Callable, num_chains: int, arguments: dict[str, Any]
) -> dict[str, np.ndarray] | None:
    """Of real entries, as many components switched on as they can tell of, in every chain: from a
    draw of the prior, a chain would have to find each of them by a birth.
    """
    program = Program(model, **arguments)
    switches = [
        site
        for site in map(program.sites.__getitem__, program.latent)
        if site.support is constraints.boolean
    ]
    if len(switches) != 1 or len(switches[0].shape) != 1 or not _are_real(program):
        return None
    [width] = switches[0].shape
    start = np.arange(width) < num_told(_entries(arguments), width)
    return {
        switches[0].name: np.broadcast_to(
            start, (num_chains, width) if num_chains > 1 else (width,)
        ).astype(int)
    }


def _entries(arguments: dict[str, Any]) -> Entries:
    return Entries(
        *(np.asarray(arguments[name]) for name in ("row", "column", "value")),
        None,
        arguments["shape"],
    )


def _are_real(program: Program) -> bool:
    return (
        len(program.observed) == 1
        and program.sites[program.observed[0]].support is constraints.real
    )


def predicted_entries(
    tree: xr.DataTree, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of entries, noise included: one is drawn for each draw of the
    posterior.
    """
    model, told = find_model(tree.attrs["model"]).model, json.loads(tree.attrs["arguments"])
    for place, size in zip((rows, columns), told["shape"], strict=True):
        if len(place) and not 0 <= place.min() <= place.max() < size:
            raise ValueError(
                f"predict: found row or column {place.min()} .. {place.max()}, wanted 0 .. "
                f"{size - 1}, those of the fit"
            )
    draws, unit = draws_of(tree), unit_of(tree)
    few = Program(model, row=np.zeros(1, int), column=np.zeros(1, int), **told)
    if absent := sorted(set(few.latent[:-1]) - set(draws)):
        raise ValueError(
            f"predict: the run has no draws of {', '.join(absent)}; it was fitted by a kernel or "
            "with a link that has none"
        )
    keys = random.split(random.key(SEED), len(jax.tree.leaves(draws)[0]))

    def at(row: Array, column: Array) -> Array:
        program = Program(model, row=row, column=column, **told)
        return jax.lax.map(
            lambda one: program.trace(*one)[program.latent[-1]]["value"],
            (draws, keys),
            batch_size=64,
        )

    index = np.asarray(chunks(len(rows), AT_ONCE))
    ask = compiled(at, rows[index[0]], columns[index[0]])
    drawn = np.concatenate([np.asarray(ask(rows[some], columns[some])) for some in index], axis=1)[
        :, : len(rows)
    ]
    return unit.told(drawn.mean(axis=0), drawn.std(axis=0))


def draws_of(tree: xr.DataTree) -> dict[str, Array]:
    """The posterior, [draw, ...]."""
    each = {
        str(name): values.transpose("chain", "draw", ...).values
        for name, values in tree["posterior"].to_dataset().items()
    }
    return {
        name: jnp.asarray(values.reshape(-1, *values.shape[2:])) for name, values in each.items()
    }
