"""The draws of the protocol, and the score."""

import os
from itertools import pairwise

import numpy as np
import pytest

from gallery.datasets import load
from tests.bench.archipelago_protocols import CELLS, DATA, Cell, draw, num_draws, score

BUNDLED = [data for data in DATA if data != "oilflow12"]
needs_copies = pytest.mark.skipif(
    not os.environ.get("ZOO_DATA"), reason="set ZOO_DATA to a folder with copies of the data sets"
)


@pytest.mark.parametrize("data", [*BUNDLED, pytest.param("oilflow12", marks=needs_copies)])
def test_few_labels_are_among_many(data):
    draws = [draw(Cell(data, labels), seed=3) for labels in (1, 2, 4, 8)]
    for labels, each in zip((1, 2, 4, 8), draws, strict=True):
        np.testing.assert_array_equal(np.bincount(each.y[each.y >= 0]), labels)
        np.testing.assert_array_equal(each.x, draws[0].x)
        np.testing.assert_array_equal(each.x_test, draws[0].x_test)
    for few, many in pairwise(draws):
        assert (few.y[few.y >= 0] == many.y[few.y >= 0]).all()
    assert not np.array_equal(draw(Cell(data, 8), seed=4).x, draws[0].x)
    np.testing.assert_array_equal(draw(Cell(data, 1), seed=3).y, draws[0].y)


def test_sizes():
    for arms in (3, 4, 5):
        rows = draw(Cell(f"{arms} arms", 8), 0)
        assert rows.x.shape == (50, 2)
        np.testing.assert_array_equal(np.bincount(rows.y_test), 300)
    wine = draw(Cell("wine", 1), 0)
    assert wine.x.shape == wine.x_test.shape == (89, 13)
    np.testing.assert_allclose(np.bincount(wine.y_test), np.bincount(load("wine").y) / 2, atol=0.5)
    np.testing.assert_allclose([wine.x.mean(0), wine.x.std(0)], [[0] * 13, [1] * 13], atol=1e-12)
    assert len({tuple(row) for row in np.vstack([wine.x, wine.x_test]).round(9)}) == 178


def test_arms_are_even_and_where_they_belong():
    for arms in (3, 4, 5):
        rows = draw(Cell(f"{arms} arms", 8), 1)
        nearest = np.linalg.norm(rows.x[:, None] - rows.x_test[None], axis=2).argsort(axis=1)[:, :9]
        arm = (
            np.array([np.bincount(votes, minlength=arms) for votes in rows.y_test[nearest]])
        ).argmax(1)
        assert np.ptp(np.bincount(arm)) <= 2
        assert (arm == rows.y)[rows.y >= 0].mean() > 0.9


def test_hard_arms_spread_more():
    angle = {}
    for data in ("4 arms", "4 arms h"):
        rows = draw(Cell(data, 1), 0)
        radius, around = np.hypot(*rows.x_test.T), np.arctan2(rows.x_test[:, 1], rows.x_test[:, 0])
        bent = np.exp(1j * (around - 0.25 * np.exp(radius) - np.pi / 2 * rows.y_test))
        angle[data] = np.angle(bent).std()
    assert angle["4 arms h"] > 1.5 * angle["4 arms"]


def test_number_of_draws():
    assert len(CELLS) == 32
    assert {cell for cell in CELLS if num_draws(cell) == 10} == {
        Cell(f"{arms} arms h", labels) for arms in (3, 4, 5) for labels in (1, 2)
    }
    assert {num_draws(cell) for cell in CELLS} == {3, 10}


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="no data '6 arms'; there are 3 arms, .*oilflow12"):
        draw(Cell("6 arms", 1), 0)
    with pytest.raises(
        ValueError, match="labels=11: '5 arms' has classes of 10 rows; wanted 1 to 10"
    ):
        draw(Cell("5 arms", 11), 0)
    with pytest.raises(ValueError, match=r"shape \(2, 2\): wanted \(2, 3\)"):
        score(np.full((2, 2), 0.5), np.array([0, 2]))
    with pytest.raises(ValueError, match="sum to one"):
        score(np.full((2, 2), 0.4), np.array([0, 1]))


def test_score():
    found = score(np.array([[0.9, 0.1], [0.7, 0.3], [0.0, 1.0]]), np.array([0, 1, 0]))
    assert found.error == pytest.approx(2 / 3)
    assert found.log_score == pytest.approx(
        np.mean(np.log(0.999 * np.array([0.9, 0.3, 0]) + 0.0005))
    )
