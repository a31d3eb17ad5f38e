"""From a data set or a table to the arguments of a model."""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gallery._dataset import Dataset
from gallery._units import Units
from gallery.commands.entries import entry_arguments, takes_entries
from gallery.commands.models import unknown
from gallery.commands.request import Request, is_table

__all__ = ["bind", "read_data", "scale_features"]


def read_data(request: Request, model: Callable) -> Dataset:
    """The named data set, or the CSV file, which holds rows of features, or entries of a matrix
    where the model is one of those.
    """
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


def scale_features(data: Dataset, raw: bool) -> Units | None:
    """Units of the columns that hold quantities; categories, and columns of 0 and 1, stay as they
    are: mean 0, scale 1.

    None where the data have no table `x` of floats.
    """
    x = data.arrays.get("x")
    if x is None or x.ndim != 2 or x.dtype.kind != "f":
        return None
    mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
    for column in range(x.shape[1]) if not raw else ():
        present = x[~np.isnan(x[:, column]), column]
        is_category = bool(data.feature_names) and data.feature_names[column] in data.categories
        if is_category or np.isin(present, (0.0, 1.0)).all():
            continue
        mean[column], scale[column], _ = Units.learn(present)
    return Units(mean, scale)


def bind(
    model: Callable, name: str, data: Dataset, scaling: Units | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's keyword arguments: arrays by their names, `num_classes`, a `component` for the
    columns, and what `--option` says.
    """
    arrays = dict(data.arrays)
    if scaling is not None:
        arrays["x"] = scaling.coded(arrays["x"])
    given = (
        arrays
        | _num_classes(data)
        | entry_arguments(data)
        | ({} if scaling is None else {"component": _component(data, arrays["x"])})
    )
    parameters = [
        p
        for p in inspect.signature(model).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    for key in keywords:
        if key in arrays:
            raise ValueError(
                f"--option {key}: {name} takes {key!r} from the data set {data.name!r}; leave it "
                "out"
            )
    named = {
        p.name: _function(p, keywords[p.name], model)
        for p in parameters
        if p.name in keywords and inspect.isfunction(p.default)
    }
    arguments = (
        {p.name: given[p.name] for p in parameters if p.name in given} | dict(keywords) | named
    )
    if "component" not in (names := [p.name for p in parameters]):
        _refuse_texts(name, data)
    if "task" in names and "task" not in arguments:
        raise ValueError(
            f"model {name} wants the task of each row: name its column with --task, or choose a "
            "data set that has tasks"
        )
    lacking = [p.name for p in parameters if p.name not in arguments and p.default is p.empty]
    if lacking:
        raise ValueError(
            f"model {name} needs {', '.join(map(repr, lacking))}, which the data set {data.name!r} "
            "lacks: it has "
            f"{', '.join(given)}. A CSV file comes as x and y. Choose other data, or give numbers "
            "with --option"
        )
    return arguments


def _refuse_texts(name: str, data: Dataset) -> None:
    """Of more than two kinds: where there is no component for categories, their codes would
    count as quantities.
    """
    from gallery.tables import number_of

    for column in data.feature_names:
        texts = data.categories.get(column, ())
        if len(texts) > 2 and any(number_of(text) is None for text in texts):
            shown = ", ".join(map(repr, texts[:3])) + (", ..." if len(texts) > 3 else "")
            raise ValueError(
                f"--data {data.name}: column {column!r} holds texts ({shown}), which {name} would "
                "take for numbers, in the order of the "
                "alphabet. Write a column of 0 and 1 for each text, or choose a model of texts: "
                "aclass"
            )


def _component(data: Dataset, x: np.ndarray) -> Callable:
    """What models each column: by its categories, by whether it holds 0 and 1, else by a normal
    distribution.
    """
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
    """The function that an option names: one of the model's own file that takes what the default
    takes.
    """
    wanted = _needed(option.default)
    functions = inspect.getmembers(sys.modules[model.__module__], inspect.isfunction)
    known = {
        each: function
        for each, function in functions
        if not each.startswith("_") and _needed(function)[: len(wanted)] == wanted
    }
    if name not in known:
        raise ValueError(unknown(option.name, str(name), known))
    return known[name]


def _needed(function: Callable) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]


def _num_classes(data: Dataset) -> dict[str, int]:
    """The number of classes, where the target has classes."""
    y = data.arrays.get("y")
    if data.class_names:
        return {"num_classes": len(data.class_names)}
    if y is not None and y.dtype.kind in "iu" and y.ndim == 1:
        return {"num_classes": int(y.max()) + 1}
    return {}
