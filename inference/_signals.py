"""Ctrl-C and SIGTERM end a run after its chunk, not in the middle of it."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["signals_noted"]


@contextmanager
def signals_noted() -> Generator[list[str]]:
    """Ctrl-C and SIGTERM put their name into the list, so that the run ends after its chunk; a second Ctrl-C raises.

    Only the main thread receives signals; elsewhere the list stays empty.
    """
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
