"""Several models at once, one for each order: how probable is each order, given the data?

    p(m | data)  is as  p(m) p(data | m),        m = 1, 2, ...

A family is a function of the order that returns a model, such as `zoo.staged_learning.family`:
clusters of a mixture, nodes of a neural network, terms of a series. Orders are taken in turn, each
in a run of its own, until no higher one is likely to count.

`Orders` keeps the runs, so that more data can be learned from later; `run_orders` is one call. More
data are learned by the orders that were tried. They may call for higher ones, which must learn from
all data: `attrs["ended"]` is then "most", and `run` begins anew.

Cost: that of a run for each order up to a few above the most probable one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import random
from numpyro.distributions import Distribution

from inference.kernels.nested.kernel import NestedSampler
from inference.program.sites import check_setting, check_whole, is_between, model_name
from inference.run.driver import Driver
from inference.run.protocol import Algorithm
from inference.run.session import signals_noted

__all__ = ["Orders", "run_orders"]

NUM_HISTORIES = 4000  # of the evidences, for the error of a probability
MOST_STEPS = 1_000_000  # of a run that goes on
SIGNALS = ("SIGINT", "SIGTERM")  # that end one


class Orders:
    """Runs of a family, order by order.

    :param family: `order -> model`.
    :param prior: of the order, over 1, 2, ...; such as `zoo.staged_learning.order_prior()`.
    :param kernel: `model -> Algorithm` with an evidence.
    :param least, most: the lowest and the highest order that is tried.
    :param negligible: ends after two orders in a row whose posterior odds to the best one are below
    this.
    :param settings: of the `Driver`; `max_time` is for all orders together, and in `checkpoint`
    each order has a folder of its own.
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
        check_whole(1, least=least)
        check_whole(least, most=most)
        check_setting(
            is_between(negligible, 0, 1), "a number between 0 and 1", negligible=negligible
        )
        if not isinstance(prior, Distribution):
            raise TypeError(f"prior: found {prior!r}, wanted a NumPyro distribution of the orders.")
        self.family, self.prior, self.kernel, self.least, self.most = (
            family,
            prior,
            kernel,
            int(least),
            int(most),
        )
        self.negligible = negligible
        self.settings: dict[str, Any] = dict(settings or {})
        self._forget()

    def run(self, rng_key: int | Any, *args: Any, **kwargs: Any) -> xr.DataTree:
        """A run of each order, on the model's arguments: what `tree` returns."""
        self._forget()
        self._key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key
        self._data = args, kwargs
        self._go_up(self._clock())
        return self.tree()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """More data for the orders that were tried, where the kernel can take them.

        What time has ended goes on first, with the data of the call before; where that takes all of
        the time, an error says so, and no order has learned of the new ones.
        """
        if not self.drivers:
            raise ValueError("update: nothing has run yet; call `run` first.")
        self._check_whole()
        for driver in self.drivers.values():
            driver.check_precision("update")
        left = self._clock()
        self._go_on(left)
        first, *others = self.drivers
        self._learn(first, left(), args, kwargs)
        # one Ctrl-C must not tear them: the others take these data, and go on with them at the next
        # call
        with signals_noted() as noted:
            for order in others:
                self._learn(order, self._unless_stopped(noted, left)(), args, kwargs)
        self._is_torn, self._is_updated = False, True

    def tree(self) -> xr.DataTree:
        """The run of each order under `order_1`, `order_2`, ..., and a group `orders` with their
        `log_prior`, `log_evidence`, `log_evidence_se`, `probability` with its error
        `probability_se`.

        `probability_se` is NaN where an error of a `log_evidence` is infinite: a run that has
        forgotten some rows may be off by anything. `attrs["ended"]` says "finished", "most" where
        the highest order was still in doubt, or what ended the run of an order, which is then left
        out; `attrs["log_evidence"]` is that of the whole family, its orders up to the last one that
        was tried.
        """
        self._check_whole()
        whole = self._whole()
        stopped = next(
            (str(tree.attrs["ended"]) for order, tree in self.trees.items() if order not in whole),
            None,
        )
        if not whole:
            raise ValueError(
                f"order {self.least}: its run ended by {stopped!r} before it had finished, so that "
                "there is no evidence; give it more "
                "time. It has the data of the last call, and goes on with them at the next."
            )
        log_prior = {order: self._log_prior(order) for order in whole}
        if not np.isfinite(list(log_prior.values())).any():
            raise ValueError(
                f"prior: it gives no probability to any of the orders tried, {min(whole)} to "
                f"{max(whole)}; raise `most`."
            )
        ended = stopped or ("finished" if self._is_over() else "most")
        return _assembled(
            whole, np.array(list(log_prior.values())), self.prior, model_name(self.family), ended
        )

    def _learn(
        self, order: int, seconds: float | None, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        driver = self.drivers[order]
        driver.max_time, known = seconds, driver.program
        try:
            driver.update(*args, **kwargs)
        finally:  # an error may come before anything changes, or while it learns
            self._is_torn |= driver.program is not known  # until all have learned
        self.trees[order] = driver.tree()

    def _unless_stopped(self, noted: list[str], left: Callable) -> Callable[[], float | None]:
        """Seconds that are left; none where a signal has come, or has ended the run of an order."""
        is_stopped = lambda: (
            noted or any(tree.attrs["ended"] in SIGNALS for tree in self.trees.values())
        )
        return lambda: 0.0 if is_stopped() else left()

    def _forget(self) -> None:
        self.drivers: dict[int, Driver] = {}
        self.models: dict[int, Callable] = {}
        self.trees: dict[int, xr.DataTree] = {}
        self._is_updated = self._is_torn = False

    def _check_whole(self) -> None:
        if self._is_torn:
            raise ValueError(
                "update: an error ended one when some orders had learned its data and others had "
                "not, so that evidences are not of the "
                "same data; call `run` with all data."
            )

    def _go_on(self, left: Callable) -> None:
        """What time has ended: runs, and orders above them."""
        for order, driver in self.drivers.items():
            if order not in self._whole():
                driver.max_time = left()
                self.trees[order] = driver.extend(MOST_STEPS)
        if not self._is_updated:
            self._go_up(left)
        for order in self.drivers:
            if order not in self._whole():
                raise ValueError(
                    f"update: order {order} has not come to the end of the data before, and "
                    "max_time is over; give it more."
                )

    def _go_up(self, left: Callable) -> None:
        """Orders above those that were tried, on the data of the run, until they do not count,
        or time is over.
        """
        args, kwargs = self._data
        while not self._is_over() and len(self._whole()) == len(self.trees):
            order = max(self.drivers, default=self.least - 1) + 1
            if order > self.most:
                return
            model = self.family(order)
            folder = self.settings.get("checkpoint")
            own = None if folder is None else Path(folder) / f"order_{order}"
            settings: dict[str, Any] = self.settings | {"checkpoint": own}
            driver = Driver(self.kernel(model), **settings)
            driver.max_time = left()
            tree = driver.run(random.fold_in(self._key, order), *args, **kwargs)
            if missing := [
                name for name in ("log_evidence", "log_evidence_se") if name not in tree.attrs
            ]:
                raise TypeError(
                    f"kernel: {type(driver.kernel).__name__} leaves no {missing[0]}; wanted one "
                    "that does, such as NestedSampler."
                )
            self.models[order], self.drivers[order], self.trees[order] = model, driver, tree

    def _whole(self) -> dict[int, xr.DataTree]:
        """Runs that have finished: a part of an evidence is none."""
        return {
            order: tree for order, tree in self.trees.items() if tree.attrs["ended"] == "finished"
        }

    def _is_over(self) -> bool:
        """Whether no higher order is likely to count."""
        joint = [
            self._log_prior(order) + tree.attrs["log_evidence"]
            for order, tree in self._whole().items()
        ]
        return len(joint) > 2 and max(joint[-2:]) < max(joint) + np.log(self.negligible)

    def _clock(self) -> Callable[[], float | None]:
        """Seconds that are left of `max_time`."""
        started, seconds = perf_counter(), self.settings.get("max_time")
        return lambda: None if seconds is None else max(0.0, seconds - (perf_counter() - started))

    def _log_prior(self, order: int) -> float:
        return np.asarray(self.prior.log_prob(jnp.asarray(order))).item()


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
    """`Orders(family, prior, ...).run(rng_key, *args, **kwargs)`: a run of each order, and the
    posterior of the orders.

    :param rng_key: an integer or a JAX key.
    :param args, kwargs: the model's arguments, the same for every order; the rest is as for
    `Orders`.
    """
    orders = Orders(
        family, prior, kernel=kernel, most=most, negligible=negligible, settings=settings
    )
    return orders.run(rng_key, *args, **kwargs)


def _assembled(
    trees: dict[int, xr.DataTree], log_prior: np.ndarray, prior: Distribution, name: str, ended: str
) -> xr.DataTree:
    orders = np.array(list(trees))
    log_evidence, error = np.array(
        [
            [tree.attrs[name] for name in ("log_evidence", "log_evidence_se")]
            for tree in trees.values()
        ]
    ).T
    joint = log_prior + log_evidence
    is_known = np.isfinite(error).all()  # else what the orders say may be off by anything
    noise = np.random.default_rng(0).normal(size=(NUM_HISTORIES, len(orders))) * (
        error if is_known else 0.0
    )
    histories = np.array([_shares(joint + each) for each in noise])
    variables = {
        "log_prior": log_prior,
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "probability": _shares(joint),
        "probability_se": histories.std(0) if is_known else np.full(len(orders), np.nan),
    }
    dataset = xr.Dataset(
        {key: (["order"], value) for key, value in variables.items()}, {"order": orders}
    )
    tree = xr.DataTree.from_dict(
        {"orders": dataset} | {f"order_{order}": each for order, each in trees.items()}
    )
    log_total = np.logaddexp.reduce(joint)
    tree.attrs |= {
        "family": name,
        "prior": json.dumps(type(prior).__name__),
        "ended": ended,
        **{
            time: float(sum(tree.attrs[time] for tree in trees.values()))
            for time in ("sampling_time", "compile_time")
        },
        "log_evidence": float(log_total),
        "log_evidence_se": float(np.std(np.logaddexp.reduce(joint + noise, axis=1)))
        if is_known
        else np.inf,
    }
    return tree


def _shares(log_weights: np.ndarray) -> np.ndarray:
    return np.exp(log_weights - np.logaddexp.reduce(log_weights))
