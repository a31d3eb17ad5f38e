"""Variational Bayes for truncated mixtures of conjugate blocks, rows with missing entries among them.

    maximise  E_q[log p(data, everything)] - E_q[log q]  over  q = q(alpha) q(V) prod_blocks q(block) prod_i q(z_i, x_i missing, t_i)

Each factor in turn is set to its optimum given the others, in closed form, so that the bound (the ELBO) never falls; it is exact, not an
estimate. What the model says is read off its trace and proved (`inference.assignment`): edit the model, and the kernel follows or refuses.

A sweep visits every row once (`_row_block`): the group of a row, its missing entries and its soft labels, jointly, for a tighter bound
than the paper's, which has the soft labels by themselves; then the factors of the groups (`_factors`) from sums over the rows. Where the
label of a row with missing entries tells of several soft labels, as with more than two classes, one of these is in the joint factor, and
the others are factors given the group. The bound that a step reports is that of the q it started from, whose rows it has just set right.
Cost of a sweep over n rows, K groups and D = features + 1: n K D^2 without holes; with m holes in a row twice that, and K m^3 / 2 more.
Memory: the data, and K numbers for each row with holes and class beyond two.

What experts have in common, q(zeta, lambda), waits for the first `NUM_HELD` sweeps: weights grow slowly from their start, where experts are
alike, and a lambda that believes in that keeps them so, in a bound far below that of experts which differ.

With `batch_size` a step visits some rows: the factors then follow from a running average of the sums over rows, in which a batch stands
for all rows,

    sums <- (1 - r_t) sums + r_t (rows / batch) sums over the batch,     r_t = (t + 1)^-forgetting,

which is a step along the natural gradient of the bound. A step reports an estimate of the bound, and only a budget ends the run.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.4; Blei and Jordan (2006); Hoffman, Blei, Wang and Paisley
(2013), "Stochastic variational inference".
"""

from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.assignment import Level, read_assignment
from inference.factors import has_factors
from inference.kernels._clusters import STARTS, TOGETHER, start_sums
from inference.kernels._factor_ascent import FactorAscent
from inference.kernels._factors import Factors, divergence, factors_of, message_of, shape_of, statistics_of
from inference.kernels._layout import Bucket, lay_out
from inference.kernels._levels import Upper, gathered, share_of
from inference.kernels._mixture_draws import draw_mixture
from inference.kernels._mixture_prediction import Prediction, log_weights, predict_rows
from inference.kernels._row_block import Message, Sums, sum_rows
from inference.program import Program
from inference.protocol import Algorithm, Results

__all__ = ["AscentData", "AscentReport", "AscentState", "CoordinateAscent"]

LEAST_SHARE = 1e-30  # at a start
NUM_HELD = 40  # sweeps before what experts have in common is learned
NUM_TRIAL = 10  # sweeps after which the best of several starts is chosen


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


class AscentReport(NamedTuple):
    """What a step reports."""

    elbo: Array
    num_groups: Array  # with a row or more


class CoordinateAscent(Algorithm):
    """Coordinate ascent on the evidence bound of `model`.

    :param model: a truncated stick-breaking mixture of conjugate blocks, such as `zoo.load("iqgme").model`; or one of common factors behind
        many features, as `zoo.load("iqgme_factors").model` (`_factor_ascent`), then with all rows a step and one dtype.
    :param init: the groups of the rows before the first sweep: "kmeans", "random", or "task", one for all rows of a task, under a shared
        group of its own (one data set is one task).
    :param restarts: starts, of which the best after a few sweeps goes on; `Driver(max_time=)` begins to count after those.
    :param tolerance: ends when a sweep gains less than this share of the bound.
    :param dtype: of the sums over rows: "float32" halves the time of a sweep where JAX runs in float64. None: what JAX runs in.
    :param batch_size: about as many rows a step, a few hundred at least, drawn anew each time; None: all of them.
    :param forgetting: more than .5 and at most 1; where it is larger, late batches move less: there is less noise in the end, but groups
        that should be one take longer to become so.
    """

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
        if init not in (*STARTS, TOGETHER):
            raise ValueError(f"init: found {init!r}, wanted one of {sorted((*STARTS, TOGETHER))}.")
        if not isinstance(restarts, Integral) or isinstance(restarts, bool) or restarts < 1:
            raise ValueError(f"restarts: found {restarts!r}, wanted an integer, at least 1.")
        if not tolerance >= 0:
            raise ValueError(f"tolerance: found {tolerance!r}, wanted a number, at least 0.")
        if dtype not in (None, "float32", "float64"):
            raise ValueError(f"dtype: found {dtype!r}, wanted 'float32', 'float64' or None.")
        if batch_size is not None and (not isinstance(batch_size, Integral) or isinstance(batch_size, bool) or batch_size < 1):
            raise ValueError(f"batch_size: found {batch_size!r}, wanted an integer, at least 1, or None.")
        if not 0.5 < forgetting <= 1:
            raise ValueError(f"forgetting: found {forgetting!r}, wanted a number above 0.5, at most 1.")
        self.batch_size, self.forgetting = batch_size, forgetting
        self.model, self.init_by, self.restarts, self.tolerance, self.dtype = model, init, restarts, tolerance, dtype
        self._checked: Program | None = None
        self._data: Any = None
        self._among_factors: FactorAscent | None = None

    def check(self, program: Program) -> None:
        """The model is read and proved, and the data are looked at; once, though the driver asks before it asks for a start."""
        if self._checked is program:
            return
        self._among_factors = self._read_factors(program) if has_factors(program) else None
        if self._among_factors is not None:
            self.assignment, self._data, self._checked = self._among_factors.found.given, self._among_factors.data, program
            return
        self.assignment = read_assignment(program)
        self.rows = self.assignment.rows(program)
        self.shape = shape_of(self.assignment, self.rows)
        self.num_tasks = int(np.prod(program.sites[self.assignment.sticks].shape[:-1]))
        self.statistics, log_base = statistics_of(self.assignment, self.rows)
        buckets = lay_out(self.rows, self.statistics, self.dtype or str(jnp.result_type(float)), shuffled=self.batch_size is not None)
        self._data = AscentData(buckets, jnp.asarray(log_base.sum(), float))
        self._checked = program

    def _read_factors(self, program: Program) -> FactorAscent:
        for name, value in {"batch_size": self.batch_size, "dtype": self.dtype}.items():
            if value is not None:
                raise ValueError(f"{name}: found {value!r} for a model whose rows have latent factors; wanted None.")
        return FactorAscent(program)

    def data(self, program: Program) -> Any:
        """The rows, laid out."""
        return self._data

    def init(self, rng_key: Array, program: Program) -> Any:
        """The factors that the groups of a start imply; the best of several after a few sweeps."""
        self.check(program)
        starts = [self._start(key) for key in random.split(rng_key, self.restarts)]
        if self.restarts == 1:
            return starts[0]
        turn = lambda data: lambda i, at: self._moved(random.fold_in(rng_key, i), at, data)
        advance = jax.jit(lambda state, data: jax.lax.fori_loop(0, NUM_TRIAL, turn(data), state))
        ends = [advance(start, self._data) for start in starts]
        return max(ends, key=lambda state: float(state.elbo))

    def _start(self, rng_key: Array) -> Any:
        rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
        if self._among_factors is not None:
            return self._among_factors.start(rng, self.init_by)
        sums, share = start_sums(self.rows, self.statistics, self.assignment, self.num_tasks, self.init_by, rng)
        log_share = None if share is None else jnp.log(jnp.maximum(jnp.asarray(share, float), LEAST_SHARE))
        factors = jax.jit(partial(factors_of, self.assignment, self.shape, is_held=True))(sums, None, log_share)
        score = tuple(self._first_scores(bucket) for bucket in self._data.buckets)
        average = sums if self.batch_size else None
        infinite = jnp.asarray(jnp.inf, float)
        return AscentState(factors, score, self._size(sums, factors), -infinite, infinite, average, jnp.zeros((), jnp.int32))

    def _first_scores(self, bucket: Bucket) -> Array:
        """Signs; of rows without holes, and of the last class, there are none."""
        num = max(bucket.signs.shape[-1] - 1, 0) if bucket.missing.shape[-1] else 0
        signs = bucket.signs[..., :num, None]
        return jnp.broadcast_to(signs, (*signs.shape[:-1], self.assignment.num_own))

    def step(self, rng_key: Array, state: Any, data: Any) -> tuple[Any, AscentReport]:
        """One sweep, which needs no random numbers; or one batch."""
        state = self._moved(rng_key, state, data)
        return state, AscentReport(state.elbo, jnp.sum(state.size >= 1))

    def _size(self, sums: Sums, factors: Factors) -> Array:
        return gathered(sums, share_of(factors.upper)).moments[:, self.shape.num_features, self.shape.num_features]

    def _moved(self, rng_key: Array, state: Any, data: Any) -> Any:
        if self._among_factors is not None:
            return self._among_factors.moved(state, data)
        message = message_of(self.assignment, self.shape, state.factors)
        own = jax.tree.map(lambda leaf: leaf.astype(data.buckets[0].entries.dtype), message)
        total, scores = None, []
        for i, (bucket, score) in enumerate(zip(data.buckets, state.score, strict=True)):
            sums, score = self._visited(None if self.batch_size is None else random.fold_in(rng_key, i), own, bucket, score)
            sums = jax.tree.map(lambda leaf: leaf.astype(message.const.dtype), sums)
            total = sums if total is None else total.plus(sums)
            scores.append(score)
        assert total is not None
        elbo = total.bound + data.log_base - divergence(self.assignment, state.factors)
        average = None
        if state.average is not None:
            rate = (state.step + 1).astype(elbo.dtype) ** -self.forgetting
            total = average = state.average.times(1 - rate).plus(total.times(rate))
        factors = factors_of(self.assignment, self.shape, total, state.factors, is_held=state.step < NUM_HELD)
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

    def finished(self, state: Any) -> Array:
        """When a sweep gains next to nothing; with batches never."""
        stands = (state.gain < self.tolerance * jnp.abs(state.elbo)) & (state.average is None)
        if self._among_factors is not None or state.factors.common is None:
            return stands  # nothing is held
        return stands & (state.step > NUM_HELD + 1)

    def is_full(self, state: Any) -> Array:
        """Whether the bound is no number: no sweep goes on from there."""
        return jnp.isnan(state.elbo)

    def grown(self, state: Any, program: Program) -> Any:
        """Refuses to go on."""
        raise ValueError(
            "the bound is no number. Features whose mean is many times their standard deviation leave no digits: standardise them, or "
            "compute in double precision (`numpyro.enable_x64()`)."
        )

    def predict(self, state: Any, program: Program) -> Prediction:
        """What q says of the rows of a program as if they were new: groups, missing features, and how probable their labels are."""
        if self._among_factors is not None:
            return self._among_factors.predict(state, program)
        return predict_rows(self.assignment, state.factors, self.assignment.rows(program))

    def log_weights(self, state: Any) -> Array:
        """How probable each group is in each task [task, group], the posterior integrated out; one data set is one task."""
        return log_weights(state.factors)

    def draw(self, rng_key: Array, state: Any, program: Program, num_draws: int) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        if self._among_factors is not None:
            return self._among_factors.draw(rng_key, state, num_draws)
        message = message_of(self.assignment, self.shape, state.factors)
        data = self._data.buckets
        return draw_mixture(rng_key, self.assignment, self.rows, message, state.factors, data, state.score, num_draws)

    def results(self, state: Any, program: Program) -> Results:
        """The parameters of q, but for the rows."""
        if self.is_full(state):
            self.grown(state, program)
        found, factors = self.assignment, state.factors
        named: dict[str, Array] = {}
        if found.concentration:
            named |= _named(found.concentration, {"concentration": factors.concentration[0], "rate": factors.concentration[1]})
        shape = (*program.sites[found.sticks].shape[:-1], -1)
        sticks = (part.reshape(shape) for part in factors.sticks)
        named |= _named(found.sticks, dict(zip(("concentration1", "concentration0"), sticks, strict=True)))
        if found.upper and factors.upper:
            named |= _of_upper(found.upper, factors.upper)
        for block, hyper in zip(found.columns, factors.columns, strict=True):
            named |= _named(block.priors[-1], hyper._asdict())
        if found.features:
            named |= _named(found.features.priors[-1], factors.features._asdict())
        if found.experts and factors.weights and factors.common:
            named |= _named(found.experts.weights, factors.weights._asdict())
            common = factors.common
            if found.experts.loc:
                named |= _named(found.experts.loc, {"loc": common.loc, "gamma": common.gamma})
            if found.experts.precision:
                named |= _named(found.experts.precision, {"concentration": common.concentration, "rate": common.rate})
        if self._among_factors is not None:
            for name, parameters in self._among_factors.parameters(state).items():
                named |= _named(name, parameters)
        return Results({"variational_parameters": named}, {}, {})


def _of_upper(level: Level, upper: Upper) -> dict[str, Array]:
    (a, b), (c1, c0) = upper.concentration, upper.sticks
    named = _named(level.sticks, {"concentration1": c1, "concentration0": c0})
    named |= _named(level.site, {"probs": jnp.exp(upper.log_share)})
    return named | (_named(level.concentration, {"concentration": a, "rate": b}) if level.concentration else {})


def _named(site: str, parameters: dict[str, Array]) -> dict[str, Array]:
    return {f"{site}_{name}".replace("/", "."): value for name, value in parameters.items()}
