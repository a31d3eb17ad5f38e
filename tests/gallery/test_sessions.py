"""What a newcomer types for each model, and what comes back: the site shows the files, and here
they are run as they stand.

ZOO_WRITE_SESSIONS=1 uv run pytest -m slow tests/gallery/test_sessions.py    # writes down what comes back today
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zoo

FOLDER = Path(__file__).parents[2] / "gallery" / "pages" / "text" / "sessions"
STEMS = sorted(path.stem for path in FOLDER.iterdir())


def commands(session):
    """A command begins with `$ ` and goes on in lines that begin with `> `; what follows is its
    output.
    """
    return [
        found.replace("\n> ", "\n")
        for found in re.findall(r"^\$ (.*(?:\n> .*)*)", session, flags=re.MULTILINE)
    ]


def played(session, folder):
    """The session as it goes today."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    lines = []
    for command in commands(session):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # 1 says of a run that it is not to be trusted
        assert done.returncode <= command.startswith("zoo report"), done.stdout
        lines.append("$ " + command.replace("\n", "\n> ") + "\n" + done.stdout)
    return "".join(lines)


def words(session):
    """All but what the machine and its libraries have a part in: numbers, and the room that they
    take.
    """
    return re.sub(
        r"[ \n]+", " ", re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\bnan\b|\binf\b", "#", session)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STEMS)
def test_a_session_goes_as_it_is_told(name, tmp_path):
    told = (FOLDER / f"{name}.txt").read_text()
    found = played(told, tmp_path)
    if "ZOO_WRITE_SESSIONS" in os.environ:
        (FOLDER / f"{name}.txt").write_text(found)
    else:
        assert words(found) == words(told)


def test_every_model_of_a_paper_has_a_session_that_fits_it():
    of_papers = {name for name in zoo.names() if zoo.load(name).card.bibtex}
    assert of_papers <= set(STEMS) <= set(zoo.names())
    for name in STEMS:
        told = commands((FOLDER / f"{name}.txt").read_text())
        assert any(command.startswith(f"zoo fit {name} ") for command in told)
        assert sum(command.startswith("zoo ") for command in told) >= 2


def test_a_session_is_played_and_another_word_is_seen(tmp_path):
    told = (
        "$ python - <<'END'\n> print('mean', 1.5)\n> END\nmean 2.5\n$ echo two words\ntwo words\n"
    )
    found = played(told, tmp_path)
    assert found == told.replace("2.5", "1.5")
    assert words(found) == words(told)
    assert words(found) != words(told.replace("two words\n", "two other words\n"))
    with pytest.raises(AssertionError, match="nowhere"):
        played("$ cat nowhere\n", tmp_path)
