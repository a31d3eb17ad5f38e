"""Predictions for rows by posterior draws of a mixture.

The group and the missing entries of a row are integrated out at each draw. With D draws d of all
sites that belong to groups, a row whose seen entries are x has

    p(y | x, data) = sum_d p(y | x, d) / S,                                                     (1)
    p(y | x, d) = sum_h pi_h p(x | h) p(y | x, h) / sum_h pi_h p(x | h),

and the means and mean squares of its missing entries likewise. Given the group scores are Normal,
and p(y | x, h) is exact. Where a label decides several soft labels of a row with missing entries,
they are correlated through these, and p(y | x, h) is an orthant probability
(`inference.maths.orthants`). It is integrated by `NUM_POINTS` points at each draw; with three
classes the error is at most 5e-4. With more classes each draw has other points, which together are
one large set of points. The weights p(x | d) of the draws are left out: with a dozen features, one
of some hundred draws would have all the weight.

Cost, for each draw: n K D^2 for n rows, K groups and D entries; for rows with m missing entries
n K m^3 / 2 more; with C > 2 classes n K C^2 `NUM_POINTS`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import log_ndtr
from jaxtyping import Float

from inference.kernels.coordinate_ascent.posterior import Shape, message_at, shape_of, statistics_of
from inference.kernels.coordinate_ascent.rows import (
    Message,
    RowBucket,
    complete_posterior,
    incomplete_given_soft,
    lay_out,
    message_to,
)
from inference.maths.orthants import CubaturePoints, cubature_points, log_orthant
from inference.program.compiling import compiled
from inference.program.program import Program
from inference.reading.stick_mixture.structure import Assignment

__all__ = ["AssignmentDraws", "RowPrediction"]

NUM_POINTS = 8


class RowPrediction(NamedTuple):
    """Predictions for rows as if they were new; a label enters `log_label` alone."""

    log_label: Array  # log probability of the row's label, 0 without one [row]
    mean: Array  # of the missing features; the others as they are [row, feature]
    deviation: Array  # standard deviation, 0 where seen [row, feature]


class _Sums(NamedTuple):
    log_label: Array  # logarithm of the sum in (1)
    first: Array  # sums of missing entries [row, feature]
    second: Array  # of their squares


class AssignmentDraws:
    """Predicts rows from the posterior draws of a run, without the data of the run.

    Args:
        model: a NumPyro model.
        found: its sites.
    """

    def __init__(self, model: Callable, found: Assignment):
        self.model, self.found = model, found

    def predict(self, draws: Mapping[str, Any], program: Program) -> RowPrediction:
        """The predictions for rows.

        Args:
            draws: {site: [draw, ...]} of all that belongs to groups.
            program: the model with the rows.
        """
        found, rows = self.found, self.found.rows(program)
        shape, (statistics, _) = shape_of(rows), statistics_of(found, rows)
        dtype = str(jnp.result_type(float))
        buckets = lay_out(rows._replace(signs=0 * rows.signs), statistics, dtype)
        names = [name for name in draws if name in program.latent and name not in found.of_rows]
        each = {name: jnp.asarray(draws[name]) for name in names}
        features, signs = jnp.asarray(rows.features, dtype), jnp.asarray(rows.signs, dtype)
        num_draws, given = len(next(iter(each.values()))), (each, buckets, features, signs)
        sums = compiled(lambda *given: _over_draws(found, shape, *given), *given)(*given)
        mean, is_seen = sums.first / num_draws, ~jnp.isnan(features)
        deviation = jnp.sqrt(jnp.maximum(sums.second / num_draws - mean**2, 0))
        return RowPrediction(
            sums.log_label - jnp.log(num_draws),
            jnp.where(is_seen, features, mean),
            jnp.where(is_seen, 0, deviation),
        )


def _over_draws(
    found: Assignment,
    shape: Shape,
    draws: Mapping[str, Array],
    buckets: tuple[RowBucket, ...],
    features: Float[Array, "row feature"],
    signs: Float[Array, "row class"],
) -> _Sums:
    zeros = jnp.zeros_like(features)
    empty = _Sums(jnp.full(len(features), -jnp.inf, features.dtype), zeros, zeros)

    def add(total: _Sums, draw: tuple[Array, Mapping[str, Array]]) -> tuple[_Sums, None]:
        number, values = draw
        num_classes, points = signs.shape[1], None
        if num_classes > 1:
            points = cubature_points(num_classes, NUM_POINTS, NUM_POINTS * number)
        new = _at_draw(message_at(found, shape, values), buckets, empty, signs, points)
        log_label = jnp.logaddexp(total.log_label, new.log_label)
        return _Sums(log_label, total.first + new.first, total.second + new.second), None

    numbers = jnp.arange(len(next(iter(draws.values()))), dtype=features.dtype)
    return lax.scan(add, empty, (numbers, draws))[0]


def _at_draw(
    message: Message,
    buckets: tuple[RowBucket, ...],
    found: _Sums,
    signs: Array,
    points: CubaturePoints | None,
) -> _Sums:
    def own(chunk: RowBucket) -> tuple[Array, Array, Array]:
        of_rows = signs[jnp.minimum(chunk.row, len(signs) - 1)]
        return _of_chunk(message_to(message, chunk.task), chunk, of_rows, points)

    for bucket in buckets:
        log_label, first, second = lax.map(own, bucket)
        at = (bucket.row[..., None], bucket.missing)
        found = _Sums(
            found.log_label.at[bucket.row].set(log_label, mode="drop"),
            found.first.at[at].add(first, mode="drop"),
            found.second.at[at].add(second, mode="drop"),
        )
    return found


def _of_chunk(
    message: Message, chunk: RowBucket, signs: Array, points: CubaturePoints | None
) -> tuple[Array, Array, Array]:
    """Log probability of the label given the seen entries, and moments of the missing entries.

    The moments are the mean and the mean square; they are 0 in the padding.
    """
    if not chunk.missing.shape[1]:
        log_rho = jax.nn.log_softmax(complete_posterior(message, chunk).log_joint.T)
        mean = jnp.zeros(chunk.missing.shape, log_rho.dtype)
        score = jnp.einsum("cki,pi->pkc", message.answers, chunk.entries)
        log_side = jnp.sum(_log_side(score, jnp.ones_like(score), signs), -1)
        return jax.nn.logsumexp(log_rho + log_side, 1), mean, mean
    none = jnp.zeros((len(chunk.row), 0, len(message.const)), message.const.dtype)
    place = incomplete_given_soft(message, chunk, none, none)
    rho = jnp.exp(place.log_rho)
    blocks, holes, _, block, groups = place.covariance.shape
    covariance = jnp.moveaxis(place.covariance, 0, 2).reshape(holes, holes, blocks * block, groups)
    at_holes = jnp.take_along_axis(place.entries, chunk.missing[:, :, None], 1)
    is_hole = jnp.arange(holes)[None] < chunk.num_missing[:, None]
    spreads = jnp.diagonal(covariance).transpose(0, 2, 1) + at_holes**2
    mean, square = (
        jnp.where(is_hole, jnp.einsum("pk,pak->pa", rho, each), 0) for each in (at_holes, spreads)
    )
    score = jnp.einsum("cki,pik->pkc", message.answers, place.entries)
    w = jnp.where(is_hole[None, None], message.answers[:, :, chunk.missing], 0)
    if points is None:
        log_side = jnp.sum(
            _log_side(score, 1 + jnp.einsum("ckpa,abpk,ckpb->pkc", w, covariance, w), signs), -1
        )
    else:
        identity = jnp.eye(len(w), dtype=score.dtype)[None, None]
        spread = jnp.einsum("ckpa,abpk,dkpb->pkcd", w, covariance, w) + identity
        log_side = log_orthant(score, spread, jnp.broadcast_to(signs[:, None], score.shape), points)
    return jax.nn.logsumexp(place.log_rho + log_side, 1), mean, square


def _log_side(
    score: Float[Array, "row group class"],
    variance: Float[Array, "row group class"],
    signs: Float[Array, "row class"],
) -> Float[Array, "row group class"]:
    """Log probabilities that independent soft labels have these signs [row, group, class]."""
    signs = signs[:, None]
    return jnp.where(signs == 0, 0, log_ndtr(signs * score / jnp.sqrt(variance)))
