"""Distributions of the order of a model, 1, 2, ...: a Poisson without its zero, and a zeta, whose
tail is long.

PositivePoisson   p(m) = rate^m / (m! (e^rate - 1))
Zeta              p(m) = (m + 1)^-exponent / sum over n >= 1 of (n + 1)^-exponent
"""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.scipy.special import gammainc, gammaln, zeta
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["PositivePoisson", "Zeta"]

MOST_DOUBLINGS = 30  # a draw of 2^30 and above is given as that


class _Order(dist.Distribution):
    """What is drawn by its survival function, P(M > m)."""

    support = constraints.positive_integer

    def sample(self, key, sample_shape=()):
        """The least m with P(M > m) <= u: by doubling, then by halving."""
        shape = sample_shape + self.batch_shape
        u = random.uniform(key, shape, minval=jnp.finfo(jnp.result_type(float)).tiny)
        is_above = lambda m: self.log_survival(m.astype(u.dtype)) > jnp.log(u)

        def halved(_, ends):
            low, high = ends  # M > low, M <= high
            middle = low + (high - low) // 2
            above = is_above(middle)
            return jnp.where(above, middle, low), jnp.where(above, high, middle)

        def doubled(_, ends):
            low, high = ends
            above = is_above(high)
            return jnp.where(above, high, low), jnp.where(above, 2 * high, high)

        ends = jnp.zeros(shape, jnp.int32), jnp.ones(shape, jnp.int32)
        ends = lax.fori_loop(0, MOST_DOUBLINGS, doubled, ends)
        return lax.fori_loop(0, MOST_DOUBLINGS, halved, ends)[1]

    def log_survival(self, value):
        """log P(M > value)."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how probable larger orders are: `log_survival`."
        )


class PositivePoisson(_Order):
    """A Poisson given that it is not 0."""

    arg_constraints = {"rate": constraints.positive}  # noqa: RUF012

    def __init__(self, rate, *, validate_args=None):
        self.rate = jnp.asarray(rate, float)
        super().__init__(jnp.shape(self.rate), validate_args=validate_args)

    @validate_sample
    def log_prob(self, value, intermediates=None):
        """Of an order; -inf below 1."""
        value = jnp.asarray(value, self.rate.dtype)
        log_prob = (
            value * jnp.log(self.rate)
            - gammaln(value + 1)
            - self.rate
            - jnp.log(-jnp.expm1(-self.rate))
        )
        return jnp.where(value >= 1, log_prob, -jnp.inf)

    def log_survival(self, value):
        """log P(M > value)."""
        rate = jnp.broadcast_to(self.rate, value.shape)
        return jnp.log(gammainc(value + 1, rate)) - jnp.log(-jnp.expm1(-rate))

    @property
    def mean(self):
        """The expected order."""
        return -self.rate / jnp.expm1(-self.rate)


class Zeta(_Order):
    """A power of the order: the paper's has the exponent 2, without the share that its zero
    would take.
    """

    arg_constraints = {"exponent": constraints.greater_than(1.0)}  # noqa: RUF012

    def __init__(self, exponent=2.0, *, validate_args=None):
        self.exponent = jnp.asarray(exponent, float)
        super().__init__(jnp.shape(self.exponent), validate_args=validate_args)

    @validate_sample
    def log_prob(self, value, intermediates=None):
        """Of an order; -inf below 1."""
        value = jnp.asarray(value, self.exponent.dtype)
        log_prob = -self.exponent * jnp.log(jnp.maximum(value, 1) + 1) - jnp.log(
            zeta(self.exponent, 2 * jnp.ones_like(self.exponent))
        )
        return jnp.where(value >= 1, log_prob, -jnp.inf)

    def log_survival(self, value):
        """log P(M > value)."""
        exponent = jnp.broadcast_to(self.exponent, value.shape)
        return jnp.log(zeta(exponent, value + 2)) - jnp.log(
            zeta(exponent, 2 * jnp.ones_like(value))
        )
