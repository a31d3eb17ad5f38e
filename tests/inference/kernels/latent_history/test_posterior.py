"""The posterior of a small Archipelago against importance sampling of softmax Gaussian processes.

With the rejected points summed out, the functions at the data have the posterior of a softmax
classifier, times (Lambda / (1 + Lambda) / Z) for each row, Z the integral of Lambda / (1 + Lambda)
over the base density; and M given the functions has the mean Q (1 - Z) / Z. Where the process may
end, Z is 1 - persistence (1 - Z) there. In one dimension Z is a sum over nodes. To first order in
the functions the density speaks of their sum, and labels of their differences: where the functions
hardly vary, those are the softmax classifier's.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer import NUTS, Gibbs
from scipy.special import expit, logsumexp, softmax

from inference import Driver, LatentHistory
from zoo import archipelago as module
from zoo.archipelago import archipelago

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

X, Y = np.array([[-1.2], [-0.3], [0.4], [1.5]]), np.array([0, -1, 1, -1])
HIGH, LOW, LENGTHSCALE = np.array([1.5, 1.3]), np.array([0.5, 0.5]), np.array([[0.7], [1.0]])
HISTORY = ["num_rejected", "rejected", "rejected_noise"]


def weighted(amplitudes, persistence=1.0, num_draws=200_000, num_nodes=40):
    """Draws of the functions at the data from their prior with the mean of M, log weights
    without and with what the density says.
    """
    rng = np.random.default_rng(0)
    nodes, mass = np.polynomial.hermite_e.hermegauss(num_nodes)
    points = np.concatenate([X[:, 0], nodes])
    g = []
    for amplitude, length in zip(amplitudes, LENGTHSCALE[:, 0], strict=True):
        covariance = np.exp(-0.5 * ((points[:, None] - points) / length) ** 2) + 1e-6 * np.eye(
            len(points)
        )
        g.append(
            amplitude * rng.normal(size=(num_draws, len(points))) @ np.linalg.cholesky(covariance).T
        )
    g = np.stack(g, -1)
    log_mass = logsumexp(g, -1)
    z = expit(log_mass[:, len(X) :]) @ (mass / mass.sum())
    at_data = g[:, : len(X)]
    labels = sum(at_data[:, i, y] - log_mass[:, i] for i, y in enumerate(Y) if y >= 0)
    lasting = 1 - persistence * (1 - z)
    density = np.sum(np.log(expit(log_mass[:, : len(X)])), 1) - len(X) * np.log(lasting)
    return told(at_data, len(X) * (1 - lasting) / lasting), labels, labels + density


def told(g, num_rejected):
    """What is compared, [draw, quantity]: probabilities of class 0 at each row, the functions'
    sums there, the number of rejections.
    """
    return np.concatenate([softmax(g, -1)[..., 0], g.sum(-1), num_rejected[:, None]], 1)


def average(values, log_weights):
    """Weighted means, and their standard errors."""
    weights = softmax(log_weights)
    mean = weights @ values
    return mean, np.sqrt(weights**2 @ (values - mean) ** 2)


def chain(amplitudes, num_draws=6000, capacity=64, persistence=1.0):
    """The same by the kernel beside NUTS."""
    known = {
        "amplitude": amplitudes,
        "lengthscale": LENGTHSCALE,
        "mean": np.zeros(1),
        "scale": np.ones(1),
    }
    model = handlers.condition(
        archipelago, {name: jnp.asarray(value) for name, value in known.items()}
    )
    kernel = Gibbs([(LatentHistory(model), HISTORY), (NUTS(model, max_tree_depth=4), None)])
    tree = Driver(kernel, num_warmup=300, num_samples=num_draws).run(
        0, X, Y, capacity=capacity, persistence=persistence
    )
    g, count = tree.posterior["function"].values[0], tree.posterior["num_rejected"].values[0]
    parts = told(g, count.astype(float)).reshape(40, num_draws // 40, -1).mean(1)
    return parts.mean(0), parts.std(0, ddof=1) / np.sqrt(len(parts))


def gaps(found, wanted):
    """Differences in standard errors."""
    return np.abs(found[0] - wanted[0]) / np.hypot(found[1], wanted[1])


def test_the_posterior_is_a_softmax_classifiers_weighted_by_the_density():
    values, labels, both = weighted(HIGH)
    found = chain(HIGH)
    assert gaps(found, average(values, both)).max() < 4, (found, average(values, both))
    assert gaps(found, average(values, labels)).max() > 5  # its own: it does not see where rows lie


def test_a_process_that_may_end_has_fewer_rejections():
    values, _, both = weighted(HIGH, persistence=0.6)
    found = chain(HIGH, capacity=32, persistence=0.6)
    assert gaps(found, average(values, both)).max() < 4, (found, average(values, both))
    values, _, both = weighted(HIGH)
    assert gaps(found, average(values, both)).max() > 5  # its own: that of a process without an end


def test_a_count_without_its_orders_has_another_posterior(monkeypatch):
    """The density as it was printed."""
    monkeypatch.setattr(module, "gammaln", jnp.zeros_like)
    values, _, both = weighted(HIGH)
    assert gaps(chain(HIGH), average(values, both)).max() > 5


def test_functions_that_hardly_vary_are_the_softmax_classifiers():
    values, labels, _ = weighted(LOW)
    found, wanted = chain(LOW), average(values, labels)
    assert gaps(found, wanted)[: len(X)].max() < 4, (found, wanted)
    assert gaps(found, (0.5, 0.0))[: len(X)].max() > 8  # labels were learned from
