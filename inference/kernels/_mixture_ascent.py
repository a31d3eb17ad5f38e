"""Coordinate ascent for mixtures without common factors: what `CoordinateAscent` reads, and its sweeps."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.assignment import Assignment, Rows, read_assignment
from inference.kernels._clusters import start_sums
from inference.kernels._factors import Factors, Shape, divergence, factors_of, message_of, parameters_of, shape_of, statistics_of
from inference.kernels._layout import Bucket, lay_out
from inference.kernels._levels import gathered, share_of
from inference.kernels._mixture_draws import draw_mixture
from inference.kernels._mixture_prediction import Prediction, predict_rows
from inference.kernels._row_block import Message, Sums, sum_rows
from inference.program import Program

__all__ = ["AscentData", "AscentState", "MixtureAscent"]

LEAST_SHARE = 1e-30  # at a start
NUM_HELD = 40  # sweeps before what experts have in common is learned


class AscentData(NamedTuple):
    """The rows as a sweep reads them."""

    buckets: tuple[Bucket, ...]
    log_base: Array  # the part of the bound that nothing changes


class AscentState(NamedTuple):
    """q; the rows follow from it, but for the soft labels that are factors of their own."""

    factors: Factors
    score: tuple[Array, ...]  # locations of those, of each bucket [chunk, place, class, group]
    size: Array  # rows of each group
    elbo: Array  # of the last step
    gain: Array  # over the step before
    average: Sums | None  # of batches, the running average; and the number of steps
    step: Array

    @property
    def may_end(self) -> Array | bool:
        """Never with batches, and not while what experts have in common is held."""
        if self.average is not None:
            return False
        return self.factors.common is None or self.step > NUM_HELD + 1


@dataclass(frozen=True, eq=False)
class MixtureAscent:
    """The mixture as it was read, and its sweeps."""

    found: Assignment
    rows: Rows  # as they came: a start and draws read them, sweeps read `AscentData`
    statistics: np.ndarray  # of the columns [row, statistic]
    shape: Shape
    num_tasks: int
    batch_size: int | None
    forgetting: float

    @classmethod
    def read(cls, program: Program, dtype: str | None, batch_size: int | None, forgetting: float) -> "tuple[MixtureAscent, AscentData]":
        """Proved, and the rows laid out."""
        found = read_assignment(program)
        rows = found.rows(program)
        statistics, log_base = statistics_of(found, rows)
        num_tasks = int(np.prod(program.sites[found.sticks].shape[:-1]))
        buckets = lay_out(rows, statistics, dtype or str(jnp.result_type(float)), shuffled=batch_size is not None)
        reading = cls(found, rows, statistics, shape_of(found, rows), num_tasks, batch_size, forgetting)
        return reading, AscentData(buckets, jnp.asarray(log_base.sum(), float))

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: which of the two cases of `CoordinateAscent` this is."""
        return {"route": "mixture"}

    def start(self, rng: np.random.Generator, init: str, data: AscentData) -> AscentState:
        """What a start's groups imply."""
        sums, share = start_sums(self.rows, self.statistics, self.found, self.num_tasks, init, rng)
        log_share = None if share is None else jnp.log(jnp.maximum(jnp.asarray(share, float), LEAST_SHARE))
        factors = jax.jit(partial(factors_of, self.found, self.shape, is_held=True))(sums, None, log_share)
        score = tuple(self._first_scores(bucket) for bucket in data.buckets)
        average = sums if self.batch_size else None
        infinite = jnp.asarray(jnp.inf, float)
        return AscentState(factors, score, self._size(sums, factors), -infinite, infinite, average, jnp.zeros((), jnp.int32))

    def _first_scores(self, bucket: Bucket) -> Array:
        """Signs; of rows without holes, and of the last class, there are none."""
        num = max(bucket.signs.shape[-1] - 1, 0) if bucket.missing.shape[-1] else 0
        signs = bucket.signs[..., :num, None]
        return jnp.broadcast_to(signs, (*signs.shape[:-1], self.found.num_own))

    def _size(self, sums: Sums, factors: Factors) -> Array:
        return gathered(sums, share_of(factors.upper)).moments[:, self.shape.num_features, self.shape.num_features]

    def moved(self, rng_key: Array, state: AscentState, data: AscentData) -> AscentState:
        """A sweep, which needs no random numbers; or a batch. The bound is that of the q it started from."""
        message = message_of(self.found, self.shape, state.factors)
        own = jax.tree.map(lambda leaf: leaf.astype(data.buckets[0].entries.dtype), message)
        total, scores = None, []
        for i, (bucket, score) in enumerate(zip(data.buckets, state.score, strict=True)):
            sums, score = self._visited(None if self.batch_size is None else random.fold_in(rng_key, i), own, bucket, score)
            sums = jax.tree.map(lambda leaf: leaf.astype(message.const.dtype), sums)
            total = sums if total is None else total.plus(sums)
            scores.append(score)
        assert total is not None
        elbo = total.bound + data.log_base - divergence(self.found, state.factors)
        average = None
        if state.average is not None:
            rate = (state.step + 1).astype(elbo.dtype) ** -self.forgetting
            total = average = state.average.times(1 - rate).plus(total.times(rate))
        factors = factors_of(self.found, self.shape, total, state.factors, is_held=state.step < NUM_HELD)
        return AscentState(factors, tuple(scores), self._size(total, factors), elbo, elbo - state.elbo, average, state.step + 1)

    def _visited(self, rng_key: Array | None, message: Message, bucket: Bucket, score: Array) -> tuple[Sums, Array]:
        """Sums over the rows of a bucket, all of them or some chunks that stand for all; and the scores."""
        num_rows, num_chunks = len(self.rows.features), len(bucket.row)
        if rng_key is None or self.batch_size is None:
            return sum_rows(message, bucket, score, num_rows)
        size = min(max(round(num_chunks * self.batch_size / num_rows), 1), num_chunks)
        at = random.permutation(rng_key, num_chunks)[:size]
        sums, own = sum_rows(message, jax.tree.map(lambda leaf: leaf[at], bucket), score[at], num_rows)
        return sums.times(num_chunks / size), score.at[at].set(own)

    def predict(self, state: AscentState, program: Program) -> Prediction:
        """What q says of the rows of a program as if they were new."""
        return predict_rows(self.found, state.factors, self.found.rows(program))

    def draw(self, rng_key: Array, state: AscentState, data: AscentData, num_draws: int) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        message = message_of(self.found, self.shape, state.factors)
        return draw_mixture(rng_key, self.found, self.rows, message, state.factors, data.buckets, state.score, num_draws)

    def parameters(self, state: AscentState) -> dict[str, dict[str, Array]]:
        """The parameters of q by site, but for the rows."""
        return parameters_of(self.found, state.factors)
