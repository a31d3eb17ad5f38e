"""A mixture that classifies: clusters of rows, each with its share of every class, and a prior on
how many clusters there are.

    m           ~ a Poisson without zero, mixed with a zeta                         the order: how many clusters
    beta        ~ Dirichlet(1, ..., 1)                                              weight of each cluster
    gamma[c]    ~ Dirichlet(1, ..., 1)                                              the classes of a cluster
    mu[c, d]    ~ Normal(0, 3)                                                      where a cluster is
    sigma[c, d] ~ LogNormal(-.5, .6)                                                how wide it is
    p(x, y)     = sum_c  gamma[c, y] beta[c] phi(x; mu[c], sigma[c])                a row and its class

The sum over clusters is carried out, in two steps: x has the density of the mixture, and y, given
x, the classes of the clusters in the proportion in which they claim x. The order is an argument;
`family(order)` is the model of that order, `order_prior()` that of the orders.

Center (2009), "Learning complex classification models from large data sets"; the paper has no
numbers, those of the priors are ours and mean columns of variance about 1. Cost of a log density:
rows x clusters x (features + classes), with full spreads features^2.
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

# its declared return type is a number as well, which cannot be indexed
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
        "beta": "weight of each cluster",
        "gamma": "the classes of a cluster",
        "mu": "where a cluster is",
        "sigma": "how wide it is along each feature",
        "x": "the features of a row",
        "y": "the class of a row, -1 in the data where it is unknown",
    },
    edits=(
        "cluster=full: features that are correlated within a cluster",
        "num_classes=0: no classes, the density of x alone",
        "dist.StudentT(4.0, mu, sigma).to_event(1) in `diagonal`: clusters with far outliers",
    ),
)


class Axes(NamedTuple):
    """The plates."""

    clusters: plate
    rows: plate
    features: plate

    def where(self, loc: Any, scale: Any):
        """Where each cluster is."""
        with self.clusters, self.features:
            return sample("mu", dist.Normal(loc, scale))

    def width(self, log_width: float, log_range: float):
        """How wide each cluster is."""
        with self.clusters, self.features:
            return sample("sigma", dist.LogNormal(log_width, log_range))


def diagonal(
    at: Axes, loc: Any = 0.0, scale: Any = 3.0, log_width: float = -0.5, log_range: float = 0.6
) -> dist.Distribution:
    """The density of x in each cluster, features independent of each other."""
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
    """The same with correlations: `corr` ~ LKJ(independence), its Cholesky factor."""
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
    """The model of one order; it returns x and y.

    :param x: [row, feature]; None: drawn, of `shape` (rows, features).
    :param y: [row], 0 .. num_classes - 1, or -1 where unknown; None: drawn.
    :param num_classes: 0: rows have no classes.
    :param cluster: `axes -> distribution [cluster]` draws the parameters of the clusters;
    `diagonal` or `full`.
    :param concentration: of the weights; `class_concentration`: of the classes of a cluster.
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
        claims = clusters.component_log_probs(x)  # [row, cluster]
        probs = softmax(claims, axis=-1) @ gamma
        known = True if y is None else jnp.asarray(y) >= 0
        with mask(mask=known):
            return x, sample(
                "y",
                dist.Categorical(probs=probs),
                obs=None if y is None else jnp.maximum(jnp.asarray(y), 0),
            )


def family(order: int, **options: Any) -> Callable:
    """The model of an order."""
    return partial(staged_learning, order=order, **options)


def order_prior(rate: float = 3.0, zeta_share: float = 0.5) -> dist.Distribution:
    """A Poisson without its zero, and with the given share a zeta, for which large orders are
    not surprising.
    """
    share = dist.Categorical(probs=jnp.array([1 - zeta_share, zeta_share]))
    return dist.MixtureGeneral(share, [PositivePoisson(rate), Zeta()])


def _checked(x, y, shape, order: int, num_classes: int) -> tuple[int, int]:
    """The shape of x, refused where the data are not what they should be."""
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
    """Data from the model itself, as the model's keyword arguments."""
    with seed(rng_seed=rng_key):
        x, y = staged_learning(shape=(num_rows, num_features), **options)
    return options | {"x": x} | ({} if y is None else {"y": y})
