"""Reports of variational runs: k-hat equal to its closed form, and every spoiled run distrusted
for the right reason.
"""

import json

import numpy as np
import pytest
import xarray as xr

from diagnostics import _variational, report
from diagnostics._psis import psis
from tests.diagnostics import trees
from tests.diagnostics.trees import failed, replaced


@pytest.fixture
def rng():
    return np.random.default_rng(1)


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
    """For q = N(0, s) and p = N(0, 1) the weights have tail index 1 - s^2 below s = 1, and are
    bounded above.
    """
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


@pytest.mark.parametrize("at", [40, 55])
def test_a_jump_of_an_ascent_that_has_come_to_rest(rng, at):
    """As of a coordinate ascent that lets go of what it held: it is at rest after the jump, and
    not where it goes on to rise.
    """
    step = np.arange(61)
    jump = np.tile(np.where(step > at, -77.0, -97.0), (3, 1)) - 0.9**step
    tree = trees.variational(rng)
    tree = xr.DataTree.from_dict(
        {**tree.to_dict(), "/sample_stats": xr.Dataset({"elbo": (["chain", "step"], jump)})}
    )
    assert report(tree)["ELBO settled"].ok
    rising = xr.Dataset({"elbo": (["chain", "step"], jump + 0.02 * step)})
    assert failed(report(xr.DataTree.from_dict({**tree.to_dict(), "/sample_stats": rising}))) == {
        "ELBO settled"
    }


def test_noise_alone_is_no_drift_and_much_noise_no_answer(rng):
    flat = np.zeros((1, 400)) - 20
    alarms = sum(
        report(
            replaced(
                trees.variational(rng, 1), "sample_stats", "elbo", flat + rng.normal(size=(1, 400))
            )
        )["ELBO settled"].ok
        is False
        for _ in range(50)
    )
    assert alarms <= 2
    page = report(
        replaced(
            trees.variational(rng, 1), "sample_stats", "elbo", flat + 50 * rng.normal(size=(1, 400))
        )
    )
    assert page["ELBO settled"].ok is None


def test_a_local_optimum_shows_in_elbo_and_means(rng):
    tree = trees.variational(rng)
    shift = np.array([0.0, 0.0, 3.0])[:, None]
    tree = replaced(tree, "sample_stats", "elbo", tree["sample_stats"]["elbo"].values - shift)
    tree = replaced(tree, "posterior", "z", tree["posterior"]["z"].values + shift)
    page = report(tree)
    assert failed(page) == {"replicates: ELBO", "replicates: means"}
    # 3 - mean(0, 0, 3), in sd of 1
    assert page["replicates: means"].figures["furthest"] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("rise", [0.5, 0.9, -0.5])
def test_a_large_elbo_settles_to_the_same_nat_as_a_small_one(rng, rise):
    """A rise of 50 nats a quarter is one whatever 1e-4 of the ELBO may be; a large ELBO at rest
    is at rest.
    """
    noise = rng.normal(size=(3, 400))
    page = report(
        replaced(
            trees.variational(rng), "sample_stats", "elbo", -1e6 + rise * np.arange(400) + noise
        )
    )
    assert failed(page) == {"ELBO settled"}
    assert page["ELBO settled"].figures["tolerance"] == 1.0
    assert report(replaced(trees.variational(rng), "sample_stats", "elbo", -1e6 + noise)).trusted


def test_replicates_of_a_large_elbo_agree_to_the_same_nat_as_of_a_small_one(rng):
    elbo = trees.variational(rng)["sample_stats"]["elbo"].values - 1e6
    page = report(
        replaced(
            trees.variational(rng), "sample_stats", "elbo", elbo + np.array([[0.0], [0.0], [900.0]])
        )
    )
    assert failed(page) == {"replicates: ELBO"}
    assert page["replicates: ELBO"].figures["limit"] == 1.0
    assert report(replaced(trees.variational(rng), "sample_stats", "elbo", elbo)).trusted


def points(rng, z, **attrs):
    """Draws that are given; the guide says that it is sure of each."""
    tree = trees.variational(rng, **attrs)
    log_p = -0.5 * z**2
    for group, name, values in (
        ("posterior", "z", z),
        ("log_prior", "z", log_p / 2),
        ("log_likelihood", "y", log_p[..., None] / 2),
    ):
        tree = replaced(tree, group, name, values)
    return replaced(tree, "log_q", "log_q", 0 * z)


def test_a_point_mass_is_no_posterior(rng):
    """Its weights are all equal, so its k-hat is the best there is."""
    at = np.repeat([[0.1], [0.1], [0.1]], 1000, axis=1)
    page = report(points(rng, at))
    assert page["Pareto k-hat"].figures["largest"] == -np.inf
    assert failed(page) == {"draws", "Pareto k-hat"}
    assert page["draws"].figures == {"replicates": [0, 1, 2]}
    at[1:] += 0.01 * rng.normal(size=(2, 1000))
    # one start has collapsed
    assert report(points(rng, at))["draws"].figures == {"replicates": [0]}
    assert report(trees.variational(rng)).trusted


def test_a_site_that_is_a_point_is_pointed_out(rng):
    """The others are given it: an empirical-Bayes fit.

    A constant that the model computes is none of q's business.
    """
    tree = replaced(
        trees.variational(rng),
        "posterior",
        "constant",
        (["chain", "draw"], np.full((3, 1000), 0.1)),
    )
    assert report(tree).trusted
    page = report(
        replaced(tree, "log_prior", "constant", (["chain", "draw"], np.full((3, 1000), -1.0)))
    )
    assert page.unknown == ["draws"]
    assert page["draws"].figures == {"constant": ["constant"]}


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("count", [1, 1000])
def test_a_density_of_q_that_is_not_finite(rng, value, count):
    tree = trees.variational(rng)
    log_q = tree["log_q"]["log_q"].values.copy()
    log_q[0, :count] = value
    page = report(replaced(tree, "log_q", "log_q", log_q))
    assert failed(page) == {"Pareto k-hat"}
    assert "NaN or infinite" in page["Pareto k-hat"].reason


def test_rows_that_have_no_weights(rng):
    rows = rng.normal(size=(5, 1000))
    rows[1, 3], rows[2, 3], rows[3], rows[4, :500] = np.nan, np.inf, -np.inf, -np.inf
    weights, khat = psis(xr.DataArray(rows, dims=("row", "draw")), dims=("draw",))
    assert np.isnan(khat[1:4]).all()
    assert np.isnan(weights[1:4]).all()
    assert np.isfinite(khat[[0, 4]]).all()
    assert np.exp(weights[[0, 4]]).sum("draw").values == pytest.approx(1.0)
    assert (weights[4, :500] == -np.inf).all()  # a draw that the posterior rules out is no fault


def test_too_few_draws_for_a_tail_are_not_called_a_bad_guide(rng):
    page = report(trees.variational(rng, draws=24))
    assert page.unknown == ["Pareto k-hat"]
    assert "Fewer than 25 draws" in page["Pareto k-hat"].reason


def test_a_factor_belongs_to_the_model(rng):
    """exp(0.4 z^2) widens the posterior from N(0, 1) to N(0, sqrt 5), beside which q = N(0, 1)
    has the tail index 1 - 1 / 5.
    """
    tree = trees.variational(rng, draws=4000)
    assert report(tree)["Pareto k-hat"].figures["largest"] < 0  # of the model without it
    tree.attrs["factors"] = json.dumps(["scope/tilt"])
    page = report(tree)
    assert page.unknown == ["Pareto k-hat"]
    assert "Not in the tree: log_factor." in page["Pareto k-hat"].reason
    tilt = 0.4 * tree["posterior"]["z"].values ** 2
    tree["log_factor"] = xr.DataTree(
        xr.Dataset({"scope.tilt": (["chain", "draw"], tilt)}, tree["posterior"].coords)
    )
    page = report(tree)
    assert failed(page) <= {"Pareto k-hat"}
    assert page["Pareto k-hat"].figures["largest"] == pytest.approx(0.8, abs=0.15)


def test_densities_of_other_draws_are_refused(rng):
    tree = trees.variational(rng)
    tree["log_q"].dataset = tree["log_q"].to_dataset().assign_coords(chain=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"log_q: 3 chains with coordinates \[1, 2, 3\].*log_prior has 3"
    ):
        report(tree)


@pytest.mark.parametrize(
    ("khat", "ok"),
    [(0.69, True), (0.71, None), (0.80, None), (0.83, False), (np.inf, False), (np.nan, False)],
)
def test_khat_decides_nothing_within_its_own_error_of_the_limit(rng, monkeypatch, khat, ok):
    """The limit and its error add up to 0.824 where the tail has 189 of 4000 draws.

    This is 0.7 + 1.7 / sqrt(189).
    """
    monkeypatch.setattr(_variational, "pareto_k", lambda tree: (np.array([0.1, khat]), 0.7))
    assert report(trees.variational(rng, draws=4000))["Pareto k-hat"].ok is ok


def test_labels_that_stand_still_in_each_replicate_are_told_apart_in_half_steps(rng):
    tree = trees.variational(rng).to_dict()
    label = xr.DataArray(
        np.repeat([[0], [0], [3]], tree["/posterior"].sizes["draw"], axis=1), dims=("chain", "draw")
    )
    page = report(xr.DataTree.from_dict({**tree, "/posterior": tree["/posterior"].assign(k=label)}))
    assert page["replicates: means"].ok is False
    # 3 - mean(0, 0, 3), in halves
    assert page["replicates: means"].figures["furthest"] == pytest.approx(4.0)
