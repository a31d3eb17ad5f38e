"""Observed sites with a Normal behind them: the predictor of each value, and what a value says of
it.

eta = predictor(program, "y", values)                    # mean of the latent Normal
response, weight = respond(rng_key, distribution, value)  # given a draw of the latent:
Normal(response | eta, 1 / sqrt(weight))
held = hold(program, "y", eta)                            # the model with eta as it is now, for
                                                          sites that have no part in it

A crossed predictor: entries, each of an item of one side and an item of another, and a predictor
linear in either.

    crossed = read_crossed(program, rng_key)               # which sites play which part
                                                           (inference.reading.crossed)
    eta = crossed.predictor(program, values)               # of every entry
    table = crossed.table(program, values, side)           # slope of the predictor in the sites of
                                                           a side, by item of the other side

The observed site is a Normal, or a probit of one, whose mean is the predictor

    eta[e] = offset[e] + table[other[e]] . x[index[e]]                                                       (1)
    eta[e] = offset[e] + sum_k s[k] z[k] slope[e, k],           slope[e, k] = u[row[e], k] v[column[e], k]   (2)

with x the sites of a side (Normal, one row for each of its items), z a switch and s an amplitude
for each component. `index` and `other` are arguments of the model, an integer for each entry. No
name and no formula of a model occurs here: slopes are its derivatives.

Cost: of the predictor, one evaluation of the model; of a table as many as a side has columns, on
one entry for each item; of slopes as many as they have columns.

Reading a crossed predictor off a model: who plays which part (`inference.reading.crossed`).

Shapes, plates and dependencies propose structures; of each one is proved, as identities on some
entries at random values of all sites,

    its equations (1) and (2)      by moving all sites of a side, and all others
    the priors of what is drawn    Normal (an amplitude perhaps cut at 0), and each element by
                                   itself
    the entries' log density       that of the link alone: not scaled, its noise no function of what
                                   is drawn

Cost: a few evaluations of the model on `FEW` entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
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
    "Level",
    "Side",
    "chunks",
    "hold",
    "predictor",
    "read_crossed",
    "rebuilt",
    "respond",
]

LINKS = {  # class -> name of the mean of the latent Normal among its parameters, the others
    dist.Normal: ("loc", ("scale",)),
    OrderedProbit: ("predictor", ("cutpoints",)),
    BinomialProbit: ("predictor", ("trials",)),
}


def predictor(program: Program, site: str, values: Mapping[str, Any]) -> Array:
    """The linear predictor of an observed site, one number for each of its values."""
    fn = unwrap(program.trace(values)[site]["fn"])
    return jnp.broadcast_to(getattr(fn, LINKS[type(fn)][0]), program.sites[site].shape)


def rebuilt(distribution, eta: Array):
    """The same distribution, what is masked and missing included, with another predictor."""
    if isinstance(distribution, Missing):
        return Missing(rebuilt(distribution.base_dist, eta), validate_args=False)
    if isinstance(distribution, dist.MaskedDistribution):
        return rebuilt(distribution.base_dist, eta).mask(distribution._mask)
    # of whole shape by its predictor
    if isinstance(distribution, dist.Independent | dist.ExpandedDistribution):
        return rebuilt(distribution.base_dist, eta)
    name, others = LINKS[type(distribution)]
    return type(distribution)(
        **{name: eta},
        **{other: getattr(distribution, other) for other in others},
        validate_args=False,
    )


def respond(rng_key: Array, distribution, value: Array) -> tuple[Array, Array]:
    """Response and weight, for a draw of the latent Normal; of a Normal, the value itself and the
    precision. What is masked or missing weighs 0.
    """
    base, counts = unwrap(distribution), _counts(distribution, value)
    value = jnp.where(counts, value, 0)
    if isinstance(base, dist.Normal):
        response, weight = value, jnp.broadcast_to(base.scale**-2.0, jnp.shape(value))
    else:
        response, weight = base.augment(rng_key, value)
    return jnp.where(counts, response, 0), jnp.where(counts, weight, 0)


def _counts(distribution, value: Array) -> Array:
    """Which values say something."""
    counts = jnp.ones(jnp.shape(value), bool)
    while distribution is not unwrap(distribution):
        if isinstance(distribution, Missing) and jnp.issubdtype(
            jnp.result_type(value), jnp.inexact
        ):
            counts = counts & ~jnp.isnan(value)
        if isinstance(distribution, dist.MaskedDistribution):
            counts = counts & distribution._mask
        distribution = distribution.base_dist
    return counts


class _Hold(Messenger):
    """Gives one site a predictor that is known."""

    def __init__(self, fn, site: str, eta: Array):
        super().__init__(fn)
        self.site, self.eta = site, eta

    def process_message(self, msg):
        if msg["name"] == self.site:
            msg["fn"] = rebuilt(msg["fn"], self.eta)


def hold(program: Program, site: str, eta: Array) -> Program:
    """The model with a predictor that is known: nothing of it is computed."""
    return Program(_Hold(program.model, site, eta), *program.args, **program.kwargs)


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
        of_components = (
            (self.components.switch, self.components.amplitude) if self.components else ()
        )
        return (*self.sides[0].sites, *self.sides[1].sites, *of_components, *self.shared)

    def num_entries(self, program: Program) -> int:
        """How many there are."""
        return len(program.arguments[self.by_entry[0]])

    def at(self, program: Program, entries: Any) -> Program:
        """The model on some of the entries."""
        return program.with_arguments(
            **{name: jnp.asarray(program.arguments[name])[entries] for name in self.by_entry}
        )

    def predictor(self, program: Program, values: Mapping[str, Any]) -> Array:
        """The linear predictor of every entry; the model runs on `CHUNK` entries at a time."""
        size = self.num_entries(program)
        found = lax.map(
            lambda entries: predictor(self.at(program, entries), self.observed, values),
            chunks(size),
        )
        return found.reshape(-1)[:size]

    def table(self, program: Program, values: Mapping[str, Any], side: Side) -> Array:
        """Slope of the predictor of an entry in the sites of its item, [item of the other side,
        column].
        """
        [other] = (each for each in self.sides if each.plate != side.plate)
        first = self.at(program, jnp.zeros(other.size, jnp.int32))
        entries = first.with_arguments(
            **{side.index: jnp.zeros(other.size, jnp.int32), other.index: jnp.arange(other.size)}
        )

        def at(row):
            rows = self.unflat(program, side, jnp.broadcast_to(row, (side.size, len(row))))
            return predictor(entries, self.observed, {**values, **rows})

        start = self.flat(values, side)[0]
        _, slope = jax.linearize(at, start)
        return lax.map(slope, jnp.eye(len(start), dtype=start.dtype)).T

    def slopes(self, program: Program, values: Mapping[str, Any]) -> Array:
        """Slope of the predictor in the amplitudes, all switched on, then in the shared sites,
        [entry, column].
        """
        start, place = self.global_values(values)
        fixed = (
            {self.components.switch: jnp.ones_like(values[self.components.switch])}
            if self.components
            else {}
        )
        _, slope = jax.linearize(
            lambda x: predictor(program, self.observed, {**values, **place(x), **fixed}), start
        )
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

    def unit_table(
        self, program: Program, values: Mapping[str, Any], side: Side
    ) -> tuple[Array, Array]:
        """The table with all components on and of amplitude 1; by (2) its columns are then to be
        multiplied by the second, [column].
        """
        if not self.components:
            table = self.table(program, values, side)
            return table, jnp.ones_like(table[0])
        switch, amplitude, _ = self.components
        table = self.table(
            program,
            {**values, **{name: jnp.ones_like(values[name]) for name in (switch, amplitude)}},
            side,
        )
        return table, jnp.ones_like(table[0]).at[self.factor_columns(program, side)].set(
            values[amplitude] * values[switch]
        )

    def global_values(self, values: Mapping[str, Any]):
        """Amplitudes and shared sites as one vector, and the way back to a dictionary."""
        names = ((self.components.amplitude,) if self.components else ()) + self.shared
        flat, unravel = ravel_pytree([jnp.asarray(values[name]) for name in names])
        return flat, lambda x: dict(zip(names, unravel(x), strict=True))

    def flat(self, values: Mapping[str, Any], side: Side) -> Array:
        """The sites of a side next to each other, [item, column]."""
        return jnp.concatenate(
            [jnp.reshape(values[name], (side.size, -1)) for name in side.sites], axis=1
        )

    def unflat(self, program: Program, side: Side, columns: Array) -> dict[str, Array]:
        """The sites from [item, column]."""
        shapes = [program.sites[name].shape for name in side.sites]
        ends = np.cumsum([int(np.prod(shape[1:])) for shape in shapes])[:-1]
        parts = jnp.split(columns, ends, axis=1)
        return {
            name: part.reshape(shape)
            for name, part, shape in zip(side.sites, parts, shapes, strict=True)
        }

    def shifted(
        self, program: Program, values: Mapping[str, Any], level: Level, step: Any
    ) -> dict[str, Any]:
        """All values, with some of the level moved from the items to the shared site: no
        predictor changes.
        """
        (side, column, place), (shared, put) = level, self.global_values(values)
        rows = self.unflat(program, side, self.flat(values, side).at[:, column].add(-step))
        return {**values, **put(shared.at[place].add(step)), **rows}

    def line(
        self, program: Program, values: Mapping[str, Any], level: Level
    ) -> tuple[Array, Array]:
        """Slope of the log joint along that move, and its rate of fall."""
        names, zero = (*level.side.sites, *self.shared), jnp.zeros((), jnp.result_type(float))
        log_prior = lambda step: self.log_prior(
            program, self.shifted(program, values, level, step), names
        )
        slope, bend = jax.jvp(jax.grad(log_prior), (zero,), (jnp.ones_like(zero),))
        return slope, -bend

    def prior(
        self, program: Program, values: Mapping[str, Any], side: Side | None = None
    ) -> tuple[Array, Array]:
        """Slope of the log joint without the entries in the sites of a side, [item, column], and
        its rate of fall; without a side, in amplitudes and shared sites, [column].
        """
        names = (
            side.sites
            if side
            else tuple(self.global_values(values)[1](self.global_values(values)[0]))
        )
        start, place = (
            (self.flat(values, side), lambda x: self.unflat(program, side, x))
            if side
            else self.global_values(values)
        )
        log_prior = lambda x: self.log_prior(program, {**values, **place(x)}, names)
        slope, bend = jax.jvp(jax.grad(log_prior), (start,), (jnp.ones_like(start),))
        return slope, -bend

    def log_prior(
        self, program: Program, values: Mapping[str, Any], names: tuple[str, ...]
    ) -> Array:
        """The part of the log joint that depends on some sites, without the entries."""
        about = {name for name, parents in program.parents.items() if parents & set(names)} | set(
            names
        )
        terms = program.log_probs(values)
        near = [
            jnp.sum(term) for name, term in terms.items() if name in about and name != self.observed
        ]
        return sum(near, start=jnp.zeros(()))


def chunks(size: int, most: int = CHUNK) -> Array:
    """0 .. size - 1 in rows of equal length; the last one is filled up with its last number."""
    num = -(-size // most)
    return jnp.minimum(jnp.arange(num * -(-size // num)), size - 1).reshape(num, -1)


FEW = 512  # entries on which the identities are proved


def read_crossed(program: Program, rng_key: Array) -> Crossed:
    """Finds and proves the structure, or raises StructureError that says what is missing."""
    observed, size = _observed(program)
    missed = []
    for found in _proposals(program, observed, size, missed):
        gap = _largest_gap(found, program, rng_key)
        if gap < root_epsilon():
            return replace(found, levels=_levels(found, program, rng_key))
        missed.append(
            f"sides {' and '.join(repr(side.plate) for side in found.sides)} miss by {gap:.2g}"
        )
    raise StructureError(
        f"site {observed!r}: no crossed predictor; "
        f"{'; '.join(missed) or 'nothing has the shape of one'}."
    )


def _observed(program: Program) -> tuple[str, int]:
    """The one site of entries, and how many it has."""
    links = [link.__name__ for link in LINKS]
    found = [name for name in program.observed if program.sites[name].family in links]
    if (
        len(found) != 1
        or len(program.sites[found[0]].plates) != 1
        or len(program.sites[found[0]].shape) != 1
        or program.factors
    ):
        raise StructureError(
            f"no crossed predictor: found the observed sites {list(program.observed)} and factors "
            f"{list(program.factors)}, wanted one "
            f"observed site, a vector in a plate, that is {' or '.join(links)}."
        )
    return found[0], program.sites[found[0]].shape[0]


# Proposals.


def _proposals(program: Program, observed: str, size: int, missed: list[str]):
    """Every structure that shapes, plates and dependencies allow; `missed` is told why there are
    no more.
    """
    is_array = lambda value: isinstance(value, np.ndarray | Array)
    arrays = {
        name: np.asarray(value)
        for name, value in program.arguments.items()
        if is_array(value) and value.shape[:1] == (size,)
    }
    vectors = {name: value for name, value in arrays.items() if value.ndim == 1}
    indices = [
        name for name, value in vectors.items() if value.dtype.kind in "iu" and value.min() >= 0
    ]
    for by_entry in {tuple(arrays): 0, tuple(vectors): 0}:
        few = program.with_arguments(**{name: arrays[name][: min(size, 2)] for name in by_entry})
        try:
            parents = _parents(few, observed)
        # the model's own: some argument is as long as the entries by chance, or must be
        except (TypeError, ValueError) as error:
            missed.append(
                f"with rows of {', '.join(by_entry)} for two entries alone, the model says: {error}"
            )
            continue
        about = [program.sites[name] for name in program.latent if name in parents]
        plates = list(
            dict.fromkeys(
                site.dims[0]
                for site in about
                if site.shape and site.dims[0] in program.plates and is_real(site)
            )
        )
        for pair in permutations(plates, 2):
            for index in permutations(indices, 2):
                sides = (
                    _side(program, about, pair[0], index[0]),
                    _side(program, about, pair[1], index[1]),
                )
                if plates.index(pair[0]) < plates.index(pair[1]) and all(
                    vectors[side.index].max() < side.size for side in sides
                ):
                    rest = [
                        site
                        for site in about
                        if site.name not in (*sides[0].sites, *sides[1].sites)
                    ]
                    for components, shared in _of_the_rest(rest, sides, program):
                        found = Crossed(observed, by_entry, sides, components, shared)
                        if _is_apart(found, few):
                            yield found


def _parents(few: Program, observed: str) -> frozenset[str]:
    """The latent sites that the predictor is computed from."""
    shapes = {
        name: jax.ShapeDtypeStruct(few.sites[name].shape, few.sites[name].dtype)
        for name in few.latent
    }
    return eval_provenance(lambda **values: predictor(few, observed, values), **shapes)


def _side(program: Program, about: list[Site], plate: str, index: str) -> Side:
    sites = tuple(
        site.name for site in about if site.shape and site.dims[0] == plate and is_real(site)
    )
    return Side(plate, program.sites[sites[0]].shape[0], index, sites)


def _of_the_rest(rest: list[Site], sides: tuple[Side, Side], program: Program):
    """What the other sites of the predictor may be: switches with amplitudes and factors, and
    shared sites.
    """
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
    for amplitude in rest:
        others = [site for site in rest if site is not switch and site is not amplitude]
        is_one = (
            amplitude.dims == switch.dims and amplitude.event_dim == 0 and _is_amplitude(amplitude)
        )
        if is_one and all(len(names) == 1 for names in factors) and all(map(is_real, others)):
            yield (
                Components(switch.name, amplitude.name, (factors[0][0], factors[1][0])),
                tuple(site.name for site in others),
            )


def _is_amplitude(site: Site) -> bool:
    return is_real(site) or site.support in (constraints.positive, constraints.nonnegative)


def _is_apart(crossed: Crossed, few: Program) -> bool:
    """Whether nothing but the entries hears of components, no prior of the switches, and the
    entries of all by the predictor alone.
    """
    eta = jnp.zeros(few.sites[crossed.observed].shape)
    if hold(few, crossed.observed, eta).parents[crossed.observed] & set(crossed.sites):
        return False
    if not crossed.components:
        return True
    switch, *parts = (
        crossed.components.switch,
        crossed.components.amplitude,
        *crossed.components.factors,
    )
    children = lambda names: (
        {name for name, parents in few.parents.items() if parents & set(names)}
        - set(few.deterministic)
    )
    return children(parts) == {crossed.observed} and not children([switch]) & set(crossed.sites)


# Proofs.


def _largest_gap(crossed: Crossed, program: Program, rng_key: Array) -> float:
    """The largest relative gap of all identities at random values of all sites.

    Every switch is on at one of two places.
    """
    size = crossed.num_entries(program)
    few = crossed.at(program, np.linspace(0, size - 1, min(size, FEW)).astype(int))

    def gaps(key):
        keys = random.split(key, 5)
        values, other = few.draw_initial(keys[0]), few.draw_initial(keys[3])
        if crossed.components:
            switch = crossed.components.switch
            values[switch] = random.bernoulli(keys[4], shape=values[switch].shape).astype(
                values[switch].dtype
            )
            other[switch] = 1 - values[switch]
        found = [
            gap
            for side, at in zip(crossed.sides, keys[1:3], strict=True)
            for gap in _gaps_of_side(crossed, few, values, side, at)
        ]
        found += [
            *_gaps_of_globals(crossed, few, values, other),
            _gap_of_entries(crossed, few, values),
        ]
        return {crossed.observed: jnp.max(jnp.stack(found))}

    return float(worst(gaps, random_settings(rng_key))[0][crossed.observed])


def _gap_of_entries(crossed: Crossed, few: Program, values: dict[str, Array]) -> Array:
    """Their log density is that of the link."""
    site = few.trace(values)[crossed.observed]
    link = rebuilt(site["fn"], predictor(few, crossed.observed, values))
    return _gap(few.log_probs(values)[crossed.observed], link.log_prob(site["value"]))


def _gaps_of_side(
    crossed: Crossed, few: Program, values: dict[str, Array], side: Side, rng_key: Array
) -> list[Array]:
    """(1), and a prior in which every element is Normal by itself."""
    [other] = (each for each in crossed.sides if each.plate != side.plate)
    old = crossed.flat(values, side)
    step = random.normal(rng_key, old.shape, old.dtype)
    moved = {**values, **crossed.unflat(few, side, old + step)}
    at = lambda name: jnp.asarray(few.arguments[name])
    wanted = jnp.sum(
        crossed.table(few, values, side)[at(other.index)] * step[at(side.index)], axis=-1
    )
    found = predictor(few, crossed.observed, moved) - predictor(few, crossed.observed, values)
    (slope, fall), (there, _) = crossed.prior(few, values, side), crossed.prior(few, moved, side)
    return [_gap(found, wanted), _gap(there, slope - fall * step), _infinite_unless(fall > 0)]


def _gaps_of_globals(
    crossed: Crossed, few: Program, values: dict[str, Array], other: dict[str, Array]
) -> list[Array]:
    """(2), for amplitudes, switches and shared sites moved together to where they are in
    `other`.
    """
    names = (*(crossed.components[:2] if crossed.components else ()), *crossed.shared)
    moved = {**values, **{name: other[name] for name in names}}
    slopes, (start, _), (end, _) = (
        crossed.slopes(few, values),
        crossed.global_values(values),
        crossed.global_values(moved),
    )
    (slope, fall), (there, _) = crossed.prior(few, values), crossed.prior(few, moved)
    about_prior = [_gap(there, slope - fall * (end - start)), _infinite_unless(fall > 0)]
    found = predictor(few, crossed.observed, moved) - predictor(few, crossed.observed, values)
    if not crossed.components:
        return [_gap(found, slopes @ (end - start)), *about_prior]
    (switch, _, factors), width = crossed.components, len(values[crossed.components.switch])
    on = lambda at, x: x.at[:width].multiply(at[switch])
    rows = [
        values[name][jnp.asarray(few.arguments[side.index])]
        for name, side in zip(factors, crossed.sides, strict=True)
    ]
    return [
        _gap(found, slopes @ (on(moved, end) - on(values, start))),
        _gap(slopes[:, :width], rows[0] * rows[1]),
        *about_prior,
    ]


def _levels(crossed: Crossed, program: Program, rng_key: Array) -> tuple[Level, ...]:
    """Where a shared site and all items of a side add the same to every entry, and have a Normal
    prior along that line.
    """
    if not crossed.shared:
        return ()
    shared = replace(crossed, components=None)

    def are_one(key):
        values = program.draw_initial(key)
        first = crossed.at(program, np.arange(1))
        tables = [
            jnp.all(crossed.table(first, values, side) == 1, axis=0) for side in crossed.sides
        ]
        slopes = lambda some: jnp.all(shared.slopes(crossed.at(program, some), values) == 1, axis=0)
        return [*tables, jnp.all(lax.map(slopes, chunks(crossed.num_entries(program))), axis=0)]

    *tables, of_shared = (np.flatnonzero(each) for each in once(are_one, rng_key)(rng_key))
    if not of_shared.size:
        return ()
    place = int(of_shared[0]) + (
        program.sites[crossed.components.switch].shape[0] if crossed.components else 0
    )
    proposed = [
        Level(side, int(at[0]), place)
        for side, at in zip(crossed.sides, tables, strict=True)
        if at.size
    ]
    gaps = [_gap_of_level(crossed, program, level, rng_key) for level in proposed]
    return tuple(level for level, gap in zip(proposed, gaps, strict=True) if gap < root_epsilon())


def _gap_of_level(crossed: Crossed, program: Program, level: Level, rng_key: Array) -> float:
    """The prior falls along the line as a Normal does."""
    few = crossed.at(program, np.arange(1))

    def gaps(key):
        values = few.draw_initial(key)
        (slope, fall), (there, _) = (
            crossed.line(few, crossed.shifted(few, values, level, step), level)
            for step in (0.0, 1.0)
        )
        return {
            level.side.plate: jnp.maximum(_gap(there, slope - fall), _infinite_unless(fall > 0))
        }

    return float(worst(gaps, [(rng_key,)])[0][level.side.plate])


def _gap(found: Array, wanted: Array) -> Array:
    """The largest difference, relative to the largest number."""
    return gap(found, wanted, 1e-30 + jnp.max(jnp.abs(wanted), initial=0))


def _infinite_unless(holds: Array) -> Array:
    return jnp.where(jnp.all(holds), 0.0, jnp.inf)
