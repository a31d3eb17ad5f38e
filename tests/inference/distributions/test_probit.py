"""Probits against integrals of the Normal behind them: probabilities, draws, and the draw of
that Normal.
"""

from copy import copy
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import integrate, stats
from scipy.special import gammaln, log_ndtr

from inference.distributions import BinomialProbit, OrderedProbit
from inference.distributions import probit as _probit
from inference.distributions.truncated_normal import TruncatedNormal

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

CUTPOINTS = np.array([0.0, 0.7, 2.0])
ENDS = [-np.inf, *CUTPOINTS, np.inf]
PREDICTORS = [-2.0, -0.4, 0.35, 1.1, 3.0]
FAR = [-60.0, -9.0, 9.0, 60.0]
# trials, successes; not in the order of the trials
COUNTS = [(3, 0), (3, 1), (0, 0), (7, 7), (1, 1), (12, 5)]
NUM_DRAWS = 8000


def log_integral(predictor, low, high, power=0):
    """The log integral of x^power exp(-(x - predictor)^2 / 2) / sqrt(2 pi) over an interval.

    The interval may lie far out, because the largest value is taken out first.
    """
    top = np.clip(predictor, low, high)
    reach = 40 / (1 + abs(top - predictor))  # beyond it nothing is left
    ends = max(low, top - reach), min(high, top + reach)
    density = lambda x: x**power * np.exp(((top - predictor) ** 2 - (x - predictor) ** 2) / 2)
    return (
        np.log(
            integrate.quad(density, *ends, points=[top], epsabs=0, epsrel=1e-12)[0]
            / np.sqrt(2 * np.pi)
        )
        - (top - predictor) ** 2 / 2
    )


@cache
def moments(predictor, low, high):
    """Mean and variance of the Normal in an interval."""
    mass = stats.norm.cdf(high - predictor) - stats.norm.cdf(low - predictor)
    power = lambda k: integrate.quad(
        lambda x: x**k * stats.norm.pdf(x - predictor) / mass, max(low, -12), min(high, 12)
    )[0]
    return power(1), power(2) - power(1) ** 2


def ordered(predictor=0.0):
    return OrderedProbit(jnp.asarray(predictor, float), jnp.asarray(CUTPOINTS))


def slope(log_prob, predictor):
    """By differences of the fourth order."""
    return (
        sum(
            c * np.asarray(log_prob(predictor + h * 1e-3))
            for c, h in ((8, 1), (-8, -1), (-1, 2), (1, -2))
        )
        / 12e-3
    )


# Probabilities.


@pytest.mark.parametrize("level", range(4))
def test_an_ordered_level_has_the_mass_of_its_interval(level):
    points = np.array(PREDICTORS + FAR)
    wanted = [log_integral(at, ENDS[level], ENDS[level + 1]) for at in points]
    np.testing.assert_allclose(
        jax.jit(ordered(points).log_prob)(np.full(len(points), level)),
        wanted,
        rtol=1e-10,
        atol=1e-12,
    )


def test_mass_is_that_of_scipy_where_scipy_can():
    wanted = np.diff(stats.norm.cdf(np.array(ENDS)[:, None] - PREDICTORS), axis=0)
    np.testing.assert_allclose(
        np.exp(jax.jit(ordered(PREDICTORS).log_prob)(np.arange(4)[:, None])), wanted, rtol=1e-10
    )


def test_a_level_too_high_is_seen(monkeypatch):
    interval = OrderedProbit.interval
    monkeypatch.setattr(OrderedProbit, "interval", lambda self, value: interval(self, value + 1))
    with pytest.raises(AssertionError):
        test_an_ordered_level_has_the_mass_of_its_interval(1)


def test_successes_are_binomial():
    found = jax.jit(
        lambda trials, hits: BinomialProbit(np.array(PREDICTORS), trials).log_prob(hits)
    )
    for trials, hits in COUNTS:
        wanted = stats.binom.logpmf(hits, trials, stats.norm.cdf(PREDICTORS))
        np.testing.assert_allclose(found(trials, hits), wanted, rtol=1e-10, atol=1e-12)


def test_successes_far_out_have_both_tails():
    far = np.array(FAR)
    wanted = gammaln(8) - gammaln(4) - gammaln(5) + 3 * log_ndtr(far) + 4 * log_ndtr(-far)
    np.testing.assert_allclose(jax.jit(BinomialProbit(far, 7).log_prob)(3), wanted, rtol=1e-12)


def test_far_tails_are_finite_in_single_precision():
    with jax.enable_x64(False):
        far = jnp.array([-1e4, -300.0, 300.0, 1e4])[:, None]
        assert np.isfinite(
            jax.jit(OrderedProbit(far, jnp.asarray(CUTPOINTS)).log_prob)(jnp.arange(4))
        ).all()
        assert np.isfinite(jax.jit(BinomialProbit(far, 4).log_prob)(jnp.arange(5))).all()


@jax.jit
def log_probs(predictor):
    """The log probabilities of all levels."""
    return OrderedProbit(predictor, CUTPOINTS).log_prob(np.arange(4))


@partial(jax.jit, static_argnums=1)
def log_probs_of_successes(predictor, trials):
    """The log probabilities of all numbers of successes."""
    return BinomialProbit(predictor, trials).log_prob(np.arange(trials + 1))


@pytest.mark.parametrize("predictor", PREDICTORS + FAR)
def test_probabilities_of_all_values_sum_to_one(predictor):
    np.testing.assert_allclose(np.exp(log_probs(predictor)).sum(), 1.0, rtol=1e-12)
    for trials in (0, 1, 6):
        np.testing.assert_allclose(
            np.exp(log_probs_of_successes(predictor, trials)).sum(), 1.0, rtol=1e-12
        )


@jax.jit
def told_of_level(predictor, cutpoints, level):
    """The log probability, and its slopes in the predictor and in the cutpoints."""
    return jax.value_and_grad(lambda *at: OrderedProbit(*at).log_prob(level), (0, 1))(
        predictor, cutpoints
    )


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_slope_of_an_ordered_level_equals_a_difference(level):
    for at in PREDICTORS:
        wanted = slope(lambda x: told_of_level(x, CUTPOINTS, level)[0], at)
        np.testing.assert_allclose(
            told_of_level(at, CUTPOINTS, level)[1][0], wanted, rtol=1e-8, atol=1e-9
        )


def test_slope_in_the_cutpoints_is_finite():
    for level in range(4):
        assert np.isfinite(told_of_level(0.3, CUTPOINTS, level)[1][1]).all()


def test_slope_of_successes_equals_a_difference():
    told = jax.jit(jax.value_and_grad(lambda x: BinomialProbit(x, 7).log_prob(3)))
    for at in PREDICTORS:
        np.testing.assert_allclose(told(at)[1], slope(lambda x: told(x)[0], at), rtol=1e-8)


# Draws.


def check_frequencies(distribution, num_values):
    draws = np.asarray(jax.jit(lambda key: distribution.sample(key, (NUM_DRAWS,)))(random.key(0)))
    counts = np.bincount(draws, minlength=num_values)
    assert len(counts) == num_values
    assert (
        stats.chisquare(
            counts, NUM_DRAWS * np.exp(jax.jit(distribution.log_prob)(np.arange(num_values)))
        ).pvalue
        > 1e-3
    )


def test_draws_are_as_frequent_as_their_probability():
    check_frequencies(ordered(0.6), 4)
    check_frequencies(BinomialProbit(jnp.asarray(0.3), 5), 6)


@pytest.mark.parametrize("family", [OrderedProbit, BinomialProbit], ids=["ordered", "binomial"])
def test_draws_at_another_predictor_are_seen(family, monkeypatch):
    sample = family.sample

    def elsewhere(self, *rest):
        other = copy(self)
        other.predictor = self.predictor + 0.1
        return sample(other, *rest)

    monkeypatch.setattr(family, "sample", elsewhere)
    with pytest.raises(AssertionError):
        check_frequencies(
            ordered(0.6) if family is OrderedProbit else BinomialProbit(jnp.asarray(0.3), 5),
            4 + 2 * (family is BinomialProbit),
        )


# The Normal behind a value.


def augmented(distribution, value):
    """Responses [draw, value], and weights."""
    draw = jax.jit(jax.vmap(lambda key: distribution.augment(key, value)))
    response, weight = map(np.asarray, draw(random.split(random.key(1), NUM_DRAWS)))
    assert (weight == weight[0]).all()
    return response, weight[0]


def check_moments(distribution, value, weight, mean, variance):
    """Mean and variance of the responses within 5 standard errors; elements are independent
    draws.
    """
    response, found = augmented(distribution, jnp.asarray(value))
    np.testing.assert_array_equal(found, weight)
    error = np.sqrt(variance / NUM_DRAWS) + 1e-12
    assert (np.abs(response.mean(0) - mean) < 5 * error).all()
    kurtosis = ((response - response.mean(0)) ** 4).mean(0)
    assert (np.abs(response.var(0) - variance) < 5 * np.sqrt(kurtosis / NUM_DRAWS) + 1e-12).all()
    assert np.isfinite(response).all()
    lag = np.corrcoef(response[:, variance > 0], rowvar=False)
    assert np.abs(lag - np.eye(len(lag))).max() < 5 / np.sqrt(NUM_DRAWS)


def check_ordered():
    predictor, level = (x.ravel() for x in np.meshgrid(PREDICTORS, range(4)))
    mean, variance = np.array(
        [moments(at, ENDS[i], ENDS[i + 1]) for at, i in zip(predictor, level, strict=True)]
    ).T
    check_moments(ordered(predictor), level, np.ones(len(level)), mean, variance)


def check_binomial():
    predictor = np.repeat(PREDICTORS, len(COUNTS))
    trials, hits = np.tile(COUNTS, (len(PREDICTORS), 1)).T
    above, below = (
        np.array([moments(at, *ends) for at in predictor]) for ends in ((0, np.inf), (-np.inf, 0))
    )
    mean, variance = (hits[:, None] * above + (trials - hits)[:, None] * below).T
    many = np.maximum(trials, 1)
    check_moments(BinomialProbit(predictor, trials), hits, trials, mean / many, variance / many**2)


def test_response_to_a_level_is_the_normal_in_its_interval():
    check_ordered()


@pytest.mark.slow
def test_response_to_successes_is_the_mean_over_the_trials():
    check_binomial()


def test_trials_are_drawn_in_pieces_and_put_back(monkeypatch):
    monkeypatch.setattr(_probit, "CHUNK", 7)
    check_binomial()


def test_nothing_is_learned_from_no_trials():
    response, weight = jax.jit(
        BinomialProbit(jnp.array([-50.0, 0.0, 50.0]), jnp.zeros(3, int)).augment
    )(random.key(0), jnp.zeros(3, int))
    assert np.isfinite(response).all()
    np.testing.assert_array_equal(weight, 0.0)


def test_response_far_out_stays_in_its_interval_and_close_to_its_end():
    response, _ = jax.jit(ordered(np.array([-300.0, 300.0])).augment)(
        random.key(0), np.array([3, 0])
    )
    response = np.asarray(response)
    assert 2.0 < response[0] < 2.1
    assert -0.1 < response[1] < 0.0


augment, total = BinomialProbit.augment, BinomialProbit._total
interval, draw = OrderedProbit.interval, TruncatedNormal.sample


def in_order_of_trials(self, rng_key, value):
    """Forgets that the values were sorted."""
    response, weight = augment(self, rng_key, value)
    return response[jnp.argsort(self.trials)], weight


TWINS = {
    "next interval": (
        check_ordered,
        OrderedProbit,
        "interval",
        lambda self, value: interval(self, jnp.minimum(value + 1, 3)),
    ),
    "ends swapped": (
        check_ordered,
        OrderedProbit,
        "interval",
        lambda self, value: interval(self, value)[::-1],
    ),
    "no truncation": (
        check_ordered,
        TruncatedNormal,
        "sample",
        lambda self, key: self.loc + random.normal(key, self.loc.shape),
    ),
    "at half the scale": (
        check_ordered,
        TruncatedNormal,
        "sample",
        lambda self, key: (draw(self, key) + self.low.clip(-9, 9)) / 2,
    ),
    "hits for misses": (
        check_binomial,
        BinomialProbit,
        "_total",
        staticmethod(lambda key, p, n, y: total(key, p, n, n - y)),
    ),
    "one trial less": (
        check_binomial,
        BinomialProbit,
        "_total",
        staticmethod(lambda key, p, n, y: total(key, p, n - 1, y)),
    ),
    "the same draw": (
        check_binomial,
        BinomialProbit,
        "_total",
        staticmethod(lambda key, p, n, y: n * total(key, p, n * 0 + 1, y)),
    ),
    "weight 1": (
        check_binomial,
        BinomialProbit,
        "augment",
        lambda self, *rest: (augment(self, *rest)[0], jnp.ones_like(self.predictor)),
    ),
    "out of order": (check_binomial, BinomialProbit, "augment", in_order_of_trials),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_response_is_seen(name, monkeypatch):
    check, owner, method, planted = TWINS[name]
    monkeypatch.setattr(owner, method, planted)
    with pytest.raises(AssertionError):
        check()


def check_score(distribution_at, values):
    """The slope of the log probability is what the response tells of the predictor, on average."""
    at = np.array(PREDICTORS)
    for value in values:
        response, weight = augmented(distribution_at(at), jnp.full(len(at), value))
        told = weight * (response - at)
        wanted = slope(
            lambda x, value=value: distribution_at(x).log_prob(np.full(len(x), value)), at
        )
        assert (np.abs(told.mean(0) - wanted) < 5 * told.std(0) / np.sqrt(NUM_DRAWS)).all()


@pytest.mark.slow
def test_the_score_is_the_mean_of_what_responses_tell():
    check_score(ordered, range(4))
    check_score(lambda at: BinomialProbit(at, 7), (0, 3))


@pytest.mark.parametrize(
    ("owner", "planted", "distribution_at", "values"),
    [
        (BinomialProbit, TWINS["weight 1"][-1], lambda at: BinomialProbit(at, 7), (3,)),
        (
            OrderedProbit,
            lambda self, key, value: (
                self.interval(value)[0].clip(-9),
                jnp.ones_like(self.predictor),
            ),
            ordered,
            (2,),
        ),
    ],
    ids=["weight 1", "the end of the interval"],
)
def test_what_is_no_response_has_another_score(
    owner, planted, distribution_at, values, monkeypatch
):
    monkeypatch.setattr(owner, "augment", planted)
    with pytest.raises(AssertionError):
        check_score(distribution_at, values)


# What NumPyro asks of a distribution.


def test_supports_and_shapes():
    for distribution, high in ((ordered(), 3), (BinomialProbit(0.3, 4), 4)):
        assert (distribution.support.lower_bound, distribution.support.upper_bound) == (0, high)
        assert distribution.support.is_discrete
    sample = lambda distribution: jax.jit(lambda key: distribution.sample(key, (5,)))(random.key(0))
    assert sample(ordered(np.zeros((2, 3)))).shape == (5, 2, 3)
    assert sample(BinomialProbit(np.zeros((2, 1)), np.arange(3))).shape == (5, 2, 3)
    many = jax.vmap(lambda at: OrderedProbit(at, CUTPOINTS))(jnp.zeros((5, 2)))
    assert jax.jit(jax.vmap(lambda one: one.log_prob(jnp.array([0, 3]))))(many).shape == (5, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OrderedProbit(0.0, 1.0),
            r"OrderedProbit cutpoints: found shape \(\), wanted one increasing vector",
        ),
        (
            lambda: OrderedProbit(np.zeros(2), np.zeros((2, 3))),
            r"OrderedProbit cutpoints: found shape \(2, 3\)",
        ),
        (lambda: OrderedProbit(0.0, np.array([1.0, 0.0]), validate_args=True), "invalid cutpoints"),
        (lambda: BinomialProbit(0.0, -1, validate_args=True), "invalid trials"),
        (lambda: BinomialProbit(0.0, 1.5, validate_args=True), "invalid trials"),
    ],
    ids=["scalar", "matrix", "not increasing", "negative", "fraction"],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("family", "other"),
    [(OrderedProbit, CUTPOINTS), (BinomialProbit, 3)],
    ids=["ordered", "binomial"],
)
@pytest.mark.filterwarnings("ignore:Out-of-support")  # NumPyro's; asked for on purpose
def test_values_beyond_the_support_are_impossible(family, other):
    assert (family(0.3, other, validate_args=True).log_prob(np.array([-1, 4])) == -jnp.inf).all()
