"""From weighted candidates to particles.

A particle filter over assignments has, at every row of data, a finite number of *candidates*: each
particle may put the row into each of its groups. `log_weight` [particle, choice] holds log of
(weight of the particle x probability of the choice and the row).

    optimal      keeps `num_particles` of all candidates: those of weight at least c as they are, of
                 the rest a systematic sample
                 with weight c, where sum min(q / c, 1) = num_particles. Each candidate's expected
                 weight is its weight, and no other scheme with as many particles has a smaller
                 variance (Fearnhead and Clifford 2003). No candidate is kept twice.
    multinomial,
    systematic   where the effective sample size has fallen below half, particles are drawn in
                 proportion to their weights, *then* each
                 chooses its group: the increment of a weight does not depend on the choice, so the
                 choice comes last.

Cost: O(particles x choices), no sort.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn import logsumexp

__all__ = [
    "SCHEMES",
    "Chosen",
    "drawn_choices",
    "effective_size",
    "resampled",
    "systematic",
    "systematic_parents",
    "threshold",
]


class Chosen(NamedTuple):
    """The particles after a step, [particle]; a particle of weight -inf is not in use."""

    parent: Array
    choice: Array
    log_weight: Array  # normalised
    resampled: Array  # scalar: whether anything was left to chance that did not have to be


def effective_size(log_weight: Array) -> Array:
    """1 / sum w^2 of normalised weights."""
    return jnp.exp(-logsumexp(2 * log_weight, axis=-1))


def drawn_choices(rng_key: Array, log_weight: Array) -> Array:
    """A choice for each particle, from log weights [particle, choice].

    One uniform for each: room that is not in use changes nothing.
    """
    reached = jnp.cumsum(jnp.exp(log_weight - jnp.max(log_weight, axis=1, keepdims=True)), axis=1)
    point = random.uniform(rng_key, (len(reached), 1), reached.dtype) * reached[:, -1:]
    return jnp.sum(reached <= point, axis=1, dtype=jnp.int32)


def threshold(weight: Array, num_kept: int) -> Array:
    """c with sum min(weight / c, 1) = num_kept; 0 where no more than `num_kept` weights are
    positive. `weight` sums to 1.

    Each round puts c where it would be if the set of weights above the last c were right; that
    falls towards the answer and reaches it after finitely many rounds, some five in practice.
    """

    def following(c):
        above = weight >= c
        return jnp.sum(jnp.where(above, 0, weight)) / jnp.maximum(
            num_kept - jnp.sum(above, dtype=weight.dtype), 1
        )

    def lower(pair):
        _, c = pair
        return c, jnp.minimum(c, following(c))

    start = (jnp.full((), jnp.inf, weight.dtype), jnp.asarray(1 / num_kept, weight.dtype))
    _, c = jax.lax.while_loop(lambda pair: pair[1] < pair[0], lower, start)
    return jnp.where(jnp.sum(weight > 0) > num_kept, c, 0)


def _optimal(rng_key: Array, log_weight: Array) -> Chosen:
    num_particles = len(log_weight)
    # Choice by choice over all particles: the systematic pass then spreads over choices. Particle
    # by particle it would fall in step with particles of equal weight, and give the same choice to
    # all of them.
    weight = jnp.exp(log_weight).T.ravel()
    c = threshold(weight, num_particles)
    kept = (weight >= c) & (weight > 0)
    num_left = num_particles - jnp.sum(kept)
    rest = jnp.where(kept | (c == 0), 0, weight / jnp.where(c == 0, 1, c))
    # Systematic: a candidate is taken where the running sum passes a point of a grid of width one,
    # thrown at random.
    reached = (
        jnp.minimum(jnp.cumsum(rest), num_left.astype(weight.dtype))
        .at[-1]
        .set(num_left.astype(weight.dtype))
    )
    passed = jnp.floor(reached + random.uniform(rng_key, (), weight.dtype))
    taken = kept | (jnp.diff(passed, prepend=0) > 0)
    order = jnp.searchsorted(jnp.cumsum(taken), jnp.arange(1, num_particles + 1))
    is_used = order < weight.size
    at = jnp.minimum(order, weight.size - 1)
    new = jnp.where(is_used, jnp.log(jnp.maximum(weight[at], c)), -jnp.inf)
    parent, choice = (at % num_particles).astype(jnp.int32), (at // num_particles).astype(jnp.int32)
    return Chosen(parent, choice, new - logsumexp(new), c > 0)


def _multinomial_parents(rng_key: Array, weight: Array) -> Array:
    return random.choice(rng_key, len(weight), weight.shape, p=weight).astype(jnp.int32)


def systematic(weight: Any, start: Any, num_draws: int) -> Any:
    """Indices in proportion to the weights, in order, by systematic resampling: where the running
    sum of the weights passes the points of an even grid. NumPy's of its own arrays, else JAX's.

    :param start: of the grid, uniform between 0 and 1: the one random number for all draws.
    """
    xp: Any = np if isinstance(weight, np.ndarray) else jnp
    points = (xp.arange(num_draws, dtype=weight.dtype) + start) / num_draws
    reached = xp.cumsum(weight)
    return xp.minimum(xp.searchsorted(reached / reached[-1], points), len(weight) - 1)


def systematic_parents(rng_key: Array, weight: Array) -> Array:
    """As many particles as there are, in proportion to their weights."""
    return systematic(weight, random.uniform(rng_key, (), weight.dtype), len(weight)).astype(
        jnp.int32
    )


def resampled(rng_key: Array, log_weight: Array, num_draws: int) -> np.ndarray:
    """Indices in proportion to the weights, by systematic resampling in float64, in random
    order.
    """
    known = np.asarray(log_weight, float)
    place_key, order_key = random.split(rng_key)
    index = systematic(
        np.exp(known - np.logaddexp.reduce(known)), float(random.uniform(place_key)), num_draws
    )
    return np.asarray(random.permutation(order_key, index))


def _with(parents):
    """The scheme that draws particles with `parents` when they have become uneven, and then
    their groups.
    """

    def scheme(rng_key: Array, log_weight: Array) -> Chosen:
        parent_key, choice_key = random.split(rng_key)
        total = logsumexp(log_weight, axis=1)
        num_particles = len(total)
        uneven = effective_size(total) < num_particles / 2
        drawn = jax.lax.cond(
            uneven,
            parents,
            lambda *_: jnp.arange(num_particles, dtype=jnp.int32),
            parent_key,
            jnp.exp(total),
        )
        even = jnp.full_like(total, -jnp.log(jnp.asarray(num_particles, total.dtype)))
        choice = drawn_choices(choice_key, log_weight[drawn])
        return Chosen(drawn, choice, jnp.where(uneven, even, total), uneven)

    return scheme


SCHEMES = {
    "optimal": _optimal,
    "multinomial": _with(_multinomial_parents),
    "systematic": _with(systematic_parents),
}
