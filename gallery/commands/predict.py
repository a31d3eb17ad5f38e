"""`zoo predict`: class probabilities of new rows, or entries of a matrix, from a saved run."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random

from gallery._standardise import Standardiser
from gallery.commands.models import find_model
from gallery.commands.predictive import (
    REFITTED,
    draws_of,
    has_predictive,
    mixture_probabilities,
    predicted_entries,
    predictive_probabilities,
    refitted_probabilities,
)
from gallery.commands.request import check_distinct, check_writable
from gallery.commands.runs import open_run, row_dims
from gallery.tables import read_features
from inference import Program
from inference.program.compiling import compiled

__all__ = ["predict", "site_probabilities"]

SEED = 0  # for latent sites of new rows, which the posterior does not hold


def predict(args: Any) -> int:
    """Read a run and a table, and write a prediction for each row of the table."""
    check_distinct({"the run": args.run, "the table": args.table, "-o": args.output})
    if args.output is not None:
        check_writable(Path(args.output), "-o", args.force)
    tree = open_run(args.run)
    if "entries" in tree.attrs:
        return _predict_entries(tree, args)
    features, standardiser, class_names = _columns(tree, args.run)
    categories = json.loads(tree.attrs["categories"])
    x = read_features(args.table, features, categories)
    z = standardiser.standardise(x)
    if tree.attrs.get("kernel") in REFITTED:
        probabilities = refitted_probabilities(tree, z, _by_row(tree, args.table, categories))
    elif tree.attrs.get("kernel") == "ConditionalGibbs":
        probabilities = mixture_probabilities(tree, z)
    elif has_predictive(tree):
        probabilities = predictive_probabilities(tree, z)
    else:
        draws = draws_of(tree, without=row_dims(tree))
        program = _program(tree, z, draws)
        site = _target(tree, program)
        probabilities = site_probabilities(program, site, draws)
    if probabilities is None:
        header, columns = ["mean", "std"], np.stack(_moments(program, site, draws), axis=1)
        labels = None
    else:
        header = (
            list(class_names)
            if len(class_names) == probabilities.shape[1]
            else [str(k) for k in range(probabilities.shape[1])]
        )
        columns, labels = probabilities, [header[k] for k in probabilities.argmax(axis=1)]
    _refuse_nan(columns, x, features, tree.attrs["model"], args.table)
    return _write_table(args.output, header, columns, labels)


def _predict_entries(tree: xr.DataTree, args: Any) -> int:
    """The table names the row and the column of each entry."""
    places = read_features(
        args.table, json.loads(tree.attrs["entries"]), json.loads(tree.attrs["categories"])
    )
    if np.isnan(places).any():
        raise ValueError(
            f"{args.table}: line {int(np.argmax(np.isnan(places).any(1))) + 2} does not say which "
            "entry it asks for"
        )
    found = predicted_entries(tree, *places.astype(int).T)
    return _write_table(args.output, ["mean", "std"], np.stack(found, axis=1), None)


def _write_table(
    path: str | None, header: list[str], columns: np.ndarray, labels: list[str] | None
) -> int:
    if path is None:
        _write(sys.stdout, header, columns, labels)
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            _write(file, header, columns, labels)
        print(f"saved {path}: {len(columns)} rows")
    return 0


def site_probabilities(program: Program, site: str, draws: dict[str, Array]) -> np.ndarray | None:
    """Return probabilities of the values of a discrete site, averaged over draws.

    A latent site that is not in `draws` is drawn from its prior for each draw. Cost: a trace of the
    model for each draw.

    Args:
        program: the model on new rows.
        site: name of the site that is predicted.
        draws: posterior draws, [draw, ...].

    Returns:
        Probabilities [row, value], or None where the support of the site cannot be enumerated.
    """
    keys = random.split(random.key(SEED), len(jax.tree.leaves(draws)[0]))
    first = {name: values[0] for name, values in draws.items()}
    found: list[Any] = []
    jax.eval_shape(
        lambda values, key: found.append(program.trace(values, key)[site]["fn"]), first, keys[0]
    )
    if not found[0].has_enumerate_support or found[0].event_dim:
        return None

    def of(values: dict[str, Array], key: Array) -> Array:
        fn = program.trace(values, key)[site]["fn"]
        return jnp.exp(fn.log_prob(fn.enumerate_support(expand=False)))

    def total(draws: dict[str, Array], keys: Array) -> Array:
        start = jnp.zeros_like(of(first, keys[0]))
        return jax.lax.scan(lambda total, one: (total + of(*one), None), start, (draws, keys))[0]

    summed = np.asarray(compiled(total, draws, keys)(draws, keys), dtype=float)  # [value, row]
    return (summed / summed.sum(axis=0)).T


def _moments(program: Program, site: str, draws: dict[str, Array]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a value drawn for each draw of the posterior, by row."""
    of = lambda *each: jax.lax.map(
        lambda one: program.trace(*one)[site]["value"], each, batch_size=64
    )
    keys = random.split(random.key(SEED), len(jax.tree.leaves(draws)[0]))
    drawn = np.asarray(compiled(of, draws, keys)(draws, keys))
    if drawn.ndim != 2:
        raise ValueError(
            f"predict: site {site!r} has {drawn.ndim - 1} dimensions; wanted one number or class "
            "for each row"
        )
    return drawn.mean(axis=0), drawn.std(axis=0)


def _columns(tree: xr.DataTree, path: str) -> tuple[list[str], Standardiser, list[str]]:
    """Names of the features, their standardiser, and names of the classes."""
    constant = (
        tree["constant_data"].to_dataset() if "constant_data" in tree.children else xr.Dataset()
    )
    if (
        "x_mean" not in constant
        or "feature" not in constant.coords
        or "categories" not in tree.attrs
    ):
        raise ValueError(
            f"{path}: it does not say how its features were named and scaled; wanted a run of `zoo "
            "fit` on a table"
        )
    class_names = list(map(str, constant["class"].values)) if "class" in constant.coords else []
    return (
        list(map(str, constant["feature"].values)),
        Standardiser(constant["x_mean"].values, constant["x_std"].values),
        class_names,
    )


def _by_row(
    tree: xr.DataTree, path: str, categories: dict[str, list[str]]
) -> dict[str, np.ndarray]:
    """The task of each new row, where the model has tasks."""
    if "task" not in tree.attrs:
        return {}
    return {"task": read_features(path, [tree.attrs["task"]], categories)[:, 0].astype(int)}


def _program(tree: xr.DataTree, x: np.ndarray, draws: dict[str, Array]) -> Program:
    """The model on new rows, without a target.

    Sites that the model observes (features with a density) may depend on the draws alone. Then the
    target, given features and draws, has the distribution of its own site.
    """
    entry = find_model(tree.attrs["model"])
    try:
        program = Program(entry.model, x=x, **json.loads(tree.attrs["arguments"]))
    except TypeError as error:
        raise ValueError(
            f"predict: {error} The command predicts with models of `x` and numbers alone"
        ) from error
    if own := [
        name
        for name in program.observed
        if {parent.replace("/", ".") for parent in program.parents[name]} - set(draws)
    ]:
        raise ValueError(
            f"predict: {entry.name} observes {', '.join(own)} itself, so that the classes of new "
            "rows do not follow from "
            "one site; use the model's estimator"
        )
    return program


def _target(tree: xr.DataTree, program: Program) -> str:
    """The site to predict: the one that the fit observed, or the only one that it did not draw."""
    observed = tree["observed_data"].data_vars if "observed_data" in tree.children else {}
    sites = [name for name in program.latent if name.replace("/", ".") in observed]
    sites = sites or [
        name for name in program.latent if name.replace("/", ".") not in tree["posterior"].data_vars
    ]
    if len(sites) != 1:
        raise ValueError(
            f"predict: wanted one observed site to predict, found {', '.join(sites) or 'none'}"
        )
    return sites[0]


def _refuse_nan(
    columns: np.ndarray, x: np.ndarray, features: Sequence[str], model: str, path: str
) -> None:
    bad = np.flatnonzero(np.isnan(columns).any(axis=1))
    if len(bad):
        missing = [name for name, value in zip(features, x[bad[0]], strict=True) if np.isnan(value)]
        why = (
            f"its {', '.join(map(repr, missing))} is missing, and {model} takes no missing features"
            if missing
            else "it is NaN"
        )
        raise ValueError(f"{path}: no prediction for row {bad[0] + 1} of {len(x)}: {why}")


def _write(file: Any, header: list[str], columns: np.ndarray, labels: list[str] | None) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header + ([] if labels is None else ["predicted"]))
    for row, values in enumerate(columns):
        writer.writerow(
            [f"{value:.6g}" for value in values] + ([] if labels is None else [labels[row]])
        )
