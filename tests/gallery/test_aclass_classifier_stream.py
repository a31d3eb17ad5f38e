"""Learning row by row, by the driver: the same numbers as at once; what fails changes nothing;
what is stopped can go on.
"""

import pickle
import signal
import warnings
from contextlib import ExitStack

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import gallery.aclass
from gallery import AClassClassifier
from inference import Driver, Interrupted, ParticleFilter
from zoo.aclass import aclass, beta_bernoulli, mixed, normal_inverse_chi2

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

PAIR = mixed(bits=([0, 1], beta_bernoulli), level=([2], normal_inverse_chi2))


FIRST = 9  # rows of the first of two calls; padded they have the shape of all 16


def table(num_rows=16):
    rng = np.random.default_rng(3)
    y = rng.integers(0, 2, num_rows)
    x = np.column_stack(
        [rng.random((num_rows, 2)) < 0.2 + 0.6 * y[:, None], rng.normal(size=num_rows) + 3 * y]
    )
    x[rng.random(x.shape) < 0.2] = np.nan
    y[FIRST] = -1
    return x, y


X, Y = table()


def said(classifier):
    """Everything that a classifier knows."""
    tree = classifier.posterior_
    drawn = {
        name: values.to_numpy()
        for group in ("posterior", "unfinished", "sample_stats", "particles")
        if group in tree.children
        for name, values in tree[group].items()
    }
    return drawn | {
        "proba": classifier.predict_proba(X),
        "evidence": classifier.log_evidence_,
        "rows": classifier.n_rows_seen_,
    }


def check_same(first, second):
    first, second = said(first), said(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def new(**settings):
    return AClassClassifier(component=PAIR, num_samples=20, random_state=1, **settings)


def relaxed():
    """What the fixture `numpyro_promotion` does, for fixtures of the module."""
    stack = ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    stack.enter_context(jax.numpy_rank_promotion("allow"))
    return stack


@pytest.fixture(scope="module")
def at_once():
    with relaxed():
        return new().partial_fit(X, Y)


@pytest.mark.slow
def test_row_by_row_equals_all_at_once_bit_for_bit(at_once):
    by_row = new()
    for i in range(len(X)):
        by_row.partial_fit(X[i : i + 1], Y[i : i + 1], classes=[0, 1])
    check_same(by_row, at_once)
    two_parts = (
        new().partial_fit(X[:FIRST], Y[:FIRST]).partial_fit(X[FIRST:], Y[FIRST:], classes=[1, 0])
    )
    check_same(two_parts, at_once)
    with pytest.raises(AssertionError):
        check_same(new().set_params(random_state=2).partial_fit(X, Y), at_once)


@pytest.mark.slow
def test_with_auto_the_first_call_decides_the_units():
    auto = AClassClassifier(num_samples=20, random_state=1)
    by_row = clone(auto).partial_fit(X[:FIRST], Y[:FIRST])
    for i in range(FIRST, len(X)):
        by_row.partial_fit(X[i : i + 1], Y[i : i + 1])
    check_same(
        by_row, clone(auto).partial_fit(X[:FIRST], Y[:FIRST]).partial_fit(X[FIRST:], Y[FIRST:])
    )


@pytest.mark.slow
def test_fit_begins_anew():
    again = new().partial_fit(X[:FIRST], Y[:FIRST])
    assert again.fit(X, Y) is again
    check_same(again, new().fit(X, Y))


@pytest.mark.slow
def test_the_work_is_done_by_the_driver_on_the_model_of_the_zoo(monkeypatch):
    calls = []

    class Seen(Driver):
        def run(self, *args, **kwargs):
            calls.append(("run", self, args, kwargs))
            return super().run(*args, **kwargs)

        def update(self, *args, **kwargs):
            calls.append(("update", self, args, kwargs))
            return super().update(*args, **kwargs)

    monkeypatch.setattr(gallery.aclass, "Driver", Seen)
    new(max_time=60.0, num_particles=7, resampling="systematic").fit(
        X[:FIRST], Y[:FIRST]
    ).partial_fit(X[FIRST:], Y[FIRST:])
    (first, driver, (_, x, labels), settings), (second, same, (x_more, more), _) = calls
    assert (first, second) == ("run", "update")
    assert driver is same
    assert driver.max_time == 60.0
    assert isinstance(driver.kernel, ParticleFilter)
    assert (driver.kernel.model, driver.kernel.num_particles, driver.kernel.resampling) == (
        aclass,
        7,
        "systematic",
    )
    np.testing.assert_array_equal(x, X[:FIRST].astype(np.float32))
    np.testing.assert_array_equal(labels, Y[:FIRST])
    np.testing.assert_array_equal(more, Y[FIRST:])
    assert x_more.shape == (7, 3)
    assert settings == {
        "num_classes": 2,
        "alpha": 1.0,
        "gamma": 1.0,
        "max_groups": None,
        "component": PAIR,
        "all_labelled": False,
    }


BAD = {
    "an unseen class": (
        X[FIRST:],
        np.where(np.arange(7) == 5, 2, Y[FIRST:]),
        r"y: row 5 has the class 2; the classes of the first call are \[0, 1\]",
    ),
    "another number of columns": (
        X[FIRST:, :2],
        Y[FIRST:],
        "X has 2 features, but AClassClassifier is expecting 3 features",
    ),
    "an infinite number": (
        np.where(np.arange(21).reshape(7, 3) == 14, np.inf, X[FIRST:]),
        Y[FIRST:],
        "column 2: found inf in row 4",
    ),
    "a number that is too large": (
        np.where(np.arange(21).reshape(7, 3) == 14, 1e22, X[FIRST:]),
        Y[FIRST:],
        "site 'level_x': row 4, column 0 is .*that can be squared",
    ),
    "no labels": (X[FIRST:], None, "y: found None, wanted the class of each row"),
    "a value outside the support": (
        np.where(np.arange(21).reshape(7, 3) == 3, 2.0, X[FIRST:]),
        Y[FIRST:],
        "site 'bits_x': .*row 1.*takes 0, 1",
    ),
    "too few labels": (X[FIRST:], Y[FIRST:-1], "inconsistent numbers of samples"),
    "a label that is missing": (
        X[FIRST:],
        np.where(np.arange(7) == 5, np.nan, Y[FIRST:]),
        "Input y contains NaN",
    ),
    "no rows": (X[:0], Y[:0], r"Found array with 0 sample\(s\)"),
}


@pytest.fixture(scope="module")
def half():
    with relaxed():
        return new().partial_fit(X[:FIRST], Y[:FIRST])


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_failed_partial_fit_changes_nothing(half, name):
    x, y, match = BAD[name]
    before = said(half)
    with pytest.raises(ValueError, match=match):
        half.partial_fit(x, y)
    for key, value in said(half).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


@pytest.mark.slow
def test_after_failures_it_goes_on_as_if_they_had_not_been(at_once):
    classifier = new().partial_fit(X[:FIRST], Y[:FIRST])
    for x, y, match in BAD.values():
        with pytest.raises(ValueError, match=match):
            classifier.partial_fit(x, y)
    check_same(classifier.partial_fit(X[FIRST:], Y[FIRST:]), at_once)


def test_a_failed_fit_changes_nothing(half):
    before = said(half)
    with pytest.raises(ValueError, match="site 'bits_x'"):
        half.fit(X + 1, Y)
    for key, value in said(half).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
    with pytest.raises(ValueError, match="y: every row is unlabelled"):
        new().partial_fit(X, np.full(len(X), -1))


@pytest.mark.slow
def test_a_class_that_comes_later_was_named_at_the_first_call():
    classifier = new().partial_fit(X[:FIRST], Y[:FIRST], classes=[2, 0, 1])
    assert list(classifier.classes_) == [0, 1, 2]
    before = classifier.predict_proba([[1.0, 1.0, 9.0]])[0, 2]
    classifier.partial_fit([[1.0, 1.0, 9.0]] * 3, [2, 2, 2])
    assert classifier.predict_proba([[1.0, 1.0, 9.0]])[0, 2] > max(0.9, before)
    with pytest.raises(
        ValueError, match=r"classes: found \[0 1\], but the first call began with \[0 1 2\]"
    ):
        classifier.partial_fit(X[:1], Y[:1], classes=[0, 1])


@pytest.mark.slow
def test_max_time_keeps_the_rows_that_were_seen_and_says_how_to_go_on(at_once):
    classifier = new(max_time=0.0)
    with pytest.warns(
        ConvergenceWarning, match=r"after 1 of 16 rows; partial_fit\(X\[1:\], y\[1:\]\) continues"
    ):
        classifier.partial_fit(X, Y)
    assert classifier.n_rows_seen_ == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        while (seen := classifier.n_rows_seen_) < len(X):
            classifier.partial_fit(X[seen:], Y[seen:])
    check_same(classifier, at_once)


def ended_early():
    """One row of 16 was taken."""
    with pytest.warns(ConvergenceWarning, match="after 1 of 16 rows"):
        return new(max_time=0.0).partial_fit(X, Y).set_params(max_time=None)


OTHERS = {
    "other rows": (
        X[2:],
        Y[2:],
        "has left 15 rows, which must come first, and row 0 is another one",
    ),
    "another entry": (
        np.where(np.arange(45).reshape(15, 3) == 19, 0.5, X[1:]),
        Y[1:],
        "and row 6 is another one",
    ),
    "another label": (
        X[1:],
        np.where(np.arange(15) == 4, 1 - Y[1:], Y[1:]),
        "row 4 is another one or has another label",
    ),
    "a bad row behind them": (
        np.vstack([X[1:], [[2.0, 0.0, 0.0]]]),
        [*Y[1:], 0],
        "site 'bits_x': row 15, column 0 is 2.0",
    ),
}


def test_no_row_is_lost_where_a_call_was_ended(at_once):
    """Other rows are refused until those of the call have been taken, in however many calls."""
    classifier = ended_early()
    before = said(classifier)
    for x, y, match in OTHERS.values():
        with pytest.raises(ValueError, match=match):
            classifier.partial_fit(x, y)
        for key, value in said(classifier).items():
            np.testing.assert_array_equal(value, before[key], err_msg=key)
    assert classifier.partial_fit(X[1:5], Y[1:5]).n_rows_seen_ == 5
    check_same(classifier.partial_fit(X[5:], Y[5:]), at_once)


@pytest.mark.slow
def test_rows_may_follow_those_that_a_call_has_left(at_once):
    with pytest.warns(ConvergenceWarning, match=f"after 1 of {FIRST} rows"):
        classifier = new(max_time=0.0).partial_fit(X[:FIRST], Y[:FIRST])
    check_same(classifier.set_params(max_time=None).partial_fit(X[1:], Y[1:]), at_once)


def test_a_second_ctrl_c_raises_and_loses_no_row(monkeypatch, at_once):
    classifier, update = new().partial_fit(X[:FIRST], Y[:FIRST]), Driver.update

    def ended(driver, *args, **kwargs):
        driver.max_time = 0.0
        update(driver, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "update", ended)
        with (
            pytest.raises(KeyboardInterrupt),
            pytest.warns(ConvergenceWarning, match="after 1 of 7 rows"),
        ):
            classifier.partial_fit(X[FIRST:], Y[FIRST:])
    check_same(classifier.partial_fit(X[FIRST + 1 :], Y[FIRST + 1 :]), at_once)


@pytest.mark.slow
def test_max_time_may_be_changed_between_calls():
    with pytest.warns(ConvergenceWarning, match="after 1 of 16 rows"):
        classifier = new(max_time=0.0).partial_fit(X, Y)
    assert classifier.set_params(max_time=None).partial_fit(X[1:], Y[1:]).n_rows_seen_ == len(X)


def test_a_row_far_from_all_others_has_no_prediction(half):
    with pytest.raises(ValueError, match="that can be squared"):
        half.predict_proba([[0.0, 1.0, 1e22]])


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-170, 1e200])
def test_units_are_free(unit):
    x, y = table(60)
    assert (
        AClassClassifier(random_state=0)
        .fit(unit * x[:, 2:], y)
        .score(unit * x[y >= 0, 2:], y[y >= 0])
        > 0.75
    )


def test_ctrl_c_keeps_the_rows_that_were_seen(monkeypatch, at_once):
    classifier = new().partial_fit(X[:FIRST], Y[:FIRST])
    with monkeypatch.context() as patch:
        patch.setattr(
            "inference.run.session.Bar.update", lambda *args: signal.raise_signal(signal.SIGINT)
        )
        with (
            pytest.raises(Interrupted),
            pytest.warns(ConvergenceWarning, match="ended by Ctrl-C or max_time"),
        ):
            classifier.partial_fit(X[FIRST:], Y[FIRST:])
    seen = classifier.n_rows_seen_
    assert FIRST < seen < 16
    check_same(classifier.partial_fit(X[seen:], Y[seen:]), at_once)
    assert classifier.posterior_["observed_data"].sizes["row"] == 16


@pytest.mark.slow
def test_pickled_it_goes_on_bit_for_bit():
    classifier = AClassClassifier(num_samples=20, random_state=1).fit(X[:FIRST], Y[:FIRST])
    copy = pickle.loads(pickle.dumps(classifier))
    check_same(copy, classifier)
    check_same(copy.partial_fit(X[FIRST:], Y[FIRST:]), classifier.partial_fit(X[FIRST:], Y[FIRST:]))


def test_a_clone_has_the_settings_and_no_memory(half):
    copy = clone(half)
    assert copy.get_params() == half.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(X)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"alpha": 0.0}, "alpha: found 0.0, wanted a positive number"),
        ({"gamma": "large"}, "gamma: found 'large', wanted a positive number"),
        ({"component": "normal"}, "component: found 'normal', wanted 'auto' or a component"),
        ({"num_particles": 0}, "num_particles: found 0"),
        ({"resampling": "none"}, "resampling: found 'none'"),
        ({"max_time": -1.0}, "max_time: found -1.0, wanted seconds, at least 0"),
    ],
)
def test_settings_are_refused_by_name(settings, match):
    with pytest.raises(ValueError, match=match):
        AClassClassifier(**settings).fit(X, Y)


@pytest.mark.slow
def test_flowers_with_holes_and_missing_labels():
    x, y = load_iris(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    x, y = np.where(rng.random(x.shape) < 0.1, np.nan, x)[order], y[order]
    some = np.where(np.arange(100) % 5, -1, y[:100])  # a fifth has a label
    assert AClassClassifier(random_state=0).fit(x[:100], y[:100]).score(x[100:], y[100:]) > 0.85
    assert AClassClassifier(random_state=0).fit(x[:100], some).score(x[100:], y[100:]) > 0.8
