"""A mixture model for classification, with a prior on the number of clusters.

    m           ~ mixture of a Poisson without 0 and a zeta   order: the number of clusters
    beta        ~ Dirichlet(1, ..., 1)                        weights of the clusters
    gamma[c]    ~ Dirichlet(1, ..., 1)                        class probabilities of a cluster
    mu[c, d]    ~ Normal(0, 3)                                mean of a cluster
    sigma[c, d] ~ LogNormal(-.5, .6)                          standard deviations of a cluster
    p(x, y)     = sum_c beta[c] gamma[c, y] phi(x; mu[c], sigma[c])

Shapes: x [row, feature]; y [row]; beta [cluster]; gamma [cluster, class]; mu and sigma
[cluster, feature].

The sum over clusters is computed in two steps. x has the density of the mixture. y given x has the
class probabilities of the clusters, weighted by the responsibilities of the clusters for x. The
order is an argument of the model: `family(order)` is the model of an order, and `order_prior()` is
the prior of the orders.

Center (2009), "Learning complex classification models from large data sets". The paper states no
numbers for the priors; those here suit features with variance about 1. Cost of a log density: rows
x clusters x (features + classes), with features^2 in place of features for full covariances.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.core import Tracer
from jax.nn import softmax
from numpyro import plate
from numpyro.handlers import mask, seed

from inference.distributions.diagonal import DiagonalNormal
from inference.distributions.orders import PositivePoisson, Zeta
from zoo.card import Card

__all__ = [
    "CARD",
    "Axes",
    "diagonal",
    "family",
    "full",
    "order_prior",
    "simulate",
    "staged_learning",
]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="A mixture of clusters that classifies, of unknown order",
    paper="Center (2009), Learning complex classification models from large data sets, Bayesian "
    "Inference and Maximum Entropy Methods",
    bibtex="""@inproceedings{center2009learning,
  title = {Learning complex classification models from large data sets},
  author = {Center, Julian L.},
  booktitle = {Bayesian Inference and Maximum Entropy Methods in Science and Engineering},
  publisher = {American Institute of Physics},
  year = {2009},
}""",
    data=("wine", "wdbc"),
    kernels=("NestedSampler", "Staged", "DataTempering", "NUTS"),
    sites={
        "beta": "the weight of each cluster",
        "gamma": "the class probabilities of a cluster",
        "mu": "the mean of a cluster",
        "sigma": "the standard deviations of a cluster",
        "x": "the features of a row",
        "y": "the class of a row, -1 in the data where it is unknown",
    },
    edits=(
        "cluster=full: features that are correlated within a cluster",
        "num_classes=0: no classes, the density of x alone",
        "dist.StudentT(4.0, mu, sigma).to_event(1) in `diagonal`: clusters with outliers",
    ),
)


class Axes(NamedTuple):
    """The plates of the model."""

    clusters: plate
    rows: plate
    features: plate

    def where(self, loc: Any, scale: Any):
        """Draw the means of the clusters."""
        with self.clusters, self.features:
            return sample("mu", dist.Normal(loc, scale))

    def width(self, log_width: float, log_range: float):
        """Draw the standard deviations of the clusters."""
        with self.clusters, self.features:
            return sample("sigma", dist.LogNormal(log_width, log_range))


def diagonal(
    at: Axes, loc: Any = 0.0, scale: Any = 3.0, log_width: float = -0.5, log_range: float = 0.6
) -> dist.Distribution:
    """Draw clusters in which features are independent.

    Args:
        at: the plates.
        loc: prior mean of mu.
        scale: prior standard deviation of mu.
        log_width: prior mean of log sigma.
        log_range: prior standard deviation of log sigma.

    Returns:
        The density of x in each cluster.
    """
    mu, sigma = at.where(loc, scale), at.width(log_width, log_range)
    return DiagonalNormal(mu, sigma)


def full(
    at: Axes,
    loc: Any = 0.0,
    scale: Any = 3.0,
    log_width: float = -0.5,
    log_range: float = 0.6,
    independence: float = 2.0,
) -> dist.Distribution:
    """Draw clusters with correlated features; `corr` is the Cholesky factor of an LKJ prior.

    Args:
        at: the plates.
        loc: prior mean of mu.
        scale: prior standard deviation of mu.
        log_width: prior mean of log sigma.
        log_range: prior standard deviation of log sigma.
        independence: concentration of the LKJ prior.

    Returns:
        The density of x in each cluster.
    """
    mu, sigma = at.where(loc, scale), at.width(log_width, log_range)
    narrow = plate(at.clusters.name, at.clusters.size, dim=-1)
    with narrow:
        prior = dist.LKJCholesky(at.features.size, concentration=independence)
        corr = sample(
            "corr", prior, infer={"event_dims": [at.features.name, f"{at.features.name}_2"]}
        )
    return dist.MultivariateNormal(mu, scale_tril=sigma[..., None] * corr)


def staged_learning(
    x=None,
    y=None,
    *,
    shape: tuple[int, int] | None = None,
    order: int = 3,
    num_classes: int = 2,
    cluster: Callable[[Axes], dist.Distribution] = diagonal,
    concentration: float = 1.0,
    class_concentration: float = 1.0,
):
    """The model of one order.

    Args:
        x: [row, feature]; None: drawn with the shape `shape`.
        y: [row], 0 .. num_classes - 1, or -1 where unknown; None: drawn.
        shape: (rows, features) where x is None.
        order: number of clusters.
        num_classes: number of classes; 0: rows have no classes.
        cluster: `axes -> distribution [cluster]` draws the parameters of the clusters; `diagonal`
            or `full`.
        concentration: of the Dirichlet prior of the weights.
        class_concentration: of the Dirichlet prior of the class probabilities.

    Returns:
        x and y.
    """
    num_rows, num_features = _checked(x, y, shape, order, num_classes)
    at = Axes(
        plate("cluster", order, dim=-2),
        plate("row", num_rows, dim=-1),
        plate("feature", num_features, dim=-1),
    )
    beta = sample(
        "beta", dist.Dirichlet(jnp.full(order, concentration)), infer={"event_dims": ["cluster"]}
    )
    clusters = dist.MixtureSameFamily(dist.Categorical(probs=beta), cluster(at))
    if not num_classes:
        with at.rows:
            return sample("x", clusters, obs=x, infer={"event_dims": ["feature"]}), None
    with plate("cluster", order, dim=-1):
        prior = dist.Dirichlet(jnp.full(num_classes, class_concentration))
        gamma = sample("gamma", prior, infer={"event_dims": ["class"]})
    with at.rows:
        x = sample("x", clusters, obs=x, infer={"event_dims": ["feature"]})
        log_joint = clusters.component_log_probs(x)  # [row, cluster]
        probs = softmax(log_joint, axis=-1) @ gamma
        known = True if y is None else jnp.asarray(y) >= 0
        with mask(mask=known):
            return x, sample(
                "y",
                dist.Categorical(probs=probs),
                obs=None if y is None else jnp.maximum(jnp.asarray(y), 0),
            )


def family(order: int, **options: Any) -> Callable:
    """Return the model of an order.

    Args:
        order: number of clusters.
        **options: other arguments of the model.
    """
    return partial(staged_learning, order=order, **options)


def order_prior(rate: float = 3.0, zeta_share: float = 0.5) -> dist.Distribution:
    """Return the prior of the order, a mixture of a Poisson without 0 and a zeta distribution.

    Args:
        rate: rate of the Poisson distribution.
        zeta_share: weight of the zeta distribution, whose heavy tail allows large orders.
    """
    share = dist.Categorical(probs=jnp.array([1 - zeta_share, zeta_share]))
    return dist.MixtureGeneral(share, [PositivePoisson(rate), Zeta()])


def _checked(x, y, shape, order: int, num_classes: int) -> tuple[int, int]:
    """The shape of x, after checks of all arguments; traced values are not checked."""
    shape = np.shape(x) if x is not None else shape
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"staged_learning: found x of shape {shape}; wanted [row, feature] with at least one "
            "of each, or shape=."
        )
    if order < 1 or num_classes < 0:
        raise ValueError(
            f"staged_learning: found order={order}, num_classes={num_classes}; wanted an order of "
            "1 or more, classes of 0 or more."
        )
    if y is None:
        return shape
    if np.shape(y) != shape[:1]:
        raise ValueError(
            f"staged_learning: found y of shape {np.shape(y)} beside x of shape {shape}; wanted a "
            "class for each row."
        )
    if not isinstance(y, Tracer) and not np.isin(y, np.arange(-1, num_classes)).all():
        raise ValueError(
            f"staged_learning y: found classes {np.unique(np.asarray(y))}, wanted 0 .. "
            f"{num_classes - 1}, or -1 where unknown."
        )
    return shape


def simulate(
    rng_key: Array, num_rows: int = 200, num_features: int = 2, **options: Any
) -> dict[str, Any]:
    """Draw data from the model.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    with seed(rng_seed=rng_key):
        x, y = staged_learning(shape=(num_rows, num_features), **options)
    return options | {"x": x} | ({} if y is None else {"y": y})
