"""Means, updates and divergences of the conjugate blocks against draws of their parameters and
against their own densities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference.reading.conjugate import pairs, quadratic
from inference.reading.conjugate.normal import (
    NormalHyper,
    NormalInverseWishart,
    NormalWishart,
    WishartHyper,
)
from inference.reading.conjugate.quadratic import Common, Weights
from inference.reading.conjugate.table import (
    BetaBernoulli,
    BetaHyper,
    DirichletCategorical,
    DirichletHyper,
    GammaHyper,
    GammaPoisson,
    NormalInverseGamma,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DRAWS = 20_000
at = lambda *numbers: tuple(np.full((1, 2), float(number)) for number in numbers)
# by numpy: in float64 whenever it is made
X = np.array([[1.0, 0.0], [np.nan, 1.0], [0.0, np.nan], [1.0, 1.0]])
FAMILIES = {
    "bits": (BetaBernoulli(), BetaHyper(*at(2.0, 1.5)), BetaHyper(*at(1.0, 0.7))),
    "codes": (
        DirichletCategorical(),
        DirichletHyper(np.ones((1, 2, 3)) * 2),
        DirichletHyper(np.array([[[0.5, 1.0, 2.0]] * 2])),
    ),
    "counts": (GammaPoisson(), GammaHyper(*at(3.0, 2.0)), GammaHyper(*at(1.5, 0.5))),
    "reals": (
        NormalInverseGamma(),
        NormalHyper(*at(0.4, 2.0, 3.0, 2.5)),
        NormalHyper(*at(0.0, 0.5, 2.0, 1.0)),
    ),
}


def is_mean(draws, wanted):
    """Within 5 standard errors."""
    draws = np.asarray(draws).reshape(DRAWS, -1)
    error = draws.std(0) / np.sqrt(DRAWS) + 1e-12
    return (abs(draws.mean(0) - np.ravel(wanted)) < 5 * error).all()


def drawn(family, hyper):
    return jax.jit(jax.vmap(lambda key: family.draw(key, hyper)))(
        random.split(random.key(0), DRAWS)
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name",
    [
        "bits",
        "reals",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("codes", "counts")),
    ],
)
def test_columns(name):
    family, hyper, prior = FAMILIES[name]
    hyper, prior = jax.tree.map(jnp.asarray, (hyper, prior))
    values = drawn(family, hyper)
    assert is_mean(jax.jit(jax.vmap(family.natural))(values), jax.jit(family.expected)(hyper))
    apart = jax.jit(
        jax.vmap(lambda *at: jnp.sum(family.log_prior(hyper, at) - family.log_prior(prior, at)))
    )(*values)
    assert is_mean(apart, jax.jit(family.divergence)(hyper, prior))
    weights = jnp.array([1.0, 0.5, 0.25, 2.0])
    x = jnp.asarray(X)
    statistics = jax.jit(family.statistics)(x, prior)
    after = jax.jit(
        lambda statistics: family.posterior(
            prior, jnp.einsum("n,ncs->cs", weights, statistics)[None]
        )
    )(statistics)
    each, add = prior, jax.jit(family.add)
    for row, weight in zip(x, weights, strict=True):
        each = add(each, row, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b), after, each)

    @jax.jit
    def told(at):
        """What the update adds to the log density, and the log likelihood of the rows by their
        weights.
        """
        log_likelihood = jnp.einsum("ncs,kcs->n", statistics, family.natural(at)) + family.log_base(
            x
        )
        return jnp.sum(
            family.log_prior(after, at) - family.log_prior(prior, at)
        ), weights @ log_likelihood

    one, other = (
        np.array(told(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], values))) for i in (0, 1)
    )
    np.testing.assert_allclose(*(one - other))


ROOT = np.array([[1.0, 0.0, 0.0], [0.4, 1.2, 0.0], [-0.3, 0.2, 0.8]])
GATE = WishartHyper(
    np.array([[0.3, -0.2, 1.0]]), np.array([2.0]), np.array([6.5]), (ROOT @ ROOT.T)[None]
)
GATE_PRIOR = WishartHyper(np.zeros((1, 3)), np.array([0.5]), np.array([4.0]), 1.5 * np.eye(3)[None])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "family", [NormalWishart(), NormalInverseWishart()], ids=["precision", "covariance"]
)
def test_features(family):
    hyper, prior = jax.tree.map(jnp.asarray, (GATE, GATE_PRIOR))
    matrix, loc = drawn(family, hyper)
    precision = matrix if family == NormalWishart() else np.linalg.inv(matrix)
    form = jax.jit(jax.vmap(quadratic.gate_natural))(precision, loc)
    means = jax.jit(quadratic.gate_means)(hyper)
    wanted = jax.jit(quadratic.gate_expected)(hyper, means)
    assert is_mean(form.const, wanted.const)
    assert is_mean(form.matrix, wanted.matrix)
    apart = jax.jit(
        jax.vmap(lambda *at: family.log_prior(hyper, at)[0] - family.log_prior(prior, at)[0])
    )(matrix, loc)
    terms = jax.jit(quadratic.gate_divergence)(hyper, means, prior)
    assert is_mean(apart, quadratic.total(*terms))
    x, weights = (
        np.asarray(random.normal(random.key(1), (5, 3))),
        np.array([1.0, 0.5, 0.25, 2.0, 0.0]),
    )
    u = np.concatenate([x, np.ones((5, 1))], 1)
    after, each = (
        jax.jit(quadratic.gate_posterior)(prior, np.einsum("n,ni,nj->ij", weights, u, u)[None]),
        prior,
    )
    add = jax.jit(family.add)
    for row, weight in zip(x, weights, strict=True):
        each = add(each, row, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), after, each)


FREE = Common(*(np.full((1, 2), number) for number in (0.2, 0.5, 3.0, 2.0)))
INFINITE = np.full((1, 2), np.inf)
COMMON_PRIORS = {
    "joint": FREE,
    "sparse": FREE._replace(gamma=INFINITE),
    "known precision": FREE._replace(rate=INFINITE),
    "known": FREE._replace(gamma=INFINITE, rate=INFINITE),
}


def log_normal(x, loc, precision):
    return (jnp.log(precision) - jnp.log(2 * jnp.pi) - precision * (x - loc) ** 2) / 2


@jax.jit
def terms_by_draws(prior, common, weights):
    """log p(w | zeta, lambda) - log q(w), and log q - log p of zeta and lambda, at draws from q."""
    keys = random.split(random.key(3), 3)
    is_known, is_free = jnp.isinf(prior.rate), jnp.isfinite(prior.gamma)
    rate = jnp.where(is_known, 1.0, common.rate)
    precision = jnp.where(
        is_known,
        prior.concentration,
        random.gamma(keys[0], common.concentration, (DRAWS, 1, 2)) / rate,
    )
    gamma = jnp.where(is_free, common.gamma, 1.0)
    zeta = jnp.where(
        is_free,
        common.loc + random.normal(keys[1], (DRAWS, 1, 2)) / jnp.sqrt(gamma * precision),
        prior.loc,
    )
    w = weights.mean + jnp.einsum(
        "ckij,sckj->scki",
        jnp.linalg.cholesky(weights.covariance),
        random.normal(keys[2], (DRAWS, 1, 3, 2)),
    )
    log_gamma = lambda x, a, b: (
        a * jnp.log(b) - jax.scipy.special.gammaln(a) + (a - 1) * jnp.log(x) - b * x
    )
    log_q = jax.scipy.stats.multivariate_normal.logpdf(
        w, weights.mean[None], weights.covariance[None]
    ).sum((1, 2))
    log_p = log_normal(w, zeta[:, :, None], precision[:, :, None]).sum((1, 2, 3))
    before = jnp.where(is_free, prior.gamma, 1.0) * precision
    of_zeta = jnp.where(
        is_free,
        log_normal(zeta, common.loc, gamma * precision) - log_normal(zeta, prior.loc, before),
        0.0,
    )
    apart = log_gamma(precision, common.concentration, rate) - log_gamma(
        precision, prior.concentration, jnp.where(is_known, 1.0, prior.rate)
    )
    return log_p - log_q, (of_zeta + jnp.where(is_known, 0.0, apart)).sum((1, 2))


@jax.jit
def terms(prior, common, weights):
    """What the two are in closed form."""
    of_weights = quadratic.total(*quadratic.weights_terms(common, weights))
    return of_weights, quadratic.common_divergence(common, prior).sum()


@pytest.mark.parametrize("name", COMMON_PRIORS)
def test_weights_of_experts(name):
    """The bound of one block: E log p(w, zeta, lambda) - log q, by draws; and it is largest
    where the update puts it.
    """
    prior = COMMON_PRIORS[name]
    covariance = 0.2 * np.stack([ROOT[:2, :2] @ ROOT[:2, :2].T] * 3)[None]
    weights = Weights(np.asarray(random.normal(random.key(2), (1, 3, 2))), covariance)
    common = jax.tree.map(np.asarray, jax.jit(quadratic.common_posterior)(prior, weights))
    for draws, wanted in zip(
        terms_by_draws(prior, common, weights), terms(prior, common, weights), strict=True
    ):
        assert is_mean(draws, wanted)
    is_known, is_free = np.isinf(prior.rate), np.isfinite(prior.gamma)
    bound = lambda common: np.subtract(*map(np.asarray, terms(prior, common, weights)))
    moving = {"loc": is_free, "gamma": is_free, "concentration": ~is_known, "rate": ~is_known}
    for field in (name for name, moves in moving.items() if moves.all()):
        moved = [
            bound(common._replace(**{field: getattr(common, field) * factor}))
            for factor in (0.99, 1.01)
        ]
        assert max(moved) < bound(common), field


def test_weights_are_a_regression():
    """q(w) is the posterior of w where rows are known and zeta, lambda stand at their means."""
    d, t = random.normal(random.key(4), (9, 2)), random.normal(random.key(5), (9,))
    common = Common(*(jnp.full((1, 2), number) for number in (0.2, 4.5, 3.0, 2.0)))
    found = jax.jit(quadratic.weights_posterior)(
        common, (d.T @ d)[None, None], (d.T @ t)[None, None]
    )
    log_joint = lambda w: (
        log_normal(t, d @ w, jnp.ones(())).sum() + log_normal(w, common.loc[0], 1.5).sum()
    )
    slope, curvature = jax.jit(lambda w: (jax.grad(log_joint)(w), jax.hessian(log_joint)(w)))(
        found.mean[0, 0]
    )
    np.testing.assert_allclose(slope, 0, atol=1e-12)
    np.testing.assert_allclose(-curvature, np.linalg.inv(found.covariance[0, 0]))


def test_sticks():
    V = random.beta(random.key(6), 2.0, 1.5, (DRAWS, 3))
    weights = V * jnp.cumprod(jnp.concatenate([jnp.ones((DRAWS, 1)), 1 - V[:, :-1]], 1), 1)
    log_weights = jax.vmap(lambda v: pairs.log_sticks(jnp.log(v), jnp.log1p(-v)))(V)
    np.testing.assert_allclose(
        jnp.exp(log_weights),
        jnp.concatenate([weights, 1 - weights.sum(1, keepdims=True)], 1),
        atol=1e-12,
    )
