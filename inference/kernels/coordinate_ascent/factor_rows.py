"""The rows of a sweep among common factors: q(z) q(s, t | z) of each row.

A row has the group z, the factors s and the soft labels t. It receives messages, which are expected
log densities as functions of u = (s, 1). Group h sends const_h - u' M_h u / 2, the features of the
row send (1) of `inference.reading.conjugate.loadings`, and an expert c whose soft label has a sign
sends

    - (t_c - w_ch . u)^2 / 2 - u' Cov(w_ch) u / 2,      t_c on the side of 0 of its sign.

A soft label is joint with the factors. Without it s is Normal, with precision Q_h (the sum of all
matrices) and mean m_h. Then t ~ Normal(w . (m, 1), v), where v = 1 + g . w_s and g = Q^-1 w_s.
Truncated at 0 it has the mean E t and the variance v (1 - lost), and

    s | t ~ Normal(m + g (t - w . (m, 1)) / v, Q^-1 - g g' / v),
    E s = m + g (E t - w . (m, 1)) / v,     Cov s = Q^-1 - g g' lost / v,
    q(h) ~ exp(const + m' Q m / 2 - log|Q| / 2) P(t on its side).

With several soft labels, as with more than two classes, the last one with a sign is joint. The
others are factors of their own, q(t_c | z).

Cost of a row with P features, K factors, H groups: P K^2 + H K^3.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import cho_solve
from jax.scipy.special import log_ndtr
from jaxtyping import Float

from inference.distributions.truncated_normal import one_sided
from inference.kernels.coordinate_ascent.rows import (
    Message,
    SufficientSums,
    as_floats,
    rounded,
    soft_labels,
)
from inference.reading.conjugate.loadings import LinearSums, LoadingMoments, row_forms
from inference.reading.conjugate.quadratic import outer

__all__ = [
    "FactorChunks",
    "FactorPosterior",
    "GroupConditional",
    "factor_chunks",
    "factor_posterior",
    "group_conditional",
    "loading_sums",
    "shown_sums",
    "sum_chunks",
]


class FactorChunks(NamedTuple):
    """Rows [chunk, place, ...]."""

    x: Array  # [..., feature], 0 where missing
    seen: Array  # 1 or 0
    signs: Array  # of the soft labels [..., class]; 0 where the label leaves the sign open
    weight: Array  # 1, or 0 where the place is empty


class GroupConditional(NamedTuple):
    """q(s, t | z) without the last soft label, and the Normal of that label [place, group, ...]."""

    log_joint: Array
    mean: Array
    covariance: Array
    pull: Array  # g
    loc: Array  # of the last soft label
    variance: Array
    last: Array  # the class of the last soft label, one 1 or none [place, class]


class FactorPosterior(NamedTuple):
    """q of rows."""

    log_rho: Array  # [place, group]
    mean: Array  # E u [place, group, entry]
    second: Array  # E u u'
    products: Array  # E t u [place, class, group, entry]
    score: Array  # E w . u [place, class, group]
    bound: Array  # [place]


def factor_chunks(
    x: Float[np.ndarray, "row feature"],
    signs: Float[np.ndarray, "row class"],
    num_groups: int,
    size: int,
) -> FactorChunks:
    """The rows in chunks of at most 2 000 000 numbers.

    A row counts as num_groups x size^2 numbers, where `size` is the number of entries of u.
    """
    num_rows = len(x)
    num_chunks = -(-num_rows // max(1, min(num_rows, 2_000_000 // (num_groups * size**2))))
    row = np.arange(num_chunks * rounded(-(-num_rows // num_chunks), 16)).reshape(num_chunks, -1)
    at, seen = np.minimum(row, num_rows - 1), ~np.isnan(x)
    parts = np.where(seen, x, 0)[at], seen[at], signs[at], row < num_rows
    return FactorChunks(*as_floats(parts))


def group_conditional(
    message: Message,
    moments: LoadingMoments,
    chunk: FactorChunks,
    score: Float[Array, "place class group"],
) -> GroupConditional:
    """q(s, t | z) of the rows of a chunk in each group.

    Args:
        message: The messages of the groups and of their experts.
        moments: The means of the loadings.
        chunk: The rows.
        score: The locations of the soft labels that are factors of their own.
    """
    has_sign, classes = chunk.signs != 0, jnp.arange(chunk.signs.shape[1])
    largest = jnp.max(jnp.where(has_sign, classes, -1), axis=1, keepdims=True, initial=-1)
    last = has_sign & (classes == largest)
    soft, term = soft_labels(score, jnp.where(last, 0, chunk.signs)[..., None])
    last, others = last.astype(score.dtype), (has_sign & ~last).astype(score.dtype)
    const, matrix, slope = row_forms(moments, chunk.x, chunk.seen)
    quadratic = (
        message.matrix[None]
        + moments.both[None] * matrix[:, None]
        + jnp.einsum("nc,chij->nhij", last, message.covariance)
        + jnp.einsum("nc,chij->nhij", others, message.second())
    )
    answers = message.answers
    linear = moments.shown[None] * slope[:, None] + jnp.einsum("nch,chi->nhi", soft, answers)
    root = jnp.linalg.cholesky(quadratic[..., :-1, :-1])
    pushed = linear[..., :-1] - quadratic[..., :-1, -1]
    covariance = cho_solve(
        (root, True), jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape)
    )
    mean = jnp.einsum("nhij,nhj->nhi", covariance, pushed)
    log_det = 2 * jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)).sum(-1)
    w = jnp.einsum("nc,chi->nhi", last, answers)
    pull = jnp.einsum("nhij,nhj->nhi", covariance, w[..., :-1])
    loc = jnp.sum(w[..., :-1] * mean, -1) + w[..., -1]
    variance = 1 + jnp.sum(pull * w[..., :-1], -1)
    sign = jnp.sum(last * chunk.signs, 1)[:, None]
    log_joint = (
        (message.const[None] + const[:, None])
        + (linear[..., -1] - quadratic[..., -1, -1] / 2 + term.sum(1))
        + (jnp.sum(mean * pushed, -1) - log_det + root.shape[-1] * math.log(2 * math.pi)) / 2
        + jnp.where(sign == 0, 0, log_ndtr(sign * loc / jnp.sqrt(variance)))
    )
    return GroupConditional(log_joint, mean, covariance, pull, loc, variance, last)


def factor_posterior(
    message: Message,
    moments: LoadingMoments,
    chunk: FactorChunks,
    score: Float[Array, "place class group"],
) -> FactorPosterior:
    """q of the rows of a chunk.

    Its `score` has the new locations of the soft labels that are factors of their own. Arguments
    are those of `group_conditional`.
    """
    given = group_conditional(message, moments, chunk, score)
    sign, scale = jnp.sum(given.last * chunk.signs, 1)[:, None], jnp.sqrt(given.variance)
    truncated = one_sided(sign * given.loc / scale)
    moved = sign * truncated.shift * scale
    mean = given.mean + given.pull * (moved / given.variance)[..., None]
    lost = jnp.where(sign == 0, 0, truncated.lost)
    whole = jnp.concatenate([mean, jnp.ones_like(mean[..., :1])], -1)
    score = jnp.einsum("nhi,chi->nch", whole, message.answers)
    others = soft_labels(score, (chunk.signs * (1 - given.last))[..., None])[0]
    tie = jnp.pad(given.pull * (1 - lost)[..., None], ((0, 0), (0, 0), (0, 1)))
    t = others + given.last[..., None] * (given.loc + moved)[:, None]
    products = t[..., None] * whole[:, None] + given.last[..., None, None] * tie[:, None]
    bound = jax.nn.logsumexp(given.log_joint, axis=1)
    return FactorPosterior(
        given.log_joint - bound[:, None],
        whole,
        outer(whole)
        .at[..., :-1, :-1]
        .add(given.covariance - outer(given.pull) * (lost / given.variance)[..., None, None]),
        products,
        score,
        bound,
    )


def loading_sums(
    moments: LoadingMoments,
    chunk: FactorChunks,
    found: FactorPosterior,
    rho: Float[Array, "place group"],
) -> LinearSums:
    """The sums over the rows of a chunk from which q of the loadings follows.

    Args:
        moments: The means of the loadings.
        chunk: The rows.
        found: q of the rows.
        rho: The responsibilities; 0 in an empty place.
    """
    shown = jnp.einsum("nh,hi,nhi->ni", rho, moments.shown, found.mean)
    both = jnp.einsum("nh,hij,nhij->nij", rho, moments.both, found.second)
    return LinearSums(
        jnp.einsum("np,nij->pij", chunk.seen, both),
        (chunk.seen * chunk.x).T @ shown,
        chunk.weight @ chunk.seen,
        chunk.weight @ chunk.x**2,
    )


def shown_sums(
    moments: LoadingMoments,
    chunk: FactorChunks,
    found: FactorPosterior,
    rho: Float[Array, "place group"],
) -> tuple[Array, Array]:
    """The sums over the rows of a chunk from which q(b) of the factors shown to groups follows.

    They are of matrix * E u u' [group, entry, entry] and of slope * E u [group, entry]. Arguments
    are those of `loading_sums`.
    """
    _, matrix, slope = row_forms(moments, chunk.x, chunk.seen)
    return jnp.einsum("nh,nij,nhij->hij", rho, matrix, found.second), jnp.einsum(
        "nh,ni,nhi->hi", rho, slope, found.mean
    )


def sum_chunks(
    message: Message,
    moments: LoadingMoments,
    chunks: FactorChunks,
    score: Float[Array, "chunk place class group"],
    summary: Callable,
) -> tuple[tuple[SufficientSums, Any], Array]:
    """The sums over all rows for groups and experts, the sums of `summary`, and the new `score`.

    Args:
        message: The messages of the groups and of their experts.
        moments: The means of the loadings.
        chunks: The rows.
        score: The locations of the soft labels that are factors of their own.
        summary: `loading_sums` or `shown_sums`.
    """

    def visit(chunk: FactorChunks, score: Array) -> tuple[tuple[SufficientSums, Any], Array]:
        found = factor_posterior(message, moments, chunk, score)
        rho = jnp.exp(found.log_rho) * chunk.weight[:, None]
        second = rho[..., None, None] * found.second
        asked = jnp.einsum("nc,nhij->chij", (chunk.signs != 0).astype(rho.dtype), second)
        parts = (
            second.sum(0),
            asked,
            jnp.einsum("nh,nchi->chi", rho, found.products),
            jnp.zeros((0, rho.shape[1]), rho.dtype),
        )
        sums = SufficientSums(*(part[None] for part in parts), jnp.sum(found.bound * chunk.weight))
        return (sums, summary(moments, chunk, found, rho)), found.score

    first = jax.eval_shape(visit, *jax.tree.map(lambda leaf: leaf[0], (chunks, score)))[0]

    def add(total: Any, part: tuple[FactorChunks, Array]) -> tuple[Any, Array]:
        sums, score = visit(*part)
        return jax.tree.map(jnp.add, total, sums), score

    return lax.scan(
        add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first), (chunks, score)
    )
