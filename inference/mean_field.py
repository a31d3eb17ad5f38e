"""Conjugate pairs under a mean-field posterior: what coordinate ascent needs of them beside `inference.conjugate`.

A group's rows are p(x | phi) = base(x) exp(F(x) . eta(phi)) column by column. Under q(phi), of the family of the prior, and rows that
belong to the group with the weights rho,

    E log p(x | phi) = log base(x) + F(x) . E eta(phi),        q(phi) <- prior after  sum over rows of  rho F(x),            (1)

and the evidence bound loses KL(q | prior). `natural` is eta at known parameters, `expected` its mean under q: one number in the place of
another, so that what is proved of the former on the model holds for the latter.

| family                         | F(x), of a cell that is seen | eta                                                  |
|--------------------------------|------------------------------|------------------------------------------------------|
| Beta -> Bernoulli              | x, 1 - x                     | log p, log(1 - p)                                    |
| Dirichlet -> Categorical       | indicators of the codes      | log p                                                |
| Gamma -> Poisson               | x, 1                         | log rate, -rate                                      |
| InverseGamma, Normal -> Normal | 1, x, x^2                    | -(log 2 pi v + loc^2 / v) / 2, loc / v, -1 / (2 v)   |

A missing cell has F(x) = 0.

Correlated features (normal, Wishart) and probit experts see a row through products of its entries: `inference.quadratic`.
"""

import math
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import betaln, digamma, gammaln

from inference._conjugate_normal import NormalHyper, fill_row
from inference.conjugate import (
    BetaBernoulli,
    BetaHyper,
    DirichletCategorical,
    DirichletHyper,
    Family,
    GammaHyper,
    GammaPoisson,
    NormalInverseGamma,
)

__all__ = ["COLUMNS", "Columns", "beta_divergence", "gamma_divergence", "log_sticks"]


class Columns(Protocol):
    """Columns that are independent within a group."""

    def statistics(self, x: Array, hyper: Any) -> Array:
        """F(x) of rows [row, column] as [row, column, statistic]."""

    def log_base(self, x: Array) -> Array:
        """log base(x) of rows, summed over the columns [row]."""

    def natural(self, values: tuple[Array, ...]) -> Array:
        """eta of the parameters [group, column] as [group, column, statistic]."""

    def expected(self, hyper: Any) -> Array:
        """E eta, the same shape."""

    def posterior(self, prior: Any, sums: Array) -> Any:
        """Hyper-parameters after rows of the weighted statistics `sums` [group, column, statistic]."""

    def divergence(self, hyper: Any, prior: Any) -> Array:
        """KL(q | prior), summed over groups and columns."""


class _NoBase:
    def log_base(self, x: Array) -> Array:
        return jnp.zeros(x.shape[0], x.dtype)


class _Bits(_NoBase):
    def statistics(self, x: Array, hyper: Any) -> Array:
        x, seen = fill_row(x, x.dtype)
        return jnp.stack([x, seen - x], -1)

    def natural(self, values: tuple[Array, ...]) -> Array:
        (p,) = values
        return jnp.stack([jnp.log(p), jnp.log1p(-p)], -1)

    def expected(self, hyper: BetaHyper) -> Array:
        c = jnp.stack(hyper, -1)
        return digamma(c) - digamma(c.sum(-1, keepdims=True))

    def posterior(self, prior: BetaHyper, sums: Array) -> BetaHyper:
        return BetaHyper(prior.concentration1 + sums[..., 0], prior.concentration0 + sums[..., 1])

    def divergence(self, hyper: BetaHyper, prior: BetaHyper) -> Array:
        return jnp.sum(beta_divergence(hyper, prior))


class _Codes(_NoBase):
    def statistics(self, x: Array, hyper: DirichletHyper) -> Array:
        codes = jnp.arange(hyper.concentration.shape[-1], dtype=x.dtype)
        return (x[..., None] == codes[None, None]).astype(x.dtype)

    def natural(self, values: tuple[Array, ...]) -> Array:
        return jnp.log(values[0])

    def expected(self, hyper: DirichletHyper) -> Array:
        return digamma(hyper.concentration) - digamma(hyper.concentration.sum(-1, keepdims=True))

    def posterior(self, prior: DirichletHyper, sums: Array) -> DirichletHyper:
        return DirichletHyper(prior.concentration + sums)

    def divergence(self, hyper: DirichletHyper, prior: DirichletHyper) -> Array:
        log_z = lambda c: gammaln(c).sum(-1) - gammaln(c.sum(-1))
        (c,), (c0,) = hyper, prior
        return jnp.sum(jnp.sum((c - c0) * self.expected(hyper), -1) - log_z(c) + log_z(c0))


class _Counts:
    def statistics(self, x: Array, hyper: Any) -> Array:
        return jnp.stack(fill_row(x, x.dtype), -1)

    def log_base(self, x: Array) -> Array:
        return -gammaln(fill_row(x, x.dtype)[0] + 1).sum(-1)

    def natural(self, values: tuple[Array, ...]) -> Array:
        return jnp.stack([jnp.log(values[0]), -values[0]], -1)

    def expected(self, hyper: GammaHyper) -> Array:
        return jnp.stack([digamma(hyper.concentration) - jnp.log(hyper.rate), -hyper.concentration / hyper.rate], -1)

    def posterior(self, prior: GammaHyper, sums: Array) -> GammaHyper:
        return GammaHyper(prior.concentration + sums[..., 0], prior.rate + sums[..., 1])

    def divergence(self, hyper: GammaHyper, prior: GammaHyper) -> Array:
        return jnp.sum(gamma_divergence(hyper, prior))


class _Reals(_NoBase):
    """Squares are sums about 0: columns whose mean is many of their spreads away lose digits."""

    def statistics(self, x: Array, hyper: Any) -> Array:
        x, seen = fill_row(x, x.dtype)
        return jnp.stack([seen, x, x**2], -1)

    def natural(self, values: tuple[Array, ...]) -> Array:
        variance, loc = values
        return self._eta(1 / variance, loc / variance, loc**2 / variance, -jnp.log(variance))

    def expected(self, hyper: NormalHyper) -> Array:
        precision = hyper.concentration / hyper.rate
        log_precision = digamma(hyper.concentration) - jnp.log(hyper.rate)
        return self._eta(precision, precision * hyper.loc, precision * hyper.loc**2 + 1 / hyper.kappa, log_precision)

    def _eta(self, precision: Array, weighted: Array, square: Array, log_precision: Array) -> Array:
        return jnp.stack([(log_precision - math.log(2 * math.pi) - square) / 2, weighted, -precision / 2], -1)

    def posterior(self, prior: NormalHyper, sums: Array) -> NormalHyper:
        count, total, squares = jnp.moveaxis(sums, -1, 0)
        kappa = prior.kappa + count
        loc = (prior.kappa * prior.loc + total) / kappa
        rate = prior.rate + (squares + prior.kappa * prior.loc**2 - kappa * loc**2) / 2
        return NormalHyper(loc, kappa, prior.concentration + count / 2, rate)

    def divergence(self, hyper: NormalHyper, prior: NormalHyper) -> Array:
        precision, ratio = hyper.concentration / hyper.rate, prior.kappa / hyper.kappa
        of_loc = (ratio - 1 - jnp.log(ratio) + prior.kappa * precision * (hyper.loc - prior.loc) ** 2) / 2
        of_variance = gamma_divergence((hyper.concentration, hyper.rate), (prior.concentration, prior.rate))
        return jnp.sum(of_loc + of_variance)


COLUMNS: dict[Family, Columns] = {
    BetaBernoulli(): _Bits(),
    DirichletCategorical(): _Codes(),
    GammaPoisson(): _Counts(),
    NormalInverseGamma(): _Reals(),
}


def beta_divergence(one: Any, other: Any) -> Array:
    """KL between Beta distributions, (concentration1, concentration0) each."""
    (a, b), (a0, b0) = one, other
    at = digamma(a + b)
    return betaln(a0, b0) - betaln(a, b) + (a - a0) * (digamma(a) - at) + (b - b0) * (digamma(b) - at)


def gamma_divergence(one: Any, other: Any) -> Array:
    """KL between Gamma distributions, (concentration, rate) each."""
    (a, b), (a0, b0) = one, other
    return (a - a0) * digamma(a) - gammaln(a) + gammaln(a0) + a0 * (jnp.log(b) - jnp.log(b0)) + a * (b0 / b - 1)


def log_sticks(log_taken: Array, log_left: Array) -> Array:
    """Log weights from the logarithms of what each stick takes and leaves [..., stick], or their means; the last takes the rest."""
    zero = jnp.zeros((*log_left.shape[:-1], 1), log_left.dtype)
    return jnp.concatenate([log_taken, zero], -1) + jnp.concatenate([zero, jnp.cumsum(log_left, -1)], -1)
