"""Nested sampling with its importance sampling against exact answers; bugs that its tests must
see; what it refuses.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from diagnostics import report
from inference import Driver, ImportanceFinish, NestedSampler, Program, Staged
from inference.kernels.nested import importance_finish
from inference.maths.normal_mixture import Defensive, NormalMixture, NormalSummary
from inference.run.session import figures
from tests.inference.kernels.staged.test_peaks import TWO, pair, pair_evidence
from tests.inference.nests import X, Y, line, line_evidence, two_modes
from tests.inference.stages import forget

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

COVARIANCE = np.linalg.inv(np.diag([1.0, 0.25]) + X.T @ X / 0.25)
MEAN = COVARIANCE @ X.T @ Y / 0.25


def finish(model=line, num_live=60, **settings):
    return ImportanceFinish(
        NestedSampler(model, num_live=num_live), **({"num_draws": 4000, "num_clumps": 2} | settings)
    )


def run(kernel, *args, seed=0, **settings):
    return Driver(kernel, **({"num_samples": 500, "progress_bar": False} | settings)).run(
        seed, *args
    )


def weighed(monkeypatch, kernel, *args):
    """The state and the results of a run whose sampler ended before its first step."""
    reading, data = kernel.read(Program(kernel.model, *args))
    monkeypatch.setattr(NestedSampler, "finished", lambda self, nest: jnp.ones((), bool))
    state = kernel.init(random.key(0), reading, data)
    asked = lambda: (bool(kernel.needs_host(state)), bool(kernel.finished(state)))
    assert asked() == (True, False)
    (state,) = kernel.on_host([state], reading, data)
    assert asked() == (False, True)
    return state, kernel.results(state, reading, data)


def wrong(monkeypatch, bug):
    """Another density than that of what was drawn from."""
    others = {
        "no density": lambda self, clumps, z, log_prior: np.zeros(len(z)),
        "the prior's": lambda self, clumps, z, log_prior: log_prior,
        "no background": lambda self, clumps, z, log_prior: self.summary.log_densities(clumps, z),
    }
    if bug != "right":
        monkeypatch.setattr(Defensive, "log_densities", others[bug])


def is_exact(particles, attrs):
    """Evidence, mean and covariance of the linear model, each within four of its own errors."""
    error = attrs["log_evidence_se"]
    share = np.exp(np.asarray(particles["log_weight"] - attrs["log_evidence"]))
    away = np.asarray(particles["weight"]) - MEAN
    second = away[:, :, None] * away[:, None] - COVARIANCE
    off = [
        np.abs(share @ each) / np.sqrt(share**2 @ each**2) for each in (away, second.reshape(-1, 4))
    ]
    return bool(
        abs(attrs["log_evidence"] - line_evidence()) < 4 * error and (np.concatenate(off) < 4).all()
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bug", ["right", "no density", "the prior's", "no background"])
def test_evidence_and_posterior_are_exact_whatever_the_clumps(bug, monkeypatch):
    """Here a single one, beside the posterior and too wide."""
    wrong(monkeypatch, bug)
    clump = NormalMixture.of(
        jnp.zeros(1), jnp.asarray(MEAN)[None] + 0.1, 1.5 * jnp.linalg.cholesky(COVARIANCE)[None]
    )
    monkeypatch.setattr(NormalSummary, "fitted", lambda *_: clump)
    _, found = weighed(monkeypatch, finish(background=0.3), X, Y)
    assert is_exact(found.groups["particles"], found.attrs) == (bug == "right")
    np.testing.assert_allclose(
        np.exp(found.groups["particles"]["log_weight"]).sum(), np.exp(found.attrs["log_evidence"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 1])
def test_clumps_are_fitted_again_to_the_weighted_draws(rounds, monkeypatch):
    """A first fit to draws from the prior, as the sampler ended before its first step: too wide;
    the others find the posterior.
    """
    _, found = weighed(
        monkeypatch, finish(num_live=120, num_rounds=rounds, enough=0.8, background=0.1), X, Y
    )
    assert found.attrs["num_rounds"] == rounds
    assert (found.attrs["ess"] > 1200) == (rounds == 3)
    assert is_exact(found.groups["particles"], found.attrs)
    # points of the sampler are looked at again
    assert found.attrs["num_evaluations"] == 120 + 4000 * rounds + 120


def test_rounds_end_with_draws_that_are_effective_enough(monkeypatch):
    clump = NormalMixture.of(
        jnp.zeros(1), jnp.asarray(MEAN)[None], jnp.linalg.cholesky(COVARIANCE)[None]
    )
    monkeypatch.setattr(NormalSummary, "fitted", lambda *_: clump)
    _, found = weighed(monkeypatch, finish(), X, Y)
    assert found.attrs["num_rounds"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["right", "no density"])
def test_the_error_is_far_below_that_of_the_nested_sampling(bug, monkeypatch):
    wrong(monkeypatch, bug)
    tree = run(finish(), X, Y)
    attrs, particles = tree.attrs, tree["particles"].dataset.isel(chain=0)
    assert (is_exact(particles, attrs) and attrs["ess"] > 2000) == (bug == "right")
    assert attrs["log_evidence_se"] < attrs["nested_log_evidence_se"] / 10
    drawn = tree["posterior"]["weight"].values[0]
    near = np.abs(drawn.mean(0) - MEAN) < 4 * np.sqrt(np.diag(COVARIANCE) / 500)
    assert near.all()  # of the planted bug as well: the posterior squared has the same mean


@pytest.mark.slow
def test_claimed_errors_are_those_that_are_made():
    attrs = run(finish(num_draws=1000), X, Y, num_chains=16).attrs
    z = (attrs["log_evidence_of_replicates"] - line_evidence()) / attrs[
        "log_evidence_se_of_replicates"
    ]
    assert 0.55 < np.sqrt(np.mean(z**2)) < 1.6
    assert np.abs(z).max() < 3.7


@pytest.mark.slow
def test_the_nested_sampling_is_as_it_is_alone_and_the_report_reads_the_whole():
    """Replicates, each with its importance draws."""
    tree = run(finish(num_live=200), X, Y, num_chains=2)
    alone = run(NestedSampler(line, num_live=200), X, Y, num_chains=2)
    for name, values in alone["sample_stats"].data_vars.items():
        np.testing.assert_array_equal(tree["sample_stats"][name], values)
    for name in ("log_evidence", "log_evidence_se"):
        np.testing.assert_array_equal(
            tree.attrs[f"nested_{name}_of_replicates"], alone.attrs[f"{name}_of_replicates"]
        )
    more = (
        tree.attrs["num_evaluations_of_replicates"] - alone.attrs["num_evaluations_of_replicates"]
    )
    assert more.tolist() == [
        4000 + count
        for count in (alone["particles"]["log_weight"] > -np.inf).sum("particle").values.tolist()
    ]
    page = report(tree)
    assert all(verdict.ok for verdict in page.verdicts), page
    assert page["importance"].figures["effective"] > 2000
    assert (
        json.loads(tree.attrs["kernel_settings"])["ImportanceFinish/NestedSampler.num_live"] == 200
    )


@pytest.mark.slow
def test_separated_modes_have_their_masses():
    tree = run(finish(two_modes, num_live=200, num_clumps=4))
    attrs, particles = tree.attrs, tree["particles"].dataset.isel(chain=0)
    assert abs(attrs["log_evidence"] + 2 * np.log(20)) < 4 * attrs["log_evidence_se"] < 0.2
    share = np.exp(particles["log_weight"].values - attrs["log_evidence"])
    is_wide = particles["x"].values[:, 0] > 0
    assert abs(share @ is_wide - 0.3) < 4 * np.sqrt(share**2 @ (is_wide - 0.3) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_mode_that_no_clump_is_near_to_is_in_the_claimed_error(bug, monkeypatch):
    """NormalMixture are fitted to one side.

    No draw knows of the other; the sampler has points there. The planted bug looks at draws alone.
    """
    fitted = NormalSummary.fitted
    one_side = lambda self, key, told, log_weight, *rest: fitted(
        self, key, told, jnp.where(told.z[:, 0] > 0, log_weight, -jnp.inf), *rest
    )
    monkeypatch.setattr(NormalSummary, "fitted", one_side)
    if bug:
        monkeypatch.setattr(importance_finish, "_missed", lambda log_share, log_each: jnp.zeros(()))
    attrs = run(finish(two_modes, num_live=200, background=1e-4)).attrs
    off, claimed = attrs["log_evidence"] + 2 * np.log(20), attrs["log_evidence_se"]
    assert off < -0.2
    assert (abs(off) < 4 * claimed) != bug


def test_clumps_with_tails_are_a_density_and_what_is_drawn():
    """The mean of a Normal density over theirs, at their draws, is 1; and a tenth of these lie
    beyond where Student's t has them.
    """
    tailed = NormalSummary(2, 3.0)
    clumps = NormalMixture(jnp.zeros(1), jnp.ones((1, 2)), jnp.array([[[1.0, 0.0], [0.5, 2.0]]]))
    z = tailed.draws(np.random.default_rng(0), clumps, 4000)
    log_ratio = lambda z: NormalSummary(2).log_density(clumps, z) - tailed.log_density(clumps, z)
    ratio = np.exp(np.asarray(jax.jit(jax.vmap(log_ratio))(z)))
    by_numpy = NormalSummary(2).log_densities(clumps, z) - tailed.log_densities(clumps, z)
    np.testing.assert_allclose(np.exp(by_numpy), ratio)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(4000)
    beyond = np.abs(z[:, 0] - 1) > stats.t(3.0).ppf(0.95)
    assert abs(beyond.mean() - 0.1) < 4 * np.sqrt(0.09 / 4000)


@pytest.mark.slow
def test_tails_that_the_clumps_miss_fail_the_report():
    def tails(y=0.0):
        x = numpyro.sample("x", dist.Uniform(-1e6, 1e6).expand([4]).to_event(1))
        numpyro.sample("y", dist.Cauchy(x, 1.0).to_event(1), obs=jnp.zeros(4))

    page = report(run(finish(tails, num_live=200, num_clumps=1, num_rounds=1)))
    assert page.conclusion == "not trusted"
    assert page["importance"].ok is False
    assert page["importance"].figures["k-hat"] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_run_is_resumed_bit_for_bit(bug, tmp_path, monkeypatch):
    """In the nested sampling, and between that and the importance draws.

    The planted bug forgets the key of these.
    """
    wanted = run(finish(), X, Y)
    steps = wanted.attrs["steps"]
    if bug:
        forget(monkeypatch, "rng_key", lambda key: key + jnp.uint32(1))
    for stop in (7, steps):
        folder = tmp_path / str(stop)
        assert run(finish(), X, Y, num_warmup=stop, checkpoint=folder).attrs["ended"] == "budget"
        found = run(finish(), X, Y, checkpoint=folder)
        assert (found.attrs["ended"], found.attrs["steps_run"]) == ("finished", steps - stop)
        same = [(found["posterior"]["weight"].values == wanted["posterior"]["weight"].values).all()]
        same += [found.attrs[name] == wanted.attrs[name] for name in ("log_evidence", "ess")]
        assert all(same) != bug
        assert found.attrs["nested_log_evidence"] == wanted.attrs["nested_log_evidence"]


def test_the_host_may_do_the_last_of_a_run_without_a_step():
    assert figures({"log_evidence": np.zeros((0, 2))}, 0) == ""


# Refusals.


@pytest.mark.parametrize(
    ("sampler", "settings", "error", "message"),
    [
        (
            Staged(line),
            {},
            TypeError,
            "sampler: found <inference.*Staged.*, wanted a NestedSampler",
        ),
        (line, {}, TypeError, "sampler: found <function line.*wanted a NestedSampler"),
        (NestedSampler, {}, TypeError, "sampler: found <class"),
        (
            NestedSampler(line),
            {"num_draws": 10},
            ValueError,
            "num_draws: found 10, wanted an integer, at least 100",
        ),
        (NestedSampler(line), {"num_draws": 1e4}, ValueError, "num_draws: found 10000.0"),
        (NestedSampler(line), {"num_clumps": 0}, ValueError, "num_clumps: found 0"),
        (NestedSampler(line), {"background": 0.0}, ValueError, "background: found 0.0"),
        (NestedSampler(line), {"background": 1.0}, ValueError, "background: found 1.0"),
        (NestedSampler(line), {"num_rounds": 0}, ValueError, "num_rounds: found 0"),
        (NestedSampler(line), {"enough": 1.0}, ValueError, "enough: found 1.0"),
        (
            NestedSampler(line),
            {"enough": "all"},
            ValueError,
            "enough: found 'all', wanted a number between 0 and 1",
        ),
    ],
    ids=[
        "staged",
        "model",
        "class",
        "few draws",
        "no integer",
        "no clump",
        "no background",
        "nothing else",
        "no round",
        "all",
        "word",
    ],
)
def test_refused_by_name(sampler, settings, error, message):
    with pytest.raises(error, match=message):
        ImportanceFinish(sampler, **settings)


def test_replicates_that_would_end_together_are_refused():
    kernel = finish()
    reading, data = kernel.read(Program(line, X, Y))
    with pytest.raises(
        ValueError, match="chain_method: replicates finish at different steps; use 'sequential'"
    ):
        kernel.on_host([kernel.init(random.key(0), reading, data)], reading, data)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_evidence_of_members_without_names_is_that_of_all_places(bug, monkeypatch):
    """The planted bug: draws in one of two places have the density of that one."""
    if bug:
        monkeypatch.setattr(
            importance_finish,
            "canonical_densities",
            lambda exchange, reference, densities: densities,
        )
    attrs = run(finish(pair, num_clumps=1), TWO).attrs
    assert (abs(attrs["log_evidence"] - pair_evidence()) < 3.5 * attrs["log_evidence_se"]) != bug
