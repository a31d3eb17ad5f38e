"""The command `zoo` on staged learning: fit an order, report, picture of the evidence, predict
the classes of new rows, in stages.
"""

import csv
import io

import numpy as np
import pytest

from gallery.commands.fit import _driver as driver_of
from gallery.commands.inputs import saved_inputs
from gallery.commands.kernels import in_precision
from gallery.commands.predict import saved_columns
from gallery.commands.runs import open_run
from tests.gallery.command import many, write

pytestmark = pytest.mark.slow


def test_classes_of_a_table_are_fitted_and_predicted(room):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 40)
    rows = [
        [f"{a:.3f}", "uv"[k]] for k, a in zip(labels, rng.normal(size=40) + 9 * labels, strict=True)
    ]
    write(room.folder / "points.csv", [["first", "kind"], *rows])
    write(room.folder / "new.csv", [["first"], ["0"], ["9"]])
    fit = ["fit", "staged_learning", "--data", "points.csv", "--target", "kind", "--option"]
    told = ["order=2", "num_live=40", "num_chains=1", "num_samples=100"]
    commands = [
        [*fit, *told, "-o", "points.nc", "--plot", "points.png"],
        ["report", "points.nc"],
        ["predict", "points.nc", "new.csv"],
        ["plot", "points.nc", "--kind", "elbo", "-o", "elbo.png"],
        [*fit, *told, "num_stages=50", "--kernel", "staged", "-o", "never.nc"],
        [
            *fit,
            *told[:1],
            "num_particles=60",
            *told[2:],
            "num_stages=2",
            "--kernel",
            "datatempering",
            "-o",
            "again.nc",
            "--plot",
            "again.png",
        ],
        ["predict", "again.nc", "new.csv"],
        ["report", "again.nc"],
    ]
    (
        (code, out, err),
        report,
        (predicted, text, _),
        elbo,
        (refused, _, why),
        tempered,
        again,
        other,
    ) = many(room, commands)
    assert (code, err) == (0, "")
    assert "NestedSampler, num_samples 100, num_chains 1" in out
    assert (room.folder / "points.png").stat().st_size > 10_000
    assert "insertion ranks" in report[1]
    assert predicted == 0
    assert [row[-1] for row in csv.reader(io.StringIO(text))] == ["predicted", "u", "v"]
    assert elbo[0] == 2
    assert "--kind elbo: this run of staged_learning has none" in elbo[2]
    assert refused == 2
    assert "num_stages: found 50 for 40 rows" in why
    assert tempered[0] == 0, tempered[2]
    assert "DataTempering, num_samples 100" in tempered[1]
    assert (room.folder / "again.png").stat().st_size > 10_000
    assert [row[-1] for row in csv.reader(io.StringIO(again[1]))] == ["predicted", "u", "v"]
    assert "walks" in other[1]


def test_a_saved_run_of_stages_learns_more_rows(room, numpyro_promotion):
    """The update in another process equals that of the driver which made the run, bit for bit."""
    rng = np.random.default_rng(1)
    labels = np.arange(50) % 2
    rows = [
        [f"{a:.3f}", "uv"[k]] for k, a in zip(labels, rng.normal(size=50) + 9 * labels, strict=True)
    ]
    write(room.folder / "first.csv", [["first", "kind"], *rows[:30]])
    write(room.folder / "later.csv", [["first", "kind"], *rows[30:]])
    fit = ["fit", "staged_learning", "--data", "first.csv", "--target", "kind", "--test", "0"]
    told = ["order=2", "num_live=40", "num_chains=1", "num_samples=100", "num_stages=1"]
    made, updated = many(
        room,
        [
            [*fit, "--kernel", "staged", "-o", "staged.nc", "--option", *told],
            ["update", "staged.nc", "later.csv", "-o", "both.nc"],
        ],
    )
    assert made[0] == 0, made[2]
    assert updated[0] == 0, updated[2]
    tree, both = open_run(room.folder / "staged.nc"), open_run(room.folder / "both.nc")
    assert both["observed_data"].sizes["row"] == 50
    inputs, (_, scaled, _) = saved_inputs(tree), saved_columns(tree, "staged.nc")
    driver = driver_of(inputs, max_time=None)
    x = scaled.standardise(np.array([[float(row[0])] for row in rows[30:]]))
    with in_precision(inputs.kernel, inputs.arguments):
        driver.run(inputs.request.seed, **inputs.arguments)
        driver.update(**inputs.arguments | {"x": x, "y": labels[30:]})
        same = driver.tree()
    assert both.attrs["log_evidence"] == same.attrs["log_evidence"] != tree.attrs["log_evidence"]
    np.testing.assert_array_equal(both["posterior"]["mu"], same["posterior"]["mu"])
