"""The Hilbert curve through a cube of any dimension, with codes longer than a machine number.

The cube [0, 1)^D is cut into cells, 2^bits along each axis. The curve goes through all cells, each
of which shares a face with the next. The code of a cell is its place on the curve as a binary
fraction of D x bits bits. It is kept in words of 32 bits: the most significant word first,
left-aligned, unused bits zero. Differences of codes are taken on the circle that joins the ends of
the curve. They are computed exactly and then rounded to a float.

Skilling (2004), "Programming the Hilbert curve", AIP Conference Proceedings 707. Cost: D x bits
short operations on all points at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

__all__ = ["cell_points", "cells_of", "decode", "difference", "encode", "num_words", "shifted"]

WORD = 32  # bits of a word


def num_words(num_dims: int, bits: int) -> int:
    """The number of words of a code."""
    if num_dims < 1 or not 1 <= bits <= WORD:
        raise ValueError(
            f"hilbert: found {num_dims} dimensions and bits={bits}; wanted 1 or more, and 1 to "
            f"{WORD}."
        )
    return -(-num_dims * bits // WORD)


@partial(jax.jit, static_argnames="bits")
def encode(cells: Array, bits: int) -> Array:
    """Codes [..., word] of cells [..., D].

    Args:
        cells: integers from 0 to below 2^bits; compiled code cannot refuse others, whose codes are
            wrong.
        bits: of a cell, along each axis.
    """
    if not jnp.issubdtype(cells.dtype, jnp.integer):
        raise TypeError(
            f"hilbert: found cells of {cells.dtype}, wanted integers; `cells_of` has those of "
            "points."
        )
    words, axes = num_words(cells.shape[-1], bits), jnp.moveaxis(cells.astype(jnp.uint32), -1, 0)
    num_dims = len(axes)

    # from the coarsest level to the finest but one, and on each level over the axes in order
    def undo(number, axes):
        level, axis = (bits - 1 - number // num_dims).astype(jnp.uint32), number % num_dims
        return _exchanged(axes, axis, level)

    axes = jax.lax.fori_loop(0, (bits - 1) * num_dims, undo, axes)
    axes = jax.lax.associative_scan(jnp.bitwise_xor, axes)
    below = axes[-1:] >> 1
    for shift in (1, 2, 4, 8, 16):  # each bit: the parity of the bits of the last axis above it
        below ^= below >> shift
    # the coarsest bit of each axis in turn, then the next ones
    each = jnp.swapaxes(_bits(jnp.moveaxis(axes ^ below, 0, -1), bits), -1, -2)
    each = each.reshape(*cells.shape[:-1], bits * num_dims)
    each = jnp.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, WORD * words - each.shape[-1])])
    return _number(each.reshape(*cells.shape[:-1], words, WORD))


@partial(jax.jit, static_argnames=("num_dims", "bits"))
def decode(code: Array, num_dims: int, bits: int) -> Array:
    """Cells [..., D] of codes [..., word]."""
    if code.shape[-1] != num_words(num_dims, bits):
        raise ValueError(
            f"hilbert: found codes of {code.shape[-1]} words, wanted {num_words(num_dims, bits)}."
        )
    each = _bits(code, WORD).reshape(*code.shape[:-1], WORD * code.shape[-1])[
        ..., : num_dims * bits
    ]
    each = jnp.swapaxes(each.reshape(*code.shape[:-1], bits, num_dims), -1, -2)
    axes = jnp.moveaxis(_number(each), -1, 0)
    axes = jnp.concatenate([axes[:1] ^ (axes[-1:] >> 1), axes[1:] ^ axes[:-1]])

    def redo(number, axes):
        level, axis = (1 + number // num_dims).astype(jnp.uint32), num_dims - 1 - number % num_dims
        return _exchanged(axes, axis, level)

    axes = jax.lax.fori_loop(0, (bits - 1) * num_dims, redo, axes)
    return jnp.moveaxis(axes, 0, -1)


def cells_of(points: Array, bits: int) -> Array:
    """The cells of points of [0, 1)^D.

    A coordinate outside is moved to the nearest face of the cube; NaN is in the last cell.
    """
    most = jnp.asarray(2.0**bits, points.dtype)
    last = jnp.asarray((1 << bits) - 1, jnp.uint32)
    scaled = jnp.floor(jnp.clip(points, 0, 1) * most)
    is_inside = scaled < most  # the far face belongs to the last cells
    return jnp.where(is_inside, jnp.where(is_inside, scaled, 0).astype(jnp.uint32), last)


def cell_points(cells: Array, bits: int, within: Array | float = 0.5) -> Array:
    """A point of each cell.

    Args:
        cells: [..., D].
        bits: of a cell, along each axis. A float must have one bit more, or the middle of a cell is
            rounded to the next one: float32 is good up to 23 bits.
        within: the place in the cell along each axis, from 0 to 1.
    """
    return (cells.astype(float) + within) * 2.0**-bits


def difference(
    first: UInt32[Array, "*batch word"], second: UInt32[Array, "*batch word"]
) -> Float[Array, "*batch"]:
    """`first - second` as a fraction of the curve, on the circle: from -1/2 to below 1/2."""
    one = jnp.ones(first.shape[:-1], jnp.uint32)
    left = _added(first, ~second, one)
    is_negative = left[..., 0] >> (WORD - 1) == 1
    size = jnp.where(is_negative[..., None], _added(jnp.zeros_like(left), ~left, one), left)
    total = jnp.zeros(size.shape[:-1], float)
    for i in reversed(range(size.shape[-1])):  # the smallest first
        total += size[..., i].astype(float) * 2.0 ** (-WORD * (i + 1))
    return jnp.where(is_negative, -total, total)


def shifted(
    code: UInt32[Array, "*batch word"], step: Float[Array, "*batch"], num_dims: int, bits: int
) -> UInt32[Array, "*batch word"]:
    """`code + step` on the circle, for steps in fractions of the curve, rounded to a cell."""
    rest, words = jnp.abs(step), []  # not 1 + step, which would round a small negative step
    rest = rest - jnp.floor(rest)
    for _ in range(code.shape[-1]):
        # below 2^32, since a float below 1 is at least its own precision away from 1
        whole = jnp.floor(rest * 2.0**WORD)
        words.append(whole.astype(jnp.uint32))
        rest = rest * 2.0**WORD - whole
    size, unused = jnp.stack(words, -1), WORD * code.shape[-1] - num_dims * bits
    zero = jnp.zeros(code.shape[:-1], jnp.uint32)
    if unused:  # add half a cell, then clear the bits below a cell
        size = _added(size, jnp.zeros_like(size).at[..., -1].set(1 << (unused - 1)), zero)
        size = size.at[..., -1].set(size[..., -1] >> unused << unused)
    else:
        size = _added(size, jnp.zeros_like(size), (rest >= 0.5).astype(jnp.uint32))
    return jnp.where((step < 0)[..., None], _added(code, ~size, zero + 1), _added(code, size, zero))


def _exchanged(
    axes: UInt32[Array, " axis *batch"], axis: Int[Array, ""], level: UInt32[Array, ""]
) -> UInt32[Array, " axis *batch"]:
    """The axes after one step of Skilling's algorithm.

    Where `axis` has its bit at `level` set, the finer bits of axis 0 are inverted; elsewhere the
    two axes exchange their finer bits.
    """
    finer = (jnp.uint32(1) << level) - 1
    own, first = axes[axis], axes[0]
    is_set = (own >> level) & 1 == 1
    apart = (first ^ own) & finer
    axes = axes.at[axis].set(jnp.where(is_set, own, own ^ apart))
    return axes.at[0].set(axes[0] ^ jnp.where(is_set, finer, apart))


def _bits(values: Array, count: int) -> Array:
    """The last `count` bits along a new last axis, the most significant first."""
    place = jax.lax.broadcasted_iota(jnp.uint32, (*values.shape, count), values.ndim)
    return (values[..., None] >> (count - 1 - place)) & 1


def _number(bits: Array) -> Array:
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return jnp.sum(bits << (bits.shape[-1] - 1 - place), -1, dtype=jnp.uint32)


def _added(first: Array, second: Array, carry: Array) -> Array:
    """The sum modulo 1, word by word from the least significant one."""
    words = []
    for i in range(first.shape[-1] - 1, -1, -1):
        total = first[..., i] + second[..., i]
        whole = total + carry
        carry = ((total < first[..., i]) | (whole < total)).astype(jnp.uint32)
        words.append(whole)
    return jnp.stack(words[::-1], -1)
