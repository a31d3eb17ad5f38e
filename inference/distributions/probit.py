"""Data that a Normal stands behind: integers seen in place of a latent  x ~ Normal(predictor, 1).

| class                                | what is seen                                                              |
|--------------------------------------|---------------------------------------------------------------------------|
| `OrderedProbit(predictor, cutpoints)`| which interval between the cutpoints x fell into, 0 ..
number of cutpoints |
| `BinomialProbit(predictor, trials)`  | how many of so many draws of x were positive                              |

Their log probabilities have x integrated out. A Gibbs sampler puts it back (Albert and Chib 1993):
given x everything is Normal, and

    response, weight = distribution.augment(rng_key, value)

draws x given the value. What x tells of the predictor is then what Normal(predictor, 1 /
sqrt(weight)) would tell at `response`.

Cost of a draw: one truncated Normal for each value, or for each trial.
"""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import gammaln, log_ndtr
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from inference.distributions.truncated_normal import TruncatedNormal

__all__ = ["BinomialProbit", "OrderedProbit"]

FAR = 1e9  # standard deviations, where a tail is 0
CHUNK = 4096  # values whose trials are drawn together


class OrderedProbit(dist.Distribution):
    """P(value = l) = Phi(cutpoints[l] - predictor) - Phi(cutpoints[l - 1] - predictor);
    `cutpoints` are one increasing vector.
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
    def support(self):
        """One value more than there are cutpoints."""
        return constraints.integer_interval(0, self.cutpoints.shape[-1])

    def interval(self, value: Array) -> tuple[Array, Array]:
        """The ends of the interval that a value stands for."""
        infinite = jnp.full(1, jnp.inf, self.cutpoints.dtype)
        ends = jnp.concatenate([-infinite, self.cutpoints, infinite])
        at = jnp.asarray(value, jnp.int32)
        return ends[at], ends[at + 1]

    @validate_sample
    def log_prob(self, value):
        """By the tail that is the smaller one, so that nothing is lost far out."""
        # At infinity log_ndtr has no slope, so that an infinite end becomes a constant far away.
        low, high = (
            jnp.where(jnp.isinf(end), FAR * jnp.sign(end), end - self.predictor)
            for end in self.interval(value)
        )
        is_right = low + high > 0
        above, below = (
            log_ndtr(jnp.where(is_right, -low, high)),
            log_ndtr(jnp.where(is_right, -high, low)),
        )
        return above + jnp.log1p(-jnp.exp(below - above))

    def sample(self, key, sample_shape=()):
        """The interval of a draw of x."""
        x = self.predictor + random.normal(
            key, sample_shape + self.batch_shape, self.predictor.dtype
        )
        return jnp.searchsorted(self.cutpoints, x).astype(jnp.int32)

    def augment(self, rng_key: Array, value: Array) -> tuple[Array, Array]:
        """A draw of x in the interval of the value, and its weight, 1."""
        one = jnp.ones_like(self.predictor)
        return TruncatedNormal(self.predictor, one, *self.interval(value)).sample(rng_key), one


class BinomialProbit(dist.Distribution):
    """Binomial(trials, Phi(predictor))."""

    arg_constraints = {"predictor": constraints.real, "trials": constraints.nonnegative_integer}  # noqa: RUF012
    reparametrized_params = ["predictor"]  # noqa: RUF012

    def __init__(self, predictor, trials, *, validate_args=None):
        # numbers of trials stay as they are given: `support` is then known
        self.predictor, self.trials = jnp.asarray(predictor), trials
        shape = lax.broadcast_shapes(self.predictor.shape, jnp.shape(trials))
        if self.predictor.shape != shape:
            self.predictor = jnp.broadcast_to(self.predictor, shape)
        if jnp.shape(trials) != shape:
            self.trials = jnp.broadcast_to(trials, shape)
        super().__init__(batch_shape=shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self):
        """No more than there were trials."""
        return constraints.integer_interval(0, self.trials)

    @validate_sample
    def log_prob(self, value):
        """The Binomial's, with both tails of Phi in logarithms."""
        trials, value = (
            jnp.asarray(number, self.predictor.dtype) for number in (self.trials, value)
        )
        choose = gammaln(trials + 1.0) - gammaln(value + 1.0) - gammaln(trials - value + 1.0)
        return (
            choose + value * log_ndtr(self.predictor) + (trials - value) * log_ndtr(-self.predictor)
        )

    def sample(self, key, sample_shape=()):
        """The Binomial's."""
        return dist.Binomial(self.trials, jnp.exp(log_ndtr(self.predictor))).sample(
            key, sample_shape
        )

    def augment(self, rng_key: Array, value: Array) -> tuple[Array, Array]:
        """The mean of the x of all trials, of which as many are positive as the value says, and
        their number.

        Values are sorted by their trials, so that those drawn together have about as many.
        """
        dtype, shape = self.predictor.dtype, self.predictor.shape
        predictor, trials, hits = (
            jnp.ravel(jnp.asarray(part)) for part in (self.predictor, self.trials, value)
        )
        order, size = jnp.argsort(trials), max(min(CHUNK, trials.size), 1)
        more = -trials.size % size
        pieces = [
            jnp.pad(part[order], (0, more)).reshape(-1, size) for part in (predictor, trials, hits)
        ]
        total = lax.map(
            lambda piece: self._total(*piece), (random.split(rng_key, len(pieces[0])), *pieces)
        ).reshape(-1)
        total, weight = (
            jnp.zeros_like(predictor).at[order].set(total[: trials.size]),
            trials.astype(dtype),
        )
        return (total / jnp.maximum(weight, 1)).reshape(shape), weight.reshape(shape)

    @staticmethod
    def _total(rng_key, predictor, trials, value):
        """The sum over the trials of each value."""
        one = jnp.ones_like(predictor)

        def more(i, total):
            is_hit = i < value
            low, high = jnp.where(is_hit, 0.0, -jnp.inf), jnp.where(is_hit, jnp.inf, 0.0)
            x = TruncatedNormal(predictor, one, low, high).sample(random.fold_in(rng_key, i))
            return total + jnp.where(i < trials, x, 0.0)

        return lax.fori_loop(0, jnp.max(trials), more, jnp.zeros_like(predictor))
