"""A second Ctrl-C ends a run at once, but not while its states are given away."""

import signal
from contextlib import nullcontext

import pytest

from inference.run import session as _session
from inference.run.loop import Loop
from inference.run.session import ctrl_c_waits, signals_noted
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
