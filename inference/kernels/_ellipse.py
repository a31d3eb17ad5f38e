"""An angle on an ellipse, by slice sampling (Murray, Adams and MacKay 2010)."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax, random

__all__ = ["on_ellipse"]


def on_ellipse(rng_key: Array, is_inside: Callable[[Array], Array]) -> Array:
    """An angle inside, by shrinking a bracket around 0, which is inside."""
    start_key, shrink_key = random.split(rng_key)
    first = random.uniform(start_key, minval=0.0, maxval=2 * jnp.pi)

    def shrink(at):
        angle, low, high, i = at
        low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
        return random.uniform(random.fold_in(shrink_key, i), minval=low, maxval=high), low, high, i + 1

    outside = lambda at: ~is_inside(at[0]) & (at[2] - at[1] > 1e-12)
    angle, low, high, _ = lax.while_loop(outside, shrink, (first, first - 2 * jnp.pi, first, 0))
    return jnp.where(high - low > 1e-12, angle, 0.0)
