"""Reading of mixtures among common factors: followed when edited, refused by name, and a wrong
formula seen.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate
from numpyro.handlers import scope

from inference import CoordinateAscent, Driver, Program, StructureError
from inference.distributions import Missing
from inference.reading import factor_mixture, proof
from inference.reading.factor_mixture import has_factors, read_factors
from inference.reading.proof import further
from inference.reading.stick_mixture import read
from tests.inference.factor_mixtures import FACTORED, FEATURES, factor_case
from zoo.iqgme import iqgme
from zoo.iqgme_factors import iqgme_factors, linear_features

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample: Any = numpyro.sample


def slow_but(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", slow_but(FACTORED, {"known numbers"}))
def test_each_part_is_read(name):
    model, data = factor_case(name)
    program = Program(model, **data)
    found = read_factors(program)
    assert (found.linked.site, found.linked.scores, found.linked.loadings, found.linked.centre) == (
        "x",
        "s",
        "A",
        "c",
    )
    assert {*found.linked.latent, "s", *found.given.known} >= {*program.latent, "y"} & set(
        program.sites
    )
    assert (found.linked.shown is None) == (name == "all factors")
    np.testing.assert_array_equal(found.rows(program).features, data["x"])


@pytest.mark.slow
def test_numbers_of_the_priors():
    found = read_factors(Program(iqgme_factors, **factor_case("binary")[1]))
    prior = found.prior
    assert prior is not None
    np.testing.assert_allclose(prior.centre, 0.7**-2)
    np.testing.assert_allclose(np.stack(prior.beta), [[3.0, 3.0], [2.0, 2.0]])
    np.testing.assert_allclose(np.stack(prior.noise)[:, 0], [8.0, 2.0])
    np.testing.assert_allclose(prior.share, 1.2 / 2.2)
    np.testing.assert_allclose(prior.counts[0], 1.2)
    y = factor_case("binary")[1]["y"]
    np.testing.assert_array_equal(
        found.rows(Program(iqgme_factors, **factor_case("binary")[1])).signs[:, 0],
        np.where(y < 0, 0, 2 * y - 1),
    )


@pytest.mark.slow
def test_other_names_are_followed():
    _, data = factor_case("known numbers")
    found = read_factors(Program(scope(iqgme_factors, prefix="a"), **data))
    assert found.linked[:3] == ("a/x", "a/s", "a/A")


def test_only_latent_vectors_of_rows_are_factors():
    assert has_factors(Program(iqgme_factors, **factor_case("no labels")[1]))
    assert not has_factors(Program(iqgme, np.ones((4, 3)), num_experts=3, expert=None))


# What is refused.


def features_with(mean=lambda s, A: s @ A, prior=None, scale=None, side=False, shared=False):
    """`linear_features` with an edit."""

    def features(x, s, z, at):
        if shared:  # one probability for a factor, whatever the expert
            with plate("factor", at.num_factors, dim=-1):
                pi = sample("pi", dist.Beta(1.0, 1.0))
                with plate("expert", at.num_experts, dim=-2):
                    s = s * sample("b", dist.Bernoulli(pi))[z]
        with plate("factor", at.num_factors, dim=-2), plate("feature", at.num_features, dim=-1):
            A = sample("A", prior or dist.Normal(0.0, 1.0))
        if side:
            sample("side", dist.Normal(A.sum(), 1.0), obs=0.0)
        with plate("feature", at.num_features, dim=-1):
            psi = sample("psi", scale or dist.Gamma(2.0, 2.0))
        with plate("row", at.num_rows, dim=-2), plate("feature", at.num_features, dim=-1):
            return sample("x", Missing(dist.Normal(mean(s, A), psi**-0.5)), obs=x)

    return features


def by_the_rows(x, s, z, at):
    return linear_features(x, s, z, at, select=False, noise=1.0, centre=float(np.nanstd(x)))


REFUSALS = {
    "shape of the mean": (
        features_with(mean=lambda s, A: jnp.tanh(s @ A)),
        "site 'x' .Normal.: read as part of .* misses that by",
    ),
    "prior of loadings": (
        features_with(prior=dist.Laplace(0.0, 1.0)),
        "site 'x': it is computed from 'A' .Laplace",
    ),
    "noise": (
        features_with(scale=dist.LogNormal(0.0, 1.0)),
        "site 'x': it is computed from 'psi' .LogNormal",
    ),
    "side": (
        features_with(side=True),
        "site 'side' .Normal.: it depends on 'A', which was read as part of .'A'",
    ),
    "shared choice": (
        features_with(shared=True),
        "site 'b': its prior is computed from .'pi'.; wanted numbers, or one Beta site of shape",
    ),
    "prior of the rows": (
        by_the_rows,
        "site 'x': the numbers of the priors of its loadings depend on the rows",
    ),
}


@pytest.mark.parametrize("name", slow_but(REFUSALS, {"prior of loadings", "shared choice", "side"}))
def test_what_is_not_conjugate_is_refused_by_name(name):
    features, message = REFUSALS[name]
    x = np.random.default_rng(0).normal(size=(30, 5))
    with pytest.raises(StructureError, match=message):
        read_factors(
            Program(
                iqgme_factors,
                x,
                num_experts=3,
                num_factors=2,
                alpha=1.0,
                expert=None,
                features=features,
            )
        )


SILENT = {
    "other rows": lambda s, A: s @ A + 5.0 * (jnp.arange(len(s)) >= 20)[:, None],
    "clipped mean": lambda s, A: jnp.clip(s @ A, -50.0, 50.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SILENT)
def test_what_acts_on_some_rows_or_large_values_is_refused(name, monkeypatch):
    """Not, and so the case has power, where twelve rows are compared at values below 1."""
    x = np.random.default_rng(0).normal(size=(30, 5))
    program = Program(
        iqgme_factors,
        x,
        num_experts=3,
        num_factors=2,
        alpha=1.0,
        expert=None,
        features=features_with(mean=SILENT[name]),
    )
    with pytest.raises(
        StructureError, match="site 'x' .Normal.: read as part of .* in some row or at some value"
    ):
        read_factors(program)
    monkeypatch.setattr(
        factor_mixture, "many_rows", lambda program, z, _: factor_mixture.some_rows(program, z, 12)
    )
    near = lambda *given: [(*starts, proof.Magnitude(1.0, 1.0)) for *starts, _ in further(*given)]
    monkeypatch.setattr(read, "further", near)
    read_factors(program)


def test_what_it_cannot_do_is_refused():
    _, data = factor_case("no labels")
    with pytest.raises(
        ValueError,
        match="batch_size: found 100 for a model whose rows have latent factors; wanted None",
    ):
        Driver(CoordinateAscent(iqgme_factors, batch_size=100)).run(0, **data)


@pytest.mark.slow
def test_a_planted_error_of_the_formula_is_seen(monkeypatch):
    right = factor_mixture.row_forms

    def wrong(*at):
        const, matrix, slope = right(*at)
        return const, matrix, 1.01 * slope

    monkeypatch.setattr(factor_mixture, "row_forms", wrong)
    _, data = factor_case("known numbers")
    with pytest.raises(StructureError, match="site 'x' .Normal.: read as .*misses that by"):
        read_factors(Program(iqgme_factors, **data | {"features": partial(FEATURES, centre=0.5)}))
