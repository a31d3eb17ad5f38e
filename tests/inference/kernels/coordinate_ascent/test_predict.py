"""Predictions of a fitted mixture against the same integrals by draws of its posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.special import log_ndtr
from jax.scipy.stats import multivariate_normal

from inference import Program
from inference.kernels.coordinate_ascent.predict import log_label
from inference.reading.conjugate.quadratic import Weights
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended
from tests.inference.mixtures import case, of_tasks
from zoo.iqgme import iqgme, sticks

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DRAWS = 4000
NEW = np.array([[0.5, -1.0], [np.nan, 0.3], [1.5, np.nan], [np.nan, np.nan]])


@pytest.mark.slow
def test_prediction_is_an_integral_over_the_posterior():
    """The predicted group, label and missing entries of each row are integrals over the posterior.

    Missing entries are drawn.
    """
    _, data = case("three classes", num_rows=60)
    kernel, state, _, _, read = ascended(data)
    labels = np.array([1, 2, 0, 1])
    found = kernel.predict(state, read[0], Program(iqgme, **data | {"x": NEW, "y": labels}))
    drawn = {
        name: value
        for name, value in kernel.draw(random.key(0), state, *read, DRAWS).items()
        if name in ("V", "mu", "Lambda", "w")
    }

    def one(key, values):
        return jnp.stack(
            [jnp.stack(_row(key, values, x, y)) for x, y in zip(NEW, labels, strict=True)]
        )

    def _row(key, values, x, y):
        """The weight of each group times the density of what is observed.

        Then come its products with the label's probability, with the first feature and with its
        square.
        """
        o, m = np.flatnonzero(~np.isnan(x)), np.flatnonzero(np.isnan(x))
        covariance = jnp.linalg.inv(values["Lambda"])
        weight = sticks(values["V"])
        if len(o):
            weight = weight * jax.vmap(
                lambda mu, c: multivariate_normal.pdf(x[o], mu[o], c[np.ix_(o, o)])
            )(values["mu"], covariance)
        precision = values["Lambda"][:, m][:, :, m]
        gap = jnp.asarray(x[o]) - values["mu"][:, o]
        mean = (
            values["mu"][:, m]
            - jnp.linalg.solve(precision, (values["Lambda"][:, m][:, :, o] @ gap[..., None]))[
                ..., 0
            ]
        )
        noise = (
            random.multivariate_normal(key, jnp.zeros((3, len(m))), jnp.linalg.inv(precision))
            if len(m)
            else jnp.zeros((3, 0))
        )
        whole = jnp.zeros((3, 2)).at[:, o].set(jnp.asarray(x[o])).at[:, m].set(mean + noise)
        score = jnp.einsum("cki,ki->ck", values["w"], jnp.concatenate([whole, jnp.ones((3, 1))], 1))
        yes = {
            0: log_ndtr(-score).sum(0),
            1: log_ndtr(score[0]),
            2: log_ndtr(-score[0]) + log_ndtr(score[1]),
        }[y]
        return weight, weight * jnp.exp(yes), weight * whole[:, 0], weight * whole[:, 0] ** 2

    each = jax.jit(lambda keys, drawn: jax.vmap(one)(keys, drawn))(
        random.split(random.key(1), DRAWS), drawn
    )
    weight, label, first, square = (np.asarray(each[:, :, i]) for i in range(4))
    mean = weight.mean(0)
    error = weight.std(0) / np.sqrt(DRAWS) / mean.sum(1, keepdims=True)
    assert (
        abs(np.exp(found.log_group) - mean / mean.sum(1, keepdims=True)) < 5 * error + 1e-3
    ).all()
    # the score is taken for normal
    np.testing.assert_allclose(
        np.exp(found.log_label), label.mean(0).sum(1) / mean.sum(1), atol=0.02
    )
    total = mean.sum(1)
    np.testing.assert_allclose(found.mean[:, 0], first.mean(0).sum(1) / total, atol=0.06)
    variance = square.mean(0).sum(1) / total - (first.mean(0).sum(1) / total) ** 2
    np.testing.assert_allclose(found.deviation[1, 0] ** 2, variance[1], rtol=0.3)
    np.testing.assert_array_equal(found.deviation[0], 0)
    np.testing.assert_array_equal(found.mean[0], NEW[0])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("num_classes", [3, 5])
def test_scores_have_missing_features_in_common(num_classes):
    """Class probabilities account for the missing features that scores have in common.

    The exact answer counts labels by draws of the features, the weights and the noise in three
    groups. Scores that are taken as independent miss it.
    """
    rng, answers, size = np.random.default_rng(num_classes), num_classes - 1, 200_000
    root = rng.normal(size=(3, 3, 3))
    root[:, 0] = 0  # the first feature is seen
    mean, covariance = rng.normal(size=(3, 3)), root @ root.mT
    weights = Weights(
        rng.normal(size=(answers, 3, 4)), np.broadcast_to(0.003 * np.eye(4), (answers, 3, 4, 4))
    )
    x = mean[:, None] + np.einsum("kij,knj->kni", root, rng.normal(size=(3, size, 3)))
    w = weights.mean[:, :, None] + np.sqrt(0.003) * rng.normal(size=(answers, 3, size, 4))
    t = np.einsum("ckni,kni->ckn", w, np.concatenate([x, np.ones((3, size, 1))], 2)) + rng.normal(
        size=(answers, 3, size)
    )
    label = np.where((t > 0).any(0), 1 + (t > 0).argmax(0), 0)
    exact = np.stack([(label == y).mean(1) for y in range(num_classes)])
    given = weights, np.concatenate([mean, np.ones((3, 1))], 1), covariance
    signs = np.array(
        [
            [0 if 0 < y < c else 1 if c == y else -1 for c in range(1, num_classes)]
            for y in range(num_classes)
        ],
        float,
    )
    of_label = jax.jit(
        lambda s, weights, *rest: [
            log_label(weights, s, (0, 1, 2, 3), *rest, is_joint) for is_joint in (True, False)
        ]
    )
    found, as_if_apart = np.moveaxis(np.exp([of_label(s, *given) for s in signs]), 1, 0)
    np.testing.assert_allclose(found.sum(0), 1, atol=1e-9)
    assert abs(found - exact).max() < 6e-3
    assert abs(as_if_apart - exact).max() > 3e-2


@pytest.mark.slow
def test_prediction_for_a_task_is_an_integral_over_its_shares_too():
    """Predictions for two tasks at the same rows are integrals over the shares of each.

    The experts' weights are those of the groups under them, and so each task has its own.
    """
    model, data = of_tasks("binary tasks", num_rows=20, num_groups=3)
    # of other rows each
    data = data | {
        "task": (np.nan_to_num(data["x"][:, 0]) > np.nanmedian(data["x"][:, 0])).astype(int)
    }
    kernel, state, _, _, read = ascended(data, model=model)
    rows, task, labels = NEW[[0, 0]], np.array([0, 1]), np.array([1, 0])
    found = kernel.predict(
        state, read[0], Program(model, **data | {"x": rows, "y": labels, "task": task})
    )
    drawn = {
        name: value
        for name, value in kernel.draw(random.key(0), state, *read, DRAWS).items()
        if name != "log_q"
    }

    def one(values):
        density = jax.vmap(
            lambda mu, L: multivariate_normal.pdf(jnp.asarray(rows[0]), mu, jnp.linalg.inv(L))
        )(values["mu"], values["Lambda"])
        share = jnp.einsum("jh,jhs->js", sticks(values["V"]), jax.nn.one_hot(values["c"], 3))
        score = values["w"][0] @ jnp.append(jnp.asarray(rows[0]), 1.0)
        yes = jnp.stack([log_ndtr(score), log_ndtr(-score)])
        return share, share * density[None], share * density[None] * jnp.exp(yes)

    share, weight, label = (np.asarray(each) for each in jax.jit(jax.vmap(one))(drawn))
    error = share.std(0) / np.sqrt(DRAWS)
    assert (abs(np.exp(kernel.log_weights(state)) - share.mean(0)) < 4 * error + 1e-4).all()
    total = weight.mean(0).sum(1)
    error = weight.std(0) / np.sqrt(DRAWS) / total[:, None]
    assert (abs(np.exp(found.log_group) - weight.mean(0) / total[:, None]) < 5 * error + 1e-3).all()
    np.testing.assert_allclose(np.exp(found.log_label), label.mean(0).sum(1) / total, atol=0.02)
    # or the tasks were not told apart
    assert abs(np.exp(found.log_group)[0] - np.exp(found.log_group)[1]).max() > 0.02


@pytest.mark.slow
def test_missing_entries_of_correlated_columns_are_covered():
    """Rows from the model's own kind: 1 and 2 standard deviations hold about 68 and 95 of 100,
    and less than a column's own say.
    """
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 400)
    x = (
        rng.normal(size=(400, 3)) @ np.array([[1, 0.9, 0.5], [0, 0.4, 0.5], [0, 0, 0.3]])
        + np.array([[-3.0, 0, 2], [3, 1, -2]])[group]
    )
    holes = rng.random(x.shape) < 0.25
    holes[holes.all(1)] = False
    data = {"x": np.where(holes, np.nan, x), "num_experts": 6, "expert": None, "alpha": 1.0}
    kernel, state, _, program, (reading, _) = ascended(data, 60)
    found = kernel.predict(state, reading, program)
    off = abs(found.mean - x)[holes] / found.deviation[holes]
    assert abs((off < 1).mean() - 0.683) < 0.08
    assert abs((off < 2).mean() - 0.954) < 0.04
    assert found.deviation[holes].mean() < 0.5 * x.std()
    np.testing.assert_array_equal(found.mean[~holes], x[~holes])
