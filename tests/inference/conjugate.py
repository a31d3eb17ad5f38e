"""Models with conjugate sites, and the closed form of each conditional; `bug` shifts one term of
it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

RNG = np.random.default_rng(0)
ROWS, COLUMNS, RANK = 6, 4, 2
Y, OTHER, MATRIX = RNG.normal(size=ROWS), RNG.normal(size=3), RNG.normal(size=(ROWS, COLUMNS))
COUNTS, DESIGN = RNG.poisson(3.0, size=ROWS), RNG.normal(size=(ROWS, 3))
GROUP, LABELS = np.array([0, 1, 2, 0, 1, 0]), np.array([0, 2, 2, 1, 2, 0])
TABLE = RNG.multinomial(9, [0.2, 0.3, 0.5], size=ROWS)


def location():
    mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=Y)
    with numpyro.plate("other row", 3):
        numpyro.sample("other", dist.Normal(3.0 * mean, 2.0), obs=OTHER)


def location_closed(values, bug):
    precision = 1 / 4 + ROWS / 0.25 + 3 * 9 / 4
    return dist.Normal(
        (1 / 4 + Y.sum() / 0.25 + (3 + bug) * OTHER.sum() / 4) / precision, precision**-0.5
    )


def groups():
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("group", 3):
        mean = numpyro.sample("mean", dist.Normal(0.0, spread))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean[GROUP], 0.5), obs=Y)


def groups_closed(values, bug):
    count, total = np.bincount(GROUP), np.bincount(GROUP, Y)
    precision = values["spread"] ** -2 + (count + bug) / 0.25
    return dist.Normal(total / 0.25 / precision, precision**-0.5)


def bounded():
    level = numpyro.sample("level", dist.HalfNormal(2.0))
    with numpyro.plate("row", ROWS):
        fraction = numpyro.sample("fraction", dist.Uniform(-1.0, 0.5))
        numpyro.sample("y", dist.Normal(level + fraction, 0.5), obs=Y)


def level_closed(values, bug):
    precision = 1 / 4 + ROWS / 0.25
    mean = (Y - values["fraction"]).sum() / 0.25 / precision
    return dist.TruncatedNormal(mean + bug, precision**-0.5, low=0.0)


def fraction_closed(values, bug):
    return dist.TruncatedNormal(Y - values["level"], 0.5 + bug, low=-1.0, high=0.5)


def rates():
    with numpyro.plate("row", ROWS):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 3.0))
        numpyro.sample("counts", dist.Poisson(rate * 1.5), obs=COUNTS)
        numpyro.sample("more", dist.Poisson(rate), obs=COUNTS[::-1].copy())


def rates_closed(values, bug):
    return dist.Gamma(2.0 + COUNTS + COUNTS[::-1], 3.0 + 1.5 + 1.0 + bug)


def scales():
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 3.0))
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 3.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=Y)
        numpyro.sample("again", dist.Normal(mean, variance**0.5), obs=2.0 * Y)


def precision_closed(values, bug):
    return dist.Gamma(2.0 + (ROWS + bug) / 2, 3.0 + ((Y - values["mean"]) ** 2).sum() / 2)


def variance_closed(values, bug):
    return dist.InverseGamma(
        2.0 + ROWS / 2, 3.0 + ((2 * Y - values["mean"]) ** 2).sum() / (2 + bug)
    )


def batting():
    size = numpyro.sample("size", dist.Gamma(2.0, 1.0))
    with numpyro.plate("row", ROWS):
        rate = numpyro.sample("rate", dist.Beta(0.3 * size, 0.7 * size))
        numpyro.sample("hits", dist.Binomial(20, rate), obs=COUNTS)
        numpyro.sample("first", dist.GeometricProbs(rate), obs=COUNTS[::-1].copy())


def batting_closed(values, bug):
    size = values["size"]
    return dist.Beta(0.3 * size + COUNTS + 1, 0.7 * size + 20 - COUNTS + COUNTS[::-1] + bug)


def spikes():
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    with numpyro.plate("row", ROWS):
        active = numpyro.sample("active", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(3.0 * active, 1.0), obs=Y)
        numpyro.sample("counts", dist.Poisson(1.0 + active), obs=COUNTS)


def active_closed(values, bug):
    share = values["share"]
    likelihood = 3 * Y - 4.5 + COUNTS * np.log(2) - 1 + bug
    return dist.Bernoulli(logits=jnp.log(share) - jnp.log1p(-share) + likelihood)


def share_closed(values, bug):
    on = values["active"].sum()
    return dist.Beta(1.0 + on, 1.0 + ROWS - on + bug)


def mixture():
    weight = numpyro.sample("weight", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
    with numpyro.plate("component", 3):
        centre = numpyro.sample("centre", dist.Normal(0.0, 2.0))
    with numpyro.plate("row", ROWS):
        which = numpyro.sample("which", dist.Categorical(weight))
        numpyro.sample("y", dist.Normal(centre[which], 0.5), obs=Y)
        numpyro.sample("label", dist.Categorical(weight), obs=LABELS)


def which_closed(values, bug):
    gap = Y[:, None] - values["centre"]
    return dist.Categorical(logits=jnp.log(values["weight"]) - gap**2 / (0.5 + bug))


def weight_closed(values, bug):
    total = jnp.bincount(values["which"], length=3) + np.bincount(LABELS)
    return dist.Dirichlet(jnp.array([0.5, 1.0, 2.0 + bug]) + total)


def tables():
    with numpyro.plate("row", ROWS):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
        numpyro.sample("table", dist.Multinomial(9, shares), obs=TABLE)


def tables_closed(values, bug):
    return dist.Dirichlet(jnp.array([0.5, 1.0, 2.0]) + TABLE + bug)


def regression():
    weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.ones(3), 2.0 * jnp.eye(3) + 1.0))
    with numpyro.plate("row", ROWS):
        numpyro.sample("y", dist.Normal(DESIGN @ weight, 0.5), obs=Y)


def regression_closed(values, bug):
    prior = jnp.linalg.inv(2.0 * jnp.eye(3) + 1.0)
    precision = prior + DESIGN.T @ DESIGN / (0.25 + bug)
    mean = jnp.linalg.solve(precision, prior @ jnp.ones(3) + DESIGN.T @ Y / 0.25)
    return dist.MultivariateNormal(mean, precision_matrix=precision)


def factors(matrix=MATRIX):
    with numpyro.plate("factor", RANK, dim=-1):
        with numpyro.plate("row", ROWS, dim=-2):
            left = numpyro.sample("left", dist.Normal(0.0, 1.0))
        with numpyro.plate("column", COLUMNS, dim=-2):
            right = numpyro.sample("right", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", ROWS, dim=-2), numpyro.plate("column", COLUMNS, dim=-1):
        numpyro.sample("matrix", dist.Normal(left @ right.T, 0.5), obs=matrix)


def left_closed(values, bug):
    right = values["right"]
    precision = jnp.eye(RANK) + right.T @ right / (0.25 + bug)
    mean = jnp.linalg.solve(precision, right.T @ MATRIX.T / 0.25).T
    return dist.MultivariateNormal(mean, precision_matrix=precision)


class Case(NamedTuple):
    model: Callable
    site: str
    family: str
    closed: Callable


CASES = [
    Case(location, "mean", "Normal", location_closed),
    Case(groups, "mean", "Normal", groups_closed),
    Case(bounded, "level", "truncated Normal", level_closed),
    Case(bounded, "fraction", "truncated Normal", fraction_closed),
    Case(rates, "rate", "Gamma", rates_closed),
    Case(scales, "precision", "Gamma", precision_closed),
    Case(scales, "variance", "inverse Gamma", variance_closed),
    Case(batting, "rate", "Beta", batting_closed),
    Case(spikes, "share", "Beta", share_closed),
    Case(spikes, "active", "Bernoulli", active_closed),
    Case(mixture, "which", "Categorical", which_closed),
    Case(mixture, "weight", "Dirichlet", weight_closed),
    Case(tables, "shares", "Dirichlet", tables_closed),
    Case(regression, "weight", "joint Normal of the last dimension", regression_closed),
    Case(factors, "left", "joint Normal of the last dimension", left_closed),
]
each_case = pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.model.__name__}-{case.site}" for case in CASES]
)
