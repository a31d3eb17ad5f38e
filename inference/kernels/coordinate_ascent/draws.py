"""Independent draws of every latent site from the mean-field posterior of a mixture.

Draws come with their log density under it.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.stats import beta, gamma, norm
from jaxtyping import Float, Int

from inference.distributions.truncated_normal import TruncatedNormal
from inference.kernels.coordinate_ascent.posterior import Factors, has_rows, is_open
from inference.kernels.coordinate_ascent.rows import (
    Message,
    RowBucket,
    class_masks,
    complete_posterior,
    form_of,
    incomplete_posterior,
    message_to,
    score_of,
    soft_labels,
)
from inference.program.compiling import compiled
from inference.reading.conjugate.quadratic import Common, Weights, outer
from inference.reading.stick_mixture.structure import (
    Assignment,
    MixtureRows,
    StickLevel,
    with_class_axis,
)

__all__ = [
    "cut",
    "draw_blocks",
    "draw_common",
    "draw_free_labels",
    "draw_gamma",
    "draw_groups",
    "draw_incomplete",
    "draw_mixture",
    "draw_normal",
    "draw_soft_labels",
    "log_rho_of",
]

Drawn = tuple[dict[str, Array], Array]  # values by site, and their log density


def draw_mixture(
    rng_key: Array,
    found: Assignment,
    rows: MixtureRows,
    message: Message,
    factors: Factors,
    buckets: tuple[RowBucket, ...],
    scores: tuple[Array, ...],
    num_draws: int,
) -> dict[str, Array]:
    """Draws of all sites [draw, ...], and their log density `log_q`.

    Args:
        rng_key: A random key.
        found: The mixture.
        rows: The data by row.
        message: The messages to the rows.
        factors: The factors of q other than those of the rows.
        buckets: The rows in buckets, as in a sweep.
        scores: Locations of the soft labels that are factors of their own, of each bucket.
        num_draws: The number of draws.
    """
    num_rows, dtype = len(rows.features), message.const.dtype
    cast = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
    buckets, scores = jax.tree.map(cast, (buckets, scores))
    log_rho = jnp.zeros((num_rows, message.const.shape[1]), dtype)
    for bucket, score in zip(buckets, scores, strict=True):
        log_rho = log_rho.at[bucket.row].set(log_rho_of(message, bucket, score), mode="drop")
    entries = jnp.asarray(
        np.concatenate((np.nan_to_num(rows.features), np.ones((num_rows, 1)), rows.extras), 1),
        dtype,
    )
    signs = jnp.asarray(rows.signs, dtype)

    def one(key: Array) -> dict[str, Array]:
        keys = random.split(key, 3 + len(buckets))
        values, log_q = draw_groups(found, factors, keys[0])
        z = random.categorical(keys[1], log_rho)
        values[found.z] = z.astype(found.few.sites[found.z].dtype)
        log_q = log_q + jnp.sum(jnp.take_along_axis(log_rho, z[:, None], 1))
        u, t = entries, jnp.zeros_like(signs)
        for key, bucket, score in zip(keys[3:], buckets, scores, strict=True):
            u, t, of_rows = _filled(key, message, bucket, score, z, u, t)
            log_q = log_q + of_rows
        if found.holes:
            values[found.holes] = u[tuple(jnp.asarray(rows.holes).T)]
        if found.experts:
            group = found.group_of_rows(values, jnp.asarray(rows.task))
            values[found.experts.soft], of_labels = draw_free_labels(
                keys[2], found, values, group, u[:, jnp.array(rows.design)], signs, t
            )
            log_q = log_q + of_labels
        return values | {"log_q": log_q}

    each = random.split(rng_key, num_draws)
    return compiled(lambda keys: lax.map(one, keys), each)(each)


def log_rho_of(
    message: Message, bucket: RowBucket, score: Float[Array, "chunk place class group"]
) -> Float[Array, "chunk place group"]:
    """log q(z) of the rows of a bucket."""

    def one(part: tuple[RowBucket, Array]) -> Array:
        chunk, score = part
        own = message_to(message, chunk.task)
        if chunk.missing.shape[-1]:
            return incomplete_posterior(own, chunk, score).log_rho
        return jax.nn.log_softmax(complete_posterior(own, chunk).log_joint, axis=0).T

    return lax.map(one, (bucket, score))


# The sites that do not belong to rows.


def draw_groups(found: Assignment, factors: Factors, rng_key: Array) -> Drawn:
    """A draw of all sites that do not belong to rows, and its log density."""
    keys = iter(random.split(rng_key, 9 + len(factors.columns)))
    own = [next(keys) for _ in range(2 if found.concentration else 1)]
    values, log_q = _level(
        found, found.lower, factors.concentration, factors.sticks, own, factors.num_open
    )
    if found.upper and factors.upper:
        concentration, sticks, log_share = factors.upper
        *own, key = (next(keys) for _ in range(3))
        above, of_above = _level(found, found.upper, concentration, sticks, own, found.num_groups)
        chosen = random.categorical(key, log_share)
        values |= above | {found.upper.site: chosen.astype(found.few.sites[found.upper.site].dtype)}
        log_q = log_q + of_above + jnp.sum(jnp.take_along_axis(log_share, chosen[..., None], -1))
    blocks, of_blocks = draw_blocks(found, factors.columns, factors.features, keys)
    values, log_q = values | blocks, log_q + of_blocks
    if found.experts and factors.weights and factors.common:
        *own, key = (next(keys) for _ in range(3))
        seen = has_rows(found, factors.upper, factors.num_open)
        common, known, of_common = draw_common(found, factors.common, own)
        w, of_weights = draw_normal(_given_common(factors.weights, seen, known), key)
        site = found.experts.weights
        values |= common | {site: w.reshape(found.few.sites[site].shape)}
        log_q = log_q + of_common + of_weights
    return values, log_q


def _level(
    found: Assignment,
    level: StickLevel,
    concentration: Any,
    sticks: Any,
    keys: list[Array],
    num_open: Any,
) -> Drawn:
    values, log_q, alpha = {}, jnp.zeros((), sticks[0].dtype), concentration[0]
    if level.concentration:
        alpha, log_q = draw_gamma(keys[0], concentration)
        values[level.concentration] = alpha
    seen = is_open(num_open, sticks[0].shape[-1])
    sticks = jnp.where(seen, sticks[0], 1), jnp.where(seen, sticks[1], alpha)
    V = random.beta(keys[-1], *sticks)
    values[level.sticks] = V.reshape(found.few.sites[level.sticks].shape)
    return values, log_q + jnp.sum(beta.logpdf(V, *sticks))


def _given_common(weights: Weights, seen: Array, known: Common) -> Weights:
    # q(w | zeta, lambda), which is the prior where a group has no rows.
    prior = known.loc[:, None], jnp.eye(known.loc.shape[-1]) / known.concentration[:, None, None]
    return Weights(
        jnp.where(seen[:, None], weights.mean, prior[0]),
        jnp.where(seen[:, None, None], weights.covariance, prior[1]),
    )


def draw_gamma(rng_key: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """A draw from Gammas (concentration, rate), and the sum of its log densities."""
    value = random.gamma(rng_key, pair[0]) / pair[1]
    return value, jnp.sum(gamma.logpdf(value, pair[0], scale=1 / pair[1]))


def draw_normal(normal: tuple[Array, Array], rng_key: Array) -> tuple[Array, Array]:
    """A draw from Normals, and the sum of its log densities.

    `normal` has the mean [..., entry] and the covariance [..., entry, entry].
    """
    mean, root = normal[0], jnp.linalg.cholesky(normal[1])
    noise = random.normal(rng_key, mean.shape, mean.dtype)
    return mean + jnp.einsum("...ij,...j->...i", root, noise), jnp.sum(
        norm.logpdf(noise)
    ) - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))


def draw_blocks(
    found: Assignment, columns: tuple[Any, ...], features: Any, keys: Iterator[Array]
) -> Drawn:
    """A draw of the parameters of columns and features, and its log density.

    Args:
        found: The mixture.
        columns: The hyper-parameters of each block of columns.
        features: Those of the features, or None.
        keys: Random keys, one for each block.
    """
    values, log_q = {}, jnp.zeros(())
    for block, hyper in zip(found.blocks, (*columns, features), strict=False):
        drawn = block.family.draw(next(keys), hyper)
        for name, value in zip(block.priors, drawn, strict=True):
            values[name] = value.reshape(found.few.sites[name].shape)
        log_q = log_q + jnp.sum(block.family.log_prior(hyper, drawn))
    return values, log_q


def draw_common(
    found: Assignment, common: Common, keys: Any
) -> tuple[dict[str, Array], Common, Array]:
    """A draw of zeta and lambda, the shared mean and precision of the experts.

    It returns the values of their sites; the same values as a `Common` that is known; and the log
    density.
    """
    values, log_q = {}, jnp.zeros((), common.loc.dtype)
    _, _, _, loc_site, precision_site = found.experts or 5 * (None,)
    precision, loc, infinite = common.concentration, common.loc, jnp.full_like(common.loc, jnp.inf)
    if precision_site:
        precision, log_q = draw_gamma(keys[0], (common.concentration, common.rate))
        values[precision_site] = precision.reshape(found.few.sites[precision_site].shape)
    if loc_site:
        scale = 1 / jnp.sqrt(common.gamma * precision)
        loc = common.loc + scale * random.normal(keys[1], scale.shape, scale.dtype)
        values[loc_site] = loc.reshape(found.few.sites[loc_site].shape)
        log_q = log_q + jnp.sum(norm.logpdf(loc, common.loc, scale))
    return values, Common(loc, infinite, precision, infinite), log_q


# The sites of rows.


def _filled(
    rng_key: Array,
    message: Message,
    bucket: RowBucket,
    score: Float[Array, "chunk place class group"],
    z: Int[Array, " row"],
    u: Float[Array, "row entry"],
    t: Float[Array, "row class"],
) -> tuple[Float[Array, "row entry"], Float[Array, "row class"], Float[Array, ""]]:
    # Draws missing entries into u and soft labels into t, for the rows of a bucket.

    def one(part: tuple[Array, RowBucket, Array]) -> tuple[Array, Array, Array]:
        key, chunk, score = part
        own = z[jnp.minimum(chunk.row, len(z) - 1)]
        said = message_to(message, chunk.task)
        experts = said.answers[:, own].swapaxes(0, 1)  # [place, class, entry]
        if chunk.missing.shape[-1]:
            score = score_of(said, chunk, score)[jnp.arange(len(own)), :, own]
            pushed = soft_labels(
                score, (chunk.signs * class_masks(chunk.signs[0]).others[None])[:, : score.shape[1]]
            )[0]
            soft, value, log_q = draw_incomplete(key, said, chunk, score, pushed, experts, own)
        else:
            loc = jnp.einsum("pci,pi->pc", experts, chunk.entries)
            soft, log_q = draw_soft_labels(key, loc, jnp.ones_like(loc), chunk.signs)
            value = jnp.zeros(chunk.missing.shape, u.dtype)
        return soft, value, jnp.where(chunk.row < len(z), log_q, 0)

    soft, value, log_q = lax.map(one, (random.split(rng_key, len(bucket.row)), bucket, score))
    u = u.at[bucket.row[..., None], bucket.missing].add(value, mode="drop")
    return u, t.at[bucket.row].set(soft, mode="drop"), jnp.sum(log_q)


def cut(
    loc: Float[Array, "row class"],
    scale: Float[Array, "row class"],
    signs: Float[Array, "row class"],
) -> TruncatedNormal:
    """Normals truncated to the side of 0 that their sign says; a sign of 0 truncates nothing."""
    low, high = (
        jnp.where(signs * side < 0, 0.0, side * jnp.inf).astype(loc.dtype) for side in (-1, 1)
    )
    return TruncatedNormal(loc, scale, low, high)


def draw_soft_labels(
    rng_key: Array,
    loc: Float[Array, "row class"],
    scale: Float[Array, "row class"],
    signs: Float[Array, "row class"],
) -> tuple[Array, Array]:
    """Soft labels [row, class] with these signs, 0 where a sign is 0, and the log density [row]."""
    is_cut, soft = signs != 0, cut(loc, scale, signs)
    value = soft.sample(rng_key)
    return jnp.where(is_cut, value, 0), jnp.sum(jnp.where(is_cut, soft.log_prob(value), 0), 1)


def draw_incomplete(
    rng_key: Array,
    said: Message,
    chunk: RowBucket,
    score: Float[Array, "place class"],
    pushed: Float[Array, "place class"],
    experts: Float[Array, "place class entry"],
    own: Int[Array, " place"],
) -> tuple[Array, Array, Array]:
    """Soft labels, missing entries given the last soft label, and their log density [place].

    Args:
        rng_key: A random key.
        said: The messages to the rows.
        chunk: Rows with holes.
        score: Locations of all soft labels but the last.
        pushed: Their means or values, on which the missing entries depend.
        experts: The weights of the group of each row.
        own: The group of each row.
    """
    soft_key, hole_key = random.split(rng_key)
    masks, rest = class_masks(chunk.signs[0]), ((0, 0), (0, experts.shape[1] - score.shape[1]))
    others, pushed = jnp.pad(score, rest), jnp.pad(pushed, rest)
    form, w = form_of(said, masks), jnp.einsum("c,pci->pi", masks.last, experts)
    slope = jnp.einsum("pc,pci->pi", pushed, experts) - jnp.einsum(
        "pij,pj->pi", form[own], chunk.entries
    )
    is_hole = jnp.arange(chunk.missing.shape[1])[None] < chunk.num_missing[:, None]
    pairs = form[own[:, None, None], chunk.missing[:, :, None], chunk.missing[:, None]]
    precision = jnp.where(
        is_hole[:, :, None] & is_hole[:, None],
        pairs,
        jnp.eye(is_hole.shape[1], dtype=slope.dtype)[None],
    )
    c, w_m = (
        jnp.where(is_hole, jnp.take_along_axis(part, chunk.missing, 1), 0) for part in (slope, w)
    )
    by_c, by_w = (_solved(jnp.linalg.cholesky(precision), part) for part in (c, w_m))
    at_zero = jnp.sum(w * chunk.entries, 1)
    last = masks.last[None]
    loc = last * (at_zero + jnp.sum(by_c * by_w, 1))[:, None] + masks.others[None] * others
    soft, log_q = draw_soft_labels(
        soft_key, loc, jnp.sqrt(1 + last * jnp.sum(by_w**2, 1)[:, None]), chunk.signs
    )
    root = jnp.linalg.cholesky(precision + outer(w_m))
    noise = jnp.where(is_hole, random.normal(hole_key, c.shape, c.dtype), 0)
    entries = _solved(
        root,
        _solved(root, c + (soft @ masks.last - at_zero)[:, None] * w_m) + noise,
        transposed=True,
    )
    return (
        soft,
        entries,
        log_q
        + jnp.sum(jnp.where(is_hole, norm.logpdf(noise), 0), 1)
        + jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum(1),
    )


def _solved(
    root: Float[Array, "place hole hole"],
    vector: Float[Array, "place hole"],
    transposed: bool = False,
) -> Float[Array, "place hole"]:
    return lax.linalg.triangular_solve(
        root, vector[..., None], left_side=True, lower=True, transpose_a=transposed
    )[..., 0]


def draw_free_labels(
    rng_key: Array,
    found: Assignment,
    values: dict[str, Array],
    group: Int[Array, " row"],
    entries: Float[Array, "row weight"],
    signs: Float[Array, "row class"],
    t: Float[Array, "row class"],
) -> tuple[Array, Array]:
    """The values of the soft labels' site, and the log density of those that are drawn here.

    Args:
        rng_key: A random key.
        found: The mixture.
        values: Values of the other sites.
        group: The group of each row.
        entries: The entries of a row that the weights multiply.
        signs: The signs of the soft labels; labels without a sign follow the model itself.
        t: The soft labels that have a sign.
    """
    assert found.experts is not None
    loc = jnp.sum(with_class_axis(values[found.experts.weights], 3)[:, group] * entries[None], -1)
    drawn = loc + random.normal(rng_key, loc.shape, loc.dtype)
    is_free = signs.T == 0
    t = jnp.where(is_free, drawn, t.T)
    soft = t if len(found.few.sites[found.experts.soft].shape) == 2 else t[0]
    return soft, jnp.sum(jnp.where(is_free, norm.logpdf(drawn - loc), 0))
