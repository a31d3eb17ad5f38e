"""The command `zoo` on augment and reduce: fit, report, predict the classes of new rows."""

import csv
import io

import numpy as np
import pytest

from tests.gallery.command import many, write

pytestmark = pytest.mark.slow


def test_classes_of_a_table_are_fitted_and_predicted(room):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 90)
    rows = [
        [f"{a:.3f}", f"{b:.3f}", "uvw"[k]]
        for k, (a, b) in zip(labels, rng.normal(size=(90, 2)) + 4 * labels[:, None], strict=True)
    ]
    write(room.folder / "choices.csv", [["first", "second", "kind"], *rows])
    write(room.folder / "choices_new.csv", [["first", "second"], ["0", "0"], ["8", "8"]])
    told = [
        "--option",
        "num_chains=2",
        "num_samples=100",
        "num_warmup=1000",
        "batch_size=30",
        "num_negatives=1",
        "noise=logistic",
    ]
    commands = [
        [
            "fit",
            "augment_reduce",
            "--data",
            "choices.csv",
            "--target",
            "kind",
            *told,
            "-o",
            "choices.nc",
        ],
        ["report", "choices.nc"],
        ["predict", "choices.nc", "choices_new.csv"],
        [
            "fit",
            "augment_reduce",
            "--data",
            "choices.csv",
            "--target",
            "kind",
            "--option",
            "noise=cauchy",
            "-o",
            "never.nc",
        ],
    ]
    (code, out, err), report, (predicted, text, _), (refused, _, why) = many(room, commands)
    assert (code, err) == (0, "")
    assert "AugmentReduce" in out
    assert "weights[u, first]" in out
    assert "1000" in report[1]
    assert predicted == 0
    assert [row[-1] for row in csv.reader(io.StringIO(text))] == ["predicted", "u", "w"]
    assert refused == 2
    assert "noise: found 'cauchy'" in why
