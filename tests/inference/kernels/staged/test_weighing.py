"""What stages have found, weighed by all rows, against exact evidences: where later rows lead
away from the first, and where not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from diagnostics import report
from inference import Driver, MergedStages, Staged
from inference.kernels.staged import kernel as staged
from inference.kernels.staged import weighing as _weighing
from inference.kernels.staged.weighing import Account, Evidence, Weighed, Weighing, loss_of
from tests.inference.kernels.staged.test_peaks import TWO, line_of, pair, pair_evidence
from tests.inference.kernels.staged.test_summary_losses import rows, square, square_evidence
from tests.inference.stages import begun, forget

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def scaled(x):
    """Has no place for outliers."""
    place = numpyro.sample("place", dist.Normal(0.0, 3.0))
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 2.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(place, spread), obs=x)


def scaled_evidence(x):
    """By a sum over a grid."""
    place, log_spread = np.linspace(-3, 3, 1201)[:, None], np.linspace(-1.5, 5.5, 1401)
    square = np.sum(x**2) - 2 * place * x.sum() + len(x) * place**2
    log_likelihood = -len(x) * (log_spread + 0.5 * np.log(2 * np.pi)) - 0.5 * square / np.exp(
        2 * log_spread
    )
    log_prior = stats.norm.logpdf(place, 0, 3) + stats.norm.logpdf(log_spread, 0, 2)
    return np.logaddexp.reduce((log_likelihood + log_prior).ravel()) + np.log(6 / 1200 * 7 / 1400)


def heavy(count, factor, num_rows=200):
    x = np.random.default_rng(0).normal(size=num_rows)
    x[:count] *= factor
    return x


def error_of(x, seed, **settings):
    kernel = Staged(scaled, **({"num_stages": 10, "num_live": 40} | settings))
    attrs = Driver(kernel, num_samples=10, progress_bar=False).run(seed, x).attrs
    return attrs["log_evidence"] - scaled_evidence(x), attrs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "key"), [(heavy(1, 300.0), 2), (heavy(4, 15.0), 0)], ids=["one", "four"]
)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_where_rows_lead_away_from_the_first_a_run_begins_again(x, key, bug, monkeypatch):
    """Outliers make the spread many deviations of the first rows' posterior larger, or less.

    The planted bug: it never begins again.
    """
    if bug:
        monkeypatch.setattr(_weighing, "MOST_LEFT", np.inf)
    error, attrs = error_of(x, key)
    assert (abs(error) < min(3.5 * attrs["log_evidence_se"], 0.5)) != bug


@pytest.mark.slow
def test_where_stages_are_to_come_what_was_found_is_fitted_again(monkeypatch):
    """For fewer likelihoods than where a run begins again."""
    anew, begin_again = [], Weighing.begin_again
    monkeypatch.setattr(
        Weighing, "begin_again", lambda *given: anew.append(given) or begin_again(*given)
    )
    x = heavy(4, 15.0, 400)
    error, attrs = error_of(x, 7, num_stages=20)
    assert abs(error) < min(3.5 * attrs["log_evidence_se"], 0.5)
    assert not anew
    monkeypatch.setattr(
        Weighing, "refitted", lambda self, key, state, found, weighed, data: (found, weighed, 0)
    )
    error, longer = error_of(x, 7, num_stages=20)
    assert abs(error) < min(3.5 * longer["log_evidence_se"], 0.5)
    assert anew
    assert attrs["num_row_evaluations"] < longer["num_row_evaluations"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_where_it_was_fitted_again_the_sum_goes_on_from_what_weights_say(bug, monkeypatch):
    """The planted bug: from what nested sampling said of stages for which something else stands
    now.
    """
    if bug:
        monkeypatch.setattr(Account, "refitted", lambda self, by_all: self)
    error, attrs = error_of(heavy(4, 15.0, 400), 7, num_stages=20)
    off = attrs["nested_log_evidence"] - attrs["log_evidence"] + error
    assert (abs(off) < 3.5 * attrs["nested_log_evidence_se"] < np.inf) != bug


def test_what_was_fitted_again_has_no_error_of_live_points():
    """That of weights is among what summaries lose; information, which live points are judged
    by, begins anew.
    """
    one, rows = jnp.ones(()), jnp.array(100.0)
    lost = loss_of(jnp.array([0.0, 0.5, -0.3, 0.2]), jnp.array(50))
    own = Evidence(7 * one, 2 * one, lost)
    found = Account(own, own, 9 * one, one).refitted(Weighed(-3 * one, 0.5 * one, 0.04 * one, lost))
    assert float(found.nested.log_evidence) == -2.5
    assert (float(found.nested.variance), float(found.information)) == (0, 0)
    assert found.corrected is own
    # and what logarithms lack
    np.testing.assert_allclose(
        found.nested.error(rows, 0 * one) ** 2, 0.04 + lost.error(rows) ** 2, rtol=0.02
    )


@pytest.mark.slow
def test_where_the_model_is_right_it_is_not_begun_again(monkeypatch):
    anew = []
    monkeypatch.setattr(Weighing, "begin_again", lambda self, found, weighed: anew.append(found))
    error, attrs = error_of(heavy(0, 1.0), 0)
    assert abs(error) < 3.5 * attrs["log_evidence_se"]
    assert attrs["nats_left"] < 0.5
    assert not anew


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"num_walkers": 0}, {"summary": "code"}], ids=["not explored", "code"]
)
def test_what_is_not_explored_begins_again_from_what_was_found(settings, monkeypatch):
    """For fewer likelihoods than from the prior, where it goes if what was found is not near,
    and with a smaller error.
    """
    monkeypatch.setattr(Weighing, "is_fine", lambda self, weighed: False)
    x = heavy(0, 1.0)
    error, attrs = error_of(x, 1, num_stages=4, **settings)
    monkeypatch.setattr(_weighing, "NEAR", -np.inf)
    _, from_prior = error_of(x, 1, num_stages=4, **settings)
    assert abs(error) < 3.5 * attrs["log_evidence_se"]
    assert attrs["log_evidence_se"] < 0.5 * from_prior["log_evidence_se"]
    assert attrs["num_row_evaluations"] < from_prior["num_row_evaluations"]


@pytest.mark.slow
def test_nothing_is_weighed_where_summaries_may_lose_whatever_they_do():
    error, attrs = error_of(heavy(1, 300.0), 0, most_lost=np.inf)
    assert np.isnan(attrs["nats_left"])
    assert abs(error) > 10


def forgets_the_first(self, state, data, right=Weighing.so_far):
    """The planted bug: rows of the first stage are in no `later`."""
    return right(self, state, data)[int(data.num_rows) - state.later.size :]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_all_rows_are_weighed(bug, monkeypatch):
    x = heavy(0, 1.0)
    if bug:
        monkeypatch.setattr(Weighing, "so_far", forgets_the_first)
        monkeypatch.setattr(_weighing, "MOST_LEFT", np.inf)
    error, attrs = error_of(x, 1, num_stages=4, most_lost=0.3)
    assert (abs(error) < 3.5 * attrs["log_evidence_se"]) != bug


@pytest.mark.slow
def test_an_update_goes_on_from_what_was_weighed():
    x = heavy(0, 1.0)
    driver = Driver(Staged(scaled, num_stages=5, num_live=40), num_samples=10, progress_bar=False)
    before = driver.run(0, x[:160]).attrs
    driver.update(x[160:])
    attrs = driver.tree().attrs
    assert abs(before["log_evidence"] - scaled_evidence(x[:160])) < 3.5 * before["log_evidence_se"]
    assert abs(attrs["log_evidence"] - scaled_evidence(x)) < 3.5 * attrs["log_evidence_se"]
    assert np.isnan(attrs["nats_left"])
    assert attrs["num_row_evaluations"] > before["num_row_evaluations"]


def level(x):
    """A Normal mean: the posterior is known exactly, and is one component."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def level_evidence(x):
    return stats.multivariate_normal(np.zeros(len(x)), np.eye(len(x)) + 100).logpdf(x)


def updated(x, again=()):
    """After an update by the second half, and what it is off by."""
    driver = Driver(
        Staged(level, num_stages=1, num_live=40, num_walkers=0), num_samples=100, progress_bar=False
    )
    driver.run(0, x[:20])
    driver.update(x[20:])
    for more in again:
        driver.update(more)
    tree = driver.tree()
    return tree, tree.attrs["log_evidence"] - level_evidence(np.concatenate([x, *again]))


@pytest.mark.parametrize(
    "bug", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["right", "planted"]
)
def test_an_update_that_makes_a_run_forget_claims_nothing(bug, monkeypatch):
    """Its rows lead to where the summary says nothing, and the prior behind that is all that is
    left. The planted bug: nobody looks.
    """
    if bug:
        monkeypatch.setattr(staged, "forgotten", lambda *found: 0.0)
    tree, error = updated(np.random.default_rng(0).normal(size=40) + np.repeat([0.0, 6.0], 20))
    assert error > 100
    assert np.isinf(tree.attrs["log_evidence_se"]) != bug
    assert (report(tree)["summaries"].ok is False) != bug


@pytest.mark.slow
def test_what_a_run_has_forgotten_no_later_stage_brings_back():
    rng = np.random.default_rng(0)
    tree, _ = updated(
        rng.normal(size=40) + np.repeat([0.0, 6.0], 20), again=[6 + rng.normal(size=20)]
    )
    assert np.isinf(tree.attrs["log_evidence_se"])


@pytest.mark.slow
def test_an_update_by_rows_like_the_first_forgets_nothing():
    tree, error = updated(np.random.default_rng(0).normal(size=40))
    assert abs(error) < 3.5 * tree.attrs["log_evidence_se"] < 1.5


def in_one_place(self, rng_key, state, found, data, right=Weighing.by_all):
    """The planted bug: the mixture is weighed without the copies by label switching."""
    return right(self, rng_key, state, _weighing.LabelledMixture(found.mixture), data)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_members_without_names_are_weighed_in_all_places(bug, monkeypatch):
    if bug:
        monkeypatch.setattr(Weighing, "by_all", in_one_place)
    kernel = Staged(pair, num_stages=3, num_live=100)
    attrs = Driver(kernel, num_samples=10, progress_bar=False).run(0, np.tile(TWO, 3)).attrs
    assert (
        abs(attrs["log_evidence"] - pair_evidence(np.tile(TWO, 3))) < 3.5 * attrs["log_evidence_se"]
    ) != bug


@pytest.mark.parametrize(
    "settings", [{"num_walkers": 0}, {"summary": "code"}], ids=["not explored", "code"]
)
def test_members_have_names_where_a_first_stage_goes_from_the_prior(settings):
    state, _, _ = begun(Staged(pair, num_stages=1, num_live=40, **settings), TWO)
    assert len(state.nest.reference.location)
    assert not len(state.proposal.reference.location)


@pytest.mark.slow
def test_what_workers_have_weighed_is_corrected_by_what_their_new_clumps_lose():
    """The new mixture has one component for two modes, of which the parts had eight."""
    x = rows(6)
    parts = [
        Driver(
            Staged(square, num_stages=2, num_live=100, most_lost=0.3),
            num_samples=10,
            progress_bar=False,
        )
        for _ in range(2)
    ]
    for number, part in enumerate(parts):
        attrs = part.run(number, x[40 * number :][:40]).attrs
        assert not np.isnan(attrs["nats_left"])
    attrs = (
        Driver(
            MergedStages(parts, num_clumps=1, most_lost=np.inf), num_samples=10, progress_bar=False
        )
        .run(2, x)
        .attrs
    )
    assert attrs["summary_loss"] > 0.02
    assert abs(attrs["log_evidence"] - square_evidence(x)) < 3 * attrs["log_evidence_se"]


@pytest.fixture(scope="module")
def whole():
    """A run of three exchangeable clusters in three stages, and at which step each begins."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        model, x = line_of(3)
        run = lambda **given: Driver(
            Staged(model, num_stages=3, num_live=40, num_walkers=20), progress_bar=False, **given
        ).run(0, x)
        tree = run(num_samples=50)
    stage = tree["sample_stats"]["stage"].values[0]
    return run, tree, [int((stage < each).sum()) for each in range(int(stage.max()) + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_run_of_members_without_names_is_resumed_in_a_later_stage(
    whole, bug, tmp_path, monkeypatch
):
    """Bit for bit. The planted bug: a checkpoint forgets what has been weighed."""
    run, wanted, begins = whole
    steps = begins[-1] + 3
    run(num_samples=50, num_warmup=steps, checkpoint=tmp_path / "run")
    if bug:
        forget(monkeypatch, "num_weighed", lambda count: count * 0 + 10**6)
    found = run(num_samples=50, checkpoint=tmp_path / "run")
    assert found.attrs["steps_run"] == wanted.attrs["steps"] - steps
    same = lambda name: found.attrs[name] == wanted.attrs[name]
    assert all(map(same, ("log_evidence", "log_evidence_se", "num_row_evaluations"))) != bug
