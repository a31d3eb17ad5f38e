"""Blocks that see a row through products of its entries: a normal distribution of the features, and
probit experts on them.

A row is u = (x, 1, c): its features, of which some may be missing, a one, and columns that are
plain data. Given the group of the row each block is a quadratic form

    log p(block | u, t) = const - u' Q u / 2 + t (w . u),                                                                   (1)

Q, w and const read off the block's parameters, or their means under q. So messages of several
blocks are added, a missing entry is normal given the rest, and the sums over rows of rho u u' and
rho t u are all that an update needs.

- Features: x ~ Normal(loc, precision^-1) with (inverse) Wishart and normal priors, any of the
  families of
    `inference.reading.conjugate.table`.
- `Weights`: t ~ Normal(w . d, 1), d some entries of u; w ~ Normal(zeta, 1 / lambda) element by
  element; lambda ~ Gamma, or known; zeta ~ Normal(m, 1 / (gamma lambda)), or known. q(zeta, lambda)
  is joint.

Cost for K groups and D entries of u: K D^3 an update.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import digamma, multigammaln

from inference.reading.conjugate.normal import WishartHyper, half_log_det
from inference.reading.conjugate.pairs import gamma_divergence, gamma_means

__all__ = [
    "Common",
    "Form",
    "Weights",
    "common_divergence",
    "common_posterior",
    "gate_divergence",
    "gate_expected",
    "gate_natural",
    "gate_posterior",
    "inverse_of",
    "known_weights",
    "precision_of",
    "weights_log_density",
    "weights_posterior",
    "weights_term",
]


class Form(NamedTuple):
    """A quadratic form for each group."""

    const: Array  # [group]
    matrix: Array  # Q, [group, entry, entry]


# Normal features.


def gate_natural(precision: Array, loc: Array) -> Form:
    """log Normal(x | loc, precision^-1) as a form in (x, 1), of parameters [group, ...]."""
    weighted = jnp.einsum("kij,kj->ki", precision, loc)
    return _form(precision, weighted, jnp.sum(weighted * loc, -1), jnp.linalg.slogdet(precision)[1])


def gate_expected(hyper: WishartHyper) -> Form:
    """Its mean under q."""
    precision, log_det = _wishart_means(hyper, jnp.linalg.cholesky(hyper.rate))
    weighted = jnp.einsum("kij,kj->ki", precision, hyper.loc)
    return _form(
        precision,
        weighted,
        jnp.sum(weighted * hyper.loc, -1) + hyper.loc.shape[-1] / hyper.kappa,
        log_det,
    )


def _wishart_means(hyper: WishartHyper, root: Array) -> tuple[Array, Array]:
    """E of the precision and of its log determinant; `root` is the Cholesky factor of the rate."""
    nu, size = hyper.concentration, hyper.loc.shape[-1]
    halves = (nu[:, None] - jnp.arange(size, dtype=nu.dtype)[None]) / 2
    return nu[:, None, None] * inverse_of(root), digamma(halves).sum(-1) + size * math.log(
        2
    ) - 2 * half_log_det(root)


def _form(precision: Array, weighted: Array, square: Array, log_det: Array) -> Form:
    corner = jnp.zeros_like(square)[:, None, None]
    matrix = jnp.concatenate(
        [
            jnp.concatenate([precision, -weighted[:, :, None]], 2),
            jnp.concatenate([-weighted[:, None, :], corner], 2),
        ],
        1,
    )
    return Form((log_det - square - precision.shape[-1] * math.log(2 * math.pi)) / 2, matrix)


def gate_posterior(prior: WishartHyper, moments: Array) -> WishartHyper:
    """After rows of the moments sum rho u u', [group, entry, entry] with u = (x, 1)."""
    count, total, squares = moments[:, -1, -1], moments[:, :-1, -1], moments[:, :-1, :-1]
    kappa = prior.kappa + count
    loc = (prior.kappa[:, None] * prior.loc + total) / kappa[:, None]
    outer = lambda scale, vector: scale[:, None, None] * vector[:, :, None] * vector[:, None, :]
    rate = prior.rate + squares + outer(prior.kappa, prior.loc) - outer(kappa, loc)
    return WishartHyper(loc, kappa, prior.concentration + count, (rate + rate.mT) / 2)


def gate_divergence(hyper: WishartHyper, prior: WishartHyper) -> Array:
    """KL(q | prior), summed over groups."""
    nu, nu0, size = hyper.concentration, prior.concentration, hyper.loc.shape[-1]
    root, root0 = jnp.linalg.cholesky(hyper.rate), jnp.linalg.cholesky(prior.rate)
    precision, log_det = _wishart_means(hyper, root)
    log_z = lambda nu, root: (
        nu * size / 2 * math.log(2) + multigammaln(nu / 2, size) - nu * half_log_det(root)
    )
    trace = jnp.einsum("kij,kij->k", prior.rate, precision)
    wishart = (
        (nu - nu0) / 2 * log_det - (nu * size - trace) / 2 - log_z(nu, root) + log_z(nu0, root0)
    )
    delta, ratio = hyper.loc - prior.loc, prior.kappa / hyper.kappa
    distance = jnp.einsum("ki,kij,kj->k", delta, precision, delta)
    return jnp.sum(wishart + (size * (ratio - 1 - jnp.log(ratio)) + prior.kappa * distance) / 2)


# Probit experts. All arrays begin with the class that an expert is asked about.


class Weights(NamedTuple):
    """q(w) of each expert."""

    mean: Array  # [class, group, weight]
    covariance: Array  # [class, group, weight, weight]

    def second(self) -> Array:
        """E w w'."""
        return self.covariance + self.mean[..., :, None] * self.mean[..., None, :]


def known_weights(w: Array) -> Weights:
    """A point in the place of q(w)."""
    return Weights(w, jnp.zeros((*w.shape, w.shape[-1]), w.dtype))


class Common(NamedTuple):
    """The prior of zeta and lambda or q, Normal(loc, 1 / (gamma lambda)) Gamma(concentration,
    rate), [class, weight].

    Where zeta is known `gamma` is infinite, where lambda is `rate`, beside its value.
    """

    loc: Array
    gamma: Array
    concentration: Array
    rate: Array


def precision_of(common: Common) -> Array:
    """E lambda."""
    return gamma_means(common[2:])[0]


def weights_posterior(common: Common, moments: Array, products: Array) -> Weights:
    """q(w) from sum rho d d' [class, group, weight, weight] and sum rho t d [class, group,
    weight].
    """
    precision = precision_of(common)
    root = jnp.linalg.cholesky(
        moments
        + (
            precision[:, None, :, None]
            * jnp.eye(precision.shape[-1], dtype=moments.dtype)[None, None]
        )
    )
    covariance = inverse_of(root)
    return Weights(
        jnp.einsum("ckij,ckj->cki", covariance, products + (precision * common.loc)[:, None]),
        covariance,
    )


def weights_log_density(common: Common, moments: Array, products: Array, w: Array) -> Array:
    """log q(w) of `weights_posterior`, [class, group]; its covariance is not worked out."""
    precision = precision_of(common)
    root = jnp.linalg.cholesky(
        moments
        + (
            precision[:, None, :, None]
            * jnp.eye(precision.shape[-1], dtype=moments.dtype)[None, None]
        )
    )
    loc = solve_triangular(
        root, (products + (precision * common.loc)[:, None])[..., None], lower=True
    )[..., 0]
    gap = jnp.einsum("ckij,cki->ckj", root, w) - loc
    return half_log_det(root) - (jnp.sum(gap**2, -1) + w.shape[-1] * math.log(2 * math.pi)) / 2


def common_posterior(prior: Common, weights: Weights, is_told: Array | None = None) -> Common:
    """q(zeta, lambda); `is_told` [class, group]: the experts that are known, by default all."""
    told = (
        jnp.ones_like(weights.mean[..., :1])
        if is_told is None
        else is_told[..., None].astype(weights.mean.dtype)
    )
    num = told.sum(1)
    is_free = jnp.isfinite(prior.gamma)
    gamma = prior.gamma + num
    total = (told * weights.mean).sum(1)
    loc = jnp.where(
        is_free,
        (jnp.where(is_free, prior.gamma, 0) * prior.loc + total) / jnp.where(is_free, gamma, 1),
        prior.loc,
    )
    spread = (
        jnp.diagonal(weights.covariance, axis1=-2, axis2=-1) + (weights.mean - loc[:, None]) ** 2
    )
    from_prior = jnp.where(is_free, jnp.where(is_free, prior.gamma, 0) * (loc - prior.loc) ** 2, 0)
    is_known = jnp.isinf(prior.rate)
    concentration = jnp.where(is_known, prior.concentration, prior.concentration + num / 2)
    return Common(loc, gamma, concentration, prior.rate + ((told * spread).sum(1) + from_prior) / 2)


def weights_term(common: Common, weights: Weights) -> Array:
    """E log p(w | zeta, lambda) + H(w), summed."""
    size = weights.mean.shape[-1]
    spread = (
        jnp.diagonal(weights.covariance, axis1=-2, axis2=-1)
        + (weights.mean - common.loc[:, None]) ** 2
    )
    # 1 / inf = 0 where zeta is known
    quadratic = precision_of(common)[:, None] * spread + 1 / common.gamma[:, None]
    entropy = half_log_det(jnp.linalg.cholesky(weights.covariance)) + size / 2
    return jnp.sum(gamma_means(common[2:])[1][:, None] - quadratic) / 2 + jnp.sum(entropy)


def common_divergence(common: Common, prior: Common) -> Array:
    """KL(q(zeta, lambda) | prior), summed."""
    is_free = jnp.isfinite(prior.gamma)
    ratio = jnp.where(is_free, prior.gamma, 1) / jnp.where(is_free, common.gamma, 1)
    distance = (
        jnp.where(is_free, prior.gamma, 0) * precision_of(common) * (common.loc - prior.loc) ** 2
    )
    of_zeta = jnp.where(is_free, ratio - 1 - jnp.log(ratio) + distance, 0) / 2
    return jnp.sum(of_zeta + gamma_divergence(common[2:], prior[2:]))


def inverse_of(root: Array) -> Array:
    """Inverse of root root'."""
    half = solve_triangular(
        root, jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape), lower=True
    )
    return half.mT @ half
