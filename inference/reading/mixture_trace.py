"""Values and log probabilities of the sites of a mixture, as they stand in a NumPyro trace."""

import jax.numpy as jnp
from jax import Array
from numpyro.distributions.util import scale_and_mask

from inference.program.sites import unwrap

__all__ = ["columns", "term"]


def columns(message: dict) -> Array:
    """The value of an observed site as floats, [row, column, ...]; where it has no axis of columns it
    gets one.
    """
    value = jnp.asarray(message["value"])
    value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
    return value if value.ndim - unwrap(message["fn"]).event_dim > 1 else value[:, None]


def term(message: dict) -> Array:
    """The summed log probability of a site, its scale applied."""
    return jnp.sum(scale_and_mask(message["fn"].log_prob(message["value"]), message["scale"]))
