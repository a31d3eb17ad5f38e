"""iQGME for many features: local experts in the space of a few factors behind them, for rows with
missing features.

    alpha, V, z[i] as in `zoo.iqgme`; Lambda[h], mu[h] as there, of factors: where expert h is in
    charge
    s[i]     ~ Normal(mu[z[i]], Lambda[z[i]]^-1)                                        factors of a row
    pi[h, k] ~ Beta(a0 / K, b0 (K - 1) / K),   b[h, k] ~ Bernoulli(pi[h, k])            whether features of expert h show factor k
    beta[k]  ~ Gamma(1, 1),                    A[k, p] ~ Normal(0, 1 / beta[k])         loadings, the same for every expert
    c[p]     ~ Normal(0, 1),                   psi[p]  ~ Gamma(1, 1)                    centre and precision of a feature
    x[i, p]  ~ Normal(c[p] + sum_k b[z[i], k] s[i, k] A[k, p], 1 / psi[p])              features; any may be missing
    lambda, zeta, w, t[i], y[i] as in `zoo.iqgme`, of (s[i], 1) in the place of (x[i], 1)

Given its factors a row's features are independent, so a missing one is not there at all, and no
site stands for it. An expert has K means and K^2 numbers of a covariance, however many features
there are; that of the features is A' S A + 1 / psi, of rank K and less.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 3.2.3, has standard
normal factors, a mean of every feature for each expert, one psi[h] for all features, and loadings A
times scales d. Here means are those of factors, so that an expert is no more than K of them; noise
is that of a feature, as the units of features are; and A and d, which no row tells apart, are one.
The prior of psi, which the thesis does not print, is ours. Cost of a log density: (rows + experts x
factors) x factors^2 + rows x factors x features.
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
    title="Mixtures of experts among common factors, for many features and few rows with missing "
    "ones",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, section 3.2.3",
    bibtex=WITHOUT_FACTORS.bibtex,
    data=("mnist", "letters16x8"),
    kernels=("CoordinateAscent",),
    sites={
        **{name: words for name, words in WITHOUT_FACTORS.sites.items() if name != "x_missing"},
        "Lambda": "precision matrix of the factors where an expert is in charge",
        "s": "the factors of a row",
        "pi": "how likely an expert is to show a factor",
        "b": "whether the features of an expert's rows show a factor",
        "beta": "how small the loadings of a factor are",
        "A": "the loadings: what a factor does to each feature",
        "c": "where a feature is when all factors are 0",
        "psi": "precision of what the factors leave of a feature",
    },
    edits=(
        "expert=None: no labels, a mixture of common factor analysers for rows with holes",
        "features=partial(linear_features, select=False): every expert shows all factors",
        "features=partial(linear_features, noise=4.0): a noise that is known, the same for all "
        "features",
        "expert=partial(soft_probit, sparse=True): weights that nothing asks for go to zero",
    ),
)

ONE = dist.Gamma(1.0, 1.0)


class FactorAxes(NamedTuple):
    """The plates of what is between factors and features."""

    num_experts: int
    num_rows: int
    num_factors: int
    num_features: int


def normal_factors(z, at: Axes, **options):
    """Factors [row, factor], correlated where an expert is in charge; for the options see
    `zoo.iqgme.normal_wishart`.
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
    """Features that are sums of the factors that the row's expert shows; they are observed, where
    they are not missing.

    :param select: experts show some of the factors; otherwise each shows all.
    :param precision: of the loadings of a factor, `noise` that of a feature: a distribution, or a
    number.
    :param centre: how far the centre of a feature may be from 0, a standard deviation.
    :param a0: of K factors an expert shows K a0 / (a0 + b0 (K - 1)) before it has seen a row.
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
    """The model; it returns x and y.

    :param x: [row, feature], NaN where missing; None: drawn, of `shape` (rows, features).
    :param y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: drawn.
    :param num_experts: the truncation, more than there may be; `num_factors` also.
    :param gate: `(z, axes) -> s` draws where each expert is in charge, and the factors.
    :param features: `(x, s, z, factor_axes) -> x` draws what factors do, and observes the features.
    :param expert: `(s, y, z, axes) -> y` draws the experts, and observes the labels; None: there
    are no labels.
    :param alpha: concentration; a distribution, or a number.
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
    """Data from the model itself, as the model's keyword arguments; for the rest see
    `zoo.iqgme.simulate`. Three factors by default.
    """
    model_key, *keys = random.split(rng_key, 3)
    expert = partial(soft_probit, precision=dist.Gamma(5.0, 5.0))
    told: dict[str, Any] = {
        "alpha": dist.Gamma(5.0, 5.0),
        "expert": expert,
        "num_factors": 3,
        **options,
    }
    with seed(rng_seed=model_key):
        x, y = iqgme_factors(shape=(num_rows, num_features), **told)
    return told | incomplete(keys, x, y, missing, unlabelled)
