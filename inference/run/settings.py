"""Settings that are numbers, Python's or NumPy's."""

from numbers import Real
from typing import Any

import numpy as np

__all__ = ["check_setting", "check_whole", "is_between", "is_number", "is_whole"]


def is_whole(value: Any) -> bool:
    """Whether it is an integer; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number, infinite or NaN as well; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_between(value: Any, low: float, high: float) -> bool:
    """Whether it is a number above the one and below the other."""
    return is_number(value) and low < value < high


def check_setting(is_fine: bool, wanted: str, /, **setting: Any) -> None:
    """Refuses a setting, by its name and what was wanted."""
    for name, value in setting.items():
        if not is_fine:
            raise ValueError(f"{name}: found {value!r}, wanted {wanted}.")


def check_whole(least: int, /, **settings: Any) -> None:
    """Refuses settings that are no integers, or too small."""
    for name, value in settings.items():
        check_setting(
            is_whole(value) and value >= least, f"an integer, at least {least}", **{name: value}
        )
