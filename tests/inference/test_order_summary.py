"""What is left for orders that were not tried: probabilities that add up to 1, the Poisson of a mean, and orders that an update calls for,
against exact evidences."""

import pickle
import signal
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import Array
from scipy import optimize, stats

from inference import Orders, Results, _order_summary
from inference._order_summary import OrderSummary, rate_of
from inference.distributions import PositivePoisson, Zeta
from inference.kernels._stages import ByStages
from tests.inference.importance import ImportanceSampling
from tests.inference.test_orders import QUIET, X, Y, exact_polynomial, polynomial

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


class PoissonFromZero(PositivePoisson):
    """As it is printed: of orders from 0."""

    def log_prob(self, value, intermediates=None):
        return dist.Poisson(self.rate).log_prob(value)


class ZetaFromZero(Zeta):
    """As it is printed: of orders from 0."""

    def log_prob(self, value, intermediates=None):
        return np.log(6 / np.pi**2) - 2 * jnp.log(jnp.asarray(value) + 1.0)


PRINTED = {"Poisson": ("PositivePoisson", PoissonFromZero), "zeta": ("Zeta", ZetaFromZero)}


@pytest.mark.parametrize("bug", [None, *PRINTED], ids=["right", *PRINTED])
def test_probabilities_of_all_orders_add_up_to_1(bug, monkeypatch):
    """Orders 2 to 4 were tried. The planted bugs are the terms as they are printed, from 0 on."""
    if bug:
        monkeypatch.setattr(_order_summary, *PRINTED[bug])
    summary, count = OrderSummary(np.arange(2, 5), np.array([0.5, 0.3, 0.2]), 0.1), 4000
    others = np.array([1, *range(5, count)])
    left = np.exp(summary.log_prob(1)) + summary.untried * np.exp(summary._terms(others[1:])).sum()
    tail = summary.untried * 0.5 / (np.pi**2 / 6 - 1) / (count + 0.5)  # of the zeta; the Poisson has none
    tried = np.exp([summary.log_prob(order) for order in (2, 3, 4)])
    assert (abs(tried.sum() + left + tail - 1) < 1e-6) == (not bug)
    np.testing.assert_allclose(tried / tried.sum(), summary.probability)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_poisson_has_the_expected_order(bug):
    """The planted bug is the printed one, which is right of a Poisson that has its zero."""
    means = [1.0, 1.001, 1.7, 4.0, 60.0]
    found = [float(PositivePoisson(mean if bug else rate_of(mean)).mean) for mean in means]
    assert np.allclose(found, means, rtol=1e-6) != bug


class Known(NamedTuple):
    """A run whose evidence is exact."""

    rows: Array  # [row, 2]: all so far
    log_evidence: Array
    num_steps: Array


class Record(NamedTuple):
    num_rows: Array


class Exact(ByStages):
    """Of polynomials; rows in stages, of which it needs none."""

    def __init__(self, model, num_stages):
        self.model, self.num_stages = model, num_stages

    def init(self, rng_key, program):
        self.row_arguments = tuple(self._by_row(program))
        return self._of(jnp.zeros((0, 2)), program)

    def updated(self, state, program, before):
        return self._of(state.rows, program)

    def _of(self, before, program):
        rows = jnp.concatenate([before, jnp.stack([program.arguments["x"], program.arguments["y"]], 1)])
        log_evidence = exact_polynomial(program.sites["weight"].shape[0], *np.asarray(rows).T)
        return Known(rows, jnp.asarray(log_evidence), jnp.zeros((), jnp.int32))

    def step(self, rng_key, state, program):
        return state._replace(num_steps=state.num_steps + 1), Record(jnp.asarray(len(state.rows)))

    def finished(self, state):
        return state.num_steps > 0

    def draw(self, rng_key, state, program, num_draws):
        x, y = state.rows.T
        powers = jnp.stack([x**p for p in range(program.sites["weight"].shape[0])], 1)
        precision = powers.T @ powers / 0.09 + jnp.eye(powers.shape[1])
        posterior = dist.MultivariateNormal(jnp.linalg.solve(precision, powers.T @ y / 0.09), precision_matrix=precision)
        return {"weight": posterior.sample(rng_key, (num_draws,))}

    def results(self, state, program):
        return Results({}, {"log_evidence": state.log_evidence, "log_evidence_se": jnp.zeros(())}, {})


def without_the_family(orders, order):
    return ENTRY(orders, order)._replace(log_evidence=0.0)


def by_the_prior(orders, order):
    return ENTRY(orders, order)._replace(log_prior=orders._log_prior(order))


ENTRY = Orders._entry
BUGS = {"family": without_the_family, "terms": by_the_prior}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [None, *BUGS], ids=["right", *BUGS])
def test_orders_that_an_update_calls_for_are_tried(bug, monkeypatch):
    """Two rows next to 0 tell nothing of slopes; all others are a parabola. The planted bugs: an order that comes later has said nothing of
    the two, where the family has; or begins with its prior, as if it had been tried."""
    if bug:
        monkeypatch.setattr(Orders, "_entry", BUGS[bug])
    first, second = np.arange(15) // 2 == 3, np.arange(15) // 2 != 3
    orders = Orders(polynomial, Zeta(), kernel=lambda model: Exact(model, num_stages=2), most=8, negligible=0.5, settings=QUIET)
    tree = orders.run(0, X[first], Y[first])
    assert (tree.attrs["ended"], tree["orders"]["order"].values.tolist()) == ("finished", [1, 2, 3])
    orders.update(X[second], Y[second])
    tree = orders.tree()
    found = tree["orders"].dataset
    late = found["first_update"].values == 1
    assert tree.attrs["ended"] == "finished"
    assert found["order"].values[~late].tolist() == [1, 2, 3]
    assert late.sum() == 2
    joint = found["log_prior"].values + found["log_evidence"].values
    exact = exact_joint(first, second, found["order"].values)
    np.testing.assert_allclose(joint[~late], exact[~late], rtol=1e-9)
    assert np.allclose(joint[late], exact[late], rtol=1e-7) == (not bug)
    orders.update(X[:1], Y[:1])  # fewer rows than the stages of a run
    assert orders.tree()["orders"]["first_update"].values.tolist() == [0, 0, 0, 1, 1]
    assert len(orders.drivers[5].states[0].rows) == second.sum() + 1


def test_fewer_rows_than_a_run_has_stages_are_enough_for_an_order_that_comes_later():
    orders = Orders(polynomial, Zeta(), kernel=lambda model: Exact(model, num_stages=2), most=8, negligible=0.5, settings=QUIET)
    orders.run(0, X[6:8], Y[6:8])
    orders.update(X[14:], Y[14:])
    assert orders.tree()["orders"]["first_update"].values.tolist() == [0, 0, 0, 1, 1]


def orders_of(kernel=lambda model: Exact(model, num_stages=1), family=polynomial, **settings):
    return Orders(family, Zeta(), kernel=kernel, most=8, negligible=0.5, settings=QUIET | settings)


def test_what_time_has_ended_goes_on_with_the_data_that_it_had():
    """Orders that the first rows call for have learned from these, though the run had no time for them."""
    whole, ended = orders_of(), orders_of(max_time=0.0)
    whole.run(0, X, Y)
    with pytest.raises(ValueError, match="order 1: its run ended by 'max_time' before it had finished"):
        ended.run(0, X, Y)
    with pytest.raises(ValueError, match=r"update: order \d has not come to the end of the data before"):
        ended.update(X[:2], Y[:2])
    ended.settings["max_time"] = None
    for orders in (whole, ended):
        orders.update(X[:2], Y[:2])
    wanted, found = (orders.tree()["orders"].dataset for orders in (whole, ended))
    xr.testing.assert_allclose(found, wanted)
    assert not found["first_update"].values.any()


class Refuses(Exact):
    """Rows of an update, of the third order."""

    def updated(self, state, program, before):
        if program.sites["weight"].shape[0] == 3:
            raise ValueError("it is refused")
        return super().updated(state, program, before)


class Fails(Exact):
    """While the first order learns from an update."""

    def step(self, rng_key, state, program):
        if program.sites["weight"].shape[0] == 1 and len(state.rows) > len(X):
            raise ValueError("it is refused")
        return super().step(rng_key, state, program)


def terms(x, y, *, order):
    polynomial(order)(x, y)


def by_name(order):
    """Of a module, so that it is pickled."""
    return partial(terms, order=order)


def test_orders_are_pickled_and_go_on():
    orders = orders_of(partial(Exact, num_stages=1), by_name)
    orders.run(0, X[6:8], Y[6:8])
    orders.update(X[8:], Y[8:])
    again = pickle.loads(pickle.dumps(orders))
    for one in (orders, again):
        one.update(X[:2], Y[:2])
    xr.testing.assert_identical(again.tree()["orders"].dataset, orders.tree()["orders"].dataset)
    assert again.tree()["orders"]["first_update"].values.any()


@pytest.mark.parametrize("kernel", [Refuses, Fails])
def test_where_one_order_refuses_nobody_is_weighed(kernel):
    orders = orders_of(lambda model: kernel(model, num_stages=1))
    orders.run(0, X, Y)
    with pytest.raises(ValueError, match="it is refused"):
        orders.update(X[:2], Y[:2])
    for ask in (orders.tree, lambda: orders.update(X[:2], Y[:2])):
        with pytest.raises(ValueError, match="some orders had learned its data and others had not"):
            ask()
    assert orders.run(0, X, Y)["orders"]["probability"].values.sum() == pytest.approx(1.0)


def test_an_update_in_another_precision_begins_no_order():
    orders = orders_of()
    orders.most = 1
    orders.run(0, X[:8], Y[:8])
    orders.most = 3
    with jax.enable_x64(False), pytest.raises(ValueError, match="update: the run began with jax_enable_x64=True, and now it is False"):
        orders.update(X[8:], Y[8:])
    assert list(orders.drivers) == [1]
    orders.update(X[8:], Y[8:])
    assert list(orders.tree()["orders"]["order"].values) == [1, 2, 3]


class Interrupted(Exact):
    """By Ctrl-C, when the second order is given the rows of an update."""

    def updated(self, state, program, before):
        if program.sites["weight"].shape[0] == 2 and len(state.rows) == len(X):
            signal.raise_signal(signal.SIGINT)
        return super().updated(state, program, before)


def test_ctrl_c_tears_no_orders():
    """Those that come after have no time, and go on at the next call."""
    orders, whole = orders_of(lambda model: Interrupted(model, num_stages=1)), orders_of()
    for one in (orders, whole):
        one.run(0, X, Y)
        one.update(X[:2], Y[:2])
    assert orders.tree().attrs["ended"] == "max_time"
    for one in (orders, whole):
        one.update(X[2:4], Y[2:4])
    xr.testing.assert_allclose(orders.tree()["orders"].dataset, whole.tree()["orders"].dataset)


def test_orders_that_an_update_calls_for_are_in_memory_alone(tmp_path):
    orders = orders_of(checkpoint=tmp_path / "runs")
    orders.run(0, X[6:8], Y[6:8])
    orders.update(X[8:], Y[8:])
    assert max(orders.drivers) > 3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"order_1", "order_2", "order_3"}


def test_an_evidence_without_an_error_is_refused():
    class Alone(Exact):
        def results(self, state, program):
            return Results({}, {"log_evidence": state.log_evidence}, {})

    with pytest.raises(TypeError, match="kernel: Alone leaves no log_evidence_se"):
        orders_of(lambda model: Alone(model, num_stages=1)).run(0, X, Y)


def test_where_no_order_can_learn_more_the_run_is_as_it_was():
    orders = orders_of(lambda model: ImportanceSampling(model, num_batches=2, batch_size=8))
    wanted = orders.run(0, X, Y)
    with pytest.raises(TypeError, match="update: ImportanceSampling learns from one data set"):
        orders.update(X[:2], Y[:2])
    xr.testing.assert_identical(orders.tree()["orders"].dataset, wanted["orders"].dataset)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_order_that_cannot_begin_says_that_others_have_learned(error):
    def limited(order):
        if order > 3:
            raise error("four is refused")
        return polynomial(order)

    orders = orders_of(family=limited)
    orders.run(0, X[6:8], Y[6:8])
    with pytest.raises(error, match="four is refused") as refused:
        orders.update(X[8:], Y[8:])
    assert refused.value.__notes__ == ["update: orders 1 to 3 have learned these data; do not give them again."]
    assert orders.tree()["orders"]["order"].values.tolist() == [1, 2, 3]


def test_rows_are_what_they_were_in_the_run():
    """An update of two rows, and an argument of two entries that are none."""

    def with_units(order):
        def model(x, y, units):
            polynomial(order)(x * units[0] / units[1], y)

        return model

    units, orders = np.array([2.0, 1.0]), orders_of(family=with_units)
    orders.run(0, X[6:8][:1], Y[6:8][:1], units)
    orders.update(X[13:], Y[13:], units)
    assert max(orders.drivers) > 3
    assert {driver.kernel.row_arguments for driver in orders.drivers.values()} == {("x", "y")}
    orders.update(X[:2], Y[:2], units)
    for order, driver in orders.drivers.items():
        np.testing.assert_array_equal(driver.tree()["constant_data"]["units"], units, err_msg=f"order {order}")


def exact_joint(first, second, orders):
    """Of all rows, for orders up to 3; of the second part alone for others, which have what the terms leave to them."""
    log_prior = lambda m: -2 * np.log(m + 1) - np.log(np.pi**2 / 6 - 1)
    of = lambda m, rows: exact_polynomial(m, X[rows], Y[rows])
    before = np.array([log_prior(m) + of(m, first) for m in (1, 2, 3)])
    family = np.logaddexp.reduce(before)
    mean = np.exp(before - family) @ [1, 2, 3]
    rate = optimize.brentq(lambda rate: rate / -np.expm1(-rate) - mean, 1e-9, 10)
    term = lambda m: 0.5 * stats.poisson.pmf(m, rate) / -np.expm1(-rate) + 0.5 * np.exp(log_prior(m))
    rest = 0.02 * (1 - sum(term(m) for m in (1, 2, 3)))
    late = lambda m: np.log(0.02 * term(m)) - np.log1p(-rest) + family + of(m, second)
    return np.array([log_prior(m) + of(m, first | second) if m < 4 else late(m) for m in orders])
