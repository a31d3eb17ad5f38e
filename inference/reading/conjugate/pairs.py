"""What conjugate pairs share, and what those of independent columns are under a mean-field
posterior.

A group's rows are p(x | phi) = base(x) exp(F(x) . eta(phi)) column by column. Under q(phi), of the
family of the prior, and rows that belong to the group with the weights rho,

    E log p(x | phi) = log base(x) + F(x) . E eta(phi),        q(phi) <- prior after  sum over rows of  rho F(x),            (1)

and the evidence bound loses KL(q | prior). `natural` is eta at known parameters, `expected` its
mean under q: one number in the place of another, so that what is proved of the former on the model
holds for the latter.

| family                         | F(x), of a cell that is seen | eta                                                  |
|--------------------------------|------------------------------|------------------------------------------------------|
| Beta -> Bernoulli              | x, 1 - x                     | log p, log(1 - p)                                    |
| Dirichlet -> Categorical       | indicators of the codes      | log p                                                |
| Gamma -> Poisson               | x, 1                         | log rate, -rate                                      |
| InverseGamma, Normal -> Normal | 1, x, x^2                    | -(log 2 pi v + loc^2 / v) / 2, loc / v, -1 / (2 v)   |

A missing cell has F(x) = 0.

Correlated features (normal, Wishart) and probit experts see a row through products of its entries:
`inference.reading.conjugate.quadratic`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import betaln, digamma, gammaln
from jax.typing import DTypeLike
from numpyro.distributions import Distribution

__all__ = [
    "Columns",
    "ConjugatePair",
    "arguments",
    "beta_divergence",
    "fill",
    "fill_row",
    "gamma_divergence",
    "gamma_means",
    "log_sticks",
    "refuse_first",
]


@dataclass(frozen=True)
class ConjugatePair(ABC):
    """What a pair of the table of conjugate pairs knows; hashable, so that it may be static
    under `jit`.
    """

    # classes of the parameters' distributions, in the order in which every method takes the
    # parameters
    priors: tuple[str, ...]
    likelihood: str  # class of the rows' distribution

    @abstractmethod
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Any:
        """Hyper-parameters from the distributions of the parameters, without wrappers, and the
        parameters' values in the same trace.
        """

    @abstractmethod
    def add(self, hyper: Any, x: Array, weight: float | Array = 1.0) -> Any:
        """Hyper-parameters after one more row, or after a row of a weight: a number, or an array
        that broadcasts to [..., columns].
        """

    def remove(self, hyper: Any, x: Array) -> Any:
        """Hyper-parameters without one of the rows that they have seen: undoes `add`, but for
        rounding.
        """
        return self.add(hyper, x, -1.0)

    @abstractmethod
    def cache(self, hyper: Any) -> Any:
        """What makes `scores` cheap, with the same leading axes."""

    @abstractmethod
    def scores(self, cache: Any, x: Array) -> Array:
        """log p(x | h) for each column [..., columns], 0 where missing."""

    def score(self, cache: Any, x: Array) -> Array:
        """`scores` summed over the columns [...]."""
        return self.scores(cache, x).sum(-1)

    def log_predictive(self, hyper: Any, x: Array) -> Array:
        """`scores` at hyper-parameters."""
        return self.scores(self.cache(hyper), x)

    @abstractmethod
    def log_prior(self, hyper: Any, values: tuple[Array, ...]) -> Array:
        """Log density of the parameters for each column [..., columns], normalised."""

    @abstractmethod
    def draw(self, rng_key: Array, hyper: Any) -> tuple[Array, ...]:
        """Parameters of each group."""

    @abstractmethod
    def draw_row(self, rng_key: Array, hyper: Any) -> Array:
        """A row from the predictive of each group [..., *row]."""

    @abstractmethod
    def mean_row(self, hyper: Any) -> Array:
        """Mean of the predictive [..., *row]; of codes, which have none, the probability of each
        [..., *row, code].
        """

    @abstractmethod
    def refuse(self, site: str, x: np.ndarray, hyper: Any = None) -> None:
        """Raises ValueError where rows [row, columns] are outside the likelihood's support; how
        many codes there are, `hyper` knows.
        """


@dataclass(frozen=True)
class Columns(ConjugatePair):
    """A pair of columns that are independent within a group, with a mean-field posterior.

    By default the hyper-parameters are the arguments of one prior, and a row adds its statistics to
    them.
    """

    hyper: Any  # NamedTuple of the arguments of the prior
    num_axes: ClassVar[int] = 0  # of a hyper-parameter, after the columns

    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Any:
        """The arguments of the prior, spread over the parameter."""
        return self.hyper(*arguments(priors[0], self.hyper._fields, values[0]))

    def add(self, hyper: Any, x: Array, weight: float | Array = 1.0) -> Any:
        """Adds the statistics of a row, times its weight."""
        first = jax.tree.leaves(hyper)[0]
        shape = first.shape[: first.ndim - self.num_axes]
        x, weight = (
            jnp.broadcast_to(jnp.asarray(each, first.dtype), shape) for each in (x, weight)
        )
        return self.posterior(hyper, weight[..., None] * self.statistics(x, hyper))

    @abstractmethod
    def statistics(self, x: Array, hyper: Any) -> Array:
        """F(x) of rows [..., column] as [..., column, statistic]."""

    def log_base(self, x: Array) -> Array:
        """log base(x) of rows, summed over the columns [row]."""
        return jnp.zeros(x.shape[0], x.dtype)

    @abstractmethod
    def natural(self, values: tuple[Array, ...]) -> Array:
        """eta of the parameters [group, column] as [group, column, statistic]."""

    @abstractmethod
    def expected(self, hyper: Any) -> Array:
        """E eta, the same shape."""

    def posterior(self, prior: Any, sums: Array) -> Any:
        """Hyper-parameters after rows of the weighted statistics `sums` [group, column,
        statistic].
        """
        leaves, form = jax.tree.flatten(prior)
        return form.unflatten([leaf + sums[..., k] for k, leaf in enumerate(leaves)])

    @abstractmethod
    def divergence(self, hyper: Any, prior: Any) -> Array:
        """KL(q | prior), summed over groups and columns."""


def arguments(distribution: Distribution, names: tuple[str, ...], like: Array) -> list[Array]:
    """Arguments of a distribution, each with the shape and dtype of `like`."""
    return [
        jnp.broadcast_to(jnp.asarray(getattr(distribution, name), like.dtype), like.shape)
        for name in names
    ]


def fill(x: Array, like: Array) -> tuple[Array, Array]:
    """`fill_row` over the shape of `like`."""
    return fill_row(jnp.broadcast_to(x, like.shape), like.dtype)


def fill_row(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The row, 0 where it is missing; and 1 where it is seen, 0 where it is missing."""
    x = jnp.asarray(x, dtype)
    missing = jnp.isnan(x)
    return jnp.where(missing, 0, x), (~missing).astype(dtype)


def refuse_first(site: str, x: np.ndarray, bad: np.ndarray, wanted: str) -> None:
    """Raises for the first value that is bad, naming its place."""
    for index in np.argwhere(bad)[:1]:
        place = ", ".join(
            f"{axis} {i}" for axis, i in zip(("row", "column", "feature"), index, strict=False)
        )
        raise ValueError(
            f"site {site!r}: {place} is {x[tuple(index)]} (one of {bad.sum()} such values); "
            f"{wanted}"
        )


def beta_divergence(one: Any, other: Any) -> Array:
    """KL between Beta distributions, (concentration1, concentration0) each."""
    (a, b), (a0, b0) = one, other
    at = digamma(a + b)
    return (
        betaln(a0, b0) - betaln(a, b) + (a - a0) * (digamma(a) - at) + (b - b0) * (digamma(b) - at)
    )


def gamma_means(pair: Any) -> tuple[Array, Array]:
    """E and E log of a Gamma (concentration, rate); of a number that is known, (it, infinity),
    itself and its logarithm.
    """
    (a, b), is_known = pair, jnp.isinf(pair[1])
    safe = jnp.where(is_known, 1, b)
    return jnp.where(is_known, a, a / safe), jnp.where(
        is_known, jnp.log(a), digamma(a) - jnp.log(safe)
    )


def gamma_divergence(one: Any, other: Any) -> Array:
    """KL between Gamma distributions, (concentration, rate) each; 0 where a number is known."""
    (a, b), (a0, b0) = one, other
    is_known = jnp.isinf(b0)
    b, b0 = jnp.where(is_known, 1, b), jnp.where(is_known, 1, b0)
    found = (
        (a - a0) * digamma(a)
        - gammaln(a)
        + gammaln(a0)
        + a0 * (jnp.log(b) - jnp.log(b0))
        + a * (b0 / b - 1)
    )
    return jnp.where(is_known, 0, found)


def log_sticks(log_taken: Array, log_left: Array) -> Array:
    """Log weights from the logarithms of what each stick takes and leaves [..., stick], or their
    means; the last takes the rest.
    """
    zero = jnp.zeros((*log_left.shape[:-1], 1), log_left.dtype)
    return jnp.concatenate([log_taken, zero], -1) + jnp.concatenate(
        [zero, jnp.cumsum(log_left, -1)], -1
    )
