"""Regression by a smooth function of unknown form: a Gaussian process.

    intercept      ~ Normal(0, 10 scale)
    amplitude      ~ HalfNormal(scale)
    noise / scale  ~ LogNormal(-1, 1)
    lengthscale[d] ~ InverseGamma(2, 2)
    f              ~ GaussianProcess(intercept, amplitude^2 c(x / lengthscale, x' / lengthscale))
    y[i]           ~ Normal(f(x[i]), noise)

Shapes: x [row, feature]; y [row]. The function f is integrated out, so y is one multivariate Normal
vector. The covariance c is exp(-distance^2 / 2), of functions that have all derivatives, or
`matern52` or `matern32`, of rougher ones. A feature with a length scale that is large beside its
spread does not matter (automatic relevance determination). Features should have variance about 1;
`scale` gives the unit of y.

Rasmussen and Williams (2006), "Gaussian processes for machine learning", chapters 2 and 5. Cost of
a log density: rows^3 + rows^2 features. Fits are for some hundred rows at most.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.linalg import cho_factor, cho_solve

from zoo._gaussian_process import JITTER, matern32, matern52, squared_exponential
from zoo.card import Card

__all__ = [
    "CARD",
    "function_at",
    "gp_regression",
    "matern32",
    "matern52",
    "simulate",
    "squared_exponential",
]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="Gaussian-process regression with a length scale for each feature",
    paper="Rasmussen and Williams (2006), Gaussian processes for machine learning, MIT Press",
    doi="10.7551/mitpress/3206.001.0001",
    kernels=("NestedSampler", "NUTS"),
    sites={
        "intercept": "the mean of the function beforehand",
        "amplitude": "how far the function goes from the intercept",
        "noise": "the standard deviation of a row about the function",
        "lengthscale": "how far one goes along a feature until the function is another",
        "y": "the quantity of all rows, one vector",
    },
    edits=(
        "covariance=matern32: rougher functions, which follow jumps sooner",
        "scale=77.0: y has a standard deviation of about 77",
        "dist.InverseGamma(2.0, 20.0) for lengthscale: functions that are nearly linear",
    ),
)


def gp_regression(
    x, y, *, scale: float = 1.0, covariance: Callable[..., Any] = squared_exponential
):
    """The model.

    Args:
        x: [row, feature].
        y: [row]; None: drawn from the prior, given no other rows.
        scale: about the standard deviation of y.
        covariance: c, a function of points that are divided by the length scales.

    Returns:
        y.
    """
    intercept = sample("intercept", dist.Normal(0.0, 10.0 * scale))
    amplitude = sample("amplitude", dist.HalfNormal(scale))
    noise = sample("noise", dist.LogNormal(jnp.log(scale) - 1.0, 1.0))
    with numpyro.plate("feature", x.shape[1]):
        lengthscale = sample("lengthscale", dist.InverseGamma(2.0, 2.0))
    points = jnp.asarray(x) / lengthscale[None]
    root = jnp.linalg.cholesky(_of_rows(covariance(points, points), amplitude, noise))
    mean = jnp.full(len(x), intercept)
    return sample("y", dist.MultivariateNormal(mean, scale_tril=root), obs=y)


def _of_rows(correlations, amplitude, noise):
    """Covariances of y: those of the function, and noise on the diagonal."""
    return amplitude**2 * correlations + (noise**2 + JITTER * amplitude**2) * jnp.eye(
        len(correlations)
    )


def function_at(x_new, x, y, draw, covariance: Callable[..., Any] = squared_exponential):
    """Return mean and standard deviation of the function at new rows, for one posterior draw.

    Args:
        x_new: [new row, feature].
        x: [row, feature].
        y: [row].
        draw: values of the latent sites.
        covariance: that of the model.

    Returns:
        Mean and standard deviation, both [new row]. Cost: rows^3 + rows^2 x new rows.
    """
    amplitude = draw["amplitude"]
    points, new = (jnp.asarray(each) / draw["lengthscale"][None] for each in (x, x_new))
    known = cho_factor(_of_rows(covariance(points, points), amplitude, draw["noise"]))
    across = amplitude**2 * covariance(points, new)
    mean = draw["intercept"] + across.T @ cho_solve(known, y - draw["intercept"])
    explained = jnp.sum(across * cho_solve(known, across), axis=0)
    return mean, jnp.sqrt(jnp.maximum(amplitude**2 - explained, 0.0))


def simulate(rng_key, num_rows: int = 60, num_features: int = 2, **options):
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
    return options | {"x": x, "y": numpyro.handlers.seed(gp_regression, y_key)(x, None, **options)}
