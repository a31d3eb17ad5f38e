"""The complete conditional of a site, read off the model.

    family = identify(program, "x", values, rng_key)                    # at init: proves or refuses
    distribution, residual = conditional(program, "x", values, family)  # pure; in a compiled loop
    x, residual = draw(rng_key, program, "x", values, family)           # a draw from it

No formula of a model occurs here: after an edit of the model, the new conditional is read, or
`identify` refuses the site. `inference.reading.families` reads and checks each family.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import constraints

from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import StructureError, model_name
from inference.reading.families import (
    BETA,
    DIRICHLET,
    GAMMA,
    INVERSE_GAMMA,
    NORMAL,
    TRUNCATED_NORMAL,
    BlockNormal,
    ByColumn,
    Family,
    Finite,
    SiteDensity,
)
from inference.reading.proof import root_epsilon, worst

__all__ = [
    "StructureError",
    "conditional",
    "draw",
    "identify",
    "identify_among",
    "settings_of",
]

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
    settings, is_finite = jax.device_get(once(settings_at, own)(own))
    if not is_finite.any():
        raise StructureError(
            f"{model_name(program.model)}: the log joint is finite neither at the given values nor "
            f"at {NUM_SETTINGS} random ones."
        )
    return [
        ({name: leaf[i] for name, leaf in settings.items()},) for i in np.flatnonzero(is_finite)
    ]


def identify_among(program: Program, site: str, settings, rng_key: Array) -> Family:
    """`identify` at given settings, by `settings_of`, which may serve many sites."""
    _refuse_early(program, site)
    values = jax.tree.map(jnp.asarray, settings[0][0])
    others = {name: value for name, value in values.items() if name != site}
    start = lambda key: program.draw_start(key, others)
    _refuse_cut(program, site, values, start, rng_key, NUM_SETTINGS)
    probes = random.split(rng_key, 4)  # keys of the second points at each setting
    missed = {}
    for family in _candidates(program, site):
        gaps = lambda setting, family=family: {
            site: _largest_residual(program, site, setting, family, probes)
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
    terms = [
        name
        for name, parents in program.parents.items()
        if site in parents and program.sites[name].kind != "deterministic"
    ]
    if program.sites[site].is_discrete or all(
        program.sites[name].family in FINITE_DENSITY for name in terms
    ):
        return
    keys = random.split(rng_key, num_moves)
    log_joint = lambda key: program.log_joint({**values, site: move(key)[site]})
    if jnp.isneginf(once(lambda keys: lax.map(log_joint, keys), keys)(keys)).any():
        raise StructureError(
            f"site {site!r}: a factor or another site's support cuts its support; the log joint is "
            f"-inf at values that its prior, {program.sites[site].family}, allows. "
            f"{_way_out(program, site)}"
        )


def _site_density(program: Program, site: str, values, column) -> SiteDensity:
    about, value = program.sites[site], jnp.asarray(values[site])
    support = _base(program.trace(values)[site]["fn"].support)
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


def _largest_residual(program, site, setting, family, probes) -> Array:
    def residual(column=None):
        return lax.map(
            lambda key: conditional(program, site, setting, family, column=column, rng_key=key)[1],
            probes,
        )

    columns = jnp.arange(program.sites[site].shape[-1]) if isinstance(family, ByColumn) else None
    return jnp.max(residual() if columns is None else lax.map(residual, columns))


def _candidates(program: Program, site: str) -> list[Family]:
    about = program.sites[site]
    support, is_vector = _base(about.support), len(about.shape) > 0
    families = _families(support)
    if not families:
        raise StructureError(
            f"site {site!r}: {about.family} has the support {support!r}, wanted one of real, "
            f"positive, an interval, a simplex, boolean or 0..n. {_way_out(program, site)}"
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
    return not isinstance(bound, jax.ShapeDtypeStruct) and bool(
        jnp.all(jnp.asarray(bound) == number)
    )


def _base(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _refuse_early(program: Program, site: str) -> None:
    """Refuses what no residual shows: plates that subsample, supports that depend on the site.

    Neither the rows left out of a plate nor the bounds of a support show in log probabilities.
    """
    if site not in program.latent:
        raise StructureError(
            f"site {site!r}: no latent site of {model_name(program.model)}; it has "
            f"{list(program.latent)}."
        )
    for name, plate in program.plates.items():
        if plate.subsample_size < plate.size:
            raise StructureError(
                f"site {site!r}: plate {name!r} shows {plate.subsample_size} of {plate.size} rows, "
                "and a complete conditional needs all of them. Drop subsample_size, or use an "
                "algorithm for subsamples."
            )
    for name, support in program.support_parents.items():
        if site in support and name != site:
            raise StructureError(
                f"site {site!r}: the support of {name!r} depends on it, which cuts its conditional "
                f"off where {name!r} is. {_way_out(program, site)}"
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
