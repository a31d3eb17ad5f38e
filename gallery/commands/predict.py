"""`zoo predict`: class probabilities of new rows, or entries of a matrix, from a saved run."""

import csv
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random

from gallery._dataset import Dataset
from gallery._standardise import Standardiser
from gallery.commands.columns import new_rows
from gallery.commands.inputs import saved_data
from gallery.commands.kernels import command_of
from gallery.commands.model_file import RESPONSE, check_unchanged, errors_of, is_file
from gallery.commands.models import NONE, find_model, parse
from gallery.commands.predictive import (
    draws_of,
    has_predictive,
    mixture_probabilities,
    predicted_entries,
    predictive_probabilities,
    state_probabilities,
)
from gallery.commands.request import check_distinct, check_writable
from gallery.commands.runs import open_fit, row_dims, waiting
from gallery.commands.wording import counted
from gallery.tables import read_features, read_table
from inference import Program
from inference.program.compiling import compiled
from inference.program.sites import unwrap

__all__ = ["predict", "predictions", "saved_columns", "site_probabilities"]

SEED = 0  # for latent sites of new rows, which the posterior does not hold


def predict(args: Any) -> int:
    """Read a run and a table, and write a prediction for each row of the table."""
    check_distinct({"the run": args.run, "the table": args.table, "-o": args.output})
    if args.output is not None:
        check_writable(Path(args.output), "-o", args.force)
    tree = open_fit(args.run)
    options, is_own = parse(args.option), is_file(tree.attrs.get("model", ""))
    if options and not is_own:
        raise ValueError(
            f"--option {next(iter(options))}: only a run of a model file takes it; leave it out"
        )
    if "entries" in tree.attrs:
        return _predict_entries(tree, args)
    if is_own:
        check_unchanged(tree.attrs)
        data = saved_data(tree)
        rows, class_names = _own_rows(tree, data, args.table), list(data.class_names)
        features = [
            name
            for argument, values in rows.items()
            for name in (data.feature_names if values.ndim == 2 else [argument])
        ]
        x = np.column_stack([np.empty((len(read_table(args.table).rows), 0)), *rows.values()])
    else:
        features, standardiser, class_names = saved_columns(tree, args.run)
        categories = json.loads(tree.attrs["categories"])
        dummies = json.loads(tree.attrs.get("dummies", "{}"))
        x = read_features(args.table, features, categories, dummies)
        rows = {"x": standardiser.standardise(x)} | _by_row(tree, args.table, categories)
    advice = "A number that counts rows is given anew: zoo predict ... --option J=8."
    with waiting("predicting"), errors_of(tree.attrs["model"], rows | options, advice):
        columns, is_classes = predictions(tree, rows, options)
    labels = None
    if not is_classes:
        header = ["mean", "std"]
    else:
        header = (
            list(class_names)
            if len(class_names) == columns.shape[1]
            else [str(k) for k in range(columns.shape[1])]
        )
        labels = [header[k] for k in columns.argmax(axis=1)]
    _refuse_nan(columns, x, features, tree.attrs["model"], args.table)
    request = json.loads(tree.attrs.get("command", "{}"))
    ids = [request["id"]] if request.get("id") else []
    return _write_table(args.output, _texts_of(args.table, ids), header, columns, labels)


def predictions(
    tree: xr.DataTree, rows: Mapping[str, np.ndarray], options: Mapping[str, Any] = NONE
) -> tuple[np.ndarray, bool]:
    """Return what a run predicts of new rows, and whether this is a class.

    Args:
        tree: a run.
        rows: the arguments of the model with an entry for each new row: features, standardised
            where the fit did so, and others, such as the task.
        options: numbers among the arguments that are others than at the fit.

    Returns:
        Class probabilities [row, class], or mean and standard deviation [row, 2] of a quantity.
    """
    kernel, is_own = tree.attrs.get("kernel"), is_file(tree.attrs["model"])
    if not is_own or "num_classes" in json.loads(tree.attrs["arguments"]):
        if command_of(str(kernel)).predicts_by_states:
            return state_probabilities(tree, rows), True
        if kernel == "ConditionalGibbs":
            return mixture_probabilities(tree, rows), True
    if not is_own and has_predictive(tree):
        return predictive_probabilities(tree, rows["x"]), True
    draws = draws_of(tree, without=row_dims(tree))
    program = _program(tree, rows, options, draws)
    site = _target(tree, program)
    draws = {name: values for name, values in draws.items() if name in program.latent}
    probabilities = site_probabilities(program, site, draws)
    if probabilities is not None:
        return probabilities, True
    return np.stack(_moments(program, site, draws), axis=1), False


def _own_rows(tree: xr.DataTree, data: Dataset, path: str) -> dict[str, np.ndarray]:
    """The arguments of a model file for new rows, given those of the fit."""
    groups = json.loads(tree.attrs["arrays"])
    observed = [
        each
        for each, (group, _) in groups.items()
        if group == "observed_data" and data[each].ndim == 1  # a model may observe the features too
    ]
    return new_rows(path, data, {*observed, *RESPONSE}, tree.attrs["model"])


def _predict_entries(tree: xr.DataTree, args: Any) -> int:
    """The table names the row and the column of each entry."""
    items = json.loads(tree.attrs["entries"])
    categories = json.loads(tree.attrs["categories"])
    places = read_features(args.table, items, categories, takes_others=True)
    if np.isnan(places).any():
        raise ValueError(
            f"{args.table}: line {int(np.argmax(np.isnan(places).any(1))) + 2} does not say which "
            "entry it asks for"
        )
    for item, column in zip(items, places.T, strict=True):
        is_new = column == len(categories[item]) if item in categories else np.zeros(1, bool)
        if is_new.any():
            print(
                f"zoo: the fit has not seen the {item!r} of {counted(int(is_new.sum()), 'line')}, "
                "predicted as one without entries",
                file=sys.stderr,
            )
    with waiting("predicting"):
        found = predicted_entries(tree, *places.astype(int).T)
    keys = _texts_of(args.table, items)
    return _write_table(args.output, keys, ["mean", "std"], np.stack(found, axis=1), None)


def _texts_of(path: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of the table that name its rows, as they stand there; those that it has."""
    if not names:
        return {}
    table = read_table(path)
    return {name: table.column(name) for name in names if name in table.header}


def _write_table(
    path: str | None,
    keys: dict[str, list[str]],
    header: list[str],
    columns: np.ndarray,
    labels: list[str] | None,
) -> int:
    each = [
        *keys.items(),
        *zip(header, ([f"{value:.6g}" for value in column] for column in columns.T), strict=True),
        *([] if labels is None else [("predicted", labels)]),
    ]
    if path is None:
        _write(sys.stdout, each)
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            _write(file, each)
        print(f"saved {path}: {counted(len(columns), 'row')}")
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
    given = _distribution(program, site, draws)
    is_count = hasattr(unwrap(given), "total_count")  # a quantity, as that of a Binomial
    if not given.has_enumerate_support or given.event_dim or is_count:
        return None

    def of(values: dict[str, Array], key: Array) -> Array:
        fn = program.trace(values, key)[site]["fn"]
        return jnp.exp(fn.log_prob(fn.enumerate_support(expand=False)))

    def total(draws: dict[str, Array], keys: Array) -> Array:
        first = {name: values[0] for name, values in draws.items()}
        start = jnp.zeros_like(of(first, keys[0]))
        return jax.lax.scan(lambda total, one: (total + of(*one), None), start, (draws, keys))[0]

    summed = np.asarray(compiled(total, draws, keys)(draws, keys), dtype=float)  # [value, row]
    return (summed / summed.sum(axis=0)).T


def _distribution(program: Program, site: str, draws: dict[str, Array]) -> Any:
    """The distribution of a site given the first draw; its numbers are not computed."""
    first = {name: values[0] for name, values in draws.items()}
    found: list[Any] = []
    jax.eval_shape(
        lambda values, key: found.append(program.trace(values, key)[site]["fn"]),
        first,
        random.key(SEED),
    )
    return found[0]


def _moments(program: Program, site: str, draws: dict[str, Array]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a value drawn for each draw of the posterior, by row."""
    given = _distribution(program, site, draws)
    if not given.batch_shape and unwrap(given).event_dim:
        raise ValueError(
            f"predict: {site!r} is one {type(unwrap(given)).__name__} of all rows, so new rows "
            "depend on those of the fit, and posterior draws do not tell them; take the "
            "conditional distribution, in Python"
        )
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


def saved_columns(tree: xr.DataTree, path: str) -> tuple[list[str], Standardiser, list[str]]:
    """Return names of the features, their standardiser, and names of the classes.

    Args:
        tree: a run on a table.
        path: of its file, for the error of another run.
    """
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


def _program(
    tree: xr.DataTree,
    rows: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
    draws: dict[str, Array],
) -> Program:
    """The model on new rows, without a target.

    Sites that the model observes (features with a density) may depend on the draws alone. Then the
    target, given features and draws, has the distribution of its own site.
    """
    entry = find_model(tree.attrs["model"])
    given = rows | json.loads(tree.attrs["arguments"]) | dict(options)
    if is_file(tree.attrs["model"]):  # where it has no default, the target is None
        parameters = inspect.signature(entry.model).parameters.values()
        given |= {p.name: None for p in parameters if p.default is p.empty and p.name not in given}
    try:
        program = Program(entry.model, **given)
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


def _write(file: Any, each: Sequence[tuple[str, list[str]]]) -> None:
    rows = zip(*(cells for _, cells in each), strict=True)
    csv.writer(file, lineterminator="\n").writerows([[name for name, _ in each], *rows])
