"""The Hilbert curve through a cube of any dimension, in extended precision.

The cube [0, 1)^D is cut into cells, 2^bits along each axis; the curve goes through all of them,
each cell shares a face with the next. The code of a cell is its place on the curve as a binary
fraction of the way, D x bits bits long: too long for a number, so it is kept in words of 32 bits,
the most significant first, left-aligned, the bits that are not used zero. Differences of codes are
taken around the circle that the curve becomes when its ends are joined, exactly, and only then
rounded to a float.

Skilling (2004), "Programming the Hilbert curve", AIP Conference Proceedings 707. Cost: D x bits
short operations on all points at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["cells_of", "decode", "difference", "encode", "num_words", "points_of", "shifted"]

WORD = 32
MOST_BITS = 32


def num_words(num_dims: int, bits: int) -> int:
    """Words of a code."""
    if num_dims < 1 or not 1 <= bits <= MOST_BITS:
        raise ValueError(
            f"hilbert: found {num_dims} dimensions and bits={bits}; wanted 1 or more, and 1 to "
            f"{MOST_BITS}."
        )
    return -(-num_dims * bits // WORD)


@partial(jax.jit, static_argnames="bits")
def encode(cells: Array, bits: int) -> Array:
    """Codes [..., word] of cells [..., D], integers from 0 to below 2^bits; compiled code cannot
    refuse others: their codes are wrong.
    """
    if not jnp.issubdtype(cells.dtype, jnp.integer):
        raise TypeError(
            f"hilbert: found cells of {cells.dtype}, wanted integers; `cells_of` has those of "
            "points."
        )
    words, axes = num_words(cells.shape[-1], bits), jnp.moveaxis(cells.astype(jnp.uint32), -1, 0)
    num_dims = len(axes)

    # from the coarsest level to the finest but one, and on each over the axes in order
    def turn(place, axes):
        level, axis = (bits - 1 - place // num_dims).astype(jnp.uint32), place % num_dims
        return _exchanged(axes, axis, level)

    axes = jax.lax.fori_loop(0, (bits - 1) * num_dims, turn, axes)
    axes = jax.lax.associative_scan(jnp.bitwise_xor, axes)
    below = axes[-1:] >> 1
    for shift in (1, 2, 4, 8, 16):  # each bit: the parity of all bits of the last axis above it
        below ^= below >> shift
    return _packed(axes ^ below, bits, words)


@partial(jax.jit, static_argnames=("num_dims", "bits"))
def decode(code: Array, num_dims: int, bits: int) -> Array:
    """Cells [..., D] of codes [..., word]."""
    if code.shape[-1] != num_words(num_dims, bits):
        raise ValueError(
            f"hilbert: found codes of {code.shape[-1]} words, wanted {num_words(num_dims, bits)}."
        )
    axes = _unpacked(code, num_dims, bits)
    below = axes[-1:] >> 1
    axes = jnp.concatenate([axes[:1] ^ below, axes[1:] ^ axes[:-1]])

    def turn_back(place, axes):
        level, axis = (1 + place // num_dims).astype(jnp.uint32), num_dims - 1 - place % num_dims
        return _exchanged(axes, axis, level)

    axes = jax.lax.fori_loop(0, (bits - 1) * num_dims, turn_back, axes)
    return jnp.moveaxis(axes, 0, -1)


def cells_of(points: Array, bits: int) -> Array:
    """The cells that points of [0, 1)^D lie in; those outside are moved to its faces, and NaN to
    the last cell.
    """
    most = jnp.asarray(2.0**bits, points.dtype)
    last = jnp.asarray((1 << bits) - 1, jnp.uint32)
    scaled = jnp.floor(jnp.clip(points, 0, 1) * most)
    is_inside = scaled < most  # the far face belongs to the last cells
    return jnp.where(is_inside, jnp.where(is_inside, scaled, 0).astype(jnp.uint32), last)


def points_of(cells: Array, bits: int, within: Array | float = 0.5) -> Array:
    """Points of cells: the middles, or wherever `within` each cell says, from 0 to 1 along each
    axis. A float must have a bit more than a cell, or the middle of one is rounded to the next:
    float32 up to 23 bits.
    """
    return (cells.astype(float) + within) * 2.0**-bits


def difference(first: Array, second: Array) -> Array:
    """`first - second` as a fraction of the curve, around the circle: from -1/2 to just below
    1/2, [...].
    """
    left = _added(first, ~second, jnp.ones(first.shape[:-1], jnp.uint32))
    is_negative = left[..., 0] >> (WORD - 1) == 1
    size = jnp.where(
        is_negative[..., None],
        _added(jnp.zeros_like(left), ~left, jnp.ones(left.shape[:-1], jnp.uint32)),
        left,
    )
    total = jnp.zeros(size.shape[:-1], float)
    for i in reversed(range(size.shape[-1])):  # the smallest first
        total += size[..., i].astype(float) * 2.0 ** (-WORD * (i + 1))
    return jnp.where(is_negative, -total, total)


def shifted(code: Array, step: Array, num_dims: int, bits: int) -> Array:
    """`code + step` around the circle, the step [...] a fraction of the curve, rounded to the
    nearest cell.
    """
    rest, words = jnp.abs(step), []  # of a small negative step, 1 + step would keep next to nothing
    rest = rest - jnp.floor(rest)
    for _ in range(code.shape[-1]):
        # below 2^32: a float below 1 is at least its own precision away from 1
        whole = jnp.floor(rest * 2.0**WORD)
        words.append(whole.astype(jnp.uint32))
        rest = rest * 2.0**WORD - whole
    size, unused = jnp.stack(words, -1), WORD * code.shape[-1] - num_dims * bits
    zero = jnp.zeros(code.shape[:-1], jnp.uint32)
    if unused:  # the half of a cell, then what is left of the cell that is reached
        half = jnp.zeros_like(size).at[..., -1].set(1 << (unused - 1))
        size = _added(size, half, zero)
        size = size.at[..., -1].set(size[..., -1] >> unused << unused)
    else:
        size = _added(size, jnp.zeros_like(size), (rest >= 0.5).astype(jnp.uint32))
    return jnp.where((step < 0)[..., None], _added(code, ~size, zero + 1), _added(code, size, zero))


def _exchanged(axes: Array, axis: Array, level: Array) -> Array:
    """Where the bit of `axis` at `level` is set, the finer bits of axis 0 are mirrored; where
    not, the two axes exchange theirs.
    """
    finer = (jnp.uint32(1) << level) - 1
    own, first = axes[axis], axes[0]
    is_set = (own >> level) & 1 == 1
    apart = (first ^ own) & finer
    axes = axes.at[axis].set(jnp.where(is_set, own, own ^ apart))
    return axes.at[0].set(axes[0] ^ jnp.where(is_set, finer, apart))


def _packed(axes: Array, bits: int, words: int) -> Array:
    """[D, ...] to [..., word]: the coarsest bit of each axis in turn, then the next ones."""
    each = _bits(jnp.moveaxis(axes, 0, -1), bits)  # [..., D, level]
    each = jnp.swapaxes(each, -1, -2).reshape(*axes.shape[1:], bits * len(axes))
    each = jnp.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, WORD * words - each.shape[-1])])
    return _number(each.reshape(*axes.shape[1:], words, WORD))


def _unpacked(code: Array, num_dims: int, bits: int) -> Array:
    each = _bits(code, WORD).reshape(*code.shape[:-1], WORD * code.shape[-1])[
        ..., : num_dims * bits
    ]
    each = jnp.swapaxes(each.reshape(*code.shape[:-1], bits, num_dims), -1, -2)
    return jnp.moveaxis(_number(each), -1, 0)


def _bits(values: Array, count: int) -> Array:
    """The last `count` bits, along a new last axis, the most significant first."""
    places = jnp.arange(count - 1, -1, -1, dtype=jnp.uint32).reshape((1,) * values.ndim + (count,))
    return (values[..., None] >> places) & 1


def _number(bits: Array) -> Array:
    """The inverse of `_bits`."""
    places = jnp.arange(bits.shape[-1] - 1, -1, -1, dtype=jnp.uint32).reshape(
        (1,) * (bits.ndim - 1) + bits.shape[-1:]
    )
    return jnp.sum(bits << places, -1, dtype=jnp.uint32)


def _added(first: Array, second: Array, carry: Array) -> Array:
    """The sum, modulo 1, word by word from the least significant one."""
    words = []
    for i in range(first.shape[-1] - 1, -1, -1):
        total = first[..., i] + second[..., i]
        whole = total + carry
        carry = ((total < first[..., i]) | (whole < total)).astype(jnp.uint32)
        words.append(whole)
    return jnp.stack(words[::-1], -1)
