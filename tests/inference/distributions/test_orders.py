"""Distributions of the order of a model against scipy, and their draws against their
probabilities.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from inference.distributions import PositivePoisson, Zeta
from tests.by_numpy import by_numpy

pytestmark = pytest.mark.usefixtures("x64")

M = np.arange(1, 400)
CASES = {
    "Poisson": (lambda: PositivePoisson(2.5), stats.poisson.pmf(M, 2.5) / (1 - np.exp(-2.5))),
    "small Poisson": (lambda: PositivePoisson(0.01), stats.poisson.pmf(M, 0.01) / -np.expm1(-0.01)),
    "zeta": (Zeta, (M + 1.0) ** -2 / (np.pi**2 / 6 - 1)),
    # Riemann's zeta(3.5)
    "steep zeta": (lambda: Zeta(3.5), (M + 1.0) ** -3.5 / (1.1267338673170566 - 1)),
}


@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_probabilities(name):
    make, expected = CASES[name]
    order = make()
    np.testing.assert_allclose(
        jnp.exp(order.log_prob(jnp.asarray(M))), expected, rtol=1e-9, atol=1e-300
    )
    np.testing.assert_allclose(
        jnp.exp(order.log_survival(jnp.asarray(M, float)))[:9],
        1 - np.cumsum(expected)[:9],
        atol=3e-3,
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_draws_are_as_frequent_as_probable(name):
    make, expected = CASES[name]
    order = make()
    drawn = np.asarray(by_numpy(lambda key: order.sample(key, (50_000,)))(random.key(0)))
    assert drawn.min() >= 1
    seen = np.array([np.mean(drawn == m) for m in (1, 2, 3, 5, 10)])
    wanted = expected[[0, 1, 2, 4, 9]]
    assert (np.abs(seen - wanted) < 4 * np.sqrt(wanted / 50_000) + 1e-4).all()


def test_the_mean_of_a_poisson_without_zero():
    assert abs(float(PositivePoisson(2.5).mean) - np.sum(M * CASES["Poisson"][1])) < 1e-12
