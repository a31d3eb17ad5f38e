"""Joint draws of all sites of one side of a crossed predictor.

Given the other side, the items are independent. An entry e of an item has the vector
x[e] = (table[other[e]], residual[e], shared slopes[e]). The entries of the item enter only by
gram = sum_e w[e] x[e] x[e]'. With D the scale of the columns of the table, the step away from the
present values of the item's sites is Normal, with

    precision  = diag(fall) + D gram[columns, columns] D                                        (1)
    linear     = slope      + D gram[columns, residual]

where slope is the gradient of the log prior at the present values, and fall is its precision. For
any vectors a and b of an item, a' gram b is the sum of (a' x) (b' x) over its entries. The slopes
of amplitudes, which are the table times the item's factors, and the residuals after the step are
such linear functions of x. So the gram also gives the sums over the entries that components and
shared sites need. By (1) a column of scale 0, and an item without entries, keeps its prior.

Items are sorted by their number of entries, and drawn a block at a time. The entries of a block are
in layers, each with a few entries of every item of the block, and the grams are sums over the
layers. So all items share one program, and its shapes hardly depend on which entries are observed.
Cost: 1.3 x entries x columns^2 + items x columns^3, where columns are those in use, rounded up to a
power of two; memory: `CHUNK` numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax.linalg import cholesky, triangular_solve
from jaxtyping import Bool, Float, Int

__all__ = ["Entries", "PaddedItems", "grams", "pad_items", "rounded_up", "steps", "steps_in_use"]

CHUNK = 2**18  # numbers of the grams, or of the padded table, that are in memory at once
MOST_ITEMS = 128  # of a block
MOST_LAYERS = 256  # whose number is rounded up to a power of two


class PaddedItems(NamedTuple):
    """The items of a side with their entries; the number after the last one is padding."""

    items: Any  # [block, item], the items with the most entries first
    place: Any  # of each item in `items`, flattened
    num_blocks: Any  # blocks whose items have entries
    ends: Any  # [1 + block]: the layers of a block begin at its end of the block before
    block: Any  # [layer]: the block; the number after the last one is padding
    entries: Any  # [layer, item, entry]


def pad_items(index: np.ndarray, num_items: int, num_columns: int) -> PaddedItems:
    """The items of a side with their entries.

    Args:
        index: the item of each entry, 0 .. num_items - 1.
        num_items: how many the side has.
        num_columns: of the table.
    """
    order = np.argsort(index, kind="stable").astype(np.int32)
    counts = np.append(np.bincount(index, minlength=num_items), 0)
    first = np.cumsum(counts) - counts
    # entries of an item in a layer: a quarter of the mean number
    width = max(4, 2 ** int(np.log2(max(len(index) / num_items / 4, 1))))
    most = min(MOST_ITEMS, max(CHUNK // (num_columns * max(num_columns, width)), 1))
    num_blocks = -(-num_items // most)
    size = -(-num_items // num_blocks)
    items = np.full(num_blocks * size, num_items)
    items[:num_items] = np.argsort(-counts[:-1], kind="stable")
    place, items = np.argsort(items)[:num_items], items.reshape(num_blocks, size)
    layers = -(-counts[items].max(axis=1) // width)
    ends = np.append(0, np.cumsum(layers))
    block = np.repeat(np.arange(num_blocks), layers)
    turn = np.arange(len(block)) - ends[block]
    at = turn[:, None, None] * width + np.arange(width)
    own = items[block][..., None]
    entries = order[np.minimum(first[own] + at, len(order) - 1)]
    entries = np.where(at < counts[own], entries, len(order))
    few = 2 ** int(np.ceil(np.log2(max(len(block), 4))))
    more = (few if few <= MOST_LAYERS else rounded_up(len(block))) - len(block)
    found = PaddedItems(
        items,
        place,
        np.count_nonzero(layers),
        ends,
        np.pad(block, (0, more), constant_values=num_blocks),
        np.pad(entries, ((0, more), (0, 0), (0, 0)), constant_values=len(order)),
    )
    return jax.device_put(PaddedItems(*(np.asarray(each, np.int32) for each in found)))


def rounded_up(size: int) -> int:
    """The next of the sizes 1, ..., 8, 10, 12, 14, 16, 20, ...: four from one power of two on."""
    step = 2 ** max(int(np.ceil(np.log2(size))) - 3, 0)
    return -(-size // step) * step


class Entries(NamedTuple):
    """The vectors x of all entries, and one more of weight 0, for padding."""

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
    """The gram of some entries of each item."""
    rows = entries.table[entries.other[which]] * entries.root[which][..., None]
    rows = jnp.concatenate([rows, entries.own[which]], axis=-1)
    return jnp.einsum("nea,neb->nab", rows, rows)


def steps(
    noise: Float[Array, "item column"],
    entries: Entries,
    start: Float[Array, "item column"],
    prior: tuple[Array, Array],
    scale: Float[Array, " column"],
    items: PaddedItems,
) -> tuple[Float[Array, "item column"], tuple[Array, Array]]:
    """A draw of the step of every item, and sums over the entries after it.

    Args:
        noise: standard Normals.
        entries: their vectors x.
        start: the present values of the items' sites.
        prior: slope and fall of (1) at `start`, [item, column].
        scale: of the columns of the table.
        items: by `pad_items`.

    Returns:
        The steps; and the sums of w y y' and w y r, with y the table times the sites after the
        step, next to the shared slopes, and r the residual after the step.
    """
    (slope, fall), num_columns, num_shared = prior, start.shape[1], entries.own.shape[1] - 1
    keep = np.delete(np.arange(num_columns + 1 + num_shared), num_columns)
    none = jnp.zeros((len(keep) + 1,) * 2, start.dtype)
    no_grams = jnp.zeros((items.items.shape[1], *none.shape), start.dtype)
    of_shared = lambda value, like: jnp.full((len(like), num_shared), value, like.dtype)
    add = lambda layer, gram: gram + grams(entries, items.entries[layer])

    def draw(block, found):
        drawn, square, linear = found
        own = items.items[block]
        at = jnp.minimum(own, len(start) - 1)
        gram = lax.fori_loop(items.ends[block], items.ends[block + 1], add, no_grams)
        step = _step(noise[at], gram, slope[at], fall[at], scale)
        zero = jnp.zeros_like(step[:, :1])
        y = jnp.concatenate([start[at] + step, zero, of_shared(1, step)], axis=1)
        r = jnp.concatenate([-scale * step, zero + 1, of_shared(0, step)], axis=1)
        square += jnp.sum(y[:, :, None] * gram * y[:, None, :], axis=0)
        linear += jnp.sum(y * jnp.einsum("nab,nb->na", gram, r), axis=0)
        return drawn.at[own].set(step, mode="drop"), square, linear

    drawn, square, linear = lax.fori_loop(
        0, items.num_blocks, draw, (_free_steps(noise, prior), none, none[0])
    )
    return drawn, (square[keep][:, keep], linear[keep])


def _free_steps(noise: Array, prior: tuple[Array, Array]) -> Array:
    """A draw of the steps from the prior."""
    slope, fall = prior
    return slope / fall + noise / jnp.sqrt(fall)


def steps_in_use(
    noise: Float[Array, "item column"],
    entries: Entries,
    start: Float[Array, "item column"],
    prior: tuple[Array, Array],
    scale: Float[Array, " column"],
    items: PaddedItems,
    is_whole: Bool[Array, ""] | bool,
) -> tuple[Float[Array, "item column"], tuple[Array, Array]]:
    """`steps` by the columns whose scale is not 0; the others are drawn from their prior.

    The sums are 0 where they have a column that is not in use, unless `is_whole`.
    """
    width, num_shared = len(scale), entries.own.shape[1] - 1
    in_use = jnp.argsort(scale == 0, stable=True)

    def of_size(size):
        columns = in_use[:size]
        at = lambda array: array[..., columns]
        some = entries._replace(table=at(entries.table))
        step, (square, linear) = steps(
            at(noise), some, at(start), tuple(map(at, prior)), at(scale), items
        )
        both = jnp.append(columns, width + jnp.arange(num_shared))
        none = jnp.zeros((width + num_shared,) * 2, square.dtype)
        drawn = _free_steps(noise, prior).at[:, columns].set(step)
        sums = none.at[both[:, None], both].set(square), none[0].at[both].set(linear)
        return drawn, sums

    sizes = [2**i for i in range(3, 10) if 2 ** (i + 1) <= width]
    place = jnp.sum(jnp.count_nonzero(scale) > jnp.array(sizes, int))
    branches = [lambda size=size: of_size(size) for size in sizes]
    whole = lambda: steps(noise, entries, start, prior, scale, items)
    return lax.switch(jnp.where(is_whole, len(sizes), place), [*branches, whole])


def _step(
    noise: Float[Array, "item column"],
    gram: Float[Array, "item number number"],
    slope: Float[Array, "item column"],
    fall: Float[Array, "item column"],
    scale: Float[Array, " column"],
) -> Float[Array, "item column"]:
    """A draw from the Normal of (1).

    With L L' = precision, the Cholesky factor of [[precision, linear], [linear', corner]] has
    inverse(L) linear in its last row, for any corner that is large enough.
    """
    width, both = len(scale), jnp.append(scale, 1)
    corner = 1 + gram[:, width, width] + 2 * jnp.sum(slope**2 / fall, axis=1)
    diagonal = jnp.concatenate([fall, corner[:, None]], axis=1)[..., None]
    own = diagonal * jnp.eye(width + 1, dtype=fall.dtype)
    own = own.at[:, width, :width].add(slope)
    scaled = both[:, None] * gram[:, : width + 1, : width + 1] * both
    root = cholesky(scaled + own, symmetrize_input=False)
    half = root[:, width, :width] + noise
    return triangular_solve(
        root[:, :width, :width], half[..., None], left_side=True, lower=True, transpose_a=True
    )[..., 0]
