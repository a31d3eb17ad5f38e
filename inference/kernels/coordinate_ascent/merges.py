"""Merges of groups, which coordinate ascent tries once it has settled.

Sums over rows are additive: the sums of two groups that become one are the sum of theirs, and a
group that is left without rows is closed. So the factors of a merge follow from the sums over rows,
without a sweep.

Which groups to merge is found from the worth of a group: what its rows add to the evidence bound
with q of its parameters at the optimum, given q(zeta, lambda), and n log n for the weight of n
rows. The worth of the union of two groups less the worth of each is what a merge gains, as long as
each row stays with its group. It is an estimate that only orders the merges: `CoordinateAscent`
keeps one if some sweeps later the bound itself has risen.

Cost for K groups with rows of D entries, on the host: K evaluations of K groups, each K^2 D^2 +
K D^3.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    blocks_of,
    expert_sums,
    gathered,
)
from inference.kernels.coordinate_ascent.rows import SufficientSums
from inference.reading.conjugate.quadratic import (
    gate_evidence,
    weights_evidence,
)
from inference.reading.stick_mixture.structure import Assignment, Prior

__all__ = ["MOST_PLANS", "merge_plans", "merged_sums", "worth_of_groups"]

MOST_PAIRS = 4  # merges of one pair that are tried before a run ends
MOST_PLANS = MOST_PAIRS + 2


def merged_sums(sums: SufficientSums, into: Float[Array, "group before"]) -> SufficientSums:
    """The sums of groups that take the rows of groups before; 1 in `into` where they do."""
    return SufficientSums(
        jnp.einsum("gh,jhab->jgab", into, sums.moments),
        jnp.einsum("gh,jchab->jcgab", into, sums.asked),
        jnp.einsum("gh,jcha->jcga", into, sums.products),
        jnp.einsum("gh,jfh->jfg", into, sums.columns),
        sums.bound,
    )


def worth_of_groups(
    found: Assignment,
    shape: Shape,
    prior: Prior,
    factors: Factors,
    sums: SufficientSums,
    into: Float[Array, "group before"],
) -> Float[Array, " group"]:
    """What the rows of each group add to the bound; `into` is that of `merged_sums`."""
    sums = gathered(merged_sums(sums, into), None)
    count = sums.moments[:, shape.num_features, shape.num_features]
    worth = count * jnp.log(jnp.maximum(count, jnp.finfo(count.dtype).tiny))
    columns, features = blocks_of(found, shape, prior, sums)
    if found.columns:
        etas = [
            block.family.expected(hyper).reshape(len(count), -1)
            for block, hyper in zip(found.columns, columns, strict=True)
        ]
        worth = worth + jnp.sum(jnp.concatenate(etas, 1) * sums.columns.T, 1)
        for block, *both in zip(found.columns, columns, prior.columns, strict=True):
            one_by_one = jax.tree.map(lambda leaf: leaf[:, None], both)
            worth = worth - jax.vmap(block.family.divergence)(*one_by_one)
    if found.features:
        worth = worth + gate_evidence(prior.features, features)
    if factors.common:
        worth = worth + weights_evidence(factors.common, *expert_sums(shape, sums))
    return worth


def merge_plans(
    worth: Callable[[np.ndarray], np.ndarray], count: np.ndarray, num_open: int
) -> Int[np.ndarray, "plan group"]:
    """The merges to try, as where each group goes; -1 in a plan that is none.

    First comes the best partition on the way down by best pairs, if the bound should rise; then the
    one with half of the groups; then single pairs.

    Args:
        worth: The worth of groups, given `into` of `merged_sums`.
        count: The number of rows of each group.
        num_open: The number of groups that may have rows.
    """
    unmerged = np.arange(len(count))
    if num_open == 1:
        return np.full((MOST_PLANS, len(count)), -1)
    way, gain, pairs = _way_down(worth, num_open, len(count))
    best, half = int(np.argmax(gain)), num_open - 1 - max(num_open // 2, 1)
    chosen = [way[best]] if gain[best] > 0 else []
    chosen.append(way[half])
    for g, h in pairs[:MOST_PAIRS]:
        chosen.append(np.where(unmerged == h, g, unmerged))
    distinct = {tuple(to): None for to in chosen}
    plans = [_by_size(np.array(to), count, num_open) for to in distinct]
    return np.array(plans + [np.full(len(count), -1)] * (MOST_PLANS - len(plans)))


def _way_down(
    worth: Callable, num_open: int, num: int
) -> tuple[list[np.ndarray], np.ndarray, list[tuple[int, int]]]:
    # Where each group goes after 1, 2, ... merges, each of the best pair; what they gain together;
    # and all pairs before the first merge, the best first.
    to, left = np.arange(num), list(range(num_open))
    into = lambda: (to[None] == np.arange(num)[:, None]).astype(float)
    gain: dict[tuple[int, int], float] = {}

    def weigh(partner: np.ndarray) -> None:
        # The gains of the unions of each group that is left with its partner, all at once.
        own = into()
        union = worth(own + own[partner])
        for g in left:
            if (h := partner[g]) != g:
                gain[min(g, h), max(g, h)] = union[g] - base[g] - base[h]

    base = worth(into())
    for shift in range(1, num_open // 2 + 1):
        weigh(np.append((np.arange(num_open) + shift) % num_open, np.arange(num_open, num)))
    pairs = sorted(gain, key=lambda pair: -gain[pair])
    way, total = [], [0.0]
    while len(left) > 1:
        g, h = max(gain, key=lambda pair: gain[pair])
        total.append(total[-1] + gain[g, h])
        base[g] += base[h] + gain[g, h]
        to = np.where(to == h, g, to)
        left.remove(h)
        gain = {pair: value for pair, value in gain.items() if not {g, h} & set(pair)}
        weigh(np.full(num, g))
        way.append(to)
    return way, np.array(total[1:]), pairs


def _by_size(
    to: Int[np.ndarray, " group"], count: Float[np.ndarray, " group"], num_open: int
) -> Int[np.ndarray, " group"]:
    # The same merge with the groups that are left first, by size.
    size = np.bincount(to, count, minlength=len(to))
    is_left = np.isin(np.arange(len(to)), to[:num_open])
    order = np.lexsort((-size, ~is_left))
    return np.argsort(order, kind="stable")[to]
