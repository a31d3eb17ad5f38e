"""iQGME: an infinite mixture of local linear experts, for rows with missing features.

Each expert has a Gaussian over the features, which selects its rows, and a linear probit
classifier.

    alpha     ~ Gamma(.05, .05)                             concentration
    V[h]      ~ Beta(1, alpha)                              stick-breaking; the last expert
    pi[h]     = V[h] prod_{l < h} (1 - V[l])                takes the rest
    Lambda[h] ~ Wishart(nu0, B0)                            precision of the expert's Gaussian
    mu[h]     ~ Normal(m0, (u0 Lambda[h])^-1)               mean of the expert's Gaussian
    lambda[p] ~ Gamma(.01, .01)                             precision of a weight over experts
    zeta[p]   ~ Normal(0, 1 / sqrt(gamma0 lambda[p]))       common mean of a weight
    w[h, p]   ~ Normal(zeta[p], 1 / sqrt(lambda[p]))        weights of the classifier, bias last
    z[i]      ~ Categorical(pi)                             expert of a row
    x[i]      ~ Normal(mu[z[i]], Lambda[z[i]]^-1)           features; any may be missing
    t[i]      ~ Normal(w[z[i]] . (x[i], 1), 1)              soft label
    y[i]      = 1 if t[i] > 0 else 0                        label; may be unknown

A Normal has a standard deviation here, or a covariance matrix where it is multivariate.

Shapes: x [row, feature]; y and z [row]; V [expert - 1]; mu [expert, feature]; Lambda
[expert, feature, feature]; lambda and zeta [class - 1, feature + 1]; w [class - 1, expert,
feature + 1]; t [class - 1, row].

A missing feature is a latent site, which is written into `x` before `x` is observed. With more than
two classes, each class c >= 1 has weights w[c, h] and soft labels t[c, i]. The label y[i] is the
first class with t[c, i] > 0, and 0, the reference, where there is none. So the model is conjugate
for any number of classes. The soft labels of classes after y[i] are not observed.

Wang (2010), "Bayesian approaches to learning from incomplete data", sections 3.2.1 and 3.2.2, with
the numbers of the thesis as defaults. Cost of a log density: (rows + experts x features) x
features^2.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from jax.scipy.special import log_ndtr
from jaxtyping import Float, Int
from numpyro import plate
from numpyro.handlers import mask, seed

from zoo.card import Card

__all__ = [
    "CARD",
    "FEW_EXPERTS",
    "VAGUE",
    "Axes",
    "checked",
    "drawn",
    "incomplete",
    "iqgme",
    "normal_wishart",
    "probit",
    "simulate",
    "soft_probit",
    "sticks",
]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

FEW_EXPERTS = dist.Gamma(0.05, 0.05)  # prior of alpha
VAGUE = dist.Gamma(0.01, 0.01)  # prior of the precisions of the weights

CARD = Card(
    title="An infinite mixture of experts for rows with missing features",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, chapter 3",
    bibtex="""@phdthesis{wang2010incomplete,
  title = {Bayesian approaches to learning from incomplete data},
  author = {Wang, Chunping},
  school = {Duke University},
  year = {2010},
}""",
    data=("ionosphere", "wdbc", "horse_colic", "pima_missing"),
    kernels=("CoordinateAscent", "ConditionalGibbs", "NUTS"),
    sites={
        "alpha": "concentration: the expected number of experts grows with it",
        "V": "stick-breaking fraction of an expert",
        "Lambda": "precision matrix of an expert's Gaussian over the features",
        "mu": "mean of an expert's Gaussian",
        "lambda": "precision of each weight over the experts",
        "zeta": "mean of each weight over the experts",
        "w": "the linear classifier of an expert, its bias last",
        "z": "the expert of a row",
        "x_missing": "the missing entries of x, row by row; only where there are any",
        "x": "the features, NaN in the data where missing",
        "t": "the soft label, whose sign decides on a class",
        "y": "the class of a row, -1 in the data where it is unknown",
    },
    edits=(
        "expert=None: no labels, a Dirichlet process mixture of Gaussians for rows with "
        "missing features",
        "expert=partial(soft_probit, sparse=True): sparse weights",
        "expert=probit: the soft label is integrated out, for NUTS and SVI",
        "alpha=1.0: a known concentration",
    ),
)


class Axes(NamedTuple):
    """The plates and sizes of the model."""

    experts: plate
    rows: plate
    num_features: int
    num_classes: int


def sticks(V: Array) -> Array:
    """Return stick-breaking weights; the last one is the rest.

    Args:
        V: stick-breaking fractions, [..., expert - 1].

    Returns:
        Weights [..., expert].
    """
    one = jnp.ones((*V.shape[:-1], 1), V.dtype)
    return jnp.concatenate([V, one], -1) * jnp.concatenate([one, jnp.cumprod(1 - V, -1)], -1)


def normal_wishart(
    x,
    z,
    at: Axes,
    centre: Any = 0.0,
    covariance: Any = 1.0,
    u0: float = 0.1,
    nu0: float | None = None,
    names: tuple[str, str] = ("x", "feature"),
):
    """Draw the Gaussians of the experts, and observe the features; missing ones are latent.

    Args:
        x: [row, feature], NaN where missing; None: drawn.
        z: expert of each row, [row].
        at: the plates.
        centre: prior mean m0, a number or [feature].
        covariance: prior mean of the covariance: a variance or a matrix [feature, feature].
        u0: number of rows that the prior of a mean is worth.
        nu0: number of rows that the prior of a covariance is worth; None: features + 2.
        names: names of the site of the features and of their dimension.

    Returns:
        The complete features, [row, feature].
    """
    size = at.num_features
    nu0 = size + 2.0 if nu0 is None else nu0
    matrix = covariance * np.eye(size) if np.ndim(covariance) == 0 else covariance
    site, dims = names[0], [names[1], f"{names[1]}_2"]
    with at.experts:  # JAX would compile some twenty programs to check these matrices
        wishart = dist.Wishart(nu0, rate_matrix=(nu0 - size - 1) * matrix, validate_args=False)
        Lambda = sample("Lambda", wishart, infer={"event_dims": dims})
        prior = dist.MultivariateNormal(
            jnp.broadcast_to(centre, (size,)), precision_matrix=u0 * Lambda, validate_args=False
        )
        mu = sample("mu", prior, infer={"event_dims": dims[:1]})
    # one Cholesky factor for each expert, not for each row
    root = dist.MultivariateNormal(mu, precision_matrix=Lambda, validate_args=False).scale_tril
    x = _completed(x)
    with at.rows:  # checking the matrices of all rows would double the memory
        own = dist.MultivariateNormal(mu[z], scale_tril=root[z], validate_args=False)
        return sample(site, own, obs=x, infer={"event_dims": dims[:1]})


def soft_probit(x, y, z, at: Axes, **options):
    """Draw the experts' classifiers, and observe labels as signs of latent Normal soft labels.

    Args:
        x: complete features, [row, feature].
        y: [row], or -1 where unlabelled; None: drawn.
        z: expert of each row, [row].
        at: the plates.
        **options: `sparse`, for zeta = 0; `precision` of the weights, a number or a distribution;
            `gamma0`, the number of experts that the prior of zeta is worth.
    """
    score = _scores(x, z, at, **options)
    with _classes(at), at.rows:
        t = sample("t", dist.Normal(score, 1.0))
    is_yes = t > 0
    first = jnp.where(is_yes.any(0), 1 + jnp.argmax(is_yes, 0), 0)
    with at.rows, _where_known(y):
        return sample("y", dist.Delta(first), obs=_filled(y))


def probit(x, y, z, at: Axes, **options):
    """Draw the experts' classifiers, and observe labels with the soft labels integrated out.

    Args:
        x: complete features, [row, feature].
        y: [row], or -1 where unlabelled; None: drawn.
        z: expert of each row, [row].
        at: the plates.
        **options: those of `soft_probit`.
    """
    score = _scores(x, z, at, **options)
    all_no = jnp.cumsum(log_ndtr(-score), axis=-2)
    each = log_ndtr(score) + all_no - log_ndtr(-score)
    log_prob = jnp.concatenate([all_no[..., -1:, :], each], axis=-2)
    with at.rows, _where_known(y):
        return sample("y", dist.Categorical(logits=jnp.moveaxis(log_prob, -2, -1)), obs=_filled(y))


def iqgme(
    x=None,
    y=None,
    *,
    shape: tuple[int, int] | None = None,
    num_classes: int = 2,
    num_experts: int = 20,
    gate: Callable = normal_wishart,
    expert: Callable | None = soft_probit,
    alpha: Any = FEW_EXPERTS,
):
    """The model.

    Args:
        x: [row, feature], NaN where missing, not traced; None: drawn with the shape `shape`.
        y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: drawn.
        shape: (rows, features) where x is None.
        num_classes: number of classes.
        num_experts: truncation of the number of experts.
        gate: `(x, z, axes) -> x` draws the Gaussians of the experts, and observes the features.
        expert: `(x, y, z, axes) -> y` draws the classifiers of the experts, and observes the
            labels; None: there are no labels.
        alpha: concentration, a distribution or a number.

    Returns:
        x and y.
    """
    num_rows, num_features = checked(x, y, shape, num_classes, num_experts)
    alpha = drawn("alpha", alpha)
    with plate("stick", num_experts - 1):
        V = sample("V", dist.Beta(1.0, alpha))
    at = Axes(
        plate("expert", num_experts, dim=-1),
        plate("row", num_rows, dim=-1),
        num_features,
        num_classes,
    )
    with at.rows:
        z = sample("z", dist.Categorical(sticks(V)), infer={"enumerate": "parallel"})
    x = gate(x, z, at)
    return x, expert(x, y, z, at) if expert else y


def _scores(
    x, z, at: Axes, sparse: bool = False, precision: Any = VAGUE, gamma0: float = 0.1
) -> Array:
    """The expert's linear score of each class but the reference, [class - 1, row]."""
    classes, weights = _classes(at), plate("weight", at.num_features + 1, dim=-1)
    with classes, weights:
        spread = 1 / jnp.sqrt(drawn("lambda", precision))
        zeta = 0.0 if sparse else sample("zeta", dist.Normal(0.0, spread / np.sqrt(gamma0)))
    shape = (at.num_classes - 1, 1, at.num_features + 1)
    loc, scale = (
        jnp.broadcast_to(part, (shape[0], shape[2])).reshape(shape) for part in (zeta, spread)
    )
    with classes, at.experts:
        w = sample("w", dist.Normal(loc, scale).to_event(1), infer={"event_dims": ["weight"]})
    own = w[jnp.arange(shape[0])[:, None], z]
    return jnp.sum(own[..., :-1] * x, -1) + own[..., -1]


def _classes(at: Axes) -> plate:
    return plate("class", at.num_classes - 1, dim=-2)


def _completed(x):
    """x with latent missing entries.

    Their prior is flat, for the density of `x` as a whole contains theirs.
    """
    if x is None:
        return None
    # in NumPy, for in a trace every JAX array is abstract
    holes = np.argwhere(np.isnan(np.asarray(x)))
    if not len(holes):
        return x
    with plate("hole", len(holes)):
        missing = sample("x_missing", dist.ImproperUniform(dist.constraints.real, (), ()))
    return jnp.asarray(x).at[tuple(holes.T)].set(missing)


def _where_known(y):
    return mask(mask=True if y is None else jnp.asarray(y) >= 0)


def _filled(y):
    return None if y is None else jnp.maximum(jnp.asarray(y), 0)


def drawn(name: str, value: Any) -> Any:
    """Return a number as it is; draw a distribution at a latent site."""
    return sample(name, value) if isinstance(value, dist.Distribution) else value


def checked(x, y, shape, num_classes: int, num_experts: int) -> tuple[int, int]:
    """Return the shape of x after checks of all arguments; traced values are not checked."""
    shape = np.shape(x) if x is not None else shape
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"iqgme: found x of shape {shape}; wanted x [row, feature] with at least one of each, "
            "or shape=(rows, features)."
        )
    if num_classes < 2 or num_experts < 2:
        raise ValueError(
            f"iqgme: found num_classes={num_classes}, num_experts={num_experts}; wanted 2 or more "
            "of each."
        )
    if x is not None and np.isinf(np.asarray(x)).any():
        row, column = np.argwhere(np.isinf(np.asarray(x)))[0]
        raise ValueError(
            f"iqgme x: row {row}, column {column} is {x[row, column]}; wanted finite numbers, or "
            "NaN where missing."
        )
    if y is None:
        return shape
    if np.shape(y) != shape[:1]:
        raise ValueError(
            f"iqgme: found y of shape {np.shape(y)} beside x of shape {shape}; wanted one label a "
            "row, -1 where unknown."
        )
    if not isinstance(y, Tracer) and not np.isin(y, np.arange(-1, num_classes)).all():
        raise ValueError(
            f"iqgme y: found labels {np.unique(np.asarray(y))}, wanted 0 .. {num_classes - 1}, or "
            "-1 where unknown."
        )
    return shape


def simulate(
    rng_key: Array,
    num_rows: int = 200,
    num_features: int = 2,
    missing: float = 0.0,
    unlabelled: float = 0.0,
    **options,
) -> dict[str, Any]:
    """Draw data from the model.

    Default priors are more informative than those of the model: alpha and the precisions of the
    weights are about 1.

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
    arguments: dict[str, Any] = {
        "alpha": dist.Gamma(5.0, 5.0),
        "expert": partial(soft_probit, precision=dist.Gamma(5.0, 5.0)),
        **options,
    }
    with seed(rng_seed=model_key):
        x, y = iqgme(shape=(num_rows, num_features), **arguments)
    return arguments | incomplete(keys, x, y, missing, unlabelled)


def incomplete(
    keys: Sequence[Array],
    x: Float[Array, "row feature"],
    y: Int[Array, " row"] | None,
    missing: float,
    unlabelled: float,
) -> dict[str, Any]:
    """Set shares of the features to NaN and of the labels to -1, at random.

    Args:
        keys: two keys.
        x: [row, feature].
        y: [row], or None.
        missing: share of the features.
        unlabelled: share of the labels.

    Returns:
        x and y as keyword arguments of a model.
    """
    missing_key, label_key = keys
    x = jnp.where(random.bernoulli(missing_key, missing, x.shape), jnp.nan, x)
    if y is None:
        return {"x": x}
    return {"x": x, "y": jnp.where(random.bernoulli(label_key, unlabelled, y.shape), -1, y)}
