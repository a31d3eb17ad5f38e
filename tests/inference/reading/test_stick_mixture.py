"""Reading of truncated mixtures: followed when edited, and a wrong formula seen."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.handlers import scope

from inference import Program, StructureError
from inference.reading.stick_mixture import read as _read
from inference.reading.stick_mixture import structure
from inference.reading.stick_mixture.read import read_assignment
from tests.inference.mixtures import CASES, TASKS, case, of_tasks
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample
X = np.random.default_rng(0).normal(size=(30, 2))
HOLES = np.where(np.random.default_rng(1).random(X.shape) < 0.3, np.nan, X)
BITS = (X > 0).astype(float)
Y = np.arange(30) % 2


def quick(names, chosen):
    """Each reading is compiled for seconds: those not chosen are of the slow set."""
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


@cache
def read(name):
    """Program, data and what is read off it."""
    model, data = of_tasks(name) if name in TASKS else case(name)
    program = Program(model, **data)
    return program, data, read_assignment(program)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", quick(CASES, {"binary", "bits"}))
def test_each_block_is_read(name):
    program, data, found = read(name)
    rows = found.rows(program)
    assert found.known >= {*program.latent, *program.observed}
    x = rows.features if found.features else rows.columns[0]
    np.testing.assert_array_equal(x, data["x"])
    assert (found.experts is None) == ("y" not in data)
    if found.features and np.isnan(x).any():
        np.testing.assert_array_equal(rows.holes, np.argwhere(np.isnan(x)))
    if found.experts:
        y = data["y"]
        wanted = np.array(
            [
                [
                    0 if yes < 0 or 0 < yes < c else 1 if yes == c else -1
                    for c in range(1, y.max() + 1)
                ]
                for yes in y
            ]
        )
        np.testing.assert_array_equal(rows.signs, wanted)
        assert rows.design == (0, 1, 2)


def test_numbers_of_the_priors():
    prior = read("binary")[-1].prior
    assert tuple(prior.concentration) == pytest.approx((3.0, 2.0))
    np.testing.assert_allclose(prior.features.loc, np.full((3, 2), 0.3))
    np.testing.assert_allclose(prior.features.kappa, 0.6)
    np.testing.assert_allclose(prior.features.concentration, 4.0)
    np.testing.assert_allclose(
        prior.features.rate, np.broadcast_to(0.8 * np.eye(2), (3, 2, 2)), atol=1e-12
    )
    np.testing.assert_allclose(prior.experts.gamma, 0.7)
    np.testing.assert_allclose(prior.experts.concentration, 3.0)
    np.testing.assert_allclose(prior.experts.rate, 2.0)
    known = read("known precision")[-1].prior
    assert tuple(known.concentration) == (1.5, np.inf)
    np.testing.assert_allclose(known.experts.concentration, 2.0)
    assert np.isinf(known.experts.rate).all()


def test_other_names_are_followed():
    _, data = case("binary")
    found = read_assignment(Program(scope(iqgme, prefix="a"), **data))
    assert (found.z, found.sticks, found.features.site, found.experts.label) == (
        "a/z",
        "a/V",
        "a/x",
        "a/y",
    )


@pytest.mark.slow
def test_more_rows_than_are_read():
    """The proof looks at a few; labels, missing entries and data columns are those of all."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 3)), rng.integers(-1, 3, 300)
    x[rng.random(x.shape) < 0.2] = np.nan
    age = rng.normal(size=300)
    program = Program(with_age, x, y, age)
    found = read_assignment(program)
    assert found.few.sites["z"].shape[0] < 20
    rows = found.rows(program)
    np.testing.assert_array_equal(rows.features, x)
    np.testing.assert_allclose(rows.extras[:, 0], age)
    assert rows.design == (2, 0, 3, 4)
    np.testing.assert_array_equal(rows.signs[:, 0], np.where(y < 0, 0, np.where(y > 0, 1, -1)))


def with_age(x, y, age):
    """Experts that see two of three features, and a covariate; labels of two kinds are lumped
    together.
    """

    def expert(x, y, z, at):
        with at.experts:
            w = sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        seen = jnp.stack([x[:, 2], x[:, 0], jnp.ones(len(x)), jnp.asarray(age)], 1)
        with at.rows:
            t = sample("t", dist.Normal(jnp.sum(w[z] * seen, -1), 1.0))
            with handlers.mask(mask=y >= 0):
                sample("y", dist.Delta((t > 0).astype(int)), obs=(y > 0).astype(int))

    return iqgme(x, y, num_classes=3, num_experts=4, alpha=1.0, expert=expert)


@pytest.mark.slow
@pytest.mark.parametrize("units", [1e-9, 1e9])
def test_columns_are_told_apart_in_any_units(units):
    found = read_assignment(program := Program(iqgme, units * HOLES, Y, num_experts=3, alpha=1.0))
    assert found.rows(program).design == (0, 1, 2)


@pytest.mark.slow
def test_whole_numbers_are_features_too():
    whole = np.round(10 * X).astype(int)
    one, other = (
        read_assignment(Program(iqgme, x, Y, num_experts=3, alpha=1.0))
        for x in (whole, whole.astype(float))
    )
    assert one.rows(Program(iqgme, whole, Y, num_experts=3, alpha=1.0)).design == (0, 1, 2)
    np.testing.assert_allclose(one.prior.features.rate, other.prior.features.rate)


@pytest.mark.slow
def test_columns_in_small_units_are_not_told_apart_by_an_absolute_tolerance(monkeypatch):
    monkeypatch.setattr(structure, "_equal", np.isclose)
    found = read_assignment(program := Program(iqgme, 1e-9 * X, Y, num_experts=3, alpha=1.0))
    assert found.rows(program).design == (0, 0, 2)


@pytest.mark.parametrize("name", quick(["three classes", "bits", "binary tasks"], {"bits"}))
def test_many_rows_are_looked_at_in_parts(name, monkeypatch):
    program, _, found = read(name)
    whole = found.rows(program)
    monkeypatch.setattr(structure, "AT_ONCE", 5)
    parts = found.rows(program)
    assert parts.design == whole.design
    for one, other in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


PLANTED = {
    "tail of the sticks": (
        "log_sticks",
        lambda right: (
            lambda taken, left: right(taken, left).at[-1].set(right(taken, left)[-1] - left[-1])
        ),
        "z",
    ),
    "form of the features": (
        "gate_natural",
        lambda right: lambda *at: right(*at)._replace(const=right(*at).const + 0.01),
        "x",
    ),
    "normal density": (
        "_log_normal",
        lambda right: lambda x, loc, precision: right(x, loc, precision) + 0.01,
        "t",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_of_the_formulas_is_seen(name, monkeypatch):
    attribute, twin, site = PLANTED[name]
    monkeypatch.setattr(_read, attribute, twin(getattr(_read, attribute)))
    model, data = case("binary")
    with pytest.raises(StructureError, match=f"site '{site}' .*misses that by"):
        read_assignment(Program(model, **data))


@pytest.mark.slow
def test_soft_labels_of_the_paper_are_read_with_its_own_priors():
    """Gamma(.01, .01) underflows when it is drawn from; a start in the middle of the support
    does not.
    """
    found = read_assignment(Program(iqgme, HOLES, Y, num_experts=5))
    assert tuple(found.prior.concentration) == pytest.approx((0.05, 0.05))
