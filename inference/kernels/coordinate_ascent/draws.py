"""Independent draws from the mean-field posterior of a mixture, every latent site of the model,
with their density under it.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.stats import beta, gamma, norm

from inference.distributions.truncated_normal import TruncatedNormal
from inference.kernels.coordinate_ascent.posterior import Factors, Upper
from inference.kernels.coordinate_ascent.rows import (
    Bucket,
    Message,
    asked,
    form_of,
    message_to,
    place_complete,
    place_rows,
    score_of,
    soft_labels,
)
from inference.program.compiling import compiled
from inference.reading.conjugate.quadratic import Common, Weights
from inference.reading.stick_mixture.structure import Assignment, Level, Rows, by_class

__all__ = [
    "cut",
    "draw_blocks",
    "draw_common",
    "draw_groups",
    "draw_incomplete",
    "draw_mixture",
    "draw_weights",
    "log_rho_of",
]


def draw_mixture(
    rng_key: Array,
    found: Assignment,
    rows: Rows,
    message: Message,
    factors: Factors,
    buckets: tuple[Bucket, ...],
    scores: tuple[Array, ...],
    num_draws: int,
) -> dict[str, Array]:
    """[draw, ...] of each site, and `log_q`; of rows what `rows` says, worked out once more, one
    group of each.
    """
    num_rows, dtype = len(rows.features), message.const.dtype
    buckets = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf,
        buckets,
    )
    scores = tuple(score.astype(dtype) for score in scores)
    log_rho = jnp.zeros((num_rows, message.const.shape[1]), dtype)
    for bucket, score in zip(buckets, scores, strict=True):
        log_rho = log_rho.at[bucket.row].set(log_rho_of(message, bucket, score), mode="drop")

    def one(key: Array) -> dict[str, Array]:
        keys = random.split(key, 3 + len(buckets))
        values, log_q = draw_groups(found, factors, keys[0])
        z = random.categorical(keys[1], log_rho)
        values[found.z] = z.astype(found.few.sites[found.z].dtype)
        log_q = log_q + jnp.sum(jnp.take_along_axis(log_rho, z[:, None], 1))
        ones = jnp.ones((num_rows, 1), dtype)
        u = jnp.concatenate(
            [
                jnp.nan_to_num(jnp.asarray(rows.features, dtype)),
                ones,
                jnp.asarray(rows.extras, dtype),
            ],
            1,
        )
        t = jnp.zeros((num_rows, rows.signs.shape[1]), dtype)
        for key, bucket, score in zip(keys[3:], buckets, scores, strict=True):
            u, t, of_rows = _filled(key, message, bucket, score, z, u, t)
            log_q = log_q + of_rows
        if found.holes:
            values[found.holes] = u[tuple(jnp.asarray(rows.holes).T)]
        if found.experts:
            values[found.experts.soft], of_labels = _soft_labels(
                keys[2], found, rows, values, u, t.T
            )
            log_q = log_q + of_labels
        return values | {"log_q": log_q}

    each = random.split(rng_key, num_draws)
    return compiled(lambda keys: lax.map(one, keys), each)(each)


def log_rho_of(message: Message, bucket: Bucket, score: Array) -> Array:
    """log q(z) of the rows of a bucket [chunk, place, group]."""

    def one(part: tuple[Bucket, Array]) -> Array:
        chunk, score = part
        own = message_to(message, chunk.task)
        if chunk.missing.shape[-1]:
            return place_rows(own, chunk, score).log_rho
        return jax.nn.log_softmax(place_complete(own, chunk).log_joint, axis=0).T

    return lax.map(one, (bucket, score))


def draw_groups(
    found: Assignment, factors: Factors, rng_key: Array
) -> tuple[dict[str, Array], Array]:
    """All sites that are not of rows, and their log density."""
    keys = iter(random.split(rng_key, 9 + len(factors.columns)))
    values, log_q = {}, jnp.zeros((), factors.sticks[0].dtype)
    if found.concentration:
        a, b = factors.concentration
        alpha = random.gamma(next(keys), a) / b
        values[found.concentration], log_q = alpha, log_q + gamma.logpdf(alpha, a, scale=1 / b)
    V = random.beta(next(keys), *factors.sticks)
    log_q = log_q + jnp.sum(beta.logpdf(V, *factors.sticks))
    values[found.sticks] = V if len(found.few.sites[found.sticks].shape) == 2 else V[0]
    if found.upper and factors.upper:
        own, of_upper = _upper(found.upper, factors.upper, [next(keys) for _ in range(3)])
        values[found.upper.site] = own.pop(found.upper.site).astype(
            found.few.sites[found.upper.site].dtype
        )
        values, log_q = values | own, log_q + of_upper
    own, of_blocks = draw_blocks(found, factors.columns, factors.features, keys)
    values, log_q = values | own, log_q + of_blocks
    if found.experts and factors.weights and factors.common:
        own, of_weights = _experts(found, factors, [next(keys) for _ in range(3)])
        values, log_q = values | own, log_q + of_weights
    return values, log_q


def draw_blocks(
    found: Assignment, columns: tuple[Any, ...], features: Any, keys: Iterator[Array]
) -> tuple[dict[str, Array], Array]:
    """Parameters of the columns and of the features from their hyper-parameters, and their log
    density.
    """
    values, log_q = {}, jnp.zeros(())
    for block, hyper in [
        *zip(found.columns, columns, strict=True),
        *([(found.features, features)] if found.features else []),
    ]:
        drawn = block.family.draw(next(keys), hyper)
        values |= {
            name: value.reshape(found.few.sites[name].shape)
            for name, value in zip(block.priors, drawn, strict=True)
        }
        log_q = log_q + jnp.sum(block.family.log_prior(hyper, drawn))
    return values, log_q


def _upper(level: Level, upper: Upper, keys: Any) -> tuple[dict[str, Array], Array]:
    """The level above the tasks."""
    values, log_q = {}, jnp.zeros((), upper.log_share.dtype)
    if level.concentration:
        a, b = upper.concentration
        values[level.concentration] = random.gamma(keys[0], a) / b
        log_q = log_q + gamma.logpdf(values[level.concentration], a, scale=1 / b)
    values[level.sticks] = random.beta(keys[1], *upper.sticks)
    log_q = log_q + jnp.sum(beta.logpdf(values[level.sticks], *upper.sticks))
    chosen = random.categorical(keys[2], upper.log_share)
    values[level.site] = chosen
    return values, log_q + jnp.sum(jnp.take_along_axis(upper.log_share, chosen[..., None], -1))


def _experts(found: Assignment, factors: Factors, keys: Any) -> tuple[dict[str, Array], Array]:
    experts, weights, common = found.experts, factors.weights, factors.common
    assert experts is not None
    assert weights is not None
    assert common is not None
    values, _, log_q = draw_common(found, common, keys[:2])
    w, of_weights = draw_weights(weights, keys[2])
    return values | {
        experts.weights: w.reshape(found.few.sites[experts.weights].shape)
    }, log_q + of_weights


def draw_common(
    found: Assignment, common: Common, keys: Any
) -> tuple[dict[str, Array], Common, Array]:
    """What experts have in common: its sites, the same as numbers that are known, and their log
    density.
    """
    experts = found.experts
    assert experts is not None
    values, log_q, shape_of = (
        {},
        jnp.zeros((), common.loc.dtype),
        lambda name: found.few.sites[name].shape,
    )
    precision, loc, infinite = common.concentration, common.loc, jnp.full_like(common.loc, jnp.inf)
    if experts.precision:
        precision = random.gamma(keys[0], common.concentration) / common.rate
        values[experts.precision] = precision.reshape(shape_of(experts.precision))
        log_q = log_q + jnp.sum(
            gamma.logpdf(precision, common.concentration, scale=1 / common.rate)
        )
    if experts.loc:
        scale = 1 / jnp.sqrt(common.gamma * precision)
        loc = common.loc + scale * random.normal(keys[1], scale.shape, scale.dtype)
        values[experts.loc] = loc.reshape(shape_of(experts.loc))
        log_q = log_q + jnp.sum(norm.logpdf(loc, common.loc, scale))
    return values, Common(loc, infinite, precision, infinite), log_q


def draw_weights(weights: Weights, rng_key: Array) -> tuple[Array, Array]:
    """Weights [class, group, weight], and their log density."""
    noise, root = (
        random.normal(rng_key, weights.mean.shape, weights.mean.dtype),
        jnp.linalg.cholesky(weights.covariance),
    )
    log_det = jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))
    return weights.mean + jnp.einsum("ckij,ckj->cki", root, noise), jnp.sum(
        norm.logpdf(noise)
    ) - log_det


def _filled(
    rng_key: Array, message: Message, bucket: Bucket, score: Array, z: Array, u: Array, t: Array
) -> tuple[Array, Array, Array]:
    """Missing entries, and soft labels that are asked for, of the rows of a bucket, their groups
    given: put into u and t.
    """

    def one(part: tuple[Array, Bucket, Array]) -> tuple[Array, Array, Array]:
        key, chunk, score = part
        own = z[jnp.minimum(chunk.row, len(z) - 1)]
        said = message_to(message, chunk.task)
        experts = said.answers[:, own].swapaxes(0, 1)  # [place, class, entry]
        if chunk.missing.shape[-1]:
            others = score_of(said, chunk, score)[jnp.arange(len(own)), :, own]
            pushed = soft_labels(
                others, (chunk.signs * asked(chunk.signs[0]).others[None])[:, : others.shape[1]]
            )[0]
            soft, value, log_q = draw_incomplete(key, said, chunk, others, pushed, experts, own)
        else:
            loc = jnp.einsum("pci,pi->pc", experts, chunk.entries)
            soft, log_q = _drawn(key, cut(loc, jnp.ones_like(loc), chunk.signs), chunk.signs)
            value = jnp.zeros(chunk.missing.shape, u.dtype)
        return soft, value, jnp.where(chunk.row < len(z), log_q, 0)

    keys = random.split(rng_key, len(bucket.row))
    soft, value, log_q = lax.map(one, (keys, bucket, score))
    u = u.at[bucket.row[..., None], bucket.missing].add(value, mode="drop")
    return u, t.at[bucket.row].set(soft, mode="drop"), jnp.sum(log_q)


def cut(loc: Array, scale: Array, signs: Array) -> TruncatedNormal:
    """Soft labels on the side of 0 that the signs say, anywhere where they are 0."""
    low, high = (
        jnp.where(signs * side < 0, 0.0, side * jnp.inf).astype(loc.dtype) for side in (-1, 1)
    )
    return TruncatedNormal(loc, scale, low, high)


def _drawn(rng_key: Array, soft: TruncatedNormal, signs: Array) -> tuple[Array, Array]:
    """Soft labels [place, class] and their log density; 0 where nothing is asked."""
    is_asked, value = signs != 0, soft.sample(rng_key)
    return jnp.where(is_asked, value, 0), jnp.sum(jnp.where(is_asked, soft.log_prob(value), 0), 1)


def draw_incomplete(
    rng_key: Array,
    said: Message,
    chunk: Bucket,
    score: Array,
    pushed: Array,
    experts: Array,
    own: Array,
) -> tuple[Array, Array, Array]:
    """Soft labels, missing entries and their log density, of rows whose groups are `own`; first the
    former, then the latter given the last one of those. The others have the locations `score`; and
    `pushed`, all [place, class], is what entries see of them.
    """
    soft_key, hole_key = random.split(rng_key)
    of, rest = asked(chunk.signs[0]), ((0, 0), (0, experts.shape[1] - score.shape[1]))
    others, pushed = jnp.pad(score, rest), jnp.pad(pushed, rest)
    form, w = form_of(said, of), jnp.einsum("c,pci->pi", of.last, experts)
    slope = jnp.einsum("pc,pci->pi", pushed, experts) - jnp.einsum(
        "pij,pj->pi", form[own], chunk.entries
    )
    is_hole = jnp.arange(chunk.missing.shape[1])[None] < chunk.num_missing[:, None]
    both, identity = (
        is_hole[:, :, None] & is_hole[:, None],
        jnp.eye(is_hole.shape[1], dtype=slope.dtype)[None],
    )
    precision = jnp.where(
        both, form[own[:, None, None], chunk.missing[:, :, None], chunk.missing[:, None]], identity
    )
    c, w_m = (
        jnp.where(is_hole, jnp.take_along_axis(part, chunk.missing, 1), 0) for part in (slope, w)
    )
    by_c, by_w = (_solved(jnp.linalg.cholesky(precision), part) for part in (c, w_m))
    at_zero = jnp.sum(w * chunk.entries, 1)
    loc = of.last[None] * (at_zero + jnp.sum(by_c * by_w, 1))[:, None] + of.others[None] * others
    scale = jnp.sqrt(1 + of.last[None] * jnp.sum(by_w**2, 1)[:, None])
    soft, log_q = _drawn(soft_key, cut(loc, scale, chunk.signs), chunk.signs)
    root = jnp.linalg.cholesky(precision + w_m[:, :, None] * w_m[:, None])
    mean = _solved(
        root, _solved(root, c + (soft @ of.last - at_zero)[:, None] * w_m), transposed=True
    )
    noise = jnp.where(is_hole, random.normal(hole_key, c.shape, c.dtype), 0)
    log_det = jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum(1)
    return (
        soft,
        mean + _solved(root, noise, transposed=True),
        log_q + jnp.sum(jnp.where(is_hole, norm.logpdf(noise), 0), 1) + log_det,
    )


def _solved(root: Array, vector: Array, transposed: bool = False) -> Array:
    return lax.linalg.triangular_solve(
        root, vector[..., None], left_side=True, lower=True, transpose_a=transposed
    )[..., 0]


def _soft_labels(
    rng_key: Array, found: Assignment, rows: Rows, values: Any, u: Array, t: Array
) -> tuple[Array, Array]:
    """Soft labels that a label tells of are drawn, t [class, row]; of the others the model
    itself says what they are given all else.
    """
    experts = found.experts
    assert experts is not None
    is_free = jnp.asarray(rows.signs.T == 0)
    weights = by_class(values[experts.weights], 3)
    loc = jnp.sum(
        weights[:, found.group_of_rows(values, jnp.asarray(rows.task))]
        * u[:, jnp.array(rows.design)][None],
        -1,
    )
    drawn = loc + random.normal(rng_key, loc.shape, loc.dtype)
    t = jnp.where(is_free, drawn, t)
    shape = values[found.z].shape if len(found.few.sites[experts.soft].shape) == 1 else t.shape
    return t.reshape(shape), jnp.sum(jnp.where(is_free, norm.logpdf(drawn - loc), 0))
