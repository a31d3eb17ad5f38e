"""Reading a crossed predictor off a model: who plays which part (`inference.crossed`).

Shapes, plates and dependencies propose structures; of each one is proved, as identities on some entries at random values of all sites,

    its equations (1) and (2)      by moving all sites of a side, and all others
    the priors of what is drawn    Normal (an amplitude perhaps cut at 0), and each element by itself
    the entries' log density       that of the link alone: not scaled, its noise no function of what is drawn

Cost: a few evaluations of the model on `FEW` entries.
"""

from dataclasses import replace
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.ops.provenance import eval_provenance

from inference.compiling import once
from inference.crossed import Components, Crossed, Level, Side, chunks
from inference.latent_normal import LINKS, hold, predictor, rebuilt
from inference.program import Program
from inference.proof import gap, random_settings, root_epsilon, worst
from inference.sites import Site, StructureError, is_real

__all__ = ["read_crossed"]

FEW = 512  # entries on which the identities are proved


def read_crossed(program: Program, rng_key: Array) -> Crossed:
    """Finds and proves the structure, or raises StructureError that says what is missing."""
    observed, size = _observed(program)
    missed = []
    for found in _proposals(program, observed, size, missed):
        gap = _largest_gap(found, program, rng_key)
        if gap < root_epsilon():
            return replace(found, levels=_levels(found, program, rng_key))
        missed.append(f"sides {' and '.join(repr(side.plate) for side in found.sides)} miss by {gap:.2g}")
    raise StructureError(f"site {observed!r}: no crossed predictor; {'; '.join(missed) or 'nothing has the shape of one'}.")


def _observed(program: Program) -> tuple[str, int]:
    """The one site of entries, and how many it has."""
    links = [link.__name__ for link in LINKS]
    found = [name for name in program.observed if program.sites[name].family in links]
    if len(found) != 1 or len(program.sites[found[0]].plates) != 1 or len(program.sites[found[0]].shape) != 1 or program.factors:
        raise StructureError(
            f"no crossed predictor: found the observed sites {list(program.observed)} and factors {list(program.factors)}, wanted one "
            f"observed site, a vector in a plate, that is {' or '.join(links)}."
        )
    return found[0], program.sites[found[0]].shape[0]


# Proposals.


def _proposals(program: Program, observed: str, size: int, missed: list[str]):
    """Every structure that shapes, plates and dependencies allow; `missed` is told why there are no more."""
    is_array = lambda value: isinstance(value, np.ndarray | Array)
    arrays = {name: np.asarray(value) for name, value in program.arguments.items() if is_array(value) and value.shape[:1] == (size,)}
    vectors = {name: value for name, value in arrays.items() if value.ndim == 1}
    indices = [name for name, value in vectors.items() if value.dtype.kind in "iu" and value.min() >= 0]
    for by_entry in {tuple(arrays): 0, tuple(vectors): 0}:
        few = program.with_arguments(**{name: arrays[name][: min(size, 2)] for name in by_entry})
        try:
            parents = _parents(few, observed)
        except (TypeError, ValueError) as error:  # the model's own: some argument is as long as the entries by chance, or must be
            missed.append(f"with rows of {', '.join(by_entry)} for two entries alone, the model says: {error}")
            continue
        about = [program.sites[name] for name in program.latent if name in parents]
        plates = list(dict.fromkeys(site.dims[0] for site in about if site.shape and site.dims[0] in program.plates and is_real(site)))
        for pair in permutations(plates, 2):
            for index in permutations(indices, 2):
                sides = _side(program, about, pair[0], index[0]), _side(program, about, pair[1], index[1])
                if plates.index(pair[0]) < plates.index(pair[1]) and all(vectors[side.index].max() < side.size for side in sides):
                    rest = [site for site in about if site.name not in (*sides[0].sites, *sides[1].sites)]
                    for components, shared in _of_the_rest(rest, sides, program):
                        found = Crossed(observed, by_entry, sides, components, shared)
                        if _is_apart(found, few):
                            yield found


def _parents(few: Program, observed: str) -> frozenset[str]:
    """The latent sites that the predictor is computed from."""
    shapes = {name: jax.ShapeDtypeStruct(few.sites[name].shape, few.sites[name].dtype) for name in few.latent}
    return eval_provenance(lambda **values: predictor(few, observed, values), **shapes)


def _side(program: Program, about: list[Site], plate: str, index: str) -> Side:
    sites = tuple(site.name for site in about if site.shape and site.dims[0] == plate and is_real(site))
    return Side(plate, program.sites[sites[0]].shape[0], index, sites)


def _of_the_rest(rest: list[Site], sides: tuple[Side, Side], program: Program):
    """What the other sites of the predictor may be: switches with amplitudes and factors, and shared sites."""
    switches = [site for site in rest if site.support is constraints.boolean and len(site.shape) == 1]
    if not switches and all(map(is_real, rest)):
        yield None, tuple(site.name for site in rest)
    if len(switches) != 1:
        return
    [switch] = switches
    is_factor = lambda site: site.event_dim == 0 and site.dims[1:] == switch.dims
    factors = [[name for name in side.sites if is_factor(program.sites[name])] for side in sides]
    for amplitude in rest:
        others = [site for site in rest if site is not switch and site is not amplitude]
        is_one = amplitude.dims == switch.dims and amplitude.event_dim == 0 and _is_amplitude(amplitude)
        if is_one and all(len(names) == 1 for names in factors) and all(map(is_real, others)):
            yield Components(switch.name, amplitude.name, (factors[0][0], factors[1][0])), tuple(site.name for site in others)


def _is_amplitude(site: Site) -> bool:
    return is_real(site) or site.support in (constraints.positive, constraints.nonnegative)


def _is_apart(crossed: Crossed, few: Program) -> bool:
    """Whether nothing but the entries hears of components, no prior of the switches, and the entries of all by the predictor alone."""
    eta = jnp.zeros(few.sites[crossed.observed].shape)
    if hold(few, crossed.observed, eta).parents[crossed.observed] & set(crossed.sites):
        return False
    if not crossed.components:
        return True
    switch, *parts = crossed.components.switch, crossed.components.amplitude, *crossed.components.factors
    children = lambda names: {name for name, parents in few.parents.items() if parents & set(names)} - set(few.deterministic)
    return children(parts) == {crossed.observed} and not children([switch]) & set(crossed.sites)


# Proofs.


def _largest_gap(crossed: Crossed, program: Program, rng_key: Array) -> float:
    """Of all identities, relative, at random values of all sites; every switch is on at one of two places."""
    size = crossed.num_entries(program)
    few = crossed.at(program, np.linspace(0, size - 1, min(size, FEW)).astype(int))

    def gaps(key):
        keys = random.split(key, 5)
        values, other = few.draw_initial(keys[0]), few.draw_initial(keys[3])
        if crossed.components:
            switch = crossed.components.switch
            values[switch] = random.bernoulli(keys[4], shape=values[switch].shape).astype(values[switch].dtype)
            other[switch] = 1 - values[switch]
        found = [gap for side, at in zip(crossed.sides, keys[1:3], strict=True) for gap in _gaps_of_side(crossed, few, values, side, at)]
        found += [*_gaps_of_globals(crossed, few, values, other), _gap_of_entries(crossed, few, values)]
        return {crossed.observed: jnp.max(jnp.stack(found))}

    return float(worst(gaps, random_settings(rng_key))[0][crossed.observed])


def _gap_of_entries(crossed: Crossed, few: Program, values: dict[str, Array]) -> Array:
    """Their log density is that of the link."""
    site = few.trace(values)[crossed.observed]
    link = rebuilt(site["fn"], predictor(few, crossed.observed, values))
    return _gap(few.log_probs(values)[crossed.observed], link.log_prob(site["value"]))


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
    return [_gap(found, wanted), _gap(there, slope - fall * step), _infinite_unless(fall > 0)]


def _gaps_of_globals(crossed: Crossed, few: Program, values: dict[str, Array], other: dict[str, Array]) -> list[Array]:
    """(2), for amplitudes, switches and shared sites moved together to where they are in `other`."""
    names = (*(crossed.components[:2] if crossed.components else ()), *crossed.shared)
    moved = {**values, **{name: other[name] for name in names}}
    slopes, (start, _), (end, _) = crossed.slopes(few, values), crossed.global_values(values), crossed.global_values(moved)
    (slope, fall), (there, _) = crossed.prior(few, values), crossed.prior(few, moved)
    about_prior = [_gap(there, slope - fall * (end - start)), _infinite_unless(fall > 0)]
    found = predictor(few, crossed.observed, moved) - predictor(few, crossed.observed, values)
    if not crossed.components:
        return [_gap(found, slopes @ (end - start)), *about_prior]
    (switch, _, factors), width = crossed.components, len(values[crossed.components.switch])
    on = lambda at, x: x.at[:width].multiply(at[switch])
    rows = [values[name][jnp.asarray(few.arguments[side.index])] for name, side in zip(factors, crossed.sides, strict=True)]
    return [_gap(found, slopes @ (on(moved, end) - on(values, start))), _gap(slopes[:, :width], rows[0] * rows[1]), *about_prior]


def _levels(crossed: Crossed, program: Program, rng_key: Array) -> tuple[Level, ...]:
    """Where a shared site and all items of a side add the same to every entry, and have a Normal prior along that line."""
    if not crossed.shared:
        return ()
    shared = replace(crossed, components=None)

    def are_one(key):
        values = program.draw_initial(key)
        first = crossed.at(program, np.arange(1))
        tables = [jnp.all(crossed.table(first, values, side) == 1, axis=0) for side in crossed.sides]
        slopes = lambda some: jnp.all(shared.slopes(crossed.at(program, some), values) == 1, axis=0)
        return [*tables, jnp.all(lax.map(slopes, chunks(crossed.num_entries(program))), axis=0)]

    *tables, of_shared = (np.flatnonzero(each) for each in once(are_one, rng_key)(rng_key))
    if not of_shared.size:
        return ()
    place = int(of_shared[0]) + (program.sites[crossed.components.switch].shape[0] if crossed.components else 0)
    proposed = [Level(side, int(at[0]), place) for side, at in zip(crossed.sides, tables, strict=True) if at.size]
    gaps = [_gap_of_level(crossed, program, level, rng_key) for level in proposed]
    return tuple(level for level, gap in zip(proposed, gaps, strict=True) if gap < root_epsilon())


def _gap_of_level(crossed: Crossed, program: Program, level: Level, rng_key: Array) -> float:
    """The prior falls along the line as a Normal does."""
    few = crossed.at(program, np.arange(1))

    def gaps(key):
        values = few.draw_initial(key)
        (slope, fall), (there, _) = (crossed.line(few, crossed.shifted(few, values, level, step), level) for step in (0.0, 1.0))
        return {level.side.plate: jnp.maximum(_gap(there, slope - fall), _infinite_unless(fall > 0))}

    return float(worst(gaps, [(rng_key,)])[0][level.side.plate])


def _gap(found: Array, wanted: Array) -> Array:
    """The largest difference, relative to the largest number."""
    return gap(found, wanted, 1e-30 + jnp.max(jnp.abs(wanted), initial=0))


def _infinite_unless(holds: Array) -> Array:
    return jnp.where(jnp.all(holds), 0.0, jnp.inf)
