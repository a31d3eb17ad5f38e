"""Tables in CSV files: the user's own, and the mixed tables of the UCI repository.

    train = read_csv("patients.csv", target="outcome")
    x_new = read_features("new_patients.csv", train.feature_names, train.categories)

Columns of numbers stay numbers. Columns of True and False become 1 and 0. Any other column is
categorical: its texts, sorted, become the codes 0, 1, ... A missing cell is empty or NA, and is NaN
in `x`. Errors name the file, the line and the column.
"""

import csv
import gzip
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gallery._dataset import Dataset

__all__ = [
    "Table",
    "TableError",
    "encode",
    "number_of",
    "read_csv",
    "read_features",
    "read_matrix",
    "read_table",
    "write_csv",
]

MISSING = frozenset({"", "NA", "NaN", "nan"})
# marks of missing values in other programs, in lower case
MARKS = frozenset({"?", "na", "n/a", "n.a.", "#n/a", "<na>", "null", "missing"})
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
MANY_VALUES = 10  # decimal numbers with more distinct values are a quantity, not class labels


class TableError(ValueError):
    """A table cannot be read; the message says where and what to change."""


class Table(NamedTuple):
    """Cells as text, and the line of each row."""

    where: str  # the file, or the data set
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: Sequence[int]  # the line of the file that holds each row

    def column(self, name: str) -> list[str]:
        """Return the cells of one column."""
        index = self.header.index(name)
        return [row[index] for row in self.rows]

    def place(self, row: int, name: str) -> str:
        """Return the place of a cell, for error messages."""
        return f"{self.where}, line {self.lines[row]}, column {name!r}"


def read_csv(
    path: str | Path,
    target: str | None = None,
    like: Dataset | None = None,
    task: str | None = None,
    classes: bool = True,
) -> Dataset:
    """Read a data set from a CSV file with a header.

    Cells of the class column are texts, integers or booleans; an empty cell is an unlabelled row,
    -1. Decimal numbers of many values are a quantity; then `y` is float, and NaN where the cell is
    empty.

    Args:
        path: the file.
        target: the class column; None: the last one.
        like: the data set that a model was fitted to. Target, features, categories and classes are
            then those of `like`, and an unknown class or category is an error.
        task: a column with the task of each row, which becomes the array `task`.
        classes: False: all numbers of the target are a quantity.
    """
    table = read_table(path)
    if target is None:
        target = (
            [name for name in table.header if name != task][-1]
            if like is None
            else like.target_name
        )
    for option, name in (("target", target), ("task", task)):
        if name is not None and name not in table.header:
            raise TableError(
                f"{path}: no column {name!r} to be the {option}; the columns are "
                f"{', '.join(table.header)}"
            )
    if task is None:
        return encode(table, target, like=like, classes=classes)
    data = encode(table, target, drop=(task,), like=like, classes=classes)
    codes, names = _tasks(table, task, None if like is None else like.categories[task])
    return replace(
        data, arrays={**data.arrays, "task": codes}, categories={**data.categories, task: names}
    )


def write_csv(data: Dataset, path: str | Path) -> None:
    """Write a file that `read_csv` reads as `data`: features, the task if any, and the class.

    Codes may differ after reading, for names are sorted then.

    Args:
        data: a data set with a table.
        path: the file.
    """
    if not {"x", "y"} <= set(data.arrays) or not data.feature_names:
        raise TableError(
            f"data set {data.name!r}: arrays {', '.join(data.arrays)}; wanted a table, x with "
            "names of its columns, and y"
        )
    columns = [
        (name, column, data.categories.get(name, ()))
        for name, column in zip(data.feature_names, data.x.T, strict=True)
    ]
    columns += (
        [("task", data.task, data.categories.get("task", ()))] if "task" in data.arrays else []
    )
    columns.append((data.target_name or "class", data.y, data.class_names))
    header = [name for name, _, _ in columns]
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise TableError(f"data set {data.name!r}: two columns are called {twice[0]!r}")
    with open(path, "w", encoding="utf-8", newline="") as file:
        cells = zip(*(_texts(column, names) for _, column, names in columns), strict=True)
        csv.writer(file, lineterminator="\n").writerows([header, *cells])


def _texts(column: np.ndarray, names: Sequence[str]) -> list[str]:
    """Cells of a column, empty where a number is NaN or a code is -1."""
    missing = column == -1 if np.issubdtype(column.dtype, np.integer) else np.isnan(column)
    text = lambda value: names[int(value)] if names else repr(value)
    return [
        "" if gone else text(value) for value, gone in zip(column.tolist(), missing, strict=True)
    ]


def read_matrix(path: str | Path, target: str | None = None) -> Dataset:
    """Read entries of a matrix from a CSV file, whose first two columns name row and column.

    Lines without a value are left out.

    Args:
        path: the file.
        target: the column of the entries; None: the last one.

    Returns:
        A data set with `rows`, `cols` and `values`; names are in `categories`.
    """
    table = read_table(path)
    target = table.header[-1] if target is None else target
    if target not in table.header or len(table.header) < 3:
        wanted = (
            f"wanted a column {target!r} and two others, of the row and of the column of each entry"
        )
        raise TableError(f"{path}: the columns are {', '.join(table.header)}; {wanted}")
    values = _numbers(table, target)
    items = [name for name in table.header if name != target][:2]
    categories = {
        name: _in_order([cell for cell in table.column(name) if cell not in MISSING])
        for name in items
    }
    places = [_coded(table, name, categories[name]) for name in items]
    for name, codes in zip(items, places, strict=True):
        if np.isnan(codes).any():
            raise TableError(
                f"{table.place(int(np.argmax(np.isnan(codes))), name)}: it is empty; wanted what "
                "the row or column is called"
            )
    rows, cols, values = (array[~np.isnan(values)] for array in (*places, values))
    stem = Path(path).name.removesuffix(".gz").removesuffix(".csv")
    shape = " x ".join(str(len(names)) for names in categories.values())
    return Dataset(
        name=stem,
        title=f"{stem}, {len(values)} entries of a matrix, {shape}",
        arrays={"rows": rows.astype(np.int64), "cols": cols.astype(np.int64), "values": values},
        target_name=target,
        categories=categories,
        description=f"Entries {target!r} by {' and '.join(map(repr, items))}.",
    )


def read_features(
    path: str | Path,
    feature_names: Sequence[str],
    categories: Mapping[str, Sequence[str]] | None = None,
) -> np.ndarray:
    """Read the features of new rows; other columns of the file are ignored.

    Args:
        path: the file.
        feature_names: columns of the file, in the order of the result.
        categories: column -> its categories in the order of their codes.

    Returns:
        x, [row, feature].
    """
    table, known = read_table(path), categories or {}
    _require(table, feature_names)
    return np.column_stack(
        [
            _coded(table, name, known[name]) if name in known else _numbers(table, name)
            for name in feature_names
        ]
    )


def read_table(path: str | Path) -> Table:
    """Read the cells of a CSV file, plain or gzipped, and check its form."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8 CSV"
        ) from None
    except csv.Error as error:
        raise TableError(
            f"{path}: not a CSV file ({error}); delimit cells by commas, quote those that hold "
            "commas or quotes"
        ) from None
    if not lines:
        raise TableError(f"{path}: the file is empty; wanted a header and rows")
    header = tuple(lines[0][1])
    _check_header(path, header)
    _check_delimiter(path, lines)
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise TableError(
                f"{path}, line {number}: {len(row)} cells where the header has {len(header)}; add "
                "or remove commas"
            )
    if len(lines) == 1:
        raise TableError(f"{path}: a header and no rows")
    return Table(
        str(path), header, [row for _, row in lines[1:]], [number for number, _ in lines[1:]]
    )


def encode(
    table: Table,
    target: str,
    categorical: bool = False,
    drop: Sequence[str] = (),
    like: Dataset | None = None,
    classes: bool = True,
) -> Dataset:
    """Encode a table as `x` and `y`.

    Args:
        table: the cells.
        target: the class column.
        categorical: whether every feature is a category, numbers included.
        drop: columns that are no features.
        like: as in `read_csv`.
        classes: as in `read_csv`.
    """
    if like is None:
        names = tuple(name for name in table.header if name != target and name not in drop)
        if not names:
            raise TableError(
                f"{table.where}: no feature columns beside the class column {target!r}"
            )
        kinds = {name: _categories(table, name, categorical) for name in names}
        categories = {name: kind for name, kind in kinds.items() if kind}
    else:
        names, categories = like.feature_names, dict(like.categories)
        _require(table, names)
    x = np.column_stack(
        [
            _coded(table, name, categories[name]) if name in categories else _numbers(table, name)
            for name in names
        ]
    )
    y, class_names = _target(table, target, like, classes)
    stem = Path(table.where).name.removesuffix(".gz").removesuffix(".csv")
    return Dataset(
        name=stem,
        title=f"{stem}, a table of {len(table.rows)} rows",
        arrays={"x": x, "y": y},
        feature_names=names,
        class_names=class_names,
        target_name=target,
        categories=categories,
        description=f"{len(names)} features of {len(table.rows)} rows; the target is {target!r}.",
    )


def _check_header(path: Path, header: tuple[str, ...]) -> None:
    if all(number_of(cell) is not None or cell in MISSING for cell in header):
        raise TableError(
            f"{path}, line 1: no header, only numbers; write the column names in the first line"
        )
    if "" in header:
        raise TableError(
            f"{path}, line 1: column {header.index('') + 1} has no name; name every column"
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise TableError(
            f"{path}, line 1: more than one column is called {', '.join(map(repr, repeated))}; "
            "rename all but one"
        )


def _check_delimiter(path: Path, lines: list[tuple[int, list[str]]]) -> None:
    """Refuse a single column in which every line holds another delimiter."""
    for delimiter in ";\t|":
        if len(lines[0][1]) == 1 and all(
            any(delimiter in cell for cell in row) for _, row in lines
        ):
            raise TableError(
                f"{path}, line 1: the cells are delimited by {delimiter!r}; the delimiter must be "
                "a comma"
            )


def _require(table: Table, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.header]
    if missing:
        found = ", ".join(table.header)
        raise TableError(
            f"{table.where}: no column {', '.join(map(repr, missing))}, which the model was fitted "
            f"to; found {found}"
        )


def number_of(cell: str) -> float | None:
    """Return the number in a cell, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if "_" in cell else value


def _categories(table: Table, name: str, categorical: bool) -> tuple[str, ...]:
    """The categories of a column, none if it holds numbers or booleans.

    Texts among more than nine times as many numbers are taken for typing errors, and are refused.
    So are usual marks of missing values among numbers.
    """
    cells = table.column(name)
    present = [cell for cell in cells if cell not in MISSING]
    texts = [cell for cell in present if number_of(cell) is None and cell not in BOOLEANS]
    if not categorical and (
        not any(number_of(cell) is None for cell in present)
        or all(cell in BOOLEANS for cell in present)
    ):
        return ()
    is_error = len(present) - len(texts) > 9 * len(texts) or (
        len(texts) < len(present) and _are_marks(texts)
    )
    if not categorical and texts and is_error:
        raise TableError(
            f"{table.place(cells.index(texts[0]), name)}: {texts[0]!r} is not a number, but "
            f"{len(present) - len(texts)} other cells of the column are; correct it, or leave it "
            "empty if it is missing; where these are categories, write them with a letter"
        )
    return _in_order(present)


def _are_marks(texts: Sequence[str]) -> bool:
    return all(text.casefold() in MARKS for text in texts)


def _in_order(values: Sequence[str]) -> tuple[str, ...]:
    """Distinct values, sorted as numbers where all are numbers."""
    distinct = sorted(set(values))
    if all(number_of(value) is not None for value in distinct):
        distinct.sort(key=float)
    return tuple(distinct)


def _numbers(table: Table, name: str) -> np.ndarray:
    values = np.full(len(table.rows), np.nan)
    for row, cell in enumerate(table.column(name)):
        if cell in MISSING:
            continue
        value = BOOLEANS.get(cell, number_of(cell))
        if value is None or math.isinf(value):
            raise TableError(
                f"{table.place(row, name)}: {cell!r} is not a finite number; correct it, or leave "
                "it empty if it is missing"
            )
        values[row] = value
    return values


def _coded(table: Table, name: str, categories: Sequence[str]) -> np.ndarray:
    codes = {category: float(code) for code, category in enumerate(categories)}
    values = np.full(len(table.rows), np.nan)
    for row, cell in enumerate(table.column(name)):
        if cell in MISSING:
            continue
        if cell not in codes:
            known = f"known are {', '.join(categories)}; leave it empty to count it as missing"
            raise TableError(
                f"{table.place(row, name)}: category {cell!r} was not seen in training; {known}"
            )
        values[row] = codes[cell]
    return values


def _tasks(
    table: Table, name: str, known: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The task of each row, and the names of the tasks."""
    names = (
        _in_order([cell for cell in table.column(name) if cell not in MISSING])
        if known is None
        else known
    )
    codes = _coded(table, name, names)
    if np.isnan(codes).any():
        raise TableError(
            f"{table.place(int(np.argmax(np.isnan(codes))), name)}: it is empty; every row is of a "
            "task"
        )
    return codes.astype(np.int64), names


def _target(
    table: Table, target: str, like: Dataset | None, classes: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """`y`, and the names of its classes (none for a quantity)."""
    cells = table.column(target) if target in table.header else []
    present = [cell for cell in cells if cell not in MISSING]
    if like is None and not present:
        raise TableError(
            f"{table.where}: the class column {target!r} is empty in every row; name another with "
            "target="
        )
    quantity = (
        (not classes or _is_quantity(present)) if like is None else like["y"].dtype.kind == "f"
    )
    if quantity:
        return _numbers(table, target), ()
    class_names = _in_order(present) if like is None else like.class_names
    if "-1" in class_names:
        raise TableError(
            f"{table.place(cells.index('-1'), target)}: -1 may be a class or mean that there is no "
            "label; leave the cell empty where the "
            "class is unknown, or give the class another name"
        )
    if like is None and (marks := [name for name in class_names if name.casefold() in MARKS]):
        raise TableError(
            f"{table.place(cells.index(marks[0]), target)}: {marks[0]!r} may be a class or mean "
            "that there is no label; leave the cell "
            "empty where the class is unknown, or give the class another name"
        )
    codes = {name: code for code, name in enumerate(class_names)}
    y = np.full(len(table.rows), -1, dtype=np.int64)
    for row, cell in enumerate(cells):
        if cell in MISSING:
            continue
        if cell not in codes:
            raise TableError(
                f"{table.place(row, target)}: unknown class {cell!r}; the classes are "
                f"{', '.join(class_names)}"
            )
        y[row] = codes[cell]
    return y, class_names


def _is_quantity(cells: Sequence[str]) -> bool:
    values = [number_of(cell) for cell in cells]
    numbers = {value for value in values if value is not None}
    return None not in values and len(numbers) > MANY_VALUES and any(value % 1 for value in numbers)
