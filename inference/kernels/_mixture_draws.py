"""Independent draws from the mean-field posterior of a mixture, every latent site of the model, with their density under it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.stats import beta, gamma, norm

from inference._assignment_rows import Rows, by_class
from inference.assignment import Assignment, Level
from inference.kernels._factors import Factors
from inference.kernels._layout import Bucket
from inference.kernels._levels import Upper
from inference.kernels._row_block import Message, form_of, message_to, place_rows, soft_labels
from inference.truncated import TruncatedNormal

__all__ = ["draw_mixture", "places_of"]


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
    """[draw, ...] of each site, and `log_q`."""
    num_rows, dtype = len(rows.features), message.const.dtype
    buckets = jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, buckets)
    scores = tuple(score.astype(dtype) for score in scores)
    log_rho = jnp.zeros((num_rows, message.const.shape[1]), dtype)
    for bucket, score in zip(buckets, scores, strict=True):
        log_rho = log_rho.at[bucket.row].set(places_of(message, bucket, score)[0], mode="drop")

    def one(key: Array) -> dict[str, Array]:
        keys = random.split(key, 3 + len(buckets))
        values, log_q = _groups(found, factors, keys[0])
        z = random.categorical(keys[1], log_rho)
        values[found.z] = z.astype(found.few.sites[found.z].dtype)
        log_q = log_q + jnp.sum(jnp.take_along_axis(log_rho, z[:, None], 1))
        ones = jnp.ones((num_rows, 1), dtype)
        u = jnp.concatenate([jnp.nan_to_num(jnp.asarray(rows.features, dtype)), ones, jnp.asarray(rows.extras, dtype)], 1)
        for key, bucket, score in zip(keys[3:], buckets, scores, strict=True):
            if bucket.missing.shape[-1]:
                u, of_holes = _filled(key, message, bucket, score, z, u)
                log_q = log_q + of_holes
        if found.holes:
            values[found.holes] = u[tuple(jnp.asarray(rows.holes).T)]
        if found.experts:
            values[found.experts.soft], of_labels = _soft_labels(keys[2], found, rows, buckets, scores, values, u)
            log_q = log_q + of_labels
        return values | {"log_q": log_q}

    return jax.jit(lambda keys: lax.map(one, keys))(random.split(rng_key, num_draws))


def places_of(message: Message, bucket: Bucket, score: Array) -> tuple[Array, Array, Array]:
    """Of the rows of a bucket [chunk, place, ...]: log q(z), and mean and variance of the missing entries, [hole, group]."""

    def one(part: tuple[Bucket, Array]) -> tuple[Array, Array, Array]:
        chunk, score = part
        place = place_rows(message_to(message, chunk.task), chunk, soft_labels(score, chunk.signs)[0])
        variance = jnp.diagonal(place.covariance, axis1=1, axis2=2)  # [block, place of the block, group, hole]
        return place.log_rho, place.mean, variance.swapaxes(2, 3).reshape(place.mean.shape)

    return lax.map(one, (bucket, score))


def _groups(found: Assignment, factors: Factors, rng_key: Array) -> tuple[dict[str, Array], Array]:
    """All sites that are not of rows."""
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
        values[found.upper.site] = own.pop(found.upper.site).astype(found.few.sites[found.upper.site].dtype)
        values, log_q = values | own, log_q + of_upper
    blocks = [*zip(found.columns, factors.columns, strict=True), *([(found.features, factors.features)] if found.features else [])]
    for block, hyper in blocks:
        drawn = block.family.draw(next(keys), hyper)
        values |= {name: value.reshape(found.few.sites[name].shape) for name, value in zip(block.priors, drawn, strict=True)}
        log_q = log_q + jnp.sum(block.family.log_prior(hyper, drawn))
    if found.experts and factors.weights and factors.common:
        own, of_weights = _experts(found, factors, [next(keys) for _ in range(3)])
        values, log_q = values | own, log_q + of_weights
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
    values, log_q, shape_of = {}, jnp.zeros((), weights.mean.dtype), lambda name: found.few.sites[name].shape
    precision = common.concentration
    if experts.precision:
        precision = random.gamma(keys[0], common.concentration) / common.rate
        values[experts.precision] = precision.reshape(shape_of(experts.precision))
        log_q = log_q + jnp.sum(gamma.logpdf(precision, common.concentration, scale=1 / common.rate))
    if experts.loc:
        scale = 1 / jnp.sqrt(common.gamma * precision)
        loc = common.loc + scale * random.normal(keys[1], scale.shape, scale.dtype)
        values[experts.loc] = loc.reshape(shape_of(experts.loc))
        log_q = log_q + jnp.sum(norm.logpdf(loc, common.loc, scale))
    noise, root = random.normal(keys[2], weights.mean.shape, weights.mean.dtype), jnp.linalg.cholesky(weights.covariance)
    values[experts.weights] = (weights.mean + jnp.einsum("ckij,ckj->cki", root, noise)).reshape(shape_of(experts.weights))
    log_det = jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))
    return values, log_q + jnp.sum(norm.logpdf(noise)) - log_det


def _filled(rng_key: Array, message: Message, bucket: Bucket, score: Array, z: Array, u: Array) -> tuple[Array, Array]:
    """Missing entries of the rows of a bucket, their groups given: put into u."""

    def one(part: tuple[Array, Bucket, Array]) -> tuple[Array, Array]:
        key, chunk, score = part
        own = z[jnp.minimum(chunk.row, len(z) - 1)]
        said, t = message_to(message, chunk.task), soft_labels(score, chunk.signs)[0]
        form = form_of(said, chunk.signs[0])
        slope = jnp.einsum("pc,cpi->pi", t, said.answers[:, own]) - jnp.einsum("pij,pj->pi", form[own], chunk.entries)
        is_hole = jnp.arange(chunk.missing.shape[1])[None] < chunk.num_missing[:, None]
        both = is_hole[:, :, None] & is_hole[:, None]
        matrix = form[own[:, None, None], chunk.missing[:, :, None], chunk.missing[:, None]]
        root = jnp.linalg.cholesky(jnp.where(both, matrix, jnp.eye(both.shape[1], dtype=u.dtype)[None]))
        g = jnp.where(is_hole, jnp.take_along_axis(slope, chunk.missing, 1), 0)
        mean = jax.scipy.linalg.cho_solve((root, True), g[..., None])[..., 0]
        noise = jnp.where(is_hole, random.normal(key, g.shape, g.dtype), 0)
        value = mean + lax.linalg.triangular_solve(root, noise[..., None], left_side=True, lower=True, transpose_a=True)[..., 0]
        log_det = jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum(1)
        log_q = jnp.sum(jnp.where(is_hole, norm.logpdf(noise), 0), 1) + log_det
        return value, jnp.where(chunk.row < len(z), log_q, 0)

    keys = random.split(rng_key, len(bucket.row))
    value, log_q = lax.map(one, (keys, bucket, score))
    row = jnp.broadcast_to(bucket.row[..., None], bucket.missing.shape)
    return u.at[row, bucket.missing].add(value, mode="drop"), jnp.sum(log_q)


def _soft_labels(
    rng_key: Array, found: Assignment, rows: Rows, buckets: tuple[Bucket, ...], scores: tuple[Array, ...], values: Any, u: Array
) -> tuple[Array, Array]:
    """Soft labels that a label tells of are their own factor; of the others the model itself says what they are given all else."""
    experts = found.experts
    assert experts is not None
    signs = jnp.asarray(rows.signs.T, u.dtype)  # [class, row]
    loc = jnp.zeros_like(signs)
    for bucket, score in zip(buckets, scores, strict=True):
        loc = loc.at[:, bucket.row].set(jnp.moveaxis(score, -1, 0), mode="drop")
    weights = by_class(values[experts.weights], 3)
    model = jnp.sum(weights[:, found.group_of_rows(values, jnp.asarray(rows.task))] * u[:, jnp.array(rows.design)][None], -1)
    loc = jnp.where(signs == 0, model, loc)
    low, high = jnp.where(signs > 0, 0.0, -jnp.inf).astype(u.dtype), jnp.where(signs < 0, 0.0, jnp.inf).astype(u.dtype)
    drawn = TruncatedNormal(loc, jnp.ones_like(loc), low, high)
    t = drawn.sample(rng_key)
    shape = values[found.z].shape if len(found.few.sites[experts.soft].shape) == 1 else t.shape
    return t.reshape(shape), jnp.sum(drawn.log_prob(t))
