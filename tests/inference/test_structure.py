"""Every family against its closed form, on a model and on the same model renamed; every refusal by the name of the site."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from inference.conditionals import BlockNormal
from inference.program import Program
from inference.structure import ByColumn, StructureError, conditional, draw, identify

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
RNG = np.random.default_rng(0)
ROWS, COLUMNS, RANK = 6, 4, 2
Y, OTHER, MATRIX = RNG.normal(size=ROWS), RNG.normal(size=3), RNG.normal(size=(ROWS, COLUMNS))
COUNTS, DESIGN = RNG.poisson(3.0, size=ROWS), RNG.normal(size=(ROWS, 3))
GROUP, LABELS = np.array([0, 1, 2, 0, 1, 0]), np.array([0, 2, 2, 1, 2, 0])
TABLE = RNG.multinomial(9, [0.2, 0.3, 0.5], size=ROWS)


def location():
    mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=Y)
    with numpyro.plate("other row", 3):
        numpyro.sample("other", dist.Normal(3.0 * mean, 2.0), obs=OTHER)


def location_closed(values, bug):
    precision = 1 / 4 + ROWS / 0.25 + 3 * 9 / 4
    return dist.Normal((1 / 4 + Y.sum() / 0.25 + (3 + bug) * OTHER.sum() / 4) / precision, precision**-0.5)


def groups():
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("group", 3):
        mean = numpyro.sample("mean", dist.Normal(0.0, spread))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean[GROUP], 0.5), obs=Y)


def groups_closed(values, bug):
    count, total = np.bincount(GROUP), np.bincount(GROUP, Y)
    precision = values["spread"] ** -2 + (count + bug) / 0.25
    return dist.Normal(total / 0.25 / precision, precision**-0.5)


def bounded():
    level = numpyro.sample("level", dist.HalfNormal(2.0))
    with numpyro.plate("row", ROWS):
        fraction = numpyro.sample("fraction", dist.Uniform(-1.0, 0.5))
        numpyro.sample("y", dist.Normal(level + fraction, 0.5), obs=Y)


def level_closed(values, bug):
    precision = 1 / 4 + ROWS / 0.25
    mean = (Y - values["fraction"]).sum() / 0.25 / precision
    return dist.TruncatedNormal(mean + bug, precision**-0.5, low=0.0)


def fraction_closed(values, bug):
    return dist.TruncatedNormal(Y - values["level"], 0.5 + bug, low=-1.0, high=0.5)


def rates():
    with numpyro.plate("row", ROWS):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 3.0))
        numpyro.sample("counts", dist.Poisson(rate * 1.5), obs=COUNTS)
        numpyro.sample("more", dist.Poisson(rate), obs=COUNTS[::-1].copy())


def rates_closed(values, bug):
    return dist.Gamma(2.0 + COUNTS + COUNTS[::-1], 3.0 + 1.5 + 1.0 + bug)


def scales():
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 3.0))
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 3.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=Y)
        numpyro.sample("again", dist.Normal(mean, variance**0.5), obs=2.0 * Y)


def precision_closed(values, bug):
    return dist.Gamma(2.0 + (ROWS + bug) / 2, 3.0 + ((Y - values["mean"]) ** 2).sum() / 2)


def variance_closed(values, bug):
    return dist.InverseGamma(2.0 + ROWS / 2, 3.0 + ((2 * Y - values["mean"]) ** 2).sum() / (2 + bug))


def batting():
    size = numpyro.sample("size", dist.Gamma(2.0, 1.0))
    with numpyro.plate("row", ROWS):
        rate = numpyro.sample("rate", dist.Beta(0.3 * size, 0.7 * size))
        numpyro.sample("hits", dist.Binomial(20, rate), obs=COUNTS)
        numpyro.sample("first", dist.GeometricProbs(rate), obs=COUNTS[::-1].copy())


def batting_closed(values, bug):
    size = values["size"]
    return dist.Beta(0.3 * size + COUNTS + 1, 0.7 * size + 20 - COUNTS + COUNTS[::-1] + bug)


def spikes():
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    with numpyro.plate("row", ROWS):
        active = numpyro.sample("active", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(3.0 * active, 1.0), obs=Y)
        numpyro.sample("counts", dist.Poisson(1.0 + active), obs=COUNTS)


def active_closed(values, bug):
    share = values["share"]
    likelihood = 3 * Y - 4.5 + COUNTS * np.log(2) - 1 + bug
    return dist.Bernoulli(logits=jnp.log(share) - jnp.log1p(-share) + likelihood)


def share_closed(values, bug):
    on = values["active"].sum()
    return dist.Beta(1.0 + on, 1.0 + ROWS - on + bug)


def mixture():
    weight = numpyro.sample("weight", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
    with numpyro.plate("component", 3):
        centre = numpyro.sample("centre", dist.Normal(0.0, 2.0))
    with numpyro.plate("row", ROWS):
        which = numpyro.sample("which", dist.Categorical(weight))
        numpyro.sample("y", dist.Normal(centre[which], 0.5), obs=Y)
        numpyro.sample("label", dist.Categorical(weight), obs=LABELS)


def which_closed(values, bug):
    gap = Y[:, None] - values["centre"]
    return dist.Categorical(logits=jnp.log(values["weight"]) - gap**2 / (0.5 + bug))


def weight_closed(values, bug):
    total = jnp.bincount(values["which"], length=3) + np.bincount(LABELS)
    return dist.Dirichlet(jnp.array([0.5, 1.0, 2.0 + bug]) + total)


def tables():
    with numpyro.plate("row", ROWS):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
        numpyro.sample("table", dist.Multinomial(9, shares), obs=TABLE)


def tables_closed(values, bug):
    return dist.Dirichlet(jnp.array([0.5, 1.0, 2.0]) + TABLE + bug)


def regression():
    weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.ones(3), 2.0 * jnp.eye(3) + 1.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(DESIGN @ weight, 0.5), obs=Y)


def regression_closed(values, bug):
    prior = jnp.linalg.inv(2.0 * jnp.eye(3) + 1.0)
    precision = prior + DESIGN.T @ DESIGN / (0.25 + bug)
    mean = jnp.linalg.solve(precision, prior @ jnp.ones(3) + DESIGN.T @ Y / 0.25)
    return dist.MultivariateNormal(mean, precision_matrix=precision)


def factors(matrix=MATRIX):
    with numpyro.plate("factor", RANK, dim=-1):
        with numpyro.plate("row", ROWS, dim=-2):
            left = numpyro.sample("left", dist.Normal(0.0, 1.0))
        with numpyro.plate("column", COLUMNS, dim=-2):
            right = numpyro.sample("right", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", ROWS, dim=-2), numpyro.plate("column", COLUMNS, dim=-1):
        numpyro.sample("matrix", dist.Normal(left @ right.T, 0.5), obs=matrix)


def left_closed(values, bug):
    right = values["right"]
    precision = jnp.eye(RANK) + right.T @ right / (0.25 + bug)
    mean = jnp.linalg.solve(precision, right.T @ MATRIX.T / 0.25).T
    return dist.MultivariateNormal(mean, precision_matrix=precision)


class Case(NamedTuple):
    model: Callable
    site: str
    family: str
    closed: Callable


CASES = [
    Case(location, "mean", "Normal", location_closed),
    Case(groups, "mean", "Normal", groups_closed),
    Case(bounded, "level", "truncated Normal", level_closed),
    Case(bounded, "fraction", "truncated Normal", fraction_closed),
    Case(rates, "rate", "Gamma", rates_closed),
    Case(scales, "precision", "Gamma", precision_closed),
    Case(scales, "variance", "inverse Gamma", variance_closed),
    Case(batting, "rate", "Beta", batting_closed),
    Case(spikes, "share", "Beta", share_closed),
    Case(spikes, "active", "Bernoulli", active_closed),
    Case(mixture, "which", "Categorical", which_closed),
    Case(mixture, "weight", "Dirichlet", weight_closed),
    Case(tables, "shares", "Dirichlet", tables_closed),
    Case(regression, "weight", "joint Normal of the last dimension", regression_closed),
    Case(factors, "left", "joint Normal of the last dimension", left_closed),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.model.__name__}-{case.site}" for case in CASES])


def start(program):
    """Values to condition on, and several values of every site to compare densities at."""
    draws = [program.draw_initial(key) for key in random.split(random.key(1), 3)]
    return draws[0], draws


def assert_same_density(found, wanted, points):
    for point in points:
        np.testing.assert_allclose(found.log_prob(point), wanted.log_prob(point), rtol=1e-8, atol=1e-8)


@each_case
def test_conditional_equals_closed_form(case):
    program = Program(case.model)
    values, draws = start(program)
    family = identify(program, case.site, values, random.key(2))
    found, residual = jax.jit(conditional, static_argnums=(0, 1, 3))(program, case.site, values, family)
    points = [point[case.site] for point in draws]
    assert family.name == case.family
    assert residual < 1e-10
    assert found.shape() == program.sites[case.site].shape
    assert_same_density(found, case.closed(values, 0.0), points)
    with pytest.raises(AssertionError):
        assert_same_density(found, case.closed(values, 0.1), points)


@each_case
def test_conditional_does_not_know_the_names(case):
    renamed = numpyro.handlers.scope(case.model, prefix="new")
    values, draws = start(Program(case.model))
    other = {f"new/{name}": value for name, value in values.items()}
    site = f"new/{case.site}"
    family = identify(Program(renamed), site, other, random.key(2))
    found, _ = conditional(Program(renamed), site, other, family)
    assert family.name == case.family
    assert_same_density(found, case.closed(values, 0.0), [point[case.site] for point in draws])


@each_case
def test_conditional_under_vmap(case):
    program = Program(case.model)
    values, draws = start(program)
    family = identify(program, case.site, values, random.key(2))
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    density = jax.vmap(lambda at: conditional(program, case.site, at, family)[0].log_prob(values[case.site]))
    wanted = jnp.stack([case.closed(point, 0.0).log_prob(values[case.site]) for point in draws])
    np.testing.assert_allclose(density(batch), wanted, rtol=1e-8, atol=1e-8)


def test_event_dims_are_kept():
    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros((2, 3)), 1.0).to_event(1))

    program = Program(model)
    values = {"x": jnp.ones((2, 3))}
    found, _ = conditional(program, "x", values, identify(program, "x", values, random.key(0)))
    assert (found.batch_shape, found.event_shape) == ((2,), (3,))


def test_all_elements_of_a_matrix_jointly():
    maps = RNG.normal(size=(ROWS, 6))

    def model():
        with numpyro.plate("a", 2, dim=-2), numpyro.plate("b", 3, dim=-1):
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(maps @ weight.ravel(), 0.5).to_event(1), obs=Y)

    program, values = Program(model), {"weight": jnp.ones((2, 3))}
    family = identify(program, "weight", values, random.key(0))
    found, _ = conditional(program, "weight", values, family)
    precision = np.eye(6) + maps.T @ maps / 0.25
    wanted = dist.MultivariateNormal(np.linalg.solve(precision, maps.T @ Y / 0.25), precision_matrix=precision)
    assert family == BlockNormal(whole=True)
    assert found.shape() == (2, 3)
    assert jnp.allclose(found.log_prob(values["weight"]), wanted.log_prob(jnp.ones(6)))


def binary_factors():
    features = np.array([[1.0, 0.5, -1.0, 2.0], [0.3, -1.0, 1.0, 0.7], [2.0, 1.0, 0.0, -0.4]])
    with numpyro.plate("row", ROWS, dim=-2):
        with numpyro.plate("feature", 3, dim=-1):
            owns = numpyro.sample("owns", dist.Bernoulli(0.3))
        with numpyro.plate("column", COLUMNS, dim=-1):
            numpyro.sample("matrix", dist.Normal(owns @ features, 0.5), obs=MATRIX)


def test_binary_columns_that_depend_on_each_other_take_turns():
    program = Program(binary_factors)
    values, _ = start(program)
    family = identify(program, "owns", values, random.key(0))
    assert isinstance(family, ByColumn)
    for column in range(3):
        found, residual = conditional(program, "owns", values, family, column=column)
        joint = [program.log_joint({"owns": values["owns"].at[4, column].set(on)}) for on in (0, 1)]
        assert residual < 1e-10
        assert jnp.allclose(found.logits[4], joint[1] - joint[0])


def test_labels_that_depend_on_each_other_take_turns():
    def model():
        with numpyro.plate("row", 3):
            label = numpyro.sample("label", dist.Bernoulli(0.5))
        numpyro.sample("total", dist.Normal(label @ jnp.array([1.0, 2.0, 4.0]), 1.0), obs=3.0)

    program, values = Program(model), {"label": jnp.array([1, 0, 1])}
    family = identify(program, "label", values, random.key(0))
    found, _ = conditional(program, "label", values, family, column=1)
    assert isinstance(family, ByColumn)
    assert jnp.allclose(found.logits, ((3 - 5) ** 2 - (3 - 7) ** 2) / 2)


def test_a_sweep_by_column_keeps_the_posterior():
    program = Program(binary_factors)
    family = identify(program, "owns", start(program)[0], random.key(0))
    rows = jnp.array(list(product((0, 1), repeat=3)))
    log_posterior = jnp.array([program.log_joint({"owns": jnp.zeros((ROWS, 3), int).at[0].set(row)}) for row in rows])
    posterior = jax.nn.softmax(log_posterior)

    def sweep(values, key):
        owns, residual = draw(key, program, "owns", {"owns": values}, family)
        return owns, (owns[0] @ jnp.array([4, 2, 1]), residual)

    _, (codes, residuals) = jax.jit(lambda: jax.lax.scan(sweep, jnp.zeros((ROWS, 3), int), random.split(random.key(3), 20_000)))()
    frequency = jnp.bincount(codes, length=8) / 20_000
    assert residuals.max() < 1e-10
    assert jnp.abs(frequency - posterior).max() < 0.02


def test_draws_have_the_shape_and_type_of_the_site():
    program = Program(mixture)
    values, _ = start(program)
    family = identify(program, "which", values, random.key(0))
    drawn, _ = draw(random.key(0), program, "which", values, family)
    assert (drawn.shape, drawn.dtype) == (values["which"].shape, values["which"].dtype)


def test_scales_and_masks_are_respected():
    seen = np.arange(ROWS) < 4

    def model():
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", ROWS), numpyro.handlers.scale(scale=2.0), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    program, values = Program(model), {"mean": jnp.array(0.3)}
    found, _ = conditional(program, "mean", values, identify(program, "mean", values, random.key(0)))
    assert jnp.allclose(found.loc, 2 * Y[seen].sum() / 9)
    assert jnp.allclose(found.scale, 1 / 3)


def test_a_bounded_site_may_be_pulled_far_across_its_bound():
    def model():
        level = numpyro.sample("level", dist.HalfNormal(2.0))
        numpyro.sample("y", dist.Normal(level, 0.01), obs=-10.0)

    program, values = Program(model), {"level": jnp.array(0.5)}
    family = identify(program, "level", values, random.key(0))
    drawn = jax.vmap(lambda key: draw(key, program, "level", values, family)[0])(random.split(random.key(1), 4000))
    assert abs(drawn.mean() * 1e5 - 1) < 5 / 4000**0.5  # exponential with rate 10 / 0.01^2


@pytest.mark.parametrize("where", [1e-6, 1e-3, 1e3, 1e6])
def test_reading_is_exact_wherever_the_site_is(where):
    program = Program(scales)
    values = {**start(program)[0], "precision": jnp.array(where)}
    found, _ = conditional(program, "precision", values, identify(program, "precision", start(program)[0], random.key(0)))
    wanted = precision_closed(values, 0.0)
    np.testing.assert_allclose((found.concentration, found.rate), (wanted.concentration, wanted.rate), rtol=1e-8)


def edit(prior=None, likelihood=None, plate=True):
    """The model `x ~ prior, y ~ likelihood(x)` with a site 'x' in a plate of rows."""

    def model():
        with numpyro.plate("row", ROWS):
            x = numpyro.sample("x", prior)
            if plate:
                numpyro.sample("y", likelihood(x), obs=Y)
        if not plate:
            numpyro.sample("y", likelihood(x), obs=Y[0])

    return model


def through(prior, link):
    def model():
        x = numpyro.sample("x", prior)
        with numpyro.plate("row", ROWS):
            numpyro.sample("labels", link(x), obs=LABELS % 2)

    return model


def cut_by_a_label():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([ROWS]).to_event(1))
    numpyro.sample("label", dist.Delta((x > 0).astype(int), event_dim=1), obs=np.ones(ROWS, int))


def bounds_another():
    x = numpyro.sample("x", dist.Gamma(2.0, 1.0))
    numpyro.sample("below", dist.Uniform(0.0, x))


def subsampled():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 100, subsample_size=ROWS):
        numpyro.sample("y", dist.Normal(x, 1.0), obs=Y)


def many_coupled_labels():
    with numpyro.plate("row", 300):
        x = numpyro.sample("x", dist.Bernoulli(0.5))
    numpyro.sample("total", dist.Normal(x.sum(), 1.0), obs=3.0)


normal, unit = (lambda x: dist.Normal(x, 1.0)), (lambda x: dist.Normal(0.0, x**-0.5))
REFUSED = {
    "Laplace prior": (edit(dist.Laplace(0.0, 1.0), normal), "Normal misses by"),
    "Laplace likelihood": (edit(dist.Normal(0.0, 1.0), lambda x: dist.Laplace(x, 1.0)), "'y' .Laplace. depends on it"),
    "StudentT likelihood": (edit(dist.Normal(0.0, 1.0), lambda x: dist.StudentT(4.0, x, 1.0)), "'y' .StudentT. depends on it"),
    "Cauchy prior": (edit(dist.Cauchy(0.0, 1.0), normal), "Its prior is Cauchy"),
    "Normal through exp": (edit(dist.Normal(0.0, 1.0), lambda x: dist.Normal(jnp.exp(x), 1.0)), "NUTS"),
    "improper": (edit(dist.ImproperUniform(dist.constraints.real, (), ()), lambda x: dist.Normal(0.0, 1.0)), "is impossible"),
    "LogNormal prior": (edit(dist.LogNormal(0.0, 1.0), unit), "Gamma is impossible.*Its prior is LogNormal"),
    "HalfCauchy prior": (edit(dist.HalfCauchy(1.0), unit), "Its prior is HalfCauchy"),
    "Gamma on a scale": (
        edit(dist.Gamma(2.0, 1.0), lambda x: dist.Normal(0.0, x)),
        "Gamma misses by.*inverse Gamma is impossible",
    ),
    "coupled Gammas": (edit(dist.Gamma(2.0, 1.0), lambda x: dist.Normal(0.0, x.sum() ** -0.5), plate=False), "Gamma misses by"),
    "coupled Betas": (
        edit(dist.Beta(2.0, 3.0), lambda x: dist.Normal(x.mean(), 0.1), plate=False),
        "Beta is impossible, truncated Normal misses by",
    ),
    "Beta squared": (through(dist.Beta(2.0, 3.0), lambda x: dist.Bernoulli(0.5 * x)), "Beta misses by"),
    "logit link": (through(dist.Normal(0.0, 1.0), lambda x: dist.Bernoulli(logits=x)), "'labels' .BernoulliLogits. depends on it"),
    "Dirichlet through softmax": (
        through(dist.Dirichlet(jnp.ones(3)), lambda x: dist.Categorical(logits=x)),
        "Dirichlet is impossible",
    ),
    "many coupled labels": (many_coupled_labels, "Bernoulli misses by"),
    "a label that cuts": (cut_by_a_label, "Normal is impossible"),
    "a support that depends": (bounds_another, "the support of 'below' depends on it"),
    "a subsampled plate": (subsampled, "plate 'row' shows 6 of 100 rows"),
    "another support": (through(dist.Poisson(3.0), lambda x: dist.Bernoulli(0.5)), "Poisson has the support.*wanted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    model, text = REFUSED[name]
    program = Program(model)
    values = {"x": jnp.full(ROWS, 0.5)} if model is cut_by_a_label else program.draw_initial(random.key(0))
    with pytest.raises(StructureError, match=f"site 'x'.*({text})"):
        identify(program, "x", values, random.key(1))


def test_a_site_that_is_not_there():
    with pytest.raises(StructureError, match=r"site 'men': no latent site of location; it has \['mean'\]"):
        identify(Program(location), "men", {"mean": jnp.array(0.0)}, random.key(0))


def test_float32_is_enough_where_the_sums_are_not_long():
    with jax.enable_x64(False):
        program = Program(factors, MATRIX.astype(np.float32))
        values, draws = start(program)
        family = identify(program, "left", values, random.key(2))
        found, residual = conditional(program, "left", values, family)
        assert residual < 1e-5
        for point in draws:
            np.testing.assert_allclose(found.log_prob(point["left"]), left_closed(values, 0.0).log_prob(point["left"]), rtol=1e-4)
