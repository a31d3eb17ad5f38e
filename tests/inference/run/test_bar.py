"""The progress bar: on a terminal, and where it is not asked for only where a run takes long."""

import io
import sys
from time import sleep

import pytest

from inference.run import session
from inference.run.session import Bar


class Terminal(io.StringIO):
    def __init__(self, is_one=True):
        super().__init__()
        self.is_one = is_one

    def isatty(self):
        return self.is_one


@pytest.fixture
def written(monkeypatch):
    """What a bar writes in a run of so many seconds."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(session, "WAIT", 0.05)

    def of(shown, seconds=0.0, is_terminal=True):
        terminal = Terminal(is_terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        bar = Bar(shown, 10, 2)
        bar.update(3, "sampling", "ess 7")
        sleep(seconds)
        bar.update(5, "sampling", "ess 8")
        bar.close()
        return terminal.getvalue()

    return of


def test_a_bar_that_is_asked_for_is_there_at_once(written):
    assert "10/10" in written(True)


def test_a_bar_that_is_not_wanted_is_never_there(written):
    assert written(False, 0.2) == ""


def test_by_default_a_bar_is_there_after_a_while(written):
    assert written(None) == ""
    shown = written(None, 0.5)
    assert "5/10" in shown
    assert "10/10" in shown


@pytest.mark.parametrize("shown", [True, None])
def test_a_pipe_and_ci_have_none(written, shown, monkeypatch):
    assert written(shown, 0.2, is_terminal=False) == ""
    monkeypatch.setenv("CI", "true")
    assert written(shown, 0.2) == ""
