"""The command `zoo`, as a person runs it: in a process of its own, in an empty folder, with an
empty cache.
"""

import csv
import io
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import arviz as az
import numpy as np
import pytest

import zoo
from gallery import cli
from gallery.commands.browse import options_text
from gallery.commands.models import parse, split
from gallery.commands.runs import waiting
from tests.gallery.command import FIT, many, run
from tests.gallery.conftest import furnished

SVI = ("fit", "softmax", "--data", "insects.csv", "--kernel", "svi", "--raw")
SVI += ("--option", "num_warmup=200", "--option", "num_samples=40", "num_chains=2")
COMMANDS = {
    "fit": FIT,
    "list": ["list"],
    "show": ["show", "softmax"],
    "data": ["data"],
    "data wine": ["data", "wine"],
    "table": ["data", "wine", "-o", "copy.csv"],
    "svi": [*SVI, "-o", "svi.nc"],
    "summary": ["summary", "run.nc"],
    "summary bias": ["summary", "run.nc", "--var-names", "bias"],
    "report": ["report", "run.nc"],
    "compare": ["compare", "run.nc", "svi.nc"],
    "plot": ["plot", "run.nc", "-o", "trace.svg"],
    "elbo": ["plot", "svi.nc", "--kind", "elbo"],
    **{
        kind: ["plot", "run.nc", "--kind", kind, "-o", f"{kind}.png"]
        for kind in ("forest", "dist", "rank", "energy")
    },
    "predict": ["predict", "run.nc", "new.csv", "-o", "classes.csv"],
    "print": ["predict", "run.nc", "new.csv"],
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return furnished(tmp_path_factory)


@pytest.fixture(scope="module")
def done(room):
    """All commands, in one process, for a process takes longer than most of them: (exit code,
    output, errors) of each.
    """
    return dict(zip(COMMANDS, many(room, list(COMMANDS.values()), is_quiet=True), strict=True))


@pytest.fixture(scope="module")
def fitted(done, room):
    """The run that most tests look at."""
    code, out, err = done["fit"]
    assert code == 0, err
    return SimpleNamespace(path=room.folder / "run.nc", out=out, err=err)


@pytest.fixture(scope="module")
def variational(room, tmp_path_factory):
    home = tmp_path_factory.mktemp("nowhere")
    done = run(room, *SVI, "-o", "raw.nc", "--no-compile-cache", XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(path=room.folder / "raw.nc", out=done.stdout, cache=home)


# Help costs nothing.


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["predict", "--help"]])
def test_help_imports_nothing_heavy(room, arguments):
    code = (
        "import json, resource, sys\nfrom gallery.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, sorted(sys.modules)]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=room.env, capture_output=True, text=True, check=True
    )
    *text, last = found.stdout.splitlines()
    seconds, modules = json.loads(last)
    assert text[0].startswith("usage: ")
    assert not {"jax", "numpyro", "arviz", "matplotlib", "sklearn", "numpy", "xarray"} & set(
        modules
    )
    assert seconds < 0.5


@pytest.mark.parametrize(
    ("model", "kernel"),
    [(name, kernel) for name in zoo.names() for kernel in zoo.load(name).card.kernels],
)
def test_all_options_that_are_listed_are_taken(model, kernel):
    parts = options_text(model, kernel).split("\n\n")
    rows = [line.split() for part in parts for line in part.strip().splitlines()[2:]]
    assert {"num_samples", "max_time"} <= {row[0] for row in rows}
    values = {"int": "3", "float": "0.5", "bool": "true", "str": "word", "function": "word"}
    for name, *more in rows:
        if name != "...":
            found = split(parse([f"{name}={values[more[0]]}"]), zoo.load(model).model, kernel)
            assert any(name in each for each in found)


def test_listed_defaults_are_those_of_the_signatures():
    lines = [line.split() for line in options_text("aclass", None).splitlines()]
    assert ["alpha", "float", "1.0"] in lines
    assert ["num_particles", "int", "200"] in lines  # the command's
    assert ["resampling", "str", "optimal"] in lines  # the kernel's
    assert ["max_groups", "int", "none"] in lines
    [component] = [line for line in lines if line[:1] == ["component"]]
    assert "gamma_poisson," in component


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("where", "shown"), [(Terminal, "fitting ...\r\033[K"), (io.StringIO, "")])
def test_waiting_is_shown_on_a_terminal_alone(where, shown, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.stderr", where())
    with waiting("fitting"):
        assert sys.stderr.getvalue() == shown.removesuffix("\033[K")
    assert sys.stderr.getvalue() == shown


def test_help_of_a_model_has_its_options(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", "iqgme", "--kernel", "nuts", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: zoo fit")
    assert out.endswith(options_text("iqgme", "nuts") + "\n")
    assert cli.main(["fit", "iqgm", "--help"]) == 2
    assert "did you mean 'iqgme'" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0
    assert "zoo fit aclass --data wine" in capsys.readouterr().out


# What there is.


def test_list_has_a_line_for_each_model(done):
    code, out, err = done["list"]
    assert (code, err) == (0, "")
    assert re.search(
        r"^aclass +Classes made of Chinese restaurant process mixtures +ParticleFilter, "
        r"CollapsedGibbs$",
        out,
        re.M,
    )
    assert re.search(r"^softmax +Softmax regression +NUTS, SVI", out, re.M)


def test_show_reads_the_priors_off_a_trace(done):
    code, out, err = done["show"]
    assert (code, err) == (0, "")
    assert "bias [class] ~ Normal(loc=0, scale=2)\n" in out
    assert "weight [feature, class] ~ Normal(loc=0, scale=1)\n" in out
    assert "y [row] ~ CategoricalLogits(logits=f(bias, weight)), observed\n" in out


@pytest.mark.parametrize("model", ["bsvd", "iqgme"])
def test_show_has_the_priors_of_a_fit_not_those_of_the_simulator(model, capsys, numpyro_promotion):
    wide = {"bsvd": zoo.bsvd.VAGUE, "iqgme": zoo.iqgme.FEW_EXPERTS}[model]
    site = {"bsvd": "alpha_s", "iqgme": "alpha"}[model]
    prior = f"Gamma(concentration={float(wide.concentration):g}, rate={float(wide.rate):g})"
    assert cli.main(["show", model]) == 0
    out = capsys.readouterr().out
    assert f"  {site} ~ {prior}\n" in out
    assert "concentration=5" not in out  # of the simulator


def test_data_lists_and_describes(done):
    assert done["data"][0] == done["data wine"][0] == 0
    assert re.search(r"^wine +Wine, chemical analysis", done["data"][1], re.M)
    assert "pinwheel" in done["data"][1]
    assert re.search(r"x +\[178, 13\] +float64", done["data wine"][1])
    assert "Classes: class_0, class_1, class_2" in done["data wine"][1]


def test_data_writes_a_table(done, room):
    assert tuple(done["table"]) == (0, "saved copy.csv: 178 rows\n", "")
    header, first = (room.folder / "copy.csv").read_text().splitlines()[:2]
    assert header.startswith("alcohol,malic_acid,")
    assert first.startswith("14.23,1.71,")
    assert (header.rpartition(",")[2], first.rpartition(",")[2]) == ("class", "class_0")


# A fit, and what it leaves.


def test_fit_says_what_it_did_and_nothing_else(fitted):
    assert fitted.err == ""
    assert (
        "softmax on insects (60 rows, 3 features, 3 classes): NUTS, num_warmup 60, num_samples 40, "
        "num_chains 2, seed 3" in fitted.out
    )
    assert "weight[length, ant]" in fitted.out
    assert "saved run.nc and run.png: 2 chains of 40 draws, 100 steps in" in fitted.out
    assert "read numbers: length, mm/width; texts: wings (2); 'species' is the class" in fitted.out
    assert "no held-out score: NUTS is not run twice unasked" in fitted.out
    # the 12 quantities are all there are
    assert fitted.out.splitlines()[2 + 1 + 12].startswith("saved run.nc and run.png")


def test_run_holds_names_scaling_and_groups(fitted):
    tree = az.from_netcdf(fitted.path)
    assert {
        "posterior",
        "log_likelihood",
        "posterior_predictive",
        "observed_data",
        "constant_data",
        "sample_stats",
    } <= set(tree.children)
    assert list(tree["posterior"]["feature"].values) == ["length", "wings", "mm/width"]
    assert (
        list(tree["posterior"]["class"].values)
        == list(tree["constant_data"]["class"].values)
        == ["ant", "bee", "fly"]
    )
    x = tree["constant_data"]["x"]
    assert x.dims == ("row", "feature")
    np.testing.assert_allclose(x.values[:, [0, 2]].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(x.values[:, [0, 2]].std(0), 1, rtol=1e-12)
    assert set(x.values[:, 1]) == {0.0, 1.0}  # a category: left as it is
    assert json.loads(tree.attrs["categories"]) == {"wings": ["no", "yes"]}
    assert (tree.attrs["model"], tree.attrs["data"], tree.attrs["ended"]) == (
        "softmax",
        "insects.csv",
        "budget",
    )


def test_picture_is_one(fitted, room):
    assert (room.folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_programs_are_kept_in_the_users_cache(fitted, room):
    assert any(room.cache.iterdir())


@pytest.mark.slow
def test_no_compile_cache_writes_no_cache(variational):
    assert not list(variational.cache.rglob("*-cache"))


@pytest.mark.slow
def test_raw_features_stay_as_they_are(variational, room):
    tree = az.from_netcdf(variational.path)
    with open(room.folder / "insects.csv") as file:
        length = [float(row["length"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(tree["constant_data"]["x"].sel(feature="length"), length)
    assert tree.attrs["kernel"] == "SVI"
    assert tree["sample_stats"].sizes["step"] == 200
    # what `zoo compare` corrects the draws by
    assert {"log_likelihood", "log_prior", "log_q"} <= set(tree.children)


# Commands on runs.


def test_commands_on_runs_are_quiet_and_succeed(done):
    assert {name: (code, err) for name, (code, _, err) in done.items()} == {
        name: (int(name == "report"), "") for name in done
    }


def test_summary_equals_arviz(done, fitted):
    table = az.summary(az.from_netcdf(fitted.path), var_names=["bias"])
    assert done["summary bias"][1].strip() == table.to_string().strip()
    assert "weight[mm/width, fly]" in done["summary"][1]


def test_report_answers_with_its_exit_code(done):
    """80 draws in all are too few for the effective sample sizes asked for."""
    code, out, err = done["report"]
    assert (code, err) == (1, "")
    assert "NOT TRUSTED" in out


def test_compare_ranks_both(done):
    table = done["compare"][1].splitlines()
    assert "elpd" in table[0]
    assert {line.split()[0] for line in table[1:3]} == {"run", "svi"}
    assert "no `log_q`" not in done["compare"][1]


def test_pictures_are_drawn(done, room):
    assert (room.folder / "trace.svg").read_text().startswith("<?xml")
    assert all(
        (room.folder / f"{name}.png").stat().st_size > 5000
        for name in ("svi-elbo", "forest", "dist", "rank", "energy")
    )


def test_predict_averages_the_softmax_over_the_draws(done, fitted, room):
    tree = az.from_netcdf(fitted.path)
    with open(room.folder / "insects.csv") as file:
        rows = list(csv.DictReader(file))
    old = np.array([[float(row["length"]), float(row["mm/width"])] for row in rows])
    new = (np.array([[161, -1.9], [99, 0.1]]) - old.mean(0)) / old.std(0)
    x = np.stack([new[:, 0], [1.0, 0.0], new[:, 1]], axis=1)
    weight, bias = (
        tree["posterior"][name].values.reshape(80, -1, 3).astype(float)
        for name in ("weight", "bias")
    )
    odds = np.exp(x @ weight + bias)
    expected = (odds / odds.sum(-1, keepdims=True)).mean(0)
    header, *written = list(csv.reader((room.folder / "classes.csv").read_text().splitlines()))
    assert header == ["ant", "bee", "fly", "predicted"]
    np.testing.assert_allclose(
        [[float(cell) for cell in row[:3]] for row in written], expected, rtol=1e-4
    )
    assert [row[3] for row in written] == [header[k] for k in expected.argmax(1)]
    assert done["print"][1] == (room.folder / "classes.csv").read_text()
