"""The command `zoo` on a matrix with holes: entries from a table, and predictions of others."""

import csv
import io
import json
import re

import arviz as az
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from scipy.stats import norm

from gallery._links import Ordered
from gallery.commands import predictive
from gallery.commands.inputs import learn_link, start_entries
from gallery.commands.predictive import draws_of, log_scores_of_levels, predicted_entries
from gallery.tables import TableError, read_matrix
from tests.gallery.command import many, write
from zoo.bsvd import bsvd, ordered_probit

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

FIT = [
    "fit",
    "bsvd",
    "--data",
    "stars.csv",
    "--option",
    "num_components=2",
    "num_warmup=30",
    "num_samples=30",
]


LEVELS = ["fit", "bsvd", "--option", "num_components=2", "num_warmup=60", "num_samples=150"]
LEVELS += ["link=ordered_probit", "--data"]


def matrix():
    """A matrix of rank one plus a constant, and which of its entries are known."""
    rng = np.random.default_rng(0)
    return np.outer(rng.normal(size=9), rng.normal(size=8)) + 3000, rng.random((9, 8)) < 0.7


@pytest.fixture(scope="module")
def done(room):
    """Exit code, output and errors of each command, run one after the other."""
    values, known = matrix()
    places = np.argwhere(known)[::-1]
    write(
        room.folder / "stars.csv",
        [
            ["user", "film", "stars"],
            *([f"u{i}", f"f{j}", f"{values[i, j]:.4f}"] for i, j in places),
        ],
    )
    write(
        room.folder / "asked.csv",
        [["film", "why", "user"], *([f"f{j}", "x", f"u{i}"] for i, j in np.argwhere(~known))],
    )
    levels = np.clip(np.round(values - 2996.5), 2, 5).astype(int)
    rated = [[f"u{i}", f"f{j}", levels[i, j]] for i, j in places]
    write(room.folder / "levels.csv", [["user", "film", "stars"], *rated])
    write(room.folder / "nobody.csv", [["user", "film"], ["u99", "f0"]])
    commands = {
        "fit": [*FIT, "-o", "stars.nc", "--plot", "stars.png"],
        # on a busy machine the fit is too long to be repeated unasked
        "levels": [
            *LEVELS,
            "levels.csv",
            "--test",
            "0.2",
            "-o",
            "levels.nc",
            "--plot",
            "levels.png",
        ],
        "predict levels": ["predict", "levels.nc", "asked.csv"],
        "report levels": ["report", "levels.nc"],
        "no levels": [*LEVELS, "stars.csv", "-o", "never.nc"],
        "predict": ["predict", "stars.nc", "asked.csv"],
        "report": ["report", "stars.nc"],
        "summary": ["summary", "stars.nc"],
        "compare": ["compare", "stars.nc", "fewer.nc"],
        "nobody": ["predict", "stars.nc", "nobody.csv"],
        "wrong data": ["fit", "bsvd", "--data", "wine", "-o", "never.nc"],
        "wrong picture": ["plot", "stars.nc", "--kind", "history"],
    }
    found = dict(zip(commands, many(room, list(commands.values())), strict=True))
    return found


@pytest.mark.slow
def test_entries_are_fitted_and_drawn(done, room):
    code, out, err = done["fit"]
    assert (code, err) == (0, "")
    assert re.search(r"^rank +", out, flags=re.MULTILINE)
    assert "u[" not in out
    assert (room.folder / "stars.png").stat().st_size > 5000
    tree = az.from_netcdf(room.folder / "stars.nc")
    assert json.loads(tree.attrs["entries"]) == ["user", "film"]
    assert "not_identified" in tree["posterior"]["u"].attrs
    assert "not_identified" not in tree["posterior"]["rank"].attrs
    values, known = matrix()
    np.testing.assert_allclose(
        [tree.attrs["shift"], tree.attrs["scale"]],
        [values[known].mean(), values[known].std()],
        rtol=1e-3,
    )
    np.testing.assert_allclose(tree["observed_data"]["y"].std(), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_a_quantity_without_draws_is_not_predicted_from_its_prior(done, room):
    tree = az.from_netcdf(room.folder / "stars.nc")
    tree["posterior"] = tree["posterior"].to_dataset().drop_vars("z")
    with pytest.raises(ValueError, match="the run has no draws of z"):
        predicted_entries(tree, np.array([0]), np.array([0]))


ENTRIES = {
    "row": np.arange(60) // 6,
    "column": np.arange(60) % 6,
    "value": np.linspace(90.0, 110.0, 60),
    "shape": (10, 6),
}


def test_real_entries_are_standardised():
    found = learn_link(bsvd, ENTRIES).standardiser
    np.testing.assert_allclose([found.mean, found.scale], [100, ENTRIES["value"].std()])
    assert learn_link(bsvd, ENTRIES, is_raw=True) is None


def test_levels_are_recoded_and_not_standardised():
    """A chain starts at the cutpoints of the shares of levels, with nothing else."""
    stars = ENTRIES | {"value": 2.0 + np.arange(60) % 4, "link": ordered_probit}
    link = learn_link(bsvd, stars, is_raw=True)
    assert link == learn_link(bsvd, stars) == Ordered((2, 3, 4, 5))
    coded = stars | link.settings | {"value": np.arange(60) % 4}
    start = start_entries(bsvd, 2, coded, link)
    np.testing.assert_allclose(start["intercept"], [norm.ppf(0.75)] * 2)
    np.testing.assert_allclose(np.exp(start["gaps"]), [[-norm.ppf(0.25)] * 2] * 2)
    assert not any(start[name].any() for name in ("z", "row_weights", "column_weights"))


def made_up(names, draws=4000):
    """A run of a matrix of 2 x 3, all of its draws alike."""
    sites = {
        "z": (["component"], [1]),
        "s": (["component"], [0.5]),
        "u": (["row", "component"], [[2.0], [-1.0]]),
        "v": (["column", "component"], [[1.0], [-2.0], [0.0]]),
        "row_precision": (["column_feature"], [4.0]),
        "row_weights": (["row", "column_feature"], [[0.5], [1.0]]),
        "column_precision": (["row_feature"], [1.0]),
        "column_weights": (["column", "row_feature"], [[0.0], [3.0], [1.0]]),
        "intercept": ([], 7.0),
        "alpha": ([], 100.0),
        "alpha_s": ([], 1.0),
    }
    alike = {
        name: (["chain", "draw", *dims], np.broadcast_to(value, (1, draws, *np.shape(value))))
        for name, (dims, value) in sites.items()
    }
    tree = xr.DataTree.from_dict({"posterior": xr.Dataset(alike)})
    arguments = json.dumps({"shape": [2, 3], "num_components": 1})
    tree.attrs |= {"model": "bsvd", "arguments": arguments, "categories": json.dumps(names)}
    return tree


def test_a_row_without_entries_is_predicted_from_its_prior():
    """Its factor has variance 1, and its effect 1 / 4; noise has variance 1 / 100."""
    tree = made_up({"user": ["a", "b"], "film": ["f", "g", "h"]})
    mean, std = predicted_entries(tree, np.array([2, 2, 0, 2]), np.array([0, 1, 1, 3]))
    wanted = np.sqrt([0.25 + 0.25 + 0.01, 1 + 0.25 + 0.01, 0.01, 0.25 + 0.25 + 1 + 0.01])
    assert (abs(mean - [7, 10, 8.5, 7])[:3] < 4 * wanted[:3] / np.sqrt(4000)).all()
    np.testing.assert_allclose(std, wanted, rtol=0.1)
    known = predicted_entries(tree, np.array([0]), np.array([1]))
    np.testing.assert_allclose(np.ravel(known), [8.5, 0.1], rtol=0.1)
    with pytest.raises(ValueError, match="found row or column 2 .. 2, wanted 0 .. 1"):
        predicted_entries(made_up({}), np.array([2]), np.array([0]))


def shares_of_levels(tree, row, column):
    """The probability of each level of an entry, by hand from the draws."""
    draws = {name: np.asarray(values) for name, values in draws_of(tree).items()}
    predictor = (draws["u"][:, row] * draws["v"][:, column] * draws["s"] * draws["z"]).sum(1)
    predictor += draws["intercept"] + draws["row_weights"][:, row, 0]
    predictor += draws["column_weights"][:, column, 0]
    cutpoints = np.cumsum(np.pad(draws["gaps"], [(0, 0), (1, 0)]), axis=1)
    below = norm.cdf(cutpoints - predictor[:, None])
    return np.column_stack([below[:, 0], np.diff(below), 1 - below[:, -1]]).mean(0)


def check_levels(tree):
    places = np.array([0, 3, 8]), np.array([1, 7, 2])
    mean, std = predicted_entries(tree, *places)
    share = np.array([shares_of_levels(tree, *place) for place in zip(*places, strict=True)])
    wanted = share @ [2, 3, 4, 5]
    variance = np.sum(share * (np.array([2, 3, 4, 5]) - wanted[:, None]) ** 2, axis=1)
    found = log_scores_of_levels(tree, *places, np.array([5, 3, 2]))
    np.testing.assert_allclose(np.exp(found), share[np.arange(3), [3, 1, 0]], rtol=1e-3)
    # one level is drawn for each draw of the posterior
    assert (abs(mean - wanted) < 4 * np.sqrt(variance / 300)).all()
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=0.25)


@pytest.mark.slow
def test_levels_are_fitted_and_predicted_in_stars(done, room, monkeypatch):
    code, out, err = done["levels"]
    assert (code, err) == (0, "")
    assert re.search(r"^gaps\[1\] +", out, flags=re.MULTILINE)
    assert re.search(r"by a fit to the others +RMSE +log score\n", out)
    assert (room.folder / "levels.png").stat().st_size > 5000
    assert done["report levels"][0] in (0, 1)
    tree = az.from_netcdf(room.folder / "levels.nc")
    assert set(np.unique(tree["observed_data"]["y"])) == {0, 1, 2, 3}
    check_levels(tree)
    _, *rows = csv.reader(io.StringIO(done["predict levels"][1]))
    mean, std = np.array(rows)[:, 2:].astype(float).T
    assert ((mean > 2) & (mean < 5) & (std > 0)).all()
    values, known = matrix()
    assert np.corrcoef(mean, values[~known])[0, 1] > 0.6
    monkeypatch.setattr(predictive.Ordered, "decoded", lambda link, codes: codes + 1.0)
    with pytest.raises(AssertionError):
        check_levels(tree)


def test_chains_start_with_the_components_that_entries_can_tell_of():
    """As the completer does; a draw of the prior has none, most often."""
    more = {name: np.tile(ENTRIES[name], 5) for name in ("row", "column", "value")} | {
        "shape": (10, 6),
        "num_components": 9,
    }
    np.testing.assert_array_equal(start_entries(bsvd, 1, more)["z"], np.arange(9) < 300 // (8 * 16))
    assert start_entries(bsvd, 3, more)["z"].shape == (3, 9)
    np.testing.assert_array_equal(start_entries(bsvd, 1, ENTRIES | {"num_components": 1})["z"], [0])


def test_a_model_without_components_starts_anywhere():
    def additive(row, column, value=None, *, shape):
        with numpyro.plate("item", shape[0]):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("entry", len(row)):
            return numpyro.sample("y", dist.Normal(effect[row], 1.0), obs=value)

    assert start_entries(additive, 2, ENTRIES) is None


@pytest.mark.slow
def test_entries_that_were_not_seen_are_predicted(done):
    values, known = matrix()
    code, out, err = done["predict"]
    assert (code, err) == (0, "")
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["user", "film", "mean", "std"]
    assert [row[:2] for row in rows] == [[f"u{i}", f"f{j}"] for i, j in np.argwhere(~known)]
    mean, std = np.array(rows)[:, 2:].astype(float).T
    miss = np.abs(mean - values[~known])
    assert np.median(miss) < 0.2 < np.median(np.abs(values[~known] - values[known].mean()))
    assert (std > 0).all()


@pytest.mark.slow
def test_report_and_summary_leave_out_what_is_not_identified(done):
    assert "R-hat" in done["report"][1]
    for name in ("report", "summary"):
        assert not re.search(r"\b[usvz]\[", done[name][1])
    assert "rank" in done["summary"][1]


@pytest.mark.slow
def test_a_user_without_entries_is_predicted(done):
    code, out, err = done["nobody"]
    assert code == 0, err
    assert "the fit has not seen the 'user' of 1 line, predicted as one without entries" in err
    assert out.splitlines()[1].startswith("u99,f0,")


REFUSED = {
    "no levels": r"values: found \S+ at row \d+, column \d+, wanted integers under this link",
    "wrong data": "model bsvd needs 'row', 'column'",
    "wrong picture": "--kind history: this run of bsvd has none",
    "compare": "fewer.nc: no such file",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(done, name, room):
    code, _, err = done[name]
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(REFUSED[name], err), err
    assert not (room.folder / "never.nc").exists()


def test_a_table_of_entries_is_read(tmp_path):
    write(
        tmp_path / "t.csv", [["b", "v", "a"], ["10", "1.5", "x"], ["9", "", "x"], ["9", "2", "y"]]
    )
    found = read_matrix(tmp_path / "t.csv", "v")
    assert found.categories == {"b": ("9", "10"), "a": ("x", "y")}
    assert [found.rows.tolist(), found.cols.tolist(), found["values"].tolist()] == [
        [1, 0],
        [0, 1],
        [1.5, 2.0],
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["a", "v"], ["1", "2"]], "two others"),
        ([["a", "b", "v"], ["1", "", "2"]], "it is empty"),
        ([["a", "b", "v"], ["1", "2", "many"]], "'v' holds texts, such as 'many'"),
        ([["a", "b", "v"], ["1", "2", "many"], ["1", "3", "4"]], "not a finite number"),
    ],
    ids=["two columns", "no column named", "texts", "a text"],
)
def test_a_table_of_no_entries_is_refused(tmp_path, rows, words):
    write(tmp_path / "t.csv", rows)
    with pytest.raises(TableError, match=words):
        read_matrix(tmp_path / "t.csv")
