"""The classifier of several tasks: it runs the zoo's model in the driver, and tells tasks apart
where they differ.
"""

import numpy as np
import pytest
import sklearn
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

from gallery import MultiTaskIQGMEClassifier
from inference import Driver
from tests.gallery.test_iqgme_classifier import QUICK, SLOW, Called
from zoo.iqgme_tasks import iqgme_tasks

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

RNG = np.random.default_rng(0)
TASK = np.repeat(["a", "b", "c"], 60)
X = RNG.normal(size=(180, 2)) + np.where(TASK == "c", 3.0, 0.0)[:, None]
# the first two tasks are one
Y = np.where((X[:, 1] > 0) & (TASK != "c") | (X[:, 0] > 3) & (TASK == "c"), "yes", "no")
HOLED = np.where(RNG.random(X.shape) < 0.15, np.nan, X)


def test_a_fit_is_the_drivers_run_of_the_zoos_model(monkeypatch):
    seen = {}

    def run(self, rng_key, *args, **kwargs):
        seen.update(driver=self, args=args, kwargs=kwargs)
        raise Called

    monkeypatch.setattr(Driver, "run", run)
    with pytest.raises(Called):
        MultiTaskIQGMEClassifier(
            7, 11, max_iter=9, beta=2, init="task", precision=3, gate_rows=50
        ).fit(HOLED, Y, TASK)
    told = seen["kwargs"]
    assert (seen["driver"].kernel.init_by, told["expert"].keywords["precision"]) == ("task", 3.0)
    assert (told["gate"].keywords["u0"], told["gate"].keywords["nu0"]) == (50.0, 53.0)
    assert seen["driver"].kernel.model is iqgme_tasks
    assert (
        seen["driver"].num_warmup,
        told["num_groups"],
        told["num_experts"],
        told["num_tasks"],
        told["beta"],
    ) == (9, 7, 11, 3, 2.0)
    np.testing.assert_array_equal(told["task"], np.repeat([0, 1, 2], 60))


@pytest.mark.slow
# weights grow as long as lines part the labels
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_tasks_that_are_alike_share_experts():
    """The third task has other rows, and its labels follow another feature."""
    model = MultiTaskIQGMEClassifier(4, 8, random_state=0).fit(HOLED, Y, TASK)
    assert (model.predict(X, TASK) == Y).mean() > 0.9
    likeness = model.similarity()
    assert likeness[0, 1] > 0.8 > 0.2 > max(likeness[0, 2], likeness[1, 2])
    np.testing.assert_allclose(likeness, likeness.T)
    np.testing.assert_allclose(np.diag(likeness), 1)
    np.testing.assert_allclose(model.shares_.sum(1), 1)
    mean, deviation = model.impute(HOLED, TASK, return_std=True)
    is_seen = ~np.isnan(HOLED)
    np.testing.assert_allclose(mean[is_seen], HOLED[is_seen])
    assert (deviation[~is_seen] > 0).all()
    nothing = np.full((2, 2), np.nan)
    share = model.predict_proba(nothing, ["a", "c"])[:, 1]
    assert abs(share[0] - (Y[TASK == "a"] == "yes").mean()) < 0.15
    with pytest.raises(
        ValueError,
        match=r"task: row 1 is of task 'd'; the tasks that were fitted are \['a', 'b', 'c'\]",
    ):
        model.predict(nothing, ["a", "d"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_task_without_one_of_the_classes():
    """It spoils no other task, whose rows lie where its own do; a task without labels at all is
    like those whose rows it shares.
    """
    of_a, of_b = TASK == "a", TASK == "b"
    model = MultiTaskIQGMEClassifier(3, 5, max_iter=40, random_state=0).fit(
        HOLED, np.where(of_b, "no", Y), TASK
    )
    assert np.isfinite(model.predict_log_proba(X, TASK)).all()
    assert (model.predict(X[of_a], TASK[of_a]) == Y[of_a]).mean() > 0.8
    assert (model.predict(X[of_b], TASK[of_b]) == "no").all()
    codes = np.where(of_b, -1, (Y == "yes").astype(int))
    unlabelled = MultiTaskIQGMEClassifier(3, 5, max_iter=40, random_state=0).fit(HOLED, codes, TASK)
    assert (unlabelled.predict(X[of_b], TASK[of_b]) == (Y[of_b] == "yes")).mean() > 0.8


OPPOSITE = np.repeat([1.0, -1.0], 15)  # of two tasks: what is yes in one is no in the other
MANY = RNG.normal(size=(330, 30))
MANY_Y = MANY[:, :3].sum(1) * np.concatenate([OPPOSITE, np.repeat([1.0, -1.0], 150)]) > 0
OF_MANY = np.concatenate([OPPOSITE, np.repeat([1.0, -1.0], 150)]).astype(int)


def area_of_opposite_tasks(**options):
    model = MultiTaskIQGMEClassifier(2, 4, random_state=0, **options).fit(
        MANY[:30], MANY_Y[:30], OF_MANY[:30]
    )
    score = model.predict_proba(MANY[30:], OF_MANY[30:])[:, 1]
    return np.mean(
        [roc_auc_score(MANY_Y[30:][OF_MANY[30:] == j], score[OF_MANY[30:] == j]) for j in (1, -1)]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_tasks_that_oppose_each_other_in_many_columns():
    """Fifteen rows each in thirty columns: where experts are in charge is chance, but for their
    task.
    """
    alone = np.mean(
        [
            roc_auc_score(
                MANY_Y[new],
                LogisticRegression().fit(MANY[old], MANY_Y[old]).decision_function(MANY[new]),
            )
            for old, new in ((slice(0, 15), slice(30, 180)), (slice(15, 30), slice(180, 330)))
        ]
    )
    found = area_of_opposite_tasks(init="task", sparse=True, precision=3.0, gate_rows=1000.0)
    assert found > alone - 0.02
    assert found > area_of_opposite_tasks() + 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_what_fits_several_tasks_asks_for_the_task():
    """And scikit-learn's tools hand it on, to rows of two tasks that call opposite things by one
    name.
    """
    task = np.tile([0, 1], 60)
    x = np.random.default_rng(0).normal(size=(120, 2))
    y = ((x[:, 0] > 0) ^ (task == 1)).astype(int)
    settings = {"max_iter": 60, "random_state": 0, "init": "task", "sparse": True, "precision": 1.0}
    model = MultiTaskIQGMEClassifier(2, 4, **settings).fit(x, y, task)
    assert model.score(x, y, task=task) > 0.9
    assert model.score(x, y, model.predict(x, task) == y, task) == 1
    for method in (
        model.predict,
        model.predict_proba,
        model.impute,
        lambda rows: model.score(rows, y, task),
    ):
        with pytest.raises(
            ValueError,
            match=r"task: found None, wanted the task of each row; the tasks that were fitted are "
            r"\[0, 1\]",
        ):
            method(x)
    with sklearn.config_context(enable_metadata_routing=True):
        asking = (
            MultiTaskIQGMEClassifier(2, 4, **settings)
            .set_fit_request(task=True)
            .set_score_request(task=True)
        )
        assert min(cross_val_score(asking, x, y, cv=2, params={"task": task})) > 0.9
    only = MultiTaskIQGMEClassifier(2, 4, **settings).fit(x[::2], y[::2], task[::2] + 5)
    np.testing.assert_array_equal(only.predict(x), only.predict(x, np.full(120, 5)))


def cases():
    for estimator, check in estimator_checks_generator(MultiTaskIQGMEClassifier(3, 4, max_iter=20)):
        name, settings = (
            check.func.__name__,
            "".join(f"-{value}" for value in check.keywords.values()),
        )
        if name in QUICK | SLOW:
            yield pytest.param(
                estimator,
                check,
                id=name + settings,
                marks=[] if name in QUICK else [pytest.mark.slow],
            )


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        MultiTaskIQGMEClassifier().fit(X, Y, TASK[:5])
    with pytest.raises(ValueError, match="shrinkage: found 2.0"):
        MultiTaskIQGMEClassifier(shrinkage=2.0).fit(X, Y, TASK)
    with pytest.raises(ValueError, match="gate_rows: found 0, wanted a number above 0, or None"):
        MultiTaskIQGMEClassifier(gate_rows=0).fit(X, Y, TASK)
    with pytest.raises(
        ValueError, match="beta: found -1, wanted a number above 0, or a distribution"
    ):
        MultiTaskIQGMEClassifier(beta=-1).fit(X, Y, TASK)
    with pytest.raises(ValueError, match="num_shared: found 1, wanted an integer, at least 2"):
        MultiTaskIQGMEClassifier(num_shared=1).fit(X, Y, TASK)
    with pytest.raises(ValueError, match="init: found 'tasks', wanted one of"):
        MultiTaskIQGMEClassifier(init="tasks").fit(X, Y, TASK)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ([1.0, np.nan], "found nan, wanted the name or the number"),
        (["a", None], "found None, wanted"),
        (["a", 1], "found texts and numbers"),
    ],
    ids=["no number", "nothing", "both kinds"],
)
def test_a_row_without_a_clear_task_is_refused(task, words):
    told = np.array(task, dtype=float if task[0] == 1 else object)[np.arange(len(Y)) % 2]
    with pytest.raises(ValueError, match=f"task: {words}"):
        MultiTaskIQGMEClassifier(3, 5).fit(HOLED, Y, told)
