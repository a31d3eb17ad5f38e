"""Settings that are whole numbers, Python's or NumPy's."""

from typing import Any

import numpy as np

__all__ = ["is_whole"]


def is_whole(value: Any) -> bool:
    """Whether it is an integer; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
