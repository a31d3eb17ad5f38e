"""What a summary of weighted points is, whatever its form; how many clumps it has; and the prior behind it.

The number of clumps is the one, of 1, 2, 4, ..., whose fit to half of the points says most of the other half. A point with much weight is
in one half only, so that a clump which sits on it says nothing of the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

__all__ = ["Backed", "Mixture", "Summary", "chosen"]

NUM_POINTS = 2000  # that a fit looks at


class Mixture(Protocol):
    """What a state keeps of a summary: arrays alone. Places are fixed in number; a clump that is not there has the weight -inf."""

    @property
    def log_weight(self) -> Array:
        """[clump], of all clumps together 1."""
        ...


class Summary(Protocol):
    """A family of densities over vectors [size] without bounds."""

    def nothing(self, num_clumps: int) -> Any:
        """No clump at all: the background is everything."""
        ...

    def log_density(self, clumps: Any, z: Array) -> Array:
        """Of one vector [size]."""
        ...

    def draw(self, rng_key: Array, clumps: Any) -> Array:
        """A vector; there must be a clump."""
        ...

    def fitted(self, rng_key: Array, z: Array, log_weight: Array, num_clumps: int) -> Any:
        """To points [point, size] in proportion to their weights."""
        ...


class Backed(NamedTuple):
    """A summary with a share of the prior in the background, so that it bounds what the prior bounds."""

    summary: Summary
    background: float

    def log_density(self, clumps: Any, z: Array, log_prior: Array) -> Array:
        """Of one vector, where the prior has this density."""
        return jnp.logaddexp(np.log1p(-self.background) + self.summary.log_density(clumps, z), np.log(self.background) + log_prior)

    def draw(self, rng_key: Array, clumps: Any, draw_prior: Callable) -> Array:
        """A vector."""
        which_key, draw_key = random.split(rng_key)
        is_background = random.bernoulli(which_key, self.background)
        return jnp.where(is_background, draw_prior(draw_key), self.summary.draw(draw_key, clumps))


def chosen(rng_key: Array, z: Array, log_weight: Array, num_clumps: int, fit: Callable, log_density: Callable) -> Any:
    """`fit(points, count)` to all points, with the count that says most of points that a fit has not seen."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    points, weight = np.asarray(z), np.exp(np.asarray(log_weight - jnp.max(log_weight), float))
    order = rng.permutation(len(points))
    learnt, asked = (_even(rng, points[half], weight[half], NUM_POINTS // 2) for half in (order[::2], order[1::2]))
    count, best, choice = 1, -np.inf, 1
    while count <= num_clumps:
        score = float(_score(log_density, fit(learnt, count), asked))
        if score > best:
            best, choice = score, count
        count *= 2
    return fit(_even(rng, points, weight, NUM_POINTS), choice)


def _score(log_density: Callable, clumps: Any, points: Array) -> Array:
    return jnp.mean(jax.vmap(lambda z: log_density(clumps, z))(points))


def _even(rng: np.random.Generator, z: np.ndarray, weight: np.ndarray, size: int) -> Array:
    """Points of equal weight, by systematic resampling, in random order."""
    share = np.cumsum(weight / weight.sum())
    index = np.minimum(np.searchsorted(share, (np.arange(size) + rng.random()) / size), len(z) - 1)
    return jnp.asarray(z[rng.permutation(index)])
