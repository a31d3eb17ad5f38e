"""A conjugate pair of columns, all of whose functions follow from the densities of its two distributions.

Let the prior p(phi | h) be linear in its arguments h but for a normaliser, log p(phi | h) = h . T(phi) - A(h) + const, and a row add
F(x) to them. By Bayes' rule, at any point phi,

    log p(x | h) = log p(phi | h) + log p(x | phi) - log p(phi | h + F(x)).

The slope of log p(phi | h) in h is T(phi) - A'(h), and A'(h) is the mean of T. So the slope at some fixed h0 may serve as the natural
parameter eta, and

    E eta = slope(h0, phi) - slope(h, phi),      KL(h | g) = log p(phi | h) - log p(phi | g) - (h - g) . slope(h, phi),

again at any point phi: the mean of p(phi | h) where there is one, so that few digits are lost.

Cost of one row against R groups of C columns: three densities for each of R C.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import Distribution, biject_to, constraints

from inference._once import once
from inference.mean_field import Columns, arguments, refuse_first

__all__ = ["Derived", "derived"]

Hyper = tuple[Array, ...]  # the arguments of the prior, in the order of `terms`
TRIED = (-1.0, -0.3, 0.4, 1.0)  # unconstrained values of the parameter at which linearity is looked at
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Derived(Columns):
    """A pair that `inference.register_conjugate` made."""

    prior: type[Distribution]
    rows: Callable[[Any], Any]  # the distribution at a value of the parameter
    terms: tuple[tuple[str, Callable], ...]  # arguments of the prior, and what a row adds to each
    mean: Callable[..., Any]

    @override
    def read(self, priors: tuple[Distribution, ...], values: tuple[Array, ...]) -> Hyper:
        return tuple(arguments(priors[0], tuple(name for name, _ in self.terms), values[0]))

    def statistics(self, x: Array, hyper: Any) -> Array:
        """What each row adds to the arguments of the prior."""
        each = [jnp.broadcast_to(jnp.asarray(term(x), x.dtype), x.shape) for _, term in self.terms]
        return jnp.where(jnp.isnan(x)[..., None], 0, jnp.stack(each, -1))

    def cache(self, hyper: Hyper) -> tuple[Hyper, Array, Array]:
        """A point, and the prior there."""
        point = self._point(hyper)
        return hyper, point, self.log_prior(hyper, (point,))

    def scores(self, cache: tuple[Hyper, Array, Array], x: Array) -> Array:
        """Two densities for each group and column, by Bayes' rule."""
        hyper, point, before = cache
        x = jnp.broadcast_to(jnp.asarray(x, point.dtype), point.shape)
        after = self.log_prior(self.add(hyper, x), (point,))
        return jnp.where(jnp.isnan(x), 0, before + self.rows(point).log_prob(x) - after)

    @override
    def log_prior(self, hyper: Hyper, values: tuple[Array, ...]) -> Array:
        return self._at(hyper).log_prob(values[0])

    @override
    def draw(self, rng_key: Array, hyper: Hyper) -> tuple[Array, ...]:
        return (self._at(hyper).sample(rng_key),)

    @override
    def draw_row(self, rng_key: Array, hyper: Hyper) -> Array:
        group_key, row_key = random.split(rng_key)
        (value,) = self.draw(group_key, hyper)
        return self.rows(value).sample(row_key).astype(value.dtype)

    @override
    def mean_row(self, hyper: Hyper) -> Array:
        return self.mean(*hyper)

    @override
    def refuse(self, site: str, x: np.ndarray, hyper: Hyper | None = None) -> None:
        support = self.rows(self.value_at(0.0)).support
        bad = ~np.isnan(x) & ~(np.asarray(support(x)) & np.isfinite(x))
        refuse_first(site, x, bad, f"{self.likelihood} takes {support}, or NaN where it is missing.")

    def natural(self, values: tuple[Array, ...]) -> Array:
        """Slopes of the log density in the arguments of the prior, at fixed ones."""
        (value,) = values
        return self.slope(tuple(jnp.full_like(value, start) for start in self.starts(0.0)), value)

    def log_base(self, x: Array) -> Array:
        """What is left of the log density at one value of the parameter."""
        value = jnp.full_like(x, self.value_at(0.0))
        rest = self.rows(value).log_prob(x) - jnp.sum(self.statistics(x, None) * self.natural((value,)), -1)
        return jnp.where(jnp.isnan(x), 0, rest).sum(-1)

    @override
    def expected(self, hyper: Hyper) -> Array:
        point = self._point(hyper)
        return self.natural((point,)) - self.slope(hyper, point)

    @override
    def divergence(self, hyper: Hyper, prior: Hyper) -> Array:
        point = self._point(hyper)
        step = jnp.stack(hyper, -1) - jnp.stack(prior, -1)
        gap = self.log_prior(hyper, (point,)) - self.log_prior(prior, (point,))
        return jnp.sum(gap - jnp.sum(step * self.slope(hyper, point), -1))

    def _at(self, hyper: Hyper) -> Any:
        return self.prior(**{name: own for (name, _), own in zip(self.terms, hyper, strict=True)}, validate_args=False)

    def _point(self, hyper: Hyper) -> Array:
        """The mean of the parameter, or where it has none the middle of its support."""
        mean = jnp.asarray(self._at(hyper).mean)
        return jnp.where(jnp.isfinite(mean), mean, self.value_at(jnp.zeros_like(mean)))

    def value_at(self, unconstrained: Any) -> Any:
        """A value of the parameter, from one without bounds."""
        return biject_to(self.prior.support)(jnp.asarray(unconstrained))

    def starts(self, unconstrained: float) -> list[Array]:
        """The arguments of a prior, each from the same number without bounds."""
        return [biject_to(self.prior.arg_constraints[name])(jnp.asarray(unconstrained)) for name, _ in self.terms]

    def slope(self, hyper: Hyper, value: Array) -> Array:
        """Slope of log p(value | hyper) in each argument, [..., argument]."""
        return jnp.stack(jax.grad(lambda hyper: jnp.sum(self.log_prior(hyper, (value,))))(hyper), -1)


def derived(
    prior: type[Distribution],
    likelihood: type[Distribution],
    rows: Callable[[Any], Distribution],
    statistics: Mapping[str, Callable[[Any], Any]],
    mean: Callable[..., Any],
) -> Derived:
    """The pair; raises ValueError where its functions do not follow from these."""
    name, support = prior.__name__, prior.support
    if not isinstance(support, constraints.Constraint) or support.event_dim or support.is_discrete:
        raise ValueError(f"prior: found {name}, whose support is {support}; wanted real numbers, their bounds known.")
    if set(statistics) != set(prior.arg_constraints):
        wanted = f"wanted what a row adds to each of {sorted(prior.arg_constraints)}, the arguments of {name}"
        raise ValueError(f"statistics: found {sorted(statistics)}; {wanted}.")
    pair = Derived((name,), likelihood.__name__, prior, rows, tuple(statistics.items()), mean)
    made = rows(pair.value_at(0.0))
    if type(made) is not likelihood or made.event_dim:
        raise ValueError(f"rows: found {type(made).__name__}, an event of {made.event_dim} axes; wanted numbers of {pair.likelihood}.")
    moved = lambda value: pair.slope(tuple(jnp.full_like(value, at) for at in pair.starts(0.7)), value) - pair.natural((value,))
    bend = once(lambda: jnp.max(jnp.ptp(moved(pair.value_at(jnp.asarray(TRIED))), axis=0)))()  # slopes move alike at all values
    if not bend < TOLERANCE:
        raise ValueError(
            f"prior: the log density of {name} is not linear in its arguments {sorted(statistics)}, whatever its normaliser: off by "
            f"{bend:.2g}. Write the pair as an object, and give it to inference.conjugate.put; see inference.register_conjugate."
        )
    return pair
