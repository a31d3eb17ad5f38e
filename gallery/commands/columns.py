"""From the columns of a table to the arguments of a model file.

An argument that is named as a column is this column. Otherwise `x`, or `X`, is the matrix of the
columns that are left, and `y`, or `Y`, is the target: that of `--target`, else the last of them.
The model gets all numbers as they stand in the table.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gallery._dataset import Dataset
from gallery.commands.model_file import MATRIX, RESPONSE, short
from gallery.commands.models import parse
from gallery.commands.request import Request
from gallery.commands.wording import some
from gallery.tables import (
    Table,
    encode,
    numbers_of,
    read_features,
    read_table,
    require_columns,
    stem_of,
    target_of,
    with_dummies,
)

__all__ = ["new_rows", "read_columns"]


class _Roles(NamedTuple):
    """What the columns are for the arguments of a model; "" for an argument that it lacks."""

    named: tuple[str, ...]  # columns that are arguments
    matrix: str  # the argument of the features
    features: tuple[str, ...]
    response: str  # the argument of the target
    target: str


def read_columns(request: Request, model: Callable) -> Dataset:
    """Return the arguments that a table has for a model, as arrays of their names.

    Args:
        request: names the table, and its target and features where they are given.
        model: the model.
    """
    table, model_name = read_table(request.data), short(request.model)
    uses = {"the target": [request.target], "dropped": request.drop, "a feature": request.columns}
    require_columns(table, uses | {"the id": [request.id]})
    parameters = {
        name: p
        for name, p in inspect.signature(model).parameters.items()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    options = parse(request.options)
    roles = _roles([name for name in parameters if name not in options], table, request)
    if request.columns and not roles.matrix:
        raise ValueError(
            f"--columns: model {model_name} takes no x, the matrix of features; omit it"
        )
    if request.target and request.target not in (*roles.named, roles.target):
        raise ValueError(
            f"--target {request.target}: model {model_name} takes neither y, the target, nor an "
            "argument of this name; omit it"
        )
    data = _features(table, roles, request.dummies)
    arrays = {name: numbers_of(table, name, model_name) for name in roles.named}
    if roles.features:
        arrays[roles.matrix] = data["x"]
    if roles.target and "num_classes" in parameters:
        arrays[roles.response], class_names = target_of(table, roles.target)
        data = replace(data, class_names=class_names)
    elif roles.target:
        arrays[roles.response] = numbers_of(
            table, roles.target, f"{model_name}, as its {roles.response},"
        )
    given = {*arrays, *options, *(["num_classes"] if data.class_names else [])}
    lacking = [n for n, p in parameters.items() if n not in given and p.default is p.empty]
    if lacking:
        raise ValueError(
            f"model {model_name} wants {', '.join(map(repr, lacking))}, for which {table.where} "
            f"has no column: its columns are {', '.join(table.header)}. Rename a column or the "
            f"argument, or give a number: --option {lacking[0]}=8"
        )
    words = _in_words(table, roles)
    return replace(data, arrays=arrays, target_name=roles.target, description=words)


def _roles(names: Sequence[str], table: Table, request: Request) -> _Roles:
    columns, left_out = set(table.header), {*request.drop, request.id}
    matrix = next((n for n in names if n in MATRIX and (n not in columns or request.columns)), "")
    response = next((name for name in names if name in RESPONSE), "")
    named = tuple(n for n in names if n in columns and n not in (matrix, response, *left_out))
    rest = [name for name in table.header if name not in (*named, *left_out)]
    target = ""
    if response:
        target = request.target or (response if response in rest else next(reversed(rest), ""))
    features = [name for name in request.columns or rest if name != target]
    return _Roles(named, matrix, tuple(features) if matrix else (), response, target)


def _features(table: Table, roles: _Roles, with_dummy_columns: bool) -> Dataset:
    """The table of the features alone; empty where the model takes no matrix."""
    if not roles.features:
        return Dataset(stem_of(table.where), "", {}, notes=table.notes)
    data = encode(table, None, drop=[name for name in table.header if name not in roles.features])
    return with_dummies(data) if with_dummy_columns else data


def _in_words(table: Table, roles: _Roles) -> str:
    """What the arguments are, so that a misreading is seen."""
    parts = [f"as they are named: {some(roles.named, 8)}"] if roles.named else []
    parts += [f"{roles.matrix} of {some(roles.features, 8)}"] if roles.features else []
    parts += [f"{roles.response} of {roles.target!r}"] if roles.target else []
    used = {*roles.named, *roles.features, roles.target}
    unused = [name for name in table.header if name not in used]
    return "; ".join(parts + ([f"not used: {some(unused, 8)}"] if unused else []))


def new_rows(
    path: str, data: Dataset, observed: Collection[str], name: str
) -> dict[str, np.ndarray]:
    """Return the arguments of a model for new rows, of the kinds that the fit had.

    Args:
        path: of the table of new rows.
        data: that of the fit.
        observed: arguments that the model observed, and that new rows lack.
        name: of the model.
    """
    table, found = read_table(path), {}
    for argument, values in data.arrays.items():
        if argument in observed:
            continue
        if values.ndim == 2:
            found[argument] = read_features(path, data.feature_names, data.categories, data.dummies)
        else:
            column = numbers_of(table, argument, short(name))
            found[argument] = column.astype(np.result_type(column, values))
    return found
