"""Joint draws of all sites of one side of a crossed predictor: all rows, or all columns.

Given the other side, the items of a side (its rows, or its columns) are independent.

An entry e of an item has the row x[e] = (table[other[e]], residual[e], shared slopes[e]). All
entries of the item enter by gram = sum_e w[e] x[e] x[e]' alone. With D the scale of the columns of
the table, the step away from the present values of the item's sites has

    precision  = diag(fall) + D gram[columns, columns] D                                        (1)
    linear     = slope      + D gram[columns, residual]

with slope and fall of the prior. For any vectors a and b of an item, a' gram b is a sum over its
entries of products of linear functions of x: of slopes of amplitudes, which are the table times the
item's factors, and of residuals after the step. So the sums over the entries that components and
shared sites need come with the gram.

Items are sorted by their number of entries, padded to few lengths, and go through in chunks, so
that memory stays small. Cost: 1.2 x entries x columns^2 + items x columns^3; memory: `CHUNK`
numbers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.lax.linalg import cholesky, triangular_solve
from jaxtyping import Float, Int

__all__ = ["Entries", "PaddedItems", "grams", "pad_items", "steps"]

CHUNK = 2**18  # numbers of the padded table that are in memory at once


class PaddedItems(NamedTuple):
    """Items with about as many entries; one number beyond the last stands for none."""

    items: Any  # [chunk, item]
    entries: Any  # [chunk, item, entry]


def pad_items(
    index: np.ndarray, num_items: int, num_columns: int, shortest: int = 8, growth: float = 1.4
) -> tuple[PaddedItems, ...]:
    """The items of a side with their entries, padded to few lengths.

    Args:
        index: the item of each entry, 0 .. num_items - 1.
        num_items: how many the side has.
        num_columns: of the table.
        shortest: length.
        growth: factor from one length to the next.
    """
    order = np.argsort(index, kind="stable").astype(np.int32)
    counts = np.bincount(index, minlength=num_items)
    first, longest = np.append(np.cumsum(counts) - counts, 0), int(counts.max())
    lengths = [min(shortest, longest)]
    while lengths[-1] < longest:
        lengths.append(min(int(lengths[-1] * growth), longest))
    which, counts = np.searchsorted(lengths, counts), np.append(counts, 0)
    found = []
    for i in np.unique(which):
        items, length = np.flatnonzero(which == i), lengths[i]
        num_chunks = -(-len(items) // max(CHUNK // (length * num_columns), 1))
        size = -(-len(items) // num_chunks)
        padding = np.full(num_chunks * size - len(items), num_items)
        items = np.append(items, padding).astype(np.int32).reshape(num_chunks, size)
        place = np.minimum(first[items][..., None] + np.arange(length), len(order) - 1)
        is_entry = np.arange(length) < counts[items][..., None]
        entries = np.where(is_entry, order[place], len(order)).astype(np.int32)
        found.append(PaddedItems(items, entries))
    return tuple(found)


class Entries(NamedTuple):
    """The rows x of all entries, and one more of weight 0, for padding."""

    table: Array  # [item of the other side, column]
    other: Array  # the item of the other side of each entry
    own: Array  # residual and shared slopes, times the root of the weight [entry, number]
    root: Array  # of the weight

    @classmethod
    def of(
        cls,
        table: Float[Array, "other column"],
        other: Int[Array, " entry"],
        own: Float[Array, "entry number"],
        weight: Float[Array, " entry"],
    ) -> "Entries":
        """Pads the entries.

        Args:
            table: slopes of the predictor by item of the other side.
            other: that item of each entry.
            own: residuals, then shared slopes.
            weight: of each entry.
        """
        root = jnp.append(jnp.sqrt(weight), 0).astype(table.dtype)
        padded = jnp.pad(own, ((0, 1), (0, 0))) * root[:, None]
        return cls(table, jnp.append(other, 0), padded, root)


def grams(entries: Entries, which: Int[Array, "item entry"]) -> Float[Array, "item number number"]:
    """The gram of each item, from its entries."""
    rows = entries.table[entries.other[which]] * entries.root[which][..., None]
    rows = jnp.concatenate([rows, entries.own[which]], axis=-1)
    return jnp.einsum("nea,neb->nab", rows, rows)


def steps(
    rng_key: Array,
    entries: Entries,
    start: Float[Array, "item column"],
    prior: tuple[Array, Array],
    scale: Float[Array, " column"],
    items: tuple[PaddedItems, ...],
) -> tuple[Float[Array, "item column"], tuple[Array, Array]]:
    """A draw of the step of every item, and sums over the entries after it.

    Args:
        rng_key: a key.
        entries: their rows.
        start: the sites of the items.
        prior: its slope and fall at `start`, [item, column].
        scale: of the columns of the table.
        items: by `pad_items`.

    Returns:
        The steps; and the sums of w y y' and w y r, with y the table times the sites after the
        step, next to the shared slopes, and r the residual after the step.
    """
    (slope, fall), num_columns, num_shared = prior, start.shape[1], entries.own.shape[1] - 1
    keep = np.delete(np.arange(num_columns + 1 + num_shared), num_columns)
    drawn, zeros = jnp.zeros_like(start), jnp.zeros((len(keep) + 1,) * 2, start.dtype)
    sums = zeros, zeros[0]
    of_shared = lambda value, like: jnp.full((len(like), num_shared), value, like.dtype)
    for i, bucket in enumerate(items):

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
    """A draw from the Normal of (1).

    With L L' = precision, the root of [[precision, linear], [linear', corner]] ends with the row
    inverse(L) linear, for any corner that is large enough.
    """
    width, both = len(scale), jnp.append(scale, 1)
    corner = 1 + gram[:, width, width] + 2 * jnp.sum(slope**2 / fall, axis=1)
    diagonal = jnp.concatenate([fall, corner[:, None]], axis=1)[..., None]
    own = diagonal * jnp.eye(width + 1, dtype=fall.dtype)
    own = own.at[:, width, :width].add(slope)
    scaled = both[:, None] * gram[:, : width + 1, : width + 1] * both
    root = cholesky(scaled + own, symmetrize_input=False)
    half = root[:, width, :width] + random.normal(rng_key, slope.shape, slope.dtype)
    return triangular_solve(
        root[:, :width, :width], half[..., None], left_side=True, lower=True, transpose_a=True
    )[..., 0]
