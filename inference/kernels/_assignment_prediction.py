"""What draws from the posterior of a mixture say of other rows, groups and missing entries integrated out at each draw.

With draws d of all that belongs to groups, a row of which x is seen has

    p(y | x, data) = sum_d p(y, x | d) / sum_d p(x | d),        p(y, x | d) = sum_h pi_h p(x | h) p(y | x, h),               (1)

and so the draws that explain what is seen weigh more; the mean and the spread of its missing entries likewise. Given the group a score is
normal, and (1) exact, but where a label tells of several soft labels of a row with missing entries: they are then taken for independent.

Cost, for each draw: n K D^2 for n rows, K groups and D entries, with m holes in a row n K m^3 / 2 more.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import log_ndtr

from inference.assignment import Assignment
from inference.kernels._factors import Shape, message_at, shape_of, statistics_of
from inference.kernels._layout import Bucket, lay_out
from inference.kernels._row_block import Message, message_to, place_complete, place_given
from inference.program import Program

__all__ = ["AssignmentDraws", "RowPrediction"]


class RowPrediction(NamedTuple):
    """Of each row, as if it were new; its label plays no part but in its own probability."""

    log_label: Array  # of the label that the row has, 0 where it has none [row]
    mean: Array  # of the features, those that are seen as they are [row, feature]
    deviation: Array  # standard deviation, 0 where seen [row, feature]


class _Sums(NamedTuple):
    """Over the draws so far: logarithms of both sums of (1), and weighted means [row, feature]."""

    log_seen: Array
    log_joint: Array
    first: Array
    second: Array


class AssignmentDraws:
    """Predicts by draws of `model`, whose parts are `found`; data of the run are not kept."""

    def __init__(self, model: Callable, found: Assignment):
        self.model, self.found = model, found

    def predict(self, draws: Mapping[str, Any], program: Program) -> RowPrediction:
        """Of the rows of a program; `draws` are {site: [draw, ...]} of all that belongs to groups."""
        found, rows = self.found, self.found.rows(program)
        shape, (statistics, _) = shape_of(found, rows), statistics_of(found, rows)
        dtype = str(jnp.result_type(float))
        buckets = lay_out(rows._replace(signs=0 * rows.signs), statistics, dtype)
        each = {name: jnp.asarray(value) for name, value in draws.items() if name in program.latent and name not in found.of_rows}
        features, signs = jnp.asarray(rows.features, dtype), jnp.asarray(rows.signs, dtype)
        total = jax.jit(lambda *given: _over_draws(found, shape, *given))(each, buckets, features, signs)
        deviation = jnp.sqrt(jnp.maximum(total.second - total.first**2, 0))
        is_seen = ~jnp.isnan(features)
        return RowPrediction(total.log_joint - total.log_seen, jnp.where(is_seen, features, total.first), jnp.where(is_seen, 0, deviation))


def _over_draws(
    found: Assignment, shape: Shape, draws: Mapping[str, Array], buckets: tuple[Bucket, ...], features: Array, signs: Array
) -> _Sums:
    none = jnp.full(len(features), -jnp.inf, features.dtype)
    empty = _Sums(none, none, jnp.zeros_like(features), jnp.zeros_like(features))

    def add(total: _Sums, values: Mapping[str, Array]) -> tuple[_Sums, None]:
        new = _at_draw(message_at(found, shape, values), buckets, empty, signs)
        log_seen = jnp.logaddexp(total.log_seen, new.log_seen)
        weight = jnp.exp(new.log_seen - log_seen)[:, None]
        mean = lambda old, one: old + weight * (one - old)
        joint = jnp.logaddexp(total.log_joint, new.log_joint)
        return _Sums(log_seen, joint, mean(total.first, new.first), mean(total.second, new.second)), None

    return lax.scan(add, empty, draws)[0]


def _at_draw(message: Message, buckets: tuple[Bucket, ...], found: _Sums, signs: Array) -> _Sums:
    for bucket in buckets:
        own = lambda chunk: _of_chunk(message_to(message, chunk.task), chunk, signs[jnp.minimum(chunk.row, len(signs) - 1)])
        log_seen, log_joint, first, second = lax.map(own, bucket)
        at = (bucket.row[..., None], bucket.missing)
        found = _Sums(
            found.log_seen.at[bucket.row].set(log_seen, mode="drop"),
            found.log_joint.at[bucket.row].set(log_joint, mode="drop"),
            found.first.at[at].add(first, mode="drop"),
            found.second.at[at].add(second, mode="drop"),
        )
    return found


def _of_chunk(said: Message, chunk: Bucket, signs: Array) -> tuple[Array, Array, Array, Array]:
    """Log density of what is seen, and with the label; of each hole the mean and the mean square, 0 beyond the holes."""
    if not chunk.missing.shape[1]:
        log_group, score = place_complete(said, chunk).log_joint.T, jnp.einsum("cki,pi->pck", said.answers, chunk.entries)
        log_seen, mean, square = jax.nn.logsumexp(log_group, 1), jnp.zeros(chunk.missing.shape), jnp.zeros(chunk.missing.shape)
        variance = jnp.zeros_like(score)
    else:
        none = jnp.zeros((len(chunk.row), 0, len(said.const)), said.const.dtype)
        place = place_given(said, chunk, none, none)
        log_seen, log_group, rho = place.norm, place.log_rho + place.norm[:, None], jnp.exp(place.log_rho)
        blocks, holes, _, block, groups = place.covariance.shape
        covariance = jnp.moveaxis(place.covariance, 0, 2).reshape(holes, holes, blocks * block, groups)
        at_holes = jnp.take_along_axis(place.entries, chunk.missing[:, :, None], 1)
        is_hole = jnp.arange(holes)[None] < chunk.num_missing[:, None]
        spreads = jnp.diagonal(covariance).transpose(0, 2, 1) + at_holes**2
        mean, square = (jnp.where(is_hole, jnp.einsum("pk,pak->pa", rho, each), 0) for each in (at_holes, spreads))
        score = jnp.einsum("cki,pik->pck", said.answers, place.entries)
        w = jnp.where(is_hole[None, None], said.answers[:, :, chunk.missing], 0)
        variance = jnp.einsum("ckpa,abpk,ckpb->pck", w, covariance, w)
    log_side = jnp.where(signs[..., None] == 0, 0, log_ndtr(signs[..., None] * score / jnp.sqrt(1 + variance)))
    return log_seen, jax.nn.logsumexp(log_group + log_side.sum(1), 1), mean, square
