"""The families of a complete conditional, and how each is read off a log joint.

All sites but one are fixed. The log joint is then a function f of that site alone, and up to a
constant the log density of its complete conditional. Each continuous family has a coordinate t in
which the slope of that density is

    df/dt = p - q * phi(t),          phi increasing,                                            (1)

so that slope and curvature at one point give p and q of every element at once:

    family            t         phi      p          q
    Normal            x         x        mean * q   1 / variance     (also truncated)
    Gamma(a, b)       log x     x        a - 1      b
    InverseGamma      log x     -1 / x   -(a + 1)   b
    Beta(a, b)        logit x   x        a - 1      a + b - 2
    Dirichlet(a)      log x_k   x_k      a_k - 1    sum_k (a_k - 1), one for each simplex

The slope of a simplex is taken along it, through the softmax. A block of dependent Normal elements
has a matrix for q, and takes one more curvature for each element. A discrete site needs no slope:
its log joint at each value gives the odds.

A second point shows whether the site is of the family, with elements that are independent given the
rest. The step to it differs from element to element. There the fitted density and the log joint
must have the same slope, and between the points the same difference: this shows a hard constraint,
which changes no slope. The largest relative gap is the `residual`. It is infinite where the fitted
parameters are invalid.

Cost of a reading: 4 gradients of the log joint for elementwise families, K + 3 for a block of width
K, V * C + 2 log joints for a discrete site of V values with C dependent dimensions; whatever the
number of rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logit
from numpyro.distributions import transforms

from inference.distributions.truncated_normal import TruncatedNormal
from inference.reading.proof import gap

__all__ = [
    "BETA",
    "DIRICHLET",
    "GAMMA",
    "INVERSE_GAMMA",
    "NORMAL",
    "TRUNCATED_NORMAL",
    "BlockNormal",
    "ByColumn",
    "Dirichlet",
    "Elementwise",
    "Family",
    "Finite",
    "SiteDensity",
]

# a complete conditional, and the residual of its reading
type Conditional = tuple[dist.Distribution, Array]


class SiteDensity(NamedTuple):
    """The log joint as a function of one site, or of one column of it, all else fixed."""

    log_joint: Callable[[Array], Array]
    terms: Callable[[Array], Array]  # the log joint by elements of the site's plates [*plates]
    value: Array  # current value of the site
    plate_axes: tuple[int, ...]  # of the value
    low: Any  # bounds of the support, -inf and inf where there are none
    high: Any
    event_dim: int


@dataclass(frozen=True)
class Elementwise:
    """A family of two parameters for each element, by (1)."""

    name: str
    value_of: Callable[[Array], Array]  # x of t
    coordinate_of: Callable[[Array], Array]  # t of x
    statistic: Callable[[Array], Array]  # phi of t
    # (p, q, low, high) -> the distribution, and whether its parameters are valid
    make: Callable[..., tuple[dist.Distribution, Array]]
    bounded: bool = False  # the coordinate ends at low and high
    reach: float = 1.0  # the longest step in t to a second point

    def read(self, site: SiteDensity, rng_key: Array) -> Conditional:
        """The conditional, by slope and curvature at the site's value."""
        here = self.coordinate_of(site.value)
        slope = jax.grad(lambda t: site.log_joint(self.value_of(t)))
        alike = (jnp.ones_like(here),)  # every element moves by the same amount
        (p, bend), (phi, growth) = (
            jax.jvp(function, (here,), alike) for function in (slope, self.statistic)
        )
        q = -bend / growth
        fitted, is_valid = self.make(p + q * phi, q, site.low, site.high)
        fitted = fitted.to_event(site.event_dim)
        # about one or two standard deviations away, to either side, inside the support
        step = jnp.minimum(self.reach, 1 / jnp.sqrt(jnp.abs(bend)))
        end = here + 2 * step * random.rademacher(rng_key, here.shape, here.dtype)
        end = jnp.clip(end, site.low, site.high) if self.bounded else end
        there = here + (end - here) * random.uniform(rng_key, here.shape, here.dtype, 0.3, 0.9)
        return fitted, _residual(site.log_joint, fitted, self.value_of, here, there, is_valid)


_identity = lambda t: t
NORMAL = Elementwise(
    "Normal",
    _identity,
    _identity,
    _identity,
    lambda p, q, low, high: (dist.Normal(p / q, 1 / jnp.sqrt(q), validate_args=False), q > 0),
    reach=jnp.inf,
)
TRUNCATED_NORMAL = Elementwise(
    "truncated Normal",
    _identity,
    _identity,
    _identity,
    lambda p, q, low, high: (
        TruncatedNormal(p / q, 1 / jnp.sqrt(q), low, high, validate_args=False),
        q > 0,
    ),
    bounded=True,
    reach=jnp.inf,
)
GAMMA = Elementwise(
    "Gamma",
    jnp.exp,
    jnp.log,
    jnp.exp,
    lambda p, q, low, high: (dist.Gamma(p + 1, q, validate_args=False), (p > -1) & (q > 0)),
)
INVERSE_GAMMA = Elementwise(
    "inverse Gamma",
    jnp.exp,
    jnp.log,
    lambda t: -jnp.exp(-t),
    lambda p, q, low, high: (dist.InverseGamma(-p - 1, q, validate_args=False), (p < -1) & (q > 0)),
)
BETA = Elementwise(
    "Beta",
    jax.nn.sigmoid,
    logit,
    jax.nn.sigmoid,
    lambda p, q, low, high: (
        dist.Beta(p + 1, q - p + 1, validate_args=False),
        (p > -1) & (q - p > -1),
    ),
)


@dataclass(frozen=True)
class BlockNormal:
    """Normal elements that depend on each other: along the last dimension, or all of the site."""

    whole: bool = False

    @property
    def name(self) -> str:
        """The name in error messages."""
        return (
            "joint Normal of all elements" if self.whole else "joint Normal of the last dimension"
        )

    def read(self, site: SiteDensity, rng_key: Array) -> Conditional:
        """The conditional, by gradient and Hessian of every block; a Newton step gives the mean."""
        shape = site.value.shape
        flat = (-1,) if self.whole else shape
        here = site.value.reshape(flat)
        log_joint = lambda x: site.log_joint(x.reshape(shape))
        slope, curve = jax.linearize(jax.grad(log_joint), here)
        directions = jnp.eye(here.shape[-1], dtype=here.dtype)
        along = lambda direction: curve(jnp.broadcast_to(direction, here.shape))
        columns = jax.vmap(along, out_axes=-1)(directions)
        precision = -(columns + columns.mT) / 2
        root = jnp.linalg.cholesky(precision)
        step = lambda vector: solve_triangular(root, vector[..., None], trans="T", lower=True)[
            ..., 0
        ]
        newton = step(solve_triangular(root, slope[..., None], lower=True)[..., 0])
        normal = dist.MultivariateNormal(
            here + newton, precision_matrix=precision, validate_args=False
        )
        there = here + step(random.uniform(rng_key, here.shape, here.dtype, -2.0, 2.0))
        residual = _residual(log_joint, normal, _identity, here, there, jnp.isfinite(root))
        if self.whole:
            return dist.TransformedDistribution(
                normal, transforms.ReshapeTransform(shape, here.shape)
            ), residual
        return normal.to_event(max(site.event_dim - 1, 0)), residual


@dataclass(frozen=True)
class Dirichlet:
    """Simplexes over the last dimension."""

    name: str = "Dirichlet"

    def read(self, site: SiteDensity, rng_key: Array) -> Conditional:
        """The conditional, by slope and curvature along the simplex; the curvature gives q."""
        here = jnp.log(site.value)
        uneven, other = (
            random.uniform(key, here.shape, here.dtype, -1.0, 1.0) for key in random.split(rng_key)
        )
        weights = lambda t: jax.nn.softmax(t, axis=-1)
        slope = jax.grad(lambda t: site.log_joint(weights(t)))
        p, bend = jax.jvp(slope, (here,), (uneven,))
        phi, growth = jax.jvp(weights, (here,), (uneven,))
        q = -jnp.sum(bend * growth, axis=-1, keepdims=True) / jnp.sum(
            growth**2, axis=-1, keepdims=True
        )
        concentration = p + q * phi + 1
        fitted = dist.Dirichlet(concentration, validate_args=False).to_event(site.event_dim - 1)
        return fitted, _residual(
            site.log_joint, fitted, weights, here, here + other, concentration > 0
        )


DIRICHLET = Dirichlet()


@dataclass(frozen=True)
class Finite:
    """A site of the values 0, ..., num_values - 1: Bernoulli or Categorical."""

    name: str
    num_values: int

    def read(self, site: SiteDensity, rng_key: Array) -> Conditional:
        """The conditional, by log joints at every value."""
        scores = self._scores(site)
        guess = random.categorical(rng_key, jnp.where(jnp.isneginf(scores), -jnp.inf, 0)).astype(
            site.value.dtype
        )
        over = tuple(axis for axis in range(site.value.ndim) if axis not in site.plate_axes)
        score = lambda value: jnp.take_along_axis(scores, value[..., None].astype(int), axis=-1)[
            ..., 0
        ].sum(over)
        rise = site.terms(guess) - site.terms(site.value)
        return self._make(scores).to_event(site.event_dim), gap(
            score(guess) - score(site.value), rise
        )

    def _scores(self, site: SiteDensity) -> Array:
        """Log joint of each element at each value [*shape, num_values], each up to a constant.

        All elements of the site's plates take a value at the same time: they are independent, or
        the residual shows that they are not. Elements of other dimensions take turns.
        """
        shape = site.value.shape
        others = tuple(1 if axis in site.plate_axes else size for axis, size in enumerate(shape))
        turns = jnp.arange(math.prod(others)).reshape(others)

        def score(turn_and_value):
            turn, value = turn_and_value
            return site.terms(
                jnp.where(
                    jnp.broadcast_to(turns == turn, shape),
                    value.astype(site.value.dtype),
                    site.value,
                )
            )

        turn, value = (
            grid.ravel()
            for grid in jnp.meshgrid(turns.ravel(), jnp.arange(self.num_values), indexing="ij")
        )
        scores = lax.map(score, (turn, value))  # [turn * value, *plates]
        free = [axis for axis in range(len(shape)) if axis not in site.plate_axes]
        scores = scores.reshape(*(shape[axis] for axis in free), self.num_values, *scores.shape[1:])
        return jnp.moveaxis(scores, range(scores.ndim), [*free, len(shape), *site.plate_axes])

    def _make(self, scores: Array) -> dist.Distribution:
        if self.name == "Bernoulli":
            largest = jnp.finfo(scores.dtype).max / 4  # 0 * inf is NaN in NumPyro's log_prob
            return dist.Bernoulli(
                logits=jnp.clip(scores[..., 1] - scores[..., 0], -largest, largest),
                validate_args=False,
            )
        return dist.Categorical(logits=jax.nn.log_softmax(scores, axis=-1), validate_args=False)


@dataclass(frozen=True)
class ByColumn:
    """A family whose elements depend on each other along the last dimension.

    They are drawn one column after the other, all rows together.
    """

    family: "Family"

    @property
    def name(self) -> str:
        """The name in error messages."""
        return f"{self.family.name} by column"

    def read(self, site: SiteDensity, rng_key: Array) -> Conditional:
        """The conditional of one column."""
        return self.family.read(site, rng_key)


# hashable, so that it may be static under `jit`
type Family = Elementwise | BlockNormal | Dirichlet | Finite | ByColumn


def _residual(log_joint, fitted, value_of, here: Array, there: Array, is_valid: Array) -> Array:
    """Largest relative gap between the log joint and the fitted log density.

    Slopes at `there` are compared, and differences from `here` to `there`. Slopes are multiplied by
    the step, so that neither depends on the unit of the site.
    """
    model = jax.value_and_grad(lambda t: log_joint(value_of(t)))
    density = jax.value_and_grad(lambda t: fitted.log_prob(value_of(t)).sum())
    (low, _), (high, wanted), (fit_low, _), (fit_high, found) = (
        model(here),
        model(there),
        density(here),
        density(there),
    )
    step = there - here
    rise = gap(fit_high - fit_low, high - low, 1 + jnp.abs(high) + jnp.abs(low))
    return jnp.where(
        jnp.all(is_valid), jnp.maximum(gap(found * step, wanted * step), rise), jnp.inf
    )
