"""A Normal truncated to an interval, which may lie far in the tail.

NumPyro's TruncatedNormal draws through the distribution function, which is 0 beyond 38 standard
deviations (13 in float32): its draws are then the bound, or infinite. A Gibbs step meets such
tails, where data pull a bounded site across its bound. Here the interval is mirrored to the left
and everything happens to the logarithm of the distribution function.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import log_ndtr, ndtri
from jax.scipy.stats import norm
from numpyro.distributions import constraints

__all__ = ["OneSided", "TruncatedNormal", "log_ndtri", "one_sided"]

NUM_NEWTON_STEPS = 8  # quadratic convergence from an asymptotic start
# below it, a continued fraction of this depth; 11 digits at -5, more further out
TAIL, NUM_FRACTIONS = -5.0, 16


class OneSided(NamedTuple):
    """Of Normal(loc, scale) above 0, loc / scale being known: mean = loc + scale * shift,
    variance = scale^2 (1 - lost).
    """

    log_mass: Array  # log probability of being above 0, before the cut
    shift: Array
    lost: Array  # between 0 and 1


def one_sided(ratio: Array) -> OneSided:
    """Moments of a Normal cut at 0, by the ratio of its location to its scale.

    With r = density / mass at the ratio a, the shift is r and lost = r (r + a), of which far in the
    tail r + a is a difference of large numbers: there it is 1 / (x + 2 / (x + 3 / (x + ...))), x =
    -a.
    """
    log_mass, x = log_ndtr(ratio), jnp.maximum(-ratio, -TAIL)
    excess = jnp.zeros_like(x)
    for k in range(NUM_FRACTIONS, 0, -1):
        excess = k / (x + excess)
    shift = jnp.where(ratio < TAIL, x + excess, jnp.exp(norm.logpdf(ratio) - log_mass))
    return OneSided(log_mass, shift, shift * jnp.where(ratio < TAIL, excess, shift + ratio))


class TruncatedNormal(dist.Distribution):
    """`loc` and `scale` of the Normal, `low` and `high` of the interval, of one shape; a bound
    may be infinite.
    """

    arg_constraints = {  # noqa: RUF012
        "loc": constraints.real,
        "scale": constraints.positive,
        "low": constraints.dependent(is_discrete=False, event_dim=0),
        "high": constraints.dependent(is_discrete=False, event_dim=0),
    }
    reparametrized_params = ["loc", "scale", "low", "high"]  # noqa: RUF012

    def __init__(self, loc, scale, low, high, *, validate_args=None):
        self.loc, self.scale, self.low, self.high = loc, scale, low, high
        super().__init__(batch_shape=jnp.shape(loc), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self):
        """The interval."""
        return constraints.interval(self.low, self.high)

    def _tails(self) -> tuple[Array, Array, Array]:
        """Whether the interval is mirrored, and the logarithm of the distribution function at
        its ends.
        """
        start, end = (self.low - self.loc) / self.scale, (self.high - self.loc) / self.scale
        is_mirrored = start > -end
        return (
            is_mirrored,
            log_ndtr(jnp.where(is_mirrored, -end, start)),
            log_ndtr(jnp.where(is_mirrored, -start, end)),
        )

    def log_prob(self, value, intermediates=None):
        """Log density inside the interval."""
        _, below, above = self._tails()
        mass = above + jnp.log1p(-jnp.exp(below - above))
        return norm.logpdf((value - self.loc) / self.scale) - jnp.log(self.scale) - mass

    def sample(self, key, sample_shape=()):
        """Inverse of the distribution function, in logarithms."""
        is_mirrored, below, above = self._tails()
        dtype = jnp.result_type(self.loc)
        # not 0, which is at infinity
        share = (
            random.uniform(key, sample_shape + self.batch_shape, dtype) + jnp.finfo(dtype).eps / 2
        )
        below, above, is_mirrored = (
            jnp.broadcast_to(end, share.shape) for end in (below, above, is_mirrored)
        )
        standard = log_ndtri(jnp.logaddexp(below + jnp.log1p(-share), above + jnp.log(share)))
        value = jnp.where(is_mirrored, -standard, standard) * jnp.broadcast_to(
            self.scale, share.shape
        )
        low, high, loc = (
            jnp.broadcast_to(array, share.shape) for array in (self.low, self.high, self.loc)
        )
        return jnp.clip(value + loc, low, high)


def log_ndtri(log_probability: Array) -> Array:
    """The inverse of `log_ndtr`: directly near the middle, by Newton's steps in the left tail.

    `log_ndtr` is concave and -sqrt(-2 y) lies left of the root, so that the steps rise to it and
    never pass.
    """
    is_tail = log_probability < -5
    tail = jnp.where(is_tail, log_probability, -5)

    def rise(_, x):
        value = log_ndtr(x)
        return x - (value - tail) * jnp.exp(value - norm.logpdf(x))

    x = lax.fori_loop(0, NUM_NEWTON_STEPS, rise, -jnp.sqrt(-2 * tail))
    return jnp.where(is_tail, x, ndtri(jnp.exp(log_probability)))
