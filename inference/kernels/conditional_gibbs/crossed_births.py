"""Births and deaths of whole components of a crossed predictor, by annealed importance sampling.

A birth switches a component on and a death switches one off, so each changes the rank by one
(`birth_or_death`). A component that explains nothing never finds good factors by chance. So a birth
proposes all of its factors: they are drawn from a mean-field approximation to what the residual
holds, and moved from there to the posterior. Metropolis-Hastings accepts them, with the factors of
the second side integrated out. A death is the same in reverse. The approximation is made from the
residual without the component, and from a random start of its own, so that a birth and the death
that reverses it use the same one. The sign of the approximation is arbitrary. The proposed
amplitude is positive.

A component that explains nothing never finds good factors by chance. So it is born whole: its
factors are drawn from a mean-field approximation to what the residual holds, moved from there to
the posterior, and accepted by Metropolis-Hastings with the factors of the second side integrated
out. A death is the same in reverse. The approximation is made from the residual without the
component, and from a random start of its own, so that a birth and the death that reverses it use
the same one. Its sign is arbitrary. An amplitude is born positive.

A component has an amplitude s and factors u, v. With r the residual of the entries without it and w
their weights, its row factors have the posterior

    p(u) Z(u),    Z(u) = integral of p(v) exp(sum_e w r s u v - w (s u v)^2 / 2) over v,        (1)

in which rows depend on each other through v alone. `mean_field` returns a product q(u) of Normals
near it. Its mean-field equations have the reaction term of Onsager (Thouless, Anderson and Palmer
1977): what a row has told the columns is not told back to it. q is tens of nats off, so there is a
path from one to the other, for 0 <= t <= 1,

    f_t(u) = q(u)^(1 - t) p(u)^t Z_t(u),                                                        (2)
    Z_t(u) = Z(u) with c(t) v for v,    c^2 = t / (1 + (1 - t) pull),

where the entries make a column factor pull + 1 times as precise. Then log Z_t is about t log Z, and
all conditionals are Normal. `anneal` goes along the path: it adds log f_{t'} - log f_t at the
present u to the log weight, makes a reversible Gibbs step at t', and so on (Neal 2001). A step
draws v given u and then u given v, overrelaxed, for the direction of u turns slowly (Adler 1981).
From a draw of q to the end of the path, the weight has the integral of (1) as its mean. A death
walks the path backwards, from the row factors of its component, and its weight stands for the
inverse of that integral in the ratio of Metropolis-Hastings (Karagiannis and Andrieu 2013).

Cost: 2 x (`NUM_ROUNDS` + `NUM_FIELDS` + steps) sums over the entries; memory: a few numbers an
entry.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jaxtyping import Float, Int
from numpyro.distributions import LogNormal

from inference.kernels.conditional_gibbs.crossed_components import Tilted, lower_bound
from inference.program.program import Program
from inference.reading.crossed import Components, Crossed

__all__ = [
    "Component",
    "EntrySums",
    "MeanField",
    "anneal",
    "birth_or_death",
    "leading",
    "mean_field",
    "schedule",
]

NUM_ROUNDS = 10  # of power iterations
NUM_FIELDS = 8  # of mean-field updates
NUM_SIGNS = 2  # of a random start; a birth draws one of them, and its death knows it
TINY = 1e-30


class Component(NamedTuple):
    """Amplitude and factors of a component, or distributions of them."""

    s: Any
    u: Any
    v: Any

    def draw(self, rng_key: Array) -> "Component":
        """A draw of each."""
        keys = random.split(rng_key, 3)
        return Component(*(part.draw(key) for part, key in zip(self, keys, strict=True)))


class EntrySums(NamedTuple):
    """Entries by their item of one side, padded as in `crossed_sides`, for sums over them."""

    size: int
    # items; and of each entry its item of the other side, weight x residual and weight
    buckets: list[tuple[Array, ...]]

    @classmethod
    def of(
        cls,
        size: int,
        items: tuple,
        other: Int[Array, " entry"],
        residual: Float[Array, " entry"],
        weight: Float[Array, " entry"],
    ) -> "EntrySums":
        """Lays out the entries.

        Args:
            size: how many items the side has.
            items: its items with their entries, by `pad_items`.
            other: the item of the other side of each entry.
            residual: of each entry.
            weight: of each entry.
        """
        flat = lambda array: jnp.reshape(array, (-1, *array.shape[2:]))
        columns = [
            jnp.append(column, jnp.zeros_like(column[:1]))
            for column in (other, weight * residual, weight)
        ]
        of_entries = lambda bucket: (column[flat(bucket.entries)] for column in columns)
        return cls(size, [(flat(bucket.items), *of_entries(bucket)) for bucket in items])

    def __call__(self, x: Float[Array, " other"], *squares: Array) -> tuple[Array, ...]:
        """Sums over the entries of each item: sum_e w r x, and sum_e w q for each q of `squares`.

        x and the squares are numbers of the items of the other side.
        """
        found, zero = jnp.zeros((self.size, 1 + len(squares)), x.dtype), jnp.zeros((), x.dtype)
        add = lambda left, right: tuple(map(jnp.add, left, right))
        for items, other, product, weight in self.buckets:
            terms = product * x[other], *(weight * square[other] for square in squares)
            sums = lax.reduce(terms, (zero,) * len(terms), add, (1,))
            found = found.at[items].set(jnp.stack(sums, axis=1), mode="drop")
        return tuple(found.T)


def leading(
    rng_key: Array, prior: Component, sums: tuple[EntrySums, EntrySums]
) -> tuple[Array, Float[Array, " row"]]:
    """Amplitude and row factors near the leading singular pair of the residual.

    They are found by `NUM_ROUNDS` alternating ridge regressions from a random start.

    Args:
        rng_key: a key.
        prior: distributions of the parts.
        sums: over the entries of the rows, and of the columns.
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
    none = jnp.zeros_like(start[0]), jnp.zeros_like(prior.u.p)
    return lax.fori_loop(0, NUM_ROUNDS, turn, (*none, start))[:2]


class MeanField(NamedTuple):
    """Independent Normals of the row factors, and the pull of the entries in (2)."""

    u: Tilted
    pull: Array


def mean_field(
    s: Array, u: Float[Array, " row"], prior: Component, sums: tuple[EntrySums, EntrySums]
) -> MeanField:
    """The mean-field approximation that is found from row factors u.

    Args:
        s: amplitude.
        u: row factors to start from.
        prior: distributions of the parts.
        sums: over the entries of the rows, and of the columns.
    """
    rows, columns = sums

    def update(mean, variance):
        product, square, spread = columns(mean, mean * mean + variance, variance)
        q = prior.v.q + s * s * square
        v = (prior.v.p + s * product) / q
        # Where residuals are as large as they should be, w r^2 = 1, the variances of v cancel from
        # the precision of u.
        product, square_of_mean, reaction = rows(v, v * v + s * s * spread / q**2, 1 / q)
        return MeanField(
            prior.u.times(s * product - s * s * reaction * mean, s * s * square_of_mean),
            s * s * square / prior.v.q,
        )

    unsure = 0.75  # variance of the row factors at the start, relative to that of the prior
    start = update(jnp.sqrt(1 - unsure) * u, unsure / prior.u.q)
    return lax.fori_loop(1, NUM_FIELDS, lambda _, at: update(at.u.p / at.u.q, 1 / at.u.q), start)


def anneal(
    rng_key: Array,
    s: Array,
    u: Float[Array, " row"],
    times: Float[Array, " step"],
    start: MeanField,
    prior: Component,
    sums: tuple[EntrySums, EntrySums],
) -> tuple[Float[Array, " row"], Array]:
    """Row factors after a walk along the path (2), and its log weight.

    Args:
        rng_key: a key.
        s: amplitude.
        u: row factors at the start of the walk.
        times: of the steps, from 0 to 1 for a birth and back for a death.
        start: the mean-field approximation.
        prior: distributions of the parts.
        sums: over the entries of the rows, and of the columns.
    """
    rows, columns = sums
    scale = lambda t: s * jnp.sqrt(t / (1 + (1 - t) * start.pull))
    # column factors given the sums over the row factors
    columns_at = lambda t, found: prior.v.times(scale(t) * found[0], scale(t) ** 2 * found[1])

    def log_weight(u, found, now, then):
        of_columns = columns_at(then, found).log_mass() - columns_at(now, found).log_mass()
        of_rows = prior.u.log_prob(u) - start.u.log_prob(u)
        return (then - now) * jnp.sum(of_rows) + jnp.sum(of_columns)

    def step(at, given):
        (u, total), (rng_key, now, then) = at, given
        v_key, u_key = random.split(rng_key)
        found = columns(u, u * u)
        x = scale(then) * columns_at(then, found).draw(v_key)
        rows_given = prior.u.mixed(start.u, then).times(*rows(x, x * x))
        # a correlation of -0.7 between the row factors before and after
        new = rows_given.overrelaxed(u_key, u, -0.7)
        return (new, total + log_weight(u, found, now, then)), None

    keys = random.split(rng_key, len(times) - 2)
    (u, total), _ = lax.scan(step, (u, jnp.zeros_like(s)), (keys, times[:-2], times[1:-1]))
    return u, total + log_weight(u, columns(u, u * u), times[-2], times[-1])


def schedule(is_dying: Array, num_items: int, dtype: Any) -> Float[Array, " step"]:
    """Times of the steps of a birth, or of a death.

    Args:
        is_dying: whether it is a death.
        num_items: rows and columns; there is a step for every 100 of them, 10 to 100 in all.
        dtype: of the times.
    """
    share = jnp.linspace(0, 1, min(max(num_items // 100, 10), 100) + 1, dtype=dtype)
    times = 1 - (1 - share) ** 1.5  # shorter steps at the end, where u leaves q
    return jnp.where(is_dying, times[::-1], times)


def birth_or_death(
    rng_key: Array,
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
    entries: tuple[Array, Array, Array],
    items: Any,
) -> tuple[dict[str, Any], Array]:
    """Proposes the birth or death of a component chosen at random.

    Args:
        rng_key: a key.
        crossed: the structure.
        components: its components.
        program: the model with its data.
        values: the values of all sites.
        entries: responses, their weights, and the predictor.
        items: the items of either side with their entries, by `pad_items`.

    Returns:
        All values after the proposal is accepted or not, and the predictor there.
    """
    keys, (response, weight, eta) = random.split(rng_key, 5), entries
    k = random.randint(keys[0], (), 0, len(values[components.switch]))
    old, prior, odds = _component(crossed, components, program, values, k)
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    part = lambda one: jnp.where(
        one.is_on, one.parts.s * one.parts.u[index[0]] * one.parts.v[index[1]], 0
    )
    residual = response - eta + part(old)
    of_side = lambda i: EntrySums.of(
        crossed.sides[i].size, items[i], index[1 - i], residual, weight
    )
    sums = of_side(0), of_side(1)
    s, u, log_ratio = _propose(keys[1], old, prior, odds, sums)
    is_taken = jnp.log(random.uniform(keys[2], (), s.dtype)) < log_ratio

    product, square = sums[1](u, u * u)
    alive = Component(s, u, prior.v.times(s * product, s * s * square).draw(keys[3]))
    choose = lambda which: lambda one, other: jnp.where(which, one, other)
    new = jax.tree.map(choose(old.is_on), prior.draw(keys[4]), alive)
    new = jax.tree.map(choose(is_taken), _Slot(~old.is_on, new), old)
    return new.put(components, values, k), eta - part(old) + part(new)


def _propose(
    rng_key: Array, old: "_Slot", prior: Component, odds: Array, sums: tuple[EntrySums, EntrySums]
) -> tuple[Array, Array, Array]:
    """Proposes the amplitude and row factors of a birth or a death; their log acceptance ratio.

    The mean field is the same for a component that is there, seen without it, as for one that is
    not: so either is the reverse of the other.
    """
    keys = random.split(rng_key, 4)
    size, start = leading(keys[0], prior, sums)
    start = jnp.where(old.is_on & (old.parts.u @ start < 0), -start, start)
    # around a little more than the amplitude of the leading pair
    amplitude = LogNormal(jnp.log(1.1 * size), 0.25)
    s = jnp.where(old.is_on, old.parts.s, amplitude.sample(keys[1]))
    field = mean_field(s, start, prior, sums)
    u = jnp.where(old.is_on, old.parts.u, field.u.draw(keys[2]))
    times = schedule(old.is_on, len(prior.u.p) + len(prior.v.p), s.dtype)
    u, gain = anneal(keys[3], s, u, times, field, prior, sums)
    log_odds = odds + jnp.log(NUM_SIGNS) + prior.s.log_prob(s) - amplitude.log_prob(s)
    # a birth that no death could reverse is refused
    birth = jnp.where(u @ start > 0, gain + log_odds, -jnp.inf)
    return s, u, jnp.where(old.is_on, gain - log_odds, birth)


class _Slot(NamedTuple):
    is_on: Array
    parts: Component

    def put(self, components: Components, values: dict[str, Any], k: Array) -> dict[str, Any]:
        (switch, amplitude, (left, right)), (s, u, v) = components, self.parts
        new = {switch: self.is_on, amplitude: s, left: u, right: v}
        return {
            **values,
            # the component is the last axis of each
            **{
                name: values[name].at[..., k].set(own.astype(values[name].dtype))
                for name, own in new.items()
            },
        }


def _component(
    crossed: Crossed, components: Components, program: Program, values: dict[str, Any], k: Array
) -> tuple[_Slot, Component, Array]:
    """Component k, the priors of its parts, and its prior log odds of being switched on."""
    switch, amplitude, factors = components
    (slope, fall), (start, _) = crossed.prior(program, values), crossed.global_values(values)
    low = lower_bound(program, components)
    bound = None if low == -jnp.inf else jnp.asarray(low, start.dtype)
    priors = [Tilted(slope[k] + fall[k] * start[k], fall[k], bound)]
    for side in crossed.sides:
        place = crossed.factor_columns(program, side).start + k
        (slope, fall), start = crossed.prior(program, values, side), crossed.flat(values, side)
        priors.append(Tilted(slope[:, place] + fall[:, place] * start[:, place], fall[:, place]))
    here = Component(values[amplitude][k], *(values[name][:, k] for name in factors))
    odds = crossed.log_odds(program, values, switch, k)
    return _Slot(values[switch][k] > 0, here), Component(*priors), odds
