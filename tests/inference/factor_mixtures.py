"""Mixtures among common factors for coordinate ascent, and data for them."""

from functools import cache, partial
from typing import Any

import numpy as np
import numpyro.distributions as dist

from tests.inference.mixtures import ALPHA, KNOWN
from zoo.iqgme_factors import iqgme_factors, linear_features, normal_factors

__all__ = ["FACTORED", "factor_case"]

FEATURES = partial(
    linear_features,
    precision=dist.Gamma(3.0, 2.0),
    noise=dist.Gamma(8.0, 2.0),
    centre=0.7,
    a0=2.4,
    b0=2.0,
)
GATE = partial(normal_factors, centre=0.3, covariance=0.8, u0=0.6)
FACTORED: dict[str, dict[str, Any]] = {
    "binary": {},
    "three classes": {"num_classes": 3},
    "no labels": {"expert": None},
    "all factors": {
        "features": partial(linear_features, select=False, noise=4.0),
        "expert": partial(KNOWN, sparse=True),
    },
    "known numbers": {"features": partial(FEATURES, precision=1.5), "expert": None, "alpha": 1.5},
}


@cache
def factor_case(name: str, num_rows: int = 14, num_features: int = 5, missing: float = 0.3):
    """(model, its arguments): rows of two groups by two factors, one of which tells them apart,
    with holes; two rows have no label.
    """
    told: dict[str, Any] = {
        "num_experts": 3,
        "num_factors": 2,
        "alpha": ALPHA,
        "expert": KNOWN,
        "features": FEATURES,
        "gate": GATE,
    }
    told |= FACTORED[name]
    rng = np.random.default_rng(3)
    factors = rng.normal(size=(num_rows, 2)) + 2 * (np.arange(num_rows)[:, None] % 2) * np.array(
        [1, 0]
    )
    x = factors @ (0.6 * rng.normal(size=(2, num_features))) + 0.8 * rng.normal(
        size=(num_rows, num_features)
    )
    told["x"] = np.where(rng.random(x.shape) < missing, np.nan, x)
    if told["expert"] is not None:
        y = np.digitize(
            factors[:, 0] + 0.5 * rng.normal(size=num_rows),
            [1.0, 2.5][: told.get("num_classes", 2) - 1],
        )
        told["y"] = np.where(np.isin(np.arange(num_rows), (4, 7)), -1, y)
    return iqgme_factors, told
