"""From what a run leaves behind to an ArviZ `DataTree`: groups, dimensions named after plates, attributes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr
from jax import Array, random

from inference.compiling import compiled
from inference.program import Program

__all__ = ["GROUPS", "check_names", "data_groups", "named", "requested_groups", "variable_dims", "with_coordinates"]

GROUPS = ("log_likelihood", "log_prior", "posterior_predictive", "prior")  # what `Driver(groups=)` may ask for
BATCH = 64  # draws that are pushed through the model at once: bounds memory, and keeps the device busy


def named(dataset: xr.Dataset, dims: dict[str, tuple[str, ...]]) -> xr.Dataset:
    """Dimensions after the model's plates, and a coordinate for each, as ArviZ gives them."""
    variables = {}
    for name, values in dataset.data_vars.items():
        inner = dims.get(str(name), ())
        placeholders = values.dims[len(values.dims) - len(inner) :]
        variables[name] = values.rename({old: new for old, new in zip(placeholders, inner, strict=True) if old != new}).variable
    return with_coordinates(xr.Dataset(variables))


def joined(programs: Sequence[Program], by_row: Sequence[str]) -> Program:
    """The model on the rows of all programs, one after the other."""
    if len(programs) == 1:
        return programs[0]
    rows = {name: np.concatenate([np.asarray(each.arguments[name]) for each in programs]) for name in by_row}
    return programs[0].with_arguments(**rows)


def data_groups(program: Program) -> dict[str, xr.Dataset]:
    """`observed_data`: what the model observes; `constant_data`: the other arrays among its arguments."""
    observed = {name: np.asarray(value) for name, value in program.observed_values.items()}
    constant = {
        name: np.asarray(value)
        for name, value in program.arguments.items()
        if isinstance(value, np.ndarray | Array) and not any(_same(np.asarray(value), other) for other in observed.values())
    }
    groups = {
        "observed_data": {_dotted(name): (list(variable_dims(program)[_dotted(name)]), value) for name, value in observed.items()},
        "constant_data": {name: ([f"{name}_dim_{i}" for i in range(value.ndim)], value) for name, value in constant.items()},
    }
    return {group: with_coordinates(xr.Dataset(variables)) for group, variables in groups.items() if variables}


def requested_groups(program: Program, posterior: xr.Dataset, wanted: tuple[str, ...], rng_key: Array) -> dict[str, xr.Dataset]:
    """The groups that cost another pass through the model; a `prior` brings its `prior_predictive`."""
    draws = {name: _draws_first(posterior[_dotted(name)]) for name in program.latent if _dotted(name) in posterior}
    shape = (posterior.sizes["chain"], posterior.sizes["draw"])
    predict_key, prior_key, prior_predict_key = random.split(rng_key, 3)
    groups: dict[str, xr.Dataset] = {}
    if "log_likelihood" in wanted:
        groups["log_likelihood"] = _grouped(program, _over(program.log_likelihood, draws), shape, batch_only=True)
    if "log_prior" in wanted:
        groups["log_prior"] = _grouped(program, _over(program.log_prior, draws), shape, batch_only=True)
    if program.factors and {"log_likelihood", "log_prior"} & set(wanted):  # the third part of the log joint
        groups["log_factor"] = _grouped(program, _over(program.log_factors, draws), shape, batch_only=True)
    if "posterior_predictive" in wanted:
        predicted = _over_keys(program, draws, predict_key)
        groups["posterior_predictive"] = _grouped(program, {k: predicted[k] for k in program.observed}, shape)
    if "prior" in wanted:
        count = shape[0] * shape[1]
        prior = program.draw_prior(prior_key, count)
        predicted = _over_keys(program, prior, prior_predict_key)
        groups["prior"] = _grouped(program, prior, (1, count))
        groups["prior_predictive"] = _grouped(program, {k: predicted[k] for k in program.observed}, (1, count))
    return groups


def check_names(program: Program) -> None:
    """Before anything runs: sites and plates must have names that a DataTree can hold side by side."""
    dims = variable_dims(program)
    if len(dims) < len(program.dims):
        twice = sorted(name for name in program.dims if sum(_dotted(name) == _dotted(other) for other in program.dims) > 1)
        raise ValueError(f"sites {twice} have the same name once '/' is written '.', as in the tree; rename one.")
    used = {dim for names in dims.values() for dim in names}
    if reserved := sorted(used & {"chain", "draw", "step"}):
        raise ValueError(f"plate {reserved[0]!r}: the tree needs this name for itself; rename the plate.")
    if both := sorted(used & set(dims)):
        raise ValueError(f"site {both[0]!r} and a dimension have the same name; rename one.")


def variable_dims(program: Program) -> dict[str, tuple[str, ...]]:
    """The model's dimensions under the names that its sites have in the tree."""
    return {_dotted(name): tuple(map(_dotted, dims)) for name, dims in program.dims.items()}


def _over(function: Callable, draws: Any) -> dict[str, Array]:
    return compiled(lambda values: jax.lax.map(function, values, batch_size=BATCH), draws)(draws)


def _over_keys(program: Program, draws: dict[str, Any], rng_key: Array) -> dict[str, Array]:
    keys = random.split(rng_key, len(jax.tree.leaves(draws)[0]))
    return _over(lambda pair: program.predict(*pair), (keys, draws))


def _grouped(program: Program, values: dict[str, Any], shape: tuple[int, int], batch_only: bool = False) -> xr.Dataset:
    variables = {}
    for name, value in values.items():
        site = program.sites[name]
        dims = tuple(map(_dotted, site.dims))
        dims = dims[: len(dims) - site.event_dim] if batch_only else dims
        array = np.asarray(value)
        variables[_dotted(name)] = (["chain", "draw", *dims], array.reshape(*shape, *array.shape[1:]))
    return with_coordinates(xr.Dataset(variables))


def _draws_first(values: xr.DataArray) -> np.ndarray:
    array = values.transpose("chain", "draw", ...).values
    return array.reshape(-1, *array.shape[2:])


def with_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """A coordinate for every dimension, as ArviZ gives them."""
    return dataset.assign_coords({dim: np.arange(size) for dim, size in dataset.sizes.items()})


def _dotted(site: str) -> str:
    """A scope's "/" would be a group in a DataTree."""
    return site.replace("/", ".")


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and np.array_equal(first, second, equal_nan=first.dtype.kind == "f" and second.dtype.kind == "f")
