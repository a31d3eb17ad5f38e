"""From a guess at a new component to its posterior, and back, by steps that are exact.

A component has an amplitude s and factors u, v; with r the residual of the entries without it and w
their weights, its rows have the posterior

    p(u) Z(u),    Z(u) = integral of p(v) exp(sum_e w r s u v - w (s u v)^2 / 2) over v,                                   (1)

whose rows depend on each other through v alone. `guess` is a product q(u) of Normals near it: a
mean field in which the entries that a row shares with others do not tell it what it told them (the
term of Onsager; Thouless, Anderson and Palmer 1977). It is tens of nats off, so there is a path
from one to the other, for 0 <= t <= 1,

    f_t(u) = q(u)^(1 - t) p(u)^t Z_t(u),    Z_t(u) = Z(u) with c(t) v for v,    c^2 = t / (1 + (1 - t) pull),              (2)

where pull + 1 is by how much the entries make a column factor surer: then log Z_t is about t log Z,
and all conditionals are Normal. `walk` goes along it: it adds up log f_{t'} - log f_t where it is,
takes a step that is reversible at t', and so on (Neal 2001); a step draws v given u and then u
given v, on the other side of its mean as a rule (Adler 1981), since the direction turns slowly.
Walked to the end from a draw of the guess, the exponential of what was added up has the integral of
(1) as its mean; walked backwards from the rows of a component, it is what reverses that in the
acceptance of Metropolis and Hastings (Karagiannis and Andrieu 2013).

Cost: 2 x (`NUM_ROUNDS` + `NUM_FIELDS` + steps) sums over the entries; memory: a few numbers an
entry.

Births and deaths of whole components of a crossed predictor.

A component that fits nothing never finds good factors by chance, so it is born whole: drawn from a
guess at what the residual holds, walked from there to its posterior, and accepted by Metropolis and
Hastings with the factors of the second side integrated out. Its death is the same walk backwards.
The guess is made without the component, from a random start of its own, so that a birth and the
death that undoes it see the same one; the start has a sign, which the entries cannot tell. An
amplitude is born positive.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import LogNormal

from inference.kernels.conditional_gibbs.crossed_components import Tilted, lowest
from inference.program.program import Program
from inference.reading.crossed import Components, Crossed

__all__ = ["Guess", "Parts", "Sums", "born", "guess", "leading", "path", "walk"]

NUM_ROUNDS, NUM_FIELDS = 10, 8  # of power iterations and of mean fields, for a guess
# steps of the path: of what a guess misses each item has a share, so there is a step for so many
# items
FEWEST, MOST, ITEMS = 10, 100, 100
# times go like 1 - (1 - i / steps)^EARLY: slower at the end, where a component leaves the place
# that was guessed
EARLY = 1.5
OPPOSITE = -0.7  # correlation of row factors before and after a step, given the column factors
UNSURE = 0.75  # of a row factor as the mean fields begin: its variance, in that of the prior
TINY = 1e-30


class Parts(NamedTuple):
    """Amplitude and factors of a component, or what they are drawn from."""

    s: Any
    u: Any
    v: Any

    def draw(self, rng_key: Array) -> "Parts":
        """A draw of each."""
        return Parts(
            *(part.draw(key) for part, key in zip(self, random.split(rng_key, 3), strict=True))
        )


class Sums(NamedTuple):
    """Entries by the item of a side that they belong to, for sums over them: the buckets of
    `crossed_sides`.
    """

    size: int
    # items; and of each entry its item of the other side, weight x residual and weight
    buckets: list[tuple[Array, ...]]

    @classmethod
    def of(cls, size: int, plan: tuple, other: Array, residual: Array, weight: Array) -> "Sums":
        """`other` is the item of the other side of each entry."""
        flat = lambda array: jnp.reshape(array, (-1, *array.shape[2:]))
        columns = [
            jnp.append(column, jnp.zeros_like(column[:1]))
            for column in (other, weight * residual, weight)
        ]
        return cls(
            size,
            [
                (flat(each.items), *(column[flat(each.entries)] for column in columns))
                for each in plan
            ],
        )

    def __call__(self, x: Array, *squares: Array) -> tuple[Array, ...]:
        """sum_e w r x of each item, and sum_e w square of each of `squares`; these by item of
        the other side.
        """
        found, zero = jnp.zeros((self.size, 1 + len(squares)), x.dtype), jnp.zeros((), x.dtype)
        add = lambda left, right: tuple(map(jnp.add, left, right))
        for items, other, product, weight in self.buckets:
            terms = product * x[other], *(weight * square[other] for square in squares)
            found = found.at[items].set(
                jnp.stack(lax.reduce(terms, (zero,) * len(terms), add, (1,)), axis=1), mode="drop"
            )
        return tuple(found.T)


def leading(rng_key: Array, prior: Parts, sums: tuple[Sums, Sums]) -> tuple[Array, Array]:
    """Amplitude and row factors of a leading pair of the residual, from a random start: ridge
    regressions in turn.
    """
    rows, columns = sums
    lengths = [jnp.sqrt(jnp.sum(1 / factors.q)) for factors in (prior.u, prior.v)]
    stretched = lambda x, length: x * (length / (jnp.linalg.norm(x) + TINY))

    def turn(_, at):
        s, _, v = at
        product, square = rows(v, v * v)
        u = stretched(product / (prior.u.q + s * s * square), lengths[0])
        product, square = columns(u, u * u)
        v = stretched(product / (prior.v.q + s * s * square), lengths[1])
        return v @ product / (v * v @ square + TINY), u, v

    start = random.normal(rng_key, prior.v.p.shape, prior.v.p.dtype)
    s, u, _ = lax.fori_loop(
        0, NUM_ROUNDS, turn, (jnp.zeros_like(start[0]), jnp.zeros_like(prior.u.p), start)
    )
    return s, u


class Guess(NamedTuple):
    """Row factors, Normal each by itself, and the pull of the entries on column factors as in
    (2).
    """

    u: Tilted
    pull: Array


def guess(s: Array, u: Array, prior: Parts, sums: tuple[Sums, Sums]) -> Guess:
    """The mean field that is found from row factors u."""
    rows, columns = sums

    def field(mean, variance):
        product, square, spread = columns(mean, mean * mean + variance, variance)
        q = prior.v.q + s * s * square
        v = (prior.v.p + s * product) / q
        # Where residuals are as large as they should be, w r^2 = 1, the variances of v cancel from
        # the precision of u.
        product, square_of_mean, reaction = rows(v, v * v + s * s * spread / q**2, 1 / q)
        return Guess(
            prior.u.times(s * product - s * s * reaction * mean, s * s * square_of_mean),
            s * s * square / prior.v.q,
        )

    start = field(jnp.sqrt(1 - UNSURE) * u, UNSURE / prior.u.q)
    return lax.fori_loop(1, NUM_FIELDS, lambda _, at: field(at.u.p / at.u.q, 1 / at.u.q), start)


def walk(
    rng_key: Array,
    s: Array,
    u: Array,
    times: Array,
    guess: Guess,
    prior: Parts,
    sums: tuple[Sums, Sums],
) -> tuple[Array, Array]:
    """Row factors after a walk along (2) through `times`, and what was added up."""
    rows, columns = sums
    scale = lambda t: s * jnp.sqrt(t / (1 + (1 - t) * guess.pull))

    def columns_at(t, found):
        """Column factors given those of the rows."""
        return prior.v.times(scale(t) * found[0], scale(t) ** 2 * found[1])

    def gain(u, found, start, end):
        """log f_end - log f_start, item by item."""
        of_columns = columns_at(end, found).log_mass() - columns_at(start, found).log_mass()
        return (end - start) * jnp.sum(prior.u.log_prob(u) - guess.u.log_prob(u)) + jnp.sum(
            of_columns
        )

    def on(at, now):
        (u, total), (rng_key, start, end) = at, now
        v_key, u_key = random.split(rng_key)
        found = columns(u, u * u)
        x = scale(end) * columns_at(end, found).draw(v_key)
        there = prior.u.mixed(guess.u, end).times(*rows(x, x * x))
        return (there.moved(u_key, u, OPPOSITE), total + gain(u, found, start, end)), None

    keys = random.split(rng_key, len(times) - 2)
    (u, total), _ = lax.scan(on, (u, jnp.zeros_like(s)), (keys, times[:-2], times[1:-1]))
    return u, total + gain(u, columns(u, u * u), times[-2], times[-1])


def path(is_dying: Array, num_items: int, dtype: Any) -> Array:
    """The times of a birth, or of a death, of a component with so many factors."""
    share = jnp.linspace(0, 1, min(max(num_items // ITEMS, FEWEST), MOST) + 1, dtype=dtype)
    times = 1 - (1 - share) ** EARLY
    return jnp.where(is_dying, times[::-1], times)


# of a proposed amplitude: in that of the leading pair, and in logarithms
CENTRE, SPREAD = 1.1, 0.25
NUM_SIGNS = 2  # of a start, of which a birth has to guess one, while its death knows it


def born(
    rng_key: Array,
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
    entries: tuple[Array, Array, Array],
    plan: Any,
) -> tuple[dict[str, Any], Array]:
    """One component, chosen at random, is born or dies, or stays as it is; and the predictor after
    that.

    :param entries: responses, their weights, and the predictor.
    :param plan: the buckets of either side.
    """
    keys, (response, weight, eta) = random.split(rng_key, 5), entries
    k = random.randint(keys[0], (), 0, len(values[components.switch]))
    old, prior, odds = _component(crossed, components, program, values, k)
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    part = lambda one: jnp.where(
        one.is_on, one.parts.s * one.parts.u[index[0]] * one.parts.v[index[1]], 0
    )
    residual = response - eta + part(old)
    of_side = lambda i: Sums.of(crossed.sides[i].size, plan[i], index[1 - i], residual, weight)
    sums = of_side(0), of_side(1)
    s, u, log_ratio = _walked(keys[1], old, prior, odds, sums)
    is_taken = jnp.log(random.uniform(keys[2], (), s.dtype)) < log_ratio

    product, square = sums[1](u, u * u)
    alive = Parts(s, u, prior.v.times(s * product, s * s * square).draw(keys[3]))
    new = jax.tree.map(
        lambda gone, there: jnp.where(old.is_on, gone, there), prior.draw(keys[4]), alive
    )
    new = jax.tree.map(lambda new, was: jnp.where(is_taken, new, was), _One(~old.is_on, new), old)
    return new.put(components, values, k), eta - part(old) + part(new)


def _walked(
    rng_key: Array, old: "_One", prior: Parts, odds: Array, sums: tuple[Sums, Sums]
) -> tuple[Array, Array, Array]:
    """Amplitude and row factors after the walk of a birth, or of a death, and the log ratio by
    which it is accepted.

    The guess is the same for a component that is there, seen without it, as for one that is not: so
    either is the reverse of the other.
    """
    keys = random.split(rng_key, 4)
    size, start = leading(keys[0], prior, sums)
    start = jnp.where(old.is_on & (old.parts.u @ start < 0), -start, start)
    amplitude = LogNormal(jnp.log(CENTRE * size), SPREAD)
    s = jnp.where(old.is_on, old.parts.s, amplitude.sample(keys[1]))
    near = guess(s, start, prior, sums)
    u = jnp.where(old.is_on, old.parts.u, near.u.draw(keys[2]))
    u, gain = walk(
        keys[3], s, u, path(old.is_on, len(prior.u.p) + len(prior.v.p), s.dtype), near, prior, sums
    )
    log_odds = odds + jnp.log(NUM_SIGNS) + prior.s.log_prob(s) - amplitude.log_prob(s)
    # what a death could not undo is no birth
    birth = jnp.where(u @ start > 0, gain + log_odds, -jnp.inf)
    return s, u, jnp.where(old.is_on, gain - log_odds, birth)


class _One(NamedTuple):
    """One component."""

    is_on: Array
    parts: Parts

    def put(self, components: Components, values: dict[str, Any], k: Array) -> dict[str, Any]:
        """All values, with this as component k."""
        (switch, amplitude, (left, right)), (s, u, v) = components, self.parts
        new = {
            switch: (self.is_on, k),
            amplitude: (s, k),
            left: (u, (slice(None), k)),
            right: (v, (slice(None), k)),
        }
        return {
            **values,
            **{
                name: values[name].at[at].set(value.astype(values[name].dtype))
                for name, (value, at) in new.items()
            },
        }


def _component(
    crossed: Crossed, components: Components, program: Program, values: dict[str, Any], k: Array
) -> tuple[_One, Parts, Array]:
    """Component k, the priors of its parts, and the log odds that it is there before any entries
    are seen.
    """
    switch, amplitude, factors = components
    (slope, fall), (start, _) = crossed.prior(program, values), crossed.global_values(values)
    low = lowest(program, components)
    priors = [
        Tilted(
            slope[k] + fall[k] * start[k],
            fall[k],
            None if low == -jnp.inf else jnp.asarray(low, start.dtype),
        )
    ]
    for side in crossed.sides:
        place = crossed.factor_columns(program, side).start + k
        (slope, fall), start = crossed.prior(program, values, side), crossed.flat(values, side)
        priors.append(Tilted(slope[:, place] + fall[:, place] * start[:, place], fall[:, place]))
    prior = lambda on: crossed.log_prior(
        program, {**values, switch: values[switch].at[k].set(on)}, (switch,)
    )
    here = Parts(values[amplitude][k], *(values[name][:, k] for name in factors))
    return _One(values[switch][k] > 0, here), Parts(*priors), prior(1) - prior(0)
