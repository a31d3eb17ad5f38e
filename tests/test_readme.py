"""What the README says runs: its quickstart as printed, the files that it links to, and its two
commands by name.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from gallery import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, r"^share\[2\] +0\."), (1, r"^0\.9\d+ -\d+\.\d+$"), (2, r"^3 \(array")],
)
def test_the_quickstarts_run_as_printed(number, printed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout, flags=re.MULTILINE), done.stdout


def test_the_first_command_makes_a_run_and_a_picture(
    tmp_path, monkeypatch, capsys, numpyro_promotion
):
    command = blocks("sh")[0].strip()
    assert command.startswith("uv run zoo fit ")
    words = [
        *command.removeprefix("uv run zoo").split(),
        "--option",
        "num_samples=100",
        "num_chains=1",
    ]
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache")):
        assert cli.main(words) == 0, capsys.readouterr().err
    assert {"wine.nc", "wine.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_a_model_of_ones_own_is_shown_fitted_and_predicted_as_printed(tmp_path):
    (tmp_path / "mymodel.py").write_text(blocks("python")[3])
    (tmp_path / "schools.csv").write_text(blocks("csv")[0])
    printed = []
    for command in blocks("sh")[2].strip().splitlines():
        words = [sys.executable, "-m", "gallery.cli", *command.removeprefix("uv run zoo").split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        printed.append(done.stdout)
    assert "theta [school] ~ Normal(loc=0, scale=1)\n" in printed[0]
    assert re.search(r"^mu +4\.\d", printed[1], flags=re.MULTILINE), printed[1]
    header, *rows = printed[2].splitlines()
    assert header == "mean,std"
    assert len(rows) == 8


def test_what_the_first_command_prints_is_that_of_the_session():
    """`tests/gallery/test_sessions.py` plays the session."""
    session = (ROOT / "gallery/pages/text/sessions/aclass.txt").read_text()
    command = blocks("sh")[0].strip().removeprefix("uv run ")
    assert session.startswith(f"$ {command}\n{blocks('text')[0]}$ ")


def test_the_second_command_runs_the_tests():
    assert blocks("sh")[1].startswith("uv run pytest")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
