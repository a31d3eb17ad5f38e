"""Label switching: which plates have exchangeable members, copies of a vector, and what nested
sampling makes of them.
"""

from functools import cache
from itertools import permutations
from math import lgamma

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from inference import Driver, NestedSampler, Program, Staged, StructureError
from inference.maths.normal_mixture import Defensive, NormalMixture, NormalSummary
from inference.reading.density import (
    Exchangeable,
    Split,
    canonical_densities,
    exchangeable,
    relabel,
)
from tests.inference.stages import begun
from zoo.staged_learning import family, full

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(20, 2)), RNG.integers(0, 3, 20)
ORDER = 4


@cache
def found(order=ORDER, model=family, **options):
    return exchangeable(Split(Program(model(order, num_classes=3, **options), X, Y)))


@cache
def heights(names=("node", "height", "slope"), first=0.0):
    """A layer of nodes under other names; with `first` the prior of the first node is another."""

    def model(x, y):
        with numpyro.plate(names[0], 3):
            loc = jnp.zeros(3).at[0].set(first)
            height, slope = (
                numpyro.sample(names[1], dist.Normal(loc, 1.0)),
                numpyro.sample(names[2], dist.Normal(0.0, 2.0)),
            )
        with numpyro.plate("row", len(x)):
            numpyro.sample("y", dist.Normal(jnp.tanh(jnp.outer(x, slope)) @ height, 0.5), obs=y)

    return model


@cache
def of_nodes(model):
    return exchangeable(Split(Program(model, X[:, 0], X[:, 1])))


def test_the_plate_is_told_from_the_model():
    """Clusters are such, features and rows are not; a single cluster has no other to change
    places with.
    """
    assert getattr(found(), "plate", None) == "cluster"
    assert getattr(found(cluster=full), "plate", None) == "cluster"
    assert found(1) is None
    assert getattr(of_nodes(heights()), "plate", None) == "node"
    assert getattr(of_nodes(heights(("a", "b", "c"))), "plate", None) == "a"


@pytest.mark.parametrize("first", [0.0, 0.3])
def test_an_edit_that_gives_a_member_a_name_is_followed(first):
    assert (of_nodes(heights(first=first)) is None) is (first != 0.0)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_columns_of_the_same_mean_and_spread_have_names(bug, monkeypatch):
    """One Normal of a standardised table says the same when its columns change places, and of a
    part of the rows it would not. The planted bug: the likelihood as one number.
    """
    if bug:
        terms = Exchangeable._terms
        monkeypatch.setattr(
            Exchangeable,
            "_terms",
            lambda self, *given: jnp.stack([(of := terms(self, *given))[0], of[1:].sum()]),
        )
    x = (X - X.mean(0)) / X.std(0)
    assert (exchangeable(Split(Program(family(1, num_classes=3), x, Y))) is None) != bug


def test_rows_that_give_members_names_are_no_more_of_the_same():
    """The means of equal columns may change places."""

    def columns(x):
        with numpyro.plate("column", 2):
            mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        with numpyro.plate("row", len(x)):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    alike, other = np.repeat(X[:, :1], 2, 1), X
    reading, _ = Staged(columns, num_stages=1, num_live=40, num_walkers=0).read(
        Program(columns, alike)
    )
    reading.more(Program(columns, alike[:10]))
    with pytest.raises(
        StructureError,
        match="plate 'column': so far its members were exchangeable, and with these rows they "
        "are not",
    ):
        reading.more(Program(columns, other))


def test_a_weight_that_is_not_said_to_be_of_the_clusters_is_none_of_them():
    """Without its name among the dimensions of beta, the plate's members cannot change places in
    beta.
    """

    def nameless(x, y):
        beta = numpyro.sample("beta", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("cluster", 3):
            mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "y",
                dist.MixtureSameFamily(dist.Categorical(probs=beta), dist.Normal(mu, 1.0)),
                obs=x,
            )

    assert exchangeable(Split(Program(nameless, X[:, 0], Y))) is None


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("options", [{}, {"cluster": full}], ids=["diagonal", "full"])
def test_a_vector_and_the_same_with_other_places_are_alike(options, bug, monkeypatch):
    """The same likelihood, and values whose members have moved.

    Planted: one site is left behind.
    """
    exchange = found(**options)
    assert exchange is not None
    if bug:
        monkeypatch.delitem(exchange._axis, "mu")
    order = np.array([2, 0, 3, 1])
    split = exchange.split
    told = jax.jit(lambda z: (split.densities(z)[1], split.values(z)["beta"]))
    draw, placed = jax.jit(split.draw), jax.jit(lambda z, order: exchange.permuted(z, order))
    for key in random.split(random.key(0), 5):
        z = draw(key)
        moved = placed(z, order)
        (one, beta), (other, beta_of_moved) = told(z), told(moved)
        assert np.allclose(one, other) != bug
        np.testing.assert_allclose(beta_of_moved, np.asarray(beta)[order])
        np.testing.assert_allclose(placed(moved, np.argsort(order)), z, atol=1e-9)


def test_places_are_found_again():
    """Whatever the places of a vector, they become those of the reference, of which it is a
    noisy copy.
    """
    exchange = found()
    assert exchange is not None
    near = np.asarray(
        jax.jit(exchange.split.draw)(random.key(2))
        + 0.02 * random.normal(random.key(3), (30, exchange.split.size))
    )
    reference = jax.jit(jax.vmap(exchange.features))(near[:1])
    reference = jax.jit(exchange.first_reference)(near)._replace(location=reference[0])
    again = jax.jit(lambda z, order: exchange.relabelled(exchange.permuted(z, order), reference))
    for number, order in enumerate(RNG.permuted(np.tile(np.arange(ORDER), (10, 1)), axis=1)):
        np.testing.assert_allclose(again(near[number], order), near[number], atol=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e200])
def test_a_vector_that_is_not_finite_stays_so_and_no_member_is_lost(value):
    exchange = of_nodes(heights())
    assert exchange is not None
    draw = jax.jit(exchange.split.draw)
    reference = jax.jit(exchange.first_reference)(
        np.stack([draw(key) for key in random.split(random.key(2), 10)])
    )
    z = np.array(draw(random.key(3)))
    z[0] = value
    # eager, NumPyro would refuse z
    assert sorted(jax.jit(exchange._matching)(z, reference).tolist()) == [0, 1, 2]
    np.testing.assert_array_equal(
        jnp.isfinite(jax.jit(exchange.relabelled)(z, reference)).all(), np.isfinite(value)
    )


def in_turn(self, z, reference):
    """A planted bug: members go to the nearest place that is left in the order in which they
    come, so that copies differ.
    """
    left = jnp.sum(
        (self.features(z)[:, None] - reference.location[None]) ** 2 / reference.variance, -1
    )
    order = jnp.zeros(self.count, jnp.int32)
    for member in range(self.count):
        place = jnp.argmin(left[member])
        order, left = order.at[place].set(member), left.at[:, place].set(jnp.inf)
    return order


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_all_copies_come_to_one_of_them(bug, monkeypatch):
    """However far from the reference: one copy of 24 is alike, and the others come to it."""
    exchange = found()
    assert exchange is not None
    if bug:
        monkeypatch.setattr(Exchangeable, "_matching", in_turn)
    draw = jax.jit(exchange.split.draw)
    vectors = np.stack([draw(key) for key in random.split(random.key(2), 30)])
    reference, is_right = jax.jit(exchange.first_reference)(vectors), []
    orders = np.array(list(permutations(range(ORDER))))

    @jax.jit
    def of_copies(z):
        copies = jax.vmap(exchange.permuted, (None, 0))(z, orders)
        return copies, *(
            jax.vmap(of, (0, None))(copies, reference)
            for of in (exchange.relabelled, exchange.is_canonical)
        )

    for z in vectors[1:8]:
        copies, chosen, are_alike = map(np.asarray, of_copies(z))
        is_one = are_alike.sum() == 1
        is_copy = np.abs(chosen[0] - copies).max(1).min() < 1e-6
        is_right.append(is_one and is_copy and np.abs(chosen - chosen[0]).max() < 1e-6)
    assert all(is_right) != bug


def test_shuffled_values_keep_members_whole():
    exchange = found()
    assert exchange is not None
    values = jax.jit(lambda key: exchange.split.values(exchange.split.draw(key)))(random.key(2))
    orders, ordered = set(), jax.jit(exchange.ordered)
    for shuffle in RNG.permuted(np.tile(np.arange(ORDER), (20, 1)), axis=1):
        other = ordered(values, shuffle)
        order = [
            int(np.flatnonzero(np.asarray(values["beta"]) == weight)[0])
            for weight in np.asarray(other["beta"])
        ]
        orders.add(tuple(order))
        for name in values:
            np.testing.assert_array_equal(other[name], np.asarray(values[name])[order])
    assert len(orders) > 8


def bumps(y):
    """Two places on a line, of equal rank: Normal data about each, weights alike. Its evidence
    is known by a grid.
    """
    with numpyro.plate("bump", 2):
        place = numpyro.sample("place", dist.Normal(0.0, 3.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample(
            "y",
            dist.MixtureSameFamily(
                dist.Categorical(probs=jnp.ones(2) / 2), dist.Normal(place, 0.5)
            ),
            obs=y,
        )


BUMPS = np.array([-1.3, -1.0, -0.8, 0.9, 1.2, 1.4])


def bumps_evidence():
    grid = np.linspace(-8, 8, 801)
    normal = lambda x, scale: np.exp(-0.5 * (x / scale) ** 2) / scale / np.sqrt(2 * np.pi)
    of = normal(BUMPS[:, None] - grid, 0.5)
    likelihood = np.prod(0.5 * (of[:, :, None] + of[:, None, :]), axis=0)
    prior = normal(grid, 3.0)
    return np.log((likelihood * prior[:, None] * prior).sum() * (grid[1] - grid[0]) ** 2)


BUGS = ["right", "one copy", "draws of all copies"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", BUGS)
def test_vectors_that_are_alike_stand_for_all(bug, monkeypatch):
    """The prior on canonical vectors is a density, and so is a defensive Normal mixture.

    The mean of the one over the other, at draws of the other, is 1. Planted: the prior has the
    density of one copy, or its draws are not made canonical.
    """
    exchange = of_nodes(heights())
    assert exchange is not None
    split, named = exchange.split, Defensive(NormalSummary(exchange.split.size), 0.5)
    own = jax.jit(split.draw)
    mean = np.asarray(own(random.key(5)))
    clumps = NormalMixture(*map(jnp.asarray, (np.zeros(1), mean[None], np.eye(split.size)[None])))
    reference = jax.jit(exchange.first_reference)(
        np.stack([mean, *(own(key) for key in random.split(random.key(2), 20))])
    )
    if bug == "one copy":
        monkeypatch.setattr(exchange, "log_copies", 0.0)
    rng = np.random.default_rng(1)
    of_prior = split.draws(rng, 4000)
    if bug != "draws of all copies":
        of_prior = relabel(exchange, of_prior, reference)
    z = named.draws(rng, clumps, of_prior)
    densities = canonical_densities(exchange, reference, split.densities)
    log_prior = np.asarray(jax.jit(jax.vmap(densities))(z)[0])
    ratio = np.exp(log_prior - named.log_densities(clumps, z, log_prior))
    assert ratio.max() < 2.0001
    assert (abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(4000)) == (bug == "right")


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_evidence_is_that_of_all_places(bug, monkeypatch):
    """The evidence is that of all copies of a vector.

    Planted: canonical points are taken as draws from one of two copies, of half the prior.
    """
    attrs = (
        Driver(
            NestedSampler(bumps, num_live=200), num_samples=400, num_chains=8, progress_bar=False
        )
        .run(0, BUMPS)
        .attrs
    )
    off = attrs["log_evidence_of_replicates"] - bumps_evidence() - (lgamma(3) if bug else 0.0)
    z = off / attrs["log_evidence_se_of_replicates"]
    assert (abs(z.mean()) < 3.3 / np.sqrt(8)) != bug


@pytest.mark.slow
@pytest.mark.parametrize("rename", [True, False])
def test_draws_are_from_all_places_though_live_points_are_in_one(rename):
    driver = Driver(
        NestedSampler(bumps, num_live=200, rename=rename, track_modes=False),
        num_samples=2000,
        progress_bar=False,
    )
    place = driver.run(0, BUMPS)["posterior"]["place"].values[0]
    assert rename is False or abs(((place[:, 0] < place[:, 1]).mean()) - 0.5) < 0.06
    live = np.asarray(driver.states[0].live.z)
    assert (len(np.unique(live[:, 0] < live[:, 1])) == 1) or not rename


def test_the_setting_is_taken():
    """Without relabelling the sampler stays as it was; with it, it has a reference."""
    state, _, _ = begun(NestedSampler(bumps, num_live=30, rename=False), BUMPS)
    assert not len(state.reference.location)
    state, reading, _ = begun(NestedSampler(bumps, num_live=30), BUMPS)
    assert len(state.reference.location)
    assert isinstance(reading.exchange, Exchangeable)
