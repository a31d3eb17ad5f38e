"""AClass: a classifier in which every class is a Chinese restaurant process mixture.

    share      ~ Dirichlet(gamma, ..., gamma)         how common each class is
    y[n]       ~ Categorical(share)                   class of a row; may be unknown
    z[n]       ~ CRP(alpha)                           group of a row among the rows of its class
    p[c, g, d] ~ Beta(beta, beta)                     parameters of group g of class c
    x[n, d]    ~ Bernoulli(p[y[n], z[n], d])          features; may be missing

Shapes: x [row, feature]; y and z [row]; share [class]; p [class, group, feature].

The last two lines are one of several components. A component is a function that draws the
parameters of all groups and observes the features, which may be binary, categorical, counts or real
numbers.

Mansinghka, Roy, Rifkin and Tenenbaum (2007), "AClass: an online algorithm for generative
classification". The defaults of alpha and beta are those of the paper. Cost of a log density:
(rows + classes x groups) x features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import plate
from numpyro.handlers import scope, seed

from inference.distributions.missing import Missing
from inference.distributions.partitions import CRP
from zoo.card import Card

__all__ = [
    "CARD",
    "Axes",
    "aclass",
    "beta_bernoulli",
    "dirichlet_categorical",
    "gamma_poisson",
    "mixed",
    "normal_inverse_chi2",
    "normal_inverse_wishart",
    "simulate",
]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="Classes made of Chinese restaurant process mixtures",
    paper="Mansinghka, Roy, Rifkin and Tenenbaum (2007), AClass: an online algorithm for "
    "generative classification, AISTATS",
    bibtex="""@inproceedings{mansinghka2007aclass,
  title = {{AClass}: An online algorithm for generative classification},
  author = {Mansinghka, Vikash K. and Roy, Daniel M. and Rifkin, Ryan and Tenenbaum, Josh},
  booktitle = {Proceedings of the Eleventh International Conference on Artificial Intelligence \
and Statistics},
  series = {Proceedings of Machine Learning Research},
  volume = {2},
  year = {2007},
}""",
    data=("house_votes", "20news_w100", "mnist_pca50", "crp_mixture", "wine"),
    kernels=("ParticleFilter", "CollapsedGibbs"),
    sites={
        "share": "the probability of each class",
        "y": "the class of a row, -1 in the data where it is unknown",
        "z": "the group of a row within its class, in order of appearance",
        "p": "the probability that a feature is 1 in a group",
        "x": "the features of a row, NaN where missing",
    },
    edits=(
        "alpha=dist.Gamma(1.0, 1.0), with ParticleFilter(aclass, grid={'alpha': [0.1, 0.3, 1.0]}): "
        "the number of groups is learned",
        "component=partial(beta_bernoulli, beta=dist.Gamma(2.0, 4.0)): the concentration of p's "
        "prior is learned",
        "component=normal_inverse_chi2, or mixed(...): real features, or columns of several kinds",
        "max_groups=1: one group a class, naive Bayes",
        "PitmanYor(alpha, 0.3, ...) in place of CRP(alpha, ...): more groups, most of them small; "
        "any ExchangeablePartition will do",
    ),
)


class Axes(NamedTuple):
    """The plates of the model, and the group of each row.

    `z` = (class, group) of each row is an index into parameters of shape [class, group, ...].
    """

    classes: plate
    groups: plate
    rows: plate
    features: plate
    z: tuple[Any, Any]

    def joint(self) -> "Axes":
        """Return plates for a component whose features are one event.

        The plates of classes, groups and rows move one dimension to the right.
        """
        moved = (
            plate(each.name, each.size, dim=each.dim + 1)
            for each in (self.classes, self.groups, self.rows)
        )
        return Axes(*moved, self.features, self.z)


def beta_bernoulli(x, at: Axes, beta: Any = 0.5):
    """Binary features: p ~ Beta(beta, beta), x ~ Bernoulli(p), the paper's component.

    Args:
        x: [row, feature], 0, 1 or NaN.
        at: the plates, and the group of each row.
        beta: a number; a distribution makes it a latent site.
    """
    [beta] = _drawn(beta=beta)
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(beta, beta))
    with at.rows, at.features:
        return sample("x", Missing(dist.Bernoulli(p[at.z])), obs=x)


def aclass(
    x=None,
    y=None,
    *,
    shape: tuple[int, ...] | None = None,
    num_classes: int = 2,
    num_groups: int | None = None,
    max_groups: int | None = None,
    alpha: Any = 1.0,
    gamma: Any = 1.0,
    component: Callable = beta_bernoulli,
    all_labelled: bool | None = None,
):
    """The model.

    Args:
        x: [row, feature], NaN where missing; None: drawn with the shape `shape`.
        y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: no row is labelled.
        shape: (rows, features) where x is None.
        num_classes: number of classes.
        num_groups: array size for the groups of each class, which truncates nothing; None: as many
            as there can be.
        max_groups: bound on the number of groups in each class, which changes the prior; None: no
            bound.
        alpha: concentration of the CRP; a distribution makes it a latent site.
        gamma: concentration of the classes.
        component: `(x, axes) -> x` draws the parameters of groups and observes the features.
        all_labelled: whether no entry of `y` is -1; None: it is read off `y`, which must not be
            traced then.

    Returns:
        x and y.
    """
    num_rows, num_features = _checked(shape if x is None else np.shape(x), y)
    share = sample(
        "share", dist.Dirichlet(jnp.full(num_classes, gamma)), infer={"event_dims": ["class"]}
    )
    with plate("row", num_rows):
        y = sample("y", dist.Categorical(share), **_observation(y, all_labelled))
    [alpha] = _drawn(alpha=alpha)
    crp = CRP(
        alpha,
        num_rows,
        labels=y,
        num_classes=num_classes,
        capacity=num_groups,
        max_groups=max_groups,
    )
    z = sample("z", crp, infer={"event_dims": ["row"]})
    at = Axes(
        classes=plate("class", num_classes, dim=-3),
        groups=plate("group", crp.capacity, dim=-2),
        rows=plate("row", num_rows, dim=-2),
        features=plate("feature", num_features, dim=-1),
        z=(y, z),
    )
    return component(x, at), y


def dirichlet_categorical(x, at: Axes, num_values: int, beta: Any = 0.5):
    """Categorical features: p ~ Dirichlet(beta, ..., beta), x ~ Categorical(p).

    Args:
        x: [row, feature], 0 .. num_values - 1 or NaN.
        at: the plates, and the group of each row.
        num_values: number of categories of each feature.
        beta: a number; a distribution makes it a latent site.
    """
    [beta], value = _drawn(beta=beta), at.features.name.replace("feature", "value")
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Dirichlet(jnp.full(num_values, beta)), infer={"event_dims": [value]})
    with at.rows, at.features:
        return sample("x", Missing(dist.Categorical(p[at.z])), obs=x)


def gamma_poisson(x, at: Axes, shape: Any = 1.0, rate: Any = 0.1):
    """Counts: mean ~ Gamma(shape, rate), x ~ Poisson(mean).

    Args:
        x: [row, feature], counts or NaN.
        at: the plates, and the group of each row.
        shape: a number; a distribution makes it a latent site.
        rate: likewise.
    """
    shape, rate = _drawn(shape=shape, rate=rate)
    with at.classes, at.groups, at.features:
        mean = sample("mean", dist.Gamma(shape, rate))
    with at.rows, at.features:
        return sample("x", Missing(dist.Poisson(mean[at.z])), obs=x)


def normal_inverse_chi2(
    x, at: Axes, mean: Any = 0.0, kappa: Any = 0.1, nu: Any = 2.0, scale: Any = 1.0
):
    """Real features that are independent within a group.

    var ~ scaled inverse chi2(nu, scale^2), loc | var ~ Normal with mean `mean` and variance
    var / kappa.

    Args:
        x: [row, feature], NaN where missing.
        at: the plates, and the group of each row.
        mean: a number; a distribution makes it a latent site.
        kappa: likewise.
        nu: likewise.
        scale: likewise.
    """
    mean, kappa, nu, scale = _drawn(mean=mean, kappa=kappa, nu=nu, scale=scale)
    with at.classes, at.groups, at.features:
        var = sample("var", dist.InverseGamma(nu / 2, nu * scale**2 / 2))
        loc = sample("loc", dist.Normal(mean, jnp.sqrt(var / kappa)))
    with at.rows, at.features:
        return sample("x", Missing(dist.Normal(loc[at.z], jnp.sqrt(var[at.z]))), obs=x)


def normal_inverse_wishart(
    x, at: Axes, mean: Any = 0.0, kappa: Any = 0.1, nu: Any = None, scale: Any = 1.0
):
    """Real features that are correlated within a group.

    covariance ~ InverseWishart(nu, nu scale^2 I), loc | covariance ~ Normal(mean, covariance /
    kappa). The site is `precision`, the inverse of the covariance. With one feature this is
    `normal_inverse_chi2`.

    Args:
        x: [row, feature], NaN where missing.
        at: the plates, and the group of each row.
        mean: a number; a distribution makes it a latent site.
        kappa: likewise.
        nu: likewise; None: features + 1.
        scale: likewise.
    """
    width, feature, at = at.features.size, at.features.name, at.joint()
    mean, kappa, nu, scale = _drawn(
        mean=mean, kappa=kappa, nu=width + 1.0 if nu is None else nu, scale=scale
    )
    rate = jnp.diag(jnp.broadcast_to(nu * scale**2, (width,)))
    with at.classes, at.groups:
        precision = sample(
            "precision",
            dist.Wishart(nu, rate_matrix=rate),
            infer={"event_dims": [feature, f"{feature}_2"]},
        )
        prior = dist.MultivariateNormal(
            jnp.broadcast_to(mean, (width,)), precision_matrix=kappa * precision
        )
        loc = sample("loc", prior, infer={"event_dims": [feature]})
    with at.rows:
        likelihood = Missing(dist.MultivariateNormal(loc[at.z], precision_matrix=precision[at.z]))
        return sample("x", likelihood, obs=x, infer={"event_dims": [feature]})


def mixed(**parts):
    """Make a component for columns of several kinds.

        mixed(votes=(slice(0, 16), beta_bernoulli), age=([16], normal_inverse_chi2))

    Args:
        **parts: name -> (columns, component). The sites of the part `votes` are "votes_x",
            "votes_p", ..., and its feature plate is "votes_feature".
    """

    def component(x, at: Axes):
        every = np.arange(at.features.size)
        chosen = {name: every[columns] for name, (columns, _) in parts.items()}
        if not np.array_equal(np.sort(np.concatenate(list(chosen.values()))), every):
            found = {name: columns.tolist() for name, columns in chosen.items()}
            raise ValueError(
                f"mixed: found the columns {found}, wanted each of 0 to {every[-1]} in one part."
            )
        seen = {}
        for name, (_, part) in parts.items():
            columns = chosen[name]
            axes = at._replace(features=plate(f"{name}_feature", len(columns), dim=-1))
            seen[name] = scope(part, prefix=name, divider="_", hide_types=["plate"])(
                None if x is None else x[:, columns], axes
            )
        order = np.argsort(np.concatenate(list(chosen.values())))
        return jnp.concatenate(list(seen.values()), axis=1)[:, order] if x is None else x

    return component


def simulate(
    rng_key: Array,
    num_rows: int = 200,
    num_features: int = 10,
    num_classes: int = 2,
    missing: float = 0.0,
    unlabelled: float = 0.0,
    **options,
) -> dict[str, Any]:
    """Draw data from the model.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features.
        num_classes: number of classes.
        missing: share of the features that are set to NaN at random.
        unlabelled: share of the labels that are set to -1 at random.
        **options: other arguments of the model, such as `component`; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    model_key, missing_key, label_key = random.split(rng_key, 3)
    # the simulation needs room for any number of groups
    roomy: dict[str, Any] = {**options, "num_groups": None}
    with seed(rng_seed=model_key):
        x, y = aclass(shape=(num_rows, num_features), num_classes=num_classes, **roomy)
    x = jnp.where(random.uniform(missing_key, x.shape) < missing, jnp.nan, x)
    y = jnp.where(random.uniform(label_key, y.shape) < unlabelled, -1, y)
    return {"x": x, "y": y, "num_classes": num_classes, **options}


def _checked(shape: tuple[int, ...] | None, y) -> tuple[int, ...]:
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"aclass: found x of shape {shape}; wanted x [row, feature] with at least one of each, "
            "or shape=(rows, features)."
        )
    if y is not None and np.shape(y) != shape[:1]:
        raise ValueError(
            f"aclass: found y of shape {np.shape(y)} beside x of shape {shape}; wanted one label a "
            "row, -1 where unknown."
        )
    return shape


def _drawn(**given: Any) -> list[Any]:
    """Hyper-parameters, where a distribution is drawn at a site with the name of the argument."""
    return [
        sample(name, value) if isinstance(value, dist.Distribution) else value
        for name, value in given.items()
    ]


def _observation(y, all_labelled: bool | None) -> dict[str, Any]:
    """Keyword arguments for observing `y`; the classes of unlabelled rows stay latent."""
    if y is None:
        return {}
    if all_labelled is None:
        try:
            all_labelled = bool((np.asarray(y) != -1).all())
        except jax.errors.TracerArrayConversionError as error:
            error.add_note(
                "aclass: y is traced, so it is not known whether all rows are labelled. Give "
                "all_labelled=True or False."
            )
            raise
    return {"obs": y} if all_labelled else {"obs": jnp.where(y == -1, 0, y), "obs_mask": y != -1}
