"""The estimator on data whose best answer is known, against the model's own probabilities, by
scikit-learn's own checks.
"""

import pickle

import jax
import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator

from gallery import StagedMixtureClassifier
from inference import Driver, orders
from tests.gallery.estimator_checks import NOTHING_FITTED

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

QUICK = NOTHING_FITTED | {
    "check_estimator_sparse_array",
    "check_estimator_sparse_tag",
    "check_supervised_y_no_nan",
}


def cases():
    """Few live points, and one cluster where a check does not score the predictions."""
    quickest = StagedMixtureClassifier(1, num_live=20, num_samples=20)
    for estimator, check in estimator_checks_generator(quickest):
        name, settings = (
            check.func.__name__,
            "".join(f"-{value}" for value in check.keywords.values()),
        )
        if name == "check_classifiers_train":
            estimator = clone(estimator).set_params(order=3)
        marks = [] if name in QUICK else [pytest.mark.slow]
        yield pytest.param(estimator, check, id=name + settings, marks=marks)


@pytest.fixture
def quickly_compiled():
    """Each check compiles for longer than it runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check, quickly_compiled):
    check(estimator)


def clusters(size=60, seed=0):
    """Two classes; the first has two clusters with the other between them, which no line parts."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 3, size)
    return np.array([-4.0, 0.0, 4.0])[which, None] + 0.5 * rng.normal(size=(size, 1)), np.where(
        which == 1, "inner", "outer"
    )


def quick(order=3, **options):
    return StagedMixtureClassifier(
        order, **{"num_live": 60, "num_sweeps": 2.0, "num_samples": 50, "random_state": 0} | options
    )


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return quick().fit(*clusters())


def by_hand(classifier, x, order=3):
    """The mixture of experts, written out with scipy: each draw's classes of a row, averaged."""
    drawn = classifier.posterior_[f"order_{order}"]["posterior"].dataset.isel(chain=0)
    z = (x - clusters()[0].mean()) / clusters()[0].std()
    each = []
    for i in range(drawn.sizes["draw"]):
        beta, gamma, mu, sigma = (
            drawn[name].values[i] for name in ("beta", "gamma", "mu", "sigma")
        )
        claims = beta * stats.norm(mu[:, 0], sigma[:, 0]).pdf(z)
        each.append(claims @ gamma / claims.sum(1, keepdims=True))
    return each


def test_probabilities_are_those_of_the_experts(fitted):
    """The planted bug takes the median expert for the mean."""
    x, _ = clusters(40, 1)
    each = by_hand(fitted, x)
    found = fitted.predict_proba(x)
    np.testing.assert_allclose(found, np.mean(each, 0), rtol=1e-6)
    assert not np.allclose(found, np.median(each, 0), rtol=1e-3)


def test_clusters_that_no_line_parts_are_classified(fitted):
    x, y = clusters(200, 1)
    assert fitted.score(x, y) > 0.97
    assert fitted.classes_.tolist() == ["inner", "outer"]
    assert (fitted.orders_.tolist(), fitted.order_posterior_.tolist()) == ([3], [1.0])
    assert fitted.n_iter_ == fitted.posterior_["order_3"].attrs["steps"]
    assert fitted.log_evidence_ == pytest.approx(
        float(
            fitted.posterior_["orders"]["log_evidence"][0]
            + fitted.posterior_["orders"]["log_prior"][0]
        )
    )
    assert 0 < fitted.log_evidence_se_ < 2
    np.testing.assert_array_equal(
        fitted.predict(x), fitted.classes_[fitted.predict_proba(x).argmax(1)]
    )


def test_a_cluster_of_one_class_is_as_sure_as_its_rows_make_it(fitted):
    """By the posterior mean of its class probabilities; with a larger concentration, less sure."""
    num_rows = np.sum(clusters()[1] == "inner")
    told = lambda concentration: (num_rows + concentration) / (num_rows + 2 * concentration)
    found = fitted.predict_proba([[0.0]])[0, 0]
    assert abs(found - told(1 / 2)) < 0.01 < abs(found - told(1.0))


def test_a_fitted_classifier_is_pickled_and_goes_on(fitted):
    x, _ = clusters(40, 1)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert clone(fitted).get_params() == fitted.get_params()


@pytest.mark.slow
def test_a_fit_that_fails_leaves_nothing_to_ask(fitted):
    again = pickle.loads(pickle.dumps(fitted))
    x, y = clusters(seed=1)  # the shapes of `fitted`: nothing compiles
    with pytest.raises(ValueError, match=r"order 3: its run ended by 'max_time'"):
        again.set_params(max_time=1e-9).fit(x, y)
    with pytest.raises(NotFittedError):
        again.predict(x)
    with pytest.raises(ValueError, match="unlabelled"):
        again.fit(x, np.full(len(y), -1))
    with pytest.raises(NotFittedError):
        again.predict(x)


@pytest.mark.slow
def test_orders_are_learned_and_averaged_over():
    """Two clusters of one class each, far apart: one cluster is not enough, a third is not
    needed.
    """
    x, y = clusters(40)
    x, y = x[x[:, 0] > -2], y[x[:, 0] > -2]
    found = quick(None, max_order=3, num_live=50, num_sweeps=1.0).fit(x, y)
    assert found.orders_.tolist() == [1, 2, 3]
    assert found.order_posterior_.argmax() == 1
    assert found.order_posterior_[0] < 1e-3
    assert found.score(x, y) == 1.0
    np.testing.assert_allclose(found.order_posterior_.sum(), 1)
    alone = [found._of_order(order, found._standard(x)) for order in (2, 3)]
    share = found.order_posterior_[1:] / found.order_posterior_[1:].sum()
    np.testing.assert_allclose(
        found.predict_proba(x), share[0] * alone[0] + share[1] * alone[1], atol=1e-3
    )
    runs, trees = found._runs, {order: found.posterior_[f"order_{order}"] for order in (1, 2)}
    log_prior = np.array([runs._log_prior(order) for order in trees])
    fewer = orders._assembled(trees, log_prior, runs.prior, "family", "most")
    with pytest.warns(ConvergenceWarning, match="max_order: 2 clusters are the most probable"):
        found.set_params(max_order=2)._taken(fewer)
    found._taken(found._runs.tree())  # no warning: what has been tried has been tried


@pytest.mark.slow
def test_a_part_is_a_stage():
    """Each part is a stage, also for a pickled classifier and outside of x64.

    Rows without a class count as well.
    """
    x, y = clusters(60)
    parts = pickle.loads(pickle.dumps(quick(2, num_live=40).partial_fit(x[:30], y[:30])))
    parts.partial_fit(x[30:], np.where(np.arange(30) < 3, -1, y[30:].astype(object)))
    assert parts.posterior_["order_2"].attrs["num_stages"] == 2
    assert parts.posterior_["order_2"]["observed_data"].sizes["row"] == 60
    assert parts.score(x, y) > 0.6  # two clusters are too few
    with pytest.raises(ValueError, match="the classes of the first call are"):
        parts.partial_fit(x, np.full(60, "new"))
    with pytest.raises(ValueError, match=r"classes: found \['inner'\]"):
        parts.partial_fit(x, y, classes=["inner"])
    with pytest.raises(
        ValueError, match="num_live: found 50, but the first call began with 40; set it back"
    ):
        parts.set_params(num_live=50).partial_fit(x, y)


@pytest.mark.slow
def test_a_later_part_may_have_more_clusters():
    """That order learns from the rows of the last call as well, which are still there."""
    x, y = clusters(160)
    classifier = quick(None, max_order=1).partial_fit(x[:40], y[:40], classes=["inner", "outer"])
    classifier.max_order = 2
    with pytest.warns(ConvergenceWarning, match="2 clusters are the most probable"):
        classifier.partial_fit(x[40:], y[40:])
    assert classifier.orders_.tolist() == [1, 2]
    assert classifier.order_posterior_[1] > 0.99
    assert classifier.posterior_["order_2"]["observed_data"].sizes["row"] == 160
    assert classifier.score(x, y) > 0.6


@pytest.mark.slow
def test_what_later_parts_make_it_forget_or_leave_out_is_told():
    """After rows of one class nothing was likely of the other, and a column had one value."""
    x, y = clusters()
    known = y == "inner"
    wide = lambda x, last: np.column_stack([x, np.full(len(x), last)])
    parts = quick(1, num_live=20).partial_fit(
        wide(x[known], 5.0), y[known], classes=["inner", "outer"]
    )
    with (
        pytest.warns(UserWarning, match=r"columns \[1\] were constant at the first call"),
        pytest.warns(
            ConvergenceWarning, match="outside of the summary of earlier rows, which is forgotten"
        ),
    ):
        parts.partial_fit(wide(x[~known], 6.0), y[~known])
    assert np.isinf(parts.log_evidence_se_)


def test_a_first_part_of_one_row_is_refused():
    with pytest.raises(
        ValueError,
        match=r"X: found 1 rows \(1 sample, or copies of it\), from which no column can be standardised",
    ):
        quick(1).partial_fit([[1.0, 2.0]], ["inner"], classes=["inner", "outer"])


def test_rows_that_are_far_away_have_probabilities(fitted):
    said = fitted.predict_proba([[1e10], [1e200], [-1e300]])
    np.testing.assert_allclose(said.sum(1), 1.0)


@pytest.mark.slow
def test_unlabelled_rows_show_where_clusters_are():
    x, y = clusters(80)
    few = np.full(80, -1, object)
    for at in (-4, 0, 4):
        nearest = np.argsort(abs(x[:, 0] - at))[:2]
        few[nearest] = y[nearest]
    found = quick().fit(x, few)
    assert found.score(x, y) > 0.95


def test_fit_goes_through_the_driver_on_the_model_of_the_zoo(monkeypatch):
    class Seen(Exception):
        pass

    def run(self, seed, x, y):
        raise Seen(
            self.kernel.model.func.__name__,
            self.kernel.model.keywords,
            x.shape,
            y.tolist(),
            self.kernel.num_stages,
        )

    monkeypatch.setattr(Driver, "run", run)
    # a constant column says nothing
    x, y = np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]]), ["a", "b", "c"]
    with pytest.raises(Seen) as seen:
        quick(4, num_stages=2).fit(x, y)
    assert seen.value.args == (
        "staged_learning",
        {"order": 4, "num_classes": 3, "class_concentration": 1 / 3},
        (3, 1),
        [0, 1, 2],
        2,
    )


def test_a_missing_entry_is_refused():
    with pytest.raises(ValueError, match="contains NaN"):
        quick().fit([[np.nan], [1.0]], [0, 1])


@pytest.mark.slow
def test_a_fit_that_has_no_time_says_so():
    with pytest.raises(
        ValueError, match="order 1: its run ended by 'max_time' .* give it more time"
    ):
        quick(None, max_time=0.0).fit(*clusters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0}, "order: found 0, wanted an integer, at least 1, or None"),
        ({"max_order": 2.5}, "max_order: found 2.5"),
        ({"num_stages": True}, "num_stages: found True"),
        ({"num_stages": 100}, "num_stages: found 100 for 60 rows"),
        ({"num_live": 10}, "num_live: found 10"),
        ({"num_sweeps": -1.0}, "num_sweeps: found -1.0"),
        ({"num_samples": 0}, "num_samples: found 0"),
        ({"class_concentration": 0.0}, "class_concentration: found 0.0, wanted a positive"),
    ],
    ids=["order", "most", "stages", "rows", "live", "sweeps", "draws", "classes"],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(*clusters())


def test_a_cluster_that_is_no_density_is_refused():
    with pytest.raises(
        TypeError,
        match="cluster: found 3, wanted a function like those of zoo.staged_learning, or None",
    ):
        quick(cluster=3).fit(*clusters())


def test_no_label_at_all_is_refused():
    with pytest.raises(ValueError, match="every row is unlabelled"):
        quick().fit(load_iris().data, np.full(150, -1))
