"""From a request to the arguments of a model: read the data, standardise them, bind them by name.

Data are rows of features, or the entries of a matrix where the model takes entries.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpyro.distributions import constraints

import zoo
from gallery._dataset import Dataset
from gallery._entries import Entries, read_entries
from gallery._links import num_initial_components
from gallery._standardise import Standardiser
from gallery.commands.models import Options, find_model, kernel_name, parse, split, unknown
from gallery.commands.request import Request, is_table
from inference import Program

__all__ = ["Inputs", "learn_entries", "read_data", "read_inputs", "start_entries", "takes_entries"]


class Inputs(NamedTuple):
    """A request with its model, kernel and data; standardisers are None where nothing is scaled."""

    request: Request
    entry: zoo.Entry
    kernel: str
    options: Options
    data: Dataset
    features: Standardiser | None  # of the columns of x
    entries: Standardiser | None  # of the real entries of a matrix
    arguments: dict[str, Any]  # of the model


def read_inputs(request: Request) -> Inputs:
    """Find the model and the kernel of a request, read its data, and bind the model's arguments."""
    entry = find_model(request.model)
    kernel = kernel_name(entry, request.kernel)
    options = split(parse(request.options), entry.model, kernel)
    data = read_data(request, entry.model)
    features = _learn_features(data, request.raw)
    arguments = _bind(entry, data, features, options.model)
    entries = None if request.raw else learn_entries(entry.model, arguments)
    if entries is not None:
        arguments["value"] = entries.standardise(arguments["value"])
    return Inputs(request, entry, kernel, options, data, features, entries, arguments)


def read_data(request: Request, model: Callable) -> Dataset:
    """Read the named data set or the CSV file of a request."""
    if is_table(request.data):
        from gallery.tables import read_csv, read_matrix

        path = Path(request.data)
        if path.is_dir():
            raise ValueError(f"--data {path}: a folder; name a CSV file in it")
        if not path.is_file():
            raise ValueError(f"--data {path}: no such file")
        if takes_entries(model):
            return read_matrix(request.data, target=request.target)
        has_classes = "num_classes" in inspect.signature(model).parameters
        return read_csv(request.data, target=request.target, task=request.task, classes=has_classes)
    from gallery.datasets import load, names

    if request.data not in names() and Path(request.data).is_dir():  # such as "."
        raise ValueError(
            f"--data {request.data}: a folder; name a CSV file in it, or a data set of `zoo data`"
        )
    return load(request.data)


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


def learn_entries(model: Callable, arguments: Mapping[str, Any]) -> Standardiser | None:
    """Learn the scale of the real entries of a matrix, for priors expect numbers about 1.

    Args:
        model: any model.
        arguments: keyword arguments of the model.

    Returns:
        The standardiser, or None where the model takes no entries or they are not real numbers.
    """
    if not takes_entries(model) or "value" not in arguments:
        return None
    if not _has_real_entries(Program(model, **arguments)):
        return None
    return Standardiser.learn(np.asarray(arguments["value"]))


def start_entries(
    model: Callable, num_chains: int, arguments: Mapping[str, Any]
) -> dict[str, np.ndarray] | None:
    """Return initial values for real entries, or None where a draw of the prior will do.

    As many components are switched on as the entries allow. From a draw of the prior, a chain
    would have to add them one by one.

    Args:
        model: a model that takes entries.
        num_chains: number of chains.
        arguments: keyword arguments of the model.
    """
    program = Program(model, **arguments)
    switches = [
        site
        for site in map(program.sites.__getitem__, program.latent)
        if site.support is constraints.boolean
    ]
    if len(switches) != 1 or len(switches[0].shape) != 1 or not _has_real_entries(program):
        return None
    [width] = switches[0].shape
    columns = (np.asarray(arguments[name]) for name in ("row", "column", "value"))
    entries = Entries(*columns, None, arguments["shape"])
    start = np.arange(width) < num_initial_components(entries, width)
    shape = (num_chains, width) if num_chains > 1 else (width,)
    return {switches[0].name: np.broadcast_to(start, shape).astype(int)}


def _has_real_entries(program: Program) -> bool:
    return (
        len(program.observed) == 1
        and program.sites[program.observed[0]].support is constraints.real
    )


def _bind(
    entry: zoo.Entry, data: Dataset, features: Standardiser | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's keyword arguments, taken from the data by their names and from `--option`."""
    arrays = dict(data.arrays)
    given = arrays | _num_classes(data) | _entries(data)
    if features is not None:
        arrays["x"] = features.standardise(arrays["x"])
        given |= {"x": arrays["x"], "component": _component(data, arrays["x"])}
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
                "take for numbers, in alphabetical order. Write a column of 0 and 1 for each text, "
                "or choose a model of texts: aclass"
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


def _function(option: inspect.Parameter, name: Any, model: Callable) -> Callable:
    """The function of that name in the model's file, with the signature of the default."""
    wanted = _required(option.default)
    functions = inspect.getmembers(sys.modules[model.__module__], inspect.isfunction)
    known = {
        each: function
        for each, function in functions
        if not each.startswith("_") and _required(function)[: len(wanted)] == wanted
    }
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
