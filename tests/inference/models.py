"""Small models with exact answers, shared by the tests of the driver."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

SPREAD = 2.0
Y = np.array([0.3, -1.2, 2.1, 0.8, 1.5], np.float32)
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELS = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(np.int32)


def normal_mean(y, spread=SPREAD):
    """mu ~ N(0, spread^2), y ~ N(mu, 1): everything about it is known."""
    mu = numpyro.sample("mu", dist.Normal(0.0, spread))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def exact_posterior(y=Y, spread=SPREAD):
    """Mean and standard deviation of mu."""
    precision = 1 / spread**2 + len(y)
    return float(y.sum() / precision), precision**-0.5


def exact_log_evidence(y=Y, spread=SPREAD):
    """log p(y)."""
    return stats.multivariate_normal(np.zeros(len(y)), np.eye(len(y)) + spread**2).logpdf(
        np.asarray(y, float)
    )


def logistic(x, y):
    """Plates, a deterministic site and two latent sites."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("feature", x.shape[1]):
        weight = numpyro.sample("weight", dist.Normal(0.0, scale))
    numpyro.deterministic("norm", jnp.sqrt((weight**2).sum()))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weight), obs=y)


def two_groups(y):
    """A discrete latent site for each row."""
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    with numpyro.plate("row", len(y)):
        group = numpyro.sample("group", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(3.0 * group, 1.0), obs=y)
