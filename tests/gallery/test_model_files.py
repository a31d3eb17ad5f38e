"""A model of one's own in a file, which the command fits to the columns of a table."""

import csv
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from jax import random
from numpyro.infer import MCMC, NUTS, Predictive

from gallery import cli
from gallery.commands.inputs import read_inputs
from gallery.commands.models import find_model
from gallery.commands.request import Request
from tests.gallery import own_models
from tests.gallery.command import many, write
from tests.gallery.conftest import furnished

FILE = Path(own_models.__file__)
SCHOOLS = [
    ("y", "sigma"),
    *zip([28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18], strict=True),
]
HITS = [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]
MANY = ("--option", "num_warmup=500", "num_samples=2000", "num_chains=2")


def lines(size=40):
    """Three columns, the last of which is a line through the others, in units of their own."""
    rng = np.random.default_rng(0)
    x = rng.normal([5.0, 100.0], [1.0, 20.0], size=(size, 2)).round(3)
    return x, (1 + x @ [2.0, -0.3] + 0.5 * rng.normal(size=size)).round(3)


def tables(folder):
    x, cost = lines()
    write(folder / "lines.csv", [["age", "weight", "cost"], *np.column_stack([x, cost])])
    write(folder / "new.csv", [["weight", "age"], ["80", "4"], ["120", "6.5"]])
    write(folder / "hole.csv", [["weight", "age"], ["80", "4"], ["", "6.5"]])
    write(folder / "schools.csv", SCHOOLS)
    write(folder / "players.csv", [["name", "at_bats", "hits"], *([f"p{h}", 45, h] for h in HITS)])
    rows = [[1.5, 0, "no", 3], [2.5, 2, "yes", 4], [0.5, 1, "no", 5]]
    write(folder / "mixed.csv", [["a", "group", "sick", "y"], *rows])
    write(folder / "texts.csv", [["dept", "male", "admitted"], ["law", 1, 1], ["art", 0, 1]])


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with tables."""
    folder = tmp_path_factory.mktemp("own")
    tables(folder)
    return folder


def asked(room, function, table, *options, **settings):
    name, path = f"{FILE}:{function}", str(room / table)
    return replace(Request(name, path, None, None, options, 0, False, "", None), **settings)


# Which columns become which arguments.


def test_x_and_y_are_the_features_and_the_target_as_they_stand(room):
    inputs, (x, cost) = read_inputs(asked(room, "regression", "lines.csv")), lines()
    np.testing.assert_array_equal(inputs.arguments["x"], x)
    np.testing.assert_array_equal(inputs.arguments["y"], cost)
    assert inputs.data.feature_names == ("age", "weight")
    assert inputs.data.description == "x of age, weight; y of 'cost'"


def test_target_and_columns_may_be_said(room):
    changed = {"target": "age", "columns": ("cost",)}
    inputs, (x, cost) = read_inputs(asked(room, "regression", "lines.csv", **changed)), lines()
    np.testing.assert_array_equal(inputs.arguments["x"][:, 0], cost)
    np.testing.assert_array_equal(inputs.arguments["y"], x[:, 0])
    assert inputs.data.description.endswith("not used: weight")


def test_arguments_that_are_named_as_columns_are_these(room):
    arguments = read_inputs(
        asked(room, "eight_schools_noncentered", "schools.csv", "J=8")
    ).arguments
    assert arguments.keys() == {"J", "sigma", "y"}
    assert arguments["J"] == 8
    np.testing.assert_array_equal(arguments["sigma"], [row[1] for row in SCHOOLS[1:]])
    assert arguments["sigma"].dtype.kind == "i"


def test_a_named_column_is_no_feature(room):
    arguments = read_inputs(asked(room, "both", "mixed.csv")).arguments
    np.testing.assert_array_equal(arguments["x"], [[1.5, 0], [2.5, 1], [0.5, 0]])
    np.testing.assert_array_equal(arguments["group"], [0, 2, 1])
    np.testing.assert_array_equal(arguments["y"], [3, 4, 5])


def test_a_model_of_classes_takes_texts_as_their_codes(room):
    request = asked(room, "softmax", "mixed.csv", target="sick", columns=("a",))
    inputs = read_inputs(request)
    assert inputs.data.class_names == ("no", "yes")
    assert inputs.arguments["num_classes"] == 2
    np.testing.assert_array_equal(inputs.arguments["Y"], [0, 1, 0])
    np.testing.assert_array_equal(inputs.arguments["X"], [[1.5], [2.5], [0.5]])


# What is refused, in one sentence.

ERRORS = {
    "no function": (
        "regresion",
        "lines.csv",
        [],
        "no function 'regresion'; did you mean 'regression'",
    ),
    "no name": ("", "lines.csv", [], r"wanted one of regression, .*own_models.py:regression"),
    "no model": ("number", "lines.csv", [], "found int, wanted a function"),
    "no sites": ("without_sites", "lines.csv", [], "found no latent site.*numpyro.sample"),
    "no column": (
        "partially_pooled_with_logit",
        "lines.csv",
        [],
        "wants 'at_bats', .*columns are age, weight, cost. Rename .*--option at_bats=8",
    ),
    "no number": (
        "eight_schools_noncentered",
        "schools.csv",
        [],
        "wants 'J', .*columns are y, sigma.*--option J=8",
    ),
    "another number": (
        "eight_schools_noncentered",
        "schools.csv",
        ["--option", "J=3"],
        r"own_models.py:eight_schools_noncentered, line \d+: .*called with sigma \[8\], y \[8\], J=3",
    ),
    "texts": (
        "departments",
        "texts.csv",
        ["--option", "num_dept=2"],
        r"column 'dept' holds texts \('art', 'law'\), where .*departments takes numbers; write each",
    ),
    "texts among features": (
        "regression",
        "players.csv",
        [],
        "column 'name' holds texts .*--dummies.*--drop name",
    ),
    "wrong shape": (
        "wrong_shape",
        "lines.csv",
        [],
        r"line \d+: TypeError.*called with x \[40, 2\]",
    ),
    "unknown option": ("regression", "lines.csv", ["--option", "J=3"], "no option 'J'"),
    "unknown kernel": ("regression", "lines.csv", ["--kernel", "nutz"], "did you mean 'nuts'"),
    "no matrix": (
        "eight_schools_noncentered",
        "schools.csv",
        ["--option", "J=8", "--columns", "sigma"],
        "--columns: model .* takes no x",
    ),
    "no response": (
        "partially_pooled_with_logit",
        "players.csv",
        ["--target", "name"],
        "--target name: model .* takes neither y",
    ),
    "held-out score": ("regression", "lines.csv", ["--test", "0.2"], "only models of the zoo"),
    "another structure": (
        "regression",
        "lines.csv",
        ["--kernel", "particlefilter"],
        "found 0 partition sites",
    ),
}


def command(room, capsys, *arguments):
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(room / "cache")):
        code = cli.main(list(map(str, arguments)))
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_one_sentence(name, room, capsys, monkeypatch, numpyro_promotion):
    function, table, options, found = ERRORS[name]
    monkeypatch.chdir(room)
    model = f"{FILE}:{function}" if function else FILE
    code, _, err = command(room, capsys, "fit", model, "--data", table, "-o", "no.nc", *options)
    assert code == 2
    assert re.fullmatch(r"zoo: [^\n]+\n", err), err
    assert re.search(found, err), err
    assert not (room / "no.nc").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(:\n", "broken.py, line 1: invalid syntax"),
        ("\nimport nothing_here\n", "broken.py, line 2: .*No module named 'nothing_here'"),
        (None, "broken.py: no such file"),
    ],
)
def test_a_file_that_cannot_be_run_is_named(text, found, tmp_path):
    if text is not None:
        (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ValueError, match=found):
        find_model(f"{tmp_path / 'broken.py'}:f")


def test_an_edit_is_seen_within_the_same_second(tmp_path):
    path = tmp_path / "edited.py"
    for number in (1, 2):
        path.write_text(f"def f(): return {number}\n")
        assert find_model(f"{path}:f").model() == number


def test_show_traces_the_model_on_stand_ins_or_on_a_table(
    room, capsys, monkeypatch, numpyro_promotion
):
    monkeypatch.chdir(room)
    code, out, err = command(room, capsys, "show", f"{FILE}:regression")
    assert (code, err) == (0, "")
    assert "regression: Linear regression with noise of deviation 0.5.\n" in out
    assert "y [row] ~ Normal(loc=f(intercept, slopes), scale=0.5), observed\n" in out
    words = (
        "show",
        f"{FILE}:eight_schools_noncentered",
        "--data",
        "schools.csv",
        "--option",
        "J=8",
    )
    assert (
        "obs [J] ~ Normal(loc=f(mu, tau, theta_base), scale=array[8])"
        in command(room, capsys, *words)[1]
    )
    code, _, err = command(room, capsys, "show", f"{FILE}:wrong_shape")
    assert code == 2
    assert re.search(r"called with x \[4, 2\].*Give what suits it", err), err


# Fits, as a person runs them.

COMMANDS = {
    "line": ["fit", f"{FILE}:regression", "--data", "lines.csv", *MANY, "-o", "line.nc"],
    "new rows": ["predict", "line.nc", "new.csv"],
    "hole": ["predict", "line.nc", "hole.csv"],
    "schools": ["fit", f"{FILE}:eight_schools_noncentered", "--data", "schools.csv", *MANY, "J=8"],
    "same schools": ["predict", "own_models-eight_schools_noncentered-schools.nc", "schools.csv"],
    "players": [
        "fit",
        f"{FILE}:partially_pooled_with_logit",
        "--data",
        "players.csv",
        *MANY,
        "-o",
        "p.nc",
    ],
    "nested": [
        "fit",
        f"{FILE}:regression",
        "--data",
        "lines.csv",
        "--kernel",
        "nestedsampler",
        "-o",
        "n.nc",
    ],
    **{
        name: [*words, "line.nc"]
        for name, words in {"report": ["report"], "cite": ["cite"], "summary": ["summary"]}.items()
    },
    "plot": ["plot", "line.nc", "-o", "line.png"],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All commands in one process: the folder, and (exit code, output, errors) of each."""
    room = furnished(tmp_path_factory)
    tables(room.folder)
    found = many(room, list(COMMANDS.values()), is_quiet=True)
    return room.folder, dict(zip(COMMANDS, found, strict=True))


def drawn(folder, name):
    tree = xr.load_datatree(folder / name, engine="h5netcdf")
    posterior = tree["posterior"].to_dataset()
    draws = {
        str(site): values.transpose("chain", "draw", ...).values.reshape(-1, *values.shape[2:])
        for site, values in posterior.items()
    }
    return tree, draws


def line_posterior(sd=10.0):
    """Mean and covariance of intercept and slopes, in closed form."""
    x, cost = lines()
    design = np.column_stack([np.ones(len(x)), x])
    covariance = np.linalg.inv(design.T @ design / 0.25 + np.eye(3) / sd**2)
    return covariance @ design.T @ cost / 0.25, covariance


@pytest.mark.slow
def test_commands_succeed_quietly(done):
    folder, found = done
    failed = {name: (code, err) for name, (code, _, err) in found.items() if code or err}
    assert failed.keys() == {"hole"}, failed
    assert re.search(r"hole.csv: no prediction for row 2 of 2: its 'weight' is", failed["hole"][1])
    assert (folder / "line.png").stat().st_size > 5000
    assert "read as they are named: at_bats, hits; not used: name" in found["players"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["line.nc", "n.nc"])
def test_the_posterior_of_a_line_is_the_closed_form(done, name):
    _, draws = drawn(done[0], name)
    values = np.column_stack([draws["intercept"], draws["slopes"]])
    mean, covariance = line_posterior()
    errors = 5 * np.sqrt(np.diag(covariance) / 300)  # of 300 independent draws or more
    np.testing.assert_allclose(values.mean(0), mean, atol=errors.max(), rtol=0)
    assert (abs(values.mean(0) - mean) < errors).all()
    np.testing.assert_allclose(values.std(0), np.sqrt(np.diag(covariance)), rtol=0.25)
    # another prior would be seen
    assert (abs(line_posterior(sd=1.0)[0] - mean) > errors).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function", "sites", "table"),
    [
        (
            "own_models-eight_schools_noncentered-schools.nc",
            "eight_schools_noncentered",
            ["mu", "tau"],
            {
                "J": 8,
                "y": np.array([r[0] for r in SCHOOLS[1:]]),
                "sigma": np.array([r[1] for r in SCHOOLS[1:]]),
            },
        ),
        (
            "p.nc",
            "partially_pooled_with_logit",
            ["loc", "scale", "alpha"],
            {"at_bats": np.full(18, 45), "hits": np.array(HITS)},
        ),
    ],
)
def test_a_fit_agrees_with_numpyros_own(done, name, function, sites, table, numpyro_promotion):
    _, draws = drawn(done[0], name)
    mcmc = MCMC(
        NUTS(getattr(own_models, function)), num_warmup=500, num_samples=4000, progress_bar=False
    )
    mcmc.run(random.key(9), **table)
    for site in sites:
        theirs = np.asarray(mcmc.get_samples()[site])
        # at least 200 independent draws each
        error = 5 * theirs.std(0) * np.sqrt(2 / 200)
        assert (abs(draws[site].mean(0) - theirs.mean(0)) < error).all(), site


@pytest.mark.slow
def test_predictions_are_those_of_predictive(done, numpyro_promotion):
    folder, found = done
    _, draws = drawn(folder, "line.nc")
    rows = list(csv.reader(found["new rows"][1].splitlines()))
    assert rows[0] == ["mean", "std"]
    x = jnp.array([[4.0, 80.0], [6.5, 120.0]])  # age and weight
    values = Predictive(own_models.regression, draws)(random.key(1), x)["y"]
    mean, std = np.asarray(values.mean(0)), np.asarray(values.std(0))
    np.testing.assert_allclose(np.array(rows[1:], float)[:, 0], mean, atol=5 * 0.6 / np.sqrt(2000))
    np.testing.assert_allclose(np.array(rows[1:], float)[:, 1], std, rtol=0.1)
    assert abs(mean[0] - mean[1]) > 1  # columns in another order would be seen


def test_rows_that_depend_on_those_of_the_fit_are_not_predicted(
    room, capsys, monkeypatch, numpyro_promotion
):
    """Draws of the model at new rows alone would be of the prior."""
    monkeypatch.chdir(room)
    few = ("--option", "num_warmup=5", "num_samples=5", "num_chains=1")
    fit = ["fit", f"{FILE}:correlated", "--data", "lines.csv", *few, "-o", "correlated.nc"]
    assert command(room, capsys, *fit)[0] == 0
    code, _, err = command(room, capsys, "predict", "correlated.nc", "new.csv")
    assert code == 2
    assert re.fullmatch(r"zoo: predict: 'y' is one MultivariateNormal of all rows[^\n]+\n", err)


@pytest.mark.slow
def test_the_file_may_be_edited_between_fits_but_not_before_a_prediction(
    room, tmp_path, capsys, monkeypatch, numpyro_promotion
):
    monkeypatch.chdir(tmp_path)
    tables(tmp_path)
    text, path = FILE.read_text(), tmp_path / "edited.py"
    path.write_text(text)
    fit = ["fit", "edited.py:regression", "--data", "lines.csv", *MANY, "--force", "-o", "run.nc"]
    for sd in (10.0, 0.1):
        path.write_text(text.replace("dist.Normal(0.0, 10.0)", f"dist.Normal(0.0, {sd})"))
        assert command(tmp_path, capsys, *fit)[0] == 0
        _, draws = drawn(tmp_path, "run.nc")
        mean, covariance = line_posterior(sd)
        np.testing.assert_allclose(
            draws["slopes"].mean(0), mean[1:], atol=5 * np.sqrt(covariance[1, 1] / 300)
        )
    assert command(tmp_path, capsys, "predict", "run.nc", "new.csv")[0] == 0
    path.write_text(text)
    code, _, err = command(tmp_path, capsys, "predict", "run.nc", "new.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"edited.py: it has changed since the run.*fit again, or undo", err)
    path.unlink()
    code, _, err = command(tmp_path, capsys, "predict", "run.nc", "new.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert "edited.py: no such file" in err
    assert command(tmp_path, capsys, "summary", "run.nc")[0] == 0
