"""Missing entries: the base where a value is seen, scipy's marginals where a part of a row is."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import biject_to, constraints
from scipy import stats

from inference.distributions import Missing
from tests.by_numpy import by_numpy

pytestmark = [
    pytest.mark.usefixtures("x64", "numpyro_promotion"),
    pytest.mark.filterwarnings("ignore:Out-of-support"),  # NumPyro's; asked for on purpose
]

BASES = {
    "Normal": (dist.Normal(np.array([0.3, -1.0, 2.0]), 0.7), [0.1, 0.4, -0.3]),
    "Bernoulli": (dist.Bernoulli(np.array([0.3, 0.6, 0.9])), [1.0, 0.0, 1.0]),
    "logits": (dist.Bernoulli(logits=np.array([0.3, 0.6, 0.9])), [1.0, 0.0, 1.0]),
    "Categorical": (dist.Categorical(np.full((3, 4), 0.25)), [0.0, 3.0, 1.0]),
    "Poisson": (dist.Poisson(np.array([0.3, 4.0, 2.0])), [0.0, 7.0, 2.0]),
    "LogNormal": (dist.LogNormal(np.array([0.3, 0.0, 2.0]), 1.5), [0.1, 0.4, 2.0]),
    "Uniform": (dist.Uniform(np.array([1.0, -3.0, 0.0]), 9.0), [2.0, -2.0, 3.0]),
    "expanded": (dist.Normal(0.3, 0.7).expand([3]), [0.1, 0.4, -0.3]),
}
LOC = np.array([0.5, -1.0, 2.0])
COVARIANCE = np.array([[1.0, 0.4, -0.2], [0.4, 2.0, 0.3], [-0.2, 0.3, 0.7]])


class OutsideOnly(Missing):
    """NaN is hidden after the density was evaluated."""

    def log_prob(self, value, intermediates=None):
        return jnp.where(jnp.isnan(value), 0.0, self.base_dist.log_prob(value))


class AtTheMean(Missing):
    """Missing coordinates are filled with their means, not integrated out."""

    def log_prob(self, value, intermediates=None):
        return self.base_dist.log_prob(jnp.where(jnp.isnan(value), self.base_dist.loc, value))


def check_gradient(family, x):
    slope = by_numpy(
        jax.grad(
            lambda loc, scale: family(dist.Normal(loc, scale)).log_prob(x).sum(), argnums=(0, 1)
        )
    )(0.4, 1.3)
    seen = x[~np.isnan(x)]
    np.testing.assert_allclose(slope[0], ((seen - 0.4) / 1.3**2).sum())
    np.testing.assert_allclose(slope[1], ((seen - 0.4) ** 2 / 1.3**3 - 1 / 1.3).sum())


def check_marginal(family):
    x = np.array([0.1, 0.7, -0.4])
    log_prob = by_numpy(family(dist.MultivariateNormal(LOC, COVARIANCE)).log_prob)
    for seen in product([False, True], repeat=3):
        kept = np.flatnonzero(seen)
        found = log_prob(np.where(seen, x, np.nan))
        wanted = (
            stats.multivariate_normal(LOC[kept], COVARIANCE[np.ix_(kept, kept)]).logpdf(x[kept])
            if len(kept)
            else 0.0
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", BASES)
def test_missing_entries_have_log_density_0_and_the_others_that_of_the_base(name):
    base, x = BASES[name]
    wanted = np.asarray(
        by_numpy(base.log_prob)(np.array(x, int) if base.is_discrete else np.array(x))
    )
    found = by_numpy(lambda holed: (Missing(base).log_prob(holed), Missing(base).support(holed)))
    for missing in product([False, True], repeat=3):
        holed = np.where(missing, np.nan, x)
        log_prob, is_inside = found(holed)
        np.testing.assert_allclose(log_prob, np.where(missing, 0.0, wanted), rtol=1e-12)
        assert is_inside.all()
    np.testing.assert_allclose(by_numpy(Missing(base).to_event(1).log_prob)(holed), 0.0)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("Bernoulli", 0.5),
        ("Bernoulli", 2.0),
        ("Poisson", -1.0),
        ("Categorical", 4.0),
        ("Normal", np.inf),
    ],
)
def test_seen_values_outside_of_the_support_are_impossible(name, x):
    base, value = BASES[name]
    holed = np.array([x, np.nan, value[2]])
    log_prob, is_inside = by_numpy(
        lambda holed: (Missing(base).log_prob(holed), Missing(base).support(holed))
    )(holed)
    np.testing.assert_array_equal(np.isneginf(log_prob), [True, False, False])
    np.testing.assert_array_equal(is_inside, [False, True, True])


def test_whole_numbers_have_nothing_missing():
    base, x = BASES["Poisson"]
    np.testing.assert_array_equal(
        Missing(base).log_prob(jnp.array(x, int)), base.log_prob(jnp.array(x, int))
    )


def test_gradient_is_that_of_the_seen_entries():
    check_gradient(Missing, np.array([0.3, np.nan, 2.0]))
    with pytest.raises(AssertionError):
        check_gradient(OutsideOnly, np.array([0.3, np.nan, 2.0]))


@pytest.mark.parametrize("name", ["Bernoulli", "logits", "Poisson"])
def test_gradient_of_counts_is_finite_at_nan(name):
    family = {
        "Bernoulli": dist.Bernoulli,
        "logits": lambda x: dist.Bernoulli(logits=x),
        "Poisson": dist.Poisson,
    }[name]
    slope = by_numpy(
        jax.grad(lambda p: Missing(family(p)).log_prob(np.array([1.0, np.nan])).sum())
    )(np.array([0.4, 0.6]))
    assert slope[0] != 0
    assert slope[1] == 0


def test_rows_of_a_normal_have_their_marginal_density():
    check_marginal(Missing)
    with pytest.raises(AssertionError):
        check_marginal(AtTheMean)


def test_gradient_of_the_marginal_equals_a_difference():
    x, step = np.array([[0.1, np.nan, -0.4], [np.nan] * 3]), 1e-6

    @jax.jit
    @jax.value_and_grad
    def by_scale(s):
        return (
            Missing(
                dist.MultivariateNormal(s * LOC, precision_matrix=s * np.linalg.inv(COVARIANCE))
            )
            .log_prob(x)
            .sum()
        )

    difference = float(by_scale(1.2 + step)[0]) - float(by_scale(1.2 - step)[0])
    np.testing.assert_allclose(by_scale(1.2)[1], difference / (2 * step), rtol=1e-7)


def test_an_independent_event_is_missing_by_its_entries():
    base, x = BASES["Normal"]
    holed = jnp.array([x[0], jnp.nan, x[2]])
    np.testing.assert_allclose(
        Missing(base.to_event(1)).log_prob(holed), Missing(base).log_prob(holed).sum()
    )
    assert Missing(base.to_event(1)).support(holed)


def test_another_event_is_missing_as_a_whole_or_not_at_all():
    missing = Missing(dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
    x = jnp.array([[0.2, 0.3, 0.5], [jnp.nan] * 3, [0.2, jnp.nan, 0.5]])
    np.testing.assert_allclose(
        missing.log_prob(x), [missing.base_dist.log_prob(x[0]), 0.0, -jnp.inf]
    )
    np.testing.assert_array_equal(missing.support(x), [True, True, False])


def test_draws_are_those_of_the_base_as_floats():
    for base, _ in BASES.values():
        draws = Missing(base).sample(random.key(0), (5,))
        assert draws.dtype == jnp.float64
        np.testing.assert_array_equal(draws, base.sample(random.key(0), (5,)))
    assert Missing(dist.Normal(0.0, 1.0)).has_rsample
    assert not Missing(dist.Bernoulli(0.5)).has_rsample


def test_support_of_a_latent_site_is_that_of_the_base():
    support = Missing(dist.LogNormal(0.0, 1.0)).support
    assert biject_to(support)(-1.0) == biject_to(constraints.positive)(-1.0)
    assert not support.is_discrete
    assert Missing(dist.Poisson(1.0)).is_discrete
    copy = jax.tree.unflatten(
        *jax.tree.flatten(Missing(dist.MultivariateNormal(LOC, COVARIANCE)))[::-1]
    )
    assert copy.log_prob(jnp.array([0.1, jnp.nan, 0.2])) == Missing(
        dist.MultivariateNormal(LOC, COVARIANCE)
    ).log_prob([0.1, jnp.nan, 0.2])
    assert copy.support == Missing(dist.MultivariateNormal(LOC, COVARIANCE)).support
    assert copy.support != support


def test_a_masked_plate_of_missing_entries():
    """NumPyro fills a masked value with a feasible one; NaN beside it stays missing."""
    base, x = BASES["Poisson"]
    masked = Missing(base).mask(jnp.array([True, True, False]))
    found = masked.log_prob(jnp.array([x[0], jnp.nan, x[2]]))
    np.testing.assert_allclose(found, [base.log_prob(jnp.array(x, int))[0], 0.0, 0.0])


def test_density_of_many_missing_patterns_integrates_to_one():
    """The pattern is given: for each, the probabilities of the seen entries sum to 1."""
    log_prob = by_numpy(Missing(dist.Bernoulli(np.array([0.3, 0.6]))).log_prob)
    for pattern in product([False, True], repeat=2):
        values = product(*[[np.nan] if missing else [0.0, 1.0] for missing in pattern])
        total = sum(prod(np.exp(log_prob(np.array(value))).tolist()) for value in values)
        np.testing.assert_allclose(total, 1.0, rtol=1e-12)


def test_in_single_precision_and_with_strict_types():
    holed = np.array([[0.1, np.nan, -0.4], [1.0, 0.0, np.nan]])
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        found = Missing(dist.Bernoulli(np.full(3, 0.25, np.float32))).log_prob(holed[1])
        np.testing.assert_allclose(found, [np.log(0.25), np.log(0.75), 0.0], rtol=1e-6)
        normal = Missing(
            dist.MultivariateNormal(LOC.astype(np.float32), COVARIANCE.astype(np.float32))
        )
        wanted = stats.multivariate_normal(LOC[[0, 2]], COVARIANCE[np.ix_([0, 2], [0, 2])]).logpdf(
            holed[0, [0, 2]]
        )
        np.testing.assert_allclose(normal.log_prob(holed[0]), wanted, rtol=1e-5)
