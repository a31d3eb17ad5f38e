"""Blocks whose log density is quadratic in the entries of a row: Normal features, probit experts.

A row is u = (x, 1, c): its features, of which some may be missing, the constant 1, and columns of
plain data. Given the group of the row, each block is a quadratic form

    log p(block | u, t) = const - u' Q u / 2 + t (w . u),                                       (1)

with Q, w and const computed from the block's parameters, or their means under q. So the forms of
several blocks add up, a missing entry is Normal given the rest, and an update needs only the
sufficient statistics: sums over rows of rho u u' and rho t u, with rho the weight of a row.

- Features: x ~ Normal(loc, precision^-1) with (inverse) Wishart and Normal priors, any of these
  families of `inference.reading.conjugate.table`.
- Experts: t ~ Normal(w . d, 1), where d are some entries of u. Element by element w ~ Normal(zeta,
  1 / lambda), zeta ~ Normal(m, 1 / (gamma lambda)), or known, and lambda ~ Gamma, or known.
  q(zeta, lambda) is joint: a Normal-Gamma.

Cost of an update for K groups and D entries of u: K D^3.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln
from jaxtyping import Bool, Float

from inference.reading.conjugate.normal import WishartHyper, half_log_det, log_diagonal
from inference.reading.conjugate.pairs import apart, digamma, gamma_divergence, gamma_means

__all__ = [
    "Common",
    "Form",
    "GateMeans",
    "Weights",
    "common_divergence",
    "common_posterior",
    "gate_divergence",
    "gate_evidence",
    "gate_expected",
    "gate_means",
    "gate_natural",
    "gate_posterior",
    "inverse_of",
    "known_weights",
    "outer",
    "precision_of",
    "total",
    "weights_evidence",
    "weights_log_density",
    "weights_posterior",
    "weights_terms",
]


class Form(NamedTuple):
    """A quadratic form for each group."""

    const: Array  # [group]
    matrix: Array  # Q [group, entry, entry]


def total(*terms: Array) -> Array:
    """The sum of all entries of arrays, in one loop, which is faster to compile than several."""
    return jnp.sum(jnp.concatenate([jnp.ravel(term) for term in terms]))


def outer(vectors: Array) -> Array:
    """v v' of vectors [..., entry]."""
    return vectors[..., :, None] * vectors[..., None, :]


def inverse_of(root: Array) -> Array:
    """The inverse of root root', for a lower triangular root."""
    half = solve_triangular(
        root, jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape), lower=True
    )
    return half.mT @ half


# Normal features.


def gate_natural(
    precision: Float[Array, "group feature feature"], loc: Float[Array, "group feature"]
) -> Form:
    """log Normal(x | loc, precision^-1) as a form in (x, 1)."""
    weighted = jnp.einsum("kij,kj->ki", precision, loc)
    return _form(precision, weighted, jnp.sum(weighted * loc, -1), jnp.linalg.slogdet(precision)[1])


class GateMeans(NamedTuple):
    """Means under q, of each group."""

    root: Array  # the Cholesky factor of the rate
    precision: Array
    log_det: Array  # of the precision


def gate_means(hyper: WishartHyper) -> GateMeans:
    """The means of the precision and of its log determinant under q."""
    nu, size, root = hyper.concentration, hyper.loc.shape[-1], jnp.linalg.cholesky(hyper.rate)
    log_det = (
        digamma((nu[:, None] - jnp.arange(size, dtype=nu.dtype)[None]) / 2).sum(-1)
        + size * math.log(2)
        - 2 * half_log_det(root)
    )
    return GateMeans(root, nu[:, None, None] * inverse_of(root), log_det)


def gate_expected(hyper: WishartHyper, means: GateMeans) -> Form:
    """The mean of `gate_natural` under q."""
    _, precision, log_det = means
    weighted = jnp.einsum("kij,kj->ki", precision, hyper.loc)
    return _form(
        precision,
        weighted,
        jnp.sum(weighted * hyper.loc, -1) + hyper.loc.shape[-1] / hyper.kappa,
        log_det,
    )


def _form(
    precision: Float[Array, "group feature feature"],
    weighted: Float[Array, "group feature"],
    square: Float[Array, " group"],
    log_det: Float[Array, " group"],
) -> Form:
    column, corner = -weighted[:, :, None], jnp.zeros_like(square)[:, None, None]
    const = (log_det - square - precision.shape[-1] * math.log(2 * math.pi)) / 2
    return Form(const, jnp.block([[precision, column], [column.mT, corner]]))


def gate_posterior(prior: WishartHyper, moments: Float[Array, "group entry entry"]) -> WishartHyper:
    """The posterior after rows with the moments sum rho u u', u = (x, 1)."""
    count, total, squares = moments[:, -1, -1], moments[:, :-1, -1], moments[:, :-1, :-1]
    kappa = prior.kappa + count
    loc = (prior.kappa[:, None] * prior.loc + total) / kappa[:, None]
    scaled = lambda scale, vector: scale[:, None, None] * vector[:, :, None] * vector[:, None, :]
    rate = prior.rate + squares + scaled(prior.kappa, prior.loc) - scaled(kappa, loc)
    return WishartHyper(loc, kappa, prior.concentration + count, (rate + rate.mT) / 2)


def gate_divergence(
    hyper: WishartHyper, means: GateMeans, prior: WishartHyper
) -> tuple[Array, ...]:
    """Terms, by group and feature, whose sum is KL(q | prior)."""
    nu, nu0, size = hyper.concentration, prior.concentration, hyper.loc.shape[-1]
    (root, precision, log_det), ratio = means, prior.kappa / hyper.kappa

    return (
        precision * (prior.rate + prior.kappa[:, None, None] * outer(hyper.loc - prior.loc)) / 2,
        (nu - nu0) / 2 * (log_det - size * math.log(2))
        + size / 2 * (ratio - 1 - jnp.log(ratio) - nu),
        _normaliser(nu0, jnp.linalg.cholesky(prior.rate)) - _normaliser(nu, root),
    )


def _normaliser(
    nu: Float[Array, " group"], root: Float[Array, "group feature feature"]
) -> Float[Array, "group feature"]:
    # Of a Wishart [group, feature]; what is the same for q and the prior is left out.
    nu = nu[:, None]
    log_gamma = gammaln(apart((nu - jnp.arange(root.shape[-1], dtype=nu.dtype)[None]) / 2))
    return log_gamma - nu * log_diagonal(root)


def gate_evidence(prior: WishartHyper, hyper: WishartHyper) -> Float[Array, " group"]:
    """The log evidence of the rows by which the prior became a posterior."""
    of_rate = lambda own: _normaliser(own.concentration, jnp.linalg.cholesky(own.rate)).sum(1)
    num, size = hyper.kappa - prior.kappa, hyper.loc.shape[-1]
    ratio = jnp.log(prior.kappa / hyper.kappa) - num * math.log(math.pi)
    return of_rate(hyper) - of_rate(prior) + size / 2 * ratio


# Probit experts. All arrays begin with the class whose soft label an expert predicts.


class Weights(NamedTuple):
    """q(w) of each expert, Normal."""

    mean: Array  # [class, group, weight]
    covariance: Array  # [class, group, weight, weight]


def known_weights(w: Array) -> Weights:
    """Known weights in the form of q(w), with covariance 0."""
    return Weights(w, jnp.zeros((*w.shape, w.shape[-1]), w.dtype))


class Common(NamedTuple):
    """The Normal-Gamma prior, or q, of the zeta and lambda that all groups have in common.

    zeta ~ Normal(loc, 1 / (gamma lambda)), lambda ~ Gamma(concentration, rate), all [class,
    weight]. Where zeta is known, loc is its value and gamma is infinite. Where lambda is known,
    concentration is its value and rate is infinite.
    """

    loc: Array
    gamma: Array
    concentration: Array
    rate: Array


def precision_of(common: Common) -> Array:
    """E lambda."""
    return gamma_means(common[2:])[0]


def _weights_root(
    common: Common,
    moments: Float[Array, "class group weight weight"],
    products: Float[Array, "class group weight"],
) -> tuple[Float[Array, "class group weight weight"], Float[Array, "class group weight"]]:
    # The Cholesky factor of the precision of q(w), and the precision times the mean.
    precision = precision_of(common)
    root = jnp.linalg.cholesky(
        moments
        + precision[:, None, :, None]
        * jnp.eye(precision.shape[-1], dtype=moments.dtype)[None, None]
    )
    return root, products + (precision * common.loc)[:, None]


def weights_posterior(
    common: Common,
    moments: Float[Array, "class group weight weight"],
    products: Float[Array, "class group weight"],
) -> Weights:
    """q(w) from the sums over rows rho d d' and rho t d."""
    root, weighted = _weights_root(common, moments, products)
    covariance = inverse_of(root)
    return Weights(jnp.einsum("ckij,ckj->cki", covariance, weighted), covariance)


def weights_evidence(
    common: Common,
    moments: Float[Array, "class group weight weight"],
    products: Float[Array, "class group weight"],
) -> Float[Array, " group"]:
    """What the rows of each group add to the bound by q(w), without terms of t alone."""
    root, weighted = _weights_root(common, moments, products)
    loc = solve_triangular(root, weighted[..., None], lower=True)[..., 0]
    mean, mean_log = gamma_means(common[2:])
    prior = (mean_log - mean * common.loc**2 - 1 / common.gamma).sum(-1)  # [class]
    return (jnp.sum(loc**2, -1) / 2 - half_log_det(root) + prior[:, None] / 2).sum(0)


def weights_log_density(
    common: Common,
    moments: Float[Array, "class group weight weight"],
    products: Float[Array, "class group weight"],
    w: Float[Array, "class group weight"],
) -> Float[Array, "class group"]:
    """log q(w) of `weights_posterior`, whose covariance is not computed."""
    root, weighted = _weights_root(common, moments, products)
    loc = solve_triangular(root, weighted[..., None], lower=True)[..., 0]
    return (
        half_log_det(root)
        - (
            jnp.sum((jnp.einsum("ckij,cki->ckj", root, w) - loc) ** 2, -1)
            + w.shape[-1] * math.log(2 * math.pi)
        )
        / 2
    )


def common_posterior(
    prior: Common, weights: Weights, is_seen: Bool[Array, "class group"] | None = None
) -> Common:
    """q(zeta, lambda) given q(w).

    Args:
        prior: The Normal-Gamma prior.
        weights: q(w), or known weights.
        is_seen: The experts whose weights are used; None for all.
    """
    is_seen = jnp.ones(weights.mean.shape[:2]) if is_seen is None else is_seen
    seen = is_seen[..., None].astype(weights.mean.dtype)
    num, is_free, is_known = seen.sum(1), jnp.isfinite(prior.gamma), jnp.isinf(prior.rate)
    gamma, gamma0 = prior.gamma + num, jnp.where(is_free, prior.gamma, 0)
    mean = (gamma0 * prior.loc + (seen * weights.mean).sum(1)) / jnp.where(is_free, gamma, 1)
    loc = jnp.where(is_free, mean, prior.loc)
    rate = (
        prior.rate
        + (
            (seen * _squares(weights, loc)).sum(1)
            + jnp.where(is_free, gamma0 * (loc - prior.loc) ** 2, 0)
        )
        / 2
    )
    return Common(
        loc, gamma, jnp.where(is_known, prior.concentration, prior.concentration + num / 2), rate
    )


def _squares(weights: Weights, loc: Array) -> Array:
    # E (w - loc)^2 [class, group, weight].
    return jnp.diagonal(weights.covariance, axis1=-2, axis2=-1) + (weights.mean - loc[:, None]) ** 2


def weights_terms(common: Common, weights: Weights) -> tuple[Array, ...]:
    """Terms, by class, group and weight, whose sum is E log p(w | zeta, lambda) + H(w)."""
    # 1 / gamma is 0 where zeta is known.
    quadratic = (
        precision_of(common)[:, None] * _squares(weights, common.loc) + 1 / common.gamma[:, None]
    )
    entropy = log_diagonal(jnp.linalg.cholesky(weights.covariance)) + 1 / 2
    return (gamma_means(common[2:])[1][:, None] - quadratic) / 2, entropy


def common_divergence(common: Common, prior: Common) -> Array:
    """KL(q(zeta, lambda) | prior) of each weight [class, weight]."""
    is_free = jnp.isfinite(prior.gamma)
    ratio = jnp.where(is_free, prior.gamma, 1) / jnp.where(is_free, common.gamma, 1)
    distance = (
        jnp.where(is_free, prior.gamma, 0) * precision_of(common) * (common.loc - prior.loc) ** 2
    )
    of_loc = jnp.where(is_free, ratio - 1 - jnp.log(ratio) + distance, 0) / 2
    return of_loc + gamma_divergence(common[2:], prior[2:])
