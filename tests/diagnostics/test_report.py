"""Reports of chains: figures equal to ArviZ's, and every spoiled run distrusted for the right
reason.
"""

import json

import arviz as az
import numpy as np
import pytest
import xarray as xr

from diagnostics import report
from diagnostics.reports import kind_of
from tests.diagnostics import trees
from tests.diagnostics.trees import failed, replaced


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def test_good_chains_are_trusted_with_the_figures_of_arviz(rng):
    tree = trees.chains(rng)
    page = report(tree)
    both = tree["posterior"].to_dataset().assign(lp=tree["sample_stats"]["lp"])
    least = {
        method: min(float(v.min()) for v in az.ess(both, method=method).data_vars.values())
        for method in ("bulk", "tail")
    }
    assert page.kind == "chains"
    assert page.trusted, page.text
    assert page["R-hat"].figures["largest"] == max(
        float(v.max()) for v in az.rhat(both).data_vars.values()
    )
    assert page["bulk ESS"].figures["least"] == least["bulk"]
    assert page["tail ESS"].figures["least"] == least["tail"]
    assert page["E-BFMI"].figures["least"] == float(az.bfmi(tree)["energy"].min())
    assert page["time per effective draw"].figures["seconds"] == pytest.approx(10.0 / least["bulk"])
    first, title, *_ = page.text.splitlines()
    assert first.startswith("TRUSTED")
    assert title == "schools by NUTS (chains): 4 chains x 500 draws, 10 s"
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
    page = report(replaced(tree, "posterior", "effect", effect))
    assert page.trusted
    assert page["movement"].ok is None  # pointed out, for a check that nothing was refused
    assert page["movement"].figures == {"constant": ["effect[0]"]}


def indicator(rng, visits):
    """Chains of an event that happens `visits` times in 500 draws, apart from each other; the
    first chain never sees it.
    """
    event = np.zeros((4, 500), int)
    event[1:, np.linspace(5, 490, visits).astype(int)] = 1
    return replaced(trees.chains(rng), "posterior", "event", (["chain", "draw"], event))


@pytest.mark.parametrize(("visits", "ok"), [(1, None), (9, None), (10, False), (50, False)])
def test_a_chain_that_misses_an_event_is_stuck_only_if_the_event_is_frequent(rng, visits, ok):
    """Each visit is two moves: with ten of them the other chains move 20 times."""
    verdict = report(indicator(rng, visits))["movement"]
    assert verdict.ok is ok
    assert verdict.figures == ({"stuck chains": [0]} if ok is False else {"rare": ["event"]})


def test_a_rare_event_spoils_no_healthy_run(rng):
    for _ in range(20):
        event = rng.uniform(size=(4, 500)) < 0.002
        assert report(
            replaced(trees.chains(rng), "posterior", "event", (["chain", "draw"], event))
        ).trusted


def test_an_event_seen_by_one_chain_at_another_place_is_stuck(rng):
    event = np.zeros((4, 500))
    event[1:, 7] = 1.0
    event[0] = 2.0
    event[3] = 0.0  # the first and the last stand still, and not at the same place
    page = report(replaced(trees.chains(rng), "posterior", "event", (["chain", "draw"], event)))
    assert page["movement"].figures == {"stuck chains": [0, 3]}


def test_divergences(rng):
    tree = trees.chains(rng)
    diverging = np.zeros((4, 500), bool)
    diverging[1, 7] = True
    page = report(replaced(tree, "sample_stats", "diverging", diverging))
    assert failed(page) == {"divergences"}
    assert page["divergences"].figures == {"count": 1, "percent": pytest.approx(0.05)}


def with_second_block(tree, **statistics):
    """Statistics of a second block, as the driver names them."""
    for name, values in statistics.items():
        replaced(tree, "sample_stats", f"{name}_1", (["chain", "draw"], values))
    tree.attrs["kernel"] = "Gibbs(NUTS, NUTS)"
    return tree


def test_divergences_of_every_block(rng):
    diverging = np.zeros((4, 500), bool)
    diverging[2, :3] = True
    page = report(with_second_block(trees.chains(rng), diverging=diverging))
    assert failed(page) == {"divergences"}
    assert page["divergences"].figures == {
        "count": 3,
        "percent": pytest.approx(0.15),
        "diverging": 0,
        "diverging_1": 3,
    }
    assert "Counted in diverging_1;" in page["divergences"].reason
    assert report(with_second_block(trees.chains(rng), diverging=0 * diverging)).trusted


@pytest.mark.parametrize("name", ["diverging", "diverging_1"])
def test_divergences_that_cannot_be_counted(rng, name):
    diverging = np.zeros((4, 500))
    diverging[0, 0] = np.nan
    page = report(replaced(trees.chains(rng), "sample_stats", name, (["chain", "draw"], diverging)))
    assert failed(page) == {"divergences"}
    assert f"`{name}` holds NaN" in page["divergences"].reason


@pytest.mark.parametrize("name", ["lp", "lp_1"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_log_joint_that_is_not_finite(rng, name, value):
    for lp in (
        np.full((4, 500), value),
        np.where(np.arange(500) == 7, value, rng.normal(size=(4, 500))),
    ):
        page = report(replaced(trees.chains(rng), "sample_stats", name, (["chain", "draw"], lp)))
        assert failed(page) == {"draws"}
        assert page["draws"].figures[name] == int((~np.isfinite(lp)).sum())


def test_the_log_joint_of_every_block_has_an_rhat(rng):
    page = report(
        with_second_block(
            trees.chains(rng), lp=rng.normal(size=(4, 500)) + 3.0 * np.arange(4)[:, None]
        )
    )
    assert page["R-hat"].ok is False
    assert page["R-hat"].figures["of"] == "lp_1"


def test_slow_energy_means_nothing_where_other_blocks_change_it(rng):
    slow = np.cumsum(rng.normal(size=(4, 500)), axis=1)
    assert failed(report(replaced(trees.chains(rng), "sample_stats", "energy", slow))) == {"E-BFMI"}
    for tree in (
        trees.chains(rng, kernel="Gibbs(NUTS, Slice)"),
        with_second_block(trees.chains(rng), energy=slow),
    ):
        page = report(replaced(tree, "sample_stats", "energy", slow))
        assert page.trusted
        assert page["E-BFMI"].ok is None


def test_an_energy_that_is_nan_is_not_called_slow(rng):
    page = report(replaced(trees.chains(rng), "sample_stats", "energy", np.full((4, 500), np.nan)))
    assert failed(page) == {"E-BFMI"}
    assert page["E-BFMI"].figures == {"energy": 2000}
    assert page["E-BFMI"].reason.startswith("The energy is NaN")


def test_slow_energy(rng):
    page = report(
        replaced(
            trees.chains(rng),
            "sample_stats",
            "energy",
            np.cumsum(rng.normal(size=(4, 500)), axis=1),
        )
    )
    assert failed(page) == {"E-BFMI"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_draws_that_are_not_finite(rng, value):
    tree = trees.chains(rng)
    mean = tree["posterior"]["mean"].values.copy()
    mean[0, 3] = value
    page = report(replaced(tree, "posterior", "mean", mean))
    assert failed(page) == {"draws"}
    assert page["draws"].figures["mean"] == 1


@pytest.mark.parametrize("ended", ["SIGINT", "SIGTERM", "max_time", "stop rule failed"])
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
    # each chain its own labels
    effect = tree["posterior"]["effect"].values + 5.0 * np.arange(4)[:, None, None]
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
    assert [
        kind_of(make(rng))
        for make in (trees.chains, trees.variational, trees.particles, trees.nested)
    ] == [
        "chains",
        "variational",
        "smc",
        "nested",
    ]
    with pytest.raises(ValueError, match="prior.*Wanted: a posterior"):
        report(xr.DataTree.from_dict({"prior": xr.Dataset()}))


def test_a_posterior_that_cannot_be_judged_is_refused(rng):
    with pytest.raises(
        ValueError, match=r"posterior: 'x' has the dimensions \['draw'\]; wanted chain and draw"
    ):
        report(trees.tree_of({"posterior": {"x": (["draw"], rng.normal(size=300))}}))
    text = replaced(
        trees.chains(rng), "posterior", "name", (["chain", "draw"], np.full((4, 500), "a"))
    )
    with pytest.raises(ValueError, match="posterior: 'name' holds <U1; wanted numbers"):
        report(text)


def test_a_posterior_without_variables_is_not_blamed_on_the_warm_up(rng):
    tree = trees.chains(rng)
    tree["posterior"].dataset = xr.Dataset()
    page = report(tree)
    assert failed(page) == {"draws"}
    assert "no variables" in page["draws"].reason


def test_the_dictionary_is_json_without_infinities(rng):
    page = report(trees.chains(rng, draws=1))
    found = json.loads(json.dumps(page.as_dict(), allow_nan=False))
    assert (
        next(each for each in found["verdicts"] if each["name"] == "R-hat")["figures"]["largest"]
        == "inf"
    )
    assert json.loads(
        json.dumps(report(trees.chains(rng, num_chains=1)).as_dict(), allow_nan=False)
    )["unknown"] == ["R-hat"]
