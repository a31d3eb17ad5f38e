"""Names for members that have none, so that copies of one mode are one.

The clusters of a mixture may change places in every point (`inference.reading.exchangeable`): its
m! modes are copies of each other. Live points are given the places of a reference, their own mean,
twice in an e-fold: then all are in one copy, directions of walks are as long as that one is wide,
and no mode can be lost to another. A point and its copies are draws from the same prior above the
same limit, so nothing else of nested sampling changes. What a run leaves behind is shuffled again:
draws are from the posterior as the model has it.

Clumps that are fitted to such points know one of the m! copies of each mode. What is drawn from
them is weighed against m! times the prior where vectors are alike, and 0 elsewhere (`in_places`):
as much as the prior has of all copies.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from inference.maths.slice_walk import Points
from inference.maths.summary import Mixture
from inference.program.compiling import once
from inference.reading.density import Split
from inference.reading.exchangeable import NO_REFERENCE, Exchangeable, Reference

__all__ = ["Named", "drawn_in_places", "in_places", "named_alike", "renamed", "shown", "together"]


def renamed(
    exchange: Exchangeable, live: Points, offers: Array, reference: Reference, densities: Callable
) -> tuple[Points, Array, Reference]:
    """Live points with the places of the reference, offers [offer, size] as well, and what the
    points are a reference of.
    """
    both = jax.vmap(lambda z: exchange.alike(z, reference))(jnp.concatenate([live.z, offers]))
    z = both[: len(live.z)]
    # of the free numbers, whose measure depends on the places
    log_prior = jax.vmap(lambda z: densities(z)[0])(z)
    return live._replace(z=z, log_prior=log_prior), both[len(live.z) :], exchange.reference(z)


def together(exchange: Exchangeable | None, z: Array, reference: Reference) -> Array:
    """Vectors [point, size] with the places of a reference, where there is one."""
    if exchange is None or not reference.gives_names:
        return z
    return _alike(exchange, z, reference)


@partial(jax.jit, static_argnums=0)
def _alike(exchange: Exchangeable, z: Array, reference: Reference) -> Array:
    return jax.vmap(lambda z: exchange.alike(z, reference))(z)


@partial(jax.jit, static_argnums=0)
def named_alike(exchange: Exchangeable, z: Array) -> Array:
    """Vectors [point, size] with their members named in one way, which is that of the first, and
    then that of all.
    """
    for reference in (exchange.first_reference, exchange.reference):
        z = _alike(exchange, z, reference(z))
    return z


def shown(
    rng_key: Array, split: Split, exchange: Exchangeable | None, z: Array
) -> dict[str, Array]:
    """The sites at vectors [point, size]; members without names in random places."""
    keys = random.split(rng_key, len(z))
    of = lambda key, z: (
        split.values(z) if exchange is None else exchange.shuffled(key, split.values(z))
    )
    return once(jax.vmap(of), keys, z)(keys, z)


class Named(NamedTuple):
    """Clumps over vectors that are alike: the members of each are where those of the reference
    are.
    """

    clumps: Mixture
    reference: Reference = NO_REFERENCE

    @property
    def log_weight(self) -> Array:
        """Of the clumps."""
        return self.clumps.log_weight


def in_places(exchange: Exchangeable | None, reference: Reference, densities: Callable) -> Callable:
    """Prior and likelihood of the vectors that are alike, each of which stands for its m! copies:
    nowhere else has the prior a density.
    """
    if exchange is None or not reference.gives_names:
        return densities

    def of_all_copies(z: Array) -> tuple[Array, Array]:
        log_prior, log_likelihood = densities(z)
        return jnp.where(
            exchange.is_alike(z, reference), log_prior + exchange.log_copies, -jnp.inf
        ), log_likelihood

    return of_all_copies


def drawn_in_places(
    exchange: Exchangeable | None, reference: Reference, draw: Callable
) -> Callable:
    """Draws of that prior, by draws of the whole."""
    if exchange is None or not reference.gives_names:
        return draw
    return lambda rng_key: exchange.alike(draw(rng_key), reference)
