"""A table as people have them: an id, a date, texts, holes, decimal commas; and what the summary
of its fit says, next to the tree, to scikit-learn and to another fit.
"""

import csv
import io
import re
from contextlib import chdir, redirect_stderr, redirect_stdout
from unittest import mock

import jax
import numpy as np
import pytest
import xarray as xr
from sklearn.linear_model import LogisticRegression

from gallery import cli
from gallery.commands import fit
from gallery.commands.findings import findings
from gallery.commands.inputs import saved_data
from gallery.commands.reports import trust_text
from inference import Interrupted

HEADER = ["patient", "admitted", "ward", "pressure", "outcome"]
OPTIONS = ["--option", "num_particles=5", "num_chains=1"]
FIT = ["fit", "aclass", "--data", "hospital.csv", *OPTIONS]
KEEP = ["--drop", "admitted", "--id", "patient"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("hospital"), np.random.default_rng(0)
    rows = [
        [
            f"P{1000 + i}",
            f"2024-{1 + i // 28:02}-{1 + i % 28:02}",
            ["north", "south", "west"][rng.integers(3)],
            "" if i % 7 == 0 else f"{110 + 20 * (i % 2) + 5 * rng.normal():.1f}".replace(".", ","),
            ["home", "stays"][i % 3 > 0],
        ]
        for i in range(40)
    ]
    with open(folder / "hospital.csv", "w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([HEADER, *rows])
    with open(folder / "new.csv", "w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([HEADER[:-1], *(row[:-1] for row in rows[:5])])
    return folder


def run(*arguments):
    """Exit code, output and errors of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def done(folder):
    """Each command's exit code, output and errors."""
    found = {}
    with chdir(folder), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with mock.patch("inference.Driver.run", side_effect=ValueError("it ran")):
            found["all"] = run(*FIT, "-o", "never.nc")
        found["fit"] = run(*FIT, *KEEP, "-o", "run.nc")
        found["predict"] = run("predict", "run.nc", "new.csv")
        found["dates"] = run(*FIT, "--drop", "patient", "-o", "dates.nc", "--test", "0")
        # the held-out rows by hand: a fit to the others, and its predictions
        held_out = set(opened(folder)["held_out"]["row"].values.tolist())
        header, *rows = table(folder)
        for name, is_test in (("others.csv", False), ("held_out.csv", True)):
            some = [row for i, row in enumerate(rows) if (i in held_out) == is_test]
            with open(folder / name, "w", newline="") as file:
                csv.writer(file, delimiter=";").writerows([header, *some])
        others = ["fit", "aclass", "--data", "others.csv", *OPTIONS, *KEEP]
        found["others"] = run(*others, "-o", "others.nc", "--test", "0")
        found["predict others"] = run("predict", "others.nc", "held_out.csv")
        found["seed"] = run(*FIT, *KEEP, "-o", "seed.nc", "--seed", "1")
        found["compare"] = run("compare", "run.nc", "seed.nc")
        found["update"] = run("update", "others.nc", "held_out.csv", "-o", "both.nc")
        found["update again"] = run("update", "both.nc", "held_out.csv")
        found["compare dates"] = run("compare", "run.nc", "dates.nc")
        found["too few"] = run(*FIT, *KEEP, "-o", "never.nc", "--test", "0.05")
        found["no time"] = run(*FIT, *KEEP, "-o", "never.nc", "--option", "max_time=0")
    return found


def table(folder):
    return list(csv.reader((folder / "hospital.csv").read_text().splitlines(), delimiter=";"))


def opened(folder, name="run.nc"):
    return xr.load_datatree(folder / name, engine="h5netcdf")


def test_what_is_no_feature_is_warned_of_dropped_and_kept_beside_predictions(done):
    code, out, err = done["all"]
    assert (code, err) == (2, "zoo: it ran\n")
    assert "dates, as days: admitted; texts: patient (40), ward (3); 6 cells empty" in out
    assert "; cells delimited by ';'; decimal commas\n" in out
    for name in ("patient", "admitted"):
        assert f"warning: '{name}' has 40 distinct values in 40 rows, as an id has" in out
    assert out.count("warning: ") == 2
    code, out, _ = done["fit"]
    assert (code, "warning" in out) == (0, False)
    code, out, _ = done["predict"]
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "patient,home,stays,predicted")
    assert [line.split(",")[0] for line in lines[1:]] == [f"P{1000 + i}" for i in range(5)]


@pytest.mark.parametrize("options", [[], ["--dummies"]])
def test_texts_with_half_as_many_values_as_rows_are_warned_of(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"note {i % 25},{i % 3}.5,{'uv'[i % 2]}" for i in range(40)]
    (tmp_path / "notes.csv").write_text("\n".join(["note,a,y", *rows]))
    with mock.patch("inference.Driver.run", side_effect=ValueError("it ran")):
        _, out, _ = run("fit", "aclass", "--data", "notes.csv", *options)
    assert out.count("warning: ") == 1
    assert "warning: 'note' has 25 distinct values in 40 rows, as an id has" in out


def test_a_run_knows_which_columns_are_dates(done, folder):
    assert done["dates"][0] == 0
    assert saved_data(opened(folder, "dates.nc")).dates == ("admitted",)
    assert saved_data(opened(folder)).dates == ()


def test_held_out_scores_are_those_of_a_fit_to_the_other_rows(done, folder):
    code, out, err = done["predict others"]
    assert code == 0, err
    held_out = opened(folder)["held_out"].to_dataset()
    rows = list(csv.reader(out.splitlines()))[1:]
    y = held_out["y"].values
    assert len(rows) == len(y) == 8
    wanted = [float(row[1 + k]) for row, k in zip(rows, y, strict=True)]
    np.testing.assert_allclose(np.exp(held_out["log_score"]), wanted, rtol=1e-4)
    names = np.array(["home", "stays"])
    assert names[held_out["predicted"].values].tolist() == [row[-1] for row in rows]


def test_the_baseline_is_scikit_learn_s(folder, done):
    held_out = opened(folder)["held_out"].to_dataset()
    rows = table(folder)[1:]
    wards = [[row[2] == ward for ward in ("north", "south", "west")] for row in rows]
    pressure = np.array([float(row[3].replace(",", ".") or "nan") for row in rows])
    y = np.array([row[4] == "stays" for row in rows]).astype(int)
    test = held_out["row"].values
    train = np.delete(np.arange(40), test)
    scaled = (pressure - np.nanmean(pressure[train])) / np.nanstd(pressure[train])
    x = np.column_stack([wards, np.nan_to_num(scaled)])  # the mean of the others is 0
    probabilities = LogisticRegression().fit(x[train], y[train]).predict_proba(x[test])
    np.testing.assert_array_equal(held_out["y"], y[test])
    np.testing.assert_allclose(
        np.exp(held_out["baseline_log_score"]), probabilities[np.arange(8), y[test]], rtol=1e-3
    )
    np.testing.assert_array_equal(held_out["baseline_predicted"], probabilities.argmax(1))


def test_the_summary_ends_with_scores_findings_and_trust(done, folder):
    """Every line is what the tree says."""
    tree = opened(folder)
    held_out = tree["held_out"].to_dataset()
    lines = done["fit"][1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("saved run.nc")) + 1
    title, of_model, of_baseline, *rest = lines[first:]
    assert re.fullmatch(
        "scores on 8 of 40 rows, by a fit to the others +accuracy +log score", title
    )
    assert held_out.sizes["row"] == 8
    for line, name, prefix in (
        (of_model, "aclass", ""),
        (of_baseline, "logistic regression", "baseline_"),
    ):
        accuracy = np.mean(held_out[f"{prefix}predicted"] == held_out["y"])
        score = np.mean(held_out[f"{prefix}log_score"])
        assert re.fullmatch(f" +{name} +{accuracy:.3f} +{score:.3f}", line)
    assert rest == [*findings(tree), *trust_text(tree, "run.nc").splitlines()]


def test_a_second_fit_may_be_forbidden_and_needs_rows(done, folder):
    assert done["others"][0] == 0
    assert "scores on" not in done["others"][1]
    assert "held_out" not in xr.load_datatree(folder / "others.nc", engine="h5netcdf")
    code, _, err = done["too few"]
    assert code == 2
    assert "--test 0.05: it leaves fewer than 5 labelled rows" in err
    assert not (folder / "never.nc").exists()


def test_a_run_without_draws_has_no_score(done):
    code, _, err = done["no time"]
    assert code == 2
    assert "ended by max_time before its end" in err


def test_runs_are_compared_on_the_same_held_out_rows(done, folder):
    code, out, err = done["compare"]
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("scores on 8 of 40 rows")
    score = float(opened(folder)["held_out"]["log_score"].mean())
    assert lines[1].split() == ["run", lines[1].split()[1], f"{score:.3f}"]
    assert lines[2].split()[0] == "seed"
    assert lines[3].split()[:2] == ["logistic", "regression"]
    assert "log_evidence" in lines[4]


def test_an_update_warns_of_rows_that_were_learned_before(done, folder):
    code, out, err = done["update"]
    assert (code, "warning: " in out) == (0, False), err
    code, out, err = done["update again"]
    assert code == 0, err
    assert (
        "warning: the run has learned rows with 8 of these values of 'patient' before (P10" in out
    )
    ids = saved_data(opened(folder, "both.nc")).ids
    assert len(ids) == 48
    assert set(ids) == {row[0] for row in table(folder)[1:]}


def test_a_run_without_a_score_is_named(done):
    code, _, err = done["compare dates"]
    assert code == 2
    assert "compare: nothing ranks all runs, and there is no held-out score of dates; fit" in err


@pytest.mark.parametrize(
    ("ending", "asked", "code", "words"),
    [
        (Interrupted("SIGINT", 3, dict), [], 130, "its fit was ended by SIGINT"),
        (ValueError("it observes x"), [], 0, "it observes x"),
        (ValueError("it observes x"), ["--test", "0.2"], 2, "zoo: it observes x; saved early.nc"),
        ("max_time", [], 0, "its fit was ended by max_time before"),
    ],
    ids=["Ctrl-C", "no prediction", "no prediction, which was asked for", "max_time"],
)
def test_a_second_fit_that_fails_leaves_the_run(
    ending, asked, code, words, done, folder, monkeypatch, numpyro_promotion
):
    drawn, calls = fit._drawn, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            return drawn(*arguments)
        if isinstance(ending, BaseException):
            raise ending
        unfinished = xr.DataTree.from_dict({"unfinished": xr.Dataset()})
        unfinished.attrs["ended"] = ending
        return unfinished

    monkeypatch.setattr(fit, "_drawn", second_fails)
    monkeypatch.chdir(folder)
    command = [*FIT, *KEEP, "-o", "early.nc", "--force", *asked]
    found, out, err = run(*command)
    assert found == code
    assert words in (err if code == 2 else out)
    assert ("no held-out score: " in out) == (code != 2)
    assert xr.load_datatree(folder / "early.nc", engine="h5netcdf")["posterior"].sizes["draw"] > 0


# Texts for a model of numbers.

BY_NUMBERS = ["fit", "augment_reduce", "--test", "0", "--option", "num_warmup=50"]
BY_NUMBERS += ["num_samples=20", "num_chains=1"]


@pytest.fixture(scope="module")
def by_numbers(tmp_path_factory):
    """A fit with --dummies, the same by hand, and predictions of both."""
    folder, rng, found = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0), {}
    wards, sexes = rng.integers(3, size=30), rng.integers(2, size=30)
    kinds, ages = rng.integers(2, size=30), rng.normal(50, 9, size=30)
    texts = [
        [["east", "north", "west"][w], f"{a:.2f}", "fm"[s], "uv"[k]]
        for w, a, s, k in zip(wards, ages, sexes, kinds, strict=True)
    ]
    numbers = [[*(int(row[0] == w) for w in ("east", "north", "west")), row[1]] for row in texts]
    numbers = [
        [*row, int(other[2] == "m"), other[3]] for row, other in zip(numbers, texts, strict=True)
    ]
    tables = {
        "texts": [["ward", "age", "sex", "kind"], *texts],
        "numbers": [
            ["ward=east", "ward=north", "ward=west", "age", "sex=m", "kind"],
            *numbers,
        ],
    }
    with chdir(folder), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name, rows in tables.items():
            with open(f"{name}.csv", "w", newline="") as file:
                csv.writer(file).writerows(rows)
            more = ["--dummies"] * (name == "texts")
            found[name] = run(*BY_NUMBERS, "--data", f"{name}.csv", *more, "-o", f"{name}.nc")
            found[f"predict {name}"] = run("predict", f"{name}.nc", f"{name}.csv")
        found["refused"] = run(*BY_NUMBERS, "--data", "texts.csv", "-o", "never.nc")
        found["no texts"] = run(*BY_NUMBERS, "--data", "numbers.csv", "--dummies", "-o", "never.nc")
    return found


def test_texts_become_columns_of_0_and_1(by_numbers):
    code, out, err = by_numbers["texts"]
    assert (code, err) == (0, "")
    assert (
        "read numbers: age; texts, each a column of 0 and 1: ward (3), sex (2); 'kind' is the class"
        in out
    )
    assert "weights[u, ward=west]" in out
    same = lambda text: text[text.index("class  rows") :].replace("texts.nc", "numbers.nc")
    assert same(out) == same(by_numbers["numbers"][1])
    assert by_numbers["predict texts"] == by_numbers["predict numbers"]
    assert by_numbers["predict texts"][0] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refused", r"column 'ward' holds texts \('east', .* Give --dummies"),
        ("no texts", "--dummies: numbers has no feature of texts; leave it out"),
    ],
)
def test_dummies_are_asked_for_and_refused_by_name(by_numbers, name, words):
    code, _, err = by_numbers[name]
    assert code == 2
    assert re.search(words, err), err
