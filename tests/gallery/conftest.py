"""A folder with tables and runs, shared by the tests of the command; and the site, by those of
it.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.gallery.command import FIT, run, write


def furnished(tmp_path_factory):
    """A folder with tables, and the surroundings in which every process of a file of tests runs."""
    folder = tmp_path_factory.mktemp("zoo")
    home = tmp_path_factory.mktemp("home")
    cleared = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "ZOO_"))
    }
    env = cleared | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    rng = np.random.default_rng(0)
    species = rng.integers(3, size=60)
    length, width = 100 + 30 * species + 10 * rng.normal(size=60), rng.normal(size=60) - species
    rows = [
        [f"{a:.3f}", "yes" if c else "no", f"{b:.4f}", ("ant", "bee", "fly")[k]]
        for a, b, c, k in zip(length, width, species > 0, species, strict=True)
    ]
    write(folder / "insects.csv", [["length", "wings", "mm/width", "species"], *rows])
    write(
        folder / "new.csv",
        [
            ["mm/width", "length", "note", "wings"],
            ["-1.9", "161", "x", "yes"],
            ["0.1", "99", "y", "no"],
        ],
    )
    write(
        folder / "hole.csv",
        [["mm/width", "length", "wings"], ["1", "100", "no"], ["NA", "100", "no"]],
    )
    write(folder / "other.csv", [["length", "wings"], ["100", "no"]])
    write(folder / "unknown.csv", [["mm/width", "length", "wings"], ["1", "100", "perhaps"]])
    write(folder / "holes.csv", [["a", "label"], ["1", "u"], ["", "v"], ["2.5", "u"]])
    write(folder / "quantity.csv", [["a", "cost"], *([str(i), f"{i / 7:.3f}"] for i in range(20))])
    colours = ["blue", "red", "green", "", "red", "blue", "green"]
    write(
        folder / "texts.csv",
        [
            ["colour", "label"],
            *([c, k] for c, k in zip(colours, ["u", "v", "u", "v", "", "u", ""], strict=True)),
        ],
    )
    write(folder / "marks.csv", [["a", "label"], ["1", "u"], ["?", "v"], ["3", "u"]])
    (folder / "text.nc").write_text("not a run")
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("years of work")
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "command.json").write_text("{")
    return SimpleNamespace(
        folder=folder, env=env, cache=home / "cache" / "bayes-model-zoo" / "compiled"
    )


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    return furnished(tmp_path_factory)


@pytest.fixture(scope="session")
def fitted(room):
    """The run that most tests look at."""
    done = run(room, *FIT)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(path=room.folder / "run.nc", out=done.stdout, err=done.stderr)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, with pages that were not run."""
    pytest.importorskip("sphinx_gallery", reason="the site is built by the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "gallery.cli",
        "gallery",
        "build",
        "--no-run",
        "-o",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder
