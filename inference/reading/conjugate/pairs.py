"""The interface of a conjugate pair: the prior of a group's parameters, the likelihood of its rows.

A *group* is a set of rows that share their parameters phi. Where p(phi) p(x | phi) is of the family
of p(phi), phi can be integrated out, and hyper-parameters h are all that a group needs: h before a
row, `add(h, x)` after it. For every phi

    log p(phi | h) + log p(x | phi) - log p(phi | add(h, x)) = log p(x | h).                  (1)

This ties `log_prior`, `add` and `log_predictive` to the likelihood, and to each other.

A row is a float array [columns], or [columns, D] where a column is D correlated features; NaN is
missing. Columns are independent. Hyper-parameters are tuples of arrays [..., columns] followed by a
parameter's own axes; a row is broadcast over the leading axes (class, group). Every result has the
dtype of the hyper-parameters.

Variational inference also needs the pair as an exponential family. The rows of a group are
p(x | phi) = base(x) exp(F(x) . eta(phi)) column by column. Under q(phi), of the family of the
prior, and rows that belong to the group with the weights rho,

    E log p(x | phi) = log base(x) + F(x) . E eta(phi),
    q(phi) is the prior after   sum over rows of rho F(x),                                    (2)

and the evidence lower bound contains -KL(q | prior). `natural` is eta at known parameters,
`expected` its mean under q. Formulas use one in place of the other, so that what is proved with
`natural` against the model holds for `expected`.

| family                         | F(x) of a cell           | eta                                  |
|--------------------------------|--------------------------|--------------------------------------|
| Beta -> Bernoulli              | x, 1 - x                 | log p, log(1 - p)                    |
| Dirichlet -> Categorical       | indicators of the codes  | log p                                |
| Gamma -> Poisson               | x, 1                     | log rate, -rate                      |
| InverseGamma, Normal -> Normal | 1, x, x^2                | -(log 2 pi v + loc^2 / v) / 2,       |
|                                |                          | loc / v, -1 / (2 v)                  |

A missing cell has F(x) = 0. Correlated features and probit regressions use products of the entries
of a row: `inference.reading.conjugate.quadratic`.

Rounding: after n rows are added and removed, hyper-parameters have a relative error of eps n or
more, so a sampler resets an emptied group to the prior. In float32 a count stops at 2^24 = 1.7e7.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import betaln, gammaln
from jax.typing import DTypeLike
from jaxtyping import Float
from numpyro.distributions import Distribution
from numpyro.distributions.util import scale_and_mask

from inference.program.sites import unwrap

__all__ = [
    "Columns",
    "ConjugatePair",
    "apart",
    "arguments",
    "beta_divergence",
    "columns",
    "digamma",
    "fill_row",
    "gamma_divergence",
    "gamma_means",
    "log_rising",
    "log_sticks",
    "refuse_first",
    "stirling_error",
    "term",
]


@dataclass(frozen=True)
class ConjugatePair(ABC):
    """A prior and a likelihood of which a group's parameters can be integrated out.

    Hashable, so that it may be a static argument of compiled code.
    """

    # classes of the parameters' distributions, in the order in which every method takes the
    # parameters
    priors: tuple[str, ...]
    likelihood: str  # class of the rows' distribution

    @abstractmethod
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Any:
        """Returns the hyper-parameters.

        Args:
            priors: The distributions of the parameters, without wrappers.
            values: The values of the parameters in the same trace.
        """

    @abstractmethod
    def add(self, hyper: Any, x: Array, weight: float | Array = 1.0) -> Any:
        """Returns the hyper-parameters after one more row.

        Args:
            hyper: Hyper-parameters before the row.
            x: The row.
            weight: Weight of the row: a number, or an array that broadcasts to [..., columns].
        """

    def remove(self, hyper: Any, x: Array) -> Any:
        """Returns the hyper-parameters without a row that was added, up to rounding."""
        return self.add(hyper, x, -1.0)

    @abstractmethod
    def cache(self, hyper: Any) -> Any:
        """Returns what `scores` needs of the hyper-parameters, with the same leading axes."""

    @abstractmethod
    def scores(self, cache: Any, x: Array) -> Array:
        """Returns log p(x | h) for each column, [..., columns], 0 where missing."""

    def score(self, cache: Any, x: Array) -> Array:
        """Returns `scores` summed over the columns, [...]."""
        return self.scores(cache, x).sum(-1)

    def log_predictive(self, hyper: Any, x: Array) -> Array:
        """Returns `scores` at hyper-parameters."""
        return self.scores(self.cache(hyper), x)

    @abstractmethod
    def log_prior(self, hyper: Any, values: tuple[Array, ...]) -> Array:
        """Returns the log density of the parameters for each column, [..., columns], normalised."""

    @abstractmethod
    def draw(self, rng_key: Array, hyper: Any) -> tuple[Array, ...]:
        """Draws the parameters of each group."""

    @abstractmethod
    def draw_row(self, rng_key: Array, hyper: Any) -> Array:
        """Draws a row from the predictive distribution of each group, [..., *row]."""

    @abstractmethod
    def mean_row(self, hyper: Any) -> Array:
        """Returns the mean of the predictive distribution, [..., *row].

        That is the location of a Student t; of codes the probability of each, [..., *row, code].
        """

    @abstractmethod
    def refuse(self, site: str, x: np.ndarray, hyper: Any = None) -> None:
        """Raises ValueError where rows are outside of the support of the likelihood.

        Args:
            site: Name of the site, for the message.
            x: The rows, [row, columns].
            hyper: Hyper-parameters, from which the number of codes is known.
        """


@dataclass(frozen=True)
class Columns(ConjugatePair):
    """A pair as an exponential family, for columns that are independent within a group.

    By default the hyper-parameters are the arguments of one prior, and a row adds its statistics to
    them.
    """

    hyper: Any  # NamedTuple of the arguments of the prior
    num_axes: ClassVar[int] = 0  # axes of a hyper-parameter after the columns

    @override
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Any:
        return self.hyper(*arguments(priors[0], self.hyper._fields, values[0]))

    @override
    def add(self, hyper: Any, x: Array, weight: float | Array = 1.0) -> Any:
        first = jax.tree.leaves(hyper)[0]
        shape = first.shape[: first.ndim - self.num_axes]
        x, weight = (
            jnp.broadcast_to(jnp.asarray(each, first.dtype), shape) for each in (x, weight)
        )
        return self.posterior(hyper, weight[..., None] * self.statistics(x, hyper))

    @abstractmethod
    def statistics(self, x: Array, hyper: Any) -> Array:
        """Returns F(x) of rows [..., column], [..., column, statistic]."""

    def log_base(self, x: Array) -> Array:
        """Returns log base(x) of rows, summed over the columns, [row]."""
        return jnp.zeros(x.shape[0], x.dtype)

    @abstractmethod
    def natural(self, values: tuple[Array, ...]) -> Array:
        """Returns eta of the parameters [group, column], [group, column, statistic]."""

    @abstractmethod
    def expected(self, hyper: Any) -> Array:
        """Returns E eta, of the same shape."""

    def posterior(self, prior: Any, sums: Array) -> Any:
        """Returns the hyper-parameters after rows.

        Args:
            prior: Hyper-parameters before the rows.
            sums: Weighted sums of the statistics of the rows, [group, column, statistic].
        """
        leaves, form = jax.tree.flatten(prior)
        return form.unflatten([leaf + sums[..., k] for k, leaf in enumerate(leaves)])

    @abstractmethod
    def divergence(self, hyper: Any, prior: Any) -> Array:
        """Returns KL(q | prior), summed over groups and columns."""


def arguments(distribution: Distribution, names: tuple[str, ...], like: Array) -> list[Array]:
    """Returns arguments of a distribution, each with the shape and dtype of `like`.

    Args:
        distribution: The distribution.
        names: Names of the arguments.
        like: An array.
    """
    return [
        jnp.broadcast_to(jnp.asarray(getattr(distribution, name), like.dtype), like.shape)
        for name in names
    ]


def fill_row(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns the row with 0 where it is missing, and an array of 1 where it is observed, else 0.

    Args:
        x: The row, NaN where missing.
        dtype: Type of both results.
    """
    x = jnp.asarray(x, dtype)
    missing = jnp.isnan(x)
    return jnp.where(missing, 0, x), (~missing).astype(dtype)


def columns(message: dict) -> Array:
    """Returns the value of an observed site as floats, [row, column, ...].

    A site without an axis of columns gets one column.
    """
    value = jnp.asarray(message["value"])
    value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
    return value if value.ndim - unwrap(message["fn"]).event_dim > 1 else value[:, None]


def term(message: dict) -> Array:
    """Returns the log probability of a site, scaled and summed over all entries."""
    return jnp.sum(scale_and_mask(message["fn"].log_prob(message["value"]), message["scale"]))


def refuse_first(site: str, x: np.ndarray, bad: np.ndarray, wanted: str) -> None:
    """Raises ValueError for the first bad value, and names its place.

    Args:
        site: Name of the site.
        x: The rows, [row, columns, ...].
        bad: Whether each value is bad, an array of the same shape.
        wanted: The end of the message.
    """
    for index in np.argwhere(bad)[:1]:
        place = ", ".join(
            f"{axis} {i}" for axis, i in zip(("row", "column", "feature"), index, strict=False)
        )
        raise ValueError(
            f"site {site!r}: {place} is {x[tuple(index)]} (one of {bad.sum()} such values); "
            f"{wanted}"
        )


def beta_divergence(one: Any, other: Any) -> Array:
    """Returns KL(one | other) of Beta distributions, each (concentration1, concentration0)."""
    (a, b), (a0, b0) = one, other
    at, normaliser = digamma(a + b), betaln(a0, b0) - betaln(*apart((a, b)))
    return normaliser + (a - a0) * (digamma(a) - at) + (b - b0) * (digamma(b) - at)


def apart(value: Any) -> Any:
    """Returns the value, and lets XLA compile what computes it apart from what uses it.

    Otherwise each operation that several users of `digamma` or `gammaln` have in common becomes a
    loop of its own, which takes long to compile.
    """
    return lax.optimization_barrier(value)


def digamma(x: Array) -> Array:
    """Returns the derivative of log Gamma."""
    return apart(jax.scipy.special.digamma(x))


def gamma_means(pair: Any) -> tuple[Array, Array]:
    """Returns the means of x and of log x, for x of a Gamma distribution.

    Args:
        pair: (concentration, rate), or (x, infinity) where x is known.
    """
    (a, b), is_known = pair, jnp.isinf(pair[1])
    safe = jnp.where(is_known, 1, b)
    return jnp.where(is_known, a, a / safe), jnp.where(
        is_known, jnp.log(a), digamma(a) - jnp.log(safe)
    )


def gamma_divergence(one: Any, other: Any) -> Array:
    """Returns KL(one | other) of Gamma distributions, 0 where x is known.

    Args:
        one: (concentration, rate), or (x, infinity) where x is known.
        other: The same for the second distribution.
    """
    (a, b), (a0, b0) = one, other
    is_known = jnp.isinf(b0)
    b, b0 = jnp.where(is_known, 1, b), jnp.where(is_known, 1, b0)
    found = (
        (a - a0) * digamma(a)
        - gammaln(apart(a))
        + gammaln(a0)
        + a0 * (jnp.log(b) - jnp.log(b0))
        + a * (b0 / b - 1)
    )
    return jnp.where(is_known, 0, found)


def log_sticks(
    log_taken: Float[Array, "*batch stick"], log_left: Float[Array, "*batch stick"]
) -> Float[Array, "*batch group"]:
    """Returns log weights of a stick-breaking process, [..., stick + 1], or their means.

    Args:
        log_taken: log v of each break, [..., stick], or its mean.
        log_left: log(1 - v) of each break, [..., stick], or its mean.
    """
    zero = jnp.zeros((*log_left.shape[:-1], 1), log_left.dtype)
    return jnp.concatenate([log_taken, zero], -1) + jnp.concatenate(
        [zero, jnp.cumsum(log_left, -1)], -1
    )


def log_rising(a: Array, x: float | Array) -> Array:
    """Returns log Gamma(a + x) - log Gamma(a), by Stirling's formula.

    In float32 the difference of two values of `gammaln` is off by .06 at a = 1e5.
    """
    return (
        (a + x - 0.5) * jnp.log1p(x / a)
        + x * (jnp.log(a) - 1)
        + stirling_error(a + x)
        - stirling_error(a)
    )


def stirling_error(z: Array) -> Array:
    """Returns the error of Stirling's formula.

    It is log Gamma(z) - ((z - 1/2) log z - z + log(2 pi) / 2), computed by its series at z + 8 and
    the recurrence log Gamma(z + 1) = log Gamma(z) + log z, eight times.
    """
    inverse = 1 / (z + 8)
    square = inverse**2
    series = inverse * (
        1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))
    )
    ratio = math.prod(((z + 8) / (z + i) for i in range(1, 8)), start=1 + 8 / z)
    return series + (z - 0.5) * jnp.log1p(8 / z) + jnp.log(ratio) - 8
