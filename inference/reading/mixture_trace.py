"""Values and log probabilities of the sites of a mixture, as they stand in a NumPyro trace."""

import jax.numpy as jnp
from jax import Array
from numpyro.distributions.util import scale_and_mask

from inference.program.sites import unwrap

__all__ = ["columns", "term"]


def columns(message: dict) -> Array:
    """Returns the value of an observed site as floats, [row, column, ...].

    A site without an axis of columns gets one column.
    """
    value = jnp.asarray(message["value"])
    value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
    return value if value.ndim - unwrap(message["fn"]).event_dim > 1 else value[:, None]


def term(message: dict) -> Array:
    """Returns the log probability of a site, scaled and summed over all entries."""
    return jnp.sum(scale_and_mask(message["fn"].log_prob(message["value"]), message["scale"]))
