"""Directions of walks: not through the origin, as long as the mode is wide, of a few numbers or
of all; and what came of it before.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from diagnostics import report
from inference import Driver, NestedSampler
from inference.kernels.nested import kernel as _nesting
from inference.maths.slice_walk import deviations_by_mode, direction

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SIZE, COUNT, LANES = 4, 30, 20_000
Z = np.random.default_rng(0).normal(size=(COUNT, SIZE)) * [1.0, 2.0, 0.1, 5.0]


def drawn(own, z=Z, spread=0.0, count=COUNT):
    fill = lambda value: jnp.full(LANES, value, jnp.int32)
    deviation = jnp.broadcast_to(jnp.asarray(spread), (LANES, SIZE))
    given = jnp.asarray(z), fill(0), fill(count), fill(own), deviation
    uniform = random.uniform(random.key(0), (5 + 2 * SIZE, LANES), minval=1e-300)
    return np.asarray(direction(uniform, *given))


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_origin_takes_no_part(bug):
    """A point that is far away is in no difference where it is the origin.

    Planted: another one is taken for the origin.
    """
    z = Z.copy()
    z[7] += 1000.0
    assert (np.abs(drawn(7 + bug, z)).max() < 100) != bug


def test_pairs_are_even():
    """Points that are far apart from each other: each pair but those with the origin comes as
    often as any other, in both orders.
    """
    far = np.zeros((5, SIZE))
    far[:, 0] = [0.0, 1.0, 10.0, 100.0, 1000.0]
    taken = drawn(2, far, count=5)
    whole = taken[(taken[:, 0] != 0)][:, 0] * np.sqrt(2)
    # lengths are by the number of latent numbers that change
    scales = np.sqrt(np.arange(1, SIZE + 1))
    values = np.round(np.abs(whole)[:, None] * scales, 6)
    pairs = [999.0, 900.0, 99.0, 1000.0, 100.0, 1.0]
    counts = np.array([np.isclose(values, pair).any(1).sum() for pair in pairs])
    assert counts.sum() == len(whole)
    np.testing.assert_allclose(counts / counts.sum(), 1 / 6, atol=0.02)
    assert abs((whole > 0).mean() - 0.5) < 0.02


def test_as_long_as_the_mode_is_wide_and_of_all_numbers_of_latent_numbers():
    spread = np.asarray(deviations_by_mode(jnp.asarray(Z), jnp.zeros(COUNT, jnp.int32), 1))[0]
    np.testing.assert_allclose(spread, Z.std(0))
    taken = drawn(0, spread=spread)
    part = taken != 0
    np.testing.assert_allclose(np.mean(np.sum((taken / spread) ** 2, 1)), 1.0, atol=0.1)
    assert (np.bincount(part.sum(1), minlength=SIZE + 1)[1:] > LANES / 20).all()
    np.testing.assert_allclose(part.mean(0), part.mean(), atol=0.02)


def test_two_points_have_no_difference_without_the_origin():
    assert np.isfinite(drawn(0, spread=1.0, count=2)).all()
    assert not drawn(0, count=2).any()


def test_spreads_are_those_of_each_mode():
    mode = np.repeat([0, 2], [10, 20])
    found = np.asarray(deviations_by_mode(jnp.asarray(Z), jnp.asarray(mode), 3))
    np.testing.assert_allclose(found[[0, 2]], [Z[:10].std(0), Z[10:].std(0)])
    assert not found[1].any()


def normal(y=0.0):
    """Twenty numbers: log Z is that of a Normal of variance 1.01."""
    x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
    numpyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=jnp.full(20, y))


def of_any_two(uniform, points, first, count, own, deviation):
    """What was there before: differences of all points, the origin among them."""
    one = (uniform[0] * count).astype(jnp.int32)
    other = (one + 1 + (uniform[1] * (count - 1)).astype(jnp.int32)) % count
    return (points[first + one] - points[first + other]) / np.sqrt(2 * points.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_few_live_points_of_many_numbers(bug, monkeypatch):
    """Forty live points of twenty numbers: the error is as claimed."""
    if bug:
        monkeypatch.setattr(_nesting, "direction", of_any_two)
    driver = Driver(
        NestedSampler(normal, num_live=40), num_samples=10, num_chains=3, progress_bar=False
    )
    tree = driver.run(0)
    attrs = tree.attrs
    exact = -10 * np.log(2 * np.pi * 1.01)
    z = (attrs["log_evidence_of_replicates"] - exact) / attrs["log_evidence_se_of_replicates"]
    assert (np.abs(z).max() < 3.5) != bug
    assert (np.abs(z.mean()) < 2.0) != bug
    assert bug or report(tree)["walks"].ok


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.25, 1.0])
def test_walks_that_are_too_short_grow_or_are_reported(memory):
    driver = Driver(
        NestedSampler(normal, num_live=40, num_sweeps=0.5, memory=memory),
        num_samples=10,
        progress_bar=False,
    )
    page = report(driver.run(0))
    assert page["walks"].ok is (memory < 1)
    assert memory < 1 or "more steps for each point" in page["walks"].reason


def test_walks_grow_by_what_they_keep():
    grown = lambda longer, halfway, memory=0.25: float(
        _nesting.lengthened(jnp.asarray(longer), jnp.asarray(halfway), memory)
    )
    assert grown(1.0, 1 / 1.5) == pytest.approx(1.0)  # a correlation of .25
    assert grown(1.0, 0.5) > 1.0 > grown(1.0, 0.9)
    assert grown(0.0, 0.9) == 0.0
    assert grown(0.0, 0.5, memory=1.0) == 0.0
    assert grown(np.log(30.0), 0.5) == pytest.approx(np.log(30.0))
