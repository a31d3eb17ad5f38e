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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from inference.maths.host import Array, generator
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

    def log_densities(
        self, mixture: Mixture, z: Float[np.ndarray, "draw size"], log_prior: np.ndarray
    ) -> np.ndarray:
        """`log_density` [draw] at vectors, by NumPy."""
        return np.logaddexp(
            np.log1p(-self.background) + self.summary.log_densities(mixture, z),
            np.log(self.background) + log_prior,
        )

    def draws(
        self, rng: np.random.Generator, mixture: Mixture, of_prior: Float[np.ndarray, "draw size"]
    ) -> Float[np.ndarray, "draw size"]:
        """Draws from the mixture, some of them replaced by these from the prior."""
        is_prior = rng.random(len(of_prior)) < self.background
        drawn = self.summary.draws(rng, mixture, len(of_prior))
        return np.where(is_prior[:, None], of_prior, drawn).astype(of_prior.dtype)


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
        """The mixture whose covariances have the Cholesky factors `root`; by NumPy."""
        log_weight, mean, root = (np.asarray(each) for each in (log_weight, mean, root))
        return cls(log_weight, mean, np.stack([_inverse(each) for each in root]))

    @property
    def present(self) -> np.ndarray:
        """The components that are not absent, the heaviest first."""
        log_weight = np.asarray(self.log_weight)
        order = np.argsort(-log_weight, kind="stable")
        return order[np.isfinite(log_weight[order])]


def _inverse(root: np.ndarray) -> np.ndarray:
    eye = np.eye(len(root), dtype=root.dtype)
    return scipy.linalg.solve_triangular(root, eye, lower=True, check_finite=False)


def _cholesky(covariance: np.ndarray) -> np.ndarray:
    """Cholesky factors of matrices; NaN of one that is not positive definite, as by JAX."""
    [factorise] = scipy.linalg.get_lapack_funcs(["potrf"], [covariance])
    found = [factorise(each, lower=1) for each in covariance]
    return np.stack([root if not info else np.full_like(root, np.nan) for root, info in found])


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
        dtype, shape = jnp.result_type(float), (num_components, self.size, self.size)
        return NormalMixture(
            np.full(num_components, -np.inf, dtype),
            np.zeros((num_components, self.size), dtype),
            np.broadcast_to(np.eye(self.size, dtype=dtype), shape),
        )

    def log_density(self, mixture: NormalMixture, z: Float[Array, " size"]) -> Array:
        """The log density at one vector; absent components at the end cost nothing."""
        return _log_density(self.degrees, mixture, z)

    def log_densities(
        self, mixture: NormalMixture, z: Float[np.ndarray, "draw size"]
    ) -> Float[np.ndarray, " draw"]:
        """`log_density` at vectors, by NumPy; NaN of a mixture that is no number."""
        with np.errstate(invalid="ignore"):
            return np.logaddexp.reduce(_log_joint(mixture, z, self.degrees), axis=1)

    def draws(
        self, rng: np.random.Generator, mixture: NormalMixture, num_draws: int
    ) -> Float[np.ndarray, "draw size"]:
        """Vectors from a mixture, by NumPy. The first of none is standard."""
        log_weight, mean, whitening = (np.asarray(each, float) for each in mixture)
        places = mixture.present if len(mixture.present) else np.zeros(1, int)
        share = np.exp(log_weight[places]) if len(mixture.present) else np.ones(1)
        which = rng.choice(places, num_draws, p=share / share.sum())
        z = rng.normal(size=(num_draws, mean.shape[1]))
        if self.degrees < np.inf:
            z *= np.sqrt(self.degrees / rng.chisquare(self.degrees, (num_draws, 1)))
        for place in np.unique(which):
            own = which == place
            z[own] = mean[place] + z[own] @ _inverse(whitening[place]).T
        return z

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
        rng = generator(rng_key)
        by_moments = lambda points, count: _em(rng, points.z, count, num_components)
        by_scores = lambda points, count: score_matched(by_moments(points, count), *points)
        ways = (by_moments,) if points.score is None else (by_moments, by_scores)
        counts = powers_of_two(num_components)
        fits = [partial(way, count=count) for count in counts for way in ways]
        return cross_validated(
            rng,
            points,
            log_weight,
            fits,
            self,
            known,
            int(np.clip(250 * num_components, 2000, 4000)),
        )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_density(degrees: float, mixture: NormalMixture, z: Array) -> Array:
    """Component by component, up to the last that is present."""
    place = jnp.arange(1, len(mixture.log_weight) + 1)
    count = jnp.max(jnp.where(jnp.isfinite(mixture.log_weight), place, 1))

    def added(place: Int[Array, ""], total: Float[Array, ""]) -> Float[Array, ""]:
        one = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, place, 1), mixture)
        return jnp.logaddexp(total, (one.log_weight + _log_each(one, z, degrees))[0])

    return jax.lax.fori_loop(0, count, added, jnp.asarray(-jnp.inf, mixture.log_weight.dtype))


@_log_density.defjvp
def _log_density_jvp(degrees: float, at: tuple, along: tuple) -> tuple[Array, Array]:
    of_all = lambda mixture, z: jax.nn.logsumexp(
        mixture.log_weight + _log_each(mixture, z, degrees)
    )
    return jax.jvp(of_all, at, along)


def _log_each(mixture: NormalMixture, z: Array, degrees: float) -> Array:
    standard = jnp.einsum("jde,je->jd", mixture.whitening, z - mixture.mean)
    log_det = jnp.sum(jnp.log(jnp.diagonal(mixture.whitening, axis1=1, axis2=2)), -1)
    return log_det + _log_standard(jnp.sum(standard**2, -1), len(z), degrees)


def _log_standard(square: Any, size: int, degrees: float) -> Any:
    """The standard log density of a Normal, or of Student's t, by squared norms."""
    if degrees == np.inf:
        return -0.5 * square - 0.5 * size * math.log(2 * math.pi)
    gammas = math.lgamma(0.5 * (degrees + size)) - math.lgamma(0.5 * degrees)
    log1p = np.log1p if isinstance(square, np.ndarray) else jnp.log1p
    constant = gammas - 0.5 * size * math.log(degrees * math.pi)
    return constant - 0.5 * (degrees + size) * log1p(square / degrees)


def _log_joint(mixture: NormalMixture, z: Any, degrees: float = np.inf) -> np.ndarray:
    """[point, component]: log weight and log density of each component, by NumPy."""
    log_weight, mean, whitening = (np.asarray(each, float) for each in mixture)
    z = np.asarray(z, float)
    standard = (z[None] - mean[:, None]) @ np.swapaxes(whitening, 1, 2)
    log_det = np.log(np.diagonal(whitening, axis1=1, axis2=2)).sum(1)
    return log_weight + log_det + _log_standard(np.sum(standard**2, -1).T, z.shape[1], degrees)


# Fits, by NumPy in double precision.


def _em(
    rng: np.random.Generator,
    points: np.ndarray,
    count: int,
    num_places: int,
    num_rounds: int = 40,
    least_gain: float = 1e-4,
) -> NormalMixture:
    """A mixture of up to `count` components, in `num_places` places."""
    z = np.asarray(points, float)
    num_points, size = z.shape
    away = z - z.mean(0)
    total_covariance = away.T @ away / num_points
    least_variance = np.diagonal(total_covariance) + np.finfo(points.dtype).tiny
    total_covariance = total_covariance + 1e-9 * np.diag(least_variance)

    def fitted(responsibility: np.ndarray) -> NormalMixture:
        # a component of fewer points than it has directions is dropped
        total = responsibility.sum(0)
        responsibility = responsibility[:, total >= min(size / 2, total.max())]
        total, mean, scatter = _scatter(responsibility, z)
        common = scatter.sum(0) / num_points + 1e-6 * total_covariance
        covariance = (scatter + size * common) / (total + size)[:, None, None]
        return NormalMixture.of(np.log(total / total.sum()), mean, _cholesky(covariance))

    mixture = fitted(_nearest_centre(rng, z, total_covariance, count))
    before = -np.inf
    for _ in range(num_rounds):
        each = _log_joint(mixture, z)
        log_density = np.logaddexp.reduce(each, axis=1, keepdims=True)
        mixture, mean = fitted(np.exp(each - log_density)), log_density.mean()
        if abs(mean - before) < least_gain:
            break
        before = mean
    return _padded(mixture, num_places, points.dtype)


def _padded(mixture: NormalMixture, num_places: int, dtype: Any) -> NormalMixture:
    rest = NormalSummary(mixture.mean.shape[1]).empty(num_places - len(mixture.mean))
    joined = (np.concatenate(each) for each in zip(mixture, rest, strict=True))
    return NormalMixture(*(each.astype(dtype) for each in joined))


def _scatter(
    responsibility: Float[np.ndarray, "point component"], points: Float[np.ndarray, "point size"]
) -> tuple[
    Float[np.ndarray, " component"],
    Float[np.ndarray, "component size"],
    Float[np.ndarray, "component size size"],
]:
    """The sum of the responsibilities, the mean, and the scatter about it, of each component."""
    total = responsibility.sum(0)
    mean = responsibility.T @ points / np.maximum(total, 1)[:, None]
    away = points[None] - mean[:, None]
    return total, mean, np.swapaxes(away * responsibility.T[:, :, None], 1, 2) @ away


def score_matched(
    mixture: NormalMixture, points: Float[Array, "point size"], score: Float[Array, "point size"]
) -> NormalMixture:
    """A mixture whose components fit points and scores, weighted by their responsibilities."""
    points, score = np.asarray(points), np.asarray(score)
    size, is_known = points.shape[1], np.isfinite(score).all(1)
    score = np.where(is_known[:, None], score, 0.0)
    log_joint = _log_joint(mixture, points)
    share = np.exp(log_joint - np.logaddexp.reduce(log_joint, axis=1, keepdims=True))
    responsibility = share * is_known[:, None]

    def moments(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total, mean, scatter = _scatter(responsibility, y)
        common = scatter.sum(0) / max(total.sum(), 1)
        covariance = (scatter + size * common) / (total + size)[:, None, None]
        # shrunk to the common one, and lifted in directions in which points do not differ
        return mean, covariance + 1e-9 * covariance * np.eye(size)

    mean, covariance = moments(np.asarray(points, float))
    mean_score, score_covariance = moments(np.asarray(score, float))
    root = _cholesky(covariance)
    matrix = np.swapaxes(root, 1, 2) @ score_covariance @ root
    is_known = np.isfinite(matrix).all((1, 2), keepdims=True)
    value, vector = np.linalg.eigh(np.where(is_known, matrix, 0.0))
    value = np.where(value > 0, value, np.nan)  # scores that do not differ tell nothing
    half = root @ vector * value[:, None, :] ** -0.25
    covariance = half @ np.swapaxes(half, 1, 2)
    mean = mean + np.einsum("jde,je->jd", covariance, mean_score)
    found = NormalMixture.of(mixture.log_weight, mean, _cholesky(covariance))
    return NormalMixture(*(each.astype(points.dtype) for each in found))


def pushed_forward(mixture: NormalMixture, to: Callable[[np.ndarray], np.ndarray]) -> NormalMixture:
    """The distribution of `to(z)` for z of a mixture, by the derivative of `to` at each mean.

    Args:
        mixture: components that are absent stay as they are.
        to: a function of vectors [point, size], which is differentiated by differences.
    """
    dtype, size = mixture.mean.dtype, mixture.mean.shape[1]
    mean, whitening = (np.array(each, float) for each in mixture[1:])
    step = np.cbrt(np.finfo(dtype).eps)
    for place in mixture.present:
        away = step * _inverse(whitening[place]).T
        z = np.concatenate([mean[place][None], mean[place] + away, mean[place] - away])
        moved = np.asarray(to(z.astype(dtype)), float)
        root = (moved[1 : size + 1] - moved[size + 1 :]) / (2 * step)  # transposed
        upper = np.linalg.qr(root, mode="r")
        mean[place] = moved[0]
        whitening[place] = _inverse(upper.T * np.sign(np.diagonal(upper)))
    return NormalMixture(mixture.log_weight, mean.astype(dtype), whitening.astype(dtype))


def _nearest_centre(
    rng: np.random.Generator,
    points: Float[np.ndarray, "point size"],
    covariance: Float[np.ndarray, "size size"],
    count: int,
) -> Float[np.ndarray, "point centre"]:
    """[point, centre]: 1 where a centre is nearest, for centres chosen as in k-means++.

    Each of the `count` centres is a point that is drawn in proportion to its squared distance to
    the centres before.
    """
    y = points @ _inverse(_cholesky(covariance[None])[0]).T
    square = np.sum((y - y[rng.integers(len(y))]) ** 2, -1)[None]
    while len(square) < count:
        reached = np.cumsum(square.min(0))
        chosen = min(np.searchsorted(reached, rng.random() * reached[-1]), len(y) - 1)
        square = np.append(square, np.sum((y - y[chosen]) ** 2, -1)[None], axis=0)
    return (np.arange(count) == square.argmin(0)[:, None]).astype(float)


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
    rng = generator(rng_key)
    arrays = jax.tree.map(np.asarray, points)
    log_weight = np.asarray(log_weight, float)
    weight = np.exp(log_weight - log_weight.max())

    def resampled(among: np.ndarray, size: int) -> FitPoints:
        index = among[rng.permutation(systematic(weight[among], rng.random(), size))]
        return jax.tree.map(lambda each: each[index], arrays)

    order = rng.permutation(len(weight))
    train, test = (resampled(half, num_points // 2) for half in (order[::2], order[1::2]))
    scores = [float(summary.log_densities(fit(train), test.z).mean()) for fit in fits]
    best = int(np.argmax([-np.inf if np.isnan(score) else score for score in scores]))
    return fits[best](resampled(order, num_points))


# Importance weights of draws from a mixture, by NumPy.


def importance_shares(log_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """Importance weights p / q of draws from q, normalised to sum to 1, and log p / q at the draws.

    The log ratio is 0 where the weight is 0. All are NaN where no draw has a positive weight.

    Args:
        log_weight: of the draws, up to a constant; NaN counts as a weight of 0.
    """
    log_weight = np.asarray(log_weight, float)
    log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
    total = np.logaddexp.reduce(log_weight)
    if not np.isfinite(total):
        return np.full_like(log_weight, np.nan), np.full_like(log_weight, np.nan)
    share = np.exp(log_weight - total)
    return share, np.log(np.where(share > 0, share * len(share), 1.0))


def divergence(log_weight: Any) -> float:
    """Kullback-Leibler divergence from q to p, in nats, by the log weights p / q of draws from q.

    NaN where no draw has a positive weight.
    """
    share, log_ratio = importance_shares(log_weight)
    return float(np.sum(share * log_ratio))
