"""Columns of a table as a mixture model reads them, and the inverse.

    columns = Columns.learn(table)      # a kind for each column
    x = columns.encode(table)           # float64 [row, column], NaN where missing
    columns.decode(x)                   # a table such as the one that was learned from
    read_numbers(estimator, table)      # for estimators that take numbers alone

A table is an array, a list of rows, or a frame of pandas, polars or pyarrow. The latter two are
read as pandas frames, and results are given back in their type.

| a column of                | is modelled as                        | `x` holds                  |
|----------------------------|---------------------------------------|----------------------------|
| 0 and 1, or booleans       | Bernoulli, Beta(1/2, 1/2)             | 0 and 1                    |
| other numbers, or only NaN | normal, a quarter of the variance     | standardised numbers       |
|                            | expected within a group               |                            |
| texts or a pandas category | categorical, Dirichlet(1/2, ..., 1/2) | codes in sorted order, or  |
|                            |                                       | in that of the category    |

Standardising changes the density: log p(table) = log p(x) - `log_units(x)`. Cost: a pass over the
table, and a Python step for each text.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from gallery._standardise import Standardiser
from zoo.aclass import beta_bernoulli, dirichlet_categorical, mixed, normal_inverse_chi2

__all__ = [
    "BINARY",
    "NUMBER",
    "STANDARDISED",
    "Column",
    "Columns",
    "Mixed",
    "as_table",
    "component_of",
    "read_numbers",
]

BINARY, NUMBER, CATEGORY, PLAIN = "0 and 1", "a number", "a category", "any number"
UNSCALED = Standardiser(0.0, 1.0)
ID_ROWS = 20  # rows from which on a column of distinct texts is taken for an id
# The variance of a standardised column is 1: a quarter of it is expected within a group, the rest
# between the means of groups.
STANDARDISED = partial(normal_inverse_chi2, kappa=1 / 3, nu=4.0, scale=0.5)


@dataclass(frozen=True)
class Column:
    """What was learned of a column: its kind, and how to get values back from codes."""

    name: str  # for error messages
    kind: str
    dtype: Any
    values: tuple = ()  # of a category or of 0 and 1; a code is an index
    standardiser: Standardiser = UNSCALED

    def codes(self, column: Any) -> np.ndarray:
        """Return the entries as floats that are not standardised."""
        entries = _entries(self.name, column)
        if self.kind == CATEGORY:
            return self._coded(entries)
        if entries.dtype == object:
            found = next(entry for entry in entries if isinstance(entry, str))
            raise ValueError(
                f"{self.name}: found {found!r}, wanted {self.kind} as in the first call, or NaN "
                "where missing."
            )
        return entries

    def restored(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of floats that `codes` or a standardiser made."""
        if not self.values:
            return self.standardiser.restore(codes)
        values = np.empty(len(self.values), object)
        values[:] = self.values
        return values[codes.astype(int)]

    def _coded(self, entries: np.ndarray) -> np.ndarray:
        known = {value: code for code, value in enumerate(self.values)}
        each = zip(entries.tolist(), pd.isna(entries), strict=True)
        codes = np.array(
            [np.nan if missing else known.get(entry, -1) for entry, missing in each], float
        )
        if (codes == -1).any():
            row = int(np.argmax(codes == -1))
            raise ValueError(
                f"{self.name}: found {entries.tolist()[row]!r} in row {row}, which was not there "
                f"in the first call; known are {', '.join(map(repr, self.values))}. Put NaN where "
                "it may count as missing, or give the first call a pandas category that lists "
                "them all."
            )
        return codes


@dataclass(frozen=True, eq=False)
class Columns:
    """All columns of a table, and the type of the table."""

    columns: tuple[Column, ...]
    names: list[Any] | None  # of a data frame
    dtype: np.dtype | None  # of an array
    backend: str | None = None  # of a frame: "polars", "pyarrow"; None: pandas

    @classmethod
    def learn(cls, table: Any, *, plain: bool = False) -> "Columns":
        """Learn the kind of each column from the first rows.

        Args:
            table: a data frame, an array or a list of rows.
            plain: whether numbers stay as they are, for a component that the user has chosen.
        """
        backend, table = _backend(table), as_table(table)
        is_frame = isinstance(table, pd.DataFrame)
        names = (
            [f"column {name!r}" for name in table.columns]
            if is_frame
            else [f"column {j}" for j in range(table.shape[1])]
        )
        found = [
            _learned(name, column, plain) for name, column in zip(names, _each(table), strict=True)
        ]
        for column, entries in zip(found, _each(table), strict=True):
            is_text = column.kind == CATEGORY and len(table) >= ID_ROWS
            if is_text and len(pd.unique(np.asarray(entries, object))) == len(table):
                warnings.warn(
                    f"{column.name}: found {len(table)} distinct texts in {len(table)} rows, as "
                    "an id has, and each becomes a category of its own; leave the column out.",
                    UserWarning,
                    stacklevel=4,
                )
        kept = (list(table.columns), None) if is_frame else (None, table.dtype)
        return cls(tuple(found), *kept, backend)

    def encode(self, table: Any) -> np.ndarray:
        """Return x [row, column], NaN where missing."""
        table = as_table(table)
        if (
            isinstance(table, np.ndarray)
            and table.dtype.kind in "fiub"
            and not any(column.kind == CATEGORY for column in self.columns)
        ):
            codes = table.astype(float)
        else:
            codes = np.column_stack(
                [
                    column.codes(entries)
                    for column, entries in zip(self.columns, _each(table), strict=True)
                ]
            )
        self._refuse(codes)
        return self._standardiser.standardise(codes)

    def decode(self, x: np.ndarray) -> Any:
        """Return a table of the type that was learned from.

        Integers other than 0 and 1 become floats, as they are modelled.
        """
        each = [column.restored(codes) for column, codes in zip(self.columns, x.T, strict=True)]
        if self.dtype is not None:
            is_whole = self.dtype.kind in "iu" and not all(column.values for column in self.columns)
            return np.column_stack(each).astype(float if is_whole else self.dtype)
        if self.backend is not None:
            pairs = zip(self.names or (), self.columns, each, strict=True)
            data = {name: _series(name, column, x, self.backend) for name, column, x in pairs}
            return nw.from_dict(data).to_native()
        typed = zip(self.columns, each, strict=True)
        series = [
            pd.Series(values, dtype=column.dtype if column.values else float)
            for column, values in typed
        ]
        return pd.concat(series, axis=1).set_axis(self.names, axis=1)

    def fill(self, table: Any, x: np.ndarray) -> Any:
        """Return a copy of the table with missing entries taken from `x`."""
        given, backend, table = table, _backend(table), as_table(table)
        each = [column.restored(codes) for column, codes in zip(self.columns, x.T, strict=True)]
        if backend is not None:
            frame = nw.from_native(given, eager_only=True)
            filled = [
                _series(name, column, old.where(old.notna(), pd.Series(values)), backend)
                for (name, old), column, values in zip(
                    table.items(), self.columns, each, strict=True
                )
                if old.isna().any()
            ]
            return frame.with_columns(*filled).to_native()
        if isinstance(table, np.ndarray):
            missing = pd.isna(table)
            return (
                np.where(missing, np.column_stack(each), table).astype(table.dtype)
                if missing.any()
                else table.copy()
            )
        filled = table.copy()
        for j, (column, values) in enumerate(zip(self.columns, each, strict=True)):
            old = filled.iloc[:, j]
            if old.isna().any():
                filled.isetitem(
                    j, _room_for(column, old).where(old.notna(), pd.Series(values, index=old.index))
                )
        return filled

    def log_units(self, x: np.ndarray) -> float:
        """Return log p(x) - log p(table), the sum of log scales of all observed entries."""
        return float((~np.isnan(x)).sum(0) @ np.log(self._standardiser.scale))

    def component(self) -> Callable:
        """Return the component of the zoo for these columns."""
        return component_of(
            [
                len(column.values) if column.kind == CATEGORY else column.kind
                for column in self.columns
            ],
            STANDARDISED,
        )

    def _refuse(self, codes: np.ndarray) -> None:
        bad = np.isinf(codes) | (self._is_binary & ~np.isnan(codes) & (codes != 0) & (codes != 1))
        for row, j in np.argwhere(bad)[:1]:
            column = self.columns[j]
            if column.kind == BINARY:
                hint = (
                    "only 0 and 1 were there in the first call, so the column is modelled as "
                    "Bernoulli. Begin with rows that show more."
                )
            else:
                hint = "wanted finite numbers, or NaN where missing."
            raise ValueError(f"{column.name}: found {codes[row, j]:g} in row {row}; {hint}")

    @cached_property
    def _is_binary(self) -> np.ndarray:
        return np.array([column.kind == BINARY for column in self.columns])

    @cached_property
    def _standardiser(self) -> Standardiser:
        """The standardisers of all columns as one."""
        each = [column.standardiser for column in self.columns]
        return Standardiser(
            np.array([one.mean for one in each]), np.array([one.scale for one in each])
        )


@dataclass(frozen=True, eq=False)
class Mixed:
    """A component like `zoo.aclass.mixed` that can be pickled."""

    parts: dict[str, tuple[list[int], Callable]]

    def __call__(self, x: Any, at: Any) -> Any:
        return mixed(**self.parts)(x, at)


def component_of(
    kinds: Sequence[str | int], of_numbers: Callable = normal_inverse_chi2
) -> Callable:
    """Return the component of the zoo for columns of several kinds.

    Args:
        kinds: `BINARY`, `NUMBER`, or the number of categories, for each column.
        of_numbers: the component of columns of numbers; by default with the priors of the model.
    """
    parts: dict[str, tuple[list[int], Callable]] = {}
    for j, kind in enumerate(kinds):
        name, component = _part(kind, of_numbers)
        parts.setdefault(name, ([], component))[0].append(j)
    return next(iter(parts.values()))[1] if len(parts) == 1 else Mixed(parts)


def as_table(table: Any) -> Any:
    """Return a frame as one of pandas, and anything else as an array of two dimensions."""
    if _backend(table) is not None:
        frame = nw.from_native(table, eager_only=True)
        table = pd.DataFrame({column.name: _of_pandas(column) for column in frame.iter_columns()})
    if isinstance(table, pd.DataFrame):
        for what, count in (("sample(s)", table.shape[0]), ("feature(s)", table.shape[1])):
            if not count:
                raise ValueError(
                    f"Found a data frame with 0 {what} (shape={table.shape}) while a minimum of 1 "
                    "is required."
                )
        return table
    if isinstance(table, list | tuple):  # NumPy would convert numbers among texts to texts
        plain = np.asarray(table)
        table = np.asarray(table, object) if plain.dtype.kind == "U" else plain
    return check_array(table, dtype=None, ensure_all_finite=False)


def read_numbers(estimator: Any, table: Any, **options: Any) -> Any:
    """Return the table by `validate_data` of scikit-learn, after a check of the types of a frame.

    Args:
        estimator: that reads the table.
        table: an array or a frame.
        **options: of `validate_data`.
    """
    if nw.dependencies.is_into_dataframe(table):
        _refuse_others(nw.from_native(table, eager_only=True))
    return validate_data(estimator, table, **options)


def _refuse_others(frame: Any) -> None:
    """Name the columns that hold no numbers, and what to do."""
    others = {column.name: column.dtype for column in frame.iter_columns() if _is_other(column)}
    if others:
        found = ", ".join(f"{name!r} ({dtype})" for name, dtype in others.items())
        dates = [repr(name) for name, dtype in others.items() if dtype in (nw.Date, nw.Datetime)]
        of_texts = " Code texts by sklearn.preprocessing.OneHotEncoder in a ColumnTransformer."
        of_dates = f" Turn dates into days: {_in_days(dates[0])}." if dates else ""
        raise ValueError(
            f"X: wanted numbers alone, and these columns hold others: {found}. Leave them out, or "
            f"make them numbers.{of_dates}{of_texts} AClassClassifier takes texts as they are."
        )


def _in_days(label: str) -> str:
    """The pandas expression that turns dates into days since 1970.

    Args:
        label: of the column, as it stands between brackets.
    """
    moments = f"pd.to_datetime(X[{label}], utc=True)"
    return f'({moments} - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)'


def _is_other(column: Any) -> bool:
    if column.dtype in (nw.Categorical, nw.Enum):
        return not column.cat.get_categories().dtype.is_numeric()
    return column.dtype == nw.String or column.dtype.is_temporal()


def _backend(table: Any) -> Any:
    """The library of a frame that is not of pandas."""
    if isinstance(table, pd.DataFrame) or not nw.dependencies.is_into_dataframe(table):
        return None
    return nw.from_native(table, eager_only=True).implementation.value


def _of_pandas(column: Any) -> pd.Series:
    """A column of any library as one of pandas, with its categories."""
    if column.dtype in (nw.Categorical, nw.Enum):
        values = column.cast(nw.String).to_numpy()
        categories = column.cat.get_categories().to_list()
        is_ordered = column.dtype == nw.Enum
        return pd.Series(pd.Categorical(values, categories=categories, ordered=is_ordered))
    return pd.Series(column.to_numpy())


def _series(name: str, column: Column, values: Any, backend: Any) -> Any:
    """A complete column of a frame that is not of pandas."""
    values = np.asarray(values).tolist()
    if column.kind == CATEGORY:
        found = nw.new_series(name, values, nw.String, backend=backend)
        if not isinstance(column.dtype, pd.CategoricalDtype):
            return found
        return found.cast(nw.Enum(column.values) if column.dtype.ordered else nw.Categorical())
    if not column.values:
        return nw.new_series(name, values, nw.Float64, backend=backend)
    plain, kind = (bool, nw.Boolean) if column.values[0] is False else (int, nw.Int64)
    return nw.new_series(name, list(map(plain, values)), kind, backend=backend)


def _each(table: Any) -> list[Any]:
    return (
        list(table.T)
        if isinstance(table, np.ndarray)
        else [table.iloc[:, j] for j in range(table.shape[1])]
    )


def _learned(name: str, column: Any, plain: bool) -> Column:
    entries = _entries(name, column)
    if plain:
        if entries.dtype == object:
            raise ValueError(
                f"{name}: found texts; a component of your own reads numbers. Code them 0, 1, ..., "
                "or take component='auto'."
            )
        return Column(name, PLAIN, column.dtype)
    if entries.dtype == object:
        is_declared = isinstance(column.dtype, pd.CategoricalDtype)
        values = (
            column.dtype.categories.tolist()
            if is_declared
            else sorted(set(entries[~pd.isna(entries)]))
        )
        return Column(name, CATEGORY, column.dtype, tuple(values))
    seen = entries[~np.isnan(entries)]
    if len(seen) and np.isin(seen, (0, 1)).all():
        first = np.asarray(column, object)[~np.isnan(entries)][0]
        return Column(
            name,
            BINARY,
            column.dtype,
            (False, True) if isinstance(first, bool | np.bool_) else (0, 1),
        )
    if not len(seen) or np.isinf(seen).any():
        # `encode` refuses infinite numbers, and says where
        return Column(name, NUMBER, column.dtype)
    return Column(name, NUMBER, column.dtype, standardiser=Standardiser.learn(seen))


def _entries(name: str, column: Any) -> np.ndarray:
    """Entries of a column as floats, NaN where missing; as objects for texts and categories."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        if not len(dtype.categories):
            raise ValueError(
                f"{name}: a pandas category without categories; drop the column, or make it one of "
                "NaN."
            )
        return np.asarray(column, object)
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return (
            column.to_numpy(float, na_value=np.nan)
            if isinstance(column, pd.Series)
            else column.astype(float)
        )
    if not (pd.api.types.is_object_dtype(dtype) or pd.api.types.is_string_dtype(dtype)):
        is_date = pd.api.types.is_datetime64_any_dtype(dtype)
        label = name.removeprefix("column ")
        way = (
            f"Turn dates into days: {_in_days(label)}." if is_date else "Turn the column into one."
        )
        raise TypeError(
            f"{name}: found the type {dtype}, wanted numbers, booleans, texts or a category. {way}"
        )
    entries = np.asarray(column, object)
    seen = ~pd.isna(entries)
    for entry in entries[seen]:
        if not isinstance(entry, str | Real | np.bool_):
            raise TypeError(
                f"{name}: found {entry!r}; an argument must be a string or a number, or NaN where "
                "missing."
            )
    is_text = [isinstance(entry, str) for entry in entries[seen]]
    if any(is_text):
        if not all(is_text):
            text, number = entries[seen][np.argmax(is_text)], entries[seen][np.argmin(is_text)]
            raise ValueError(
                f"{name}: found the text {text!r} and the number {number}; wanted one or the other."
            )
        return entries
    numbers = np.full(len(entries), np.nan)
    numbers[seen] = entries[seen].astype(float)
    return numbers


def _part(kind: str | int, of_numbers: Callable) -> tuple[str, Callable]:
    if isinstance(kind, int):
        return f"category{kind}", partial(dirichlet_categorical, num_values=kind)
    return ("binary", beta_bernoulli) if kind == BINARY else ("number", of_numbers)


def _room_for(column: Column, old: pd.Series) -> pd.Series:
    """The column with a dtype that can hold the filled entries."""
    if column.kind == CATEGORY and isinstance(old.dtype, pd.CategoricalDtype):
        return old.cat.set_categories(column.values)
    return (
        old.astype("Float64")
        if not column.values and pd.api.types.is_integer_dtype(old.dtype)
        else old
    )
