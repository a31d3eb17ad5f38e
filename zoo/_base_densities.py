"""Base densities of `zoo.archipelago`, which propose points, with their parameters.

The priors suit features with mean 0 and variance 1.
"""

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import plate

__all__ = ["gaussian", "mixture", "student_t"]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample


def gaussian(num_features: int) -> dist.Distribution:
    """Draw a normal base density with a latent mean and covariance, as in the paper."""
    location, root = _location_and_root(num_features)
    # the root is a Cholesky factor, which JAX would compile some twenty programs to check
    return dist.MultivariateNormal(location, scale_tril=root, validate_args=False)


def student_t(num_features: int) -> dist.Distribution:
    """Draw a Student t base density, for data with outliers."""
    location, root = _location_and_root(num_features)
    df = sample("df", dist.Gamma(2.0, 0.1))
    return dist.MultivariateStudentT(df, location, root)


def mixture(num_features: int, num_parts: int = 3) -> dist.Distribution:
    """Draw a base density that is a mixture of normal densities without correlations."""
    weights = sample("weights", dist.Dirichlet(jnp.full(num_parts, 2.0)))
    with plate("part", num_parts, dim=-1):
        location = sample(
            "mean",
            dist.Normal(0.0, 1.0).expand([num_features]).to_event(1),
            infer={"event_dims": ["feature"]},
        )
        scale = sample(
            "scale",
            dist.LogNormal(-0.5, 0.5).expand([num_features]).to_event(1),
            infer={"event_dims": ["feature"]},
        )
    return dist.MixtureSameFamily(
        dist.Categorical(weights), dist.Normal(location, scale).to_event(1)
    )


def _location_and_root(num_features: int) -> tuple[Array, Array]:
    of_features = {"event_dims": ["feature"]}
    location = sample(
        "mean", dist.Normal(0.0, 1.0).expand([num_features]).to_event(1), infer=of_features
    )
    scale = sample(
        "scale", dist.LogNormal(0.0, 0.5).expand([num_features]).to_event(1), infer=of_features
    )
    root = jnp.ones((1, 1)) if num_features == 1 else sample("root", dist.LKJCholesky(num_features))
    return location, scale[:, None] * root
