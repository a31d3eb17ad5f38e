"""The command `zoo` on Archipelago: few labels, and points that were rejected on their way."""

import csv
import io
import os
import re

import arviz as az
import numpy as np
import pytest

from tests.gallery.command import many, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ZOO_ALL_CHECKS" not in os.environ,
        reason="takes minutes, for it compiles anew; ZOO_ALL_CHECKS=1 and -m slow run it",
    ),
]


@pytest.fixture(scope="module")
def done(room):
    """Exit code, output and errors of each command, run one after the other."""
    x = np.random.default_rng(0).normal(size=8) + np.repeat([-3, 3], 4)
    kinds = ["left", "", "", "", "right", "", "", ""]
    write(
        room.folder / "line.csv",
        [
            ["place", "kind"],
            *([f"{place:.3f}", kind] for place, kind in zip(x, kinds, strict=True)),
        ],
    )
    write(room.folder / "line_new.csv", [["place"], ["-3"], ["3"]])
    write(room.folder / "line_hole.csv", [["place", "kind"], ["", "left"]])
    told = [
        "--option",
        "num_warmup=15",
        "num_samples=15",
        "num_chains=1",
        "capacity=16",
        "max_capacity=64",
    ]
    commands = {
        "fit": [
            "fit",
            "archipelago",
            "--data",
            "line.csv",
            *told,
            "-o",
            "line.nc",
            "--plot",
            "line.png",
        ],
        "predict": ["predict", "line.nc", "line_new.csv"],
        "hole": ["predict", "line.nc", "line_hole.csv"],
        "summary": ["summary", "line.nc"],
        "report": ["report", "line.nc"],
        "compare": ["compare", "line.nc", "line.nc"],
    }
    return dict(zip(commands, many(room, list(commands.values())), strict=True))


def test_fit_keeps_the_history_and_draws_it(done, room):
    code, out, err = done["fit"]
    assert (code, err) == (0, "")
    assert "archipelago on line (8 rows, 1 features, 2 classes): LatentHistory" in out
    assert "amplitude[left]" in out
    assert (room.folder / "line.png").stat().st_size > 5000
    assert az.from_netcdf(room.folder / "line.nc")["posterior"]["function"].dims[:3] == (
        "chain",
        "draw",
        "row",
    )


def test_new_rows_are_classified(done):
    code, out, err = done["predict"]
    assert (code, err) == (0, "")
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["left", "right", "predicted"]
    assert [row[-1] for row in rows] == ["left", "right"]


def test_report_and_summary_read_the_run(done):
    assert "R-hat" in done["report"][1]
    assert "num_rejected" in done["summary"][1]
    assert "rejected_noise" not in done["summary"][1]


REFUSED = {
    "hole": "archipelago takes no missing features, and 1 rows have some",
    "compare": "a run named twice",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(done, name):
    code, _, err = done[name]
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(REFUSED[name], err), err
