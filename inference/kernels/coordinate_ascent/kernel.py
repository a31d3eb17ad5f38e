"""Variational Bayes for truncated stick-breaking mixtures of rows that may have missing entries.

Groups have conjugate blocks of features, and probit experts for labels.

    maximise  E_q[log p(data, everything)] - E_q[log q]
    over      q = q(alpha) q(V) prod_blocks q(block) prod_i q(z_i, x_i missing, t_i)

Each factor in turn is set to its optimum given the others, in closed form. So the evidence bound
(ELBO), which is exact, never falls. The structure is read off the model's trace and proved
(`inference.reading.stick_mixture.read`): edit the model, and the kernel follows or refuses.

A sweep visits every row once (`rows`): the group, the missing entries and the soft labels of a row,
jointly. That bound is tighter than the paper's, in which the soft labels are a factor of their own.
Then come the factors of the groups (`posterior`), from sums over the rows. Where the label of a row
with missing entries decides several soft labels, as with more than two classes, one of these is in
the joint factor, and the others are factors given the group. A step reports the bound of the q that
it started from, with the optimal factors of the rows.

The first sweeps hold q(zeta, lambda). Weights grow slowly from a start at which experts are alike.
A lambda that is learned from those would keep experts alike, at a bound far below that of experts
which differ.

With `batch_size` a step visits some rows. The factors then follow from a running average of the
sums over rows, in which a batch stands for all rows,

    sums <- (1 - r_t) sums + r_t (rows / batch) sums over the batch,     r_t = (t + 1)^-forgetting,

which is a step along the natural gradient of the bound. A step reports an estimate of the bound,
and only a budget ends the run.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.4; Blei and Jordan
(2006); Hoffman, Blei, Wang and Paisley (2013), "Stochastic variational inference".

Cost of a sweep over n rows, K groups and D = features + 1: n K D^2 without holes; with m holes in a
row twice that, and K m^3 / 2 more. Memory: the data, and K numbers for each row with holes and
class beyond two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.coordinate_ascent.draws import draw_mixture
from inference.kernels.coordinate_ascent.factors import FactorAscent
from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    divergence,
    factors_of,
    gathered,
    message_of,
    parameters_of,
    shape_of,
    share_of,
    statistics_of,
)
from inference.kernels.coordinate_ascent.predict import Prediction, log_weights, predict_rows
from inference.kernels.coordinate_ascent.rows import (
    Message,
    RowBucket,
    SufficientSums,
    lay_out,
    sum_rows,
)
from inference.kernels.coordinate_ascent.start import STARTS, TOGETHER, start_sums
from inference.program.compiling import compiled
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_whole
from inference.reading.factor_mixture import has_factors
from inference.reading.stick_mixture.read import read_assignment
from inference.reading.stick_mixture.structure import Assignment, MixtureRows
from inference.run.protocol import Algorithm, Results

__all__ = ["AscentData", "AscentReport", "AscentState", "CoordinateAscent", "MixtureAscent"]

NUM_HELD = 40  # sweeps before q(zeta, lambda) is updated
NO_NUMBER = (
    "the bound is no number. Features whose mean is many times their standard deviation leave no "
    "digits: standardise them, or compute in double precision (`numpyro.enable_x64()`)."
)


class AscentData(NamedTuple):
    """The rows as a sweep reads them."""

    buckets: tuple[RowBucket, ...]
    log_base: Array  # the constant part of the bound


class AscentState(NamedTuple):
    """q. Of the rows only the locations of soft labels that are factors of their own are kept."""

    factors: Factors
    score: tuple[Array, ...]  # of each bucket [chunk, place, class, group]
    size: Array  # expected number of rows of each group
    elbo: Array  # of the last step
    gain: Array  # over the step before; infinite with batches and while q(zeta, lambda) is held
    average: SufficientSums | None  # the running average, with batches
    step: Array  # number of steps


@dataclass(frozen=True, eq=False)
class MixtureAscent:
    """A mixture without common factors as it was read, and its sweeps."""

    attributes: ClassVar = {"route": "mixture"}
    found: Assignment
    rows: MixtureRows  # as they came: a start and draws read them, sweeps read `AscentData`
    statistics: np.ndarray  # of the columns [row, statistic]
    shape: Shape
    num_tasks: int
    batch_size: int | None
    forgetting: float

    @classmethod
    def read(
        cls, program: Program, dtype: str | None, batch_size: int | None, forgetting: float
    ) -> "tuple[MixtureAscent, AscentData]":
        """The mixture, proved, and the rows in buckets."""
        found = read_assignment(program)
        rows = found.rows(program)
        statistics, log_base = statistics_of(found, rows)
        reading = cls(
            found,
            rows,
            statistics,
            shape_of(rows),
            int(np.prod(program.sites[found.sticks].shape[:-1])),
            batch_size,
            forgetting,
        )
        return reading, AscentData(
            lay_out(
                rows,
                statistics,
                dtype or str(jnp.result_type(float)),
                shuffled=batch_size is not None,
            ),
            jnp.asarray(log_base.sum(), float),
        )

    def start(self, rng: np.random.Generator, init: str, data: AscentData) -> AscentState:
        """q after the updates that the groups of a start imply."""
        sums, share = start_sums(self.rows, self.statistics, self.found, self.num_tasks, init, rng)
        log_share = (
            None if share is None else jnp.log(jnp.maximum(jnp.asarray(share, float), 1e-30))
        )
        update = lambda sums, log_share: factors_of(
            self.found, self.shape, sums, None, log_share, is_held=True
        )
        factors = compiled(update, sums, log_share)(sums, log_share)
        average, infinite = sums if self.batch_size else None, jnp.asarray(jnp.inf, float)
        size, step = self._size(sums, factors), jnp.zeros((), jnp.int32)
        return AscentState(
            factors,
            tuple(map(self._first_scores, data.buckets)),
            size,
            -infinite,
            infinite,
            average,
            step,
        )

    def _first_scores(self, bucket: RowBucket) -> Array:
        # None in rows without holes, and none for the last class.
        num = max(bucket.signs.shape[-1] - 1, 0) if bucket.missing.shape[-1] else 0
        signs = bucket.signs[..., :num, None]
        return jnp.broadcast_to(signs, (*signs.shape[:-1], self.found.num_own))

    def _size(self, sums: SufficientSums, factors: Factors) -> Array:
        one = self.shape.num_features
        return gathered(sums, share_of(factors.upper)).moments[:, one, one]

    def moved(self, rng_key: Array, state: AscentState, data: AscentData) -> AscentState:
        """The state after a sweep, or after a natural-gradient step on a batch.

        A sweep needs no random numbers. The bound is that of the q it started from.
        """
        message = message_of(self.found, self.shape, state.factors)
        own = jax.tree.map(lambda leaf: leaf.astype(data.buckets[0].entries.dtype), message)
        visited = [
            self._visited(random.fold_in(rng_key, i), own, *part)
            for i, part in enumerate(zip(data.buckets, state.score, strict=True))
        ]
        each, scores = zip(*visited, strict=True)
        total = reduce(
            SufficientSums.plus, jax.tree.map(lambda leaf: leaf.astype(message.const.dtype), each)
        )
        elbo = total.bound + data.log_base - divergence(self.found, state.factors)
        average = None
        if state.average is not None:
            rate = (state.step + 1).astype(elbo.dtype) ** -self.forgetting
            total = average = state.average.times(1 - rate).plus(total.times(rate))
        factors = factors_of(
            self.found, self.shape, total, state.factors, is_held=state.step < NUM_HELD
        )
        size, step = self._size(total, factors), state.step + 1
        return AscentState(
            factors,
            scores,
            size,
            elbo,
            jnp.where(
                average is None and (factors.common is None or state.step > NUM_HELD),
                elbo - state.elbo,
                jnp.inf,
            ),
            average,
            step,
        )

    def _visited(
        self, rng_key: Array, message: Message, bucket: RowBucket, score: Array
    ) -> tuple[SufficientSums, Array]:
        # The sums over the rows of a bucket, by all its chunks or by some that stand for all; and
        # the new scores.
        num_rows, num_chunks = len(self.rows.features), len(bucket.row)
        if self.batch_size is None:
            return sum_rows(message, bucket, score, num_rows)
        size = min(max(round(num_chunks * self.batch_size / num_rows), 1), num_chunks)
        at = random.permutation(rng_key, num_chunks)[:size]
        sums, own = sum_rows(
            message, jax.tree.map(lambda leaf: leaf[at], bucket), score[at], num_rows
        )
        return sums.times(num_chunks / size), score.at[at].set(own)

    def predict(self, state: AscentState, program: Program) -> Prediction:
        """What q says of the rows of a program, as if they had not been fitted."""
        return predict_rows(self.found, state.factors, self.found.rows(program))

    def draw(
        self, rng_key: Array, state: AscentState, data: AscentData, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q of all sites [draw, ...]; `log_q` is their density."""
        return draw_mixture(
            rng_key,
            self.found,
            self.rows,
            message_of(self.found, self.shape, state.factors),
            state.factors,
            data.buckets,
            state.score,
            num_draws,
        )

    def parameters(self, state: AscentState) -> dict[str, dict[str, Array]]:
        """The parameters of q by site, but for the rows."""
        return parameters_of(self.found, state.factors)


type Ascent = MixtureAscent | FactorAscent  # what was read, and how q moves


class AscentReport(NamedTuple):
    """What a step reports."""

    elbo: Array
    num_groups: Array  # with a row or more


class CoordinateAscent(Algorithm):
    """Coordinate ascent on the evidence bound of `model`.

    Args:
        model: A truncated stick-breaking mixture of conjugate blocks, such as
            `zoo.load("iqgme").model`, or one among common factors, such as
            `zoo.load("iqgme_factors").model`. The latter takes no `dtype` and no `batch_size`.
        init: The groups of the rows before the first sweep: "kmeans", "random", or "task" (all
            rows of a task in one group, under a shared group of its own; one data set is one task).
        restarts: The number of starts. The best after a few sweeps goes on. `Driver(max_time=)`
            counts from then on.
        tolerance: The run ends when a sweep gains less than this share of the bound.
        dtype: Of the sums over rows. "float32" halves the time of a sweep where JAX runs in
            float64. None: that of JAX.
        batch_size: About as many rows a step, a few hundred at least, drawn anew each time. None:
            all rows.
        forgetting: More than .5 and at most 1. A larger value lets late batches move less: there is
            less noise in the end, but groups that should be one take longer to merge.
    """

    report = "variational"

    def __init__(
        self,
        model: Any,
        *,
        init: str = "kmeans",
        restarts: int = 1,
        tolerance: float = 1e-7,
        dtype: str | None = None,
        batch_size: int | None = None,
        forgetting: float = 0.6,
    ):
        starts = sorted((*STARTS, TOGETHER))
        check_setting(init in starts, f"one of {starts}", init=init)
        check_whole(1, restarts=restarts)
        check_setting(tolerance >= 0, "a number, at least 0", tolerance=tolerance)
        check_setting(
            dtype in (None, "float32", "float64"), "'float32', 'float64' or None", dtype=dtype
        )
        check_setting(
            batch_size is None or (is_whole(batch_size) and batch_size >= 1),
            "an integer, at least 1, or None",
            batch_size=batch_size,
        )
        check_setting(0.5 < forgetting <= 1, "a number above 0.5, at most 1", forgetting=forgetting)
        self.model, self.init_by, self.restarts, self.tolerance = model, init, restarts, tolerance
        self.dtype, self.batch_size, self.forgetting = dtype, batch_size, forgetting

    def read(self, program: Program) -> tuple[Ascent, Any]:
        """The strategy for the model, proved, and the rows as it reads them."""
        strategy = FactorAscent if has_factors(program) else MixtureAscent
        return strategy.read(program, self.dtype, self.batch_size, self.forgetting)

    def init(self, rng_key: Array, reading: Ascent, data: Any) -> Any:
        """The factors that the groups of a start imply; the best of several after a few sweeps."""
        starts = [
            reading.start(
                np.random.default_rng(np.asarray(random.key_data(key))), self.init_by, data
            )
            for key in random.split(rng_key, self.restarts)
        ]
        if self.restarts == 1:
            return starts[0]
        turn = lambda data: lambda i, at: reading.moved(random.fold_in(rng_key, i), at, data)
        advance = lambda state, data: jax.lax.fori_loop(0, 10, turn(data), state)
        return max(
            [compiled(advance, start, data)(start, data) for start in starts],
            key=lambda state: float(state.elbo),
        )

    def step(
        self, rng_key: Array, state: Any, reading: Ascent, data: Any
    ) -> tuple[Any, AscentReport]:
        """One sweep, which needs no random numbers, or one step on a batch."""
        state = reading.moved(rng_key, state, data)
        return state, AscentReport(state.elbo, jnp.sum(state.size >= 1))

    def finished(self, state: Any) -> Array:
        """Whether a sweep gained less than the tolerance; never with batches."""
        return state.gain < self.tolerance * jnp.abs(state.elbo)

    def needs_host(self, state: Any) -> Array:
        """Whether the bound is no number."""
        return jnp.isnan(state.elbo)

    def on_host(self, states: Sequence[Any], reading: Ascent, data: Any) -> Sequence[Any]:
        """Raises ValueError, because no sweep goes on from a bound that is no number."""
        raise ValueError(NO_NUMBER)

    def predict(self, state: Any, reading: Ascent, program: Program) -> Prediction:
        """Predicts groups, missing features and labels of rows, as if they were new."""
        return reading.predict(state, program)

    def log_weights(self, state: Any) -> Array:
        """The log of the posterior mean weight of each group in each task [task, group].

        One data set is one task.
        """
        return log_weights(state.factors)

    def draw(
        self, rng_key: Array, state: Any, reading: Ascent, data: Any, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        return reading.draw(rng_key, state, data, num_draws)

    def results(self, state: Any, reading: Ascent, data: Any) -> Results:
        """The parameters of q, but for the rows."""
        if np.isnan(state.elbo):
            raise ValueError(NO_NUMBER)
        named = {
            f"{site}_{name}".replace("/", "."): value
            for site, own in reading.parameters(state).items()
            for name, value in own.items()
        }
        return Results({"variational_parameters": named}, {}, {})
