"""No fit of an estimator returns NaN or infinity."""

import inspect
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

__all__ = ["check_finite"]


def check_finite(estimator: BaseEstimator, **found: Any) -> None:
    """Raise ValueError where a fit found NaN or infinity.

    Args:
        estimator: whose settings the message names, those that are not the defaults.
        found: numbers and arrays, by name.
    """
    bad = [name for name, values in found.items() if not np.isfinite(values).all()]
    if not bad:
        return
    parameters = inspect.signature(type(estimator)).parameters
    given = [
        f"{name}={value!r}"
        for name, value in estimator.get_params(deep=False).items()
        if repr(value) != repr(parameters[name].default)
    ]
    among = f"one of {', '.join(given)} is out of range, or " if given else ""
    raise ValueError(
        f"fit: {', '.join(bad)} came out NaN or infinite; {among}a column of X has values that are "
        "too large."
    )
