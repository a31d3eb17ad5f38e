"""AClass: a classifier whose every class is a Chinese restaurant process mixture.

    share          ~ Dirichlet(gamma, ..., gamma)                          of the classes
    y[n]           ~ Categorical(share)                                    class of a row; may be unknown
    z[n] | y, z[1 .. n-1] ~ CRP(alpha) among the rows of class y[n]        group of a row
    p[c, g, d]     ~ Beta(beta, beta)                                      parameters of group g of class c
    x[n, d]        ~ Bernoulli(p[y[n], z[n], d])                           features; may be missing

Binary features are one `component` of several: a function that draws the parameters of all groups
and observes the features.

Mansinghka, Roy, Rifkin and Tenenbaum (2007), "AClass: an online algorithm for generative
classification". Its alpha and beta are the defaults. Cost of a log density: (rows + classes x
groups) x features.
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

# its declared return type is a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="Classes made of Chinese restaurant process mixtures",
    paper="Mansinghka, Roy, Rifkin and Tenenbaum (2007), AClass: an online algorithm for "
    "generative classification, AISTATS",
    bibtex="""@inproceedings{mansinghka2007aclass,
  title = {{AClass}: An online algorithm for generative classification},
  author = {Mansinghka, Vikash K. and Roy, Daniel M. and Rifkin, Ryan and Tenenbaum, Josh},
  booktitle = {Proceedings of the Eleventh International Conference on Artificial Intelligence and Statistics},
  series = {Proceedings of Machine Learning Research},
  volume = {2},
  year = {2007},
}""",
    data=("house_votes", "20news_w100", "mnist_pca50", "crp_mixture", "wine"),
    kernels=("ParticleFilter", "CollapsedGibbs"),
    sites={
        "share": "how common each class is",
        "y": "the class of a row, -1 in the data where it is unknown",
        "z": "the group of a row within its class, in order of appearance",
        "p": "how likely a feature is to be 1 in a group",
        "x": "the features of a row, NaN where missing",
    },
    edits=(
        "alpha=dist.Gamma(1.0, 1.0), with ParticleFilter(aclass, grid={'alpha': [0.1, 0.3, 1.0]}): "
        "learn how many groups the data ask for",
        "component=partial(beta_bernoulli, beta=dist.Gamma(2.0, 4.0)): learn how sure of its "
        "features a group is",
        "component=normal_inverse_chi2, or mixed(...): real features, or columns of several kinds",
        "max_groups=1: one group a class, naive Bayes",
        "PitmanYor(alpha, 0.3, ...) in place of CRP(alpha, ...): more groups, most of them small; "
        "any ExchangeablePartition will do",
    ),
)


class Axes(NamedTuple):
    """The plates; `z` = (class, group) of each row, an index into the parameters of groups
    [class, group, ...].
    """

    classes: plate
    groups: plate
    rows: plate
    features: plate
    z: tuple[Any, Any]

    def joint(self) -> "Axes":
        """For a component whose features are one event: the other plates, each one place further
        right, where the features were.
        """
        moved = (
            plate(each.name, each.size, dim=each.dim + 1)
            for each in (self.classes, self.groups, self.rows)
        )
        return Axes(*moved, self.features, self.z)


def beta_bernoulli(x, at: Axes, beta: Any = 0.5):
    """Binary features, the paper's component."""
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
    """The model; it returns x and y.

    :param x: [row, feature], NaN where missing; None: drawn, of `shape` (rows, features).
    :param y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: no row is labelled.
    :param num_groups: room for groups in each class, `capacity` of `CRP`, which truncates nothing;
    None: as many as there can be.
    :param max_groups: bounds the number of groups in each class; the prior is then that of `CRP`
    with this bound.
    :param alpha: concentration; given a distribution, a latent site. So are the hyper-parameters of
    the components.
    :param component: `(x, axes) -> x` draws the parameters of groups and observes the features.
    :param all_labelled: whether no entry of `y` is -1; None: it is looked up, for which `y` must
    not be traced.
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
    """Features with the codes 0 .. num_values - 1."""
    [beta], value = _drawn(beta=beta), at.features.name.replace("feature", "value")
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Dirichlet(jnp.full(num_values, beta)), infer={"event_dims": [value]})
    with at.rows, at.features:
        return sample("x", Missing(dist.Categorical(p[at.z])), obs=x)


def gamma_poisson(x, at: Axes, shape: Any = 1.0, rate: Any = 0.1):
    """Counts."""
    shape, rate = _drawn(shape=shape, rate=rate)
    with at.classes, at.groups, at.features:
        mean = sample("mean", dist.Gamma(shape, rate))
    with at.rows, at.features:
        return sample("x", Missing(dist.Poisson(mean[at.z])), obs=x)


def normal_inverse_chi2(
    x, at: Axes, mean: Any = 0.0, kappa: Any = 0.1, nu: Any = 2.0, scale: Any = 1.0
):
    """Real features, independent within a group: var ~ scaled inverse chi2(nu, scale^2), loc |
    var ~ Normal(mean, var / kappa).
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
    """Real features, correlated within a group: covariance ~ InverseWishart(nu, nu scale^2 I), loc
    ~ Normal(mean, covariance / kappa).

    The inverse of the covariance, `precision`, is what is drawn. `nu` is features + 1 by default;
    one feature makes `normal_inverse_chi2`.
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
    """Columns of several kinds: `mixed(votes=(slice(0, 16), beta_bernoulli), age=([16],
    normal_inverse_chi2))`.

    Each part is (columns, component); its sites are called "votes_x", "votes_p", ... and its
    features "votes_feature".
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
    """Data from the model itself, as the model's keyword arguments.

    :param missing: share of the features that are made NaN at random.
    :param unlabelled: share of the labels that are made -1 at random.
    :param options: other arguments of the model, such as `component`; they are returned beside the
    data.
    """
    model_key, missing_key, label_key = random.split(rng_key, 3)
    # the data are never cut; the model that reads them may have less room
    roomy: dict[str, Any] = {**options, "num_groups": None}
    with seed(rng_seed=model_key):
        x, y = aclass(shape=(num_rows, num_features), num_classes=num_classes, **roomy)
    x = jnp.where(random.uniform(missing_key, x.shape) < missing, jnp.nan, x)
    y = jnp.where(random.uniform(label_key, y.shape) < unlabelled, -1, y)
    return {"x": x, "y": y, "num_classes": num_classes, **options}


def _checked(shape: tuple[int, ...] | None, y) -> tuple[int, ...]:
    """The shape of x, refused where there is nothing to model or the labels do not fit."""
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
    """The values of hyper-parameters; one that is a distribution becomes a latent site with the
    name of the argument.
    """
    return [
        sample(name, value) if isinstance(value, dist.Distribution) else value
        for name, value in given.items()
    ]


def _observation(y, all_labelled: bool | None) -> dict[str, Any]:
    """How `y` is observed: whole, or but for the rows that have no label, which are then latent."""
    if y is None:
        return {}
    if all_labelled is None:
        try:
            all_labelled = bool((np.asarray(y) != -1).all())
        except jax.errors.TracerArrayConversionError as error:
            error.add_note(
                "aclass: y is traced, so it cannot be seen whether all rows are labelled. Say it: "
                "all_labelled=True or False."
            )
            raise
    return {"obs": y} if all_labelled else {"obs": jnp.where(y == -1, 0, y), "obs_mask": y != -1}
