"""The proof that a mixture was read right: each site's log probability, written down from what was
read by the functions that a kernel uses, equals the model's own at random values, row by row; and
what was read on some rows holds for others.

A model may be another one on some rows: `mu[z] + 5 * (arange(rows) >= 100)`. So all rows are
compared.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import betaln, gammaln

from inference.program.program import Program
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import Common, Form, gate_natural
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
    Level,
    Prior,
    Rows,
    by_class,
)

__all__ = [
    "Read",
    "entries",
    "gaps",
    "precision_and_loc",
    "prove_for",
    "proved_prior",
    "row_sums",
    "values_by_group",
]


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


def values_by_group(found: Assignment, block: Block, values: Any) -> tuple[Array, ...]:
    """The parameters of a block of columns [group, column, ...]."""
    return tuple(found.by_column(values[name], block) for name in block.priors)


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


def precision_and_loc(block: Block, values: Any) -> tuple[Array, Array]:
    """The parameters of the features, their precision whichever of it and its inverse the model
    has.
    """
    return block.family.precision_and_loc(tuple(values[name] for name in block.priors))


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
