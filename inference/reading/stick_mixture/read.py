"""Finds a truncated stick-breaking mixture of conjugate blocks in a model, and proves it.

    found = read_assignment(program)     # an `Assignment`: the part of each site
    found.prior                          # the hyper-parameters
    found.rows(program)                  # the data by row

    groups      alpha ~ Gamma, or known;  V[h] ~ Beta(1, alpha);  z[i] ~ Categorical(sticks(V))
    tasks       V[j, h];  z[i] ~ Categorical(sticks(V[task[i]])). Tasks may share the parameters of
                groups: c[j, h] ~ Categorical(sticks(U)), U[s] ~ Beta(1, beta), beta ~ Gamma, or
                known. Then a row has the parameters of group c[task[i], z[i]].
    columns     parameters [group, column] and rows with a conjugate likelihood, any `Columns` of
                the table of conjugate pairs
    features    Normal rows whose mean and precision are Normal and (inverse) Wishart; missing
                entries may be latent (ImproperUniform) sites
    experts     t[c, i] ~ Normal(w[c, z[i]] . d[i], 1), where d has features and plain data; a label
                says on which side of 0 each t lies

The reading looks at types, shapes, plates and dependencies only. The proof then computes each
site's log probability from what was read, by the functions that a kernel uses, and compares it with
the model's own at random values, row by row. Hyper-parameters are read at other values.

All rows are compared, because a model may differ on some rows: `mu[z] + 5 * (arange(rows) >= 100)`.
Where the log density of all rows takes more than `MOST` numbers at once (1e4 rows of 44 correlated
features), a part of the rows, spread evenly, is compared as a shorter data set. A difference that
depends on the data of a row is still seen. One that depends on the index of a row, and begins at an
index beyond the length of that data set, is not.

Cost: some traces of the model on at most `FEW` rows, and a few evaluations of its log density on
all rows, at most `MOST` numbers each.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import betaln
from jax.scipy.stats import gamma
from jaxtyping import Float, Int

from inference.program.program import Program, evenly
from inference.program.sites import is_real, model_name, require
from inference.reading.conjugate.pairs import Columns, log_sticks
from inference.reading.conjugate.quadratic import Common, gate_natural
from inference.reading.conjugate.table import NormalWishart, pair_of
from inference.reading.proof import (
    Magnitude,
    at_magnitude,
    further,
    gap_of_numbers,
    gap_of_sums,
    prove,
)
from inference.reading.stick_mixture.structure import (
    WAY_OUT,
    Assignment,
    ConjugateBlock,
    Experts,
    MixtureRows,
    Prior,
    StickLevel,
    event_dim,
    refuse_other_children,
    values_by_group,
    with_class_axis,
)

__all__ = [
    "assignment_and_rows",
    "assignment_site",
    "gaps",
    "many_rows",
    "numbers_of_a_row",
    "prove_for",
    "proved_prior",
    "read_assignment",
    "row_sums",
    "some_rows",
]

FEW = 12  # rows on which sites are told apart, and on which hyper-parameters must be the same
MOST = 20_000_000  # numbers that a proof may take: entries of a row by entries, of all rows
SizedTerm = tuple[Array, Any]  # a log probability, and the sum of its terms' absolute values


def read_assignment(program: Program) -> Assignment:
    """Reads the mixture of a model and proves it; a StructureError names the site that differs."""
    return assignment_and_rows(program)[0]


def assignment_and_rows(program: Program) -> tuple[Assignment, MixtureRows]:
    """The mixture of a model, proved, and the data by row, which the proof needs as well."""
    z = assignment_site(program)
    few = some_rows(program, z, FEW)
    _, sticks, concentration = _level(few, z)
    upper, holes = _upper(few, z), _holes(few)
    require(
        holes == _holes(program),
        f"site {_holes(program)!r}: missing entries, but none in the rows that were looked at; "
        "wanted NaN in an array.",
    )
    of_rows = {z, upper.site if upper else z, holes}
    columns, features = _blocks(few, z, of_rows, holes)
    found = Assignment(
        few, z, sticks, concentration, upper, columns, features, holes, _experts(few, z, of_rows)
    )
    for name in (*few.latent, *few.observed, *few.factors):
        require(
            name in found.known,
            f"site {name!r} ({few.sites[name].family}): {few.sites[name].kind}, and no block of "
            "the mixture reads it; wanted sticks, parameters of groups, rows that depend on "
            f"{z!r}, and soft labels. {WAY_OUT}",
        )
    _refuse_parameters_elsewhere(found)
    _refuse_shared(found)
    compared = many_rows(
        program, z, MOST // numbers_of_a_row(few, features.site if features else None)
    )
    rows = found.rows(compared)
    refusal = partial(_refusal, found, compared)
    found = replace(found, prior=proved_prior(found, compared, rows, gaps, refusal))
    for others in (few, program):
        if others is not compared:
            prove_for(others, found, z, "groups")
    return found, rows if compared is program else found.rows(program)


def numbers_of_a_row(few: Program, correlated: str | None) -> int:
    """About how many numbers the log density of a row needs in memory.

    Args:
        few: The model on a few rows.
        correlated: A site of Normal rows whose covariance differs from row to row, or None.
    """
    sizes = [int(np.prod(few.sites[name].shape[1:])) for name in few.observed]
    return max([1, *sizes, (few.sites[correlated].shape[1] + 1) ** 2 if correlated else 1])


def assignment_site(program: Program) -> str:
    """The site that says which group each row is in."""
    found = [name for name in _indices(program) if len(program.sites[name].shape) == 1]
    require(
        len(found) == 1,
        f"{model_name(program.model)}: found {len(found)} latent Categorical sites of rows "
        f"{found}, wanted one: the group of each row. {WAY_OUT}",
    )
    return found[0]


def _indices(program: Program) -> list[str]:
    is_index = lambda site: site.kind == "latent" and site.family.startswith("Categorical")
    return [name for name, site in program.sites.items() if is_index(site)]


def _level(few: Program, site: str) -> StickLevel:
    parents = sorted(few.parents[site])
    require(
        [few.sites[name].family for name in parents] == ["Beta"],
        f"site {site!r} ({few.sites[site].family}): its probabilities come from {parents}; "
        "wanted one Beta site V, with the weights V_h prod_(l<h) (1 - V_l), the last stick 1. "
        f"{WAY_OUT}",
    )
    above = sorted(few.parents[parents[0]])
    kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in above)
    require(
        all((few.sites[name].family, few.sites[name].shape) == ("Gamma", ()) for name in above)
        and len(above) < 2,
        f"site {parents[0]!r}: its concentration comes from {kinds}; wanted one scalar Gamma, "
        f"or a number. {WAY_OUT}",
    )
    return StickLevel(site, parents[0], above[0] if above else None)


def _upper(few: Program, z: str) -> StickLevel | None:
    found = [name for name in _indices(few) if name != z]
    if not found:
        return None
    level, last = _level(few, found[0]), few.sites[found[-1]]
    *tasks, num_sticks = few.sites[_level(few, z).sticks].shape
    own = (*tasks, num_sticks + 1)
    require(
        last.shape == own
        and len(own) == 2
        and len(found) == len(few.sites[level.sticks].shape) == 1,
        f"site {found[-1]!r} ({last.family}): latent, of shape {last.shape}; wanted, beside "
        f"{z!r}, one index for each task and each of its groups, {own}, drawn by one row of "
        f"sticks. {WAY_OUT}",
    )
    return level


def _holes(few: Program) -> str | None:
    found = [name for name in few.latent if few.sites[name].family == "ImproperUniform"]
    require(
        len(found) < 2, f"sites {found}: several sites of missing entries; wanted one. {WAY_OUT}"
    )
    for name in found:
        require(
            is_real(few.sites[name]),
            f"site {name!r}: missing entries that have bounds; wanted any real numbers. {WAY_OUT}",
        )
    return found[0] if found else None


def _blocks(
    few: Program, z: str, of_rows: set[str | None], holes: str | None
) -> tuple[tuple[ConjugateBlock, ...], ConjugateBlock | None]:
    found = [_block(few, of_rows, name) for name in few.observed if z in few.parents[name]]
    features = [block for block in found if isinstance(block.family, NormalWishart)]
    require(
        len(features) < 2,
        f"sites {[block.site for block in features]}: several sites of correlated features; wanted "
        f"one. {WAY_OUT}",
    )
    columns = tuple(block for block in found if block not in features)
    for block in columns:
        require(
            holes not in few.parents[block.site],
            f"site {block.site!r}: columns that are independent in a group have no latent "
            f"missing entries; wanted Missing(dist...), obs with NaN. {WAY_OUT}",
        )
    require(
        features or not holes,
        f"site {holes!r}: no site of correlated features has these missing entries. {WAY_OUT}",
    )
    return columns, features[0] if features else None


def _block(few: Program, of_rows: set[str | None], site: str) -> ConjugateBlock:
    groups = sorted(few.parents[site] - of_rows, key=few.latent.index)
    hint = (
        "Labels need soft labels, Normal sites of variance 1, of which they are the signs. "
        f"{WAY_OUT}"
    )
    priors, family = pair_of(
        site, {name: few.sites[name].family for name in groups}, few.sites[site].family, hint
    )
    require(
        isinstance(family, Columns | NormalWishart),
        f"site {site!r}: its pair in the table has no mean-field posterior; wanted the methods "
        f"of Columns. {WAY_OUT}",
    )
    return ConjugateBlock(site, priors, family)


def _experts(few: Program, z: str, of_rows: set[str | None]) -> Experts | None:
    below = [name for name in few.latent if z in few.parents[name]]
    if not below:
        return None
    soft = below[0]
    kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in below)
    require(
        len(below) == 1 and few.sites[soft].family == "Normal",
        f"site {below[-1]!r}: latent sites that depend on {z!r}: {kinds}; wanted one Normal "
        f"site of soft labels. {WAY_OUT}",
    )
    labels = [name for name in few.observed if soft in few.parents[name]]
    require(
        [(few.sites[name].family, few.parents[name]) for name in labels] == [("Delta", {soft})],
        f"site {soft!r}: {labels} depend on it; wanted one Delta site, the label, that its "
        f"signs decide. {WAY_OUT}",
    )
    weights = sorted(few.parents[soft] - of_rows)
    require(
        [few.sites[name].family for name in weights] == ["Normal"],
        f"site {soft!r}: its loc is computed from {weights}; wanted one Normal site of "
        f"weights. {WAY_OUT}",
    )
    parents = sorted(few.parents[weights[0]])
    above = {few.sites[name].family: name for name in parents}
    loc, precision = above.get("Normal"), above.get("Gamma")
    require(
        {*parents} == {loc, precision} - {None}
        and not (loc and few.parents[loc] - {precision})
        and not (precision and few.parents[precision]),
        f"site {weights[0]!r}: its prior is computed from {parents}; wanted a Normal loc and a "
        f"Gamma precision, each of them or a number. {WAY_OUT}",
    )
    return Experts(soft, labels[0], weights[0], loc, precision)


def _refuse_parameters_elsewhere(found: Assignment) -> None:
    # Only the sites of its own block may depend on a parameter.
    allowed: dict[Any, set] = {}
    for block in found.blocks:
        allowed |= {name: {block.site, *block.priors} for name in block.priors}
    for level in found.levels:
        allowed |= {level.sticks: {level.site}, level.concentration: {level.sticks}}
    if found.experts:
        soft, label, weights, loc, precision = found.experts
        allowed |= {soft: {label}, weights: {soft}, loc: {weights}, precision: {weights, loc}}
    refuse_other_children(found.few, allowed)


def _refuse_shared(found: Assignment) -> None:
    # Each group, column and weight must have parameters of its own.
    few, num_groups = found.few, found.num_groups
    shape_of = lambda name: few.sites[name].shape
    wanted: dict[str, tuple[int, ...]] = {
        name: (num_groups, *shape_of(block.site)[1:], *shape_of(name)[-1:][: event_dim(few, name)])
        for block in found.columns
        for name in block.priors
    }
    if found.features:
        width = shape_of(found.features.site)[1:]
        wanted |= {
            name: (num_groups, *width * max(event_dim(few, name), 1))
            for name in found.features.priors
        }
    if found.experts:
        soft, _, weights, loc, precision = found.experts
        classes, of_weights = shape_of(soft)[:-1], shape_of(weights)[-1:]
        wanted[weights] = (*classes, num_groups, *of_weights)
        wanted |= {name: (*classes, *of_weights) for name in (loc, precision) if name}
    for name, shape in wanted.items():
        require(
            shape_of(name) == shape,
            f"site {name!r} ({few.sites[name].family}): its shape is {shape_of(name)}, wanted "
            f"{shape}: no parameter that groups, columns, classes or weights share. {WAY_OUT}",
        )


def some_rows(program: Program, z: str, size: int) -> Program:
    """The model on at most `size` of its rows.

    Among them are rows of different labels and rows with missing entries, as far as there are any.
    """
    num_rows = program.sites[z].shape[0]
    if num_rows <= size:
        return program
    return program.on_rows(program.few_rows(num_rows, size), program.by_row(num_rows), z)


def many_rows(program: Program, z: str, size: int) -> Program:
    """The model on about `size` of its rows: `FEW` different ones, and others spread evenly.

    It is on all rows if there are no more.
    """
    num_rows = program.sites[z].shape[0]
    if num_rows <= max(size, FEW):
        return program
    return program.on_rows(
        np.union1d(program.few_rows(num_rows, FEW), evenly(num_rows, size)),
        program.by_row(num_rows),
        z,
    )


# The proof.


def proved_prior(
    found: Any, program: Program, rows: MixtureRows, gaps: Callable, refusal: Callable
) -> Any:
    """The hyper-parameters of a reading, once every identity is proved on a program.

    Args:
        found: An `Assignment`, or another reading with `rows`, `start` and `prior_at`.
        program: The model with its data.
        rows: The data by row.
        gaps: A function of the reading, a program, its rows, the hyper-parameters and values of
            the sites, which returns how far each site is from what was read.
        refusal: The message, by site and gap.
    """

    def compared(some: Program, rows: Any, first: Any, second: Any, size: Magnitude) -> Any:
        # Hyper-parameters are read at the first start, gaps are taken at the second.
        prior = found.prior_at(some, some.constrain(first))
        return gaps(found, some, rows, prior, at_magnitude(some, second, size)), prior

    identities = lambda some: partial(compared, some, rows if some is program else found.rows(some))
    settings = further(partial(found.start, program), rows.features, *rows.columns)
    return prove(identities, settings, refusal, program)[0]


def _refusal(found: Assignment, program: Program, site: str, missed: float) -> str:
    first = "A log probability is not finite: first look at the numbers of the priors. "
    return (
        f"site {site!r} ({program.sites[site].family}): read as {_role(found, site)}, but the "
        f"log probability of the model misses that by {missed:.2g} (relative), in some row or "
        f"at some value. {first if math.isinf(missed) else ''}Look for a parameter that is "
        "transformed, scaled, clipped, shared, masked, or indexed by something else than "
        f"{found.z!r}. Use SVI with an autoguide for this model, or put a conjugate site there."
    )


def prove_for(others: Program, found: Any, site: str, part: str) -> None:
    """Raises StructureError where hyper-parameters differ on the rows of another program.

    Args:
        others: The other program.
        found: The reading with its hyper-parameters.
        site: The site that the error names.
        part: What has the priors, for the error: "groups".
    """
    refusal = lambda site, _: (
        f"site {site!r}: the numbers of the priors of its {part} depend on the rows; wanted "
        "numbers that hold for any rows. Compute them outside of the model, and give them as "
        "arguments."
    )
    tolerance = 1e-4  # relative to each number
    gaps = lambda some, at: {
        site: gap_of_numbers(found.prior_at(some, some.constrain(at)), found.prior, tolerance)
    }
    settings = [(found.start(others, 0),)]
    prove(lambda some: partial(gaps, some), settings, refusal, others, tolerance=tolerance)


def _role(found: Assignment, site: str) -> str:
    for block in found.blocks:
        if site in (block.site, *block.priors):
            priors = ", ".join(map(repr, block.priors))
            return f"{priors} -> {block.family.likelihood} of {found.z!r}"
    soft, label, weights = (found.experts or 3 * ("",))[:3]
    weighed = "stick-breaking weights V_h prod_(l<h) (1 - V_l), the last stick 1"
    roles = {
        soft: f"Normal(w[{found.z}] . features, 1)",
        label: f"the signs of {soft!r}",
        weights: "Normal(zeta, 1 / sqrt(lambda)), the same for every group",
        **{level.site: weighed for level in found.levels},
        **{level.sticks: "Beta(1, alpha)" for level in found.levels},
    }
    return roles.get(site, "its prior")


def gaps(
    found: Assignment, program: Program, rows: MixtureRows, prior: Prior, values: dict[str, Array]
) -> dict[str, Array]:
    """How far each site's log probability in the model is from what was read, in the worst row.

    The terms of all parameters of a block are compared as one sum, under the name of the last.

    Args:
        found: The reading.
        program: The model with its data.
        rows: The data of the program by row.
        prior: The numbers of the priors.
        values: Values of all latent sites; soft labels are changed in place.
    """
    if found.experts:
        # Every other soft label gets the sign that its label requires; the rest may be wrong.
        soft = values[found.experts.soft]
        signs = jnp.asarray(rows.signs.T, soft.dtype).reshape(soft.shape)
        values[found.experts.soft] = jnp.where(
            jnp.arange(soft.shape[-1]) % 2 == 0,
            jnp.where(signs == 0, soft, signs * jnp.abs(soft)),
            soft,
        )
    by_row = {part.site for part in (*found.blocks, *found.levels)} | {*(found.experts or ())[:2]}
    each = program.log_probs(values)
    model = {name: own if name in by_row else jnp.sum(own) for name, own in each.items()}
    group = found.group_of_rows(values, rows.task)
    read = _of_level(found.lower, prior.concentration, values, rows.task)
    if found.upper:
        read |= _of_level(found.upper, prior.upper, values, 0)
    for block, x, hyper in zip(found.columns, rows.columns, prior.columns, strict=True):
        parameters, x = values_by_group(found, block, values), jnp.asarray(x, float)
        terms = block.family.statistics(x, hyper) * block.family.natural(parameters)[group]
        value = terms.sum((1, 2)) + block.family.log_base(x)
        model[block.site] = row_sums(model[block.site], len(group))
        read[block.site] = (value, jnp.abs(terms).sum((1, 2)))
        read |= _of_priors(block, hyper, parameters, model)
    features, extras = jnp.asarray(rows.features, float), jnp.asarray(rows.extras, float)
    if found.holes:
        features = features.at[tuple(rows.holes.T)].set(values[found.holes])
        model[found.holes], read[found.holes] = jnp.sum(each[found.holes]), (jnp.zeros(()), 0.0)
    u = jnp.concatenate([features, jnp.ones((len(features), 1)), extras], 1)
    if found.features:
        parameters = values_by_group(found, found.features, values)
        form = gate_natural(*found.features.family.precision_and_loc(parameters))
        x, const = u[:, : rows.features.shape[1] + 1], form.const[group]
        terms = x[:, :, None] * form.matrix[group] * x[:, None] / 2
        read[found.features.site] = (
            const - terms.sum((1, 2)),
            jnp.abs(const) + jnp.abs(terms).sum((1, 2)),
        )
        read |= _of_priors(found.features, prior.features, parameters, model)
    if found.experts and prior.experts:
        read |= _of_experts(found.experts, rows, prior.experts, values, u, group)
    return {name: gap_of_sums(own, model[name], size) for name, (own, size) in read.items()}


def row_sums(term: Array, num_rows: int) -> Array:
    """The sums of a term over all axes but the first, if that is the rows; else the term."""
    return term.reshape(num_rows, -1).sum(1) if term.shape[:1] == (num_rows,) else term


def _of_level(level: StickLevel, prior: Any, values: Any, row: Any) -> dict[str, SizedTerm]:
    # The terms of a level; `row` says which row of the sticks draws each index.
    V, name = values[level.sticks], level.concentration
    alpha = values[name] if name else prior[0]
    log_weights = jnp.atleast_2d(log_sticks(jnp.log(V), jnp.log1p(-V)))
    read = {
        level.site: (log_weights[row, values[level.site]], 0.0),
        level.sticks: (jnp.sum((alpha - 1) * jnp.log1p(-V) - betaln(1.0, alpha)), 0.0),
    }
    return read | ({name: (_log_gamma(alpha, *prior), 0.0)} if name else {})


def _of_priors(
    block: ConjugateBlock, hyper: Any, parameters: tuple[Array, ...], model: dict[str, Array]
) -> dict[str, SizedTerm]:
    *others, last = block.priors
    model[last] = sum((model[name] for name in others), start=model[last])
    return {
        last: (jnp.sum(block.family.log_prior(jax.tree.map(jnp.asarray, hyper), parameters)), 0.0)
    }


def _of_experts(
    experts: Experts,
    rows: MixtureRows,
    prior: Common,
    values: Any,
    u: Float[Array, "row entry"],
    group: Int[Array, " row"],
) -> dict[str, SizedTerm]:
    soft, label, weights, loc, precision = experts
    w, t = with_class_axis(values[weights], 3), with_class_axis(values[soft], 2)
    terms = w[:, group] * u[:, jnp.asarray(rows.design)][None]
    score = terms.sum(-1)
    is_wrong = ((jnp.asarray(rows.signs.T, t.dtype) * t) < 0).any(0)
    common = with_class_axis(values[precision], 2) if precision else prior.concentration
    centre = with_class_axis(values[loc], 2) if loc else prior.loc
    size = jnp.abs(terms).sum(-1) * (1 + jnp.abs(t - score))
    of_loc = jnp.sum(_log_normal(centre, prior.loc, prior.gamma * common))
    of_precision = jnp.sum(_log_gamma(common, prior.concentration, prior.rate))
    return {
        soft: (_log_normal(t, score, jnp.ones_like(t)), size),
        label: (jnp.where(is_wrong, -jnp.inf, 0.0), 0.0),
        weights: (jnp.sum(_log_normal(w, centre[:, None], common[:, None])), 0.0),
        **({loc: (of_loc, 0.0)} if loc else {}),
        **({precision: (of_precision, 0.0)} if precision else {}),
    }


def _log_normal(x: Array, loc: Any, precision: Any) -> Array:
    return (jnp.log(precision) - math.log(2 * math.pi) - precision * (x - loc) ** 2) / 2


def _log_gamma(x: Any, concentration: Any, rate: Any) -> Array:
    return gamma.logpdf(x, concentration, scale=1 / rate)
