"""Tables in CSV and Parquet files: the user's own, and the mixed tables of the UCI repository.

    train = read_csv("patients.csv", target="outcome")
    x_new = read_features("new_patients.csv", train.feature_names, train.categories)

Columns of numbers stay numbers. Columns of True and False become 1 and 0. Columns of dates, such as
2024-03-01, 01.03.2024 or 03/31/2024, become days since 1970. Any other column is categorical: its
texts, sorted, become the codes 0, 1, ... A missing cell is empty or NA, and is NaN in `x`. Errors
name the file, the line and the column.

Cells may be delimited by commas, semicolons, tabs or bars, and numbers may have decimal commas
where the delimiter is another. A text that is not UTF-8 is read as Windows-1252. What was found is
in the `notes` of a data set.
"""

import csv
import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np

from gallery._dataset import Dataset

__all__ = [
    "Table",
    "TableError",
    "days_of",
    "encode",
    "indicators",
    "number_of",
    "numbers_of",
    "read_csv",
    "read_features",
    "read_matrix",
    "read_table",
    "require_columns",
    "stem_of",
    "target_of",
    "with_dummies",
    "write_csv",
]

MISSING = frozenset({"", "NA", "NaN", "nan"})
# marks of missing values in other programs, in lower case
MARKS = frozenset({"?", "na", "n/a", "n.a.", "#n/a", "<na>", "null", "missing"})
DELIMITERS = ",;\t|"
YEAR_LAST = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4})((?:[ T].*)?)")
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # the column of rows without names
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
MOST_NAMED = 10  # categories in an error
LIKE_IDS = 20  # categories of a column whose texts may be ids
MANY_VALUES = 10  # decimal numbers with more distinct values are a quantity, not class labels


class TableError(ValueError):
    """A table cannot be read; the message says where and what to change."""


@dataclass(frozen=True)
class Table:
    """Cells as text, and the line of each row."""

    where: str  # the file, or the data set
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: Sequence[int]  # the line of the file that holds each row
    notes: tuple[str, ...] = ()  # how the file was read where that could be otherwise

    def column(self, name: str) -> list[str]:
        """Return the cells of one column."""
        index = self._places[name]
        return [row[index] for row in self.rows]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.header)}

    def place(self, row: int, name: str) -> str:
        """Return the place of a cell, for error messages."""
        return f"{self.where}, line {self.lines[row]}, column {name!r}"


def read_csv(
    path: str | Path,
    target: str | None = None,
    like: Dataset | None = None,
    task: str | None = None,
    classes: bool = True,
    drop: Sequence[str] = (),
    columns: Sequence[str] = (),
    id_column: str | None = None,
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
        drop: columns that are no features.
        columns: the features; none: all columns that are left.
        id_column: a column that names the rows, and is no feature; with `like` it may be absent.
    """
    table = read_table(path)
    if like is not None and id_column not in table.header:
        id_column = None
    if target is None:
        target = (
            [name for name in table.header if name not in (task, id_column, *drop)][-1]
            if like is None
            else like.target_name
        )
    uses = {"the target": (target,), "the task": (task,), "the id": (id_column,)}
    require_columns(table, uses | {"dropped": drop, "a feature": columns})
    if columns:
        kept = {*columns, target, task}
        drop = [*drop, *(name for name in table.header if name not in kept)]
    left_out = [name for name in (*drop, id_column, task) if name is not None]
    data = encode(table, target, drop=left_out, like=like, classes=classes)
    if id_column is not None:
        data = replace(data, ids=tuple(table.column(id_column)))
    if task is None:
        return data
    codes, names = _tasks(table, task, None if like is None else like.categories[task])
    return replace(
        data, arrays={**data.arrays, "task": codes}, categories={**data.categories, task: names}
    )


def require_columns(table: Table, uses: Mapping[str, Sequence[str | None]]) -> None:
    """Refuse the name of a column that the table lacks.

    Args:
        table: the cells.
        uses: use of columns, in words -> their names, of which None is none.
    """
    for use, names in uses.items():
        for name in names:
            if name is not None and name not in table.header:
                raise TableError(
                    f"{table.where}: no column {name!r} to be {use}; the columns are "
                    f"{', '.join(table.header)}"
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
    if twice := _repeated(header):
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
    _refuse_texts(table, target)
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
    stem = stem_of(path)
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
    dummies: Mapping[str, Sequence[str]] | None = None,
    takes_others: bool = False,
) -> np.ndarray:
    """Read the features of new rows; other columns of the file are ignored.

    Args:
        path: the file.
        feature_names: columns of the file, or of `with_dummies`, in the order of the result.
        categories: column -> its categories in the order of their codes.
        dummies: column -> its texts, which are columns of 0 and 1 in the result.
        takes_others: whether a text that is no category gets the code after the last one; else it
            is an error.

    Returns:
        x, [row, feature].
    """
    table = read_table(path)
    return _features(table, feature_names, categories or {}, dummies or {}, takes_others)


def _features(
    table: Table,
    feature_names: Sequence[str],
    categories: Mapping[str, Sequence[str]],
    dummies: Mapping[str, Sequence[str]],
    takes_others: bool = False,
) -> np.ndarray:
    known = {**categories, **dummies}
    made = {f"{name}={text}" for name, each in dummies.items() for text in each}
    names = [*dummies, *(name for name in feature_names if name not in made)]
    _require(table, names)
    x = np.column_stack(
        [
            _coded(table, name, known[name], takes_others)
            if name in known
            else _numbers(table, name)
            for name in names
        ]
    )
    columns = dict(indicators(x, names, dummies))
    return np.column_stack([columns[name] for name in feature_names])


def indicators(
    x: np.ndarray, names: Sequence[str], categories: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and values of each column of numbers; each text is a column of 0 and 1.

    Of two texts, which exclude each other, the second is a column.

    Args:
        x: features [row, feature], texts as codes.
        names: of the columns.
        categories: column -> its texts in the order of their codes.
    """
    for column, name in zip(x.T, names, strict=True):
        texts = categories.get(name, ())
        if not texts:
            yield name, column
        for code in range(int(len(texts) == 2), len(texts)):
            one = np.where(np.isnan(column), np.nan, column == code)
            yield f"{name}={texts[code]}", one


def with_dummies(data: Dataset) -> Dataset:
    """Return a table with columns of 0 and 1, such as `ward=west`, in place of each text column.

    Args:
        data: a table with features `x`.
    """
    texts = {name: data.categories[name] for name in data.feature_names if name in data.categories}
    each = list(indicators(data["x"], data.feature_names, data.categories))
    names = tuple(name for name, _ in each)
    if doubled := [name for name, times in Counter(names).items() if times > 1]:
        raise TableError(
            f"{data.name}: two columns would be called {doubled[0]!r}; rename the one of the table"
        )
    return replace(
        data,
        arrays=dict(data.arrays) | {"x": np.column_stack([values for _, values in each])},
        feature_names=names,
        categories={name: each for name, each in data.categories.items() if name not in texts},
        dummies=texts,
    )


def read_table(path: str | Path) -> Table:
    """Read the cells of a CSV file, plain or gzipped, or of a Parquet file, and check its form."""
    path = Path(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    text, notes = _text(path)
    delimiter = _delimiter(text)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        raise TableError(
            f"{path}: not a CSV file ({error}); quote cells that hold the delimiter "
            f"{delimiter!r} or quotes"
        ) from None
    if not lines:
        raise TableError(f"{path}: the file is empty; wanted a header and rows")
    header = tuple(lines[0][1])
    _check_header(path, header)
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise TableError(
                f"{path}, line {number}: {len(row)} cells where the header has {len(header)}; add "
                "or remove commas"
            )
    if len(lines) == 1:
        raise TableError(f"{path}: a header and no rows")
    rows = [row for _, row in lines[1:]]
    if delimiter != ",":
        notes += (f"cells delimited by {delimiter!r}",)
        rows, had_commas = _with_points(rows)
        notes += ("decimal commas",) if had_commas else ()
    return Table(str(path), header, rows, [number for number, _ in lines[1:]], notes)


def numbers_of(table: Table, name: str, wanted_by: str) -> np.ndarray:
    """Return a column of numbers: int64 where all are written as whole numbers, else float64.

    Args:
        table: the cells.
        name: of the column.
        wanted_by: what takes the column, for error messages.
    """
    if name not in table.header:
        raise TableError(
            f"{table.where}: no column {name!r}, which {wanted_by} takes; the columns are "
            f"{', '.join(table.header)}. Rename a column, or the argument"
        )
    cells = table.column(name)
    if texts := _categories(table, name, categorical=False):
        raise TableError(
            f"{table.where}: column {name!r} holds texts ({', '.join(map(repr, texts[:3]))}"
            f"{', ...' if len(texts) > 3 else ''}), where {wanted_by} takes numbers; write each "
            "text as a number, 0, 1, ..."
        )
    values = _numbers(table, name)
    is_whole = all(cell in BOOLEANS or re.fullmatch(r"[+-]?\d{1,9}", cell) for cell in cells)
    return values.astype(np.int64) if is_whole else values


def encode(
    table: Table,
    target: str | None,
    categorical: bool = False,
    drop: Sequence[str] = (),
    like: Dataset | None = None,
    classes: bool = True,
) -> Dataset:
    """Encode a table as `x` and `y`.

    Args:
        table: the cells.
        target: the class column; None: there is no `y`.
        categorical: whether every feature is a category, numbers included.
        drop: columns that are no features.
        like: as in `read_csv`.
        classes: as in `read_csv`.
    """
    if like is None:
        left_out = {target, *drop}
        names = tuple(name for name in table.header if name not in left_out)
        if not names:
            raise TableError(
                f"{table.where}: no feature columns beside the class column {target!r}"
            )
        kinds = {name: _categories(table, name, categorical) for name in names}
        categories = {name: kind for name, kind in kinds.items() if kind}
    else:
        names, categories = like.feature_names, dict(like.categories)
    dummies = {} if like is None else like.dummies
    arrays = {"x": _features(table, names, categories, dummies)}
    class_names: tuple[str, ...] = ()
    if target is not None:
        arrays["y"], class_names = target_of(table, target, like, classes)
    stem = stem_of(table.where)
    return Dataset(
        name=stem,
        title=f"{stem}, a table of {len(table.rows)} rows",
        arrays=arrays,
        feature_names=names,
        class_names=class_names,
        target_name=target or "",
        categories=categories,
        dummies=dummies,
        dates=tuple(name for name in names if name not in categories and _days(table, name)),
        notes=table.notes,
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
    if repeated := _repeated(header):
        raise TableError(
            f"{path}, line 1: more than one column is called {', '.join(map(repr, repeated))}; "
            "rename all but one"
        )


def _repeated(header: Sequence[str]) -> list[str]:
    return sorted(name for name, count in Counter(header).items() if count > 1)


def stem_of(path: str | Path) -> str:
    """Return the name of a file without the endings of tables."""
    return Path(path).name.removesuffix(".gz").removesuffix(".csv").removesuffix(".parquet")


def _read_parquet(path: Path) -> Table:
    """The cells as texts, as they would stand in a CSV file; a line is a row."""
    import narwhals.stable.v2 as nw

    try:
        frame = nw.read_parquet(str(path), backend="pyarrow")
    except ImportError as error:
        raise TableError(
            f"{path}: a Parquet file is read by the package pyarrow, which is not installed; "
            "install it, or save the table as CSV"
        ) from error
    except ValueError as error:
        raise TableError(f"{path}: not a Parquet file ({error})") from error
    kept = [name for name in frame.columns if not PANDAS_INDEX.fullmatch(name)]
    notes = ("the index of a data frame left out",) if len(kept) < len(frame.columns) else ()
    frame = frame.select(kept)
    _check_header(path, tuple(kept))
    if not len(frame):
        raise TableError(f"{path}: column names and no rows")
    text = lambda value: "" if value is None else str(value).strip()
    rows = [[text(value) for value in row] for row in frame.iter_rows()]
    return Table(str(path), tuple(kept), rows, range(1, len(rows) + 1), notes)


def _text(path: Path) -> tuple[str, tuple[str, ...]]:
    """The text of a file, and notes on how it is coded."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        content = file.read()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16"), ("read as UTF-16",)
    try:
        return content.decode("utf-8-sig"), ()
    except UnicodeDecodeError as error:
        try:
            return content.decode("cp1252"), ("not UTF-8: read as Windows-1252",)
        except UnicodeDecodeError:
            raise TableError(
                f"{path}: neither UTF-8 nor Windows-1252 ({error.reason} at byte {error.start}); "
                "save it as UTF-8 CSV"
            ) from None


def _delimiter(text: str) -> str:
    """The delimiter that gives the first line the most cells; a comma where several do."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    cells = lambda delimiter: len(next(csv.reader([first], delimiter=delimiter), []))
    return max(DELIMITERS, key=cells)


def _with_points(rows: list[list[str]]) -> tuple[list[list[str]], bool]:
    """The rows with decimal points, and whether they had decimal commas."""
    cells = [cell for row in rows for cell in row]
    has_commas = any(map(DECIMAL_COMMA.fullmatch, cells))
    if not has_commas or any(map(DECIMAL_POINT.fullmatch, cells)):
        return rows, False
    turned = lambda cell: cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell
    return [list(map(turned, row)) for row in rows], True


def _require(table: Table, names: Sequence[str]) -> None:
    known = set(table.header)
    if missing := [name for name in names if name not in known]:
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


def days_of(cell: str, day_first: bool = True) -> float | None:
    """Return the days since 1970 of a date, or None.

    Args:
        cell: a date, such as 2024-03-01, 01.03.2024 or 01/03/2024, with or without a time.
        day_first: whether the day comes before the month where slashes or hyphens divide them.
    """
    if match := YEAR_LAST.fullmatch(cell):
        day, mark, month, year, time = match.groups()
        if mark != "." and not day_first:
            day, month = month, day
        cell = f"{year}-{month:0>2}-{day:0>2}{time}"
    if not re.match(r"\d{4}-\d\d-\d\d", cell):
        return None
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - EPOCH).total_seconds() / 86400


def _days(table: Table, name: str) -> dict[str, float]:
    """The days since 1970 of each date in a column; empty where a cell is no date."""
    cells = {cell for cell in table.column(name) if cell not in MISSING}
    first, second = (_each_day(cells, day_first) for day_first in (True, False))
    if first and second and first != second:
        row, cell = next(
            (row, cell)
            for row, cell in enumerate(table.column(name))
            if first.get(cell) != second.get(cell)
        )
        raise TableError(
            f"{table.place(row, name)}: the day or the month of {cell!r} may come first, and no "
            "other cell of the column tells which; write dates as 2024-03-31, or leave the column "
            "out"
        )
    return first or second


def _each_day(cells: set[str], day_first: bool) -> dict[str, float]:
    found = {}
    for cell in cells:
        if (day := days_of(cell, day_first)) is None:
            return {}
        found[cell] = day
    return found


def _categories(table: Table, name: str, categorical: bool) -> tuple[str, ...]:
    """The categories of a column, none if it holds numbers, booleans or dates.

    Texts among more than nine times as many numbers are taken for typing errors, and are refused.
    So are usual marks of missing values among numbers.
    """
    cells = table.column(name)
    present = [cell for cell in cells if cell not in MISSING]
    texts = [cell for cell in present if number_of(cell) is None and cell not in BOOLEANS]
    if not categorical and (
        not any(number_of(cell) is None for cell in present)
        or all(cell in BOOLEANS for cell in present)
        or _days(table, name)
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
    days = _days(table, name)
    number = days.get if days else number_of
    for row, cell in enumerate(table.column(name)):
        if cell in MISSING:
            continue
        value = BOOLEANS.get(cell, number(cell))
        if value is None or math.isinf(value):
            raise TableError(
                f"{table.place(row, name)}: {cell!r} is not a finite number; correct it, or leave "
                "it empty if it is missing"
            )
        values[row] = value
    return values


def _coded(
    table: Table, name: str, categories: Sequence[str], takes_others: bool = False
) -> np.ndarray:
    """Codes of the categories, NaN where missing; the number after the last one for others."""
    codes = {category: float(code) for code, category in enumerate(categories)}
    cells = table.column(name)
    others = [cell for cell in cells if cell not in codes and cell not in MISSING]
    if others and not takes_others:
        more = f", ... {len(categories) - MOST_NAMED} more" if len(categories) > MOST_NAMED else ""
        is_id = len(set(others)) > len(set(cells)) / 2 and len(categories) >= LIKE_IDS
        raise TableError(
            f"{table.place(cells.index(others[0]), name)}: category {others[0]!r} was not seen in "
            f"training; known are {', '.join(categories[:MOST_NAMED])}{more}; "
            + (
                f"where it names rows, fit again with --id {name}"
                if is_id
                else "leave it empty where the model takes missing features"
            )
        )
    return np.array(
        [np.nan if cell in MISSING else codes.get(cell, float(len(codes))) for cell in cells]
    )


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


def target_of(
    table: Table, target: str, like: Dataset | None = None, classes: bool = True
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return `y`, and the names of its classes (none for a quantity).

    Args:
        table: the cells.
        target: the column.
        like: as in `read_csv`.
        classes: as in `read_csv`.
    """
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
        _refuse_texts(table, target)
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


def _refuse_texts(table: Table, target: str) -> None:
    """Refuse a target without a number, where a model predicts numbers."""
    texts = [cell for cell in table.column(target) if cell not in MISSING]
    is_text = lambda cell: number_of(cell) is None and cell not in BOOLEANS
    if texts and all(map(is_text, texts)) and not _days(table, target):
        raise TableError(
            f"{table.where}: this model predicts numbers, and the target {target!r} holds texts, "
            f"such as {texts[0]!r}; name a column of numbers by --target"
        )


def _is_quantity(cells: Sequence[str]) -> bool:
    values = [number_of(cell) for cell in cells]
    numbers = {value for value in values if value is not None}
    return None not in values and len(numbers) > MANY_VALUES and any(value % 1 for value in numbers)
