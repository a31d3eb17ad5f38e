"""Orders that learn from more data: nobody is left behind, and a run that was ended early goes
on; against exact evidences.
"""

import pickle
import signal
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import Array

from inference import Algorithm, Interrupted, Orders, Program, Results
from inference.distributions import Zeta
from tests.by_numpy import by_numpy
from tests.inference.importance import ImportanceSampling
from tests.inference.test_orders import QUIET, X, Y, exact_polynomial, polynomial

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


class Known(NamedTuple):
    """A run whose evidence is exact."""

    rows: Array  # [row, 2]: all so far
    log_evidence: Array
    num_steps: Array


class Record(NamedTuple):
    num_rows: Array


@dataclass(frozen=True)
class Rows:
    """How many weights there are: a reading that takes more rows."""

    program: Program

    def more(self, program):
        return self, data_of(program)

    def by_row(self, programs):
        return ("x", "y")


def data_of(program):
    return jnp.asarray(np.stack([program.arguments["x"], program.arguments["y"]], 1))


class Exact(Algorithm):
    """An exact algorithm for polynomials; all is known at once."""

    report = "smc"

    def __init__(self, model):
        self.model = model

    def read(self, program):
        return Rows(program), data_of(program)

    def init(self, rng_key, reading, data):
        return self._of(np.zeros((0, 2)), reading, data)

    def updated(self, state, reading, data, before):
        return self._of(state.rows, reading, data)

    def _of(self, before, reading, data):
        rows = np.concatenate([before, data])
        log_evidence = exact_polynomial(num_weights(reading), *rows.T)
        return Known(jnp.asarray(rows), jnp.asarray(log_evidence), jnp.zeros((), jnp.int32))

    def step(self, rng_key, state, reading, data):
        return state._replace(num_steps=state.num_steps + 1), Record(jnp.asarray(len(state.rows)))

    def finished(self, state):
        return state.num_steps > 0

    def draw(self, rng_key, state, reading, data, num_draws):
        x, y = np.asarray(state.rows).T
        powers = np.stack([x**p for p in range(num_weights(reading))], 1)
        precision = powers.T @ powers / 0.09 + np.eye(powers.shape[1])
        mean = np.linalg.solve(precision, powers.T @ y / 0.09)
        posterior = lambda: dist.MultivariateNormal(mean, precision_matrix=precision)
        return {"weight": by_numpy(lambda key: posterior().sample(key, (num_draws,)))(rng_key)}

    def results(self, state, reading, data):
        return Results(
            {}, {"log_evidence": state.log_evidence, "log_evidence_se": jnp.zeros(())}, {}
        )


def num_weights(reading):
    return reading.program.sites["weight"].shape[0]


def orders_of(kernel=Exact, family=polynomial, **settings):
    return Orders(family, Zeta(), kernel=kernel, most=8, negligible=0.5, settings=QUIET | settings)


def test_what_time_has_ended_goes_on_with_the_data_that_it_had():
    """Orders that the first rows call for have learned from these, though the run had no time
    for them.
    """
    whole, ended = orders_of(), orders_of(max_time=0.0)
    whole.run(0, X, Y)
    with pytest.raises(
        ValueError, match="order 1: its run ended by 'max_time' before it had finished"
    ):
        ended.run(0, X, Y)
    with pytest.raises(
        ValueError, match=r"update: order \d has not come to the end of the data before"
    ):
        ended.update(X[:2], Y[:2])
    ended.settings["max_time"] = None
    for orders in (whole, ended):
        orders.update(X[:2], Y[:2])
    wanted, found = (orders.tree()["orders"].dataset for orders in (whole, ended))
    xr.testing.assert_allclose(found, wanted)


class Refuses(Exact):
    """Rows of an update, of the third order."""

    def updated(self, state, reading, data, before):
        if num_weights(reading) == 3:
            raise ValueError("it is refused")
        return super().updated(state, reading, data, before)


class Fails(Exact):
    """While the first order learns from an update."""

    def step(self, rng_key, state, reading, data):
        if num_weights(reading) == 1 and len(state.rows) > len(X):
            raise ValueError("it is refused")
        return super().step(rng_key, state, reading, data)


def terms(x, y, *, order):
    polynomial(order)(x, y)


def by_name(order):
    """The model of an order, by a function of a module, so that it is pickled."""
    return partial(terms, order=order)


def test_orders_are_pickled_and_go_on():
    orders = orders_of(family=by_name)
    orders.run(0, X[6:8], Y[6:8])
    orders.update(X[8:], Y[8:])
    again = pickle.loads(pickle.dumps(orders))
    for one in (orders, again):
        one.update(X[:2], Y[:2])
    xr.testing.assert_identical(again.tree()["orders"].dataset, orders.tree()["orders"].dataset)


@pytest.mark.parametrize("kernel", [Refuses, Fails])
def test_where_one_order_refuses_nobody_is_weighed(kernel):
    orders = orders_of(kernel)
    orders.run(0, X, Y)
    with pytest.raises(ValueError, match="it is refused"):
        orders.update(X[:2], Y[:2])
    for ask in (orders.tree, lambda: orders.update(X[:2], Y[:2])):
        with pytest.raises(ValueError, match="some orders had learned its data and others had not"):
            ask()
    assert orders.run(0, X, Y)["orders"]["probability"].values.sum() == pytest.approx(1.0)


class Pressed(Exact):
    """By Ctrl-C, when the second order is given the rows of an update."""

    def updated(self, state, reading, data, before):
        if num_weights(reading) == 2 and len(state.rows) == len(X):
            signal.raise_signal(signal.SIGINT)
        return super().updated(state, reading, data, before)


def test_ctrl_c_tears_no_orders():
    """Those that come after have no time, and go on at the next call."""
    orders, whole = orders_of(Pressed), orders_of()
    for one in (orders, whole):
        one.run(0, X, Y)
    whole.update(X[:2], Y[:2])
    with pytest.raises(Interrupted) as caught:
        orders.update(X[:2], Y[:2])
    assert caught.value.signal == "SIGINT"
    assert caught.value.tree.attrs == orders.tree().attrs
    assert orders.tree().attrs["ended"] == "max_time"
    for one in (orders, whole):
        one.update(X[2:4], Y[2:4])
    xr.testing.assert_allclose(orders.tree()["orders"].dataset, whole.tree()["orders"].dataset)


def test_an_update_begins_no_order_and_says_that_higher_ones_may_count():
    """Two rows next to 0 tell nothing of slopes; all others are a parabola."""
    orders = orders_of()
    assert orders.run(0, X[6:8], Y[6:8]).attrs["ended"] == "finished"
    orders.update(X[8:], Y[8:])
    tree = orders.tree()
    assert tree["orders"]["order"].values.tolist() == [1, 2, 3]
    assert tree.attrs["ended"] == "most"
    exact = [exact_polynomial(m, X[6:], Y[6:]) for m in (1, 2, 3)]
    np.testing.assert_allclose(tree["orders"]["log_evidence"].values, exact, rtol=1e-9)
    assert tree.attrs["sampling_time"] >= tree.attrs["compile_time"] > 0


def test_an_evidence_without_an_error_is_refused():
    class Alone(Exact):
        def results(self, state, reading, data):
            return Results({}, {"log_evidence": state.log_evidence}, {})

    with pytest.raises(TypeError, match="kernel: Alone leaves no log_evidence_se"):
        orders_of(Alone).run(0, X, Y)


def test_where_no_order_can_learn_more_the_run_is_as_it_was():
    orders = orders_of(lambda model: ImportanceSampling(model, num_batches=2, batch_size=8))
    wanted = orders.run(0, X, Y)
    with pytest.raises(TypeError, match="update: ImportanceSampling learns from one data set"):
        orders.update(X[:2], Y[:2])
    xr.testing.assert_identical(orders.tree()["orders"].dataset, wanted["orders"].dataset)
