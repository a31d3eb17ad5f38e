"""Entries of a matrix, for models of rows and columns: what they are told, and what they say of other entries."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random

from gallery._dataset import Dataset
from gallery._entries import read_entries
from gallery.commands.models import find_model
from inference import Program

__all__ = ["draws_of", "entry_arguments", "item_names", "predicted_entries", "takes_entries"]

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
    entries = read_entries((data["rows"], data["cols"], data["values"]), (sizes[0], sizes[1]) if sizes else None)
    return {"row": entries.row, "column": entries.column, "value": entries.value, "shape": entries.shape}


def predicted_entries(tree: xr.DataTree, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of entries, noise included: one is drawn for each draw of the posterior."""
    model, told = find_model(tree.attrs["model"]).model, json.loads(tree.attrs["arguments"])
    for place, size in zip((rows, columns), told["shape"], strict=True):
        if len(place) and not 0 <= place.min() <= place.max() < size:
            raise ValueError(f"predict: found row or column {place.min()} .. {place.max()}, wanted 0 .. {size - 1}, those of the fit")
    draws = draws_of(tree)
    keys = random.split(random.key(SEED), len(jax.tree.leaves(draws)[0]))

    @jax.jit
    def at(row: Array, column: Array) -> Array:
        program = Program(model, row=row, column=column, **told)
        return jax.lax.map(lambda one: program.trace(*one)[program.latent[-1]]["value"], (draws, keys), batch_size=64)

    parts = [slice(i, i + AT_ONCE) for i in range(0, len(rows), AT_ONCE)]
    drawn = np.concatenate([np.asarray(at(jnp.asarray(rows[part]), jnp.asarray(columns[part]))) for part in parts], axis=1)
    return drawn.mean(axis=0), drawn.std(axis=0)


def draws_of(tree: xr.DataTree) -> dict[str, Array]:
    """The posterior, [draw, ...]."""
    each = {str(name): values.transpose("chain", "draw", ...).values for name, values in tree["posterior"].to_dataset().items()}
    return {name: jnp.asarray(values.reshape(-1, *values.shape[2:])) for name, values in each.items()}
