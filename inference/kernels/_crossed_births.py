"""Births and deaths of whole components of a crossed predictor.

A component that fits nothing never finds good factors by chance, so it is born whole: drawn from a guess at what the residual holds,
walked from there to its posterior, and accepted by Metropolis and Hastings with the factors of the second side integrated out. Its death
is the same walk backwards. The guess is made without the component, from a random start of its own, so that a birth and the death that
undoes it see the same one; the start has a sign, which the entries cannot tell. An amplitude is born positive.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions import LogNormal

from inference.crossed import Components, Crossed
from inference.kernels._crossed_bridge import Parts, Sums, guess, leading, path, walk
from inference.kernels._crossed_components import Tilted, lowest
from inference.program import Program

__all__ = ["born"]

CENTRE, SPREAD = 1.1, 0.25  # of a proposed amplitude: in that of the leading pair, and in logarithms
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
    """One component, chosen at random, is born or dies, or stays as it is; and the predictor after that.

    :param entries: responses, their weights, and the predictor.
    :param plan: the buckets of either side.
    """
    keys, (response, weight, eta) = random.split(rng_key, 5), entries
    k = random.randint(keys[0], (), 0, len(values[components.switch]))
    old, prior, odds = _component(crossed, components, program, values, k)
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    part = lambda one: jnp.where(one.is_on, one.parts.s * one.parts.u[index[0]] * one.parts.v[index[1]], 0)
    residual = response - eta + part(old)
    of_side = lambda i: Sums.of(crossed.sides[i].size, plan[i], index[1 - i], residual, weight)
    sums = of_side(0), of_side(1)
    s, u, log_ratio = _walked(keys[1], old, prior, odds, sums)
    is_taken = jnp.log(random.uniform(keys[2], (), s.dtype)) < log_ratio

    product, square = sums[1](u, u * u)
    alive = Parts(s, u, prior.v.times(s * product, s * s * square).draw(keys[3]))
    new = jax.tree.map(lambda gone, there: jnp.where(old.is_on, gone, there), prior.draw(keys[4]), alive)
    new = jax.tree.map(lambda new, was: jnp.where(is_taken, new, was), _One(~old.is_on, new), old)
    return new.put(components, values, k), eta - part(old) + part(new)


def _walked(rng_key: Array, old: "_One", prior: Parts, odds: Array, sums: tuple[Sums, Sums]) -> tuple[Array, Array, Array]:
    """Amplitude and row factors after the walk of a birth, or of a death, and the log ratio by which it is accepted.

    The guess is the same for a component that is there, seen without it, as for one that is not: so either is the reverse of the other.
    """
    keys = random.split(rng_key, 4)
    size, start = leading(keys[0], prior, sums)
    start = jnp.where(old.is_on & (old.parts.u @ start < 0), -start, start)
    amplitude = LogNormal(jnp.log(CENTRE * size), SPREAD)
    s = jnp.where(old.is_on, old.parts.s, amplitude.sample(keys[1]))
    near = guess(s, start, prior, sums)
    u = jnp.where(old.is_on, old.parts.u, near.u.draw(keys[2]))
    u, gain = walk(keys[3], s, u, path(old.is_on, len(prior.u.p) + len(prior.v.p), s.dtype), near, prior, sums)
    log_odds = odds + jnp.log(NUM_SIGNS) + prior.s.log_prob(s) - amplitude.log_prob(s)
    birth = jnp.where(u @ start > 0, gain + log_odds, -jnp.inf)  # what a death could not undo is no birth
    return s, u, jnp.where(old.is_on, gain - log_odds, birth)


class _One(NamedTuple):
    """One component."""

    is_on: Array
    parts: Parts

    def put(self, components: Components, values: dict[str, Any], k: Array) -> dict[str, Any]:
        """All values, with this as component k."""
        (switch, amplitude, (left, right)), (s, u, v) = components, self.parts
        new = {switch: (self.is_on, k), amplitude: (s, k), left: (u, (slice(None), k)), right: (v, (slice(None), k))}
        return {**values, **{name: values[name].at[at].set(value.astype(values[name].dtype)) for name, (value, at) in new.items()}}


def _component(crossed: Crossed, components: Components, program: Program, values: dict[str, Any], k: Array) -> tuple[_One, Parts, Array]:
    """Component k, the priors of its parts, and the log odds that it is there before any entries are seen."""
    switch, amplitude, factors = components
    (slope, fall), (start, _) = crossed.prior(program, values), crossed.global_values(values)
    low = lowest(program, components)
    priors = [Tilted(slope[k] + fall[k] * start[k], fall[k], None if low == -jnp.inf else jnp.asarray(low, start.dtype))]
    for side in crossed.sides:
        place = crossed.factor_columns(program, side).start + k
        (slope, fall), start = crossed.prior(program, values, side), crossed.flat(values, side)
        priors.append(Tilted(slope[:, place] + fall[:, place] * start[:, place], fall[:, place]))
    prior = lambda on: crossed.log_prior(program, {**values, switch: values[switch].at[k].set(on)}, (switch,))
    here = Parts(values[amplitude][k], *(values[name][:, k] for name in factors))
    return _One(values[switch][k] > 0, here), Parts(*priors), prior(1) - prior(0)
