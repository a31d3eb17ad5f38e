"""Where a nested sampling stands: live points, dead ones, and what is known of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inference.kernels.nested.volumes import Volumes, started
from inference.maths.slice_walk import Points
from inference.reading.exchangeable import Reference
from inference.run.protocol import Results

__all__ = [
    "Dead",
    "Nest",
    "Offers",
    "begun_with",
    "information_of",
    "particles",
    "points_of",
    "with_room",
]

NUM_HISTORIES = 200
# looks back to the ancestors of live points: modes hang together for long after the last walk went
# from one to the other
GENERATIONS = 12


class Dead(NamedTuple):
    """Points that have died, in their order; room for more."""

    z: Array
    log_likelihood: Array
    log_volume: Array  # the prior volume that each stands for
    mode: Array


class Offers(NamedTuple):
    """Draws from where nested sampling starts, for births to take.

    The host makes them, for the code that draws takes long to compile.
    """

    z: Array  # [offer, size]
    num_used: Array
    are_worn: Array  # whether new ones are wanted
    rng_key: Array  # by which these are drawn


class Nest(NamedTuple):
    """Where a run stands."""

    live: Points
    mode: Array  # [live]
    # [generation, live]: the live point that each is a copy of a copy of, one look ago, two, ...
    ancestor: Array
    num_modes: Array
    volumes: Volumes
    dead: Dead
    num_dead: Array
    num_steps: Array
    num_evaluations: Array
    longer: Array  # logarithm of how many times as long as at first walks are
    offers: Offers
    reference: Reference  # what members without names are named after


def begun_with(
    live: Points, offers: Offers, reference: Reference, num_modes: int, room: int
) -> Nest:
    """Live points in one mode of up to `num_modes`, nothing dead, and room for those that die."""
    (num_live, size), dtype = live.z.shape, live.z.dtype
    zero, nothing = jnp.zeros((), jnp.int32), jnp.zeros(0, dtype)
    dead = Dead(jnp.zeros((0, size), dtype), nothing, nothing, jnp.zeros(0, jnp.int32))
    return Nest(
        live=live,
        mode=jnp.zeros(num_live, jnp.int32),
        ancestor=jnp.broadcast_to(jnp.arange(num_live, dtype=jnp.int32), (GENERATIONS, num_live)),
        num_modes=zero + 1,
        volumes=started(num_modes, NUM_HISTORIES),
        dead=with_room(dead, room),
        num_dead=zero,
        num_steps=zero,
        num_evaluations=zero + num_live,
        longer=jnp.zeros((), dtype),
        offers=offers,
        reference=reference,
    )


def with_room(dead: Dead, room: int) -> Dead:
    """Room for as many dead in all."""
    more = lambda leaf: jnp.concatenate(
        [leaf, jnp.zeros((room - len(leaf), *leaf.shape[1:]), leaf.dtype)]
    )
    return jax.tree.map(more, dead)


def points_of(state: Nest) -> tuple[Array, Array, Array, Array]:
    """All points, dead and live: z, log weight, log likelihood, mode."""
    nest, kept = jax.device_get(state), int(state.num_dead)
    count = np.bincount(nest.mode, minlength=len(nest.volumes.log_volume))
    log_each = nest.volumes.log_volume[:, 0] - np.log(np.maximum(count, 1))
    dead = jax.tree.map(lambda leaf: leaf[:kept], nest.dead)
    log_likelihood = np.concatenate([dead.log_likelihood, nest.live.log_likelihood])
    log_volume = np.concatenate([dead.log_volume, log_each[nest.mode]])
    z, mode = np.concatenate([dead.z, nest.live.z]), np.concatenate([dead.mode, nest.mode])
    return (
        jnp.asarray(z),
        jnp.asarray(log_volume + log_likelihood),
        jnp.asarray(log_likelihood),
        jnp.asarray(mode),
    )


def information_of(state: Nest) -> Array:
    """Nats that the posterior is away from the prior; on the host, where nothing is to be
    compiled.
    """
    _, log_weight, log_likelihood, _ = map(np.asarray, points_of(state))
    total = np.logaddexp.reduce(log_weight)
    weight = np.exp(log_weight - total)
    return jnp.asarray(np.sum(weight * np.where(weight > 0, log_likelihood, 0.0)) - total)


def particles(named: dict[str, Array], **beside: Array) -> Results:
    """The group `particles` of the tree: what is known of each weighted point, and its sites."""
    named = {name.replace("/", "."): value for name, value in named.items()}
    return Results({"particles": beside | named}, {}, dict.fromkeys(beside | named, ("particle",)))
