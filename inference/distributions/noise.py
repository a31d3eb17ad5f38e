"""The utility perspective: of K classes the one is chosen whose utility, its mean and a draw of the
noise, is the largest.

| what                      | it is                                                                                  |
|---------------------------|----------------------------------------------------------------------------------------|
| `Choice(utility, noise)`  | the chosen class: softmax for Gumbel noise, multinomial probit for Normal noise        |
| `Below(bound, noise)`     | whether a draw of the noise is below a bound                                           |
| `expectation_nodes(...)`  | nodes z and weights w, so that E[g(noise)] = sum w g(z)                                |
| `log_cdf(noise, value)`   | log P(draw <= value), exact in both tails; `log_cdf.register` takes further families   |

A choice is an integral over the utility t that the chosen class has (its bound, which all others
fall below):

    P(y) = int f(t - psi_y) prod_{k != y} F(t - psi_k) dt = int exp(L(t)) f(t - psi_y) / F(t - psi_y) dt,   L(t) = sum_k log F(t - psi_k)

L is the same for all classes, so that all K probabilities cost nodes x K. Where f has kinks
(Laplace) the quadrature is good to 1e-3, else to the last digits.
"""

from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.scipy.special import betainc
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["Below", "Choice", "expectation_nodes", "log_cdf"]

NUM_NODES = 201
REACH = 5.0  # nodes lie at center + width * sinh(v), |v| up to this
NEGLIGIBLE = -1e4  # of L: nothing is lost where all utilities are hardly ever this low


@singledispatch
def log_cdf(noise: Any, value: Any) -> Array:
    """Log of the distribution function of a NumPyro distribution: its own `log_cdf`, or one that
    is registered for its class.
    """
    own = getattr(noise, "log_cdf", None)
    if own is None:
        raise TypeError(
            f"noise: {type(noise).__name__} has no log_cdf. Give the class one, or register a "
            "function: "
            f"inference.distributions.log_cdf.register({type(noise).__name__}, "
            "function_of_noise_and_value)."
        )
    return own(value)


@log_cdf.register
def _(noise: dist.Gumbel, value: Any) -> Array:
    return -jnp.exp(-(value - noise.loc) / noise.scale)


@log_cdf.register
def _(noise: dist.Logistic, value: Any) -> Array:
    return jax.nn.log_sigmoid((value - noise.loc) / noise.scale)


@log_cdf.register
def _(noise: dist.Laplace, value: Any) -> Array:
    z = jnp.asarray((value - noise.loc) / noise.scale)
    return _two_sided(z, -jnp.abs(z) - jnp.log(2.0).astype(z.dtype))


@log_cdf.register
def _(noise: dist.StudentT, value: Any) -> Array:
    z = jnp.asarray((value - noise.loc) / noise.scale)
    return _log_t_cdf(z, jnp.broadcast_to(jnp.asarray(noise.df, z.dtype), z.shape))


@jax.custom_jvp
def _log_t_cdf(z: Array, df: Array) -> Array:
    half = jnp.full_like(z, 0.5)
    return _two_sided(z, jnp.log(betainc(df / 2, half, df / (df + z * z)) / 2))


def _slope_of_log_t_cdf(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """By the density: that of `betainc` is not a number at z = 0."""
    (z, df), (moved, df_moved) = primals, tangents
    if not isinstance(df_moved, SymbolicZero):
        raise NotImplementedError("StudentT log_cdf: no slope in df; fix the degrees of freedom.")
    value = _log_t_cdf(z, df)
    return value, jnp.exp(dist.StudentT(df).log_prob(z) - value) * _with_zeros(moved, z)


def _with_zeros(tangent: Any, like: Array) -> Array:
    """Zeros where there is no tangent."""
    return jnp.zeros_like(like) if isinstance(tangent, SymbolicZero) else tangent


_log_t_cdf.defjvp(_slope_of_log_t_cdf, symbolic_zeros=True)


def _two_sided(z: Array, log_tail: Array) -> Array:
    """Of a symmetric distribution, from log P(draw < -|z|)."""
    return jnp.where(z < 0, log_tail, jnp.log1p(-jnp.exp(log_tail)))


class Below(dist.Distribution):
    """Whether a draw of `noise` is below `bound`: Bernoulli(F(bound)), in logarithms that lose
    nothing.
    """

    arg_constraints = {"bound": constraints.real}  # noqa: RUF012
    pytree_data_fields = ("noise",)
    reparametrized_params = ["bound"]  # noqa: RUF012
    support = constraints.boolean

    def __init__(self, bound, noise: dist.Distribution, *, validate_args=None):
        shape = lax.broadcast_shapes(jnp.shape(bound), noise.batch_shape)
        self.bound, self.noise = jnp.broadcast_to(jnp.asarray(bound), shape), noise
        super().__init__(batch_shape=shape, validate_args=validate_args)

    @validate_sample
    def log_prob(self, value):
        """log F(bound), or log(1 - F(bound))."""
        log_below = log_cdf(self.noise, self.bound)
        if not isinstance(value, Array) and np.all(value):
            # told before the model runs, so that what is not asked for need not be computed
            return log_below
        log_above = jnp.log(-jnp.expm1(jnp.minimum(log_below, -jnp.finfo(log_below.dtype).tiny)))
        return jnp.where(jnp.asarray(value, bool), log_below, log_above)

    def sample(self, key, sample_shape=()):
        """By a draw of the noise."""
        drawn = jnp.asarray(self.noise.expand(self.batch_shape).sample(key, sample_shape))
        return (drawn <= jnp.broadcast_to(self.bound, drawn.shape)).astype(jnp.int32)


class Choice(dist.Distribution):
    """The class with the largest `utility` [..., class] plus noise, drawn independently for
    each; `noise` is one distribution for all.
    """

    arg_constraints = {"utility": constraints.real_vector}  # noqa: RUF012
    pytree_data_fields = ("noise",)
    reparametrized_params = ["utility"]  # noqa: RUF012

    def __init__(self, utility, noise: dist.Distribution, *, validate_args=None):
        self.utility, self.noise = jnp.asarray(utility), noise
        if self.utility.ndim == 0 or self.utility.shape[-1] < 2:
            raise ValueError(
                f"Choice utility: found shape {self.utility.shape}, wanted [..., class] with two "
                "classes or more."
            )
        if noise.batch_shape or noise.event_shape:
            raise ValueError(
                f"Choice noise: found one of shape {noise.shape()}, wanted one distribution of a "
                "number, for all classes."
            )
        super().__init__(batch_shape=self.utility.shape[:-1], validate_args=validate_args)

    has_enumerate_support = True

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self):
        """Codes of the classes."""
        return constraints.integer_interval(0, self.utility.shape[-1] - 1)

    def enumerate_support(self, expand=True):
        """All classes, along a new first axis."""
        values = jnp.arange(self.utility.shape[-1]).reshape(-1, *(1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, (len(values), *self.batch_shape)) if expand else values

    @validate_sample
    def log_prob(self, value):
        """Log probability of a class."""
        value = jnp.asarray(value, jnp.int32)
        shape = lax.broadcast_shapes(value.shape, self.batch_shape)
        if isinstance(self.noise, dist.Gumbel) or value.ndim > len(self.batch_shape):
            log_probs = jnp.broadcast_to(self.log_probs, (*shape, self.utility.shape[-1]))
            return jnp.take_along_axis(log_probs, jnp.broadcast_to(value, shape)[..., None], -1)[
                ..., 0
            ]
        own = jnp.take_along_axis(self.utility, jnp.broadcast_to(value, shape)[..., None], -1)
        return self._integral(own)[..., 0]

    @property
    def log_probs(self) -> Array:
        """Log probability of each class, [..., class]."""
        return (
            jax.nn.log_softmax(self.utility / self.noise.scale)
            if isinstance(self.noise, dist.Gumbel)
            else self._integral(self.utility)
        )

    def sample(self, key, sample_shape=()):
        """By a draw of the noise of every class."""
        noise = jnp.asarray(self.noise.sample(key, (*sample_shape, *self.utility.shape)))
        return jnp.argmax(jnp.broadcast_to(self.utility, noise.shape) + noise, -1).astype(jnp.int32)

    def _integral(self, own: Array) -> Array:
        """Log probability of classes whose mean utilities are `own` [..., any]."""
        dtype = self.utility.dtype
        place, log_weight = _nodes(self.noise, self.utility.shape[-1], dtype)
        best = lax.stop_gradient(self.utility.max(-1, keepdims=True))

        def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
            t = best + node[0]
            log_all = jnp.sum(log_cdf(self.noise, t - self.utility), -1, keepdims=True)
            counts = log_all > NEGLIGIBLE
            z = jnp.where(counts, t - own, 0.0)
            log_hazard = self.noise.log_prob(z) - log_cdf(self.noise, z)
            term = jnp.where(counts, log_all, 0.0) + log_hazard + node[1]
            return jnp.where(
                counts, jnp.logaddexp(total, jnp.where(counts, term, total)), total
            ), None

        start = jnp.full(own.shape, jnp.finfo(dtype).min / 2, dtype)
        return lax.scan(add, start, (place, log_weight))[0]


def _nodes(noise: dist.Distribution, num_classes: int, dtype: Any) -> tuple[Array, Array]:
    """Places above the best mean utility, and log weights, of a trapezoidal rule for t = center +
    width sinh(v).

    The largest of all utilities has its median between that of the noise and, by the union bound,
    its quantile 1 - 1 / 2K.
    """
    low, middle, high = (_quantile(noise, p, dtype) for p in (0.1, 0.5, 0.9))
    top = -_quantile(noise, 1 / (2 * num_classes), dtype, upper=True)
    center, width = (middle + top) / 2, (top - middle) / 2 + (high - low) / 2
    v = jnp.linspace(-REACH, REACH, NUM_NODES, dtype=dtype)
    return center + width * jnp.sinh(v), jnp.log(width * jnp.cosh(v) * (v[1] - v[0]))


def expectation_nodes(noise: dist.Distribution, num_nodes: int = 101) -> tuple[Array, Array]:
    """Nodes and weights of a trapezoidal rule over one distribution of a number, as far as its
    density counts.
    """
    dtype = jnp.result_type(float)
    low, middle, high = (_quantile(noise, p, dtype) for p in (0.1, 0.5, 0.9))
    v = jnp.linspace(-REACH, REACH, num_nodes, dtype=dtype)
    z = middle + (high - low) / 2 * jnp.sinh(v)
    weight = jnp.cosh(v) * jnp.exp(noise.log_prob(z))
    return z, weight / jnp.sum(weight)


def _quantile(noise: dist.Distribution, p: float, dtype: Any, upper: bool = False) -> Array:
    """By bisection in arcsinh(z), so that noise of any scale is met; `upper`: minus the place
    above which a share p lies.
    """
    log_below = lambda z: log_cdf(noise, z)
    is_above = (
        (lambda z: -jnp.expm1(log_below(-z)) > p) if upper else (lambda z: log_below(z) > np.log(p))
    )

    def halve(_, ends):
        middle = (ends[0] + ends[1]) / 2
        above = is_above(jnp.sinh(middle))
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    ends = jnp.asarray(-30.0, dtype), jnp.asarray(30.0, dtype)
    return jnp.sinh(lax.fori_loop(0, 60, halve, ends)[0])
