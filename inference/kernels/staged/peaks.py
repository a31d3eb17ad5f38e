"""Normal mixtures near the peaks of a posterior: climbs, Laplace and batch-and-match fits, walks.

Walkers begin as draws from what a stage starts from, and climb to the peaks of its posterior
(`find_peaks`). At each peak `laplace` is the Normal with the curvature of the peak.
`batch_and_match` improves it by the scores (gradients of the log density) at its own draws. If the
density is Normal, its scores give mean and covariance from any points (`score_matched`); else they
give a better fit, from which the next draws are made. Rounds go on while the mean log weight of the
draws, a lower bound of the log-evidence, rises. That finds a mode near the start, its covariance
and its evidence in a few hundred gradients. `combined` weights such Normals by their evidence.
Where Normals do not fit, walkers go outwards from draws of them by slice sampling
(`walk_outwards`), and a mixture is fitted to where they are.

Throughout, `target(arrays)` is a function of a vector whose two values add up to the log density.
Targets that compare equal are compiled once.

Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei and Saul (2024), "Batch and match: black-box
variational inference with a score-based divergence", without their regularisation towards the
Normal before; Center (2009), "Learning complex classification models from large data sets", for
walkers and slice sampling outwards. Cost: a gradient for each step of a climb; points x rounds
gradients of batch and match; for walks, walkers x dimensions x about 10 evaluations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array, Float
from scipy.optimize import minimize

from inference.maths.normal_mixture import NormalMixture, NormalSummary, Summary, score_matched
from inference.maths.resampling import next_exponent, systematic_parents, tempered
from inference.maths.slice_walk import Particles, slice_moves

__all__ = [
    "GRADIENT",
    "LEAST",
    "batch_and_match",
    "combined",
    "distinct",
    "find_peaks",
    "is_within",
    "laplace",
    "walk_outwards",
    "weighted_draws",
    "with_scores",
    "worthwhile",
]

GRADIENT = 3  # evaluations that a gradient costs
LEAST = 20  # walkers that climb in any case
LEVEL = 0.5  # nats within which peaks are equally high


def find_peaks(
    start: Float[Array, "walker size"],
    target: Callable,
    arrays: Any,
    least: int = LEAST,
    often: int = 5,
) -> tuple[Float[Array, "walker size"], np.ndarray, int]:
    """Climbs by L-BFGS, until the highest peak has been found often enough.

    Returned are the ends of the climbs, their log densities, and the number of evaluations.

    Args:
        start: where walkers begin, one after the other.
        target: `target(arrays)` has the log density.
        arrays: see `target`.
        least: walkers that climb in any case.
        often: walkers that must have come to the highest peak.
    """

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, score = _value_and_score(jnp.asarray(z, start.dtype), arrays, target)
        return -float(value), -np.asarray(score, float)

    z, height, evaluations = [], [], 0
    for walker in np.asarray(start, float):
        top, looks = -np.inf, 1
        if np.isfinite(loss(walker)[0]):  # else a climb would look for a step a thousand times
            end = minimize(loss, walker, jac=True, method="L-BFGS-B", options={"maxiter": 1000})
            walker, looks = end.x, 1 + end.nfev
            top = -end.fun if np.isfinite(end.fun) else -np.inf
        evaluations += GRADIENT * looks
        z, height = [*z, walker], [*height, top]
        if len(z) >= least and np.sum(np.array(height) > max(height) - LEVEL) >= often:
            break
    return jnp.asarray(np.array(z), start.dtype), np.array(height), evaluations


@partial(jax.jit, static_argnames="target")
def _value_and_score(z: Array, arrays: Any, target: Callable) -> tuple[Array, Array]:
    return jax.value_and_grad(lambda z: sum(target(arrays)(z)))(z)


def distinct(
    peaks: Float[Array, "peak size"],
    height: np.ndarray,
    deviation: Float[Array, " size"],
    most: int,
) -> tuple[Float[Array, "peak size"], np.ndarray]:
    """The highest peaks that are different, and their heights.

    Args:
        peaks: some of them the same.
        height: their log densities.
        deviation: standard deviations of the starts; peaks within a twentieth of them are the same.
        most: how many are kept.
    """
    kept: list[int] = []
    z, reach = np.asarray(peaks), 0.05 * np.asarray(deviation)
    is_same = lambda one, other: (
        abs(height[one] - height[other]) < LEVEL and bool(np.all(np.abs(z[one] - z[other]) < reach))
    )
    for number in np.argsort(-height):
        is_new = np.isfinite(height[number]) and len(kept) < most
        if is_new and not any(is_same(number, other) for other in kept):
            kept.append(int(number))
    return peaks[np.array(kept, int)], height[kept]


@partial(jax.jit, static_argnames="target")
def laplace(
    peak: Float[Array, " size"],
    start: Float[Array, "walker size"],
    arrays: Any,
    target: Callable,
) -> NormalMixture:
    """The Laplace approximation at a peak, in no direction wider than the starts of the walkers."""
    score = jax.grad(lambda z: sum(target(arrays)(z)))
    along = lambda direction: jax.jvp(score, (peak,), (direction,))[1]
    curvature = -jax.lax.map(along, jnp.eye(len(peak), dtype=peak.dtype))
    curvature = jnp.where(jnp.isfinite(curvature).all(), curvature, 0.0)
    value, vector = jnp.linalg.eigh((curvature + curvature.T) / 2)
    variance = jnp.mean(((start - start.mean(0)) @ vector) ** 2, 0)
    value = jnp.maximum(jnp.abs(value), 1 / jnp.maximum(variance, jnp.finfo(peak.dtype).tiny))
    root = jnp.linalg.cholesky((vector / value) @ vector.T)
    return NormalMixture.of(jnp.zeros(1, peak.dtype), peak[None], root[None])


def worthwhile(approximations: list[NormalMixture], height: np.ndarray) -> list[NormalMixture]:
    """The Laplace approximations that may hold a part of the evidence, given their peaks' heights.

    The Laplace evidence of a peak may be wrong by 30 nats.
    """
    log_det = [float(jnp.sum(jnp.log(jnp.diagonal(each.whitening[0])))) for each in approximations]
    log_evidence = height - np.array(log_det)
    is_enough = log_evidence > log_evidence.max(initial=-np.inf) - 30
    return [each for each, enough in zip(approximations, is_enough, strict=True) if enough]


def batch_and_match(
    rng_key: Array, start: NormalMixture, target: Callable, arrays: Any, num_points: int
) -> tuple[NormalMixture, float, int]:
    """Batch and match from a Normal, as long as a round raises the bound by a tenth of a nat.

    Returned are a mixture of one component, its log-evidence by its draws (-inf where none has a
    density), and evaluations.

    Args:
        rng_key: a JAX key.
        start: a mixture of one component.
        target: `target(arrays)` has the log density.
        arrays: see `target`.
        num_points: draws of a round.
    """
    best, log_evidence, component, bound, spent = start, -np.inf, start, -np.inf, 0
    for key in random.split(rng_key, 15):
        z, score, log_weight = _scored_draws(key, component, arrays, target, num_points)
        spent += GRADIENT * num_points
        if not float(log_weight.mean()) > bound + 0.1:
            break
        bound = float(log_weight.mean())
        best, log_evidence = component, float(jax.nn.logsumexp(log_weight) - np.log(num_points))
        component = score_matched(component, z, score)
    return best, log_evidence, spent


@partial(jax.jit, static_argnames=("target", "num_points"))
def _scored_draws(
    rng_key: Array, component: NormalMixture, arrays: Any, target: Callable, num_points: int
) -> tuple[Array, Array, Array]:
    family = NormalSummary(component.mean.shape[1])
    z = jax.vmap(lambda key: family.draw(key, component))(random.split(rng_key, num_points))
    value, score = with_scores(z, arrays, target)
    return z, score, value - jax.vmap(lambda z: family.log_density(component, z))(z)


@partial(jax.jit, static_argnames="target")
def with_scores(
    z: Float[Array, "point size"], arrays: Any, target: Callable
) -> tuple[Float[Array, " point"], Float[Array, "point size"]]:
    """Log densities and scores at vectors, one at a time, since each takes all rows."""
    densities = target(arrays)
    return jax.lax.map(jax.value_and_grad(lambda z: sum(densities(z))), z)


@partial(jax.jit, static_argnames=("family", "target", "num_points"))
def weighted_draws(
    rng_key: Array,
    family: Summary,
    mixture: Any,
    arrays: Any,
    target: Callable,
    num_points: int,
) -> tuple[Float[Array, "draw size"], Float[Array, " draw"]]:
    """Draws from a mixture of a family, and their log importance weights for the target."""
    densities = target(arrays)
    z = jax.vmap(lambda key: family.draw(key, mixture))(random.split(rng_key, num_points))
    return z, jax.lax.map(lambda z: sum(densities(z)) - family.log_density(mixture, z), z)


def is_within(z: Float[Array, " size"], component: NormalMixture) -> bool:
    """Whether a vector is within about two standard deviations of a Normal, in each direction."""
    away = np.asarray(component.whitening[0] @ (z - component.mean[0]))
    return bool(away @ away < 2.0**2 * (len(away) + 5))


def combined(
    found: list[NormalMixture], log_evidence: list[float], num_places: int
) -> NormalMixture:
    """A mixture of up to `num_places` Normals in proportion to their evidence.

    Normals are left out that hold less than e^-7 of the evidence, or whose centre has nearly the
    same density under a heavier one.
    """
    family = NormalSummary(found[0].mean.shape[1])
    log_share = np.array(log_evidence)
    if not np.isfinite(log_share).any():
        return family.empty(num_places)
    log_share = log_share - np.logaddexp.reduce(log_share)
    kept: list[int] = []
    for number in np.argsort(-log_share):
        own = found[number]
        others = [found[other] for other in kept]
        at_centre = [float(family.log_density(each, own.mean[0])) for each in (own, *others)]
        if log_share[number] > -7 and max(at_centre[1:], default=-np.inf) < at_centre[0] - 0.7:
            kept.append(int(number))
    kept = kept[:num_places]
    rest = family.empty(num_places - len(kept))
    parts = [found[number] for number in kept]
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts, rest)
    weight = jnp.asarray(log_share[kept] - np.logaddexp.reduce(log_share[kept]))
    return whole._replace(log_weight=jnp.concatenate([weight, rest.log_weight]))


@partial(jax.jit, static_argnames="target")
def walk_outwards(
    rng_key: Array,
    z: Float[Array, "walker size"],
    log_weight: Float[Array, " walker"],
    arrays: Any,
    target: Callable,
) -> tuple[Float[Array, "walker size"], Array]:
    """Walkers after slice sampling of the target, and the evaluations that this took.

    Args:
        rng_key: a JAX key.
        z: weighted draws. They are first resampled by that power of their weights at which the
            effective sample size is half of their number.
        log_weight: of the draws.
        arrays: see `target`.
        target: `target(arrays)` has the log density.
    """
    parent_key, walk_key = random.split(rng_key)
    log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf)
    power = tempered(log_weight, next_exponent(log_weight, jnp.zeros((), z.dtype), 0.5))
    parent = systematic_parents(parent_key, jnp.exp(power - jax.nn.logsumexp(power)))
    densities = lambda z: (sum(target(arrays)(z)), jnp.zeros((), z.dtype))
    log_density, zero = jax.vmap(densities)(z)
    at, report = slice_moves(
        walk_key,
        Particles(z, log_density, zero, zero),
        parent,
        densities,
        num_sweeps=2.0,
        memory=0.25,
    )
    return at.z, report.evaluations
