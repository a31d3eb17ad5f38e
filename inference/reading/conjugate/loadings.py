"""Features that are sums of factors which the row's group shows: what they say of a row's factors,
and what rows say of the loadings.

    x[i, p] ~ Normal(L[p] . (b[h] * u), 1 / psi[p])   where seen,   u = (s[i], 1),   L[p] = (loadings, centre),   h the group of row i

`b` is 0 or 1 for each factor, and 1 for the centre. A row's features are a quadratic form in u, as
the blocks of `inference.reading.conjugate.quadratic`:

    log p(x_i | u, h) = const_i + (shown_h * slope_i) . u - u' (both_h * matrix_i) u / 2,                                       (1)

`matrix` and `slope` sums over the features that are seen, `shown` and `both` b and b b', * element
by element. Under q = prod_p q(L_p) prod q(b) q(psi) q(beta) each is a product of means. Entries of
q(L_p) are normal and depend on each other, for they are told apart by the same rows; and q(b, pi)
is joint, where each b has a pi of its own: pi is then as if it had been summed out. The other joint
factor, q(b, L), is out of reach: loadings are those of all groups.

    loadings  A[k, p] ~ Normal(loc, 1 / beta[k]),  beta ~ Gamma, or known       psi ~ Gamma for each feature, or known
    centre    c[p] ~ Normal(loc, scale), or there is none                       b ~ Bernoulli(pi), pi ~ Beta, or known, or all are 1

Cost for n rows, P features, K factors: n P K^2 for (1) and for the sums, P K^3 an update of the
loadings.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import xlogy

from inference.reading.conjugate.normal import half_log_det
from inference.reading.conjugate.pairs import gamma_divergence, gamma_means
from inference.reading.conjugate.quadratic import inverse_of

__all__ = [
    "Linear",
    "LinearPrior",
    "LinearSums",
    "Told",
    "of_rows",
    "posterior",
    "shown_posterior",
    "surprise",
    "told",
    "told_at",
]

NUM_ROUNDS = 2  # of loadings, their precision and the noise, which wait for each other

Pair = tuple[Array, Array]


class LinearPrior(NamedTuple):
    """Numbers of the priors. Of a Gamma (concentration, rate); of a known number (it, infinity)."""

    loc: Array  # of the loadings and the centre [feature, entry]
    centre: Array  # precision of the centre [feature]
    beta: Pair  # [factor]
    noise: Pair  # [feature]
    share: Array  # how probable it is that a group shows a factor [group, factor]
    counts: Pair | None  # of a Beta behind it, [group, factor]


class Linear(NamedTuple):
    """q of the loadings and all that belongs to them."""

    mean: Array  # [feature, entry]
    covariance: Array  # [feature, entry, entry]
    beta: Pair
    noise: Pair
    shown: Array  # E b [group, entry]


class Told(NamedTuple):
    """Means of what (1) is made of."""

    mean: Array  # E L [feature, entry]
    second: Array  # E L L' [feature, entry, entry]
    noise: Array  # E psi [feature]
    log_noise: Array  # E log psi
    shown: Array  # E b [group, entry]
    both: Array  # E b b' [group, entry, entry]


class LinearSums(NamedTuple):
    """Over rows, of each seen feature."""

    moments: Array  # E (b * u) (b * u)' [feature, entry, entry]
    products: Array  # x E (b * u) [feature, entry]


def told(linear: Linear) -> Told:
    """Under q."""
    noise, log_noise = gamma_means(linear.noise)
    second = linear.covariance + _outer(linear.mean)
    return Told(linear.mean, second, noise, log_noise, linear.shown, _both(linear.shown))


def told_at(loadings: Array, noise: Array, shown: Array) -> Told:
    """At known values."""
    return Told(loadings, _outer(loadings), noise, jnp.log(noise), shown, _outer(shown))


def of_rows(told: Told, x: Array, seen: Array) -> tuple[Array, Array, Array]:
    """const [row], matrix [row, entry, entry] and slope [row, entry] of (1); x is 0 where `seen`
    is 0.
    """
    weight, size = seen * told.noise[None], told.mean.shape[1]
    const = (seen @ (told.log_noise - math.log(2 * math.pi)) - jnp.sum(weight * x**2, 1)) / 2
    return (
        const,
        (weight @ told.second.reshape(-1, size * size)).reshape(-1, size, size),
        (weight * x) @ told.mean,
    )


def posterior(
    prior: LinearPrior, before: Linear, sums: LinearSums, count: Array, squares: Array
) -> Linear:
    """q of loadings, their precisions and the noise, in turns; `count` and `squares` are sums of 1
    and x^2 over what is seen [feature].
    """

    def turn(_, at: Linear) -> Linear:
        noise, weight = gamma_means(at.noise)[0], _weight(prior, gamma_means(at.beta)[0])
        precision = (
            noise[:, None, None] * sums.moments
            + weight[:, :, None] * jnp.eye(weight.shape[1], dtype=weight.dtype)[None]
        )
        covariance = inverse_of(jnp.linalg.cholesky(precision))
        mean = jnp.einsum(
            "pij,pj->pi", covariance, noise[:, None] * sums.products + weight * prior.loc
        )
        away = (_variance(covariance) + (mean - prior.loc) ** 2)[:, :-1]
        beta = _after(prior.beta, len(mean) / 2, away.sum(0) / 2)
        rest = (
            squares
            - 2 * jnp.sum(mean * sums.products, 1)
            + jnp.einsum("pij,pij->p", covariance + _outer(mean), sums.moments)
        )
        return Linear(mean, covariance, beta, _after(prior.noise, count / 2, rest / 2), at.shown)

    return jax.lax.fori_loop(0, NUM_ROUNDS, turn, before)


def shown_posterior(prior: LinearPrior, before: Array, moments: Array, products: Array) -> Array:
    """E b of each factor in turn, from sums over the rows of a group of matrix * E u u' [group,
    entry, entry] and slope * E u.
    """
    log_odds = jnp.log(prior.share) - jnp.log1p(-prior.share)

    def turn(k: Array, shown: Array) -> Array:
        with_others = jnp.einsum("hj,hj->h", moments[:, k], shown) - moments[:, k, k] * shown[:, k]
        gain = products[:, k] - moments[:, k, k] / 2 - with_others
        return shown.at[:, k].set(jax.nn.sigmoid(log_odds[:, k] + gain))

    return jax.lax.fori_loop(0, prior.share.shape[1], turn, before)


def surprise(prior: LinearPrior, linear: Linear) -> Array:
    """KL(q | prior): what it takes from the evidence bound."""
    beta, log_beta = gamma_means(linear.beta)
    log_weight = jnp.concatenate(
        [
            jnp.broadcast_to(log_beta, (len(linear.mean), len(log_beta))),
            jnp.log(prior.centre)[:, None],
        ],
        1,
    )
    away = _variance(linear.covariance) + (linear.mean - prior.loc) ** 2
    quadratic = jnp.sum(_weight(prior, beta) * away - log_weight - 1) / 2
    of_loadings = quadratic - jnp.sum(half_log_det(jnp.linalg.cholesky(linear.covariance)))
    q = linear.shown[:, :-1]
    of_shown = (
        xlogy(q, q) + xlogy(1 - q, 1 - q) - xlogy(q, prior.share) - xlogy(1 - q, 1 - prior.share)
    )
    of_gammas = ((linear.beta, prior.beta), (linear.noise, prior.noise))
    return (
        of_loadings
        + sum(jnp.sum(gamma_divergence(*each)) for each in of_gammas)
        + jnp.sum(of_shown)
    )


def _weight(prior: LinearPrior, beta: Array) -> Array:
    """E of the precision of each entry [feature, entry]."""
    return jnp.concatenate(
        [jnp.broadcast_to(beta, (len(prior.centre), len(beta))), prior.centre[:, None]], 1
    )


def _both(shown: Array) -> Array:
    """E b b': b is its own square."""
    identity = jnp.eye(shown.shape[1], dtype=shown.dtype)[None]
    return _outer(shown) * (1 - identity) + shown[:, :, None] * identity


def _after(prior: Pair, concentration: Array | float, rate: Array) -> Pair:
    a, b = prior
    return jnp.where(jnp.isinf(b), a, a + concentration), b + rate


def _variance(covariance: Array) -> Array:
    return jnp.diagonal(covariance, axis1=-2, axis2=-1)


def _outer(vectors: Array) -> Array:
    return vectors[:, :, None] * vectors[:, None]
