"""Models in the manner of NumPyro's examples, which the tests of model files fit as they are."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import TransformReparam


def regression(x, y=None):
    """Linear regression with noise of deviation 0.5."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("row", x.shape[0]):
        return numpyro.sample("y", dist.Normal(intercept + x @ slopes, 0.5), obs=y)


def correlated(x, y=None):
    """Rows that are alike depend on each other."""
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    distance = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    covariance = jnp.exp(-0.5 * distance) + (0.1 + noise**2) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), covariance), obs=y)


def eight_schools_noncentered(J, sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    shifted = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau)
    )
    with numpyro.plate("J", J):
        with numpyro.handlers.reparam(config={"theta": TransformReparam()}):
            theta = numpyro.sample("theta", shifted)
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def partially_pooled_with_logit(at_bats, hits=None):
    loc = numpyro.sample("loc", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    with numpyro.plate("num_players", at_bats.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
        return numpyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def departments(dept, male, num_dept, admitted=None):
    """A logistic regression whose intercepts vary by department; `dept` is an index."""
    centre = numpyro.sample("centre", dist.Normal(0.0, 2.0))
    with numpyro.plate("department", num_dept):
        level = numpyro.sample("level", dist.Normal(centre, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(male)):
        logits = level[dept] + slope * male
        numpyro.sample("admitted", dist.Bernoulli(logits=logits), obs=admitted)


def softmax(X, num_classes, Y):
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([X.shape[1], num_classes]))
    numpyro.sample("Y", dist.Categorical(logits=X @ weights), obs=Y)


def both(x, group, y):
    """All features but `group`, which has a meaning of its own."""
    level = numpyro.sample("level", dist.Normal(0, 1).expand([3]))
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1]]))
    numpyro.sample("y", dist.Normal(level[group] + x @ weights, 1), obs=y)


def wrong_shape(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(slope * x @ jnp.ones(7), 1.0), obs=y)


def without_sites(x):
    return x


number = 3
