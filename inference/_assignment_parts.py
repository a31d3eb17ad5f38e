"""What `inference.assignment` has read of a mixture: which site plays which part, the numbers of its priors, its data by row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from inference._assignment_rows import Rows, by_class, rows_of
from inference.compiling import once
from inference.program import Program
from inference.quadratic import Common
from inference.sites import unwrap

__all__ = ["Assignment", "Block", "Experts", "Level", "Prior", "Rows", "event_dim"]


class Block(NamedTuple):
    """An observed site and the group parameters behind it."""

    site: str
    priors: tuple[str, ...]  # names of sites, in the order of the family
    family: Any  # `Columns`, or `NormalWishart` of the features


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
    experts: Common | None


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
    def by_row(self) -> set[str]:
        """The sites that say something of each row, or of each group of a task."""
        observed = {block.site for block in (*self.columns, *([self.features] if self.features else []))}
        labels = {self.experts.soft, self.experts.label} if self.experts else set()
        return {self.z, *([self.upper.site] if self.upper else [])} | observed | labels

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
        return leaf if len(first.shape) - event_dim(self.few, block.priors[0]) > 1 else leaf[:, None]

    def _experts_prior(self, fn: Any, values: Mapping[str, Array]) -> Common | None:
        if self.experts is None:
            return None
        weights, loc, precision = self.experts.weights, self.experts.loc, self.experts.precision
        shape = by_class(values[weights], 3).shape
        common = lambda number: by_class(jnp.broadcast_to(number, values[weights].shape), 3)[:, 0]
        of = lambda number, name: by_class(jnp.broadcast_to(number, values[name].shape), 2)
        value = by_class(values[precision], 2) if precision else common(fn(weights).scale) ** -2
        infinite = jnp.full((shape[0], shape[2]), jnp.inf)
        return Common(
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


def event_dim(program: Program, name: str) -> int:
    """Dimensions of one event of a site, those that `to_event` declared not counted."""
    return {"Dirichlet": 1, "MultivariateNormal": 1, "Wishart": 2, "InverseWishart": 2}.get(program.sites[name].family, 0)
