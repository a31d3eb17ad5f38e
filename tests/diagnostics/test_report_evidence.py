"""Reports of particle filters and nested samplers: what is trusted, and every spoiled run
distrusted for the right reason.
"""

import json

import numpy as np
import pytest
import xarray as xr

from diagnostics import insertion_rank_test, report
from diagnostics._evidence import steps_taken
from tests.diagnostics import trees
from tests.diagnostics.trees import failed, replaced


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def test_good_particle_filter_is_trusted(rng):
    page = report(trees.particles(rng))
    assert page.trusted, page.text
    assert page["resamplings"].figures == {"a replicate": [4, 4, 4], "steps": 20}


def test_few_ancestors_are_no_reason_to_distrust_and_say_what_rests_on_them(rng):
    page = report(trees.particles(rng, genealogy="collapsed"))  # at step 10 of 20
    assert page.trusted, page.text
    verdict = page["unique ancestors"]
    assert verdict.ok is None
    assert verdict.figures == {"left": [1, 1, 1]}
    assert "rows before 10 rests on fewer than 10 distinct ancestors" in verdict.reason
    assert report(trees.particles(rng))["unique ancestors"].ok is True


def test_ancestors_are_traced_to_the_first_step(rng):
    tree = trees.particles(rng, replicates=1, steps=3, size=4)
    # at step 1 particles 1 and 2 live on; they come from 0 and 1
    parents = np.array([[[9, 9, 9, 9], [0, 0, 1, 3], [1, 2, 2, 2]]])
    assert report(replaced(tree, "sample_stats", "ancestor", parents))["unique ancestors"].figures[
        "left"
    ] == [2]
    lone = np.array([[[9, 9, 9, 9], [0, 1, 2, 3], [1, 1, 1, 1]]])
    assert report(replaced(tree, "sample_stats", "ancestor", lone))["unique ancestors"].figures[
        "left"
    ] == [1]


def test_ancestors_that_the_filter_counted_by_row(rng):
    tree = trees.particles(rng, replicates=2)
    counts = np.array([[1, 3, 9, 12, 40], [1, 1, 1, 9, 10]])
    tree["ancestry"] = xr.DataTree(xr.Dataset({"unique_ancestors": (["chain", "row"], counts)}))
    verdict = report(tree)["unique ancestors"]
    assert verdict.figures == {"left": [1, 1]}
    assert "rows before 4 rests" in verdict.reason  # of the worse replicate
    tree["ancestry"] = xr.DataTree(
        xr.Dataset({"unique_ancestors": (["chain", "row"], np.minimum(counts, 9))})
    )
    assert "any row rests" in report(tree)["unique ancestors"].reason


def concentrated(rng, resampling, **attrs):
    """A filter whose first particle has nearly all of the weight, from the first step on."""
    settings = json.dumps({"ParticleFilter.resampling": resampling})
    tree = trees.particles(rng, kernel_settings=settings, **attrs)
    return replaced(tree, "sample_stats", "ess", np.full((3, 20), 1.01))


def test_a_concentrated_posterior_is_no_fault_of_a_filter_that_keeps_the_best(rng):
    page = report(concentrated(rng, "optimal"))
    assert page.trusted, page.text
    assert page["ESS path"].ok is page["resamplings"].ok is None
    assert page["ESS path"].figures["least"] == 1.01
    assert failed(report(concentrated(rng, "systematic"))) == {"ESS path", "resamplings"}
    apart = np.array([-50.0, -53.0, -48.0])
    assert failed(report(concentrated(rng, "optimal", log_evidence_of_replicates=apart))) == {
        "evidence spread"
    }


def test_an_ess_that_is_not_a_number_is_one_for_no_filter(rng):
    tree = concentrated(rng, "optimal")
    ess = tree["sample_stats"]["ess"].values.copy()
    ess[1, 3] = np.nan
    assert failed(report(replaced(tree, "sample_stats", "ess", ess))) == {"ESS path"}


@pytest.mark.parametrize("steps", [0, 1])
def test_filters_of_hardly_any_steps(rng, steps):
    tree = trees.particles(rng, steps=1)
    tree["sample_stats"].dataset = tree["sample_stats"].to_dataset().isel(step=slice(steps))
    assert failed(report(tree)) == (set() if steps else {"ESS path"})


@pytest.mark.parametrize("make", [trees.particles, trees.nested])
def test_draws_of_an_evidence_run_that_are_not_finite(rng, make):
    tree = make(rng)
    z = tree["posterior"]["z"].values.copy()
    z[0, 3] = np.nan
    assert failed(report(replaced(tree, "posterior", "z", z))) == {"draws"}
    assert failed(report(replaced(tree, "posterior", "z", np.full_like(z, np.nan)))) == {"draws"}


@pytest.mark.parametrize("make", [trees.particles, trees.nested])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("replicates", [1, 2])
def test_evidences_that_are_not_finite(rng, make, value, replicates):
    each = np.array([value, -30.0][:replicates])
    page = report(
        make(
            rng,
            replicates=replicates,
            log_evidence=float(each.mean()),
            log_evidence_of_replicates=each,
        )
    )
    assert failed(page) == {"log-evidence"}
    assert page["log-evidence"].figures["replicates"] == [0]


@pytest.mark.parametrize("make", [trees.particles, trees.nested])
@pytest.mark.parametrize("ended", ["budget", "stop", "max_time"])
def test_a_run_with_an_evidence_must_have_finished(rng, make, ended):
    assert failed(report(make(rng, ended=ended))) == {"ended"}


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
    assert page["evidence spread"].figures["sd"] == pytest.approx(
        np.sqrt((1 / 3**2 + (8 / 3) ** 2 + (7 / 3) ** 2) / 2)
    )
    alone = report(trees.particles(rng, replicates=1))
    assert alone.unknown == ["evidence spread"]
    assert alone["evidence spread"].reason.startswith("Unknown without replicates")


def test_particles_that_walk_are_asked_whether_they_forget(rng):
    """And whether their errors are those that they claim; not for histories."""
    page = report(trees.tempered(rng))
    assert (page.kind, page.trusted) == ("smc", True), page.text
    assert page["walks"].ok
    assert page["evidence error"].ok
    assert "unique ancestors" not in {verdict.name for verdict in page.verdicts}
    assert failed(report(trees.tempered(rng, halfway=0.55))) == {"walks"}
    assert failed(report(trees.tempered(rng, log_evidence_se_of_replicates=np.full(3, 0.01)))) == {
        "evidence error"
    }
    assert failed(report(trees.tempered(rng, ended="budget"))) == {"ended"}
    assert report(trees.tempered(rng, replicates=1)).trusted is False


def test_good_nested_run_is_trusted(rng):
    page = report(trees.nested(rng))
    assert page.trusted, page.text
    assert page["information"].figures["error it implies"] == pytest.approx(np.sqrt(0.08))


@pytest.mark.parametrize("lost", [0, 1])
def test_where_a_mode_died_out_nothing_is_decided(rng, lost):
    each = {"num_modes_of_replicates": np.array([2, 3])}
    page = report(trees.nested(rng, num_lost_modes_of_replicates=np.array([0, lost]), **each))
    assert page.conclusion == ("undecided" if lost else "trusted")
    assert page["modes"].ok is (None if lost else True)
    assert ("a run of more live points" in page["modes"].reason) == bool(lost)


def test_a_nested_run_in_stages_is_asked_what_summaries_lose(rng):
    """What they add to the error is no part of that of live points."""
    se, both = np.sqrt(0.08), np.full(2, np.hypot(np.sqrt(0.08), 2.0))
    each = {"nested_log_evidence_se_of_replicates": both, "log_evidence_se_of_replicates": both}
    each["nested_summary_error_of_replicates"] = np.full(2, 2.0)
    page = report(trees.nested(rng, summary_loss_of_replicates=np.array([0.1, 0.2]), **each))
    assert page.trusted, page.text
    assert page["information"].figures["claimed"] == pytest.approx(se)
    assert page["summaries"].figures["nats each"] == 0.2
    for lost in (3.0, np.nan):
        page = report(trees.nested(rng, summary_loss_of_replicates=np.array([0.1, lost]), **each))
        assert failed(page) == {"summaries"}
    for left, wanted in ((np.nan, set()), (0.4, set()), (3.0, {"summaries"})):
        each["nats_left_of_replicates"] = np.array([0.1, left])
        assert (
            failed(
                report(trees.nested(rng, summary_loss_of_replicates=np.array([0.1, 0.2]), **each))
            )
            == wanted
        )
    each |= {
        "nats_left_of_replicates": np.full(2, np.nan),
        "log_evidence_se_of_replicates": np.array([0.1, np.inf]),
    }
    each["nested_log_evidence_se_of_replicates"] = np.array([se, np.inf])
    page = report(trees.nested(rng, summary_loss_of_replicates=np.array([0.1, 0.2]), **each))
    assert failed(page) == {"summaries"}
    assert page["information"].ok is None
    assert failed(report(trees.nested(rng, log_evidence_se_of_replicates=both))) == {"information"}


def test_insertion_ranks_hold_their_level_and_find_a_slow_sampler(rng):
    alarms = sum(insertion_rank_test(rng.integers(0, 50, 1000), 50) < 0.05 for _ in range(400))
    assert alarms <= 32  # 20 expected at most; 3 standard errors above
    page = report(trees.nested(rng, skew=1.2))
    assert failed(page) == {"insertion ranks"}


def with_walks(tree, *correlation):
    """Walks whose ends have the given correlation with their origins, one for each replicate."""
    ranks = tree["sample_stats"]["insertion_rank"]
    left = np.broadcast_to(np.array(correlation)[:, None], ranks.shape)
    stats = tree["sample_stats"].to_dataset()
    tree["sample_stats"].dataset = stats.assign(
        halfway=(["chain", "step"], (1 - np.sqrt(left)) / (1 - left))
    )
    return tree


def test_walks_that_are_too_short_are_found(rng):
    page = report(with_walks(trees.nested(rng), 0.2, 0.2))
    assert page.trusted, page.text
    assert page["walks"].figures["correlation"] == pytest.approx(0.2)
    assert failed(report(with_walks(trees.nested(rng), 0.8, 0.8))) == {"walks"}
    assert failed(report(with_walks(trees.nested(rng), 0.2, 0.8))) == {"walks"}
    unknown = with_walks(trees.nested(rng), 0.2, 0.2)
    unknown["sample_stats"]["halfway"].values[0, 5] = np.nan
    assert failed(report(unknown)) == {"walks"}
    assert report(trees.nested(rng))["walks"].ok is None


def test_likelihoods_that_were_nan_are_told(rng):
    """Rows that repeat the last one, of a replicate that had finished before, count once."""
    tree = trees.nested(rng)
    stats = tree["sample_stats"].to_dataset()
    shape = stats["insertion_rank"].shape[:2]
    assert "likelihood" not in report(tree).text
    for count, ok in ((0, True), (2, None)):
        tree["sample_stats"].dataset = stats.assign(
            num_nan=(
                ["chain", "step"],
                np.where(np.arange(shape[1]) == 3, count, 0) * np.ones(shape, int),
            ),
            evaluations=(["chain", "step"], np.full(shape, 50)),
        )
        found = report(tree)["likelihood"]
        assert (found.ok, found.figures["NaN"]) == (ok, count * shape[0])
        assert found.figures["evaluations"] == 50 * steps_taken(tree).sum()


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
    assert failed(report(trees.nested(rng, log_evidence_se_of_replicates=np.full(2, 0.01)))) >= {
        "information"
    }


def test_effective_draws_are_kish(rng):
    tree = trees.nested(rng)
    weights = np.log(np.array([[0.5, 0.5, 1e-30], [1.0, 1e-30, 1e-30]]))
    tree["particles"].dataset = xr.Dataset({"log_weight": (["chain", "particle"], weights)})
    page = report(tree)
    assert page["effective draws"].figures["count"] == pytest.approx(3.0)
    assert failed(page) == {"effective draws"}


def finished_by_importance(rng, log_weight, replicates=2, missed=0.001):
    """Log weights [replicate, draw] of the importance draws."""
    each = -30 + 0.01 * rng.normal(size=replicates)
    attrs = {
        "nested_log_evidence_se": 0.28,
        "nested_log_evidence_se_of_replicates": np.full(replicates, 0.28),
    }
    attrs |= {
        "log_evidence_of_replicates": each,
        "log_evidence_se_of_replicates": np.full(replicates, 0.01),
    }
    attrs |= {"missed_of_replicates": np.full(replicates, missed)}
    tree = trees.nested(rng, replicates, **attrs)
    tree["particles"] = xr.DataTree(xr.Dataset({"log_weight": (["chain", "particle"], log_weight)}))
    return tree


def test_a_finish_by_importance_sampling_is_held_to_its_weights_and_the_steps_to_their_own_error(
    rng,
):
    page = report(finished_by_importance(rng, 0.5 * rng.normal(size=(2, 5000)) - 40))
    assert page.trusted, page.text
    assert page["information"].figures["claimed"] == pytest.approx(0.28)
    assert page["importance"].figures["effective"] == pytest.approx(5000 * np.exp(-0.25), rel=0.05)
    some_without = np.where(rng.random((2, 5000)) < 0.5, -np.inf, 0.0)
    assert report(finished_by_importance(rng, some_without)).trusted
    assert "importance" not in {verdict.name for verdict in report(trees.nested(rng)).verdicts}


def test_a_poor_finish_is_said_to_be_one_with_what_to_do(rng):
    good = 0.5 * rng.normal(size=(1, 5000))
    tails = 1.2 * rng.exponential(size=(1, 5000))  # of the log weight: k = 1.2
    page = report(finished_by_importance(rng, np.concatenate([good, tails])))
    assert "importance" in failed(page)
    assert page["importance"].figures["k-hat"] > 0.7
    for words in ("heavy tails", "num_clumps", "nested_log_evidence"):
        assert words in page["importance"].reason
    few = np.where(np.arange(5000) < 40, 0.0, -np.inf)[None]
    page = report(finished_by_importance(rng, np.concatenate([good, few])))
    assert failed(page) == {"importance"}
    assert page["importance"].figures["effective"] == pytest.approx(40)
    assert "Fewer than 50 effective draws" in page["importance"].reason


@pytest.mark.parametrize("missed", [0.001, 0.1])
def test_a_mode_that_draws_miss_is_reported(missed, rng):
    page = report(finished_by_importance(rng, 0.5 * rng.normal(size=(2, 5000)), missed=missed))
    assert page.trusted == (missed < 0.01)
    assert ("lies where the proposal puts no draws" in page["importance"].reason) != (missed < 0.01)


def test_a_finish_that_did_not_come_is_unknown(rng):
    tree = finished_by_importance(rng, 0.5 * rng.normal(size=(2, 5000)))
    tree.attrs["log_evidence_se_of_replicates"] = np.array([0.01, np.nan])
    assert report(tree).unknown == ["importance"]


def without_ranks(tree, replicates):
    ranks = tree["sample_stats"]["insertion_rank"].values.copy()
    ranks[replicates] = -1
    return replaced(tree, "sample_stats", "insertion_rank", ranks)


def test_a_replicate_without_insertion_ranks_hides_nothing(rng):
    """NaN is smaller than nothing: `min(1.0, nan)` is 1."""
    page = report(without_ranks(trees.nested(rng), [0]))
    assert page.unknown == ["insertion ranks"]
    assert page["insertion ranks"].figures["without ranks"] == [0]
    assert failed(report(without_ranks(trees.nested(rng, skew=1.5), [0]))) == {"insertion ranks"}
    assert report(without_ranks(trees.nested(rng), [0, 1])).unknown == ["insertion ranks"]


def repeating(tree, from_step):
    """The first replicate had finished, and repeats its last row until the other has."""
    stats = tree["sample_stats"].to_dataset()
    for name in stats.data_vars:
        stats[name].values[0, from_step:] = stats[name].values[0, from_step - 1]
    tree["sample_stats"].dataset = stats
    return tree


def test_rows_that_are_repeated_after_the_end_are_no_steps(rng):
    whole, padded = trees.nested(rng), trees.nested(rng)
    padded = repeating(padded, 1500)
    assert steps_taken(whole).tolist() == [2000, 2000]
    assert steps_taken(padded).tolist() == [1500, 2000]
    page = report(padded)
    assert page["insertion ranks"].ok is True
    assert page["insertion ranks"].figures["insertions"] == 3500
    # read with its repeats
    assert insertion_rank_test(padded["sample_stats"]["insertion_rank"].values[0], 100) < 1e-6
    ends = repeating(trees.nested(rng), 1500)["sample_stats"].to_dataset()
    ends["log_volume"].values[0, 1500:] = np.nan  # a kernel may also leave NaN
    assert steps_taken(xr.DataTree.from_dict({"sample_stats": ends})).tolist() == [1501, 2000]


def test_resamplings_are_counted_until_the_end(rng):
    tree = trees.particles(rng)
    assert report(repeating(tree, 6))["resamplings"].figures == {
        "a replicate": [2, 4, 4],
        "steps": 20,
    }


def test_an_error_that_is_no_number_is_unknown(rng):
    page = report(trees.nested(rng, log_evidence_se_of_replicates=np.array([np.nan, 0.28])))
    assert page["evidence error"].ok is None
    assert page["information"].ok is None
    page = report(trees.nested(rng, log_evidence_se_of_replicates=np.zeros(2)))
    assert {"evidence error", "information"} <= failed(page)
    page = report(trees.nested(rng, information_of_replicates=np.array([np.nan, 8.0])))
    assert page["information"].reason == "The information is not finite."
