"""Exploration: several walkers look for what a stage has to go over.

    pi_e(z)  ~  pi(z) likelihood(z) ^ e,        e from 0 to 1

Walkers begin as draws from pi, what the stage starts from. The exponent grows as far as it leaves half of them effective; then those that
lie low give way to copies of others, and all of them slice sample. In the end they are about where the posterior is, and a summary of
them is what nested sampling may draw from. Nothing else of them is used: where they have missed something, nested sampling takes longer.

Center (2009), "Learning complex classification models from large data sets", whose search and outward sampling this is, with annealing for
the search. Cost: walkers x exponents x steps of a walk x about 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.kernels._nested_moves import Points
from inference.kernels._resampling import systematic_parents
from inference.kernels._tempering import moved, next_exponent, powered

__all__ = ["Walkers", "explored"]

SHARE = 0.5  # of the walkers, which a step leaves effective


class Walkers(NamedTuple):
    """Where they are."""

    at: Points
    exponent: Array
    exponents: Array  # how many there were
    evaluations: Array


def explored(rng_key: Array, start: Points, densities_of: Callable, given: Any, num_sweeps: float) -> Walkers:
    """From draws of pi whose likelihoods are numbers, or 0, to the exponent 1; on the host, so that it may be interrupted.

    :param densities_of: `densities_of(given)` are the logarithms of pi and of the likelihood. What compares equal is compiled once.
    :param num_sweeps: of a walk at each exponent. Walks need not forget where they began, so that they keep their length.
    """
    none = jnp.zeros((), jnp.int32)
    walkers = Walkers(start, jnp.zeros((), start.z.dtype), none, none + len(start.z))
    while not walkers.exponent >= 1:
        walkers = _step(random.fold_in(rng_key, int(walkers.exponents)), walkers, given, densities_of, num_sweeps)
    return walkers


@partial(jax.jit, static_argnames=("densities_of", "num_sweeps"))
def _step(rng_key: Array, walkers: Walkers, given: Any, densities_of: Callable, num_sweeps: float) -> Walkers:
    parent_key, walk_key = random.split(rng_key)
    at, exponent = walkers.at, next_exponent(walkers.at.log_likelihood, walkers.exponent, SHARE)
    log_weight = powered(at.log_likelihood, exponent - walkers.exponent)
    parent = systematic_parents(parent_key, jnp.exp(log_weight - logsumexp(log_weight)))
    densities = densities_of(given)

    def annealed(z: Array) -> tuple[Array, Array]:
        log_prior, log_likelihood = densities(z)
        return log_prior + powered(log_likelihood, exponent), log_likelihood

    start = at._replace(log_prior=at.log_prior + powered(at.log_likelihood, exponent))
    new, walked = moved(walk_key, start, parent, annealed, num_sweeps=num_sweeps, memory=1.0)
    new = new._replace(log_prior=new.log_prior - powered(new.log_likelihood, exponent))
    return Walkers(new, exponent, walkers.exponents + 1, walkers.evaluations + walked.evaluations)
