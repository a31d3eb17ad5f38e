"""The proof that a mixture was read right: each site's log probability, written down from what was read by the functions that a kernel
uses, equals the model's own at random values, row by row; and what was read on some rows holds for others.

A model may be another one on some rows, at large values, or at small ones: `mu[z] + 5 * (arange(rows) >= 100)`, `clip(score, -5, 5)`,
`maximum(alpha, 0.1)`, `clip(p, 0.1, 0.9)`. So all rows are compared, at values of several magnitudes, from a thousandth to beyond what the
data hold, and probabilities from about .0025 to .9975."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import betaln, gammaln
from numpyro.distributions import constraints

from inference._assignment_rows import Rows, by_class
from inference.compiling import once
from inference.mean_field import log_sticks
from inference.quadratic import Common, Form, gate_natural
from inference.sites import StructureError

if TYPE_CHECKING:
    from inference._assignment_parts import Assignment, Block, Level, Prior
    from inference.program import Program

__all__ = [
    "NUM_PROOFS",
    "Magnitude",
    "at_magnitude",
    "entries",
    "gaps",
    "magnitudes",
    "numbers_that_hold",
    "precision_and_loc",
    "prove",
    "prove_for",
    "row_sums",
    "values_by_group",
    "worst_gap",
]

NUM_PROOFS = 5
FAR = 1000.0  # times the largest number of the data, or times 1: the largest magnitude of values
SOME = 8  # entries along an axis that are spread
TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
ROUNDING = 100.0  # machine epsilons of the terms of a sum, which may be much larger than it is


def prove(found: "Assignment", program: "Program") -> "Prior":
    """The numbers of the priors; raises StructureError, by the name of the site, where a block is not what it looks like on the rows of
    `program`."""
    rows = found.rows(program)

    def compared(first: Any, second: Any, size: "Magnitude") -> tuple["Prior", dict[str, Array]]:
        prior = found.prior_at(program, program.constrain(first))
        return prior, gaps(found, program, rows, prior, at_magnitude(program, second, size))

    def refusal(site: str, gap: float) -> str:
        first = "First look at the numbers of the priors, for a log probability is no number. " if math.isnan(gap) else ""
        return (
            f"site {site!r} ({program.sites[site].family}): read as {_role(found, site)}, but the log probability of the model "
            f"misses that by {gap:.2g} (relative), in some row or at some value. {first}Look for a parameter that is transformed, scaled, "
            f"clipped, shared, masked, or indexed by something else than {found.z!r}. Use SVI with an autoguide for this model, or put a "
            f"conjugate site there."
        )

    starts = [found.start(program, seed) for seed in range(NUM_PROOFS + 1)]
    return numbers_that_hold(compared, starts, magnitudes(rows.features, *rows.columns), refusal)


class Magnitude(NamedTuple):
    """Of values without bounds how many times as large they are made, of others how far they are spread towards their bounds."""

    size: Any
    spread: Any


def magnitudes(*data: np.ndarray) -> list[Magnitude]:
    """One for each proof; the largest is far beyond the data, but its fourth power is a number."""
    largest = max((np.abs(part[np.isfinite(part)]).max(initial=1.0) for part in data), default=1.0)
    most = float(jnp.finfo(jnp.result_type(float)).max) ** 0.2
    far = max(min(FAR * largest, most / largest), 1.0)
    return [Magnitude(1.0, 1.0), Magnitude(10.0, 3.0), Magnitude(far, 6.0), Magnitude(0.03, 6.0), Magnitude(1e-3, 3.0)]


def at_magnitude(program: "Program", unconstrained: dict[str, Array], magnitude: Magnitude) -> dict[str, Array]:
    """Values of all latent sites."""
    latent = {name: program.sites[name] for name in unconstrained if not program.sites[name].is_discrete}
    bounded = {name for name, site in latent.items() if not _is_scalable(site.support)}
    stretched = {name: _some_times(value, magnitude.spread) if name in bounded else value for name, value in unconstrained.items()}
    scaled = lambda name, value: value * magnitude.size.astype(value.dtype) if name in latent and name not in bounded else value
    return {name: scaled(name, value) for name, value in program.constrain(stretched).items()}


def _some_times(value: Array, factor: Array) -> Array:
    """Some eight along the last axis: of many sticks all near a bound the weights would be too small for a number."""
    length = value.shape[-1] if value.ndim else 1
    some = jnp.arange(length) % max(1, length // SOME) == 0
    return jnp.where(some if value.ndim else True, value * factor.astype(value.dtype), value)


def _is_scalable(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support in (constraints.real, constraints.positive, constraints.positive_definite)


def numbers_that_hold(compared: Callable, starts: Sequence[Any], sizes: Sequence[Magnitude], refusal: Callable[[str, float], str]) -> Any:
    """The numbers `compared` reads at the first start; raises StructureError where they miss the model, a gap of a site, at another."""
    each = [Magnitude(*(jnp.asarray(part, float) for part in size)) for size in sizes]
    compiled = once(compared, starts[0], starts[1], each[0])
    for start, size in zip(starts[1:], each, strict=True):
        numbers, missed = jax.device_get(compiled(starts[0], start, size))
        for site, gap in missed.items():
            if not gap < TOLERANCE[gap.dtype.name]:
                raise StructureError(refusal(site, gap))
    return numbers


def prove_for(others: "Program", found: "Assignment") -> None:
    """Raises StructureError where the numbers of a prior are different ones on other rows."""
    mine, theirs = (jax.tree.leaves(prior) for prior in (found.prior, found.prior_on(others)))
    if any(a.shape != b.shape or not np.allclose(a, b, rtol=1e-4) for a, b in zip(mine, theirs, strict=True)):
        raise StructureError(
            f"site {found.z!r}: the numbers of the priors of its groups follow the rows; wanted numbers that hold for any rows. Compute "
            f"them outside of the model, and give them as arguments."
        )


def _role(found: "Assignment", site: str) -> str:
    for block in (*found.columns, *([found.features] if found.features else [])):
        if site in (block.site, *block.priors):
            return f"{', '.join(map(repr, block.priors))} -> {block.family.likelihood} of {found.z!r}"
    roles = {}
    for level in (found.lower, *([found.upper] if found.upper else [])):
        roles |= {level.site: "stick-breaking weights V_h prod_(l<h) (1 - V_l), the last stick 1", level.sticks: "Beta(1, alpha)"}
    if found.experts:
        roles[found.experts.soft] = f"Normal(w[{found.z}] . features, 1)"
        roles[found.experts.label] = f"the signs of {found.experts.soft!r}"
        roles[found.experts.weights] = "Normal(zeta, 1 / sqrt(lambda)), the same for every group"
    return roles.get(site, "its prior")


def gaps(found: "Assignment", program: "Program", rows: Rows, prior: "Prior", values: dict[str, Array]) -> dict[str, Array]:
    """Of each site, or of the first of several that are one block, how far what was read is from the model, in the worst row."""
    if found.experts:  # half of the soft labels on the side where they have to be, others likely on the wrong one
        soft = values[found.experts.soft]
        signs = by_class(jnp.asarray(rows.signs.T, soft.dtype), soft.ndim) if soft.ndim == 2 else jnp.asarray(rows.signs[:, 0], soft.dtype)
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
        read[block.site] = _of_columns(block, jnp.asarray(x, float), hyper, values_by_group(found, block, values), group)
        read |= _of_priors(found, block, hyper, values, model)
    u = entries(found, rows, values)
    if found.features:
        hyper = jax.tree.map(jnp.asarray, prior.features)
        read[found.features.site] = _form_at(gate_natural(*precision_and_loc(found.features, values)), u[:, : _width(rows) + 1], group)
        read |= _of_priors(found, found.features, hyper, values, model)
    if found.experts:
        read |= _of_experts(found, rows, prior.experts, values, u, group)
    if found.holes:
        model[found.holes], read[found.holes] = jnp.sum(each[found.holes]), Read(jnp.zeros(()))
    return {name: worst_gap(model[name], *own) for name, own in read.items()}


class Read(NamedTuple):
    """A log probability from what was read, and how large the terms are that it is a sum of."""

    value: Array
    size: Any = 0.0  # [row], or one for all


def row_sums(term: Array, num_rows: int) -> Array:
    """Of a site whose rows come first; one sum where the site does not tell them apart."""
    return term.reshape(num_rows, -1).sum(1) if term.shape[:1] == (num_rows,) else term


def _of_columns(block: "Block", x: Array, hyper: Any, values: tuple[Array, ...], group: Array) -> Read:
    """[row]."""
    terms = block.family.statistics(x, hyper) * block.family.natural(values)[group]
    return Read(terms.sum((1, 2)) + block.family.log_base(x), jnp.abs(terms).sum((1, 2)))


def _of_level(level: "Level", prior: Any, values: Any, row: Any) -> dict[str, Read]:
    """`row` of the sticks draws each index."""
    V, alpha = values[level.sticks], values[level.concentration] if level.concentration else prior[0]
    weights = jnp.atleast_2d(log_sticks(jnp.log(V), jnp.log1p(-V)))
    read = {
        level.site: Read(weights[row, values[level.site]]),
        level.sticks: Read(jnp.sum((alpha - 1) * jnp.log1p(-V) - betaln(1.0, alpha))),
    }
    return read | ({level.concentration: Read(_log_gamma(alpha, *prior))} if level.concentration else {})


def _width(rows: Rows) -> int:
    return rows.features.shape[1]


def entries(found: "Assignment", rows: Rows, values: Any) -> Array:
    """u = (features, 1, extras) of each row, the missing entries at `values`."""
    features = jnp.asarray(rows.features, float)
    if found.holes:
        features = features.at[tuple(rows.holes.T)].set(values[found.holes])
    return jnp.concatenate([features, jnp.ones((len(features), 1)), jnp.asarray(rows.extras, float)], 1)


def values_by_group(found: "Assignment", block: "Block", values: Any) -> tuple[Array, ...]:
    """The parameters of a block of columns [group, column, ...]."""
    return tuple(found.by_column(values[name], block) for name in block.priors)


def _of_priors(found: "Assignment", block: "Block", hyper: Any, values: Any, model: dict[str, Array]) -> dict[str, Read]:
    """The terms of a block's parameters, together under the name of the last."""
    parameters = tuple(values[name] for name in block.priors)
    if block in found.columns:
        parameters = values_by_group(found, block, values)
    *others, last = block.priors
    model[last] = sum((model[name] for name in others), start=model[last])
    return {last: Read(jnp.sum(block.family.log_prior(jax.tree.map(jnp.asarray, hyper), parameters)))}


def precision_and_loc(block: "Block", values: Any) -> tuple[Array, Array]:
    """The parameters of the features, their precision whichever of it and its inverse the model has."""
    return block.family.precision_and_loc(tuple(values[name] for name in block.priors))


def _form_at(form: Form, u: Array, group: Array) -> Read:
    """[row]."""
    terms = u[:, :, None] * form.matrix[group] * u[:, None] / 2
    return Read(form.const[group] - terms.sum((1, 2)), jnp.abs(form.const[group]) + jnp.abs(terms).sum((1, 2)))


def _of_experts(found: "Assignment", rows: Rows, prior: Common | None, values: Any, u: Array, group: Array) -> dict[str, Read]:
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
        soft: Read(_log_normal(t, score, jnp.ones_like(t)), jnp.abs(terms).sum(-1) * (1 + jnp.abs(t - score))),
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
    return concentration * jnp.log(rate) - gammaln(concentration) + (concentration - 1) * jnp.log(x) - rate * x


def worst_gap(model: Array, read: Array, size: Any) -> Array:
    """The largest of all rows, or that of their sum where the model has no more; 0 where both are the same infinity."""
    if model.size != read.size:
        model, read, size = jnp.sum(model), jnp.sum(read), jnp.sum(size)
    model, read = jnp.ravel(model), jnp.ravel(read)
    rounding = ROUNDING * float(jnp.finfo(read.dtype).eps) / TOLERANCE[read.dtype.name]
    of = 1 + jnp.abs(model) + rounding * jnp.ravel(size)
    return jnp.max(jnp.where(model == read, 0.0, jnp.abs(model - read) / of))
