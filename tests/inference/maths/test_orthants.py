"""Probabilities of signs of normal numbers, against another library's and against what must
hold.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from inference.maths.orthants import cubature_points, log_orthant
from tests.by_numpy import by_numpy

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


POINTS = cubature_points(3, 128)
found_by = by_numpy(log_orthant)


def problems(size, number=12):
    """Locations, covariances and signs; shares of two normal numbers that all depend on make
    most of a variance.
    """
    rng = np.random.default_rng(size)
    root = rng.normal(size=(number, size, 2)) * rng.uniform(0.3, 3, (number, 1, 1))
    return (
        rng.normal(size=(number, size)),
        np.eye(size) + root @ root.mT,
        rng.choice([-1.0, 1.0], (number, size)),
    )


def errors(size, num, covariance_of=lambda covariance: covariance):
    loc, covariance, signs = problems(size)
    found = np.exp(found_by(loc, covariance_of(covariance), signs, cubature_points(size, num)))
    flipped = signs[:, :, None] * covariance * signs[:, None]
    exact = [
        stats.multivariate_normal(None, c, seed=0).cdf(s * m)
        for m, c, s in zip(loc, flipped, signs, strict=True)
    ]
    return abs(found - np.array(exact))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("size", "num", "most"),
    [(1, 1, 1e-12), (2, 16, 1e-4), (2, 8, 5e-4), (3, 256, 2e-3), (6, 256, 2e-3)],
)
def test_equals_another_library(size, num, most):
    """As if the numbers were independent, the error is seen."""
    assert errors(size, num).max() < most
    if size > 1:
        assert errors(size, num, lambda covariance: covariance * np.eye(size)).max() > 5 * most


@pytest.mark.slow
def test_more_points_are_nearer():
    assert errors(4, 4096).mean() < 0.2 * errors(4, 64).mean()


def test_cases_of_a_decision_sum_to_one():
    """The first number that is above 0, or none: whatever comes after it is not asked for."""
    loc, covariance, _ = problems(3)
    cases = [[1, 0, 0], [-1, 1, 0], [-1, -1, 1], [-1, -1, -1]]
    each = [found_by(loc, covariance, np.broadcast_to(case, loc.shape), POINTS) for case in cases]
    np.testing.assert_allclose(np.exp(each).sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(
        np.exp(each[0]), stats.norm.cdf(loc[:, 0] / np.sqrt(covariance[:, 0, 0])), atol=1e-12
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_nearly_impossible_has_a_logarithm(dtype):
    """Independent numbers have a closed form."""
    loc, signs = jnp.array([[-60.0, 50.0, -45.0]], dtype), jnp.array([[1, -1, 1]], dtype)
    found = found_by(loc, jnp.eye(3, dtype=dtype)[None], signs, POINTS)
    np.testing.assert_allclose(found, stats.norm.logcdf([-60, -50, -45]).sum(), rtol=1e-6)
    assert np.isfinite(
        found_by(
            loc, jnp.full((1, 3, 3), 30.0, dtype) + jnp.eye(3, dtype=dtype)[None], signs, POINTS
        )
    ).all()


def test_a_sequence_goes_on():
    whole, second = cubature_points(4, 16), cubature_points(4, 8, 8)
    np.testing.assert_allclose(second.at, whole.at[8:], atol=1e-12)
