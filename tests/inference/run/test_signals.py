"""Ctrl-C and SIGTERM end a run, which is saved, by an error. A second Ctrl-C ends it at once, but
not while its states are given away.
"""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import xarray as xr

from inference import Interrupted
from inference.run import session as _session
from inference.run.loop import Loop
from inference.run.session import Bar, ctrl_c_waits, signals_noted
from tests.inference.run.test_updates import MORE, streaming

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def press():
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_raises():
    with signals_noted() as noted:
        press()
        assert noted == ["SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            press()


def test_it_waits_where_it_is_to_wait():
    gone_on = []

    def wait():
        with ctrl_c_waits():
            press()
            gone_on.append(True)

    with signals_noted():
        press()
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert gone_on


def test_where_nothing_is_noted_ctrl_c_raises_as_ever():
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        press()


def test_what_the_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_noted() as noted:
            press()
            assert not noted
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_with_what_was_drawn(number, monkeypatch):
    """The driver goes on from there."""
    driver, whole = streaming(), streaming().run(0, MORE)
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "update", lambda *args: signal.raise_signal(number))
        patch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(Interrupted, match=f"{number.name} ended the run after") as caught:
            driver.run(0, MORE)
    assert caught.value.signal == number.name
    steps = caught.value.tree.attrs["steps"]
    assert 0 < steps < whole.attrs["steps"]
    assert caught.value.tree.attrs["ended"] == number.name
    xr.testing.assert_equal(
        driver.tree()["sample_stats"].to_dataset(),
        whole["sample_stats"].to_dataset().isel(step=slice(0, steps)),
    )
    xr.testing.assert_equal(driver.extend(100).posterior.to_dataset(), whole.posterior.to_dataset())


SCRIPT = """
import signal, sys
from inference import Interrupted
from inference.run.session import Bar
from tests.inference.run.test_updates import MORE, streaming

Bar.update = lambda *args: signal.raise_signal(int(sys.argv[1]))
for fit in range(3):
    print("fit", fit, flush=True)
    try:
        streaming().run(0, MORE)
    except Interrupted:
        if sys.argv[2] == "raise":
            raise
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("number", "caught", "code"),
    [
        (signal.SIGTERM, "raise", 143),
        (signal.SIGINT, "raise", 130),
        (signal.SIGTERM, "catch", 0),
    ],
)
def test_how_a_script_ends(number, caught, code):
    """A loop of fits does not go on, unless it catches the error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(int(number)), caught],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.count("fit") == (3 if caught == "catch" else 1)
    assert ("Interrupted: " in done.stderr) == (caught == "raise")


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_two_of_them_lose_no_run(bug, monkeypatch):
    """The second while the compiled loop has the states. The planted bug: it does not wait."""
    driver, chunk = streaming(), Loop.chunk
    driver.kernel.num_batches = 4

    def pressed(self, *args, **kwargs):
        press()
        found = chunk(self, *args, **kwargs)
        press()
        return found

    if bug:
        monkeypatch.setattr(_session, "ctrl_c_waits", nullcontext)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "chunk", pressed)
        with pytest.raises(KeyboardInterrupt):
            driver.run(0, MORE)
    if bug:
        with pytest.raises(RuntimeError, match="deleted"):
            driver.tree()
    else:
        assert driver.extend(100).attrs["ended"] == "finished"
