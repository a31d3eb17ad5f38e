"""The complete conditional of a site, read off the model.

    family = identify(program, "x", values, rng_key)                    # at init: proves or refuses
    distribution, residual = conditional(program, "x", values, family)  # pure; in a compiled loop
    x, residual = draw(rng_key, program, "x", values, family)           # a draw from it

No formula of a model occurs here: after an edit of the model, the new conditional is read, or
`identify` refuses the site.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logit
from numpyro.distributions import constraints, transforms

from inference.distributions.gamma import Gamma
from inference.distributions.truncated_normal import TruncatedNormal
from inference.program.interpreting import interpreted, split
from inference.program.program import Program
from inference.program.sites import StructureError, entry_support, model_name, require
from inference.reading.proof import gap, root_epsilon, worst

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
    "conditional",
    "draw",
    "draw_together",
    "identify",
    "identify_all",
    "identify_among",
    "settings_of",
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
    lambda p, q, low, high: (Gamma(p + 1, q, validate_args=False), (p > -1) & (q > 0)),
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
        p, bend = jax.jvp(jax.grad(lambda t: site.log_joint(weights(t))), (here,), (uneven,))
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
    at = lambda t: (model(t), density(t))
    # compiled once for both points
    ((low, high), (_, wanted)), ((fit_low, fit_high), (_, found)) = lax.map(
        at, jnp.stack([here, there])
    )
    step = there - here
    rise = gap(fit_high - fit_low, high - low, 1 + jnp.abs(high) + jnp.abs(low))
    return jnp.where(
        jnp.all(is_valid), jnp.maximum(gap(found * step, wanted * step), rise), jnp.inf
    )


# The conditional of a site.

MAX_WIDTH = 256  # the most Normal elements drawn jointly, and the most columns drawn in turn
NUM_SETTINGS = 4  # random settings of all sites at which a family must hold
# distributions with a density that is finite all over their support, whatever their parameters
FINITE_DENSITY = {
    "Bernoulli",
    "BernoulliLogits",
    "BernoulliProbs",
    "Beta",
    "BinomialLogits",
    "BinomialProbs",
    "BinomialProbit",
    "Categorical",
    "CategoricalLogits",
    "CategoricalProbs",
    "Cauchy",
    "Dirichlet",
    "Exponential",
    "Gamma",
    "HalfCauchy",
    "HalfNormal",
    "InverseGamma",
    "Laplace",
    "LogNormal",
    "Logistic",
    "MultivariateNormal",
    "Normal",
    "OrderedProbit",
    "Poisson",
    "StudentT",
    "Wishart",
}


def conditional(
    program: Program,
    site: str,
    values,
    family: Family,
    *,
    column=None,
    rng_key: Array | None = None,
):
    """The complete conditional of a site, and the residual of its reading.

    Args:
        program: the model with its data.
        site: the name of the site.
        values: the values of all sites.
        family: the site's family, by `identify`.
        column: under `ByColumn`, which column, `values[site][..., column]`.
        rng_key: places the second point, at which the residual is taken.
    """
    density = _site_density(program, site, values, column)
    return family.read(density, random.key(0) if rng_key is None else rng_key)


def draw(
    rng_key: Array, program: Program, site: str, values, family: Family
) -> tuple[Array, Array]:
    """A draw from the complete conditional of a site, and the largest residual.

    Under `ByColumn` each column is drawn in turn.

    Args:
        rng_key: a key.
        program: the model with its data.
        site: the name of the site.
        values: the values of all sites.
        family: the site's family, by `identify`.
    """
    old = jnp.asarray(values[site])
    if not isinstance(family, ByColumn):
        distribution, residual = conditional(program, site, values, family)
        return distribution.sample(rng_key).astype(old.dtype), residual

    def update(value, column):
        distribution, residual = conditional(
            program, site, {**values, site: value}, family, column=column
        )
        new = distribution.sample(random.fold_in(rng_key, column)).astype(old.dtype)
        return value.at[..., column].set(new), residual

    value, residuals = lax.scan(update, old, jnp.arange(old.shape[-1]))
    return value, residuals.max()


def draw_together(
    rng_key: Array, program: Program, sites: tuple[str, ...], values, family: Family
) -> tuple[dict[str, Array], Array]:
    """Draws of sites that `identify_all` has found together, and the largest residual."""
    if len(sites) == 1:
        value, residual = draw(rng_key, program, sites[0], values, family)
        return {sites[0]: value}, residual
    density, unravel = _joint_density(program, sites, values)
    distribution, residual = family.read(density, random.key(0))
    return unravel(jnp.asarray(distribution.sample(rng_key), density.value.dtype)), residual


def identify_all(
    program: Program, sites: Sequence[str], settings, rng_key: Array
) -> dict[tuple[str, ...], Family]:
    """The family of each site; sites that are drawn together are one key.

    These have one support, and no term of the log joint depends on two of them. So they are
    independent given all others, and one reading and one draw serve all of them.
    """
    found = {}
    groups = _groups(program, sites)
    for key, group in zip(split(rng_key, len(groups)), groups, strict=True):
        if len(group) > 1 and (family := _common_family(program, group, settings, key)):
            found[group] = family
        else:
            found |= {(site,): identify_among(program, site, settings, key) for site in group}
    return found


def _groups(program: Program, sites: Sequence[str]) -> list[tuple[str, ...]]:
    terms = [{name, *parents} for name, parents in program.parents.items()]
    groups: list[list[str]] = []
    for site in sites:
        about = program.sites[site]
        is_apart = lambda other, site=site: not any({site, other} <= term for term in terms)
        for group in groups if isinstance(about.support, type(constraints.positive)) else []:
            if all(program.sites[each].support is about.support for each in group) and all(
                map(is_apart, group)
            ):
                group.append(site)
                break
        else:
            groups.append([site])
    return [tuple(group) for group in groups]


def _common_family(
    program: Program, sites: tuple[str, ...], settings, rng_key: Array
) -> Family | None:
    """The family of all of these sites; None where there is none, or where each must be probed."""
    for site in sites:
        _refuse_early(program, site)
    if not all(_is_finite(program, site) for site in sites):
        return None
    for family in _families(program.sites[sites[0]].support):

        def gaps(setting, family=family):
            density, _ = _joint_density(program, sites, setting)
            residual = lambda key: family.read(density, key)[1]
            return {"": jnp.max(lax.map(residual, random.split(rng_key, 4)))}

        if worst(gaps, settings)[0][""] < root_epsilon():
            return family
    return None


def _joint_density(program: Program, sites: tuple[str, ...], values) -> tuple[SiteDensity, Any]:
    """The log joint as a function of all elements of some sites, and the way back to the sites."""
    flat, unravel = ravel_pytree({site: jnp.asarray(values[site]) for site in sites})
    own = {name for name, parents in program.parents.items() if {name, *parents} & set(sites)}

    def log_joint(x):
        terms = program.log_probs({**values, **unravel(x)})
        return jnp.asarray(sum(jnp.sum(term) for name, term in terms.items() if name in own))

    low, high = (jnp.full_like(flat, bound) for bound in _bounds(program.sites[sites[0]].support))
    return SiteDensity(log_joint, log_joint, flat, (), low, high, 0), unravel


def identify(program: Program, site: str, values, rng_key: Array) -> Family:
    """The family of the complete conditional of a site: the first with which the model agrees.

    It must agree at `values` and at random settings of all sites. A factor or another site may also
    cut off a part of the support of a continuous site: the log joint is -inf beyond the cut, and
    its slope does not show this. So the site alone is moved from `values`, to random values in its
    support and to draws from the conditional that was read. A site for which one of these has a log
    joint of -inf is refused. A cut many standard deviations away may be missed; but then draws of a
    run would hardly cross it either.

    Args:
        program: the model with its data.
        site: the name of the site.
        values: the values of all sites.
        rng_key: for the random settings.

    Raises:
        StructureError: says by how much each family misses.
    """
    _refuse_early(program, site)
    return identify_among(program, site, settings_of(program, values, rng_key), rng_key)


def settings_of(program: Program, values, rng_key: Array):
    """`values` and random values of all sites, where the log joint is finite there."""

    def settings_at(values):
        others = lax.map(program.draw_initial, random.split(rng_key, NUM_SETTINGS))
        both = {
            name: jnp.concatenate([values[name][None], others[name]]) for name in program.latent
        }
        return both, jnp.isfinite(lax.map(program.log_joint, both))

    own = {name: jnp.asarray(values[name]) for name in program.latent}
    settings, is_finite = jax.device_get(interpreted(settings_at, own)(own))
    require(
        is_finite.any(),
        f"{model_name(program.model)}: the log joint is finite neither at the given values nor "
        f"at {NUM_SETTINGS} random ones.",
    )
    return [
        ({name: leaf[i] for name, leaf in settings.items()},) for i in np.flatnonzero(is_finite)
    ]


def identify_among(program: Program, site: str, settings, rng_key: Array) -> Family:
    """`identify` at given settings, by `settings_of`, which may serve many sites."""
    _refuse_early(program, site)
    values = settings[0][0]
    others = {name: value for name, value in values.items() if name != site}
    start = lambda key: program.draw_start(key, others)
    _refuse_cut(program, site, values, start, rng_key, NUM_SETTINGS)
    missed = {}
    for family in _candidates(program, site):
        gaps = lambda setting, family=family: {
            site: _largest_residual(program, site, setting, family, rng_key)
        }
        missed[family] = float(worst(gaps, settings)[0][site])
        if missed[family] < root_epsilon():
            moved = lambda key, family=family: {site: draw(key, program, site, values, family)[0]}
            _refuse_cut(program, site, values, moved, rng_key, 16)
            return family
    raise StructureError(_refusal(program, site, missed))


def _refuse_cut(program: Program, site: str, values, move, rng_key: Array, num_moves: int) -> None:
    """Refuses a continuous site whose support is cut off by a factor or by another site.

    The log joint must not be -inf at any `move(key)[site]`, all other sites at `values`.
    """
    if program.sites[site].is_discrete or _is_finite(program, site):
        return
    log_joint = lambda key: program.log_joint({**values, site: move(key)[site]})
    moved = lambda key: lax.map(log_joint, random.split(key, num_moves))
    require(
        not np.isneginf(interpreted(moved, rng_key)(rng_key)).any(),
        f"site {site!r}: a factor or another site's support cuts its support; the log joint is "
        f"-inf at values that its prior, {program.sites[site].family}, allows. "
        f"{_way_out(program, site)}",
    )


def _is_finite(program: Program, site: str) -> bool:
    """Whether all terms that depend on a site are finite wherever its support is."""
    return all(
        program.sites[name].family in FINITE_DENSITY
        for name, parents in program.parents.items()
        if site in parents and program.sites[name].kind != "deterministic"
    )


def _site_density(program: Program, site: str, values, column) -> SiteDensity:
    about, value = program.sites[site], jnp.asarray(values[site])
    support = entry_support(program.trace(values)[site]["fn"].support)
    number = value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else jnp.result_type(float)
    low, high = (
        jnp.broadcast_to(jnp.asarray(bound, number), value.shape) for bound in _bounds(support)
    )
    dims, event_dim, at = about.dims, about.event_dim, lambda x: x
    if column is not None:
        dims, event_dim = dims[:-1], max(event_dim - 1, 0)
        whole, (value, low, high) = value, (array[..., column] for array in (value, low, high))
        at = lambda x: whole.at[..., column].set(x)
    plates = tuple(name for name in dims if name in about.plates)
    # all other terms are constant
    own = {site, *(name for name, parents in program.parents.items() if site in parents)}

    def log_probs(x):
        found = program.log_probs({**values, site: at(x)})
        return {name: term for name, term in found.items() if name in own}

    return SiteDensity(
        log_joint=lambda x: jnp.asarray(sum(jnp.sum(term) for term in log_probs(x).values())),
        terms=lambda x: _shared_terms(program, plates, log_probs(x)),
        value=value,
        plate_axes=tuple(dims.index(name) for name in plates),
        low=low,
        high=high,
        event_dim=event_dim,
    )


def _shared_terms(program: Program, plates: tuple[str, ...], log_probs: dict[str, Array]) -> Array:
    """The log joint by elements of `plates`.

    Terms inside the plates are summed over all other dimensions; terms outside are added to every
    element. Such a term must not depend on the site, for it is counted more than once; otherwise
    the residual shows it.
    """
    shape, total = tuple(program.plates[name].subsample_size for name in plates), 0.0
    for name, term in log_probs.items():
        site = program.sites[name]
        dims = site.dims[: len(site.shape) - site.event_dim][-term.ndim :] if term.ndim else ()
        dims = ("",) * (term.ndim - len(dims)) + dims
        term = term.sum(tuple(axis for axis, dim in enumerate(dims) if dim not in plates))
        kept = [dim for dim in dims if dim in plates]
        term = term.transpose([kept.index(plate) for plate in plates if plate in kept])
        term = jnp.expand_dims(
            term, [axis for axis, plate in enumerate(plates) if plate not in kept]
        )
        total = total + jnp.broadcast_to(term, shape)
    return jnp.asarray(total)


def _largest_residual(program, site, setting, family, rng_key) -> Array:
    probes = random.split(rng_key, 4)  # keys of the second points

    def residual(column=None):
        return lax.map(
            lambda key: conditional(program, site, setting, family, column=column, rng_key=key)[1],
            probes,
        )

    columns = jnp.arange(program.sites[site].shape[-1]) if isinstance(family, ByColumn) else None
    return jnp.max(residual() if columns is None else lax.map(residual, columns))


def _candidates(program: Program, site: str) -> list[Family]:
    about = program.sites[site]
    support, is_vector = entry_support(about.support), len(about.shape) > 0
    families = _families(support)
    require(
        families,
        f"site {site!r}: {about.family} has the support {support!r}, wanted one of real, "
        f"positive, an interval, a simplex, boolean or 0..n. {_way_out(program, site)}",
    )
    takes_turns = is_vector and 1 < about.shape[-1] <= MAX_WIDTH and families != [DIRICHLET]
    by_column = [ByColumn(family) for family in families] if takes_turns else []
    blocks = []
    if families == [NORMAL] and is_vector:
        blocks += [BlockNormal()] if about.shape[-1] <= MAX_WIDTH else []
        is_small = len(about.shape) > 1 and math.prod(about.shape) <= MAX_WIDTH
        blocks += [BlockNormal(whole=True)] if is_small else []
    return [*families, *blocks, *by_column]


def _families(support) -> list[Family]:
    low, high = _bounds(support)
    starts_at_0, is_unbounded_above = _equals(low, 0), _equals(high, jnp.inf)
    if support is constraints.boolean:
        return [Finite("Bernoulli", 2)]
    if support.is_discrete:
        is_short = starts_at_0 and isinstance(high, int) and high < 1024
        return [Finite("Categorical", high + 1)] if is_short else []
    if support is constraints.real:
        return [NORMAL]
    if support is constraints.simplex:
        return [DIRICHLET]
    if _equals(low, -jnp.inf) and is_unbounded_above:
        return []
    if starts_at_0 and is_unbounded_above:
        return [GAMMA, INVERSE_GAMMA, TRUNCATED_NORMAL]
    is_unit = starts_at_0 and _equals(high, 1)
    return [BETA, TRUNCATED_NORMAL] if is_unit else [TRUNCATED_NORMAL]


def _bounds(support) -> tuple[Any, Any]:
    return getattr(support, "lower_bound", -jnp.inf), getattr(support, "upper_bound", jnp.inf)


def _equals(bound, number) -> bool:
    return not isinstance(bound, jax.ShapeDtypeStruct) and bool(np.all(np.asarray(bound) == number))


def _refuse_early(program: Program, site: str) -> None:
    """Refuses what no residual shows: plates that subsample, supports that depend on the site.

    Neither the rows left out of a plate nor the bounds of a support show in log probabilities.
    """
    require(
        site in program.latent,
        f"site {site!r}: no latent site of {model_name(program.model)}; it has "
        f"{list(program.latent)}.",
    )
    for name, plate in program.plates.items():
        require(
            plate.subsample_size >= plate.size,
            f"site {site!r}: plate {name!r} shows {plate.subsample_size} of {plate.size} rows, "
            "and a complete conditional needs all of them. Drop subsample_size, or use an "
            "algorithm for subsamples.",
        )
    for name, support in program.support_parents.items():
        require(
            site not in support or name == site,
            f"site {site!r}: the support of {name!r} depends on it, which cuts its conditional "
            f"off where {name!r} is. {_way_out(program, site)}",
        )


def _refusal(program: Program, site: str, missed: dict[Family, float]) -> str:
    children = [
        name
        for name, parents in program.parents.items()
        if site in parents and program.sites[name].family
    ]
    relatives = (
        ", ".join(f"{name!r} ({program.sites[name].family})" for name in children) or "no site"
    )
    misses = lambda gap: "is impossible" if gap == jnp.inf else f"misses by {gap:.2g}"
    gaps = ", ".join(
        f"{family.name} {misses(gap)}"
        for family, gap in missed.items()
        if not isinstance(family, ByColumn)
    )
    # a gap that rounding of long sums in float32 may cause
    is_rounded = jnp.result_type(float) == jnp.float32 and min(missed.values()) < 1e-2
    advice = (
        "In float32 sums over many data round; try numpyro.enable_x64(). " if is_rounded else ""
    )
    return (
        f"site {site!r}: its complete conditional is of no family that can be drawn from ({gaps}). "
        f"Its prior is {program.sites[site].family}, and {relatives} depends on it. "
        f"{advice}{_way_out(program, site)}"
    )


def _way_out(program: Program, site: str) -> str:
    if program.sites[site].is_discrete:
        return (
            f"NUTS draws no discrete site: sum {site!r} out of the model, or give all sites to "
            "numpyro.infer.DiscreteHMCGibbs."
        )
    return (
        f"Give {site!r} to NUTS: Gibbs([(ConditionalGibbs(model, ...), [...]), (NUTS(model), "
        "None)])."
    )
