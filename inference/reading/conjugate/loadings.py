"""Factor analysis within a mixture: features that are noisy sums of the factors of a row.

    x[i, p] ~ Normal(L[p] . (b[h] * u), 1 / psi[p])   where seen,   u = (s[i], 1),
    L[p] = (loadings, centre),   h the group of row i

`b` is 0 or 1: whether a group uses a factor; it is 1 for the centre. The log density of the
features of a row is a quadratic form in u, like that of the blocks in
`inference.reading.conjugate.quadratic`:

    log p(x_i | u, h) = const_i + (shown_h * slope_i) . u - u' (both_h * matrix_i) u / 2        (1)

`matrix` and `slope` are sums over the features that are seen, `shown` and `both` are b and b b',
and * is element by element. Under q = prod_p q(L_p) prod q(b) q(psi) q(beta) the mean of each term
is a product of means. q(L_p) is a joint Normal of all entries of L_p, because the same rows inform
them. Where each b has a pi of its own, q(b, pi) is joint, so pi is integrated out. q(b, L) is not
joint, because all groups share the loadings.

    loadings  A[k, p] ~ Normal(loc, 1 / beta[k]),  beta ~ Gamma, or known
    centre    c[p] ~ Normal(loc, scale), or there is none
    noise     psi[p] ~ Gamma, or known
    shown     b ~ Bernoulli(pi), pi ~ Beta, or known; or all b are 1

Cost for n rows, P features, K factors: n P K^2 for (1) and for the sums, P K^3 for an update of the
loadings.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import xlogy
from jaxtyping import Float, Int

from inference.reading.conjugate.normal import half_log_det
from inference.reading.conjugate.pairs import gamma_divergence, gamma_means
from inference.reading.conjugate.quadratic import inverse_of, outer

__all__ = [
    "Linear",
    "LinearPrior",
    "LinearSums",
    "LoadingMoments",
    "known_loadings",
    "linear_divergence",
    "linear_posterior",
    "loading_moments",
    "row_forms",
    "shown_posterior",
]

Pair = tuple[Array, Array]


class LinearPrior(NamedTuple):
    """Hyper-parameters: a Gamma is (concentration, rate), a known value x is (x, infinity)."""

    loc: Array  # of the loadings and the centre [feature, entry]
    centre: Array  # precision of the centre [feature]
    beta: Pair  # [factor]
    noise: Pair  # [feature]
    share: Array  # probability that a group uses a factor [group, factor]
    counts: Pair | None  # concentrations of a Beta prior of that probability [group, factor]


class Linear(NamedTuple):
    """q of the loadings, the centre, their precisions, the noise, and b."""

    mean: Array  # [feature, entry]
    covariance: Array  # [feature, entry, entry]
    beta: Pair
    noise: Pair
    shown: Array  # E b [group, entry]


class LoadingMoments(NamedTuple):
    """The means under q of which (1) is computed."""

    mean: Array  # E L [feature, entry]
    second: Array  # E L L' [feature, entry, entry]
    noise: Array  # E psi [feature]
    log_noise: Array  # E log psi
    shown: Array  # E b [group, entry]
    both: Array  # E b b' [group, entry, entry]


class LinearSums(NamedTuple):
    """Sums over the rows in which a feature is seen."""

    moments: Array  # E (b * u) (b * u)' [feature, entry, entry]
    products: Array  # x E (b * u) [feature, entry]
    count: Array  # 1 [feature]
    squares: Array  # x^2 [feature]


def loading_moments(linear: Linear) -> LoadingMoments:
    """The means under q of the parameters in equation (1) of this module."""
    shown, identity = linear.shown, jnp.eye(linear.shown.shape[1], dtype=linear.shown.dtype)[None]
    both = outer(shown) * (1 - identity) + shown[:, :, None] * identity  # b is its own square
    return LoadingMoments(
        linear.mean, linear.covariance + outer(linear.mean), *gamma_means(linear.noise), shown, both
    )


def known_loadings(
    loadings: Float[Array, "feature entry"],
    noise: Float[Array, " feature"],
    shown: Float[Array, "group entry"],
) -> LoadingMoments:
    """The moments of known values, in place of means under q."""
    return LoadingMoments(loadings, outer(loadings), noise, jnp.log(noise), shown, outer(shown))


def row_forms(
    moments: LoadingMoments, x: Float[Array, "row feature"], seen: Float[Array, "row feature"]
) -> tuple[Array, Array, Array]:
    """The parts of (1): const [row], matrix [row, entry, entry] and slope [row, entry].

    Args:
        moments: The means of the parameters.
        x: The features, 0 where missing.
        seen: 1 where a feature is seen, else 0.
    """
    weight, size = seen * moments.noise[None], moments.mean.shape[1]
    const = (seen @ (moments.log_noise - math.log(2 * math.pi)) - jnp.sum(weight * x**2, 1)) / 2
    matrix = (weight @ moments.second.reshape(-1, size * size)).reshape(-1, size, size)
    return const, matrix, (weight * x) @ moments.mean


def linear_posterior(prior: LinearPrior, before: Linear, sums: LinearSums) -> Linear:
    """Updates q of the loadings, their precisions and the noise, each given the others, twice."""

    def turn(_, at: Linear) -> Linear:
        noise, weight = gamma_means(at.noise)[0], _entries(gamma_means(at.beta)[0], prior.centre)
        precision = (
            noise[:, None, None] * sums.moments
            + weight[:, :, None] * jnp.eye(weight.shape[1], dtype=weight.dtype)[None]
        )
        covariance = inverse_of(jnp.linalg.cholesky(precision))
        mean = jnp.einsum(
            "pij,pj->pi", covariance, noise[:, None] * sums.products + weight * prior.loc
        )
        second = jnp.einsum("pij,pij->p", covariance + outer(mean), sums.moments)
        beta = _gamma_posterior(
            prior.beta,
            len(mean) / 2,
            (jnp.diagonal(covariance, axis1=-2, axis2=-1) + (mean - prior.loc) ** 2)[:, :-1].sum(0)
            / 2,
        )
        return Linear(
            mean,
            covariance,
            beta,
            _gamma_posterior(
                prior.noise,
                sums.count / 2,
                (sums.squares - 2 * jnp.sum(mean * sums.products, 1) + second) / 2,
            ),
            at.shown,
        )

    return jax.lax.fori_loop(0, 2, turn, before)


def shown_posterior(
    prior: LinearPrior,
    before: Float[Array, "group entry"],
    moments: Float[Array, "group entry entry"],
    products: Float[Array, "group entry"],
) -> Float[Array, "group entry"]:
    """Updates E b of each factor in turn.

    Args:
        prior: The hyper-parameters.
        before: E b before the update.
        moments: Sums over the rows of a group of matrix * E u u'.
        products: Sums over the rows of a group of slope * E u.
    """
    log_odds = jnp.log(prior.share) - jnp.log1p(-prior.share)

    def turn(k: Int[Array, ""], shown: Float[Array, "group entry"]) -> Float[Array, "group entry"]:
        with_others = jnp.einsum("hj,hj->h", moments[:, k], shown) - moments[:, k, k] * shown[:, k]
        return shown.at[:, k].set(
            jax.nn.sigmoid(log_odds[:, k] + (products[:, k] - moments[:, k, k] / 2 - with_others))
        )

    return jax.lax.fori_loop(0, prior.share.shape[1], turn, before)


def linear_divergence(prior: LinearPrior, linear: Linear) -> Array:
    """KL(q | prior), which the evidence lower bound subtracts."""
    beta, log_beta = gamma_means(linear.beta)
    away = jnp.diagonal(linear.covariance, axis1=-2, axis2=-1) + (linear.mean - prior.loc) ** 2
    quadratic = (
        jnp.sum(_entries(beta, prior.centre) * away - _entries(log_beta, jnp.log(prior.centre)) - 1)
        / 2
    )
    q, share = linear.shown[:, :-1], prior.share
    of_shown = xlogy(q, q) + xlogy(1 - q, 1 - q) - xlogy(q, share) - xlogy(1 - q, 1 - share)
    return (
        quadratic
        - jnp.sum(half_log_det(jnp.linalg.cholesky(linear.covariance)))
        + jnp.sum(gamma_divergence(linear.beta, prior.beta))
        + jnp.sum(gamma_divergence(linear.noise, prior.noise))
        + jnp.sum(of_shown)
    )


def _entries(
    of_factor: Float[Array, " factor"], of_centre: Float[Array, " feature"]
) -> Float[Array, "feature entry"]:
    # [feature, entry] from numbers of each factor and of the centre of each feature.
    factors = jnp.broadcast_to(of_factor, (len(of_centre), len(of_factor)))
    return jnp.concatenate([factors, of_centre[:, None]], 1)


def _gamma_posterior(prior: Pair, concentration: Array | float, rate: Array) -> Pair:
    a, b = prior
    return jnp.where(jnp.isinf(b), a, a + concentration), b + rate
