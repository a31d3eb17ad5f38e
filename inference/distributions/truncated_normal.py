"""A normal distribution truncated to an interval, which may lie far in the tail.

NumPyro's `TruncatedNormal` draws by the distribution function, which is 0 beyond 38 standard
deviations (13 in float32): there its draws are the bound, or infinite. A Gibbs step meets such
tails where data pull a bounded site across its bound. Here the logarithm of the distribution
function is used, and an interval on the right is mirrored to the left.
"""

from typing import NamedTuple, override

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import log_ndtr, ndtri
from jax.scipy.stats import norm
from numpyro.distributions import constraints

__all__ = ["OneSided", "TruncatedNormal", "log_ndtri", "one_sided"]


class OneSided(NamedTuple):
    """Moments of Normal(loc, scale) truncated to values above 0.

    The mean is loc + scale * shift, the variance scale^2 (1 - lost).
    """

    log_mass: Array  # log probability of being above 0 before the truncation
    shift: Array
    lost: Array  # between 0 and 1


def one_sided(ratio: Array) -> OneSided:
    """Returns the moments of a normal distribution truncated to values above 0.

    With r = density / mass at the ratio a, the shift is r and lost = r (r + a). In the tail r + a
    is a small difference of large numbers. There it is computed, with x = -a, by the continued
    fraction 1 / (x + 2 / (x + 3 / (x + ...))).

    Args:
        ratio: Location divided by scale, before the truncation.
    """
    tail = -5.0  # here 16 terms of the fraction give 11 digits, and more further out
    # Without the barrier, parts that several results share are loops of their own: slow to compile.
    log_mass, x = lax.optimization_barrier(log_ndtr(ratio)), jnp.maximum(-ratio, -tail)
    excess = jnp.zeros_like(x)
    for k in range(16, 0, -1):
        excess = k / (x + excess)
    shift = jnp.where(ratio < tail, x + excess, jnp.exp(norm.logpdf(ratio) - log_mass))
    return OneSided(log_mass, shift, shift * jnp.where(ratio < tail, excess, shift + ratio))


class TruncatedNormal(dist.Distribution):
    """Normal(loc, scale) truncated to the interval from `low` to `high`.

    Args:
        loc: Mean before the truncation.
        scale: Standard deviation before the truncation.
        low: Lower bound, of the same shape; may be -inf.
        high: Upper bound, of the same shape; may be inf.
        validate_args: As for NumPyro's distributions.
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
    @override
    def support(self):
        return constraints.interval(self.low, self.high)

    def _tails(self) -> tuple[Array, Array, Array]:
        """Whether the interval is mirrored, and the log distribution function at its two ends."""
        start, end = (self.low - self.loc) / self.scale, (self.high - self.loc) / self.scale
        is_mirrored = start > -end
        low = jnp.where(is_mirrored, -end, start)
        high = jnp.where(is_mirrored, -start, end)
        # one call, for its code is long
        below, above = log_ndtr(jnp.stack(jnp.broadcast_arrays(low, high)))
        return is_mirrored, below, above

    @override
    def log_prob(self, value, intermediates=None):
        _, below, above = self._tails()
        log_mass = above + jnp.log1p(-jnp.exp(below - above))
        return norm.logpdf((value - self.loc) / self.scale) - jnp.log(self.scale) - log_mass

    @override
    def sample(self, key, sample_shape=()):
        uniform = random.uniform(key, sample_shape + self.batch_shape, jnp.result_type(self.loc))
        return self.icdf(uniform + jnp.finfo(uniform.dtype).eps / 2)  # 0 has no finite quantile

    @override
    def icdf(self, q):
        is_mirrored, below, above, scale, low, high, loc = (
            jnp.broadcast_to(part, jnp.shape(q))
            for part in (*self._tails(), self.scale, self.low, self.high, self.loc)
        )
        standard = log_ndtri(jnp.logaddexp(below + jnp.log1p(-q), above + jnp.log(q)))
        return jnp.clip(jnp.where(is_mirrored, -standard, standard) * scale + loc, low, high)


def log_ndtri(log_probability: Array) -> Array:
    """Returns the inverse of `log_ndtr`, in the left tail by Newton's method.

    `log_ndtr` is concave, and the start -sqrt(-2 y) lies left of the root: the steps rise to the
    root and never pass it. Eight of them suffice, because the start is asymptotically right.

    Args:
        log_probability: The values y of `log_ndtr`.
    """
    is_tail = log_probability < -5
    tail = jnp.where(is_tail, log_probability, -5)

    def newton(_, x):
        value = log_ndtr(x)
        return x - (value - tail) * jnp.exp(value - norm.logpdf(x))

    x = lax.fori_loop(0, 8, newton, -jnp.sqrt(-2 * tail))
    return jnp.where(is_tail, x, ndtri(jnp.exp(log_probability)))
