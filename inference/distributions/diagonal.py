"""Normal vectors with independent entries."""

from typing import Any, override

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.util import validate_sample

__all__ = ["DiagonalNormal"]


class DiagonalNormal(dist.Independent):
    """`Normal(loc, scale).to_event(1)` whose log density of many rows takes half the time.

    It puts the features first and the rows last, so that the sum over features adds many rows at
    once.

    Args:
        loc: Means, [..., feature].
        scale: Standard deviations, [..., feature].
        validate_args: As for NumPyro's distributions.
    """

    def __init__(self, loc, scale, *, validate_args=None):
        super().__init__(
            dist.Normal(loc, scale, validate_args=validate_args), 1, validate_args=validate_args
        )

    @override
    @validate_sample
    def log_prob(self, value):
        normal: Any = self.base_dist
        parts = value, normal.loc, normal.scale
        ndim = max(jnp.ndim(part) for part in parts)
        value, loc, scale = (
            jnp.expand_dims(part, range(ndim - jnp.ndim(part))).T for part in parts
        )
        each = -0.5 * ((value - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
        return each.sum(axis=0).T
