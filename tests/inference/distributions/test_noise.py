"""Choices among noisy utilities against integrals by SciPy and against their own draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats

from inference.distributions import Below, Choice, log_cdf
from inference.distributions import noise as _noise

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
    return integrate.quad(
        value,
        points[0] - 40 * width,
        points[-1] + 40 * width,
        points=points,
        limit=800,
        epsabs=1e-13,
    )[0]


@each_noise
def test_log_cdf_has_both_tails(name):
    noise, known = NOISES[name]
    z = np.concatenate([known.ppf([1e-12, 1e-3, 0.2, 0.5, 0.9]), known.isf([1e-3, 1e-9])])
    np.testing.assert_allclose(
        jax.jit(lambda z: log_cdf(noise, z))(z),
        np.log1p(-known.sf(z)) * (z > z[3]) + known.logcdf(z) * (z <= z[3]),
        rtol=1e-6,
    )


@each_noise
def test_log_cdf_has_the_slope_of_its_hazard(name):
    noise, known = NOISES[name]
    z = known.ppf([1e-6, 0.1, 0.45, 0.8, 0.999])
    slopes = jax.jit(jax.vmap(jax.grad(lambda at: log_cdf(noise, at))))(z)
    np.testing.assert_allclose(slopes, known.pdf(z) / known.cdf(z), rtol=1e-6)


@each_noise
def test_log_cdf_has_a_slope_at_zero_in_float32(name):
    noise, known = NOISES[name]
    with jax.enable_x64(False):
        slope = jax.jit(jax.grad(lambda at: log_cdf(noise, at)))
        for z in (0.0, 1e-5, -1e-5):
            assert float(slope(np.float32(z))) == pytest.approx(
                known.pdf(z) / known.cdf(z), rel=1e-3
            )


@pytest.mark.slow_after(2)
@each_noise
def test_choice_is_the_integral_of_equation_5(name):
    noise, known = NOISES[name]
    tolerance = 1e-3 if name == "laplace" else 1e-5  # kinks
    wanted = [integral(known, k) for k in range(len(UTILITY))]
    both = lambda utility: (
        Choice(utility, noise).log_probs,
        Choice(utility, noise)._integral(utility),
    )
    for found in jax.jit(both)(UTILITY):
        np.testing.assert_allclose(np.exp(found), wanted, rtol=tolerance)


@pytest.mark.slow_after(2)
@each_noise
def test_probabilities_of_many_classes_sum_to_one(name):
    utility = np.random.default_rng(0).normal(size=(2, 1000))
    total = np.exp(
        jax.jit(lambda utility: Choice(utility, NOISES[name][0])._integral(utility))(utility)
    ).sum(-1)
    np.testing.assert_allclose(total, 1.0, atol=1e-3 if name == "laplace" else 1e-7)


def test_the_hazard_of_another_noise_is_seen(monkeypatch):
    monkeypatch.setattr(
        _noise, "log_cdf", lambda noise, value: log_cdf(dist.Normal(0.0, 1.02), value)
    )
    with pytest.raises(AssertionError):
        test_choice_is_the_integral_of_equation_5("normal")


def test_log_prob_of_a_class_is_that_of_all_classes():
    utility = np.random.default_rng(1).normal(size=(4, 6))
    for noise in (dist.Gumbel(0.0, 1.0), dist.Logistic(0.0, 1.0)):

        @jax.jit
        def answers(utility, own, noise=noise):
            choice = Choice(utility, noise)
            return (
                choice.log_prob(own),
                choice.log_prob(choice.enumerate_support()),
                choice.log_probs,
            )

        of_own, of_each, wanted = map(np.asarray, answers(utility, np.array([0, 3, 5, 2])))
        np.testing.assert_allclose(of_own, wanted[np.arange(4), [0, 3, 5, 2]], rtol=1e-12)
        np.testing.assert_allclose(of_each, wanted.T, rtol=1e-12)


def test_gradient_of_a_choice_is_that_of_the_softmax():
    gumbel = Choice(UTILITY, dist.Gumbel(0.0, 1.0))
    slope = jax.jit(
        jax.grad(lambda utility: Choice(utility, dist.Gumbel(0.0, 1.0))._integral(utility)[2])
    )(UTILITY)
    np.testing.assert_allclose(slope, np.eye(5)[2] - np.exp(gumbel.log_probs), atol=1e-10)


@pytest.mark.parametrize("name", ["normal", "student_t"])
def test_draws_have_the_probabilities(name):
    choice = Choice(UTILITY, NOISES[name][0])
    drawn, log_probs = jax.jit(lambda key: (choice.sample(key, (20_000,)), choice.log_probs))(
        random.key(0)
    )
    counts, probs = np.bincount(drawn, minlength=5), np.exp(log_probs)
    assert stats.chisquare(counts, 20_000 * probs / probs.sum()).pvalue > 1e-3


def test_whether_a_draw_is_below_has_both_outcomes():
    bound = np.array([-3.0, 0.2, 4.0])
    for noise, known in NOISES.values():
        log_prob = jax.jit(
            lambda outcome, noise=noise: Below(jnp.asarray(bound), noise).log_prob(outcome)
        )
        np.testing.assert_allclose(
            log_prob(np.ones(3, int)), known.logcdf(bound), rtol=1e-6, atol=1e-12
        )
        np.testing.assert_allclose(
            log_prob(np.array([0, 1, 0])),
            np.array([known.logsf(-3.0), known.logcdf(0.2), known.logsf(4.0)]),
            rtol=1e-6,
            atol=1e-10,
        )
    draw = jax.jit(
        lambda key: Below(jnp.asarray(bound), dist.Normal(0.0, 1.0)).sample(key, (20_000,))
    )
    share = np.asarray(draw(random.key(1))).mean(0)
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
