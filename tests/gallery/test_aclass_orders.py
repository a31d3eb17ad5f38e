"""The orders of `fit`: one filter each, whose predictions are averaged and whose evidence has an
error.
"""

import warnings

import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning

from gallery import AClassClassifier

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


def signs(num_rows=120):
    x, y = load_digits(return_X_y=True)
    x, y = x[:num_rows] > 8, y[:num_rows] % 2
    return x[:, 18:30].astype(float), y


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return AClassClassifier(num_orders=3, random_state=0, num_samples=5).fit(*signs())


def check_average(classifier):
    """The probabilities are the means of those of the filters."""
    x, _ = signs()
    program = classifier._program(*classifier._read(x))
    each = [
        np.asarray(classifier._kernel.log_classes(state, classifier._reading, program), float)
        for state in classifier._kernel.alike(classifier._states)
    ]
    alone = [np.exp(joint - logsumexp(joint, axis=1, keepdims=True)) for joint in each]
    assert np.abs(alone[0] - alone[1]).max() > 1e-3
    np.testing.assert_allclose(classifier.predict_proba(x), np.mean(alone, 0), rtol=1e-6)


def test_predictions_are_averages_over_the_orders(fitted):
    check_average(fitted)
    assert fitted.posterior_["posterior"].sizes["chain"] == 3


def test_one_order_alone_is_seen(fitted, monkeypatch):
    first = fitted._states[:1]
    monkeypatch.setattr(type(fitted._kernel), "alike", lambda self, states: first)
    alone = fitted.predict_proba(signs()[0])
    monkeypatch.undo()
    assert np.abs(alone - fitted.predict_proba(signs()[0])).max() > 1e-3


def test_the_evidence_is_the_mean_over_the_orders(fitted):
    each = fitted._log_evidences()
    assert fitted.log_evidence_ == pytest.approx(logsumexp(each) - np.log(3), abs=1e-9)
    assert 0 < fitted.log_evidence_se_ < np.inf


def test_one_order_is_that_of_the_table():
    x, y = signs()
    at_once = AClassClassifier(num_orders=1, random_state=0).partial_fit(x, y)
    fitted = AClassClassifier(num_orders=1, random_state=0).fit(x, y)
    assert fitted.log_evidence_ == at_once.log_evidence_
    assert np.isinf(fitted.log_evidence_se_)


def test_a_fit_that_ended_early_cannot_go_on_and_says_so():
    x, y = signs()
    with pytest.warns(ConvergenceWarning, match="of 120 rows; call fit again with more time"):
        classifier = AClassClassifier(max_time=0.0, num_orders=3, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="each of its 3 filters has read others; call fit again"):
        classifier.set_params(max_time=None).partial_fit(x[1:], y[1:])


@pytest.mark.slow
def test_two_errors_hold_the_mean_of_the_evidence():
    """Over fits to three data sets, as often as two errors of a Normal do."""
    held = []
    for data in (load_wine, load_iris, None):
        x, y = data(return_X_y=True) if data else signs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            fits = [AClassClassifier(random_state=seed).fit(x, y) for seed in range(50)]
        found = np.array([(fit.log_evidence_, fit.log_evidence_se_) for fit in fits])
        held += list(abs(found[:, 0] - found[:, 0].mean()) < 2 * found[:, 1])
    assert 0.9 <= np.mean(held) <= 0.98
