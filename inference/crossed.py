"""A crossed predictor: entries, each of an item of one side and an item of another, and a predictor linear in either.

    crossed = read_crossed(program, rng_key)               # which sites play which part (inference._crossed_reading)
    eta = crossed.predictor(program, values)               # of every entry
    table = crossed.table(program, values, side)           # slope of the predictor in the sites of a side, by item of the other side

The observed site is a Normal, or a probit of one, whose mean is the predictor

    eta[e] = offset[e] + table[other[e]] . x[index[e]]                                                       (1)
    eta[e] = offset[e] + sum_k s[k] z[k] slope[e, k],           slope[e, k] = u[row[e], k] v[column[e], k]   (2)

with x the sites of a side (Normal, one row for each of its items), z a switch and s an amplitude for each component. `index` and `other`
are arguments of the model, an integer for each entry. No name and no formula of a model occurs here: slopes are its derivatives.

Cost: of the predictor, one evaluation of the model; of a table as many as a side has columns, on one entry for each item; of slopes as
many as they have columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from inference.latent_normal import predictor
from inference.program import Program

__all__ = ["Components", "Crossed", "Level", "Side", "chunks"]

CHUNK = 2**13  # entries whose predictors are computed together


class Side(NamedTuple):
    """The items of one plate."""

    plate: str
    size: int
    index: str  # the argument that says to which item an entry belongs
    sites: tuple[str, ...]  # whose rows are the items


class Components(NamedTuple):
    """Switches and amplitudes, and their factors on either side."""

    switch: str
    amplitude: str
    factors: tuple[str, str]


class Level(NamedTuple):
    """What adds the same to every entry: a column of a side, and a shared site by its place."""

    side: Side
    column: int
    place: int


@dataclass(frozen=True)
class Crossed:
    """Who is who among the sites. Hashable, so that compiled code may depend on it."""

    observed: str
    by_entry: tuple[str, ...]  # arguments with a row for each entry
    sides: tuple[Side, Side]
    components: Components | None
    shared: tuple[str, ...]  # Normal sites in which all entries are linear
    levels: tuple["Level", ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites that the predictor is computed from."""
        of_components = (self.components.switch, self.components.amplitude) if self.components else ()
        return (*self.sides[0].sites, *self.sides[1].sites, *of_components, *self.shared)

    def num_entries(self, program: Program) -> int:
        """How many there are."""
        return len(program.arguments[self.by_entry[0]])

    def at(self, program: Program, entries: Any) -> Program:
        """The model on some of the entries."""
        return program.with_arguments(**{name: jnp.asarray(program.arguments[name])[entries] for name in self.by_entry})

    def predictor(self, program: Program, values: Mapping[str, Any]) -> Array:
        """Of every entry, `CHUNK` of them at a time."""
        size = self.num_entries(program)
        found = lax.map(lambda entries: predictor(self.at(program, entries), self.observed, values), chunks(size))
        return found.reshape(-1)[:size]

    def table(self, program: Program, values: Mapping[str, Any], side: Side) -> Array:
        """Slope of the predictor of an entry in the sites of its item, [item of the other side, column]."""
        [other] = (each for each in self.sides if each.plate != side.plate)
        first = self.at(program, jnp.zeros(other.size, jnp.int32))
        entries = first.with_arguments(**{side.index: jnp.zeros(other.size, jnp.int32), other.index: jnp.arange(other.size)})

        def at(row):
            rows = self.unflat(program, side, jnp.broadcast_to(row, (side.size, len(row))))
            return predictor(entries, self.observed, {**values, **rows})

        start = self.flat(values, side)[0]
        _, slope = jax.linearize(at, start)
        return lax.map(slope, jnp.eye(len(start), dtype=start.dtype)).T

    def slopes(self, program: Program, values: Mapping[str, Any]) -> Array:
        """Slope of the predictor in the amplitudes, all switched on, then in the shared sites, [entry, column]."""
        start, place = self.global_values(values)
        fixed = {self.components.switch: jnp.ones_like(values[self.components.switch])} if self.components else {}
        _, slope = jax.linearize(lambda x: predictor(program, self.observed, {**values, **place(x), **fixed}), start)
        return jax.vmap(slope)(jnp.eye(len(start), dtype=start.dtype)).T

    def shared_slopes(self, program: Program, values: Mapping[str, Any]) -> Array:
        """Slope of the predictor in the shared sites, [entry, column]."""
        return replace(self, components=None).slopes(program, values)

    def factor_columns(self, program: Program, side: Side) -> slice:
        """Where among the columns of a side the factors of the components are."""
        if not self.components:
            return slice(0, 0)
        [name] = set(self.components.factors) & set(side.sites)
        widths = [int(np.prod(program.sites[each].shape[1:])) for each in side.sites]
        first = sum(widths[: side.sites.index(name)])
        return slice(first, first + widths[side.sites.index(name)])

    def unit_table(self, program: Program, values: Mapping[str, Any], side: Side) -> tuple[Array, Array]:
        """The table with all components on and of amplitude 1; by (2) its columns are then to be multiplied by the second, [column]."""
        if not self.components:
            table = self.table(program, values, side)
            return table, jnp.ones_like(table[0])
        switch, amplitude, _ = self.components
        table = self.table(program, {**values, **{name: jnp.ones_like(values[name]) for name in (switch, amplitude)}}, side)
        return table, jnp.ones_like(table[0]).at[self.factor_columns(program, side)].set(values[amplitude] * values[switch])

    def global_values(self, values: Mapping[str, Any]):
        """Amplitudes and shared sites as one vector, and the way back to a dictionary."""
        names = ((self.components.amplitude,) if self.components else ()) + self.shared
        flat, unravel = ravel_pytree([jnp.asarray(values[name]) for name in names])
        return flat, lambda x: dict(zip(names, unravel(x), strict=True))

    def flat(self, values: Mapping[str, Any], side: Side) -> Array:
        """The sites of a side next to each other, [item, column]."""
        return jnp.concatenate([jnp.reshape(values[name], (side.size, -1)) for name in side.sites], axis=1)

    def unflat(self, program: Program, side: Side, columns: Array) -> dict[str, Array]:
        """The sites from [item, column]."""
        shapes = [program.sites[name].shape for name in side.sites]
        ends = np.cumsum([int(np.prod(shape[1:])) for shape in shapes])[:-1]
        parts = jnp.split(columns, ends, axis=1)
        return {name: part.reshape(shape) for name, part, shape in zip(side.sites, parts, shapes, strict=True)}

    def shifted(self, program: Program, values: Mapping[str, Any], level: Level, step: Any) -> dict[str, Any]:
        """All values, with some of the level moved from the items to the shared site: no predictor changes."""
        (side, column, place), (shared, put) = level, self.global_values(values)
        rows = self.unflat(program, side, self.flat(values, side).at[:, column].add(-step))
        return {**values, **put(shared.at[place].add(step)), **rows}

    def line(self, program: Program, values: Mapping[str, Any], level: Level) -> tuple[Array, Array]:
        """Slope of the log joint along that move, and its rate of fall."""
        names, zero = (*level.side.sites, *self.shared), jnp.zeros((), jnp.result_type(float))
        log_prior = lambda step: self.log_prior(program, self.shifted(program, values, level, step), names)
        slope, bend = jax.jvp(jax.grad(log_prior), (zero,), (jnp.ones_like(zero),))
        return slope, -bend

    def prior(self, program: Program, values: Mapping[str, Any], side: Side | None = None) -> tuple[Array, Array]:
        """Slope of the log joint without the entries in the sites of a side, [item, column], and its rate of fall; without a side, in
        amplitudes and shared sites, [column]."""
        names = side.sites if side else tuple(self.global_values(values)[1](self.global_values(values)[0]))
        start, place = (self.flat(values, side), lambda x: self.unflat(program, side, x)) if side else self.global_values(values)
        log_prior = lambda x: self.log_prior(program, {**values, **place(x)}, names)
        slope, bend = jax.jvp(jax.grad(log_prior), (start,), (jnp.ones_like(start),))
        return slope, -bend

    def log_prior(self, program: Program, values: Mapping[str, Any], names: tuple[str, ...]) -> Array:
        """The part of the log joint that depends on some sites, without the entries."""
        about = {name for name, parents in program.parents.items() if parents & set(names)} | set(names)
        terms = program.log_probs(values)
        near = [jnp.sum(term) for name, term in terms.items() if name in about and name != self.observed]
        return sum(near, start=jnp.zeros(()))


def chunks(size: int, most: int = CHUNK) -> Array:
    """0 .. size - 1 in rows of equal length; the last one is filled up with its last number."""
    num = -(-size // most)
    return jnp.minimum(jnp.arange(num * -(-size // num)), size - 1).reshape(num, -1)
