"""What makes a comparison unsafe, and what is no reason to doubt it; errors of evidences against
their false-alarm rate.
"""

import warnings

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm, t

from diagnostics import compare
from diagnostics.comparison import uncertainty
from tests.diagnostics.test_compare import ROWS, gaussian
from tests.diagnostics.trees import replaced, tree_of


@pytest.fixture
def rng():
    return np.random.default_rng(2)


def doubts(trees, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(trees, **settings)["unsafe"].to_dict()


# Draws that are no posterior, or none that nothing corrects.


def test_draws_that_repeat_few_points(rng):
    y = rng.normal(size=ROWS)
    tree, worse = gaussian(rng, y)[0], gaussian(rng, y, sd=3.0)[0]
    assert doubts({"tree": tree, "worse": worse}) == {"tree": "", "worse": ""}
    rows = tree["log_likelihood"]["y"].values.reshape(-1, ROWS)
    few = replaced(
        tree.copy(deep=True), "log_likelihood", "y", rows[:8][rng.integers(0, 8, (4, 500))]
    )
    assert doubts({"few": few, "worse": worse})["few"].startswith("its 2000 draws are")
    assert "distinct points: too few for an ELPD" in doubts({"few": few, "worse": worse})["few"]
    two = gaussian(rng, y, draws=2)[0]
    assert (
        doubts({"two": two, "worse": worse})["two"]
        == "its 8 draws are 8 distinct points: too few for an ELPD"
    )


def test_a_point_mass_is_told_from_a_likelihood_without_parameters(rng):
    y = rng.normal(size=ROWS)
    tree = gaussian(rng, y)[0]
    fixed = replaced(
        tree.copy(deep=True),
        "log_likelihood",
        "y",
        np.broadcast_to(norm.logpdf(y, 0.0, 3.0), (4, 500, ROWS)),
    )
    assert doubts({"tree": tree, "fixed": fixed}) == {"tree": "", "fixed": ""}
    point = replaced(fixed, "posterior", "mu", np.repeat([[0.1], [0.2], [0.1], [0.1]], 500, axis=1))
    assert (
        doubts({"tree": tree, "point": point})["point"]
        == "all draws of a chain are one point: a point mass is no posterior"
    )


def test_a_few_states_of_discrete_sites_may_be_all_there_are(rng):
    y, z = rng.normal(size=ROWS), rng.integers(0, 3, (4, 500))
    tree = tree_of(
        {
            "posterior": {"z": (["chain", "draw"], z)},
            "observed_data": {"y": (["row_y"], y)},
            "log_likelihood": {
                "y": (["chain", "draw", "row_y"], norm.logpdf(y, z[..., None] - 1.0, 3.0))
            },
        }
    )
    assert doubts({"tree": gaussian(rng, y)[0], "states": tree})["states"] == ""


def variational(rng, y, **more):
    sd = 1.5 / np.sqrt(len(y))
    mu = y.mean() + sd * rng.normal(size=(4, 1000))
    groups = {
        "posterior": {"mu": (["chain", "draw"], mu)},
        "observed_data": {"y": (["row"], y)},
        "log_likelihood": {"y": (["chain", "draw", "row"], norm.logpdf(y, mu[..., None]))},
        "sample_stats": {"elbo": (["chain", "step"], np.zeros((4, 10)))},
        "log_prior": {"mu": (["chain", "draw"], 0 * mu)},
        "log_q": {"log_q": (["chain", "draw"], norm.logpdf(mu, y.mean(), sd))},
    }
    return tree_of(groups | more)


def test_densities_that_are_not_numbers_correct_nothing(rng):
    y = rng.normal(size=ROWS)
    trees = {"vb": variational(rng, y), "worse": gaussian(rng, y, sd=3.0)[0]}
    assert doubts(trees)["vb"] == ""
    log_q = trees["vb"]["log_q"]["log_q"].values.copy()
    log_q[0, 3] = np.nan
    trees["vb"] = replaced(trees["vb"], "log_q", "log_q", log_q)
    with pytest.warns(
        UserWarning, match="their densities are NaN or infinite, so they are not corrected"
    ):
        assert np.isfinite(compare(trees)["elpd"]["vb"])


def test_a_factor_that_is_not_in_the_tree_leaves_the_draws_uncorrected(rng):
    """With its group the ELPD is that of the model: here the factor is the half of a prior N(0,
    0.1).
    """
    y = rng.normal(size=ROWS)
    tree, worse = variational(rng, y), gaussian(rng, y, sd=3.0)[0]
    half = norm.logpdf(tree["posterior"]["mu"], 0.0, 0.1)
    whole = replaced(tree.copy(deep=True), "log_prior", "mu", half)
    tree.attrs["factors"] = '["tilt"]'
    assert (
        "no `log_factor` in the tree to correct them"
        in doubts({"tree": tree, "worse": worse})["tree"]
    )
    tree["log_factor"] = xr.DataTree(
        xr.Dataset({"tilt": (["chain", "draw"], half)}, tree["posterior"].coords)
    )
    found = {
        name: compare({name: each, "worse": worse})["elpd"][name]
        for name, each in (("tree", tree), ("whole", whole))
    }
    assert found["tree"] == pytest.approx(found["whole"], abs=1e-9)


# Evidences.


def run(log_evidence, each=None, claims=None, **attrs):
    attrs = {"log_evidence": log_evidence, "ended": "finished"} | attrs
    if each is not None:
        ratios = np.exp(np.asarray(each) - log_evidence)
        attrs |= {
            "log_evidence_of_replicates": each,
            "log_evidence_se": float(np.std(ratios, ddof=1) / np.sqrt(len(ratios))),
        }
    if claims is not None:
        attrs["log_evidence_se_of_replicates"] = claims
    return tree_of({"posterior": {}}, **attrs)


def test_a_run_that_has_not_finished_is_doubted():
    trees = {
        "cut": run(-7.2, log_evidence_se=0.05, ended="budget"),
        "whole": run(-67.4, log_evidence_se=0.1),
    }
    found = doubts(trees)
    assert found["cut"].startswith("its run ended by 'budget' before it had finished")
    trees["cut"].attrs["ended"] = "finished"
    assert doubts(trees) == {"cut": "", "whole": ""}


def test_the_error_is_the_larger_of_spread_and_claim():
    apart, near = np.array([-30.0, -31.0]), np.array([-30.0, -30.001])
    spread = run(-30.5, apart).attrs["log_evidence_se"]
    assert uncertainty(run(-30.5, apart)) == (spread, 1)
    assert uncertainty(run(-30.5, apart, np.array([0.1, 0.1]))) == (spread, 1)
    assert uncertainty(run(-30.0, near, np.array([0.3, 0.5]))) == (
        pytest.approx(np.sqrt((0.09 + 0.25) / 4)),
        np.inf,
    )
    assert uncertainty(run(-30.0, log_evidence_se=0.3)) == (0.3, np.inf)


def test_few_replicates_are_asked_for_student_s_quantile():
    """The spread of three is known with 2 degrees of freedom, beside an error that is known."""
    three, best = np.array([-32.0, -32.2, -31.8]), run(-30.0, log_evidence_se=0.0)
    factor = t.ppf(norm.cdf(2.0), 2) * run(-32.0, three).attrs["log_evidence_se"]
    assert factor > 2 * 2 * run(-32.0, three).attrs["log_evidence_se"]
    for size, is_tie in ((0.99 * factor, True), (1.01 * factor, False)):
        trees = {"best": best, "three": run(-32.0, three)}
        trees["best"].attrs["log_evidence"] = -32.0 + size
        found = doubts(trees)
        assert (
            ("its log Bayes factor against the best" in found["three"])
            is ("log Bayes factor of three against it" in found["best"])
            is is_tie
        )


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [True, False])
def test_equal_evidences_are_ranked_as_seldom_as_two_errors_say(rng, claimed):
    """Two replicates each, with errors of 0.3: one pair in 22 passes two known errors.

    Of spreads taken as known one in six did.
    """
    ranked = naive = 0
    for _ in range(400):
        trees = {}
        for name in ("one", "other"):
            each = -30 + 0.3 * rng.normal(size=2)
            trees[name] = run(
                float(np.log(np.exp(each).mean())), each, np.full(2, 0.3) if claimed else None
            )
        ranked += not any(doubts(trees).values())
        apart = trees["one"].attrs["log_evidence"] - trees["other"].attrs["log_evidence"]
        naive += abs(apart) >= 2 * np.hypot(
            *(tree.attrs["log_evidence_se"] for tree in trees.values())
        )
    assert ranked <= 400 * 0.0455 + 3 * np.sqrt(400 * 0.0455)
    assert naive > 400 * 0.1


def test_evidences_that_are_not_finite(rng):
    y = rng.normal(size=ROWS)
    trees = {"a": gaussian(rng, y)[0], "b": gaussian(rng, y, sd=3.0)[0]}
    for one, other in ((np.nan, np.nan), (-np.inf, -np.inf), (np.inf, -3.0), (np.nan, -3.0)):
        for tree, value in zip(trees.values(), (one, other), strict=True):
            tree.attrs |= {"log_evidence": value, "log_evidence_se": 0.1}
        found = doubts(trees)
        assert found["a"] == "its log-evidence is not finite"
        assert found["b"] == ("" if np.isfinite(other) else found["a"])
    alone = {"a": run(np.inf, log_evidence_se=0.1), "b": run(-3.0, log_evidence_se=0.1)}
    with pytest.warns(UserWarning, match="not finite"):
        assert list(compare(alone).index) == ["b", "a"]


# Held-out rows.


def held_out(rng, sd, new, names, **attrs):
    mu = 0.1 * rng.normal(size=(4, 500))
    parts = np.array_split(np.arange(len(new)), len(names))
    groups = {
        "observed_data": {
            name: ([f"row_{name}"], new[part]) for name, part in zip(names, parts, strict=True)
        },
        "log_likelihood": {
            name: (["chain", "draw", f"row_{name}"], norm.logpdf(new[part], mu[..., None], sd))
            for name, part in zip(names, parts, strict=True)
        },
    }
    return tree_of(groups, **attrs)


def in_order(tree, names):
    """The same tree with its sites in another order."""
    return xr.DataTree.from_dict(
        {group: tree[group].to_dataset()[names] for group in ("observed_data", "log_likelihood")}
    )


def test_held_out_sites_are_matched_by_their_data(rng):
    y, new = rng.normal(size=ROWS), rng.normal(size=40)
    trees = {"right": gaussian(rng, y)[0], "wide": gaussian(rng, y, sd=3.0)[0]}
    right, wide = held_out(rng, 1.0, new, ("p", "q")), held_out(rng, 3.0, new, ("p", "q"))
    first = compare(trees, test={"right": right, "wide": wide})
    again = compare(trees, test={"right": right, "wide": in_order(wide, ["q", "p"])})
    assert again["test_dse"]["wide"] == pytest.approx(first["test_dse"]["wide"], rel=1e-9)
    bare = {
        name: tree.copy(deep=True)
        for name, tree in {"right": right, "wide": in_order(wide, ["q", "p"])}.items()
    }
    for tree in bare.values():
        del tree["observed_data"]  # by name, then
    assert compare(trees, test=bare)["test_dse"]["wide"] == pytest.approx(
        first["test_dse"]["wide"], rel=1e-9
    )
    rows = lambda tree, names: np.concatenate(
        [tree["log_likelihood"][name] for name in names], axis=-1
    )
    arrays = {"right": rows(right, "pq"), "wide": rows(wide, "qp")}
    # what a wrong order gives
    assert compare(trees, test=arrays)["test_dse"]["wide"] != pytest.approx(
        first["test_dse"]["wide"], rel=1e-3
    )


def test_equal_held_out_sites_are_matched_by_name(rng):
    y = rng.normal(size=ROWS)
    trees = {"right": gaussian(rng, y)[0], "wide": gaussian(rng, y, sd=3.0)[0]}
    right, wide = (
        held_out(rng, 1.0, np.zeros(10), ("p", "q")),
        held_out(rng, 3.0, np.zeros(10), ("p", "q")),
    )
    right, wide = (
        replaced(tree, "log_likelihood", "q", tree["log_likelihood"]["q"].values * 2)
        for tree in (right, wide)
    )
    first = compare(trees, test={"right": right, "wide": wide})
    again = compare(trees, test={"right": right, "wide": in_order(wide, ["q", "p"])})
    assert again["test_dse"]["wide"] == pytest.approx(first["test_dse"]["wide"], rel=1e-9)


def test_other_held_out_data_are_refused(rng):
    y, new = rng.normal(size=ROWS), rng.normal(size=40)
    trees = {"right": gaussian(rng, y)[0], "wide": gaussian(rng, y, sd=3.0)[0]}
    test = {"right": held_out(rng, 1.0, new, ("p",)), "wide": held_out(rng, 3.0, new + 100, ("p",))}
    with pytest.raises(
        ValueError, match="test: 'right' and 'wide' observe different data .the values differ"
    ):
        compare(trees, test=test)
    del test["wide"]["log_likelihood"]
    with pytest.raises(ValueError, match=r"test\['wide'\]: no log-likelihood"):
        compare(trees, test={"wide": test["wide"]})


def test_a_draw_may_rule_a_held_out_row_out(rng):
    y, values = rng.normal(size=ROWS), rng.normal(size=(4, 500, 6)) / 10
    trees = {"right": gaussian(rng, y)[0], "wide": gaussian(rng, y, sd=3.0)[0]}
    some = values.copy()
    some[0, :250, 2] = -np.inf  # an eighth of the draws
    table = compare(trees, test={"right": values + 1, "wide": some})
    assert table["test_score"]["wide"] == pytest.approx(np.log(np.exp(some).mean((0, 1))).sum())
    never = values.copy()
    never[..., 2] = -np.inf
    with pytest.warns(UserWarning, match="wide: 1 held-out rows have probability 0 in every draw"):
        table = compare(trees, test={"right": values + 1, "wide": never})
    assert table["test_score"]["wide"] == -np.inf
    with pytest.warns(UserWarning, match="right: 1 held-out rows"):
        assert compare(trees, test={"right": never, "wide": never})["test_score"].to_list() == [
            -np.inf,
            -np.inf,
        ]


def test_one_observation_has_no_standard_error(rng):
    mu = rng.normal(size=(4, 500))
    group = lambda sd: {"log_likelihood": {"y": (["chain", "draw"], norm.logpdf(0.3, mu, sd))}}
    trees = {
        name: tree_of({"posterior": {"mu": (["chain", "draw"], mu)}, **group(sd)})
        for name, sd in (("one", 2.0), ("other", 9.0))
    }
    assert doubts(trees) == {"one": "", "other": doubts(trees)["other"]}
    assert "which has no standard error" in doubts(trees)["other"]
