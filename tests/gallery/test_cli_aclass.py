"""The command `zoo` on a model of the zoo: rows with missing features and labels, a kernel that
integrates its parameters out.
"""

import csv
import json
import re

import arviz as az
import numpy as np
import pytest

import gallery._columns
from gallery import AClassClassifier
from tests.gallery.command import many, write
from zoo.aclass import normal_inverse_chi2

pytestmark = pytest.mark.slow

ROWS = [
    ["height", "spots", "colour", "kind"],
    # the first row has no label: with particles enough, everything is then exact
    ["8", "0", "blue", ""],
    ["1.5", "1", "red", "u"],
    ["", "0", "blue", "v"],
    ["2.5", "1", "", "u"],
    ["9", "", "red", "v"],
    ["1", "1", "red", "u"],
]
NEW = [["colour", "height", "spots"], ["red", "2", "1"], ["", "", "0"], ["blue", "9.5", ""]]
LATER = [
    ["kind", "spots", "height", "note", "colour"],
    ["v", "0", "8.5", "x", ""],
    ["", "1", "1.2", "", "red"],
]
SMALL = ["--option", "num_samples=50"]
FIT = ["fit", "aclass", "--data", "plants.csv", *SMALL]


@pytest.fixture(scope="module")
def done(room):
    """Exit code, output and errors of each command, run one after the other."""
    write(room.folder / "plants.csv", ROWS)
    write(room.folder / "unseen.csv", NEW)
    write(room.folder / "later.csv", LATER)
    write(room.folder / "no class.csv", [row[1:] for row in LATER])
    write(room.folder / "new class.csv", [*LATER, ["w", "1", "1", "", ""]])
    write(room.folder / "two spots.csv", [*LATER, ["u", "2", "1", "", ""]])
    commands = {
        "fit": [*FIT, "-o", "plants.nc", "--plot", "plants.png", "--checkpoint", "plants"],
        "resume": ["resume", "plants"],
        "report": ["report", "plants.nc"],
        "plot": ["plot", "plants.nc", "--kind", "forest", "-o", "forest.png"],
        "predict": ["predict", "plants.nc", "unseen.csv", "-o", "kinds.csv"],
        "kernel": [
            *FIT,
            "num_particles=7",
            "resampling=systematic",
            "num_chains=1",
            "-o",
            "seven.nc",
        ],
        "component": [*FIT, "num_chains=1", "component=gamma_poisson", "-o", "never.nc"],
        "unknown component": [*FIT, "component=gama_poisson", "-o", "never.nc"],
        "wrong kind": [*FIT, "num_particles=few", "-o", "never.nc"],
        "gibbs": [
            *FIT,
            "num_warmup=20",
            "num_chains=2",
            "--kernel",
            "collapsedgibbs",
            "-o",
            "gibbs.nc",
            "--plot",
            "gibbs.png",
        ],
        "predict by gibbs": ["predict", "gibbs.nc", "unseen.csv"],
        "compare": ["compare", "plants.nc", "seven.nc"],
        "update": ["update", "plants.nc", "later.csv", "-o", "updated.nc"],
        "predict updated": ["predict", "updated.nc", "unseen.csv", "-o", "updated.csv"],
        "report updated": ["report", "updated.nc"],
        "update in place": ["update", "seven.nc", "later.csv"],
        "update, no class": ["update", "plants.nc", "no class.csv", "-o", "never.nc"],
        "update, new class": ["update", "plants.nc", "new class.csv", "-o", "never.nc"],
        "update, new number": ["update", "plants.nc", "two spots.csv", "-o", "never.nc"],
        "update, no columns": ["update", "plants.nc", "unseen.csv", "-o", "never.nc"],
        "update a chain": ["update", "gibbs.nc", "later.csv", "-o", "never.nc"],
        "update, file exists": ["update", "plants.nc", "later.csv", "-o", "gibbs.nc"],
        "update no run": ["update", "text.nc", "later.csv", "-o", "never.nc"],
    }
    found = dict(zip(commands, many(room, list(commands.values())), strict=True))
    (room.folder / "plants.csv").unlink()
    [found["predict without data"]] = many(room, [["predict", "plants.nc", "unseen.csv"]])
    return found


def test_fit_keeps_partitions_evidence_and_names(done, room):
    code, out, err = done["fit"]
    assert (code, err) == (0, "")
    assert (
        "aclass on plants (6 rows, 3 features, 2 classes): ParticleFilter, num_samples 50, "
        "num_chains 4, seed 0" in out
    )
    assert "share[v]" in out
    tree = az.from_netcdf(room.folder / "plants.nc")
    assert tree["posterior"]["z"].dims == ("chain", "draw", "row")
    assert json.loads(tree.attrs["partition"]) == ["z", "y"]
    assert np.isfinite([tree.attrs["log_evidence"], tree.attrs["log_evidence_se"]]).all()
    assert (
        f"log-evidence {tree.attrs['log_evidence']:.1f} +- {tree.attrs['log_evidence_se']:.1f}\n"
        in out
    )
    assert json.loads(tree.attrs["categories"]) == {"colour": ["blue", "red"]}
    assert (room.folder / "plants.png").stat().st_size > 5000


def test_finished_run_is_resumed_without_a_step(done):
    assert done["resume"][0] == 0
    assert " 0 steps in" in done["resume"][1]


def test_report_trusts_what_is_exact(done):
    """As many particles as there are partitions: replicates have one evidence."""
    code, out, _ = done["report"]
    assert (code, "NOT TRUSTED" in out) == (0, False)
    assert done["plot"][0] == 0


def check_probabilities(room, name="kinds.csv", later=False, rtol=1e-3, **settings):
    x = np.array(
        [[8, 0, 0], [1.5, 1, 1], [np.nan, 0, 0], [2.5, 1, np.nan], [9, np.nan, 1], [1, 1, 1]]
    )
    new = np.array([[2, 1, 1], [np.nan, 0, np.nan], [9.5, np.nan, 0]])
    frame = lambda table: [
        [*row[:2], None if np.isnan(row[2]) else ("blue", "red")[int(row[2])]]
        for row in table.tolist()
    ]
    y = np.array([-1, "u", "v", "u", "v", "u"], object)
    with pytest.MonkeyPatch.context() as patch:
        # the command keeps the priors of the model
        patch.setattr(gallery._columns, "STANDARDISED", normal_inverse_chi2)
        fitted = AClassClassifier(200, random_state=0, **settings).fit(frame(x), y)
    if later:
        fitted.partial_fit(
            frame(np.array([[8.5, 0, np.nan], [1.2, 1, 1]])), np.array(["v", -1], object)
        )
    wanted = fitted.predict_proba(frame(new))
    header, *written = list(csv.reader((room.folder / name).read_text().splitlines()))
    assert header == ["u", "v", "predicted"]
    np.testing.assert_allclose([[float(cell) for cell in row[:2]] for row in written], wanted, rtol)


def test_predictions_are_those_of_the_estimator(done, room, numpyro_promotion):
    assert done["predict"][:3:2] == [0, ""]
    check_probabilities(room)
    with pytest.raises(AssertionError):
        check_probabilities(room, alpha=3.0)


def test_predictions_need_the_run_alone(done, room):
    code, out, err = done["predict without data"]
    assert (code, err, out) == (0, "", (room.folder / "kinds.csv").read_text())


def test_an_updated_run_is_that_of_all_rows(done, room, numpyro_promotion):
    code, out, err = done["update"]
    assert (code, err) == (0, "")
    assert (
        "aclass on plants.csv: 6 rows, and 2 more of later.csv, 1 of them without 'kind'\n" in out
    )
    assert re.search(r"log-evidence -\S+ \+- \S+\nsaved updated.nc: .* 2 steps in", out)
    assert out.splitlines()[-1].startswith("TRUSTED")
    assert done["report updated"][0] == 0
    tree = az.from_netcdf(room.folder / "updated.nc")
    assert tree["posterior"].sizes["row"] == tree["observed_data"].sizes["row"] == 8
    assert tree["sample_stats"].sizes["step"] == 8
    nearly = {"name": "updated.csv", "rtol": 0.02}  # these are more partitions than particles
    check_probabilities(room, later=True, **nearly)
    with pytest.raises(AssertionError):
        check_probabilities(room, **nearly)


def test_a_run_is_updated_in_place(done, room):
    assert done["update in place"][0] == 0
    assert az.from_netcdf(room.folder / "seven.nc").attrs["steps"] == 8


def test_a_damaged_run_is_not_updated(done, room):
    assert done["fit"][0] == 0
    data = bytearray((room.folder / "plants.nc").read_bytes())
    data[data.index(b"FilterState")] ^= 0x55
    (room.folder / "hurt.nc").write_bytes(data)
    [(code, out, err)] = many(room, [["update", "hurt.nc", "later.csv", "-o", "never.nc"]])
    assert (code, out) == (2, "")
    assert err == "zoo: hurt.nc: the file is damaged; save it anew, or fit again\n"


def test_kernel_takes_options(done, room):
    assert done["kernel"][0] == 0
    settings = json.loads(az.from_netcdf(room.folder / "seven.nc").attrs["kernel_settings"])
    assert (settings["ParticleFilter.num_particles"], settings["ParticleFilter.resampling"]) == (
        7,
        "systematic",
    )


def test_runs_of_different_kernels_are_drawn_and_compared(done, room):
    assert done["gibbs"][0] == 0, done["gibbs"]
    assert az.from_netcdf(room.folder / "gibbs.nc").attrs["kernel"] == "CollapsedGibbs"
    assert (room.folder / "gibbs.png").stat().st_size > 5000
    code, out, _ = done["compare"]
    assert code == 0
    assert {"plants", "seven"} <= {line.split()[0] for line in out.splitlines() if line}


REFUSED = {
    "component": r"site 'x': .*row 0.*Poisson takes whole numbers",
    "unknown component": "no component 'gama_poisson'; did you mean 'gamma_poisson'",
    "wrong kind": "--option num_particles: wanted a whole number, found 'few'",
    "predict by gibbs": "observes",
    "update, no class": "no class.csv: no column 'kind' to be the target; the columns are spots",
    "update, new class": "new class.csv, line 4, column 'kind': unknown class 'w'; the classes",
    "update, new number": "two spots.csv: column 'spots' has other values than the two, or the",
    "update, no columns": "unseen.csv: no column 'kind' to be the target",
    "update a chain": "gibbs.nc: a run of CollapsedGibbs cannot learn more rows from its file; fit",
    "update, file exists": "gibbs.nc: the file exists; name another, or give --force to replace it",
    "update no run": "text.nc: not a run, or damaged; wanted a netCDF file of `zoo fit`",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(done, name, room):
    code, _, err = done[name]
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(REFUSED[name], err), err
    assert not (room.folder / "never.nc").exists()
