"""Steps along a Hilbert curve leave the prior above the limit alone, and nested sampling with them finds the evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.stats import kstest, truncnorm

from inference import Driver, NestedSampler
from inference.kernels._nested_curve import curve, reach
from inference.kernels._nested_moves import Limit, Points, walk
from tests.inference.nests import EXACT

COUNT, WIDTH = 4000, 4.0
RNG = np.random.default_rng(0)


def wide(size=2, count=COUNT):
    """A mode's centre and standard deviations, for each lane."""
    return jnp.broadcast_to(jnp.linspace(0.2, 0.8, size), (count, size)), jnp.broadcast_to(jnp.linspace(0.5, 1.5, size), (count, size))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("size", [7, 1, 2])
def test_a_step_forth_and_back_ends_where_it_began(size):
    with jax.enable_x64(True):
        chart = curve(*wide(size), WIDTH)
        z, step = jnp.asarray(RNG.normal(size=(COUNT, size))), jnp.asarray(RNG.uniform(-2, 2, COUNT))
        share = reach(random.key(0), COUNT, size, z.dtype)
        there = chart.at(z, share, step)
        assert (np.abs(there - z).max(1) > 0.01).mean() > 0.9
        np.testing.assert_allclose(chart.at(there, share, -step), z, atol=1e-6)


def test_short_steps_along_the_curve_end_nearby():
    centre, spread = wide(3)
    z = jnp.asarray(RNG.normal(size=(COUNT, 3)), centre.dtype)
    far = lambda share: np.median(np.abs(curve(centre, spread, WIDTH).at(z, jnp.full((COUNT, 1), share), jnp.ones(COUNT)) - z))
    assert far(1e-6) < 0.1 * far(1e-1)


def walked(bug=False):
    """Standard normal points with x1 > 0.5, before and after a walk from exact draws. Bug: the prior is taken as if it were the chart's."""
    z = RNG.normal(size=(200_000, 2))
    z = jnp.asarray(z[z[:, 0] > 0.5][:COUNT])
    densities = lambda z: (-0.5 * jnp.sum(z**2), z[0])
    start = Points(z, *jax.vmap(densities)(z), jnp.full(COUNT, 0.5))
    limit = Limit(jnp.full(COUNT, 0.5), jnp.full(COUNT, 0.5))
    chart = curve(*wide(), WIDTH)
    chart = chart._replace(log_stretch=lambda z: jnp.zeros(len(z))) if bug else chart
    turn = lambda key: reach(key, COUNT, 2, z.dtype)
    moved, *_ = walk(random.key(0), densities, start, limit, turn, 20, WIDTH, chart)
    return np.asarray(start.z), np.asarray(moved.z)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_walk_leaves_the_prior_above_the_limit_alone(bug):
    before, after = walked(bug)
    assert (after[:, 0] > 0.5).all()
    assert abs(np.corrcoef(before[:, 1], after[:, 1])[0, 1]) < 0.1  # twenty steps forget where they began
    p = min(kstest(after[:, 1], "norm").pvalue, kstest(after[:, 0], truncnorm(0.5, np.inf).cdf).pvalue)
    assert (p > 1e-3) == (not bug)


@pytest.mark.slow
@pytest.mark.usefixtures("x64", "numpyro_promotion")
def test_a_small_run_with_them_is_near_the_evidence():
    model, args, exact = EXACT["line"]
    kernel = NestedSampler(model, num_live=60, along_curve=0.5)
    attrs = Driver(kernel, num_samples=10, progress_bar=False).run(0, *args).attrs
    assert abs(attrs["log_evidence"] - exact) < 3.5 * attrs["log_evidence_se"]


@pytest.mark.usefixtures("x64", "numpyro_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["line", "two modes"])
def test_nested_sampling_with_them_finds_the_evidence(name):
    model, args, exact = EXACT[name]
    found, evaluations = {}, {}
    for share in (0.0, 0.5):
        kernel = NestedSampler(model, num_live=200, along_curve=share)
        tree = Driver(kernel, num_samples=100, num_chains=8, progress_bar=False).run(0, *args)
        found[share], evaluations[share] = tree.attrs["log_evidence_of_replicates"], np.mean(tree.attrs["num_evaluations_of_replicates"])
        z = (found[share] - exact) / tree.attrs["log_evidence_se_of_replicates"]
        assert 0.4 < np.sqrt(np.mean(z**2)) < 1.7
    assert (found[0.0] != found[0.5]).all()
    assert evaluations[0.5] > 1.3 * evaluations[0.0]


def test_a_wrong_share_is_refused():
    with pytest.raises(ValueError, match=r"along_curve: found -0.5, wanted a number, 0 or more"):
        NestedSampler(lambda: None, along_curve=-0.5)
