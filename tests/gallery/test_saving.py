"""Saved estimators: they predict as the fitted ones did, and other files are refused."""

import subprocess
import sys
from functools import partial

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from sklearn.exceptions import NotFittedError

import gallery
from gallery._saving import _checksum, packed, unpacked
from gallery._standardise import Standardiser
from gallery.commands.runs import open_fit
from zoo.aclass import beta_bernoulli

pytestmark = [
    pytest.mark.usefixtures("numpyro_promotion"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

RNG = np.random.default_rng(0)
CODES = np.arange(30) % 3
Y = np.array(["ant", "bee", "fly"])[CODES]
X = RNG.normal(size=(30, 3)) + np.outer(CODES, [2.0, 0, 0])
HOLED = np.where(RNG.random(X.shape) < 0.1, np.nan, X)
FRAME = pd.DataFrame(HOLED[:, :2], columns=["length", "width"]).assign(
    wings=pd.Categorical(np.array(["no", "yes"])[(CODES > 0).astype(int)])
)
TASK = np.array(["river", "wood"])[np.arange(30) % 2]
MATRIX = np.where(RNG.random((9, 7)) < 0.2, np.nan, RNG.normal(size=(9, 1)) * RNG.normal(size=7))
PLACES = [0, 1, 8], [6, 3, 0]
SHORT = {"max_iter": 5, "num_samples": 3, "random_state": 0}
SAMPLED = {"num_warmup": 4, "num_samples": 3, "random_state": 0}


def of_classes(X, *more):
    return lambda fitted: [fitted.predict_proba(X, *more), fitted.classes_]


def and_imputed(X, *more):
    return lambda fitted: [fitted.predict_proba(X, *more), fitted.impute(X, *more)]


def of_entries(fitted):
    return [*fitted.predict(*PLACES, return_std=True), *fitted.suggest(2)]


def folded():
    """A completer by keys, of new rows."""
    row, column = np.nonzero(~np.isnan(MATRIX))
    stars = np.round(MATRIX[row, column])
    names = np.array([f"user {i}" for i in row])
    ratings = pd.DataFrame({"who": names, "what": column, "stars": stars})
    completer = gallery.BSVDCompleter(link="ordered", num_components=4, **SAMPLED).fit(ratings)
    return completer.fold_in(ratings[:3].assign(who="new"))


CASES = {
    "AClassClassifier": (
        lambda: gallery.AClassClassifier(5, num_orders=2, random_state=0, num_samples=5).fit(
            FRAME, Y
        ),
        and_imputed(FRAME),
    ),
    "AugmentReduceClassifier": (
        lambda: gallery.AugmentReduceClassifier(max_iter=5, random_state=0).fit(X, Y),
        of_classes(X),
    ),
    "BSVDCompleter": (
        lambda: gallery.BSVDCompleter(num_components=4, **SAMPLED).fit(MATRIX),
        of_entries,
    ),
    "BSVDCompleter by keys, of new rows": (
        folded,
        lambda fitted: [fitted.predict(["new", "nobody"], [2, 3]), fitted.row_keys_],
    ),
    "IQGMEClassifier": (
        lambda: gallery.IQGMEClassifier(3, **SHORT).fit(HOLED, Y),
        and_imputed(HOLED),
    ),
    "IQGMEClassifier with factors": (
        lambda: gallery.IQGMEClassifier(3, n_factors=2, **SHORT).fit(HOLED, Y),
        and_imputed(HOLED),
    ),
    "IQGMEClassifier by Gibbs": (
        lambda: gallery.IQGMEClassifier(3, inference="gibbs", **SHORT).fit(HOLED, Y),
        and_imputed(HOLED),
    ),
    "MultiTaskIQGMEClassifier": (
        lambda: gallery.MultiTaskIQGMEClassifier(3, 4, **SHORT).fit(HOLED, Y, TASK),
        and_imputed(HOLED, TASK),
    ),
    "ArchipelagoClassifier": (
        lambda: gallery.ArchipelagoClassifier(num_chains=1, **SAMPLED).fit(X[:9, :2], Y[:9]),
        of_classes(X[:, :2]),
    ),
    "StagedMixtureClassifier": (
        lambda: gallery.StagedMixtureClassifier(2, num_live=20, num_samples=5, random_state=0).fit(
            X[:, :1], Y
        ),
        of_classes(X[:, :1]),
    ),
}
QUICK = ("AClassClassifier", "AugmentReduceClassifier")


@pytest.mark.parametrize(
    ("fit", "ask"),
    [
        pytest.param(*case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_a_loaded_estimator_predicts_as_the_fitted_one(fit, ask, tmp_path):
    fitted, path = fit(), tmp_path / "m.nc"
    fitted.save(path)
    loaded = type(fitted).load(path)
    for found, wanted in zip(ask(loaded), ask(fitted), strict=True):
        if isinstance(wanted, pd.DataFrame):
            pd.testing.assert_frame_equal(found, wanted)
        elif wanted.dtype.kind == "f":
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found, wanted)
    assert set(loaded.posterior_.children) == set(fitted.posterior_.children)
    assert packed(loaded.get_params()).identical(packed(fitted.get_params()))
    loaded.save(tmp_path / "again.nc")
    np.testing.assert_array_equal(ask(type(fitted).load(tmp_path / "again.nc"))[0], ask(loaded)[0])


def test_every_estimator_is_tested():
    assert {name.split()[0] for name in CASES} == set(gallery.__all__)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import jax

    path = tmp_path_factory.mktemp("saved") / "m.nc"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fitted = gallery.AClassClassifier(3, num_orders=2, random_state=0, num_samples=2).fit(
            X[:8], Y[:8]
        )
    fitted.save(path)
    return fitted, path


def test_another_process_predicts(saved):
    fitted, path = saved
    code = (
        "import sys, numpy as np; from gallery import AClassClassifier; "
        "print(repr(AClassClassifier.load(sys.argv[1]).predict_proba(np.zeros((1, 3))).tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    np.testing.assert_allclose(eval(done.stdout), fitted.predict_proba(np.zeros((1, 3))), rtol=1e-6)


HALF = np.array([*"ab", -1, *"bab", -1, *"ab"], object)  # labels, some of them unknown


def check_that_both_learn_on(path, **settings):
    """The classifier that was saved twice on its way, and the one that never was."""
    fitted = gallery.AClassClassifier(4, num_orders=2, random_state=0, num_samples=6, **settings)
    fitted.fit(FRAME[:9], HALF)
    loaded = fitted
    for rows in (FRAME[9:18], FRAME[18:27]):
        loaded.save(path)
        loaded = type(fitted).load(path)
        for each in (fitted, loaded):
            each.partial_fit(rows, HALF)
    assert (loaded.n_rows_seen_, loaded.log_evidence_) == (27, fitted.log_evidence_)
    np.testing.assert_array_equal(loaded.predict_proba(FRAME), fitted.predict_proba(FRAME))
    assert set(loaded.posterior_.children) == set(fitted.posterior_.children)
    for name, group in fitted.posterior_.children.items():
        xr.testing.assert_equal(loaded.posterior_[name].to_dataset(), group.to_dataset())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"rejuvenate": 1}, marks=pytest.mark.slow),
        {"keep_assignments": False},
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loaded_classifier_learns_on_bit_for_bit(settings, tmp_path):
    check_that_both_learn_on(tmp_path / "m.nc", **settings)


@pytest.mark.slow
def test_a_file_without_the_counters_is_seen(tmp_path, monkeypatch):
    contents = gallery.AClassClassifier._contents

    def forgetful(self):
        found = contents(self)
        steps = [step._replace(count=np.int32(0)) for step in found["_loaded"]]
        return found | {"_loaded": steps}

    monkeypatch.setattr(gallery.AClassClassifier, "_contents", forgetful)
    with pytest.raises(AssertionError):
        check_that_both_learn_on(tmp_path / "m.nc", resampling="systematic")


def test_a_loaded_classifier_wants_the_rows_that_max_time_has_left(tmp_path):
    half = gallery.AClassClassifier(4, num_orders=2, random_state=0, num_samples=6).fit(
        X[:5], Y[:5]
    )
    half.set_params(max_time=0.0).partial_fit(X[5:], Y[5:])
    seen = half.n_rows_seen_
    half.save(tmp_path / "half.nc")
    loaded = gallery.AClassClassifier.load(tmp_path / "half.nc").set_params(max_time=None)
    with pytest.raises(ValueError, match=rf"X: a call .* has left {len(X) - seen} rows"):
        loaded.partial_fit(X, Y)
    loaded.partial_fit(X[seen:], Y[seen:])
    whole = (
        gallery.AClassClassifier(4, num_orders=2, random_state=0)
        .fit(X[:5], Y[:5])
        .partial_fit(X[5:], Y[5:])
    )
    assert loaded.log_evidence_ == whole.log_evidence_


def test_a_loaded_classifier_refuses_other_columns_and_precisions(saved):
    import jax

    loaded = gallery.AClassClassifier.load(saved[1])
    with pytest.raises(ValueError, match=r"X has 2 features, but .* is expecting 3"):
        loaded.partial_fit(X[:, :2], Y)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"update: the run began with jax_enable_x64=False"),
    ):
        loaded.partial_fit(X, Y)
    assert loaded.fit(X[:8], Y[:8]).partial_fit(X[:8], Y[:8]).n_rows_seen_ == 16


def test_other_loaded_estimators_do_not_learn_on(tmp_path):
    fitted = CASES["AugmentReduceClassifier"][0]()
    fitted.save(tmp_path / "m.nc")
    with pytest.raises(ValueError, match=r"partial_fit: this AugmentReduceClassifier was loaded"):
        type(fitted).load(tmp_path / "m.nc").partial_fit(X, Y)


def test_a_damaged_file_is_refused_or_does_no_harm(saved, tmp_path):
    fitted, path = saved
    data, rng = path.read_bytes(), np.random.default_rng(0)
    text, number = (
        data.index(b'{"pairs"'),
        data.index(fitted._states[0].groups.log_weight.tobytes()),
    )
    for place in (text + 50, number + 1, *rng.integers(len(data), size=5)):
        hurt = bytearray(data)
        hurt[place] ^= 0x55
        (tmp_path / "hurt.nc").write_bytes(hurt)
        try:
            loaded = gallery.AClassClassifier.load(tmp_path / "hurt.nc")
        except ValueError as error:
            assert "damaged" in str(error)  # noqa: PT017
        else:
            assert place not in (text + 50, number + 1)
            np.testing.assert_array_equal(loaded.predict_proba(X), fitted.predict_proba(X))


def test_other_files_are_refused_in_a_sentence(saved, tmp_path):
    _, path = saved
    load = gallery.AClassClassifier.load
    (tmp_path / "cut.nc").write_bytes(path.read_bytes()[:-1000])
    (tmp_path / "text.nc").write_text("length,width\n")
    for name in ("cut.nc", "text.nc"):
        with pytest.raises(ValueError, match=rf"{name}: not a saved estimator, or damaged; wanted"):
            load(tmp_path / name)
    with pytest.raises(ValueError, match=r"no.nc: no such file"):
        load(tmp_path / "no.nc")
    with pytest.raises(ValueError, match=r"a folder; name a netCDF file of AClassClassifier.save"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"m.nc: holds an AClassClassifier; load it in"):
        gallery.IQGMEClassifier.load(path)
    with pytest.raises(ValueError, match=r"m.nc: holds an AClassClassifier; load it in Python by"):
        open_fit(path)
    xr.DataTree.from_dict({"posterior": xr.Dataset()}).to_netcdf(
        tmp_path / "run.nc", engine="h5netcdf"
    )
    with pytest.raises(ValueError, match=r"run.nc: holds no estimator; wanted a netCDF file of"):
        load(tmp_path / "run.nc")
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        tree = tree.load()
    tree.attrs["format"] = 99
    tree.to_netcdf(tmp_path / "new.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match=r"new.nc: written by another version .*format 99"):
        load(tmp_path / "new.nc")


def test_what_a_file_cannot_hold_is_named(saved, tmp_path):
    with pytest.raises(NotFittedError):
        gallery.AClassClassifier().save(tmp_path / "m.nc")
    loaded = gallery.AClassClassifier.load(saved[1])
    for settings in ({"component": lambda x, at: x}, {"random_state": np.random.RandomState(0)}):
        [name] = settings
        with pytest.raises(ValueError, match=rf"save: {name} is .* which a file cannot hold"):
            loaded.set_params(**{"component": "auto", **settings}).save(tmp_path / "m.nc")
    assert not list(tmp_path.iterdir())


def test_values_come_back():
    value = {
        "numbers": (1, 2.5, True, None, np.float64(3.0), np.inf),
        "texts": np.array(["a", "ab"]),
        "mixed": np.array(["a", 1, None], object),
        7: [np.arange(3, dtype=np.int8), np.zeros((0, 2)), np.array([True, False])],
        "record": Standardiser.learn(X),
        "partial": partial(beta_bernoulli, a=2.0),
        "dtypes": [
            np.dtype("float32"),
            pd.CategoricalDtype(["b", "a"], ordered=True),
            pd.Int64Dtype(),
        ],
    }
    found = unpacked(packed(value))
    np.testing.assert_equal(
        {**found, "partial": 0}, {**value, "partial": 0}
    )  # a partial is equal to itself alone
    assert found["partial"].func is beta_bernoulli
    assert found["partial"].keywords == {"a": 2.0}
    assert found["texts"].dtype == value["texts"].dtype
    drawn = unpacked(packed(dist.Gamma(2.0, np.ones(3)).expand([2, 3]).to_event(1)))
    assert drawn.log_prob(np.ones((2, 3))).shape == (2,)
    assert unpacked(packed(dist.Gamma(2.0, 1.0))).rate == 1.0


@pytest.mark.parametrize("name", ["os:system", "gallery:WHERE", "zoo.aclass:no_such_function"])
def test_no_other_function_is_looked_up(name):
    text = f'{{"function": "{name}"}}'
    other = xr.Dataset(attrs={"content": text, "checksum": _checksum(text, {}), "version": "9"})
    with pytest.raises(ValueError, match=r"written by version 9, which this version"):
        unpacked(other)
