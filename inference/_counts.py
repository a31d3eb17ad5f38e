"""Settings that are numbers, Python's or NumPy's."""

from numbers import Real
from typing import Any

import numpy as np

__all__ = ["is_between", "is_number", "is_whole"]


def is_whole(value: Any) -> bool:
    """Whether it is an integer; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number, infinite or NaN as well; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_between(value: Any, low: float, high: float) -> bool:
    """Whether it is a number above the one and below the other."""
    return is_number(value) and low < value < high
