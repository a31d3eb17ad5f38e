"""Linear regression in which most weights are near zero and a few are large: the horseshoe prior.

    intercept  ~ Normal(0, 1000)
    variance   ~ InverseGamma(1, 1)                      of a row
    tau2       ~ InverseGamma(1/2, 1 / xi)               tau ~ HalfCauchy(scale)
    xi         ~ InverseGamma(1/2, 1 / scale^2)
    lam2[d]    ~ InverseGamma(1/2, 1 / nu[d])            lam[d] ~ HalfCauchy(1)
    nu[d]      ~ InverseGamma(1/2, 1)
    weights[d] ~ Normal(0, sqrt(variance tau2 lam2[d]))
    y[i]       ~ Normal(intercept + x[i] weights, sqrt(variance))

Shapes: x [row, feature]; y [row]. The squares of tau and lam are inverse Gamma given xi and nu,
which makes them half Cauchy (Makalic and Schmidt 2016), and the complete conditional of each site
is then of a known family. Features should have variance about 1; weights follow the unit of y.

Carvalho, Polson and Scott (2010), "The horseshoe estimator for sparse signals". Cost of a log
density: rows x features.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random

from zoo.card import Card

__all__ = ["CARD", "horseshoe", "simulate"]

CARD = Card(
    title="Linear regression with few weights that matter",
    paper="Carvalho, Polson and Scott (2010), The horseshoe estimator for sparse signals, "
    "Biometrika 97",
    doi="10.1093/biomet/asq017",
    data=("diabetes",),
    kernels=("ConditionalGibbs", "NestedSampler", "NUTS"),
    sites={
        "intercept": "the mean of y where all features are 0",
        "variance": "the variance of a row",
        "xi": "makes tau half Cauchy",
        "tau2": "the variance of all weights, in units of that of a row",
        "nu": "makes lam half Cauchy",
        "lam2": "the variance of each weight, in units of tau2",
        "weights": "the slope of each feature",
        "y": "the quantity of a row",
    },
    edits=(
        "scale=0.1: fewer weights matter beforehand",
        "1.0 for lam2 in `weights`: ridge regression, in which no weight escapes the shrinkage",
        "dist.StudentT(4.0, mean, deviation) for y: rows with outliers; NUTS follows",
    ),
)


def horseshoe(x, y=None, *, scale: float = 1.0):
    """The model.

    Args:
        x: [row, feature].
        y: [row]; None: drawn.
        scale: of the prior of tau.

    Returns:
        y.
    """
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1000.0))
    variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
    xi = numpyro.sample("xi", dist.InverseGamma(0.5, scale**-2))
    tau2 = numpyro.sample("tau2", dist.InverseGamma(0.5, 1 / xi))
    with numpyro.plate("feature", x.shape[1]):
        nu = numpyro.sample("nu", dist.InverseGamma(0.5, 1.0))
        lam2 = numpyro.sample("lam2", dist.InverseGamma(0.5, 1 / nu))
        spread = jnp.sqrt(variance * tau2 * lam2)
        weights = numpyro.sample("weights", dist.Normal(0.0, spread))
    mean, deviation = intercept + jnp.asarray(x) @ weights, jnp.sqrt(variance)
    with numpyro.plate("row", len(x)):
        return numpyro.sample("y", dist.Normal(mean, deviation), obs=y)


def simulate(rng_key, num_rows: int = 100, num_features: int = 8, **options):
    """Draw data from the model.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features, which are standard Normal.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    x_key, y_key = random.split(rng_key)
    x = random.normal(x_key, (num_rows, num_features))
    return options | {"x": x, "y": numpyro.handlers.seed(horseshoe, y_key)(x, **options)}
