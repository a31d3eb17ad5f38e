"""Reading a truncated mixture whose every block is conjugate: rows that are assigned to groups, and what the groups say of them.

    structure = read_assignment(program)          # which sites play which part; or an error that names the site
    prior = structure.prior                       # the numbers of the priors
    rows = structure.rows(program)                # the data, one entry a row

    alpha ~ Gamma (or known);  V[h] ~ Beta(1, alpha);  z[i] ~ Categorical(sticks(V))
    tasks:    V[j, h], z[i] ~ Categorical(sticks(V[task[i]])); and where groups of tasks share what they say of rows, c[j, h] ~
              Categorical(sticks(U)), U[s] ~ Beta(1, beta), beta ~ Gamma (or known): a row is in group c[task[i], z[i]] of all
    columns:  parameters [group, column] and rows with a conjugate likelihood, any of `inference.mean_field`
    features: normal rows, their mean and precision normal and (inverse) Wishart; missing entries may be latent (ImproperUniform) sites
    experts:  t[c, i] ~ Normal(w[c, z[i]] . d[i], 1), d made of features and of plain data; a label says on which side of 0 each t lies

Only types, shapes, plates and dependencies are read. That the parts then mean what they seem to mean is proved by writing each site's log
probability down from what was read, by the functions that a kernel then uses, and comparing with the model's own at random values; the
numbers of the priors are read at other values than those. See `inference._assignment_proof`.

Cost: a few traces of the model on at most `FEW` rows; the whole data are only looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from inference._assignment_proof import prove, prove_for
from inference._assignment_rows import Rows, by_class, rows_of
from inference._once import once
from inference._some_rows import arguments_by_row, on_rows
from inference.conjugate import Family, describe, family_of
from inference.mean_field import COLUMNS
from inference.program import Program
from inference.quadratic import CommonPrior
from inference.sites import StructureError, model_name, unwrap

__all__ = ["Assignment", "Block", "Experts", "Level", "Prior", "Rows", "assignment_site", "read_assignment", "some_rows"]

FEW = 12  # rows on which the reading is proved; those of another number, on which the priors must be the same
WAY_OUT = "Use SVI with an autoguide for this model, or put a conjugate site there."


class Block(NamedTuple):
    """An observed site and the group parameters behind it."""

    site: str
    priors: tuple[str, ...]  # names of sites, in the order of the family
    family: Family


class Experts(NamedTuple):
    """Soft labels, and what is behind them."""

    soft: str
    label: str
    weights: str
    loc: str | None  # zeta; None where it is known
    precision: str | None  # lambda


class Level(NamedTuple):
    """Indices that are drawn by stick-breaking weights."""

    site: str
    sticks: str
    concentration: str | None  # None where it is known


class Prior(NamedTuple):
    """The numbers of the priors."""

    concentration: Any  # (concentration, rate) of alpha; where alpha is known, (alpha, infinity)
    upper: Any  # the same of the level above, or None
    columns: tuple[Any, ...]  # of each block of columns, [group, column, ...]
    features: Any  # WishartHyper [group, ...], or None
    experts: CommonPrior | None


@dataclass(frozen=True)
class Assignment:
    """Who is who among the sites."""

    few: Program  # the model on a few of its rows
    z: str
    sticks: str
    concentration: str | None
    upper: Level | None  # of the groups of tasks: which group of all each is
    columns: tuple[Block, ...]
    features: Block | None
    holes: str | None  # the missing entries of the features
    experts: Experts | None
    prior: Prior | None = None  # the numbers of the priors

    @property
    def lower(self) -> Level:
        """Of the rows."""
        return Level(self.z, self.sticks, self.concentration)

    @property
    def num_own(self) -> int:
        """Groups of a task."""
        return self.few.sites[self.sticks].shape[-1] + 1

    @property
    def num_groups(self) -> int:
        """Groups that say something of rows: those of all tasks together, where tasks share them."""
        return self.few.sites[self.upper.sticks].shape[0] + 1 if self.upper else self.num_own

    @property
    def known(self) -> set[str]:
        """Every site that plays a part."""
        blocks = (*self.columns, *([self.features] if self.features else []))
        named = {name for block in blocks for name in (block.site, *block.priors)}
        return named | {name for name in (*self.lower, *(self.upper or ()), self.holes, *(self.experts or ())) if name}

    def start(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Values at random, unconstrained; made here, for code that draws them is slow to compile."""
        rng, found = np.random.default_rng(seed), {}
        indices = {self.z: self.num_own} | ({self.upper.site: self.num_groups} if self.upper else {})
        for name in (name for name in program.latent if name not in indices):
            site = program.sites[name]
            radius = min(1.0, 3 / np.sqrt(site.shape[-1])) if site.support.event_dim == 2 else 1.0  # so that large matrices can be inverted
            found[name] = rng.uniform(-radius, radius, biject_to(site.support).inverse_shape(site.shape)).astype(site.dtype)
        drawn = lambda name, most: rng.integers(0, most, program.sites[name].shape).astype(program.sites[name].dtype)
        return found | {name: drawn(name, most) for name, most in indices.items()}

    def group_of_rows(self, values: Mapping[str, Array], task: Any) -> Array:
        """What says something of each row."""
        z = values[self.z]
        return values[self.upper.site][task, z] if self.upper else z

    @property
    def of_rows(self) -> set[str]:
        """The latent sites that have values for each row."""
        return {name for name in (self.z, self.holes, self.experts.soft if self.experts else None) if name}

    @property
    def by_number(self) -> set[str]:
        """The latent sites whose values depend on what groups are called."""
        blocks = (*self.columns, *([self.features] if self.features else []))
        named = {name for block in blocks for name in block.priors} | ({self.experts.weights} if self.experts else set())
        return named | {self.z, self.sticks} | ({self.upper.site, self.upper.sticks} if self.upper else set())

    def share_at(self, values: Mapping[str, Array]) -> Array | None:
        """1 where a group of a task is the shared group, else 0 [task, own group, group]; None where there is no level above."""
        return jax.nn.one_hot(values[self.upper.site], self.num_groups, dtype=values[self.sticks].dtype) if self.upper else None

    def prior_on(self, program: Program) -> "Prior":
        """The numbers of the priors as they stand on the rows of a program."""
        start = self.start(program, 0)
        return jax.device_get(once(lambda start: self.prior_at(program, program.constrain(start)), start)(start))

    def prior_at(self, program: Program, values: Mapping[str, Array]) -> Prior:
        """The same at values of the latent sites, on which they must not depend."""
        trace = program.trace(values)
        fn = lambda name: unwrap(trace[name]["fn"])

        def concentration(level: Level) -> tuple[Array, ...]:
            name = level.concentration
            known = (jnp.ravel(fn(level.sticks).concentration0)[0], jnp.inf)
            return tuple(jnp.asarray(number, float) for number in ((fn(name).concentration, fn(name).rate) if name else known))

        read = lambda block: block.family.read(tuple(fn(name) for name in block.priors), tuple(values[name] for name in block.priors))
        columns = tuple(jax.tree.map(lambda leaf, block=block: self.by_column(leaf, block), read(block)) for block in self.columns)
        features, experts = read(self.features) if self.features else None, self._experts_prior(fn, values)
        return Prior(concentration(self.lower), concentration(self.upper) if self.upper else None, columns, features, experts)

    def by_column(self, leaf: Array, block: Block) -> Array:
        """A parameter [group, ...] without an axis of columns gets one."""
        first = self.few.sites[block.priors[0]]
        return leaf if len(first.shape) - _event_dim(self.few, block.priors[0]) > 1 else leaf[:, None]

    def _experts_prior(self, fn: Any, values: Mapping[str, Array]) -> CommonPrior | None:
        if self.experts is None:
            return None
        weights, loc, precision = self.experts.weights, self.experts.loc, self.experts.precision
        shape = by_class(values[weights], 3).shape
        common = lambda number: by_class(jnp.broadcast_to(number, values[weights].shape), 3)[:, 0]
        of = lambda number, name: by_class(jnp.broadcast_to(number, values[name].shape), 2)
        value = by_class(values[precision], 2) if precision else common(fn(weights).scale) ** -2
        infinite = jnp.full((shape[0], shape[2]), jnp.inf)
        return CommonPrior(
            of(fn(loc).loc, loc) if loc else common(fn(weights).loc),
            of(fn(loc).scale, loc) ** -2 / value if loc else infinite,
            of(fn(precision).concentration, precision) if precision else value,
            of(fn(precision).rate, precision) if precision else infinite,
        )

    def rows(self, program: Program) -> Rows:
        """The data by row, refused where a family cannot have them."""
        rows = rows_of(self, program)
        for block, x in zip(self.columns, rows.columns, strict=True):
            block.family.refuse(block.site, x)
        if self.features and np.isinf(rows.features).any():
            row, column = np.argwhere(np.isinf(rows.features))[0]
            raise ValueError(f"site {self.features.site!r}: row {row}, column {column} is infinite; wanted numbers, NaN where missing.")
        return rows


def _event_dim(program: Program, name: str) -> int:
    """Dimensions of one event of a site, those that `to_event` declared not counted."""
    return {"Dirichlet": 1, "MultivariateNormal": 1, "Wishart": 2, "InverseWishart": 2}.get(program.sites[name].family, 0)


def read_assignment(program: Program) -> Assignment:
    """Reads and proves; raises StructureError, by the name of the site, where a block is not conjugate."""
    z = assignment_site(program)
    few = some_rows(program, z, FEW)
    _, sticks, concentration = _level(few, z)
    upper = _upper(few, z)
    holes = _holes(few)
    if holes != _holes(program):
        raise StructureError(
            f"site {_holes(program)!r}: missing entries, but none in the rows that were looked at; wanted NaN in an array."
        )
    of_rows = {z, upper.site if upper else z, holes}
    columns, features = _blocks(few, z, of_rows, holes)
    found = Assignment(few, z, sticks, concentration, upper, columns, features, holes, _experts(few, z, of_rows))
    for name in (*few.latent, *few.observed, *few.factors):
        if name not in found.known:
            raise StructureError(
                f"site {name!r} ({few.sites[name].family}): {few.sites[name].kind}, and no block of the mixture reads it; wanted sticks, "
                f"parameters of groups, rows that depend on {z!r}, and soft labels. {WAY_OUT}"
            )
    _refuse_other_children(found)
    found = replace(found, prior=prove(found))
    if program.sites[z].shape[0] > FEW:
        prove_for(some_rows(program, z, FEW + 3), found)
    return found


def assignment_site(program: Program) -> str:
    """The site that says which group each row is in."""
    is_row = lambda site: site.kind == "latent" and site.family.startswith("Categorical") and len(site.shape) == 1
    found = [name for name, site in program.sites.items() if is_row(site)]
    if len(found) != 1:
        raise StructureError(
            f"{model_name(program.model)}: found {len(found)} latent Categorical sites of rows {found}, wanted one: the group of each row. "
            f"{WAY_OUT}"
        )
    return found[0]


def _level(few: Program, site: str) -> Level:
    """The sticks that indices are drawn by."""
    parents = sorted(few.parents[site])
    if len(parents) != 1 or few.sites[parents[0]].family != "Beta":
        raise StructureError(
            f"site {site!r} ({few.sites[site].family}): its probabilities come from {parents}; wanted one Beta site V, with the weights "
            f"V_h prod_(l<h) (1 - V_l), the last stick 1. {WAY_OUT}"
        )
    above = sorted(few.parents[parents[0]])
    if not above:
        return Level(site, parents[0], None)
    if len(above) > 1 or few.sites[above[0]].family != "Gamma" or few.sites[above[0]].shape:
        kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in above)
        raise StructureError(f"site {parents[0]!r}: its concentration comes from {kinds}; wanted one scalar Gamma, or a number. {WAY_OUT}")
    return Level(site, parents[0], above[0])


def _upper(few: Program, z: str) -> Level | None:
    """Groups of tasks that are themselves assigned."""
    is_index = lambda site: site.kind == "latent" and site.family.startswith("Categorical")
    found = [name for name, site in few.sites.items() if is_index(site) and name != z]
    if not found:
        return None
    level = _level(few, found[0])
    own, shape = (*few.sites[_level(few, z).sticks].shape[:-1], few.sites[_level(few, z).sticks].shape[-1] + 1), few.sites[found[0]].shape
    if len(found) > 1 or shape != own or len(own) != 2 or len(few.sites[level.sticks].shape) != 1:
        raise StructureError(
            f"site {found[-1]!r} ({few.sites[found[-1]].family}): latent, of shape {few.sites[found[-1]].shape}; wanted, beside {z!r}, one "
            f"index for each task and each of its groups, {own}, drawn by one row of sticks. {WAY_OUT}"
        )
    return level


def _holes(few: Program) -> str | None:
    found = [name for name in few.latent if few.sites[name].family == "ImproperUniform"]
    if len(found) > 1:
        raise StructureError(f"site {found[1]!r}: beside {found[0]!r} a second site of missing entries; wanted one. {WAY_OUT}")
    return found[0] if found else None


def _blocks(few: Program, z: str, of_rows: set[str | None], holes: str | None) -> tuple[tuple[Block, ...], Block | None]:
    """The columns, and the features, of which there is at most one site."""
    found = [_block(few, of_rows, name) for name in few.observed if z in few.parents[name]]
    features = [block for block in found if block.family not in COLUMNS]
    if len(features) > 1:
        raise StructureError(f"site {features[1].site!r}: beside {features[0].site!r} a second one of correlated features. {WAY_OUT}")
    for block in found:
        if holes in few.parents[block.site] and block not in features:
            raise StructureError(
                f"site {block.site!r}: columns that are independent in a group have no latent missing entries; wanted "
                f"Missing(dist...), obs with NaN. {WAY_OUT}"
            )
    return tuple(block for block in found if block not in features), features[0] if features else None


def _block(few: Program, of_rows: set[str | None], site: str) -> Block:
    groups = sorted(few.parents[site] - of_rows, key=few.latent.index)
    kinds = {name: few.sites[name].family for name in groups}
    family = family_of(tuple(kinds.values()), few.sites[site].family)
    if family is None:
        priors = " and ".join(f"{name!r} ~ {kind}" for name, kind in kinds.items()) or "no parameter of a group"
        raise StructureError(
            f"site {site!r}: {priors} is not conjugate to {few.sites[site].family}. Conjugate: {describe()}; labels need soft labels, "
            f"Normal sites of variance 1, of which they are the signs. {WAY_OUT}"
        )
    return Block(site, tuple(next(name for name, kind in kinds.items() if kind == wanted) for wanted in family.priors), family)


def _experts(few: Program, z: str, of_rows: set[str | None]) -> Experts | None:
    below = [name for name in few.latent if z in few.parents[name]]
    if not below:
        return None
    soft = below[0]
    if len(below) > 1 or few.sites[soft].family != "Normal":
        kinds = ", ".join(f"{name!r} ({few.sites[name].family})" for name in below)
        raise StructureError(
            f"site {below[-1]!r}: latent sites that depend on {z!r}: {kinds}; wanted one Normal site of soft labels. {WAY_OUT}"
        )
    labels = [name for name in few.observed if soft in few.parents[name]]
    if len(labels) != 1 or few.sites[labels[0]].family != "Delta" or few.parents[labels[0]] != {soft}:
        raise StructureError(f"site {soft!r}: {labels} depend on it; wanted one Delta site, the label, that its signs decide. {WAY_OUT}")
    weights = sorted(few.parents[soft] - of_rows)
    if len(weights) != 1 or few.sites[weights[0]].family != "Normal":
        raise StructureError(f"site {soft!r}: its loc is computed from {weights}; wanted one Normal site of weights. {WAY_OUT}")
    above = {few.sites[name].family: name for name in sorted(few.parents[weights[0]])}
    loc, precision = above.pop("Normal", None), above.pop("Gamma", None)
    if above or len(few.parents[weights[0]]) > 2 or (loc and few.parents[loc] - {precision}) or (precision and few.parents[precision]):
        raise StructureError(
            f"site {weights[0]!r}: its prior is computed from {sorted(few.parents[weights[0]])}; wanted a Normal loc and a Gamma "
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
                    f"site {name!r} ({few.sites[name].family}): it depends on {parent!r}, which was read as part of "
                    f"{sorted(allowed[parent])}. {WAY_OUT}"
                )


def some_rows(program: Program, z: str, size: int) -> Program:
    """The model on `size` of its rows, of different labels and with missing entries where it can be told."""
    num_rows = program.sites[z].shape[0]
    if num_rows <= size:
        return program
    by_row = arguments_by_row(program, num_rows)
    firsts = [i for value in by_row.values() if value.ndim == 1 for i in np.unique(value, return_index=True)[1][: size // 2]]
    reals = [value for value in by_row.values() if value.ndim == 2 and value.dtype.kind == "f"]
    holed = [i for value in reals for i in np.flatnonzero(np.isnan(value).any(1))[: size // 3]]
    spread = ((np.arange(size) + 0.5) * num_rows // size).astype(int)
    chosen = np.sort(list(dict.fromkeys([*firsts, *holed, *spread]))[:size])
    return on_rows(program, z, by_row, chosen)
