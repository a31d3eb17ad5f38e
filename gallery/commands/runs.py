"""Saved runs: what the command adds to the driver's tree, files, and what to print of a run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from gallery.commands.inputs import Inputs, takes_entries
from gallery.commands.models import unknown

__all__ = [
    "annotate",
    "main_variables",
    "num_draws",
    "open_run",
    "row_dims",
    "save",
    "scores_text",
    "select",
    "summary_text",
]


def annotate(tree: xr.DataTree, inputs: Inputs) -> xr.DataTree:
    """Return the driver's tree with all that later commands need.

    Names of features and classes become coordinates. Means and scales, the request and the plain
    arguments of the model become variables and attributes.
    """
    request, data, arguments = inputs.request, inputs.data, inputs.arguments
    task = request.task or "task"
    names = {
        "feature": data.feature_names,
        "class": data.class_names,
        "task": data.categories.get(task, ()),
    }
    groups = {name: _named(group.to_dataset(), names) for name, group in tree.children.items()}
    constant = groups.get("constant_data", xr.Dataset())
    if inputs.features is not None:
        dims = {"x_dim_0": "row", "x_dim_1": "feature"}
        constant = constant.rename({old: new for old, new in dims.items() if old in constant.dims})
        constant = constant.assign(
            x_mean=("feature", inputs.features.mean), x_std=("feature", inputs.features.scale)
        )
    named = {dim: list(values) for dim, values in names.items() if values}
    groups["constant_data"] = constant.assign_coords(named)
    annotated = xr.DataTree.from_dict(groups)
    annotated.attrs = dict(tree.attrs) | {
        "model": request.model,
        "data": request.data_name,
        "command": request.to_json(),
        "arguments": json.dumps(
            {key: value for key, value in arguments.items() if _is_plain(value)}
        ),
        "categories": json.dumps({name: list(values) for name, values in data.categories.items()}),
    }
    if inputs.entries is not None:
        annotated.attrs["shift"] = float(inputs.entries.mean)
        annotated.attrs["scale"] = float(inputs.entries.scale)
    if "task" in arguments:
        annotated.attrs["task"] = task
    if takes_entries(inputs.entry.model):
        annotated.attrs["entries"] = json.dumps(list(data.categories) or ["row", "column"])
        # components are identified up to order, sign and scale
        for values in annotated["posterior"].data_vars.values():
            values.attrs |= {"not_identified": 1} if "component" in values.dims else {}
    return annotated


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def save(tree: xr.DataTree, path: Path) -> None:
    """Write a netCDF file, as a whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        tree.to_netcdf(partial, engine="h5netcdf")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def open_run(path: str | Path) -> xr.DataTree:
    """Read into memory the tree that `zoo fit` or `tree.to_netcdf` wrote."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name a netCDF file of `zoo fit`")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with xr.open_datatree(path, engine="h5netcdf") as tree:
            tree = tree.load()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: not a run; wanted a netCDF file of `zoo fit`") from error
    if not num_draws(tree):
        raise ValueError(
            f"{path}: no posterior draws in it, only {', '.join(tree.children) or 'nothing'}; "
            "wanted a run of `zoo fit`"
        )
    return tree


def num_draws(tree: xr.DataTree) -> int:
    """Return the number of posterior draws of each chain."""
    return tree["posterior"].sizes.get("draw", 0) if "posterior" in tree.children else 0


def main_variables(tree: xr.DataTree) -> list[str]:
    """Return the identified variables that are not by row, the smallest first.

    All variables are returned where every one is by row or not identified.
    """
    posterior, rows = tree["posterior"], row_dims(tree)
    hidden = (
        set(map(str, tree["not_identified"].data_vars))
        if "not_identified" in tree.children
        else set()
    )
    names = sorted(map(str, posterior.data_vars), key=lambda name: posterior[name].size)
    identified = [
        name
        for name in names
        if name not in hidden and not posterior[name].attrs.get("not_identified")
    ]
    rows |= {"row", "column"} if "entries" in tree.attrs else set()
    return [name for name in identified if not rows & set(posterior[name].dims)] or names


def row_dims(tree: xr.DataTree) -> set[str]:
    """Return the first dimension of each observed site, which counts the observations."""
    observed = tree.children.get("observed_data")
    return (
        set()
        if observed is None
        else {str(values.dims[0]) for values in observed.data_vars.values() if values.dims}
    )


def select(tree: xr.DataTree, names: list[str] | None) -> list[str]:
    """Return the named variables after a check; `main_variables` where none is named."""
    known = list(map(str, tree["posterior"].data_vars))
    for name in names or ():
        if name not in known:
            raise ValueError(unknown("quantity", name, known))
    return names or main_variables(tree)


def summary_text(tree: xr.DataTree, names: list[str], limit: int | None = None) -> str:
    """Return the first `limit` rows of `az.summary` as text."""
    import arviz as az

    table = az.summary(tree, var_names=names)
    text = table.head(limit).to_string() if limit else table.to_string()
    more = len(table) - limit if limit else 0
    return f"{text}\n... and {more} more" if more > 0 else text


def scores_text(tree: xr.DataTree) -> str:
    """Return the log-evidence of a run, or its ELBO and number of groups; empty where not known."""
    found = []
    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else xr.Dataset()
    if "log_evidence" in tree.attrs:
        error = float(tree.attrs.get("log_evidence_se", np.nan))
        found.append(
            f"log-evidence {float(tree.attrs['log_evidence']):.1f}"
            + (f" +- {error:.1f}" if np.isfinite(error) else "")
        )
    # the ELBO of these kernels is exact; that of others is an estimate
    if {"elbo", "num_groups"} <= set(stats):
        last = stats.isel(chain=int(stats["elbo"].values[:, -1].argmax()), step=-1)
        found.append(
            f"bound of the log-evidence {float(last['elbo']):.1f}, groups with a row or more "
            f"{int(last['num_groups'])}"
        )
    return ", ".join(found)


def _named(dataset: xr.Dataset, names: Mapping[str, tuple[str, ...]]) -> xr.Dataset:
    """Names become coordinates of dimensions of the same length."""
    fitting = {
        dim: np.asarray(values)
        for dim, values in names.items()
        if values and dataset.sizes.get(dim) == len(values)
    }
    return dataset.assign_coords(fitting)
