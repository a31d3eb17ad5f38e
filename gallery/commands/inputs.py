"""From a request to the arguments of a model: read the data, standardise them, bind them by name.

Data are rows of features, or the entries of a matrix where the model takes entries.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpyro.distributions import constraints

import zoo
from gallery._dataset import Dataset
from gallery._entries import Entries, read_entries
from gallery._links import Gaussian, Ordered, num_initial_components
from gallery._standardise import Standardiser
from gallery.commands.columns import read_columns
from gallery.commands.model_file import errors_of, is_file, short
from gallery.commands.models import Options, find_model, kernel_name, parse, split
from gallery.commands.request import Request, is_table
from gallery.commands.wording import unknown
from inference import Program
from zoo.bsvd import ordered_probit

__all__ = [
    "Inputs",
    "entries_of",
    "functions_for",
    "has_real_entries",
    "learn_link",
    "read_data",
    "read_inputs",
    "saved_data",
    "saved_inputs",
    "start_entries",
    "takes_entries",
]


class Inputs(NamedTuple):
    """A request with its model, kernel and data; what does not apply is None."""

    request: Request
    entry: zoo.Entry
    kernel: str
    options: Options
    data: Dataset
    features: Standardiser | None  # of the columns of x
    link: Gaussian | Ordered | None  # of the entries of a matrix, which it has coded
    arguments: dict[str, Any]  # of the model


def read_inputs(request: Request, data: Dataset | None = None) -> Inputs:
    """Find the model and the kernel of a request, and bind the model's arguments.

    Args:
        request: what was asked for.
        data: some of the rows of its data; None: all, which are read.
    """
    entry = find_model(request.model)
    kernel = kernel_name(entry, request.kernel)
    options = split(parse(request.options), entry.model, kernel)
    is_own = is_file(request.model)
    if data is None:
        data = read_data(request, entry.model)
        data = _with_dummies(data) if request.dummies and not is_own else data
    features = None if is_own else _learn_features(data, request.raw)
    arguments = _bind(entry, data, features, options.model)
    if is_own:
        _check_sites(request.model, entry.model, arguments)
    elif not entry.takes_missing:
        _refuse_missing(request, entry, data)
    link = learn_link(entry.model, arguments, request.raw)
    if link is not None:
        arguments["value"] = link.coded(entries_of(arguments)).value
    if isinstance(link, Ordered):
        del arguments["link"]  # without the number of levels
        arguments = link.settings | arguments
    return Inputs(request, entry, kernel, options, data, features, link, arguments)


def _check_sites(name: str, model: Callable, arguments: Mapping[str, Any]) -> None:
    """Trace a model file's model, so that its errors come before the fit."""
    with errors_of(name, arguments):
        latent = Program(model, **arguments).latent
    if not latent:
        raise ValueError(
            f"model {short(name)}: found no latent site, wanted one to infer; write it by "
            "numpyro.sample(...), without obs="
        )


def saved_inputs(tree: xr.DataTree) -> Inputs:
    """Return the inputs of a fit from its saved run; features and entries are scaled already."""
    request = Request.from_json(tree.attrs["command"])
    entry = find_model(request.model)
    kernel = kernel_name(entry, request.kernel)
    options = split(parse(request.options), entry.model, kernel)
    data = saved_data(tree)
    scaled = None if is_file(request.model) or "x" not in data.arrays else Standardiser(0.0, 1.0)
    return Inputs(
        request, entry, kernel, options, data, None, None, _bind(entry, data, scaled, options.model)
    )


def saved_data(tree: xr.DataTree) -> Dataset:
    """Return the arrays that the model of a saved run took, and the names of their columns."""
    constant = tree["constant_data"].to_dataset()
    names = lambda dim: tuple(map(str, constant[dim].values)) if dim in constant.coords else ()
    return Dataset(
        name=tree.attrs["data"],
        title="",
        arrays={
            name: tree[group].dataset[variable].values
            for name, (group, variable) in json.loads(tree.attrs["arrays"]).items()
        },
        feature_names=names("feature"),
        class_names=names("class"),
        target_name=tree.attrs.get("target", ""),
        categories=json.loads(tree.attrs["categories"]),
        dummies=json.loads(tree.attrs.get("dummies", "{}")),
        dates=tuple(json.loads(tree.attrs.get("dates", "[]"))),
        ids=tuple(constant["row_id"].values.tolist()) if "row_id" in constant else (),
    )


def read_data(request: Request, model: Callable) -> Dataset:
    """Read the named data set or the CSV file of a request."""
    if is_table(request.data):
        from gallery.tables import read_csv, read_matrix

        path = Path(request.data)
        if path.is_dir():
            raise ValueError(f"--data {path}: a folder; name a CSV file in it")
        if not path.is_file():
            raise ValueError(f"--data {path}: no such file")
        if is_file(request.model):
            return read_columns(request, model)
        if takes_entries(model):
            return read_matrix(request.data, target=request.target)
        return read_csv(
            request.data,
            target=request.target,
            task=request.task,
            classes="num_classes" in inspect.signature(model).parameters,
            drop=request.drop,
            columns=request.columns,
            id_column=request.id,
        )
    from gallery.datasets import load, names

    if request.data not in names() and Path(request.data).is_dir():  # such as "."
        raise ValueError(
            f"--data {request.data}: a folder; name a CSV file in it, or a data set of `zoo data`"
        )
    return load(request.data)


def _with_dummies(data: Dataset) -> Dataset:
    from gallery.tables import with_dummies

    if not set(data.feature_names) & set(data.categories):
        raise ValueError(f"--dummies: {data.name} has no feature of texts; leave it out")
    return with_dummies(data)


def takes_entries(model: Callable) -> bool:
    """Return whether a model takes the entries of a matrix."""
    return {"row", "column", "value", "shape"} <= set(inspect.signature(model).parameters)


def _learn_features(data: Dataset, is_raw: bool) -> Standardiser | None:
    """Raw columns, categories and columns of 0 and 1 keep mean 0 and scale 1."""
    x = data.arrays.get("x")
    if x is None or x.ndim != 2 or x.dtype.kind != "f":
        return None
    mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
    for column in range(x.shape[1]) if not is_raw else ():
        present = x[~np.isnan(x[:, column]), column]
        is_category = bool(data.feature_names) and data.feature_names[column] in data.categories
        if not is_category and not np.isin(present, (0.0, 1.0)).all():
            mean[column], scale[column], _ = Standardiser.learn(present)
    return Standardiser(mean, scale)


def learn_link(
    model: Callable, arguments: Mapping[str, Any], is_raw: bool = False
) -> Gaussian | Ordered | None:
    """Learn how the entries of a matrix are coded: as levels, or as standardised real numbers.

    Args:
        model: any model.
        arguments: keyword arguments of the model.
        is_raw: whether real entries stay as they are.

    Returns:
        The link, or None where the model takes entries as they are, or none.
    """
    if not takes_entries(model) or "value" not in arguments:
        return None
    if arguments.get("link") is ordered_probit:
        return Ordered.learn(entries_of(arguments))
    if is_raw or not has_real_entries(Program(model, **arguments)):
        return None
    return Gaussian.learn(entries_of(arguments))


def start_entries(
    model: Callable,
    num_chains: int,
    arguments: Mapping[str, Any],
    link: Gaussian | Ordered | None = None,
) -> dict[str, np.ndarray] | None:
    """Return initial values, or None where a draw of the prior will do.

    Levels start as the link says. Of real entries as many components are switched on as the entries
    allow. From a draw of the prior, a chain would have to add them one by one.

    Args:
        model: a model that takes entries.
        num_chains: number of chains.
        arguments: keyword arguments of the model.
        link: of the entries.
    """
    program, entries = Program(model, **arguments), entries_of(arguments)
    if isinstance(link, Ordered):
        start = link.start(entries, program)
    else:
        switches = [
            site
            for site in map(program.sites.__getitem__, program.latent)
            if site.support is constraints.boolean
        ]
        if len(switches) != 1 or len(switches[0].shape) != 1 or not has_real_entries(program):
            return None
        [width] = switches[0].shape
        is_on = np.arange(width) < num_initial_components(entries, width)
        start = {switches[0].name: is_on.astype(int)}
    chains = (num_chains,) if num_chains > 1 else ()
    return {name: np.broadcast_to(one, chains + np.shape(one)) for name, one in start.items()}


def entries_of(arguments: Mapping[str, Any]) -> Entries:
    """Return the entries among the arguments of a model."""
    columns = (np.asarray(arguments[name]) for name in ("row", "column", "value"))
    return Entries(*columns, None, arguments["shape"])


def has_real_entries(program: Program) -> bool:
    """Return whether a model observes real numbers alone."""
    return (
        len(program.observed) == 1
        and program.sites[program.observed[0]].support is constraints.real
    )


def _bind(
    entry: zoo.Entry, data: Dataset, features: Standardiser | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's keyword arguments, taken from the data by their names and from `--option`."""
    arrays = dict(data.arrays)
    given = arrays | _num_classes(data) | _num_tasks(data) | _entries(data)
    if features is not None:
        arrays["x"] = given["x"] = features.standardise(arrays["x"])
    if features is not None or (data.feature_names and "x" in arrays):
        given["component"] = _component(data, arrays["x"])
    parameters = {
        name: p
        for name, p in inspect.signature(entry.model).parameters.items()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    for key in options:
        if key in arrays:
            raise ValueError(
                f"--option {key}: {entry.name} takes {key!r} from the data set {data.name!r}; "
                "leave it out"
            )
    functions = {
        name: _function(p, options[name], entry.model)
        for name, p in parameters.items()
        if name in options and inspect.isfunction(p.default)
    }
    arguments = {name: given[name] for name in parameters if name in given}
    arguments |= dict(options) | functions
    if "component" not in parameters:
        _refuse_texts(entry.name, data)
    if "task" in parameters and "task" not in arguments:
        raise ValueError(
            f"model {entry.name} wants the task of each row: name its column with --task, or "
            "choose a data set that has tasks"
        )
    lacking = [
        name for name, p in parameters.items() if name not in arguments and p.default is p.empty
    ]
    if lacking:
        raise ValueError(
            f"model {entry.name} needs {', '.join(map(repr, lacking))}, which the data set "
            f"{data.name!r} lacks: it has {', '.join(given)}. A CSV file comes as x and y. Choose "
            "other data, or give numbers with --option"
        )
    return arguments


def _entries(data: Dataset) -> dict[str, Any]:
    """The model's arguments for entries of a matrix, sorted by row; empty for other data."""
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
        "counts": np.ones(len(entries.value), bool),
    }


def _refuse_texts(name: str, data: Dataset) -> None:
    """Refuse texts of more than two kinds, whose codes a model would take for quantities."""
    from gallery.tables import number_of

    for column in data.feature_names:
        texts = data.categories.get(column, ())
        if len(texts) > 2 and any(number_of(text) is None for text in texts):
            shown = ", ".join(map(repr, texts[:3])) + (", ..." if len(texts) > 3 else "")
            raise ValueError(
                f"--data {data.name}: column {column!r} holds texts ({shown}), which {name} would "
                "take for numbers, in alphabetical order. Give --dummies, which makes each text a "
                f"column of 0 and 1, or --drop {column}, or choose a model of texts: aclass"
            )


def _refuse_missing(request: Request, entry: zoo.Entry, data: Dataset) -> None:
    """Refuse features with missing entries, before anything is compiled for them."""
    x = data.arrays.get("x")
    takes_features = "x" in inspect.signature(entry.model).parameters
    if x is None or x.dtype.kind != "f" or not takes_features or not np.isnan(x).any():
        return
    of_text = {f"{name}={text}": name for name, texts in data.dummies.items() for text in texts}
    places = np.flatnonzero(np.isnan(x).any(axis=0)).tolist()
    names = [data.feature_names[i] if data.feature_names else f"feature {i}" for i in places]
    columns = list(dict.fromkeys(of_text.get(name, name) for name in names))
    advice = f"drop them by --drop {','.join(columns)}, or " if is_table(request.data) else ""
    raise ValueError(
        f"--data {request.data_name}: {entry.name} takes no missing features, and these columns "
        f"have empty cells: {', '.join(columns)}; {advice}take a model of missing features, aclass "
        "or iqgme"
    )


def _component(data: Dataset, x: np.ndarray) -> Callable:
    """The component of the zoo that models each column by its kind."""
    from gallery._columns import BINARY, NUMBER, component_of

    names = data.feature_names or range(x.shape[1])
    is_binary = [bool(np.isin(column[~np.isnan(column)], (0.0, 1.0)).all()) for column in x.T]
    widths = [len(data.categories.get(name, ())) for name in names]
    return component_of(
        [
            width or (BINARY if binary else NUMBER)
            for width, binary in zip(widths, is_binary, strict=True)
        ]
    )


def functions_for(option: inspect.Parameter, model: Callable) -> dict[str, Callable]:
    """Return the functions of a model's file that may stand for an argument, by their names.

    Args:
        option: an argument whose default is a function; the others have its signature.
        model: the model.
    """
    wanted = _required(option.default)
    functions = inspect.getmembers(sys.modules[model.__module__], inspect.isfunction)
    return {
        each: function
        for each, function in functions
        if not each.startswith("_") and _required(function)[: len(wanted)] == wanted
    }


def _function(option: inspect.Parameter, name: Any, model: Callable) -> Callable:
    known = functions_for(option, model)
    if name not in known:
        raise ValueError(unknown(option.name, str(name), known))
    return known[name]


def _required(function: Callable) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]


def _num_classes(data: Dataset) -> dict[str, int]:
    y = data.arrays.get("y")
    if data.class_names:
        return {"num_classes": len(data.class_names)}
    if y is not None and y.dtype.kind in "iu" and y.ndim == 1:
        return {"num_classes": int(y.max()) + 1}
    return {}


def _num_tasks(data: Dataset) -> dict[str, int]:
    """The tasks of a table, of which a part of its rows may lack some."""
    if "task" not in data.arrays:
        return {}
    names = [each for column, each in data.categories.items() if column not in data.feature_names]
    return {"num_tasks": len(names[0]) if names else int(data["task"].max()) + 1}
