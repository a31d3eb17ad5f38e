"""Variational Bayes for truncated stick-breaking mixtures; rows may have missing entries.

    maximise  E_q[log p(data, everything)] - E_q[log q]
    over      q = q(alpha) q(V) prod_blocks q(block) prod_i q(z_i, x_i missing, t_i)

The blocks are conjugate, so each factor in turn is set to its optimum given the others, in closed
form. The evidence bound (ELBO) is exact and never falls. The structure is read off the model's
trace and proved (`inference.reading.stick_mixture.read`): edit the model, and the kernel follows or
refuses.

A sweep visits every row once (`rows`): the group, the missing entries and the soft labels of a row,
jointly. That bound is tighter than the paper's, in which the soft labels are a factor of their own.
Then the factors of the groups are updated (`posterior`), from sums over the rows. Where the label
of a row with missing entries decides several soft labels, as with more than two classes, one of
these is in the joint factor, and each of the others is a factor of its own given the group. A step
reports the bound of the q that it started from, with the optimal factors of the rows.

The first sweeps hold q(zeta, lambda) fixed; zeta and lambda are the shared mean and precision of
the experts. The experts are alike at the start, and their weights grow slowly. A lambda that is
learned from such weights would keep the experts alike, at a bound far below that of experts which
differ.

Once sweeps gain little, merges of groups are tried (`merges`): some sweeps on the factors of merged
groups. A merge takes the place of q if the bound has risen by then, so the bound that steps report
is that of the best q and never falls. A group that is left without rows is closed: it gets no rows
again, and its stick and its expert follow the prior given alpha, zeta and lambda. So closed groups
cost nothing, and a bound with few groups is that of few groups, whatever the truncation. With
batches, with several tasks and among common factors nothing is merged. There closed groups would
have to be closed in each task, or in the update of loadings.

With `batch_size` a step visits only a batch of rows. The factors then follow from a running average
of the sums over rows, in which a batch stands for all rows,

    sums <- (1 - r_t) sums + r_t (rows / batch) sums over the batch,     r_t = (t + 1)^-forgetting,

which is a step along the natural gradient of the bound. A step reports an estimate of the bound,
and only a budget ends the run.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.4; Blei and Jordan
(2006); Kurihara, Welling and Vlassis (2007), "Accelerated variational Dirichlet process mixtures",
for closed groups; Hoffman, Blei, Wang and Paisley (2013), "Stochastic variational inference".

Cost of a sweep over n rows, K groups and D = features + 1: n K D^2 without missing entries; with m
of them in a row twice that, and K m^3 / 2 more. Memory: the data, and K numbers for each row with
missing entries and each class beyond two.
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
from inference.kernels.coordinate_ascent.merges import (
    MOST_PLANS,
    merge_plans,
    merged_sums,
    worth_of_groups,
)
from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    divergence,
    factors_of,
    gathered,
    is_open,
    means_of,
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
    as_floats,
    lay_out,
    sum_rows,
)
from inference.kernels.coordinate_ascent.start import STARTS, TOGETHER, start_sums
from inference.maths.host import generator
from inference.program.compiling import compiled
from inference.program.interpreting import interpreted, split
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_whole
from inference.reading.factor_mixture import has_factors
from inference.reading.stick_mixture.read import assignment_and_rows
from inference.reading.stick_mixture.structure import Assignment, MixtureRows, Prior
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = [
    "AscentData",
    "AscentReport",
    "AscentState",
    "CoordinateAscent",
    "MixtureAscent",
    "Trial",
]

NUM_HELD = 40  # sweeps before q(zeta, lambda) is updated
TRIAL_SWEEPS = 6  # of a merge; without a higher bound by then it is dropped
SETTLED = 0.1  # nats that a sweep gains when merges are tried
NO_NUMBER = (
    "the bound is no number. Features whose mean is many times their standard deviation lose all "
    "digits: standardise them, or compute in double precision (`numpyro.enable_x64()`)."
)


class AscentData(NamedTuple):
    """The rows as a sweep reads them."""

    buckets: tuple[RowBucket, ...]
    log_base: Array  # the constant part of the bound
    prior: Prior


class Trial(NamedTuple):
    """A merge of groups that takes the place of q if the bound rises."""

    factors: Factors
    score: tuple[Array, ...]
    left: Array  # number of sweeps that it still has; 0: no merge is being tried
    turn: Array  # number of plans that were tried since q last changed by one
    plans: Array  # where each group goes [plan, group], -1 in a plan that is none


class AscentState(NamedTuple):
    """The parameters of q, the best so far.

    For rows it keeps only the locations of the soft labels that are factors of their own.
    """

    factors: Factors
    score: tuple[Array, ...]  # of each bucket [chunk, place, class, group]
    size: Array  # expected number of rows of each group
    elbo: Array  # of the last step
    gain: Array  # over the step before; infinite with batches and while q(zeta, lambda) is held
    sums: SufficientSums | None  # that the factors follow from; with batches a running average
    step: Array  # number of steps
    trial: Trial | None  # None where no merges are tried: with batches and with several tasks


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
        found, rows = assignment_and_rows(program)
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
            *as_floats((log_base.sum(), found.prior)),
        )

    def start(self, rng: np.random.Generator, init: str, data: AscentData) -> AscentState:
        """q after an update of each factor, given the starting groups."""
        sums, share = start_sums(self.rows, self.statistics, self.found, self.num_tasks, init, rng)
        given = (sums, share, data)
        return interpreted(self._started, *given)(*given)

    def _started(self, sums: SufficientSums, share: Any, data: AscentData) -> AscentState:
        log_share = None if share is None else jnp.log(jnp.maximum(share, 1e-30))
        factors = factors_of(
            self.found, self.shape, data.prior, sums, None, log_share, is_held=True
        )
        infinite, zero = jnp.full((), jnp.inf, sums.bound.dtype), jnp.zeros((), jnp.int32)
        score = tuple(map(self._first_scores, data.buckets))
        plans = jnp.full((MOST_PLANS, self.found.num_own), -1, jnp.int32)
        trial = Trial(factors, score, zero, zero, plans) if self.merges else None
        return AscentState(
            factors,
            score,
            self._size(sums, factors),
            -infinite,
            infinite,
            sums if self.merges or self.batch_size else None,
            zero,
            trial,
        )

    @property
    def merges(self) -> bool:
        """Whether merges are tried."""
        return self.batch_size is None and self.found.upper is None and self.num_tasks == 1

    def _first_scores(self, bucket: RowBucket) -> Array:
        # None in rows without holes, and none for the last class.
        num = max(bucket.signs.shape[-1] - 1, 0) if bucket.missing.shape[-1] else 0
        signs = bucket.signs[..., :num, None]
        return jnp.broadcast_to(signs, (*signs.shape[:-1], self.found.num_own))

    def _size(self, sums: SufficientSums, factors: Factors) -> Array:
        one = self.shape.num_features
        return gathered(sums, share_of(factors.upper)).moments[:, one, one]

    def moved(self, rng_key: Array, state: AscentState, data: AscentData) -> AscentState:
        """A sweep of q or of the merge that is being tried; or a step on a batch.

        A sweep needs no random numbers. The bound is that of the q it started from. A merge takes
        the place of q once its bound is above that of q, whose last sweep is counted in.
        """
        if (trial := state.trial) is None:
            return self._swept(rng_key, state, data)
        is_trial = trial.left > 0
        factors, score = jax.tree.map(
            partial(jnp.where, is_trial), trial[:2], (state.factors, state.score)
        )
        new = self._swept(rng_key, state._replace(factors=factors, score=score), data)
        is_kept = ~is_trial | (new.elbo > state.elbo + state.gain)
        kept = jax.tree.map(partial(jnp.where, is_kept), new, state)
        return kept._replace(
            step=new.step,
            trial=Trial(
                new.factors,
                new.score,
                jnp.where(is_kept, 0, trial.left - 1),
                jnp.where(is_trial & is_kept, 0, trial.turn),
                trial.plans,
            ),
        )

    def proposed(self, state: AscentState, data: AscentData) -> AscentState:
        """The state with the next merge to try; on the host."""
        trial, sums, factors = state.trial, state.sums, state.factors
        assert trial is not None
        assert sums is not None
        turn, plans = int(trial.turn), np.asarray(trial.plans)
        num_open, one = int(factors.num_open), self.shape.num_features
        if turn == 0:
            given = (data.prior, factors, sums, np.eye(self.found.num_own))
            worth = interpreted(partial(worth_of_groups, self.found, self.shape), *given)
            plans = merge_plans(
                lambda into: worth(*given[:3], into),
                np.asarray(sums.moments)[0, :, one, one],
                num_open,
            ).astype(np.int32)
        to = plans[turn]
        if to[0] < 0:
            over = trial._replace(turn=jax.device_put(np.int32(MOST_PLANS)))
            return state._replace(trial=over)
        given = (data, state, to)
        factors, score = interpreted(self._merged, *given)(*given)
        numbers = np.int32(TRIAL_SWEEPS), np.int32(turn + 1), plans
        return state._replace(trial=Trial(factors, score, *map(jax.device_put, numbers)))

    def _merged(self, data: AscentData, state: AscentState, to: Array) -> tuple[Factors, Any]:
        # Factors and scores of groups that go where `to` says; a union has the scores of its
        # largest group.
        assert state.sums is not None
        num = self.found.num_own
        is_into = to[None] == jnp.arange(num)[:, None]
        is_used = jnp.any(is_into & is_open(state.factors.num_open, num)[None], 1)
        factors = factors_of(
            self.found,
            self.shape,
            data.prior,
            merged_sums(state.sums, is_into.astype(state.elbo.dtype)),
            state.factors,
            num_open=jnp.sum(is_used).astype(state.factors.num_open.dtype),
        )
        largest = jnp.argmax(jnp.where(is_into, state.size[None], -1), axis=1)
        return factors, tuple(score[..., largest] for score in state.score)

    def _swept(self, rng_key: Array, state: AscentState, data: AscentData) -> AscentState:
        means = means_of(state.factors)
        message = message_of(self.found, self.shape, state.factors, means)
        own = jax.tree.map(lambda leaf: leaf.astype(data.buckets[0].entries.dtype), message)
        visited = [
            self._visited(random.fold_in(rng_key, i), own, *part)
            for i, part in enumerate(zip(data.buckets, state.score, strict=True))
        ]
        each, scores = zip(*visited, strict=True)
        total = reduce(
            SufficientSums.plus, jax.tree.map(lambda leaf: leaf.astype(message.const.dtype), each)
        )
        elbo = (
            total.bound + data.log_base - divergence(self.found, data.prior, state.factors, means)
        )
        if self.batch_size and state.sums:
            rate = (state.step + 1).astype(elbo.dtype) ** -self.forgetting
            total = state.sums.times(1 - rate).plus(total.times(rate))
        factors = factors_of(
            self.found,
            self.shape,
            data.prior,
            total,
            state.factors,
            is_held=state.step < NUM_HELD,
            means=means,
        )
        size, step = self._size(total, factors), state.step + 1
        return AscentState(
            factors,
            scores,
            size,
            elbo,
            jnp.where(
                not self.batch_size and (factors.common is None or state.step > NUM_HELD),
                elbo - state.elbo,
                jnp.inf,
            ),
            None if state.sums is None else total,
            step,
            state.trial,
        )

    def _visited(
        self, rng_key: Array, message: Message, bucket: RowBucket, score: Array
    ) -> tuple[SufficientSums, Array]:
        # The sums over the rows of a bucket, by all its chunks or by some that stand for all; and
        # the new scores.
        if self.batch_size is None:
            return sum_rows(message, bucket, score)
        num_rows, num_chunks = len(self.rows.features), len(bucket.row)
        size = min(max(round(num_chunks * self.batch_size / num_rows), 1), num_chunks)
        at = random.permutation(rng_key, num_chunks)[:size]
        sums, own = sum_rows(message, jax.tree.map(lambda leaf: leaf[at], bucket), score[at])
        return sums.times(num_chunks / size), score.at[at].set(own)

    def predict(self, state: AscentState, rows: MixtureRows) -> Prediction:
        """The predictions for rows, as if they had not been fitted."""
        return predict_rows(self.found, state.factors, rows)

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
        """The parameters of q by site, without those of the rows."""
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
        dtype: The type of the sums over rows. "float32" halves the time of a sweep where JAX runs
            in float64. None: JAX's default.
        batch_size: The number of rows of a step, approximately, a few hundred at least; they are
            drawn anew each time. None: all rows.
        forgetting: More than .5 and at most 1. A larger value lets late batches move less: there is
            less noise in the end, but groups that should be one take longer to merge.
    """

    report = "variational"
    command = Command(
        driver={"num_chains": 1, "num_samples": 200},
        double_below=np.inf,
        held_out=0.2,
        predicts_by_states=True,
        is_marginal=True,
    )

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
        """The state after the start; with several starts the best of them, after a few sweeps."""
        starts = [
            reading.start(generator(key), self.init_by, data)
            for key in split(rng_key, self.restarts)
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
        """Whether a sweep gained less than the tolerance, and no merge is left to try.

        Never with batches.
        """
        is_settled = state.gain < self.tolerance * jnp.abs(state.elbo)
        if (trial := state.trial) is None:
            return is_settled
        return is_settled & (trial.left == 0) & (trial.turn == MOST_PLANS)

    def needs_host(self, state: Any) -> Array:
        """Whether the bound is no number, or a merge is to be tried."""
        is_wrong = jnp.isnan(state.elbo)
        if (trial := state.trial) is None:
            return is_wrong
        is_settled = state.gain < jnp.maximum(SETTLED, self.tolerance * jnp.abs(state.elbo))
        return is_wrong | (is_settled & (trial.left == 0) & (trial.turn < MOST_PLANS))

    def on_host(self, states: Sequence[Any], reading: Ascent, data: Any) -> Sequence[Any]:
        """The states with the next merge to try.

        Raises ValueError where the bound is no number, because no sweep goes on from there.
        """
        if any(np.isnan(state.elbo) for state in states):
            raise ValueError(NO_NUMBER)
        asks = interpreted(self.needs_host, states[0])
        assert isinstance(reading, MixtureAscent)
        return [reading.proposed(state, data) if asks(state) else state for state in states]

    def predict(self, state: Any, reading: Ascent, program: Program) -> Prediction:
        """Groups, missing features and label probabilities of the rows of a program.

        The rows are predicted as if they had not been fitted.
        """
        return reading.predict(state, reading.found.rows(program))

    def log_weights(self, state: Any) -> Array:
        """The log probability of each group in each task [task, group], with sticks integrated out.

        One data set is one task.
        """
        return log_weights(state.factors)

    def draw(
        self, rng_key: Array, state: Any, reading: Ascent, data: Any, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        return reading.draw(rng_key, state, data, num_draws)

    def results(self, state: Any, reading: Ascent, data: Any) -> Results:
        """The parameters of q, without those of the rows."""
        if np.isnan(state.elbo):
            raise ValueError(NO_NUMBER)
        named = {
            f"{site}_{name}".replace("/", "."): value
            for site, own in reading.parameters(jax.device_get(state)).items()
            for name, value in own.items()
        }
        return Results({"variational_parameters": named}, {}, {})
