"""A line through the columns of a table: y ~ Normal(intercept + x weights, noise)."""

import numpyro
import numpyro.distributions as dist
from jax import random

from zoo.card import Card

__all__ = ["CARD", "mine", "simulate"]

CARD = Card(
    title="A line through the columns",
    paper="none",
    sites={
        "intercept": "height of the line",
        "weights": "its slopes",
        "noise": "deviation of a row",
        "y": "the quantity",
    },
    kernels=("NUTS", "SVI"),
)


def mine(x, y=None):
    """The model; without `y` it draws it."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    with numpyro.plate("row", len(x)):
        return numpyro.sample("y", dist.Normal(intercept + x @ weights, noise), obs=y)


def simulate(rng_key, num_rows=100, num_features=2):
    """The model's arguments, with data drawn from it."""
    x_key, y_key = random.split(rng_key)
    x = random.normal(x_key, (num_rows, num_features))
    return {"x": x, "y": numpyro.handlers.seed(mine, y_key)(x)}
