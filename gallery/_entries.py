"""Observed entries of a matrix, from what people keep them in.

    entries = read_entries(X)                        # an array with NaN where missing, or a scipy
                                                     sparse matrix: its stored entries
    entries = read_entries((rows, columns, values))  # or (rows, columns, successes, trials)

    by_key = read_keyed(frame)                       # a frame with columns user, item, rating, of
                                                     # any names; None where X is no such frame
    keys = Keys.learn(by_key)
    entries = read_entries(keys.placed(by_key), keys.shape)

Keys are any hashable values. One row and one column more than there are keys have no entries: they
stand for all keys that are not known. A masked entry of a masked array is missing. Refused by name:
entries that occur twice, places outside of the shape, values that are no finite numbers, no entries
at all. A row or a column without entries is allowed. Cost: a sort of the entries.
"""

from operator import index
from typing import Any, NamedTuple

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import scipy.sparse
from jaxtyping import Int, Shaped

__all__ = ["Entries", "Keyed", "Keys", "read_entries", "read_keyed", "read_keys", "read_places"]

MOST = np.iinfo(np.int32).max  # rows, or columns: their numbers are kept in 32 bits


class Entries(NamedTuple):
    """Vectors of one length, sorted by row."""

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    trials: np.ndarray | None
    shape: tuple[int, int]


def read_entries(
    X: Any, shape: tuple[int, int] | None = None, keys: "Keys | None" = None
) -> Entries:
    """The observed entries of a matrix.

    Args:
        X: a matrix, or a tuple of vectors.
        shape: that of the whole matrix; None: that of the array, or the smallest that has all
            entries.
        keys: of rows and columns, for messages.
    """
    row, column, value, trials, own = _taken_apart(X)
    row, column, shape = read_places(row, column, own if shape is None else _checked(shape))
    value, trials = _floats(value, "values"), None if trials is None else _floats(trials, "trials")
    for name, found in (("values", value), ("trials", trials)):
        if found is not None and found.shape != row.shape:
            raise ValueError(
                f"{name}: found shape {found.shape} beside {len(row)} rows, wanted one for each "
                "entry."
            )
    if not len(row):
        raise ValueError("X: found no observed entry, wanted at least one.")
    if not np.isfinite(value).all():
        i = int(np.argmax(~np.isfinite(value)))
        raise ValueError(
            f"values: found {value[i]} at {_at(row[i], column[i], keys)}; leave out what was not "
            "observed."
        )
    order = np.lexsort((column, row))
    row, column, value = row[order], column[order], value[order]
    if (twice := (np.diff(row) == 0) & (np.diff(column) == 0)).any():
        i = int(np.argmax(twice))
        raise ValueError(
            f"X: the entry at {_at(row[i], column[i], keys)} occurs twice ({value[i]:g}, "
            f"{value[i + 1]:g}); keep one of them."
        )
    return Entries(row, column, value, None if trials is None else trials[order], shape)


def _at(row: int, column: int, keys: "Keys | None") -> str:
    if keys is None:
        return f"row {row}, column {column}"
    own = (known.tolist()[at] for known, at in zip(keys, (row, column), strict=True))
    return "row {!r}, column {!r}".format(*own)


class Keyed(NamedTuple):
    """Entries by the keys of their row and column, in vectors of one length."""

    row: np.ndarray
    column: np.ndarray
    values: tuple[np.ndarray, ...]  # the value; or successes and trials


class Keys(NamedTuple):
    """The keys of rows and of columns, in the order of their places."""

    row: np.ndarray
    column: np.ndarray

    @classmethod
    def learn(cls, entries: Keyed) -> "Keys":
        """Learn the keys in the order in which they come."""
        return cls(*(np.asarray(pd.factorize(each)[1]) for each in (entries.row, entries.column)))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, with a row and a column for keys that are not known."""
        return len(self.row) + 1, len(self.column) + 1

    def placed(self, entries: Keyed) -> tuple[np.ndarray, ...]:
        """Return rows, columns and values as `read_entries` takes them."""
        return (*self.places(entries.row, entries.column), *entries.values)

    def places(
        self, row: Shaped[np.ndarray, " entry"], column: Shaped[np.ndarray, " entry"]
    ) -> tuple[Int[np.ndarray, " entry"], Int[np.ndarray, " entry"]]:
        """Return the places of keys; the last ones for those that are not known."""
        pairs = zip(("row", "column"), (row, column), self, strict=True)
        found = [_places_of(*pair) for pair in pairs]
        return found[0], found[1]

    def are_known(self, entries: Keyed) -> bool:
        """Return whether all keys of entries are known."""
        places = self.places(entries.row, entries.column)
        return all((at < len(own)).all() for at, own in zip(places, self, strict=True))


def read_keyed(X: Any, y: Any = None, num_values: int = 1) -> Keyed | None:
    """Return entries by key; None where X is a matrix or a tuple.

    Entries without a value are left out.

    Args:
        X: two columns of keys, where there is a y; or a frame of keys and values.
        y: the values, [entry], or successes and trials, [entry, 2]; None: they are in X.
        num_values: numbers of an entry, 2 for successes and trials.
    """
    is_frame = nw.dependencies.is_into_dataframe(X)
    if y is None and not (is_frame and _width(X) == 2 + num_values):
        return None
    columns = _columns_of(X)
    if y is not None:
        if len(columns) != 2:
            raise ValueError(
                f"X: found {len(columns)} columns beside y, wanted two: the keys of row and column "
                "of each entry. A matrix needs no y."
            )
        values = np.asarray(y)
        columns |= {f"y{i}": each for i, each in enumerate(np.atleast_2d(values.T))}
    (row, column), numbers = list(columns.values())[:2], list(columns.values())[2:]
    if len(numbers) != num_values:
        raise ValueError(f"y: found {len(numbers)} numbers for each entry, wanted {num_values}.")
    _check_keys(columns, is_frame and y is None)
    values = tuple(_floats(each, "values") for each in numbers)
    if len({len(each) for each in (row, column, *values)}) > 1:
        raise ValueError(f"y: found {len(values[0])} values beside {len(row)} rows of X.")
    is_there = ~np.any([np.isnan(each) for each in values], axis=0)
    return Keyed(row[is_there], column[is_there], tuple(each[is_there] for each in values))


def read_keys(X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of rows and columns: the first two columns of a frame or an array."""
    columns = _columns_of(X)
    if len(columns) < 2:
        raise ValueError(
            f"X: found {len(columns)} column(s), wanted two: the keys of row and column of each "
            "entry."
        )
    _check_keys(columns, False)
    row, column = list(columns.values())[:2]
    return row, column


def _width(X: Any) -> int:
    return nw.from_native(X, eager_only=True).shape[1]


def _columns_of(X: Any) -> dict[str, np.ndarray]:
    """The columns of a frame or of an array, by name."""
    if nw.dependencies.is_into_dataframe(X):
        frame = nw.from_native(X, eager_only=True)
        if frame.implementation.is_pyarrow():  # which has no NumPy array of missing categories
            kinds = frame.schema.items()
            texts = [name for name, dtype in kinds if dtype in (nw.Categorical, nw.Enum)]
            frame = frame.with_columns(nw.col(*texts).cast(nw.String)) if texts else frame
        return {f"column {one.name!r}": one.to_numpy() for one in frame.iter_columns()}
    X = np.asarray(X, object) if isinstance(X, list | tuple) else np.asarray(X)
    if X.ndim != 2:
        raise ValueError(
            f"X: found an array of {X.ndim} dimensions, wanted two columns: the keys of row and "
            "column of each entry."
        )
    return {f"column {j}": one for j, one in enumerate(X.T)}


def _check_keys(columns: dict[str, np.ndarray], may_be_matrix: bool) -> None:
    hint = (
        " A frame of three columns holds the row, the column and the value of entries; give a "
        "matrix of three columns as an array."
        if may_be_matrix
        else ""
    )
    for name, keys in list(columns.items())[:2]:
        if (missing := pd.isna(keys)).any():
            raise ValueError(f"X: {name} has no key in row {int(np.argmax(missing))}.{hint}")
        if keys.dtype.kind == "f" and (fraction := keys % 1 != 0).any():
            raise ValueError(f"X: {name} holds {keys[fraction][0]:g}, which is no key.{hint}")


def _places_of(
    name: str, keys: Shaped[np.ndarray, " entry"], known: Shaped[np.ndarray, " key"]
) -> Int[np.ndarray, " entry"]:
    """The places of keys among known ones; their number for others."""
    places = pd.Index(known, tupleize_cols=False).get_indexer(pd.Index(keys, tupleize_cols=False))
    if (new := places < 0).any():
        is_text = isinstance(keys[new][0], str)
        if len(known) and all(isinstance(key, str) is not is_text for key in known):
            raise ValueError(
                f"{name}: found the key {keys[new].tolist()[0]!r}, wanted one of the type of "
                f"{known.tolist()[0]!r}."
            )
    return np.where(new, len(known), places)


def read_places(
    rows: Any, columns: Any, shape: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Rows and columns as integers inside of the shape."""
    found = []
    for i, (name, given) in enumerate((("rows", rows), ("columns", columns))):
        place = np.atleast_1d(np.asarray(given))
        is_whole = place.dtype.kind in "iu" or (
            place.dtype.kind == "f" and np.array_equal(place, np.floor(place))
        )
        if place.ndim != 1 or not is_whole or np.ma.is_masked(given):
            masked = "masked " if np.ma.is_masked(given) else ""
            raise ValueError(
                f"{name}: found {masked}{place.dtype} of shape {place.shape}, wanted a vector of "
                "integers."
            )
        most = MOST if shape is None else shape[i]
        if len(place) and (place.min() < 0 or place.max() >= most):
            worst = place.min() if place.min() < 0 else place.max()
            why = "number them 0, 1, ..." if shape is None else f"the shape is {shape}"
            raise ValueError(f"{name}: found {worst}, wanted 0 to {most - 1}, {why}.")
        found.append(place.astype(np.int32))
    if len(found[0]) != len(found[1]):
        raise ValueError(
            f"rows, columns: found {len(found[0])} and {len(found[1])}, wanted as many of one as "
            "of the other."
        )
    smallest = int(found[0].max(initial=-1)) + 1, int(found[1].max(initial=-1)) + 1
    return found[0], found[1], smallest if shape is None else shape


def _taken_apart(X: Any):
    """Rows, columns, values, trials and shape of X; trials and shape may be None."""
    if scipy.sparse.issparse(X):
        X = X.tocoo()
        if X.ndim != 2:
            raise ValueError(f"X: found a sparse array of {X.ndim} dimensions, wanted a matrix.")
        return X.row, X.col, X.data, None, X.shape
    if isinstance(X, tuple):
        if len(X) not in (3, 4):
            raise ValueError(
                f"X: found a tuple of {len(X)}, wanted (rows, columns, values) or (rows, columns, "
                "successes, trials)."
            )
        return *X[:3], X[3] if len(X) == 4 else None, None
    X = _floats(X, "X")
    if X.ndim != 2:
        raise ValueError(
            f"X: found an array of {X.ndim} dimensions, wanted a matrix with NaN where an entry is "
            "missing, or a tuple."
        )
    row, column = np.nonzero(~np.isnan(X))
    return row, column, X[row, column], None, X.shape


def _floats(values: Any, name: str) -> np.ndarray:
    """Floats, NaN where one is masked or, in a table, not there."""
    try:
        if np.ma.isMaskedArray(values):
            return np.ma.filled(values.astype(float), np.nan)
        if hasattr(values, "iloc"):  # of pandas, whose own missing value is no float
            return values.to_numpy(dtype=float, na_value=np.nan)
        return np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: found what is no number ({error}), wanted numbers alone."
        ) from None


def _checked(shape: Any) -> tuple[int, int]:
    """Two sizes, as Python's integers, whose product does not overflow."""
    try:
        rows, columns = map(index, shape)
    except (TypeError, ValueError):
        rows = columns = 0
    if not (1 <= rows <= MOST and 1 <= columns <= MOST):
        raise ValueError(f"shape: found {shape!r}, wanted (rows, columns), two integers from 1 on.")
    return rows, columns
