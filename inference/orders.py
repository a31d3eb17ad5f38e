"""Several models at once, one for each order: how probable is each order, given the data?

    p(m | data)  is as  p(m) p(data | m),        m = 1, 2, ...

A family is a function of the order that returns a model, such as `zoo.staged_learning.family`: clusters of a mixture, nodes of a neural
network, terms of a series. Orders are taken in turn, each in a run of its own, until no higher one is likely to count.

Cost: that of a run for each order up to a few above the most probable one.
"""

import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import random
from numpyro.distributions import Distribution

from inference.driver import Driver
from inference.kernels.nested_sampler import NestedSampler
from inference.protocol import Algorithm
from inference.sites import model_name

__all__ = ["run_orders"]

NUM_HISTORIES = 4000  # of the evidences, for the error of a probability


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
    """A run of each order, and the posterior of the orders.

    :param rng_key: an integer or a JAX key.
    :param family: `order -> model`.
    :param prior: of the order, over 1, 2, ...; such as `zoo.staged_learning.order_prior()`.
    :param args, kwargs: the model's arguments, the same for every order.
    :param kernel: `model -> Algorithm` with an evidence.
    :param most: the highest order that is tried.
    :param negligible: ends after two orders in a row whose posterior odds to the best one are below this.
    :param settings: of the `Driver`.

    The tree holds the run of each order under `order_1`, `order_2`, ..., and a group `orders` with their `log_prior`, `log_evidence`,
    `log_evidence_se` and `probability` with its error `probability_se`. `attrs["ended"]` says "finished", "most" where the highest
    order was still in doubt, or what ended the run of an order, which is then left out; `attrs["log_evidence"]` is that of the whole
    family, its orders up to the last one that was tried.
    """
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"most: found {most!r}, wanted an integer, at least 1.")
    key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key
    trees, joint, ended = {}, [], "most"
    for order in range(1, most + 1):
        driver = Driver(kernel(family(order)), **(settings or {}))
        tree = driver.run(random.fold_in(key, order), *args, **kwargs)
        if "log_evidence" not in tree.attrs:
            raise TypeError(f"kernel: {type(driver.kernel).__name__} leaves no log_evidence; wanted one that does, such as NestedSampler.")
        if tree.attrs["ended"] != "finished":  # a part of an evidence is none
            ended = str(tree.attrs["ended"])
            break
        trees[order] = tree
        joint.append(np.asarray(prior.log_prob(jnp.asarray(order))).item() + tree.attrs["log_evidence"])
        if len(joint) > 2 and max(joint[-2:]) < max(joint) + np.log(negligible):
            ended = "finished"
            break
    if not trees:
        raise ValueError(f"order 1: its run ended by {ended!r} before it had finished, so that there is no evidence; give it more time.")
    return _assembled(trees, np.array(joint), prior, model_name(family), ended)


def _assembled(trees: dict[int, xr.DataTree], joint: np.ndarray, prior: Distribution, name: str, ended: str) -> xr.DataTree:
    orders = np.array(list(trees))
    found = {key: np.array([tree.attrs[key] for tree in trees.values()]) for key in ("log_evidence", "log_evidence_se")}
    noise = np.random.default_rng(0).normal(size=(NUM_HISTORIES, len(orders))) * found["log_evidence_se"]
    histories = np.array([_shares(joint + each) for each in noise])
    variables = {
        "log_prior": joint - found["log_evidence"],
        **found,
        "probability": _shares(joint),
        "probability_se": histories.std(0),
    }
    dataset = xr.Dataset({key: (["order"], value) for key, value in variables.items()}, {"order": orders})
    tree = xr.DataTree.from_dict({"orders": dataset} | {f"order_{order}": each for order, each in trees.items()})
    log_total = np.logaddexp.reduce(joint)
    tree.attrs |= {
        "family": name,
        "prior": json.dumps(type(prior).__name__),
        "ended": ended,
        "log_evidence": float(log_total),
        "log_evidence_se": float(np.std(np.logaddexp.reduce(joint + noise, axis=1))),
    }
    return tree


def _shares(log_weights: np.ndarray) -> np.ndarray:
    return np.exp(log_weights - np.logaddexp.reduce(log_weights))
