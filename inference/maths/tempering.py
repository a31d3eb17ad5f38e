"""From one distribution to the next by a power of a likelihood: how far a step goes, and the error
of the evidence that all steps leave.

    Z  =  product over steps of  mean over particles of w,        w = likelihood ^ (difference of the exponents)

The error of log Z is told from the families that particles are of. A particle adds (w / mean w - 1)
/ particles, whose mean over particles is 0; particles of one ancestor are alike as far as the moves
have not made them forget it, those of different ones are independent. So

    variance of log Z  =  sum over families of  (what its members add, over the steps) ^ 2

(Chan and Lai 2013, whose families are those of the first particles; compare Lee and Whiteley 2018).
Where moves forget all, it is on average the sum of the variances of the steps as if particles were
independent; where they forget nothing, a family has added what its founder has. Resampling that is
less random than the multinomial changes nothing in it, whereas the estimate of Lee and Whiteley,
which counts pairs of relatives and takes off those that the multinomial makes, comes out too small
then. In time families become few, and the estimate poor: so every `GENERATIONS` steps all particles
found new ones, and what particles remember for longer than that is left out.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.maths.resampling import effective_size
from inference.maths.slice_walk import Around, Limit, Points, direction, spread_of, walk

__all__ = [
    "GENERATIONS",
    "Families",
    "Walked",
    "counted",
    "founded",
    "moved",
    "next_exponent",
    "powered",
    "variance_of",
]

GENERATIONS = 8
HALVINGS = 60
WIDTH = 4.0  # of the interval of a walk, in standard deviations
DOUBLINGS = 5  # of a walk that does not forget


class Families(NamedTuple):
    """What is known of the error of log Z."""

    family: Array  # [particle]
    added: Array  # [family]: since they were founded
    variance: Array  # of the families before
    age: Array


def powered(log_likelihood: Array, power: Array) -> Array:
    """Of a likelihood to a power; to the power 0 it is 1 wherever it is 0."""
    return jnp.where(power > 0, power * log_likelihood, jnp.zeros_like(log_likelihood))


def next_exponent(log_likelihood: Array, exponent: Array, share: float) -> Array:
    """Up to 1, as far as the weights leave `share` of the particles effective; at least a
    little, should many have no weight at all.
    """
    size, one = len(log_likelihood), jnp.ones_like(exponent)

    def is_even(step: Array) -> Array:
        log_weight = powered(log_likelihood, step)
        return effective_size(log_weight - logsumexp(log_weight)) >= share * size

    def halved(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        even = is_even(middle)
        return jnp.where(even, middle, low), jnp.where(even, high, middle)

    _, step = jax.lax.fori_loop(0, HALVINGS, halved, (jnp.zeros_like(exponent), one - exponent))
    reached = jnp.maximum(exponent + step, jnp.nextafter(exponent, one))
    return jnp.where(is_even(one - exponent), one, jnp.minimum(reached, one))


def founded(size: int, variance: Array) -> Families:
    """Each particle a family."""
    return Families(
        jnp.arange(size, dtype=jnp.int32),
        jnp.zeros(size, variance.dtype),
        variance,
        jnp.zeros((), jnp.int32),
    )


def counted(families: Families, weight: Array, parent: Array) -> Families:
    """After a step with these weights, which sum to 1, and its resampling."""
    added = families.added.at[families.family].add(weight - 1 / len(weight))
    families = Families(families.family[parent], added, families.variance, families.age + 1)
    new = founded(len(weight), variance_of(families))
    return jax.tree.map(
        lambda old, new: jnp.where(families.age < GENERATIONS, old, new), families, new
    )


def variance_of(families: Families) -> Array:
    """Of log Z so far."""
    return families.variance + jnp.sum(families.added**2)


class Walked(NamedTuple):
    """What the moves of a step took."""

    halfway: Array
    num_steps: Array  # of each walk
    evaluations: Array
    num_nan: Array
    passes: Array


def moved(
    rng_key: Array,
    before: Points,
    parent: Array,
    densities: Callable,
    *,
    num_sweeps: float,
    memory: float,
) -> tuple[Points, Walked]:
    """Copies of parents after walks, of which each pass takes as many steps as all before it.

    `densities` are the log of what a walk leaves as it is, and the log likelihood that goes with
    it. Directions are between the points before they were resampled: none of them is where the walk
    begins but the parent, which is left out.
    """
    (count, size), dtype = before.z.shape, before.z.dtype
    start = jax.tree.map(lambda leaf: leaf[parent], before)
    nothing = jnp.zeros(count, jnp.int32)
    spread = spread_of(start.z, nothing, 1)[nothing]
    turn = partial(direction, around=Around(before.z, nothing, nothing + count, parent, spread))
    limit = Limit(jnp.full_like(before.log_likelihood, -jnp.inf), jnp.zeros_like(before.label))
    apart = lambda at: jnp.mean(((at - start.z) / jnp.maximum(spread, jnp.finfo(dtype).tiny)) ** 2)
    least = max(1, round(num_sweeps * size / 2))

    def goes_on(carry: tuple[Points, Walked]) -> Array:
        """After half of the steps a walk that keeps a correlation c is 1 / (1 + sqrt(c)) as far,
        in squares, as after all.
        """
        _, walked = carry
        kept = jnp.clip(1 / walked.halfway - 1, 0, 1)
        return (walked.passes < 2) | ((kept > np.sqrt(memory)) & (walked.passes < 2 + DOUBLINGS))

    def one_pass(carry: tuple[Points, Walked]) -> tuple[Points, Walked]:
        at, walked = carry
        num_steps = jnp.maximum(walked.num_steps, least)
        new = walk(
            random.fold_in(rng_key, walked.passes), densities, at, limit, turn, num_steps, WIDTH
        )
        halfway = apart(at.z) / jnp.maximum(apart(new.at.z), jnp.finfo(dtype).tiny)
        evaluations, num_nan = (
            walked.evaluations + new.num_evaluations,
            walked.num_nan + new.num_nan,
        )
        return new.at, Walked(
            halfway, walked.num_steps + num_steps, evaluations, num_nan, walked.passes + 1
        )

    zero = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(
        goes_on, one_pass, (start, Walked(jnp.zeros((), dtype), zero, zero, zero, zero))
    )
