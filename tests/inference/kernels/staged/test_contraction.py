"""The contraction of a graph against one that goes over all pairs at each turn, and on groups
that are known.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from inference.kernels.staged import hilbert_clumps

pytestmark = pytest.mark.usefixtures("x64")

COUNT = 4


def squares(z):
    return ((z[:, None] - z[None]) ** 2).sum(-1) / ((z[:, None] - z[None]) ** 2).sum(-1).mean()


def by_all_pairs(square, count):
    """The same, with a dictionary of what is left."""
    near = len(square) / (2 * count)
    of = lambda log_spread: np.exp(-0.5 * square / np.exp(log_spread))
    affinity = of(
        optimize.brentq(lambda log_spread: of(log_spread).sum(1).mean() - near, -60, 20, xtol=1e-12)
    )
    cosine = lambda i, j: (
        affinity[i] @ affinity[j] / np.sqrt(affinity[i] @ affinity[i] * (affinity[j] @ affinity[j]))
    )
    weight, gone = dict.fromkeys(range(len(square)), 1.0), []
    while len(weight) > 1:
        pairs = [
            ((1 - cosine(i, j)) * min(weight[i], weight[j]), i, j)
            for i in weight
            for j in weight
            if i < j
        ]
        _, i, j = min(pairs, key=lambda pair: pair[0])
        goes, stays = (i, j) if weight[i] < weight[j] else (j, i)
        weight[stays] += weight.pop(goes)
        gone.append(goes)
    return np.array([*weight, *gone[::-1]])


def without_others(square, num_near):
    """A planted bug: nodes are alike that are near to each other, whatever others say."""
    return jnp.linalg.cholesky(jnp.exp(-0.5 * square / 0.01) + 1e-9 * jnp.eye(len(square)))


def of_one_spread(square, num_near):
    """Another: the spread is what it is, however many are to be left."""
    return jnp.exp(-0.5 * square)


BUGS = {"others": without_others, "spread": of_one_spread}


@pytest.mark.parametrize("bug", [None, *BUGS], ids=["right", *BUGS])
def test_it_combines_what_is_most_alike(bug, monkeypatch):
    if bug:
        monkeypatch.setattr(hilbert_clumps, "_affinities", BUGS[bug])
    square = squares(np.random.default_rng(0).normal(size=(24, 2)))
    found = np.asarray(
        jax.jit(lambda square: hilbert_clumps.contracted(square, COUNT))(jnp.asarray(square))
    )
    assert sorted(found) == list(range(24))
    assert np.array_equal(found, by_all_pairs(square, COUNT)) == (not bug)


def test_each_of_some_groups_has_one_that_stands_for_it():
    sizes = [40, 30, 30, 20]
    group = np.repeat(np.arange(4), sizes)
    z = 10.0 * group[:, None] ** 2 + np.random.default_rng(1).normal(size=(120, 1))
    order = np.random.default_rng(2).permutation(120)
    found = np.asarray(hilbert_clumps.contracted(jnp.asarray(squares(z[order])), 4))
    left = group[order][found[:4]]
    assert sorted(left.tolist()) == [0, 1, 2, 3]


def test_of_points_that_are_one_each_has_a_place():
    found = np.asarray(hilbert_clumps.contracted(jnp.zeros((6, 6)), 2))
    assert sorted(found.tolist()) == list(range(6))


def test_a_point_far_from_all_others_is_no_clump():
    z = np.append(np.random.default_rng(3).normal(size=40), 30.0)[:, None]
    found = np.asarray(hilbert_clumps.contracted(jnp.asarray(squares(z)), 4))
    assert 40 not in found[:4]
