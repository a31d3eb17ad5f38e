"""Crossed predictors: each entry has a row and a column, and a predictor linear in either.

A matrix factorisation is one: given the column factors, the predictor is linear in the row factors,
and the reverse. The row and the column are the items of an entry, one on each side.

    crossed = read_crossed(program, rng_key)      # the part of each site; proved
    eta = crossed.predictor(program, values)      # of every entry
    table = crossed.table(program, values, side)  # its slope in the sites of a side, for each item
                                                  # of the other side
    response, weight = respond(rng_key, distribution, value)  # by data augmentation for a probit
    held = hold(program, "y", eta)                # the model with the predictor fixed at eta

The observed site is a Normal, or a probit of one, whose mean is the predictor

    eta[e] = offset[e] + table[other[e]] . x[index[e]]                                          (1)
    eta[e] = offset[e] + sum_k s[k] z[k] slope[e, k],                                           (2)
    slope[e, k] = u[row[e], k] v[column[e], k]

with x the sites of a side (Normal, one row for each of its items), z a switch and s an amplitude
for each component. `index` and `other` are arguments of the model, an integer for each entry. No
name and no formula of a model occurs here: slopes are derivatives of the model.

Shapes, plates and dependencies propose structures. For each one these identities are proved, on
some entries at random values of all sites:

    equations (1) and (2)       by moving all sites of a side, and all others
    the priors                  Normal (an amplitude perhaps cut at 0), elements independent
    the entries' log density    that of the distribution in `LINKS` given the predictor: not scaled,
                                and its noise no function of the predictor's sites

Cost: of the predictor, one evaluation of the model; of a table, as many as a side has columns, on
one entry for each item; of slopes, as many as they have columns; of the proof, a few evaluations on
`NUM_PROVED` entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int
from numpyro.distributions import constraints
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from inference.distributions.missing import Missing
from inference.distributions.probit import BinomialProbit, OrderedProbit
from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import Site, StructureError, is_real, unwrap
from inference.reading.proof import gap, random_settings, root_epsilon, worst

__all__ = [
    "LINKS",
    "Components",
    "Crossed",
    "Intercept",
    "Side",
    "chunks",
    "hold",
    "predictor",
    "read_crossed",
    "rebuilt",
    "respond",
]

LINKS = {  # class -> the parameter that is the predictor, the other parameters
    dist.Normal: ("loc", ("scale",)),
    OrderedProbit: ("predictor", ("cutpoints",)),
    BinomialProbit: ("predictor", ("trials",)),
}


def predictor(program: Program, site: str, values: Mapping[str, Any]) -> Array:
    """The linear predictor of an observed site, one number for each of its values."""
    fn = unwrap(program.trace(values)[site]["fn"])
    return jnp.broadcast_to(getattr(fn, LINKS[type(fn)][0]), program.sites[site].shape)


def rebuilt(distribution, eta: Array):
    """The distribution with another predictor; masks and missing values stay."""
    if isinstance(distribution, Missing):
        return Missing(rebuilt(distribution.base_dist, eta), validate_args=False)
    if isinstance(distribution, dist.MaskedDistribution):
        return rebuilt(distribution.base_dist, eta).mask(distribution._mask)
    # the predictor gives the whole shape
    if isinstance(distribution, dist.Independent | dist.ExpandedDistribution):
        return rebuilt(distribution.base_dist, eta)
    name, others = LINKS[type(distribution)]
    kept = {other: getattr(distribution, other) for other in others}
    return type(distribution)(**{name: eta}, **kept, validate_args=False)


def respond(rng_key: Array, distribution, value: Array) -> tuple[Array, Array]:
    """Responses and weights of the entries, as in Normal(response | eta, 1 / sqrt(weight)).

    A Normal has its value and precision; a probit has a draw of its latent Normal. Entries that are
    masked or missing weigh 0.

    Args:
        rng_key: a key.
        distribution: the distribution of the entries.
        value: the values of the entries.
    """
    base, is_seen, outer = unwrap(distribution), jnp.ones(jnp.shape(value), bool), distribution
    while outer is not base:
        if isinstance(outer, Missing) and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            is_seen = is_seen & ~jnp.isnan(value)
        if isinstance(outer, dist.MaskedDistribution):
            is_seen = is_seen & outer._mask
        outer = outer.base_dist
    value = jnp.where(is_seen, value, 0)
    if isinstance(base, dist.Normal):
        response, weight = value, jnp.broadcast_to(base.scale**-2.0, jnp.shape(value))
    else:
        response, weight = base.augment(rng_key, value)
    return jnp.where(is_seen, response, 0), jnp.where(is_seen, weight, 0)


class _Hold(Messenger):
    def __init__(self, fn, site: str, eta: Array):
        super().__init__(fn)
        self.site, self.eta = site, eta

    def process_message(self, msg):
        if msg["name"] == self.site:
            msg["fn"] = rebuilt(msg["fn"], self.eta)


def hold(program: Program, site: str, eta: Array) -> Program:
    """The model with the predictor of an observed site fixed at `eta`."""
    return Program(_Hold(program.model, site, eta), *program.args, **program.kwargs)


class Side(NamedTuple):
    """One side of the crossing, such as the rows: the items of one plate."""

    plate: str
    size: int
    index: str  # the argument that gives the item of each entry
    sites: tuple[str, ...]  # the latent sites with a row for each item


class Components(NamedTuple):
    """The sites of the components in (2): switch z, amplitude s, and factors u and v."""

    switch: str
    amplitude: str
    factors: tuple[str, str]


class Intercept(NamedTuple):
    """An intercept that the model has twice: as a column of a side, and as a shared site."""

    side: Side
    column: int
    place: int  # index of the shared site in `global_values`


@dataclass(frozen=True)
class Crossed:
    """The part of each site; hashable, so that compiled code may depend on it."""

    observed: str
    by_entry: tuple[str, ...]  # arguments with a row for each entry
    sides: tuple[Side, Side]
    components: Components | None
    shared: tuple[str, ...]  # Normal sites in which all entries are linear
    intercepts: tuple[Intercept, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites that the predictor depends on."""
        of_components = self.components[:2] if self.components else ()
        return (*self.sides[0].sites, *self.sides[1].sites, *of_components, *self.shared)

    def num_entries(self, program: Program) -> int:
        """The number of entries."""
        return len(program.arguments[self.by_entry[0]])

    def at(self, program: Program, entries: Any) -> Program:
        """The model on some of the entries."""
        return program.with_arguments(
            **{name: jnp.asarray(program.arguments[name])[entries] for name in self.by_entry}
        )

    def predictor(self, program: Program, values: Mapping[str, Any]) -> Array:
        """The linear predictor of every entry; the model runs on a chunk of them at a time."""
        size = self.num_entries(program)
        of_chunk = lambda entries: predictor(self.at(program, entries), self.observed, values)
        return lax.map(of_chunk, chunks(size)).reshape(-1)[:size]

    def table(
        self, program: Program, values: Mapping[str, Any], side: Side
    ) -> Float[Array, "other column"]:
        """Slopes of an entry's predictor in the sites of its item, by item of the other side."""
        [other] = (each for each in self.sides if each.plate != side.plate)
        first = self.at(program, jnp.zeros(other.size, jnp.int32))
        index = {side.index: jnp.zeros(other.size, jnp.int32), other.index: jnp.arange(other.size)}
        entries = first.with_arguments(**index)

        def predictor_at(row):
            rows = self.unflat(program, side, jnp.broadcast_to(row, (side.size, len(row))))
            return predictor(entries, self.observed, {**values, **rows})

        start = self.flat(values, side)[0]
        _, slope = jax.linearize(predictor_at, start)
        return lax.map(slope, jnp.eye(len(start), dtype=start.dtype)).T

    def slopes(self, program: Program, values: Mapping[str, Any]) -> Float[Array, "entry column"]:
        """Slopes of the predictor in the amplitudes, all switched on, then in the shared sites."""
        start, place = self.global_values(values)
        names = [self.components.switch] if self.components else []
        on = {name: jnp.ones_like(values[name]) for name in names}
        predictor_at = lambda x: predictor(program, self.observed, {**values, **place(x), **on})
        _, slope = jax.linearize(predictor_at, start)
        return jax.vmap(slope)(jnp.eye(len(start), dtype=start.dtype)).T

    def shared_slopes(self, program: Program, values: Mapping[str, Any]) -> Array:
        """Slopes of the predictor in the shared sites, [entry, column]."""
        return replace(self, components=None).slopes(program, values)

    def factor_columns(self, program: Program, side: Side) -> slice:
        """The columns of a side that are the factors of the components."""
        if not self.components:
            return slice(0, 0)
        [name] = set(self.components.factors) & set(side.sites)
        widths = [int(np.prod(program.sites[each].shape[1:])) for each in side.sites]
        place = side.sites.index(name)
        return slice(sum(widths[:place]), sum(widths[: place + 1]))

    def unit_table(
        self, program: Program, values: Mapping[str, Any], side: Side
    ) -> tuple[Float[Array, "other column"], Float[Array, " column"]]:
        """The table at switches and amplitudes of 1, and the scale of each of its columns."""
        if not self.components:
            table = self.table(program, values, side)
            return table, jnp.ones_like(table[0])
        switch, amplitude, _ = self.components
        ones = {name: jnp.ones_like(values[name]) for name in (switch, amplitude)}
        table = self.table(program, {**values, **ones}, side)
        scale = values[amplitude] * values[switch]
        return table, jnp.ones_like(table[0]).at[self.factor_columns(program, side)].set(scale)

    def global_values(self, values: Mapping[str, Any]):
        """Amplitudes and shared sites as one vector, and the way back to a dictionary."""
        names = ((self.components.amplitude,) if self.components else ()) + self.shared
        flat, unravel = ravel_pytree([jnp.asarray(values[name]) for name in names])
        return flat, lambda x: dict(zip(names, unravel(x), strict=True))

    def flat(self, values: Mapping[str, Any], side: Side) -> Array:
        """The sites of a side as one array, [item, column]."""
        return jnp.concatenate(
            [jnp.reshape(values[name], (side.size, -1)) for name in side.sites], axis=1
        )

    def unflat(self, program: Program, side: Side, columns: Array) -> dict[str, Array]:
        """The sites of a side, from one array [item, column]."""
        shapes = [program.sites[name].shape for name in side.sites]
        ends = np.cumsum([int(np.prod(shape[1:])) for shape in shapes])[:-1]
        parts = jnp.split(columns, ends, axis=1)
        return {
            name: part.reshape(shape)
            for name, part, shape in zip(side.sites, parts, shapes, strict=True)
        }

    def shifted(
        self, program: Program, values: Mapping[str, Any], intercept: Intercept, step: Any
    ) -> dict[str, Any]:
        """All values, after `step` has moved from the items' intercept to the shared site.

        The predictor does not change.
        """
        (side, column, place), (shared, put) = intercept, self.global_values(values)
        rows = self.unflat(program, side, self.flat(values, side).at[:, column].add(-step))
        return {**values, **put(shared.at[place].add(step)), **rows}

    def line(
        self, program: Program, values: Mapping[str, Any], intercept: Intercept
    ) -> tuple[Array, Array]:
        """Slope of the log joint along the move of `shifted`, and minus its second derivative."""
        names, zero = (*intercept.side.sites, *self.shared), jnp.zeros((), jnp.result_type(float))
        shifted = lambda step: self.shifted(program, values, intercept, step)
        return _slope_and_fall(lambda step: self.log_prior(program, shifted(step), names), zero)

    def prior(
        self, program: Program, values: Mapping[str, Any], side: Side | None = None
    ) -> tuple[Array, Array]:
        """Slope of the log prior in the sites of a side, and minus its second derivative.

        Both are [item, column]. Without a side they are those in amplitudes and shared sites,
        [column].
        """
        start, place = self.global_values(values)
        if side:
            start, place = self.flat(values, side), lambda x: self.unflat(program, side, x)
        names = tuple(place(start))
        log_prior = lambda x: self.log_prior(program, {**values, **place(x)}, names)
        return _slope_and_fall(log_prior, start)

    def log_odds(self, program: Program, values: Mapping[str, Any], switch: str, k: Array) -> Array:
        """Prior log odds that the switch of component k is on, given the other switches."""
        log_prior = lambda on: self.log_prior(
            program, {**values, switch: values[switch].at[k].set(on)}, (switch,)
        )
        return log_prior(1) - log_prior(0)

    def log_prior(
        self, program: Program, values: Mapping[str, Any], names: tuple[str, ...]
    ) -> Array:
        """The terms of the log joint that depend on some sites, but for that of the entries."""
        about = {name for name, parents in program.parents.items() if parents & set(names)}
        about = (about | set(names)) - {self.observed}
        terms = program.log_probs(values)
        own = [jnp.sum(term) for name, term in terms.items() if name in about]
        return sum(own, start=jnp.zeros(()))


def _slope_and_fall(log_density, at: Array) -> tuple[Array, Array]:
    slope, bend = jax.jvp(jax.grad(log_density), (at,), (jnp.ones_like(at),))
    return slope, -bend


def chunks(size: int, most: int = 2**13) -> Int[Array, "chunk entry"]:
    """Indices 0 .. size - 1 in rows of equal length; the last index pads the last row.

    Args:
        size: the number of indices.
        most: the largest length of a row.
    """
    num = -(-size // most)
    return jnp.minimum(jnp.arange(num * -(-size // num)), size - 1).reshape(num, -1)


NUM_PROVED = 512  # entries on which the identities are proved


def read_crossed(program: Program, rng_key: Array) -> Crossed:
    """Finds and proves the structure.

    Args:
        program: the model with its data.
        rng_key: for the settings of the proof.

    Raises:
        StructureError: says what is missing.
    """
    observed, size = _observed(program)
    missed = []
    for found in _proposals(program, observed, size, missed):
        gap = _largest_gap(found, program, rng_key)
        if gap < root_epsilon():
            return replace(found, intercepts=_intercepts(found, program, rng_key))
        missed.append(
            f"sides {' and '.join(repr(side.plate) for side in found.sides)} miss by {gap:.2g}"
        )
    raise StructureError(
        f"site {observed!r}: no crossed predictor; "
        f"{'; '.join(missed) or 'no sites and indices have the shapes of one'}."
    )


def _observed(program: Program) -> tuple[str, int]:
    links = [link.__name__ for link in LINKS]
    found = [program.sites[name] for name in program.observed]
    found = [site for site in found if site.family in links]
    is_vector = len(found) == 1 and len(found[0].plates) == len(found[0].shape) == 1
    if not is_vector or program.factors:
        raise StructureError(
            f"no crossed predictor: found the observed sites {list(program.observed)} and factors "
            f"{list(program.factors)}, wanted one observed site, a vector in a plate, that is "
            f"{' or '.join(links)}."
        )
    return found[0].name, found[0].shape[0]


# Proposals.


def _proposals(program: Program, observed: str, size: int, missed: list[str]):
    """Every structure that shapes, plates and dependencies allow.

    The list `missed` collects why there are no more.
    """
    is_by_entry = lambda value: isinstance(value, np.ndarray | Array) and value.shape[:1] == (size,)
    arrays = {
        name: np.asarray(value) for name, value in program.arguments.items() if is_by_entry(value)
    }
    vectors = {name: value for name, value in arrays.items() if value.ndim == 1}
    indices = [
        name for name, value in vectors.items() if value.dtype.kind in "iu" and value.min() >= 0
    ]
    for by_entry in dict.fromkeys((tuple(arrays), tuple(vectors))):
        two = program.with_arguments(**{name: arrays[name][:2] for name in by_entry})
        try:
            parents = _parents(two, observed)
        # the model's own error: some argument is as long as the entries by chance, or must be
        except (TypeError, ValueError) as error:
            missed.append(
                f"with {', '.join(by_entry)} cut to two entries, the model raises: {error}"
            )
            continue
        about = [program.sites[name] for name in program.latent if name in parents]
        plates = dict.fromkeys(
            site.dims[0]
            for site in about
            if site.shape and site.dims[0] in program.plates and is_real(site)
        )
        for pair in combinations(plates, 2):
            for index in permutations(indices, 2):
                sides = (
                    _side(program, about, pair[0], index[0]),
                    _side(program, about, pair[1], index[1]),
                )
                if all(vectors[side.index].max() < side.size for side in sides):
                    of_sides = (*sides[0].sites, *sides[1].sites)
                    rest = [site for site in about if site.name not in of_sides]
                    for components, shared in _roles(rest, sides, program):
                        found = Crossed(observed, by_entry, sides, components, shared)
                        if _is_separate(found, two):
                            yield found


def _parents(two: Program, observed: str) -> frozenset[str]:
    shapes = {
        name: jax.ShapeDtypeStruct(two.sites[name].shape, two.sites[name].dtype)
        for name in two.latent
    }
    return eval_provenance(lambda **values: predictor(two, observed, values), **shapes)


def _side(program: Program, about: list[Site], plate: str, index: str) -> Side:
    is_own = lambda site: site.shape and site.dims[0] == plate and is_real(site)
    sites = tuple(site.name for site in about if is_own(site))
    return Side(plate, program.sites[sites[0]].shape[0], index, sites)


def _roles(rest: list[Site], sides: tuple[Side, Side], program: Program):
    """The parts that the other sites may have: components, and the names of shared sites."""
    switches = [
        site for site in rest if site.support is constraints.boolean and len(site.shape) == 1
    ]
    if not switches and all(map(is_real, rest)):
        yield None, tuple(site.name for site in rest)
    if len(switches) != 1:
        return
    [switch] = switches
    is_factor = lambda site: site.event_dim == 0 and site.dims[1:] == switch.dims
    factors = [[name for name in side.sites if is_factor(program.sites[name])] for side in sides]
    is_positive = lambda site: site.support in (constraints.positive, constraints.nonnegative)
    for amplitude in rest:
        others = [site for site in rest if site is not switch and site is not amplitude]
        is_amplitude = (
            amplitude.dims == switch.dims
            and amplitude.event_dim == 0
            and (is_real(amplitude) or is_positive(amplitude))
        )
        if is_amplitude and all(len(names) == 1 for names in factors) and all(map(is_real, others)):
            yield (
                Components(switch.name, amplitude.name, (factors[0][0], factors[1][0])),
                tuple(site.name for site in others),
            )


def _is_separate(crossed: Crossed, two: Program) -> bool:
    """Whether the entries depend on the sites through the predictor only.

    Also, only the entries may depend on amplitudes and factors, and no prior of the crossed sites
    on the switches.
    """
    eta = jnp.zeros(two.sites[crossed.observed].shape)
    if hold(two, crossed.observed, eta).parents[crossed.observed] & set(crossed.sites):
        return False
    if not crossed.components:
        return True
    switch, amplitude, factors = crossed.components
    children = lambda names: (
        {name for name, parents in two.parents.items() if parents & set(names)}
        - set(two.deterministic)
    )
    of_parts = children([amplitude, *factors])
    return of_parts == {crossed.observed} and not children([switch]) & set(crossed.sites)


# Proofs.


def _largest_gap(crossed: Crossed, program: Program, rng_key: Array) -> float:
    """The largest relative gap of all identities at random values of all sites.

    Identities compare two points; every switch is on at one of the two.
    """
    size = crossed.num_entries(program)
    some = crossed.at(program, np.linspace(0, size - 1, min(size, NUM_PROVED)).astype(int))

    def gaps(key):
        keys = random.split(key, 5)
        values, other = some.draw_initial(keys[0]), some.draw_initial(keys[3])
        if crossed.components:
            switch = crossed.components.switch
            old = values[switch]
            values[switch] = random.bernoulli(keys[4], shape=old.shape).astype(old.dtype)
            other[switch] = 1 - values[switch]
        found = _gaps_of_globals(crossed, some, values, other)
        for side, at in zip(crossed.sides, keys[1:3], strict=True):
            found += _gaps_of_side(crossed, some, values, side, at)
        site = some.trace(values)[crossed.observed]
        link = rebuilt(site["fn"], predictor(some, crossed.observed, values))
        log_prob = some.log_probs(values)[crossed.observed]
        found.append(_gap(log_prob, link.log_prob(site["value"])))
        return {crossed.observed: jnp.max(jnp.stack(found))}

    return float(worst(gaps, random_settings(rng_key))[0][crossed.observed])


def _gaps_of_side(
    crossed: Crossed, some: Program, values: dict[str, Array], side: Side, rng_key: Array
) -> list[Array]:
    [other] = (each for each in crossed.sides if each.plate != side.plate)
    old = crossed.flat(values, side)
    step = random.normal(rng_key, old.shape, old.dtype)
    moved = {**values, **crossed.unflat(some, side, old + step)}
    index, of_other = (jnp.asarray(some.arguments[each.index]) for each in (side, other))
    wanted = jnp.sum(crossed.table(some, values, side)[of_other] * step[index], axis=-1)
    found = predictor(some, crossed.observed, moved) - predictor(some, crossed.observed, values)
    prior, there = crossed.prior(some, values, side), crossed.prior(some, moved, side)
    return [_gap(found, wanted), _gap_of_normal(prior, there, step)]


def _gaps_of_globals(
    crossed: Crossed, some: Program, values: dict[str, Array], other: dict[str, Array]
) -> list[Array]:
    """Gaps of (2), when amplitudes, switches and shared sites move to their values in `other`."""
    names = (*(crossed.components[:2] if crossed.components else ()), *crossed.shared)
    moved = {**values, **{name: other[name] for name in names}}
    slopes = crossed.slopes(some, values)
    (start, _), (end, _) = crossed.global_values(values), crossed.global_values(moved)
    prior, there = crossed.prior(some, values), crossed.prior(some, moved)
    of_prior = _gap_of_normal(prior, there, end - start)
    found = predictor(some, crossed.observed, moved) - predictor(some, crossed.observed, values)
    if not crossed.components:
        return [_gap(found, slopes @ (end - start)), of_prior]
    (switch, _, factors), width = crossed.components, len(values[crossed.components.switch])
    on = lambda at, x: x.at[:width].multiply(at[switch])
    u, v = (
        values[name][jnp.asarray(some.arguments[side.index])]
        for name, side in zip(factors, crossed.sides, strict=True)
    )
    wanted = slopes @ (on(moved, end) - on(values, start))
    return [_gap(found, wanted), _gap(slopes[:, :width], u * v), of_prior]


def _intercepts(crossed: Crossed, program: Program, rng_key: Array) -> tuple[Intercept, ...]:
    """The intercepts: where a shared site and all items of a side add the same to every entry.

    The log prior along the move between them must be that of a Normal.
    """
    if not crossed.shared:
        return ()
    shared, first = replace(crossed, components=None), crossed.at(program, np.arange(1))

    def are_one(key):
        values = program.draw_initial(key)
        tables = [
            jnp.all(crossed.table(first, values, side) == 1, axis=0) for side in crossed.sides
        ]
        slopes = lambda some: jnp.all(shared.slopes(crossed.at(program, some), values) == 1, axis=0)
        return [*tables, jnp.all(lax.map(slopes, chunks(crossed.num_entries(program))), axis=0)]

    *tables, of_shared = (np.flatnonzero(each) for each in once(are_one, rng_key)(rng_key))
    if not of_shared.size:
        return ()
    components = crossed.components
    place = int(of_shared[0]) + (program.sites[components.switch].shape[0] if components else 0)
    found = []
    for side, columns in zip(crossed.sides, tables, strict=True):
        for column in columns[:1]:
            intercept = Intercept(side, int(column), place)

            def gaps(key, intercept=intercept):
                values, step = first.draw_initial(key), jnp.ones(())
                moved = crossed.shifted(first, values, intercept, step)
                prior, there = (crossed.line(first, at, intercept) for at in (values, moved))
                return {"": _gap_of_normal(prior, there, step)}

            if worst(gaps, [(rng_key,)])[0][""] < root_epsilon():
                found.append(intercept)
    return tuple(found)


def _gap_of_normal(prior: tuple[Array, Array], there: tuple[Array, Array], step: Array) -> Array:
    """The gap between the slope of a log prior after a step and that of a Normal.

    It is infinite where the log prior is not concave.
    """
    slope, fall = prior
    return jnp.where(jnp.all(fall > 0), _gap(there[0], slope - fall * step), jnp.inf)


def _gap(found: Array, wanted: Array) -> Array:
    return gap(found, wanted, 1e-30 + jnp.max(jnp.abs(wanted), initial=0))
