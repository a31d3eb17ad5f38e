"""Predictions of the group, the missing entries and the label of rows that were not fitted.

The posterior of the parameters is integrated out. A row's group is h with probability proportional
to E pi_h times the predictive density of the entries that are seen. For Normal features with a
Normal-Wishart factor (loc m, kappa, nu, rate R) of width P that is a Student t of nu + 1 - P
degrees of freedom with centre m_o and scale (kappa + 1) / (kappa (nu + 1 - P)) R_oo. Given the
group the missing features are a Student t again. Only the label probabilities of a probit expert
are approximate: scores are taken as Normal, with the means and covariances that they have under
q(w) and that Student t. The scores of several classes are correlated where they depend on the same
missing features (`inference.maths.orthants`).

Cost of a row: K P^3 for K groups; with C > 2 classes and missing features K C^2 more for each of
256 points, 16 for C = 3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaln, log_ndtr
from jaxtyping import Float, Int

from inference.kernels.coordinate_ascent.posterior import Factors
from inference.maths.orthants import cubature_points, log_orthant
from inference.reading.conjugate.normal import WishartHyper
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import Weights, outer
from inference.reading.stick_mixture.structure import Assignment, MixtureRows

__all__ = ["Prediction", "in_chunks", "log_label", "log_weights", "predict_rows"]

CHUNK = 64  # rows


class Prediction(NamedTuple):
    """The prediction of each row; its label enters `log_label` alone."""

    log_group: Array  # log probability of each group [row, group]
    log_label: Array  # of the label that the row has, 0 where it has none [row]
    mean: Array  # of the features, the value where seen [row, feature]
    deviation: Array  # standard deviation, 0 where seen [row, feature]


def predict_rows(found: Assignment, factors: Factors, rows: MixtureRows) -> Prediction:
    """The predictions of rows, as if they were new."""
    float_of = lambda part: np.asarray(part, factors.sticks[0].dtype)
    given = (*map(float_of, (rows.features, rows.extras, rows.signs)), rows.task)
    given = (*given, tuple(map(float_of, rows.columns)))
    # Correlated scores cost more.
    is_joint = np.isnan(rows.features).any(1) & (rows.signs.shape[1] > 1)
    places = [at for at in (np.flatnonzero(~is_joint), np.flatnonzero(is_joint)) if len(at)]
    families = tuple(block.family for block in found.columns)
    parts = [
        in_chunks(
            partial(_predicted, families, rows.design, bool(is_joint[at[0]]), factors),
            jax.tree.map(lambda leaf, at=at: leaf[at], given),
        )
        for at in places
    ]
    order = np.argsort(np.concatenate(places))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)


def in_chunks(function: Callable, rows: Any) -> Any:
    """What a compiled function returns for rows, in chunks of one size, so it is compiled once.

    Args:
        function: A function of a tree of arrays, each with `CHUNK` rows, that returns such a tree.
        rows: A tree of arrays with any number of rows.
    """
    num_rows = len(jax.tree.leaves(rows)[0])
    parts = []
    for start in range(0, num_rows, CHUNK):
        at = np.minimum(np.arange(start, start + CHUNK), num_rows - 1)
        found = jax.device_get(function(jax.tree.map(lambda leaf, at=at: leaf[at], rows)))
        parts.append(jax.tree.map(lambda leaf, left=num_rows - start: leaf[:left], found))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _predicted(
    families: tuple[Any, ...], design: tuple[int, ...], is_joint: bool, factors: Factors, rows: Any
) -> Prediction:
    log_weight = log_weights(factors)
    dtype = log_weight.dtype

    def of_row(
        x: Float[Array, " feature"],
        extras: Float[Array, " extra"],
        signs: Float[Array, " class"],
        task: Int[Array, ""],
        columns: tuple[Array, ...],
    ) -> Prediction:
        log_group = log_weight[task]
        for family, hyper, values in zip(families, factors.columns, columns, strict=True):
            log_group = log_group + jnp.sum(family.log_predictive(hyper, values), -1)
        mean = jnp.zeros((len(log_group), 0), dtype)
        covariance = jnp.zeros((len(log_group), 0, 0), dtype)
        if factors.features is not None:
            log_density, mean, covariance = _student(factors.features, x)
            log_group = log_group + log_density
        log_group = jax.nn.log_softmax(log_group)
        log_probability = jnp.zeros((), dtype)
        if factors.weights is not None:
            beside = jnp.concatenate([jnp.ones(1, dtype), extras])
            entries = jnp.concatenate([mean, jnp.broadcast_to(beside, (len(mean), len(beside)))], 1)
            log_probability = jax.nn.logsumexp(
                log_group + log_label(factors.weights, signs, design, entries, covariance, is_joint)
            )
        rho = jnp.exp(log_group)
        whole = jnp.where(jnp.isnan(x), rho @ mean, x) if mean.shape[1] else mean[0]
        variance = rho @ (jnp.diagonal(covariance, axis1=1, axis2=2) + (mean - whole[None]) ** 2)
        return Prediction(
            log_group, log_probability, whole, jnp.sqrt(jnp.where(jnp.isnan(x), variance, 0))
        )

    return jax.vmap(of_row)(*rows)


@jax.jit
def log_weights(factors: Factors) -> Float[Array, "task group"]:
    """The log of the posterior mean weight of each group in each task."""
    c1, c0 = factors.sticks
    log_weight = log_sticks(jnp.log(c1 / (c0 + c1)), jnp.log(c0 / (c0 + c1)))
    if factors.upper is None:
        return log_weight
    return jax.nn.logsumexp(log_weight[..., None] + factors.upper.log_share, 1)


def _student(hyper: WishartHyper, x: Array) -> tuple[Array, Array, Array]:
    # The log density of what a row shows, and the mean and covariance of all its features given
    # that, for each group.
    loc, kappa, nu, rate = hyper
    freedom, seen = nu + 1 - len(x), ~jnp.isnan(x)
    scale = rate * ((kappa + 1) / (kappa * freedom))[:, None, None]
    both, num_seen = outer(seen), jnp.sum(seen).astype(x.dtype)
    root = jnp.linalg.cholesky(jnp.where(both[None], scale, jnp.eye(len(x), dtype=x.dtype)[None]))
    gap = jnp.where(seen[None], x[None] - loc, 0)
    distance = jnp.sum(solve_triangular(root, gap[..., None], lower=True)[..., 0] ** 2, -1)
    log_density = (
        gammaln((freedom + num_seen) / 2)
        - gammaln(freedom / 2)
        - num_seen / 2 * jnp.log(freedom * jnp.pi)
        - jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), -1)
        - (freedom + num_seen) / 2 * jnp.log1p(distance / freedom)
    )
    across = jnp.where(seen[None, :, None] & ~seen[None, None], scale, 0)  # [group, seen, missing]
    slope = cho_solve((root, True), across)
    mean = jnp.where(seen[None], x[None], loc + jnp.einsum("ksm,ks->km", slope, gap))
    rest = jnp.where(outer(~seen)[None], scale - across.mT @ slope, 0)
    # The covariance of a Student t is scale times degrees / (degrees - 2).
    return (
        log_density,
        mean,
        rest * ((freedom + distance) / (freedom + num_seen - 2))[:, None, None],
    )


def log_label(
    weights: Weights,
    signs: Float[Array, " class"],
    design: tuple[int, ...],
    entries: Float[Array, "group entry"],
    covariance: Float[Array, "group uncertain uncertain"],
    is_joint: bool = True,
) -> Float[Array, " group"]:
    """The log probability that the soft labels of a row have these signs.

    Args:
        weights: q(w).
        signs: The signs; 0 where either is possible.
        design: Which entry each weight multiplies.
        entries: The means of the entries in each group.
        covariance: The covariance of the first entries; others are certain.
        is_joint: Whether scores may be correlated.
    """
    rest = entries.shape[1] - covariance.shape[1]
    at = jnp.array(design)
    seen, spread = (
        entries[:, at],
        jnp.pad(covariance, ((0, 0), (0, rest), (0, rest)))[:, at][:, :, at],
    )
    score = jnp.einsum("ckj,kj->kc", weights.mean, seen)
    own = 1 + jnp.einsum("ckij,kij->kc", weights.covariance, spread + outer(seen))
    signs = jnp.broadcast_to(signs[None], score.shape)
    if is_joint and score.shape[1] > 1:
        shared = jnp.einsum("cki,kij,dkj->kcd", weights.mean, spread, weights.mean)
        return log_orthant(
            score,
            shared + own[:, None] * jnp.eye(score.shape[1], dtype=score.dtype)[None],
            signs,
            cubature_points(score.shape[1], 16 if score.shape[1] == 2 else 256),
        )
    variance = own + jnp.einsum("cki,kij,ckj->kc", weights.mean, spread, weights.mean)
    return jnp.sum(jnp.where(signs == 0, 0, log_ndtr(signs * score / jnp.sqrt(variance))), 1)
