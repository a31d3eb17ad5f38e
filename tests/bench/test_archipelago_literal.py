"""The literal sampler against exact answers: the number of rejections given the functions, and
draws of the joint distribution.
"""

import arviz as az
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import nbinom, norm

from tests.bench.archipelago_literal import Base, Hyper, Sampler, simulate, sliced, trace

NUM_SEEN = 4


def known(x):
    """Two functions that are nowhere near constant."""
    return np.stack([2 * np.sin(2 * x[..., 0]) - 1, 1 - x[..., 0] ** 2], axis=-1)


def rejected(x):
    """1 / (1 + Λ) at x."""
    return 1 / (1 + np.exp(known(np.array([x]))).sum())


Z = 1 - quad(lambda x: rejected(x) * norm.pdf(x), -8, 8)[0]


class Known(Sampler):
    """Its functions are `known`, and stay."""

    def values_at(self, new):
        return known(new)


class AsPrinted(Sampler):
    """Equation 8, without the number of orders."""

    def odds(self, m):
        return 1.0


class KnownAsPrinted(AsPrinted, Known):
    """Both."""


def histories(kind, num_sweeps=12_000):
    """M, and the mean location of the rejections, at each of many sweeps of the history alone."""
    x = np.array([[-1.0], [0.2], [0.5], [1.5]])
    chain = kind(
        x,
        known(x),
        np.array([0, 1, -1, -1]),
        Hyper(),
        Base(np.zeros(1), np.eye(1)),
        np.random.default_rng(0),
    )
    assert len(x) == NUM_SEEN
    found = []
    for sweep in range(num_sweeps):
        for _ in range(5):
            chain.birth_or_death()
        if sweep % 5 == 0:
            chain.relocate()
        found.append((chain.num_rejections, (chain.x[NUM_SEEN:] > 0.5).sum()))
    return np.array(found, dtype=float)


def scaled_error(values, wanted):
    """The error of the mean of a chain's values, in standard errors."""
    return (values.mean() - wanted) / (values.std() / np.sqrt(float(az.ess(values[None]))))


def test_rejections_are_negative_binomial():
    m, right = histories(Known).T
    exact = nbinom(NUM_SEEN, Z)
    assert abs(scaled_error(m, exact.mean())) < 4
    for most in (0, 2, 5, 10):
        assert abs(scaled_error((m <= most).astype(float), exact.cdf(most))) < 4
    # rejections are π / (1 + Λ)
    share = quad(lambda x: rejected(x) * norm.pdf(x), 0.5, 8)[0] / (1 - Z)
    assert abs(scaled_error(right, share * exact.mean())) < 4


def test_rejections_of_the_printed_equation_are_not():
    assert abs(scaled_error(histories(KnownAsPrinted)[:, 0], nbinom(NUM_SEEN, Z).mean())) > 6


def statistics(chain):
    g, m = chain.g[: len(chain.y)], chain.num_rejections
    return [
        np.log1p(m),
        m == 0,
        g.mean(),
        (g**2).mean(),
        (chain.x[len(chain.y) :] ** 2).sum() / (1 + m),
        np.log(chain.hyper.length),
    ]


def changes(kind, replicates, learn):
    """The mean changes of `statistics` by three sweeps, in standard errors.

    The chains start from exact draws of everything.
    """
    found = []
    for seed in range(replicates):
        rng = np.random.default_rng([seed, 1])
        hyper = Hyper(*np.exp(rng.normal([0, 0], [0.3, 0.3]))) if learn else Hyper(1.5, 0.7)
        base = (
            Base(np.zeros(1), np.eye(1)).refreshed(np.zeros((0, 1)), rng)
            if learn
            else Base(np.zeros(1), np.eye(1))
        )
        truth = simulate(3, 2, hyper, base, seed)
        truth.y[1:] = -1
        chain = kind(truth.x, truth.g, truth.y, truth.hyper, truth.base, rng, learn=learn, step=0.4)
        before = statistics(chain)
        for _ in range(3):
            chain.sweep()
        found.append(np.subtract(statistics(chain), before))
    found = np.array(found, dtype=float)
    moved = found.std(0) > 0
    return found.mean(0)[moved] / (found.std(0, ddof=1)[moved] / np.sqrt(replicates))


def test_sweeps_keep_the_joint_distribution():
    assert np.abs(changes(Sampler, 500, learn=False)).max() < 3.3


def test_sweeps_with_the_printed_equation_do_not():
    assert np.abs(changes(AsPrinted, 500, learn=False)).max() > 5


@pytest.mark.slow
def test_sweeps_that_learn_keep_the_joint_distribution(monkeypatch):
    # the priors of `changes`
    monkeypatch.setattr("tests.bench.archipelago_literal.LOG_AMPLITUDE", (0.0, 0.3))
    monkeypatch.setattr("tests.bench.archipelago_literal.LOG_LENGTH", (0.0, 0.3))
    assert np.abs(changes(Sampler, 1500, learn=True)).max() < 3.3


def test_the_slope_is_the_derivative():
    chain = simulate(5, 3, Hyper(), Base(np.zeros(2), np.eye(2)), seed=1)
    chain.y[::2] = -1
    for k in range(3):
        for row in range(len(chain.x)):
            shift = np.zeros_like(chain.g)
            shift[row, k] = 1e-5
            numeric = (
                chain.log_likelihood(chain.g + shift) - chain.log_likelihood(chain.g - shift)
            ) / 2e-5
            assert chain.slope(chain.g, k)[row] == pytest.approx(numeric, abs=1e-7)


def test_values_at_a_new_point_are_conditional():
    chain = simulate(4, 2, Hyper(1.2, 0.8), Base(np.zeros(1), np.eye(1)), seed=2)
    new = np.array([0.3])
    drawn = np.array([chain.values_at(new) for _ in range(4000)])
    points = np.vstack([chain.x, new])
    precision = np.linalg.inv(chain.hyper.root(points) @ chain.hyper.root(points).T)
    std = precision[-1, -1] ** -0.5
    np.testing.assert_allclose(
        drawn.mean(0), -(std**2) * precision[-1, :-1] @ chain.g, atol=4 * std / np.sqrt(4000)
    )
    np.testing.assert_allclose(drawn.std(0), std, rtol=0.05)


def test_slices_draw_from_a_normal():
    rng, drawn, value = np.random.default_rng(0), [], 0.0
    for _ in range(6000):
        value = sliced(lambda a: -0.5 * ((a - 1) / 0.5) ** 2, value, rng)
        drawn.append(value)
    assert abs(scaled_error(np.array(drawn), 1)) < 3
    assert np.std(drawn) == pytest.approx(0.5, rel=0.05)


def test_base_density_given_many_points():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 2)) @ np.array([[1.0, 0.5], [0, 2.0]]) + [3.0, -1.0]
    found = Base(np.zeros(2), np.eye(2)).refreshed(x, rng)
    np.testing.assert_allclose(found.mean, [3, -1], atol=0.05)
    np.testing.assert_allclose(found.covariance, np.cov(x.T), atol=0.15)


def test_a_chain_from_nothing_runs():
    x = np.random.default_rng(0).normal(size=(8, 2))
    chain = Sampler.start(
        x,
        np.array([0, 1, 2, -1, -1, -1, -1, -1]),
        Hyper(),
        Base(np.zeros(2), np.eye(2)),
        learn=True,
    )
    found, seconds = trace(chain, 20, 30)
    assert found.shape == (30,)
    assert seconds > 0
    assert found.max() > 0
    np.testing.assert_array_equal(chain.x[:8], x)
