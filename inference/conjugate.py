"""Conjugate pairs: the prior of a group's parameters, the likelihood of its rows, and the group integrated out.

A *group* is rows that share their parameters phi. Where p(phi) p(x | phi) is of p(phi)'s family, the group is its hyper-parameters:
h before a row, `add(h, x)` after it. For every phi

    log p(phi | h) + log p(x | phi) - log p(phi | add(h, x)) = log p(x | h),                                                 (1)

which ties `log_prior`, `add` and `log_predictive` to the likelihood, and to each other.

    priors                                   likelihood           predictive p(x | h)
    Beta(c1, c0)                             BernoulliProbs       c1 / (c1 + c0) for 1, c0 / (c1 + c0) for 0
    Dirichlet(c)                             CategoricalProbs     c_x / sum_k c_k
    Gamma(a, b)                              Poisson              negative binomial, Gamma(a+x) b^a / (Gamma(a) x! (b+1)^(a+x))
    InverseGamma + Normal                    Normal               Student t
    (Inverse)Wishart + MultivariateNormal    MultivariateNormal   multivariate t

A row is a float array [columns], or [columns, D] where a column is D features that depend on each other; NaN is missing, tells
nothing. Columns are independent. Hyper-parameters are tuples of arrays [..., columns] and a parameter's own axes; a row is spread
over the leading axes (class, group). Every result has the dtype of the hyper-parameters.

Rounding: an emptied group is off by eps n after n rows, or more: start it from the prior. In float32 a count ends at 2^24 = 1.7e7.

Cost of one row against R groups of C columns (float32, one core, R = 40, C = 100): Bernoulli two products of R C (0.4 us);
Categorical one of R C K with the row as indicators (0.9 us at K = 3, 4.5 at K = 20; a gather took 2.2 and 2.8, by
`take_along_axis` 8); Poisson three logarithms for each of R C (27 us; with `gammaln` 60), Normal one (10 us).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import betaln, gammaln, xlog1py, xlogy
from numpyro.distributions import Distribution

from inference._conjugate_normal import (
    NormalInverseGamma,
    NormalInverseWishart,
    NormalWishart,
    arguments,
    fill,
    fill_row,
    refuse_first,
    stirling_error,
)

__all__ = [
    "FAMILIES",
    "BetaBernoulli",
    "BetaHyper",
    "DirichletCategorical",
    "DirichletHyper",
    "Family",
    "GammaHyper",
    "GammaPoisson",
    "NormalInverseGamma",
    "NormalInverseWishart",
    "NormalWishart",
    "describe",
    "family_of",
]


class Family(Protocol):
    """A conjugate pair; hashable, so that it may be static under `jit`."""

    @property
    def name(self) -> str:
        """As an error prints it."""

    @property
    def priors(self) -> tuple[str, ...]:
        """Classes of the parameters' distributions, in the order in which every method takes the parameters."""

    @property
    def likelihood(self) -> str:
        """Class of the rows' distribution."""

    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Any:
        """Hyper-parameters from the distributions of the parameters, without wrappers, and the parameters' values in the same trace."""

    def add(self, hyper: Any, x: Array, weight: float | Array = 1.0) -> Any:
        """Hyper-parameters after one more row, or after a row of a weight: a number, or an array that broadcasts to [..., columns]."""

    def remove(self, hyper: Any, x: Array) -> Any:
        """Hyper-parameters without one of the rows that they have seen: undoes `add`, but for rounding."""

    def log_predictive(self, hyper: Any, x: Array) -> Array:
        """log p(x | h) for each column [..., columns], 0 where missing."""

    def cache(self, hyper: Any) -> Any:
        """What makes `score` cheap, with the same leading axes."""

    def score(self, cache: Any, x: Array) -> Array:
        """`log_predictive` summed over the columns [...]."""

    def log_prior(self, hyper: Any, values: tuple[Array, ...]) -> Array:
        """Log density of the parameters for each column [..., columns], normalised."""

    def draw(self, rng_key: Array, hyper: Any) -> tuple[Array, ...]:
        """Parameters of each group."""

    def draw_row(self, rng_key: Array, hyper: Any) -> Array:
        """A row from the predictive of each group [..., *row]."""

    def mean_row(self, hyper: Any) -> Array:
        """Mean of the predictive [..., *row]; of codes, which have none, the most probable."""

    def refuse(self, site: str, x: np.ndarray, hyper: Any = None) -> None:
        """Raises ValueError where rows [row, columns] are outside the likelihood's support; how many codes there are, `hyper` knows."""


class BetaHyper(NamedTuple):
    """Both [..., columns]."""

    concentration1: Array  # of x = 1
    concentration0: Array  # of x = 0


@dataclass(frozen=True)
class BetaBernoulli:
    """Columns of 0 and 1."""

    name: str = "Beta, Bernoulli"
    priors: tuple[str, ...] = ("Beta",)
    likelihood: str = "BernoulliProbs"

    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> BetaHyper:
        """`values` are (probability,)."""
        return BetaHyper(*arguments(priors[0], ("concentration1", "concentration0"), values[0]))

    def add(self, hyper: BetaHyper, x: Array, weight: float | Array = 1.0) -> BetaHyper:
        """Counts ones and zeros."""
        x, seen = fill(x, hyper.concentration1)
        return BetaHyper(hyper.concentration1 + weight * x, hyper.concentration0 + weight * (seen - x))

    def remove(self, hyper: BetaHyper, x: Array) -> BetaHyper:
        """Counts back."""
        return self.add(hyper, x, -1.0)

    def log_predictive(self, hyper: BetaHyper, x: Array) -> Array:
        """Log of the count's share."""
        gain, base = self.cache(hyper)
        x, seen = fill(x, base)
        return gain * x + base * seen

    def cache(self, hyper: BetaHyper) -> tuple[Array, Array]:
        """Log odds, and the log probability of 0."""
        c1, c0 = hyper
        return jnp.log(c1 / c0), jnp.log(c0 / (c1 + c0))

    def score(self, cache: tuple[Array, Array], x: Array) -> Array:
        """Two products of a matrix and a vector."""
        gain, base = cache
        x, seen = fill_row(x, base.dtype)
        return gain @ x + base @ seen

    def log_prior(self, hyper: BetaHyper, values: tuple[Array, ...]) -> Array:
        """Beta density."""
        (p,), c1, c0 = values, hyper.concentration1, hyper.concentration0
        return xlogy(c1 - 1, p) + xlog1py(c0 - 1, -p) - betaln(c1, c0)

    def draw(self, rng_key: Array, hyper: BetaHyper) -> tuple[Array, ...]:
        """Probabilities of 1."""
        return (random.beta(rng_key, *hyper, hyper.concentration1.shape, hyper.concentration1.dtype),)

    def draw_row(self, rng_key: Array, hyper: BetaHyper) -> Array:
        """Zeros and ones."""
        return random.bernoulli(rng_key, self.mean_row(hyper)).astype(hyper.concentration1.dtype)

    def mean_row(self, hyper: BetaHyper) -> Array:
        """Probability of 1."""
        return hyper.concentration1 / (hyper.concentration1 + hyper.concentration0)

    def refuse(self, site: str, x: np.ndarray, hyper: BetaHyper | None = None) -> None:
        """What is not 0, 1 or NaN."""
        bad = ~np.isnan(x) & (x != 0) & (x != 1)
        refuse_first(site, x, bad, "BernoulliProbs takes 0, 1, or NaN where it is missing. Give such a column to another family.")


class DirichletHyper(NamedTuple):
    """Of K codes."""

    concentration: Array  # [..., columns, K]


@dataclass(frozen=True)
class DirichletCategorical:
    """Columns of the codes 0, ..., K - 1. Another code than these counts as missing: `refuse` finds it before."""

    name: str = "Dirichlet, Categorical"
    priors: tuple[str, ...] = ("Dirichlet",)
    likelihood: str = "CategoricalProbs"

    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> DirichletHyper:
        """`values` are (probabilities,)."""
        return DirichletHyper(*arguments(priors[0], ("concentration",), values[0]))

    def add(self, hyper: DirichletHyper, x: Array, weight: float | Array = 1.0) -> DirichletHyper:
        """Counts codes."""
        is_code = jnp.broadcast_to(self._indicators(x, hyper.concentration), hyper.concentration.shape)
        weight = jnp.broadcast_to(jnp.asarray(weight, is_code.dtype), is_code.shape[:-1])
        return DirichletHyper(hyper.concentration + weight[..., None] * is_code)

    def remove(self, hyper: DirichletHyper, x: Array) -> DirichletHyper:
        """Counts back."""
        return self.add(hyper, x, -1.0)

    def log_predictive(self, hyper: DirichletHyper, x: Array) -> Array:
        """Log of the count's share."""
        log_p = self.cache(hyper)
        return jnp.sum(log_p * jnp.broadcast_to(self._indicators(x, log_p), log_p.shape), axis=-1)

    def cache(self, hyper: DirichletHyper) -> Array:
        """Log probability of every code [..., columns, K]."""
        return jnp.log(hyper.concentration) - jnp.log(hyper.concentration.sum(-1, keepdims=True))

    def score(self, cache: Array, x: Array) -> Array:
        """One product of a matrix and the row's indicators."""
        return jnp.tensordot(cache, self._indicators(x, cache), 2)

    def log_prior(self, hyper: DirichletHyper, values: tuple[Array, ...]) -> Array:
        """Dirichlet density."""
        (p,), c = values, hyper.concentration
        return jnp.sum(xlogy(c - 1, p) - gammaln(c), axis=-1) + gammaln(c.sum(-1))

    def draw(self, rng_key: Array, hyper: DirichletHyper) -> tuple[Array, ...]:
        """Probabilities of the codes."""
        return (random.dirichlet(rng_key, hyper.concentration, hyper.concentration.shape[:-1], hyper.concentration.dtype),)

    def draw_row(self, rng_key: Array, hyper: DirichletHyper) -> Array:
        """Codes."""
        return random.categorical(rng_key, jnp.log(hyper.concentration)).astype(hyper.concentration.dtype)

    def probabilities(self, hyper: DirichletHyper) -> Array:
        """Of every code [..., columns, K]."""
        return hyper.concentration / hyper.concentration.sum(-1, keepdims=True)

    def mean_row(self, hyper: DirichletHyper) -> Array:
        """The most probable code."""
        return jnp.argmax(hyper.concentration, axis=-1).astype(hyper.concentration.dtype)

    def refuse(self, site: str, x: np.ndarray, hyper: DirichletHyper | None = None) -> None:
        """What is not a code or NaN; without `hyper` every whole number from 0 is a code."""
        largest = np.inf if hyper is None else hyper.concentration.shape[-1] - 1
        bad = ~np.isnan(x) & ((x < 0) | (x > largest) | (x != np.floor(x)) | np.isinf(x))
        codes = "the codes 0, 1, 2, ..." if hyper is None else f"the codes 0 to {largest}"
        refuse_first(site, x, bad, f"CategoricalProbs takes {codes}, or NaN where it is missing. Number the categories from 0.")

    def _indicators(self, x: Array, like: Array) -> Array:
        """1 at the code of each column, one more axis than the row has; 0 everywhere where it is missing."""
        x, codes = jnp.asarray(x, like.dtype)[..., None], jnp.arange(like.shape[-1], dtype=like.dtype)
        return (x == codes.reshape((1,) * (x.ndim - 1) + codes.shape)).astype(like.dtype)


class GammaHyper(NamedTuple):
    """Both [..., columns]."""

    concentration: Array
    rate: Array


class _PoissonCache(NamedTuple):
    """log p(x) = base + slope x + (a + x - 1/2) log(1 + x / a) + stirling_error(a + x) - log x!."""

    concentration: Array  # a
    slope: Array
    base: Array


@dataclass(frozen=True)
class GammaPoisson:
    """Columns of counts."""

    name: str = "Gamma, Poisson"
    priors: tuple[str, ...] = ("Gamma",)
    likelihood: str = "Poisson"

    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> GammaHyper:
        """`values` are (rate,)."""
        return GammaHyper(*arguments(priors[0], ("concentration", "rate"), values[0]))

    def add(self, hyper: GammaHyper, x: Array, weight: float | Array = 1.0) -> GammaHyper:
        """Sums counts and rows."""
        x, seen = fill(x, hyper.rate)
        return GammaHyper(hyper.concentration + weight * x, hyper.rate + weight * seen)

    def remove(self, hyper: GammaHyper, x: Array) -> GammaHyper:
        """Subtracts them."""
        return self.add(hyper, x, -1.0)

    def log_predictive(self, hyper: GammaHyper, x: Array) -> Array:
        """Negative binomial."""
        terms, log_factorial = self._log_negative_binomial(self.cache(hyper), x)
        return terms - jnp.broadcast_to(log_factorial, terms.shape)

    def cache(self, hyper: GammaHyper) -> _PoissonCache:
        """The parts that a count does not change."""
        a, b = hyper
        return _PoissonCache(a, jnp.log(a) - 1 - jnp.log1p(b), -a * jnp.log1p(1 / b) - stirling_error(a))

    def score(self, cache: _PoissonCache, x: Array) -> Array:
        """Three logarithms for each group and column."""
        terms, log_factorial = self._log_negative_binomial(cache, x)
        return terms.sum(-1) - log_factorial.sum(-1)  # summed apart, or XLA computes log x! for every group

    def log_prior(self, hyper: GammaHyper, values: tuple[Array, ...]) -> Array:
        """Gamma density."""
        (rate,), (a, b) = values, hyper
        return a * jnp.log(b) - gammaln(a) + xlogy(a - 1, rate) - b * rate

    def draw(self, rng_key: Array, hyper: GammaHyper) -> tuple[Array, ...]:
        """Rates of the counts."""
        return (random.gamma(rng_key, hyper.concentration, hyper.rate.shape, hyper.rate.dtype) / hyper.rate,)

    def draw_row(self, rng_key: Array, hyper: GammaHyper) -> Array:
        """Counts."""
        group_key, row_key = random.split(rng_key)
        (rate,) = self.draw(group_key, hyper)
        return random.poisson(row_key, rate).astype(rate.dtype)

    def mean_row(self, hyper: GammaHyper) -> Array:
        """Mean of the negative binomial."""
        return hyper.concentration / hyper.rate

    def refuse(self, site: str, x: np.ndarray, hyper: GammaHyper | None = None) -> None:
        """What is not a count or NaN."""
        bad = ~np.isnan(x) & ((x < 0) | (x != np.floor(x)) | np.isinf(x))
        refuse_first(site, x, bad, "Poisson takes whole numbers from 0, or NaN where it is missing. Give such a column to another family.")

    def _log_negative_binomial(self, cache: _PoissonCache, x: Array) -> tuple[Array, Array]:
        """Its log density without log x! [..., columns], and log x!."""
        a = cache.concentration
        filled, seen = fill(x, a)
        rising = (a + filled - 0.5) * jnp.log1p(filled / a) + stirling_error(a + filled)  # with base and slope: `log_rising`
        return seen * (cache.base + cache.slope * filled + rising), gammaln(fill_row(x, a.dtype)[0] + 1)


NORMAL = (NormalInverseGamma(), NormalWishart(), NormalInverseWishart())
FAMILIES: tuple[Family, ...] = (BetaBernoulli(), DirichletCategorical(), GammaPoisson(), *NORMAL)


def family_of(priors: Sequence[str], likelihood: str) -> Family | None:
    """The family of these classes, the priors in any order; None where there is none."""
    found = (family for family in FAMILIES if family.likelihood == likelihood and sorted(family.priors) == sorted(priors))
    return next(found, None)


def describe() -> str:
    """Every pair, as an error lists them."""
    return "; ".join(f"{' + '.join(family.priors)} -> {family.likelihood}" for family in FAMILIES)
