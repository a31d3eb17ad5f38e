"""Signals, kills, resuming by the command `zoo`."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import arviz as az
import numpy as np
import pytest

from gallery.commands.request import Request, load_request, save_request
from inference import check_checkpoint
from tests.gallery.command import RUN, TINY, many


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
    command = [*RUN, "fit", "softmax", "--data", "insects.csv", *options]
    return subprocess.Popen(
        command,
        cwd=room.folder,
        env=room.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(folder: Path) -> int:
    return check_checkpoint(folder).records if (folder / "state.npz").exists() else 0


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
    """The run of `fitted` once more: its time limit ends it in the warm-up, it is resumed, and
    then has the time it needs.
    """
    fit = [
        "fit",
        "softmax",
        "--data",
        "insects.csv",
        "--target",
        "species",
        *TINY,
        "--checkpoint",
        "kept",
        "-o",
        "kept.nc",
        "--force",
    ]
    commands = [
        [*fit, "--seed", "3", "--option", "max_time=0"],
        ["resume", "kept"],
        [*fit, "--seed", "9"],
        [*fit, "--seed", "3"],
        ["resume", "kept", "--salvage"],
        ["check", "kept"],
    ]
    return many(room, commands)


@pytest.mark.slow
def test_run_without_a_draw_is_an_error_that_says_how_to_go_on(resumed):
    code, _, err = resumed[0]
    assert code == 2
    assert re.fullmatch(
        r"zoo: ended by max_time before the first draw, after \d+ steps: .*; go on with: zoo "
        r"resume kept\n",
        err,
    )


@pytest.mark.slow
def test_resumed_run_equals_the_one_that_was_not_stopped(resumed, room, fitted):
    assert resumed[1][0] in (0, 2)  # 2: the limit came again before the first draw
    assert [code for code, _, _ in resumed[3:]] == [0, 0, 0]
    assert "kept: whole until step 100\n" in resumed[4][1]
    assert "0 steps in" in resumed[4][1]
    assert resumed[5][1] == "kept: whole; 100 steps, 40 records; ended by budget\n"
    final, straight = (az.from_netcdf(path) for path in (room.folder / "kept.nc", fitted.path))
    assert final.attrs["steps"] == straight.attrs["steps"] == 100
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(final["posterior"][name], straight["posterior"][name])


@pytest.mark.slow
def test_checkpoint_of_another_run_is_refused_and_stays(resumed, room):
    code, _, err = resumed[2]
    assert code == 2
    assert "holds another run (seed: 3 there, 9 here)" in err
    assert json.loads((room.folder / "kept" / "command.json").read_text())["seed"] == 3


def test_a_request_that_was_changed_is_refused(tmp_path):
    request = Request("softmax", "wine", None, None, (), 3, False, "run.nc", None)
    save_request(request, tmp_path)
    assert load_request(tmp_path) == request
    path = tmp_path / "command.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 7'))
    with pytest.raises(ValueError, match="damaged .its checksum is another one.; remove it, and"):
        load_request(tmp_path)
