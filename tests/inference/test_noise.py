"""Choices among noisy utilities against integrals by SciPy and against their own draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats

from inference.distributions import Below, Choice, _noise, log_cdf

pytestmark = pytest.mark.usefixtures("x64")

NOISES = {
    "gumbel": (dist.Gumbel(0.0, 1.0), stats.gumbel_r()),
    "normal": (dist.Normal(0.0, 1.0), stats.norm()),
    "logistic": (dist.Logistic(0.0, 1.0), stats.logistic()),
    "laplace": (dist.Laplace(0.0, 1.0), stats.laplace()),
    "student_t": (dist.StudentT(5.0, 0.0, 1.0), stats.t(5)),
    "moved": (dist.Normal(0.5, 3.0), stats.norm(0.5, 3.0)),
    "wide": (dist.Logistic(-20.0, 10.0), stats.logistic(-20.0, 10.0)),
}
UTILITY = np.array([0.3, -1.0, 2.0, 0.5, -3.0])
each_noise = pytest.mark.parametrize("name", NOISES)


def integral(noise, k):
    """Eq. 5 by SciPy."""
    others = np.delete(UTILITY, k)
    value = lambda t: noise.pdf(t - UTILITY[k]) * np.prod(noise.cdf(t - others))
    width = noise.ppf(0.75) - noise.ppf(0.25)
    points = sorted({*UTILITY, *(UTILITY + noise.median())})
    return integrate.quad(value, points[0] - 40 * width, points[-1] + 40 * width, points=points, limit=800, epsabs=1e-13)[0]


@each_noise
def test_log_cdf_has_both_tails(name):
    noise, known = NOISES[name]
    z = np.concatenate([known.ppf([1e-12, 1e-3, 0.2, 0.5, 0.9]), known.isf([1e-3, 1e-9])])
    np.testing.assert_allclose(
        log_cdf(noise, jnp.asarray(z)), np.log1p(-known.sf(z)) * (z > z[3]) + known.logcdf(z) * (z <= z[3]), rtol=1e-6
    )


@each_noise
def test_log_cdf_has_the_slope_of_its_hazard(name):
    noise, known = NOISES[name]
    z = known.ppf([1e-6, 0.1, 0.45, 0.8, 0.999])
    slopes = jax.vmap(jax.grad(lambda at: log_cdf(noise, at)))(jnp.asarray(z))
    np.testing.assert_allclose(slopes, known.pdf(z) / known.cdf(z), rtol=1e-6)


@each_noise
def test_log_cdf_has_a_slope_at_zero_in_float32(name):
    noise, known = NOISES[name]
    with jax.enable_x64(False):
        for z in (0.0, 1e-5, -1e-5):
            assert float(jax.grad(lambda at: log_cdf(noise, at))(jnp.float32(z))) == pytest.approx(known.pdf(z) / known.cdf(z), rel=1e-3)


@each_noise
def test_choice_is_the_integral_of_equation_5(name):
    noise, known = NOISES[name]
    tolerance = 1e-3 if name == "laplace" else 1e-5  # kinks
    wanted = [integral(known, k) for k in range(len(UTILITY))]
    np.testing.assert_allclose(np.exp(Choice(UTILITY, noise).log_probs), wanted, rtol=tolerance)
    np.testing.assert_allclose(np.exp(Choice(UTILITY, noise)._integral(jnp.asarray(UTILITY))), wanted, rtol=tolerance)


@each_noise
def test_probabilities_of_many_classes_sum_to_one(name):
    utility = np.random.default_rng(0).normal(size=(2, 1000))
    total = np.exp(Choice(utility, NOISES[name][0])._integral(jnp.asarray(utility))).sum(-1)
    np.testing.assert_allclose(total, 1.0, atol=1e-3 if name == "laplace" else 1e-7)


def test_the_hazard_of_another_noise_is_seen(monkeypatch):
    monkeypatch.setattr(_noise, "log_cdf", lambda noise, value: log_cdf(dist.Normal(0.0, 1.02), value))
    with pytest.raises(AssertionError):
        test_choice_is_the_integral_of_equation_5("normal")


def test_log_prob_of_a_class_is_that_of_all_classes():
    utility = np.random.default_rng(1).normal(size=(4, 6))
    for noise in (dist.Gumbel(0.0, 1.0), dist.Logistic(0.0, 1.0)):
        choice = Choice(utility, noise)
        own = choice.log_prob(jnp.array([0, 3, 5, 2]))
        np.testing.assert_allclose(own, np.asarray(choice.log_probs)[np.arange(4), [0, 3, 5, 2]], rtol=1e-12)
        np.testing.assert_allclose(choice.log_prob(choice.enumerate_support()), np.asarray(choice.log_probs).T, rtol=1e-12)


def test_gradient_of_a_choice_is_that_of_the_softmax():
    gumbel = Choice(UTILITY, dist.Gumbel(0.0, 1.0))
    slope = jax.grad(lambda utility: Choice(utility, dist.Gumbel(0.0, 1.0))._integral(utility)[2])(jnp.asarray(UTILITY))
    np.testing.assert_allclose(slope, np.eye(5)[2] - np.exp(gumbel.log_probs), atol=1e-10)


@pytest.mark.parametrize("name", ["normal", "student_t"])
def test_draws_have_the_probabilities(name):
    choice = Choice(UTILITY, NOISES[name][0])
    counts = np.bincount(choice.sample(random.key(0), (20_000,)), minlength=5)
    assert stats.chisquare(counts, 20_000 * np.exp(choice.log_probs) / np.exp(choice.log_probs).sum()).pvalue > 1e-3


def test_whether_a_draw_is_below_has_both_outcomes():
    bound = jnp.array([-3.0, 0.2, 4.0])
    for noise, known in NOISES.values():
        np.testing.assert_allclose(Below(bound, noise).log_prob(np.ones(3, int)), known.logcdf(bound), rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(
            Below(bound, noise).log_prob(jnp.array([0, 1, 0])),
            np.array([known.logsf(-3.0), known.logcdf(0.2), known.logsf(4.0)]),
            rtol=1e-6,
            atol=1e-10,
        )
    share = Below(bound, dist.Normal(0.0, 1.0)).sample(random.key(1), (20_000,)).mean(0)
    np.testing.assert_allclose(share, stats.norm.cdf(bound), atol=0.015)


def test_a_noise_without_log_cdf_is_refused_until_one_is_registered():
    class Triangle(dist.Uniform):
        pass

    with pytest.raises(TypeError, match=r"noise: Triangle has no log_cdf.*register"):
        log_cdf(Triangle(0.0, 1.0), 0.5)
    log_cdf.register(Triangle, lambda noise, value: 2 * jnp.log(value))
    assert float(log_cdf(Triangle(0.0, 1.0), jnp.asarray(0.5))) == pytest.approx(np.log(0.25))


@pytest.mark.parametrize(
    ("utility", "noise", "message"),
    [
        (np.zeros((3, 1)), dist.Normal(0.0, 1.0), "Choice utility: found shape"),
        (np.zeros(3), dist.Normal(jnp.zeros(3), 1.0), "Choice noise: found one of shape"),
    ],
    ids=["one class", "a noise a class"],
)
def test_what_is_no_choice_is_refused(utility, noise, message):
    with pytest.raises(ValueError, match=message):
        Choice(utility, noise)
