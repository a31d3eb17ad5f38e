"""The estimator on data whose best answer is known, on tables of all kinds, by scikit-learn's
own checks.
"""

import pickle
from functools import cache

import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import sparse, stats
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import estimator_checks_generator

from gallery import AugmentReduceClassifier, augment_reduce
from gallery.augment_reduce import _highest, _log_probs
from inference import Driver
from tests.gallery.estimator_checks import NOTHING_FITTED

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

IRIS = load_iris(return_X_y=True)
QUICK = NOTHING_FITTED | {
    "check_supervised_y_no_nan",
}


def cases():
    for estimator, check in estimator_checks_generator(AugmentReduceClassifier(max_iter=1000)):
        name, settings = (
            check.func.__name__,
            "".join(f"-{value}" for value in check.keywords.values()),
        )
        yield pytest.param(
            estimator, check, id=name + settings, marks=[] if name in QUICK else [pytest.mark.slow]
        )


@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def quick(**options):
    return AugmentReduceClassifier(**{"max_iter": 400, "random_state": 0} | options)


@cache
def learned():
    return quick().fit(*IRIS)


def test_iris_is_classified_by_the_softmax_of_scikit_learn():
    x, y = IRIS
    found = quick(max_iter=4000, batch_size=150, prior_scale=1.0).fit(x, y)
    z = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(150)])  # the same prior for intercepts
    exact = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-8, max_iter=1000).fit(z, y)
    np.testing.assert_allclose(found.predict_proba(x), exact.predict_proba(z), atol=0.05)
    assert found.score(x, y) > 0.95
    assert found.n_iter_ == 4000


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    ["normal", "logistic", "laplace", dist.StudentT(4.0, 0.0, 1.0)],
    ids=["normal", "logistic", "laplace", "t"],
)
def test_other_noises_classify(noise):
    x, y = IRIS
    found = quick(noise=noise, max_iter=2000).fit(x, y)
    assert found.score(x, y) > 0.93
    np.testing.assert_allclose(found.predict_proba(x).sum(1), 1, atol=2e-3)


@pytest.mark.slow
def test_sparse_and_dense_tables_agree_where_columns_are_not_moved(monkeypatch):
    rng = np.random.default_rng(0)
    x = sparse.random_array((80, 30), density=0.1, rng=rng, format="csr", dtype=np.float32)
    y = rng.integers(0, 3, 80)
    unpacked = quick().fit(x, y).predict_proba(x)
    monkeypatch.setattr("gallery.augment_reduce.MOST_DENSE", 10)
    packed = quick().fit(x, y)
    np.testing.assert_allclose(packed.predict_proba(x), unpacked, atol=1e-3)
    assert packed.predict(x.toarray()).shape == (80,)


FEW = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32) + 3.0
KINDS = np.arange(40) % 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"), [({"rank": 2}, 10**8), ({}, 10)], ids=["rank", "many entries"]
)
def test_columns_that_were_moved_are_moved_in_a_sparse_table(monkeypatch, options, most):
    monkeypatch.setattr("gallery.augment_reduce.MOST_DENSE", most)
    found = quick(max_iter=30, **options).fit(FEW, KINDS)
    np.testing.assert_allclose(
        found.predict_proba(sparse.csr_matrix(FEW)), found.predict_proba(FEW), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("most", [100, 10**8], ids=["packed first", "unpacked first"])
def test_further_rows_are_laid_out_as_the_first(monkeypatch, most):
    monkeypatch.setattr("gallery.augment_reduce.MOST_DENSE", most)
    x = sparse.csr_matrix(np.where(FEW > 3, FEW, 0))
    found = quick(max_iter=30).fit(x, KINDS)
    monkeypatch.setattr("gallery.augment_reduce.MOST_DENSE", 100)
    for more in (x, x[:5], x.toarray()):
        found.partial_fit(more, KINDS[: more.shape[0]])
    assert found.n_iter_ == 33
    np.testing.assert_allclose(found.predict_proba(x), found.predict_proba(x.toarray()), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
def test_units_of_columns_do_not_matter(pack):
    x = np.where(FEW > 3, FEW, 0).astype(float)
    other = quick(max_iter=30).fit(pack(x * [1e-12, 1.0, 1e12, 1e-30]), KINDS)
    np.testing.assert_allclose(
        other._draws["weights"], quick(max_iter=30).fit(pack(x), KINDS)._draws["weights"], atol=1e-4
    )


@pytest.mark.slow
def test_columns_that_are_seldom_anything_but_alike_do_no_harm():
    """Entries that are hundreds of deviations off, as border pixels are, made weights so large
    that no number was left.
    """
    x, y = load_iris(return_X_y=True)
    # each is 1 in a single row
    seldom = (np.arange(150)[:, None] == 3 * np.arange(40)[None] + 2).astype(float)
    classifier = AugmentReduceClassifier(max_iter=2000, prior_scale=1.0, random_state=0).fit(
        np.column_stack([x, np.repeat(seldom, 10, axis=1)]), y
    )
    assert np.isfinite(classifier.elbo_)
    assert classifier.score(np.column_stack([x, np.zeros((150, 400))]), y) > 0.9
    assert (
        np.abs(
            classifier._scaled(
                np.column_stack([x, np.repeat(seldom, 10, axis=1)]).astype(np.float32), False
            )
        )
        <= 10.001
    ).all()


def scored(place, best, noise=0.0):
    """Log scores of four rows, with a peak at `best`; and what rows add by themselves."""
    return -((place - best) ** 2) / 8 + noise * np.array([-1.0, 1.0, 1.0, -1.0]) * place


@pytest.mark.parametrize("best", [-3.2, -1.0, 0.4, 1.9])
def test_the_highest_score_is_found_between_the_places_that_are_tried(best):
    tried = []

    def scores(place):
        tried.append(place)
        return scored(place, best)

    assert _highest(scores, -1, 8) == pytest.approx(min(best, round(best) + 0.25))
    assert len(set(tried)) <= 8


def test_what_may_be_chance_is_not_followed():
    assert _highest(lambda place: scored(place, 0.4, noise=1.0), -1, 8) == -1


def spread_rows(spread):
    """Rows of three classes, whose weights have the standard deviation `spread`."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1000, 60)), spread * rng.normal(size=(3, 60))
    return x, (x @ w.T + rng.gumbel(size=(1000, 3))).argmax(1)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_scale_of_the_prior_is_learned(spread):
    """Within a factor of three of the one that the weights were drawn with."""
    found = quick(max_iter=4000).fit(*spread_rows(spread))
    assert spread / 3 < found.prior_scale_ < 3 * spread, found.prior_scale_


@pytest.mark.slow
def test_a_scale_that_is_learned_from_rows_of_the_fit_is_seen(monkeypatch):
    """Rows that are not held out ask for no prior at all."""
    divided = augment_reduce._divided
    not_held_out = lambda rng, num_rows, most: (
        divided(rng, num_rows, most)[0],
        np.arange(num_rows),
    )
    monkeypatch.setattr(augment_reduce, "_divided", not_held_out)
    with pytest.raises(AssertionError):
        test_the_scale_of_the_prior_is_learned(0.1)


def test_a_scale_that_is_given_stays():
    assert learned().prior_scale_ > 0
    for scale in (0.7, None):
        assert quick(max_iter=5, prior_scale=scale).fit(FEW, KINDS).prior_scale_ == scale
    assert quick(max_iter=5).fit(FEW[:15], KINDS[:15]).prior_scale_ == 1.0  # too few rows


@pytest.mark.slow
def test_a_search_compiles_what_the_fit_does():
    """One loop for all scales, and for the fit."""
    found = quick(max_iter=50).fit(*IRIS)
    [loop] = found._driver._last.session.compiled.values()
    again = quick(max_iter=50, prior_scale=0.123).fit(*IRIS)
    [other] = again._driver._last.session.compiled.values()
    assert loop.advance is other.advance


def test_classes_that_were_not_learned_are_refused():
    found = learned()
    for unknown in (-1, 3, "u"):
        with pytest.raises(
            ValueError, match=f"classes: found {unknown!r}, which is none of the 3 classes"
        ):
            found.predict_proba(IRIS[0], classes=[unknown])
    for wrong in ([], [1, 1]):
        with pytest.raises(ValueError, match="wanted at least one class, and each once"):
            found.predict_proba(IRIS[0], classes=wrong)
    two = quick(max_iter=5).fit(FEW, np.where(KINDS > 1, 1, -1))
    np.testing.assert_array_equal(
        two.predict_proba(FEW, classes=[1, -1]), two.predict_proba(FEW)[:, ::-1]
    )


def test_labels_that_num_classes_does_not_name_are_refused():
    with pytest.raises(
        ValueError, match=r"y: found classes of type <U1, .* wanted integers 0 \.\. 2"
    ):
        quick(num_classes=3).fit(FEW, np.array(list("uvw"))[KINDS])
    with pytest.raises(ValueError, match="but num_classes=3 names them"):
        quick(num_classes=3).partial_fit(FEW, KINDS, classes=range(5))


@pytest.mark.slow
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_few_combinations_of_the_columns_suffice(is_sparse):
    x, y = load_digits(return_X_y=True)
    x = sparse.csr_matrix(x) if is_sparse else x
    found = quick(rank=9, max_iter=3000).fit(x[:1400], y[:1400])
    assert found.posterior_["posterior"]["embedding"].shape == (1, 1, 64, 9)
    assert found.score(x[1400:], y[1400:]) > 0.8


def test_top_k_is_the_best_of_all():
    x, y = load_digits(return_X_y=True)
    found = quick().fit(x[:500], y[:500])
    classes, probabilities = found.top_k(x[500:520], 3)
    every = found.predict_proba(x[500:520])
    order = np.argsort(-every, axis=1)[:, :3]
    np.testing.assert_array_equal(classes, order)
    np.testing.assert_allclose(probabilities, np.take_along_axis(every, order, 1), rtol=1e-5)
    np.testing.assert_array_equal(classes[:, 0], found.predict(x[500:520]))
    with pytest.raises(ValueError, match="k: found 11"):
        found.top_k(x, 11)


def among_two(found, rows, classes, noise_of_difference):
    """P(the first of two classes has the larger utility), by the distribution of a difference."""
    z = (rows - found._mean) / found._scale
    own = {name: value[0, classes] for name, value in found._draws.items()}
    utility = z @ own["weights"].T + own["biases"]
    return noise_of_difference.cdf(utility[:, 0] - utility[:, 1])


@pytest.mark.parametrize(
    ("noise", "difference"),
    [("gumbel", stats.logistic()), ("normal", stats.norm(0, 2**0.5))],
    ids=["gumbel", "normal"],
)
def test_classes_that_are_asked_for_share_the_probability(noise, difference):
    x, y = IRIS
    found = learned() if noise == "gumbel" else quick(noise=noise, max_iter=50).fit(x, y)
    two = found.predict_proba(x, classes=[2, 0])
    np.testing.assert_allclose(two[:, 0], among_two(found, x, [2, 0], difference), atol=1e-5)
    np.testing.assert_allclose(two.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(
        found.predict_proba(x, classes=[2, 0, 1]), found.predict_proba(x)[:, [2, 0, 1]], atol=1e-6
    )
    of_two = found.predict_proba(x)[:, [2, 0]]
    gap = np.abs(two - of_two / of_two.sum(1, keepdims=True)).max()
    assert (gap < 1e-5) == (noise == "gumbel")
    np.testing.assert_array_equal(found.predict_proba(x, classes=[1]), np.ones((150, 1)))


def test_frequencies_count_among_the_classes_that_are_asked_for():
    x, y = IRIS
    weight = {0: 3.0, 2: 0.5}
    found = quick(class_weight=weight, max_iter=50).fit(x, y)
    every = found.predict_proba(x)[:, [2, 0]]
    np.testing.assert_allclose(
        found.predict_proba(x, classes=[2, 0]), every / every.sum(1, keepdims=True), atol=1e-6
    )


@pytest.mark.parametrize("pack", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
def test_a_prediction_of_a_similar_length_compiles_nothing(pack):
    x, y = load_digits(return_X_y=True)
    found = quick(max_iter=50).fit(pack(x[:500]), y[:500])
    every = found.predict_proba(pack(x[500:560]))
    _log_probs.clear_cache()
    np.testing.assert_allclose(found.predict_proba(pack(x[500:533])), every[:33], rtol=1e-5)
    found.predict_proba(pack(x[500:560]))
    assert _log_probs._cache_size() == 1
    every = found.predict_proba(pack(x[500:1000]))
    np.testing.assert_allclose(found.predict_proba(pack(x[500:600])), every[:100], rtol=1e-5)
    assert _log_probs._cache_size() == 2


@pytest.mark.slow
def test_parts_teach_as_the_whole():
    x, y = load_digits(return_X_y=True)
    found = quick()
    for _ in range(6):
        for part in range(3):
            found.partial_fit(x[part:1500:3], y[part:1500:3], classes=np.arange(10))
    assert found.n_iter_ == 6 * 3 * 4
    assert found.score(x[1500:], y[1500:]) > 0.85


@pytest.mark.slow
def test_a_class_that_is_named_and_never_seen_is_improbable():
    x, y = IRIS
    found = quick(num_classes=5).fit(x, y)
    assert found.classes_.tolist() == [0, 1, 2, 3, 4]
    assert found.predict_proba(x)[:, 3:].max() < 0.2
    assert set(found.predict(x)) <= {0, 1, 2}
    for labels in (y, y.astype(float)):
        with pytest.raises(ValueError, match=r"wanted integers 0 \.\. 1"):
            quick(num_classes=2).fit(x, labels)


@pytest.mark.slow
def test_unlabelled_rows_say_nothing():
    x, y = IRIS
    half = np.where(np.arange(150) % 2, y, -1)
    np.testing.assert_allclose(
        quick().fit(x[1::2], y[1::2]).predict_proba(x),
        quick().fit(x[half >= 0], half[half >= 0]).predict_proba(x),
    )
    assert quick().fit(x, half).classes_.tolist() == [0, 1, 2]


def test_one_class_is_certain():
    found = quick().fit(IRIS[0], np.full(150, "only"))
    assert set(found.predict(IRIS[0])) == {"only"}
    np.testing.assert_array_equal(found.predict_proba(IRIS[0]), np.ones((150, 1)))


@pytest.mark.slow
def test_posterior_is_a_tree_of_the_weights():
    x, y = IRIS
    found = quick(posterior=True, num_samples=7).fit(x, y)
    tree = found.posterior_
    assert tree["posterior"]["weights"].sizes == {"chain": 1, "draw": 7, "class": 3, "feature": 4}
    assert {"weights_loc", "weights_scale", "eps_rate"} <= set(
        tree["variational_parameters"].data_vars
    )
    assert found.score(x, y) > 0.9
    assert quick().fit(x, y).posterior_["posterior"].sizes["draw"] == 1


def test_fit_goes_through_the_driver(monkeypatch):
    seen = []
    run = Driver.run
    monkeypatch.setattr(
        Driver,
        "run",
        lambda self, *args, **kwargs: (seen.append(kwargs), run(self, *args, **kwargs))[1],
    )
    quick(batch_size=1000).fit(*IRIS)
    assert seen[0]["num_classes"] == 3
    assert (seen[0]["batch_size"], seen[0]["num_negatives"]) == (150, 2)


def test_a_fitted_classifier_is_pickled():
    found = learned()
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.predict_proba(IRIS[0]), found.predict_proba(IRIS[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "cauchy"}, "noise: found 'cauchy'"),
        ({"batch_size": 0}, "batch_size: found 0"),
        ({"num_negatives": 2.5}, "num_negatives: found 2.5"),
        ({"max_iter": True}, "max_iter: found True"),
        ({"prior_scale": -1.0}, "prior_scale: found -1.0"),
        ({"step_size": None}, "step_size: found None"),
        ({"num_classes": 0}, "num_classes: found 0"),
        ({"rank": 0}, "rank: found 0"),
    ],
    ids=["noise", "batch", "negatives", "steps", "prior", "step size", "classes", "rank"],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(*IRIS)


def test_no_label_at_all_is_refused():
    with pytest.raises(ValueError, match="every row is unlabelled"):
        quick().fit(IRIS[0], np.full(150, -1))
