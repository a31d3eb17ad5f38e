"""Gaussian processes: covariance functions, values at points, and conditional distributions.

A covariance function takes points [m, feature] and [n, feature] that are divided by a length scale.
It returns covariances [m, n] for amplitude 1. A kernel of tinygp will do as well where it is
positive definite in several features. Most are with
`distance=tinygp.kernels.distance.L2Distance()`, which is not their default.

Values at points are the Cholesky factor times standard normal noise. So the value at a point
depends on the noise of that point and of the points before it, and appended points do not change
earlier values. Cost of values at n points: n^3 for each function.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

__all__ = ["JITTER", "Functions", "matern32", "matern52", "squared_exponential"]

JITTER = 1e-6  # share of the variance that is added to the diagonal of every covariance matrix


def squared_exponential(
    first: Float[Array, "m feature"], second: Float[Array, "n feature"]
) -> Float[Array, "m n"]:
    """Return squared exponential covariances; functions have all derivatives."""
    return jnp.exp(-0.5 * _squared_distance(first, second))


def matern32(
    first: Float[Array, "m feature"], second: Float[Array, "n feature"]
) -> Float[Array, "m n"]:
    """Return Matern 3/2 covariances; functions have one derivative."""
    r = jnp.sqrt(3 * _squared_distance(first, second) + 1e-12)  # sqrt has no gradient at 0
    return (1 + r) * jnp.exp(-r)


def matern52(
    first: Float[Array, "m feature"], second: Float[Array, "n feature"]
) -> Float[Array, "m n"]:
    """Return Matern 5/2 covariances; functions have two derivatives."""
    r = jnp.sqrt(5 * _squared_distance(first, second) + 1e-12)
    return (1 + r + r**2 / 3) * jnp.exp(-r)


def _squared_distance(
    first: Float[Array, "m feature"], second: Float[Array, "n feature"]
) -> Float[Array, "m n"]:
    apart = jnp.sum(first**2, -1)[:, None] + jnp.sum(second**2, -1)[None, :] - 2 * first @ second.T
    return jnp.maximum(apart, 0.0)


class Functions(NamedTuple):
    """Independent Gaussian processes, each with its own amplitude and length scales."""

    covariance: Callable[[Array, Array], Array]
    amplitude: Array  # [function]
    lengthscale: Array  # [function, feature], or [function, 1]

    def values(
        self,
        points: Float[Array, "n feature"],
        noise: Float[Array, "n function"],
        is_used: Bool[Array, " n"] | None = None,
    ) -> Float[Array, "n function"]:
        """Return the functions' values at points.

        Args:
            points: [n, feature].
            noise: standard normal noise, [n, function].
            is_used: [n]; a point that is not used is independent of the others. None: all are used.

        Returns:
            Values [n, function].
        """
        is_used = jnp.ones(len(points), bool) if is_used is None else is_used

        def one(amplitude, lengthscale, noise):
            return amplitude * (self._root(points / lengthscale, is_used) @ noise)

        return jax.vmap(one, (0, 0, 1), 1)(self.amplitude, self.lengthscale, noise)

    def noise_near(
        self,
        points: Float[Array, "n feature"],
        targets: Float[Array, "n function"],
        is_target: Bool[Array, " n"],
        spread: float = 0.3,
    ) -> Float[Array, "n function"]:
        """Return the noise of smooth functions that are close to targets.

        Args:
            points: [n, feature].
            targets: [n, function].
            is_target: whether a point has a target, [n].
            spread: standard deviation of the distance to the targets, in amplitudes.

        Returns:
            Noise [n, function], the posterior mean given the targets.
        """

        def one(amplitude, lengthscale, targets):
            root = self._root(points / lengthscale, jnp.ones(len(points), bool))
            # values at the targets = seen @ noise
            seen = jnp.where(is_target[:, None], root, 0.0)
            variance = seen @ seen.T + spread**2 * jnp.eye(len(points))
            return seen.T @ jnp.linalg.solve(
                variance, jnp.where(is_target, targets, 0.0) / amplitude
            )

        return jax.vmap(one, (0, 0, 1), 1)(self.amplitude, self.lengthscale, targets)

    def given(
        self,
        new: Float[Array, "m feature"],
        points: Float[Array, "n feature"],
        values: Float[Array, "n function"],
        is_used: Bool[Array, " n"],
    ) -> tuple[Float[Array, "m function"], Float[Array, "m function"]]:
        """Return mean and standard deviation at new points given values at other points.

        Args:
            new: new points, [m, feature].
            points: [n, feature].
            values: the functions' values at the points, [n, function].
            is_used: which points are conditioned on, [n].

        Returns:
            Means and standard deviations, both [m, function], of each new point by itself.
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
            # points so far away that squares overflow
            own = jnp.where(jnp.isnan(own), self.covariance(middle, middle)[0, 0], own)
            return known[:, 0] @ known[:, 1:], amplitude * jnp.sqrt(
                jnp.maximum(own + JITTER - explained, JITTER)
            )

        return jax.vmap(one, (0, 0, 1), 1)(
            self.amplitude, self.lengthscale, jnp.where(is_used[:, None], values, 0.0)
        )

    def _root(
        self, points: Float[Array, "n feature"], is_used: Bool[Array, " n"]
    ) -> Float[Array, "n n"]:
        """Cholesky factor of the correlations, where unused points are uncorrelated."""
        own = jnp.eye(len(points))
        correlations = jnp.where(
            is_used[:, None] & is_used[None, :], self.covariance(points, points), own
        )
        return jnp.linalg.cholesky(correlations + JITTER * own)
