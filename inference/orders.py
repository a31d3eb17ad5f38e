"""Several models at once, one for each order: how probable is each order, given the data?

    p(m | data)  is as  p(m) p(data | m),        m = 1, 2, ...

A family is a function of the order that returns a model, such as `zoo.staged_learning.family`: clusters of a mixture, nodes of a neural
network, terms of a series. Orders are taken in turn, each in a run of its own, until no higher one is likely to count.

`Orders` keeps the runs, so that more data can be learned from later; `run_orders` is one call.

Cost: that of a run for each order up to a few above the most probable one.
"""

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import random
from numpyro.distributions import Distribution

from inference._counts import is_whole
from inference.driver import Driver
from inference.kernels.nested_sampler import NestedSampler
from inference.protocol import Algorithm
from inference.sites import model_name

__all__ = ["Orders", "run_orders"]

NUM_HISTORIES = 4000  # of the evidences, for the error of a probability
MOST_STEPS = 1_000_000  # of a run that goes on


class Orders:
    """Runs of a family, order by order.

    :param family: `order -> model`.
    :param prior: of the order, over 1, 2, ...; such as `zoo.staged_learning.order_prior()`.
    :param kernel: `model -> Algorithm` with an evidence.
    :param least, most: the lowest and the highest order that is tried.
    :param negligible: ends after two orders in a row whose posterior odds to the best one are below this.
    :param settings: of the `Driver`; `max_time` is for all orders together.
    """

    def __init__(
        self,
        family: Callable[[int], Callable],
        prior: Distribution,
        *,
        kernel: Callable[[Any], Algorithm] = NestedSampler,
        least: int = 1,
        most: int = 20,
        negligible: float = 1e-3,
        settings: dict[str, Any] | None = None,
    ):
        for name, value, lowest in (("least", least, 1), ("most", most, least)):
            if not is_whole(value) or value < lowest:
                raise ValueError(f"{name}: found {value!r}, wanted an integer, at least {lowest}.")
        self.family, self.prior, self.kernel, self.least, self.most = family, prior, kernel, int(least), int(most)
        self.negligible = negligible
        self.settings: dict[str, Any] = dict(settings or {})
        self.drivers: dict[int, Driver] = {}
        self.models: dict[int, Callable] = {}

    def run(self, rng_key: int | Any, *args: Any, **kwargs: Any) -> xr.DataTree:
        """A run of each order, on the model's arguments: what `tree` returns."""
        key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key
        self.drivers, self.models, self.ended, trees, joint, left = {}, {}, "most", {}, [], self._clock()
        for order in range(self.least, self.most + 1):
            self.models[order] = self.family(order)
            driver = Driver(self.kernel(self.models[order]), **self.settings)
            driver.max_time = left()
            tree = driver.run(random.fold_in(key, order), *args, **kwargs)
            if "log_evidence" not in tree.attrs:
                raise TypeError(
                    f"kernel: {type(driver.kernel).__name__} leaves no log_evidence; wanted one that does, such as NestedSampler."
                )
            self.drivers[order], trees[order] = driver, tree
            if tree.attrs["ended"] != "finished":
                break
            joint.append(self._log_prior(order) + tree.attrs["log_evidence"])
            if len(joint) > 2 and max(joint[-2:]) < max(joint) + np.log(self.negligible):
                self.ended = "finished"
                break
        return self._assembled(trees)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """More data for the orders that were tried, where the kernel can take them; others stay untried. A run that time has ended goes on
        first; where that takes all of the time, an error says so, and no order has learned of them."""
        if not self.drivers:
            raise ValueError("update: nothing has run yet; call `run` first.")
        left = self._clock()
        for order, driver in self.drivers.items():
            if not _has_finished(driver):
                driver.max_time = left()
                driver.extend(MOST_STEPS)
            if not _has_finished(driver):
                raise ValueError(f"update: order {order} has not come to the end of the data before, and max_time is over; give it more.")
        for driver in self.drivers.values():
            driver.max_time = left()
            driver.update(*args, **kwargs)

    def tree(self) -> xr.DataTree:
        """The run of each order under `order_1`, `order_2`, ..., and a group `orders` with their `log_prior`, `log_evidence`,
        `log_evidence_se` and `probability` with its error `probability_se`.

        `probability_se` is NaN where an error of a `log_evidence` is infinite: a run that has forgotten some rows may be off by anything.
        `attrs["ended"]` says "finished", "most" where the highest order was still in doubt, or what ended the run of an order, which is
        then left out; `attrs["log_evidence"]` is that of the whole family, its orders up to the last one that was tried.
        """
        return self._assembled({order: driver.tree() for order, driver in self.drivers.items()})

    def _clock(self) -> Callable[[], float | None]:
        """Seconds that are left of `max_time`."""
        started, seconds = perf_counter(), self.settings.get("max_time")
        return lambda: None if seconds is None else max(0.0, seconds - (perf_counter() - started))

    def _log_prior(self, order: int) -> float:
        return np.asarray(self.prior.log_prob(jnp.asarray(order))).item()

    def _assembled(self, trees: dict[int, xr.DataTree]) -> xr.DataTree:
        whole = {order: tree for order, tree in trees.items() if tree.attrs["ended"] == "finished"}  # a part of an evidence is none
        ended = next((str(tree.attrs["ended"]) for order, tree in trees.items() if order not in whole), self.ended)
        if not whole:
            raise ValueError(
                f"order {min(trees)}: its run ended by {ended!r} before it had finished, so that there is no evidence; give it more time."
            )
        joint = np.array([self._log_prior(order) + tree.attrs["log_evidence"] for order, tree in whole.items()])
        return _assembled(whole, joint, self.prior, model_name(self.family), ended)


def run_orders(
    rng_key: int | Any,
    family: Callable[[int], Callable],
    prior: Distribution,
    *args: Any,
    kernel: Callable[[Any], Algorithm] = NestedSampler,
    most: int = 20,
    negligible: float = 1e-3,
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> xr.DataTree:
    """`Orders(family, prior, ...).run(rng_key, *args, **kwargs)`: a run of each order, and the posterior of the orders.

    :param rng_key: an integer or a JAX key.
    :param args, kwargs: the model's arguments, the same for every order; the rest is as for `Orders`.
    """
    orders = Orders(family, prior, kernel=kernel, most=most, negligible=negligible, settings=settings)
    return orders.run(rng_key, *args, **kwargs)


def _assembled(trees: dict[int, xr.DataTree], joint: np.ndarray, prior: Distribution, name: str, ended: str) -> xr.DataTree:
    orders = np.array(list(trees))
    found = {key: np.array([tree.attrs[key] for tree in trees.values()]) for key in ("log_evidence", "log_evidence_se")}
    is_known = np.isfinite(found["log_evidence_se"]).all()  # else what the orders say may be off by anything
    noise = np.random.default_rng(0).normal(size=(NUM_HISTORIES, len(orders))) * (found["log_evidence_se"] if is_known else 0.0)
    histories = np.array([_shares(joint + each) for each in noise])
    variables = {
        "log_prior": joint - found["log_evidence"],
        **found,
        "probability": _shares(joint),
        "probability_se": histories.std(0) if is_known else np.full(len(orders), np.nan),
    }
    dataset = xr.Dataset({key: (["order"], value) for key, value in variables.items()}, {"order": orders})
    tree = xr.DataTree.from_dict({"orders": dataset} | {f"order_{order}": each for order, each in trees.items()})
    log_total = np.logaddexp.reduce(joint)
    tree.attrs |= {
        "family": name,
        "prior": json.dumps(type(prior).__name__),
        "ended": ended,
        "log_evidence": float(log_total),
        "log_evidence_se": float(np.std(np.logaddexp.reduce(joint + noise, axis=1))) if is_known else np.inf,
    }
    return tree


def _has_finished(driver: Driver) -> bool:
    kernel = driver.kernel
    assert isinstance(kernel, Algorithm)  # it has left an evidence
    return all(kernel.finished(state) for state in driver.states)


def _shares(log_weights: np.ndarray) -> np.ndarray:
    return np.exp(log_weights - np.logaddexp.reduce(log_weights))
