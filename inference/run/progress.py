"""The live bar: on a terminal, quiet in CI and in pipes."""

import os
import sys
from typing import Any

import numpy as np

__all__ = ["Bar", "figures"]


class Bar:
    """A tqdm bar over the steps of a run, with the figures that matter for its kernel."""

    def __init__(self, shown: bool, title: str, total: int | None, done: int):
        quiet = not shown or "CI" in os.environ or not sys.stderr.isatty()
        self.tqdm = None
        if not quiet:
            from tqdm.auto import tqdm

            self.tqdm = tqdm(total=total, initial=done, desc=title, leave=True, dynamic_ncols=True)

    def update(self, steps: int, phase: str, text: str) -> None:
        """Move on by `steps`."""
        if self.tqdm is not None:
            self.tqdm.set_description(phase, refresh=False)
            self.tqdm.set_postfix_str(text, refresh=False)
            self.tqdm.update(steps)

    def close(self) -> None:
        """Leave the last line standing."""
        if self.tqdm is not None:
            self.tqdm.close()


def figures(stats: dict[str, np.ndarray], divergences: int) -> str:
    """What the bar says of the records of one chunk: sampler statistics by name, else the last
    value of each scalar figure. There may be no record: where the host has done the last of a run.
    """
    shown: list[str] = []
    if "diverging" in stats:
        shown.append(f"divergences {divergences}")
    if "acceptance_rate" in stats:
        shown.append(f"acceptance {np.mean(stats['acceptance_rate']):.2f}")
    if not shown:
        shown = [
            f"{name} {_short(value[-1])}"
            for name, value in stats.items()
            if value.ndim == 2 and len(value)
        ]
    return ", ".join(shown)


def _short(value: Any) -> str:
    return f"{np.mean(value):.6g}"
