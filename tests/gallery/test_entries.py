"""What a completer is given: entries, links, features, and which entry it asks for next."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.sparse
from scipy.stats import norm

from gallery._entries import Keys, read_entries, read_keyed, read_places
from gallery._features import Features, missingness
from gallery._links import Binomial, Gaussian, Ordered
from gallery._standardise import Standardiser
from gallery._suggest import most_informative
from inference.distributions import OrderedProbit

NAN = np.nan
MATRIX = np.array([[1.0, NAN, 3.0], [NAN, NAN, NAN], [NAN, 0.0, NAN]])
VECTORS = (np.array([2, 0, 0]), np.array([1, 2, 0]), np.array([0.0, 3.0, 1.0]))


@pytest.mark.parametrize(
    "X",
    [MATRIX, VECTORS, scipy.sparse.coo_matrix((VECTORS[2], VECTORS[:2]), shape=(3, 3))],
    ids=["matrix", "vectors", "sparse"],
)
def test_all_forms_are_the_same_entries(X):
    entries = read_entries(X, (3, 3))
    np.testing.assert_array_equal(entries.row, [0, 0, 2])
    np.testing.assert_array_equal(entries.column, [0, 2, 1])
    np.testing.assert_array_equal(entries.value, [1.0, 3.0, 0.0])
    assert entries.shape == (3, 3)


def test_masked_entries_are_missing():
    """The numbers below a mask are none that were observed."""
    masked = np.ma.masked_array(np.where(np.isnan(MATRIX), -99.0, MATRIX), np.isnan(MATRIX))
    for X in (masked, masked.astype(int)):
        np.testing.assert_array_equal(read_entries(X).value, [1.0, 3.0, 0.0])


def test_tables_of_pandas_are_read():
    table = pd.DataFrame({"a": pd.array([1, None, 3], dtype="Int64"), "b": [np.nan, 2.5, np.nan]})
    np.testing.assert_array_equal(read_entries(table).value, [1.0, 2.5, 3.0])
    assert read_entries((table.index, table.index, table["a"].fillna(0))).shape == (3, 3)


def test_the_shape_is_the_smallest_that_has_all_entries():
    assert read_entries(VECTORS).shape == (3, 3)
    assert read_entries(VECTORS, (7, 5)).shape == (7, 5)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (
            ([0, 1, 0], [2, 0, 2], [1.0, 2.0, 3.0]),
            r"the entry at row 0, column 2 occurs twice \(1, 3\)",
        ),
        (([0, 5], [0, 0], [1.0, 2.0]), r"rows: found 5, wanted 0 to 2, the shape is \(3, 3\)"),
        (([0, -1], [0, 0], [1.0, 2.0]), r"rows: found -1, wanted 0 to 2"),
        (([0.5], [0], [1.0]), r"rows: found float64 of shape \(1,\), wanted a vector of integers"),
        (([0, 1], [0], [1.0, 2.0]), r"rows, columns: found 2 and 1"),
        (([0, 1], [0, 1], [1.0]), r"values: found shape \(1,\) beside 2 rows"),
        (([0, 1], [0, 1], [1.0, np.inf]), r"values: found inf at row 1, column 1"),
        (([], [], []), r"X: found no observed entry"),
        (np.full((2, 2), NAN), r"X: found no observed entry"),
        (np.zeros(4), r"X: found an array of 1 dimensions"),
        (([0], [0]), r"X: found a tuple of 2"),
        (
            ([0, 1], [0, 1], np.ma.array([1.0, 2.0], mask=[0, 1])),
            r"values: found nan at row 1, column 1",
        ),
        ((np.ma.array([0, 1], mask=[0, 1]), [0, 1], [1.0, 2.0]), r"rows: found masked int64"),
        (([0, 1], [0, 1], [1.0, 2.0], [3, 4, 5]), r"trials: found shape \(3,\) beside 2 rows"),
        (([0, 1], [0, 1], ["a", "b"]), r"values: found what is no number .*'a'"),
        (np.array([["a"]]), r"X: found what is no number .*'a'"),
        (scipy.sparse.coo_array(np.ones(3)), r"X: found a sparse array of 1 dimensions"),
    ],
    ids=[
        *(
            "twice",
            "beyond",
            "negative",
            "half",
            "lengths",
            "values",
            "infinite",
            "none",
            "all NaN",
            "a vector",
            "a pair",
        ),
        *(
            "masked value",
            "masked row",
            "too many trials",
            "texts",
            "a matrix of texts",
            "a sparse vector",
        ),
    ],
)
def test_wrong_entries_are_named(X, message):
    with pytest.raises(ValueError, match=message):
        read_entries(X, (3, 3))


@pytest.mark.parametrize(
    "shape",
    [(3,), (2.5, 3), (-3, 3), "no", 4],
    ids=["one", "half", "negative", "a text", "a number"],
)
def test_a_shape_is_two_sizes(shape):
    with pytest.raises(ValueError, match=r"shape: found .*, wanted \(rows, columns\)"):
        read_entries(VECTORS, shape)


def test_rows_that_32_bits_do_not_hold_are_refused():
    """They came back as others."""
    with pytest.raises(
        ValueError, match=r"rows: found 5000000000, wanted 0 to 2147483646, number them 0, 1"
    ):
        read_entries(([0, 5_000_000_000], [0, 1], [1.0, 2.0]))


def test_places_are_checked_as_well():
    with pytest.raises(ValueError, match=r"columns: found 3, wanted 0 to 2"):
        read_places([0], [3], (3, 3))


def test_gaussian_entries_are_standardised_and_come_back():
    entries = read_entries(VECTORS)
    link = Gaussian.learn(entries)
    coded = link.coded(entries).value
    np.testing.assert_allclose([coded.mean(), coded.std()], [0, 1], atol=1e-12)
    np.testing.assert_allclose(link.decoded(coded), entries.value)


def test_entries_that_do_not_vary_keep_their_unit():
    assert Gaussian.learn(read_entries(([0, 1], [0, 1], [2.0, 2.0]))).standardiser.scale == 1


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_units_may_be_of_any_size(unit):
    entries = read_entries((*VECTORS[:2], VECTORS[2] * unit))
    link = Gaussian.learn(entries)
    coded = link.coded(entries).value
    np.testing.assert_allclose([coded.mean(), coded.std()], [0, 1], atol=1e-12)
    np.testing.assert_allclose(link.restore_moments(coded, np.ones(3))[1], VECTORS[2].std() * unit)


def test_moments_are_exact_far_from_zero():
    """A mean square less the squared mean is all rounding there; in single precision so is the
    mean.
    """
    link = Gaussian(Standardiser(1e8, 2.0))
    mean, variance = link.moments(dist.Normal(jnp.float32([0.5, -0.5]), jnp.float32(0.25)))
    mean, deviation = link.restore_moments(np.asarray(mean), np.sqrt(variance))
    np.testing.assert_array_equal(mean, [1e8 + 1, 1e8 - 1])
    np.testing.assert_allclose(deviation, 0.5, rtol=1e-6)


def test_moments_of_levels_are_those_of_their_probabilities():
    link, predictor, cutpoints = Ordered((1, 3, 7)), np.array([0.3, -2.0]), np.array([0.0, 1.5])
    mean, variance = link.moments(OrderedProbit(jnp.asarray(predictor), jnp.asarray(cutpoints)))
    share = np.diff(norm.cdf(cutpoints[:, None] - predictor), axis=0, prepend=0, append=1)
    wanted = np.array([1, 3, 7]) @ share
    np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    np.testing.assert_allclose(variance, np.array([1, 9, 49]) @ share - wanted**2, rtol=1e-4)


def test_levels_are_coded_by_their_order():
    entries = read_entries(([0, 1, 2], [0, 1, 2], [5, 1, 3]))
    link = Ordered.learn(entries)
    np.testing.assert_array_equal(link.coded(entries).value, [2, 0, 1])
    np.testing.assert_array_equal(link.decoded(np.array([2, 0, 1])), [5, 1, 3])


@pytest.mark.parametrize(
    ("link", "X", "message"),
    [
        (
            Ordered((1, 2)),
            ([0], [0], [3]),
            r"found the level 3, wanted one of those learned, \(1, 2\)",
        ),
        (
            Ordered((1, 2)),
            ([0], [0], [1.5]),
            r"values: found 1.5 at row 0, column 0, wanted integers",
        ),
        (Binomial(), ([0], [1], [3], [2]), r"found 3 successes of 2 trials at row 0, column 1"),
        (Binomial(), ([0], [1], [-1], [2]), r"found -1 successes of 2 trials"),
        (
            Binomial(),
            ([0], [1], [1], [2.5]),
            r"trials: found 2.5 at row 0, column 1, wanted integers",
        ),
        (
            Binomial(),
            ([0], [1], [1], [np.inf]),
            r"trials: found inf at row 0, column 1, wanted integers",
        ),
    ],
    ids=[
        "a new level",
        "half a level",
        "too many",
        "too few",
        "half a trial",
        "no number of trials",
    ],
)
def test_what_is_none_of_the_link_is_named(link, X, message):
    with pytest.raises(ValueError, match=message):
        link.coded(read_entries(X, (3, 3)))


def test_one_level_is_refused():
    with pytest.raises(ValueError, match=r"found the one level 4, wanted two at least"):
        Ordered.learn(read_entries(([0, 1], [0, 1], [4, 4])))


def test_features_are_standardised_and_constants_left_out():
    given = np.array([[1.0, 7.0], [3.0, 7.0]])
    learned, coded = Features.learn([given], 2, "row_features")
    np.testing.assert_allclose(coded, [[-1.0], [1.0]])
    np.testing.assert_allclose(learned.coded([[5.0, 0.0]]), [[3.0]])
    assert Features.learn([None], 2, "row_features") == (None, None)


def test_a_feature_that_rounding_alone_varies_is_constant():
    """The mean of seven 0.1 is not 0.1."""
    learned, coded = Features.learn([np.full((7, 1), 0.1)], 7, "row_features")
    assert np.full(7, 0.1).std() > 0
    assert coded.shape == (7, 0)
    assert learned.coded([[0.2]]).shape == (1, 0)


@pytest.mark.parametrize(
    "given", [np.zeros((3, 1)), np.zeros(2), np.full((2, 1), NAN)], ids=["rows", "a vector", "NaN"]
)
def test_features_that_do_not_fit_are_named(given):
    with pytest.raises(
        ValueError, match=r"row_features: found shape .*, wanted \(2, features\), all finite"
    ):
        Features.learn([given], 2, "row_features")


def test_missingness_is_that_of_the_known_entries():
    rng = np.random.default_rng(0)
    known = rng.random((8, 6)) < np.outer(np.linspace(0.2, 1, 8), np.linspace(0.3, 1, 6))
    row, column = np.nonzero(known)
    left, right = missingness(read_entries((row, column, np.zeros(len(row))), (8, 6)), 2)
    u, _, v = np.linalg.svd(known.astype(float))
    np.testing.assert_allclose(np.sort(np.abs(left.T @ u[:, :2]).max(0)), [1, 1], atol=1e-6)
    np.testing.assert_allclose(np.sort(np.abs(v[:2] @ right).max(1)), [1, 1], atol=1e-6)


def conditional_choice(covariance, noise, n):
    """Pivoted Cholesky, by conditioning the whole covariance each time."""
    chosen = []
    for _ in range(n):
        variance = np.diag(covariance).copy()
        variance[chosen] = -np.inf
        best = int(np.argmax(variance))
        chosen.append(best)
        covariance = covariance - np.outer(covariance[best], covariance[best]) / (
            covariance[best, best] + noise
        )
    return chosen


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_entries_are_chosen_as_if_the_covariance_were_conditioned(noise):
    draws = np.random.default_rng(1).normal(size=(40, 3)) @ np.random.default_rng(2).normal(
        size=(3, 12)
    )
    wanted = conditional_choice(np.cov(draws.T), noise, 3 if noise == 0 else 8)
    np.testing.assert_array_equal(most_informative(draws, noise, len(wanted)), wanted)


def test_conditioning_without_noise_where_there_is_some_chooses_otherwise():
    """The twin of the test above."""
    draws = np.random.default_rng(1).normal(size=(40, 3)) @ np.random.default_rng(2).normal(
        size=(3, 12)
    )
    wanted = conditional_choice(np.cov(draws.T), 5.0, 8)
    assert most_informative(draws, 1e-9, 8).tolist() != wanted


def test_two_copies_of_the_most_uncertain_entry_are_not_both_chosen():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 200, 1)) * [[[3.0]], [[1.0]]]
    draws = np.concatenate([first, first, second], axis=1)
    assert set(most_informative(draws, 0.01, 2).tolist()) in ({0, 2}, {1, 2})
    assert set(most_informative(draws, 0.01, 2, is_correlated=False).tolist()) == {0, 1}


RATINGS = {"who": ["ann", "bob", "ann", "bob"], "what": [7, 7, 9, 9], "stars": [1.0, 2, 3, NAN]}


def test_keys_and_values_may_come_apart():
    by_key = read_keyed(list(zip(RATINGS["who"], RATINGS["what"], strict=True)), RATINGS["stars"])
    assert by_key.row.tolist() == ["ann", "bob", "ann"]
    assert by_key.column.tolist() == [7, 7, 9]
    hits = np.array([[1, 2], [0, 3], [2, 2], [1, 1]])
    successes, trials = read_keyed(pd.DataFrame(RATINGS)[["who", "what"]], hits, 2).values
    np.testing.assert_array_equal(successes, hits[:, 0])
    np.testing.assert_array_equal(trials, hits[:, 1])
    any_kind = pd.DataFrame({"a": [(1, 2), None.__class__, (1, 2)], "b": [0, 0, 1], "c": [1, 2, 3]})
    assert len(Keys.learn(read_keyed(any_kind)).row) == 2


@pytest.mark.parametrize("X", [MATRIX, VECTORS, pd.DataFrame(np.ones((2, 4)))])
def test_what_has_no_keys_is_a_matrix(X):
    assert read_keyed(X) is None


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (pd.DataFrame(MATRIX), None, r"column 0 has no key in row 1. A frame of three columns"),
        (pd.DataFrame(np.full((2, 3), 0.5)), None, r"column 0 holds 0.5, which is no key. A frame"),
        (MATRIX, [1, 2, 3], r"X: found 3 columns beside y, wanted two"),
        ([["a", "b"]], [1, 2], r"y: found 2 values beside 1 rows of X"),
        ([["a", "b"]], [[1, 2]], r"y: found 2 numbers for each entry, wanted 1"),
    ],
)
def test_wrong_keys_are_named(X, y, message):
    with pytest.raises(ValueError, match=message):
        read_keyed(X, y)


def test_an_entry_that_occurs_twice_is_named_by_its_keys():
    by_key = read_keyed([["ann", 7], ["ann", 7]], [1, 2])
    keys = Keys.learn(by_key)
    with pytest.raises(ValueError, match=r"the entry at row 'ann', column 7 occurs twice \(1, 2\)"):
        read_entries(keys.placed(by_key), keys.shape, keys)


def test_a_key_of_another_type_is_no_new_key():
    keys = Keys(np.array([1, 2]), np.array(["a", "b"], object))
    with pytest.raises(ValueError, match=r"row: found the key '1', wanted one of the type of 1"):
        keys.places(np.array(["1"], object), np.array(["a"], object))
