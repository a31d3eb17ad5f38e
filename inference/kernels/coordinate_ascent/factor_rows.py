"""The rows of a sweep among common factors: group, factors and soft labels of each row, q(z) q(s, t
| z).

Of u = (s, 1) groups say const_h - u' M_h u / 2, the features of a row (1) of
`inference.reading.conjugate.loadings`, and an expert c that is asked

    - (t_c - w_ch . u)^2 / 2 - u' Cov(w_ch) u / 2,      t_c on the side of 0 that the label says.

Where the label tells of one soft label, it is in the joint factor: without it s is normal, with
precision Q_h (the sum of all matrices) and mean m_h; then t ~ Normal(w . (m, 1), v), v = 1 + g .
w_s and g = Q^-1 w_s; cut at 0 it has the mean E t and v (1 - lost); and

    s | t ~ Normal(m + g (t - w . (m, 1)) / v, Q^-1 - g g' / v),     E s = m + g (E t - w . (m, 1)) / v,   Cov s = Q^-1 - g g' lost / v,
    q(h) ~ exp(const + m' Q m / 2 - log|Q| / 2) P(t on its side).

With several of them, as with more than two classes, that is the last one that is asked; the others
are factors of their own, q(t_c | z).

Cost of a row with P features, K factors, H groups: P K^2 + H K^3.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import cho_solve
from jax.scipy.special import log_ndtr
from jax.scipy.stats import norm

from inference.kernels.coordinate_ascent.rows import Sums, soft_labels
from inference.reading.conjugate.loadings import LinearSums, Told, of_rows

__all__ = [
    "Chunks",
    "Given",
    "Placed",
    "RowSums",
    "Said",
    "given_group",
    "lay_out",
    "place",
    "sum_chunks",
    "summed",
]

MOST_NUMBERS = 2_000_000  # of a chunk: groups x entries^2 for each row


class Chunks(NamedTuple):
    """Rows [chunk, place, ...]."""

    x: Array  # [..., feature], 0 where missing
    seen: Array  # 1 or 0
    signs: Array  # [..., class]: the side of 0 on which a soft label lies; 0 where nothing is known
    row: Array  # number of the row, or that of all rows where the place is empty
    weight: Array  # 1, or 0 where the place is empty


class Said(NamedTuple):
    """What the factors of the groups say of u = (s, 1)."""

    const: Array  # [group], the log weight in it
    matrix: Array  # [group, entry, entry]
    answers: Array  # E w [class, group, entry]
    covariance: Array  # of w [class, group, entry, entry]


class Given(NamedTuple):
    """Of rows in each group: factors without their last soft label, and that; [place, group,
    ...].
    """

    log_joint: Array
    mean: Array
    covariance: Array
    pull: Array  # g
    loc: Array  # of the last soft label
    variance: Array
    last: Array  # which class that is, one 1 or none [place, class]


class Placed(NamedTuple):
    """q of rows."""

    log_rho: Array  # [place, group]
    mean: Array  # E u [place, group, entry]
    second: Array  # E u u'
    products: Array  # E t u [place, class, group, entry]
    score: Array  # E w . u [place, class, group]
    bound: Array  # [place]


class RowSums(NamedTuple):
    """Over rows."""

    rows: Sums  # what groups and experts need
    linear: LinearSums | None  # what the loadings need
    # what the choice of factors needs: of matrix * E u u' [group, entry, entry]
    moments: Array | None
    products: Array | None  # and of slope * E u

    def plus(self, other: "RowSums") -> "RowSums":
        """Of the rows of both."""
        return jax.tree.map(jnp.add, self, other)


def lay_out(x: Array, signs: Array, num_numbers: int) -> Chunks:
    """`num_numbers` for each row bound the size of a chunk."""
    num_rows = len(x)
    num_chunks = -(-num_rows // max(1, min(num_rows, MOST_NUMBERS // num_numbers)))
    size = -(-num_rows // num_chunks)
    row = jnp.arange(num_chunks * size).reshape(num_chunks, size)
    at, seen = jnp.minimum(row, num_rows - 1), ~jnp.isnan(x)
    row = jnp.minimum(row, num_rows)
    return Chunks(
        jnp.where(seen, x, 0)[at],
        seen[at].astype(x.dtype),
        signs[at],
        row,
        (row < num_rows).astype(x.dtype),
    )


def given_group(said: Said, told: Told, chunk: Chunks, score: Array) -> Given:
    """The rows of a chunk, and the locations of the soft labels that are factors of their own,
    [place, class, group].
    """
    is_asked = chunk.signs != 0
    classes = jnp.arange(is_asked.shape[1])
    last = is_asked & (
        classes == jnp.max(jnp.where(is_asked, classes, -1), axis=1, keepdims=True, initial=-1)
    )
    others, term = soft_labels(score, jnp.where(last, 0, chunk.signs)[..., None])
    last, asked = last.astype(score.dtype), is_asked.astype(score.dtype)
    const, matrix, slope = of_rows(told, chunk.x, chunk.seen)
    second = said.covariance + said.answers[..., :, None] * said.answers[..., None, :]
    quadratic = said.matrix[None] + told.both[None] * matrix[:, None]
    quadratic = (
        quadratic
        + jnp.einsum("nc,chij->nhij", last, said.covariance)
        + jnp.einsum("nc,chij->nhij", asked - last, second)
    )
    linear = told.shown[None] * slope[:, None] + jnp.einsum("nch,chi->nhi", others, said.answers)
    log_joint = (
        said.const[None]
        + const[:, None]
        + linear[..., -1]
        - quadratic[..., -1, -1] / 2
        + term.sum(1)
    )
    root = jnp.linalg.cholesky(quadratic[..., :-1, :-1])
    pushed = linear[..., :-1] - quadratic[..., :-1, -1]
    identity = jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape)
    covariance = cho_solve((root, True), identity)
    mean = jnp.einsum("nhij,nhj->nhi", covariance, pushed)
    log_det = 2 * jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)).sum(-1)
    log_joint = (
        log_joint
        + (jnp.sum(mean * pushed, -1) - log_det + root.shape[-1] * math.log(2 * math.pi)) / 2
    )
    w = jnp.einsum("nc,chi->nhi", last, said.answers)
    pull = jnp.einsum("nhij,nhj->nhi", covariance, w[..., :-1])
    loc, variance = (
        jnp.sum(w[..., :-1] * mean, -1) + w[..., -1],
        1 + jnp.sum(pull * w[..., :-1], -1),
    )
    sign = jnp.sum(last * chunk.signs, 1)[:, None]
    log_joint = log_joint + jnp.where(sign == 0, 0, log_ndtr(sign * loc / jnp.sqrt(variance)))
    return Given(log_joint, mean, covariance, pull, loc, variance, last)


def place(said: Said, told: Told, chunk: Chunks, score: Array) -> Placed:
    """q of the rows of a chunk, and afterwards of the soft labels that are factors of their own."""
    given = given_group(said, told, chunk, score)
    sign, scale = jnp.sum(given.last * chunk.signs, 1)[:, None], jnp.sqrt(given.variance)
    ratio = sign * given.loc / scale
    shift = jnp.where(sign == 0, 0, jnp.exp(norm.logpdf(ratio) - log_ndtr(ratio)))
    lost = shift * (shift + ratio)
    moved = sign * shift * scale
    mean = given.mean + given.pull * (moved / given.variance)[..., None]
    covariance = (
        given.covariance
        - given.pull[..., :, None]
        * given.pull[..., None, :]
        * (lost / given.variance)[..., None, None]
    )
    whole = jnp.concatenate([mean, jnp.ones_like(mean[..., :1])], -1)
    second = whole[..., :, None] * whole[..., None, :]
    second = second.at[..., :-1, :-1].add(covariance)
    score = jnp.einsum("nhi,chi->nch", whole, said.answers)
    others = soft_labels(score, (chunk.signs * (1 - given.last))[..., None])[0]
    t = others + given.last[..., None] * (given.loc + moved)[:, None]
    tie = jnp.pad(given.pull * (1 - lost)[..., None], ((0, 0), (0, 0), (0, 1)))
    products = t[..., None] * whole[:, None] + given.last[..., None, None] * tie[:, None]
    bound = jax.nn.logsumexp(given.log_joint, axis=1)
    return Placed(given.log_joint - bound[:, None], whole, second, products, score, bound)


def summed(placed: Placed, told: Told, chunk: Chunks, is_of_loadings: bool) -> RowSums:
    """What the rows of a chunk add to the sums; those of the loadings, or those of the choice of
    factors.
    """
    rho = jnp.exp(placed.log_rho) * chunk.weight[:, None]
    first, second = rho[..., None] * placed.mean, rho[..., None, None] * placed.second
    asked = jnp.einsum("nc,nhij->chij", (chunk.signs != 0).astype(rho.dtype), second)
    products = jnp.einsum("nh,nchi->chi", rho, placed.products)
    bound = jnp.sum(placed.bound * chunk.weight)
    sums = Sums(
        second.sum(0)[None],
        asked[None],
        products[None],
        jnp.zeros((1, 0, rho.shape[1]), rho.dtype),
        bound,
    )
    if not is_of_loadings:
        _, matrix, slope = of_rows(told, chunk.x, chunk.seen)
        return RowSums(
            sums,
            None,
            jnp.einsum("nij,nhij->hij", matrix, second),
            jnp.einsum("ni,nhi->hi", slope, first),
        )
    size = second.shape[-1]
    moments = jnp.einsum("hij,nhij->nij", told.both, second).reshape(-1, size * size)
    shown = jnp.einsum("hi,nhi->ni", told.shown, first)
    linear = LinearSums(
        (chunk.seen.T @ moments).reshape(-1, size, size), (chunk.seen * chunk.x).T @ shown
    )
    return RowSums(sums, linear, None, None)


def sum_chunks(
    said: Said, told: Told, chunks: Chunks, score: Array, is_of_loadings: bool
) -> tuple[RowSums, Array]:
    """Over all rows; and the locations of soft labels afterwards, `score` [chunk, place, class,
    group].
    """

    def visit(chunk: Chunks, score: Array) -> tuple[RowSums, Array]:
        placed = place(said, told, chunk, score)
        return summed(placed, told, chunk, is_of_loadings), placed.score

    first = jax.eval_shape(visit, *jax.tree.map(lambda leaf: leaf[0], (chunks, score)))[0]
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def one(total: RowSums, part: tuple[Chunks, Array]) -> tuple[RowSums, Array]:
        sums, score = visit(*part)
        return total.plus(sums), score

    return lax.scan(one, zero, (chunks, score))
