"""Draws that births are offered: new ones in time, each once, labelled as the live points are."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference import Driver, NestedSampler, Program
from inference.kernels.nested import kernel as _nesting
from inference.kernels.nested.kernel import BLOCK, Nesting
from inference.reading.density import relabel
from tests.inference.nests import X, Y, line
from zoo.staged_learning import family

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def begun(model=line, args=(X, Y), num_live=60):
    kernel = NestedSampler(model, num_live=num_live)
    reading, data = kernel.read(Program(model, *args))
    return kernel, reading, kernel.init(random.key(0), reading, data)


def used(reading, state, count):
    """The state after so many more of its offers were used."""
    return state._replace(
        offers=reading.used(state, jnp.asarray(count, jnp.int32) - state.offers.num_used)
    )


def test_the_first_draws_are_the_live_points():
    _, _, state = begun()
    np.testing.assert_array_equal(state.live.z, state.offers.z[:60])
    assert 60 <= state.offers.num_used < 70
    assert len(state.offers.z) == 600


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_worn_offers_are_renewed(bug, monkeypatch):
    """The planted bug: the same draws over again."""
    if bug:
        offers = Nesting._offers
        monkeypatch.setattr(
            Nesting, "_offers", lambda self, rng_key, *given: offers(self, random.key(5), *given)
        )
    kernel, reading, state = begun()
    fresh, worn = used(reading, state, 300), used(reading, state, 301)
    assert not kernel.needs_host(fresh)
    assert kernel.needs_host(worn)
    (new,) = kernel.on_host([worn], reading, {})
    (newer,) = kernel.on_host([used(reading, new, 600)], reading, {})
    assert new.offers.num_used == 0
    assert not kernel.needs_host(new)
    numbers = np.concatenate([each.offers.z[:, 0] for each in (state, new, newer)])
    assert (len(np.unique(numbers)) == 1800) is not bug
    np.testing.assert_array_equal(new.live.z, worn.live.z)


def test_no_new_ones_are_drawn_where_walks_are_cheaper():
    kernel, reading, state = begun()
    low = state._replace(volumes=state.volumes._replace(log_volume=state.volumes.log_volume - 5))
    assert not kernel.needs_host(used(reading, low, 600))


def test_offers_are_named_as_the_live_points():
    data = np.random.default_rng(0).normal(size=(20, 2))
    kernel, reading, state = begun(family(3, num_classes=0), (data,))
    assert len(state.reference.location)
    for each in (state, *kernel.on_host([used(reading, state, 400)], reading, {})):
        np.testing.assert_allclose(
            each.offers.z, relabel(reading.exchange, each.offers.z, state.reference)
        )


def test_a_few_live_points_have_a_block_of_offers():
    _, _, state = begun(num_live=20)
    assert len(state.offers.z) == BLOCK


@pytest.mark.slow
def test_chains_side_by_side_get_offers_and_room_each_when_it_needs_them(monkeypatch):
    """As one after the other."""
    monkeypatch.setattr(_nesting, "FIRST_FOLDS", 4)
    found = []
    for method in ("sequential", "vectorized"):
        driver = Driver(
            NestedSampler(line, num_live=60),
            num_chains=3,
            num_samples=10,
            chain_method=method,
            progress_bar=False,
        )
        found.append(driver.run(0, X, Y).attrs["log_evidence_of_replicates"])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert len(set(found[0])) == 3
