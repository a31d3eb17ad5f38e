"""A mixture of Normals fitted to weighted points: what one stage of learning tells the next.

    pi(z)  =  (1 - background) sum_j a_j Normal(z; mean_j, root_j root_j')  +  background prior(z)

EM from centres that are far from each other, covariances drawn to the common one, clumps that claim
too little left out; as many as say most of points held out (`summary`). The prior in the background
keeps the ratio of posterior to approximation bounded, whatever the clumps have missed.

A covariance of n points is off by about size^2 / 4n nats, more than a summary may lose where
numbers are many. Where the slopes of the log density are told, clumps are fitted to both: of a
Normal the slope at z is (mean - z) / covariance, so that

    covariance  cov(slope)  covariance  =  cov(z),        mean  =  mean(z) + covariance mean(slope)

hold for whichever points of it, and give it without error from any that are more than it has
numbers. Points held out say whether that is better than the moments: it is not where a clump is far
from Normal, or slopes say nothing.

Center (2009), "Learning complex classification models from large data sets", with the spread a
root, about the new centre; Dempster, Laird and Rubin (1977); covariances from slopes as in nutpie's
mass matrices. Cost of a fit: rounds x points x clumps x size^2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import lgamma
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn import softmax
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp

from inference.maths import summary as _summary

__all__ = ["Clumps", "StateClumps", "moved", "sharpened"]

POINTS = 250  # that a fit looks at for each clump, up to twice as many as for others
# of EM, and nats a point by which a round must still move what clumps say
NUM_ROUNDS, NO_GAIN = 40, 1e-4


class Clumps(NamedTuple):
    """Places are fixed in number; a clump that is not there has the weight -inf."""

    log_weight: Array  # [clump], of all clumps together 1
    mean: Array  # [clump, size]
    # [clump, size, size], lower triangular: of the root of its covariance, for densities are asked
    # more often than draws
    inverse: Array

    @classmethod
    def of(cls, log_weight: Array, mean: Array, root: Array) -> "Clumps":
        """With roots [clump, size, size], lower triangular, of the covariances."""
        return cls(
            log_weight,
            mean,
            jax.vmap(
                lambda root: solve_triangular(
                    root, jnp.eye(len(root), dtype=root.dtype), lower=True
                )
            )(root),
        )


@dataclass(frozen=True)
class StateClumps:
    """Clumps over vectors of this size.

    :param degrees: of freedom of Student's t, which a clump is in place of a Normal: for draws that
    are to be weighed.
    """

    size: int
    degrees: float = np.inf
    asks_for_slopes = True

    def nothing(self, num_clumps: int) -> Clumps:
        """No clump at all: the background is everything."""
        eye = jnp.broadcast_to(jnp.eye(self.size), (num_clumps, self.size, self.size))
        return Clumps(jnp.full(num_clumps, -jnp.inf), jnp.zeros((num_clumps, self.size)), eye)

    def log_density(self, clumps: Clumps, z: Array) -> Array:
        """Of one vector [size]. Clumps behind the last that is there take no time."""
        place = jnp.arange(1, len(clumps.log_weight) + 1)
        last = jnp.max(jnp.where(jnp.isfinite(clumps.log_weight), place, 1))
        sizes = [*_summary.counts(len(place) - 1), len(place)]

        def of_first(count: int, z: Array) -> Array:
            first = jax.tree.map(lambda leaf: leaf[:count], clumps)
            return logsumexp(first.log_weight + _each(first, z, self.degrees))

        return jax.lax.switch(
            jnp.searchsorted(jnp.array(sizes), last),
            [partial(of_first, count) for count in sizes],
            z,
        )

    def draw(self, rng_key: Array, clumps: Clumps) -> Array:
        """A vector; there must be a clump."""
        which_key, noise_key, tail_key = random.split(rng_key, 3)
        which = random.categorical(which_key, clumps.log_weight)
        noise = random.normal(noise_key, clumps.mean.shape[1:], clumps.mean.dtype)
        if self.degrees < np.inf:
            noise *= jnp.sqrt(
                0.5 * self.degrees / random.gamma(tail_key, 0.5 * self.degrees, dtype=noise.dtype)
            )
        return clumps.mean[which] + solve_triangular(clumps.inverse[which], noise, lower=True)

    def fitted(
        self,
        rng_key: Array,
        told: _summary.Told,
        log_weight: Array,
        num_clumps: int,
        known: Clumps | None = None,
    ) -> Clumps:
        """To points in proportion to their weights."""
        by_moments = lambda told, count: _em(rng_key, told.z, count, num_clumps)
        by_slopes = lambda told, count: sharpened(by_moments(told, count), told.z, told.slope)
        ways = (by_moments,) if told.slope is None else (by_moments, by_slopes)
        fits = [partial(way, count=count) for count in _summary.counts(num_clumps) for way in ways]
        num_points = int(np.clip(POINTS * num_clumps, _summary.NUM_POINTS, 2 * _summary.NUM_POINTS))
        return _summary.chosen(rng_key, told, log_weight, fits, self, known, num_points)


def _each(clumps: Clumps, z: Array, degrees: float = np.inf) -> Array:
    """Log density of each clump at one vector."""
    standard = jnp.einsum("jde,je->jd", clumps.inverse, z - clumps.mean)
    log_det = jnp.sum(jnp.log(jnp.diagonal(clumps.inverse, axis1=1, axis2=2)), -1)
    away, size = jnp.sum(standard**2, -1), len(z)
    if degrees == np.inf:
        return -0.5 * away + log_det - 0.5 * size * jnp.log(2 * jnp.pi)
    constant = (
        lgamma(0.5 * (degrees + size))
        - lgamma(0.5 * degrees)
        - 0.5 * size * np.log(degrees * np.pi)
    )
    return -0.5 * (degrees + size) * jnp.log1p(away / degrees) + log_det + constant


class _Round(NamedTuple):
    """Of EM."""

    clumps: Clumps
    said: Array  # of the points by the clumps before
    gain: Array
    number: Array


@partial(jax.jit, static_argnames="num_clumps")
def _em(rng_key: Array, points: Array, count: Array, num_clumps: int) -> Clumps:
    """`count` clumps in `num_clumps` places."""
    num_points, size = points.shape
    away = points - points.mean(0)
    spread = away.T @ away / num_points
    spread = spread + 1e-9 * jnp.diag(jnp.diagonal(spread) + jnp.finfo(points.dtype).tiny)

    def fitted(claim: Array) -> Clumps:
        # a clump of fewer points than it has directions is left out
        claim = jnp.where(claim.sum(0) > size / 2, claim, 0.0)
        total = claim.sum(0)
        mean = claim.T @ points / jnp.maximum(total, 1)[:, None]
        apart = points[None] - mean[:, None]  # from the new centres
        scatter = jnp.einsum("nj,jnd,jne->jde", claim, apart, apart)
        common = scatter.sum(0) / num_points + 1e-6 * spread
        root = jnp.linalg.cholesky((scatter + size * common) / (total + size)[:, None, None])
        return Clumps.of(jnp.log(total) - jnp.log(total.sum()), mean, root)

    def improved(last: _Round) -> _Round:
        log_joint = jax.vmap(lambda z: last.clumps.log_weight + _each(last.clumps, z))(points)
        log_density = logsumexp(log_joint, axis=1, keepdims=True)
        said = log_density.mean()
        return _Round(
            fitted(jnp.exp(log_joint - log_density)),
            said,
            jnp.abs(said - last.said),
            last.number + 1,
        )

    goes_on = lambda last: (last.number < NUM_ROUNDS) & ~(last.gain < NO_GAIN)
    never, start = (
        jnp.array(-jnp.inf, points.dtype),
        fitted(_nearest(rng_key, points, spread, count, num_clumps)),
    )
    return jax.lax.while_loop(
        goes_on, improved, _Round(start, never, -never, jnp.zeros((), jnp.int32))
    ).clumps


@jax.jit
def sharpened(clumps: Clumps, points: Array, slope: Array) -> Clumps:
    """Clumps fitted to slopes as well, of the points that each claims."""
    size, is_known = points.shape[1], jnp.isfinite(slope).all(1)
    slope = jnp.where(is_known[:, None], slope, 0.0)
    claim = (
        softmax(jax.vmap(lambda z: clumps.log_weight + _each(clumps, z))(points), axis=1)
        * is_known[:, None]
    )
    total = claim.sum(0)

    def moments(y: Array) -> tuple[Array, Array]:
        """Of each clump, its covariance drawn to the common one."""
        mean = claim.T @ y / jnp.maximum(total, 1)[:, None]
        apart = y[None] - mean[:, None]
        scatter = jnp.einsum("nj,jnd,jne->jde", claim, apart, apart)
        common = scatter.sum(0) / jnp.maximum(total.sum(), 1)
        return mean, _lifted((scatter + size * common) / (total + size)[:, None, None])

    (place, spread), (steepness, curvature) = moments(points), moments(slope)
    root = jnp.linalg.cholesky(spread)
    value, vector = jnp.linalg.eigh(jnp.swapaxes(root, 1, 2) @ curvature @ root)
    half = root @ vector * value[:, None, :] ** -0.25
    covariance = half @ jnp.swapaxes(half, 1, 2)
    return Clumps.of(
        clumps.log_weight,
        place + jnp.einsum("jde,je->jd", covariance, steepness),
        jnp.linalg.cholesky(covariance),
    )


def moved(clumps: Clumps, to: Callable[[Array], Array]) -> Clumps:
    """Clumps as they are after a smooth map of the vectors, straightened at each centre."""
    stretch = jax.vmap(jax.jacfwd(to))(clumps.mean)
    root = jax.vmap(
        lambda inverse: solve_triangular(
            inverse, jnp.eye(len(inverse), dtype=inverse.dtype), lower=True
        )
    )(clumps.inverse)
    along = stretch @ root
    return Clumps.of(
        clumps.log_weight,
        jax.vmap(to)(clumps.mean),
        jnp.linalg.cholesky(along @ jnp.swapaxes(along, 1, 2)),
    )


def _lifted(covariance: Array) -> Array:
    """With a little on the diagonal, for directions in which points do not differ."""
    return covariance + 1e-9 * covariance * jnp.eye(covariance.shape[-1])


def _nearest(rng_key: Array, points: Array, spread: Array, count: Array, num_places: int) -> Array:
    """[point, place], 1 where a centre is nearest: of `count`, which are points one after the
    other, each with the probability of its squared distance to those before.
    """
    y = solve_triangular(jnp.linalg.cholesky(spread), points.T, lower=True).T
    keys = random.split(rng_key, num_places)
    chosen = [random.randint(keys[0], (), 0, len(points))]
    away = [jnp.sum((y - y[chosen[0]]) ** 2, -1)]
    for key in keys[1:]:
        chosen.append(random.categorical(key, jnp.log(jnp.stack(away).min(0))))
        away.append(jnp.sum((y - y[chosen[-1]]) ** 2, -1))
    distance = jnp.where(jnp.arange(num_places)[:, None] < count, jnp.stack(away), jnp.inf)
    return (jnp.arange(num_places) == jnp.argmin(distance, axis=0)[:, None]).astype(points.dtype)
