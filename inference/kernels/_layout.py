"""Rows laid out for sweeps: in buckets of rows that miss about as many entries, each cut into chunks of rows of one task whose labels tell
alike.

All chunks of a bucket have one shape, so that a bucket is one compiled loop, and memory is that of a chunk. A row that misses m entries
costs as one that misses the width of its bucket; the widths are chosen so that this costs least.
"""

from itertools import combinations
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from inference.assignment import Rows

__all__ = ["BLOCK", "LONGEST_CHUNK", "Bucket", "lay_out"]

MOST_BUCKETS = 5
BLOCK = 16  # places whose missing entries are worked out together
OVERHEAD = 2e5  # of a bucket, which is compiled, in the multiplications of a group
MANY_ROWS = 500
LONGEST_CHUNK = {"complete": 1024, "incomplete": 256}


class Bucket(NamedTuple):
    """All arrays [chunk, place, ...], but for the task."""

    row: Array  # number of the row, or that of all rows where the place is empty
    entries: Array  # u = (features, 1, extras), 0 where missing
    statistics: Array  # of the columns, one block after the other
    signs: Array  # [..., class]: the side of 0 on which a soft label lies; 0 where nothing is known
    missing: Array  # [..., hole]: which entries are missing, 0 where there are fewer
    num_missing: Array
    task: Array  # of all rows of a chunk [chunk]


def lay_out(rows: Rows, statistics: np.ndarray, dtype: str, shuffled: bool = False) -> tuple[Bucket, ...]:
    """`statistics` are [row, statistic]; rows are in their order, or in one drawn at random, the same each time."""
    is_missing = np.isnan(rows.features)
    count = is_missing.sum(1)
    ones = np.ones((len(count), 1))
    entries = np.concatenate([np.where(is_missing, 0, rows.features), ones, rows.extras], 1)
    order = np.argsort(~is_missing, axis=1, kind="stable")  # missing entries first
    kinds = np.unique(np.column_stack([rows.task, rows.signs != 0]), axis=0, return_inverse=True)[1].reshape(-1)
    found, narrower = [], -1
    for width in _widths(count, entries.shape[1]):
        chosen = np.flatnonzero((count > narrower) & (count <= width))
        chosen = np.random.default_rng(0).permutation(chosen) if shuffled else chosen
        narrower = width
        groups = [chosen[kinds[chosen] == kind] for kind in np.unique(kinds[chosen])]
        row = _places(groups, LONGEST_CHUNK["incomplete" if width else "complete"], len(count))
        at = np.minimum(row, len(count) - 1)  # an empty place looks like some row, and counts for nothing
        missing = np.where(np.arange(width) < count[at][..., None], order[at, :width], 0)
        numbers = (jnp.asarray(part, dtype) for part in (entries[at], statistics[at], rows.signs[at]))
        row, missing, num_missing, task = (jnp.asarray(part, jnp.int32) for part in (row, missing, count[at], rows.task[row[:, 0]]))
        found.append(Bucket(row, *numbers, missing, num_missing, task))
    return tuple(found)


def _places(groups: list[np.ndarray], longest: int, num_rows: int) -> np.ndarray:
    """Row numbers [chunk, place], each chunk of one group."""
    size = max(map(len, groups))
    if size < MANY_ROWS:  # no chunk of the longest size: code for it takes long to compile
        longest = max(longest // 2, 1)
    size = size if size <= BLOCK else min(longest, size + -size % BLOCK)
    padded = [np.pad(group, (0, -len(group) % size), constant_values=num_rows) for group in groups]
    return np.concatenate(padded).reshape(-1, size)


def _widths(count: np.ndarray, size: int) -> tuple[int, ...]:
    """The largest number of missing entries of each bucket, by what a sweep then costs; `size` is that of u."""
    sizes, how_many = _thinned(*np.unique(count, return_counts=True))

    def cost(widths: tuple[int, ...]) -> float:
        width = np.asarray(widths)[np.searchsorted(widths, sizes)]
        each = np.where(width == 0, size**2, 2 * size**2 + (width + 2.0) ** 3)
        return float(how_many @ each) + OVERHEAD * len(widths)

    inner = (chosen for number in range(MOST_BUCKETS) for chosen in combinations(sizes[:-1].tolist(), min(number, len(sizes) - 1)))
    return min(((*chosen, int(sizes[-1])) for chosen in inner), key=cost)


def _thinned(sizes: np.ndarray, how_many: np.ndarray, most: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Fewer sizes to choose among; the first and the last are kept."""
    ends = np.unique(np.linspace(0, len(sizes) - 1, min(most, len(sizes))).round().astype(int))
    return sizes[ends], np.add.reduceat(how_many, np.concatenate([[0], ends[:-1] + 1]))
