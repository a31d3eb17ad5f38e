"""The truncated Normal against NumPyro's where that one holds, and against the law of its tail
where it does not.
"""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random
from jax.scipy.special import log_ndtr
from scipy.special import erfcx

from inference.distributions.truncated_normal import TruncatedNormal, log_ndtri, one_sided

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


@pytest.mark.parametrize(
    ("low", "high"), [(0.5, 2.0), (-1.0, jnp.inf), (-jnp.inf, 0.3), (-3.0, -2.0), (4.0, jnp.inf)]
)
def test_density_and_draws_equal_numpyro(low, high):
    ours = TruncatedNormal(0.2, 0.7, low, high)
    theirs = dist.TruncatedNormal(
        0.2, 0.7, low=None if jnp.isneginf(low) else low, high=None if jnp.isposinf(high) else high
    )
    draws = ours.sample(random.key(0), (4000,))
    assert jnp.allclose(ours.log_prob(draws), theirs.log_prob(draws))
    assert scipy.stats.kstest(np.asarray(theirs.cdf(draws)), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_the_far_tail_is_nearly_exponential(side):
    low, high = (500.0, jnp.inf) if side > 0 else (-jnp.inf, -500.0)
    ours = TruncatedNormal(0.0, 1.0, low, high)
    excess = side * ours.sample(random.key(0), (4000,)) - 500.0
    assert scipy.stats.kstest(np.asarray(500.0 * excess), "expon").pvalue > 1e-3
    assert jnp.allclose(ours.log_prob(side * 500.0), jnp.log(500.0), atol=1e-5)


def test_log_ndtri_inverts_log_ndtr():
    x = jnp.concatenate([jnp.linspace(-1000.0, -10.0, 50), jnp.linspace(-10.0, 5.0, 50)])
    np.testing.assert_allclose(log_ndtri(log_ndtr(x)), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_moments_of_a_cut_normal(dtype):
    """By a scaled complementary error function; far in the tail, where that loses digits, by the
    first terms of their series.
    """
    ratio = np.concatenate([np.linspace(-30.0, -5.01, 40), np.linspace(-4.99, 9.0, 40)]).astype(
        dtype
    )
    found, exact = one_sided(jnp.asarray(ratio)), ratio.astype(float)
    shift = np.sqrt(2 / np.pi) / erfcx(-exact / np.sqrt(2))
    rtol = {"float64": 1e-9, "float32": 2e-5}[dtype]
    np.testing.assert_allclose(found.shift, shift, rtol=rtol)
    np.testing.assert_allclose(
        found.lost, shift * (shift + exact), rtol=10 * rtol, atol=1e-6 if dtype == "float32" else 0
    )
    far = np.array([1e3, 1e6], dtype)
    found = one_sided(-jnp.asarray(far))
    np.testing.assert_allclose(found.shift, far, rtol=2e-6)
    np.testing.assert_allclose(
        1 - found.lost, 1 / far.astype(float) ** 2, atol={"float64": 1e-11, "float32": 1e-6}[dtype]
    )
