"""The paper's summary of a stage: a mixture over codes of Hilbert curves.

    u = 1 / (1 + exp(-z)),      h_k = the code of block k of u, a place on a circle of length 1
    q(z)  =  sum_j a_j product_k exp(-(h_k - h_jk)^2 / (2 s_jk^2)) / z_jk  product_i u_i (1 - u_i)

A block is a latent site. Differences of codes are taken on the circle, from -1/2 to 1/2, and z_jk =
s_jk sqrt(2 pi) erf(1 / (s_jk sqrt 8)). The curve preserves volume, so that the second product is
the whole Jacobian. A component costs two numbers a block, whatever the dimension of the block. But
what is near in z may be far in code: a round cloud becomes pieces of many lengths.

The mixture is fitted by EM as in the paper, with the spread s from the mean square about the new
centre. On a circle the maximum-likelihood spread solves E[h^2] = (mean square); the root of the
mean square itself would be too narrow for a wide component. Spreads are at least 8 cells of the
curve, since for narrower ones the sum over cells is not the integral, and at most 10, nearly
uniform. A component of less than a hundredth of the points is dropped (with more than fifty
components, of less than half an even share). EM begins as in the paper, with one component on each
of some points, which are contracted to as many as are wanted. The last component is as wide as the
circle, for points that the curve has torn off. The number of components is chosen by
cross-validation.

`contracted` reduces a graph of nodes with Gaussian affinities exp(-square_ij / 2 s^2). Two nodes
are alike by the cosine between their affinities to all nodes. The pair is combined for which (1 -
cosine) x (weight of the lighter node) is smallest; the lighter node goes, and leaves its weight to
the other, until few enough are left. (The paper combines nodes whose affinities are "similar
enough"; this needs no threshold, and an outlier keeps no component for itself.) The scale s is such
that a node has half as many neighbours as it will stand for.

With 20 bits a cell is 4e-6 wide in z at 0, and 3e-3 at 8 and -8, narrower than posteriors of 1e5
rows. Beyond 14 and -14 all is one cell, in which the density is the tail of the logistic
distribution.

Center (2009), "Learning complex classification models from large data sets". Cost of a density:
bits x size short operations, and components x words of the codes; of a fit: rounds x points x
components x words, and the cube of the points that are contracted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import erf, erfinv
from jaxtyping import Float, UInt32

from inference.maths import hilbert
from inference.maths.host import Array, in_chunks
from inference.maths.normal_mixture import FitPoints, cross_validated, powers_of_two
from inference.maths.resampling import bisected

__all__ = [
    "HilbertClumps",
    "HilbertMixture",
    "contracted",
    "log_circle_mass",
    "log_uniform_codes",
    "spread_on_circle",
]

CELLS = 8  # the narrowest spread, in cells of the curve
WIDEST = 10.0  # the widest spread


class HilbertMixture(NamedTuple):
    """The parameters of a mixture over codes; an absent component has log weight -inf."""

    log_weight: Float[Array, " component"]  # normalised
    centre: UInt32[Array, "component block word"]  # codes, shorter ones with zeros behind
    spread: Float[Array, "component block"]  # in fractions of the circle


@dataclass(frozen=True)
class HilbertClumps:
    """Mixtures over the codes of Hilbert curves, one curve for each latent site.

    Args:
        blocks: sizes of the sites, in their order in a vector.
        bits: of a code, for each dimension.
    """

    blocks: tuple[int, ...] = ()
    bits: int = 20
    usual_components = 64
    uses_scores = False  # codes have no gradient

    def over(self, blocks: Sequence[int]) -> "HilbertClumps":
        """The family over vectors of sites with these sizes."""
        return replace(self, blocks=tuple(blocks))

    def empty(self, num_components: int) -> HilbertMixture:
        """A mixture whose components are all absent."""
        shape = (num_components, len(self.blocks))
        return HilbertMixture(
            jnp.full(num_components, -jnp.inf),
            jnp.zeros((*shape, max(self._words)), jnp.uint32),
            jnp.ones(shape),
        )

    def log_density(self, mixture: HilbertMixture, z: Float[Array, " size"]) -> Array:
        """The log density at one vector."""
        away = hilbert.difference(self.codes(z)[None], mixture.centre)
        each = mixture.log_weight + _log_each(away, mixture.spread)
        return jax.nn.logsumexp(each) + log_uniform_codes(z)

    def draw(self, rng_key: Array, mixture: HilbertMixture) -> Array:
        """A vector from a mixture that has a component."""
        which_key, code_key, cell_key = random.split(rng_key, 3)
        which = random.categorical(which_key, mixture.log_weight)
        spread = mixture.spread[which]
        share = random.uniform(code_key, spread.shape, spread.dtype, minval=-1.0)
        away = np.sqrt(2) * spread * erfinv(share * erf(0.5 / np.sqrt(2) / spread))
        code = self._moved(mixture.centre[which], jnp.clip(away, -0.5, 0.5))
        parts = enumerate(zip(self._words, self.blocks, strict=True))
        cells = [hilbert.decode(code[i, :words], size, self.bits) for i, (words, size) in parts]
        cells, last = jnp.concatenate(cells), jnp.uint32((1 << self.bits) - 1)
        within = random.uniform(
            cell_key, cells.shape, spread.dtype, minval=float(jnp.finfo(spread.dtype).tiny)
        )
        # from the nearer face of the cube, so that z keeps its digits and is finite
        is_upper = cells > last // 2
        u = hilbert.cell_points(jnp.where(is_upper, last - cells, cells), self.bits, within)
        z = jnp.log(u) - jnp.log1p(-u)
        return jnp.where(is_upper, -z, z)

    def log_densities(
        self, mixture: HilbertMixture, z: Float[np.ndarray, "draw size"]
    ) -> Float[np.ndarray, " draw"]:
        """`log_density` at vectors, on the host."""
        return in_chunks(lambda z: _log_densities(self, mixture, z), z)

    def draws(
        self, rng: np.random.Generator, mixture: HilbertMixture, num_draws: int
    ) -> Float[np.ndarray, "draw size"]:
        """Vectors from a mixture that has a component, on the host."""
        keys = rng.integers(2**32, size=(num_draws, 2), dtype=np.uint32)
        return in_chunks(lambda keys: _draws(self, mixture, keys), keys)

    def fitted(
        self,
        rng_key: Any,
        points: FitPoints,
        log_weight: Float[Array, " point"],
        num_components: int,
        known: HilbertMixture | None = None,
    ) -> HilbertMixture:
        """The cross-validated fit to weighted points, or `known` if that is better."""
        fit = lambda points, count: self._em(self.codes(points.z), count, num_components)
        fits = [partial(fit, count=count) for count in powers_of_two(num_components)]
        return cross_validated(rng_key, points, log_weight, fits, self, known)

    @partial(jax.jit, static_argnums=0)
    def codes(self, z: Array) -> Array:
        """Codes [..., block, word] of vectors [..., size]."""
        parts = jnp.split(
            hilbert.cells_of(jax.nn.sigmoid(z), self.bits), np.cumsum(self.blocks)[:-1], axis=-1
        )
        return self._stacked([hilbert.encode(part, self.bits) for part in parts])

    @property
    def _words(self) -> list[int]:
        return [hilbert.num_words(size, self.bits) for size in self.blocks]

    def _stacked(self, codes: list[Array]) -> UInt32[Array, "*batch block word"]:
        most = max(self._words)
        pad = lambda code: [(0, 0)] * (code.ndim - 1) + [(0, most - code.shape[-1])]
        return jnp.stack([jnp.pad(code, pad(code)) for code in codes], -2)

    def _moved(
        self, code: UInt32[Array, "*batch block word"], step: Float[Array, "*batch block"]
    ) -> UInt32[Array, "*batch block word"]:
        parts = enumerate(zip(self._words, self.blocks, strict=True))
        move = lambda i, words, size: hilbert.shifted(
            code[..., i, :words], step[..., i], size, self.bits
        )
        return self._stacked([move(i, *sizes) for i, sizes in parts])

    @partial(jax.jit, static_argnums=(0, 3))
    def _em(
        self, codes: UInt32[Array, "point block word"], count: Array, num_places: int
    ) -> HilbertMixture:
        place, nodes = jnp.arange(num_places), codes[: max(256, num_places)]
        square = hilbert.difference(nodes[:, None], nodes[None]) ** 2
        unit = jnp.maximum(jnp.mean(square, (0, 1)), jnp.finfo(square.dtype).tiny)
        centre = nodes[contracted(jnp.sum(square / unit, -1), count)[place]]
        away = hilbert.difference(codes[:, None], centre[None])
        distance = jnp.where(place < count, jnp.sum(away**2 / unit, -1), jnp.inf)
        nearest = jax.nn.one_hot(distance.argmin(1), num_places, dtype=away.dtype)
        start = self._improved(codes, jnp.log(nearest), centre, count)
        is_wide = (place == count - 1) & (count > 1)
        start = start._replace(spread=jnp.where(is_wide[:, None], WIDEST, start.spread))

        def improved(_, mixture: HilbertMixture) -> HilbertMixture:
            away = hilbert.difference(codes[:, None], mixture.centre[None])
            log_joint = mixture.log_weight[None] + _log_each(away, mixture.spread[None])
            return self._improved(codes, jax.nn.log_softmax(log_joint, 1), mixture.centre, count)

        return jax.lax.fori_loop(0, 40, improved, start)

    def _improved(
        self,
        codes: UInt32[Array, "point block word"],
        log_responsibility: Float[Array, "point component"],
        centre: UInt32[Array, "component block word"],
        count: Array,
    ) -> HilbertMixture:
        """The M step, by log responsibilities [point, component]."""
        responsibility = jnp.exp(log_responsibility)
        total = responsibility.sum(0)
        least = len(codes) * jnp.minimum(0.01, 0.5 / count)  # one is left, however many there are
        log_weight = jnp.where(total > least, jnp.log(total), -jnp.inf)
        divisor = jnp.maximum(total, 1)[:, None]
        away = hilbert.difference(codes[:, None], centre[None])
        centre = self._moved(centre, jnp.einsum("nj,njk->jk", responsibility, away) / divisor)
        away = hilbert.difference(codes[:, None], centre[None])  # from the new centres
        log_each = log_responsibility[..., None] + 2 * jnp.log(jnp.abs(away))
        root = jnp.exp(0.5 * (jax.nn.logsumexp(log_each, 0) - jnp.log(divisor)))
        cell = np.array([2.0 ** -(size * self.bits) for size in self.blocks])
        least_root = CELLS * np.maximum(cell, jnp.finfo(away.dtype).tiny).astype(away.dtype)
        return HilbertMixture(
            log_weight - jax.nn.logsumexp(log_weight),
            centre,
            spread_on_circle(jnp.maximum(root, least_root)),
        )


@partial(jax.jit, static_argnums=0)
def _log_densities(family: HilbertClumps, mixture: HilbertMixture, z: Array) -> Array:
    return jax.vmap(lambda z: family.log_density(mixture, z))(z)


@partial(jax.jit, static_argnums=0)
def _draws(family: HilbertClumps, mixture: HilbertMixture, key_data: Array) -> Array:
    return jax.vmap(lambda key: family.draw(random.wrap_key_data(key), mixture))(key_data)


def _log_each(away: Array, spread: Array) -> Array:
    standard = jnp.minimum(jnp.abs(away) / spread, 1e9)  # has a finite square
    return jnp.sum(-0.5 * standard**2 - log_circle_mass(spread), -1)


def log_uniform_codes(z: Array) -> Array:
    """Log density [...] at z [..., size] of the distribution that is uniform over codes."""
    return jnp.sum(jax.nn.log_sigmoid(z) + jax.nn.log_sigmoid(-z), -1)


def log_circle_mass(spread: Array) -> Array:
    """Log of the integral of exp(-h^2 / (2 spread^2)) on the circle."""
    return jnp.log(spread) + 0.5 * np.log(2 * np.pi) + jnp.log(erf(0.5 / np.sqrt(2) / spread))


def spread_on_circle(root: Array) -> Array:
    """The maximum-likelihood spread where differences have the root mean square `root`."""

    def is_high(log_spread: Array) -> Array:
        end = 0.5 / jnp.exp(log_spread)
        # the mean square on the circle, as a part of the square of the spread
        cut = end * np.sqrt(2 / np.pi) * jnp.exp(-0.5 * end**2) / erf(end / np.sqrt(2))
        return log_spread + 0.5 * jnp.log(1 - cut) > jnp.log(root)

    # the spread is above the root mean square
    ends = jnp.log(root), jnp.full_like(root, np.log(WIDEST))
    return jnp.exp(bisected(is_high, *ends, 64)[0])


def contracted(square: Float[Array, "node node"], count: Array) -> Array:
    """The nodes, ordered so that the first `count` are those that the contraction leaves.

    Args:
        square: squared distances, in units of a usual one.
        count: nodes that are left.
    """
    num_nodes = len(square)
    affinity = _affinities(square, num_nodes / (2 * count))
    direction = affinity / jnp.linalg.norm(affinity, axis=1, keepdims=True)
    unlike = jnp.where(jnp.eye(num_nodes, dtype=bool), jnp.inf, 1 - direction @ direction.T)

    def combined(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        weight, left = carry
        lighter = jnp.minimum(weight[:, None], weight[None])
        change = jnp.where(lighter > 0, unlike * lighter, jnp.inf)  # of those that are left
        pair = jnp.stack(jnp.unravel_index(jnp.argmin(change), change.shape))
        goes, stays = jnp.where(weight[pair[0]] < weight[pair[1]], pair, pair[::-1])
        weight = weight.at[stays].add(weight[goes]).at[goes].set(0.0)
        return weight, left.at[num_nodes - 1 - turn].set(goes)

    start = jnp.ones(num_nodes, square.dtype), jnp.zeros(num_nodes, int)
    weight, left = jax.lax.fori_loop(0, num_nodes - 1, combined, start)
    return left.at[0].set(jnp.argmax(weight))


def _affinities(square: Float[Array, "node node"], num_near: Array) -> Float[Array, "node node"]:
    """Gaussian affinities, of the scale at which nodes have `num_near` neighbours on average.

    A node is a neighbour of itself.
    """
    at = lambda log_square: jnp.exp(-0.5 * square / jnp.exp(log_square))
    has_many = lambda log_square: at(log_square).sum(1).mean() > num_near
    ends = jnp.asarray(-60.0, square.dtype), jnp.asarray(20.0, square.dtype)
    return at(bisected(has_many, *ends, 50)[1])
