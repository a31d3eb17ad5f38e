"""The command `zoo` on local experts: a table with holes, for one task and for several."""

import csv
import io
import re

import arviz as az
import numpy as np
import pytest

from tests.gallery.command import many, write

pytestmark = pytest.mark.slow

TINY = ["--option", "num_experts=4", "num_samples=20", "num_warmup=30"]
NEW = [["second", "first", "field"], ["0", "-3", "north"], ["", "3", "south"]]


def rows():
    """The class is on which side of 0 the first number is; every seventh cell of the second is
    missing.
    """
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(-3, 1, (40, 2)), rng.normal(3, 1, (40, 2))])
    where, kind = ("north", "south"), ("hi", "lo")
    cells = [
        [f"{a:.3f}", "" if i % 7 == 0 else f"{b:.3f}", where[i % 2], kind[int(a < 0)]]
        for i, (a, b) in enumerate(x)
    ]
    return [["first", "second", "field", "kind"], *cells]


@pytest.fixture(scope="module")
def done(room):
    """Exit code, output and errors of each command, run one after the other."""
    write(room.folder / "sides.csv", rows())
    write(room.folder / "points.csv", [[*row[:2], row[3]] for row in rows()])
    write(room.folder / "sides_new.csv", NEW)
    write(room.folder / "west.csv", [NEW[0], ["0", "-3", "west"]])
    fit = ["fit", "iqgme_tasks", "--data", "sides.csv", *TINY, "num_groups=3"]
    by_draws = ["fit", "iqgme", "--kernel", "conditionalgibbs", "--data", "points.csv", *TINY]
    commands = {
        "fit": ["fit", "iqgme", "--data", "points.csv", *TINY, "-o", "one.nc", "--plot", "one.png"],
        "fit draws": [*by_draws, "-o", "draws.nc", "--plot", "draws.png"],
        "predict draws": ["predict", "draws.nc", "sides_new.csv"],
        "report": ["report", "one.nc"],
        "summary": ["summary", "one.nc", "--var-names", "alpha"],
        "compare": ["compare", "one.nc", "tasks.nc"],
        "fit tasks": [*fit, "--task", "field", "-o", "tasks.nc", "--plot", "tasks.png"],
        "predict": ["predict", "tasks.nc", "sides_new.csv"],
        "predict unknown": ["predict", "tasks.nc", "west.csv"],
        "no task": [*fit, "-o", "never.nc"],
        "no such task": [*fit, "--task", "farm", "-o", "never.nc"],
    }
    order = [name for name in commands if name.startswith("fit")]
    order += [name for name in commands if name not in order]
    return dict(zip(order, many(room, [commands[name] for name in order]), strict=True))


@pytest.mark.parametrize("name", ["one", "tasks"])
def test_fit_draws_the_bound_and_names_what_it_found(done, room, name):
    code, out, err = done["fit" if name == "one" else "fit tasks"]
    assert (code, err) == (0, "")
    assert "CoordinateAscent, num_warmup 30" in out
    assert "alpha" in out
    assert (room.folder / f"{name}.png").stat().st_size > 5000
    tree = az.from_netcdf(room.folder / f"{name}.nc")
    assert list(tree["constant_data"]["feature"].values) == ["first", "second"]
    bound, groups = (tree["sample_stats"][name].values[0, -1] for name in ("elbo", "num_groups"))
    assert f"ELBO {bound:.1f} (lower bound of the log-evidence), {groups} groups in use\n" in out


def test_draws_are_named_and_drawn(done, room):
    code, out, err = done["fit draws"]
    assert (code, err) == (0, "")
    assert "ConditionalGibbs, num_warmup 30" in out
    assert (room.folder / "draws.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["predict", "predict draws"])
def test_new_rows_are_classified_whatever_they_miss(done, name):
    code, out, err = done[name]
    assert (code, err) == (0, "")
    header, *found = csv.reader(io.StringIO(out))
    assert header == ["hi", "lo", "predicted"]
    assert [row[-1] for row in found] == ["lo", "hi"]
    assert all(abs(float(row[0]) + float(row[1]) - 1) < 1e-4 for row in found)
    assert max(map(float, found[0][:2])) > 0.8


def test_tasks_have_their_names(done, room):
    tree = az.from_netcdf(room.folder / "tasks.nc")
    assert tree.attrs["task"] == "field"
    assert list(tree["posterior"]["V"].coords["task"].values) == ["north", "south"]


def test_report_and_summary_read_the_run(done):
    assert "ELBO" in done["report"][1]
    assert re.search(r"^alpha ", done["summary"][1], flags=re.MULTILINE)


REFUSED = {
    "predict unknown": "category 'west' was not seen in training; known are north, south",
    "no task": "wants the task of each row: name its column with --task",
    "no such task": "no column 'farm' to be the task",
    "compare": "and their held-out scores are of different rows",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(done, name, room):
    code, _, err = done[name]
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(REFUSED[name], err), err
    assert not (room.folder / "never.nc").exists()
