"""The reader of CRP mixtures: every component is read and its numbers found, edits are followed,
and what is not conjugate is refused.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate
from scipy import stats

from inference import Program
from inference.distributions import CRP, Missing
from inference.reading.crp_mixture import grid_of, read_partition
from zoo.aclass import (
    Axes,
    aclass,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
    mixed,
    normal_inverse_chi2,
    normal_inverse_wishart,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample

RNG = np.random.default_rng(0)
BITS = (RNG.random((6, 3)) < 0.5).astype(float)
REAL = RNG.normal(size=(6, 3))
BITS[1, 2] = BITS[4, 0] = np.nan
HOLES = np.where(np.isnan(BITS), np.nan, REAL)
Y = np.array([0, 1, 0, 0, 1, 1])
ONES = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def read(component=beta_bernoulli, x=BITS, y=Y, **options):
    return read_partition(Program(aclass, x, y, component=component, **options))


COMPONENTS = {
    "beta_bernoulli": (
        partial(beta_bernoulli, beta=0.3),
        BITS,
        ("p",),
        {"concentration1": 0.3, "concentration0": 0.3},
    ),
    "dirichlet_categorical": (
        partial(dirichlet_categorical, num_values=4, beta=0.7),
        BITS,
        ("p",),
        {"concentration": 0.7},
    ),
    "gamma_poisson": (
        partial(gamma_poisson, shape=2.0, rate=0.4),
        BITS,
        ("mean",),
        {"concentration": 2.0, "rate": 0.4},
    ),
    "normal_inverse_chi2": (
        partial(normal_inverse_chi2, mean=0.5, kappa=0.2, nu=3.0, scale=2.0),
        HOLES,
        ("var", "loc"),
        {"loc": 0.5, "kappa": 0.2, "concentration": 1.5, "rate": 6.0},
    ),
    "normal_inverse_wishart": (
        partial(normal_inverse_wishart, mean=0.5, kappa=0.2, nu=5.0, scale=2.0),
        REAL,
        ("precision", "loc"),
        {"loc": 0.5, "kappa": 0.2, "concentration": 5.0, "rate": 20.0 * np.eye(3)},
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_is_read_with_its_numbers(name):
    component, x, priors, numbers = COMPONENTS[name]
    found = read(component, x, alpha=2.5, gamma=0.7, max_groups=3)
    [block] = found.blocks
    assert (found.z, found.labels, found.shares, found.scalars) == ("z", "y", "share", ())
    assert (found.num_classes, found.max_groups) == (2, 3)
    assert (block.site, block.priors, block.num_axes) == ("x", priors, 2)
    parameters = jax.jit(found.parameters)({})
    hyper = parameters.priors["x"]
    for leaf, wanted in numbers.items():
        value = getattr(hyper, leaf)
        assert value.shape[:2] == (2, 1 if name.endswith("wishart") else 3)
        np.testing.assert_allclose(value, np.broadcast_to(wanted, value.shape), rtol=1e-9)
    np.testing.assert_allclose(parameters.seating.concentration, 2.5)
    np.testing.assert_allclose(parameters.class_weights, [0.7, 0.7])


@pytest.mark.slow
def test_mixed_columns_are_blocks_of_their_own():
    parts = mixed(
        bits=([0, 2], beta_bernoulli),
        code=([1], partial(dirichlet_categorical, num_values=2)),
        size=([3], normal_inverse_chi2),
    )
    x = np.column_stack([BITS, REAL[:, 0]])
    found = read(parts, x)
    assert [block.site for block in found.blocks] == ["bits_x", "code_x", "size_x"]
    assert [block.priors for block in found.blocks] == [
        ("bits_p",),
        ("code_p",),
        ("size_var", "size_loc"),
    ]
    rows = found.rows(Program(aclass, x, Y, component=parts))
    np.testing.assert_array_equal(rows.values["bits_x"], x[:, [0, 2]])
    np.testing.assert_array_equal(rows.values["size_x"], x[:, [3]])


def renamed(table, kind):
    """AClass with other names throughout, and its plates made anew where they are used."""
    weights = sample("weights", dist.Dirichlet(jnp.array([2.0, 3.0])))
    with plate("person", len(table)):
        sort = sample("sort", dist.Categorical(weights), obs=kind)
    crp = CRP(1.5, len(table), labels=sort, num_classes=2)
    cluster = sample("cluster", crp)
    with (
        plate("kinds", 2, dim=-3),
        plate("clusters", crp.capacity, dim=-2),
        plate("question", table.shape[1], dim=-1),
    ):
        chance = sample("chance", dist.Beta(0.5, 0.6))
    with plate("person", len(table), dim=-2), plate("question", table.shape[1], dim=-1):
        sample("answer", Missing(dist.Bernoulli(chance[sort, cluster])), obs=table)


@pytest.mark.slow
def test_names_mean_nothing():
    found = read_partition(Program(renamed, BITS, Y))
    [block] = found.blocks
    assert (found.z, found.labels, found.shares, block.site, block.priors) == (
        "cluster",
        "sort",
        "weights",
        "answer",
        ("chance",),
    )
    parameters = jax.jit(found.parameters)({})
    np.testing.assert_allclose(parameters.class_weights, [2.0, 3.0])
    np.testing.assert_allclose(parameters.priors["answer"].concentration0, np.full((2, 3), 0.6))
    rows = found.rows(Program(renamed, BITS, Y))
    np.testing.assert_array_equal(rows.values["answer"], BITS)
    np.testing.assert_array_equal(rows.labels, Y)


def by_class_and_feature(x, at):
    """Another prior for each class and feature."""
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(ONES[:, None], 2.0))
    with at.rows, at.features:
        return sample("x", Missing(dist.Bernoulli(p[at.z])), obs=x)


def whole_numbers(x, at):
    """Nothing is missing, and the data are integers."""
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(0.5, 0.5))
    with at.rows, at.features:
        return sample("x", dist.Bernoulli(p[at.z]), obs=x)


def events(x, at):
    """The features of a row are one event."""
    with plate("class", 2, dim=-2), plate("group", at.groups.size, dim=-1):
        p = sample("p", dist.Beta(0.5, 0.5).expand([x.shape[1]]).to_event(1))
    with plate("row", len(x)):
        return sample("x", Missing(dist.Bernoulli(p[at.z]).to_event(1)), obs=x)


def inverse_wishart(x, at):
    """The covariance itself is drawn."""
    width, at = at.features.size, at.joint()
    with at.classes, at.groups:
        covariance = sample(
            "covariance", dist.InverseWishart(width + 2.0, scale_matrix=3.0 * jnp.eye(width))
        )
        loc = sample(
            "loc", dist.MultivariateNormal(jnp.zeros(width), covariance_matrix=covariance / 0.25)
        )
    with at.rows:
        return sample(
            "x",
            Missing(dist.MultivariateNormal(loc[at.z], covariance_matrix=covariance[at.z])),
            obs=x,
        )


def test_priors_may_differ_by_feature_and_by_class():
    hyper = jax.jit(read(by_class_and_feature).parameters)({}).priors["x"]
    np.testing.assert_allclose(hyper.concentration1, ONES)
    np.testing.assert_allclose(hyper.concentration0, np.full((2, 3), 2.0))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("component", "x", "numbers"),
    [
        (events, BITS, {"concentration1": 0.5}),
        (whole_numbers, np.isnan(BITS).astype(int), {"concentration0": 0.5}),
        (inverse_wishart, REAL, {"kappa": 0.25, "concentration": 5.0, "rate": 3.0 * np.eye(3)}),
    ],
    ids=["to_event", "whole numbers", "inverse Wishart"],
)
def test_other_ways_to_write_a_component_are_followed(component, x, numbers):
    hyper = jax.jit(read(component, x).parameters)({}).priors["x"]
    for leaf, wanted in numbers.items():
        value = getattr(hyper, leaf)
        np.testing.assert_allclose(value, np.broadcast_to(wanted, value.shape), rtol=1e-9)


def one_column(x):
    """No classes, and one feature."""
    z = sample("z", CRP(1.0, len(x)))
    with plate("group", len(x)):
        p = sample("p", dist.Beta(0.5, 0.5))
    with plate("row", len(x)):
        sample("x", Missing(dist.Bernoulli(p[z])), obs=x)


def test_without_classes_there_is_one():
    found = read_partition(Program(one_column, BITS[:, 0]))
    assert (found.labels, found.shares, found.num_classes, found.blocks[0].num_axes) == (
        None,
        None,
        1,
        1,
    )
    assert jax.jit(found.parameters)({}).priors["x"].concentration1.shape == (1, 1)
    rows = found.rows(Program(one_column, BITS[:, 0]))
    np.testing.assert_array_equal(rows.values["x"], BITS[:, :1])
    np.testing.assert_array_equal(rows.labels, np.zeros(6))


def with_shares(x, y, shares=None):
    """AClass whose classes have fixed probabilities, or no prior."""
    if shares is not None:
        with plate("row", len(x)):
            y = sample("y", dist.Categorical(jnp.array(shares)), obs=y)
    z = sample("z", CRP(1.0, len(x), labels=y, num_classes=2))
    at = (
        plate("class", 2, dim=-3),
        plate("group", len(x), dim=-2),
        plate("row", len(x), dim=-2),
        plate("feature", 3, dim=-1),
    )
    beta_bernoulli(x, Axes(*at, (y, z)))


@pytest.mark.slow
def test_classes_of_fixed_probabilities_or_of_none():
    fixed = read_partition(Program(with_shares, BITS, Y, (0.3, 0.7)))
    assert (fixed.labels, fixed.shares) == ("y", None)
    np.testing.assert_allclose(jax.jit(fixed.parameters)({}).class_weights, [0.3, 0.7])
    data = read_partition(Program(with_shares, BITS, Y))
    assert (data.labels, data.shares) == (None, None)
    np.testing.assert_array_equal(data.rows(Program(with_shares, BITS, Y)).labels, Y)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("y", [np.array([0, -1, 1, -1, 0, 1]), None], ids=["some", "none"])
def test_rows_without_a_label_are_read_as_such(y):
    program = Program(aclass, BITS, y)
    found = read_partition(program)
    assert (found.labels, found.shares) == ("y", "share")
    np.testing.assert_array_equal(found.rows(program).labels, np.full(6, -1) if y is None else y)


@cache
def with_latent_scalars():
    return read(partial(beta_bernoulli, beta=dist.Gamma(2.0, 4.0)), alpha=dist.Gamma(1.5, 1.0))


def test_latent_scalars_move_the_numbers():
    found = with_latent_scalars()
    assert found.scalars == ("alpha", "beta")
    parameters = jax.jit(found.parameters)({"alpha": 0.4, "beta": 0.9})
    np.testing.assert_allclose(parameters.seating.concentration, 0.4)
    np.testing.assert_allclose(parameters.priors["x"].concentration1, np.full((2, 3), 0.9))


def test_grid_weighs_by_density_times_spacing():
    alpha, beta = np.array([0.1, 0.3, 1.0, 3.0]), np.array([0.5, 1.0])
    points, log_prior = grid_of(with_latent_scalars(), {"alpha": alpha, "beta": beta})
    spacing = np.array([0.2, 0.45, 1.35, 2.0])[:, None] * np.array([0.5, 0.5])
    weight = (
        stats.gamma.pdf(alpha, 1.5)[:, None] * stats.gamma.pdf(beta, 2.0, scale=1 / 4) * spacing
    )
    np.testing.assert_allclose(np.exp(log_prior), (weight / weight.sum()).ravel(), rtol=1e-9)
    np.testing.assert_array_equal(points["alpha"], np.repeat(alpha, 2))
    np.testing.assert_array_equal(points["beta"], np.tile(beta, 4))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            {"alpha": [1.0]},
            r"site 'beta': a latent scalar is learned over a grid; give its values, say "
            r"grid=\{'beta'",
        ),
        (
            {"alpha": [1.0], "beta": [1.0], "gamma": [1.0]},
            r"grid: 'gamma' is no latent scalar of the model, which has \['alpha', 'beta'\]",
        ),
        (
            {"alpha": [2.0, 1.0], "beta": [1.0]},
            "grid: the values of 'alpha' must be finite and rise",
        ),
        ({"alpha": [np.inf], "beta": [1.0]}, "grid: the values of 'alpha' must be finite and rise"),
        (
            {"alpha": [-1.0, 1.0], "beta": [1.0]},
            "grid: the prior density is not positive at every point",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_a_grid_must_fit_the_latent_scalars(grid, message):
    with pytest.raises(ValueError, match=message):
        grid_of(with_latent_scalars(), {name: np.array(values) for name, values in grid.items()})


def test_few_rows_hold_every_class_and_prove_for_all():
    x, y = np.tile(BITS, (30, 1)), np.zeros(180, int)
    y[100:] = 1
    y[170] = 2
    found = read(x=x, y=y, num_classes=3)
    assert found.few.sites["z"].shape == (8,)
    assert set(np.asarray(found.few.arguments["y"])) == {0, 1, 2}
    np.testing.assert_array_equal(found.rows(Program(aclass, x, y, num_classes=3)).values["x"], x)
