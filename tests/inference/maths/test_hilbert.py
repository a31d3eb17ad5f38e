"""The Hilbert curve: exact there and back, neighbours that touch, the same curve as one that is
built from its four (eight, ...) parts.
"""

import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.maths import hilbert

RNG = np.random.default_rng(0)
SOME = [(1, 1), (1, 32), (2, 31), (3, 32), (5, 13), (10, 16), (31, 1), (33, 7), (64, 32)]
EVERY_DIM = [(dims, int(RNG.integers(1, 33))) for dims in range(1, 65)]
EVERY_BITS = [(int(RNG.integers(1, 65)), bits) for bits in range(1, 33)]
SWEEP = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in dict.fromkeys([*EVERY_DIM, *EVERY_BITS])
    if case not in SOME
]


def drawn(dims, bits, size=50):
    return np.random.default_rng(dims * 100 + bits).integers(
        0, 2**bits, (size, dims), dtype=np.uint32
    )


def fraction(words):
    """Exactly, by Python's own integers."""
    return Fraction(
        sum(int(word) << (32 * i) for i, word in enumerate(reversed(words))), 1 << (32 * len(words))
    )


# An independent construction: the curve as a list of cells, from the curves of its parts.


def built(dims, bits):
    """All cells in the order of the curve.

    The parts of a cube follow each other by Gray's code. In the part with the corner w the curve is
    turned: for the axes from last to first, the first axis is mirrored where w is 1, or exchanged
    with that axis where it is 0; and every other part is run through backwards.
    """
    if bits == 0:
        return [(0,) * dims]
    finer, half, cells = built(dims, bits - 1), 2 ** (bits - 1), []
    for number in range(2**dims):
        gray = number ^ (number >> 1)
        corner = [(gray >> (dims - 1 - axis)) & 1 for axis in range(dims)]
        for cell in finer[:: -1 if number % 2 else 1]:
            turned = list(cell)
            for axis in reversed(range(dims)):
                if corner[axis]:
                    turned[0] = half - 1 - turned[0]
                else:
                    turned[0], turned[axis] = turned[axis], turned[0]
            cells.append(tuple(half * c + t for c, t in zip(corner, turned, strict=True)))
    return cells


@pytest.mark.parametrize(("dims", "bits"), [*SOME, *SWEEP], ids=str)
def test_there_and_back_is_exact(dims, bits):
    sides = st.integers(0, 2**bits - 1)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @example([0] * dims)
    @example([2**bits - 1] * dims)
    @given(st.lists(sides, min_size=dims, max_size=dims))
    def there_and_back(cell):
        code = np.asarray(hilbert.encode(np.array(cell, np.uint32), bits))
        assert code.shape == (hilbert.num_words(dims, bits),)
        np.testing.assert_array_equal(hilbert.decode(code, dims, bits), cell)
        unused = 32 * len(code) - dims * bits
        assert not int(code[-1]) & (2**unused - 1)

    there_and_back()


@pytest.mark.parametrize(
    ("dims", "bits"), [(1, 5), (2, 1), (2, 5), (3, 3), (4, 2), (5, 2), (7, 1)], ids=str
)
def test_it_is_the_curve_that_is_built_from_its_parts(dims, bits):
    cells = np.array(built(dims, bits))
    code = np.asarray(hilbert.encode(jnp.asarray(cells, jnp.uint32), bits))
    assert [fraction(words) * 2 ** (dims * bits) for words in code] == list(range(len(cells)))


@pytest.mark.parametrize(("dims", "bits"), [(2, 6), (3, 4), (5, 2), (10, 1)], ids=str)
def test_it_visits_every_cell_and_neighbours_touch(dims, bits):
    size = 2 ** (dims * bits)
    unused = 32 - dims * bits
    cells = np.asarray(
        hilbert.decode((jnp.arange(size, dtype=jnp.uint32) << unused)[:, None], dims, bits)
    ).astype(int)
    assert len(np.unique(cells, axis=0)) == size
    assert (np.abs(np.diff(cells, axis=0)).sum(1) == 1).all()


@pytest.mark.parametrize(("dims", "bits"), [(2, 32), (10, 16), (6, 11), (64, 32)], ids=str)
def test_neighbours_touch_in_extended_precision(dims, bits):
    whole, unused = dims * bits, 32 * hilbert.num_words(dims, bits) - dims * bits
    words = lambda number: [
        (number << unused) >> (32 * i) & 0xFFFFFFFF
        for i in reversed(range(hilbert.num_words(dims, bits)))
    ]
    rng = np.random.default_rng(1)
    places = [int.from_bytes(rng.bytes(whole // 8 + 1)) % (2**whole - 1) for _ in range(200)]
    first, second = (
        hilbert.decode(jnp.asarray([words(p + i) for p in places], jnp.uint32), dims, bits)
        for i in (0, 1)
    )
    apart = np.abs(np.asarray(first).astype(np.int64) - np.asarray(second).astype(np.int64))
    assert (apart.sum(1) == 1).all()


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_curve_with_a_wrong_turn_is_not_it(bug, monkeypatch):
    """The planted bug: axes are exchanged where one should be mirrored, and mirrored where they
    should be exchanged. Cells and codes are still there and back, each once.
    """
    if bug:
        right = hilbert._exchanged
        flipped = lambda axes, level: axes ^ (jnp.uint32(1) << level)
        monkeypatch.setattr(
            hilbert,
            "_exchanged",
            lambda axes, axis, level: flipped(right(flipped(axes, level), axis, level), level),
        )
    code = np.asarray(hilbert.encode.__wrapped__(jnp.array(built(3, 3), jnp.uint32), 3))
    places = [int(fraction(words) * 512) for words in code]
    assert sorted(places) == list(range(512))
    assert (places == list(range(512))) != bug


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dims", "bits"), [(1, 4), (2, 16), (3, 32), (10, 16)], ids=str)
def test_differences_go_the_shorter_way_around(dims, bits):
    codes = np.asarray(hilbert.encode(jnp.asarray(drawn(dims, bits)), bits))
    first, second = codes[::2], codes[1::2]
    exact = [
        (fraction(one) - fraction(two) + Fraction(1, 2)) % 1 - Fraction(1, 2)
        for one, two in zip(first, second, strict=True)
    ]
    found = hilbert.difference(jnp.asarray(first), jnp.asarray(second))
    np.testing.assert_allclose(found, [float(value) for value in exact], rtol=1e-15)
    near = hilbert.difference(jnp.asarray(codes), jnp.asarray(codes))
    assert not np.asarray(near).any()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dims", "bits"), [(2, 16), (3, 32), (10, 16), (3, 11)], ids=str)
def test_a_shift_is_undone_by_its_difference(dims, bits):
    codes = hilbert.encode(jnp.asarray(drawn(dims, bits)), bits)
    for size in (1.0, 1e-3, 1e-9):
        steps = jnp.asarray(np.random.default_rng(2).uniform(-0.5, 0.5, len(codes)) * size)
        there = hilbert.shifted(codes, steps, dims, bits)
        np.testing.assert_allclose(
            hilbert.difference(there, codes), steps, rtol=1e-13, atol=0.5 * 2.0 ** -(dims * bits)
        )
        np.testing.assert_array_equal(hilbert.shifted(there, -steps, dims, bits), codes)
        assert (np.asarray(hilbert.decode(there, dims, bits)) <= 2**bits - 1).all()


def test_points_lie_in_their_cells():
    points = jnp.asarray([[0.0, 0.49], [0.5, 1.0], [0.999, 0.25]])
    np.testing.assert_array_equal(hilbert.cells_of(points, 2), [[0, 1], [2, 3], [3, 1]])
    np.testing.assert_array_equal(hilbert.cells_of(points[1:2], 32), [[2**31, 2**32 - 1]])
    cells = drawn(3, 8)
    np.testing.assert_array_equal(
        hilbert.cells_of(hilbert.cell_points(jnp.asarray(cells), 8), 8), cells
    )


def test_near_on_the_curve_is_near_in_the_cube():
    """The distance in the cube is at most of the order of the D-th root of that on the curve."""
    codes = hilbert.encode(jnp.asarray(drawn(2, 16, 4000)), 16)
    points = np.asarray(hilbert.cell_points(hilbert.decode(codes, 2, 16), 16))
    there = np.asarray(
        hilbert.cell_points(
            hilbert.decode(hilbert.shifted(codes, jnp.full(4000, 1e-4), 2, 16), 2, 16), 16
        )
    )
    away = np.linalg.norm(there - points, axis=1)
    # the last stretch joins the ends of the circle
    inside = np.asarray(codes[:, 0]) < 0.999 * 2**32
    assert away[inside].max() < 3 * 1e-2


@pytest.mark.parametrize(("dims", "bits"), list(itertools.product((0, 3), (0, 33))), ids=str)
def test_what_is_no_cube_is_refused(dims, bits):
    with pytest.raises(ValueError, match=f"hilbert: found {dims} dimensions and bits={bits}"):
        hilbert.num_words(dims, bits)


def test_cells_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="hilbert: found cells of float.*, wanted integers"):
        hilbert.encode(jnp.zeros((2, 3)), 4)


def test_codes_of_another_cube_are_refused():
    with pytest.raises(ValueError, match="hilbert: found codes of 2 words, wanted 1"):
        hilbert.decode(jnp.zeros((5, 2), jnp.uint32), 3, 4)


def test_no_point_has_no_code():
    code = hilbert.encode(jnp.zeros((0, 3), jnp.uint32), 16)
    assert code.shape == (0, 2)
    assert hilbert.decode(code, 3, 16).shape == (0, 3)
