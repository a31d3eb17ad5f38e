"""Births and deaths of whole components of a crossed predictor.

A component that fits nothing never finds good factors by chance, so it is born whole: an amplitude, factors u of the first side from
their conditional at the leading pair of the residual, factors v of the second from theirs given u, accepted by Metropolis and Hastings with
v integrated out. Its death is the reverse. The leading pair is found without the component, from a random start of its own, so that a birth
and the death that undoes it see the same one. Cost: `NUM_ROUNDS` x entries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.ops import segment_sum
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm

from inference.crossed import Components, Crossed
from inference.kernels._crossed_components import Tilted, lowest
from inference.program import Program

__all__ = ["born"]

NUM_ROUNDS = 12  # of alternating least squares, for the leading pair
SPREAD = 0.3  # of a proposed amplitude, in logarithms
RIDGE = 0.1  # of the leading pair, as a share of the mean precision
TINY = 1e-30


def born(
    rng_key: Array,
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
    response: Array,
    weight: Array,
    eta: Array,
) -> tuple[dict[str, Any], Array]:
    """One component, chosen at random, is born or dies, or stays as it is; and the predictor after that."""
    keys = random.split(rng_key, 5)
    k = random.randint(keys[0], (), 0, len(values[components.switch]))
    old, prior, odds = _component(crossed, components, program, values, k)
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
    return new.put(components, values, k), eta - part(old) + part(new)


class _One(NamedTuple):
    """One component."""

    is_on: Array
    s: Any
    u: Any  # factors of the first side
    v: Any

    def put(self, components: Components, values: dict[str, Any], k: Array) -> dict[str, Any]:
        """All values, with this as component k."""
        switch, amplitude, (left, right) = components
        new = {switch: (self.is_on, k), amplitude: (self.s, k), left: (self.u, (slice(None), k)), right: (self.v, (slice(None), k))}
        return {**values, **{name: values[name].at[at].set(value.astype(values[name].dtype)) for name, (value, at) in new.items()}}


def _component(crossed: Crossed, components: Components, program: Program, values: dict[str, Any], k: Array) -> tuple[_One, _One, Array]:
    """Component k, the priors of its parts, and the log odds that it is there before any entries are seen."""
    switch, amplitude, factors = components
    (slope, fall), (start, _) = crossed.prior(program, values), crossed.global_values(values)
    priors = [Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.asarray(lowest(program, components)))]
    for side in crossed.sides:
        place = crossed.factor_columns(program, side).start + k
        (slope, fall), start = crossed.prior(program, values, side), crossed.flat(values, side)
        priors.append(Tilted(slope[:, place] + fall[:, place] * start[:, place], fall[:, place]))
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
        expected = [jnp.sqrt(jnp.sum(1 / factors.q)) for factors in (prior.u, prior.v)]  # lengths

        def of_side(i, other):
            """The factors of one side given those of the other, and their length, which is taken out."""
            x, size = other[index[1 - i]], len((prior.u, prior.v)[i].p)
            product, square = segment_sum(jnp.stack([weight * residual * x, weight * x * x], axis=1), index[i], size).T
            factor = product / (square + RIDGE * jnp.mean(square) + TINY)
            length = jnp.linalg.norm(factor) + TINY
            return factor / length, length

        start = random.normal(rng_key, prior.v.p.shape, prior.v.p.dtype)
        v = lax.fori_loop(1, NUM_ROUNDS, lambda _, v: of_side(1, of_side(0, v)[0])[0], start)
        _, length = of_side(0, v)
        return cls(length / (expected[0] * expected[1]), v[index[1]] * expected[1], prior, index, residual, weight)

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
