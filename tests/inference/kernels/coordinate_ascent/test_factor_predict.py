"""Predictions among common factors against the same integrals by draws of the posterior."""

import jax
import numpy as np
import pytest
from jax import random
from scipy.special import ndtr
from scipy.stats import multivariate_normal

from inference import Program
from tests.inference.factor_mixtures import factor_case
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended

pytestmark = [pytest.mark.usefixtures("x64", "numpyro_promotion"), pytest.mark.slow]

NAN = np.nan
NEW = np.array(
    [[0.5, -1.0, 0.3, 0.2, -0.4], [NAN, 0.3, NAN, 1.0, 0.6], [1.5, NAN, NAN, NAN, NAN], [NAN] * 5]
)


def integrals(draws, x, which):
    """Weights of the groups times the density of what is seen, that times P(y = 1), and that
    times the feature `which`, of each draw.
    """
    o, parts = np.flatnonzero(~np.isnan(x)), []
    for d in range(len(draws["c"])):
        V, c = draws["V"][d], draws["c"][d]
        weight = np.append(V, 1.0) * np.append(1.0, np.cumprod(1 - V))
        own = []
        for h in range(len(weight)):
            covariance, loading = (
                np.linalg.inv(draws["Lambda"][d, h]),
                draws["b"][d, h][:, None] * draws["A"][d],
            )
            mean, w = c + draws["mu"][d, h] @ loading, draws["w"][d, 0, h]
            spread = loading.T @ covariance @ loading + np.diag(1 / draws["psi"][d])
            with_score = loading.T @ covariance @ w[:-1]
            solved = np.linalg.solve(
                spread[np.ix_(o, o)], np.column_stack([x[o] - mean[o], with_score[o]])
            )
            score = w[:-1] @ draws["mu"][d, h] + w[-1] + with_score[o] @ solved[:, 0]
            sure = 1 + w[:-1] @ covariance @ w[:-1] - with_score[o] @ solved[:, 1]
            density = weight[h] * (
                multivariate_normal.pdf(x[o], mean[o], spread[np.ix_(o, o)]) if len(o) else 1.0
            )
            yes = ndtr(score / np.sqrt(sure))
            own.append(
                (density, density * yes, density * (mean[which] + spread[which][o] @ solved[:, 0]))
            )
        parts.append(np.sum(own, 0))
    return np.array(parts)


def test_prediction_is_an_integral_over_the_posterior():
    """The predicted label and missing entry of each row are integrals over the posterior."""
    model, data = factor_case("binary")
    kernel, state, _, _, read = ascended(data, 300, model)
    found = kernel.predict(
        state, read[0], Program(model, **data | {"x": NEW, "y": np.ones(4, int)})
    )
    draws = jax.device_get(kernel.draw(random.key(0), state, *read, 1500))
    for i, x in enumerate(NEW):
        which = int(np.argmax(np.isnan(x)))
        density, yes, feature = integrals(draws, x, which).mean(0)
        np.testing.assert_allclose(np.exp(found.log_label[i]), yes / density, atol=0.05)
        if np.isnan(x).any():
            np.testing.assert_allclose(found.mean[i, which], feature / density, atol=0.15)
            assert found.deviation[i, which] > 0
    np.testing.assert_array_equal(found.mean[0], NEW[0])
    np.testing.assert_array_equal(found.deviation[0], 0)
