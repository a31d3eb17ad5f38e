"""Small models whose evidence is known, shared by the tests of the nested sampler."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

RNG = np.random.default_rng(3)
X, NOISE = RNG.normal(size=(12, 2)), 0.5
Y = X @ [1.0, -0.5] + NOISE * RNG.normal(size=12)


def line(x, y):
    """A linear model: the data are Normal."""
    weight = numpyro.sample("weight", dist.Normal(0.0, jnp.array([1.0, 2.0])).to_event(1))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ weight, NOISE), obs=y)


def line_evidence(x=X, y=Y):
    return stats.multivariate_normal(
        np.zeros(len(x)), x @ np.diag([1.0, 4.0]) @ x.T + NOISE**2 * np.eye(len(x))
    ).logpdf(y)


def two_modes(low=-10.0):
    """Two Normals of mass .3 and .7 in a square: log Z = -2 log 20."""
    x = numpyro.sample("x", dist.Uniform(low, 10.0).expand([2]).to_event(1))
    centres, widths = jnp.array([[-4.0, -4.0], [4.0, 4.0]]), jnp.array([[0.5, 0.5], [0.3, 0.3]])
    shares = dist.Categorical(probs=jnp.array([0.3, 0.7]))
    numpyro.sample(
        "y",
        dist.MixtureSameFamily(shares, dist.Normal(x[None] + centres, widths).to_event(1)),
        obs=jnp.zeros(2),
    )


def counts(y, total=20):
    """A Dirichlet and a multinomial: a simplex of three."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5])))
    numpyro.sample("y", dist.Multinomial(total, share), obs=y)


COUNTS = np.array([4, 14, 2])


def counts_evidence(y=COUNTS):
    return stats.dirichlet_multinomial([1.0, 2.0, 0.5], 20).logpmf(y)


def constant(y=2.0):
    """A likelihood that does not depend on the latent site."""
    numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def steps(y=0.0):
    """A likelihood of three flat places: 0 on half of the prior, 1 on a quarter, 9 on the rest."""
    x = numpyro.sample("x", dist.Uniform(0.0, 1.0))
    log_density = jnp.where(x < 0.5, -jnp.inf, jnp.where(x < 0.75, 0.0, jnp.log(9.0)))
    numpyro.sample(
        "y",
        dist.Delta(jnp.zeros(()), log_density=log_density, validate_args=False),
        obs=jnp.zeros(()),
    )


EXACT = {
    "line": (line, (X, Y), line_evidence()),
    "two modes": (two_modes, (), -2 * np.log(20)),
    "counts": (counts, (COUNTS,), counts_evidence()),
    "constant": (constant, (), stats.norm.logpdf(2.0)),
    "flat places": (steps, (), np.log(0.25 + 9 * 0.25)),
}
