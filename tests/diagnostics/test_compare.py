"""Comparison: columns equal to ArviZ's, to closed forms and to sums by hand; unsafe rankings say
why.
"""

import importlib
import warnings

import arviz as az
import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm

from diagnostics import compare
from diagnostics._comparison_rows import joined
from tests.diagnostics.trees import tree_of

ROWS = 60
# the package's name for it is the function
module = importlib.import_module("diagnostics.comparison")


@pytest.fixture
def rng():
    return np.random.default_rng(2)


def gaussian(rng, y, sd=1.0, draws=500, names=("y",), tail=0.0, **attrs):
    """Exact posterior draws of a normal mean with known sd and a flat prior; the data in one site
    or split over two.

    Returns the tree and its exact leave-one-out ELPD: y_i given the others is N(mean of the others,
    sd^2 (1 + 1 / (n - 1))).
    """
    n = len(y)
    mu = y.mean() + sd / np.sqrt(n) * rng.normal(size=(4, draws))
    logp = norm.logpdf(y, mu[..., None], sd)
    if tail:
        logp[..., 0] -= tail * np.exp(rng.normal(size=mu.shape))
    parts = np.array_split(np.arange(n), len(names))
    groups = {
        "posterior": {"mu": (["chain", "draw"], mu)},
        "observed_data": {
            name: ([f"row_{name}"], y[part]) for name, part in zip(names, parts, strict=True)
        },
        "log_likelihood": {
            name: (["chain", "draw", f"row_{name}"], logp[..., part])
            for name, part in zip(names, parts, strict=True)
        },
    }
    others = (y.sum() - y) / (n - 1)
    return tree_of(groups, **attrs), float(
        norm.logpdf(y, others, sd * np.sqrt(1 + 1 / (n - 1))).sum()
    )


@pytest.fixture
def pair(rng):
    y = rng.normal(size=ROWS)
    right, exact = gaussian(rng, y, log_evidence=-80.0, log_evidence_se=0.3)
    wide, exact_wide = gaussian(rng, y, sd=2.0, log_evidence=-90.0, log_evidence_se=0.4)
    return {"wide": wide, "right": right}, {"wide": exact_wide, "right": exact}


def test_elpd_is_the_exact_leave_one_out_score_and_arviz_s(pair):
    trees, exact = pair
    table = compare(trees)
    reference = az.compare(trees, round_to="none")
    assert list(table.index) == ["right", "wide"]
    for name in trees:
        assert table["elpd"][name] == pytest.approx(exact[name], abs=0.1)
        assert table["elpd"][name] == pytest.approx(reference["elpd"][name], abs=0.01)
        assert table["dse"][name] == pytest.approx(reference["dse"][name], abs=0.01)
        assert table["p"][name] == pytest.approx(reference["p"][name], abs=0.01)
    assert table["elpd_diff"]["wide"] == pytest.approx(exact["wide"] - exact["right"], abs=0.1)
    assert (table["unsafe"] == "").all()


def test_bayes_factors_and_their_errors(pair):
    table = compare(pair[0])
    assert table["log_bayes_factor"].to_dict() == {"right": 0.0, "wide": -10.0}
    assert table["log_bayes_factor_se"]["wide"] == pytest.approx(0.5)
    assert table["log_bayes_factor_se"]["right"] == 0.0


def test_evidence_errors_that_make_a_ranking_unsafe(pair):
    trees, _ = pair
    trees["wide"].attrs |= {"log_evidence": -80.9}
    with pytest.warns(
        UserWarning,
        match=r"log Bayes factor of wide against it is -0.9 \+- 0.5, not 2 standard errors below 0",
    ) as caught:
        table = compare(trees)
    assert len(caught) == 1
    assert table["unsafe"]["wide"].startswith(
        "its log Bayes factor against the best, right, is -0.9 +- 0.5"
    )
    trees["wide"].attrs["log_evidence_se"] = float("nan")
    with pytest.warns(UserWarning, match="wide: its log-evidence has no error"):
        compare(trees)


def test_a_high_khat_is_counted_and_warned_of_once(rng):
    y = rng.normal(size=ROWS)
    good, _ = gaussian(rng, y)
    bad, _ = gaussian(rng, y, sd=2.0, tail=3.0)
    with pytest.warns(UserWarning, match="good: ELPD of bad within two standard errors") as caught:
        table = compare({"good": good, "bad": bad})
    assert len(caught) == 1
    assert table["unsafe"]["bad"].startswith("1 rows with k-hat above 0.70")
    assert table["high_k"].to_dict() == {"good": 0, "bad": 1}


def test_two_runs_of_one_model_cannot_be_ranked(rng):
    y = rng.normal(size=ROWS)
    with pytest.warns(UserWarning, match="ELPD of .* within two standard errors"):
        table = compare({"one": gaussian(rng, y)[0], "other": gaussian(rng, y, sd=1.001)[0]})
    best, other = table.index
    size = f"({table['elpd_diff'][other]:.3g} +- {table['dse'][other]:.3g})"
    assert table["unsafe"][best] == f"ELPD of {other} within two standard errors {size}"
    assert table["unsafe"][other] == f"ELPD within two standard errors of the best, {best} {size}"


def test_several_sites_are_joined_and_matched_by_their_data(rng):
    """The same posterior with the data in one site, in two, and in two under other names and in
    the other order.
    """
    y = rng.normal(size=ROWS)
    split, exact = gaussian(rng, y, names=("a", "b"))
    swapped = split.copy(deep=True)
    for group in ("observed_data", "log_likelihood"):
        data = split[group].to_dataset()
        swapped[group].dataset = xr.Dataset({"p": data["b"].variable, "q": data["a"].variable})
    with pytest.warns(UserWarning, match=r"swapped within two standard errors \(0 \+- 0\)"):
        table = compare({"split": split, "swapped": swapped})
    assert table["elpd"]["split"] == pytest.approx(exact, abs=0.1)
    assert table["elpd"]["swapped"] == table["elpd"]["split"]
    assert table["dse"].to_list() == [0.0, 0.0]  # a wrong order would give the pairs a spread


def test_a_table_in_another_precision_is_the_same_table(rng):
    y = rng.normal(size=ROWS)
    one, exact = gaussian(rng, y)
    other = gaussian(rng, y.astype(np.float32))[0]
    assert other["observed_data"]["y"].dtype == np.float32
    with pytest.warns(UserWarning, match="within two standard errors"):
        table = compare({"one": one, "other": other})
    np.testing.assert_allclose(table["elpd"], exact, atol=0.1)
    with pytest.raises(ValueError, match="'one' and 'other' observe different data"):
        compare({"one": one, "other": gaussian(rng, (y * (1 + 1e-6)).astype(np.float32))[0]})


def test_other_data_are_refused_naming_both(rng):
    y = rng.normal(size=ROWS)
    one = gaussian(rng, y)[0]
    with pytest.raises(
        ValueError, match="'one' and 'short' observe different data.*shapes differ.*60.*59"
    ):
        compare({"one": one, "short": gaussian(rng, y[:-1])[0]})
    with pytest.raises(ValueError, match="'one' and 'other' observe different data.*values differ"):
        compare({"one": one, "other": gaussian(rng, y + 1e-3)[0]})
    bare = gaussian(rng, y[:-1])[0]
    del bare["observed_data"]
    with pytest.raises(ValueError, match="'one' has 60 log-likelihood terms, 'bare' has 59"):
        compare({"one": one, "bare": bare})


def test_missing_entries_are_no_rows(rng):
    y = rng.normal(size=ROWS)
    tree, exact = gaussian(rng, y)
    padded = tree.copy(deep=True)
    padded["observed_data"].dataset = xr.Dataset({"y": (["row_y"], np.append(y, np.nan))})
    ll = tree["log_likelihood"]["y"].values
    padded["log_likelihood"].dataset = xr.Dataset(
        {"y": (["chain", "draw", "row_y"], np.concatenate([ll, np.nan * ll[..., :1]], -1))}
    )
    assert (
        compare({"padded": padded})["elpd"]["padded"]
        == compare({"plain": tree})["elpd"]["plain"]
        == pytest.approx(exact, abs=0.1)
    )


def test_a_row_with_probability_one_adds_nothing(rng):
    """ArviZ itself refuses it: all ratios are the same."""
    y = rng.normal(size=ROWS)
    tree, _ = gaussian(rng, y)
    more = tree.copy(deep=True)
    ll = tree["log_likelihood"]["y"].values
    more["log_likelihood"].dataset = xr.Dataset(
        {"y": (["chain", "draw", "row_y"], np.concatenate([ll, 0 * ll[..., :1]], -1))}
    )
    del more["observed_data"]
    with pytest.raises(ValueError, match="All tail values are the same"):
        az.loo(more)
    table = compare({"more": more})
    assert table["elpd"]["more"] == pytest.approx(
        compare({"plain": tree})["elpd"]["plain"], abs=1e-9
    )
    assert table["high_k"]["more"] == 0


def test_held_out_score_is_the_closed_form_predictive(rng):
    y, new = rng.normal(size=ROWS), rng.normal(size=40)
    trees, test, exact = {}, {}, {}
    for name, sd in (("right", 1.0), ("wide", 3.0)):
        tree, _ = gaussian(rng, y, sd=sd, draws=2000)
        test[name] = norm.logpdf(new, tree["posterior"]["mu"].values[..., None], sd)
        exact[name] = norm.logpdf(new, y.mean(), sd * np.sqrt(1 + 1 / ROWS))
        trees[name] = tree
    table = compare(trees, test=test)
    for name in trees:
        assert table["test_score"][name] == pytest.approx(exact[name].sum(), abs=0.05)
    apart = exact["wide"] - exact["right"]
    assert table["test_diff"]["wide"] == pytest.approx(apart.sum(), abs=0.05)
    assert table["test_dse"]["wide"] == pytest.approx(np.sqrt(40 * np.var(apart, ddof=1)), rel=0.02)


def test_runs_on_other_data_are_compared_by_held_out_rows_alone(rng):
    """Log predictive probabilities of the rows, in place of draws of them."""
    y, exact = rng.normal(size=ROWS), rng.normal(size=(2, 9))
    exact[1] += 5.0
    trees = {"classes": gaussian(rng, y)[0], "features": gaussian(rng, y + 1)[0]}
    test = dict(zip(trees, exact, strict=True))
    table = compare(trees, test=test)
    assert list(table.columns) == ["rank", "test_score", "test_diff", "test_dse", "unsafe"]
    assert list(table.index) == ["features", "classes"]
    np.testing.assert_allclose(table["test_score"], exact.sum(1)[::-1])
    assert (table["unsafe"] == "").all()
    with pytest.raises(ValueError, match="'classes' and 'features' observe different data"):
        compare(trees, test={"classes": exact[0]})


def test_held_out_scores_rank_before_all_others(pair):
    trees, _ = pair
    rows = {"wide": np.linspace(1, 2, 9), "right": np.linspace(-2, -1, 9)}
    table = compare(trees, test=rows)
    assert list(table.index) == ["wide", "right"]
    assert table["elpd"]["right"] > table["elpd"]["wide"]


def test_held_out_tables_are_checked(pair):
    trees, _ = pair
    with pytest.raises(ValueError, match="test: .'third'. are not among the trees"):
        compare(trees, test={"third": np.zeros((4, 5, 6))})
    with pytest.raises(ValueError, match="'wide' has 6 held-out rows, 'right' has 7"):
        compare(trees, test={"wide": np.zeros((4, 5, 6)), "right": np.zeros((4, 5, 7))})
    with pytest.raises(
        ValueError, match="test.'wide'.: log-likelihoods .chain, draw, row., finite or -inf"
    ):
        compare(trees, test={"wide": np.full((4, 5, 6), np.nan)})


def test_evidence_alone_ranks_when_there_is_no_likelihood(rng):
    bare = {
        name: tree_of({"posterior": {}}, log_evidence=value, log_evidence_se=0.1)
        for name, value in (("a", -5.0), ("b", -3.0))
    }
    table = compare(bare)
    assert list(table.index) == ["b", "a"]
    assert "elpd" not in table
    del bare["a"].attrs["log_evidence"]
    with pytest.raises(ValueError, match="nothing to rank by.*log_likelihood"):
        compare(bare)


def test_variational_draws_are_corrected_with_log_q_and_doubted_without(rng):
    """q is 1.5 times too wide; with log_q the exact ELPD comes back, and it equals
    `az.loo_approximate_posterior`.
    """
    y = rng.normal(size=ROWS)
    _, exact = gaussian(rng, y)
    sd_q = 1.5 / np.sqrt(ROWS)
    mu = y.mean() + sd_q * rng.normal(size=(4, 1000))
    groups = {
        "posterior": {"mu": (["chain", "draw"], mu)},
        "observed_data": {"y": (["row"], y)},
        "log_likelihood": {"y": (["chain", "draw", "row"], norm.logpdf(y, mu[..., None]))},
        "sample_stats": {"elbo": (["chain", "step"], np.zeros((4, 10)))},
    }
    with pytest.warns(UserWarning, match="draws of an approximation"):
        plain = compare({"vb": tree_of(groups)})
    log_q = norm.logpdf(mu, y.mean(), sd_q)
    groups |= {
        "log_prior": {"mu": (["chain", "draw"], 0 * mu)},
        "log_q": {"log_q": (["chain", "draw"], log_q)},
    }
    tree = tree_of(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = compare({"vb": tree})
    log_p = tree["log_likelihood"]["y"].sum("row")
    assert table["elpd"]["vb"] == pytest.approx(
        az.loo_approximate_posterior(tree, log_p, tree["log_q"]["log_q"]).elpd, abs=1e-9
    )
    assert abs(table["elpd"]["vb"] - exact) < 0.1 < abs(plain["elpd"]["vb"] - exact)


def test_trees_are_checked():
    with pytest.raises(ValueError, match="trees: empty"):
        compare({})
    with pytest.raises(TypeError, match="found {'a': 'Dataset'}"):
        compare({"a": xr.Dataset()})
    for wrong in ([tree_of({"posterior": {}})], tree_of({"posterior": {}})):
        with pytest.raises(
            TypeError, match=f"trees: a dict of name -> DataTree; found {type(wrong).__name__}"
        ):
            compare(wrong)


def test_tail_of_correlated_draws_is_longer(rng):
    """The relative ESS is that of the likelihood, so labels that switch leave it alone; ArviZ
    then gives the same k-hat.
    """
    y = rng.normal(size=ROWS)
    tree, _ = gaussian(rng, y)
    # correlated, the same draws
    mu = np.sort(tree["posterior"]["mu"].values.reshape(4, 50, 10), axis=-1).reshape(4, 500)
    logp = norm.logpdf(y, mu[..., None])
    tree["log_likelihood"].dataset = xr.Dataset({"y": (["chain", "draw", "row_y"], logp)})
    efficiency = np.mean(
        [float(az.ess(np.exp(logp[..., i]), method="mean", relative=True)) for i in range(ROWS)]
    )
    assert efficiency < 0.9
    found = module._loo(tree, joined({"a": tree})["a"], None).pareto_k.values
    np.testing.assert_allclose(found, az.loo(tree, reff=efficiency, pointwise=True).pareto_k.values)
    assert np.abs(found - az.loo(tree, reff=1.0, pointwise=True).pareto_k.values).max() > 1e-3
