"""Truncated mixtures for coordinate ascent, and data for them: one for each block that may be in
one.
"""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import plate

from inference.distributions import Missing
from tests.by_numpy import simulated
from zoo.iqgme import Axes, iqgme, normal_wishart, simulate, soft_probit
from zoo.iqgme_tasks import iqgme_tasks
from zoo.iqgme_tasks import simulate as simulate_tasks

__all__ = [
    "CASES",
    "TASKS",
    "beta_bernoulli",
    "case",
    "dirichlet_categorical",
    "gamma_poisson",
    "inverse_wishart",
    "normal_columns",
    "of_tasks",
]

sample: Any = numpyro.sample


def columns_of(at: Axes):
    """Groups and rows one place further left, for columns."""
    return (
        plate("expert", at.experts.size, dim=-2),
        plate("row", at.rows.size, dim=-2),
        plate("feature", at.num_features, dim=-1),
    )


def beta_bernoulli(x, z, at, wrap=Missing):
    experts, rows, columns = columns_of(at)
    with experts, columns:
        p = sample("p", dist.Beta(1.5, 0.8))
    with rows, columns:
        return sample("x", wrap(dist.Bernoulli(p[z])), obs=x)


def dirichlet_categorical(x, z, at):
    experts, rows, columns = columns_of(at)
    with experts, columns:
        p = sample("p", dist.Dirichlet(jnp.array([1.5, 0.8, 0.6])))
    with rows, columns:
        return sample("x", Missing(dist.Categorical(p[z])), obs=x)


def gamma_poisson(x, z, at):
    experts, rows, columns = columns_of(at)
    with experts, columns:
        rate = sample("rate", dist.Gamma(2.0, 0.7))
    with rows, columns:
        return sample("x", Missing(dist.Poisson(rate[z])), obs=x)


def normal_columns(x, z, at):
    experts, rows, columns = columns_of(at)
    with experts, columns:
        var = sample("var", dist.InverseGamma(3.0, 2.0))
        loc = sample("loc", dist.Normal(0.3, jnp.sqrt(var / 0.4)))
    with rows, columns:
        return sample("x", Missing(dist.Normal(loc[z], jnp.sqrt(var[z]))), obs=x)


def inverse_wishart(x, z, at):
    size = at.num_features
    with at.experts:
        cov = sample("cov", dist.InverseWishart(size + 2.5, scale_matrix=2.0 * jnp.eye(size)))
        loc = sample("loc", dist.MultivariateNormal(jnp.full(size, 0.2), cov / 0.6))
    with at.rows:
        return sample("x", dist.MultivariateNormal(loc[z], cov[z]), obs=x)


# says enough for a small problem to have power
KNOWN = partial(soft_probit, precision=dist.Gamma(3.0, 2.0), gamma0=0.7)
GATE = partial(normal_wishart, centre=0.3, covariance=0.8, u0=0.6)
ALPHA = dist.Gamma(3.0, 2.0)
CASES: dict[str, dict[str, Any]] = {
    "binary": {"expert": KNOWN, "gate": GATE},
    "sparse": {"expert": partial(KNOWN, sparse=True), "gate": GATE},
    "three classes": {"expert": KNOWN, "gate": GATE, "num_classes": 3},
    "known precision": {"expert": partial(soft_probit, precision=2.0), "gate": GATE, "alpha": 1.5},
    "no labels": {"expert": None, "gate": GATE},
    "bits": {"expert": None, "gate": beta_bernoulli},
    "codes": {"expert": None, "gate": dirichlet_categorical},
    "counts": {"expert": None, "gate": gamma_poisson},
    "reals": {"expert": None, "gate": normal_columns},
    "covariances": {"expert": None, "gate": inverse_wishart},
}


@cache
def case(
    name: str,
    num_rows: int = 12,
    num_features: int = 2,
    missing: float = 0.45,
    num_experts: int = 3,
):
    """(model, its arguments): data drawn from the model, with holes and two rows without a
    label.
    """
    told = {"alpha": ALPHA, "num_experts": num_experts, **CASES[name]}
    data = simulated(
        simulate,
        5,
        num_rows,
        num_features,
        missing=0.0 if name == "covariances" else missing,
        **told,
    )
    data["x"] = np.asarray(data["x"], float)
    if told["expert"] is not None:
        y = np.array(data["y"])
        y[: told.get("num_classes", 2)] = np.arange(told.get("num_classes", 2))
        data["y"] = np.where(np.isin(np.arange(num_rows), (3, 7)), -1, y)
    return iqgme, data


TASKS: dict[str, dict[str, Any]] = {
    "binary tasks": {"expert": KNOWN, "gate": GATE},
    "tasks of three classes": {"expert": KNOWN, "gate": GATE, "num_classes": 3},
    "tasks without labels": {"expert": None, "gate": GATE, "beta": 0.8},
    "tasks of bits": {"expert": None, "gate": beta_bernoulli, "alpha": 1.2},
}


@cache
def of_tasks(
    name: str,
    num_rows: int = 7,
    num_tasks: int = 2,
    missing: float = 0.4,
    num_groups: int = 2,
    num_experts: int = 3,
):
    """(model, its arguments): data of tasks drawn from the model, with holes, and in each a row
    without a label; rows of tasks mixed.
    """
    sizes = {"num_tasks": num_tasks, "num_groups": num_groups, "num_experts": num_experts}
    told = {"alpha": ALPHA, "beta": ALPHA, **sizes, **TASKS[name]}
    data = simulated(simulate_tasks, 5, num_rows, num_features=2, missing=missing, **told)
    order = np.random.default_rng(0).permutation(num_rows * num_tasks)
    data |= {"x": np.asarray(data["x"], float)[order], "task": data["task"][order]}
    if told["expert"] is not None:
        y = np.array(data["y"])[order]
        y[: told.get("num_classes", 2)] = np.arange(told.get("num_classes", 2))
        data["y"] = np.where(
            np.isin(
                np.arange(len(y)), [np.flatnonzero(data["task"] == j)[-1] for j in range(num_tasks)]
            ),
            -1,
            y,
        )
    return iqgme_tasks, data
