"""Saved runs: what the command adds to the driver's tree, files, and what to print of a run."""

import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from gallery._links import Gaussian, Ordered
from gallery._saving import best_state, held_estimator, packed, read_tree, unpacked
from gallery.commands.inputs import Inputs, takes_entries
from gallery.commands.kernels import command_of
from gallery.commands.model_file import MATRIX, is_file, source_hash
from gallery.commands.wording import unknown

__all__ = [
    "annotate",
    "main_variables",
    "num_draws",
    "open_fit",
    "open_run",
    "row_dims",
    "scores_text",
    "select",
    "summary_text",
    "waiting",
    "with_states",
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
    if data.feature_names:
        dims = {f"{x}_dim_{i}": new for x in MATRIX for i, new in enumerate(("row", "feature"))}
        constant = constant.rename({old: new for old, new in dims.items() if old in constant.dims})
    if inputs.features is not None:
        constant = constant.assign(
            x_mean=("feature", inputs.features.mean), x_std=("feature", inputs.features.scale)
        )
    if data.ids:
        constant = constant.assign(row_id=("row_id_dim_0", list(data.ids)))
    named = {dim: list(values) for dim, values in names.items() if values}
    # a coordinate would take the place of the argument of its name
    constant = constant.rename({dim: f"{dim}_of_row" for dim in named if dim in constant.data_vars})
    groups["constant_data"] = constant.assign_coords(named)
    annotated = xr.DataTree.from_dict(groups)
    annotated.attrs = dict(tree.attrs) | {
        "model": request.model,
        "data": request.data_name,
        "target": data.target_name,
        "command": request.to_json(),
        "arguments": json.dumps(
            {key: value for key, value in arguments.items() if _is_plain(value)}
        ),
        "arrays": json.dumps(_arrays(annotated, inputs)),
        "categories": json.dumps({name: list(values) for name, values in data.categories.items()}),
        "dummies": json.dumps({name: list(values) for name, values in data.dummies.items()}),
        "dates": json.dumps(data.dates),
    }
    if is_file(request.model):
        annotated.attrs["source"] = source_hash(request.model)
    if isinstance(inputs.link, Gaussian):
        unit = inputs.link.standardiser
        annotated.attrs |= {"shift": float(unit.mean), "scale": float(unit.scale)}
    if isinstance(inputs.link, Ordered):
        annotated.attrs["levels"] = inputs.link.levels
    if "task" in arguments:
        annotated.attrs["task"] = task
    if takes_entries(inputs.entry.model):
        annotated.attrs["entries"] = json.dumps(list(data.categories) or ["row", "column"])
        # components are identified up to order, sign and scale
        for values in annotated["posterior"].data_vars.values():
            values.attrs |= {"not_identified": 1} if "component" in values.dims else {}
    return annotated


def _arrays(tree: xr.DataTree, inputs: Inputs) -> dict[str, tuple[str, str]]:
    """Where the tree holds each array of the data that the model takes: group and variable."""
    places = [
        (group, str(name), values.values)
        for group in ("constant_data", "observed_data")
        if group in tree.children
        for name, values in tree[group].data_vars.items()
    ]
    found = {}
    for name in inputs.data.arrays:
        value = np.asarray(inputs.arguments.get(name, ()))
        for group, variable, held in places:
            same = value.dtype.kind == held.dtype.kind and value.shape == held.shape
            if same and np.array_equal(value, held, equal_nan=held.dtype.kind == "f"):
                found.setdefault(name, (group, variable))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def with_states(tree: xr.DataTree, driver: Any) -> xr.DataTree:
    """Return the tree with the kernel's final states, from which it predicts and learns on.

    Size: of a particle filter, the statistics of particles x groups x columns (1.5 MB a replicate
    on the wine data), and 8 bytes x particles for each row; of coordinate ascent, which does not
    learn on, the factors of q.

    Args:
        tree: the run, with a posterior.
        driver: the driver that made it, of a kernel that predicts by its states.
    """
    learns_on = command_of(tree.attrs["kernel"]).learns_on
    states = driver.steps if learns_on else [best_state(driver.states)]
    tree["states"] = xr.DataTree(packed(states))
    return tree


@contextmanager
def waiting(what: str) -> Generator[None]:
    """Show on a terminal what a person waits for, until it is done; nothing in CI and in pipes."""
    is_shown = "CI" not in os.environ and sys.stderr.isatty()
    if is_shown:
        print(f"{what} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print("\033[K", end="", file=sys.stderr, flush=True)  # erases the line


def open_run(path: str | Path) -> xr.DataTree:
    """Read into memory the tree that `zoo fit` or `tree.to_netcdf` wrote."""
    path = Path(path)
    tree = read_tree(path, "a run", "`zoo fit`")
    if "unfinished" in tree.children:
        raise ValueError(
            f"{path}: the run had not finished, and its draws are not of the posterior; go on with "
            "it by `zoo resume`"
        )
    if not num_draws(tree):
        raise ValueError(
            f"{path}: no posterior draws in it, only {', '.join(tree.children) or 'nothing'}; "
            "wanted a run of `zoo fit`"
        )
    return tree


def open_fit(path: str | Path) -> xr.DataTree:
    """Read a run of `zoo fit` as `open_run` does; the file of an estimator is refused."""
    tree = open_run(path)
    if "estimator" in tree.children:
        kind = unpacked(tree["estimator"].to_dataset())["class"]
        raise ValueError(f"{path}: {held_estimator(kind)}")
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
    """Return the first `limit` rows of `az.summary` as text.

    Where the run has weighted points, the effective sample size is that of their weights.
    """
    import arviz as az

    weighted = tree.attrs.get("ess_of_replicates", tree.attrs.get("ess"))
    if weighted is None:
        table = az.summary(tree, var_names=names)
    else:
        table = az.summary(tree, var_names=names, kind="stats").assign(ess=round(np.sum(weighted)))
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
            f"ELBO {float(last['elbo']):.1f} (lower bound of the log-evidence), "
            f"{int(last['num_groups'])} groups in use"
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
