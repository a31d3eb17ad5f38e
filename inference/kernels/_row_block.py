"""The rows of a sweep: group and missing entries of each row jointly, q(z, x_missing), then its soft labels q(t).

Every block that sees a row sends a message, a number and a quadratic form in u = (features, 1, extras) for each group h; their sum is

    s_h(u) = const_h - u' Q_h u / 2 + sum_c t_c w_ch . u,                                                                    (1)

t the means of the soft labels. With the missing entries m of a row, g = (sum_c t_c w_ch - Q_h u)_m at u_m = 0 and Omega = (Q_h)_mm^-1

    x_m | h ~ Normal(Omega g, Omega),     q(h) ~ exp(s_h(u_m = 0) + g' Omega g / 2 + log|Omega| / 2 + |m| log(2 pi) / 2).    (2)

Nothing else of a row is needed than its part in the sums over rows of rho, rho u u' (with rho Omega), rho t u, and rho F of the columns.

A row without holes costs K D^2 / 2 multiplications twice, as one matrix product each, over the products of its entries; a row with m of
them 2 K D^2 and K m^3 / 2, by sweeps that run over many rows at once, all groups side by side.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import log_ndtr
from jax.scipy.stats import norm

from inference.kernels._layout import BLOCK, LONGEST_CHUNK, Bucket

__all__ = ["Message", "Place", "Sums", "form_of", "inverse", "message_to", "place_rows", "soft_labels", "sum_rows"]

MOST_UNROLLED = 24  # holes; with more of them the code would be long


class Message(NamedTuple):
    """What all blocks say of a row of each group; of several tasks each array has one more axis in front."""

    const: Array  # [group], the log weight in it
    matrix: Array  # [group, entry, entry]: the features' part of Q
    answers: Array  # E w in the place of its entries, [class, group, entry]
    second: Array  # E w w', [class, group, entry, entry]; of a class that a row is asked about it belongs to Q
    columns: Array  # E eta [statistic, group]


class Sums(NamedTuple):
    """Over rows; of several tasks each array but the bound has one more axis in front."""

    moments: Array  # rho u u' [group, entry, entry]
    asked: Array  # the same over the rows that a class is asked about [class, group, entry, entry]
    products: Array  # rho t u [class, group, entry]
    columns: Array  # rho F [statistic, group]
    bound: Array  # what the rows add to the evidence bound

    def plus(self, other: "Sums") -> "Sums":
        """Of the rows of both."""
        return jax.tree.map(jnp.add, self, other)

    def times(self, factor: Any) -> "Sums":
        """As if each row were there so many times."""
        return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), self)

    def plus_task(self, other: "Sums", task: Array) -> "Sums":
        """With those of rows of one task."""
        parts = (mine.at[task].add(own) for mine, own in zip(self[:-1], other[:-1], strict=True))
        return Sums(*parts, self.bound + other.bound)


class Place(NamedTuple):
    """q(z, x_missing) of the rows of a chunk."""

    log_rho: Array  # [place, group]
    mean: Array  # of the missing entries, [place, hole, group]
    covariance: Array  # [block of places, hole, hole, place of the block, group]
    norm: Array  # log of the sum in (2) over the groups [place]


def soft_labels(score: Array, signs: Array) -> tuple[Array, Array]:
    """Mean of Normal(score, 1) on the side of 0 that the sign says; and what a row adds to the bound for it. 0 where nothing is asked."""
    log_mass = log_ndtr(signs * score)
    mean = score + signs * jnp.exp(norm.logpdf(score) - log_mass)
    is_asked = signs != 0
    return jnp.where(is_asked, mean, 0), jnp.where(is_asked, log_mass + score**2 / 2 - score * mean, 0)


def message_to(message: Message, task: Array) -> Message:
    """What is said of the rows of a task."""
    return jax.tree.map(lambda leaf: leaf[task], message)


def form_of(message: Message, signs: Array) -> Array:
    """Q of rows with these signs [class] or rather of those that are asked the same: [group, entry, entry]."""
    is_asked = (signs != 0).astype(message.matrix.dtype)
    return message.matrix + jnp.einsum("c,ckij->kij", is_asked, message.second)


def sum_rows(message: Message, bucket: Bucket, score: Array, num_rows: int) -> tuple[Sums, Array]:
    """The rows of a bucket: their sums, and the scores of their soft labels, `score` [chunk, place, class], afterwards.

    `message` and the sums are [task, ...].
    """
    visit = _visit_incomplete if bucket.missing.shape[-1] else _visit_complete
    zero = _nothing(message, packed=not bucket.missing.shape[-1])

    def one(total: Sums, chunk: tuple[Bucket, Array]) -> tuple[Sums, Array]:
        task = chunk[0].task
        sums, score = visit(message_to(message, task), *chunk, (chunk[0].row < num_rows).astype(message.const.dtype))
        return total.plus_task(sums, task), score

    total, score = lax.scan(one, zero, (bucket, score))
    return (total if bucket.missing.shape[-1] else _unpacked(total, message.matrix.shape[-1])), score


def _nothing(message: Message, packed: bool) -> Sums:
    tasks, classes, groups, size = message.answers.shape
    entries = (size * (size + 1) // 2,) if packed else (size, size)
    zeros = lambda *shape: jnp.zeros((tasks, *shape), message.const.dtype)
    moments, asked, products = zeros(groups, *entries), zeros(classes, groups, *entries), zeros(classes, groups, size)
    return Sums(moments, asked, products, jnp.zeros_like(message.columns), jnp.zeros((), message.const.dtype))


# Rows without holes, places last.


def _visit_complete(message: Message, chunk: Bucket, score: Array, weight: Array) -> tuple[Sums, Array]:
    u, is_asked = chunk.entries.T, (chunk.signs[0] != 0).astype(message.const.dtype)
    t, term = soft_labels(score, chunk.signs)
    products = jnp.concatenate([u[i : i + 1] * u[i:] for i in range(len(u))])  # [pair of entries, place]
    answers = jnp.einsum("cki,ip->ckp", message.answers, u)
    log_joint = message.const[:, None] + _packed(form_of(message, chunk.signs[0])) @ products + jnp.einsum("ckp,pc->kp", answers, t)
    log_joint = log_joint + message.columns.T @ chunk.statistics.T
    total = jax.nn.logsumexp(log_joint, axis=0)
    rho = jnp.exp(log_joint - total[None]) * weight[None]
    score = jnp.einsum("kp,ckp->pc", rho, answers)
    t = soft_labels(score, chunk.signs)[0]
    moments = rho @ products.T
    asked = is_asked[:, None, None] * moments[None]
    by_class = jnp.einsum("kp,pc,ip->cki", rho, t, u) if t.shape[1] else jnp.zeros_like(message.answers)
    bound = jnp.sum(weight * (total + term.sum(1)))
    return Sums(moments, asked, by_class, chunk.statistics.T @ rho.T, bound), score


def _packed(matrix: Array) -> Array:
    """-u' Q u / 2 as coefficients of the products of entries."""
    size = matrix.shape[-1]
    whole = [jnp.concatenate([matrix[:, i, i : i + 1] / 2, matrix[:, i, i + 1 :]], 1) for i in range(size)]
    return -jnp.concatenate(whole, 1)


def _unpacked(sums: Sums, size: int) -> Sums:
    above = [(i, j) for i in range(size) for j in range(i, size)]
    place = jnp.zeros((size, size), jnp.int32)
    rows, columns = (jnp.array(index) for index in zip(*above, strict=True))
    place = place.at[rows, columns].set(jnp.arange(len(above), dtype=jnp.int32))
    place = place.at[columns, rows].set(jnp.arange(len(above), dtype=jnp.int32))
    return sums._replace(moments=sums.moments[..., place], asked=sums.asked[..., place])


# Rows with holes, groups last.


def place_rows(message: Message, chunk: Bucket, t: Array) -> Place:
    """q(z, x_missing) of the rows of a chunk, the means of their soft labels given."""
    u, matrix = chunk.entries, form_of(message, chunk.signs[0]).transpose(1, 2, 0)  # [entry, entry, group]
    size, _, groups = matrix.shape
    pull = (u @ matrix.reshape(size, -1)).reshape(-1, size, groups)
    push = jnp.einsum("pc,cki->pik", t, message.answers)
    log_joint = message.const[None] + jnp.einsum("pi,pik->pk", u, push - pull / 2) + chunk.statistics @ message.columns
    mean, covariance, gain = _holes(chunk, matrix, push - pull)
    log_joint = log_joint + gain
    total = jax.nn.logsumexp(log_joint, axis=1)
    return Place(log_joint - total[:, None], mean, covariance, total)


def _holes(chunk: Bucket, matrix: Array, slope: Array) -> tuple[Array, Array, Array]:
    """Mean and covariance of the missing entries, and the last three terms of (2); some rows at a time, which stay in the cache."""
    rows, block = len(chunk.missing), math.gcd(len(chunk.missing), BLOCK)
    split = lambda leaf: leaf.reshape(rows // block, block, *leaf.shape[1:])
    parts = jax.tree.map(split, (chunk.missing, chunk.num_missing, slope))
    is_unrolled = rows >= LONGEST_CHUNK["incomplete"] and chunk.missing.shape[1] <= MOST_UNROLLED
    mean, covariance, gain = lax.map(lambda part: _holes_of_block(*part, matrix, is_unrolled), parts)
    join = lambda leaf: leaf.reshape(rows, *leaf.shape[2:])
    return join(mean), covariance, join(gain)


def _holes_of_block(missing: Array, num_missing: Array, slope: Array, matrix: Array, is_unrolled: bool) -> tuple[Array, Array, Array]:
    size, groups, width = *matrix.shape[1:], missing.shape[1]
    is_hole = jnp.arange(width)[None] < num_missing[:, None]  # [place, hole]
    g = jnp.take_along_axis(slope, missing[:, :, None], 1) * is_hole[:, :, None]
    both = (is_hole.T[:, None] & is_hole.T[None])[..., None]
    own = matrix.reshape(size * size, groups)[_pairs(missing, size)]
    covariance, log_det = inverse(jnp.where(both, own, jnp.eye(width, dtype=own.dtype)[:, :, None, None]), is_unrolled)
    mean = jnp.einsum("abpk,pbk->pak", covariance, g)
    constant = (num_missing.astype(own.dtype) * math.log(2 * math.pi))[:, None]
    return mean, jnp.where(both, covariance, 0), (jnp.sum(g * mean, 1) - log_det + constant) / 2


def _pairs(missing: Array, size: int) -> Array:
    """Where each pair of missing entries is in a matrix laid out in a row [hole, hole, place]."""
    return missing.T[:, None] * size + missing.T[None]


def inverse(matrix: Array, is_unrolled: bool = False) -> tuple[Array, Array]:
    """Inverse and log determinant of positive definite matrices [i, j, ...], all of them at once.

    Unrolled it is three times as fast, and slow to compile.
    """
    return (_eliminated if is_unrolled or not len(matrix) else _swept)(matrix)


def _swept(matrix: Array) -> tuple[Array, Array]:
    """By the sweep operator, which at each index turns the pivot p and column v to -1 / p and v / p, and the rest to rest - v v' / p."""
    size = len(matrix)

    def sweep(j: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        matrix, log_det = at
        column = lax.dynamic_index_in_dim(matrix, j, 0, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, j, 0, keepdims=False)
        unit = (jnp.arange(size) == j).astype(matrix.dtype).reshape(size, *(1,) * (matrix.ndim - 2))
        column = column - unit
        return matrix - column[:, None] * (column / pivot[None])[None] - 2 * unit[:, None] * unit[None], log_det + jnp.log(pivot)

    negative, log_det = lax.fori_loop(0, size, sweep, (matrix, jnp.zeros(matrix.shape[2:], matrix.dtype)))
    return -negative, log_det


def _eliminated(matrix: Array) -> tuple[Array, Array]:
    """Down: the complement of the first row and column is their pivot's, v = column / pivot. Up: with the inverse Z of the complement and
    y = Z v, the inverse is ((1 / pivot + v . y, -y'), (-y, Z)). Each step is a loop of its own, or XLA would compute steps again and again.
    """
    rest, pivots, steps = matrix, [], []
    for _ in range(len(matrix)):
        pivots.append(rest[0, 0])
        steps.append(lax.optimization_barrier(rest[1:, 0] / rest[:1, 0]))
        rest = lax.optimization_barrier(rest[1:, 1:] - rest[1:, :1] * steps[-1][None])
    found = rest
    for pivot, step in zip(reversed(pivots), reversed(steps), strict=True):
        y = lax.optimization_barrier(jnp.sum(found * step[None], 1))
        corner = 1 / pivot + jnp.sum(step * y, 0)
        top = jnp.concatenate([corner[None], -y])
        found = lax.optimization_barrier(jnp.concatenate([top[None], jnp.concatenate([-y[:, None], found], 1)]))
    return found, sum((jnp.log(pivot) for pivot in pivots), start=jnp.zeros(matrix.shape[2:], matrix.dtype))


def _visit_incomplete(message: Message, chunk: Bucket, score: Array, weight: Array) -> tuple[Sums, Array]:
    t, term = soft_labels(score, chunk.signs)
    place = place_rows(message, chunk, t)
    rho = jnp.exp(place.log_rho) * weight[:, None]
    at = jnp.arange(len(rho))[:, None]
    whole = jnp.broadcast_to(chunk.entries[:, :, None], (*chunk.entries.shape, rho.shape[1]))
    whole = whole.at[at, chunk.missing].add(place.mean)  # where there are fewer holes, 0 is added
    answers = jnp.einsum("pik,cki->pck", whole, message.answers)
    score = jnp.einsum("pk,pck->pc", rho, answers)
    t = soft_labels(score, chunk.signs)[0]
    weighted = rho[:, None] * whole
    size = whole.shape[1]
    block = place.covariance.shape[3]
    pair = jax.vmap(lambda missing: _pairs(missing, size))(chunk.missing.reshape(-1, block, chunk.missing.shape[1]))
    weighed = place.covariance * rho.reshape(-1, 1, 1, block, rho.shape[1])
    spread = jnp.zeros((size * size, rho.shape[1]), rho.dtype).at[pair].add(weighed)
    moments = jnp.einsum("pik,pjk->kij", weighted, whole) + spread.T.reshape(-1, size, size)
    is_asked = (chunk.signs[0] != 0).astype(rho.dtype)
    products = jnp.einsum("pc,pik->cki", t, weighted)
    bound = jnp.sum(weight * (place.norm + term.sum(1)))
    return Sums(moments, is_asked[:, None, None, None] * moments[None], products, chunk.statistics.T @ rho, bound), score
