"""The table of conjugate pairs, and pairs that are made from two NumPyro distributions.

    priors                                  likelihood           predictive p(x | h)
    Beta(c1, c0)                            BernoulliProbs       c_x / (c1 + c0)
    Dirichlet(c)                            CategoricalProbs     c_x / sum_k c_k
    Gamma(a, b)                             Poisson              negative binomial
    InverseGamma + Normal                   Normal               Student t
    (Inverse)Wishart + MultivariateNormal   MultivariateNormal   multivariate t

Every pair has the methods of `ConjugatePair`. Readers look one up by `pair_of`, and then prove it
against the model's own terms. `register_conjugate` adds a pair to the table. All methods of such a
pair follow from the densities of its two distributions:

Let the log density of the prior be linear in its arguments h but for a normaliser,
log p(phi | h) = h . T(phi) - A(h) + const, and let a row add F(x) to h. By Bayes' rule, at any
point phi,

    log p(x | h) = log p(phi | h) + log p(x | phi) - log p(phi | h + F(x)).

The slope of log p(phi | h) in h is T(phi) - A'(h), and A'(h) is the mean of T. So the slope at some
fixed h0 may serve as the natural parameter eta, and

    E eta = slope(h0, phi) - slope(h, phi),
    KL(h | g) = log p(phi | h) - log p(phi | g) - (h - g) . slope(h, phi),

again at any point phi. The point is the mean of p(phi | h), if it is finite, to lose few digits.

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
from inference.program.sites import StructureError, require
from inference.reading.conjugate.counts import (
    BetaBernoulli,
    BetaHyper,
    DirichletCategorical,
    DirichletHyper,
    GammaHyper,
    GammaPoisson,
)
from inference.reading.conjugate.normal import (
    NormalInverseGamma,
    NormalInverseWishart,
    NormalWishart,
)
from inference.reading.conjugate.pairs import Columns, ConjugatePair, refuse_first

__all__ = [
    "TABLE",
    "BetaBernoulli",
    "BetaHyper",
    "ConjugatePair",
    "Derived",
    "DirichletCategorical",
    "DirichletHyper",
    "GammaHyper",
    "GammaPoisson",
    "NormalInverseGamma",
    "NormalInverseWishart",
    "NormalWishart",
    "derived",
    "pair_of",
    "put",
    "register_conjugate",
]

# cached, so that pairs whose priors have the same arguments share a class of hyper-parameters
_hyper_of = cache(lambda names: namedtuple("Hyper", names))


@dataclass(frozen=True)
class Derived(Columns):
    """A pair that `register_conjugate` makes from two distributions."""

    prior: type[Distribution]
    rows: Callable[[Any], Any]  # the distribution at a value of the parameter
    terms: tuple[Callable, ...]  # what a row adds to each argument of the prior
    mean: Callable[..., Any]  # the mean of the next row, from the arguments of the prior

    @override
    def statistics(self, x: Array, hyper: Any) -> Array:
        each = [jnp.broadcast_to(jnp.asarray(term(x), x.dtype), x.shape) for term in self.terms]
        return jnp.where(jnp.isnan(x)[..., None], 0, jnp.stack(each, -1))

    @override
    def cache(self, hyper: Any) -> tuple[Any, Array, Array]:
        point = self._point(hyper)
        return hyper, point, self.log_prior(hyper, (point,))

    @override
    def scores(self, cache: tuple[Any, Array, Array], x: Array) -> Array:
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

    @override
    def natural(self, values: tuple[Array, ...]) -> Array:
        (value,) = values
        return self.slope(self.start(0.0, value), value)

    @override
    @partial(jax.jit, static_argnums=0)
    def log_base(self, x: Array) -> Array:
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
        """The mean of the parameter; where it has none, the middle of its support."""
        mean = jnp.asarray(self._at(hyper).mean)
        return jnp.where(jnp.isfinite(mean), mean, self.value_at(jnp.zeros_like(mean)))

    def value_at(self, unconstrained: Any) -> Any:
        """Returns the value of the parameter at an unconstrained value."""
        return biject_to(self.prior.support)(jnp.asarray(unconstrained))

    def start(self, unconstrained: float, like: Array) -> Any:
        """Returns arguments of the prior, all at the same unconstrained value.

        Args:
            unconstrained: The value.
            like: An array of the shape and dtype of each argument.
        """
        at = lambda name: biject_to(self.prior.arg_constraints[name])(
            jnp.full_like(like, unconstrained)
        )
        return self.hyper(*map(at, self.hyper._fields))

    def slope(self, hyper: Any, value: Array) -> Array:
        """Returns the slope of log p(value | hyper) in each argument, [..., argument]."""
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
    """Returns the pair of two distributions; the arguments are those of `register_conjugate`."""
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
    # Where the prior is linear, the slopes change by the same amount at all values.
    values = jnp.asarray((-1.0, -0.3, 0.4, 1.0))
    bend = once(lambda: jnp.max(jnp.ptp(moved(pair.value_at(values)), axis=0)))()
    if not bend < 1e-3:
        raise ValueError(
            f"prior: the log density of {name} is not linear in its arguments "
            f"{sorted(statistics)}, whatever its normaliser: off by "
            f"{bend:.2g}. Write the pair as an object, and give it to "
            "`inference.reading.conjugate.table.put`; see inference.register_conjugate."
        )
    return pair


# by the classes of the priors, in alphabetical order, and of the likelihood
TABLE: dict[tuple[tuple[str, ...], str], ConjugatePair] = {}


def put(pair: ConjugatePair) -> None:
    """Puts a pair into the table; it replaces a pair of the same distributions."""
    TABLE[tuple(sorted(pair.priors)), pair.likelihood] = pair


for each in (
    BetaBernoulli(),
    DirichletCategorical(),
    GammaPoisson(),
    NormalInverseGamma(),
    NormalWishart(),
    NormalInverseWishart(),
):
    put(each)


def pair_of(
    site: str, priors: Mapping[str, str], likelihood: str, way_out: str = ""
) -> tuple[tuple[str, ...], ConjugatePair]:
    """Returns the pair of an observed site, and the sites of its parameters in the pair's order.

    Raises StructureError where the table has no such pair.

    Args:
        site: Name of the observed site.
        priors: Class of the distribution of each of the group's parameters, by site.
        likelihood: Class of the distribution of the observed site.
        way_out: End of the error message.
    """
    listed = "; ".join(f"{' + '.join(pair.priors)} -> {pair.likelihood}" for pair in TABLE.values())
    require(
        priors,
        f"site {site!r}: no group parameter is behind its {likelihood}; wanted one of "
        f"{listed}. {way_out}".strip(),
    )
    pair = TABLE.get((tuple(sorted(priors.values())), likelihood))
    if pair is None:
        found = " and ".join(f"{name!r} ~ {kind}" for name, kind in priors.items())
        raise StructureError(
            f"site {site!r}: {likelihood} with {found} is not in the table of conjugate pairs; "
            "register it with "
            f"inference.register_conjugate, see its docstring. In the table: {listed}. "
            f"{way_out}".strip()
        )
    return tuple(
        next(name for name, kind in priors.items() if kind == wanted) for wanted in pair.priors
    ), pair


def register_conjugate(
    prior: type[Distribution],
    likelihood: type[Distribution],
    *,
    statistics: Mapping[str, Callable[[Any], Any]],
    mean: Callable[..., Any],
    rows: Callable[[Any], Distribution] | None = None,
) -> None:
    """Adds a conjugate pair for ParticleFilter, CollapsedGibbs and CoordinateAscent.

    Densities, draws and updates follow from those of the two distributions. When a kernel reads a
    model, it proves the pair against the model's own terms; a wrong statistic makes it refuse the
    model, by the name of the site. A pair that is registered again replaces the earlier one. Raises
    ValueError where the arguments of `prior` are not what rows can be added to.

    A pair of several parameters, or of vectors, is an object with the methods of
    `inference.reading.conjugate.pairs.ConjugatePair`; put it into the table by
    `inference.reading.conjugate.table.put`. `CoordinateAscent` needs the methods of
    `inference.reading.conjugate.pairs.Columns` as well.

    Args:
        prior: Class of the prior of a group's parameter, a number for each column. After a row it
            must be the same distribution with something added to each argument.
        likelihood: Class of the distribution of a row's entries given the parameter.
        statistics: For each argument of the prior a function of the row's entries: what one row
            adds to it.
        mean: Mean of the next row, a function of the prior's arguments in the order of
            `statistics`. It fills in missing entries, and no proof covers it.
        rows: The distribution of the entries given the parameter, where it is not
            `likelihood(parameter)`.

    Waiting times whose rate is unknown, in groups:

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> from inference import CollapsedGibbs, Driver, register_conjugate
    >>> from inference.distributions.partitions import CRP
    >>> register_conjugate(
    ...     dist.Gamma,
    ...     dist.Exponential,
    ...     statistics={"concentration": lambda wait: 1.0, "rate": lambda wait: wait},
    ...     mean=lambda concentration, rate: rate / (concentration - 1),
    ... )
    >>> def waits(x):
    ...     crp = CRP(1.0, len(x))
    ...     z = numpyro.sample("z", crp)
    ...     with numpyro.plate("group", crp.capacity):
    ...         rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     with numpyro.plate("row", len(x)):
    ...         numpyro.sample("x", dist.Exponential(rate[z]), obs=x)
    >>> x = np.array([0.1, 0.2, 9.0, 0.1, 7.0])
    >>> driver = Driver(CollapsedGibbs(waits), num_warmup=20, num_samples=30, progress_bar=False)
    >>> tree = driver.run(0, x)
    >>> tree.posterior["z"].shape  # chain, draw, row
    (1, 30, 5)
    """
    put(derived(prior, likelihood, rows or likelihood, statistics, mean))
