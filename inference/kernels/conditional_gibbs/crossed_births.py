"""Births and deaths of whole components of a crossed predictor, by annealed importance sampling.

The number of components that are switched on, such as the rank of a matrix factorisation, changes
here. A component that is switched off has factors from the prior, which never fit the residual by
chance. So a birth proposes a whole component. Its row factors are drawn from a mean-field
approximation to their posterior given the residual, and moved to the posterior by annealed
importance sampling. The proposal is accepted by Metropolis-Hastings with the column factors
integrated out. A death is a birth in reverse. The approximation is computed from the residual
without the component, and from a random start. So a birth and the death that reverses it use the
same approximation. The sign of the start is arbitrary. A birth proposes a positive amplitude.

A component has an amplitude s, row factors u and column factors v. Let r be the residuals of the
entries without the component, and w their weights. The row factors have the posterior

    p(u) Z(u),    Z(u) = integral of p(v) exp(sum_e w r s u v - w (s u v)^2 / 2) over v,        (1)

in which rows depend on each other through v alone. `mean_field` returns a product q(u) of Normals
near it. Its mean-field equations have the reaction term of Onsager (Thouless, Anderson and Palmer
1977), which keeps a row from being influenced by its own effect on the columns. The divergence
from q to the posterior is tens of nats. So a path leads from one to the other, for 0 <= t <= 1,

    f_t(u) = q(u)^(1 - t) p(u)^t Z_t(u),                                                        (2)
    Z_t(u) = Z(u) with c(t) v for v,    c^2 = t / (1 + (1 - t) pull),

where the entries make a column factor pull + 1 times as precise as its prior. Then log Z_t is about
t log Z, and all conditionals are Normal. `anneal` goes along the path by annealed importance
sampling (Neal 2001): it adds log f_{t'} - log f_t at the present u to the log weight, makes a
reversible Gibbs step at t', and so on. A step draws v given u and then u given v. The second draw
is overrelaxed, because the direction of u turns slowly (Adler 1981). A walk that starts from a
draw of q has the integral of (1) as its mean weight. A death walks the path backwards, from the
row factors of the component; its weight is the inverse in the acceptance ratio (Karagiannis and
Andrieu 2013).

Cost: 2 x (`NUM_ROUNDS` + `NUM_FIELDS` + steps) sums over the entries; memory: a few numbers an
entry, and 2 x steps x (rows + columns) random numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ops import segment_sum
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
    "num_random",
    "schedule",
    "sums_over",
]

NUM_ROUNDS = 10  # of power iterations
NUM_FIELDS = 8  # of mean-field updates
ENTRIES_PER_STEP = 1000  # of a walk, which has 10 to 100 steps
NUM_SIGNS = 2  # of a random start; a birth draws one, a death takes that of its component
TINY = 1e-30


class Component(NamedTuple):
    """Amplitude and factors of a component, or distributions of them."""

    s: Any
    u: Any
    v: Any


class EntrySums(NamedTuple):
    """The entries of one side, for sums over those of each item."""

    size: int  # items of the side
    # of each entry its item, the item of the other side, weight x residual, weight
    item: Array
    other: Array
    product: Array
    weight: Array

    def __call__(self, x: Float[Array, " other"], *squares: Array) -> tuple[Array, ...]:
        """For each item sum_e w r x, and sum_e w y for each y of `squares`.

        Sums are over the entries of the item. x and y have a number for each item of the other
        side.
        """
        terms = self.product * x[self.other], *(self.weight * y[self.other] for y in squares)
        return tuple(segment_sum(jnp.stack(terms, axis=-1), self.item, self.size).T)


def sums_over(
    sizes: Sequence[int],
    items: Sequence[Int[Array, " entry"]],
    residual: Float[Array, " entry"],
    weight: Float[Array, " entry"],
) -> tuple[EntrySums, EntrySums]:
    """Sums over the entries of each row, and over those of each column.

    Args:
        sizes: how many rows and how many columns there are.
        items: the row of each entry, and the column.
        residual: of each entry.
        weight: of each entry.
    """
    product = weight * residual
    (num_rows, num_columns), (row, column) = sizes, items
    return (
        EntrySums(num_rows, row, column, product, weight),
        EntrySums(num_columns, column, row, product, weight),
    )


def leading(
    start: Float[Array, " column"], prior: Component, sums: tuple[EntrySums, EntrySums]
) -> tuple[Array, Float[Array, " row"]]:
    """Amplitude and row factors of the leading singular pair of the residual.

    They come from alternating ridge regressions.

    Args:
        start: column factors to start from; standard Normals.
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

    none = jnp.zeros_like(start[0]), jnp.zeros_like(prior.u.p)
    return lax.fori_loop(0, NUM_ROUNDS, turn, (*none, start))[:2]


class MeanField(NamedTuple):
    """The mean-field Normals of the row factors, and `pull` of (2)."""

    u: Tilted
    pull: Array


def mean_field(
    s: Array, u: Float[Array, " row"], prior: Component, sums: tuple[EntrySums, EntrySums]
) -> MeanField:
    """The mean-field approximation to (1), by iteration from row factors u.

    Args:
        s: amplitude.
        u: row factors to start from.
        prior: distributions of the parts.
        sums: over the entries of the rows, and of the columns.
    """
    rows, columns = sums

    def update(_, at):
        mean, variance = at.u.p / at.u.q, 1 / at.u.q
        product, square, spread = columns(mean, mean * mean + variance, variance)
        q = prior.v.q + s * s * square
        v = (prior.v.p + s * product) / q
        # Where w r^2 is 1, as the model has it on average, the variances of v cancel from the
        # precision of u.
        product, square_of_mean, reaction = rows(v, v * v + s * s * spread / q**2, 1 / q)
        return MeanField(
            prior.u.times(s * product - s * s * reaction * mean, s * s * square_of_mean),
            s * s * square / prior.v.q,
        )

    unsure = 0.75  # variance of the row factors at the start, relative to that of the prior
    start = Tilted(jnp.sqrt(1 - unsure) * u * prior.u.q / unsure, prior.u.q / unsure)
    return lax.fori_loop(0, NUM_FIELDS, update, MeanField(start, jnp.zeros_like(prior.v.p)))


def anneal(
    noise: Float[Array, "step item"],
    s: Array,
    u: Float[Array, " row"],
    times: Float[Array, " step"],
    start: MeanField,
    prior: Component,
    sums: tuple[EntrySums, EntrySums],
) -> tuple[Float[Array, " row"], Array, tuple[Array, Array]]:
    """Row factors after a walk along the path (2), its log importance weight, and their sums.

    Args:
        noise: standard Normals: in each step one for each row, then one for each column.
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
    # log p(u) - log q(u) is linear in u and its square
    p, q = prior.u.p - start.u.p, prior.u.q - start.u.q
    less = jnp.sum(prior.u.log_mass() - start.u.log_mass())

    def log_weight(u, found, now, then):
        ends = jax.tree.map(
            lambda *x: jnp.stack(x), columns_at(now, found), columns_at(then, found)
        )
        before, after = jnp.sum(ends.log_mass(), axis=1)
        return (then - now) * (jnp.sum((p - q * u / 2) * u) - less) + after - before

    def step(at, given):
        (u, total, _), (noise, now, then, is_last) = at, given
        found = columns(u, u * u)
        x = scale(then) * columns_at(then, found).at(noise[len(u) :])
        rows_given = prior.u.mixed(start.u, then).times(*rows(x, x * x))
        # a correlation of -0.7 between the row factors before and after
        new = rows_given.overrelaxed(noise[: len(u)], u, -0.7)
        total = total + log_weight(u, found, now, then)
        return (jnp.where(is_last, u, new), total, found), None

    number, none = len(noise), jnp.zeros_like(prior.v.p)
    given = noise, times[:-1], times[1:], jnp.arange(number) == number - 1
    (u, total, found), _ = lax.scan(step, (u, jnp.zeros_like(s), (none, none)), given)
    return u, total, found


def schedule(is_dying: Array, num_steps: int, dtype: Any) -> Float[Array, " time"]:
    """Times t of (2) before and after each step: rising for a birth, falling for a death.

    Args:
        is_dying: whether it is a death.
        num_steps: how many steps there are.
        dtype: of the times.
    """
    share = jnp.linspace(0, 1, num_steps + 1, dtype=dtype)
    times = 1 - (1 - share) ** 1.5  # shorter steps at the end, where u leaves q
    return jnp.where(is_dying, times[::-1], times)


def num_random(crossed: Crossed, program: Program) -> int:
    """How many random numbers `birth_or_death` takes."""
    num_rows, num_columns = (side.size for side in crossed.sides)
    num_steps = min(max(crossed.num_entries(program) // ENTRIES_PER_STEP, 10), 100)
    return 3 + num_rows + 2 * num_columns + num_steps * (num_rows + num_columns)


def birth_or_death(
    uniform: Float[Array, " number"],
    noise: Float[Array, " number"],
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
    entries: tuple[Array, Array, Array],
    priors: list[tuple[Array, Array]],
) -> tuple[dict[str, Any], Array]:
    """Proposes the birth or death of a component chosen at random.

    The parts of components that are switched off are integrated out: those of a dead one stay what
    they were. The caller draws them from their priors before anything depends on them.

    Args:
        uniform: `num_random` numbers between 0 and 1.
        noise: as many standard Normals, the quantiles at these.
        crossed: the structure.
        components: its components.
        program: the model with its data.
        values: the values of all sites.
        entries: responses, their weights, and the predictor.
        priors: by `crossed.priors` at the values.

    Returns:
        All values after the proposal was accepted or refused, and the predictor at them.
    """
    sizes, (response, weight, eta) = [side.size for side in crossed.sides], entries
    which, accepted, stretch = *uniform[:2], noise[2]
    ends = np.cumsum([3, sizes[1], sizes[1], sizes[0]])
    _, start, v_noise, u_noise, walk = jnp.split(noise, ends)
    k = (which * len(values[components.switch])).astype(jnp.int32)
    old, prior, odds = _component(crossed, components, program, values, k, priors)
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    part = lambda one: jnp.where(
        one.is_on, one.parts.s * one.parts.u[index[0]] * one.parts.v[index[1]], 0
    )
    sums = sums_over(sizes, index, response - eta + part(old), weight)
    normals = start, u_noise, walk.reshape(-1, sum(sizes))
    s, u, log_ratio, (product, square) = _propose(normals, old, prior, odds, sums, stretch)
    is_taken = jnp.log(accepted) < log_ratio
    born = Component(s, u, prior.v.times(s * product, s * s * square).at(v_noise))
    is_born = is_taken & ~old.is_on
    parts = jax.tree.map(lambda new, kept: jnp.where(is_born, new, kept), born, old.parts)
    new = _Slot(old.is_on ^ is_taken, parts)
    return new.put(components, values, k), eta - part(old) + part(new)


def _propose(
    noise: tuple[Float[Array, " column"], Float[Array, " row"], Float[Array, "step item"]],
    old: "_Slot",
    prior: Component,
    odds: Float[Array, ""],
    sums: tuple[EntrySums, EntrySums],
    stretch: Float[Array, ""],
) -> tuple[
    Float[Array, ""],
    Float[Array, " row"],
    Float[Array, ""],
    tuple[Float[Array, " column"], Float[Array, " column"]],
]:
    """The proposal of a birth or a death: amplitude, row factors, log acceptance ratio, their sums.

    The mean field is computed without the component, whether that is switched on or not. So a birth
    and a death are the reverse of each other.
    """
    start, u_noise, walk = noise
    size, at = leading(start, prior, sums)
    at = jnp.where(old.is_on & (old.parts.u @ at < 0), -at, at)
    # centred a little above the amplitude of the leading pair
    centre, width = jnp.log(1.1 * size), 0.25
    amplitude = LogNormal(centre, width)
    s = jnp.where(old.is_on, old.parts.s, jnp.exp(centre + width * stretch))
    field = mean_field(s, at, prior, sums)
    u = jnp.where(old.is_on, old.parts.u, field.u.at(u_noise))
    times = schedule(old.is_on, len(walk), s.dtype)
    u, gain, found = anneal(walk, s, u, times, field, prior, sums)
    log_odds = odds + jnp.log(NUM_SIGNS) + prior.s.log_prob(s) - amplitude.log_prob(s)
    # a birth that no death could reverse is refused
    birth = jnp.where(u @ at > 0, gain + log_odds, -jnp.inf)
    return s, u, jnp.where(old.is_on, gain - log_odds, birth), found


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
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
    k: Array,
    priors: list[tuple[Array, Array]],
) -> tuple[_Slot, Component, Array]:
    """Component k, the priors of its parts, and the prior log odds that it is switched on."""
    switch, amplitude, factors = components
    low = lower_bound(program, components)
    here = Component(values[amplitude][k], *(values[name][:, k] for name in factors))
    columns = [k, *(crossed.factor_columns(program, side).start + k for side in crossed.sides)]
    bounds = [None if low == -jnp.inf else jnp.asarray(low, here.s.dtype), None, None]
    parts = []
    for x, column, low, (slope, fall) in zip(
        here, columns, bounds, [priors[2], *priors[:2]], strict=True
    ):
        own = slope[..., column], fall[..., column]
        parts.append(Tilted(own[0] + own[1] * x, own[1], low))
    odds = crossed.log_odds(program, values, switch, k)
    return _Slot(values[switch][k] > 0, here), Component(*parts), odds
