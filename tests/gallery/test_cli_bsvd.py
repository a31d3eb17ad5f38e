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

from gallery.commands.inputs import learn_entries, start_entries
from gallery.commands.predictive import predicted_entries
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
    write(room.folder / "nobody.csv", [["user", "film"], ["u99", "f0"]])
    commands = {
        "fit": [*FIT, "-o", "stars.nc", "--plot", "stars.png"],
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
    found = learn_entries(bsvd, ENTRIES)
    np.testing.assert_allclose([found.mean, found.scale], [100, ENTRIES["value"].std()])


def test_levels_are_not_standardised():
    levels = ENTRIES | {"value": np.arange(60) % 5, "link": ordered_probit}
    assert learn_entries(bsvd, levels) is None
    assert start_entries(bsvd, 1, levels) is None


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
    mean, std = np.array(rows, float).T
    assert header == ["mean", "std"]
    miss = np.abs(mean - values[~known])
    assert np.median(miss) < 0.2 < np.median(np.abs(values[~known] - values[known].mean()))
    assert (std > 0).all()


@pytest.mark.slow
def test_report_and_summary_leave_out_what_is_not_identified(done):
    assert "R-hat" in done["report"][1]
    for name in ("report", "summary"):
        assert not re.search(r"\b[usvz]\[", done[name][1])
    assert "rank" in done["summary"][1]


REFUSED = {
    "nobody": "category 'u99' was not seen in training",
    "wrong data": "model bsvd needs 'row', 'column'",
    "wrong picture": "--kind history: bsvd has none",
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
        ([["a", "b", "v"], ["1", "2", "many"]], "not a finite number"),
    ],
    ids=["two columns", "no column named", "a text"],
)
def test_a_table_of_no_entries_is_refused(tmp_path, rows, words):
    write(tmp_path / "t.csv", rows)
    with pytest.raises(TableError, match=words):
        read_matrix(tmp_path / "t.csv")
