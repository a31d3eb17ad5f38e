"""Archipelago against its formula in numpy and scipy, its process against moments of the model,
its predictions against simulation.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from scipy import stats
from scipy.spatial.distance import cdist
from scipy.special import gammaln, logsumexp

import zoo
from gallery.datasets import names
from inference import Program
from tests.by_numpy import by_numpy
from zoo._gaussian_process import Functions
from zoo.archipelago import (
    CARD,
    archipelago,
    fantasies,
    gaussian,
    matern32,
    matern52,
    mixture,
    predict,
    process,
    propose,
    simulate,
    squared_exponential,
    student_t,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 2)), np.array([0, 2, -1, -1, 1])
OPTIONS = {"num_classes": 3, "capacity": 6}
PROGRAM = Program(archipelago, X, Y, **OPTIONS)
PRIOR = by_numpy(PROGRAM.draw_prior)


def draw(seed=0, count=4):
    return PRIOR(random.key(seed)) | {"num_rejected": jnp.asarray(count)}


def function_by_hand(v, points, noise):
    """Values of the functions, one class after the other."""
    each = []
    for k, (amplitude, lengthscale) in enumerate(
        zip(v["amplitude"], v["lengthscale"], strict=True)
    ):
        apart = cdist(points / lengthscale, points / lengthscale, "sqeuclidean")
        covariance = amplitude**2 * (np.exp(-apart / 2) + 1e-6 * np.eye(len(points)))
        each.append(np.linalg.cholesky(covariance) @ noise[:, k])
    return np.stack(each, -1)


def log_joint_by_hand(v, x, y, capacity, num_classes):
    """Priors, then one term a point in the order of the module's text."""
    v = {name: np.asarray(value) for name, value in v.items()}
    count = int(v["num_rejected"])
    total = stats.lognorm.logpdf(v["amplitude"], 0.5, scale=np.exp(2.0)).sum()
    total += stats.lognorm.logpdf(v["lengthscale"], 0.7, scale=np.sqrt(2) * np.exp(-0.5)).sum()
    total += stats.norm.logpdf(v["mean"]).sum() + stats.lognorm.logpdf(v["scale"], 0.5).sum()
    orders = lambda m: gammaln(m + len(x)) - gammaln(m + 1) + m * np.log(0.9)
    total += orders(count) - logsumexp(orders(np.arange(capacity + 1)))
    points, noise = (
        np.concatenate([x, v["rejected"]]),
        np.concatenate([v["noise"], v["rejected_noise"]]),
    )
    total += stats.norm.logpdf(noise).sum()
    g = function_by_hand(v, points, noise)
    root = v["scale"][:, None] * v["root"]
    base = stats.multivariate_normal(v["mean"], root @ root.T)
    for n, (point, values) in enumerate(zip(points, g, strict=True)):
        mass = logsumexp(values)
        if n < len(x):
            total += (
                base.logpdf(point)
                + mass
                - np.log1p(np.exp(mass))
                + (values[y[n]] - mass if y[n] >= 0 else 0.0)
            )
        elif n < len(x) + count:
            total += base.logpdf(point) - np.log1p(np.exp(mass))
    return total


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_log_joint_is_the_formula(count):
    values = [draw(seed, count) for seed in (0, 1)]
    density, prior = by_numpy(PROGRAM.log_joint), by_numpy(PROGRAM.log_prior)
    found = [density(each) for each in values]
    wanted = [log_joint_by_hand(each, X, Y, **{"capacity": 6, "num_classes": 3}) for each in values]
    free = [prior(each)["root"] for each in values]  # of the correlations, NumPyro's own
    np.testing.assert_allclose(
        (found[0] - free[0]) - (found[1] - free[1]), wanted[0] - wanted[1], rtol=1e-8
    )


def test_orders_of_the_data_and_of_rejections_do_not_count():
    """In other orders the noise is another, but the joint density of points and functions is the
    same.
    """
    values, order = draw(), np.array([3, 0, 4, 1, 2])

    def density(v, x, y):
        """The log density of points, functions and labels, without the volume of the noise."""
        points = np.concatenate([x, v["rejected"]])
        volume = sum(np.log(np.diagonal(_root(v, points, k))).sum() for k in range(3))
        return by_numpy(Program(archipelago, x, y, **OPTIONS).log_joint)(v) - volume

    whole = np.concatenate([values["noise"], values["rejected_noise"]])
    points = np.concatenate([X, values["rejected"]])
    moved = np.concatenate([order, 5 + np.array([2, 0, 3, 1]), [9, 10]])
    g = function_by_hand({k: np.asarray(v) for k, v in values.items()}, points, whole)[moved]
    noise = np.stack(
        [np.linalg.solve(_root(values, points[moved], k), g[:, k]) for k in range(3)], -1
    )
    other = values | {
        "noise": noise[:5],
        "rejected_noise": noise[5:],
        "rejected": points[moved][5:],
    }
    np.testing.assert_allclose(density(other, X[order], Y[order]), density(values, X, Y), rtol=1e-8)


def _root(values, points, k):
    apart = cdist(points, points, "sqeuclidean") / np.asarray(values["lengthscale"])[k] ** 2
    return float(values["amplitude"][k]) * np.linalg.cholesky(
        np.exp(-apart / 2) + 1e-6 * np.eye(len(points))
    )


def test_count_of_a_process_that_may_end_is_negative_binomial():
    def found(counts):
        traced = handlers.trace(handlers.seed(archipelago, 0)).get_trace(
            X, Y, num_classes=3, capacity=200, persistence=0.7
        )
        return traced["num_rejected"]["fn"].log_prob(counts)

    np.testing.assert_allclose(
        by_numpy(found)(np.arange(60)), stats.nbinom(len(X), 0.3).logpmf(np.arange(60)), atol=1e-8
    )


def chance_of_lasting(num_rows, persistence, amplitude, lengthscale, num_draws=20_000):
    """That the process lasts until that many rows: the mean of (Z / (1 - persistence (1 -
    Z)))^rows, Z a sum over nodes.
    """
    nodes, mass = np.polynomial.hermite_e.hermegauss(40)
    correlation = np.exp(-0.5 * ((nodes[:, None] - nodes) / lengthscale) ** 2) + 1e-6 * np.eye(40)
    g = (
        amplitude
        * np.random.default_rng(0).normal(size=(num_draws, 2, 40))
        @ np.linalg.cholesky(correlation).T
    )
    z = (1 / (1 + np.exp(-logsumexp(g, 1)))) @ (mass / mass.sum())
    return np.mean((z / (1 - persistence * (1 - z))) ** num_rows)


def test_simulation_begins_anew_as_often_as_the_process_ends(monkeypatch):
    """Each attempt is noted, and the next one made."""
    lasted, first_accepted = [], zoo.archipelago._first_accepted
    monkeypatch.setattr(
        zoo.archipelago,
        "_first_accepted",
        lambda *given: lasted.append(first_accepted(*given) is not None),
    )
    monkeypatch.setattr(zoo.archipelago, "MOST_ATTEMPTS", 600)
    given = {
        "amplitude": dist.LogNormal(np.log(2.0), 1e-3),
        "lengthscale": dist.LogNormal(np.log(0.7), 1e-3),
    }
    standard = lambda num_features: dist.MultivariateNormal(
        jnp.zeros(num_features), jnp.eye(num_features)
    )
    with pytest.raises(RuntimeError, match="all of 600 attempts at 3 rows ended"):
        simulate(random.key(0), 3, 1, 2, persistence=0.5, base=standard, **given)
    wanted = chance_of_lasting(3, 0.5, 2.0, 0.7)
    apart = (np.mean(lasted) - wanted) / np.sqrt(wanted * (1 - wanted) / 600)
    assert abs(apart) < 3.5, (np.mean(lasted), wanted)
    for slip in (0.25, 0.7):  # one rejection too few or too many would be as these
        assert abs(np.mean(lasted) - chance_of_lasting(3, slip, 2.0, 0.7)) > 3.5 * np.sqrt(
            wanted * (1 - wanted) / 600
        )


def test_unlabelled_rows_sum_their_classes_out():
    values = draw()
    terms = by_numpy(PROGRAM.log_likelihood)(values)
    programs = [
        Program(archipelago, X, np.where(np.arange(5) == 2, k, Y), **OPTIONS) for k in range(3)
    ]
    each = [by_numpy(program.log_likelihood)(values) for program in programs]
    joint = [term["accepted"][2] + term["y"][2] for term in each]
    assert terms["y"][2] == 0
    np.testing.assert_allclose(logsumexp(joint), terms["accepted"][2], rtol=1e-12)


@pytest.mark.parametrize(
    ("covariance", "wanted"),
    [
        (squared_exponential, lambda r: np.exp(-(r**2) / 2)),
        (matern32, lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)),
        (matern52, lambda r: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)),
    ],
    ids=["squared_exponential", "matern32", "matern52"],
)
def test_covariances_are_their_formulas(covariance, wanted):
    points = jnp.asarray(X)
    np.testing.assert_allclose(covariance(points, points), wanted(cdist(X, X)), atol=2e-6)
    assert np.isfinite(jax.jacobian(lambda p: covariance(p, p))(points)).all()


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_conditional_is_that_of_the_joint_normal(variance):
    """A covariance function may have a variance of its own."""
    functions = Functions(
        lambda *at: variance * squared_exponential(*at),
        jnp.array([1.5, 0.7]),
        jnp.array([[0.8], [1.2]]),
    )
    points, is_used = (
        np.concatenate([X, RNG.normal(size=(2, 2)), [[9.0, 9.0]]]),
        np.array([1, 1, 1, 1, 1, 1, 1, 0], bool),
    )
    values, new = RNG.normal(size=(8, 2)), RNG.normal(size=(3, 2))
    mean, spread = by_numpy(functions.given)(new, points, values, is_used)
    for k, (amplitude, lengthscale) in enumerate([(1.5, 0.8), (0.7, 1.2)]):
        both = np.concatenate([points[:7], new]) / lengthscale
        c = amplitude**2 * (
            variance * np.exp(-cdist(both, both, "sqeuclidean") / 2) + 1e-6 * np.eye(10)
        )
        weights = np.linalg.solve(c[:7, :7], c[:7, 7:])
        np.testing.assert_allclose(mean[:, k], weights.T @ values[:7, k], rtol=1e-6)
        np.testing.assert_allclose(
            spread[:, k] ** 2, np.diag(c[7:, 7:] - c[7:, :7] @ weights), rtol=1e-4
        )


def test_noise_near_targets_is_the_mean_given_them():
    """The noise near targets is its mean given them.

    The noise is seen through the Cholesky factor, with an error.
    """
    functions = Functions(squared_exponential, jnp.array([1.5, 0.7]), jnp.array([[0.8], [1.2]]))
    points, targets, is_target = (
        RNG.normal(size=(7, 2)),
        RNG.normal(size=(7, 2)),
        np.array([1, 0, 1, 1, 0, 0, 1], bool),
    )
    found = by_numpy(partial(functions.noise_near, spread=0.3))(points, targets, is_target)
    for k, (amplitude, lengthscale) in enumerate([(1.5, 0.8), (0.7, 1.2)]):
        c = np.exp(
            -cdist(points / lengthscale, points / lengthscale, "sqeuclidean") / 2
        ) + 1e-6 * np.eye(7)
        seen = np.linalg.cholesky(c)[is_target]
        wanted = np.linalg.solve(
            seen.T @ seen / 0.3**2 + np.eye(7), seen.T @ targets[is_target, k] / amplitude / 0.3**2
        )
        np.testing.assert_allclose(found[:, k], wanted, rtol=1e-6)


@pytest.mark.slow
def test_simulated_data_are_accepted_points():
    """A class that is accepted nearly everywhere, and one that nearly never is."""
    data = simulate(random.key(0), 40, 2, 3, labelled=0.5)
    assert data["x"].shape == (40, 2)
    assert set(np.asarray(data["y"]).tolist()) <= {-1, 0, 1, 2}
    assert 8 < np.sum(np.asarray(data["y"]) >= 0) < 32
    assert np.isfinite(
        Program(archipelago, **data).log_joint(
            by_numpy(Program(archipelago, **data).draw_prior)(random.key(1))
        )
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("base", "num_features"),
    [
        (gaussian, 1),
        (mixture, 3),
        pytest.param(mixture, 1, marks=pytest.mark.slow),
        pytest.param(student_t, 1, marks=pytest.mark.slow),
        pytest.param(student_t, 3, marks=pytest.mark.slow),
    ],
    ids=["gaussian 1", "mixture 3", "mixture 1", "student_t 1", "student_t 3"],
)
def test_bases_are_densities_of_rows(base, num_features):
    x = RNG.normal(size=(4, num_features))
    program = Program(archipelago, x, None, capacity=3, base=base)
    assert np.isfinite(
        by_numpy(lambda key: program.log_joint(program.draw_prior(key)))(random.key(0))
    )


def test_predictions_weigh_draws_by_their_density():
    """At points so close to two of the data that the functions are known there."""
    draws = by_numpy(jax.vmap(draw_with_functions))(random.split(random.key(0), 40))
    x_new = X[:2] + 0.01
    told = lambda **options: by_numpy(partial(predict, num_values=64, **options))(
        random.key(1), draws, X, x_new
    )
    found, flat = told(), told(knows_density=False)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-12)
    function = np.asarray(draws["function"])[:, :2]
    mass = np.exp(logsumexp(function, -1))
    root = np.asarray(draws["scale"])[:, :, None] * np.asarray(draws["root"])
    base = [
        stats.multivariate_normal(mean, root @ root.T).pdf(x_new)
        for mean, root in zip(draws["mean"], root, strict=True)
    ]
    weight = base * (1 + np.asarray(draws["num_rejected"])[:, None] / 5) * mass / (1 + mass)
    shares = np.exp(function) / mass[..., None]
    np.testing.assert_allclose(
        found, (weight[..., None] * shares).sum(0) / weight.sum(0)[:, None], atol=0.004
    )
    np.testing.assert_allclose(flat, shares.mean(0), atol=0.004)
    assert np.abs(found - flat).max() > 0.01


@pytest.mark.slow
def test_points_where_no_draw_has_a_density_get_no_number():
    draws = jax.vmap(draw_with_functions)(random.split(random.key(0), 4))
    far = jnp.array([[1e200, 0.0]])  # the log density of a normal is -inf there
    assert np.isnan(predict(random.key(1), draws, jnp.asarray(X), far)).all()
    assert np.isfinite(
        predict(random.key(1), draws, jnp.asarray(X), far, knows_density=False)
    ).all()


def draw_with_functions(key):
    values = PROGRAM.draw_prior(key) | {"lengthscale": jnp.full((3, 1), 2.0)}
    values |= {"num_rejected": random.randint(key, (), 0, 7)}
    return values | PROGRAM.deterministics(values)


@pytest.mark.slow
def test_fantasies_are_of_the_wanted_class():
    draws = jax.vmap(draw_with_functions)(random.split(random.key(2), 3))
    points, classes = fantasies(random.key(0), draws, jnp.asarray(X), 7, label=1)
    assert points.shape == (7, 2)
    assert (classes == 1).all()
    assert set(fantasies(random.key(0), draws, jnp.asarray(X), 40)[1]) == {0, 1, 2}


def two_kinds_of_draws(seed=0, num_draws=400, persistence=0.9):
    """Functions that are the same everywhere, of one kind or the other; and, exactly, how likely
    it is that the next row is of class 0.
    """
    kinds, rng = np.array([[3.0, -3.0], [-8.0, -4.0]]), np.random.default_rng(seed)
    mass = np.exp(kinds) / (1 + np.exp(kinds).sum(1, keepdims=True))  # [kind, class]
    told = mass / (1 - persistence + persistence * mass.sum(1, keepdims=True))
    kind = np.repeat([0, 1], num_draws // 2)
    lost = rng.negative_binomial(len(X), 1 - persistence * (1 - mass[kind].sum(1)))
    rejected = rng.normal(size=(num_draws, 1 + lost.max(), 2))
    values = {
        "amplitude": np.full((num_draws, 2), 1e-3),
        "lengthscale": np.full((num_draws, 2, 1), 5.0),
    }
    values |= {
        "mean": np.zeros((num_draws, 2)),
        "scale": np.ones((num_draws, 2)),
        "root": np.tile(np.eye(2), (num_draws, 1, 1)),
    }
    values |= {
        "num_rejected": lost,
        "rejected": rejected,
        "function": np.repeat(kinds[kind, None], len(X), 1),
    }
    return values | {
        "rejected_function": np.repeat(kinds[kind, None], rejected.shape[1], 1)
    }, told.sum(0)[0] / told.sum()


def share_of_the_first_class(draws, num_rows=1500):
    return np.mean(
        fantasies(random.key(1), jax.tree.map(jnp.asarray, draws), jnp.asarray(X), num_rows)[1] == 0
    )


def test_fantasies_are_from_the_density_that_predictions_are_of():
    draws, exact = two_kinds_of_draws()
    assert abs(share_of_the_first_class(draws, 600) - exact) < 0.05, exact


@pytest.mark.slow
def test_fantasies_of_draws_that_weigh_the_same_are_not():
    draws, exact = two_kinds_of_draws()
    assert (
        abs(
            share_of_the_first_class(
                draws | {"num_rejected": np.full_like(draws["num_rejected"], 5)}
            )
            - exact
        )
        > 0.1
    )


def test_a_class_that_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(zoo.archipelago, "MOST_BARREN", 2)
    draws, _ = two_kinds_of_draws()
    few = jax.tree.map(
        lambda leaf: jnp.asarray(leaf[:4]), draws | {"function": draws["function"] - 100}
    )
    with pytest.raises(RuntimeError, match="no point of class 1 among 512 proposals"):
        fantasies(
            random.key(1), few | {"num_rejected": jnp.zeros(4, int)}, jnp.asarray(X), 3, label=1
        )


@pytest.mark.slow
def test_more_proposals_begin_with_the_same_ones():
    """Or a run that goes on until it has enough would favour runs that have many."""
    with handlers.seed(rng_seed=0):
        drawn = process(2, 3)
    few, many = (propose(random.key(1), drawn, size) for size in (20, 40))
    for one, other in zip(few, many, strict=True):
        np.testing.assert_allclose(one, other[:20], rtol=1e-6)


def test_what_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(zoo.archipelago, "MOST_PROPOSALS", 64)
    # high everywhere, or low everywhere
    flat = {"amplitude": dist.LogNormal(4.0, 0.1), "lengthscale": dist.LogNormal(5.0, 0.1)}

    def until_one_is_low():
        for seed in range(20):
            simulate(random.key(seed), 30, num_classes=1, persistence=1.0, **flat)

    with pytest.raises(RuntimeError, match="fewer than 30 points among 60 proposals"):
        until_one_is_low()


def cone(first, second):
    """A covariance along a line and not in a plane."""
    return jnp.maximum(0.0, 1 - jnp.sqrt(jnp.sum((first[:, None] - second) ** 2, -1) + 1e-12))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": X[0]}, "x: found shape"),
        ({"x": X[:0], "y": Y[:0]}, r"x: found shape \(0, 2\)"),
        ({"x": np.where(X > 0, np.nan, X)}, "x: found nan"),
        ({"y": Y[:3]}, r"y: found shape \(3,\)"),
        ({"y": np.array([0, 2, -3, -1, 1])}, "y: found .*, wanted integers: 0 .. 2, or -1"),
        ({"y": np.array([0, 3, -1, -1, 1])}, "y: found .*, wanted integers: 0 .. 2"),
        ({"y": Y.astype(float)}, "y: found .*, wanted integers"),
        ({"num_classes": 0}, "num_classes: found 0"),
        ({"capacity": 2.5}, "capacity: found 2.5"),
        ({"persistence": 0.0}, "persistence: found 0.0"),
        ({"persistence": "a"}, "persistence: found 'a'"),
        ({"base": "gaussian"}, "base: found 'gaussian', wanted a function"),
        ({"covariance": "rbf"}, "covariance: found 'rbf', wanted a function"),
        (
            {"covariance": cone},
            "covariance: found an eigenvalue of -0.07 .* wanted a positive definite function",
        ),
        (
            {"covariance": lambda first, _: jnp.ones(len(first))},
            r"covariance: found shape \(124,\)",
        ),
        ({"amplitude": 2.0}, "amplitude: found 2.0, wanted a distribution"),
        (
            {"lengthscale": dist.Normal(0.0, 1.0)},
            "lengthscale: found .*, wanted a distribution of a positive number",
        ),
        ({"is_ard": "yes"}, "is_ard: found 'yes'"),
    ],
)
def test_wrong_arguments_are_named(changes, named):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=named):
        archipelago(**({"x": X, "y": Y, "num_classes": 3} | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"persistence": 2.0}, "persistence: found 2.0"),
        ({"persistence": 0.0}, "persistence: found 0.0"),
        ({"num_rows": 0}, "num_rows: found 0"),
        ({"num_classes": 0}, "num_classes: found 0"),
        ({"labelled": 2.0}, "labelled: found 2.0"),
    ],
)
def test_wrong_arguments_of_a_simulation_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        simulate(random.key(0), **changes)


def test_the_model_wants_float64_and_a_simulation_sees_to_it():
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="found float32, wanted float64"):
            archipelago(X.astype(np.float32), Y, num_classes=3)
        narrow = simulate(random.key(0), 20, num_classes=2)
    assert narrow["x"].dtype == np.float64
    np.testing.assert_array_equal(narrow["x"], simulate(random.key(0), 20, num_classes=2)["x"])


def test_card_names_the_sites_and_data_sets():
    assert set(CARD.data) <= set(names())
    sites = {
        name
        for base in (gaussian,)
        for name in Program(archipelago, X, Y, base=base, num_classes=3).sites
    }
    assert set(CARD.sites) == sites
    assert "archipelago" in zoo.names()
