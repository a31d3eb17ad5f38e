"""What is done to runs, and what must come of it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference import CheckpointError, Interrupted, check_checkpoint, salvage_checkpoint
from inference.run.session import Bar
from inference.run.store import Store
from tests.faults.cases import is_same, run, surroundings

ROOT = Path(__file__).parents[2]
CHUNK = 2  # steps between two commits
STATE = "state.npz"


class Died(BaseException):
    """Stands for the moment at which a process dies: nothing in the project may catch it."""


# Kills.


def victim(name: str, folder: Path) -> subprocess.Popen:
    """A process that runs a case with a checkpoint, and commits after each few steps."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults", "--victim", name, str(folder)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def commits_of(process: subprocess.Popen, folder: Path) -> Iterator[None]:
    """Yields at each new commit, until the process ends."""
    seen = -1
    while process.poll() is None:
        try:
            now = (folder / STATE).stat().st_mtime_ns
        except FileNotFoundError:
            now = -1
        if now != seen:
            seen = now
            yield
        time.sleep(0.001)


def killed(name: str, folder: Path, kills: int, rng: np.random.Generator) -> Counter:
    """Kills runs of a case again and again; each goes on where the one before it was killed.

    Most are killed around some commit, a quarter at any time. A run that has ended is looked at, and
    the next one begins anew.
    """
    found: Counter = Counter()
    while found["killed"] < kills:
        process, anytime = victim(name, folder), rng.random() < 0.25
        if anytime:
            time.sleep(rng.uniform(0.0, 10.0))
        else:
            for _ in zip(range(rng.integers(2, 8)), commits_of(process, folder), strict=False):
                pass
            time.sleep(rng.uniform(0.0, 0.03))
        process.kill()
        _, err = process.communicate()
        found["killed"] += process.returncode == -signal.SIGKILL
        if process.returncode not in (0, -signal.SIGKILL):
            found[f"FAILED: {err.splitlines()[-1]}"] += 1
            return found
        if process.returncode == 0:
            found += after(name, folder)
            shutil.rmtree(folder)
    return found + (after(name, folder) if folder.exists() else Counter())


def after(name: str, folder: Path) -> Counter:
    """What a run is that goes on in a folder to its end."""
    with surroundings():
        return Counter(["same" if is_same(name, run(name, folder)) else "OTHER DRAWS"])


# Damage.


def died(name: str, folder: Path, commits: int) -> None:
    """The checkpoint of a run that died after so many commits."""
    save, count = Store.save, [0]

    def dying(*args):
        save(*args)
        count[0] += 1
        if count[0] == commits:
            raise Died

    with surroundings(CHUNK), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "save", dying)
        with pytest.raises(Died):
            run(name, folder)


def harmed(folder: Path, rng: np.random.Generator) -> tuple[str, str]:
    """Damages one file; returns its name and what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    # as many of the commits as of the draws
    kinds = [[p for p in files if (p.parent == folder) == at_top] for at_top in (True, False)]
    some = kinds[rng.integers(2)] or files
    path = some[rng.integers(len(some))]
    content = bytearray(path.read_bytes())
    what = str(rng.choice(["flipped", "cut", "deleted"]))
    if what == "flipped":
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    if what == "deleted":
        path.unlink()
    else:
        path.write_bytes(content if what == "flipped" else content[: rng.integers(len(content))])
    return str(path.relative_to(folder)), what


def outcome(name: str, folder: Path, harm: tuple[str, str]) -> str:
    """What comes of a damaged checkpoint: capital letters where something passes in silence.

    An earlier commit may be deleted. zarr's documents may name more records than the commit.
    """
    (file, what), seen = harm, ""
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        seen = str(error)
    if not seen and "/" not in file and not (what == "deleted" and file != STATE):
        return f"NOT SEEN: {harm}"
    with surroundings():
        try:
            is_right = is_same(name, run(name, folder))
            how = "seen" if seen else "not needed"
        except CheckpointError as error:
            if not all(f"{folder / file}'" in text for text in (seen, str(error))):
                return f"ANOTHER FILE IS NAMED: {harm}, {error}"
            salvage_checkpoint(folder)
            is_right, how = is_same(name, run(name, folder)), "refused and salvaged"
        except Exception as error:
            return f"RAW ERROR: {harm}, {error!r}"
    return f"{how}, same" if is_right else f"OTHER DRAWS: {harm}"


def damaged(name: str, folder: Path, times: int, rng: np.random.Generator) -> Counter:
    """Damages the checkpoint of a case that died, in copies."""
    died(name, folder / "whole", 3 if name == "DataTempering" else 12)  # it ends after few chunks
    found: Counter = Counter()
    for _ in range(times):
        copy = shutil.copytree(folder / "whole", folder / "copy")
        found[outcome(name, copy, harmed(copy, rng))] += 1
        shutil.rmtree(copy)
    return found


# Signals.


def signalled(name: str, folder: Path, times: int, rng: np.random.Generator) -> Counter:
    """Interrupts runs of a case in this process, by Ctrl-C and SIGTERM in turn, after some chunks."""
    found: Counter = Counter()
    for number in (signal.SIGINT, signal.SIGTERM) * times:
        left = [int(rng.integers(1, 4))]  # the shortest case has four chunks

        def update(bar, *args, left=left, number=number):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

        with surroundings(CHUNK), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bar, "update", update)
            patch.setattr(sys, "excepthook", sys.excepthook)
            try:
                run(name, folder)
                found["ENDED AS IF WHOLE" if left[0] <= 0 else "ended before"] += 1
            except Interrupted as error:
                is_saved = check_checkpoint(folder)[1:4:2] == (
                    error.tree.attrs["steps"],
                    number.name,
                )
                found["raised" if is_saved else "NOT SAVED"] += 1
        found += after(name, folder)
        shutil.rmtree(folder)
    return found


def is_silent(found: Counter) -> bool:
    """Whether something has passed in silence."""
    return any(any(word.isupper() for word in outcome.split(":")[0].split()) for outcome in found)
