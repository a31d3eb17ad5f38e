"""Which of many nodes stand for all: the contraction of a graph whose edges are affinities.

    affinity_ij = exp(-square_ij / 2 spread^2),        alike_ij = the cosine between affinities of i and of j to all nodes

Two nodes are combined where that changes least: those of which 1 - alike, times the weight of the lighter one, is smallest. The lighter one
goes, and leaves its weight to the other, until few enough are left. (The paper combines nodes whose affinities to all others are "similar
enough"; this needs no threshold, and a point that is far from all others does not keep the place of a clump.) The spread is such that as
many nodes are near to a node as a part of those that one which is left will stand for.

Center (2009), "Learning complex classification models from large data sets". Cost: nodes^3 short operations.
"""

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["contracted"]

FINER = 2  # parts of what a node will stand for
NUM_HALVINGS, LOW, HIGH = 50, -60.0, 20.0  # of the interval of log spread^2


def contracted(square: Array, count: Array) -> Array:
    """Nodes in the order in which they would be left, from squared distances [node, node]: the first `count` stand for all. Distances are
    in units of what is usual among them."""
    num_nodes = len(square)
    affinity = _affinities(square, num_nodes / (FINER * count))
    direction = affinity / jnp.linalg.norm(affinity, axis=1, keepdims=True)
    unlike = jnp.where(jnp.eye(num_nodes, dtype=bool), jnp.inf, 1 - direction @ direction.T)

    def combined(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        weight, left = carry
        lighter = jnp.minimum(weight[:, None], weight[None])
        change = jnp.where(lighter > 0, unlike * lighter, jnp.inf)  # of those that are still there
        pair = jnp.stack(jnp.unravel_index(jnp.argmin(change), change.shape))
        first_goes = weight[pair[0]] < weight[pair[1]]
        goes, stays = jnp.where(first_goes, pair, pair[::-1])
        weight = weight.at[stays].add(weight[goes]).at[goes].set(0.0)
        return weight, left.at[num_nodes - 1 - turn].set(goes)

    start = jnp.ones(num_nodes, square.dtype), jnp.zeros(num_nodes, int)
    weight, left = jax.lax.fori_loop(0, num_nodes - 1, combined, start)
    return left.at[0].set(jnp.argmax(weight))


def _affinities(square: Array, num_near: Array) -> Array:
    """With the spread for which, on average, a node has so many near to it, itself among them."""
    of = lambda log_spread: jnp.exp(-0.5 * square / jnp.exp(log_spread))

    def halved(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        has_many = of(middle).sum(1).mean() > num_near
        return jnp.where(has_many, low, middle), jnp.where(has_many, middle, high)

    ends = jnp.asarray(LOW, square.dtype), jnp.asarray(HIGH, square.dtype)
    return of(jax.lax.fori_loop(0, NUM_HALVINGS, halved, ends)[1])
