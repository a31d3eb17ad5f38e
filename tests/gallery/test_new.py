"""`zoo new`: what it writes into a clone runs as it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo
from gallery.cli import main
from gallery.commands.citations import citations
from gallery.commands.kernels import make_kernel
from gallery.commands.models import driver_defaults, find_model, kernel_name
from tests.gallery.command import write

ROOT = Path(__file__).parents[2]
MODEL = {"zoo/demo.py", "tests/zoo/test_demo.py", "gallery/pages/demo.py"}
KERNEL = {
    "inference/kernels/stroll/__init__.py",
    "inference/kernels/stroll/kernel.py",
    "tests/inference/kernels/stroll/__init__.py",
    "tests/inference/kernels/stroll/test_kernel.py",
}


@pytest.fixture
def clone(tmp_path):
    """A copy of the checkout."""
    kept = shutil.ignore_patterns(".*", "__pycache__", "site")
    for name in ("zoo", "inference", "diagnostics", "gallery", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=kept)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_writes_a_model_or_a_kernel_and_replaces_nothing(clone, capsys):
    before = files(clone)
    for words, written in ((["demo"], MODEL), (["stroll", "--kernel"], KERNEL)):
        assert main(["new", *words, "-o", str(clone)]) == 0
        assert files(clone) - before == written
        before |= written
    out = capsys.readouterr().out
    assert "uv run pytest tests/zoo/test_demo.py; uv run zoo fit demo --data table.csv" in out
    texts = "".join((clone / path).read_text() for path in MODEL | KERNEL)
    for word in ("mine", "ImportanceSampling", "zoo new", "slow"):
        assert word not in texts
    for words in (["demo"], ["stroll", "--kernel"]):
        assert main(["new", *words, "-o", str(clone)]) == 2
        assert "choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["Demo"], "new 'Demo': wanted words of small letters"),
        (["class"], "new 'class': wanted words"),
        (["aclass"], "there is a model 'aclass'"),
        (["walk", "--kernel"], "has a class Walk; choose another name"),
        (["nested", "--kernel"], "inference/kernels/nested/kernel.py exists"),
        (["demo", "-o", "."], "wanted a clone of the project.*zoo fit mymodel.py:model"),
    ],
)
def test_what_it_refuses(words, found, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert found.split(".*")[0] in err
    assert found.split(".*")[-1] in err


def test_another_package_adds_a_model_and_a_kernel(clone, tmp_path, monkeypatch):
    """By entry points: no file of the project changes."""
    assert main(["new", "birds", "-o", str(clone)]) == 0
    package, points = tmp_path / "package", tmp_path / "package" / "birds-1.0.dist-info"
    points.mkdir(parents=True)
    (package / "birds.py").write_text((clone / "zoo" / "birds.py").read_text())
    (package / "flight.py").write_text(
        "from numpyro.infer import SA\nfrom inference.run.command import Command\n"
        'class Flight(SA): command = Command(driver={"num_chains": 1})\n'
    )
    (package / "flight.bib").write_text("@article{flight,\n  year = {2020},\n}\n")
    (points / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    (points / "entry_points.txt").write_text(
        "[zoo.models]\nbirds = birds\n[zoo.kernels]\nFlight = flight:Flight\n"
    )
    assert "birds" not in zoo.names()
    monkeypatch.syspath_prepend(package)
    assert "birds" in zoo.names()
    entry = zoo.load("birds")
    assert entry.model.__module__ == "birds"
    own = find_model(f"{package / 'birds.py'}:birds")
    assert kernel_name(own, "flight") == "Flight"
    assert type(make_kernel("Flight", entry.model)).__name__ == "Flight"
    assert driver_defaults("Flight") == driver_defaults("NUTS") | {"num_chains": 1}
    assert citations("Flight") == ("@article{flight,\n  year = {2020},\n}",)


@pytest.mark.slow
def test_what_it_writes_runs_and_keeps_the_rules(clone):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).round(3)
    write(clone / "table.csv", [["a", "b", "cost"], *np.column_stack([x, x @ [1, 2] + 3])])
    tiny = "--option num_samples=50 num_chains=1"
    commands = [
        "gallery.cli new demo",
        "gallery.cli new stroll --kernel",
        f"gallery.cli fit demo --data table.csv {tiny} num_warmup=50 -o demo.nc",
        "gallery.cli predict demo.nc table.csv -o predicted.csv",
        f"gallery.cli fit zoo/demo.py:demo --data table.csv --kernel stroll {tiny} -o stroll.nc",
        "pytest -n 0 -q -p no:cacheprovider tests/zoo/test_demo.py tests/test_architecture.py "
        "tests/inference/kernels/stroll tests/gallery/test_sessions.py",
        "ruff check .",
        "ruff format --check .",
    ]
    env = os.environ | {"PYTHONPATH": str(clone), "MPLBACKEND": "Agg"}
    for words in (*(["-m", *command.split()] for command in commands), ["gallery/pages/demo.py"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=clone,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
    assert "times as wide" in done.stdout
    assert (clone / "predicted.csv").read_text().startswith("mean,std\n")
