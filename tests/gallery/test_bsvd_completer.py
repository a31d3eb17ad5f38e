"""The completer as a whole: one fit of each link, asked everything."""

import pickle

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, ShuffleSplit

import gallery.bsvd
from diagnostics import report
from gallery import BSVDCompleter
from gallery._entries import read_entries
from inference import Program
from zoo.bsvd import bsvd

RNG = np.random.default_rng(0)
FACTORS = RNG.normal(size=(24, 2)), RNG.normal(size=(2, 18))
TRUTH = 100 + 5 * FACTORS[0] @ FACTORS[1]
SEEN = np.where(RNG.random(TRUTH.shape) < 0.7, TRUTH, np.nan)
ROWS, COLUMNS = np.nonzero(np.isnan(SEEN))
SHORT = {"num_components": 6, "num_warmup": 100, "num_samples": 100, "random_state": 0}


pytestmark = pytest.mark.usefixtures("numpyro_promotion")


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return BSVDCompleter(**SHORT).fit(SEEN)


def test_nothing_is_told_before_fit():
    with pytest.raises(NotFittedError):
        BSVDCompleter().predict([0], [0])


@pytest.mark.parametrize(
    ("settings", "X", "message"),
    [
        (
            {"link": "poisson"},
            SEEN,
            r"link: found 'poisson', wanted one of \['binomial', 'gaussian', 'ordered', ",
        ),
        (
            {"link": "binomial"},
            SEEN,
            r"X: the binomial link wants \(rows, columns, successes, trials\)",
        ),
        ({}, ([0], [0], [1], [2]), r"X: the gaussian link wants \(rows, columns, values\)"),
        ({"link": "ordered"}, SEEN, r"values: found .* wanted integers"),
        ({"dtype": "half"}, SEEN, r"dtype: found 'half'"),
        ({"missingness": 18}, SEEN, r"missingness: found 18, wanted 0 to 17"),
        (
            {"row_features": np.zeros((3, 1))},
            SEEN,
            r"row_features: found shape \(3, 1\), wanted \(24, features\)",
        ),
        ({"num_components": 2.5}, SEEN, r"num_components: found 2.5, wanted an integer"),
        ({"a": -1.0}, SEEN, r"a, b: found -1.0, 1.0, wanted a above 0"),
        ({"shape": (3,)}, SEEN, r"shape: found \(3,\), wanted \(rows, columns\)"),
    ],
    ids=[
        "link",
        "no trials",
        "trials",
        "levels",
        "dtype",
        "missingness",
        "features",
        "half a component",
        "a",
        "shape",
    ],
)
def test_wrong_settings_are_named(settings, X, message):
    with pytest.raises(ValueError, match=message):
        BSVDCompleter(**settings).fit(X)


def test_it_is_a_scikit_learn_estimator():
    completer = BSVDCompleter(num_components=7, link="ordered")
    assert clone(completer).get_params() == completer.get_params()


@pytest.mark.slow
def test_rank_and_entries_are_found(fitted):
    mean, std = fitted.predict(ROWS, COLUMNS, return_std=True)
    assert fitted.rank_ == 2
    assert (
        np.linalg.norm(mean - TRUTH[ROWS, COLUMNS]) / np.linalg.norm(TRUTH[ROWS, COLUMNS] - 100)
        < 1e-3
    )
    assert (np.abs(mean - TRUTH[ROWS, COLUMNS]) < 6 * std).mean() > 0.95


@pytest.mark.slow
def test_too_few_components_are_told_of():
    with pytest.warns(ConvergenceWarning, match="found 2 of 2 in use, and there may be more"):
        BSVDCompleter(**SHORT | {"num_components": 2, "num_warmup": 60, "num_samples": 20}).fit(
            SEEN
        )


@pytest.mark.slow
def test_the_tree_tells_what_is_identified(fitted):
    tree = fitted.posterior_
    assert {
        "rank",
        "alpha",
        "intercept",
        "singular_value",
        "prediction",
        "row_weights",
        "column_weights",
    } <= set(tree["posterior"].data_vars)
    assert {"u", "v", "s", "z"} == set(tree["not_identified"].data_vars)
    values = np.linalg.svd(
        (TRUTH - TRUTH.mean(0) - TRUTH.mean(1)[:, None] + TRUTH.mean()) / tree.attrs["scale"],
        compute_uv=False,
    )[:2]
    assert np.all(tree["posterior"]["singular_value"].values[..., 2:] < 0.01 * values[-1])
    assert np.all(tree["posterior"]["singular_value"].values[..., :2].mean((0, 1)) > 0.5 * values)
    assert "u" not in str(report(tree)).split()


@pytest.mark.slow
def test_singular_values_are_those_of_the_matrix(fitted):
    u, v, s, z = (fitted._draws[name][0] for name in "uvsz")
    found = gallery.bsvd._singular_values(u, v, s, z)
    np.testing.assert_allclose(
        found, np.linalg.svd((u * (s * z)) @ v.T, compute_uv=False)[: len(z)], atol=1e-8
    )


@pytest.mark.slow
def test_predictions_are_those_of_the_model(fitted):
    draws = fitted._draws
    eta = np.einsum("nik,nk,njk->nij", draws["u"], draws["s"] * draws["z"], draws["v"])
    eta += (
        draws["intercept"][:, None, None]
        + draws["row_weights"]
        + draws["column_weights"].transpose(0, 2, 1)
    )
    link = fitted._link
    np.testing.assert_allclose(
        fitted.predict(ROWS, COLUMNS), link.decoded(eta[:, ROWS, COLUMNS].mean(0)), rtol=1e-6
    )
    noise = np.mean(link.standardiser.scale**2 / draws["alpha"])
    wanted = np.sqrt(link.standardiser.scale**2 * eta[:, ROWS, COLUMNS].var(0) + noise)
    np.testing.assert_allclose(
        fitted.predict(ROWS, COLUMNS, return_std=True)[1], wanted, rtol=0.05, atol=2e-4
    )


@pytest.mark.slow
def test_suggestions_are_entries_not_seen(fitted):
    rows, columns = fitted.suggest(7)
    assert np.isnan(SEEN[rows, columns]).all()
    assert len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == 7
    with pytest.raises(ValueError, match=r"n: found 3, wanted an integer, 1 to 2"):
        fitted.suggest(3, candidates=([0, 1], [0, 0]))
    with pytest.raises(ValueError, match=r"n: found 1.5, wanted an integer"):
        fitted.suggest(1.5)


@pytest.mark.slow
def test_a_candidate_that_is_named_twice_is_suggested_once(fitted):
    rows, columns = fitted.suggest(2, candidates=([5, 5, 0], [3, 3, 1]))
    assert {*zip(rows.tolist(), columns.tolist(), strict=True)} == {(5, 3), (0, 1)}


def test_the_last_holes_of_a_large_matrix_are_found():
    """Chance would hardly meet them among a million."""
    completer = BSVDCompleter(random_state=0)
    row, column = np.divmod(np.setdiff1d(np.arange(1_000_000), [17, 654_321]), 1000)
    completer._entries = read_entries((row, column, np.zeros(len(row))), (1000, 1000))
    np.testing.assert_array_equal(completer._unobserved(), [17, 654_321])


@pytest.mark.slow
def test_no_entries_have_no_predictions(fitted):
    mean, std = fitted.predict([], [], return_std=True)
    assert mean.shape == std.shape == (0,)
    assert fitted.sample([], [], 7).shape == (7, 0)


@pytest.mark.slow
def test_the_spread_does_not_depend_on_the_level():
    """A mean square less the squared mean has no digit left at 1e9."""
    short = SHORT | {"num_warmup": 20, "num_samples": 20}
    near, far = (
        BSVDCompleter(**short).fit(SEEN + level).predict(ROWS, COLUMNS, return_std=True)[1]
        for level in (0.0, 2.0**30)
    )
    np.testing.assert_allclose(far, near, rtol=1e-2)


@pytest.mark.slow
def test_one_entry_is_a_matrix():
    """Its row, its column and its standardised value are all 0."""
    completer = BSVDCompleter(
        **SHORT | {"num_components": 8, "num_warmup": 5, "num_samples": 5}
    ).fit([[5.0]])
    assert np.isfinite(completer.predict([0], [0], return_std=True)).all()


@pytest.mark.slow
def test_a_fit_without_a_draw_is_no_fit():
    completer = BSVDCompleter(**SHORT | {"num_components": 1}, max_time=0.0)
    with pytest.raises(ValueError, match=r"fit: ended by max_time before the first draw"):
        completer.fit(SEEN)
    with pytest.raises(NotFittedError):
        completer.predict([0], [0])


@pytest.mark.slow
def test_a_fitted_completer_is_pickled(fitted):
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(ROWS, COLUMNS), fitted.predict(ROWS, COLUMNS))


@pytest.mark.slow
def test_draws_have_the_predictive_spread(fitted):
    drawn = fitted.sample(ROWS[:5], COLUMNS[:5], 2000)
    mean, std = fitted.predict(ROWS[:5], COLUMNS[:5], return_std=True)
    np.testing.assert_allclose(drawn.mean(0), mean, atol=6 * std.max() / np.sqrt(2000) + 1e-3)
    assert drawn.shape == (2000, 5)


@pytest.mark.slow
def test_new_rows_are_folded_in(fitted):
    new = 100 + 5 * RNG.normal(size=(3, 2)) @ FACTORS[1]
    seen = np.where(np.arange(18) % 2 == 0, new, np.nan)
    folded = fitted.fold_in(seen)
    rows, columns = np.nonzero(np.isnan(seen))
    assert (
        np.linalg.norm(folded.predict(rows, columns) - new[rows, columns])
        / np.linalg.norm(new[rows, columns] - 100)
        < 1e-2
    )
    assert fitted.shape_ == (24, 18)
    with pytest.raises(ValueError, match=r"row_features: found features, wanted None"):
        fitted.fold_in(seen, row_features=np.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"X: the gaussian link wants \(rows, columns, values\)"):
        fitted.fold_in(([0], [0], [1], [2]))
    with pytest.raises(ValueError, match=r"X: found 19 columns, wanted 18"):
        fitted.fold_in(np.ones((1, 19)))


@pytest.mark.slow
def test_rows_without_entries_are_predicted_from_the_prior():
    seen = SEEN.copy()
    seen[3] = np.nan
    completer = BSVDCompleter(**SHORT).fit(seen)
    mean, std = completer.predict([3, 4], [0, 0], return_std=True)
    assert np.isfinite(mean).all()
    assert std[0] > 3 * std[1]


@pytest.mark.slow
def test_counts_give_probabilities():
    rate = norm.cdf((TRUTH - 100) / 10)
    trials = RNG.integers(1, 30, size=rate.shape)
    rows, columns = np.nonzero(~np.isnan(SEEN))
    hits = RNG.binomial(trials, rate)
    completer = BSVDCompleter(link="binomial", **SHORT).fit(
        (rows, columns, hits[rows, columns], trials[rows, columns])
    )
    mean, std = completer.predict(ROWS, COLUMNS, return_std=True)
    assert np.mean(np.abs(mean - rate[ROWS, COLUMNS])) < 0.1
    assert np.mean(np.abs(mean - rate[ROWS, COLUMNS]) < 2 * std) > 0.85


@pytest.mark.slow
def test_log_likelihood_is_of_rows(fitted):
    """Each row's by itself, with few entries at once as with all of them."""
    found = fitted.posterior_["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "row")
    with jax.enable_x64(True):
        program = Program(bsvd, **fitted._arguments_)
        draw = {name: values[7] for name, values in fitted._draws.items() if name != "rank"}
        wanted = np.bincount(fitted._entries.row, program.log_likelihood(draw)["y"], 24)
    np.testing.assert_allclose(found[0, 7], wanted, rtol=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery.bsvd, "CHUNK", 100)
        np.testing.assert_allclose(found[0], fitted._row_log_likelihood(), rtol=1e-6)


@pytest.mark.slow
def test_a_warm_start_goes_on_from_the_last_draw():
    """A few sweeps suffice for more entries, and compile no new loop."""
    few = np.where(np.random.default_rng(1).random(SEEN.shape) < 0.9, SEEN, np.nan)
    completer = BSVDCompleter(**SHORT, warm_start=True).fit(few)
    completer.set_params(num_warmup=0, num_samples=5).fit(SEEN)
    mean = completer.predict(ROWS, COLUMNS)
    assert np.linalg.norm(mean - TRUTH[ROWS, COLUMNS]) < 1e-2 * np.linalg.norm(mean - 100)
    cold = BSVDCompleter(**SHORT | {"num_warmup": 0, "num_samples": 5}).fit(SEEN)
    away = np.linalg.norm(cold.predict(ROWS, COLUMNS) - TRUTH[ROWS, COLUMNS])
    assert away > 0.1 * np.linalg.norm(mean - 100)


@pytest.mark.slow
def test_levels_are_learned():
    levels = np.clip(np.round((TRUTH - 100) / 5 + RNG.normal(size=TRUTH.shape)), -2, 2)
    seen = np.where(np.isnan(SEEN), np.nan, levels)
    completer = BSVDCompleter(link="ordered", **SHORT).fit(seen)
    error = np.mean((completer.predict(ROWS, COLUMNS) - levels[ROWS, COLUMNS]) ** 2)
    # a start with effects ends where the entries are learned by heart, at 1.2
    assert error < 0.7 * np.var(levels[ROWS, COLUMNS])
    assert set(np.unique(completer.sample(ROWS, COLUMNS, 20))) <= {-2, -1, 0, 1, 2}


AT = np.nonzero(~np.isnan(SEEN))
USERS, ITEMS = np.array([f"user {i}" for i in range(24)]), 10 * np.arange(18)
RATINGS = pd.DataFrame({"who": USERS[AT[0]], "what": ITEMS[AT[1]], "stars": SEEN[AT]})


@pytest.fixture(scope="module")
def by_key():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return BSVDCompleter(**SHORT).fit(RATINGS)


@pytest.mark.slow
def test_a_frame_of_users_and_items_is_a_matrix(by_key):
    mean, std = by_key.predict(USERS[ROWS], ITEMS[COLUMNS], return_std=True)
    wanted = TRUTH[ROWS, COLUMNS]
    assert np.linalg.norm(mean - wanted) < 2e-3 * np.linalg.norm(wanted - 100)
    assert by_key.shape_ == (24, 18)
    rows, columns = by_key.suggest(3)
    assert set(rows) <= set(USERS)
    assert set(columns) <= set(ITEMS)
    new_mean, new_std = by_key.predict(["a new one"], [0], return_std=True)
    assert np.isfinite(new_mean).all()
    assert new_std[0] > 3 * std.max()
    tree = by_key.posterior_["posterior"]
    assert list(tree["row"].values) == [*by_key.row_keys_, "(others)"]
    with pytest.raises(ValueError, match=r"column: found the key '0', wanted one of the type of"):
        by_key.predict(["user 1"], ["0"])
    with pytest.raises(ValueError, match=r"wanted 0 to 23"):
        by_key.suggest(1, candidates=(["a new one"], [0]))


@pytest.mark.slow
def test_keys_and_values_apart_are_the_same_fit(by_key):
    wanted = by_key.predict(RATINGS)
    apart = BSVDCompleter(**SHORT).fit(RATINGS[["who", "what"]], RATINGS["stars"])
    np.testing.assert_array_equal(apart.predict(RATINGS[["who", "what"]]), wanted)
    assert by_key.score(RATINGS) == by_key.score(RATINGS[["who", "what"]], RATINGS["stars"])
    assert by_key.score(RATINGS) == pytest.approx(r2_score(RATINGS["stars"], wanted))
    weight = np.arange(len(RATINGS)) + 1.0
    assert by_key.score(RATINGS, sample_weight=weight) == pytest.approx(
        r2_score(RATINGS["stars"], wanted, sample_weight=weight)
    )


@pytest.mark.slow
def test_new_users_are_folded_in(by_key):
    seen = by_key.fold_in(pd.DataFrame({"a": ["eve"] * 12, "b": ITEMS[:12], "c": TRUTH[0, :12]}))
    assert seen.row_keys_ == ["eve"]
    np.testing.assert_allclose(seen.predict(["eve"] * 6, ITEMS[12:]), TRUTH[0, 12:], atol=0.1)
    with pytest.raises(ValueError, match=r"X: some columns were not there in the fit"):
        by_key.fold_in(pd.DataFrame({"a": ["eve"], "b": [7], "c": [1.0]}))
    with pytest.raises(ValueError, match=r"X: found no keys, wanted keys"):
        by_key.fold_in(SEEN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_it_works_in_a_grid_search():
    split = ShuffleSplit(1, test_size=0.2, random_state=0)
    search = GridSearchCV(BSVDCompleter(**SHORT), {"num_components": [1, 4]}, cv=split).fit(RATINGS)
    assert search.best_params_ == {"num_components": 4}
    assert search.best_score_ > 0.9


@pytest.mark.slow
def test_features_of_keys_are_found_by_their_index():
    of_users = pd.DataFrame({"age": RNG.normal(size=24)}, index=USERS)
    short = SHORT | {"num_warmup": 5, "num_samples": 5}
    fitted = BSVDCompleter(row_features=of_users.sample(frac=1, random_state=0), **short)
    x = fitted.fit(RATINGS)._arguments_["row_features"][:, 0]
    np.testing.assert_allclose(np.corrcoef(x[:-1], of_users.loc[fitted.row_keys_, "age"])[0, 1], 1)
    assert x[-1] == pytest.approx(0)
    for features, message in (
        (of_users.to_numpy(), r"row_features: found ndarray beside keys, wanted a pandas frame"),
        (of_users[1:], r"row_features: its index lacks the key 'user 0'"),
    ):
        with pytest.raises(ValueError, match=message):
            BSVDCompleter(row_features=features, **short).fit(RATINGS)
