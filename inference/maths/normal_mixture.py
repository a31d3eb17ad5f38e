"""Normal mixtures fitted to weighted points: summaries of a posterior, and proposals.

    q(z)  =  (1 - background) sum_j a_j Normal(z; mean_j, covariance_j)  +  background prior(z)

`NormalSummary.fitted` fits the mixture by EM, with centres that are far from each other at the
start, covariances shrunk towards the common one, and components of too few points dropped. The
number of components, 1, 2, 4, ..., is chosen by `cross_validated`: the fit to half of the points
under which the other half has the largest mean log density. `Defensive` mixes in the prior, so that
the importance weights are bounded wherever the likelihood is.

A covariance that is estimated from n points costs about size^2 / 4n nats. Where the scores
(gradients of the log density) at the points are known, `score_matched` fits components to them as
well. The score of a Normal at z is (mean - z) / covariance, so that

    covariance  cov(score)  covariance  =  cov(z),        mean  =  mean(z) + covariance mean(score)

hold for any set of points, and give the covariance without error from more points than it has
dimensions. Cross-validation also chooses between the fits with and without scores: those with
scores are worse where a component is far from Normal.

Dempster, Laird and Rubin (1977) for EM; Center (2009), "Learning complex classification models
from large data sets", for mixtures between stages; Hesterberg (1995) for the defensive mixture;
covariances from scores as in nutpie's mass matrices. Cost of a fit: rounds x points x components x
size^2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lgamma
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from inference.maths.resampling import systematic

__all__ = [
    "Defensive",
    "FitPoints",
    "Mixture",
    "NormalMixture",
    "NormalSummary",
    "Summary",
    "cross_validated",
    "divergence",
    "importance_shares",
    "powers_of_two",
    "pushed_forward",
    "score_matched",
]


type Mixture = Any  # parameters of a mixture: arrays alone, of which log_weight is one
type Summary = Any  # a family of mixtures, with the methods of `NormalSummary`


class FitPoints(NamedTuple):
    """Points that a summary is fitted to."""

    z: Float[Array, "point size"]
    score: Float[Array, "point size"] | None = None  # gradient of the log density


class Defensive(NamedTuple):
    """A summary with a share `background` of the prior mixed in."""

    summary: Summary
    background: float

    def log_density(self, mixture: Mixture, z: Float[Array, " size"], log_prior: Array) -> Array:
        """The log density at one vector, where the prior has this log density."""
        return jnp.logaddexp(
            np.log1p(-self.background) + self.summary.log_density(mixture, z),
            np.log(self.background) + log_prior,
        )

    def draw(self, rng_key: Array, mixture: Mixture, draw_prior: Callable) -> Array:
        """A vector from the mixture or, by `draw_prior(key)`, from the prior."""
        which_key, draw_key = random.split(rng_key)
        return jnp.where(
            random.bernoulli(which_key, self.background),
            draw_prior(draw_key),
            self.summary.draw(draw_key, mixture),
        )


# Normal mixtures.


class NormalMixture(NamedTuple):
    """The parameters of a Normal mixture; an absent component has log weight -inf."""

    log_weight: Float[Array, " component"]  # normalised
    mean: Float[Array, "component size"]
    # inverse of the Cholesky factor of the covariance, since densities are evaluated more often
    # than draws are made
    whitening: Float[Array, "component size size"]

    @classmethod
    def of(
        cls,
        log_weight: Float[Array, " component"],
        mean: Float[Array, "component size"],
        root: Float[Array, "component size size"],
    ) -> "NormalMixture":
        """The mixture whose covariances have the Cholesky factors `root`."""
        return cls(log_weight, mean, jax.vmap(_inverse)(root))


def _inverse(root: Array) -> Array:
    return solve_triangular(root, jnp.eye(len(root), dtype=root.dtype), lower=True)


@dataclass(frozen=True)
class NormalSummary:
    """The family of Normal mixtures over vectors of one size.

    Args:
        size: of the vectors.
        degrees: degrees of freedom of Student's t, with which components have heavier tails as
            proposals of importance sampling; infinite for Normals.
    """

    size: int = 0
    degrees: float = np.inf
    usual_components = 8
    uses_scores = True

    def over(self, blocks: Sequence[int]) -> "NormalSummary":
        """The family over vectors of sites with these sizes."""
        return replace(self, size=sum(blocks))

    def empty(self, num_components: int) -> NormalMixture:
        """A mixture whose components are all absent."""
        return NormalMixture(
            jnp.full(num_components, -jnp.inf),
            jnp.zeros((num_components, self.size)),
            jnp.broadcast_to(jnp.eye(self.size), (num_components, self.size, self.size)),
        )

    def log_density(self, mixture: NormalMixture, z: Float[Array, " size"]) -> Array:
        """The log density at one vector; absent components at the end cost nothing."""
        place = jnp.arange(1, len(mixture.log_weight) + 1)
        last = jnp.max(jnp.where(jnp.isfinite(mixture.log_weight), place, 1))
        sizes = [*powers_of_two(len(place) - 1), len(place)]

        def of_first(count: int, z: Array) -> Array:
            first = jax.tree.map(lambda leaf: leaf[:count], mixture)
            return jax.nn.logsumexp(first.log_weight + _log_each(first, z, self.degrees))

        branches = [partial(of_first, count) for count in sizes]
        return jax.lax.switch(jnp.searchsorted(jnp.array(sizes), last), branches, z)

    def draw(self, rng_key: Array, mixture: NormalMixture) -> Array:
        """A vector from a mixture that has a component."""
        which_key, noise_key, tail_key = random.split(rng_key, 3)
        which = random.categorical(which_key, mixture.log_weight)
        noise = random.normal(noise_key, mixture.mean.shape[1:], mixture.mean.dtype)
        if self.degrees < np.inf:
            chi2 = random.gamma(tail_key, 0.5 * self.degrees, dtype=noise.dtype)
            noise *= jnp.sqrt(0.5 * self.degrees / chi2)
        return mixture.mean[which] + solve_triangular(mixture.whitening[which], noise, lower=True)

    def fitted(
        self,
        rng_key: Array,
        points: FitPoints,
        log_weight: Float[Array, " point"],
        num_components: int,
        known: NormalMixture | None = None,
    ) -> NormalMixture:
        """The cross-validated fit to weighted points.

        Args:
            rng_key: a JAX key.
            points: with scores, fits by score matching are candidates as well.
            log_weight: of the points, up to a constant.
            num_components: the most components.
            known: a mixture that is a candidate as it is.
        """
        by_moments = lambda points, count: _em(rng_key, points.z, count, num_components)
        by_scores = lambda points, count: score_matched(by_moments(points, count), *points)
        ways = (by_moments,) if points.score is None else (by_moments, by_scores)
        counts = powers_of_two(num_components)
        fits = [partial(way, count=count) for count in counts for way in ways]
        return cross_validated(
            rng_key,
            points,
            log_weight,
            fits,
            self,
            known,
            int(np.clip(250 * num_components, 2000, 4000)),
        )


def _log_each(mixture: NormalMixture, z: Array, degrees: float = np.inf) -> Array:
    standard = jnp.einsum("jde,je->jd", mixture.whitening, z - mixture.mean)
    log_det = jnp.sum(jnp.log(jnp.diagonal(mixture.whitening, axis1=1, axis2=2)), -1)
    square, size = jnp.sum(standard**2, -1), len(z)
    if degrees == np.inf:
        return -0.5 * square + log_det - 0.5 * size * jnp.log(2 * jnp.pi)
    gammas = lgamma(0.5 * (degrees + size)) - lgamma(0.5 * degrees)
    constant = gammas - 0.5 * size * np.log(degrees * np.pi)
    return -0.5 * (degrees + size) * jnp.log1p(square / degrees) + log_det + constant


@partial(jax.jit, static_argnames="num_places")
def _em(
    rng_key: Array,
    points: Array,
    count: Array,
    num_places: int,
    num_rounds: int = 40,
    least_gain: float = 1e-4,
) -> NormalMixture:
    num_points, size = points.shape
    away = points - points.mean(0)
    total_covariance = away.T @ away / num_points
    least_variance = jnp.diagonal(total_covariance) + jnp.finfo(points.dtype).tiny
    total_covariance = total_covariance + 1e-9 * jnp.diag(least_variance)

    def fitted(responsibility: Array) -> NormalMixture:
        # a component of fewer points than it has directions is dropped
        is_kept = responsibility.sum(0) > size / 2
        responsibility = jnp.where(is_kept, responsibility, 0.0)
        total, mean, scatter = _scatter(responsibility, points)
        common = scatter.sum(0) / num_points + 1e-6 * total_covariance
        return NormalMixture.of(
            jnp.log(total) - jnp.log(total.sum()),
            mean,
            jnp.linalg.cholesky((scatter + size * common) / (total + size)[:, None, None]),
        )

    def improved(state: tuple) -> tuple:
        number, mixture, before, _ = state
        each = jax.vmap(lambda z: mixture.log_weight + _log_each(mixture, z))(points)
        log_density = jax.nn.logsumexp(each, axis=1, keepdims=True)
        mean = log_density.mean()
        return number + 1, fitted(jnp.exp(each - log_density)), mean, jnp.abs(mean - before)

    goes_on = lambda state: (state[0] < num_rounds) & ~(state[3] < least_gain)
    infinity = jnp.array(jnp.inf, points.dtype)
    start = fitted(_nearest_centre(rng_key, points, total_covariance, count, num_places))
    first = jnp.zeros((), jnp.int32), start, -infinity, infinity
    return jax.lax.while_loop(goes_on, improved, first)[1]


def _scatter(responsibility: Array, points: Array) -> tuple[Array, Array, Array]:
    total = responsibility.sum(0)
    mean = responsibility.T @ points / jnp.maximum(total, 1)[:, None]
    away = points[None] - mean[:, None]
    return total, mean, jnp.einsum("nj,jnd,jne->jde", responsibility, away, away)


@jax.jit
def score_matched(
    mixture: NormalMixture, points: Float[Array, "point size"], score: Float[Array, "point size"]
) -> NormalMixture:
    """A mixture whose components fit points and scores, weighted by their responsibilities."""
    size, is_known = points.shape[1], jnp.isfinite(score).all(1)
    score = jnp.where(is_known[:, None], score, 0.0)
    each = jax.vmap(lambda z: mixture.log_weight + _log_each(mixture, z))(points)
    responsibility = jax.nn.softmax(each, axis=1) * is_known[:, None]

    def moments(y: Array) -> tuple[Array, Array]:
        total, mean, scatter = _scatter(responsibility, y)
        common = scatter.sum(0) / jnp.maximum(total.sum(), 1)
        covariance = (scatter + size * common) / (total + size)[:, None, None]
        # shrunk to the common one, and lifted in directions in which points do not differ
        return mean, covariance + 1e-9 * covariance * jnp.eye(size)

    mean, covariance = moments(points)
    mean_score, score_covariance = moments(score)
    root = jnp.linalg.cholesky(covariance)
    value, vector = jnp.linalg.eigh(jnp.swapaxes(root, 1, 2) @ score_covariance @ root)
    half = root @ vector * value[:, None, :] ** -0.25
    covariance = half @ jnp.swapaxes(half, 1, 2)
    mean = mean + jnp.einsum("jde,je->jd", covariance, mean_score)
    return NormalMixture.of(mixture.log_weight, mean, jnp.linalg.cholesky(covariance))


def pushed_forward(mixture: NormalMixture, to: Callable[[Array], Array]) -> NormalMixture:
    """The distribution of `to(z)` for z of a mixture, by the derivative of `to` at each mean."""
    root = jax.vmap(jax.jacfwd(to))(mixture.mean) @ jax.vmap(_inverse)(mixture.whitening)
    covariance = root @ jnp.swapaxes(root, 1, 2)
    return NormalMixture.of(
        mixture.log_weight, jax.vmap(to)(mixture.mean), jnp.linalg.cholesky(covariance)
    )


def _nearest_centre(
    rng_key: Array, points: Array, covariance: Array, count: Array, num_places: int
) -> Array:
    """[point, place]: 1 where a centre is nearest, for centres chosen as in k-means++.

    Each of the `count` centres is a point that is drawn in proportion to its squared distance to
    the centres before.
    """
    y = solve_triangular(jnp.linalg.cholesky(covariance), points.T, lower=True).T
    keys = random.split(rng_key, num_places)
    chosen = [random.randint(keys[0], (), 0, len(points))]
    square = [jnp.sum((y - y[chosen[0]]) ** 2, -1)]
    for key in keys[1:]:
        chosen.append(random.categorical(key, jnp.log(jnp.stack(square).min(0))))
        square.append(jnp.sum((y - y[chosen[-1]]) ** 2, -1))
    distance = jnp.where(jnp.arange(num_places)[:, None] < count, jnp.stack(square), jnp.inf)
    return (jnp.arange(num_places) == jnp.argmin(distance, axis=0)[:, None]).astype(points.dtype)


# The choice of a fit.


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ..., up to `most`."""
    return [2**power for power in range(most.bit_length())]


def cross_validated(
    rng_key: Array,
    points: FitPoints,
    log_weight: Float[Array, " point"],
    fits: Sequence[Callable[[FitPoints], Any]],
    summary: Summary,
    known: Any = None,
    num_points: int = 2000,
) -> Any:
    """The fit to all points whose fit to half of them has the best log density on the other half.

    Each point, with all its weight, is in one half only, so that a component on a single heavy
    point has no merit on the other half. Among equals the first is taken.

    Args:
        rng_key: a JAX key.
        points: to be fitted, resampled in proportion to their weights.
        log_weight: of the points, up to a constant.
        fits: functions that fit a mixture to points of equal weight.
        summary: the family of the mixtures.
        known: a mixture that is a candidate as it is; None, or without components, for none.
        num_points: resampled points.
    """
    if known is not None and len(known.log_weight):
        fits = [*fits, lambda points: known]
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    arrays = jax.tree.map(np.asarray, points)
    weight = np.exp(np.asarray(log_weight - jnp.max(log_weight), float))

    def resampled(among: np.ndarray, size: int) -> FitPoints:
        index = among[rng.permutation(systematic(weight[among], rng.random(), size))]
        return jax.tree.map(lambda each: jnp.asarray(each[index]), arrays)

    order = rng.permutation(len(weight))
    train, test = (resampled(half, num_points // 2) for half in (order[::2], order[1::2]))
    scores = [float(_mean_log_density(summary, fit(train), test.z)) for fit in fits]
    best = int(np.argmax([-np.inf if np.isnan(score) else score for score in scores]))
    return fits[best](resampled(order, num_points))


@partial(jax.jit, static_argnums=0)
def _mean_log_density(summary: Summary, mixture: Any, points: Array) -> Array:
    return jnp.mean(jax.vmap(lambda z: summary.log_density(mixture, z))(points))


# Importance weights of draws from a mixture.


def importance_shares(log_weight: Float[Array, " draw"]) -> tuple[Array, Array]:
    """Importance weights p / q of draws from q, normalised to sum to 1, and log p / q at the draws.

    The log ratio is 0 where the weight is 0. All are NaN where no draw has a positive weight.

    Args:
        log_weight: of the draws, up to a constant; NaN counts as a weight of 0.
    """
    log_weight = jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight)
    total = jax.nn.logsumexp(log_weight)
    share = jnp.where(jnp.isfinite(total), jnp.exp(log_weight - total), jnp.nan)
    return share, jnp.where(share > 0, jnp.log(share * len(share)), 0.0)


def divergence(log_weight: Float[Array, " draw"]) -> Array:
    """Kullback-Leibler divergence from q to p, in nats, by the log weights p / q of draws from q.

    NaN where no draw has a positive weight.
    """
    share, log_ratio = importance_shares(log_weight)
    return jnp.sum(share * log_ratio)
