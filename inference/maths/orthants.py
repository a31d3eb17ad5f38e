"""How probable it is that normal numbers which depend on each other have given signs.

    P(s_1 t_1 > 0, ..., s_c t_c > 0),    t ~ Normal(loc, L L'),    is the mean over uniform u_1 ... u_(c-1) of the product of
    p_j = Phi(s_j (loc_j + sum_(i<j) L_ji e_i) / L_jj),    s_j e_j = -Phi^-1(u_j p_j):                                          (1)

each number in turn is drawn on its side given those before it, and how probable that side is
counts. The integrand is smooth and between 0 and 1, so that few points do: of two numbers Gauss and
Legendre's, of more the fractional parts of multiples of fixed irrational numbers, folded in the
middle. The same points serve all signs; so the cases of a decision by one sign after the other sum
to 1.

Largest errors over covariances I + A A' of variances from 1 to 30, and what they are in the mean:
two numbers, 16 points, 1e-4 and 1e-5; three to nine, 256 points, 2e-3 and 2e-4.

Genz (1992), "Numerical computation of multivariate normal probabilities". Cost: c^2 for each point.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import log_ndtr, ndtri

__all__ = ["Points", "log_orthant", "points_of"]


class Points(NamedTuple):
    """Where an integrand on the unit cube is looked at."""

    at: Array  # [point, dimension]
    log_weight: Array  # [point]


def points_of(num_signs: int, num: int, first: Any = 0) -> Points:
    """For so many signs; `first` is where a sequence of points goes on that others have begun."""
    dimensions = num_signs - 1
    if dimensions < 2:
        nodes, weights = np.polynomial.legendre.leggauss(num if dimensions else 1)
        return Points(
            jnp.asarray((nodes[:, None] + 1)[:, :dimensions] / 2, float),
            jnp.log(jnp.asarray(weights / 2, float)),
        )
    step = np.roots([1.0, *(0.0,) * (dimensions - 1), -1.0, -1.0])  # of x^(d+1) = x + 1
    ratio = 1 / max(step[abs(step.imag) < 1e-9].real)
    at = (
        jnp.asarray(first + np.arange(num), float)[:, None]
        * jnp.asarray(ratio ** np.arange(1, dimensions + 1), float)[None]
    )
    return Points(1 - jnp.abs(2 * ((at + 0.5) % 1) - 1), jnp.full(num, -np.log(num), float))


def log_orthant(loc: Array, covariance: Array, signs: Array, points: Points) -> Array:
    """Log of (1), [...], from [..., number], [..., number, number] and [..., number]; where a
    sign is 0 the number may be any.
    """
    root, dtype = jnp.linalg.cholesky(covariance), loc.dtype
    smallest, side = jnp.finfo(dtype).tiny, jnp.where(signs == 0, 1, signs).astype(dtype)
    over_points = lambda values: values[..., None]
    total, drawn = (
        jnp.broadcast_to(points.log_weight.astype(dtype), (*loc.shape[:-1], len(points.at))),
        [],
    )
    for j in range(loc.shape[-1]):
        score = over_points(loc[..., j]) + sum(
            (over_points(root[..., j, i]) * e for i, e in enumerate(drawn)),
            start=jnp.zeros((), dtype),
        )
        ratio = over_points(side[..., j]) * score / over_points(root[..., j, j])
        log_p = jnp.where(over_points(signs[..., j]) == 0, 0, log_ndtr(ratio))
        total = total + log_p
        if j + 1 < loc.shape[-1]:
            at = points.at[:, j].astype(dtype)
            low = ndtri(
                jnp.maximum(at.reshape((1,) * (loc.ndim - 1) + at.shape) * jnp.exp(log_p), smallest)
            )
            drawn.append(
                -over_points(side[..., j])
                * jnp.where(over_points(signs[..., j]) == 0, low, jnp.minimum(low, ratio))
            )
    return jax.nn.logsumexp(total, axis=-1)
