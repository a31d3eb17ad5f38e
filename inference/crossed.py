"""Reading a crossed predictor: entries, each of an item of one side and an item of another, and a predictor linear in either.

    crossed = read_crossed(program, rng_key)               # which sites play which part; or an error that says why not
    eta = crossed.predictor(program, values)               # of every entry
    table = crossed.table(program, values, side)           # slope of the predictor in the sites of a side, by item of the other side

The observed site is a Normal, or a probit of one, whose mean is the predictor

    eta[e] = offset[e] + table[other[e]] . x[index[e]]                                                       (1)
    eta[e] = offset[e] + sum_k s[k] z[k] slope[e, k],           slope[e, k] = u[row[e], k] v[column[e], k]   (2)

with x the sites of a side (Normal, one row for each of its items), z a switch and s an amplitude for each component. `index` and `other`
are arguments of the model, an integer for each entry. Shapes, plates and dependencies propose who is who; (1) and (2) are then proved as
identities on some entries, at random values of all sites. No name and no formula of a model occurs here: slopes are its derivatives.

Cost: a few evaluations of the model on `FEW` entries, and for each table as many as a side has columns, on one entry for each item.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints
from numpyro.ops.provenance import eval_provenance

from inference.latent_normal import LINKS, predictor
from inference.program import Program
from inference.sites import StructureError

__all__ = ["Components", "Crossed", "Side", "chunks", "read_crossed"]

FEW = 512  # entries on which the identities are proved
NUM_SETTINGS = 3  # random values of all sites
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


@dataclass(frozen=True)
class Crossed:
    """Who is who among the sites. Hashable, so that compiled code may depend on it."""

    observed: str
    by_entry: tuple[str, ...]  # arguments with a row for each entry
    sides: tuple[Side, Side]
    components: Components | None
    shared: tuple[str, ...]  # Normal sites in which all entries are linear
    levels: tuple[tuple[Side, int, int], ...] = ()  # column of a side, place of a shared site: both add the same to every entry

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

    def products(self, program: Program, values: Mapping[str, Any]) -> Array:
        """The same by (2), which is proved, at less cost."""
        if not self.components:
            return self.slopes(program, values)
        at = zip(self.components.factors, self.sides, strict=True)
        left, right = (values[name][jnp.asarray(program.arguments[side.index])] for name, side in at)
        return jnp.concatenate([left * right, replace(self, components=None).slopes(program, values)], axis=1)

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


def read_crossed(program: Program, rng_key: Array) -> Crossed:
    """Finds and proves the structure, or raises StructureError that says what is missing."""
    observed, size = _observed(program)
    gaps = []
    for found in _proposals(program, observed, size):
        gaps.append(_largest_gap(found, program, rng_key))
        if gaps[-1] < float(jnp.sqrt(jnp.finfo(jnp.result_type(float)).eps)):
            return replace(found, levels=_levels(found, program, rng_key))
    raise StructureError(
        f"site {observed!r}: no crossed predictor; "
        + (f"the nearest misses by {min(gaps):.2g}." if gaps else "nothing has the shape of one.")
    )


def _levels(crossed: Crossed, program: Program, rng_key: Array) -> tuple[tuple[Side, int, int], ...]:
    """Where the slope is the same for all entries."""
    few = crossed.at(program, np.arange(min(2, crossed.num_entries(program))))

    @jax.jit
    def slopes(values):
        return [crossed.table(few, values, side) for side in crossed.sides], crossed.slopes(few, values)

    tables, shared = jax.tree.map(np.asarray, slopes(program.draw_initial(rng_key)))
    place = next((j for j, column in enumerate(shared.T) if np.all(column == 1)), None)
    columns = [next((j for j, column in enumerate(table.T) if np.all(column == 1)), None) for table in tables]
    return tuple((side, j, place) for side, j in zip(crossed.sides, columns, strict=True) if j is not None and place is not None)


def _observed(program: Program) -> tuple[str, int]:
    """The one site of entries, and how many it has."""
    found = [name for name in program.observed if program.sites[name].family in {link.__name__ for link in LINKS}]
    if len(found) != 1 or len(program.sites[found[0]].plates) != 1 or len(program.sites[found[0]].shape) != 1 or program.factors:
        raise StructureError(
            f"no crossed predictor: found the observed sites {list(program.observed)} and factors {list(program.factors)}, wanted one "
            f"observed site, a vector in a plate, that is {' or '.join(link.__name__ for link in LINKS)}."
        )
    return found[0], program.sites[found[0]].shape[0]


def _proposals(program: Program, observed: str, size: int):
    """Every structure that shapes, plates and dependencies allow."""
    is_array = lambda value: isinstance(value, np.ndarray | Array)
    arrays = {name: np.asarray(value) for name, value in program.arguments.items() if is_array(value) and value.shape[:1] == (size,)}
    vectors = {name: value for name, value in arrays.items() if value.ndim == 1}
    indices = [name for name, value in vectors.items() if value.dtype.kind in "iu" and value.min() >= 0]
    for by_entry in {tuple(arrays): 0, tuple(vectors): 0}:
        parents = _parents(program, observed, by_entry)
        about = [program.sites[name] for name in program.latent if name in parents]
        plates = list(dict.fromkeys(site.dims[0] for site in about if site.shape and site.dims[0] in program.plates and _is_real(site)))
        for pair in permutations(plates, 2):
            for index in permutations(indices, 2):
                sides = _side(program, about, pair[0], index[0]), _side(program, about, pair[1], index[1])
                if plates.index(pair[0]) < plates.index(pair[1]) and all(vectors[side.index].max() < side.size for side in sides):
                    rest = [site for site in about if site.name not in (*sides[0].sites, *sides[1].sites)]
                    for components, shared in _of_the_rest(rest, sides, program):
                        yield Crossed(observed, by_entry, sides, components, shared)


def _side(program: Program, about: list, plate: str, index: str) -> Side:
    sites = tuple(site.name for site in about if site.shape and site.dims[0] == plate and _is_real(site))
    return Side(plate, program.sites[sites[0]].shape[0], index, sites)


def _of_the_rest(rest: list, sides: tuple, program: Program):
    """What the other sites of the predictor may be: switches with amplitudes and factors, and shared sites."""
    shared = tuple(site.name for site in rest if _is_real(site))
    others = [site for site in rest if site.name not in shared]
    if not others:
        yield None, shared
    switches = [site for site in others if site.support is constraints.boolean and len(site.shape) == 1]
    if len(others) == 2 and len(switches) == 1:
        [amplitude] = (site for site in others if site is not switches[0])
        is_factor = lambda name: program.sites[name].dims[1:] == switches[0].dims
        factors = [[name for name in side.sites if is_factor(name)] for side in sides]
        children = [name for name, parents in program.parents.items() if parents & {amplitude.name, *factors[0], *factors[1]}]
        is_free = (
            children == [name for name in children if name in program.observed] and switches[0].name not in program.parents[amplitude.name]
        )
        if amplitude.dims == switches[0].dims and is_free and all(len(names) == 1 for names in factors) and _is_amplitude(amplitude):
            yield Components(switches[0].name, amplitude.name, (factors[0][0], factors[1][0])), shared


def _is_real(site) -> bool:
    support = site.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def _is_amplitude(site) -> bool:
    return _is_real(site) or site.support in (constraints.positive, constraints.nonnegative)


def _parents(program: Program, observed: str, by_entry: tuple[str, ...]) -> frozenset[str]:
    """The latent sites that the predictor is computed from."""
    few = program.with_arguments(**{name: np.asarray(program.arguments[name])[:2] for name in by_entry})
    shapes = {name: jax.ShapeDtypeStruct(program.sites[name].shape, program.sites[name].dtype) for name in program.latent}
    return eval_provenance(lambda **values: predictor(few, observed, values), **shapes)


def _largest_gap(crossed: Crossed, program: Program, rng_key: Array) -> float:
    """Of (1), (2) and the priors being Normal, relative, at random values of all sites."""
    size = crossed.num_entries(program)
    few = crossed.at(program, np.linspace(0, size - 1, min(size, FEW)).astype(int))

    @jax.jit
    def gaps(key):
        keys = random.split(key, 5)
        values = few.draw_initial(keys[0])
        found = [gap for side, at in zip(crossed.sides, keys[1:3], strict=True) for gap in _gaps_of_side(crossed, few, values, side, at)]
        return jnp.max(jnp.stack(found + _gaps_of_globals(crossed, few, values, few.draw_initial(keys[3]))))

    return max(float(jnp.nan_to_num(gaps(key), nan=jnp.inf)) for key in random.split(rng_key, NUM_SETTINGS))


def _gaps_of_side(crossed: Crossed, few: Program, values: dict[str, Array], side: Side, rng_key: Array) -> list[Array]:
    """(1), and a prior in which every element is Normal by itself."""
    [other] = (each for each in crossed.sides if each.plate != side.plate)
    old = crossed.flat(values, side)
    step = random.normal(rng_key, old.shape, old.dtype)
    moved = {**values, **crossed.unflat(few, side, old + step)}
    at = lambda name: jnp.asarray(few.arguments[name])
    wanted = jnp.sum(crossed.table(few, values, side)[at(other.index)] * step[at(side.index)], axis=-1)
    found = predictor(few, crossed.observed, moved) - predictor(few, crossed.observed, values)
    (slope, fall), (there, _) = crossed.prior(few, values, side), crossed.prior(few, moved, side)
    is_proper = jnp.where(jnp.all(fall > 0), 0.0, jnp.inf)
    return [_gap(found, wanted), _gap(there, slope - fall * step), is_proper]


def _gaps_of_globals(crossed: Crossed, few: Program, values: dict[str, Array], other: dict[str, Array]) -> list[Array]:
    """(2), for amplitudes, switches and shared sites moved together to where they are in `other`."""
    names = (*(crossed.components[:2] if crossed.components else ()), *crossed.shared)
    moved = {**values, **{name: other[name] for name in names}}
    slopes, (start, _), (end, _) = crossed.slopes(few, values), crossed.global_values(values), crossed.global_values(moved)
    (slope, fall), (there, _) = crossed.prior(few, values), crossed.prior(few, moved)
    about_prior = [_gap(there, slope - fall * (end - start)), jnp.where(jnp.all(fall > 0), 0.0, jnp.inf)]
    found = predictor(few, crossed.observed, moved) - predictor(few, crossed.observed, values)
    if not crossed.components:
        return [_gap(found, slopes @ (end - start)), *about_prior]
    (switch, _, factors), width = crossed.components, len(values[crossed.components.switch])
    on = lambda at, x: x.at[:width].multiply(at[switch])
    rows = [values[name][jnp.asarray(few.arguments[side.index])] for name, side in zip(factors, crossed.sides, strict=True)]
    return [_gap(found, slopes @ (on(moved, end) - on(values, start))), _gap(slopes[:, :width], rows[0] * rows[1]), *about_prior]


def _gap(found: Array, wanted: Array) -> Array:
    """The largest difference, relative to the largest number."""
    return jnp.max(jnp.abs(found - wanted), initial=0) / (1e-30 + jnp.max(jnp.abs(wanted), initial=0))
