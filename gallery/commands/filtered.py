"""Predictions of a particle filter: the draws of a run do not hold what it knows, so it is run again, which gives the same filter."""

from typing import Any

import numpy as np
import xarray as xr
from jax.scipy.special import logsumexp

from gallery.commands import options
from gallery.commands.inputs import bind, read_data, scale_features
from gallery.commands.models import find_model, make_kernel
from gallery.commands.request import Request
from inference import Driver, Program

__all__ = ["filtered_probabilities"]


def filtered_probabilities(tree: xr.DataTree, x: np.ndarray) -> np.ndarray:
    """p(class | row) [row, class] of new rows, its replicates weighted by their evidence. Cost: that of the fit."""
    request = Request.from_json(tree.attrs["command"])
    entry = find_model(request.model)
    told = options.split(options.parse(request.options), entry.model, "ParticleFilter")
    data = read_data(request)
    arguments = bind(entry.model, entry.name, data, scale_features(data, request.raw), told.model)
    kernel = make_kernel("ParticleFilter", entry.model, **told.kernel)
    driver = Driver(kernel, num_samples=1, num_chains=told.driver["num_chains"], progress_bar=False)
    again = driver.run(request.seed, **arguments)
    if not np.isclose(again.attrs["log_evidence"], tree.attrs["log_evidence"], rtol=1e-5, atol=0):
        changed = "the run ended early, or the data or the model have changed"
        raise ValueError(f"predict: fitting {request.data_name} again gives another evidence: {changed}. Fit anew.")
    program = Program(entry.model, **arguments | {"x": x, "y": np.full(len(x), -1)})
    each = [kernel.log_classes(state, program) + _log_evidence(state) for state in driver.states]
    joint = np.asarray(logsumexp(np.stack(each), axis=0), float)
    return np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True))


def _log_evidence(state: Any) -> float:
    return float(logsumexp(state.log_prior + state.log_evidence))
