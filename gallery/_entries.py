"""Observed entries of a matrix, from what people keep them in.

    entries = read_entries(X)                        # an array with NaN where missing, or a scipy
                                                     sparse matrix: its stored entries
    entries = read_entries((rows, columns, values))  # or (rows, columns, successes, trials)

A masked entry of a masked array is missing. Refused by name: entries that occur twice, places
outside of the shape, values that are no finite numbers, no entries at all. A row or a column
without entries is allowed. Cost: a sort of the entries.
"""

from operator import index
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

__all__ = ["Entries", "read_entries", "read_places"]

MOST = np.iinfo(np.int32).max  # rows, or columns: their numbers are kept in 32 bits


class Entries(NamedTuple):
    """Vectors of one length, sorted by row."""

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    trials: np.ndarray | None
    shape: tuple[int, int]


def read_entries(X: Any, shape: tuple[int, int] | None = None) -> Entries:
    """The observed entries of a matrix.

    `shape` is that of the whole matrix. None: that of the array, or the smallest that has all
    entries.
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
            f"values: found {value[i]} at row {row[i]}, column {column[i]}; leave out what was not "
            "observed."
        )
    order = np.lexsort((column, row))
    row, column, value = row[order], column[order], value[order]
    if (twice := (np.diff(row) == 0) & (np.diff(column) == 0)).any():
        i = int(np.argmax(twice))
        raise ValueError(
            f"X: the entry at row {row[i]}, column {column[i]} occurs twice ({value[i]:g}, "
            f"{value[i + 1]:g}); keep one of them."
        )
    return Entries(row, column, value, None if trials is None else trials[order], shape)


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
