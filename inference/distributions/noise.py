"""Discrete choice: of K classes the one with the largest utility, a mean plus noise, is chosen.

| name                     | what it is                                                            |
|--------------------------|-----------------------------------------------------------------------|
| `Choice(utility, noise)` | the chosen class; Gumbel noise: softmax, normal: multinomial probit   |
| `Below(bound, noise)`    | whether a draw of the noise is below a bound                          |
| `expectation_nodes(...)` | nodes z and weights w of a quadrature: E[g(noise)] = sum w g(z)       |
| `log_cdf(noise, value)`  | log P(draw <= value), exact in both tails; `log_cdf.register` extends |

With psi the mean utilities, f the density of the noise and F its distribution function, the
probability of class y is an integral over the utility t of the chosen class, below which all
others are:

    P(y) = int f(t - psi_y) prod_{k != y} F(t - psi_k) dt
         = int exp(L(t)) f(t - psi_y) / F(t - psi_y) dt,     L(t) = sum_k log F(t - psi_k)

L is the same for all classes, so all K probabilities cost O(nodes x K). The quadrature is accurate
to rounding where f is smooth, and to 1e-3 where f has kinks (Laplace).
"""

from functools import singledispatch
from typing import Any, override

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

NEGLIGIBLE = -1e4  # values of L below which a node adds nothing to the integral


@singledispatch
def log_cdf(noise: Any, value: Any) -> Array:
    """Returns the log distribution function of a noise.

    It is the distribution's own `log_cdf`, or the function that is registered for its class.

    Args:
        noise: A NumPyro distribution of a number.
        value: Where the function is evaluated.
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


def _log_t_cdf_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative by the density: that of `betainc` is not a number at z = 0."""
    (z, df), (z_tangent, df_tangent) = primals, tangents
    if not isinstance(df_tangent, SymbolicZero):
        raise NotImplementedError(
            "StudentT log_cdf: no derivative in df; fix the degrees of freedom."
        )
    value = _log_t_cdf(z, df)
    slope = jnp.exp(dist.StudentT(df).log_prob(z) - value)
    return value, jnp.zeros_like(z) if isinstance(z_tangent, SymbolicZero) else slope * z_tangent


_log_t_cdf.defjvp(_log_t_cdf_jvp, symbolic_zeros=True)


def _two_sided(z: Array, log_tail: Array) -> Array:
    """The log distribution function of a symmetric distribution, from log P(draw < -|z|)."""
    return jnp.where(z < 0, log_tail, jnp.log1p(-jnp.exp(log_tail)))


class Below(dist.Distribution):
    """Whether a draw of `noise` is below `bound`: Bernoulli(F(bound)), accurate in both tails.

    Args:
        bound: The bound.
        noise: A NumPyro distribution of a number.
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {"bound": constraints.real}  # noqa: RUF012
    pytree_data_fields = ("noise",)
    reparametrized_params = ["bound"]  # noqa: RUF012
    support = constraints.boolean

    def __init__(self, bound, noise: dist.Distribution, *, validate_args=None):
        shape = lax.broadcast_shapes(jnp.shape(bound), noise.batch_shape)
        self.bound, self.noise = jnp.broadcast_to(jnp.asarray(bound), shape), noise
        super().__init__(batch_shape=shape, validate_args=validate_args)

    @override
    @validate_sample
    def log_prob(self, value):
        log_below = log_cdf(self.noise, self.bound)
        if not isinstance(value, Array) and np.all(value):
            return log_below  # a constant value is known while tracing: log_above is not computed
        log_above = jnp.log(-jnp.expm1(jnp.minimum(log_below, -jnp.finfo(log_below.dtype).tiny)))
        return jnp.where(jnp.asarray(value, bool), log_below, log_above)

    @override
    def sample(self, key, sample_shape=()):
        drawn = jnp.asarray(self.noise.expand(self.batch_shape).sample(key, sample_shape))
        return (drawn <= jnp.broadcast_to(self.bound, drawn.shape)).astype(jnp.int32)


class Choice(dist.Distribution):
    """The class with the largest utility, whose noise is drawn independently for each class.

    Args:
        utility: Mean utilities, [..., class], of two classes or more.
        noise: One NumPyro distribution of a number, for all classes.
        validate_args: As for NumPyro's distributions.
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
    @override
    def support(self):
        return constraints.integer_interval(0, self.utility.shape[-1] - 1)

    @override
    def enumerate_support(self, expand=True):
        values = jnp.arange(self.utility.shape[-1]).reshape(-1, *(1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, (len(values), *self.batch_shape)) if expand else values

    @override
    @validate_sample
    def log_prob(self, value):
        value = jnp.asarray(value, jnp.int32)
        shape = lax.broadcast_shapes(value.shape, self.batch_shape)
        index = jnp.broadcast_to(value, shape)[..., None]
        if isinstance(self.noise, dist.Gumbel) or value.ndim > len(self.batch_shape):
            log_probs = jnp.broadcast_to(self.log_probs, (*shape, self.utility.shape[-1]))
            return jnp.take_along_axis(log_probs, index, -1)[..., 0]
        return self._integral(jnp.take_along_axis(self.utility, index, -1))[..., 0]

    @property
    def log_probs(self) -> Array:
        """Log probability of each class, [..., class]."""
        if isinstance(self.noise, dist.Gumbel):
            return jax.nn.log_softmax(self.utility / self.noise.scale)
        return self._integral(self.utility)

    @override
    def sample(self, key, sample_shape=()):
        noise = jnp.asarray(self.noise.sample(key, (*sample_shape, *self.utility.shape)))
        return jnp.argmax(jnp.broadcast_to(self.utility, noise.shape) + noise, -1).astype(jnp.int32)

    def _integral(self, own: Array) -> Array:
        """Log probability of classes whose mean utilities are `own` [..., any].

        The largest of all utilities has its median between that of the noise and, by the union
        bound, its quantile 1 - 1 / 2K above the best mean utility.
        """
        dtype = self.utility.dtype
        middle, width = _center_and_width(self.noise, dtype)
        top = -_quantile(self.noise, 1 / (2 * self.utility.shape[-1]), dtype, upper=True)
        center, width = (middle + top) / 2, (top - middle) / 2 + width
        v = jnp.linspace(-5.0, 5.0, 201, dtype=dtype)
        best = lax.stop_gradient(self.utility.max(-1, keepdims=True))

        def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
            t = best + node[0]
            log_all = jnp.sum(log_cdf(self.noise, t - self.utility), -1, keepdims=True)
            counts = log_all > NEGLIGIBLE
            z = jnp.where(counts, t - own, 0.0)
            log_hazard = self.noise.log_prob(z) - log_cdf(self.noise, z)
            log_all = jnp.where(counts, log_all, -jnp.inf)
            return jnp.logaddexp(total, log_all + log_hazard + node[1]), None

        nodes = center + width * jnp.sinh(v), jnp.log(width * jnp.cosh(v) * (v[1] - v[0]))
        return lax.scan(add, jnp.full(own.shape, jnp.finfo(dtype).min / 2, dtype), nodes)[0]


def expectation_nodes(noise: dist.Distribution, num_nodes: int = 101) -> tuple[Array, Array]:
    """Returns nodes and weights of a trapezoidal rule for expectations over the noise.

    Args:
        noise: One distribution of a number.
        num_nodes: Number of nodes.
    """
    dtype = jnp.result_type(float)
    middle, width = _center_and_width(noise, dtype)
    v = jnp.linspace(-5.0, 5.0, num_nodes, dtype=dtype)
    z = middle + width * jnp.sinh(v)
    weight = jnp.cosh(v) * jnp.exp(noise.log_prob(z))
    return z, weight / jnp.sum(weight)


def _center_and_width(noise: dist.Distribution, dtype: Any) -> tuple[Array, Array]:
    """The median, and half the distance of the quantiles .1 and .9."""
    low, middle, high = (_quantile(noise, p, dtype) for p in (0.1, 0.5, 0.9))
    return middle, (high - low) / 2


def _quantile(noise: dist.Distribution, p: float, dtype: Any, upper: bool = False) -> Array:
    """The quantile p; with `upper`, minus the quantile 1 - p.

    By bisection in arcsinh(z), so that the noise may have any scale.
    """
    is_above = lambda z: (
        -jnp.expm1(log_cdf(noise, -z)) > p if upper else log_cdf(noise, z) > np.log(p)
    )

    def halve(_, ends):
        middle = (ends[0] + ends[1]) / 2
        above = is_above(jnp.sinh(middle))
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    ends = jnp.asarray(-30.0, dtype), jnp.asarray(30.0, dtype)
    return jnp.sinh(lax.fori_loop(0, 60, halve, ends)[0])
