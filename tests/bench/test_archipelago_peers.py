"""The peers: likelihoods against simulation and closed forms, forecasts against what a Gaussian
process implies.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import log_density
from scipy.spatial.distance import cdist
from scipy.stats import norm

from tests.bench import archipelago_gaussian as gaussian
from tests.bench.archipelago_peers import PEERS, label_spreading
from tests.bench.archipelago_protocols import Cell, draw, score

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
G = np.array([[0.3, -0.5, 1.2], [2.0, 1.9, -3.0], [0.0, 0.0, 0.0]])
CHEAP = ("label spreading", "GP classifier", "self-training GP")


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_probit_is_the_share_of_noisy_wins(margin):
    noisy = G + np.random.default_rng(0).normal(size=(200_000, *G.shape))
    second, first = np.sort(noisy, axis=2)[:, :, -2:].transpose(2, 0, 1)
    won = np.eye(3)[noisy.argmax(2)] * (first - second > margin)[..., None]
    np.testing.assert_allclose(gaussian.probit(jnp.asarray(G), margin), won.mean(0), atol=0.006)


def test_wins_far_in_the_tail():
    g = jnp.array([[0.0, 20.0, 3.0]])
    wanted = norm.logcdf(-20.5) + norm.logcdf(-3.5)
    assert gaussian.log_wins(g, jnp.array([0.5]), 1.0)[0, 0] == pytest.approx(wanted, rel=1e-9)
    assert np.isfinite(gaussian.log_wins(1e3 * g, jnp.array([0.5]), 1.0)).all()


def test_null_category_sums_over_the_classes_of_a_row_without_a_label():
    x, y = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2))), jnp.array([2, -1, 0])
    white = jnp.asarray(np.random.default_rng(2).normal(size=(3, 3)))
    values = {
        "amplitude": jnp.array(2.0),
        "length": jnp.array([0.7]),
        "white": white,
        "u": jnp.array([0.1, -0.4, 1.0]),
    }
    found = log_density(gaussian.null_category, (x, y, 3, False), {}, values)[0]
    g = np.linalg.cholesky(4 * np.exp(-0.5 * cdist(x, x) ** 2 / 0.49) + 4e-6 * np.eye(3)) @ white
    wins = lambda n, k: np.prod(
        [norm.cdf(g[n, k] - g[n, j] - 1 + values["u"][n]) for j in range(3) if j != k]
    )
    wanted = np.log(wins(0, 2)) + np.log(sum(wins(1, k) for k in range(3))) + np.log(wins(2, 0))
    prior = (
        log_density(gaussian.latent, (x, 3, False), {}, values)[0] + norm.logpdf(values["u"]).sum()
    )
    assert found - prior == pytest.approx(wanted)


def test_probit_gp_integrates_to_the_probit_of_its_values():
    """The winner's noise is a site of the model; summed over it, what is left is the likelihood
    that the forecast uses.
    """
    x, (nodes, weights) = jnp.zeros((1, 1)), np.polynomial.hermite_e.hermegauss(40)
    values = {
        "amplitude": jnp.array(1.5),
        "length": jnp.array([1.0]),
        "white": jnp.array([[0.4, -0.2, 0.1]]),
    }

    def likelihood(k):
        joint = [
            log_density(
                gaussian.probit_gp,
                (x, jnp.array([k]), 3, False),
                {},
                {**values, "u": jnp.array([u])},
            )[0]
            for u in nodes
        ]
        return weights @ np.exp(np.array(joint) - norm.logpdf(nodes))

    found = np.array([likelihood(k) for k in range(3)])
    g = gaussian.root(x, values["amplitude"], values["length"]) @ values["white"]
    np.testing.assert_allclose(found / found.sum(), gaussian.probit(g, 0.0)[0], atol=1e-3)


def test_forecast_interpolates_and_forgets():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(4, 2)))
    draws = {
        "amplitude": jnp.full(500, 1.3),
        "length": jnp.full((500, 1), 0.8),
        "white": jnp.asarray(rng.normal(size=(500, 4, 3))),
    }
    x_test = jnp.concatenate([x[:1], jnp.full((1, 2), 50.0)])
    keys = random.split(random.key(0), 500)
    found = gaussian._forecast(jax.nn.softmax, x, x_test, keys, draws)
    factor = np.linalg.cholesky(1.69 * np.exp(-0.5 * cdist(x, x) ** 2 / 0.64) + 1.69e-6 * np.eye(4))
    np.testing.assert_allclose(
        found[0], jax.nn.softmax((factor @ draws["white"])[:, 0], axis=1).mean(0), atol=1e-3
    )
    far = jax.nn.softmax(1.3 * rng.normal(size=(100_000, 3)), axis=1)
    np.testing.assert_allclose(found[1], far.mean(0), atol=4 * far[:, 0].std() / np.sqrt(500))
    tilted = gaussian._forecast(
        lambda g: jax.nn.softmax(g) ** 2 * jnp.array([1, 2, 3]), x, x_test, keys, draws
    )
    # normalised after the average
    wanted = (far**2).mean(0) * np.array([1, 2, 3]) / 6 / (far**2).mean()
    np.testing.assert_allclose(tilted[1], wanted, atol=0.02)


@pytest.mark.parametrize("name", CHEAP)
def test_peers_learn_from_few_labels(name):
    rows = draw(Cell("3 arms", 2), 0)
    found = PEERS[name](*rows[:3], 0)
    assert score(found, rows.y_test).error < 0.05


def test_only_the_supervised_classifier_ignores_rows_without_a_label():
    rows = draw(Cell("3 arms", 2), 0)
    kept = (rows.y >= 0) | (np.arange(50) < 25)
    same = {
        name: np.allclose(
            PEERS[name](*rows[:3], 0), PEERS[name](rows.x[kept], rows.y[kept], rows.x_test, 0)
        )
        for name in CHEAP
    }
    assert same == {"label spreading": False, "GP classifier": True, "self-training GP": False}


def test_label_spreading_knows_nothing_of_rows_that_no_label_reaches():
    x = np.concatenate(
        [
            np.random.default_rng(0).normal(size=(20, 2)),
            np.random.default_rng(1).normal(size=(20, 2)) + 1e3,
        ]
    )
    y = np.full(40, -1)
    y[:2] = [0, 1]
    np.testing.assert_allclose(label_spreading(x, y, x[20:], neighbours=5), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax GP", "probit GP"])
def test_bayesian_peers_learn_from_few_labels(name, monkeypatch):
    monkeypatch.setattr(gaussian, "NUM_WARMUP", 50)  # enough for what is asked here
    monkeypatch.setattr(gaussian, "NUM_SAMPLES", 50)
    rows = draw(Cell("3 arms", 4), 0)
    found = score(PEERS[name](*rows[:3], 0), rows.y_test)
    assert found.error < 0.05
    assert found.log_score > -0.5


@pytest.mark.slow
def test_softmax_gp_against_importance_sampling():
    """Three labelled rows on a line: prior draws weighted by the likelihood give the forecast."""
    x, y, x_test = np.array([[-1.0], [0.0], [1.5]]), np.array([0, 1, 0]), np.array([[0.5], [3.0]])
    rng, count = np.random.default_rng(0), 100_000
    amplitude, length = (
        np.exp(rng.normal(1, 1, count)),
        np.exp(rng.normal(0.5 * np.log(0.5), 1, count)),
    )
    rows = np.concatenate([x, x_test])
    gram = amplitude[:, None, None] ** 2 * (
        np.exp(-0.5 * cdist(rows, rows) ** 2 / length[:, None, None] ** 2) + 1e-6 * np.eye(5)
    )
    g = np.linalg.cholesky(gram) @ rng.normal(size=(count, 5, 2))
    p = np.asarray(jax.nn.softmax(g, axis=2))
    weight = np.prod([p[:, n, y[n]] for n in range(3)], axis=0)
    wanted = np.tensordot(weight, p[:, 3:], axes=1) / weight.sum()
    found = np.mean(
        [gaussian.predict(gaussian.softmax_gp, x, y, x_test, seed=seed) for seed in range(2)],
        axis=0,
    )
    np.testing.assert_allclose(found, wanted, atol=0.05)
