"""A conjugate pair of columns, all of whose functions follow from the densities of its two
distributions.

Let the prior p(phi | h) be linear in its arguments h but for a normaliser, log p(phi | h) = h .
T(phi) - A(h) + const, and a row add F(x) to them. By Bayes' rule, at any point phi,

    log p(x | h) = log p(phi | h) + log p(x | phi) - log p(phi | h + F(x)).

The slope of log p(phi | h) in h is T(phi) - A'(h), and A'(h) is the mean of T. So the slope at some
fixed h0 may serve as the natural parameter eta, and

    E eta = slope(h0, phi) - slope(h, phi),      KL(h | g) = log p(phi | h) - log p(phi | g) - (h -
                                                 g) . slope(h, phi),

again at any point phi: the mean of p(phi | h) where there is one, so that few digits are lost.

Cost of one row against R groups of C columns: three densities for each of R C.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import Distribution, biject_to, constraints

from inference.program.compiling import once
from inference.reading.conjugate.pairs import Columns, refuse_first

__all__ = ["Derived", "derived"]

# one class for all pairs whose priors have these arguments
_hyper_of = cache(lambda names: namedtuple("Hyper", names))
# unconstrained values of the parameter at which linearity is looked at
TRIED = (-1.0, -0.3, 0.4, 1.0)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Derived(Columns):
    """A pair that `inference.register_conjugate` made."""

    prior: type[Distribution]
    rows: Callable[[Any], Any]  # the distribution at a value of the parameter
    terms: tuple[Callable, ...]  # what a row adds to each argument of the prior
    mean: Callable[..., Any]

    def statistics(self, x: Array, hyper: Any) -> Array:
        """What each row adds to the arguments of the prior."""
        each = [jnp.broadcast_to(jnp.asarray(term(x), x.dtype), x.shape) for term in self.terms]
        return jnp.where(jnp.isnan(x)[..., None], 0, jnp.stack(each, -1))

    def cache(self, hyper: Any) -> tuple[Any, Array, Array]:
        """A point, and the prior there."""
        point = self._point(hyper)
        return hyper, point, self.log_prior(hyper, (point,))

    def scores(self, cache: tuple[Any, Array, Array], x: Array) -> Array:
        """Two densities for each group and column, by Bayes' rule."""
        hyper, point, before = cache
        x = jnp.broadcast_to(jnp.asarray(x, point.dtype), point.shape)
        after = self.log_prior(self.add(hyper, x), (point,))
        return jnp.where(jnp.isnan(x), 0, before + self.rows(point).log_prob(x) - after)

    @override
    def log_prior(self, hyper: Any, values: tuple[Array, ...]) -> Array:
        return self._at(hyper).log_prob(values[0])

    @override
    def draw(self, rng_key: Array, hyper: Any) -> tuple[Array, ...]:
        return (self._at(hyper).sample(rng_key),)

    @override
    def draw_row(self, rng_key: Array, hyper: Any) -> Array:
        group_key, row_key = random.split(rng_key)
        (value,) = self.draw(group_key, hyper)
        return self.rows(value).sample(row_key).astype(value.dtype)

    @override
    def mean_row(self, hyper: Any) -> Array:
        return self.mean(*hyper)

    @override
    def refuse(self, site: str, x: np.ndarray, hyper: Any = None) -> None:
        support = self.rows(self.value_at(0.0)).support
        bad = ~np.isnan(x) & ~(np.asarray(support(x)) & np.isfinite(x))
        refuse_first(
            site, x, bad, f"{self.likelihood} takes {support}, or NaN where it is missing."
        )

    def natural(self, values: tuple[Array, ...]) -> Array:
        """Slopes of the log density in the arguments of the prior, at fixed ones."""
        (value,) = values
        return self.slope(self.start(0.0, value), value)

    @partial(jax.jit, static_argnums=0)
    def log_base(self, x: Array) -> Array:
        """What is left of the log density at one value of the parameter."""
        value = jnp.full_like(x, self.value_at(0.0))
        rest = self.rows(value).log_prob(x) - jnp.sum(
            self.statistics(x, None) * self.natural((value,)), -1
        )
        return jnp.where(jnp.isnan(x), 0, rest).sum(-1)

    @override
    def expected(self, hyper: Any) -> Array:
        point = self._point(hyper)
        return self.natural((point,)) - self.slope(hyper, point)

    @override
    def divergence(self, hyper: Any, prior: Any) -> Array:
        point = self._point(hyper)
        step = jnp.stack(hyper, -1) - jnp.stack(prior, -1)
        gap = self.log_prior(hyper, (point,)) - self.log_prior(prior, (point,))
        return jnp.sum(gap - jnp.sum(step * self.slope(hyper, point), -1))

    def _at(self, hyper: Any) -> Any:
        return self.prior(**hyper._asdict(), validate_args=False)

    def _point(self, hyper: Any) -> Array:
        """The mean of the parameter, or where it has none the middle of its support."""
        mean = jnp.asarray(self._at(hyper).mean)
        return jnp.where(jnp.isfinite(mean), mean, self.value_at(jnp.zeros_like(mean)))

    def value_at(self, unconstrained: Any) -> Any:
        """A value of the parameter, from one without bounds."""
        return biject_to(self.prior.support)(jnp.asarray(unconstrained))

    def start(self, unconstrained: float, like: Array) -> Any:
        """Arguments of the prior, each from the same number without bounds, of a shape."""
        at = lambda name: biject_to(self.prior.arg_constraints[name])(
            jnp.full_like(like, unconstrained)
        )
        return self.hyper(*map(at, self.hyper._fields))

    def slope(self, hyper: Any, value: Array) -> Array:
        """Slope of log p(value | hyper) in each argument, [..., argument]."""
        return jnp.stack(
            jax.grad(lambda hyper: jnp.sum(self.log_prior(hyper, (value,))))(hyper), -1
        )


def derived(
    prior: type[Distribution],
    likelihood: type[Distribution],
    rows: Callable[[Any], Distribution],
    statistics: Mapping[str, Callable[[Any], Any]],
    mean: Callable[..., Any],
) -> Derived:
    """The pair; raises ValueError where its functions do not follow from these."""
    name, support = prior.__name__, cast(Any, prior.support)
    if constraints.is_dependent(support) or support.event_dim or support.is_discrete:
        raise ValueError(
            f"prior: found {name}, whose support is {support}; wanted real numbers, their bounds "
            "known."
        )
    if set(statistics) != set(prior.arg_constraints):
        wanted = (
            f"wanted what a row adds to each of {sorted(prior.arg_constraints)}, the "
            f"arguments of {name}"
        )
        raise ValueError(f"statistics: found {sorted(statistics)}; {wanted}.")
    pair = Derived(
        (name,),
        likelihood.__name__,
        _hyper_of(tuple(statistics)),
        prior,
        rows,
        tuple(statistics.values()),
        mean,
    )
    made = rows(pair.value_at(0.0))
    if type(made) is not likelihood or made.event_dim:
        raise ValueError(
            f"rows: found {type(made).__name__}, an event of {made.event_dim} axes; wanted numbers "
            f"of {pair.likelihood}."
        )
    moved = lambda value: pair.slope(pair.start(0.7, value), value) - pair.natural((value,))
    # slopes move alike at all values
    bend = once(lambda: jnp.max(jnp.ptp(moved(pair.value_at(jnp.asarray(TRIED))), axis=0)))()
    if not bend < TOLERANCE:
        raise ValueError(
            f"prior: the log density of {name} is not linear in its arguments "
            f"{sorted(statistics)}, whatever its normaliser: off by "
            f"{bend:.2g}. Write the pair as an object, and give it to "
            "`inference.reading.conjugate.table.put`; "
            f"see inference.register_conjugate."
        )
    return pair
