"""Which of many nodes stand for all: the contraction of a graph whose edges are affinities.

    affinity_ij = exp(-square_ij / 2 spread^2),        alike_ij = the cosine between affinities of i
                                                       and of j to all nodes

Two nodes are combined where that changes least: those of which 1 - alike, times the weight of the
lighter one, is smallest. The lighter one goes, and leaves its weight to the other, until few enough
are left. (The paper combines nodes whose affinities to all others are "similar enough"; this needs
no threshold, and a point that is far from all others does not keep the place of a clump.) The
spread is such that as many nodes are near to a node as a part of those that one which is left will
stand for.

Center (2009), "Learning complex classification models from large data sets". Cost: nodes^3 short
operations.

A mixture over codes of the Hilbert curve, fitted to weighted points: the paper's own form of what
one stage tells the next.

    u = 1 / (1 + exp(-z)),      h_k = code of the numbers of u in block k, a place on a circle of
                                length 1
    pi(z)  =  sum_j a_j product_k exp(-(h_k - h_jk)^2 / (2 s_jk^2)) / z_jk   x   product_i u_i (1 - u_i)

with differences around the circle, from -1/2 to 1/2, and z_jk = s_jk sqrt(2 pi) erf(1 / (s_jk sqrt
8)). The curve keeps volume: the second product is all the Jacobian there is. A block has one number
on its circle, however many latent numbers it has, so that a clump costs two numbers a block; but
the curve tears: what is near in z may be far in code, and a round cloud becomes pieces of many
lengths.

Fitted by EM as in the paper, with the spread a root, about the new centre, and of the greatest
likelihood on a circle: s solves E[h^2] = (mean square found), where moments alone would be too
narrow for a wide clump. s is at least 8 cells of the curve: of narrower ones the sum over cells is
not the integral. It is at most 10, next to uniform. A clump with less than a hundredth of the
points (of half an even share, where clumps are more than fifty) is left out. Clumps begin as in the
paper: one on each of some points, contracted to as many as are wanted (`hilbert_clumps`), of which
the last is as wide as the circle, for what is torn off. How many are wanted, points held out say
(`inference.maths.summary`), which needs no threshold and is what the fit is for.

20 bits: a cell is 4e-6 wide in z at 0 and 3e-3 at 8 and -8, narrower than posteriors of 1e5 rows.
Beyond 14 and -14 all is one cell, in which the density is that of the tail of the logistic
distribution.

Center (2009), "Learning complex classification models from large data sets". Cost of a density:
bits x size short operations, and clumps x words of the codes; of a fit: rounds x points x clumps x
words, and the cube of the points that are contracted.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn import log_sigmoid, log_softmax
from jax.scipy.special import erf, erfinv, logsumexp

from inference.maths import hilbert
from inference.maths import summary as _summary

__all__ = ["CodeClumps", "Codes", "contracted", "log_base", "log_mass", "spread_of"]

FINER = 2  # parts of what a node will stand for
NUM_HALVINGS, LOW, HIGH = 50, -60.0, 20.0  # of the interval of log spread^2


def contracted(square: Array, count: Array) -> Array:
    """Nodes in the order in which they would be left, from squared distances [node, node]: the
    first `count` stand for all. Distances are in units of what is usual among them.
    """
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


BITS = 20
NUM_ROUNDS = 40  # of EM
NODES = 256  # points, at most, that are contracted
LEAST = 0.01  # of all points, that a clump must claim
CELLS, WIDEST = 8, 10.0  # limits of a spread: the narrowest in cells of the curve
FAR = 1e9  # in spreads: counts for nothing, and has a finite square
HALVINGS = 64  # of the interval in which a spread is looked for


class Codes(NamedTuple):
    """Places are fixed in number; a clump that is not there has the weight -inf."""

    log_weight: Array  # [clump], of all clumps together 1
    centre: Array  # [clump, block, word]: codes, those of fewer words with zeros behind
    spread: Array  # [clump, block]: of fractions of the circle


def log_base(z: Array) -> Array:
    """Density [...] over z [..., size] of what is uniform over codes."""
    return jnp.sum(log_sigmoid(z) + log_sigmoid(-z), -1)


def log_mass(spread: Array) -> Array:
    """Of exp(-h^2 / (2 spread^2)) around the circle."""
    return jnp.log(spread) + 0.5 * np.log(2 * np.pi) + jnp.log(erf(0.5 / np.sqrt(2) / spread))


def spread_of(root: Array) -> Array:
    """The spread whose likelihood is greatest where differences have the root mean square
    `root`.
    """

    def halved(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        is_high = middle + 0.5 * jnp.log(_kept(jnp.exp(middle))) > jnp.log(root)
        return jnp.where(is_high, low, middle), jnp.where(is_high, middle, high)

    # what the circle cuts off makes the root smaller, never greater
    low, high = jnp.log(root), jnp.full_like(root, np.log(WIDEST))
    return jnp.exp(jax.lax.fori_loop(0, HALVINGS, halved, (low, high))[0])


def _kept(spread: Array) -> Array:
    """The share of its square that the mean square of differences comes to around the circle."""
    end = 0.5 / spread
    return 1 - end * np.sqrt(2 / np.pi) * jnp.exp(-0.5 * end**2) / erf(end / np.sqrt(2))


@dataclass(frozen=True)
class CodeClumps:
    """Clumps on the circles of blocks: sizes of the parts of a vector that have a curve each, in
    order.
    """

    blocks: tuple[int, ...]
    bits: int = BITS
    asks_for_slopes = False  # a curve has none

    def nothing(self, num_clumps: int) -> Codes:
        """No clump at all: the background is everything."""
        shape = (num_clumps, len(self.blocks))
        return Codes(
            jnp.full(num_clumps, -jnp.inf),
            jnp.zeros((*shape, max(self._words)), jnp.uint32),
            jnp.ones(shape),
        )

    def log_density(self, clumps: Codes, z: Array) -> Array:
        """Of one vector [size]."""
        away = hilbert.difference(self.codes(z)[None], clumps.centre)
        return logsumexp(clumps.log_weight + _log_each(away, clumps.spread)) + log_base(z)

    def draw(self, rng_key: Array, clumps: Codes) -> Array:
        """A vector; there must be a clump."""
        which_key, code_key, cell_key = random.split(rng_key, 3)
        which = random.categorical(which_key, clumps.log_weight)
        spread = clumps.spread[which]
        share = random.uniform(code_key, spread.shape, spread.dtype, minval=-1.0)
        away = jnp.clip(
            np.sqrt(2) * spread * erfinv(share * erf(0.5 / np.sqrt(2) / spread)), -0.5, 0.5
        )
        code = self._moved(clumps.centre[which], away)
        places = [
            hilbert.decode(code[i, : self._words[i]], size, self.bits)
            for i, size in enumerate(self.blocks)
        ]
        return self._within(cell_key, jnp.concatenate(places), spread.dtype)

    def fitted(
        self,
        rng_key: Array,
        told: _summary.Told,
        log_weight: Array,
        num_clumps: int,
        known: Codes | None = None,
    ) -> Codes:
        """To points in proportion to their weights; slopes are of no use on a circle of codes."""
        fit = lambda told, count: self._em(self.codes(told.z), count, num_clumps)
        fits = [partial(fit, count=count) for count in _summary.counts(num_clumps)]
        return _summary.chosen(rng_key, told, log_weight, fits, self, known)

    @partial(jax.jit, static_argnums=0)
    def codes(self, z: Array) -> Array:
        """[..., block, word] of vectors [..., size]."""
        ends = list(accumulate(self.blocks))[:-1]
        parts = jnp.split(hilbert.cells_of(jax.nn.sigmoid(z), self.bits), ends, axis=-1)
        return self._side_by_side([hilbert.encode(part, self.bits) for part in parts])

    @property
    def _words(self) -> list[int]:
        return [hilbert.num_words(size, self.bits) for size in self.blocks]

    @property
    def _cell(self) -> np.ndarray:
        """[block]: the length of a cell on the circle; 0 where there is no such number."""
        return np.array([2.0 ** -(size * self.bits) for size in self.blocks])

    def _side_by_side(self, codes: list[Array]) -> Array:
        most = max(self._words)
        return jnp.stack(
            [
                jnp.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, most - code.shape[-1])])
                for code in codes
            ],
            -2,
        )

    def _moved(self, code: Array, step: Array) -> Array:
        """Codes [..., block, word] by steps [..., block] around the circles."""
        each = enumerate(zip(self._words, self.blocks, strict=True))
        return self._side_by_side(
            [
                hilbert.shifted(code[..., i, :words], step[..., i], size, self.bits)
                for i, (words, size) in each
            ]
        )

    def _within(self, rng_key: Array, cells: Array, dtype: jnp.dtype) -> Array:
        """z of a point in a cell; from the nearer face of the cube, so that it keeps its digits
        and is not at infinity.
        """
        last = jnp.uint32((1 << self.bits) - 1)
        is_upper = cells > last // 2
        within = random.uniform(rng_key, cells.shape, dtype, minval=float(jnp.finfo(dtype).tiny))
        u = hilbert.points_of(jnp.where(is_upper, last - cells, cells), self.bits, within)
        z = jnp.log(u) - jnp.log1p(-u)
        return jnp.where(is_upper, -z, z)

    @partial(jax.jit, static_argnums=(0, 3))
    def _em(self, codes: Array, count: Array, num_clumps: int) -> Codes:
        """Clumps of points [point, block, word] in random order: `count` of `num_clumps` places,
        or fewer.
        """
        place, nodes = jnp.arange(num_clumps), codes[: max(NODES, num_clumps)]
        square = hilbert.difference(nodes[:, None], nodes[None]) ** 2
        unit = jnp.maximum(jnp.mean(square, (0, 1)), jnp.finfo(square.dtype).tiny)
        centre = nodes[contracted(jnp.sum(square / unit, -1), count)[place]]
        apart = hilbert.difference(codes[:, None], centre[None])
        distance = jnp.where(place < count, jnp.sum(apart**2 / unit, -1), jnp.inf)
        start = self._improved(
            codes,
            jnp.log(jax.nn.one_hot(distance.argmin(1), num_clumps, dtype=apart.dtype)),
            centre,
            count,
        )
        is_wide = (place == count - 1) & (count > 1)
        start = start._replace(spread=jnp.where(is_wide[:, None], WIDEST, start.spread))

        def improved(_, clumps: Codes) -> Codes:
            away = hilbert.difference(codes[:, None], clumps.centre[None])
            log_joint = clumps.log_weight[None] + _log_each(away, clumps.spread[None])
            return self._improved(codes, log_softmax(log_joint, 1), clumps.centre, count)

        return jax.lax.fori_loop(0, NUM_ROUNDS, improved, start)

    def _improved(self, codes: Array, log_claim: Array, centre: Array, count: Array) -> Codes:
        """Clumps of what they claim [point, clump]."""
        claim = jnp.exp(log_claim)
        total = claim.sum(0)
        least = len(codes) * jnp.minimum(LEAST, 0.5 / count)  # one is left, however many there are
        log_weight = jnp.where(total > least, jnp.log(total), -jnp.inf)
        away = hilbert.difference(codes[:, None], centre[None])
        centre = self._moved(
            centre, jnp.einsum("nj,njk->jk", claim, away) / jnp.maximum(total, 1)[:, None]
        )
        away = hilbert.difference(codes[:, None], centre[None])  # from the new centres
        log_square = (
            logsumexp(log_claim[..., None] + 2 * jnp.log(jnp.abs(away)), 0)
            - jnp.log(jnp.maximum(total, 1))[:, None]
        )
        least_root = CELLS * np.maximum(self._cell, jnp.finfo(away.dtype).tiny).astype(away.dtype)
        spread = spread_of(jnp.maximum(jnp.exp(0.5 * log_square), least_root))
        return Codes(log_weight - logsumexp(log_weight), centre, spread)


def _log_each(away: Array, spread: Array) -> Array:
    """Log density [..., clump] over codes of each clump, at differences [..., clump, block]."""
    return jnp.sum(-0.5 * jnp.minimum(jnp.abs(away) / spread, FAR) ** 2 - log_mass(spread), -1)
