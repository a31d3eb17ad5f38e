"""What the command `zoo` refuses, and how: one line on stderr and exit code 2."""

import csv
import io
import os
import re
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest import mock

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

import zoo
from gallery import cli
from gallery.commands.inputs import read_data
from gallery.commands.models import parse
from gallery.commands.request import Request
from inference import CheckpointError
from tests.gallery.command import MODELS, run, write

FIT = ["fit", "softmax", "--data", "insects.csv", "-o", "never.nc"]
ERRORS = {
    "unknown command": (["fitt"], "invalid choice: 'fitt'"),
    "no data": (
        ["fit", "softmax"],
        "the following arguments are required: --data .*zoo fit --help",
    ),
    "unknown flag": (
        [*FIT, "--sed", "3"],
        r"unrecognized arguments: --sed 3 \(see zoo fit --help\)",
    ),
    "unknown flag without a command": (
        ["--sed"],
        r"unrecognized arguments: --sed \(see zoo --help",
    ),
    "the beginning of an option": (
        [*FIT, "--option", "nums=3"],
        "no option 'nums'; did you mean 'num_samples'. there are .*_matrix, num_classes\n",
    ),
    "a short beginning of options": (
        [*FIT, "--option", "num=3"],
        "no option 'num'; did you mean 'num_warmup' or 'num_samples' or 'num_chains'",
    ),
    "seed": ([*FIT, "--seed", "x"], "--seed: wanted a whole number from 0 to .*, found 'x'"),
    "seed of many digits": (
        [*FIT, "--seed", "99999999999999999999"],
        "--seed: wanted a whole number .*, found '99999999999999999999'",
    ),
    "negative seed": ([*FIT, "--seed=-1"], "--seed: wanted a whole number .*, found '-1'"),
    "output is the data": (
        ["fit", "softmax", "--data", "insects.csv", "-o", "full/../insects.csv", "--force"],
        "--data and -o .*the same file",
    ),
    "picture is the output": (
        ["fit", "softmax", "--data", "insects.csv", "-o", "never.png", "--plot", "never.png"],
        "-o and --plot .*the same",
    ),
    "picture is the data": (
        [*FIT, "--plot", "insects.csv"],
        "--data and --plot .*insects.csv: the same file",
    ),
    "data is a folder": (["fit", "softmax", "--data", "./full"], "full: a folder; name a CSV file"),
    "data is this folder": (
        ["fit", "softmax", "--data", "."],
        "--data .: a folder; name a CSV file",
    ),
    "a column to drop that is not there": (
        [*FIT, "--drop", "lenght"],
        "no column 'lenght' to be dropped; the columns are length, wings",
    ),
    "an id that is not there": (
        [*FIT, "--id", "nope"],
        "no column 'nope' to be the id; the columns are length, wings",
    ),
    "columns of a data set": (
        ["fit", "softmax", "--data", "wine", "--drop", "hue"],
        "--drop hue.*only a CSV file needs it",
    ),
    "words of JAX": (
        [*FIT, "--option", "num_classes=abc"],
        r"zoo: TypeError: [^;]*\(--debug shows where\)\n$",
    ),
    "one run to compare": (["compare", "made.nc"], "arguments are required"),
    "same run twice": (["compare", "made.nc", "made.nc"], "named twice"),
    "unknown model": (["show", "sofmax"], "no model 'sofmax'; did you mean 'softmax'"),
    "unknown model to fit": (["fit", "xyz", "--data", "wine"], "no model 'xyz'; there"),
    "unknown data": (["fit", "softmax", "--data", "wne"], "no data set 'wne'; did you mean 'wine'"),
    "unknown data to describe": (["data", "wne"], "no data set 'wne'"),
    "data to write that have no name": (
        ["data", "-o", "never.csv"],
        "-o never.csv: say which data set",
    ),
    "data over a file": (["data", "wine", "-o", "insects.csv"], "-o insects.csv: the file exists"),
    "no file": (["fit", "softmax", "--data", "no.csv"], "no.csv: no such file"),
    "no target column": (
        [*FIT, "--target", "kind"],
        "no column 'kind'.*length, wings, mm/width, species",
    ),
    "target of a named set": (
        ["fit", "softmax", "--data", "wine", "--target", "y"],
        "--target y: only a CSV file",
    ),
    "missing features": (
        ["fit", "softmax", "--data", "holes.csv", "-o", "never.nc"],
        "softmax takes no missing features, and these columns have empty cells: a; "
        "drop them by --drop a, or take a model of missing features, aclass or iqgme",
    ),
    "missing texts": (
        ["fit", "softmax", "--data", "texts.csv", "--dummies", "-o", "never.nc"],
        "these columns have empty cells: colour; drop them by --drop colour, or",
    ),
    "texts as numbers": (
        ["fit", "softmax", "--data", "texts.csv", "-o", "never.nc"],
        "column 'colour' holds texts \\('blue', 'green', 'red'\\), which softmax would take for "
        "numbers.*a column of 0 and 1",
    ),
    "a mark among numbers": (
        ["fit", "softmax", "--data", "marks.csv", "-o", "never.nc"],
        "line 3, column 'a': '\\?' is not a number",
    ),
    "no tasks": (
        ["fit", "iqgme_tasks", "--data", "insects.csv", "-o", "never.nc"],
        "wants the task of each row: .*--task",
    ),
    "a quantity": (
        ["fit", "softmax", "--data", "quantity.csv"],
        "model softmax needs 'num_classes', which the data set 'quantity' lacks",
    ),
    "no table": (
        ["fit", "softmax", "--data", "low_rank_matrix"],
        "model softmax needs 'x', 'num_classes', which the data set 'low_rank_matrix' lacks",
    ),
    "unknown option": (
        [*FIT, "--option", "num_sample=3"],
        "no option 'num_sample'; did you mean 'num_samples'",
    ),
    "option without value": ([*FIT, "--option", "num_samples"], "'num_samples': wanted key=value"),
    "option twice": (
        [*FIT, "--option", "thinning=1", "--option", "thinning=2"],
        "thinning: given twice",
    ),
    "option of the wrong kind": (
        [*FIT, "--option", "num_samples=many"],
        "num_samples: wanted a whole number, found 'many'",
    ),
    "option that the driver refuses": (
        [*FIT, "--option", "num_chains=0"],
        "num_chains: found .*, wanted an integer, at least 1",
    ),
    "option that is data": ([*FIT, "--option", "y=3"], "takes 'y' from the data set"),
    "unknown kernel": (
        [*FIT, "--kernel", "nutz"],
        "no kernel of softmax 'nutz'; did you mean 'nuts'",
    ),
    "output exists": (
        ["fit", "softmax", "--data", "insects.csv", "-o", "made.nc"],
        "the file exists.*--force",
    ),
    "output without folder": (
        ["fit", "softmax", "--data", "insects.csv", "-o", "no/made.nc"],
        "there is no folder",
    ),
    "output is a folder": (
        ["fit", "softmax", "--data", "insects.csv", "-o", "full"],
        "a folder; name a file",
    ),
    "no picture": ([*FIT, "--plot", "out.doc"], "found the ending '.doc', wanted one of"),
    "foreign checkpoint": ([*FIT, "--checkpoint", "full"], "holds files that are no checkpoint"),
    "nothing to resume": (["resume", "empty"], "no command.json in it"),
    "damaged checkpoint": (["resume", "damaged"], "command.json: damaged"),
    "nothing to check": (["check", "empty"], "state.npz' cannot be read"),
    "no run": (["summary", "no.nc"], "no.nc: no such file"),
    "run is a folder": (["summary", "."], "zoo: .: a folder; name a netCDF file"),
    "not a run": (["report", "text.nc"], "text.nc: not a run"),
    "unknown quantity": (
        ["summary", "made.nc", "--var-names", "wight"],
        "no quantity 'wight'; did you mean 'weight'",
    ),
    "no such statistic": (
        ["plot", "made.nc", "--kind", "elbo"],
        "--kind elbo: this run of softmax has none; choose one of energy, trace_dist",
    ),
    "unknown kind": (["plot", "made.nc", "--kind", "pie"], "invalid choice: 'pie'"),
    "missing column": (["predict", "made.nc", "other.csv"], "no column 'mm/width'"),
    "unknown category": (["predict", "made.nc", "unknown.csv"], "category 'perhaps' was not seen"),
    "missing feature to predict": (
        ["predict", "made.nc", "hole.csv"],
        "its 'mm/width' is missing, and softmax takes no missing",
    ),
    "no new table": (["predict", "made.nc", "no.csv"], "no.csv: No such file"),
    "prediction over its table": (
        ["predict", "made.nc", "new.csv", "-o", "new.csv", "--force"],
        "the table and -o new.csv: the same file",
    ),
    "prediction exists": (
        ["predict", "made.nc", "new.csv", "-o", "insects.csv"],
        "the file exists",
    ),
}


def made_up(path):
    """A run of softmax on `insects.csv` as `zoo fit` leaves it, its draws made up."""
    rng = np.random.default_rng(0)
    names = {"feature": ["length", "wings", "mm/width"], "class": ["ant", "bee", "fly"]}
    draws = {"bias": (("chain", "draw", "class"), rng.normal(size=(2, 40, 3)))}
    draws |= {"weight": (("chain", "draw", "feature", "class"), rng.normal(size=(2, 40, 3, 3)))}
    constant = xr.Dataset(
        {"x_mean": ("feature", [130.0, 0.0, -1.0]), "x_std": ("feature", [25.0, 1.0, 1.3])}, names
    )
    groups = {
        "posterior": xr.Dataset(draws, names),
        "observed_data": xr.Dataset({"y": ("row", np.arange(60) % 3)}),
    }
    groups |= {
        "constant_data": constant,
        "sample_stats": xr.Dataset({"energy": (("chain", "draw"), rng.normal(size=(2, 40)))}),
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {
        "model": "softmax",
        "kernel": "NUTS",
        "arguments": '{"num_classes": 3}',
        "categories": '{"wings": ["no", "yes"]}',
    }
    tree.to_netcdf(path, engine="h5netcdf")


@contextmanager
def surrounded(room):
    """This process in the surroundings of a command; what it sets is taken back."""
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.chdir(room.folder)
        patch.setattr(zoo, "__path__", [*zoo.__path__, str(MODELS)])
        yield


@pytest.fixture(scope="module")
def refused(room):
    """Exit code, output and errors of each, some of them on a run whose draws are made up."""
    made_up(room.folder / "made.nc")
    found = {}
    with surrounded(room), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name, (arguments, _) in ERRORS.items():
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                code = cli.main(arguments)
            found[name] = (code, out.getvalue(), err.getvalue())
    return found


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_one_line_and_exit_code_2(refused, name):
    code, _, err = refused[name]
    assert code == 2
    assert re.fullmatch(r"zoo: [^\n]+\n", err), err
    assert re.search(ERRORS[name][1], err), err


def test_errors_leave_no_file(refused, room):
    assert not list(room.folder.glob("never.*"))
    assert (room.folder / "insects.csv").read_text().startswith("length,wings,mm/width,species")
    assert not (room.folder / "softmax-quantity.nc").exists()
    assert [path.name for path in (room.folder / "full").iterdir()] == ["thesis.txt"]
    assert not [path for path in room.folder.iterdir() if "partial" in path.name]


def test_texts_that_a_model_makes_categories_of_are_taken(room, here, monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("it ran"))
    assert here("fit", "aclass", "--data", "texts.csv", "-o", "never.nc") == 2
    told = capsys.readouterr()
    assert "it ran" in told.err
    assert (
        "read texts: colour (3); 1 cell empty; 2 rows without 'label'; 'label' is the class"
        in told.out
    )


@pytest.mark.parametrize("option", ["--drop", "--id"])
def test_a_target_is_told_that_stands_before_a_column_left_out(option, here, monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("it ran"))
    fit = ("fit", "aclass", "--data", "insects.csv", "-o", "never.nc")
    here(*fit, option, "species", "--target", "wings")
    assert "'wings' is the class\n" in capsys.readouterr().out
    here(*fit, option, "species")
    assert (
        "is a quantity, because the last column, 'species', is left out; --target names another"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("has_classes", [True, False])
def test_whole_numbers_are_classes_only_for_a_model_that_has_classes(has_classes, tmp_path):
    write(tmp_path / "whole.csv", [["a", "cost"], ["1", "70"], ["2", "90"], ["3", "70"]])
    model = (lambda x, y=None, num_classes=2: None) if has_classes else (lambda x, y=None: None)
    data = read_data(
        Request("mine", str(tmp_path / "whole.csv"), None, None, (), 0, False, "m.nc", None), model
    )
    np.testing.assert_array_equal(data.y, [0, 1, 0] if has_classes else [70.0, 90.0, 70.0])
    assert data.class_names == (("70", "90") if has_classes else ())


def test_a_model_that_cannot_be_read_hides_no_other(monkeypatch, tmp_path, capsys):
    (tmp_path / "unfinished.py").write_text("CARD = (")
    monkeypatch.setattr(zoo, "__path__", [*zoo.__path__, str(tmp_path)])
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted([*zoo.names()])
    assert any(re.match(r"unfinished +cannot be read: SyntaxError: ", line) for line in lines)


def test_exit_code_and_streams_of_the_process(room, here, capsys):
    assert here("summary", "no.nc") == 2
    assert tuple(capsys.readouterr()) == ("", "zoo: no.nc: no such file\n")
    done = run(room, "data", "wne")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"zoo: no data set 'wne'; did you mean 'wine'[^\n]+\n", done.stderr), (
        done.stderr
    )


def test_data_set_out_of_reach_is_one_line(room):
    unreachable = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    done = run(room, "data", "ionosphere", **unreachable, no_proxy="", NO_PROXY="")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"zoo: data set 'ionosphere': there is no copy in [^\n]+\n", done.stderr), (
        done.stderr
    )


def test_largest_seed_is_taken(here, monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("it ran"))
    assert (
        here("fit", "softmax", "--data", "insects.csv", "-o", "never.nc", "--seed", str(2**63 - 1))
        == 2
    )
    assert "it ran" in capsys.readouterr().err


def test_debug_shows_the_traceback(room, here):
    with pytest.raises(ValueError, match=r"^no.nc: no such file$"):
        here("summary", "no.nc", "--debug")
    done = run(room, "fitt", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert re.search(r"invalid choice: 'fitt'[^\n]*\n$", done.stderr), done.stderr


# A driver that fails, in this process.


@pytest.fixture
def here(room):
    """The command in this process."""
    with surrounded(room):
        yield lambda *arguments: cli.main([*arguments, "--no-compile-cache"])


def failing(monkeypatch, error):
    def run(self, *args, **kwargs):
        raise error

    monkeypatch.setattr("inference.Driver.run", run)


def test_what_a_failing_checkpoint_leaves_is_saved(here, room, monkeypatch, capsys):
    error = CheckpointError("checkpoint: the disk is full")
    error.tree = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"mu": (("chain", "draw"), np.zeros((1, 7)))})}
    )
    failing(monkeypatch, error)
    assert (
        here(
            "fit", "softmax", "--data", "insects.csv", "-o", "rescued.nc", "--checkpoint", "rescue"
        )
        == 2
    )
    assert capsys.readouterr().err == "zoo: checkpoint: the disk is full; saved rescued.nc\n"
    assert az.from_netcdf(room.folder / "rescued.nc")["posterior"].sizes["draw"] == 7


def test_unexpected_error_has_its_type_and_a_hint(here, monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("two\nlines"))
    assert here("fit", "softmax", "--data", "insects.csv", "-o", "never.nc") == 2
    assert capsys.readouterr().err == "zoo: RuntimeError: two lines (--debug shows where)\n"


def test_ctrl_c_outside_of_the_run(here, monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert here("fit", "softmax", "--data", "insects.csv", "-o", "never.nc") == 130
    assert capsys.readouterr().err == "zoo: interrupted\n"
    fit = ("fit", "softmax", "--data", "insects.csv", "-o", "never.nc", "--checkpoint", "stopped")
    assert here(*fit) == 130
    assert capsys.readouterr().err == "zoo: interrupted; go on with: zoo resume stopped\n"


def test_ctrl_c_that_python_drops_is_repeated(here, monkeypatch, capsys):
    class Dropping:
        def __del__(self):
            raise KeyboardInterrupt

    def summary(args):
        Dropping()
        for _ in range(1000):
            time.sleep(0.01)

    monkeypatch.setattr("gallery.commands.reports.summary", summary)
    assert here("summary", "no.nc") == 130
    assert capsys.readouterr().err == "zoo: interrupted\n"


# Models of other kinds.


def run_of(path, posterior, observed):
    """A saved run of one feature as `zoo fit` leaves it, its draws made up."""
    draws = {
        name: (("chain", "draw", *(f"{name}_dim_{i}" for i in range(value.ndim - 2))), value)
        for name, value in posterior.items()
    }
    constant = xr.Dataset(
        {"x_mean": ("feature", [1.0]), "x_std": ("feature", [2.0])}, {"feature": ["a"]}
    )
    groups = {
        "posterior": xr.Dataset(draws),
        "observed_data": xr.Dataset(observed),
        "constant_data": constant,
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {"model": "other", "arguments": "{}", "categories": "{}"}
    tree.to_netcdf(path, engine="h5netcdf")


def test_a_quantity_is_predicted_by_mean_and_deviation(
    here, room, monkeypatch, capsys, numpyro_promotion
):
    def regression(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * jnp.asarray(x)[:, 0], 0.5).to_event(1), obs=y)

    slope = np.random.default_rng(0).normal(3.0, 0.1, size=(2, 2000))
    run_of(room.folder / "line.nc", {"slope": slope}, {"y": ("row", np.zeros(5))})
    write(room.folder / "line.csv", [["a"], ["1"], ["5"]])
    for module in ("predict", "predictive"):
        monkeypatch.setattr(
            f"gallery.commands.{module}.find_model",
            lambda name: SimpleNamespace(model=regression, name=name),
        )
    assert here("predict", "line.nc", "line.csv") == 0
    header, *rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert header == ["mean", "std"]
    found = np.array(rows, dtype=float)  # x = 0 and 2 after scaling; 4000 draws
    np.testing.assert_allclose(found[:, 0], [0, 6], atol=0.05)
    np.testing.assert_allclose(found[:, 1], [0.5, np.hypot(0.5, 0.2)], rtol=0.06)


def test_predict_says_that_a_run_has_no_state(here, room, capsys):
    run_of(
        room.folder / "moved.nc",
        {"share": np.full((1, 4, 2), 0.5)},
        {"y": ("row", np.zeros(5, int))},
    )
    tree = xr.load_datatree(room.folder / "moved.nc", engine="h5netcdf")
    command = Request(
        "aclass", str(room.folder / "gone.csv"), None, None, (), 0, False, "moved.nc", None
    )
    tree.attrs |= {"model": "aclass", "kernel": "ParticleFilter", "command": command.to_json()}
    tree.to_netcdf(room.folder / "moved.nc", engine="h5netcdf")
    write(room.folder / "line.csv", [["a"], ["1"], ["5"]])
    assert here("predict", "moved.nc", "line.csv") == 2
    assert "the run holds no state of its kernel" in capsys.readouterr().err


def test_a_model_of_the_features_is_refused(here, room, monkeypatch, capsys, numpyro_promotion):
    def generative(x, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        y = numpyro.sample("y", dist.Bernoulli(0.5).expand([len(x)]).to_event(1), obs=y)
        numpyro.sample("x", dist.Normal(mean + y[:, None], 1).expand(x.shape).to_event(2), obs=x)

    run_of(room.folder / "both.nc", {"mean": np.zeros((1, 4))}, {"y": ("row", np.zeros(5))})
    write(room.folder / "line.csv", [["a"], ["1"], ["5"]])
    for module in ("predict", "predictive"):
        monkeypatch.setattr(
            f"gallery.commands.{module}.find_model",
            lambda name: SimpleNamespace(model=generative, name=name),
        )
    assert here("predict", "both.nc", "line.csv") == 2
    assert "other observes x itself" in capsys.readouterr().err


def test_show_names_the_sites_that_parameters_come_from(
    here, monkeypatch, capsys, numpyro_promotion
):
    def hierarchical(y=None):
        centre = numpyro.sample("centre", dist.Normal(jnp.array([0.0, 5.0]), 1.5).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(2.0))
        inner = numpyro.deterministic("inner", 2 * centre)
        numpyro.sample("y", dist.Normal(inner, spread).to_event(1), obs=y)

    card = SimpleNamespace(
        title="T", paper="P", doi="", sites={}, data=(), kernels=("NUTS",), edits=()
    )
    entry = SimpleNamespace(
        name="other", model=hierarchical, card=card, simulate=lambda key: {"y": jnp.zeros(2)}
    )
    monkeypatch.setattr("gallery.commands.browse.find_model", lambda name: entry)
    assert here("show", "other") == 0
    out = capsys.readouterr().out
    assert "centre [centre_dim_0] ~ Normal(loc=array[2], scale=1.5)\n" in out
    assert "spread ~ HalfNormal(scale=2)\n" in out
    assert "inner [inner_dim_0] = f(centre)\n" in out
    assert "y [y_dim_0] ~ Normal(loc=f(centre), scale=spread), observed\n" in out


def test_values_of_options():
    texts = ["a=3", "b=-0.5", "c=1e3", "d=true", "e=False", "f=probit", "g=x=y"]
    assert parse(texts) == {
        "a": 3,
        "b": -0.5,
        "c": 1000.0,
        "d": True,
        "e": False,
        "f": "probit",
        "g": "x=y",
    }
