"""The state of nested sampling: live points, dead points, and simulated prior volumes.

When the lowest of n points of a mode dies, the prior volume of the mode shrinks by t ~ Beta(n, 1),
log t = - Exponential / n. When a mode splits, its parts share its volume as Exponential weights of
its points do. For independent points that is a Dirichlet with the numbers of points. But points are
copies of others, and stay in the part of their parent when the parts came apart before that was
noticed. So all descendants of one point, some e-folds ago, have one weight. Several simulated
histories draw all of these, and the standard deviation of their evidences is the error of the
log-evidence, the uncertain shares of the modes included.

The first column of the volumes is not simulated: a volume shrinks by 1 - 1 / n, and is shared in
proportion to the points. That makes the evidence of each mode, and so their sum, unbiased. (The
mean of t, n / (n + 1), does not: likelihoods rise where volumes fall by chance.)

Skilling (2006), "Nested sampling for general Bayesian computation"; Walter (2017), "Point
process-based Monte Carlo estimation". Cost of a step: histories x (deaths^2 + modes).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from inference.maths.slice_walk import Particles
from inference.reading.density import Reference
from inference.run.protocol import Results

__all__ = [
    "Dead",
    "Nest",
    "Offers",
    "Volumes",
    "all_points",
    "evidence",
    "information_of",
    "initial_state",
    "particles",
    "remaining",
    "share_volumes",
    "shrink_volumes",
    "whole_prior",
    "with_room",
]


class Volumes(NamedTuple):
    """Prior volumes and the evidence of the dead: expected, then of each simulated history."""

    log_volume: Float[Array, "mode column"]  # -inf for a mode that does not exist
    log_evidence: Float[Array, " column"]


class Dead(NamedTuple):
    """Dead points in the order of their deaths, and room for more."""

    z: Float[Array, "dead size"]
    log_likelihood: Float[Array, " dead"]
    log_volume: Float[Array, " dead"]  # of the shell that each stands for
    mode: Int[Array, " dead"]


class Offers(NamedTuple):
    """Independent draws from what nested sampling starts from, which births may take.

    The host makes them, because code that draws from a prior takes long to compile.
    """

    z: Float[Array, "offer size"]
    num_used: Array
    are_worn: Array  # whether new ones are wanted
    rng_key: Array  # of the new ones


class Nest(NamedTuple):
    """The state of a run."""

    live: Particles
    mode: Int[Array, " live"]
    # the live point that each descends from, as of one search for modes ago, two, ...
    ancestor: Int[Array, "generation live"]
    num_modes: Array
    volumes: Volumes
    dead: Dead
    num_dead: Array
    num_steps: Array
    num_evaluations: Array
    longer: Array  # log of the length of walks, relative to the first ones
    offers: Offers
    reference: Reference  # by which exchangeable members are labelled


def initial_state(
    live: Particles, offers: Offers, reference: Reference, num_modes: int, room: int
) -> Nest:
    """Live points in one mode, and no dead ones.

    Args:
        live: the live points.
        offers: draws for births.
        reference: by which exchangeable members are labelled.
        num_modes: the most modes.
        room: for dead points.
    """
    (num_live, size), dtype = live.z.shape, live.z.dtype
    zero, nothing = jnp.zeros((), jnp.int32), jnp.zeros(0, dtype)
    dead = Dead(jnp.zeros((0, size), dtype), nothing, nothing, jnp.zeros(0, jnp.int32))
    # 12 searches back to an ancestor, because modes stay connected in the graph for long after the
    # last walk went from one to the other
    ancestor = jnp.broadcast_to(jnp.arange(num_live, dtype=jnp.int32), (12, num_live))
    return Nest(
        live=live,
        mode=jnp.zeros(num_live, jnp.int32),
        ancestor=ancestor,
        num_modes=zero + 1,
        volumes=whole_prior(num_modes, num_histories=200),
        dead=with_room(dead, room),
        num_dead=zero,
        num_steps=zero,
        num_evaluations=zero + num_live,
        longer=jnp.zeros((), dtype),
        offers=offers,
        reference=reference,
    )


def with_room(dead: Dead, room: int) -> Dead:
    """Dead points with room for `room` in all."""
    more = lambda leaf: jnp.zeros((room - len(leaf), *leaf.shape[1:]), leaf.dtype)
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf, more(leaf)]), dead)


def all_points(state: Nest) -> tuple[Array, Array, Array, Array]:
    """All points, dead and live: z, log weight, log likelihood, mode."""
    nest, kept = jax.device_get(state), int(state.num_dead)
    count = np.bincount(nest.mode, minlength=len(nest.volumes.log_volume))
    log_each = nest.volumes.log_volume[:, 0] - np.log(np.maximum(count, 1))
    dead = jax.tree.map(lambda leaf: leaf[:kept], nest.dead)
    log_likelihood = np.concatenate([dead.log_likelihood, nest.live.log_likelihood])
    log_weight = np.concatenate([dead.log_volume, log_each[nest.mode]]) + log_likelihood
    z, mode = np.concatenate([dead.z, nest.live.z]), np.concatenate([dead.mode, nest.mode])
    z, log_weight, log_likelihood, mode = map(jnp.asarray, (z, log_weight, log_likelihood, mode))
    return z, log_weight, log_likelihood, mode


def information_of(state: Nest) -> Array:
    """Kullback-Leibler divergence from the prior to the posterior, in nats; by NumPy."""
    _, log_weight, log_likelihood, _ = map(np.asarray, all_points(state))
    total = np.logaddexp.reduce(log_weight)
    weight = np.exp(log_weight - total)
    return jnp.asarray(np.sum(weight * np.where(weight > 0, log_likelihood, 0.0)) - total)


def particles(values: dict[str, Array], **beside: Array) -> Results:
    """The group `particles` of the tree: sites of weighted points, and what else is known."""
    variables = beside | {name.replace("/", "."): value for name, value in values.items()}
    return Results({"particles": variables}, {}, dict.fromkeys(variables, ("particle",)))


# Prior volumes.


def whole_prior(most_modes: int, num_histories: int) -> Volumes:
    """The volumes at the start: the whole prior in the first of up to `most_modes` modes."""
    log_volume = jnp.full((most_modes, 1 + num_histories), -jnp.inf).at[0].set(0.0)
    return Volumes(log_volume, jnp.full(1 + num_histories, -jnp.inf))


def shrink_volumes(
    rng_key: Array,
    volumes: Volumes,
    log_likelihood: Float[Array, " death"],
    mode: Int[Array, " death"],
    rank: Int[Array, " death"],
    count: Int[Array, " death"],
) -> tuple[Float[Array, " death"], Volumes]:
    """The expected log volume of the shell of each death, and the volumes after the deaths.

    Args:
        rng_key: a JAX key.
        volumes: those before.
        log_likelihood: of the points that die.
        mode: of the points that die.
        rank: of the points that die in their modes; 0 for the lowest.
        count: points of their modes.
    """
    dtype = volumes.log_volume.dtype
    alive = (count - rank)[:, None].astype(dtype)
    drawn = random.exponential(rng_key, (len(mode), volumes.log_volume.shape[1] - 1), dtype) / alive
    expected = jnp.minimum(-jnp.log1p(-1 / alive), 100.0)  # not infinite where the last point dies
    drop = jnp.concatenate([expected, drawn], axis=1)
    is_same = mode[:, None] == mode[None, :]
    before = (is_same & (rank[None, :] < rank[:, None])).astype(dtype) @ drop
    log_shell = volumes.log_volume[mode] - before + jnp.log(-jnp.expm1(-drop))
    log_evidence = logsumexp(log_shell + log_likelihood[:, None], axis=0)
    total = jnp.zeros_like(volumes.log_volume).at[mode].add(drop)
    log_evidence = jnp.logaddexp(volumes.log_evidence, log_evidence)
    return log_shell[:, 0], Volumes(volumes.log_volume - total, log_evidence)


def share_volumes(
    rng_key: Array,
    volumes: Volumes,
    mode: Int[Array, " live"],
    origin: Int[Array, " mode"],
    ancestor: Int[Array, " live"],
) -> Volumes:
    """The volumes after modes were split.

    Args:
        rng_key: a JAX key.
        volumes: those before.
        mode: of the live points after the split.
        origin: the mode that each mode was a part of.
        ancestor: the point that each live point descends from.
    """
    log_volume = volumes.log_volume
    shape = len(mode), log_volume.shape[1] - 1
    drawn = random.exponential(rng_key, shape, log_volume.dtype)[ancestor]
    each = jnp.concatenate([jnp.ones_like(drawn[:, :1]), drawn], axis=1)
    part = jnp.zeros_like(log_volume).at[mode].add(each)
    whole = jnp.zeros_like(log_volume).at[origin].add(part)[origin]
    shared = log_volume[origin] + (jnp.log(part) - jnp.log(whole))
    return volumes._replace(log_volume=jnp.where(part < whole, shared, log_volume))


def remaining(state: Nest, columns: slice = slice(None)) -> Float[Array, " column"]:
    """The log-evidence that the live points stand for, by columns of the volumes."""
    log_volume = state.volumes.log_volume[:, columns]
    count = jnp.zeros(len(log_volume), jnp.int32).at[state.mode].add(1)
    log_each = log_volume - jnp.log(jnp.maximum(count, 1).astype(log_volume.dtype))[:, None]
    return logsumexp(log_each[state.mode] + state.live.log_likelihood[:, None], axis=0)


@jax.jit
def evidence(state: Nest) -> tuple[Array, Array]:
    """The log-evidence with all live points, and its standard error.

    The evidence is unbiased, so that half of the variance of its logarithm is added to the latter.
    """
    each = jnp.logaddexp(state.volumes.log_evidence, remaining(state))
    error = jnp.std(each[1:])
    return each[0] + error**2 / 2, error
