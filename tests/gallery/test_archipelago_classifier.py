"""The classifier: what it hands to the driver, what it says of rows and classes, and what it
refuses.
"""

import os
import pickle
from copy import copy

import jax
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from gallery import ArchipelagoClassifier
from gallery.generators import pinwheel
from inference import Driver, Program
from tests.by_numpy import by_numpy
from tests.gallery.estimator_checks import NOTHING_FITTED
from zoo.archipelago import archipelago, matern32, mixture

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

ARMS = pinwheel(3, 10, tangential_std=0.2, seed=0)
NAMES = np.array(["left", "right", "up"], object)
Y = np.where(np.arange(30) % 10 < 2, NAMES[ARMS.y], -1)  # two labels a class
# thin classes and high functions have many rejected points, which take their time
TAME = dist.LogNormal(0.5, 0.2)
SHORT = {
    "num_warmup": 30,
    "num_samples": 30,
    "num_chains": 1,
    "amplitude": TAME,
    "capacity": 128,
    "random_state": 0,
}


class Called(Exception):
    """The driver's `run` was called."""


@pytest.fixture
def call(monkeypatch):
    """What the driver is asked to run, and how; it runs nothing."""
    seen = {}

    def run(self, rng_key, *args, **kwargs):
        seen.update(driver=self, key=rng_key, args=args, kwargs=kwargs)
        raise Called

    monkeypatch.setattr(Driver, "run", run)
    return seen


def test_a_fit_is_the_drivers_run_of_the_zoos_model(call):
    X = np.column_stack([ARMS.x * [10, 0.1] + [5, -3], np.full(30, 7.0)])
    with pytest.raises(Called):
        ArchipelagoClassifier(
            is_ard=True, persistence=0.8, max_time=9.0, **SHORT | {"num_chains": 2}
        ).fit(X, Y)
    driver, (x, labels), options = call["driver"], call["args"], call["kwargs"]
    assert [type(kernel).__name__ for kernel, _ in driver.kernel.blocks] == [
        "LatentHistory",
        "NUTS",
    ]
    assert driver.kernel.model is archipelago
    assert (driver.num_warmup, driver.num_samples, driver.num_chains, driver.max_time) == (
        30,
        30,
        2,
        9.0,
    )
    # the column that is constant is left out
    assert_allclose(x, (ARMS.x - ARMS.x.mean(0)) / ARMS.x.std(0), atol=1e-9)
    assert_array_equal(np.asarray(labels)[:4], [0, 0, -1, -1])
    assert (options["num_classes"], options["is_ard"], options["capacity"]) == (3, True, 128)
    assert options["persistence"] == 0.8
    first = options.pop("init_params")
    assert_array_equal(first["num_rejected"], [30, 30])
    assert first["noise"].shape == (2, 30, 3)
    assert np.abs(first["rejected"][0] - first["rejected"][1]).max() > 0.1  # chains start apart
    with jax.enable_x64(True):
        values = {name: value[0] for name, value in first.items()}
        program = Program(archipelago, x, labels, **options)
        of = by_numpy(
            lambda values: program.deterministics(
                {**program.draw_initial(jax.random.key(0)), **values}
            )["function"]
        )
        function = of(values)
    known = np.asarray(labels) >= 0
    # islands around the labels
    assert_array_equal(np.asarray(function)[known].argmax(1), np.asarray(labels)[known])
    with jax.enable_x64(True):
        assert set(Program(archipelago, x, labels, **options).latent) > {"noise", "num_rejected"}


@pytest.mark.parametrize(
    ("X", "y", "named"),
    [
        (ARMS.x, np.full(30, -1), "every row is unlabelled"),
        (np.ones((30, 2)), Y, "X: found 30 row.s. of constant columns"),
        (ARMS.x[:5], Y, "inconsistent numbers of samples"),
        (np.where(ARMS.x > 1, np.nan, ARMS.x), Y, "NaN"),
        (np.where(ARMS.x > 1, np.inf, ARMS.x), Y, "infinity"),
    ],
    ids=["no label", "constant", "lengths", "nan", "inf"],
)
def test_wrong_data_are_refused_before_anything_runs(X, y, named, call):
    with pytest.raises(ValueError, match=named):
        ArchipelagoClassifier().fit(X, y)
    assert not call


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"capacity": 0}, "capacity: found 0, wanted a whole number from 1 to max_capacity, 4096"),
        (
            {"capacity": 32, "max_capacity": 8},
            "capacity: found 32, wanted a whole number from 1 to max_capacity, 8",
        ),
        ({"max_capacity": "a"}, "max_capacity: found 'a'"),
        ({"max_time": "a"}, "max_time: found 'a', wanted seconds, at least 0"),
        ({"persistence": 2.0}, "persistence: found 2.0"),
        ({"amplitude": 2.0}, "amplitude: found 2.0, wanted a distribution"),
        ({"covariance": "rbf"}, "covariance: found 'rbf'"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        ArchipelagoClassifier(**settings).fit(ARMS.x, Y)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-200, 1e-13, 1e200])
def test_no_unit_is_too_small_or_too_large(unit, call):
    for X in (ARMS.x, ARMS.x * [1, unit], ARMS.x * [unit, 1] + [3 * unit, 0]):
        with pytest.raises(Called):
            ArchipelagoClassifier().fit(X, Y)
        assert_allclose(call["args"][0], (ARMS.x - ARMS.x.mean(0)) / ARMS.x.std(0), atol=1e-9)


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return ArchipelagoClassifier(**SHORT).fit(ARMS.x, Y)


@pytest.mark.slow
def test_classes_follow_the_arms(fitted):
    new = pinwheel(3, 100, tangential_std=0.2, seed=1)
    p = fitted.predict_proba(new.x)
    assert_allclose(p.sum(1), 1)
    assert np.mean(fitted.predict(new.x) == NAMES[new.y]) > 0.85
    assert_array_equal(fitted.classes_, NAMES)
    assert fitted.n_iter_ == 60
    assert fitted.posterior_.posterior.sizes["draw"] == 30
    far = [[0.0, 0.0], [1e200, 0.0]]  # the log density of a normal is -inf there
    with pytest.raises(
        ValueError, match=r"row 1 lies where the base density is 0; knows_density=False"
    ):
        fitted.predict_proba(far)
    assert_allclose(copy(fitted).set_params(knows_density=False).predict_proba(far).sum(1), 1)


@pytest.mark.slow
def test_a_pickle_answers_the_same(fitted):
    assert_array_equal(
        pickle.loads(pickle.dumps(fitted)).predict_proba(ARMS.x), fitted.predict_proba(ARMS.x)
    )


@pytest.mark.slow
def test_an_answer_hangs_on_no_other_row(fitted):
    p = fitted.predict_proba(ARMS.x)
    assert_allclose(fitted.predict_proba(ARMS.x[::-1])[::-1], p, atol=1e-7)
    assert_allclose(
        np.concatenate([fitted.predict_proba(ARMS.x[i : i + 1]) for i in range(5)]),
        p[:5],
        atol=1e-7,
    )


@pytest.mark.slow
def test_the_model_of_a_fit_stays(fitted):
    other = copy(fitted).set_params(covariance=matern32, amplitude=dist.LogNormal(0.0, 1.0))
    assert_array_equal(other.predict_proba(ARMS.x), fitted.predict_proba(ARMS.x))


@pytest.mark.slow
def test_rows_of_a_class_look_like_it(fitted):
    X, y = fitted.sample(40, label="right")
    assert X.shape == (40, 2)
    assert set(y) == {"right"}
    # by chance 0.33; the classes of so tame a prior overlap
    assert np.mean(fitted.predict(X) == "right") > 0.5
    assert set(fitted.sample(60)[1]) == set(NAMES)
    assert_array_equal(fitted.sample(3)[0], fitted.sample(3)[0])
    for wrong, named in (
        ({"n": 0}, "n: found 0"),
        ({"label": -1}, "label: found -1"),
        ({"label": "down"}, "has the class 'down'"),
    ):
        with pytest.raises(ValueError, match=named):
            fitted.sample(**wrong)


@pytest.mark.slow
def test_units_constant_columns_and_frames_do_not_count(fitted):
    frame = pd.DataFrame({"a": ARMS.x[:, 0] * 8 + 1, "same": 3.0, "b": ARMS.x[:, 1] / 8})
    other = clone(fitted).fit(frame, Y)
    assert_allclose(other.predict_proba(frame), fitted.predict_proba(ARMS.x), atol=1e-4)
    assert list(other.feature_names_in_) == ["a", "same", "b"]
    assert (other.sample(5)[0][:, 1] == 3).all()


@pytest.mark.slow
def test_one_class_and_rows_that_occur_often():
    X = np.repeat(ARMS.x[:6], 3, axis=0)
    classifier = ArchipelagoClassifier(**SHORT).fit(X, np.array(["only"] * 4 + [-1] * 14, object))
    assert_allclose(classifier.predict_proba(X), np.ones((18, 1)))
    assert np.isfinite(classifier.sample(5)[0]).all()


def elsewhere(num_features):
    """A density without mass where the rows are."""
    return dist.Uniform(5.0, 6.0).expand([num_features]).to_event(1)


@pytest.mark.slow
def test_a_base_without_mass_where_the_rows_are_is_an_error():
    with pytest.raises((ValueError, RuntimeError), match="site 'x'"):
        ArchipelagoClassifier(**SHORT | {"base": elsewhere}).fit(ARMS.x, Y)


@pytest.mark.slow
def test_another_base_and_prior_are_one_argument():
    options = {
        "base": mixture,
        "amplitude": dist.LogNormal(0.7, 0.2),
        "lengthscale": dist.LogNormal(0.0, 0.3),
    }
    classifier = ArchipelagoClassifier(**SHORT | options).fit(ARMS.x, Y)
    assert "weights" in classifier.posterior_.posterior
    assert np.mean(classifier.predict(ARMS.x) == NAMES[ARMS.y]) > 0.7


@pytest.mark.slow
def test_no_time_is_said():
    with pytest.raises(
        ValueError,
        match="max_time: 0 seconds have passed before the first draw",
    ):
        ArchipelagoClassifier(max_time=0, **SHORT).fit(ARMS.x, Y)


COMPILING = {"check_classifiers_regression_target", "check_set_params"}
NO_FIT = (NOTHING_FITTED - COMPILING) | {
    "check_estimator_sparse_array",
    "check_supervised_y_no_nan",
}


FITS = {"check_fit_score_takes_y"}
SLOW, OTHER = (
    pytest.mark.slow,
    pytest.mark.skipif(
        "ZOO_ALL_CHECKS" not in os.environ,
        reason="takes long, for it compiles anew; ZOO_ALL_CHECKS=1 and -m slow run it",
    ),
)


def cases():
    short = ArchipelagoClassifier(
        num_warmup=20, num_samples=20, num_chains=1, amplitude=TAME, capacity=64
    )
    for estimator, check in estimator_checks_generator(short):
        name, settings = (
            check.func.__name__,
            "".join(f"-{value}" for value in check.keywords.values()),
        )
        marks = [] if name in NO_FIT else [SLOW] if name in FITS else [SLOW, OTHER]
        yield pytest.param(estimator, check, id=name + settings, marks=marks)


@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_every_check_that_is_named_is_there():
    assert {case.values[1].func.__name__ for case in cases()} > NO_FIT | FITS
