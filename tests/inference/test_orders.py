"""Orders of a family against posterior probabilities that are known, orders that are equal by
symmetry, and a family of neural networks.
"""

from functools import partial
from itertools import count

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from scipy import stats

from inference import Driver, NestedSampler, Orders, Staged, run_orders
from inference import orders as orders_module
from inference.distributions import PositivePoisson, Zeta
from inference.run.session import Session
from tests.inference import models
from tests.inference.importance import ImportanceSampling
from zoo.staged_learning import family, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X = np.linspace(-2, 2, 15)
Y = 1.0 + 0.5 * X - 0.8 * X**2 + 0.3 * np.random.default_rng(0).normal(size=15)
QUIET = {"progress_bar": False, "num_samples": 100}


def polynomial(order):
    """`order` coefficients, each Normal: the data are Normal."""

    def model(x, y):
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([order]).to_event(1))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "y", dist.Normal(jnp.stack([x**p for p in range(order)], 1) @ weight, 0.3), obs=y
            )

    return model


def exact_polynomial(order, x=X, y=Y):
    powers = np.stack([x**p for p in range(order)], 1)
    return stats.multivariate_normal(
        np.zeros(len(x)), powers @ powers.T + 0.09 * np.eye(len(x))
    ).logpdf(y)


def network(nodes):
    """One hidden layer; its order is the number of its nodes."""

    def model(x, y):
        inner = numpyro.sample("inner", dist.Normal(0.0, 2.0).expand([2, nodes]).to_event(2))
        outer = numpyro.sample("outer", dist.Normal(0.0, 2.0).expand([nodes]).to_event(1))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "y", dist.Normal(jnp.tanh(x[:, None] * inner[0] + inner[1]) @ outer, 0.3), obs=y
            )

    return model


def by_importance(model):
    return ImportanceSampling(model, num_batches=40, batch_size=256)


@pytest.mark.slow
def test_orders_that_are_equal_come_out_equal():
    """The same model under every order: the posterior is the prior, and the family's evidence
    that of the model.
    """
    same = lambda order: models.normal_mean
    prior = PositivePoisson(1.5)
    tree = run_orders(
        0, same, prior, models.Y.astype(float), kernel=by_importance, most=6, settings=QUIET
    )
    expected = np.exp(np.asarray(prior.log_prob(np.arange(1, 7))))
    np.testing.assert_allclose(tree["orders"]["probability"], expected / expected.sum(), atol=0.05)
    assert (
        abs(tree.attrs["log_evidence"] - models.exact_log_evidence() - np.log(expected.sum())) < 0.1
    )
    assert tree.attrs["ended"] == "most"
    assert set(tree.children) == {"orders", *(f"order_{m}" for m in range(1, 7))}


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_orders_of_other_sizes_with_equal_evidence_come_out_equal(bug):
    """A slope in as many parts as the order, whose sum has one prior.

    The planted bug: each part has the prior of the sum.
    """
    scale = lambda order: 20.0 if bug else 20.0 / np.sqrt(order)

    def in_parts(order):
        def model(x, y):
            part = numpyro.sample(
                "part", dist.Normal(0.0, scale(order)).expand([order, 3]).to_event(2)
            )
            with numpyro.plate("row", len(x)):
                numpyro.sample(
                    "y",
                    dist.Normal(jnp.stack([x**p for p in range(3)], 1) @ part.sum(0), 0.3),
                    obs=y,
                )

        return model

    powers = np.stack([X**p for p in range(3)], 1)
    exact = stats.multivariate_normal(
        np.zeros(15), 400 * powers @ powers.T + 0.09 * np.eye(15)
    ).logpdf(Y)
    kernel = lambda model: NestedSampler(model, num_live=200)
    found = run_orders(
        0, in_parts, PositivePoisson(1.5), X, Y, kernel=kernel, most=3, settings=QUIET
    )["orders"].dataset
    z = (found["log_evidence"].values - exact) / found["log_evidence_se"].values
    assert (np.abs(z).max() < 3.5) != bug


@pytest.mark.slow
def test_probabilities_of_orders_are_the_exact_ones():
    prior = Zeta()
    kernel = lambda model: NestedSampler(model, num_live=100)
    tree = run_orders(1, polynomial, prior, X, Y, kernel=kernel, most=4, settings=QUIET)
    exact = np.array([exact_polynomial(m) + float(prior.log_prob(m)) for m in range(1, 5)])
    found = tree["orders"].dataset
    z = (found["log_evidence"].values + found["log_prior"].values - exact) / found[
        "log_evidence_se"
    ].values
    assert np.abs(z).max() < 3.5
    assert found["probability"].values.argmax() == 2
    assert float(found["probability_se"].max()) < 0.2


@pytest.mark.slow
def test_a_family_of_networks():
    """Its order is the number of nodes: one node is a step, the data are a parabola."""
    kernel = lambda model: NestedSampler(model, num_live=50)
    tree = run_orders(0, network, PositivePoisson(2.0), X, Y, kernel=kernel, most=2, settings=QUIET)
    probability = tree["orders"]["probability"].values
    assert probability[0] < 0.01
    assert np.isfinite(tree.attrs["log_evidence"])


@pytest.mark.slow
def test_the_order_of_a_mixture_is_found():
    data = simulate(random.key(1), 60, 1, order=2, num_classes=0)
    x = np.concatenate([data["x"][:30] * 0.2 - 3, data["x"][30:] * 0.2 + 3])
    kernel = lambda model: NestedSampler(model, num_live=50)
    make = lambda order: family(order, num_classes=0)
    tree = run_orders(
        0, make, PositivePoisson(2.0), jnp.asarray(x), kernel=kernel, most=3, settings=QUIET
    )
    assert int(tree["orders"]["probability"].values.argmax()) + 1 in (2, 3)
    assert tree["orders"]["probability"].values[0] < 0.01


def test_it_ends_where_no_higher_order_counts():
    falls = lambda order: lambda: _constant(-20.0 * order)
    tree = run_orders(0, falls, PositivePoisson(2.0), kernel=by_importance, most=9, settings=QUIET)
    assert list(tree["orders"]["order"].values) == [1, 2, 3]
    assert tree.attrs["ended"] == "finished"
    assert abs(tree["orders"]["probability"].values[0] - 1) < 1e-6


def _constant(log_likelihood):
    numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Delta(0.0, log_density=log_likelihood), obs=0.0)


def test_part_of_an_evidence_is_none():
    with pytest.raises(
        ValueError, match="order 1: its run ended by 'budget' before it had finished"
    ):
        run_orders(
            0, polynomial, Zeta(), X, Y, kernel=by_importance, settings=QUIET | {"num_warmup": 2}
        )


def test_a_prior_that_leaves_nothing_to_the_orders_tried_is_refused():
    third = dist.Categorical(jnp.array([0.0, 0.0, 0.0, 1.0]))
    with pytest.raises(
        ValueError,
        match="prior: it gives no probability to any of the orders tried, 1 to 2; raise `most`",
    ):
        run_orders(0, polynomial, third, X, Y, kernel=by_importance, most=2, settings=QUIET)


def test_a_checkpoint_has_a_folder_for_each_order(tmp_path, monkeypatch):
    """Orders that have been learned are read, and others added."""
    run = lambda most, **more: run_orders(
        0, polynomial, Zeta(), X, Y, kernel=by_importance, most=most, settings=QUIET | more
    )
    whole = run(2)
    run(1, checkpoint=tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["order_1"]
    xr.testing.assert_identical(
        run(2, checkpoint=tmp_path / "runs")["orders"].dataset, whole["orders"].dataset
    )
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"order_1", "order_2"}
    monkeypatch.setattr(
        Session, "_chunk", lambda *_: pytest.fail("steps were taken where none is left")
    )
    again = run(2, checkpoint=str(tmp_path / "runs"))
    xr.testing.assert_equal(
        again["order_2"]["posterior"].dataset, whole["order_2"]["posterior"].dataset
    )


def test_no_order_is_refused():
    with pytest.raises(ValueError, match="most: found 0"):
        run_orders(0, polynomial, Zeta(), X, Y, most=0)
    with pytest.raises(ValueError, match="most: found 2, wanted an integer, at least 3"):
        Orders(polynomial, Zeta(), least=3, most=2)
    with pytest.raises(ValueError, match="negligible: found -0.1, wanted a number between 0 and 1"):
        Orders(polynomial, Zeta(), negligible=-0.1)
    with pytest.raises(TypeError, match="prior: found None, wanted a NumPyro distribution"):
        Orders(polynomial, None)
    with pytest.raises(ValueError, match="update: nothing has run yet"):
        Orders(polynomial, Zeta()).update(X, Y)


@pytest.mark.slow
def test_more_data_are_one_more_stage_of_each_order():
    """Probabilities after two parts are those of all data at once, exactly known, where no
    higher order may be tried.
    """
    prior = Zeta()
    orders = Orders(
        polynomial,
        prior,
        kernel=lambda model: Staged(model, num_stages=1, num_live=60, num_walkers=0),
        least=2,
        most=3,
        settings=QUIET,
    )
    orders.run(0, X[::2], Y[::2])
    orders.update(X[1::2], Y[1::2])
    found = orders.tree()["orders"].dataset
    assert found["order"].values.tolist() == [2, 3]
    exact = np.array([exact_polynomial(m) for m in (2, 3)])
    z = (found["log_evidence"].values - exact) / found["log_evidence_se"].values
    assert np.abs(z).max() < 3.5
    assert orders.tree()["order_3"].attrs["num_stages"] == 2


@pytest.mark.slow
def test_where_time_ended_an_order_all_learn_more_data_or_none(monkeypatch):
    kernel = lambda model: Staged(
        model, num_stages=np.int64(1), num_live=np.int64(40), num_walkers=np.int64(0)
    )
    orders = Orders(
        polynomial, Zeta(), kernel=kernel, least=np.int64(2), most=np.int64(3), settings=QUIET
    )
    run, of_second = Driver.run, iter((None, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(
            Driver,
            "run",
            lambda self, *args: (setattr(self, "max_time", next(of_second)), run(self, *args))[1],
        )
        assert orders.run(0, X[::2], Y[::2]).attrs["ended"] == "max_time"
    stages = lambda: [int(driver.states[0].stage) + 1 for driver in orders.drivers.values()]
    orders.settings["max_time"] = 0.0
    with pytest.raises(
        ValueError,
        match="update: order 3 has not come to the end of the data before, and max_time is over",
    ):
        orders.update(X[1::2], Y[1::2])
    assert stages() == [1, 1]
    orders.settings["max_time"] = None
    orders.update(X[1::2], Y[1::2])
    assert stages() == [2, 2]
    found = orders.tree()["orders"].dataset
    z = (found["log_evidence"].values - [exact_polynomial(m) for m in (2, 3)]) / found[
        "log_evidence_se"
    ].values
    assert np.abs(z).max() < 3.5


def test_where_an_error_has_no_bound_no_probability_has_an_error(monkeypatch):
    run = Driver.run

    def forgetful(self, *args):
        tree = run(self, *args)
        tree.attrs["log_evidence_se"] = np.inf
        return tree

    monkeypatch.setattr(Driver, "run", forgetful)
    tree = run_orders(
        0,
        lambda order: lambda: _constant(-1.0),
        PositivePoisson(2.0),
        kernel=by_importance,
        most=2,
        settings=QUIET,
    )
    assert np.isinf(tree.attrs["log_evidence_se"])
    assert np.isnan(tree["orders"]["probability_se"].values).all()
    np.testing.assert_allclose(tree["orders"]["probability"].values.sum(), 1.0)


def test_time_is_for_all_orders_together(monkeypatch):
    """A clock that goes a second at each look."""
    seen, run = [], Driver.run
    monkeypatch.setattr(
        Driver, "run", lambda self, *args: (seen.append(self.max_time), run(self, *args))[1]
    )
    monkeypatch.setattr(orders_module, "perf_counter", partial(next, count()))
    same = lambda order: models.normal_mean
    kernel = lambda model: ImportanceSampling(model, num_batches=2, batch_size=8)
    Orders(
        same, PositivePoisson(1.5), kernel=kernel, most=3, settings=QUIET | {"max_time": 1000.0}
    ).run(0, models.Y.astype(float))
    assert seen == [999.0, 998.0, 997.0]
