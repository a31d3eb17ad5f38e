"""Joint draws of all sites of a side of a crossed predictor: the items are independent given the other side.

For the item with entries e, of residuals r[e] and weights w[e], the step d away from where its sites are has

    precision  = diag(fall) + sum_e w[e] table[other[e]] table[other[e]]'
    linear     = slope      + sum_e w[e] table[other[e]] r[e]                                                 (1)

with slope and fall of the prior. Items are sorted into buckets by their number of entries, which are then padded to one length, and go
through in chunks, so that memory stays small. Cost: 1.2 x entries x columns^2 + items x columns^3; memory: `CHUNK` numbers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.lax.linalg import cholesky, triangular_solve

__all__ = ["Bucket", "buckets", "normal_equations", "steps"]

SHORTEST, GROWTH = 8, 1.4  # lengths of the buckets
CHUNK = 2**18  # numbers of the padded table that are at hand at once


class Bucket(NamedTuple):
    """Items with about as many entries."""

    items: Any  # [chunk, item]; one beyond the last stands for none
    entries: Any  # [chunk, item, entry]; one beyond the last stands for none


def buckets(index: np.ndarray, num_items: int, num_columns: int) -> tuple[Bucket, ...]:
    """The items 0 .. num_items - 1 by the number of their entries."""
    order, counts = np.argsort(index, kind="stable").astype(np.int32), np.bincount(index, minlength=num_items)
    first = np.append(np.cumsum(counts) - counts, 0)
    lengths = [min(SHORTEST, int(counts.max()))]
    while lengths[-1] < counts.max():
        lengths.append(min(int(lengths[-1] * GROWTH), int(counts.max())))
    which, counts = np.searchsorted(lengths, counts), np.append(counts, 0)
    return tuple(
        _bucket(np.flatnonzero(which == i), length, order, first, counts, num_columns) for i, length in enumerate(lengths) if i in which
    )


def _bucket(items: np.ndarray, length: int, order: np.ndarray, first: np.ndarray, counts: np.ndarray, num_columns: int) -> Bucket:
    num_chunks = -(-len(items) // max(CHUNK // (length * num_columns), 1))
    size = -(-len(items) // num_chunks)
    items = np.append(items, np.full(num_chunks * size - len(items), len(first) - 1)).astype(np.int32).reshape(num_chunks, size)
    place = np.minimum(first[items][..., None] + np.arange(length), len(order) - 1)
    return Bucket(items, np.where(np.arange(length) < counts[items][..., None], order[place], len(order)).astype(np.int32))


def normal_equations(table: Array, other: Array, residual: Array, weight: Array, entries: Array) -> tuple[Array, Array]:
    """The sums of (1) over entries [item, entry], of which those beyond the last count nothing."""
    is_there = entries < len(residual)
    entries = jnp.minimum(entries, len(residual) - 1)
    rows = table[other[entries]]
    weighted = rows * jnp.where(is_there, weight[entries], 0)[..., None]
    return jnp.einsum("ned,nef->ndf", weighted, rows), jnp.einsum("ned,ne->nd", weighted, residual[entries])


def steps(rng_key: Array, table: Array, other: Array, residual: Array, weight: Array, prior: tuple[Array, Array], plan: tuple) -> Array:
    """A draw of the step of every item, [item, column]."""
    slope, fall = prior
    last = len(slope) - 1
    drawn = jnp.zeros_like(slope)
    for i, bucket in enumerate(plan):

        def draw(chunk):
            key, items, entries = chunk
            precision, linear = normal_equations(table, other, residual, weight, entries)
            at = jnp.minimum(items, last)
            root = cholesky(precision + fall[at][..., None] * jnp.eye(fall.shape[1], dtype=fall.dtype))
            half = triangular_solve(root, (linear + slope[at])[..., None], left_side=True, lower=True)
            half += random.normal(key, half.shape, half.dtype)
            return triangular_solve(root, half, left_side=True, lower=True, transpose_a=True)[..., 0]

        keys = random.split(random.fold_in(rng_key, i), len(bucket.items))
        found = lax.map(draw, (keys, bucket.items, bucket.entries))
        drawn = drawn.at[bucket.items.reshape(-1)].set(found.reshape(-1, slope.shape[1]), mode="drop")
    return drawn
