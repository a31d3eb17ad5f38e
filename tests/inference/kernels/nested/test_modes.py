"""Modes of live points: clusters in numpy and scipy, what must hang together and what must not,
and walks that leave their target alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.special import ndtri
from scipy.sparse.csgraph import connected_components
from scipy.stats import kstest, norm, truncnorm

from inference.kernels.nested import kernel, state
from inference.kernels.nested.state import covariance_roots, nothing_lost, search_modes
from inference.maths import slice_walk

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(0)


def cloud(size, centre=0.0, width=1.0, dims=3):
    return centre + width * RNG.normal(size=(size, dims))


def looked(z, mode=None, most=6, least=10, limit=-1e30, densities=lambda z: (0.0, jnp.sum(z))):
    """[point]: the modes, and their number; the likelihood of a limit so low falls nowhere."""
    mode = jnp.zeros(len(z), jnp.int32) if mode is None else jnp.asarray(mode, jnp.int32)
    flat = jnp.zeros(len(z))

    def search(z, mode):
        live = slice_walk.Particles(z, flat, flat, flat)
        apart = partial(kernel._are_apart, densities)
        roots, lost = covariance_roots(z, mode, most), nothing_lost(z.shape[1], z.dtype)
        return search_modes(live, mode, roots, mode.max() + 1, least, limit, lost, apart)

    return jax.jit(search)(jnp.asarray(z), mode)


def test_two_clouds_are_two_modes_and_one_is_one():
    found = looked(np.concatenate([cloud(60), cloud(30, 20.0, 0.2)]))
    assert found.num_modes == 2
    # the larger keeps its number
    np.testing.assert_array_equal(found.mode, np.repeat([0, 1], [60, 30]))
    assert looked(RNG.uniform(size=(200, 2))).num_modes == 1


def test_few_points_go_with_the_nearest():
    found = looked(np.concatenate([cloud(60), cloud(5, 20.0)]))
    assert found.num_modes == 1
    assert not np.any(found.mode)


@pytest.mark.parametrize(
    "bug", ["", "a bridge", "the limit itself"], ids=["right", "planted bridge", "planted floor"]
)
def test_a_single_point_is_a_mode_if_the_likelihood_falls_around_it(bug):
    """One point far away. A bridge of likelihood between them joins it to the others; so does a
    likelihood that is nowhere below the limit.
    """
    z = np.concatenate([cloud(60), cloud(1, 20.0, 0.1)])
    floor = {"": -5.0, "a bridge": 0.5, "the limit itself": 0.0}[bug]
    near = lambda z, centre: jnp.sum((z - centre) ** 2) < 100.0
    height = lambda z: jnp.where(near(z, 0.0) | near(z, 20.0), 1.0, floor)
    found = looked(z, limit=0.0, densities=lambda z: (0.0, height(z)))
    assert (found.num_modes == 2) == (not bug)
    np.testing.assert_array_equal(found.mode, np.repeat([0, 0 if bug else 1], [60, 1]))
    assert (found.num_evaluations >= 12 * 8) == (not bug)
    refused = looked(z, most=1, limit=0.0, densities=lambda z: (0.0, height(z)))
    assert refused.lost.num_others == (not bug)


def test_volume_goes_with_the_points():
    """Modes have volume .6 and .4. A third of the first becomes a mode, and half of the second
    goes to the first.
    """
    before, after = np.repeat([0, 1], [6, 4]), np.repeat([2, 0, 1, 0], [2, 4, 2, 2])
    log_volume = jnp.log(jnp.array([0.6, 0.4, 0.0, 0.0]))[:, None] * jnp.ones(101)
    volumes = state.Volumes(log_volume, jnp.zeros(101))
    shared = state.share_volumes(
        random.key(0), volumes, jnp.asarray(before), jnp.asarray(after), jnp.arange(10)
    )
    share = np.exp(shared.log_volume)
    np.testing.assert_allclose(share[:, 0], [0.6, 0.2, 0.2, 0.0], atol=1e-12)
    np.testing.assert_allclose(share.sum(0), 1.0)
    assert share[2].std() > 0.05


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_mode_that_dies_out_is_kept_in_mind(bug):
    """Its last point; planted: the last point of all."""
    z = jnp.arange(6.0)[:, None]
    live = slice_walk.Particles(z, jnp.zeros(6), z[:, 0], jnp.zeros(6))
    mode, count = jnp.array([0, 1, 1, 0, 0, 0]), jnp.array([4, 2, 0])
    death = state.lowest(live, mode, count, 3)
    none = state.Lost(jnp.zeros((2, 1)), jnp.zeros(2), jnp.zeros(2, bool), jnp.zeros((), int))
    dies_out = (death.count > 0) & (death.count == (death.count if bug else death.dying))
    lost = state.with_lost(none, live, death, dies_out)
    assert (lost.z[0] == 2.0) == (not bug)
    assert lost.is_lost.tolist() == [True, False]
    full = lost._replace(is_lost=jnp.ones(2, bool))
    assert (state.with_lost(full, live, death, dies_out).num_others == 1) == (not bug)


def test_each_mode_falls_apart_by_itself_and_where_there_is_no_place_it_does_not():
    z = np.concatenate([cloud(40), cloud(30, 20.0), cloud(40, -20.0), cloud(30, 40.0)])
    mode = np.repeat([0, 1], 70)
    found = looked(z, mode)
    np.testing.assert_array_equal(found.mode, np.repeat([0, 2, 1, 3], [40, 30, 40, 30]))
    assert looked(z, mode, most=3).num_modes == 3


def test_components_are_those_of_scipy():
    joined = RNG.random((60, 60)) < 0.015
    joined = joined | joined.T
    found = np.asarray(state._components(jnp.asarray(joined)))
    _, wanted = connected_components(joined)
    first = np.array([np.flatnonzero(wanted == label)[0] for label in wanted])
    np.testing.assert_array_equal(found, first)


def test_roots_are_those_of_the_covariance_of_each_mode():
    z = np.concatenate(
        [cloud(4000) @ np.array([[2.0, 0, 0], [1, 1, 0], [0, 0, 3]]), cloud(4000, 5.0, 0.1)]
    )
    mode = np.repeat([0, 1], 4000)
    roots = np.asarray(covariance_roots(jnp.asarray(z), jnp.asarray(mode), 2))
    for m in range(2):
        np.testing.assert_allclose(
            roots[m] @ roots[m].T, np.cov(z[mode == m].T, ddof=0), rtol=0.02, atol=0.02
        )


def walked(bug=""):
    """Standard normal points above a limit: x1 > 0.5, many at once, after a walk from exact draws.

    Bug: the height is left out.
    """
    count, dims = 4000, 2
    z = RNG.normal(size=(200_000, dims))
    z = jnp.asarray(z[z[:, 0] > 0.5][:count])
    densities = lambda z: (jnp.zeros(()) if bug else -0.5 * jnp.sum(z**2), z[0])
    log_prior, log_likelihood = jax.vmap(densities)(z)
    start = slice_walk.Particles(z, log_prior, log_likelihood, jnp.full(count, 0.5))
    limit = slice_walk.Limit(jnp.full(count, 0.5), jnp.full(count, 0.5))
    turn = lambda uniform: ndtri(uniform[:dims].T)
    moved, _, evaluations, *_ = slice_walk.walk(
        random.key(0), densities, start, limit, turn, 20, 3.0
    )
    assert evaluations > 20 * count
    return np.asarray(start.z), np.asarray(moved.z)


@pytest.mark.parametrize("bug", ["", "no height"], ids=["right", "planted"])
def test_a_walk_leaves_the_prior_above_the_limit_alone(bug):
    before, after = walked(bug)
    assert (after[:, 0] > 0.5).all()
    assert (before != after).any(1).mean() > 0.99
    p = min(
        kstest(after[:, 1], "norm").pvalue, kstest(after[:, 0], truncnorm(0.5, np.inf).cdf).pvalue
    )
    assert (p > 1e-3) == (not bug)


@pytest.mark.parametrize(
    "bug", ["", "below the limit", "no label"], ids=["right", "planted limit", "planted label"]
)
def test_offers_above_the_limit_are_taken(bug, monkeypatch):
    """From a place where it could not stay: a likelihood that is flat beyond 1, with the limit on
    that plateau at the label .5, leaves half of the plateau and all of the hill behind it. The
    planted bugs: any offer is taken, or each of the plateau.
    """
    count = 8000
    if bug:
        above = slice_walk.is_above
        at_least = lambda log_likelihood, label, limit: log_likelihood >= limit.log_likelihood
        monkeypatch.setattr(
            slice_walk,
            "is_above",
            at_least if bug == "no label" else lambda *given: above(*given) | True,
        )
    likelihood = lambda z: jnp.where(z < 1, z, jnp.where(z < 2, 1.0, z))
    densities = lambda z: (-0.5 * jnp.sum(z**2), likelihood(z[0]))
    start = slice_walk.Particles(
        jnp.full((count, 1), 3.0), jnp.full(count, -4.5), jnp.full(count, 3.0), jnp.full(count, 0.9)
    )
    limit = slice_walk.Limit(jnp.ones(count), jnp.full(count, 0.5))
    turn, offers = (
        lambda uniform: jnp.ones((count, 1)),
        random.normal(random.key(1), (20 * count, 1)),
    )
    given = (densities, start, limit, turn, 5, 3.0, offers)
    found, halfway, evaluations, offered, *_ = slice_walk.walk(random.key(0), *given, 0, 200)
    plateau, hill = norm.cdf(2) - norm.cdf(1), norm.sf(2)
    share = np.mean(np.asarray(found.z)[:, 0] < 2)
    assert (abs(share - 0.5 * plateau / (0.5 * plateau + hill)) < 0.02) != bool(bug)
    np.testing.assert_array_equal(halfway, found.z)  # all at once, with nothing halfway
    if not bug:
        assert abs(evaluations / count - 1 / (0.5 * plateau + hill)) < 0.5
        assert offered == evaluations


def test_lanes_walk_where_no_offers_are_left():
    """Ten offers, the first five of which are used: five lanes take one each, the
    others walk away from where they were.
    """
    count, offers = 8, jnp.arange(10.0, 20.0)[:, None]
    start = slice_walk.Particles(
        jnp.zeros((count, 1)), jnp.zeros(count), jnp.zeros(count), jnp.full(count, 0.9)
    )
    limit = slice_walk.Limit(jnp.full(count, -1.0), jnp.zeros(count))
    densities = lambda z: (-0.5 * jnp.sum(z**2), jnp.zeros(()))
    turn = lambda uniform: jnp.ones((count, 1))
    given = start, limit, turn, 3, 3.0, offers, 5, 100
    found, _, _, offered, *_ = slice_walk.walk(random.key(0), densities, *given)
    assert offered == 5
    np.testing.assert_array_equal(found.z[:5, 0], [15, 16, 17, 18, 19])
    assert (np.abs(np.asarray(found.z)[5:, 0]) < 6).all()
    assert (np.asarray(found.z)[5:, 0] != 0).all()


def test_points_of_equal_likelihood_are_ordered_by_their_labels():
    """On a plateau at the limit every new label is above that of the limit, evenly."""
    count = 2000
    start = slice_walk.Particles(
        jnp.zeros((count, 1)), jnp.zeros(count), jnp.zeros(count), jnp.full(count, 0.9)
    )
    limit = slice_walk.Limit(jnp.zeros(count), jnp.full(count, 0.6))
    densities = lambda z: (-0.5 * jnp.sum(z**2), jnp.zeros(()))
    moved, *_ = slice_walk.walk(
        random.key(0), densities, start, limit, lambda uniform: jnp.ones((count, 1)), 3, 3.0
    )
    assert kstest((np.asarray(moved.label) - 0.6) / 0.4, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("power", [0.0, 1.0], ids=["beside", "within"])
def test_vectors_where_the_likelihood_is_nan_are_counted_and_not_gone_to(power):
    """To the right of 1.

    Where the density that a walk leaves alone has the likelihood in it, it is NaN there itself.
    """
    count = 500
    z = -jnp.abs(random.normal(random.key(1), (count, 1)))
    likelihood = lambda z: jnp.where(z[0] > 1, jnp.nan, -jnp.sum(z**2))
    densities = lambda z: (-0.5 * jnp.sum(z**2) + (likelihood(z) if power else 0.0), likelihood(z))
    start = slice_walk.Particles(z, *jax.vmap(densities)(z), jnp.full(count, 0.5))
    limit = slice_walk.Limit(jnp.full(count, -jnp.inf), jnp.full(count, 0.5))
    turn = lambda uniform: ndtri(uniform[:1].T)
    ended = slice_walk.walk(random.key(0), densities, start, limit, turn, 8, 3.0)
    assert 100 < ended.num_nan < 0.5 * ended.num_evaluations
    assert (ended.at.z < 1).all()
    beside = slice_walk.walk(
        random.key(0), lambda z: (-0.5 * jnp.sum(z**2), -jnp.sum(z**2)), start, limit, turn, 8, 3.0
    )
    assert beside.num_nan == 0


def test_halfway_is_where_a_walk_of_half_the_steps_ends():
    """The same random numbers: exactly there. A single step has no half."""
    count = 50
    z = jnp.asarray(RNG.normal(size=(count, 2)))
    densities = lambda z: (-0.5 * jnp.sum(z**2), -jnp.sum(z**2))
    log_prior, log_likelihood = jax.vmap(densities)(z)
    start = slice_walk.Particles(z, log_prior, log_likelihood, jnp.full(count, 0.5))
    limit = slice_walk.Limit(jnp.full(count, -20.0), jnp.full(count, 0.5))
    turn = lambda uniform: ndtri(uniform[:2].T)
    walk = lambda num_steps: slice_walk.walk(
        random.key(0), densities, start, limit, turn, num_steps, 3.0
    )
    _, halfway, *_ = walk(8)
    np.testing.assert_array_equal(halfway, walk(4)[0].z)
    assert (np.asarray(halfway) != np.asarray(walk(5)[0].z)).any()
    np.testing.assert_array_equal(walk(1)[1], z)
