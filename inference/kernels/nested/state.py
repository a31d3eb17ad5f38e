"""The state of nested sampling: live points and their modes, dead points, prior volumes.

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

The lowest points of all modes die, so that all modes have one limit. Then points of one region
remain draws from the prior above the limit however they are assigned to modes, each mode with its
share of the volume: it does no harm when walks cross from one mode to another, or when a connected
mode was split. (With a limit for each mode, the mode with the lower limit would wander into the
region of the other.)

The point that dies is replaced by a copy of a survivor, which then walks. Until a separation of
modes is noticed, copies stay in the mode of their parent. So parents are not left to chance: they
are taken evenly along the principal axis of the mode, so that parts at its two ends keep their
numbers of points. On average each survivor is copied equally often.

Modes are connected components of the graph of mutual nearest neighbours, in coordinates in which
each mode has unit covariance. A component of few points, even of one, is a mode where it is proved:
it is far from the others, and the likelihood falls below the limit on each straight way to the
points that are nearest. Without, a mode that is narrow would be lost by drift: if its share of the
volume is less than a point, it has one now and then, and that dies. A split is final: the parts
share the volume as they share the points, and new points of a mode are copies of its own points
from then on, so that the evidence of separated modes cannot drift.

A lone point is a rough measure of the volume of its mode, which the simulated histories know. Walks
in a mode of few points are too short to leave it. Where a region is proved separate although walks
still reach it from elsewhere, its volume is too large on average: so components that are near to
others, as at the ragged edge of a mode in many dimensions, are not tried.

A mode that dies out while it could add to the evidence is kept in mind, until a live point is found
to which a way leads from its last point.

Skilling (2006), "Nested sampling for general Bayesian computation"; Walter (2017), "Point
process-based Monte Carlo estimation". Cost of a step: histories x (deaths^2 + modes), live points x
size x 8, and two sorts; of a search for modes: live points^2 x (size + neighbours), and at most 8 x
12 x 8 evaluations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Bool, Float, Int

from inference.maths.host import Array
from inference.maths.slice_walk import (
    Limit,
    Particles,
    deviations_by_mode,
    is_above,
    means_by_mode,
)
from inference.reading.density import Reference
from inference.run.protocol import Results

__all__ = [
    "Dead",
    "Death",
    "Lost",
    "Nest",
    "Offers",
    "Sought",
    "Volumes",
    "all_points",
    "covariance_roots",
    "evidence",
    "information_of",
    "initial_state",
    "insertion_rank",
    "lowest",
    "nothing_lost",
    "parents_of",
    "particles",
    "principal_coordinate",
    "remaining",
    "search_modes",
    "share_volumes",
    "shrink_volumes",
    "whole_prior",
    "with_lost",
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


class Lost(NamedTuple):
    """The last points of modes that died out while they could add to the evidence.

    Also counted are those that had no place here, and modes that were proved and had no place.
    """

    z: Float[Array, "lost size"]
    log_likelihood: Float[Array, " lost"]
    is_lost: Bool[Array, " lost"]  # until a live point is found to which a way leads
    num_others: Array


def nothing_lost(size: int, dtype: Any) -> Lost:
    """Room for eight lost modes."""
    zeros = partial(np.zeros, dtype=dtype)
    return Lost(zeros((8, size)), zeros(8), np.zeros(8, bool), np.zeros((), np.int32))


class Nest(NamedTuple):
    """The state of a run."""

    live: Particles
    mode: Int[Array, " live"]
    # the live point that each descends from, as they were 1, 2, ... searches for modes ago
    ancestor: Int[Array, "generation live"]
    num_modes: Array
    volumes: Volumes
    dead: Dead
    num_dead: Array
    num_steps: Array
    num_evaluations: Array
    lost: Lost
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
    zero, nothing = np.zeros((), np.int32), np.zeros(0, dtype)
    dead = Dead(np.zeros((0, size), dtype), nothing, nothing, np.zeros(0, np.int32))
    # 12 searches back to an ancestor, because modes stay connected in the graph for long after the
    # last walk went from one to the other
    ancestor = np.broadcast_to(np.arange(num_live, dtype=np.int32), (12, num_live))
    return Nest(
        live=live,
        mode=np.zeros(num_live, np.int32),
        ancestor=ancestor,
        num_modes=zero + np.int32(1),
        volumes=whole_prior(num_modes, num_histories=200),
        dead=with_room(dead, room),
        num_dead=zero,
        num_steps=zero,
        num_evaluations=zero + np.int32(num_live),
        lost=nothing_lost(size, dtype),
        longer=np.zeros((), dtype),
        offers=offers,
        reference=reference,
    )


def with_room(dead: Dead, room: int) -> Dead:
    """Dead points with room for `room` in all."""
    more = lambda leaf: np.zeros((room - len(leaf), *leaf.shape[1:]), leaf.dtype)
    return jax.tree.map(lambda leaf: np.concatenate([leaf, more(leaf)]), jax.device_get(dead))


def all_points(state: Nest) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All points, dead and live: z, log weight, log likelihood, mode."""
    nest, kept = jax.device_get(state), int(state.num_dead)
    count = np.bincount(nest.mode, minlength=len(nest.volumes.log_volume))
    log_each = nest.volumes.log_volume[:, 0] - np.log(np.maximum(count, 1))
    dead = jax.tree.map(lambda leaf: leaf[:kept], nest.dead)
    log_likelihood = np.concatenate([dead.log_likelihood, nest.live.log_likelihood])
    log_weight = np.concatenate([dead.log_volume, log_each[nest.mode]]) + log_likelihood
    z, mode = np.concatenate([dead.z, nest.live.z]), np.concatenate([dead.mode, nest.mode])
    return z, log_weight, log_likelihood, mode


def information_of(state: Nest) -> np.floating:
    """Kullback-Leibler divergence from the prior to the posterior, in nats; by NumPy."""
    _, log_weight, log_likelihood, _ = all_points(state)
    total = np.logaddexp.reduce(log_weight)
    weight = np.exp(log_weight - total)
    return np.sum(weight * np.where(weight > 0, log_likelihood, 0.0)) - total


def particles(values: dict[str, Array], **beside: Array) -> Results:
    """The group `particles` of the tree: sites of weighted points, and what else is known."""
    variables = beside | {name.replace("/", "."): value for name, value in values.items()}
    return Results({"particles": variables}, {}, dict.fromkeys(variables, ("particle",)))


# Prior volumes.


def whole_prior(most_modes: int, num_histories: int) -> Volumes:
    """The volumes at the start: the whole prior in the first of up to `most_modes` modes."""
    is_first = np.arange(most_modes) == 0
    log_volume = np.where(is_first[:, None], np.zeros(1 + num_histories), -np.inf)
    dtype = jnp.result_type(float)
    return Volumes(log_volume.astype(dtype), np.full(1 + num_histories, -np.inf, dtype))


def shrink_volumes(
    uniform: Float[Array, "death history"],
    volumes: Volumes,
    log_likelihood: Float[Array, " death"],
    mode: Int[Array, " death"],
    rank: Int[Array, " death"],
    count: Int[Array, " death"],
) -> tuple[Float[Array, " death"], Volumes]:
    """The expected log volume of the shell of each death, and the volumes after the deaths.

    Args:
        uniform: numbers between 0 and 1.
        volumes: those before.
        log_likelihood: of the points that die.
        mode: of the points that die.
        rank: of the points that die in their modes; 0 for the lowest.
        count: points of their modes.
    """
    dtype = volumes.log_volume.dtype
    alive = (count - rank)[:, None].astype(dtype)
    drawn = -jnp.log(uniform) / alive
    expected = jnp.minimum(-jnp.log1p(-1 / alive), 100.0)  # not infinite where the last point dies
    drop = jnp.concatenate([expected, drawn], axis=1)
    is_same = mode[:, None] == mode[None, :]
    before = (is_same & (rank[None, :] < rank[:, None])).astype(dtype) @ drop
    log_shell = volumes.log_volume[mode] - before + jnp.log(-jnp.expm1(-drop))
    log_evidence = jax.nn.logsumexp(log_shell + log_likelihood[:, None], axis=0)
    total = jnp.zeros_like(volumes.log_volume).at[mode].add(drop)
    log_evidence = jnp.logaddexp(volumes.log_evidence, log_evidence)
    return log_shell[:, 0], Volumes(volumes.log_volume - total, log_evidence)


def share_volumes(
    rng_key: Array,
    volumes: Volumes,
    before: Int[Array, " live"],
    mode: Int[Array, " live"],
    ancestor: Int[Array, " live"],
) -> Volumes:
    """The volumes after points went to other modes, each with its share of the volume.

    Args:
        rng_key: a JAX key.
        volumes: those before.
        before: the mode of each live point before.
        mode: after.
        ancestor: the point that each live point descends from.
    """
    log_volume = volumes.log_volume
    shape = len(mode), log_volume.shape[1] - 1
    drawn = random.exponential(rng_key, shape, log_volume.dtype)[ancestor]
    each = jnp.concatenate([jnp.ones_like(drawn[:, :1]), drawn], axis=1)
    whole = jnp.zeros_like(log_volume).at[before].add(each)
    log_each = log_volume[before] + jnp.log(each) - jnp.log(whole)[before]
    highest = jnp.full_like(log_volume, -jnp.inf).at[mode].max(log_each)
    parts = jnp.zeros_like(log_volume).at[mode].add(jnp.exp(log_each - highest[mode]))
    is_other = jnp.zeros((len(log_volume), 1), bool).at[before, 0].max(mode != before)
    is_other = is_other.at[mode, 0].max(mode != before)
    return volumes._replace(log_volume=jnp.where(is_other, highest + jnp.log(parts), log_volume))


def remaining(state: Nest, columns: slice = slice(None)) -> Float[Array, " column"]:
    """The log-evidence that the live points stand for, by columns of the volumes.

    By NumPy for a state of its arrays, else by JAX, as `evidence`.
    """
    xp, log_volume = _namespace(state), state.volumes.log_volume[:, columns]
    count = (state.mode == xp.arange(len(log_volume))[:, None]).sum(1)
    log_each = log_volume - xp.log(xp.maximum(count, 1).astype(log_volume.dtype))[:, None]
    each = log_each[state.mode] + state.live.log_likelihood[:, None]
    return np.logaddexp.reduce(each) if xp is np else jax.nn.logsumexp(each, axis=0)


def evidence(state: Nest) -> tuple[Array, Array]:
    """The log-evidence with all live points, and its standard error.

    The evidence is unbiased, so its logarithm is too small by half of its variance on average, and
    that is added.
    """
    xp = _namespace(state)
    each = xp.logaddexp(state.volumes.log_evidence, remaining(state))
    error = xp.std(each[1:])
    return each[0] + error**2 / 2, error


def _namespace(state: Nest) -> Any:
    return np if isinstance(state.mode, np.ndarray) else jnp


# Deaths and births.


class Death(NamedTuple):
    """Who dies, and the live points sorted by mode and likelihood."""

    order: Int[Array, " live"]  # live points, mode by mode, the lowest first
    first: Int[Array, " mode"]  # where a mode begins in this order
    count: Int[Array, " mode"]  # live points
    dying: Int[Array, " mode"]  # deaths
    chosen: Int[Array, " batch"]  # the live points that die
    rank: Int[Array, " batch"]  # their ranks in their modes


def lowest(
    live: Particles, mode: Int[Array, " live"], count: Int[Array, " mode"], batch: int
) -> Death:
    """The `batch` lowest live points, which die; `count` says how many points modes have."""
    order = jnp.lexsort((live.label, live.log_likelihood, mode))
    first = jnp.cumsum(count) - count
    chosen = jnp.lexsort((live.label, live.log_likelihood))[:batch]
    return Death(
        order,
        first,
        count,
        jnp.zeros_like(count).at[mode[chosen]].add(1),
        chosen,
        jnp.argsort(order)[chosen] - first[mode[chosen]],
    )


def with_lost(lost: Lost, live: Particles, death: Death, is_lost: Bool[Array, " mode"]) -> Lost:
    """The lost modes with those that died out just now, of which the first has a place."""
    place, mode = jnp.argmin(lost.is_lost), jnp.argmax(is_lost)
    point = death.order[death.first[mode] + death.count[mode] - 1]
    takes = is_lost.any() & ~lost.is_lost[place]
    put = lambda room, new: room.at[place].set(jnp.where(takes, new, room[place]))
    return Lost(
        put(lost.z, live.z[point]),
        put(lost.log_likelihood, live.log_likelihood[point]),
        put(lost.is_lost, True),
        lost.num_others + jnp.sum(is_lost, dtype=jnp.int32) - takes.astype(jnp.int32),
    )


def parents_of(
    uniform: Float[Array, " mode"],
    z: Float[Array, "live size"],
    mode: Int[Array, " live"],
    death: Death,
    birth_mode: Int[Array, " birth"],
) -> Int[Array, " birth"]:
    """The survivor that each birth is a copy of.

    Args:
        uniform: numbers between 0 and 1.
        z: the live points.
        mode: of the live points.
        death: who dies.
        birth_mode: the mode of each birth, in rising order.
    """
    survivors = death.count - death.dying
    is_dying = jnp.zeros(len(z), bool).at[death.chosen].set(True)
    order = jnp.lexsort((principal_coordinate(z, mode, len(survivors)), is_dying, mode))
    births = jnp.zeros_like(survivors).at[birth_mode].add(1)
    before = (jnp.cumsum(births) - births)[birth_mode]
    number = jnp.arange(len(birth_mode), dtype=birth_mode.dtype) - before
    share = (number.astype(z.dtype) + uniform[birth_mode]) / births[birth_mode].astype(z.dtype)
    pick = (share * survivors[birth_mode].astype(z.dtype)).astype(jnp.int32)
    return order[death.first[birth_mode] + jnp.minimum(pick, survivors[birth_mode] - 1)]


def insertion_rank(
    uniform: Float[Array, " birth"],
    live: Particles,
    mode: Int[Array, " live"],
    death: Death,
    born: Particles,
    birth_mode: Int[Array, " birth"],
) -> Int[Array, " birth"]:
    """The rank of each birth among the survivors of its mode, scaled to all live points.

    It is an integer by the `uniform` numbers between 0 and 1. Where a mode has more births than
    survivors, as one that was found just now, the ranks would hang together: they are -1.
    """
    num_live, dtype = len(mode), born.z.dtype
    survives = jnp.ones(num_live, bool).at[death.chosen].set(False)
    limit = Limit(born.log_likelihood[:, None], born.label[:, None])
    is_lower = ~is_above(live.log_likelihood[None], live.label[None], limit)
    below = jnp.sum(is_lower & survives[None] & (mode[None] == birth_mode[:, None]), axis=1)
    survivors = death.count - death.dying
    births = jnp.zeros_like(survivors).at[birth_mode].add(1)
    places = (survivors[birth_mode] + 1).astype(dtype)
    share = (below.astype(dtype) + uniform) / places
    rank = jnp.minimum(jnp.floor(share * num_live), num_live - 1).astype(jnp.int32)
    return jnp.where((births <= survivors)[birth_mode], rank, -1)


def principal_coordinate(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, " point"]:
    """Points along the first principal axis of their mode, with coordinates scaled to variance 1.

    The axis is found by the power method, from the point that is farthest from the mean.
    """
    tiny = jnp.finfo(z.dtype).tiny
    deviation = jnp.maximum(deviations_by_mode(z, mode, num_modes), tiny)[mode]
    y = (z - means_by_mode(z, mode, num_modes)[mode]) / deviation
    sums = lambda values: jnp.zeros((num_modes, *values.shape[1:]), z.dtype).at[mode].add(values)

    def multiplied(_: int, axis: Array) -> Array:
        new = sums(y * jnp.sum(y * axis[mode], 1, keepdims=True))
        return new / jnp.maximum(jnp.linalg.norm(new, axis=1, keepdims=True), tiny)

    square = jnp.sum(y**2, 1)
    is_farthest = square >= jnp.zeros(num_modes, z.dtype).at[mode].max(square)[mode]
    axis = jax.lax.fori_loop(0, 8, multiplied, sums(jnp.where(is_farthest[:, None], y, 0.0)))
    return jnp.sum(y * axis[mode], 1)


# Modes.

NEIGHBOURS = 7
# neighbours in one dimension: among 7 of 200 such points there are two gaps by chance
ON_A_LINE = 15
TRIALS, ENDS = 8, 12  # components that a search tries, and ways from each
FAR = 1.5  # distance to the rest of its mode, over that of neighbours


def covariance_roots(
    z: Float[Array, "point size"], mode: Int[Array, " point"], num_modes: int
) -> Float[Array, "mode size size"]:
    """Cholesky factors of the covariance of each mode, shrunk to the common one for few points."""
    size = z.shape[-1]
    member = (mode[None, :] == jnp.arange(num_modes)[:, None]).astype(z.dtype)
    count = jnp.maximum(member.sum(1), 1)[:, None]
    away = z - (member @ z / count)[mode]
    products = (away[:, :, None] * away[:, None, :]).reshape(len(z), -1)
    sums = (member @ products).reshape(num_modes, size, size)
    pooled = sums.sum(0) / len(z)
    pooled = pooled + 1e-8 * jnp.diag(jnp.diagonal(pooled) + jnp.finfo(z.dtype).tiny)
    return jnp.linalg.cholesky((sums + 1.0 * size * pooled[None]) / (count + 1.0 * size)[..., None])


class Sought(NamedTuple):
    """What a search for modes has found."""

    mode: Int[Array, " point"]
    num_modes: Array
    lost: Lost
    num_evaluations: Array


def search_modes(
    live: Particles,
    mode: Int[Array, " point"],
    roots: Float[Array, "mode size size"],
    num_modes: Array,
    least: int,
    limit: Float[Array, ""],
    lost: Lost,
    are_apart: Callable,
) -> Sought:
    """The modes after each was split into its connected components.

    The largest component of a mode keeps its number. Another one becomes a mode if it has many
    points, or is proved to be separate from all others. Of the small ones those are tried that lie
    farthest from the rest of their mode, some at a time. Points of the other small components join
    the component of the nearest other point. A lost mode to which a way leads is lost no more; all
    ways are tried in one loop, because it compiles for long.

    Args:
        live: the live points.
        mode: of the points.
        roots: Cholesky factors of the covariance of each mode; as many as modes may become.
        num_modes: modes so far.
        least: points of a component that needs no proof.
        limit: the likelihood of the last dead point.
        lost: lost modes.
        are_apart: a function of limits [trial], of vectors [trial, size], of others [trial, end,
            size], and whether there is something to try [trial]. It returns whether the likelihood
            falls below the limit on the way to each end, and the evaluations.
    """
    num_points, most = len(live.z), len(roots)
    points = jnp.arange(num_points, dtype=jnp.int32)
    square = _square_distances(live.z, mode, roots)
    num_neighbours = NEIGHBOURS if live.z.shape[1] > 1 else ON_A_LINE
    component = _components(_mutual_neighbours(square, num_neighbours))
    size = jnp.zeros(num_points, jnp.int32).at[component].add(1)
    is_first, is_large = component == points, size >= least
    # the largest component of a mode, the first of them in a tie
    order = size * num_points - points
    best = jnp.zeros(most, jnp.int32).at[mode].max(jnp.where(is_first, order, 0))
    is_largest = is_first & (order == best[mode])
    # from the point of each small component that is nearest to the rest of its mode
    outside = component[:, None] != component[None, :]
    gap = jnp.min(jnp.where(outside, square, jnp.inf), axis=1)
    least_gap = jnp.full(num_points, jnp.inf, gap.dtype).at[component].min(gap)
    closest = jnp.where(gap == least_gap[component], points, num_points)
    closest = jnp.full(num_points, num_points).at[component].min(closest)
    is_far = least_gap > FAR**2 * jnp.median(square.min(1))
    is_small = is_first & ~is_large & ~is_largest & is_far
    _, tried = jax.lax.top_k(jnp.where(is_small, least_gap, -jnp.inf), min(TRIALS, num_points))
    here = closest[tried]
    there = _nearest(live.z, roots[mode[here]], live.z[here], outside[here])
    whole = covariance_roots(live.z, jnp.zeros_like(mode), 1)[jnp.zeros_like(lost.is_lost, int)]
    everywhere = jnp.ones((len(lost.z), num_points), bool)
    of_lost = lost.log_likelihood, lost.z, _nearest(live.z, whole, lost.z, everywhere), lost.is_lost
    of_small = jnp.broadcast_to(limit, here.shape), live.z[here], there, is_small[tried]
    both = map(jnp.concatenate, zip(of_small, of_lost, strict=True))
    apart, num_evaluations = are_apart(*both)
    is_proved = jnp.zeros(num_points, bool).at[tried].set(apart[: len(here)])
    is_new = is_first & ~is_largest & (is_large | is_proved)
    number = num_modes - 1 + jnp.cumsum(is_new, dtype=jnp.int32)
    is_refused, is_new = is_new & (number >= most), is_new & (number < most)
    is_kept = (is_largest | is_large | is_new)[component]
    joined = jnp.argmin(jnp.where(is_kept[None, :], square, jnp.inf), axis=1)
    component = jnp.where(is_kept, component, component[joined])
    new_mode = jnp.where(is_new, number, mode)[component].astype(mode.dtype)
    count = lambda flags: jnp.sum(flags, dtype=num_modes.dtype)
    num_others = lost.num_others + count(is_refused & is_proved)
    lost = lost._replace(is_lost=apart[len(here) :], num_others=num_others)
    return Sought(new_mode, num_modes + count(is_new), lost, num_evaluations)


def _nearest(
    z: Float[Array, "point size"],
    root: Float[Array, "trial size size"],
    here: Float[Array, "trial size"],
    outside: Bool[Array, "trial point"],
) -> Float[Array, "trial end size"]:
    """The points outside of some components that are nearest to a vector, whitened by `root`."""
    away = z[None] - here[:, None]
    whitened = lambda root, away: jax.scipy.linalg.solve_triangular(root, away.T, lower=True)
    square = jnp.sum(jax.vmap(whitened)(root, away) ** 2, 1)
    return z[jax.lax.top_k(-jnp.where(outside, square, jnp.inf), min(ENDS, len(z)))[1]]


def _square_distances(
    z: Float[Array, "point size"], mode: Int[Array, " point"], roots: Float[Array, "mode size size"]
) -> Float[Array, "point point"]:
    """[point, point], whitened by the mode; infinite between modes and of a point to itself."""
    eye = jnp.broadcast_to(jnp.eye(z.shape[-1], dtype=z.dtype), roots.shape)
    y = jnp.einsum("nij,nj->ni", jax.scipy.linalg.solve_triangular(roots, eye, lower=True)[mode], z)
    y = y - y.mean(0, keepdims=True)
    square = jnp.sum(y**2, -1)
    return jnp.where(
        (mode[:, None] == mode[None, :]) & ~jnp.eye(len(z), dtype=bool),
        square[:, None] + square[None, :] - 2 * y @ y.T,
        jnp.inf,
    )


def _mutual_neighbours(square: Array, num_neighbours: int) -> Array:
    next_one = lambda _, reach: jnp.min(jnp.where(square > reach[:, None], square, jnp.inf), axis=1)
    reach = jax.lax.fori_loop(
        0, num_neighbours, next_one, jnp.full(len(square), -jnp.inf, square.dtype)
    )
    near = (square <= reach[:, None]) & jnp.isfinite(square)
    return near & near.T


def _components(joined: Array) -> Array:
    """[point]: the connected component, by the smallest number of its points."""
    points = jnp.arange(len(joined), dtype=jnp.int32)

    def spread(state):
        least, _ = state
        new = jnp.minimum(least, jnp.min(jnp.where(joined, least[None, :], len(joined)), axis=1))
        new = new[new]
        return new, jnp.any(new != least)

    return jax.lax.while_loop(lambda state: state[1], spread, (points, jnp.array(True)))[0]
