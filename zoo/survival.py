"""Regression of times to an event, some of which are censored: the Weibull model.

    intercept ~ Normal(0, 10)
    slopes[d] ~ Normal(0, 1)
    shape     ~ LogNormal(0, 1/2)
    scale[i]  = exp(intercept + x[i] slopes)
    time[i]   ~ Weibull(scale[i], shape)          where event[i] is 1
    time[i]   : probability exp(-(time[i] / scale[i])^shape) to live longer, where it is 0

Shapes: x [row, feature]; event and time [row]. A slope multiplies time: with slope s, a row whose
feature is larger by 1 lives exp(s) times as long (accelerated failure time). The hazard rises with
time where shape > 1, and falls where shape < 1. Censoring must say nothing of the time that was
not seen. Features should have variance about 1; time may have any unit.

Kalbfleisch and Prentice (2002), "The statistical analysis of failure time data", chapter 2. Cost
of a log density: rows x features.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random

from zoo.card import Card

__all__ = ["CARD", "CensoredWeibull", "simulate", "survival"]

CARD = Card(
    title="Weibull regression of times to an event, with right censoring",
    paper="Kalbfleisch and Prentice (2002), The statistical analysis of failure time data, Wiley",
    doi="10.1002/9781118032985",
    kernels=("NUTS", "NestedSampler", "SVI"),
    sites={
        "intercept": "the log of the scale of time where all features are 0",
        "slopes": "by how much the log of the time grows with each feature",
        "shape": "above 1 where the hazard rises with time, below 1 where it falls",
        "time": "when the event was, or when the row was last seen without it",
    },
    edits=(
        "1.0 for shape: a constant hazard, the exponential model",
        "dist.Normal(0.0, 0.1) for slopes: features that matter less beforehand",
        "dist.RightCensoredDistribution(dist.LogNormal(location, 1 / shape), event == 0) for time: "
        "a hazard that rises and then falls",
    ),
)


class CensoredWeibull(dist.RightCensoredDistribution):
    """A Weibull distribution, some of whose values are known to be larger than what is given.

    The log probability of the base class, log(1 - cdf), is rounded where the survival is below
    1e-7 in float32; this one is exact. Draws are not censored.
    """

    def log_prob(self, value, intermediates=None):
        """Return log densities, or log survival functions where a value is censored."""
        weibull = self.base_dist
        log_survival = -((value / weibull.scale) ** weibull.concentration)
        return jnp.where(self.censored, log_survival, weibull.log_prob(value))


def survival(x, event, time):
    """The model.

    Args:
        x: [row, feature].
        event: 1 where the event was seen at `time`, 0 where the row is censored there, [row], or
            one number for all rows.
        time: positive, [row]; None: the time of the event is drawn, also of a censored row.

    Returns:
        time.
    """
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
    with numpyro.plate("feature", x.shape[1]):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    location = intercept + jnp.asarray(x) @ slopes
    with numpyro.plate("row", len(x)):
        weibull = dist.Weibull(jnp.exp(location), shape)
        return numpyro.sample("time", CensoredWeibull(weibull, jnp.asarray(event) == 0), obs=time)


def simulate(rng_key, num_rows: int = 100, num_features: int = 2, share: float = 0.7):
    """Draw data from the model. The study ends when a share of the rows has had the event.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features, which are standard Normal.
        share: of the rows; the others are censored at the end of the study.

    Returns:
        Keyword arguments of the model.
    """
    x_key, time_key = random.split(rng_key)
    x = random.normal(x_key, (num_rows, num_features))
    time = numpyro.handlers.seed(survival, time_key)(x, 1, None)
    end = jnp.sort(time)[max(round(share * num_rows), 1) - 1]
    return {"x": x, "event": (time <= end).astype(int), "time": jnp.minimum(time, end)}
