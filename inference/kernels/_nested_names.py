"""Names for members that have none, so that copies of one mode are one.

The clusters of a mixture may change places in every point (`inference.exchangeable`): its m! modes are copies of each other. Live points
are given the places of a reference, their own mean, twice in an e-fold: then all are in one copy, directions of walks are as long as that
one is wide, and no mode can be lost to another. A point and its copies are draws from the same prior above the same limit, so nothing else
of nested sampling changes. What a run leaves behind is shuffled again: draws are from the posterior as the model has it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference._once import once
from inference.exchangeable import MOST_NAMED, Exchangeable, Reference
from inference.kernels._nested_moves import Points
from inference.kernels._summary import Summary, Told
from inference.split import Split

__all__ = ["Unnamed", "for_all_places", "named_alike", "renamed", "scattered", "shown", "together"]


def renamed(
    exchange: Exchangeable, live: Points, offers: Array, reference: Reference, densities: Callable
) -> tuple[Points, Array, Reference]:
    """Live points with the places of the reference, offers [offer, size] as well, and what the points are a reference of."""
    both = jax.vmap(lambda z: exchange.alike(z, reference))(jnp.concatenate([live.z, offers]))
    z = both[: len(live.z)]
    log_prior = jax.vmap(lambda z: densities(z)[0])(z)  # of the free numbers, whose measure depends on the places
    return live._replace(z=z, log_prior=log_prior), both[len(live.z) :], exchange.reference(z)


def together(exchange: Exchangeable | None, z: Array, reference: Reference | None) -> Array:
    """Vectors [point, size] with the places of a reference, where there is one."""
    if exchange is None or reference is None:
        return z
    return _alike(exchange, z, reference)


@partial(jax.jit, static_argnums=0)
def _alike(exchange: Exchangeable, z: Array, reference: Reference) -> Array:
    return jax.vmap(lambda z: exchange.alike(z, reference))(z)


@partial(jax.jit, static_argnums=0)
def named_alike(exchange: Exchangeable, z: Array) -> Array:
    """Vectors [point, size] with their members named in one way, which is that of the first, and then that of all."""
    for reference in (exchange.first_reference, exchange.reference):
        z = _alike(exchange, z, reference(z))
    return z


def scattered(exchange: Exchangeable | None, z: Array) -> Array:
    """Vectors [point, size], their members in random places: where these are too many for each to be looked at."""
    if exchange is None:
        return z
    place = lambda key, z: exchange.placed(z, random.permutation(key, exchange.count))
    return jax.jit(jax.vmap(place))(random.split(random.key(0), len(z)), z)


def shown(rng_key: Array, split: Split, exchange: Exchangeable | None, z: Array) -> dict[str, Array]:
    """The sites at vectors [point, size]; members without names in random places."""
    keys = random.split(rng_key, len(z))
    of = lambda key, z: split.values(z) if exchange is None else exchange.shuffled(key, split.values(z))
    return once(jax.vmap(of), keys, z)(keys, z)


@dataclass(frozen=True)
class Unnamed:
    """A summary of vectors whose members are named, with the members in all places alike: the mean over the m! places of

        q(places(z)) prior(z) / prior(places(z)),

    the last two for what changing places does to volumes of free numbers; the measure of the prior stays as it is."""

    named: Summary
    exchange: Exchangeable

    @property
    def asks_for_slopes(self) -> bool:
        """As the other does."""
        return self.named.asks_for_slopes

    def nothing(self, num_clumps: int) -> Any:
        """No clump."""
        return self.named.nothing(num_clumps)

    def log_density(self, clumps: Any, z: Array) -> Array:
        """Of one vector [size]."""
        log_prior = lambda z: self.exchange.split.densities(z)[0]
        each = jax.vmap(lambda z: self.named.log_density(clumps, z) - log_prior(z))(self.exchange.every(z))
        return logsumexp(each) - np.log(len(each)) + log_prior(z)

    def draw(self, rng_key: Array, clumps: Any) -> Array:
        """A vector, its members in random places."""
        draw_key, order_key = random.split(rng_key)
        return self.exchange.placed(self.named.draw(draw_key, clumps), random.permutation(order_key, self.exchange.count))

    def fitted(self, rng_key: Array, told: Told, log_weight: Array, num_clumps: int, known: Any = None) -> Any:
        """To vectors whose members are named."""
        return self.named.fitted(rng_key, told, log_weight, num_clumps, known)


def for_all_places(summary: Summary, exchange: Exchangeable | None) -> Summary | Unnamed:
    """The summary that is right for vectors with their members in all places, where these are few enough."""
    return summary if exchange is None or exchange.count > MOST_NAMED else Unnamed(summary, exchange)
