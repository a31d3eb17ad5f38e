"""Softmax regression: a model of `x`, `y` and `num_classes` for NUTS and SVI, on which the command
`zoo` is tested.

    weight[d, k] ~ Normal                                  one for each feature and class
    y[n]         ~ Categorical(softmax(x[n] weight + bias))

Böhning (1992), "Multinomial logistic regression algorithm". Cost: rows x features x classes for a
log probability.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random

from zoo.card import Card

__all__ = ["CARD", "simulate", "softmax"]

CARD = Card(
    title="Softmax regression",
    paper="Böhning (1992), Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44",
    doi="10.1007/BF00048682",
    data=("wine", "digits", "wdbc", "pinwheel"),
    kernels=("NUTS", "SVI"),
    sites={
        "bias": "log odds of a class at the origin",
        "weight": "what a unit of a feature adds to the log odds of a class",
        "y": "the class of a row",
    },
    edits=(
        "draw a `scale` from a HalfNormal for each feature, the deviation of its weights: features "
        "that do not matter shrink",
        "draw `weight` from a Laplace: few large weights, many small ones",
    ),
)


def softmax(x: Array, y: Array | None = None, *, num_classes: int):
    """`x` [row, feature] without missing entries, `y` [row] in 0 .. num_classes - 1, or None to
    simulate.
    """
    x = jnp.asarray(x)
    with numpyro.plate("class", num_classes, dim=-1):
        bias = numpyro.sample("bias", dist.Normal(0.0, 2.0))
        with numpyro.plate("feature", x.shape[1], dim=-2):
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        return numpyro.sample("y", dist.Categorical(logits=x @ weight + bias), obs=y)


def simulate(
    rng_key: Array, num_rows: int = 200, num_features: int = 3, num_classes: int = 3
) -> dict[str, Array | int]:
    """Data from the model itself, as the model's keyword arguments."""
    x_key, model_key = random.split(rng_key)
    x = random.normal(x_key, (num_rows, num_features))
    with numpyro.handlers.seed(rng_seed=model_key):
        return {"x": x, "y": softmax(x, num_classes=num_classes), "num_classes": num_classes}
