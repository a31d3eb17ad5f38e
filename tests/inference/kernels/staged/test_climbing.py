"""Climbs to the Normal that slopes tell, and what they say of the evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from inference.kernels.staged import peaks
from inference.kernels.staged.peaks import batch_and_match, combined, values
from inference.maths.normal_mixture import NormalMixture, NormalSummary

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SIZE = 6
RNG = np.random.default_rng(2)
LOADING = RNG.normal(size=(SIZE, SIZE))
COVARIANCE = LOADING @ LOADING.T + 0.1 * np.eye(SIZE)
MEAN, MASS = np.arange(SIZE) - 2.0, -7.0  # log of its integral


def at(mean, scale):
    return NormalMixture.of(jnp.zeros(1), jnp.asarray(mean)[None], scale * jnp.eye(SIZE)[None])


def normal(mass):
    """A Normal of this integral, in two parts as a stage has them."""
    precision = np.linalg.inv(COVARIANCE)
    top = mass + stats.multivariate_normal(MEAN, COVARIANCE).logpdf(MEAN)
    return lambda z: (
        -0.25 * (z - MEAN) @ precision @ (z - MEAN),
        top - 0.25 * (z - MEAN) @ precision @ (z - MEAN),
    )


def covariance_of(clumps, number=0):
    root = np.linalg.inv(clumps.whitening[number])
    return root @ root.T


@pytest.mark.parametrize(
    ("mean", "scale"), [(np.full(SIZE, 30.0), 0.1), (MEAN, 20.0)], ids=["far", "wide"]
)
def test_a_climb_ends_at_the_normal(mean, scale):
    found, log_evidence, evaluations = batch_and_match(
        random.key(0), at(mean, scale), normal, MASS, 60
    )
    np.testing.assert_allclose(found.mean[0], MEAN, atol=1e-4)
    np.testing.assert_allclose(covariance_of(found), COVARIANCE, rtol=1e-4, atol=1e-4)
    assert abs(log_evidence - MASS) < 1e-4
    # at the start, where it ends, and once more to see that this is the end
    assert evaluations == 3 * 3 * 60


def test_a_climb_that_follows_no_slopes_does_not_end_there(monkeypatch):
    """The planted bug: moments alone, which are those of the start."""
    monkeypatch.setattr(peaks, "score_matched", lambda clumps, z, slope: clumps)
    _, log_evidence, _ = batch_and_match(
        random.key(0), at(np.full(SIZE, 30.0), 0.1), normal, MASS, 60
    )
    assert log_evidence < MASS - 100


def curved(power):
    """Not Normal: what is known of its integral is a bound, which climbs may not pass by more
    than noise.
    """
    return lambda z: (-jnp.sum(jnp.abs(z) ** power), jnp.zeros(()))


def test_what_is_not_normal_comes_near():
    exact = SIZE * np.log(2 * stats.gennorm(4.0).pdf(0.0) ** -1 / 2)
    found, log_evidence, _ = batch_and_match(
        random.key(0), at(np.full(SIZE, 3.0), 0.5), curved, 4.0, 500
    )
    assert abs(log_evidence - exact) < 0.2
    np.testing.assert_allclose(found.mean[0], 0.0, atol=0.25)


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_nothing_is_found_where_nothing_is(value):
    found, log_evidence, _ = batch_and_match(
        random.key(0), at(MEAN, 1.0), lambda value: lambda z: (jnp.sum(z), value), value, 60
    )
    assert log_evidence == -np.inf
    assert combined([found, found], 2 * [log_evidence], 4).log_weight.tolist() == [-np.inf] * 4


def test_clumps_are_joined_by_their_evidence():
    """Components of one mode become one, and each has its share of the evidence.

    Three are of one mode, by climbs that ended a little apart; one is of another; one is not worth
    a component.
    """
    low = [at(MEAN + shift, 1.0) for shift in (0.0, 0.01, -0.02)]
    found = [*low[:2], at(MEAN + 9, 2.0), at(MEAN - 9, 1.0), low[2]]
    log_evidence = [*np.log([0.3, 0.3, 0.6]), -20.0, np.log(0.3)]
    whole = combined(found, log_evidence, 5)
    np.testing.assert_allclose(np.exp(whole.log_weight), [2 / 3, 1 / 3, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(whole.mean[:2], [MEAN + 9, MEAN])
    np.testing.assert_allclose(covariance_of(whole), 4 * np.eye(SIZE), atol=1e-12)


def test_no_more_are_joined_than_there_are_places():
    apart = [at(MEAN + 50 * number, 1.0) for number in range(4)]
    whole = combined(apart, [0.0, -1.0, -2.0, -3.0], 2)
    np.testing.assert_allclose(whole.mean, [MEAN, MEAN + 50])
    np.testing.assert_allclose(np.exp(whole.log_weight).sum(), 1.0)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_weights_of_draws_give_the_evidence(bug):
    """Weights of draws from a Normal mixture give the evidence.

    The planted bug: the weights are over another mixture.
    """
    wide = lambda scale: NormalMixture.of(
        jnp.zeros(1),
        jnp.asarray(MEAN)[None],
        scale * jnp.linalg.cholesky(jnp.asarray(COVARIANCE))[None],
    )
    clump, said = (
        wide(1.2),
        lambda clump: jax.vmap(lambda z: NormalSummary(SIZE).log_density(clump, z))(z),
    )
    z = NormalSummary(SIZE).draws(np.random.default_rng(1), clump, 5000)
    log_weight = sum(values(z, MASS, normal)) - NormalSummary(SIZE).log_densities(clump, z)
    if bug:
        log_weight = log_weight + said(clump) - said(wide(1.5))
    assert (abs(np.logaddexp.reduce(np.asarray(log_weight)) - np.log(5000) - MASS) < 0.1) != bug
    np.testing.assert_allclose(
        z.mean(0), MEAN, atol=5 * np.sqrt(1.44 * np.diag(COVARIANCE).max() / 5000)
    )
