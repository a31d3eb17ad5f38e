"""Gaussian processes: covariance functions, and values at points.

A covariance function takes points [m, feature] and [n, feature] that are already divided by a
length scale and gives covariances [m, n], which an amplitude multiplies. A kernel of tinygp is one
as well where it is positive definite in several columns: most are with
`distance=tinygp.kernels.distance.L2Distance()`, which is not their default. Values come from
standard normal noise through the Cholesky factor, so the value at a point depends on the noise of
that point and of those before it, and points may be appended without changing what was there.

Cost of values at n points: n^3 for each function.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

__all__ = ["JITTER", "Functions", "matern32", "matern52", "squared_exponential"]

JITTER = 1e-6  # of the variance: part of every covariance function, noise of each value by itself


def squared_exponential(first: Array, second: Array) -> Array:
    """Functions that have all derivatives."""
    return jnp.exp(-0.5 * _squared_distance(first, second))


def matern32(first: Array, second: Array) -> Array:
    """Functions that can be differentiated once."""
    r = jnp.sqrt(3 * _squared_distance(first, second) + 1e-12)  # a root has no slope at 0
    return (1 + r) * jnp.exp(-r)


def matern52(first: Array, second: Array) -> Array:
    """Functions that can be differentiated twice."""
    r = jnp.sqrt(5 * _squared_distance(first, second) + 1e-12)
    return (1 + r + r**2 / 3) * jnp.exp(-r)


def _squared_distance(first: Array, second: Array) -> Array:
    apart = jnp.sum(first**2, -1)[:, None] + jnp.sum(second**2, -1)[None, :] - 2 * first @ second.T
    return jnp.maximum(apart, 0.0)


class Functions(NamedTuple):
    """Independent functions, each with an amplitude and length scales of its own."""

    covariance: Callable[[Array, Array], Array]
    amplitude: Array  # [function]
    lengthscale: Array  # [function, feature], or [function, 1]

    def values(self, points: Array, noise: Array, is_used: Array | None = None) -> Array:
        """At points [n, feature], of standard normal noise [n, function]: [n, function].

        Points that are not used say nothing.
        """
        is_used = jnp.ones(len(points), bool) if is_used is None else is_used

        def one(amplitude, lengthscale, noise):
            return amplitude * (self._root(points / lengthscale, is_used) @ noise)

        return jax.vmap(one, (0, 0, 1), 1)(self.amplitude, self.lengthscale, noise)

    def noise_near(
        self, points: Array, targets: Array, is_target: Array, spread: float = 0.3
    ) -> Array:
        """Noise of smooth functions that come near targets [n, function] at some of the points,
        to `spread` amplitudes: [n, function].
        """

        def one(amplitude, lengthscale, targets):
            root = self._root(points / lengthscale, jnp.ones(len(points), bool))
            # values at the targets are these times the noise
            seen = jnp.where(is_target[:, None], root, 0.0)
            variance = seen @ seen.T + spread**2 * jnp.eye(len(points))
            return seen.T @ jnp.linalg.solve(
                variance, jnp.where(is_target, targets, 0.0) / amplitude
            )

        return jax.vmap(one, (0, 0, 1), 1)(self.amplitude, self.lengthscale, targets)

    def given(
        self, new: Array, points: Array, values: Array, is_used: Array
    ) -> tuple[Array, Array]:
        """Mean and standard deviation at each of the points `new` [m, feature] by itself, given
        values at the points that are used.
        """
        middle = jnp.zeros((1, new.shape[1]))

        def one(amplitude, lengthscale, values):
            root = self._root(points / lengthscale, is_used)
            across = jnp.where(
                is_used[:, None], self.covariance(points / lengthscale, new / lengthscale), 0.0
            )
            known = solve_triangular(root, jnp.column_stack([values, across]), lower=True)
            explained = jnp.sum(known[:, 1:] ** 2, 0)
            own = jax.vmap(lambda point: self.covariance(point[None], point[None])[0, 0])(
                new / lengthscale
            )
            # so far away that a square is no number
            own = jnp.where(jnp.isnan(own), self.covariance(middle, middle)[0, 0], own)
            return known[:, 0] @ known[:, 1:], amplitude * jnp.sqrt(
                jnp.maximum(own + JITTER - explained, JITTER)
            )

        return jax.vmap(one, (0, 0, 1), 1)(
            self.amplitude, self.lengthscale, jnp.where(is_used[:, None], values, 0.0)
        )

    def _root(self, points: Array, is_used: Array) -> Array:
        """Cholesky factor of the correlations; a point that is not used is correlated with no
        other.
        """
        own = jnp.eye(len(points))
        correlations = jnp.where(
            is_used[:, None] & is_used[None, :], self.covariance(points, points), own
        )
        return jnp.linalg.cholesky(correlations + JITTER * own)
