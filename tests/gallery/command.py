"""The command `zoo` in a process of its own, as a person runs it."""

import csv
import json
import subprocess
import sys

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
