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

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.factors import has_factors
from inference.kernels._clusters import STARTS, TOGETHER
from inference.kernels._factor_ascent import FactorAscent
from inference.kernels._mixture_ascent import MixtureAscent
from inference.kernels._mixture_prediction import Prediction, log_weights
from inference.program import Program
from inference.protocol import Algorithm, Results

__all__ = ["AscentReport", "CoordinateAscent"]

NUM_TRIAL = 10  # sweeps after which the best of several starts is chosen
NO_NUMBER = (
    "the bound is no number. Features whose mean is many times their standard deviation leave no digits: standardise them, or compute in "
    "double precision (`numpyro.enable_x64()`)."
)

type Ascent = MixtureAscent | FactorAscent  # what was read, and how q moves


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

    def read(self, program: Program) -> tuple[Ascent, Any]:
        """The model, proved, and the rows, laid out."""
        if not has_factors(program):
            return MixtureAscent.read(program, self.dtype, self.batch_size, self.forgetting)
        for name in ("batch_size", "dtype"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}: found {value!r} for a model whose rows have latent factors; wanted None.")
        return FactorAscent.read(program)

    def init(self, rng_key: Array, reading: Ascent, data: Any) -> Any:
        """The factors that the groups of a start imply; the best of several after a few sweeps."""
        of = lambda key: np.random.default_rng(np.asarray(random.key_data(key)))
        starts = [reading.start(of(key), self.init_by, data) for key in random.split(rng_key, self.restarts)]
        if self.restarts == 1:
            return starts[0]
        turn = lambda data: lambda i, at: reading.moved(random.fold_in(rng_key, i), at, data)
        advance = jax.jit(lambda state, data: jax.lax.fori_loop(0, NUM_TRIAL, turn(data), state))
        ends = [advance(start, data) for start in starts]
        return max(ends, key=lambda state: float(state.elbo))

    def step(self, rng_key: Array, state: Any, reading: Ascent, data: Any) -> tuple[Any, AscentReport]:
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
        """What q says of the rows of a program as if they were new: groups, missing features, and how probable their labels are."""
        return reading.predict(state, program)

    def log_weights(self, state: Any) -> Array:
        """How probable each group is in each task [task, group], the posterior integrated out; one data set is one task."""
        return log_weights(state.factors)

    def draw(self, rng_key: Array, state: Any, reading: Ascent, data: Any, num_draws: int) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        return reading.draw(rng_key, state, data, num_draws)

    def results(self, state: Any, reading: Ascent, data: Any) -> Results:
        """The parameters of q, but for the rows."""
        if np.isnan(state.elbo):
            raise ValueError(NO_NUMBER)
        each = reading.parameters(state).items()
        named = {f"{site}_{name}".replace("/", "."): value for site, own in each for name, value in own.items()}
        return Results({"variational_parameters": named}, {}, {})
