"""Probit regression: integers seen in place of a latent x ~ Normal(predictor, 1).

| class                                 | what is observed                              |
|---------------------------------------|-----------------------------------------------|
| `OrderedProbit(predictor, cutpoints)` | the interval between cutpoints that holds x   |
| `BinomialProbit(predictor, trials)`   | how many of `trials` draws of x were positive |

The log probabilities integrate x out. A Gibbs sampler draws x again, by data augmentation (Albert
and Chib 1993), because given x the model is normal:

    response, weight = distribution.augment(rng_key, value)

draws x given the value. As a likelihood of the predictor the draw is that of
Normal(predictor, 1 / sqrt(weight)) at `response`.

Cost of `augment`: one truncated normal draw for each value, or for each trial.
"""

from typing import override

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import gammaln, log_ndtr
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from inference.distributions.truncated_normal import TruncatedNormal

__all__ = ["BinomialProbit", "OrderedProbit"]

CHUNK = 4096  # values whose trials are drawn together


class OrderedProbit(dist.Distribution):
    """The interval between cutpoints that holds the latent x, numbered from 0.

    P(value = l) = Phi(cutpoints[l] - predictor) - Phi(cutpoints[l - 1] - predictor). The cutpoint
    before the first is -inf, the one after the last is inf.

    Args:
        predictor: Mean of the latent x.
        cutpoints: One increasing vector for all values, [cutpoint].
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {"predictor": constraints.real, "cutpoints": constraints.ordered_vector}  # noqa: RUF012
    reparametrized_params = ["predictor", "cutpoints"]  # noqa: RUF012

    def __init__(self, predictor, cutpoints, *, validate_args=None):
        if jnp.ndim(cutpoints) != 1:
            raise ValueError(
                f"OrderedProbit cutpoints: found shape {jnp.shape(cutpoints)}, wanted one "
                "increasing vector for all values."
            )
        self.predictor, self.cutpoints = jnp.asarray(predictor), jnp.asarray(cutpoints)
        super().__init__(batch_shape=self.predictor.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    @override
    def support(self):
        return constraints.integer_interval(0, self.cutpoints.shape[-1])

    def interval(self, value: Array) -> tuple[Array, Array]:
        """Returns the ends of the interval that holds x."""
        infinite = jnp.full(1, jnp.inf, self.cutpoints.dtype)
        ends = jnp.concatenate([-infinite, self.cutpoints, infinite])
        at = jnp.asarray(value, jnp.int32)
        return ends[at], ends[at + 1]

    @override
    @validate_sample
    def log_prob(self, value):
        # The gradient of log_ndtr at infinity is not a number, so an infinite end becomes 1e9.
        low, high = (
            jnp.where(jnp.isinf(end), 1e9 * jnp.sign(end), end - self.predictor)
            for end in self.interval(value)
        )
        # The smaller of the two tails loses no digits.
        is_right = low + high > 0
        above = log_ndtr(jnp.where(is_right, -low, high))
        below = log_ndtr(jnp.where(is_right, -high, low))
        return above + jnp.log1p(-jnp.exp(below - above))

    @override
    def sample(self, key, sample_shape=()):
        shape, dtype = sample_shape + self.batch_shape, self.predictor.dtype
        x = self.predictor + random.normal(key, shape, dtype)
        return jnp.searchsorted(self.cutpoints, x).astype(jnp.int32)

    def augment(self, rng_key: Array, value: Array) -> tuple[Array, Array]:
        """Returns a draw of x in the interval of the value, and its weight, 1."""
        one = jnp.ones_like(self.predictor)
        return TruncatedNormal(self.predictor, one, *self.interval(value)).sample(rng_key), one


class BinomialProbit(dist.Distribution):
    """Binomial(trials, Phi(predictor)).

    Args:
        predictor: Mean of the latent x.
        trials: Number of trials.
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {"predictor": constraints.real, "trials": constraints.nonnegative_integer}  # noqa: RUF012
    reparametrized_params = ["predictor"]  # noqa: RUF012

    def __init__(self, predictor, trials, *, validate_args=None):
        shape = lax.broadcast_shapes(jnp.shape(predictor), jnp.shape(trials))
        self.predictor = jnp.broadcast_to(jnp.asarray(predictor), shape)
        # A NumPy array stays one, so that the support is known while the model is traced.
        self.trials = trials if jnp.shape(trials) == shape else jnp.broadcast_to(trials, shape)
        super().__init__(batch_shape=shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    @override
    def support(self):
        return constraints.integer_interval(0, self.trials)

    @override
    @validate_sample
    def log_prob(self, value):
        trials, value = (
            jnp.asarray(number, self.predictor.dtype) for number in (self.trials, value)
        )
        choose = gammaln(trials + 1.0) - gammaln(value + 1.0) - gammaln(trials - value + 1.0)
        return (
            choose + value * log_ndtr(self.predictor) + (trials - value) * log_ndtr(-self.predictor)
        )

    @override
    def sample(self, key, sample_shape=()):
        share = jnp.exp(log_ndtr(self.predictor))
        return dist.Binomial(self.trials, share).sample(key, sample_shape)

    def augment(self, rng_key: Array, value: Array) -> tuple[Array, Array]:
        """Returns the mean of a draw of x for each trial, and its weight, the number of trials.

        As many of the draws are positive as the value says. Values are sorted by their number of
        trials, so that those drawn together have similar numbers.
        """
        dtype, shape = self.predictor.dtype, self.predictor.shape
        predictor, trials, hits = (
            jnp.ravel(jnp.asarray(part)) for part in (self.predictor, self.trials, value)
        )
        order, size = jnp.argsort(trials), max(min(CHUNK, trials.size), 1)
        padding = (0, -trials.size % size)
        chunks = [
            jnp.pad(part[order], padding).reshape(-1, size) for part in (predictor, trials, hits)
        ]
        keys = random.split(rng_key, len(chunks[0]))
        total = lax.map(lambda chunk: self._total(*chunk), (keys, *chunks)).reshape(-1)
        total = jnp.zeros_like(predictor).at[order].set(total[: trials.size])
        weight = trials.astype(dtype)
        return (total / jnp.maximum(weight, 1)).reshape(shape), weight.reshape(shape)

    @staticmethod
    def _total(rng_key, predictor, trials, value):
        one = jnp.ones_like(predictor)

        def add(i, total):
            is_hit = i < value
            low, high = jnp.where(is_hit, 0.0, -jnp.inf), jnp.where(is_hit, jnp.inf, 0.0)
            x = TruncatedNormal(predictor, one, low, high).sample(random.fold_in(rng_key, i))
            return total + jnp.where(i < trials, x, 0.0)

        return lax.fori_loop(0, jnp.max(trials), add, jnp.zeros_like(predictor))
