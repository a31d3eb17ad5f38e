"""Switches, amplitudes and shared sites of a crossed predictor; births, deaths and changes of scale of components.

The entries enter the first three by their sums of squares and products alone, G = sum_e w slopes slopes' and g, so that a sweep over
components costs nothing beside the sums. As a function of the amplitude x of component k the entries are exp(b x - G[k, k] x^2 / 2), and

    p(entries | z = 1) / p(entries | z = 0) = Z(p + b, q + G[k, k]) / Z(p, q),   Z(p, q) = integral of exp(p x - q x^2 / 2)      (1)

over the support of the amplitude, whose prior falls like that with p, q. A switch is drawn by (1), with its amplitude integrated out.

A component that fits nothing never finds good factors by chance, so it is also born whole: row factors u from their conditional at the
leading pair of the residual, column factors v from theirs given u, accepted by Metropolis and Hastings with v integrated out; its death is
the reverse. And (u, s) -> (c u, s / c), which the entries cannot tell apart, moves by the priors.

Cost: entries x components^2 for the sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.ops import segment_sum
from jax.scipy.special import log_ndtr, logsumexp
from jax.scipy.stats import norm

from inference.crossed import Crossed, chunks
from inference.program import Program
from inference.truncated import TruncatedNormal

__all__ = ["Tilted", "born", "rescaled", "shifted", "sums", "switched"]

NUM_ROUNDS = 4  # of alternating least squares, for the leading pair
SPREAD = 0.3  # of a proposed amplitude, in logarithms
RIDGE = 0.1  # of the leading pair, as a share of the mean precision
TINY = 1e-30


def sums(crossed: Crossed, program: Program, values: dict[str, Any], response: Array, weight: Array, eta: Array) -> tuple[Array, Array]:
    """G [column, column], and the sums of weight, slope and what the response is without the columns, [column]."""
    start, _ = crossed.global_values(values)
    now = _switched_on(crossed, values, start)
    index = chunks(len(response))
    is_new = jnp.arange(index.size).reshape(index.shape) < len(response)

    def add(total, chunk):
        entries, is_there = chunk
        slopes = crossed.slopes(crossed.at(program, entries), values)
        weighted = slopes * (weight[entries] * is_there)[:, None]
        rest = response[entries] - eta[entries] + slopes @ now
        return (total[0] + weighted.T @ slopes, total[1] + rest @ weighted), None

    zero = jnp.zeros_like(start)
    return lax.scan(add, (jnp.outer(zero, zero), zero), (index, is_new))[0]


def switched(rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any], found: tuple[Array, Array]) -> dict[str, Array]:
    """Every switch with its amplitude, and every shared site, drawn once in turn."""
    (gram, linear), (start, place), (slope, fall) = found, crossed.global_values(values), crossed.prior(program, values)
    name = crossed.components.switch if crossed.components else None
    switch = values[name] if name else jnp.zeros(0)
    width, low = len(switch), _low(crossed, program)

    def log_odds(z, k):
        prior = lambda on: crossed.log_prior(program, {**values, name: z.at[k].set(on)}, (name,))
        return prior(1) - prior(0)

    def one(k, drawn):
        x, on = drawn
        switch_key, value_key = random.split(random.fold_in(rng_key, k))
        prior = Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.where(k < width, low, -jnp.inf))
        there = Tilted(prior.p + linear[k] - gram[k] @ (x * on) + gram[k, k] * x[k] * on[k], prior.q + gram[k, k], prior.low)
        is_on = jnp.ones((), bool)
        if name:
            odds = log_odds(on[:width].astype(switch.dtype), jnp.minimum(k, width - 1)) + there.log_mass() - prior.log_mass()
            is_on = (k >= width) | (random.logistic(switch_key, dtype=x.dtype) < odds)
        value = jax.tree.map(lambda new, old: jnp.where(is_on, new, old), there, prior).draw(value_key)
        return x.at[k].set(value), on.at[k].set(is_on.astype(x.dtype))

    on = jnp.ones_like(start).at[:width].set(switch)
    x, on = lax.fori_loop(0, len(start), one, (start, on))
    return place(x) | ({name: on[:width].astype(switch.dtype)} if name else {})


class Tilted(NamedTuple):
    """Density proportional to exp(p x - q x^2 / 2) above `low`, elementwise; `log_mass` is log Z(p, q) of (1) less log(2 pi) / 2."""

    p: Array
    q: Array
    low: Any

    def log_mass(self) -> Array:
        """Its normaliser."""
        mean = self.p / self.q
        return self.p * mean / 2 - jnp.log(self.q) / 2 + log_ndtr((mean - self.low) * jnp.sqrt(self.q))

    def log_prob(self, x: Array) -> Array:
        """Log density of each element."""
        return self.p * x - self.q * x * x / 2 - self.log_mass() - jnp.log(2 * jnp.pi) / 2

    def draw(self, rng_key: Array) -> Array:
        """A draw of each element."""
        low = jnp.broadcast_to(self.low, jnp.shape(self.p)).astype(self.p.dtype)
        return TruncatedNormal(self.p / self.q, 1 / jnp.sqrt(self.q), low, jnp.full_like(low, jnp.inf)).sample(rng_key)

    def given(self, x: Array, index: Array, residual: Array, weight: Array) -> "Tilted":
        """With entries that are x times the element they belong to."""
        total = lambda part: segment_sum(part, index, len(self.p))
        return self._replace(p=self.p + total(weight * residual * x), q=self.q + total(weight * x * x))


def rescaled(rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """Every component's factors and amplitude, a little longer here and shorter there."""
    _, amplitude, factors = crossed.components
    for name, side in zip(factors, crossed.sides, strict=True):
        rng_key, step_key, accept_key = random.split(rng_key, 3)
        width = len(values[amplitude])
        log_c = 1.7 / jnp.sqrt(side.size) * random.normal(step_key, (width,), values[amplitude].dtype)
        moved = {**values, name: values[name] * jnp.exp(log_c), amplitude: values[amplitude] * jnp.exp(-log_c)}
        old, new = (_terms(program, at, (name, amplitude)) for at in (values, moved))
        is_taken = jnp.log(random.uniform(accept_key, (width,), log_c.dtype)) < new - old + (side.size - 1) * log_c
        values = {**values, **{each: jnp.where(is_taken, moved[each], values[each]) for each in (name, amplitude)}}
    return values


def shifted(rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """The level of all entries, between a shared site and the items of each side, by the priors: the entries cannot tell."""
    for i, (side, column, place) in enumerate(crossed.levels):
        items, (shared, put) = crossed.flat(values, side), crossed.global_values(values)
        (slope, fall), (slope_shared, fall_shared) = crossed.prior(program, values, side), crossed.prior(program, values)
        q = fall_shared[place] + jnp.sum(fall[:, column])
        p = slope_shared[place] - jnp.sum(slope[:, column])
        step = p / q + random.normal(random.fold_in(rng_key, i), (), q.dtype) / jnp.sqrt(q)
        rows = crossed.unflat(program, side, items.at[:, column].add(-step))
        values = {**values, **put(shared.at[place].add(step)), **rows}
    return values


def _terms(program: Program, values: dict[str, Any], names: tuple[str, ...]) -> Array:
    """Log probabilities of some sites, by component."""
    terms = program.log_probs(values)
    return sum(terms[name].reshape(-1, terms[name].shape[-1]).sum(0) for name in names)


def _low(crossed: Crossed, program: Program) -> float:
    """Where the amplitudes begin."""
    if not crossed.components:
        return -jnp.inf
    return getattr(program.sites[crossed.components.amplitude].support, "lower_bound", -jnp.inf)


def _switched_on(crossed: Crossed, values: dict[str, Any], x: Array) -> Array:
    """Amplitudes that are switched off count as 0."""
    if not crossed.components:
        return x
    switch = values[crossed.components.switch]
    return x.at[: len(switch)].multiply(switch)


def born(
    rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any], response: Array, weight: Array, eta: Array
) -> tuple[dict[str, Any], Array]:
    """One component, chosen at random, is born or dies, or stays as it is; and the predictor after that."""
    keys = random.split(rng_key, 5)
    k = random.randint(keys[0], (), 0, len(values[crossed.components.switch]))
    old, prior, odds = _component(crossed, program, values, k)
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    part = lambda one: jnp.where(one.is_on, one.s * one.u[index[0]] * one.v[index[1]], 0)
    residual = response - eta + part(old)

    # The same for a component that is there, seen without it, as for one that is not: so birth and death are each other's reverse.
    proposal = _Proposal.at(keys[1], prior, index, residual, weight)
    s, u = (jnp.where(old.is_on, here, new) for here, new in zip((old.s, old.u), proposal.draw(keys[2]), strict=True))
    v = prior.v.given(s * u[index[0]], index[1], residual, weight)
    log_ratio = (
        odds + prior.s.log_prob(s) + jnp.sum(prior.u.log_prob(u)) - proposal.log_prob(s, u) + jnp.sum(v.log_mass() - prior.v.log_mass())
    )
    is_taken = jnp.log(random.uniform(keys[3], (), s.dtype)) < jnp.where(old.is_on, -log_ratio, log_ratio)

    key_s, key_u, key_v = random.split(keys[4], 3)
    dead = _One(~old.is_on, prior.s.draw(key_s), prior.u.draw(key_u), prior.v.draw(key_v))
    alive = _One(~old.is_on, s, u, v.draw(key_v))
    new = jax.tree.map(lambda there, gone, was: jnp.where(is_taken, jnp.where(old.is_on, gone, there), was), alive, dead, old)
    return new.put(crossed, values, k), eta - part(old) + part(new)


class _One(NamedTuple):
    """One component."""

    is_on: Array
    s: Any
    u: Any  # factors of the first side
    v: Any

    def put(self, crossed: Crossed, values: dict[str, Any], k: Array) -> dict[str, Any]:
        """All values, with this as component k."""
        switch, amplitude, (left, right) = crossed.components
        new = {switch: (self.is_on, k), amplitude: (self.s, k), left: (self.u, (slice(None), k)), right: (self.v, (slice(None), k))}
        return {**values, **{name: values[name].at[at].set(value.astype(values[name].dtype)) for name, (value, at) in new.items()}}


def _component(crossed: Crossed, program: Program, values: dict[str, Any], k: Array) -> tuple[_One, _One, Array]:
    """Component k, the priors of its parts, and the log odds that it is there before any entries are seen."""
    switch, amplitude, factors = crossed.components
    (slope, fall), (start, _) = crossed.prior(program, values), crossed.global_values(values)
    priors = [Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.asarray(_low(crossed, program)))]
    for side, name in zip(crossed.sides, factors, strict=True):
        place = sum(int(np.prod(program.sites[each].shape[1:])) for each in side.sites[: side.sites.index(name)]) + k
        (slope, fall), start = crossed.prior(program, values, side), crossed.flat(values, side)
        priors.append(Tilted(slope[:, place] + fall[:, place] * start[:, place], fall[:, place], jnp.asarray(-jnp.inf)))
    prior = lambda on: crossed.log_prior(program, {**values, switch: values[switch].at[k].set(on)}, (switch,))
    here = _One(values[switch][k] > 0, values[amplitude][k], *(values[name][:, k] for name in factors))
    return here, _One(here.is_on, *priors), prior(1) - prior(0)


class _Proposal(NamedTuple):
    """Amplitude and row factors of a new component: log-normal about `size`, and given that Normal about the leading pair."""

    size: Array
    guess: Array  # column factor of each entry
    prior: _One
    index: Any
    residual: Array
    weight: Array

    @classmethod
    def at(cls, rng_key: Array, prior: _One, index: list[Array], residual: Array, weight: Array) -> "_Proposal":
        """By alternating least squares from a random start."""
        expected = [jnp.sqrt(jnp.sum(1 / of_side.q)) for of_side in (prior.u, prior.v)]  # lengths
        factor = random.normal(rng_key, prior.v.p.shape, prior.v.p.dtype)
        length = jnp.ones_like(expected[0])
        for i in range(1, 2 * NUM_ROUNDS):
            x, at, size = factor[index[i % 2]], index[1 - i % 2], len((prior.u, prior.v)[1 - i % 2].p)
            square = segment_sum(weight * x * x, at, size)
            factor = segment_sum(weight * residual * x, at, size) / (square + RIDGE * jnp.mean(square) + TINY)
            length = jnp.linalg.norm(factor) + TINY
            factor = factor / length
        return cls(length / (expected[0] * expected[1]), x * expected[1], prior, index, residual, weight)

    def _rows(self, s: Array) -> list[Tilted]:
        """Of either sign, which the entries cannot tell apart."""
        return [self.prior.u.given(sign * s * self.guess, self.index[0], self.residual, self.weight) for sign in (1, -1)]

    def draw(self, rng_key: Array) -> tuple[Array, Array]:
        """Amplitude and row factors."""
        s_key, sign_key, u_key = random.split(rng_key, 3)
        s = self.size * jnp.exp(SPREAD * random.normal(s_key, (), self.size.dtype))
        plus, minus = self._rows(s)
        return s, jnp.where(random.bernoulli(sign_key), plus.draw(u_key), minus.draw(u_key))

    def log_prob(self, s: Array, u: Array) -> Array:
        """Log density of an amplitude and row factors."""
        of_rows = jnp.stack([jnp.sum(rows.log_prob(u)) for rows in self._rows(s)])
        return norm.logpdf(jnp.log(s / self.size) / SPREAD) - jnp.log(SPREAD * s) + logsumexp(of_rows) - jnp.log(2)
