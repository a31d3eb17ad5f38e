"""Variational Bayes for truncated mixtures of conjugate blocks, rows with missing entries among
them.

    maximise  E_q[log p(data, everything)] - E_q[log q]  over  q = q(alpha) q(V) prod_blocks
    q(block) prod_i q(z_i, x_i missing, t_i)

Each factor in turn is set to its optimum given the others, in closed form, so that the bound (the
ELBO) never falls; it is exact, not an estimate. What the model says is read off its trace and
proved (`inference.reading.stick_mixture.read`): edit the model, and the kernel follows or refuses.

A sweep visits every row once (`rows`): the group of a row, its missing entries and its soft labels,
jointly, for a tighter bound than the paper's, which has the soft labels by themselves; then the
factors of the groups (`posterior`) from sums over the rows. Where the label of a row with missing
entries tells of several soft labels, as with more than two classes, one of these is in the joint
factor, and the others are factors given the group. The bound that a step reports is that of the q
it started from, whose rows it has just set right. Cost of a sweep over n rows, K groups and D =
features + 1: n K D^2 without holes; with m holes in a row twice that, and K m^3 / 2 more. Memory:
the data, and K numbers for each row with holes and class beyond two.

What experts have in common, q(zeta, lambda), waits for the first `NUM_HELD` sweeps: weights grow
slowly from their start, where experts are alike, and a lambda that believes in that keeps them so,
in a bound far below that of experts which differ.

With `batch_size` a step visits some rows: the factors then follow from a running average of the
sums over rows, in which a batch stands for all rows,

    sums <- (1 - r_t) sums + r_t (rows / batch) sums over the batch,     r_t = (t + 1)^-forgetting,

which is a step along the natural gradient of the bound. A step reports an estimate of the bound,
and only a budget ends the run.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.4; Blei and Jordan
(2006); Hoffman, Blei, Wang and Paisley (2013), "Stochastic variational inference".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
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
from inference.kernels.coordinate_ascent.rows import Bucket, Message, Sums, lay_out, sum_rows
from inference.kernels.coordinate_ascent.start import STARTS, TOGETHER, start_sums
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_whole
from inference.reading.factor_mixture import has_factors
from inference.reading.stick_mixture.read import read_assignment
from inference.reading.stick_mixture.structure import Assignment, Rows
from inference.run.protocol import Algorithm, Results

__all__ = ["AscentData", "AscentReport", "AscentState", "CoordinateAscent", "MixtureAscent"]

LEAST_SHARE = 1e-30  # at a start
NUM_HELD = 40  # sweeps before what experts have in common is learned
NUM_TRIAL = 10  # sweeps after which the best of several starts is chosen
NO_NUMBER = (
    "the bound is no number. Features whose mean is many times their standard deviation leave no "
    "digits: standardise them, or compute in "
    "double precision (`numpyro.enable_x64()`)."
)


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
    """A mixture without common factors as it was read, and its sweeps."""

    attributes: ClassVar = {"route": "mixture"}
    found: Assignment
    rows: Rows  # as they came: a start and draws read them, sweeps read `AscentData`
    statistics: np.ndarray  # of the columns [row, statistic]
    shape: Shape
    num_tasks: int
    batch_size: int | None
    forgetting: float

    @classmethod
    def read(
        cls, program: Program, dtype: str | None, batch_size: int | None, forgetting: float
    ) -> "tuple[MixtureAscent, AscentData]":
        """Proved, and the rows laid out."""
        found = read_assignment(program)
        rows = found.rows(program)
        statistics, log_base = statistics_of(found, rows)
        num_tasks = int(np.prod(program.sites[found.sticks].shape[:-1]))
        buckets = lay_out(
            rows, statistics, dtype or str(jnp.result_type(float)), shuffled=batch_size is not None
        )
        reading = cls(
            found, rows, statistics, shape_of(found, rows), num_tasks, batch_size, forgetting
        )
        return reading, AscentData(buckets, jnp.asarray(log_base.sum(), float))

    def start(self, rng: np.random.Generator, init: str, data: AscentData) -> AscentState:
        """What a start's groups imply."""
        sums, share = start_sums(self.rows, self.statistics, self.found, self.num_tasks, init, rng)
        log_share = (
            None if share is None else jnp.log(jnp.maximum(jnp.asarray(share, float), LEAST_SHARE))
        )
        factors = jax.jit(partial(factors_of, self.found, self.shape, is_held=True))(
            sums, None, log_share
        )
        score = tuple(self._first_scores(bucket) for bucket in data.buckets)
        average = sums if self.batch_size else None
        infinite = jnp.asarray(jnp.inf, float)
        return AscentState(
            factors,
            score,
            self._size(sums, factors),
            -infinite,
            infinite,
            average,
            jnp.zeros((), jnp.int32),
        )

    def _first_scores(self, bucket: Bucket) -> Array:
        """Signs; of rows without holes, and of the last class, there are none."""
        num = max(bucket.signs.shape[-1] - 1, 0) if bucket.missing.shape[-1] else 0
        signs = bucket.signs[..., :num, None]
        return jnp.broadcast_to(signs, (*signs.shape[:-1], self.found.num_own))

    def _size(self, sums: Sums, factors: Factors) -> Array:
        return gathered(sums, share_of(factors.upper)).moments[
            :, self.shape.num_features, self.shape.num_features
        ]

    def moved(self, rng_key: Array, state: AscentState, data: AscentData) -> AscentState:
        """A sweep, which needs no random numbers; or a batch.

        The bound is that of the q it started from.
        """
        message = message_of(self.found, self.shape, state.factors)
        own = jax.tree.map(lambda leaf: leaf.astype(data.buckets[0].entries.dtype), message)
        key_of = lambda i: None if self.batch_size is None else random.fold_in(rng_key, i)
        visited = [
            self._visited(key_of(i), own, *part)
            for i, part in enumerate(zip(data.buckets, state.score, strict=True))
        ]
        each, scores = zip(*visited, strict=True)
        total = reduce(Sums.plus, jax.tree.map(lambda leaf: leaf.astype(message.const.dtype), each))
        elbo = total.bound + data.log_base - divergence(self.found, state.factors)
        average = None
        if state.average is not None:
            rate = (state.step + 1).astype(elbo.dtype) ** -self.forgetting
            total = average = state.average.times(1 - rate).plus(total.times(rate))
        factors = factors_of(
            self.found, self.shape, total, state.factors, is_held=state.step < NUM_HELD
        )
        return AscentState(
            factors,
            scores,
            self._size(total, factors),
            elbo,
            elbo - state.elbo,
            average,
            state.step + 1,
        )

    def _visited(
        self, rng_key: Array | None, message: Message, bucket: Bucket, score: Array
    ) -> tuple[Sums, Array]:
        """Sums over the rows of a bucket, all of them or some chunks that stand for all; and the
        scores.
        """
        num_rows, num_chunks = len(self.rows.features), len(bucket.row)
        if rng_key is None or self.batch_size is None:
            return sum_rows(message, bucket, score, num_rows)
        size = min(max(round(num_chunks * self.batch_size / num_rows), 1), num_chunks)
        at = random.permutation(rng_key, num_chunks)[:size]
        sums, own = sum_rows(
            message, jax.tree.map(lambda leaf: leaf[at], bucket), score[at], num_rows
        )
        return sums.times(num_chunks / size), score.at[at].set(own)

    def predict(self, state: AscentState, program: Program) -> Prediction:
        """What q says of the rows of a program as if they were new."""
        return predict_rows(self.found, state.factors, self.found.rows(program))

    def draw(
        self, rng_key: Array, state: AscentState, data: AscentData, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        message = message_of(self.found, self.shape, state.factors)
        return draw_mixture(
            rng_key,
            self.found,
            self.rows,
            message,
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

    :param model: a truncated stick-breaking mixture of conjugate blocks, such as
    `zoo.load("iqgme").model`; or one of common
        factors behind many features, as `zoo.load("iqgme_factors").model` (`factors`), then with
        all rows a step and one dtype.
    :param init: the groups of the rows before the first sweep: "kmeans", "random", or "task", one
    for all rows of a task, under a
        shared group of its own (one data set is one task).
    :param restarts: starts, of which the best after a few sweeps goes on; `Driver(max_time=)`
    begins to count after those.
    :param tolerance: ends when a sweep gains less than this share of the bound.
    :param dtype: of the sums over rows: "float32" halves the time of a sweep where JAX runs in
    float64. None: what JAX runs in.
    :param batch_size: about as many rows a step, a few hundred at least, drawn anew each time;
    None: all of them.
    :param forgetting: more than .5 and at most 1; where it is larger, late batches move less: there
    is less noise in the end, but
        groups that should be one take longer to become so.
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
        check_setting(
            init in (*STARTS, TOGETHER), f"one of {sorted((*STARTS, TOGETHER))}", init=init
        )
        check_whole(1, restarts=restarts)
        check_setting(tolerance >= 0, "a number, at least 0", tolerance=tolerance)
        check_setting(
            dtype in (None, "float32", "float64"), "'float32', 'float64' or None", dtype=dtype
        )
        is_size = batch_size is None or (is_whole(batch_size) and batch_size >= 1)
        check_setting(is_size, "an integer, at least 1, or None", batch_size=batch_size)
        check_setting(0.5 < forgetting <= 1, "a number above 0.5, at most 1", forgetting=forgetting)
        self.batch_size, self.forgetting = batch_size, forgetting
        self.model, self.init_by, self.restarts, self.tolerance, self.dtype = (
            model,
            init,
            restarts,
            tolerance,
            dtype,
        )

    def read(self, program: Program) -> tuple[Ascent, Any]:
        """The model, proved, and the rows, laid out."""
        if not has_factors(program):
            return MixtureAscent.read(program, self.dtype, self.batch_size, self.forgetting)
        for name in ("batch_size", "dtype"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}: found {value!r} for a model whose rows have latent factors; wanted "
                    "None."
                )
        return FactorAscent.read(program)

    def init(self, rng_key: Array, reading: Ascent, data: Any) -> Any:
        """The factors that the groups of a start imply; the best of several after a few sweeps."""
        of = lambda key: np.random.default_rng(np.asarray(random.key_data(key)))
        starts = [
            reading.start(of(key), self.init_by, data)
            for key in random.split(rng_key, self.restarts)
        ]
        if self.restarts == 1:
            return starts[0]
        turn = lambda data: lambda i, at: reading.moved(random.fold_in(rng_key, i), at, data)
        advance = jax.jit(lambda state, data: jax.lax.fori_loop(0, NUM_TRIAL, turn(data), state))
        ends = [advance(start, data) for start in starts]
        return max(ends, key=lambda state: float(state.elbo))

    def step(
        self, rng_key: Array, state: Any, reading: Ascent, data: Any
    ) -> tuple[Any, AscentReport]:
        """One sweep, which needs no random numbers; or one batch."""
        state = reading.moved(rng_key, state, data)
        return state, AscentReport(state.elbo, jnp.sum(state.size >= 1))

    def finished(self, state: Any) -> Array:
        """When a sweep gains next to nothing; with batches never."""
        return state.may_end & (state.gain < self.tolerance * jnp.abs(state.elbo))

    def needs_host(self, state: Any) -> Array:
        """Whether the bound is no number: no sweep goes on from there."""
        return jnp.isnan(state.elbo)

    def on_host(self, states: Sequence[Any], reading: Ascent, data: Any) -> Sequence[Any]:
        """Refuses to go on."""
        raise ValueError(NO_NUMBER)

    def predict(self, state: Any, reading: Ascent, program: Program) -> Prediction:
        """What q says of the rows of a program as if they were new: groups, missing features, and
        how probable their labels are.
        """
        return reading.predict(state, program)

    def log_weights(self, state: Any) -> Array:
        """How probable each group is in each task [task, group], the posterior integrated out;
        one data set is one task.
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
        each = reading.parameters(state).items()
        named = {
            f"{site}_{name}".replace("/", "."): value
            for site, own in each
            for name, value in own.items()
        }
        return Results({"variational_parameters": named}, {}, {})
