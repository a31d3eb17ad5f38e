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
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import Site, StructureError, is_real, unwrap
from inference.reading.proof import gap, root_epsilon, worst

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

    @property
    def global_names(self) -> tuple[str, ...]:
        """The amplitudes and the shared sites."""
        return ((self.components.amplitude,) if self.components else ()) + self.shared

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
        flat, unravel = ravel_pytree([jnp.asarray(values[name]) for name in self.global_names])
        return flat, lambda x: dict(zip(self.global_names, unravel(x), strict=True))

    def width(self, program: Program, side: Side) -> int:
        """How many columns `flat` has."""
        return sum(int(np.prod(program.sites[name].shape[1:])) for name in side.sites)

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

    def direction(self, program: Program, intercept: Intercept) -> dict[str, Array]:
        """By how much each site changes where 1 moves from the items' intercept to the shared site.

        The predictor does not change.
        """
        (own, column, place), shapes = intercept, program.latent_shapes()
        names = (*self.sides[0].sites, *self.sides[1].sites, *self.global_names)
        still = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in names}
        flat, put = self.global_values(still)
        rows = self.unflat(program, own, self.flat(still, own).at[:, column].add(-1))
        return still | put(flat.at[place].add(1)) | rows

    def along(
        self, program: Program, values: Mapping[str, Any], direction: Mapping[str, Array]
    ) -> tuple[Array, Array]:
        """Slope of the log prior along a direction, and minus its second derivative."""

        def log_prior(step):
            moved = {name: values[name] + step * own for name, own in direction.items()}
            return self.log_prior(program, {**values, **moved}, tuple(direction))

        slope, bend = jax.jvp(jax.grad(log_prior), *[(jnp.zeros(()),), (jnp.ones(()),)])
        return slope, -bend

    def priors(self, program: Program, values: Mapping[str, Any]) -> list[tuple[Array, Array]]:
        """Slope of the log prior in the sites of each side, and minus its second derivative.

        Both are [item, column]. The last ones are those in amplitudes and shared sites, [column].
        """
        flat, put = self.global_values(values)
        places = [lambda x, side=side: self.unflat(program, side, x) for side in self.sides]
        places.append(put)
        start = [*(self.flat(values, side) for side in self.sides), flat]
        names = (*self.sides[0].sites, *self.sides[1].sites, *self.global_names)

        def log_prior(x):
            moved = [place(own) for place, own in zip(places, x, strict=True)]
            return self.log_prior(program, {**values, **moved[0], **moved[1], **moved[2]}, names)

        slopes, bend = jax.linearize(jax.grad(log_prior), start)
        # one part moves at a time: the prior of one may depend on another
        moves = [
            jnp.stack([jnp.full_like(own, i == j) for j in range(len(start))])
            for i, own in enumerate(start)
        ]
        bends = jax.vmap(bend)(moves)
        return [(slope, -own[i]) for i, (slope, own) in enumerate(zip(slopes, bends, strict=True))]

    def log_odds(self, program: Program, values: Mapping[str, Any], switch: str, k: Array) -> Array:
        """Prior log odds that the switch of component k is on, given the other switches."""
        log_prior = lambda on: self.log_prior(
            program, {**values, switch: values[switch].at[k].set(on)}, (switch,)
        )
        off, on = jax.vmap(log_prior)(jnp.arange(2, dtype=values[switch].dtype))
        return on - off

    def log_prior(
        self, program: Program, values: Mapping[str, Any], names: tuple[str, ...]
    ) -> Array:
        """The terms of the log joint that depend on some sites, but for that of the entries."""
        about = {name for name, parents in program.parents.items() if parents & set(names)}
        about = (about | set(names)) - {self.observed}
        terms = program.log_probs(values)
        own = [jnp.sum(term) for name, term in terms.items() if name in about]
        return sum(own, start=jnp.zeros(()))


def chunks(size: int, most: int = 2**13) -> Int[Array, "chunk entry"]:
    """Indices 0 .. size - 1 in rows of equal length; the last index pads the last row.

    Args:
        size: the number of indices.
        most: the largest length of a row.
    """
    num = -(-size // most)
    return jnp.minimum(jnp.arange(num * -(-size // num)), size - 1).reshape(num, -1)


NUM_PROVED = 512  # entries on which the identities are proved
NUM_SETTINGS = 3  # random values at which they are


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
        gap, moves = _proved(found, program, rng_key)
        if gap < root_epsilon():
            return replace(found, intercepts=_intercepts(found, program, rng_key, moves))
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


def _proved(crossed: Crossed, program: Program, rng_key: Array) -> tuple[float, list[np.ndarray]]:
    """The largest relative gap of all identities at random values, and which slopes are 1.

    Each identity compares values with others: of the sites of a side, or of all others. Every
    switch is on at one of the two. Slopes are those in the columns of each side, and in the shared
    sites, at all entries.
    """
    size = crossed.num_entries(program)
    some = crossed.at(program, np.linspace(0, size - 1, min(size, NUM_PROVED)).astype(int))
    draw = lambda key: lax.map(some.draw_initial, random.split(key, 2 * NUM_SETTINGS))
    drawn = interpreted(draw, rng_key)(rng_key)
    drawn = {name: np.split(np.array(x), NUM_SETTINGS) for name, x in drawn.items()}
    if crossed.components:
        rng = np.random.default_rng(0)
        for first, second in drawn[crossed.components.switch]:
            first[:] = rng.integers(0, 2, first.shape)
            second[:] = 1 - first
    shared = replace(crossed, components=None)

    def gaps(both):
        values, other = ({name: x[i] for name, x in both.items()} for i in (0, 1))
        tables = [crossed.table(some, values, side) for side in crossed.sides]
        parts = [side.sites for side in crossed.sides]
        parts.append((*(crossed.components[:2] if crossed.components else ()), *crossed.shared))
        moved = [values | {name: other[name] for name in names} for names in ((), *parts)]
        at = lambda values: (
            predictor(some, crossed.observed, values),
            crossed.priors(some, values),
            [*(crossed.flat(values, side) for side in crossed.sides), *_on(crossed, values)],
        )
        eta, priors, places = lax.map(at, jax.tree.map(lambda *each: jnp.stack(each), *moved))
        step = lambda i: places[i][1 + i] - places[i][0]
        slopes = crossed.slopes(some, values)
        index = [jnp.asarray(some.arguments[side.index]) for side in crossed.sides]
        rises = [jnp.sum(tables[i][index[1 - i]] * step(i)[index[i]], axis=-1) for i in (0, 1)]
        rises.append(slopes @ (places[3][3] - places[3][0]))
        found = [_gap(eta[1 + i] - eta[0], rise) for i, rise in enumerate(rises)]
        for i, (slope, fall) in enumerate(priors):
            prior = slope[0], fall[0]
            found.append(_gap_of_normal(prior, (slope[1 + i], fall[1 + i]), step(i)))
        if crossed.components:
            factors = zip(crossed.components.factors, index, strict=True)
            u, v = (values[name][place] for name, place in factors)
            found.append(_gap(slopes[:, : u.shape[1]], u * v))
        site = some.trace(values)[crossed.observed]
        link = rebuilt(site["fn"], eta[0])
        log_prob = some.log_probs(values)[crossed.observed]
        found.append(_gap(log_prob, link.log_prob(site["value"])))
        of_chunk = lambda entries: jnp.all(
            shared.slopes(crossed.at(program, entries), values) == 1, axis=0
        )
        are_one = [jnp.all(table == 1, axis=0) for table in tables]
        are_one.append(jnp.all(lax.map(of_chunk, chunks(size)), axis=0))
        return {crossed.observed: jnp.max(jnp.stack(found))}, are_one

    settings = [
        (dict(zip(drawn, each, strict=True)),) for each in zip(*drawn.values(), strict=True)
    ]
    largest, are_one = worst(gaps, settings)
    return float(largest[crossed.observed]), [np.flatnonzero(each) for each in are_one[0]]


def _on(crossed: Crossed, values: Mapping[str, Any]) -> tuple[Array, Array]:
    """Amplitudes and shared sites; and the same, where components that are switched off have 0."""
    flat, _ = crossed.global_values(values)
    if not crossed.components:
        return flat, flat
    switch = values[crossed.components.switch]
    return flat, flat.at[: len(switch)].multiply(switch)


def _intercepts(
    crossed: Crossed, program: Program, rng_key: Array, are_one: list[np.ndarray]
) -> tuple[Intercept, ...]:
    """The intercepts: where a shared site and all items of a side add the same to every entry.

    The log prior along the move between them must be that of a Normal.

    Args:
        crossed: the structure.
        program: the model with its data.
        rng_key: for values.
        are_one: by `_proved`.
    """
    *tables, shared = are_one
    columns = [
        (side, int(at[0])) for side, at in zip(crossed.sides, tables, strict=True) if at.size
    ]
    if not (shared.size and columns):
        return ()
    components = crossed.components
    place = int(shared[0]) + (program.sites[components.switch].shape[0] if components else 0)
    found = [Intercept(side, column, place) for side, column in columns]
    first = crossed.at(program, np.arange(1))

    def gaps(key):
        values = first.draw_initial(key)

        def gap_of(direction):
            at = lambda step: crossed.along(
                first, values | {k: values[k] + step * x for k, x in direction.items()}, direction
            )
            slope, fall = lax.map(at, jnp.arange(2.0))
            return _gap_of_normal((slope[0], fall[0]), (slope[1], fall[1]), jnp.ones(()))

        directions = [crossed.direction(first, each) for each in found]
        each = lax.map(gap_of, jax.tree.map(lambda *x: jnp.stack(x), *directions))
        return {str(i): each[i] for i in range(len(found))}

    largest, _ = worst(gaps, [(rng_key,)])
    return tuple(each for i, each in enumerate(found) if largest[str(i)] < root_epsilon())


def _gap_of_normal(prior: tuple[Array, Array], there: tuple[Array, Array], step: Array) -> Array:
    """The gap between the slope of a log prior after a step and that of a Normal.

    It is infinite where the log prior is not concave.
    """
    slope, fall = prior
    return jnp.where(jnp.all(fall > 0), _gap(there[0], slope - fall * step), jnp.inf)


def _gap(found: Array, wanted: Array) -> Array:
    return gap(found, wanted, 1e-30 + jnp.max(jnp.abs(wanted), initial=0))
