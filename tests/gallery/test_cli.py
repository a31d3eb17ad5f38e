"""The command `zoo`, as a person runs it: in a process of its own, in an empty folder, with an empty cache."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

from gallery import cli
from gallery.commands.options import parse
from inference import CheckpointError

TINY = ("--option", "num_warmup=60", "num_samples=40", "num_chains=2")
MANY = """
import contextlib, io, json, sys
from gallery.cli import main
found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    """A folder with tables, and the surroundings in which every process of this file runs."""
    folder = tmp_path_factory.mktemp("zoo")
    home = tmp_path_factory.mktemp("home")
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "ZOO_"))}
    env = cleared | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    rng = np.random.default_rng(0)
    species = rng.integers(3, size=60)
    length, width = 100 + 30 * species + 10 * rng.normal(size=60), rng.normal(size=60) - species
    rows = [
        [f"{a:.3f}", "yes" if c else "no", f"{b:.4f}", ("ant", "bee", "fly")[k]]
        for a, b, c, k in zip(length, width, species > 0, species, strict=True)
    ]
    write(folder / "insects.csv", [["length", "wings", "mm/width", "species"], *rows])
    write(folder / "new.csv", [["mm/width", "length", "note", "wings"], ["-1.9", "161", "x", "yes"], ["0.1", "99", "y", "no"]])
    write(folder / "hole.csv", [["mm/width", "length", "wings"], ["1", "100", "no"], ["NA", "100", "no"]])
    write(folder / "other.csv", [["length", "wings"], ["100", "no"]])
    write(folder / "unknown.csv", [["mm/width", "length", "wings"], ["1", "100", "perhaps"]])
    write(folder / "holes.csv", [["a", "label"], ["1", "u"], ["", "v"], ["2.5", "u"]])
    write(folder / "quantity.csv", [["a", "cost"], *([str(i), f"{i / 7:.3f}"] for i in range(20))])
    (folder / "text.nc").write_text("not a run")
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("years of work")
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "command.json").write_text("{")
    return SimpleNamespace(folder=folder, env=env, cache=home / "cache" / "bayes-model-zoo" / "compiled")


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def zoo(room, *arguments, **changed):
    command = [sys.executable, "-m", "gallery.cli", *arguments]
    return subprocess.run(command, cwd=room.folder, env=room.env | changed, capture_output=True, text=True, timeout=300)


def many(room, commands):
    """Several commands in one process: (exit code, output, errors) of each."""
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, cwd=room.folder, env=room.env, input=json.dumps(commands), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def fitted(room):
    """The run that most tests look at."""
    done = zoo(
        room, "fit", "demo", "--data", "insects.csv", "--target", "species", *TINY, "--seed", "3", "-o", "run.nc", "--plot", "run.png"
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(path=room.folder / "run.nc", out=done.stdout, err=done.stderr)


# Help costs nothing.


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["predict", "--help"]])
def test_help_imports_nothing_heavy(room, arguments):
    code = (
        "import json, resource, sys\nfrom gallery.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=room.env, capture_output=True, text=True, check=True)
    *text, last = done.stdout.splitlines()
    seconds, modules = json.loads(last)
    assert text[0].startswith("usage: ")
    assert not {"jax", "numpyro", "arviz", "matplotlib", "sklearn", "numpy", "xarray"} & set(modules)
    assert seconds < 0.5


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0
    assert "zoo fit demo --data wine" in capsys.readouterr().out


# What there is.


@pytest.fixture(scope="session")
def browsed(room):
    return many(room, [["list"], ["show", "demo"], ["data"], ["data", "wine"]])


def test_list_marks_the_demonstration(browsed):
    code, out, err = browsed[0]
    assert (code, err) == (0, "")
    assert re.search(r"^demo +Softmax regression \(the demonstration\) +NUTS, SVI", out, re.M)


def test_show_reads_the_priors_off_a_trace(browsed):
    code, out, err = browsed[1]
    assert (code, err) == (0, "")
    assert "bias [class] ~ Normal(loc=0, scale=2)\n" in out
    assert "weight [feature, class] ~ Normal(loc=0, scale=1)\n" in out
    assert "y [row] ~ CategoricalLogits(logits=f(bias, weight)), observed\n" in out


def test_data_lists_and_describes(browsed):
    assert browsed[2][0] == browsed[3][0] == 0
    assert re.search(r"^wine +Wine, chemical analysis", browsed[2][1], re.M)
    assert "pinwheel" in browsed[2][1]
    assert re.search(r"x +\[178, 13\] +float64", browsed[3][1])
    assert "Classes: class_0, class_1, class_2" in browsed[3][1]


# A fit, and what it leaves.


def test_fit_says_what_it_did_and_nothing_else(fitted):
    assert fitted.err == ""
    assert "demo on insects (60 rows, 3 features, 3 classes): NUTS, num_warmup 60, num_samples 40, num_chains 2, seed 3" in fitted.out
    assert "weight[length, ant]" in fitted.out
    assert "saved run.nc and run.png: 2 chains of 40 draws, 100 steps in" in fitted.out
    assert len(fitted.out.splitlines()) == 1 + 1 + 12 + 1  # the last: the 12 quantities are all there are


def test_run_holds_names_scaling_and_groups(fitted):
    tree = az.from_netcdf(fitted.path)
    assert {"posterior", "log_likelihood", "posterior_predictive", "observed_data", "constant_data", "sample_stats"} <= set(tree.children)
    assert list(tree["posterior"]["feature"].values) == ["length", "wings", "mm/width"]
    assert list(tree["posterior"]["class"].values) == list(tree["constant_data"]["class"].values) == ["ant", "bee", "fly"]
    x = tree["constant_data"]["x"]
    assert x.dims == ("row", "feature")
    np.testing.assert_allclose(x.values[:, [0, 2]].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(x.values[:, [0, 2]].std(0), 1, rtol=1e-12)
    assert set(x.values[:, 1]) == {0.0, 1.0}  # a category: left as it is
    assert json.loads(tree.attrs["categories"]) == {"wings": ["no", "yes"]}
    assert (tree.attrs["model"], tree.attrs["data"], tree.attrs["ended"]) == ("demo", "insects.csv", "budget")


def test_picture_is_one(fitted, room):
    assert (room.folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_programs_are_kept_in_the_users_cache(fitted, room):
    assert any(room.cache.iterdir())


@pytest.fixture(scope="session")
def variational(room, tmp_path_factory):
    home = tmp_path_factory.mktemp("nowhere")
    done = zoo(
        room,
        *(
            "fit",
            "demo",
            "--data",
            "insects.csv",
            "--kernel",
            "svi",
            "--raw",
            "--option",
            "num_warmup=200",
            "--option",
            "num_samples=40",
            "num_chains=2",
        ),
        *("-o", "svi.nc", "--no-compile-cache"),
        XDG_CACHE_HOME=str(home),
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(path=room.folder / "svi.nc", out=done.stdout, cache=home)


def test_no_compile_cache_writes_no_cache(variational):
    assert not list(variational.cache.rglob("*-cache"))


def test_raw_features_stay_as_they_are(variational, room):
    tree = az.from_netcdf(variational.path)
    with open(room.folder / "insects.csv") as file:
        length = [float(row["length"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(tree["constant_data"]["x"].sel(feature="length"), length)
    assert tree.attrs["kernel"] == "SVI"
    assert tree["sample_stats"].sizes["step"] == 200


# Commands on runs.


@pytest.fixture(scope="session")
def looked_at(room, fitted, variational):
    names = ["summary", "summary bias", "report", "compare", "plot", "elbo", "forest", "dist", "rank", "energy", "predict", "print"]
    done = many(
        room,
        [
            ["summary", "run.nc"],
            ["summary", "run.nc", "--var-names", "bias"],
            ["report", "run.nc"],
            ["compare", "run.nc", "svi.nc"],
            ["plot", "run.nc", "-o", "trace.svg"],
            ["plot", "svi.nc"],
            *(["plot", "run.nc", "--kind", kind, "-o", f"{kind}.png"] for kind in ("forest", "dist", "rank", "energy")),
            ["predict", "run.nc", "new.csv", "-o", "classes.csv"],
            ["predict", "run.nc", "new.csv"],
        ],
    )
    return dict(zip(names, done, strict=True))


def test_commands_on_runs_are_quiet_and_succeed(looked_at):
    assert {name: (code, err) for name, (code, _, err) in looked_at.items() if name != "report"} == {
        name: (0, "") for name in looked_at if name != "report"
    }


def test_summary_equals_arviz(looked_at, fitted):
    table = az.summary(az.from_netcdf(fitted.path), var_names=["bias"])
    assert looked_at["summary bias"][1].strip() == table.to_string().strip()
    assert "weight[mm/width, fly]" in looked_at["summary"][1]


def test_report_answers_with_its_exit_code(looked_at):
    """80 draws in all are too few for the effective sample sizes asked for."""
    code, out, err = looked_at["report"]
    assert (code, err) == (1, "")
    assert "NOT TRUSTED" in out


def test_compare_ranks_both(looked_at):
    table = looked_at["compare"][1].splitlines()
    assert "elpd" in table[0]
    assert {line.split()[0] for line in table[1:3]} == {"run", "svi"}


def test_pictures_are_drawn(looked_at, room):
    assert (room.folder / "trace.svg").read_text().startswith("<?xml")
    assert all((room.folder / f"{name}.png").stat().st_size > 5000 for name in ("svi", "forest", "dist", "rank", "energy"))


def test_predict_averages_the_softmax_over_the_draws(looked_at, fitted, room):
    tree = az.from_netcdf(fitted.path)
    with open(room.folder / "insects.csv") as file:
        rows = list(csv.DictReader(file))
    old = np.array([[float(row["length"]), float(row["mm/width"])] for row in rows])
    new = (np.array([[161, -1.9], [99, 0.1]]) - old.mean(0)) / old.std(0)
    x = np.stack([new[:, 0], [1.0, 0.0], new[:, 1]], axis=1)
    weight, bias = (tree["posterior"][name].values.reshape(80, -1, 3).astype(float) for name in ("weight", "bias"))
    odds = np.exp(x @ weight + bias)
    expected = (odds / odds.sum(-1, keepdims=True)).mean(0)
    header, *written = list(csv.reader((room.folder / "classes.csv").read_text().splitlines()))
    assert header == ["ant", "bee", "fly", "predicted"]
    np.testing.assert_allclose([[float(cell) for cell in row[:3]] for row in written], expected, rtol=1e-4)
    assert [row[3] for row in written] == [header[k] for k in expected.argmax(1)]
    assert looked_at["print"][1] == (room.folder / "classes.csv").read_text()


# Errors: one line, exit code 2.

FIT = ["fit", "demo", "--data", "insects.csv", "-o", "never.nc"]
ERRORS = {
    "unknown command": (["fitt"], "invalid choice: 'fitt'"),
    "no data": (["fit", "demo"], "the following arguments are required: --data .*zoo fit --help"),
    "unknown flag": ([*FIT, "--sed", "3"], "unrecognized arguments: --sed"),
    "seed": ([*FIT, "--seed", "x"], "--seed: invalid int value: 'x'"),
    "one run to compare": (["compare", "run.nc"], "arguments are required"),
    "same run twice": (["compare", "run.nc", "run.nc"], "named twice"),
    "unknown model": (["show", "dmo"], "no model 'dmo'; did you mean 'demo'"),
    "unknown model to fit": (["fit", "xyz", "--data", "wine"], "no model 'xyz'; there"),
    "unknown data": (["fit", "demo", "--data", "wne"], "no data set 'wne'; did you mean 'wine'"),
    "unknown data to describe": (["data", "wne"], "no data set 'wne'"),
    "no file": (["fit", "demo", "--data", "no.csv"], "no.csv: no such file"),
    "no target column": ([*FIT, "--target", "kind"], "no column 'kind'.*length, wings, mm/width, species"),
    "target of a named set": (["fit", "demo", "--data", "wine", "--target", "y"], "--target y: only a CSV file"),
    "missing features": (["fit", "demo", "--data", "holes.csv", "-o", "never.nc"], "argument 'x': 1 entries are NaN"),
    "a quantity": (["fit", "demo", "--data", "quantity.csv"], "model demo needs 'num_classes', which the data set 'quantity' lacks"),
    "no table": (
        ["fit", "demo", "--data", "low_rank_matrix"],
        "model demo needs 'x', 'num_classes', which the data set 'low_rank_matrix' lacks",
    ),
    "unknown option": ([*FIT, "--option", "num_sample=3"], "no option 'num_sample'; did you mean 'num_samples'"),
    "option without value": ([*FIT, "--option", "num_samples"], "'num_samples': wanted key=value"),
    "option twice": ([*FIT, "--option", "thinning=1", "--option", "thinning=2"], "thinning: given twice"),
    "option of the wrong kind": ([*FIT, "--option", "num_samples=many"], "num_samples: wanted a whole number, found 'many'"),
    "option that the driver refuses": ([*FIT, "--option", "num_chains=0"], "num_chains: an integer, at least 1"),
    "option that is data": ([*FIT, "--option", "y=3"], "takes 'y' from the data set"),
    "unknown kernel": ([*FIT, "--kernel", "nutz"], "no kernel of demo 'nutz'; did you mean 'nuts'"),
    "output exists": (["fit", "demo", "--data", "insects.csv", "-o", "run.nc"], "the file exists.*--force"),
    "output without folder": (["fit", "demo", "--data", "insects.csv", "-o", "no/run.nc"], "there is no folder"),
    "output is a folder": (["fit", "demo", "--data", "insects.csv", "-o", "full"], "a folder; name a file"),
    "no picture": ([*FIT, "--plot", "out.doc"], "found the ending '.doc', wanted one of"),
    "foreign checkpoint": ([*FIT, "--checkpoint", "full"], "holds files that are no checkpoint"),
    "nothing to resume": (["resume", "empty"], "no command.json in it"),
    "damaged checkpoint": (["resume", "damaged"], "command.json: damaged"),
    "no run": (["summary", "no.nc"], "no.nc: no such file"),
    "not a run": (["report", "text.nc"], "text.nc: not a run"),
    "unknown quantity": (["summary", "run.nc", "--var-names", "wight"], "no quantity 'wight'; did you mean 'weight'"),
    "no such statistic": (["plot", "run.nc", "--kind", "elbo"], "--kind elbo: the run has no such statistic"),
    "unknown kind": (["plot", "run.nc", "--kind", "pie"], "invalid choice: 'pie'"),
    "missing column": (["predict", "run.nc", "other.csv"], "no column 'mm/width'"),
    "unknown category": (["predict", "run.nc", "unknown.csv"], "category 'perhaps' was not seen"),
    "missing feature to predict": (["predict", "run.nc", "hole.csv"], "row 2 of 2: its 'mm/width' is missing, and demo takes no missing"),
    "no new table": (["predict", "run.nc", "no.csv"], "no.csv: No such file"),
    "prediction exists": (["predict", "run.nc", "new.csv", "-o", "insects.csv"], "the file exists"),
}


@pytest.fixture(scope="session")
def refused(room, fitted):
    return dict(zip(ERRORS, many(room, [arguments for arguments, _ in ERRORS.values()]), strict=True))


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_one_line_and_exit_code_2(refused, name):
    code, _, err = refused[name]
    assert code == 2
    assert re.fullmatch(r"zoo: [^\n]+\n", err), err
    assert re.search(ERRORS[name][1], err), err


def test_errors_leave_no_file(refused, room):
    assert not (room.folder / "never.nc").exists()
    assert not (room.folder / "demo-quantity.nc").exists()
    assert [path.name for path in (room.folder / "full").iterdir()] == ["thesis.txt"]
    assert not [path for path in room.folder.iterdir() if "partial" in path.name]


def test_exit_code_and_streams_of_the_process(room):
    done = zoo(room, "summary", "no.nc")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "zoo: no.nc: no such file\n"


def test_debug_shows_the_traceback(room):
    done = zoo(room, "summary", "no.nc", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: no.nc: no such file\n")


# A driver that fails, in this process.


@pytest.fixture
def here(room, monkeypatch):
    """The command in this process; what it sets is taken back."""
    monkeypatch.chdir(room.folder)
    for name in ("TF_CPP_MIN_LOG_LEVEL", "JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    return lambda *arguments: cli.main([*arguments, "--no-compile-cache"])


def failing(monkeypatch, error):
    def run(self, *args, **kwargs):
        raise error

    monkeypatch.setattr("inference.Driver.run", run)


def test_what_a_failing_checkpoint_leaves_is_saved(here, room, monkeypatch, capsys):
    error = CheckpointError("checkpoint: the disk is full")
    error.tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"mu": (("chain", "draw"), np.zeros((1, 7)))})})
    failing(monkeypatch, error)
    assert here("fit", "demo", "--data", "insects.csv", "-o", "rescued.nc", "--checkpoint", "rescue") == 2
    assert capsys.readouterr().err == "zoo: checkpoint: the disk is full; saved rescued.nc\n"
    assert az.from_netcdf(room.folder / "rescued.nc")["posterior"].sizes["draw"] == 7


def test_unexpected_error_has_its_type_and_a_hint(here, monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("two\nlines"))
    assert here("fit", "demo", "--data", "insects.csv", "-o", "never.nc") == 2
    assert capsys.readouterr().err == "zoo: RuntimeError: two lines (--debug shows where)\n"


def test_ctrl_c_outside_of_the_run(here, monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert here("fit", "demo", "--data", "insects.csv", "-o", "never.nc") == 130
    assert capsys.readouterr().err == "zoo: interrupted\n"


# Models that the demonstration is not.


def run_of(path, posterior, observed):
    """A saved run as `zoo fit` leaves it, its draws made up."""
    draws = {name: (("chain", "draw", *(f"{name}_dim_{i}" for i in range(value.ndim - 2))), value) for name, value in posterior.items()}
    constant = xr.Dataset({"x_mean": ("feature", [1.0]), "x_std": ("feature", [2.0])}, {"feature": ["a"]})
    groups = {"posterior": xr.Dataset(draws), "observed_data": xr.Dataset(observed), "constant_data": constant}
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {"model": "other", "arguments": "{}", "categories": "{}"}
    tree.to_netcdf(path, engine="h5netcdf")


def test_a_quantity_is_predicted_by_mean_and_deviation(here, room, monkeypatch, capsys, numpyro_promotion):
    def regression(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * jnp.asarray(x)[:, 0], 0.5).to_event(1), obs=y)

    slope = np.random.default_rng(0).normal(3.0, 0.1, size=(2, 2000))
    run_of(room.folder / "line.nc", {"slope": slope}, {"y": ("row", np.zeros(5))})
    write(room.folder / "line.csv", [["a"], ["1"], ["5"]])
    monkeypatch.setattr("gallery.commands.predict.find_model", lambda name: SimpleNamespace(model=regression, name=name))
    assert here("predict", "line.nc", "line.csv") == 0
    header, *rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert header == ["mean", "std"]
    found = np.array(rows, dtype=float)  # x = 0 and 2 after scaling; 4000 draws
    np.testing.assert_allclose(found[:, 0], [0, 6], atol=0.05)
    np.testing.assert_allclose(found[:, 1], [0.5, np.hypot(0.5, 0.2)], rtol=0.06)


def test_a_model_of_the_features_is_refused(here, room, monkeypatch, capsys, numpyro_promotion):
    def generative(x, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(0.5).expand([len(x)]).to_event(1), obs=y)
        numpyro.sample("x", dist.Normal(mean, 1).expand(x.shape).to_event(2), obs=x)

    run_of(room.folder / "both.nc", {"mean": np.zeros((1, 4))}, {"y": ("row", np.zeros(5))})
    write(room.folder / "line.csv", [["a"], ["1"], ["5"]])
    monkeypatch.setattr("gallery.commands.predict.find_model", lambda name: SimpleNamespace(model=generative, name=name))
    assert here("predict", "both.nc", "line.csv") == 2
    assert "other observes x itself" in capsys.readouterr().err


def test_show_names_the_sites_that_parameters_come_from(here, monkeypatch, capsys, numpyro_promotion):
    def hierarchical(y=None):
        centre = numpyro.sample("centre", dist.Normal(jnp.array([0.0, 5.0]), 1.5).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(2.0))
        inner = numpyro.deterministic("inner", 2 * centre)
        numpyro.sample("y", dist.Normal(inner, spread).to_event(1), obs=y)

    card = SimpleNamespace(title="T", paper="P", doi="", sites={}, data=(), kernels=("NUTS",), edits=())
    entry = SimpleNamespace(name="other", model=hierarchical, card=card, simulate=lambda key: {"y": jnp.zeros(2)})
    monkeypatch.setattr("gallery.commands.browse.find_model", lambda name: entry)
    assert here("show", "other") == 0
    out = capsys.readouterr().out
    assert "centre [centre_dim_0] ~ Normal(loc=array[2], scale=1.5)\n" in out
    assert "spread ~ HalfNormal(scale=2)\n" in out
    assert "inner [inner_dim_0] = f(centre)\n" in out
    assert "y [y_dim_0] ~ Normal(loc=f(centre), scale=spread), observed\n" in out


def test_values_of_options():
    texts = ["a=3", "b=-0.5", "c=1e3", "d=true", "e=False", "f=probit", "g=x=y"]
    assert parse(texts) == {"a": 3, "b": -0.5, "c": 1000.0, "d": True, "e": False, "f": "probit", "g": "x=y"}


# Signals, kills, resuming.


def start(room, name):
    """A fit that would take hours, once its checkpoint holds draws."""
    options = (
        "--option",
        "num_warmup=20",
        "num_samples=10000000",
        "thinning=100",
        "save_every=0.5",
        "--checkpoint",
        name,
        "-o",
        f"{name}.nc",
    )
    command = [sys.executable, "-m", "gallery.cli", "fit", "demo", "--data", "insects.csv", *options]
    return subprocess.Popen(command, cwd=room.folder, env=room.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def records(folder: Path) -> int:
    if not (folder / "state.npz").exists():
        return 0
    with np.load(folder / "state.npz") as file:
        return int(file["records"])


@pytest.mark.slow
def test_signals_keep_what_was_drawn(room, fitted):
    processes = {number: start(room, number.name) for number in (signal.SIGINT, signal.SIGTERM)}
    deadline = time.monotonic() + 200
    while any(not records(room.folder / number.name) for number in processes):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes.values())
        time.sleep(0.2)
    for number, process in processes.items():
        process.send_signal(number)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        out, err = processes[number].communicate(timeout=200)
        assert (processes[number].returncode, err) == (code, "")
        assert f"ended early by {number.name}; go on with: zoo resume {number.name}" in out
        tree = az.from_netcdf(room.folder / f"{number.name}.nc")
        assert tree.attrs["ended"] == number.name
        assert tree["posterior"].sizes["draw"] == records(room.folder / number.name) > 0


@pytest.fixture(scope="session")
def resumed(room, fitted):
    """The run of `fitted` once more: its time limit ends it in the warm-up, it is resumed, and then has the time it needs."""
    fit = ["fit", "demo", "--data", "insects.csv", "--target", "species", *TINY, "--checkpoint", "kept", "-o", "kept.nc", "--force"]
    commands = [
        [*fit, "--seed", "3", "--option", "max_time=0"],
        ["resume", "kept"],
        [*fit, "--seed", "9"],
        [*fit, "--seed", "3"],
        ["resume", "kept"],
    ]
    return many(room, commands)


def test_run_without_a_draw_is_an_error_that_says_how_to_go_on(resumed):
    code, _, err = resumed[0]
    assert code == 2
    assert re.fullmatch(r"zoo: ended by max_time before the first draw, after \d+ steps: .*; go on with: zoo resume kept\n", err)


def test_resumed_run_equals_the_one_that_was_not_stopped(resumed, room, fitted):
    assert resumed[1][0] in (0, 2)  # 2: the limit came again before the first draw
    assert [code for code, _, _ in resumed[3:]] == [0, 0]
    assert "0 steps in" in resumed[4][1]
    final, straight = (az.from_netcdf(path) for path in (room.folder / "kept.nc", fitted.path))
    assert final.attrs["steps"] == straight.attrs["steps"] == 100
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(final["posterior"][name], straight["posterior"][name])


def test_checkpoint_of_another_run_is_refused_and_stays(resumed, room):
    code, _, err = resumed[2]
    assert code == 2
    assert "holds another run (seed: 3 there, 9 here)" in err
    assert json.loads((room.folder / "kept" / "command.json").read_text())["seed"] == 3
