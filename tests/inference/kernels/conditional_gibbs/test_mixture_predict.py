"""Predictions by draws of a mixture's posterior, against the same sums written down by numpy, in
covariances and not in precisions.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from inference import Program
from inference.kernels.conditional_gibbs import mixture_predict
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from inference.reading.stick_mixture.read import read_assignment
from tests.inference.mixtures import case
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

ROWS = np.array([[0.5, -1.0], [np.nan, 0.3], [1.5, np.nan], [np.nan, np.nan], [-0.4, 0.2]])
NUM_DRAWS, NUM_GROUPS = 4, 3


def draws(num_classes):
    """Draws of all parameters of groups, far apart, so that draws have different weights."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(NUM_DRAWS, NUM_GROUPS, 2, 2))
    return {
        "V": rng.uniform(0.2, 0.8, (NUM_DRAWS, NUM_GROUPS - 1)),
        "mu": rng.normal(size=(NUM_DRAWS, NUM_GROUPS, 2)),
        "Lambda": root @ root.mT + 0.4 * np.eye(2),
        "w": rng.normal(size=(NUM_DRAWS, num_classes - 1, NUM_GROUPS, 3)),
    }


def exact(x, y, drawn):
    """Probability of a label, mean and standard deviation of the first feature, by the sums over
    draws and groups.
    """
    seen, found = ~np.isnan(x), np.zeros((NUM_DRAWS, 4))
    for total, V, mu, precision, w in zip(
        found, drawn["V"], drawn["mu"], drawn["Lambda"], drawn["w"], strict=True
    ):
        weight = np.append(V, 1.0) * np.append(1.0, np.cumprod(1 - V))
        for h in range(NUM_GROUPS):
            c = np.linalg.inv(precision[h])
            density = (
                stats.multivariate_normal.pdf(x[seen], mu[h][seen], c[np.ix_(seen, seen)])
                if seen.any()
                else 1.0
            )
            slope = c[np.ix_(~seen, seen)] @ np.linalg.inv(c[np.ix_(seen, seen)])
            mean, spread = x.copy(), np.zeros((2, 2))
            mean[~seen] = mu[h][~seen] + slope @ (x[seen] - mu[h][seen])
            spread[np.ix_(~seen, ~seen)] = c[np.ix_(~seen, ~seen)] - slope @ c[np.ix_(seen, ~seen)]
            score, covariance = (
                w[:, h, :2] @ mean + w[:, h, 2],
                np.eye(len(w)) + w[:, h, :2] @ spread @ w[:, h, :2].T,
            )
            # the classes that are asked
            side = np.where(np.arange(1, len(w) + 1) == y, 1, -1)[: y if y else None]
            asked = np.ix_(range(len(side)), range(len(side)))
            label = stats.multivariate_normal.cdf(
                side * score[: len(side)], None, np.outer(side, side) * covariance[asked]
            )
            total += (
                weight[h] * density * np.array([1.0, label, mean[0], mean[0] ** 2 + spread[0, 0]])
            )
    _, label, first, square = (found / found[:, :1]).mean(0)
    return label, first, np.sqrt(max(square - first**2, 0))


def errors(name, rows):
    """The largest errors of the label probability, the mean and the standard deviation."""
    _, data = case(name)
    num_classes = data.get("num_classes", 2)
    drawn, labels = draws(num_classes), np.arange(len(rows)) % num_classes
    predictor = AssignmentDraws(iqgme, read_assignment(Program(iqgme, **data)))
    found = predictor.predict(drawn, Program(iqgme, **data | {"x": rows, "y": labels}))
    mine = np.stack([np.exp(found.log_label), found.mean[:, 0], found.deviation[:, 0]], 1)
    return abs(
        mine - np.array([exact(x, y, drawn) for x, y in zip(rows, labels, strict=True)])
    ).max(0)


@pytest.mark.slow
def test_labels_and_entries_are_sums_over_draws_and_groups():
    assert errors("binary", ROWS).max() < 1e-7


@pytest.mark.slow
def test_labels_of_three_classes(monkeypatch):
    """The scores have missing entries in common; as if they had not, the error is seen."""
    assert errors("three classes", ROWS[[0, 4]]).max() < 1e-7
    assert errors("three classes", np.repeat(ROWS[1:4], 3, 0)).max() < 5e-4
    right = mixture_predict.log_orthant
    alone = lambda score, spread, *at: right(score, spread * jnp.eye(2), *at)
    monkeypatch.setattr(mixture_predict, "log_orthant", alone)
    assert errors("three classes", np.repeat(ROWS[1:4], 3, 0)).max() > 5e-3


@pytest.mark.slow
def test_weights_that_are_left_out_are_seen(monkeypatch):
    right = mixture_predict.message_at
    monkeypatch.setattr(
        mixture_predict,
        "message_at",
        lambda *at: right(*at)._replace(const=jnp.zeros((1, NUM_GROUPS))),
    )
    assert errors("binary", ROWS).max() > 1e-2
