"""The classifier: it runs the zoo's model in the driver, and says what can be said of rows,
classes and missing entries.
"""

import os
import pickle

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import estimator_checks_generator

from gallery import IQGMEClassifier
from inference import Driver
from tests.gallery.estimator_checks import NOTHING_FITTED
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

RNG = np.random.default_rng(0)
GROUP = np.arange(90) % 3
X = RNG.normal(size=(90, 2)) + np.array([[-3.0, 0], [1, 0], [5, 0]])[GROUP]
# a line in each group
Y = np.array(["no", "yes"])[(X[:, 1] * np.array([1, -1, 1])[GROUP] > 0).astype(int)]
HOLED = np.where(RNG.random(X.shape) < 0.15, np.nan, X)


class Called(Exception):
    """The driver's `run` was called."""


def test_a_fit_is_the_drivers_run_of_the_zoos_model(monkeypatch):
    seen = {}

    def run(self, rng_key, *args, **kwargs):
        seen.update(driver=self, args=args, kwargs=kwargs)
        raise Called

    monkeypatch.setattr(Driver, "run", run)
    with pytest.raises(Called):
        IQGMEClassifier(7, max_iter=9, max_time=3.0).fit(
            np.column_stack([HOLED * 10 + 3, np.full(90, 4.0)]), Y
        )
    x, labels = seen["args"]
    assert seen["driver"].kernel.model is iqgme
    assert (seen["driver"].num_warmup, seen["driver"].max_time, seen["kwargs"]["num_experts"]) == (
        9,
        3.0,
        7,
    )
    np.testing.assert_allclose(np.nanmean(x, 0), 0, atol=1e-12)
    np.testing.assert_allclose(np.nanstd(x, 0), 1)
    np.testing.assert_array_equal(labels, Y == "yes")


@pytest.mark.slow
def test_a_truncation_that_is_used_up_is_told():
    """Ten clusters far apart."""
    x = RNG.normal(size=(90, 2)) + 40 * np.stack([np.arange(90) % 10, np.arange(90) % 10 % 3], 1)
    with pytest.warns(ConvergenceWarning, match="all 3 experts have rows.*raise truncation"):
        IQGMEClassifier(3, random_state=0).fit(x, Y)


@pytest.mark.slow
# weights grow as long as lines part the labels
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_it_learns_a_line_for_each_group():
    model = IQGMEClassifier(6, max_iter=300, random_state=0).fit(HOLED, Y)
    assert model.score(X, Y) > 0.85
    proba = model.predict_proba(HOLED)
    np.testing.assert_allclose(proba.sum(1), 1)
    mean, deviation = model.impute(HOLED, return_std=True)
    is_seen = ~np.isnan(HOLED)
    np.testing.assert_allclose(mean[is_seen], HOLED[is_seen])
    assert (deviation[~is_seen] > 0).all()
    assert (deviation[is_seen] == 0).all()
    assert model.posterior_["posterior"].sizes["draw"] == 200
    share = model.predict_proba(np.full((1, 2), np.nan))
    assert abs(share[0, 1] - (Y == "yes").mean()) < 0.1


@pytest.mark.slow
def test_it_learns_by_batches():
    """It makes `max_iter` sweeps, and does not warn that there were too few."""
    model = IQGMEClassifier(6, batch_size=45, max_iter=150, random_state=0).fit(HOLED, Y)
    assert model.n_iter_ == 150
    assert model.score(X, Y) > 0.8


@pytest.mark.slow
def test_it_learns_by_draws():
    """Predictions and what is filled in are much as by variational Bayes; two chains, pickled
    and back.
    """
    settings = {"inference": "gibbs", "max_iter": 150, "num_samples": 100, "restarts": 2}
    with pytest.warns(ConvergenceWarning):
        model = IQGMEClassifier(6, max_iter=3, random_state=0).fit(HOLED, Y)
    model.set_params(**settings).fit(HOLED, Y)
    assert model.n_iter_ == 250
    assert not hasattr(model, "elbo_")  # that of the fit before
    assert model.score(X, Y) > 0.85
    assert model.posterior_["posterior"].sizes["chain"] == 2
    assert {"lp", "num_groups"} <= set(model.posterior_["sample_stats"].data_vars)
    mean, deviation = model.impute(HOLED, return_std=True)
    is_seen = ~np.isnan(HOLED)
    np.testing.assert_allclose(mean[is_seen], HOLED[is_seen])
    assert 0.5 < (abs(mean - X) < deviation)[~is_seen].mean() < 0.9
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(HOLED[:5]), model.predict_proba(HOLED[:5]))


@pytest.mark.parametrize("name", ["n_factors", "batch_size"])
def test_what_draws_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: found 5 beside inference='gibbs', wanted None"):
        IQGMEClassifier(inference="gibbs", **{name: 5}).fit(X, Y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_it_finds_the_factors_behind_many_columns():
    """Forty columns of two factors, a third of the cells missing; the classes are told apart by
    the sign of one of the factors.
    """
    rng = np.random.default_rng(1)
    factors, loadings = rng.normal(size=(80, 2)), rng.normal(size=(2, 40))
    whole = factors @ loadings + 0.5 * rng.normal(size=(80, 40))
    x, y = np.where(rng.random(whole.shape) < 0.33, np.nan, whole), factors[:, 0] > 0
    model = IQGMEClassifier(3, n_factors=4, max_iter=100, random_state=0).fit(x[:50], y[:50])
    assert model.score(x[50:], y[50:]) > 0.8
    mean, deviation = model.impute(x, return_std=True)
    missing = np.isnan(x)
    away = (mean - whole)[missing] / deviation[missing]
    assert 0.58 < np.mean(abs(away) < 1) < 0.78
    # what is known of a cell but for the noise: next to it, .5
    assert np.std((mean - whole)[missing]) < 0.6
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(x[:5]), model.predict_proba(x[:5]))


QUICK = NOTHING_FITTED
# of those that compile; the others take minutes: ZOO_ALL_CHECKS=1 runs them too
SLOW = {"check_estimators_pickle", "check_n_features_in"}


def cases():
    drawing = IQGMEClassifier(4, inference="gibbs", max_iter=20, num_samples=20)
    among_factors = IQGMEClassifier(3, n_factors=2, max_iter=20)
    for prefix, one in (
        ("", IQGMEClassifier(4, max_iter=20)),
        ("gibbs-", drawing),
        ("factors-", among_factors),
    ):
        for estimator, check in estimator_checks_generator(one):
            name, settings = (
                check.func.__name__,
                "".join(f"-{value}" for value in check.keywords.values()),
            )
            if (
                name in QUICK | (SLOW if one is not drawing else set())
                or "ZOO_ALL_CHECKS" in os.environ
            ):
                marks = [] if name in QUICK else [pytest.mark.slow]
                yield pytest.param(estimator, check, id=prefix + name + settings, marks=marks)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_every_quick_check_is_there():
    assert {case.values[1].func.__name__ for case in cases()} >= QUICK | SLOW


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_tables_that_say_little():
    """A row and a column without entries, a constant column; then one class."""
    x = np.column_stack([HOLED, np.full(90, np.nan), np.full(90, 4.0)])
    x[0] = np.nan
    model = IQGMEClassifier(4, max_iter=30, random_state=0).fit(x, Y)
    found = model.predict_proba(x)
    assert np.isfinite(found).all()
    assert abs(found[0, 1] - (Y == "yes").mean()) < 0.15
    filled = model.impute(x)
    assert np.isnan(filled[:, 2]).all()
    assert np.isfinite(filled[:, :2]).all()
    assert (filled[:, 3] == 4).all()
    sure = IQGMEClassifier(4, max_iter=30, random_state=0).fit(HOLED, np.repeat("yes", 90))
    assert (sure.predict(HOLED) == "yes").all()
    np.testing.assert_array_equal(sure.predict_proba(HOLED), np.ones((90, 1)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("units", [1e-200, 1e-12, 1e200])
def test_units_do_not_matter(units):
    """Nor are columns in small ones taken for constant, and rows that are far away have classes."""
    scale = np.array([units, 1.0])
    fit = lambda x: IQGMEClassifier(4, max_iter=30, random_state=0).fit(x, Y)
    one, other = fit(HOLED), fit(HOLED * scale)
    np.testing.assert_allclose(
        other.predict_proba(HOLED * scale), one.predict_proba(HOLED), atol=1e-6
    )
    for found, wanted in zip(
        other.impute(HOLED * scale, return_std=True),
        one.impute(HOLED, return_std=True),
        strict=True,
    ):
        np.testing.assert_allclose(found / scale, wanted, atol=1e-6)
    far = one.predict_proba(np.array([[1e155, 1e155], [-1e300, 1e300], [1.7e308, np.nan]]))
    np.testing.assert_allclose(far.sum(1), 1)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_constant_that_rounding_changes_stays_one():
    x = np.column_stack([HOLED, np.where(np.arange(90) % 2, 0.1 + 0.2, 0.3)])
    found = (
        IQGMEClassifier(4, max_iter=30, random_state=0)
        .fit(x, Y)
        .impute(x[:2] * [[1, 1, np.nan]], return_std=True)
    )
    np.testing.assert_allclose([found[0][:, 2], found[1][:, 2]], [[0.3] * 2, [0] * 2])


def test_infinite_entries_are_refused():
    with pytest.raises(ValueError, match="infinity"):
        IQGMEClassifier().fit(np.where(np.isnan(HOLED), np.inf, HOLED), Y)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="inference: found 'mcmc', wanted 'vb' or 'gibbs'"):
        IQGMEClassifier(inference="mcmc").fit(X, Y)
    with pytest.raises(
        ValueError, match="n_factors: found 1, wanted an integer, 2 or more, or None"
    ):
        IQGMEClassifier(n_factors=1).fit(X, Y)


WRONG = {
    "num_samples": (-1, "an integer, at least 1"),
    "truncation": (2.5, "an integer, at least 2"),
    "max_iter": (0, "an integer, at least 1"),
    "restarts": (0, "an integer, at least 1"),
    "batch_size": (1.5, "an integer, at least 1"),
    "shrinkage": (2.0, "a number from 0 to 1"),
    "tolerance": (-1.0, "a number, at least 0"),
    "max_time": (-1.0, "seconds, at least 0, or None"),
    "gate_rows": (0, "a number above 0, or None"),
    "precision": (0, "a number above 0, or a distribution"),
    "alpha": (-1, "a number above 0, or a distribution"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_and_texts_for_numbers_are_refused_by_name(name):
    value, wanted = WRONG[name]
    for found in (value, "a few", np.nan):
        with pytest.raises(ValueError, match=f"{name}: found {found!r}, wanted {wanted}"):
            IQGMEClassifier(**{name: found}).fit(X, Y)
