"""The conjugate pairs of a normal likelihood.

Their methods are documented in `inference.reading.conjugate.pairs`.

NormalInverseGamma: x ~ Normal(loc, var), loc | var ~ Normal(m, var / kappa) and
var ~ InverseGamma(a, b). A row of weight w, at the distance d = x - m, changes these numbers to

    kappa' = kappa + w,    m' = m + (w / kappa') d,
    a' = a + w / 2,        b' = b + (w / 2) (kappa / kappa') d^2,                             (1)

and w = -1 undoes w = 1. No step subtracts two large sums, so that the variance of data far from 0
keeps its digits in float32. The predictive distribution is a Student t of 2 a degrees of freedom.
With s^2 = 2 b (kappa + 1) / kappa

    log p(x) = log Gamma(a + 1/2) - log Gamma(a) - log(pi s^2) / 2
               - (a + 1/2) log(1 + d^2 / s^2).                                                (2)

NormalWishart and NormalInverseWishart are the same for rows of D correlated features. In place of
2 a stands nu, the degrees of freedom of the Wishart distribution; in place of 2 b stands
rate [D, D], the inverse of its scale matrix, which is the scale matrix of the inverse Wishart
distribution of the covariance. (1) changes nu by w and rate by w (kappa / kappa') d d^T. (2) is a
multivariate t of nu - D + 1 degrees of freedom.

Rounding errors in float32 (eps = 6e-8), for columns with a standard deviation of 1:

- Adding rows: m is off by up to eps |m| sqrt(n), which is 3e-3 at m = 1e3 and n = 1e4 and changes
  log p(x) by less than 0.01. Beyond |m| = 1e4 the steps d / n of a large group are below the last
  digit of m: centre such a column first.
- Removing and adding: 1e5 such pairs in a group of 100 changed b = 50 by 0.02 at m = 0, and by 0.4
  at m = 1e3.
- Removing an outlier at k standard deviations leaves an error of eps k^2 in b: at k = 1e4 the b of
  the prior is lost, and may be negative.
- Removing all rows of a group divides the error of m by the kappa of the prior: 0.4 at m = 1e3,
  n = 100 and kappa = 0.1.

So a sampler that removes rows resets an emptied group to the prior, and computes every group anew
from its rows once a sweep.

Cost for R groups and C columns: O(R C) for `add` and `score`. With D features O(R C D^2) for `add`
and `score`, and O(R C D^3) for `cache`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, override

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln, multigammaln
from numpyro.distributions import Distribution

from inference.reading.conjugate.pairs import (
    Columns,
    ConjugatePair,
    arguments,
    digamma,
    fill_row,
    gamma_divergence,
    log_rising,
    refuse_first,
)

__all__ = [
    "NormalHyper",
    "NormalInverseGamma",
    "NormalInverseWishart",
    "NormalWishart",
    "StudentCache",
    "WishartHyper",
    "half_log_det",
    "inverse_root",
    "log_diagonal",
]


class NormalHyper(NamedTuple):
    """Hyper-parameters of a normal column, all [..., columns]."""

    loc: Array  # m
    kappa: Array  # the number of rows that the prior of loc counts for
    concentration: Array  # a
    rate: Array  # b


class WishartHyper(NamedTuple):
    """Hyper-parameters of D correlated features."""

    loc: Array  # [..., columns, D]
    kappa: Array  # [..., columns]
    concentration: Array  # nu, [..., columns]
    rate: Array  # [..., columns, D, D]


class StudentCache(NamedTuple):
    """The constants of log p(x) = base - power log(1 + |root (x - loc)|^2)."""

    loc: Array
    root: Array
    power: Array
    base: Array


@dataclass(frozen=True)
class NormalInverseGamma(Columns):
    """Normal columns of unknown mean and variance.

    The statistics are squares about 0. So `posterior` loses digits where the mean of a column is
    many standard deviations from 0; `add` does not.
    """

    priors: tuple[str, ...] = ("InverseGamma", "Normal")
    likelihood: str = "Normal"
    hyper: Any = NormalHyper

    @override
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> NormalHyper:
        """`values` are (variance, loc)."""
        inverse_gamma, normal = priors
        variance, value = jnp.broadcast_arrays(*values)
        loc, scale = arguments(normal, ("loc", "scale"), value)
        return NormalHyper(
            loc, variance / scale**2, *arguments(inverse_gamma, ("concentration", "rate"), variance)
        )

    @override
    def add(self, hyper: NormalHyper, x: Array, weight: float | Array = 1.0) -> NormalHyper:
        delta, seen = self._gap(x, hyper.loc)
        weight = weight * seen
        kappa = hyper.kappa + weight
        rate = hyper.rate + weight / 2 * (hyper.kappa / kappa) * delta**2
        return NormalHyper(
            hyper.loc + weight / kappa * delta, kappa, hyper.concentration + weight / 2, rate
        )

    @override
    def cache(self, hyper: NormalHyper) -> StudentCache:
        square = 2 * hyper.rate * (1 + 1 / hyper.kappa)
        base = log_rising(hyper.concentration, 0.5) - jnp.log(math.pi * square) / 2
        return StudentCache(hyper.loc, 1 / jnp.sqrt(square), hyper.concentration + 0.5, base)

    @override
    def scores(self, cache: StudentCache, x: Array) -> Array:
        delta, seen = self._gap(x, cache.loc)
        return seen * (cache.base - cache.power * jnp.log1p((cache.root * delta) ** 2))

    @override
    def log_prior(self, hyper: NormalHyper, values: tuple[Array, ...]) -> Array:
        (variance, value), a, b = values, hyper.concentration, hyper.rate
        inverse_gamma = a * jnp.log(b) - gammaln(a) - (a + 1) * jnp.log(variance) - b / variance
        precision = hyper.kappa / variance
        return (
            inverse_gamma
            + jnp.log(precision / (2 * math.pi)) / 2
            - precision * (value - hyper.loc) ** 2 / 2
        )

    @override
    def draw(self, rng_key: Array, hyper: NormalHyper) -> tuple[Array, ...]:
        gamma_key, normal_key = random.split(rng_key)
        shape, dtype = hyper.loc.shape, hyper.loc.dtype
        variance = hyper.rate * jnp.exp(
            -random.loggamma(gamma_key, hyper.concentration, shape, dtype)
        )
        return variance, hyper.loc + jnp.sqrt(variance / hyper.kappa) * random.normal(
            normal_key, shape, dtype
        )

    @override
    def draw_row(self, rng_key: Array, hyper: NormalHyper) -> Array:
        group_key, row_key = random.split(rng_key)
        variance, loc = self.draw(group_key, hyper)
        return loc + jnp.sqrt(variance) * random.normal(row_key, loc.shape, loc.dtype)

    @override
    def mean_row(self, hyper: NormalHyper) -> Array:
        return hyper.loc

    @override
    def refuse(self, site: str, x: np.ndarray, hyper: NormalHyper | None = None) -> None:
        refuse_first(
            site,
            x,
            _is_large(x),
            "Normal takes finite numbers that can be squared. Correct it, or give NaN where it is "
            "missing.",
        )

    @override
    def statistics(self, x: Array, hyper: NormalHyper) -> Array:
        x, seen = fill_row(x, x.dtype)
        return jnp.stack([seen, x, x**2], -1)

    @override
    def natural(self, values: tuple[Array, ...]) -> Array:
        variance, loc = values
        return self._eta(1 / variance, loc / variance, loc**2 / variance, -jnp.log(variance))

    @override
    def expected(self, hyper: NormalHyper) -> Array:
        precision = hyper.concentration / hyper.rate
        log_precision = digamma(hyper.concentration) - jnp.log(hyper.rate)
        return self._eta(
            precision,
            precision * hyper.loc,
            precision * hyper.loc**2 + 1 / hyper.kappa,
            log_precision,
        )

    def _eta(self, precision: Array, weighted: Array, square: Array, log_precision: Array) -> Array:
        return jnp.stack(
            [(log_precision - math.log(2 * math.pi) - square) / 2, weighted, -precision / 2], -1
        )

    @override
    def posterior(self, prior: NormalHyper, sums: Array) -> NormalHyper:
        count, total, squares = jnp.moveaxis(sums, -1, 0)
        kappa = prior.kappa + count
        loc = (prior.kappa * prior.loc + total) / kappa
        rate = prior.rate + (squares + prior.kappa * prior.loc**2 - kappa * loc**2) / 2
        return NormalHyper(loc, kappa, prior.concentration + count / 2, rate)

    @override
    def divergence(self, hyper: NormalHyper, prior: NormalHyper) -> Array:
        precision, ratio = hyper.concentration / hyper.rate, prior.kappa / hyper.kappa
        of_loc = (
            ratio - 1 - jnp.log(ratio) + prior.kappa * precision * (hyper.loc - prior.loc) ** 2
        ) / 2
        of_variance = gamma_divergence(
            (hyper.concentration, hyper.rate), (prior.concentration, prior.rate)
        )
        return jnp.sum(of_loc + of_variance)

    def _gap(self, x: Array, loc: Array) -> tuple[Array, Array]:
        """x - loc, 0 where missing; and 1 where observed, 0 where missing."""
        x, seen = fill_row(jnp.broadcast_to(x, loc.shape), loc.dtype)
        return seen * (x - loc), seen


@dataclass(frozen=True)
class NormalWishart(ConjugatePair):
    """Rows of a multivariate normal distribution of unknown mean and precision matrix."""

    priors: tuple[str, ...] = ("Wishart", "MultivariateNormal")
    likelihood: str = "MultivariateNormal"

    @override
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> WishartHyper:
        """`values` are (precision, loc)."""
        (wishart, normal), (precision, value) = priors, values
        (root,) = arguments(normal, ("scale_tril",), precision)
        # D / trace(precision C), for C = precision^-1 / kappa the covariance of the prior of loc
        kappa = value.shape[-1] / jnp.sum(root * (precision @ root), axis=(-2, -1))
        return self._hyper(wishart, "rate_matrix", normal, kappa, precision, value)

    @override
    def add(self, hyper: WishartHyper, x: Array, weight: float | Array = 1.0) -> WishartHyper:
        delta, seen = self._gap(x, hyper.loc)
        weight = weight * seen
        kappa = hyper.kappa + weight
        step, growth = (weight / kappa)[..., None], (weight * hyper.kappa / kappa)[..., None, None]
        rate = hyper.rate + growth * delta[..., :, None] * delta[..., None, :]
        return WishartHyper(hyper.loc + step * delta, kappa, hyper.concentration + weight, rate)

    @override
    def cache(self, hyper: WishartHyper) -> StudentCache:
        size = hyper.loc.shape[-1]
        root = inverse_root(hyper.rate * (1 + 1 / hyper.kappa)[..., None, None])
        freedom = hyper.concentration - size + 1
        base = log_rising(freedom / 2, size / 2) - size / 2 * math.log(math.pi) + half_log_det(root)
        return StudentCache(hyper.loc, root, (hyper.concentration + 1) / 2, base)

    @override
    def scores(self, cache: StudentCache, x: Array) -> Array:
        delta, seen = self._gap(x, cache.loc)
        return seen * (
            cache.base
            - cache.power * jnp.log1p(jnp.sum(jnp.matvec(cache.root, delta) ** 2, axis=-1))
        )

    @override
    def log_prior(self, hyper: WishartHyper, values: tuple[Array, ...]) -> Array:
        (precision, value), nu, size = values, hyper.concentration, hyper.loc.shape[-1]
        log_det = half_log_det(jnp.linalg.cholesky(precision))
        normaliser = (
            nu * half_log_det(jnp.linalg.cholesky(hyper.rate))
            - nu * size / 2 * math.log(2)
            - multigammaln(nu / 2, size)
        )
        wishart = (
            normaliser
            + (nu - size - 1) * log_det
            - jnp.sum(hyper.rate * precision, axis=(-2, -1)) / 2
        )
        delta = value - hyper.loc
        distance = jnp.einsum("...i,...ij,...j->...", delta, precision, delta)
        return (
            wishart
            + log_det
            + size / 2 * jnp.log(hyper.kappa / (2 * math.pi))
            - hyper.kappa * distance / 2
        )

    @override
    def draw(self, rng_key: Array, hyper: WishartHyper) -> tuple[Array, ...]:
        precision, _, loc = _draw_wishart(rng_key, hyper)
        return precision, loc

    @override
    def draw_row(self, rng_key: Array, hyper: WishartHyper) -> Array:
        group_key, row_key = random.split(rng_key)
        _, root, loc = _draw_wishart(group_key, hyper)
        return loc + jnp.matvec(root.mT, random.normal(row_key, loc.shape, loc.dtype))

    @override
    def mean_row(self, hyper: WishartHyper) -> Array:
        return hyper.loc

    @override
    def refuse(self, site: str, x: np.ndarray, hyper: WishartHyper | None = None) -> None:
        refuse_first(
            site,
            x,
            _is_large(x),
            "MultivariateNormal takes finite numbers that can be squared. Correct it, or drop the "
            "row.",
        )
        num_missing, size = np.isnan(x).sum(-1), x.shape[-1]
        for row, column in np.argwhere((num_missing > 0) & (num_missing < size)):
            place = f"row {row}" if x.shape[1] == 1 else f"row {row}, column {column}"
            raise ValueError(
                f"site {site!r}: {place} misses {num_missing[row, column]} of {size} features and "
                "MultivariateNormal couples them; use normal_inverse_chi2, or drop the row."
            )

    def precision_and_loc(self, values: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns the precision matrix and loc.

        The first of `values` is the precision matrix, or the covariance in a subclass.
        """
        precision, loc = values
        return precision, loc

    def _hyper(
        self, wishart, rate_name: str, normal, kappa: Array, matrix: Array, value: Array
    ) -> WishartHyper:
        (loc,), (rate,) = (
            arguments(normal, ("loc",), value),
            arguments(wishart, (rate_name,), matrix),
        )
        return WishartHyper(loc, kappa, *arguments(wishart, ("concentration",), kappa), rate)

    def _gap(self, x: Array, loc: Array) -> tuple[Array, Array]:
        """x - loc, 0 in a missing row, NaN in a partly missing one; and 1 where observed."""
        x = jnp.broadcast_to(jnp.asarray(x, loc.dtype), loc.shape)
        missing = jnp.isnan(x).all(-1)
        return jnp.where(missing[..., None], 0, x - loc), (~missing).astype(loc.dtype)


@dataclass(frozen=True)
class NormalInverseWishart(NormalWishart):
    """Rows of a multivariate normal distribution of unknown mean and covariance matrix."""

    priors: tuple[str, ...] = ("InverseWishart", "MultivariateNormal")

    @override
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> WishartHyper:
        """`values` are (covariance, loc)."""
        (wishart, normal), (covariance, value) = priors, values
        (root,) = arguments(normal, ("scale_tril",), covariance)
        kappa = jnp.trace(covariance, axis1=-2, axis2=-1) / jnp.sum(root**2, axis=(-2, -1))
        return self._hyper(wishart, "scale_matrix", normal, kappa, covariance, value)

    @override
    def log_prior(self, hyper: WishartHyper, values: tuple[Array, ...]) -> Array:
        # The Jacobian of the inverse is |precision|^(D + 1).
        covariance, value = values
        root = inverse_root(covariance)
        return super().log_prior(hyper, (root.mT @ root, value)) + 2 * (
            value.shape[-1] + 1
        ) * half_log_det(root)

    @override
    def precision_and_loc(self, values: tuple[Array, ...]) -> tuple[Array, Array]:
        covariance, loc = values
        return jnp.linalg.inv(covariance), loc

    @override
    def draw(self, rng_key: Array, hyper: WishartHyper) -> tuple[Array, ...]:
        _, root, loc = _draw_wishart(rng_key, hyper)
        return root.mT @ root, loc


def _draw_wishart(rng_key: Array, hyper: WishartHyper) -> tuple[Array, Array, Array]:
    """The precision by Bartlett's decomposition, a root G of the covariance G^T G, and loc."""
    diagonal_key, below_key, loc_key = random.split(rng_key, 3)
    (*batch, size), dtype = hyper.loc.shape, hyper.loc.dtype
    index = jnp.arange(size)
    freedom = hyper.concentration[..., None] - jnp.broadcast_to(
        index.astype(dtype), hyper.loc.shape
    )
    triangle = jnp.tril(random.normal(below_key, (*batch, size, size), dtype), -1)
    triangle = triangle.at[..., index, index].set(
        jnp.sqrt(2 * random.gamma(diagonal_key, freedom / 2, freedom.shape, dtype))
    )
    rate_root = jnp.linalg.cholesky(hyper.rate)
    half = solve_triangular(rate_root, triangle, trans="T", lower=True)
    root = solve_triangular(triangle, rate_root.mT, lower=True)
    noise = jnp.matvec(root.mT, random.normal(loc_key, hyper.loc.shape, dtype))
    return half @ half.mT, root, hyper.loc + noise / jnp.sqrt(hyper.kappa)[..., None]


def inverse_root(matrix: Array) -> Array:
    """Returns the inverse of the Cholesky factor of a matrix."""
    root = jnp.linalg.cholesky(matrix)
    return solve_triangular(
        root, jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape), lower=True
    )


def half_log_det(root: Array) -> Array:
    """Returns half the log determinant of a matrix from its Cholesky factor.

    From the inverse of the factor it returns minus that.
    """
    return log_diagonal(root).sum(-1)


def log_diagonal(root: Array) -> Array:
    """Returns the logarithms of the diagonal of a matrix."""
    return jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1))


def _is_large(x: np.ndarray) -> np.ndarray:
    """Whether a sum of squares of values like this may overflow; False for NaN."""
    return np.abs(x) > 1e-4 * np.sqrt(np.finfo(x.dtype).max)
