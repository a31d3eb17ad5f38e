"""Joint draws of all sites of a side of a crossed predictor: the items are independent given the
other side.

An entry e of an item says what its row x[e] = (table[other[e]], residual[e], shared slopes[e])
says, and all entries of the item no more than gram = sum_e w[e] x[e] x[e]'. With D the scale of the
columns of the table, the step away from where the item's sites are has

    precision  = diag(fall) + D gram[columns, columns] D
    linear     = slope      + D gram[columns, residual]                                                       (1)

with slope and fall of the prior. For any numbers a and b of an item, a' gram b is a sum over its
entries of products of what is linear in x: of slopes of amplitudes, which are the table times the
item's factors, and of residuals after the step. So what components and shared sites need of the
entries costs nothing beside the gram.

Items are sorted into buckets by their number of entries, which are then padded to one length, and
go through in chunks, so that memory stays small. Cost: 1.2 x entries x columns^2 + items x
columns^3; memory: `CHUNK` numbers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.lax.linalg import cholesky, triangular_solve

__all__ = ["Bucket", "Entries", "buckets", "grams", "steps"]

SHORTEST, GROWTH = 8, 1.4  # lengths of the buckets
CHUNK = 2**18  # numbers of the padded table that are at hand at once


class Bucket(NamedTuple):
    """Items with about as many entries."""

    items: Any  # [chunk, item]; one beyond the last stands for none
    entries: Any  # [chunk, item, entry]; one beyond the last stands for none


def buckets(index: np.ndarray, num_items: int, num_columns: int) -> tuple[Bucket, ...]:
    """The items 0 .. num_items - 1 by the number of their entries."""
    order, counts = (
        np.argsort(index, kind="stable").astype(np.int32),
        np.bincount(index, minlength=num_items),
    )
    first = np.append(np.cumsum(counts) - counts, 0)
    lengths = [min(SHORTEST, int(counts.max()))]
    while lengths[-1] < counts.max():
        lengths.append(min(int(lengths[-1] * GROWTH), int(counts.max())))
    which, counts = np.searchsorted(lengths, counts), np.append(counts, 0)
    return tuple(
        _bucket(np.flatnonzero(which == i), length, order, first, counts, num_columns)
        for i, length in enumerate(lengths)
        if i in which
    )


def _bucket(
    items: np.ndarray,
    length: int,
    order: np.ndarray,
    first: np.ndarray,
    counts: np.ndarray,
    num_columns: int,
) -> Bucket:
    num_chunks = -(-len(items) // max(CHUNK // (length * num_columns), 1))
    size = -(-len(items) // num_chunks)
    items = (
        np.append(items, np.full(num_chunks * size - len(items), len(first) - 1))
        .astype(np.int32)
        .reshape(num_chunks, size)
    )
    place = np.minimum(first[items][..., None] + np.arange(length), len(order) - 1)
    return Bucket(
        items,
        np.where(np.arange(length) < counts[items][..., None], order[place], len(order)).astype(
            np.int32
        ),
    )


class Entries(NamedTuple):
    """What they say, and one more that says nothing, for padding."""

    table: Array  # [item of the other side, column]
    other: Array  # to which item of the other side each belongs
    own: Array  # residual and shared slopes, times the root of the weight
    root: Array  # of the weight

    @classmethod
    def of(cls, table: Array, other: Array, own: Array, weight: Array) -> "Entries":
        """`own` [entry, number]: residuals first, then shared slopes."""
        root = jnp.append(jnp.sqrt(weight), 0).astype(table.dtype)
        return cls(
            table, jnp.append(other, 0), jnp.pad(own, ((0, 1), (0, 0))) * root[:, None], root
        )


def grams(entries: Entries, which: Array) -> Array:
    """Of each item, from its entries [item, entry]."""
    rows = entries.table[entries.other[which]] * entries.root[which][..., None]
    rows = jnp.concatenate([rows, entries.own[which]], axis=-1)
    return jnp.einsum("nea,neb->nab", rows, rows)


def steps(
    rng_key: Array,
    entries: Entries,
    start: Array,
    prior: tuple[Array, Array],
    scale: Array,
    plan: tuple,
) -> tuple[Array, tuple]:
    """A draw of the step of every item, [item, column]; and with y the table times the sites after
    the step, next to the shared slopes, and r the residual after the step, the sums over all
    entries of w y y' and w y r.
    """
    (slope, fall), num_columns, num_shared = prior, start.shape[1], entries.own.shape[1] - 1
    drawn, keep = (
        jnp.zeros_like(start),
        np.delete(np.arange(num_columns + 1 + num_shared), num_columns),
    )
    sums = jnp.zeros((len(keep) + 1,) * 2, start.dtype), jnp.zeros(len(keep) + 1, start.dtype)
    of_shared = lambda value, like: jnp.full((len(like), num_shared), value, like.dtype)
    for i, bucket in enumerate(plan):

        def draw(sums, chunk):
            key, items, which = chunk
            at, gram = jnp.minimum(items, len(start) - 1), grams(entries, which)
            step = _step(key, gram, slope[at], fall[at], scale)
            zero = jnp.zeros_like(step[:, :1])
            y = jnp.concatenate([start[at] + step, zero, of_shared(1, step)], axis=1)
            r = jnp.concatenate([-scale * step, zero + 1, of_shared(0, step)], axis=1)
            square = jnp.sum(y[:, :, None] * gram * y[:, None, :], axis=0)
            linear = jnp.sum(y * jnp.einsum("nab,nb->na", gram, r), axis=0)
            return (sums[0] + square, sums[1] + linear), step

        keys = random.split(random.fold_in(rng_key, i), len(bucket.items))
        sums, found = lax.scan(draw, sums, (keys, bucket.items, bucket.entries))
        drawn = drawn.at[bucket.items.reshape(-1)].set(found.reshape(-1, num_columns), mode="drop")
    return drawn, (sums[0][keep][:, keep], sums[1][keep])


def _step(rng_key: Array, gram: Array, slope: Array, fall: Array, scale: Array) -> Array:
    """From the Normal of (1).

    With L L' = precision, the root of [[precision, linear], [linear', corner]] ends with the row
    inverse(L) linear, for any corner that is large enough.
    """
    width = len(scale)
    both = jnp.append(scale, 1)
    corner = 1 + gram[:, width, width] + 2 * jnp.sum(slope**2 / fall, axis=1)
    own = jnp.concatenate([fall, corner[:, None]], axis=1)[..., None] * jnp.eye(
        width + 1, dtype=fall.dtype
    )
    own = own.at[:, width, :width].add(slope)
    root = cholesky(
        both[:, None] * gram[:, : width + 1, : width + 1] * both + own, symmetrize_input=False
    )
    half = root[:, width, :width] + random.normal(rng_key, slope.shape, slope.dtype)
    return triangular_solve(
        root[:, :width, :width], half[..., None], left_side=True, lower=True, transpose_a=True
    )[..., 0]
