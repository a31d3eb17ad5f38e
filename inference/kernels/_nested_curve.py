"""Steps of a walk along a Hilbert curve through the cube that a mode fills.

Each latent number goes through the logistic function of its distance from the mode's centre, in standard deviations of the mode: the mode
is then a cube, of which the curve is a circle (`inference.hilbert`). A step along the circle goes to a near cell or a far one, in all
latent numbers at once; within its cell a point stays where it is. How far a step may reach is drawn anew for each, from the whole circle
down to a cube half as wide.

Center (2009), "Learning complex classification models from large data sets", who takes it from Skilling.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, random

from inference import hilbert
from inference.kernels._code_clumps import log_base
from inference.kernels._nested_moves import Chart

__all__ = ["curve", "reach"]

BITS = 16


def curve(centre: Array, spread: Array, width: float) -> Chart:
    """Of the modes of lanes, with their centres and standard deviations [lane, size]; intervals of `width` go once around the circle."""
    unit = jnp.maximum(spread, jnp.finfo(spread.dtype).tiny)
    return Chart(partial(_along, centre, unit, width), lambda z: -log_base((z - centre) / unit))


def reach(rng_key: Array, num_lanes: int, size: int, dtype: jnp.dtype) -> Array:
    """Directions along the circle [lane, 1]: the share of it that an interval covers, from 2^-size to 1."""
    return jnp.exp2(-size * random.uniform(rng_key, (num_lanes, 1), dtype))


def _along(centre: Array, unit: Array, width: float, z: Array, share: Array, step: Array) -> Array:
    """Points [lane, size] a step along the circle from those at `z`."""
    size = z.shape[-1]
    away = (z - centre) / unit
    cells = hilbert.cells_of(jax.nn.sigmoid(away), BITS)
    within = jax.nn.sigmoid(away) * 2.0**BITS - cells.astype(z.dtype)
    code = hilbert.shifted(hilbert.encode(cells, BITS), step * share[:, 0] / width, size, BITS)
    u = hilbert.points_of(hilbert.decode(code, size, BITS), BITS, within).astype(z.dtype)
    moved = centre + unit * (jnp.log(u) - jnp.log1p(-u))
    return jnp.where(step[:, None] == 0, z, moved)
