"""Reports: figures equal to ArviZ's or to a closed form, and every spoiled run distrusted for the right reason."""

import json

import arviz as az
import numpy as np
import pytest
import xarray as xr

from diagnostics import report
from diagnostics.reports import insertion_rank_test, kind_of
from tests.diagnostics import trees


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def replaced(tree, group, name, values):
    data = tree[group].to_dataset()
    tree[group].dataset = data.assign({name: (data[name].dims, values)})
    return tree


def failed(page):
    return {verdict.name for verdict in page.verdicts if verdict.ok is False}


def test_good_chains_are_trusted_with_the_figures_of_arviz(rng):
    tree = trees.chains(rng)
    page = report(tree)
    both = tree["posterior"].to_dataset().assign(lp=tree["sample_stats"]["lp"])
    least = {method: min(float(v.min()) for v in az.ess(both, method=method).data_vars.values()) for method in ("bulk", "tail")}
    assert page.kind == "chains"
    assert page.trusted, page.text
    assert page["R-hat"].figures["largest"] == max(float(v.max()) for v in az.rhat(both).data_vars.values())
    assert page["bulk ESS"].figures["least"] == least["bulk"]
    assert page["tail ESS"].figures["least"] == least["tail"]
    assert page["E-BFMI"].figures["least"] == float(az.bfmi(tree)["energy"].min())
    assert page["time an effective draw"].figures["seconds"] == pytest.approx(10.0 / least["bulk"])
    assert page.text.startswith("schools by NUTS (chains): 4 chains x 500 draws, 10 s\nTRUSTED")
    assert json.loads(json.dumps(page.as_dict()))["trusted"] is True


def test_a_shifted_chain_is_found_and_named(rng):
    tree = trees.chains(rng)
    effect = tree["posterior"]["effect"].values.copy()
    effect[2, :, 1] += 3.0
    page = report(replaced(tree, "posterior", "effect", effect))
    assert failed(page) == {"R-hat", "bulk ESS", "tail ESS"}
    assert page["R-hat"].figures["of"] == "effect[1]"
    assert "effect" in page["R-hat"].reason
    assert "mean" not in page["R-hat"].reason
    assert "NOT TRUSTED: R-hat" in page.text


def test_a_chain_that_stands_still_is_named(rng):
    tree = trees.chains(rng)
    mean = tree["posterior"]["mean"].values.copy()
    mean[3] = 0.1
    page = report(replaced(tree, "posterior", "mean", mean))
    assert "movement" in failed(page)
    assert page["movement"].figures == {"stuck chains": [3]}


def test_chains_stuck_at_different_points_are_not_trusted(rng):
    tree = trees.chains(rng)
    page = report(replaced(tree, "posterior", "mean", np.repeat(np.arange(4.0)[:, None], 500, 1)))
    assert {"R-hat", "movement"} <= failed(page)
    assert page["R-hat"].figures["largest"] > 1e6


def test_nothing_that_moves_is_not_trusted(rng):
    tree = trees.chains(rng)
    tree["posterior"].dataset = xr.Dataset({"mean": tree["posterior"]["mean"] * 0})
    tree["sample_stats"].dataset = tree["sample_stats"].to_dataset()[["diverging"]]
    page = report(tree)
    assert failed(page) == {"movement"}
    assert page["R-hat"].ok is None


def test_a_constant_element_does_not_spoil_the_rest(rng):
    tree = trees.chains(rng)
    effect = tree["posterior"]["effect"].values.copy()
    effect[..., 0] = 1.0
    assert report(replaced(tree, "posterior", "effect", effect)).trusted


def test_divergences(rng):
    tree = trees.chains(rng)
    diverging = np.zeros((4, 500), bool)
    diverging[1, 7] = True
    page = report(replaced(tree, "sample_stats", "diverging", diverging))
    assert failed(page) == {"divergences"}
    assert page["divergences"].figures == {"count": 1, "percent": pytest.approx(0.05)}


def test_slow_energy(rng):
    page = report(replaced(trees.chains(rng), "sample_stats", "energy", np.cumsum(rng.normal(size=(4, 500)), axis=1)))
    assert failed(page) == {"E-BFMI"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_draws_that_are_not_finite(rng, value):
    tree = trees.chains(rng)
    mean = tree["posterior"]["mean"].values.copy()
    mean[0, 3] = value
    page = report(replaced(tree, "posterior", "mean", mean))
    assert failed(page) == {"draws"}
    assert page["draws"].figures["mean"] == 1


@pytest.mark.parametrize("ended", ["SIGINT", "SIGTERM", "max_time"])
def test_a_run_that_ended_early(rng, ended):
    assert failed(report(trees.chains(rng, ended=ended))) == {"ended"}


def test_too_few_draws(rng):
    assert {"draws", "bulk ESS"} <= failed(report(trees.chains(rng, draws=20)))
    page = report(trees.chains(rng, draws=0))
    assert failed(page) == {"draws"}
    assert "warm-up" in page["draws"].reason


def test_one_chain_is_undecided(rng):
    page = report(trees.chains(rng, num_chains=1))
    assert page.conclusion == "undecided"
    assert page.unknown == ["R-hat"]
    assert not page.trusted


@pytest.mark.parametrize("mark", ["attribute", "group"])
def test_labels_never_get_an_rhat_and_invariants_do(rng, mark):
    tree = trees.chains(rng)
    effect = tree["posterior"]["effect"].values + 5.0 * np.arange(4)[:, None, None]  # each chain its own labels
    tree = replaced(tree, "posterior", "effect", effect)
    assert not report(tree).trusted
    if mark == "attribute":
        tree["posterior"]["effect"].attrs["not_identified"] = 1
    else:
        tree["not_identified"] = xr.DataTree(xr.Dataset({"effect": 1}))
    page = report(tree)
    assert page.trusted, page.text
    assert "without an R-hat: effect" in page["R-hat"].reason
    assert page["R-hat"].figures["of"] in ("mean", "lp")


def test_a_gibbs_run_has_no_energy_and_says_so(rng):
    tree = trees.chains(rng)
    del tree["sample_stats"]
    page = report(tree)
    assert page.trusted
    assert page["E-BFMI"].ok is page["divergences"].ok is None
    assert "Not in the tree" in page["E-BFMI"].reason


def test_kind_is_told_from_the_groups(rng):
    assert [kind_of(make(rng)) for make in (trees.chains, trees.variational, trees.particles, trees.nested)] == [
        "chains",
        "variational",
        "smc",
        "nested",
    ]
    with pytest.raises(ValueError, match="prior.*Wanted: a posterior"):
        report(xr.DataTree.from_dict({"prior": xr.Dataset()}))


def test_good_variational_run_is_trusted(rng):
    page = report(trees.variational(rng))
    assert page.trusted, page.text


def test_without_log_q_nothing_is_pretended(rng):
    page = report(trees.variational(rng, with_q=False))
    assert page.conclusion == "undecided"
    assert page.unknown == ["Pareto k-hat"]
    assert page["Pareto k-hat"].reason.startswith("Not in the tree: log_q")


@pytest.mark.parametrize(("sd_q", "fits"), [(1.0, True), (1.3, True), (0.45, False)])
def test_khat_is_the_tail_index_of_the_weights(rng, sd_q, fits):
    """For q = N(0, s) and p = N(0, 1) the weights have tail index 1 - s^2 below s = 1, and are bounded above."""
    page = report(trees.variational(rng, sd_q=sd_q, draws=4000))
    assert page["Pareto k-hat"].ok is fits
    if sd_q < 1:
        assert page["Pareto k-hat"].figures["largest"] == pytest.approx(1 - sd_q**2, abs=0.15)


@pytest.mark.parametrize("drift", [0.05, -0.05])
def test_an_elbo_that_still_moves(rng, drift):
    tree = trees.variational(rng)
    elbo = tree["sample_stats"]["elbo"].values + drift * np.arange(400)
    page = report(replaced(tree, "sample_stats", "elbo", elbo))
    assert failed(page) == {"ELBO settled"}
    assert page["ELBO settled"].figures["gain"] == pytest.approx(100 * drift, abs=0.1)
    assert ("rises" if drift > 0 else "falls") in page["ELBO settled"].reason


def test_noise_alone_is_no_drift_and_much_noise_no_answer(rng):
    flat = np.zeros((1, 400)) - 20
    alarms = sum(
        report(replaced(trees.variational(rng, 1), "sample_stats", "elbo", flat + rng.normal(size=(1, 400))))["ELBO settled"].ok is False
        for _ in range(50)
    )
    assert alarms <= 2
    page = report(replaced(trees.variational(rng, 1), "sample_stats", "elbo", flat + 50 * rng.normal(size=(1, 400))))
    assert page["ELBO settled"].ok is None


def test_a_local_optimum_shows_in_elbo_and_means(rng):
    tree = trees.variational(rng)
    shift = np.array([0.0, 0.0, 3.0])[:, None]
    tree = replaced(tree, "sample_stats", "elbo", tree["sample_stats"]["elbo"].values - shift)
    tree = replaced(tree, "posterior", "z", tree["posterior"]["z"].values + shift)
    page = report(tree)
    assert failed(page) == {"replicates: ELBO", "replicates: means"}
    assert page["replicates: means"].figures["furthest"] == pytest.approx(2.0, abs=0.1)  # 3 - mean(0, 0, 3), in sd of 1


def test_good_particle_filter_is_trusted(rng):
    page = report(trees.particles(rng))
    assert page.trusted, page.text
    assert page["resamplings"].figures == {"a replicate": [4, 4, 4], "steps": 20}


def test_ancestors_are_traced_to_the_first_step(rng):
    page = report(trees.particles(rng, genealogy="collapsed"))
    assert failed(page) == {"unique ancestors"}
    assert page["unique ancestors"].figures["left"] == [1, 1, 1]
    tree = trees.particles(rng, replicates=1, steps=3, size=4)
    parents = np.array([[[9, 9, 9, 9], [0, 0, 1, 3], [1, 2, 2, 2]]])  # 0 0 1 3, then 0 1 1 1
    assert report(replaced(tree, "sample_stats", "ancestor", parents))["unique ancestors"].figures["left"] == [2]


def test_particles_that_collapse_and_are_not_resampled(rng):
    tree = trees.particles(rng)
    ess = tree["sample_stats"]["ess"].values.copy()
    ess[1, 7] = 1.5
    page = report(replaced(tree, "sample_stats", "ess", ess))
    assert failed(page) == {"ESS path", "resamplings"}
    assert page["ESS path"].figures["at step"] == 7


def test_evidences_that_spread(rng):
    page = report(trees.particles(rng, log_evidence_of_replicates=np.array([-50.0, -53.0, -48.0])))
    assert failed(page) == {"evidence spread"}
    assert page["evidence spread"].figures["sd"] == pytest.approx(np.sqrt((1 / 3**2 + (8 / 3) ** 2 + (7 / 3) ** 2) / 2))
    assert report(trees.particles(rng, replicates=1))["evidence spread"].ok is None


def test_good_nested_run_is_trusted(rng):
    page = report(trees.nested(rng))
    assert page.trusted, page.text
    assert page["information"].figures["error it implies"] == pytest.approx(np.sqrt(0.08))


def test_insertion_ranks_hold_their_level_and_find_a_slow_sampler(rng):
    alarms = sum(insertion_rank_test(rng.integers(0, 50, 1000), 50) < 0.05 for _ in range(400))
    assert alarms <= 32  # 20 expected at most; 3 standard errors above
    page = report(trees.nested(rng, skew=1.2))
    assert failed(page) == {"insertion ranks"}


def test_insertion_ranks_find_a_fault_that_is_brief(rng):
    ranks = rng.integers(0, 100, 5000)
    assert insertion_rank_test(ranks, 100) > 0.01
    ranks[2000:2100] = rng.integers(0, 60, 100)
    assert insertion_rank_test(ranks, 100) < 0.01


def test_insertion_ranks_beyond_the_live_points_are_refused():
    with pytest.raises(ValueError, match="insertion_rank: the largest is 100, among num_live=100"):
        insertion_rank_test(np.array([0, 100]), 100)


def test_replicates_beyond_their_claimed_error(rng):
    page = report(trees.nested(rng, log_evidence_of_replicates=np.array([-30.0, -33.0])))
    assert failed(page) == {"evidence error"}
    assert failed(report(trees.nested(rng, log_evidence_se_of_replicates=np.full(2, 0.01)))) >= {"information"}


def test_effective_draws_are_kish(rng):
    tree = trees.nested(rng)
    weights = np.log(np.array([[0.5, 0.5, 1e-30], [1.0, 1e-30, 1e-30]]))
    tree["particles"].dataset = xr.Dataset({"log_weight": (["chain", "particle"], weights)})
    page = report(tree)
    assert page["effective draws"].figures["count"] == pytest.approx(3.0)
    assert failed(page) == {"effective draws"}


def test_a_nested_run_that_was_cut_is_not_trusted(rng):
    assert failed(report(trees.nested(rng, ended="budget"))) == {"ended"}
