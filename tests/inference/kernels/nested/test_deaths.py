"""Who is copied, and what it means for the share of a mode that points descend from few others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.stats import beta, kstest

from inference.kernels.nested import state
from inference.kernels.nested.state import Death, parents_of, principal_coordinate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(0)


def two_parts(few=30, many=70):
    """A mode of two parts that have come apart, and a mode far away."""
    parts = [
        RNG.normal(size=(few, 3)),
        RNG.normal(size=(many, 3)) + 20.0,
        RNG.normal(size=(20, 3)) - 90.0,
    ]
    return jnp.asarray(np.concatenate(parts)), jnp.repeat(
        jnp.array([0, 1]), jnp.array([few + many, 20])
    )


def parents(num_times=300, batch=20):
    """[time, birth]: ten copies for the ten that die in the first mode, and ten in the other
    mode, of which two die.
    """
    z, mode = two_parts()
    chosen = jnp.asarray(np.r_[np.arange(3), 40:47, 100:102])
    death = Death(
        jnp.arange(120),
        jnp.array([0, 100]),
        jnp.array([100, 20]),
        jnp.array([10, 2]),
        chosen,
        jnp.arange(12),
    )
    birth_mode = jnp.repeat(jnp.array([0, 1]), batch // 2)
    taken = jax.jit(jax.vmap(lambda uniform: parents_of(uniform, z, mode, death, birth_mode)))(
        random.uniform(random.key(0), (num_times, 2))
    )
    return np.asarray(taken), np.asarray(chosen)


def test_copies_are_of_survivors_of_their_mode_each_as_often_as_any_other():
    taken, dying = parents(2000)
    assert not np.isin(taken, dying).any()
    assert (taken[:, :10] < 100).all()
    assert (taken[:, 10:] >= 100).all()
    for births, survivors, first in ((taken[:, :10], 90, 0), (taken[:, 10:], 18, 100)):
        counts = np.bincount(births.ravel() - first, minlength=120 - first)[
            : 100 if first == 0 else 20
        ]
        counts = np.delete(counts, dying[(dying >= first) & (dying < first + len(counts))] - first)
        expected = births.size / survivors
        assert len(counts) == survivors
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_parts_that_have_come_apart_keep_their_numbers(bug, monkeypatch):
    """27 of 90 survivors are of the smaller part: 3 of 10 copies, but for the fraction.

    Planted: in any order.
    """
    if bug:
        noise = lambda z, mode, num_modes: random.normal(
            random.key(int(RNG.integers(2**30))), mode.shape
        )
        monkeypatch.setattr(state, "principal_coordinate", noise)
    taken, _ = parents()
    of_smaller = (taken[:, :10] < 30).sum(1)
    assert (of_smaller == 3).all() != bug


def test_the_axis_is_the_first_principal_one_of_each_mode():
    z, mode = two_parts()
    found = np.asarray(principal_coordinate(z, mode, 3))
    for m in range(2):
        y = np.asarray(z)[np.asarray(mode) == m]
        y = (y - y.mean(0)) / y.std(0)
        first = y @ np.linalg.svd(y)[2][0]
        if m == 0:
            assert abs(np.corrcoef(found[np.asarray(mode) == m], first)[0, 1]) > 0.999
        assert found[np.asarray(mode) == m].std() > 0.9


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_points_of_one_descent_weigh_as_one(bug):
    """Two families, each in a part of its own: the share of a part is Uniform.

    Points of their own: Beta(10, 10).
    """
    mode = jnp.repeat(jnp.array([0, 1]), 10)
    ancestor = jnp.arange(20) if bug else jnp.repeat(jnp.array([3, 7]), 10)
    volumes = state.share_volumes(
        random.key(0), state.whole_prior(2, 2000), jnp.zeros_like(mode), mode, ancestor
    )
    share = np.exp(np.asarray(volumes.log_volume[0]))
    assert share[0] == pytest.approx(0.5)
    p = kstest(share[1:], "uniform").pvalue, kstest(share[1:], beta(10, 10).cdf).pvalue
    assert (p[0] > 1e-3) == (not bug)
    assert (p[1] > 1e-3) == bug


def test_families_on_both_sides_say_nothing_of_the_share():
    """Each family has a third of its points in the first part: the share is a third in every
    history.
    """
    mode, ancestor = jnp.tile(jnp.array([0, 1, 1]), 6), jnp.repeat(jnp.arange(6), 3)
    volumes = state.share_volumes(
        random.key(0), state.whole_prior(2, 50), jnp.zeros_like(mode), mode, ancestor
    )
    np.testing.assert_allclose(np.exp(volumes.log_volume[0]), 1 / 3)
