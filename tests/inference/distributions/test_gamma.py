"""Draws of the Gamma distribution against scipy's distribution function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from scipy import stats

from inference.distributions.gamma import Gamma

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

CONCENTRATIONS = np.array([0.05, 0.5, 1.0, 3.0, 40.0, 1e5])
RATES = np.array([0.1, 1.0, 2.0, 1e-3, 5.0, 1e4])


def p_values(num_draws=20_000):
    draw = jax.jit(lambda key: Gamma(CONCENTRATIONS, RATES).sample(key, (num_draws,)))
    found = np.asarray(draw(random.key(0)))
    assert found.shape == (num_draws, len(RATES))
    each = zip(found.T, CONCENTRATIONS, RATES, strict=True)
    return [stats.kstest(x, stats.gamma(a, scale=1 / b).cdf).pvalue for x, a, b in each]


def test_draws_have_the_distribution():
    assert min(p_values()) > 1e-3


def test_a_wrong_proposal_is_seen(monkeypatch):
    wide = lax.erf_inv
    monkeypatch.setattr(lax, "erf_inv", lambda x: 1.1 * wide(x))
    assert min(p_values()) < 1e-6


def test_draws_are_independent_of_each_other():
    found = np.asarray(Gamma(jnp.full(2, 0.5), 1.0).sample(random.key(1), (20_000,)))
    assert abs(np.corrcoef(found.T)[0, 1]) < 4 / np.sqrt(20_000)
