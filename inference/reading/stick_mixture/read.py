"""Reading a truncated mixture whose every block is conjugate: rows that are assigned to groups, and
what the groups say of them.

    structure = read_assignment(program)          # which sites play which part; or an error that
                                                  names the site
    prior = structure.prior                       # the numbers of the priors
    rows = structure.rows(program)                # the data, one entry a row

    alpha ~ Gamma (or known);  V[h] ~ Beta(1, alpha);  z[i] ~ Categorical(sticks(V))
    tasks:    V[j, h], z[i] ~ Categorical(sticks(V[task[i]])); and where groups of tasks share what
              they say of rows, c[j, h] ~
              Categorical(sticks(U)), U[s] ~ Beta(1, beta), beta ~ Gamma (or known): a row is in
              group c[task[i], z[i]] of all
    columns:  parameters [group, column] and rows with a conjugate likelihood, any `Columns` of the
    table of conjugate pairs features: normal rows, their mean and precision normal and (inverse)
    Wishart; missing entries may be latent (ImproperUniform) sites experts:  t[c, i] ~ Normal(w[c,
    z[i]] . d[i], 1), d made of features and of plain data; a label says on which side of 0 each t
    lies

Only types, shapes, plates and dependencies are read. That the parts then mean what they seem to
mean is proved by writing each site's log probability down from what was read, by the functions that
a kernel then uses, and comparing with the model's own at random values, in each row; the numbers of
the priors are read at other values than those. See `inference.reading.stick_mixture.identities`.

Of data whose log density takes more than `MOST` numbers at once, 1e4 rows of 44 correlated
features, rows spread evenly over all are compared: so many that what happens to a part of the rows,
by their data, is seen, but not what follows the place of a row in the table and begins only beyond
as many places as there are rows compared.

Cost: some traces of the model on at most `FEW` rows; and a few evaluations of its log density on
all rows, at most `MOST` numbers each.

The proof that a mixture was read right: each site's log probability, written down from what was
read by the functions that a kernel uses, equals the model's own at random values, row by row; and
what was read on some rows holds for others.

A model may be another one on some rows: `mu[z] + 5 * (arange(rows) >= 100)`. So all rows are
compared.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import betaln, gammaln

from inference.program.program import Program, evenly
from inference.program.sites import StructureError, is_real, model_name
from inference.reading.conjugate.pairs import Columns, log_sticks
from inference.reading.conjugate.quadratic import Common, Form, gate_natural
from inference.reading.conjugate.table import NormalWishart, pair_of
from inference.reading.proof import (
    Magnitude,
    at_magnitude,
    further,
    gap_of_sums,
    prove,
    prove_numbers,
)
from inference.reading.stick_mixture.structure import (
    Assignment,
    Block,
    Experts,
    Level,
    Prior,
    Rows,
    by_class,
    event_dim,
    precision_and_loc,
    values_by_group,
)

__all__ = [
    "assignment_site",
    "gaps",
    "many_rows",
    "numbers_of_a_row",
    "read_assignment",
    "row_sums",
    "some_rows",
]

# rows that are looked at to tell sites apart, and on which the priors must be those of all rows
FEW = 12
MOST = 20_000_000  # numbers that a proof may take: entries of a row by entries, of all rows
WAY_OUT = "Use SVI with an autoguide for this model, or put there what is wanted."


def read_assignment(program: Program) -> Assignment:
    """Reads and proves; raises StructureError, by the name of the site, where a block is not
    what it looks like.
    """
    z = assignment_site(program)
    few = some_rows(program, z, FEW)
    _, sticks, concentration = _level(few, z)
    upper = _upper(few, z)
    holes = _holes(few)
    if holes != _holes(program):
        raise StructureError(
            f"site {_holes(program)!r}: missing entries, but none in the rows that were looked at; "
            "wanted NaN in an array."
        )
    of_rows = {z, upper.site if upper else z, holes}
    columns, features = _blocks(few, z, of_rows, holes)
    found = Assignment(
        few, z, sticks, concentration, upper, columns, features, holes, _experts(few, z, of_rows)
    )
    for name in (*few.latent, *few.observed, *few.factors):
        if name not in found.known:
            raise StructureError(
                f"site {name!r} ({few.sites[name].family}): {few.sites[name].kind}, and no block "
                "of the mixture reads it; wanted sticks, "
                f"parameters of groups, rows that depend on {z!r}, and soft labels. {WAY_OUT}"
            )
    _refuse_other_children(found)
    _refuse_shared(found)
    compared = many_rows(
        program, z, MOST // numbers_of_a_row(few, features.site if features else None)
    )
    found = replace(found, prior=proved_prior(found, compared))
    for others in (few, program):
        if others is not compared:
            prove_for(others, found)
    return found


def numbers_of_a_row(few: Program, correlated: str | None) -> int:
    """That its log density takes at once, about; `correlated` are normal numbers whose
    covariance differs from row to row.
    """
    sizes = [int(np.prod(few.sites[name].shape[1:])) for name in few.observed]
    return max([1, *sizes, (few.sites[correlated].shape[1] + 1) ** 2 if correlated else 1])


def assignment_site(program: Program) -> str:
    """The site that says which group each row is in."""
    is_row = lambda site: (
        site.kind == "latent" and site.family.startswith("Categorical") and len(site.shape) == 1
    )
    found = [name for name, site in program.sites.items() if is_row(site)]
    if len(found) != 1:
        raise StructureError(
            f"{model_name(program.model)}: found {len(found)} latent Categorical sites of rows "
            f"{found}, wanted one: the group of each row. "
            f"{WAY_OUT}"
        )
    return found[0]


def _level(few: Program, site: str) -> Level:
    """The sticks that indices are drawn by."""
    parents = sorted(few.parents[site])
    if len(parents) != 1 or few.sites[parents[0]].family != "Beta":
        raise StructureError(
            f"site {site!r} ({few.sites[site].family}): its probabilities come from {parents}; "
            "wanted one Beta site V, with the weights "
            f"V_h prod_(l<h) (1 - V_l), the last stick 1. {WAY_OUT}"
        )
    above = sorted(few.parents[parents[0]])
    if not above:
        return Level(site, parents[0], None)
    if len(above) > 1 or few.sites[above[0]].family != "Gamma" or few.sites[above[0]].shape:
        kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in above)
        raise StructureError(
            f"site {parents[0]!r}: its concentration comes from {kinds}; wanted one scalar Gamma, "
            f"or a number. {WAY_OUT}"
        )
    return Level(site, parents[0], above[0])


def _upper(few: Program, z: str) -> Level | None:
    """Groups of tasks that are themselves assigned."""
    is_index = lambda site: site.kind == "latent" and site.family.startswith("Categorical")
    found = [name for name, site in few.sites.items() if is_index(site) and name != z]
    if not found:
        return None
    level = _level(few, found[0])
    own, shape = (
        (
            *few.sites[_level(few, z).sticks].shape[:-1],
            few.sites[_level(few, z).sticks].shape[-1] + 1,
        ),
        few.sites[found[0]].shape,
    )
    if len(found) > 1 or shape != own or len(own) != 2 or len(few.sites[level.sticks].shape) != 1:
        raise StructureError(
            f"site {found[-1]!r} ({few.sites[found[-1]].family}): latent, of shape "
            f"{few.sites[found[-1]].shape}; wanted, beside {z!r}, one "
            f"index for each task and each of its groups, {own}, drawn by one row of sticks. "
            f"{WAY_OUT}"
        )
    return level


def _holes(few: Program) -> str | None:
    found = [name for name in few.latent if few.sites[name].family == "ImproperUniform"]
    if len(found) > 1:
        raise StructureError(
            f"site {found[1]!r}: beside {found[0]!r} a second site of missing entries; wanted one. "
            f"{WAY_OUT}"
        )
    if found and not is_real(few.sites[found[0]]):
        raise StructureError(
            f"site {found[0]!r}: missing entries that have bounds; wanted any real numbers. "
            f"{WAY_OUT}"
        )
    return found[0] if found else None


def _blocks(
    few: Program, z: str, of_rows: set[str | None], holes: str | None
) -> tuple[tuple[Block, ...], Block | None]:
    """The columns, and the features, of which there is at most one site."""
    found = [_block(few, of_rows, name) for name in few.observed if z in few.parents[name]]
    features = [block for block in found if isinstance(block.family, NormalWishart)]
    if len(features) > 1:
        raise StructureError(
            f"site {features[1].site!r}: beside {features[0].site!r} a second one of correlated "
            f"features. {WAY_OUT}"
        )
    for block in found:
        if holes in few.parents[block.site] and block not in features:
            raise StructureError(
                f"site {block.site!r}: columns that are independent in a group have no latent "
                "missing entries; wanted "
                f"Missing(dist...), obs with NaN. {WAY_OUT}"
            )
    return tuple(block for block in found if block not in features), features[
        0
    ] if features else None


def _block(few: Program, of_rows: set[str | None], site: str) -> Block:
    groups = sorted(few.parents[site] - of_rows, key=few.latent.index)
    kinds = {name: few.sites[name].family for name in groups}
    hint = (
        "Labels need soft labels, Normal sites of variance 1, of which they are the signs. "
        f"{WAY_OUT}"
    )
    priors, family = pair_of(site, kinds, few.sites[site].family, hint)
    if not isinstance(family, Columns | NormalWishart):
        raise StructureError(
            f"site {site!r}: its pair in the table has no mean-field posterior; wanted the methods "
            f"of Columns. {WAY_OUT}"
        )
    return Block(site, priors, family)


def _experts(few: Program, z: str, of_rows: set[str | None]) -> Experts | None:
    below = [name for name in few.latent if z in few.parents[name]]
    if not below:
        return None
    soft = below[0]
    if len(below) > 1 or few.sites[soft].family != "Normal":
        kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in below)
        raise StructureError(
            f"site {below[-1]!r}: latent sites that depend on {z!r}: {kinds}; wanted one Normal "
            f"site of soft labels. {WAY_OUT}"
        )
    labels = [name for name in few.observed if soft in few.parents[name]]
    if (
        len(labels) != 1
        or few.sites[labels[0]].family != "Delta"
        or few.parents[labels[0]] != {soft}
    ):
        raise StructureError(
            f"site {soft!r}: {labels} depend on it; wanted one Delta site, the label, that its "
            f"signs decide. {WAY_OUT}"
        )
    weights = sorted(few.parents[soft] - of_rows)
    if len(weights) != 1 or few.sites[weights[0]].family != "Normal":
        raise StructureError(
            f"site {soft!r}: its loc is computed from {weights}; wanted one Normal site of "
            f"weights. {WAY_OUT}"
        )
    above = {few.sites[name].family: name for name in sorted(few.parents[weights[0]])}
    loc, precision = above.pop("Normal", None), above.pop("Gamma", None)
    if (
        above
        or len(few.parents[weights[0]]) > 2
        or (loc and few.parents[loc] - {precision})
        or (precision and few.parents[precision])
    ):
        raise StructureError(
            f"site {weights[0]!r}: its prior is computed from {sorted(few.parents[weights[0]])}; "
            "wanted a Normal loc and a Gamma "
            f"precision, each of them or a number. {WAY_OUT}"
        )
    return Experts(soft, labels[0], weights[0], loc, precision)


def _refuse_other_children(found: Assignment) -> None:
    """A parameter must tell of nothing but its own block."""
    few = found.few
    allowed: dict[str, set[str]] = {}
    for block in (*found.columns, *([found.features] if found.features else [])):
        allowed |= {name: {block.site, *block.priors} for name in block.priors}
    for level in (found.lower, *([found.upper] if found.upper else [])):
        allowed[level.sticks] = {level.site}
        allowed |= {level.concentration: {level.sticks}} if level.concentration else {}
    if found.experts:
        soft, label, weights, loc, precision = found.experts
        allowed |= {soft: {label}, weights: {soft}}
        allowed |= {name: {weights, *([loc] if loc else [])} for name in (loc, precision) if name}
    for name, parents in few.parents.items():
        if few.sites[name].kind == "deterministic":
            continue
        for parent in parents & set(allowed):
            if name not in allowed[parent]:
                raise StructureError(
                    f"site {name!r} ({few.sites[name].family}): it depends on {parent!r}, which "
                    "was read as part of "
                    f"{sorted(allowed[parent])}. {WAY_OUT}"
                )


def _refuse_shared(found: Assignment) -> None:
    """Each group, column and weight has parameters of its own."""
    few, wanted = found.few, {}
    for block in found.columns:
        sizes = (found.num_groups, *few.sites[block.site].shape[1:])
        wanted |= {
            name: (*sizes, *few.sites[name].shape[-1:][: event_dim(few, name)])
            for name in block.priors
        }
    if found.features:
        width = few.sites[found.features.site].shape[1:]
        for name in found.features.priors:
            wanted[name] = (found.num_groups, *width * (1 + (event_dim(few, name) == 2)))
    if found.experts:
        soft, _, weights, loc, precision = found.experts
        classes, of_weights = few.sites[soft].shape[:-1], few.sites[weights].shape[-1:]
        wanted[weights] = (*classes, found.num_groups, *of_weights)
        wanted |= {name: (*classes, *of_weights) for name in (loc, precision) if name}
    for name, shape in wanted.items():
        if few.sites[name].shape != shape:
            raise StructureError(
                f"site {name!r} ({few.sites[name].family}): its shape is {few.sites[name].shape}, "
                f"wanted {shape}: no parameter that "
                f"groups, columns, classes or weights share. {WAY_OUT}"
            )


def some_rows(program: Program, z: str, size: int) -> Program:
    """The model on `size` of its rows, of different labels and with missing entries where it can
    be told.
    """
    num_rows = program.sites[z].shape[0]
    if num_rows <= size:
        return program
    return program.on_rows(program.few_rows(num_rows, size), program.by_row(num_rows), z)


def many_rows(program: Program, z: str, size: int) -> Program:
    """The model on about `size` of its rows, or on all if there are no more: `FEW` different
    ones, and others spread evenly.
    """
    num_rows = program.sites[z].shape[0]
    if num_rows <= max(size, FEW):
        return program
    rows = np.union1d(program.few_rows(num_rows, FEW), evenly(num_rows, size))
    return program.on_rows(rows, program.by_row(num_rows), z)


def proved_prior(found: Assignment, program: Program) -> Prior:
    """The numbers of the priors; raises StructureError, by the name of the site, where a block is
    not what it looks like on the rows of `program`.
    """
    rows = found.rows(program)

    def refusal(site: str, missed: float) -> str:
        first = (
            "First look at the numbers of the priors, for a log probability is not finite. "
            if math.isinf(missed)
            else ""
        )
        return (
            f"site {site!r} ({program.sites[site].family}): read as {_role(found, site)}, but the "
            "log probability of the model "
            f"misses that by {missed:.2g} (relative), in some row or at some value. {first}Look "
            "for a parameter that is transformed, "
            f"scaled, clipped, shared, masked, or indexed by something else than {found.z!r}. Use "
            "SVI with an autoguide for this "
            f"model, or put a conjugate site there."
        )

    identities = lambda some: partial(
        _compared, found, some, rows if some is program else found.rows(some)
    )
    return prove(
        identities,
        further(partial(found.start, program), rows.features, *rows.columns),
        refusal,
        program,
    )[0]


def _compared(
    found: Assignment, program: Program, rows: Rows, first: Any, second: Any, size: Magnitude
) -> tuple[dict[str, Array], Prior]:
    """The gaps at the second start, by the numbers of the priors at the first; and these."""
    prior = found.prior_at(program, program.constrain(first))
    return gaps(found, program, rows, prior, at_magnitude(program, second, size)), prior


def prove_for(others: Program, found: Assignment) -> None:
    """Raises StructureError where the numbers of a prior are different ones on other rows."""
    refusal = lambda site, _: (
        f"site {site!r}: the numbers of the priors of its groups follow the rows; wanted numbers "
        "that hold for any rows. Compute "
        f"them outside of the model, and give them as arguments."
    )
    prove_numbers(found.z, found.prior, found.prior_at, found.start, others, refusal)


def _role(found: Assignment, site: str) -> str:
    for block in (*found.columns, *([found.features] if found.features else [])):
        if site in (block.site, *block.priors):
            return (
                f"{', '.join(map(repr, block.priors))} -> {block.family.likelihood} of {found.z!r}"
            )
    roles = {}
    for level in (found.lower, *([found.upper] if found.upper else [])):
        roles |= {
            level.site: "stick-breaking weights V_h prod_(l<h) (1 - V_l), the last stick 1",
            level.sticks: "Beta(1, alpha)",
        }
    if found.experts:
        roles[found.experts.soft] = f"Normal(w[{found.z}] . features, 1)"
        roles[found.experts.label] = f"the signs of {found.experts.soft!r}"
        roles[found.experts.weights] = "Normal(zeta, 1 / sqrt(lambda)), the same for every group"
    return roles.get(site, "its prior")


def gaps(
    found: Assignment, program: Program, rows: Rows, prior: Prior, values: dict[str, Array]
) -> dict[str, Array]:
    """How far what was read is from the model, in the worst row: for each site, or for the first
    of several in one block.
    """
    # half of the soft labels on the side where they have to be, others likely on the wrong one
    if found.experts:
        soft = values[found.experts.soft]
        signs = (
            by_class(jnp.asarray(rows.signs.T, soft.dtype), soft.ndim)
            if soft.ndim == 2
            else jnp.asarray(rows.signs[:, 0], soft.dtype)
        )
        right = jnp.where(signs == 0, soft, signs * jnp.abs(soft))
        values[found.experts.soft] = jnp.where(jnp.arange(soft.shape[-1]) % 2 == 0, right, soft)
    each = program.log_probs(values)
    model = {name: each[name] if name in found.by_row else jnp.sum(each[name]) for name in each}
    group = found.group_of_rows(values, rows.task)
    read = _of_level(found.lower, prior.concentration, values, rows.task)
    if found.upper:
        read |= _of_level(found.upper, prior.upper, values, 0)
    for block, x, hyper in zip(found.columns, rows.columns, prior.columns, strict=True):
        model[block.site] = row_sums(model[block.site], len(group))
        read[block.site] = _of_columns(
            block, jnp.asarray(x, float), hyper, values_by_group(found, block, values), group
        )
        read |= _of_priors(found, block, hyper, values, model)
    u = entries(found, rows, values)
    if found.features:
        hyper = jax.tree.map(jnp.asarray, prior.features)
        read[found.features.site] = _form_at(
            gate_natural(*precision_and_loc(found.features, values)),
            u[:, : _width(rows) + 1],
            group,
        )
        read |= _of_priors(found, found.features, hyper, values, model)
    if found.experts:
        read |= _of_experts(found, rows, prior.experts, values, u, group)
    if found.holes:
        model[found.holes], read[found.holes] = jnp.sum(each[found.holes]), Read(jnp.zeros(()))
    return {name: gap_of_sums(own.value, model[name], own.size) for name, own in read.items()}


class Read(NamedTuple):
    """A log probability from what was read, and how large the terms are that it is a sum of."""

    value: Array
    size: Any = 0.0  # [row], or one for all


def row_sums(term: Array, num_rows: int) -> Array:
    """The sum of a term over each row, where rows are its first axis; else the term as it is."""
    return term.reshape(num_rows, -1).sum(1) if term.shape[:1] == (num_rows,) else term


def _of_columns(
    block: Block, x: Array, hyper: Any, values: tuple[Array, ...], group: Array
) -> Read:
    """[row]."""
    terms = block.family.statistics(x, hyper) * block.family.natural(values)[group]
    return Read(terms.sum((1, 2)) + block.family.log_base(x), jnp.abs(terms).sum((1, 2)))


def _of_level(level: Level, prior: Any, values: Any, row: Any) -> dict[str, Read]:
    """`row` of the sticks draws each index."""
    V, alpha = (
        values[level.sticks],
        values[level.concentration] if level.concentration else prior[0],
    )
    weights = jnp.atleast_2d(log_sticks(jnp.log(V), jnp.log1p(-V)))
    read = {
        level.site: Read(weights[row, values[level.site]]),
        level.sticks: Read(jnp.sum((alpha - 1) * jnp.log1p(-V) - betaln(1.0, alpha))),
    }
    return read | (
        {level.concentration: Read(_log_gamma(alpha, *prior))} if level.concentration else {}
    )


def _width(rows: Rows) -> int:
    return rows.features.shape[1]


def entries(found: Assignment, rows: Rows, values: Any) -> Array:
    """u = (features, 1, extras) of each row, the missing entries at `values`."""
    features = jnp.asarray(rows.features, float)
    if found.holes:
        features = features.at[tuple(rows.holes.T)].set(values[found.holes])
    return jnp.concatenate(
        [features, jnp.ones((len(features), 1)), jnp.asarray(rows.extras, float)], 1
    )


def _of_priors(
    found: Assignment, block: Block, hyper: Any, values: Any, model: dict[str, Array]
) -> dict[str, Read]:
    """The terms of a block's parameters, together under the name of the last."""
    parameters = tuple(values[name] for name in block.priors)
    if block in found.columns:
        parameters = values_by_group(found, block, values)
    *others, last = block.priors
    model[last] = sum((model[name] for name in others), start=model[last])
    return {
        last: Read(jnp.sum(block.family.log_prior(jax.tree.map(jnp.asarray, hyper), parameters)))
    }


def _form_at(form: Form, u: Array, group: Array) -> Read:
    """[row]."""
    terms = u[:, :, None] * form.matrix[group] * u[:, None] / 2
    return Read(
        form.const[group] - terms.sum((1, 2)),
        jnp.abs(form.const[group]) + jnp.abs(terms).sum((1, 2)),
    )


def _of_experts(
    found: Assignment, rows: Rows, prior: Common | None, values: Any, u: Array, group: Array
) -> dict[str, Read]:
    assert found.experts is not None
    assert prior is not None
    soft, label, weights, loc, precision = found.experts
    w, t = by_class(values[weights], 3), by_class(values[soft], 2)
    terms = w[:, group] * u[:, jnp.asarray(rows.design)][None]
    score = terms.sum(-1)
    is_wrong = ((jnp.asarray(rows.signs.T, t.dtype) * t) < 0).any(0)
    common = by_class(values[precision], 2) if precision else prior.concentration
    centre = by_class(values[loc], 2) if loc else prior.loc
    read = {
        soft: Read(
            _log_normal(t, score, jnp.ones_like(t)),
            jnp.abs(terms).sum(-1) * (1 + jnp.abs(t - score)),
        ),
        label: Read(jnp.where(is_wrong, -jnp.inf, 0.0)),
        weights: Read(jnp.sum(_log_normal(w, centre[:, None], common[:, None]))),
    }
    if precision:
        read[precision] = Read(jnp.sum(_log_gamma(common, prior.concentration, prior.rate)))
    if loc:
        read[loc] = Read(jnp.sum(_log_normal(centre, prior.loc, prior.gamma * common)))
    return read


def _log_normal(x: Array, loc: Any, precision: Any) -> Array:
    return (jnp.log(precision) - math.log(2 * math.pi) - precision * (x - loc) ** 2) / 2


def _log_gamma(x: Any, concentration: Any, rate: Any) -> Array:
    return (
        concentration * jnp.log(rate)
        - gammaln(concentration)
        + (concentration - 1) * jnp.log(x)
        - rate * x
    )
