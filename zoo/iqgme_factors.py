"""iQGME for many features: local experts on a few common factors, for rows with missing features.

As in `zoo.iqgme`, but experts see factors s in place of features x:

    alpha, V, z[i], Lambda[h], mu[h]   as in `zoo.iqgme`, for factors
    s[i]     ~ Normal(mu[z[i]], Lambda[z[i]]^-1)            factors of a row
    pi[h, k] ~ Beta(a0 / K, b0 (K - 1) / K)
    b[h, k]  ~ Bernoulli(pi[h, k])                          whether expert h uses factor k
    beta[k]  ~ Gamma(1, 1)                                  precision of the loadings of a factor
    A[k, p]  ~ Normal(0, 1 / sqrt(beta[k]))                 loadings, common to all experts
    c[p]     ~ Normal(0, 1)                                 centre of a feature
    psi[p]   ~ Gamma(1, 1)                                  precision of the noise of a feature
    x[i, p]  ~ Normal(c[p] + sum_k b[z[i], k] s[i, k] A[k, p], 1 / sqrt(psi[p]))
    lambda, zeta, w, t[i], y[i]        as in `zoo.iqgme`, with (s[i], 1) in place of (x[i], 1)

Shapes: x [row, feature]; s [row, factor]; pi and b [expert, factor]; A [factor, feature]; c and psi
[feature].

Given its factors, the features of a row are independent. So a missing feature needs no site. The
Gaussian of an expert has K means and a K x K covariance, however many features there are. The
covariance S of the factors gives A' S A + 1 / psi for the features.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.2.3, differs in three
points. There factors are standard normal, and each expert has a mean of every feature; here the
means are those of the factors. There one psi[h] holds for all features; here each feature has its
own noise. There loadings are A times scales d; here they are A, for only the product is identified.
The thesis does not state its prior of psi. Cost of a log density: (rows + experts x factors) x
factors^2 + rows x factors x features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import plate
from numpyro.handlers import seed

from inference.distributions.missing import Missing
from zoo.card import Card
from zoo.iqgme import CARD as WITHOUT_FACTORS
from zoo.iqgme import (
    FEW_EXPERTS,
    Axes,
    checked,
    drawn,
    incomplete,
    normal_wishart,
    soft_probit,
    sticks,
)

__all__ = ["CARD", "FactorAxes", "iqgme_factors", "linear_features", "normal_factors", "simulate"]

sample: Any = numpyro.sample

CARD = Card(
    title="A mixture of experts on common factors, for many features, of which some are missing",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, section 3.2.3",
    bibtex=WITHOUT_FACTORS.bibtex,
    data=("mnist", "letters16x8"),
    kernels=("CoordinateAscent",),
    sites={
        **{name: words for name, words in WITHOUT_FACTORS.sites.items() if name != "x_missing"},
        "Lambda": "precision matrix of an expert's Gaussian over the factors",
        "s": "the factors of a row",
        "pi": "the probability that an expert uses a factor",
        "b": "whether an expert uses a factor",
        "beta": "precision of the loadings of a factor",
        "A": "the loadings of a factor",
        "c": "the mean of a feature where all factors are 0",
        "psi": "precision of the noise of a feature",
    },
    edits=(
        "expert=None: no labels, a mixture of common factor analysers for missing features",
        "features=partial(linear_features, select=False): every expert uses all factors",
        "features=partial(linear_features, noise=4.0): a known noise precision",
        "expert=partial(soft_probit, sparse=True): sparse weights",
    ),
)

ONE = dist.Gamma(1.0, 1.0)


class FactorAxes(NamedTuple):
    """The sizes of the linear map from factors to features."""

    num_experts: int
    num_rows: int
    num_factors: int
    num_features: int


def normal_factors(z, at: Axes, **options):
    """Draw the Gaussians of the experts over factors, and the factors.

    Args:
        z: expert of each row, [row].
        at: the plates.
        **options: those of `zoo.iqgme.normal_wishart`.

    Returns:
        Factors [row, factor].
    """
    return normal_wishart(None, z, at, names=("s", "factor"), **options)


def linear_features(
    x,
    s,
    z,
    at: FactorAxes,
    select: bool = True,
    precision: Any = ONE,
    noise: Any = ONE,
    centre: Any = 1.0,
    a0: float = 1.0,
    b0: float = 1.0,
):
    """Draw loadings, centres and noise, and observe the features that are not missing.

    Args:
        x: [row, feature], NaN where missing; None: drawn.
        s: factors, [row, factor].
        z: expert of each row, [row].
        at: sizes.
        select: whether each expert uses a subset of the factors; False: all use all.
        precision: precision of the loadings of a factor, a distribution or a number.
        noise: precision of the noise of a feature, a distribution or a number.
        centre: prior standard deviation of the centre of a feature.
        a0: with `b0`, an expert uses K a0 / (a0 + b0 (K - 1)) of K factors in prior expectation.
        b0: see `a0`.

    Returns:
        The features.
    """
    num = at.num_factors
    factors, features = plate("factor", num, dim=-1), plate("feature", at.num_features, dim=-1)
    if select:
        with plate("expert", at.num_experts, dim=-2), factors:
            pi = sample("pi", dist.Beta(a0 / num, b0 * (num - 1) / num))
            s = s * sample("b", dist.Bernoulli(pi))[z].astype(s.dtype)
    with factors:
        spread = 1 / jnp.sqrt(jnp.broadcast_to(drawn("beta", precision), (num,)))
    with plate("factor", num, dim=-2), features:
        A = sample("A", dist.Normal(0.0, spread[:, None]))
    with features:
        c = sample("c", dist.Normal(0.0, centre))
        scale = 1 / jnp.sqrt(drawn("psi", noise))
    with plate("row", at.num_rows, dim=-2), features:
        return sample("x", Missing(dist.Normal(s @ A + c, scale)), obs=x)


def iqgme_factors(
    x=None,
    y=None,
    *,
    shape: tuple[int, int] | None = None,
    num_classes: int = 2,
    num_experts: int = 20,
    num_factors: int = 20,
    gate: Callable = normal_factors,
    features: Callable = linear_features,
    expert: Callable | None = soft_probit,
    alpha: Any = FEW_EXPERTS,
):
    """The model.

    Args:
        x: [row, feature], NaN where missing; None: drawn with the shape `shape`.
        y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: drawn.
        shape: (rows, features) where x is None.
        num_classes: number of classes.
        num_experts: truncation of the number of experts.
        num_factors: truncation of the number of factors.
        gate: `(z, axes) -> s` draws the Gaussians of the experts, and the factors.
        features: `(x, s, z, factor_axes) -> x` draws the linear map, and observes the features.
        expert: `(s, y, z, axes) -> y` draws the classifiers of the experts, and observes the
            labels; None: there are no labels.
        alpha: concentration, a distribution or a number.

    Returns:
        x and y.
    """
    num_rows, num_features = checked(x, y, shape, num_classes, num_experts)
    if num_factors < 2:
        raise ValueError(f"iqgme_factors: found num_factors={num_factors}, wanted 2 or more.")
    alpha = drawn("alpha", alpha)
    with plate("stick", num_experts - 1):
        V = sample("V", dist.Beta(1.0, alpha))
    at = Axes(
        plate("expert", num_experts, dim=-1),
        plate("row", num_rows, dim=-1),
        num_factors,
        num_classes,
    )
    with at.rows:
        z = sample("z", dist.Categorical(sticks(V)), infer={"enumerate": "parallel"})
    s = gate(z, at)
    x = features(x, s, z, FactorAxes(num_experts, num_rows, num_factors, num_features))
    return x, expert(s, y, z, at) if expert else y


def simulate(
    rng_key: Array,
    num_rows: int = 100,
    num_features: int = 10,
    missing: float = 0.0,
    unlabelled: float = 0.0,
    **options,
) -> dict[str, Any]:
    """Draw data from the model, with more informative default priors and three factors.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features.
        missing: share of the features that are set to NaN at random.
        unlabelled: share of the labels that are set to -1 at random.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    model_key, *keys = random.split(rng_key, 3)
    expert = partial(soft_probit, precision=dist.Gamma(5.0, 5.0))
    arguments: dict[str, Any] = {
        "alpha": dist.Gamma(5.0, 5.0),
        "expert": expert,
        "num_factors": 3,
        **options,
    }
    with seed(rng_seed=model_key):
        x, y = iqgme_factors(shape=(num_rows, num_features), **arguments)
    return arguments | incomplete(keys, x, y, missing, unlabelled)
