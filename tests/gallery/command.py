"""The command `zoo` in a process of its own, as a person runs it; its zoo has the models of
`tests/gallery/models` as well.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).parent / "models"
ZOO = f"import sys, zoo\nzoo.__path__.append({str(MODELS)!r})\nfrom gallery.cli import main\n"
RUN = [sys.executable, "-c", ZOO + "sys.exit(main())"]
TINY = ("--option", "num_warmup=60", "num_samples=40", "num_chains=2")
FIT = (
    "fit",
    "softmax",
    "--data",
    "insects.csv",
    "--target",
    "species",
    *TINY,
    "--seed",
    "3",
    "-o",
    "run.nc",
    "--plot",
    "run.png",
)
MANY = f"""{ZOO}
import contextlib, io, json
found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def run(room, *arguments, **changed):
    return subprocess.run(
        [*RUN, *arguments],
        cwd=room.folder,
        env=room.env | changed,
        capture_output=True,
        text=True,
        timeout=900,
    )


def many(room, commands, is_quiet=False):
    """Several commands in one process, which says nothing itself where it is to be quiet: (exit
    code, output, errors) of each.
    """
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(
        command,
        cwd=room.folder,
        env=room.env,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert not (is_quiet and done.stderr), done.stderr
    return json.loads(done.stdout)
