"""Posterior probabilities of the orders of a family of models.

    p(m | data)  is proportional to  p(m) p(data | m),        m = 1, 2, ...

A family is a function of the order that returns a model, such as `zoo.staged_learning.family`:
clusters of a mixture, nodes of a neural network, terms of a series. Orders are run from the lowest
up, each in a run of its own, until two in a row have negligible posterior odds.

`Orders` keeps the runs, so that `update` can give them more data; `run_orders` is one call. An
update gives its data only to the orders that were tried. If the data call for higher ones,
`attrs["ended"]` is "most": a higher order must learn from all data, so call `run` with all of them.

Cost: that of a run for each order up to a few above the most probable one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr
from jax import random
from numpyro.distributions import Distribution

from inference.kernels.nested.kernel import NestedSampler
from inference.program.interpreting import interpreted
from inference.program.sites import check_setting, check_whole, is_between, model_name
from inference.run.driver import Driver, each_run
from inference.run.protocol import Algorithm
from inference.run.session import Interrupted, signals_noted

__all__ = ["Orders", "run_orders"]


class Orders:
    """Runs of a family of models, order by order.

    Args:
        family: `order -> model`.
        prior: distribution of the order, over 1, 2, ..., such as
            `zoo.staged_learning.order_prior()`.
        kernel: `model -> Algorithm` with an evidence.
        least, most: the lowest and the highest order that is tried.
        negligible: no further order is run after two in a row whose posterior odds against the best
            one are below this.
        settings: of the `Driver`. `max_time` is for all orders together, and in `checkpoint` each
            order has a folder of its own.
        cluster: as for `Driver`: each order is a task. Orders above the last one that counts run
            beside it, and end when it has ended.
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
        cluster: Any = None,
    ):
        check_whole(1, least=least)
        check_whole(least, most=most)
        check_setting(
            is_between(negligible, 0, 1), "a number between 0 and 1", negligible=negligible
        )
        if not isinstance(prior, Distribution):
            raise TypeError(f"prior: found {prior!r}, wanted a NumPyro distribution of the orders.")
        self.family, self.prior, self.kernel = family, prior, kernel
        self.least, self.most, self.negligible = int(least), int(most), negligible
        self.settings: dict[str, Any] = dict(settings or {})
        self.cluster = cluster
        self._forget()

    def _forget(self) -> None:
        self.drivers: dict[int, Driver] = {}
        self.trees: dict[int, xr.DataTree] = {}
        self._is_updated = False
        self._is_torn = False  # whether some orders have learned more data than others

    def run(self, rng_key: int | Any, *args: Any, **kwargs: Any) -> xr.DataTree:
        """Runs each order on the model's arguments, and returns `tree()`.

        Args:
            rng_key: an integer or a JAX key.
            args, kwargs: the model's arguments, the same for every order.
        """
        self._forget()
        self._key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key
        self._data = args, kwargs
        self._try_higher(self._clock())
        return self.tree()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Gives more data to the orders that were tried, where the kernel can take them.

        Runs that `max_time` has ended go on first, with the data of the call before. Where this
        takes all of the time, an error says so, and no order has learned of the new data.

        Args:
            args, kwargs: the model's arguments with the new rows.
        """
        if not self.drivers:
            raise ValueError("update: nothing has run yet; call `run` first.")
        self._check_not_torn()
        for driver in self.drivers.values():
            driver.check_precision("update")
        left = self._clock()
        for order, driver in self.drivers.items():
            if order not in self._finished():
                driver.max_time = left()
                self.trees[order] = driver.extend(1_000_000)
        if not self._is_updated:
            self._try_higher(left)
        for order in self.drivers:
            if order not in self._finished():
                raise ValueError(
                    f"update: order {order} has not come to the end of the data before, and "
                    "max_time is over; give it more."
                )
        # After a Ctrl-C the others take these data without a step, and go on at the next call:
        # all orders must know the same data.
        with signals_noted() as noted:
            for order in self.drivers:
                noted += self._learn(order, 0.0 if noted else left(), args, kwargs)
        self._is_torn, self._is_updated = False, True
        if noted:
            steps = sum(tree.attrs["steps"] for tree in self.trees.values())
            raise Interrupted(noted[0], steps, self.tree)

    def tree(self) -> xr.DataTree:
        """The run of each order under `order_1`, `order_2`, ..., and the group `orders`.

        The group has `log_prior`, `log_evidence`, `log_evidence_se`, `probability` and its error
        `probability_se`, by order. `probability_se` is NaN where the error of a `log_evidence` is
        infinite, as that of a run that has forgotten some rows.

        `attrs["ended"]` is "finished"; or "most" where higher orders may not be negligible; or what
        ended the run of an order early, which is then left out. `attrs["log_evidence"]` is that of
        the whole family, its orders up to the last one that was tried.
        """
        self._check_not_torn()
        finished = self._finished()
        cut = [str(tree.attrs["ended"]) for n, tree in self.trees.items() if n not in finished]
        if not finished:
            raise ValueError(
                f"order {self.least}: its run ended by {cut[0]!r} before it had finished, so that "
                "there is no evidence; give it more time. It has the data of the last call, and "
                "goes on with them at the next."
            )
        log_prior = np.array([self._log_prior(order) for order in finished])
        if not np.isfinite(log_prior).any():
            raise ValueError(
                f"prior: it gives no probability to any of the orders tried, {min(finished)} to "
                f"{max(finished)}; raise `most`."
            )
        ended = next(iter(cut), "finished" if self._is_over() else "most")
        return _assembled(finished, log_prior, self.prior, model_name(self.family), ended)

    def _learn(
        self, order: int, seconds: float | None, args: tuple, kwargs: dict[str, Any]
    ) -> list[str]:
        """Updates an order; returns the signal that has ended it, if one has."""
        driver, signals = self.drivers[order], []
        driver.max_time, known = seconds, driver.program
        try:
            driver.update(*args, **kwargs)
        except Interrupted as error:
            signals = [error.signal]
        finally:  # an error may come before anything changes, or while it learns
            self._is_torn |= driver.program is not known  # reset once all orders have learned
        self.trees[order] = driver.tree()
        return signals

    def _check_not_torn(self) -> None:
        if self._is_torn:
            raise ValueError(
                "update: an error ended one when some orders had learned its data and others had "
                "not, so that evidences are not of the same data; call `run` with all data."
            )

    def _try_higher(self, left: Callable[[], float | None]) -> None:
        """Runs higher orders until two in a row are negligible, or `most` or `max_time` ends it."""
        orders = range(max(self.drivers, default=self.least - 1) + 1, self.most + 1)
        folder = self.settings.get("checkpoint")
        each = map(self._prepared, orders)
        with each_run(self.cluster, self._data, each, left=left, folder=folder) as runs:
            for order in orders:
                if self._is_over() or len(self._finished()) < len(self.trees):
                    return
                driver, tree = next(runs)
                for name in ("log_evidence", "log_evidence_se"):
                    if name not in tree.attrs:
                        raise TypeError(
                            f"kernel: {type(driver.kernel).__name__} leaves no {name}; wanted one "
                            "that does, such as NestedSampler."
                        )
                self.drivers[order], self.trees[order] = driver, tree

    def _prepared(self, order: int) -> tuple[Driver, Any, tuple]:
        """Driver and key of an order, which has no argument of its own."""
        settings = dict(self.settings)
        if settings.get("checkpoint") is not None:
            settings["checkpoint"] = Path(settings["checkpoint"]).absolute() / f"order_{order}"
        driver = Driver(self.kernel(self.family(order)), **settings)
        return driver, random.fold_in(self._key, order), ()

    def _finished(self) -> dict[int, xr.DataTree]:
        """Runs that have finished: others have no evidence."""
        return {n: tree for n, tree in self.trees.items() if tree.attrs["ended"] == "finished"}

    def _is_over(self) -> bool:
        """Whether the last two orders are negligible, so that no higher one is run."""
        finished = self._finished().items()
        joint = [self._log_prior(order) + tree.attrs["log_evidence"] for order, tree in finished]
        return len(joint) > 2 and max(joint[-2:]) < max(joint) + np.log(self.negligible)

    def _clock(self) -> Callable[[], float | None]:
        """A function that returns the seconds that are left of `max_time`."""
        started, seconds = perf_counter(), self.settings.get("max_time")
        return lambda: None if seconds is None else max(0.0, seconds - (perf_counter() - started))

    def _log_prior(self, order: int) -> float:
        log_prob = interpreted(self.prior.log_prob, np.asarray(order))
        return np.asarray(log_prob(np.asarray(order))).item()


def run_orders(
    rng_key: int | Any,
    family: Callable[[int], Callable],
    prior: Distribution,
    *args: Any,
    kernel: Callable[[Any], Algorithm] = NestedSampler,
    most: int = 20,
    negligible: float = 1e-3,
    settings: dict[str, Any] | None = None,
    cluster: Any = None,
    **kwargs: Any,
) -> xr.DataTree:
    """Runs each order, and returns the runs with the posterior of the orders: `Orders.run`.

    Args:
        rng_key: an integer or a JAX key.
        family, prior, kernel, most, negligible, settings, cluster: as for `Orders`.
        args, kwargs: the model's arguments, the same for every order.
    """
    return Orders(
        family,
        prior,
        kernel=kernel,
        most=most,
        negligible=negligible,
        settings=settings,
        cluster=cluster,
    ).run(rng_key, *args, **kwargs)


def _assembled(
    trees: dict[int, xr.DataTree], log_prior: np.ndarray, prior: Distribution, name: str, ended: str
) -> xr.DataTree:
    orders = np.array(list(trees))
    each = lambda name: np.array([tree.attrs[name] for tree in trees.values()])
    log_evidence, error = each("log_evidence"), each("log_evidence_se")
    joint = log_prior + log_evidence
    shares = lambda joint: np.exp(joint - np.logaddexp.reduce(joint, -1, keepdims=True))
    is_known = np.isfinite(error).all()  # else the probabilities may be off by anything
    # the error of a probability: log evidences are Normal about their estimates
    noise = np.random.default_rng(0).normal(size=(4000, len(orders))) * (error if is_known else 0.0)
    unknown = np.full(len(orders), np.nan)
    variables = {
        "log_prior": log_prior,
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "probability": shares(joint),
        "probability_se": shares(joint + noise).std(0) if is_known else unknown,
    }
    groups = {
        "orders": xr.Dataset({k: (["order"], v) for k, v in variables.items()}, {"order": orders})
    }
    tree = xr.DataTree.from_dict(groups | {f"order_{order}": run for order, run in trees.items()})
    spread = np.std(np.logaddexp.reduce(joint + noise, axis=1))
    tree.attrs |= {
        "family": name,
        "prior": json.dumps(type(prior).__name__),
        "ended": ended,
        "sampling_time": float(each("sampling_time").sum()),
        "compile_time": float(each("compile_time").sum()),
        "log_evidence": float(np.logaddexp.reduce(joint)),
        "log_evidence_se": float(spread) if is_known else np.inf,
    }
    return tree
