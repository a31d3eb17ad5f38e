"""Predictions of a model whose own module says how draws of its posterior predict: a function
`predict` beside the model.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import xarray as xr
from jax import random

from gallery.commands import options
from gallery.commands.entries import draws_of
from gallery.commands.inputs import bind, read_data, scale_features
from gallery.commands.models import find_model, kernel_name
from gallery.commands.request import Request

__all__ = ["has_predictive", "predictive_probabilities"]

SEED = 0
MOST_DRAWS = 400  # that a prediction looks at


def has_predictive(tree: xr.DataTree) -> bool:
    """Whether the module of the run's model has one."""
    return _predict(find_model(tree.attrs["model"]).model) is not None


def predictive_probabilities(tree: xr.DataTree, x: np.ndarray) -> np.ndarray:
    """p(class | row) [row, class] of new rows; the rows of the fit are read again."""
    request = Request.from_json(tree.attrs["command"])
    entry = find_model(request.model)
    told = options.split(
        options.parse(request.options), entry.model, kernel_name(entry, request.kernel)
    )
    data = read_data(request, entry.model)
    arguments = bind(entry.model, entry.name, data, scale_features(data, request.raw), told.model)
    own = inspect.signature(entry.model).parameters
    # those that the model passes on
    settings = {name: value for name, value in arguments.items() if name not in own}
    if np.isnan(x).any():
        raise ValueError(
            f"predict: {entry.name} takes no missing features, and {int(np.isnan(x).any(1).sum())} "
            "rows have some"
        )
    with jax.enable_x64(True):
        every = draws_of(tree)
        size = len(next(iter(every.values())))
        taken = np.linspace(0, size - 1, min(size, MOST_DRAWS)).astype(int)
        draws = {name: values[taken] for name, values in every.items()}
        predict: Any = _predict(entry.model)
        return np.asarray(
            predict(random.key(SEED), draws, np.asarray(arguments["x"]), x, **settings)
        )


def _predict(model: Callable) -> Callable | None:
    return vars(sys.modules[model.__module__]).get("predict")
