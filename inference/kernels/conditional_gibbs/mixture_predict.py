"""What draws from the posterior of a mixture say of other rows, groups and missing entries
integrated out at each draw.

With D draws d of all that belongs to groups, a row of which x is seen has

    p(y | x, data) = sum_d p(y | x, d) / D,        p(y | x, d) = sum_h pi_h p(x | h) p(y | x, h) / sum_h pi_h p(x | h),      (1)

and the mean and the square of its missing entries likewise. Given the group scores are normal, and
p(y | x, h) exact. Where a label tells of several soft labels of a row with missing entries, these
have the entries in common, and what is wanted is an integral (`inference.maths.orthants`): by
`NUM_POINTS` at each draw, of three classes with an error of 5e-4 at most, of more classes by other
points at each draw, which together are one set of many. What a row itself tells of d is left out;
weights p(x | d) would bring it in, but with some dozen features one of some hundred draws would
have all the weight.

Cost, for each draw: n K D^2 for n rows, K groups and D entries, with m holes in a row n K m^3 / 2
more, and with C > 2 classes n K C^2 `NUM_POINTS`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import log_ndtr

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
    """Of each row, as if it were new; its label plays no part but in its own probability."""

    log_label: Array  # of the label that the row has, 0 where it has none [row]
    mean: Array  # of the features, those that are seen as they are [row, feature]
    deviation: Array  # standard deviation, 0 where seen [row, feature]


class _Sums(NamedTuple):
    """Over the draws so far: the logarithm of that of (1), sums of missing entries and of their
    squares [row, feature].
    """

    log_label: Array
    first: Array
    second: Array


class AssignmentDraws:
    """Predicts by draws of `model`, whose parts are `found`; data of the run are not kept."""

    def __init__(self, model: Callable, found: Assignment):
        self.model, self.found = model, found

    def predict(self, draws: Mapping[str, Any], program: Program) -> RowPrediction:
        """Of the rows of a program; `draws` are {site: [draw, ...]} of all that belongs to
        groups.
        """
        found, rows = self.found, self.found.rows(program)
        shape, (statistics, _) = shape_of(rows), statistics_of(found, rows)
        dtype = str(jnp.result_type(float))
        buckets = lay_out(rows._replace(signs=0 * rows.signs), statistics, dtype)
        each = {
            name: jnp.asarray(value)
            for name, value in draws.items()
            if name in program.latent and name not in found.of_rows
        }
        features, signs = jnp.asarray(rows.features, dtype), jnp.asarray(rows.signs, dtype)
        num_draws = len(next(iter(each.values())))
        given = each, buckets, features, signs
        log_label, first, second = compiled(
            lambda *given: _over_draws(found, shape, *given), *given
        )(*given)
        mean, is_seen = first / num_draws, ~jnp.isnan(features)
        deviation = jnp.sqrt(jnp.maximum(second / num_draws - mean**2, 0))
        known = lambda seen, filled: jnp.where(is_seen, seen, filled)
        return RowPrediction(
            log_label - jnp.log(num_draws),
            known(features, mean),
            known(jnp.zeros_like(mean), deviation),
        )


def _over_draws(
    found: Assignment,
    shape: Shape,
    draws: Mapping[str, Array],
    buckets: tuple[RowBucket, ...],
    features: Array,
    signs: Array,
) -> _Sums:
    empty = _Sums(
        jnp.full(len(features), -jnp.inf, features.dtype),
        jnp.zeros_like(features),
        jnp.zeros_like(features),
    )

    def add(total: _Sums, draw: tuple[Array, Mapping[str, Array]]) -> tuple[_Sums, None]:
        number, values = draw
        points = (
            cubature_points(signs.shape[1], NUM_POINTS, NUM_POINTS * number)
            if signs.shape[1] > 1
            else None
        )
        new = _at_draw(message_at(found, shape, values), buckets, empty, signs, points)
        return _Sums(
            jnp.logaddexp(total.log_label, new.log_label),
            total.first + new.first,
            total.second + new.second,
        ), None

    return lax.scan(
        add, empty, (jnp.arange(len(next(iter(draws.values()))), dtype=features.dtype), draws)
    )[0]


def _at_draw(
    message: Message,
    buckets: tuple[RowBucket, ...],
    found: _Sums,
    signs: Array,
    points: CubaturePoints | None,
) -> _Sums:
    own = lambda chunk: _of_chunk(
        message_to(message, chunk.task),
        chunk,
        signs[jnp.minimum(chunk.row, len(signs) - 1)],
        points,
    )
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
    said: Message, chunk: RowBucket, signs: Array, points: CubaturePoints | None
) -> tuple[Array, Array, Array]:
    """Log probability of the label given what is seen; of each hole the mean and the mean
    square, 0 beyond the holes.
    """
    if not chunk.missing.shape[1]:
        log_rho = jax.nn.log_softmax(complete_posterior(said, chunk).log_joint.T)
        mean = jnp.zeros(chunk.missing.shape, log_rho.dtype)
        score = jnp.einsum("cki,pi->pkc", said.answers, chunk.entries)
        log_side = jnp.sum(_log_side(score, jnp.ones_like(score), signs), -1)
        return jax.nn.logsumexp(log_rho + log_side, 1), mean, mean
    none = jnp.zeros((len(chunk.row), 0, len(said.const)), said.const.dtype)
    place = incomplete_given_soft(said, chunk, none, none)
    rho = jnp.exp(place.log_rho)
    blocks, holes, _, block, groups = place.covariance.shape
    covariance = jnp.moveaxis(place.covariance, 0, 2).reshape(holes, holes, blocks * block, groups)
    at_holes = jnp.take_along_axis(place.entries, chunk.missing[:, :, None], 1)
    is_hole = jnp.arange(holes)[None] < chunk.num_missing[:, None]
    spreads = jnp.diagonal(covariance).transpose(0, 2, 1) + at_holes**2
    mean, square = (
        jnp.where(is_hole, jnp.einsum("pk,pak->pa", rho, each), 0) for each in (at_holes, spreads)
    )
    score = jnp.einsum("cki,pik->pkc", said.answers, place.entries)
    w = jnp.where(is_hole[None, None], said.answers[:, :, chunk.missing], 0)
    if points is None:
        log_side = jnp.sum(
            _log_side(score, 1 + jnp.einsum("ckpa,abpk,ckpb->pkc", w, covariance, w), signs), -1
        )
    else:
        identity = jnp.eye(len(w), dtype=score.dtype)[None, None]
        spread = jnp.einsum("ckpa,abpk,dkpb->pkcd", w, covariance, w) + identity
        log_side = log_orthant(score, spread, jnp.broadcast_to(signs[:, None], score.shape), points)
    return jax.nn.logsumexp(place.log_rho + log_side, 1), mean, square


def _log_side(score: Array, variance: Array, signs: Array) -> Array:
    """Of soft labels that are independent, [place, group, class]."""
    signs = signs[:, None]
    return jnp.where(signs == 0, 0, log_ndtr(signs * score / jnp.sqrt(variance)))
