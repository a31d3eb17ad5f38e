"""What summaries between stages cost the log-evidence, as it is claimed: against Normals, and
against what it was.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from diagnostics import report
from inference import Driver, MergedStages, Program, Staged
from inference.kernels.staged import kernel as staged
from inference.kernels.staged import peaks as _peaks
from inference.kernels.staged import search as _search
from inference.kernels.staged import weighing as _weighing
from inference.kernels.staged.merge import Part
from inference.kernels.staged.search import LabelledMixture
from inference.kernels.staged.weighing import Loss, loss_of
from inference.maths.normal_mixture import NormalSummary
from tests.inference.kernels.staged.test_kernel import over
from tests.inference.stages import begun

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

P, Q = stats.norm(0.3, 1.0), stats.norm(0.0, 1.2)
ROWS = jnp.array(10)


def drawn(planted=False):
    z = Q.rvs(200_000, random_state=0)
    weight = P.logpdf(z) - Q.logpdf(z)
    return loss_of(jnp.asarray(-7.0 + (-weight if planted else weight)), ROWS)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_loss_is_the_divergence_and_its_spread(bug):
    """By quadrature. The planted bug: the divergence of the posterior from the summary."""
    z = np.linspace(-12, 12, 200_001)
    ratio, density = P.logpdf(z) - Q.logpdf(z), P.pdf(z) * (z[1] - z[0])
    nats = density @ ratio
    exact = [nats, density @ (ratio - nats) ** 2]
    found = drawn(bug)
    assert np.allclose([found.nats[0], found.variance[0]], exact, rtol=0.02) != bug


def one_loss(off, num_rows):
    """The loss by a Normal whose mean is off by so many deviations."""
    times, root = np.array([1.0, num_rows]), np.sqrt(num_rows)
    return Loss(
        *map(jnp.array, (0.5 * off**2 * times, off**2 * times, [off / root, off * root], 1.0))
    )


def test_a_mean_that_is_off_is_a_loss_like_any_other():
    z = stats.norm.rvs(size=400_000, random_state=2) + 0.4
    found, wanted = (
        loss_of(jnp.asarray(stats.norm.logpdf(z) - stats.norm.logpdf(z, 0.4)), ROWS),
        one_loss(0.4, 10),
    )
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0.02), found, wanted
    )


@pytest.mark.parametrize("seen", [0.1, 0.5, 0.9])
def test_rows_to_come_average_over_what_a_summary_gets_wrong(seen):
    """A mean that is off by .4, of what has seen a part of all rows: exact, for the ratio is a
    straight line.
    """
    off = 0.4
    found = one_loss(off, 100 * seen).error(jnp.array(100.0))
    # of the posterior of all rows
    centre = stats.norm(0, np.sqrt(1 - seen)).rvs(100_000, random_state=1)
    errors = off * centre + 0.5 * off**2 * seen - 0.5 * off**2
    np.testing.assert_allclose(found, np.sqrt(np.mean(errors**2)), rtol=0.02)


# rows, and deviations by which a mean is off
SEEN, OFF = np.array([10, 20, 60, 90]), np.array([0.4, 0.3, 0.5, 0.2])
# replicates: rows are Normals of deviation 1 about z, and of z nothing is known before
SIZE = 40_000


def errors_of_stages(num_rows=100):
    """By which the log-evidence is off, where all means lean one way, and each stage starts from
    the one before.
    """
    rows = np.random.default_rng(3).normal(size=(SIZE, num_rows))
    # the sum of what rows say, and of what was added to that
    total, seen, last = np.zeros(SIZE), 0, np.zeros(SIZE)
    for size, off in zip(SEEN, OFF, strict=True):
        last = last + rows[:, seen:size].sum(1)
        total -= off * np.sqrt(size) * last / size + 0.5 * off**2
        last, seen = last + off * np.sqrt(size), size
    slope = (OFF * np.sqrt(SEEN)).sum()
    return total + slope * rows.mean(1) + 0.5 * slope**2 / num_rows


def errors_of_workers():
    """The same of workers, whose means lean as it comes."""
    rng, num_rows = np.random.default_rng(3), SEEN.sum()
    means = rng.normal(size=(SIZE, len(SEEN))) / np.sqrt(SEEN)
    slopes = OFF * np.sqrt(SEEN) * rng.choice([-1, 1], (SIZE, len(SEEN)))
    apart = means @ SEEN / num_rows - means.T
    return (slopes.T * apart).sum(0) + 0.5 * slopes.sum(1) ** 2 / num_rows - 0.5 * (OFF**2).sum()


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize(
    ("errors", "num_rows"),
    [(errors_of_stages, 100), (errors_of_workers, 180)],
    ids=["stages", "workers"],
)
def test_errors_of_summaries_go_together_as_their_rows_do(errors, num_rows, bug):
    """The ratios are straight lines. The planted bug: workers as stages, and stages as workers."""
    each = [one_loss(off, size) for off, size in zip(OFF, SEEN, strict=True)]
    added = reduce(lambda one, other: jax.tree.map(jnp.add, one, other), each)
    found = added if (errors is errors_of_workers) != bug else reduce(Loss.then, each)
    assert (
        np.isclose(found.error(jnp.array(num_rows)), np.sqrt(np.mean(errors() ** 2)), rtol=0.03)
        != bug
    )


@pytest.mark.parametrize("nothing", [-jnp.inf, jnp.nan])
def test_draws_that_are_nowhere_say_nothing(nothing):
    assert np.isnan(loss_of(jnp.full(20, nothing), ROWS).nats).all()
    some = jnp.where(jnp.arange(40) < 20, jnp.array(nothing), jnp.log(2.0))
    np.testing.assert_allclose(loss_of(some, ROWS).nats, [np.log(2), 10 * np.log(2)])


def square(x):
    """Its posterior has two modes."""
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(z**2 + 0.1 * z, 3.0), obs=x)


def rows(seed, count=80, z=None):
    """With a large `z` the modes are far apart."""
    r = np.random.default_rng(seed)
    z = r.normal() if z is None else z
    return z**2 + 0.1 * z + 3 * r.normal(size=count)


def square_evidence(x):
    z = np.linspace(-6, 6, 20_001)
    return np.logaddexp.reduce(
        stats.norm.logpdf(z) + stats.norm.logpdf(x[:, None], z**2 + 0.1 * z, 3.0).sum(0)
    ) + np.log(z[1] - z[0])


def in_stages(x, num_clumps=1):
    kernel = Staged(square, num_stages=4, num_live=100, num_clumps=num_clumps, most_lost=np.inf)
    return Driver(kernel, num_samples=100, progress_bar=False).run(0, x)


@pytest.mark.slow
def test_one_clump_for_two_modes_costs_what_is_claimed():
    """The planted bug: a claim of nested sampling alone."""
    error, claimed, lost = [], [], []
    for seed in range(5):
        x = rows(seed, z=1.2)
        attrs = in_stages(x).attrs
        error.append(attrs["log_evidence"] - square_evidence(x))
        claimed.append(attrs["log_evidence_se"])
        lost.append(attrs["summary_error"])
        assert attrs["nested_log_evidence_se"] == attrs["log_evidence_se"]  # nothing is weighed
        assert attrs["nested_summary_error"] == attrs["summary_error"]
    error, claimed, lost = np.array([error, claimed, lost])
    rms = lambda claimed: np.sqrt(np.mean((error / claimed) ** 2))
    assert rms(claimed) < 1.6
    assert rms(np.sqrt(claimed**2 - lost**2)) > 2


@pytest.mark.slow
def test_the_report_says_where_summaries_are_poor():
    poor, fine = (report(in_stages(rows(8, z=2.0), number)) for number in (1, 8))
    assert poor["summaries"].ok is False
    assert fine["summaries"].ok is True
    for page in (poor, fine):
        # of all stages, against the error of nested sampling alone
        assert page["information"].ok, page.text


@pytest.mark.slow
def test_what_workers_lose_is_claimed_of_what_they_have_together():
    x = rows(6)
    parts = [
        Driver(
            Staged(square, num_stages=1, num_live=100, num_clumps=1),
            num_samples=100,
            progress_bar=False,
        )
        for _ in range(2)
    ]
    for seed, part in enumerate(parts):
        part.run(seed, x[40 * seed :][:40])
    attrs = (
        Driver(MergedStages(parts), num_samples=100, progress_bar=False).run(random.key(2), x).attrs
    )
    assert attrs["summary_loss"] > 0.02
    assert (
        abs(attrs["nested_log_evidence"] - square_evidence(x)) < 3 * attrs["nested_log_evidence_se"]
    )


def rate(y):
    """With few rows its posterior is far from Normal."""
    rate = numpyro.sample("rate", dist.HalfCauchy(1.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


TIMES = np.random.default_rng(3).exponential(0.5, size=64)


def rate_evidence():
    log_rate = np.linspace(-12, 8, 20_001)
    joint = (
        stats.halfcauchy.logpdf(np.exp(log_rate))
        + log_rate
        + stats.expon.logpdf(TIMES[:, None], scale=np.exp(-log_rate)).sum(0)
    )
    return np.logaddexp.reduce(joint) + np.log(log_rate[1] - log_rate[0])


def rated(**settings):
    kernel = Staged(
        rate,
        **(
            {
                "num_stages": 8,
                "num_live": 100,
                "num_clumps": 1,
                "num_walkers": 0,
                "most_lost": 0.001,
            }
            | settings
        ),
    )
    seen, search = [], kernel._started
    kernel._started = lambda state, more, *given: (
        seen.append(np.concatenate([state.rows, more])) or search(state, more, *given)
    )
    return Driver(kernel, num_samples=100, progress_bar=False).run(0, TIMES), seen


right_next_stage = Staged._next_stage


def from_what_was_found(self, state, reading, data):
    """The planted bug: a stage starts again from a mixture that has used its rows already."""
    found, account = self._summarised(state, reading, data)
    if not (state.num_left > 0 and self._is_too_much(account.nested.lost)):
        return right_next_stage(self, state, reading, data)
    again = state._replace(mixture=found, before=account)
    more = staged._taking_more(again, state.before.then(account).num_evaluations)
    return self._started(*more, reading, data, staged.Begin(LabelledMixture(found)))


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_stage_begins_again_with_more_rows_where_a_summary_would_cost_too_much(bug, monkeypatch):
    if bug:
        monkeypatch.setattr(Staged, "_next_stage", from_what_was_found)
    # else the mixture would be fitted again to all rows
    monkeypatch.setattr(_weighing, "MOST_LEFT", np.inf)
    tree, seen = rated()
    assert (
        abs(tree.attrs["nested_log_evidence"] - rate_evidence())
        < 3 * tree.attrs["nested_log_evidence_se"]
    ) != bug
    assert set(np.concatenate(seen)) == set(range(64))
    assert tree.attrs["num_stages"] == len(seen)
    if not bug:
        assert [len(rows) for rows in seen[:3]] == [8, 16, 32]
        assert set(seen[0]) < set(seen[1]) < set(seen[2])


@pytest.mark.slow
def test_rows_that_are_too_few_for_what_was_found_are_not_gone_over_before_there_are_more(
    monkeypatch,
):
    """Walkers climb again from the peaks that they have come to before, here from one, and a few
    from anywhere.
    """
    walkers, peaks = [], _search.find_peaks
    climb = lambda *given, **least: walkers.append(peaks(*given, **least)) or walkers[-1]
    monkeypatch.setattr(_search, "find_peaks", climb)
    tree, seen = rated(num_walkers=None)
    assert [len(rows) for rows in seen[:3]] == [8, 16, 32]
    first, *more = [len(z) for z, _, _ in walkers]
    assert first == _peaks.LEAST
    assert set(more) == {1 + _search.FRESH}
    assert tree.attrs["num_stages"] < len(seen)
    assert abs(tree.attrs["log_evidence"] - rate_evidence()) < 3 * tree.attrs["log_evidence_se"]
    # what was looked for is after_step
    assert tree.attrs["num_row_evaluations"] > sum(20 * len(rows) for rows in seen)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_nor_are_rows_of_which_what_was_found_is_not_believed(bug, monkeypatch):
    """A summary would say no more than that.

    The planted bug: the search is taken for one that has failed.
    """
    monkeypatch.setattr(_search, "LITTLE", -1.0)
    monkeypatch.setattr(_search, "PART", 0.0)
    if bug:
        monkeypatch.setattr(staged, "FAR", 0.0)
    tree, seen = rated(num_walkers=None)
    assert [len(rows) for rows in seen[:3]] == [8, 16, 32]
    assert (tree.attrs["num_stages"] == 1) != bug
    assert abs(tree.attrs["log_evidence"] - rate_evidence()) < 3 * tree.attrs["log_evidence_se"]


@pytest.mark.slow
def test_it_does_not_where_it_is_told_so():
    tree, seen = rated(most_lost=np.inf, num_stages=4)
    assert [len(rows) for rows in seen] == [16, 16, 16, 16]
    assert tree.attrs["summary_loss"] > 0.001


def test_a_wrong_limit_is_refused():
    for most_lost in (0.0, -1.0, np.nan, "little", None):
        with pytest.raises(ValueError, match=r"most_lost: found .*, wanted a number above 0"):
            Staged(rate, most_lost=most_lost)


def level(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


LEVELS = np.random.default_rng(0).normal(1.0, 1.0, size=20)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_background_is_no_loss(bug, monkeypatch):
    """After a posterior far narrower than the prior a next stage has what the background leaves: half,
    in each of nine. The planted bug: as if it were all.
    """
    if bug:
        monkeypatch.setattr(_weighing, "weighted_mean", lambda log_weight, each: jnp.zeros(()))
    kernel = Staged(
        level, num_stages=10, num_live=100, background=0.5, num_walkers=0, most_lost=np.inf
    )
    attrs = Driver(kernel, num_samples=10, progress_bar=False).run(0, LEVELS).attrs
    exact = stats.multivariate_normal(np.zeros(20), np.eye(20) + 100).logpdf(LEVELS)
    assert (abs(attrs["log_evidence"] - exact) < 3.5 * attrs["log_evidence_se"]) != bug


@pytest.mark.slow
def test_slopes_reach_the_summaries_of_workers(monkeypatch):
    parts, seen = [], []
    for seed in range(2):
        kernel = Staged(level, num_stages=1, num_live=40, num_walkers=0)
        state, *read = begun(kernel, LEVELS[10 * seed :][:10], seed=seed)
        parts.append(Part(kernel, over(state), *read))
    merged = MergedStages(parts)
    fitted = NormalSummary.fitted
    monkeypatch.setattr(
        NormalSummary,
        "fitted",
        lambda self, key, told, *given: seen.append(told.score) or fitted(self, key, told, *given),
    )
    begun(merged, LEVELS, seed=2)
    assert [score is not None for score in seen] == [True, True]


def test_rows_may_be_arrays_of_jax():
    """A model may need them so."""

    def uniform(y):
        top = numpyro.sample("top", dist.Pareto(1.0, 1.5))
        with numpyro.plate("row", len(y)):
            numpyro.sample("y", dist.Uniform(0.0, top), obs=y)

    kernel = Staged(uniform, num_stages=2, num_live=40, num_walkers=0)
    state, reading, data = begun(kernel, jnp.asarray(TIMES))
    assert isinstance(reading.rows.cut(data, state.rows)["y"], jax.Array)


def test_an_update_without_rows_is_refused():
    reading, _ = Staged(level, num_stages=1, num_live=40, num_walkers=0).read(
        Program(level, LEVELS)
    )
    with pytest.raises(ValueError, match="update: argument 'y' has no rows; wanted one or more"):
        reading.more(Program(level, LEVELS[:0]))
