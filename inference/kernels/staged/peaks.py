"""Exploration: several walkers look for what a stage has to go over.

Walkers begin as draws from what the stage starts from, and climb to peaks of its posterior, each to
one nearby. From a peak and the curvature there `climbing` finds a Normal, and what it holds of the
evidence. Where Normals will not do, walkers slice sample outwards from draws of them; what they
come to is told by clumps of any form.

Center (2009), "Learning complex classification models from large data sets": a multistate search,
and slice sampling outwards from the peaks. Cost: a gradient for each step of a climb; then walkers
x latent numbers x about 10.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp
from scipy.optimize import minimize

from inference.kernels.staged.climbing import GRADIENT
from inference.maths.normal_mixture import Clumps
from inference.maths.resampling import systematic_parents
from inference.maths.slice_walk import Points
from inference.maths.tempering import moved, next_exponent, powered

__all__ = ["Peaks", "apart", "around", "outwards", "peaks", "worthwhile"]

# walkers; and how many must have come to the highest peak, for others to stay where they are
LEAST, FOUND = 20, 5
# nats, and standard deviations of what walkers began as, within which peaks are one
LEVEL, NEAR = 0.5, 0.05
MOST_STEPS = 1000  # of a climb
DOUBT = 30.0  # nats, by which the evidence of a peak may be wrong that its curvature tells
# of walkers, which are effective when they go outwards; how far at least, and until they forget
SHARE, SWEEPS, MEMORY = 0.5, 2.0, 0.25


class Peaks(NamedTuple):
    """Where walkers have come to."""

    z: Array  # [walker, size]
    height: np.ndarray  # [walker]: log density
    evaluations: int


def peaks(start: Array, densities_of: Callable, given: Any, least: int = LEAST) -> Peaks:
    """From starts [walker, size], one walker after the other, until the highest peak has been found
    again and again.

    :param densities_of: the sum of `densities_of(given)` is the log density. What compares equal is
    compiled once.
    :param least: walkers that climb in any case.
    """

    def lost(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _slope(jnp.asarray(z, start.dtype), given, densities_of)
        return -float(value), -np.asarray(slope, float)

    z, height, evaluations = [], [], 0
    for walker in np.asarray(start, float):
        # where it is not, a climb looks for steps in vain, some thousand times
        if np.isfinite(lost(walker)[0]):
            end = minimize(
                lost, walker, jac=True, method="L-BFGS-B", options={"maxiter": MOST_STEPS}
            )
            walker, top, looks = end.x, -end.fun if np.isfinite(end.fun) else -np.inf, 1 + end.nfev
        else:
            top, looks = -np.inf, 1
        evaluations += GRADIENT * looks
        z, height = [*z, walker], [*height, top]
        if len(z) >= least and np.sum(np.array(height) > max(height) - LEVEL) >= FOUND:
            break
    return Peaks(jnp.asarray(np.array(z), start.dtype), np.array(height), evaluations)


@partial(jax.jit, static_argnames="densities_of")
def _slope(z: Array, given: Any, densities_of: Callable) -> tuple[Array, Array]:
    return jax.value_and_grad(lambda z: sum(densities_of(given)(z)))(z)


def apart(found: Peaks, spread: Array, most: int) -> Peaks:
    """The highest peaks that are not the same."""
    kept: list[int] = []
    z, height = np.asarray(found.z), found.height
    near = lambda one, other: (
        abs(height[one] - height[other]) < LEVEL
        and bool(np.all(np.abs(z[one] - z[other]) < NEAR * np.asarray(spread)))
    )
    for number in np.argsort(-height):
        if (
            np.isfinite(height[number])
            and len(kept) < most
            and not any(near(number, other) for other in kept)
        ):
            kept.append(int(number))
    return found._replace(z=found.z[np.array(kept, int)], height=height[kept])


def worthwhile(curved: list[Clumps], height: np.ndarray) -> list[Clumps]:
    """Of peaks with their curvatures, those that may hold a part of the evidence, as Laplace's
    approximation has it.
    """
    log_det = [float(jnp.sum(jnp.log(jnp.diagonal(clump.inverse[0])))) for clump in curved]
    log_evidence = height - np.array(log_det)
    return [
        clump
        for clump, each in zip(curved, log_evidence, strict=True)
        if each > log_evidence.max() - DOUBT
    ]


@partial(jax.jit, static_argnames="densities_of")
def around(peak: Array, start: Array, given: Any, densities_of: Callable) -> Clumps:
    """A clump with the curvature of a peak, in no direction wider than the starts [walker,
    size].
    """
    slope = jax.grad(lambda z: sum(densities_of(given)(z)))
    curvature = -jax.lax.map(
        lambda along: jax.jvp(slope, (peak,), (along,))[1], jnp.eye(len(peak), dtype=peak.dtype)
    )
    known = jnp.where(jnp.isfinite(curvature).all(), curvature, 0.0)
    value, vector = jnp.linalg.eigh((known + known.T) / 2)
    away = (start - start.mean(0)) @ vector
    value = jnp.maximum(
        jnp.abs(value), 1 / jnp.maximum(jnp.mean(away**2, 0), jnp.finfo(peak.dtype).tiny)
    )
    covariance = (vector / value) @ vector.T
    return Clumps.of(jnp.zeros(1, peak.dtype), peak[None], jnp.linalg.cholesky(covariance)[None])


@partial(jax.jit, static_argnames="densities_of")
def outwards(
    rng_key: Array, z: Array, log_weight: Array, given: Any, densities_of: Callable
) -> tuple[Array, Array]:
    """Draws [walker, size] from something near to the density, with the logarithms of their
    weights, after walks that leave it as it is; and evaluations.
    """
    parent_key, walk_key = random.split(rng_key)
    log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf)
    some = powered(log_weight, next_exponent(log_weight, jnp.zeros((), z.dtype), SHARE))
    parent = systematic_parents(parent_key, jnp.exp(some - logsumexp(some)))
    densities = lambda z: (sum(densities_of(given)(z)), jnp.zeros((), z.dtype))
    log_density, nothing = jax.vmap(densities)(z)
    at, walked = moved(
        walk_key,
        Points(z, log_density, nothing, nothing),
        parent,
        densities,
        num_sweeps=SWEEPS,
        memory=MEMORY,
    )
    return at.z, walked.evaluations
