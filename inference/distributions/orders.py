"""Distributions of the order of a model, 1, 2, ...

PositivePoisson   p(m) = rate^m / (m! (e^rate - 1))
Zeta              p(m) = (m + 1)^-exponent / sum over n >= 1 of (n + 1)^-exponent
"""

from collections.abc import Callable
from typing import override

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import gammainc, gammaln, zeta
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["PositivePoisson", "Zeta"]

MOST_DOUBLINGS = 30  # a draw of 2^30 or more is returned as 2^30


class _Order(dist.Distribution):
    support = constraints.positive_integer
    log_survival: Callable[..., Array]  # log P(M > value)

    @override
    def sample(self, key, sample_shape=()):
        """The least m with P(M > m) <= u, for u uniform: by doubling, then by bisection."""
        shape = sample_shape + self.batch_shape
        u = random.uniform(key, shape, minval=jnp.finfo(jnp.result_type(float)).tiny)
        is_above = lambda m: self.log_survival(m.astype(u.dtype)) > jnp.log(u)

        def bisect(_, ends):
            low, high = ends  # low < M <= high
            middle = low + (high - low) // 2
            above = is_above(middle)
            return jnp.where(above, middle, low), jnp.where(above, high, middle)

        def double(_, ends):
            low, high = ends
            above = is_above(high)
            return jnp.where(above, high, low), jnp.where(above, 2 * high, high)

        ends = jnp.zeros(shape, jnp.int32), jnp.ones(shape, jnp.int32)
        ends = lax.fori_loop(0, MOST_DOUBLINGS, double, ends)
        return lax.fori_loop(0, MOST_DOUBLINGS, bisect, ends)[1]


class PositivePoisson(_Order):
    """A Poisson distribution conditional on not being 0.

    Args:
        rate: Rate of the Poisson distribution.
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {"rate": constraints.positive}  # noqa: RUF012

    def __init__(self, rate, *, validate_args=None):
        self.rate = jnp.asarray(rate, float)
        super().__init__(jnp.shape(self.rate), validate_args=validate_args)

    @override
    @validate_sample
    def log_prob(self, value, intermediates=None):
        value = jnp.asarray(value, self.rate.dtype)
        log_prob = (
            value * jnp.log(self.rate)
            - gammaln(value + 1)
            - self.rate
            - jnp.log(-jnp.expm1(-self.rate))
        )
        return jnp.where(value >= 1, log_prob, -jnp.inf)

    def log_survival(self, value):
        """Returns log P(M > value)."""
        rate = jnp.broadcast_to(self.rate, value.shape)
        return jnp.log(gammainc(value + 1, rate)) - jnp.log(-jnp.expm1(-rate))

    @property
    @override
    def mean(self):
        return -self.rate / jnp.expm1(-self.rate)


class Zeta(_Order):
    """A power law, p(m) in proportion to (m + 1)^-exponent; its tail is long.

    Args:
        exponent: Exponent of the power law, above 1.
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {"exponent": constraints.greater_than(1.0)}  # noqa: RUF012

    def __init__(self, exponent=2.0, *, validate_args=None):
        self.exponent = jnp.asarray(exponent, float)
        super().__init__(jnp.shape(self.exponent), validate_args=validate_args)

    @override
    @validate_sample
    def log_prob(self, value, intermediates=None):
        value = jnp.asarray(value, self.exponent.dtype)
        log_total = jnp.log(zeta(self.exponent, 2 * jnp.ones_like(self.exponent)))
        log_prob = -self.exponent * jnp.log(jnp.maximum(value, 1) + 1) - log_total
        return jnp.where(value >= 1, log_prob, -jnp.inf)

    def log_survival(self, value):
        """Returns log P(M > value)."""
        exponent = jnp.broadcast_to(self.exponent, value.shape)
        log_total = jnp.log(zeta(exponent, 2 * jnp.ones_like(value)))
        return jnp.log(zeta(exponent, value + 2)) - log_total
