"""Ctrl-C and SIGTERM end a run after its chunk, not in the middle of it."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Noted", "ctrl_c_waits", "signals_noted"]


class Noted(list[str]):
    """Names of signals; a Ctrl-C that is not the first raises, but where it is to wait."""

    is_to_wait = is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if not self or number != signal.SIGINT:
            self.append(signal.Signals(number).name)
        elif not self.is_to_wait:
            raise KeyboardInterrupt
        else:
            self.is_waiting = True


@contextmanager
def signals_noted() -> Generator[list[str]]:
    """Ctrl-C and SIGTERM put their name into the list, so that the run ends after its chunk; a
    second Ctrl-C raises.

    Only the main thread receives signals; elsewhere the list stays empty.
    """
    noted = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_waits() -> Generator[None]:
    """Where signals are noted, a second Ctrl-C raises when this is over."""
    noted = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(noted, Noted):
        yield
        return
    noted.is_to_wait = True
    try:
        yield
    finally:
        noted.is_to_wait = False
    if noted.is_waiting:
        raise KeyboardInterrupt
