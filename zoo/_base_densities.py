"""Base densities: where points are proposed, with parameters of their own.

Priors are those of features with mean 0 and variance 1.
"""

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import plate

__all__ = ["gaussian", "mixture", "student_t"]

# its declared return type is a number as well, which cannot be indexed
sample: Any = numpyro.sample


def gaussian(num_features: int) -> dist.Distribution:
    """A normal base density, its mean and covariance learned: the paper's."""
    location, root = _place_and_shape(num_features)
    return dist.MultivariateNormal(location, scale_tril=root)


def student_t(num_features: int) -> dist.Distribution:
    """With heavier tails, for data with outlying points."""
    location, root = _place_and_shape(num_features)
    df = sample("df", dist.Gamma(2.0, 0.1))
    return dist.MultivariateStudentT(df, location, root)


def mixture(num_features: int, num_parts: int = 3) -> dist.Distribution:
    """Of normal densities without correlations."""
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


def _place_and_shape(num_features: int) -> tuple[Array, Array]:
    of_features = {"event_dims": ["feature"]}
    location = sample(
        "mean", dist.Normal(0.0, 1.0).expand([num_features]).to_event(1), infer=of_features
    )
    scale = sample(
        "scale", dist.LogNormal(0.0, 0.5).expand([num_features]).to_event(1), infer=of_features
    )
    root = jnp.ones((1, 1)) if num_features == 1 else sample("root", dist.LKJCholesky(num_features))
    return location, scale[:, None] * root
