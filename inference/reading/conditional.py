"""The complete conditional of a site, read off the model.

    family = identify(program, "x", values, rng_key)                  # once, at init: proves the family or refuses
    distribution, residual = conditional(program, "x", values, family)  # pure; in a compiled loop
    x, residual = draw(rng_key, program, "x", values, family)           # the same, drawn

No formula of the model occurs here: edit the model, and the reading follows or refuses. How a
family is read, and the check that refuses another, stands in `inference.reading.families`.
"""

from dataclasses import dataclass

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
    Family,
    Finite,
    View,
)
from inference.reading.proof import root_epsilon, worst

__all__ = [
    "ByColumn",
    "StructureError",
    "conditional",
    "draw",
    "identify",
    "identify_among",
    "settings_of",
]

MAX_WIDTH = 256  # most Normal elements drawn jointly, most columns that take turns
MAX_VALUES = 1024  # most values of a discrete site
NUM_SETTINGS = 4  # random settings of all sites at which a family must hold
NUM_PROBES = 4  # second points at each
NUM_DRAWS = 16  # draws of the conditional at which the log joint must be finite
WHOLE = {  # densities that are finite all over their support, whatever their parameters
    *(
        "Bernoulli",
        "BernoulliLogits",
        "BernoulliProbs",
        "Beta",
        "BinomialLogits",
        "BinomialProbs",
        "BinomialProbit",
        "Categorical",
    ),
    *(
        "CategoricalLogits",
        "CategoricalProbs",
        "Cauchy",
        "Dirichlet",
        "Exponential",
        "Gamma",
        "HalfCauchy",
        "HalfNormal",
        "InverseGamma",
    ),
    *(
        "Laplace",
        "LogNormal",
        "Logistic",
        "MultivariateNormal",
        "Normal",
        "OrderedProbit",
        "Poisson",
        "StudentT",
        "Wishart",
    ),
}
ROUNDING = 1e-2  # a gap that long sums in float32 may leave


@dataclass(frozen=True)
class ByColumn:
    """Elements that depend on each other along the last dimension: drawn one column after the
    other, all rows together.
    """

    family: Family

    @property
    def name(self) -> str:
        """As an error prints it."""
        return f"{self.family.name} by column"

    def read(self, view: View, rng_key: Array):
        """Reads one column."""
        return self.family.read(view, rng_key)


def conditional(
    program: Program,
    site: str,
    values,
    family: Family,
    *,
    column=None,
    rng_key: Array | None = None,
):
    """The distribution of `site` given all other `values` and the data, with the residual of its
    reading.

    The distribution's draws have the site's shape; under `ByColumn` that of one column,
    `values[site][..., column]`. `rng_key` places the second point that the residual is taken at; it
    has no part in the distribution.
    """
    view = _view(program, site, values, column)
    return family.read(view, random.key(0) if rng_key is None else rng_key)


def draw(
    rng_key: Array, program: Program, site: str, values, family: Family
) -> tuple[Array, Array]:
    """A draw of `site` from its complete conditional (under `ByColumn`: each column in turn),
    and the largest residual met.
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
    """The family of the complete conditional of `site`: the first, of those its support allows,
    that the model agrees with.

    It must agree at `values` and at random settings of all sites. Otherwise StructureError says by
    how much each one misses.

    A factor, or another site, may cut the support of a continuous site: the log joint is -inf
    beyond the cut and has no slope at it. So the site alone is moved, from `values`, to random
    settings inside its support and to draws of the conditional read there, and -inf at one of them
    is refused. A cut that none of them crosses, many deviations away, is not seen; hardly a draw
    would cross it either.
    """
    _refuse_early(program, site)
    return identify_among(program, site, settings_of(program, values, rng_key), rng_key)


def settings_of(program: Program, values, rng_key: Array):
    """`values` and random settings of all sites, those at which the log joint is finite."""

    def drawn(values):
        others = lax.map(program.draw_initial, random.split(rng_key, NUM_SETTINGS))
        settings = {
            name: jnp.concatenate([values[name][None], others[name]]) for name in program.latent
        }
        return settings, jnp.isfinite(lax.map(program.log_joint, settings))

    own = {name: jnp.asarray(values[name]) for name in program.latent}
    settings, is_finite = jax.device_get(once(drawn, own)(own))
    if not is_finite.any():
        raise StructureError(
            f"{model_name(program.model)}: the log joint is finite neither at the given values nor "
            f"at {NUM_SETTINGS} random ones."
        )
    return [
        ({name: leaf[i] for name, leaf in settings.items()},) for i in np.flatnonzero(is_finite)
    ]


def identify_among(program: Program, site: str, settings, rng_key: Array) -> Family:
    """The same at given settings, which may serve many sites."""
    _refuse_early(program, site)
    values = jax.tree.map(jnp.asarray, settings[0][0])
    _refuse_cut(
        program,
        site,
        values,
        lambda key: program.draw_start(key, _others(values, site)),
        rng_key,
        NUM_SETTINGS,
    )
    probes = random.split(rng_key, NUM_PROBES)
    missed = {}
    for family in _candidates(program, site):
        gaps = lambda setting, family=family: {
            site: _largest_residual(program, site, setting, family, probes)
        }
        missed[family] = float(worst(gaps, settings)[0][site])
        if missed[family] < root_epsilon():
            moved = lambda key, family=family: {site: draw(key, program, site, values, family)[0]}
            _refuse_cut(program, site, values, moved, rng_key, NUM_DRAWS)
            return family
    raise StructureError(_refusal(program, site, missed))


def _refuse_cut(program: Program, site: str, values, move, rng_key: Array, num_moves: int) -> None:
    """Refuses a continuous site for which the log joint is -inf at one of `move(key)[site]`, all
    other sites at `values`.
    """
    terms = [
        name
        for name, parents in program.parents.items()
        if site in parents and program.sites[name].kind != "deterministic"
    ]
    if program.sites[site].is_discrete or all(
        program.sites[name].family in WHOLE for name in terms
    ):
        return
    keys = random.split(rng_key, num_moves)
    at = once(
        lambda keys: lax.map(
            lambda key: program.log_joint({**values, site: move(key)[site]}), keys
        ),
        keys,
    )
    if jnp.isneginf(at(keys)).any():
        raise StructureError(
            f"site {site!r}: a factor or another site's support cuts its support; the log joint is "
            "-inf at values that its prior, "
            f"{program.sites[site].family}, allows. {_way_out(program, site)}"
        )


def _others(values, site: str):
    return {name: value for name, value in values.items() if name != site}


def _view(program: Program, site: str, values, column) -> View:
    """The model as a function of `site`, or of one column of it."""
    about, value = program.sites[site], jnp.asarray(values[site])
    support = _base(program.trace(values)[site]["fn"].support)
    number = value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else jnp.result_type(float)
    bounds = (
        getattr(support, name, end)
        for name, end in (("lower_bound", -jnp.inf), ("upper_bound", jnp.inf))
    )
    low, high = (jnp.broadcast_to(jnp.asarray(bound, number), value.shape) for bound in bounds)
    dims, event_dim, at = about.dims, about.event_dim, lambda x: x
    if column is not None:
        dims, event_dim = dims[:-1], max(event_dim - 1, 0)
        whole, (value, low, high) = value, (array[..., column] for array in (value, low, high))
        at = lambda x: whole.at[..., column].set(x)
    plates = tuple(name for name in dims if name in about.plates)
    # all other terms are constant
    near = {site, *(name for name, parents in program.parents.items() if site in parents)}

    def log_probs(x):
        found = program.log_probs({**values, site: at(x)})
        return {name: term for name, term in found.items() if name in near}

    return View(
        log_joint=lambda x: jnp.asarray(sum(jnp.sum(term) for term in log_probs(x).values())),
        terms=lambda x: _shared_terms(program, plates, log_probs(x)),
        value=value,
        plate_axes=tuple(dims.index(name) for name in plates),
        low=low,
        high=high,
        event_dim=event_dim,
    )


def _shared_terms(program: Program, plates: tuple[str, ...], log_probs: dict[str, Array]) -> Array:
    """The log joint split over `plates`: terms inside are summed over all other dimensions, terms
    outside go to every element.

    A term outside the plates that depends on the site would be counted for each element; the
    residual shows it.
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


def _candidates(program: Program, site: str):
    """The families that have the site's support, the cheapest first."""
    about = program.sites[site]
    support, is_vector = _base(about.support), len(about.shape) > 0
    families: list[Family] = _continuous(support)
    if about.is_discrete:
        families = _discrete(support)
    takes_turns = is_vector and 1 < about.shape[-1] <= MAX_WIDTH and families != [DIRICHLET]
    by_column: list[Family] = [ByColumn(family) for family in families] if takes_turns else []
    if families == [NORMAL] and is_vector:
        families += [BlockNormal()] if about.shape[-1] <= MAX_WIDTH else []
        families += (
            [BlockNormal(whole=True)]
            if len(about.shape) > 1 and jnp.size(jnp.zeros(about.shape)) <= MAX_WIDTH
            else []
        )
    if not families:
        raise StructureError(
            f"site {site!r}: {about.family} has the support {support!r}, wanted one of real, "
            "positive, an interval, a simplex, "
            f"boolean or 0..n. {_way_out(program, site)}"
        )
    return families + by_column


def _continuous(support) -> list[Family]:
    if support is constraints.real:
        return [NORMAL]
    if support is constraints.simplex:
        return [DIRICHLET]
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    if low is None and high is None:
        return []
    if high is None and _equals(low, 0.0):
        return [GAMMA, INVERSE_GAMMA, TRUNCATED_NORMAL]
    if _equals(low, 0.0) and _equals(high, 1.0):
        return [BETA, TRUNCATED_NORMAL]
    return [TRUNCATED_NORMAL]


def _discrete(support) -> list[Family]:
    if support is constraints.boolean:
        return [Finite("Bernoulli", 2)]
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    if _equals(low, 0) and isinstance(high, int) and high < MAX_VALUES:
        return [Finite("Categorical", high + 1)]
    return []


def _equals(bound, number) -> bool:
    """Whether a bound is this number, known before the model runs."""
    return not isinstance(bound, jax.ShapeDtypeStruct | None) and bool(
        jnp.all(jnp.asarray(bound) == number)
    )


def _base(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _refuse_early(program: Program, site: str) -> None:
    """What no residual can show: the log probability of a site does not know its support, nor
    the rows left out of a plate.
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
                "and a complete conditional needs "
                f"all of them. Drop subsample_size, or use an algorithm for subsamples."
            )
    for name, support in program.support_parents.items():
        if site in support and name != site:
            raise StructureError(
                f"site {site!r}: the support of {name!r} depends on it, which cuts its conditional "
                f"off where {name!r} is. "
                f"{_way_out(program, site)}"
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
    is_rounded = jnp.result_type(float) == jnp.float32 and min(missed.values()) < ROUNDING
    advice = (
        "In float32 sums over many data round; try numpyro.enable_x64(). " if is_rounded else ""
    )
    return (
        f"site {site!r}: its complete conditional is of no family that can be drawn from ({gaps}). "
        "Its prior is "
        f"{program.sites[site].family}, and {relatives} depends on it. "
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
