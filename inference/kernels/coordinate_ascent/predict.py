"""What the mean-field posterior of a mixture says of other rows, their missing entries and the
posterior integrated out.

A row's group is h with probability proportional to E pi_h times the predictive density of what the
row shows: of normal features, with (loc m, kappa, nu, rate R) of a normal-Wishart factor of width
P, a Student t of nu + 1 - P degrees of freedom, centre m_o and scale (kappa + 1) / (kappa (nu + 1 -
P)) R_oo. Given the group the missing features are a Student t again; only what a probit expert then
says is approximate: scores are taken for normal, with the means and covariances that they have
under q(w) and that Student t. Those of several classes depend on each other where features are
missing that both depend on (`inference.maths.orthants`).

Cost of a row: K P^3 for K groups; with C > 2 classes and missing features K C^2 more for each of
some points, `NUM_POINTS`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaln, log_ndtr

from inference.kernels.coordinate_ascent.posterior import Factors
from inference.maths.orthants import log_orthant, points_of
from inference.program.compiling import compiled
from inference.reading.conjugate.normal import WishartHyper
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import Weights
from inference.reading.stick_mixture.structure import Assignment, Rows

__all__ = ["Prediction", "log_label", "log_weights", "predict_rows"]

AT_ONCE = 64  # rows
NUM_POINTS = {2: 16}  # by the number of scores that depend on each other
MOST_POINTS = 256  # of three scores and more


class Prediction(NamedTuple):
    """Of each row; its label plays no part but in its own probability."""

    log_group: Array  # log probability of each group [row, group]
    log_label: Array  # of the label that the row has, 0 where it has none [row]
    mean: Array  # of the features, those that are seen as they are [row, feature]
    deviation: Array  # standard deviation, 0 where seen [row, feature]


def predict_rows(found: Assignment, factors: Factors, rows: Rows) -> Prediction:
    """Of rows other than those that were fitted, or the same ones as if they were new."""
    given = jax.tree.map(
        lambda part: jnp.asarray(part, factors.sticks[0].dtype),
        (rows.features, rows.extras, rows.signs, rows.columns),
    )
    given, has_holes = (
        (given, jnp.asarray(rows.task)),
        np.isnan(rows.features).any(1) & (rows.signs.shape[1] > 1),
    )
    # scores that depend on each other cost more
    places = [at for at in (np.flatnonzero(~has_holes), np.flatnonzero(has_holes)) if len(at)]
    parts = [
        _predicted(
            found,
            factors,
            rows.design,
            jax.tree.map(lambda leaf, at=at: leaf[at], given),
            has_holes[at[0]],
        )
        for at in places
    ]
    order = np.argsort(np.concatenate(places))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *parts)


def _predicted(
    found: Assignment, factors: Factors, design: tuple[int, ...], given: Any, is_joint: bool
) -> Prediction:
    log_weight = log_weights(factors)
    dtype = log_weight.dtype

    def of_row(row: tuple[tuple[Array, Array, Array, tuple[Array, ...]], Array]) -> Prediction:
        (x, extras, signs, columns), task = row
        log_group = log_weight[task]
        for block, hyper, values in zip(found.columns, factors.columns, columns, strict=True):
            log_group = log_group + jnp.sum(block.family.log_predictive(hyper, values), -1)
        mean, covariance = (
            jnp.zeros((len(log_group), 0), dtype),
            jnp.zeros((len(log_group), 0, 0), dtype),
        )
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

    return compiled(lambda given: lax.map(of_row, given, batch_size=AT_ONCE), given)(given)


def log_weights(factors: Factors) -> Array:
    """How probable each group is in each task [task, group], the posterior integrated out."""
    c1, c0 = factors.sticks
    log_weight = log_sticks(jnp.log(c1 / (c0 + c1)), jnp.log(c0 / (c0 + c1)))
    return (
        log_weight
        if factors.upper is None
        else jax.nn.logsumexp(log_weight[..., None] + factors.upper.log_share, 1)
    )


def _student(hyper: WishartHyper, x: Array) -> tuple[Array, Array, Array]:
    """Of each group: log density of what a row shows, and mean and covariance of all its
    features given that.
    """
    loc, kappa, nu, rate = hyper
    freedom = nu + 1 - len(x)
    scale = rate * ((kappa + 1) / (kappa * freedom))[:, None, None]
    seen = ~jnp.isnan(x)
    both, num_seen = seen[:, None] & seen[None], jnp.sum(seen).astype(x.dtype)
    root = jnp.linalg.cholesky(jnp.where(both[None], scale, jnp.eye(len(x), dtype=x.dtype)[None]))
    gap = jnp.where(seen[None], x[None] - loc, 0)
    distance = jnp.sum(solve_triangular(root, gap[..., None], lower=True)[..., 0] ** 2, -1)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), -1)
    log_density = (
        gammaln((freedom + num_seen) / 2)
        - gammaln(freedom / 2)
        - num_seen / 2 * jnp.log(freedom * jnp.pi)
        - log_det / 2
    )
    log_density = log_density - (freedom + num_seen) / 2 * jnp.log1p(distance / freedom)
    across = jnp.where(seen[None, :, None] & ~seen[None, None], scale, 0)  # [group, seen, missing]
    slope = cho_solve((root, True), across)
    mean = jnp.where(seen[None], x[None], loc + jnp.einsum("ksm,ks->km", slope, gap))
    rest = jnp.where((~seen[:, None] & ~seen[None])[None], scale - across.mT @ slope, 0)
    # of a Student t: scale times degrees / (degrees - 2)
    spread = (freedom + distance) / (freedom + num_seen - 2)
    return log_density, mean, rest * spread[:, None, None]


def log_label(
    weights: Weights,
    signs: Array,
    design: tuple[int, ...],
    entries: Array,
    covariance: Array,
    is_joint: bool = True,
) -> Array:
    """Log probability that the soft labels lie on these sides of 0 [group]; not `is_joint`: they
    share no entry that is uncertain.
    """
    size, width = entries.shape[1], covariance.shape[1]
    padded = (
        jnp.zeros((len(entries), size, size), entries.dtype).at[:, :width, :width].set(covariance)
    )
    at = jnp.array(design)
    seen, spread = entries[:, at], padded[:, at][:, :, at]
    score = jnp.einsum("ckj,kj->kc", weights.mean, seen)
    own = 1 + jnp.einsum("ckij,kij->kc", weights.covariance, spread + _outer(seen))
    signs = jnp.broadcast_to(signs[None], score.shape)
    if is_joint and score.shape[1] > 1:
        shared = jnp.einsum("cki,kij,dkj->kcd", weights.mean, spread, weights.mean)
        identity = jnp.eye(score.shape[1], dtype=score.dtype)[None]
        points = points_of(score.shape[1], NUM_POINTS.get(score.shape[1], MOST_POINTS))
        return log_orthant(score, shared + own[:, None] * identity, signs, points)
    variance = own + jnp.einsum("cki,kij,ckj->kc", weights.mean, spread, weights.mean)
    return jnp.sum(jnp.where(signs == 0, 0, log_ndtr(signs * score / jnp.sqrt(variance))), 1)


def _outer(vectors: Array) -> Array:
    return vectors[:, :, None] * vectors[:, None]
