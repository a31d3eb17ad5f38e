"""Reading a mixture whose groups can be integrated out: one CRP site, and conjugate components behind it.

    structure = read_partition(program)               # which sites play which part; or an error that names the site
    hyper = structure.parameters({"alpha": 1.0})      # the numbers of the priors, at values of the latent scalars
    rows = structure.rows(program)                    # the data, one entry a row

Only types, shapes, plates and dependencies are read. That the parts then mean what they seem to mean is proved on a few rows,
block by block, at random parameters phi and assignments z:

    log p(phi) + log p(x | phi, z) - log p(phi | x, z)  =  sum over rows of log p(row | rows before it, z)               (1)

On the left stand the model's own terms; the posterior and the right side come from the conjugate family, by the very functions that
a kernel then uses. An identity in phi for all z checks family, normalisers, gathers, missing entries and hyper-parameters at once.
Hyper-parameters must also be the same on other rows, and on another number of them: a kernel reads them once, for all rows to come.

Cost: a few traces of the model on at most `OTHERS` rows; the whole data are only looked at.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference._mixture_proof import prove, prove_for
from inference._mixture_trace import by_class, columns, kinds, labelled, labels_of, sites_of_labels, started, term
from inference._once import once
from inference._some_rows import on_rows
from inference.conjugate import Family, describe, family_of
from inference.program import Program
from inference.sites import StructureError, model_name, unwrap

__all__ = ["Block", "Parameters", "Partition", "Rows", "grid_of", "read_partition"]

FEW, OTHERS = 8, 12  # rows on which the identity is proved; other rows, and another number, on which the priors must be the same


class Block(NamedTuple):
    """One observed site and the group parameters behind it."""

    site: str
    priors: tuple[str, ...]  # names of sites, in the order of the family
    family: Family
    num_axes: int  # axes of a parameter before its columns: class and group, or group alone


class Parameters(NamedTuple):
    """The numbers of the priors; `priors` maps each block's site to the family's hyper-parameters, [class, column, ...]."""

    concentration: Array
    class_weights: Array  # Dirichlet concentration [class]; of fixed class probabilities, these; of classes without a prior, ones
    priors: dict[str, Any]


class Rows(NamedTuple):
    """The data, by row."""

    values: dict[str, Array]  # of each block's site, [row, column, ...], NaN where missing
    labels: Array  # class of each row, -1 where it is latent


@dataclass(frozen=True)
class Partition:
    """Who is who among the sites. Hashable, so that compiled code may depend on it."""

    few: Program  # the model on a few of its rows
    z: str
    labels: str | None  # the site of the classes; None where they are plain data
    shares: str | None  # the Dirichlet site behind them
    blocks: tuple[Block, ...]
    scalars: tuple[str, ...]  # latent hyper-parameters, such as a random alpha
    num_classes: int
    max_groups: int | None

    def __getstate__(self) -> dict[str, Any]:
        """Compiled code stays behind."""
        return {field.name: vars(self)[field.name] for field in fields(self)}

    def differences(self, program: Program) -> list[str]:
        """What a program has, beside other rows, that this one was not read from: in words, empty where it has nothing."""
        if program.model is not self.few.model:
            return [f"the model is {model_name(program.model)}, was {model_name(self.few.model)}"]
        mine, found = self.few.arguments, program.arguments
        num_rows, num_mine = program.sites[self.z].shape[0], self.few.sites[self.z].shape[0]
        words = [f"argument {name!r} is {'new' if name in found else 'missing'}" for name in sorted({*mine} ^ {*found})]
        for name in (name for name in mine if name in found):
            old, new = mine[name], found[name]
            if _argument_by_row(old, num_mine) and _argument_by_row(new, num_rows):
                if old.shape[1:] != new.shape[1:]:
                    words.append(f"argument {name!r} has {new.shape[1:]} a row, had {old.shape[1:]}")
            elif not _is_same(old, new):
                words.append(f"argument {name!r} is {new!r}, was {old!r}")
        return words

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: which site is a partition of the rows, and which holds the classes that it is within."""
        return {"partition": json.dumps([self.z, self.labels])}

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """Arguments that have an entry for each row, in each of some programs that differ in their rows alone."""
        is_by_row = lambda name, each: _argument_by_row(each.arguments[name], each.sites[self.z].shape[0])
        return tuple(name for name in self.few.arguments if all(is_by_row(name, each) for each in (self.few, *programs)))

    def trace(self, program: Program, given: Mapping[str, Any], rng_key: Array | None = None, spread: Any = 1.0) -> dict[str, dict]:
        """The trace with latent sites at `given`, the rest at a start, the rows of each class in one group."""
        return started(program, self.z, given, rng_key, spread)

    def parameters(self, scalars: Mapping[str, Any]) -> Parameters:
        """The numbers of the priors at values of the latent scalars; may be traced."""
        return self.parameters_of(self.trace(self.few, scalars))

    def parameters_of(self, trace: Mapping[str, dict]) -> Parameters:
        """The same as they stand in a trace."""
        priors = {block.site: jax.tree.map(lambda leaf: leaf[:, 0], self.hyper(block, trace)) for block in self.blocks}
        concentration = jnp.asarray(unwrap(trace[self.z]["fn"]).concentration, float)
        return Parameters(concentration, self.class_weights(trace), priors)

    def hyper(self, block: Block, trace: Mapping[str, dict]) -> Any:
        """Hyper-parameters of a block as they stand in a trace, [class, group, column, ...]."""
        sites = [trace[name] for name in block.priors]
        read = block.family.read(tuple(unwrap(site["fn"]) for site in sites), tuple(site["value"] for site in sites))
        return jax.tree.map(lambda leaf: by_class(leaf, sites[0]["fn"], block.num_axes), read)

    def rows(self, program: Program) -> Rows:
        """Each block's data, refused where the family cannot have them, and the classes."""
        with jax.ensure_compile_time_eval():  # the rows are numbers, also where what is asked of them is compiled
            rows = jax.tree.map(np.asarray, self._seen(program))
        for block in self.blocks:
            block.family.refuse(block.site, rows.values[block.site], self._priors[block.site])
        bad = np.flatnonzero((rows.labels < -1) | (rows.labels >= self.num_classes))
        if len(bad):
            raise ValueError(
                f"row {bad[0]}: found class {rows.labels[bad[0]]}, wanted 0 to {self.num_classes - 1}, or -1 where unlabelled."
            )
        return rows

    @cached_property
    def _priors(self) -> dict[str, Any]:
        return jax.device_get(once(lambda: self.parameters({}))().priors)

    def _seen(self, program: Program) -> Rows:
        """What the model observes. Where it does not look at its data while it is traced, one compilation serves all data of a shape."""
        num_rows = program.sites[self.z].shape[0]
        by_row = {name: value for name, value in program.arguments.items() if _argument_by_row(value, num_rows)}
        try:
            return self._observed_of(by_row)
        except jax.errors.JAXTypeError:
            return once(lambda: self._observed(program))()

    @cached_property
    def _observed_of(self) -> Any:
        return jax.jit(lambda by_row: self._observed(self.few.with_arguments(**by_row)))

    def _observed(self, program: Program) -> Rows:
        trace = self.trace(program, {})
        classes = labels_of(unwrap(trace[self.z]["fn"]))
        known = labelled(trace, self.labels, len(classes))
        return Rows({block.site: columns(trace[block.site]) for block in self.blocks}, jnp.where(known, classes, -1))

    def class_weights(self, trace: Mapping[str, dict]) -> Array:
        """Dirichlet concentration [class], or the probabilities themselves where they are fixed."""
        if self.shares:
            return unwrap(trace[self.shares]["fn"]).concentration
        if self.labels is None:
            return jnp.ones(self.num_classes)
        fn = unwrap(trace[sites_of_labels(trace, self.labels)[0]]["fn"])
        return jnp.exp(
            fn.log_prob(jnp.arange(self.num_classes).reshape(-1, *(1,) * len(fn.batch_shape))).reshape(self.num_classes, -1)[:, 0]
        )


def read_partition(program: Program) -> Partition:
    """Reads and proves; raises StructureError, by the name of the site, where a group cannot be integrated out."""
    z = _partition_site(program)
    few = program if program.sites[z].shape[0] <= FEW else _some_rows(program, z, FEW)
    trace = kinds(few, z)
    crp = unwrap(trace[z]["fn"])
    label_site = _label_site(few, z, trace)
    label_sites = sites_of_labels(trace, label_site) if label_site else []
    blocks = _blocks(few, z, trace, label_sites)
    shares = _shares(few, label_sites, trace)
    known = {z, *label_sites, *(name for block in blocks for name in block.priors), *([shares] if shares else [])}
    scalars = tuple(name for name in few.latent if name not in known)
    for name in scalars:
        if few.sites[name].shape:
            raise StructureError(
                f"site {name!r}: latent, of shape {few.sites[name].shape}, and no parameter of a group; wanted group parameters with "
                f"conjugate priors, and scalars. Move {name!r} into the plates of class and group, or fix it."
            )
    _refuse_other_terms(few, z, {*known, *(block.site for block in blocks)})
    found = Partition(few, z, label_site, shares, blocks, scalars, crp.num_classes, crp.max_groups)
    try:
        prove(found)
    except StructureError:
        found.rows(program)  # data that a family cannot have say more than the identity that they break
        raise
    prove_for(_some_rows(program, z, OTHERS), found)
    return found


def _refuse_other_terms(few: Program, z: str, known: set[str]) -> None:
    for name in (*few.observed, *few.factors):
        if name not in known:
            raise StructureError(
                f"site {name!r}: {few.sites[name].kind}, but no feature that depends on {z!r}; its term would be left out. "
                f"Index it by {z!r}, or take it out of the model."
            )


def _argument_by_row(value: Any, num_rows: int) -> bool:
    return isinstance(value, np.ndarray | Array) and value.shape[:1] == (num_rows,)


def _is_same(old: Any, new: Any) -> bool:
    """Also of distributions with the same numbers."""
    (old_leaves, old_form), (new_leaves, new_form) = jax.tree.flatten(old), jax.tree.flatten(new)
    return old_form == new_form and all(a is b or np.array_equal(a, b) for a, b in zip(old_leaves, new_leaves, strict=True))


def _some_rows(program: Program, z: str, size: int) -> Program:
    """The model on `size` of its rows, of different classes where it can be told; the last is repeated where there are fewer."""
    num_rows = program.sites[z].shape[0]
    by_row = {name: value for name, value in program.arguments.items() if _argument_by_row(value, num_rows)}
    firsts = [np.unique(np.asarray(value), return_index=True)[1] for value in by_row.values() if np.ndim(value) == 1]
    spread = (np.arange(size) + 0.5) * num_rows // size  # other rows for other sizes
    chosen = np.sort(list(dict.fromkeys([*(i for first in firsts for i in first[: size - 2]), *spread.astype(int)]))[:size])
    chosen = np.pad(chosen, (0, size - len(chosen)), mode="edge")
    return on_rows(program, z, by_row, chosen)


def _partition_site(program: Program) -> str:
    found = [name for name, site in program.sites.items() if site.family == "CRP"]
    if len(found) != 1:
        raise StructureError(
            f"{model_name(program.model)}: found {len(found)} CRP sites {found}, wanted one: "
            f"numpyro.sample('z', CRP(alpha, num_rows, labels))."
        )
    if program.sites[found[0]].kind != "latent":
        raise StructureError(f"site {found[0]!r}: the partition is {program.sites[found[0]].kind}, wanted latent. Leave out its obs.")
    return found[0]


def _label_site(few: Program, z: str, trace: Mapping[str, dict]) -> str | None:
    """The site whose value the CRP has for the classes of its rows: equal to it at random starts."""
    like_z = lambda site: site.shape == few.sites[z].shape and jnp.issubdtype(site.dtype, jnp.integer)
    names = [name for name, site in few.sites.items() if name != z and like_z(site) and not name.endswith(("_observed", "_unobserved"))]
    names = [name for name in names if sites_of_labels(trace, name)]

    def are_labels(rng_key):
        at = started(few, z, {}, rng_key)
        classes = labels_of(unwrap(at[z]["fn"]))
        return {name: jnp.all(at[name]["value"] == classes) for name in names}

    if not names:
        return None
    equal = once(are_labels, random.key(0))
    found = [equal(random.key(seed)) for seed in range(4)]
    return next((name for name in names if all(each[name] for each in found)), None)


def _shares(few: Program, label_sites: list[str], trace: Mapping[str, dict]) -> str | None:
    parents = sorted(set().union(*(few.parents[name] for name in label_sites)) - set(label_sites)) if label_sites else []
    for name in label_sites:
        family = type(unwrap(trace[name]["fn"])).__name__
        if not family.startswith("Categorical"):
            raise StructureError(f"site {name!r}: the class of a row is {family}, wanted Categorical.")
    if not parents:
        return None
    if len(parents) > 1 or few.sites[parents[0]].family != "Dirichlet":
        found = ", ".join(f"{name!r} ~ {few.sites[name].family}" for name in parents)
        raise StructureError(f"site {label_sites[0]!r}: its class probabilities come from {found}; wanted one Dirichlet site, or numbers.")
    _refuse_other_children(few, parents[0], label_sites, label_sites[0])
    return parents[0]


def _blocks(few: Program, z: str, trace: Mapping[str, dict], label_sites: list[str]) -> tuple[Block, ...]:
    below = [name for name in few.sites if z in few.parents[name] and few.sites[name].kind != "deterministic"]
    for name in below:
        if few.sites[name].kind != "observed":
            raise StructureError(
                f"site {name!r}: {few.sites[name].kind}, and depends on {z!r}; a group can only be integrated out where observed features "
                f"alone depend on it. Observe {name!r}, or leave the partition to another kernel."
            )
    if not below:
        raise StructureError(f"site {z!r}: no observed site depends on it; wanted features, obs=x, whose parameters are indexed by {z!r}.")
    return tuple(_block(few, z, name, trace, label_sites) for name in below)


def _block(few: Program, z: str, site: str, trace: Mapping[str, dict], label_sites: list[str]) -> Block:
    crp = unwrap(trace[z]["fn"])
    own = set(few.sites[site].plates)
    outer = lambda name: [plate for plate in few.sites[name].plates if plate not in own]
    scalars = [name for name in few.parents[site] if not few.sites[name].shape]
    groups = [name for name in few.latent if name in few.parents[site] - {z, *label_sites, *scalars}]
    for name in groups:
        sizes = tuple(few.plates[plate].size for plate in outer(name))
        if sizes not in ((crp.num_classes, crp.capacity), (crp.capacity,) if crp.num_classes == 1 else ()):
            raise StructureError(
                f"site {name!r}: {site!r} depends on it, and its plates {few.sites[name].plates} have the sizes {sizes} beside those of "
                f"{site!r}; wanted a class plate of {crp.num_classes} outside a group plate of {crp.capacity}."
            )
    types = {name: type(unwrap(trace[name]["fn"])).__name__ for name in groups}
    observed = type(unwrap(trace[site]["fn"])).__name__
    family = family_of(tuple(types.values()), observed)
    if family is None:
        priors = " and ".join(f"{name!r} ~ {kind}" for name, kind in types.items()) or "no group parameter"
        raise StructureError(f"site {site!r}: {priors} is not conjugate to {observed}. Conjugate: {describe()}.")
    batch = len(few.sites[site].shape) - unwrap(trace[site]["fn"]).event_dim
    if batch > 2:
        raise StructureError(f"site {site!r}: found {batch} axes before an event, wanted [row] or [row, feature]. Flatten the features.")
    priors = tuple(next(name for name, kind in types.items() if kind == wanted) for wanted in family.priors)
    for name in priors:
        _refuse_other_children(few, name, [*priors, site], site)
    return Block(site, priors, family, len(outer(priors[0])))


def _refuse_other_children(few: Program, parent: str, allowed: list[str], site: str) -> None:
    for name, parents in few.parents.items():
        if parent in parents and name not in allowed and few.sites[name].kind != "deterministic":
            raise StructureError(f"site {name!r} depends on {parent!r}, a parameter of {site!r}, which can then not be integrated out.")


def grid_of(partition: Partition, grid: Mapping[str, np.ndarray]) -> tuple[dict[str, Array], Array]:
    """Every combination of the values of the latent scalars, {site: [point]}, and its log prior: density times spacing, normalised."""
    for name in partition.scalars:
        if name not in grid:
            raise StructureError(
                f"site {name!r}: a latent scalar is learned over a grid; give its values, say grid={{{name!r}: [0.1, 0.3, 1, 3]}}."
            )
    for name, values in grid.items():
        if name not in partition.scalars:
            raise ValueError(f"grid: {name!r} is no latent scalar of the model, which has {list(partition.scalars)}.")
        if values.ndim != 1 or not len(values) or not (np.diff(values) > 0).all() or not np.isfinite(values).all():
            raise ValueError(f"grid: the values of {name!r} must be finite and rise; found {values}.")
    if not grid:
        return {}, jnp.zeros(1)
    mesh = np.meshgrid(*grid.values(), indexing="ij")
    points = {name: jnp.asarray(values.ravel(), float) for name, values in zip(grid, mesh, strict=True)}
    spacing = np.meshgrid(*(np.gradient(values) if len(values) > 1 else np.ones(1) for values in grid.values()), indexing="ij")

    def density(point):
        trace = partition.trace(partition.few, point)
        return jnp.sum(jnp.stack([term(trace[name]) for name in partition.scalars]))

    log_prior = jax.vmap(density)(points) + jnp.asarray(sum(np.log(space).ravel() for space in spacing), float)
    if not jnp.isfinite(log_prior).all():
        raise ValueError(f"grid: the prior density is not positive at every point of {dict(grid)}.")
    return points, log_prior - jax.nn.logsumexp(log_prior)
