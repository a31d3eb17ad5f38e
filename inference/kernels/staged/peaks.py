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
Targets that compare equal are compiled once: `values` without scores, and `with_scores`. All else
is NumPy.

Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei and Saul (2024), "Batch and match: black-box
variational inference with a score-based divergence", without their regularisation towards the
Normal before; Center (2009), "Learning complex classification models from large data sets", for
walkers and slice sampling outwards. Cost: a gradient for each step of a climb; points x rounds
gradients of batch and match; for walks, walkers x dimensions x about 10 evaluations.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Float, Int
from scipy.optimize import minimize

from inference.maths.host import Array, generator, in_chunks
from inference.maths.normal_mixture import NormalMixture, NormalSummary, score_matched
from inference.maths.resampling import next_exponent, systematic_parents, tempered
from inference.maths.slice_walk import Particles, slice_moves
from inference.program.compiling import compiled

__all__ = [
    "CURVATURE",
    "GRADIENT",
    "LEAST",
    "batch_and_match",
    "combined",
    "distinct",
    "find_peaks",
    "is_within",
    "laplace",
    "values",
    "walk_outwards",
    "with_scores",
    "worthwhile",
]

GRADIENT = 3  # evaluations that a gradient costs
CURVATURE = 4 * GRADIENT  # evaluations, times the size, that the curvature at a peak costs
LEAST = 20  # walkers that climb in any case
LEVEL = 0.5  # nats within which peaks are equally high


def find_peaks(
    start: Float[np.ndarray, "walker size"],
    target: Callable,
    arrays: Any,
    least: int = LEAST,
    often: int = 5,
) -> tuple[Float[np.ndarray, "walker size"], np.ndarray, int]:
    """Climbs by L-BFGS, until the highest peak has been found often enough.

    Returned are the ends of the climbs, their log densities, and the number of evaluations.

    Args:
        start: where walkers begin, one after the other.
        target: `target(arrays)` has the log density.
        arrays: see `target`.
        least: walkers that climb in any case.
        often: walkers that must have come to the highest peak.
    """
    dtype = start.dtype
    scored = _scores_of(start.shape[1], dtype, arrays, target)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, score = scored(z[None])
        return -float(value[0]), -np.asarray(score[0], float)

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
    return np.array(z).astype(dtype), np.array(height), evaluations


CHUNK = 100  # vectors of one call


def values(z: Float[np.ndarray, "point size"], arrays: Any, target: Callable) -> np.ndarray:
    """The two values [2, point] of a target at vectors."""
    code = _code(_values, target, arrays, np.zeros((CHUNK, z.shape[1]), z.dtype))
    return in_chunks(partial(code, arrays), z, CHUNK).T


def with_scores(
    z: Float[np.ndarray, "point size"], arrays: Any, target: Callable
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "point size"]]:
    """Log densities and scores at vectors."""
    return _scores_of(z.shape[1], z.dtype, arrays, target)(z)


def _scores_of(size: int, dtype: Any, arrays: Any, target: Callable) -> Callable:
    """`with_scores` as a function of vectors, which finds its compiled code once."""
    code = _code(_with_scores, target, arrays, np.zeros((CHUNK, size), dtype), np.int32(0))
    return lambda z: in_chunks(partial(code, arrays), z.astype(dtype), CHUNK, counts=True)


def _code(function: Callable, target: Callable, *arguments: Any) -> Callable:
    leaves, form = jax.tree.flatten(arguments)
    types = [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    return _compiled(function, target, form, *types)


@lru_cache(16)
def _compiled(function: Callable, target: Callable, form: Any, *types: Any) -> Callable:
    like = jax.tree.unflatten(form, [np.zeros(*each) for each in types])
    return compiled(partial(function, target), *like)


def _values(target: Callable, arrays: Any, z: Array) -> Array:
    densities = target(arrays)
    # one at a time, since each takes all rows
    return jax.lax.map(lambda z: jnp.stack(densities(z)), z)


def _with_scores(
    target: Callable, arrays: Any, z: Float[Array, "point size"], count: Int[Array, ""]
) -> tuple[Float[Array, " point"], Float[Array, "point size"]]:
    """For the first `count` vectors."""
    densities = target(arrays)
    both = jax.value_and_grad(lambda z: sum(densities(z)))

    def one(place: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.tree.map(lambda into, new: into.at[place].set(new), found, both(z[place]))

    return jax.lax.fori_loop(0, count, one, (jnp.zeros(len(z), z.dtype), jnp.zeros_like(z)))


def distinct(
    peaks: Float[np.ndarray, "peak size"],
    height: np.ndarray,
    deviation: Float[np.ndarray, " size"],
    most: int,
) -> tuple[Float[np.ndarray, "peak size"], np.ndarray]:
    """The highest peaks that are different, and their heights.

    Args:
        peaks: some of them the same.
        height: their log densities.
        deviation: standard deviations of the starts; peaks within a twentieth of them are the same.
        most: how many are kept.
    """
    kept: list[int] = []
    reach = 0.05 * deviation
    is_same = lambda one, other: (
        abs(height[one] - height[other]) < LEVEL
        and bool(np.all(np.abs(peaks[one] - peaks[other]) < reach))
    )
    for number in np.argsort(-height):
        is_new = np.isfinite(height[number]) and len(kept) < most
        if is_new and not any(is_same(number, other) for other in kept):
            kept.append(int(number))
    return peaks[np.array(kept, int)], height[kept]


def laplace(
    peak: Float[np.ndarray, " size"],
    start: Float[np.ndarray, "walker size"],
    arrays: Any,
    target: Callable,
) -> NormalMixture:
    """The Laplace approximation at a peak, in no direction wider than the starts of the walkers.

    The curvature is a difference of scores: over a part of the width of the starts, and then over
    that part of the width that the first difference gives.
    """
    dtype, size = start.dtype, len(peak)
    widest = 1 / np.maximum(start.var(0), np.finfo(dtype).tiny)
    curvature = np.zeros((size, size))
    for _ in range(2):
        least = np.maximum(np.abs(np.diagonal(curvature)), widest)
        step = np.diag(np.cbrt(np.finfo(dtype).eps) / np.sqrt(least))
        around = np.concatenate([peak + step, peak - step]).astype(dtype)
        score = np.asarray(with_scores(around, arrays, target)[1], float)
        width = np.diagonal(around[:size].astype(float) - around[size:])
        curvature = (score[size:] - score[:size]) / width[:, None]
        if not np.isfinite(curvature).all():
            curvature = np.zeros_like(curvature)
    value, vector = np.linalg.eigh((curvature + curvature.T) / 2)
    variance = np.mean(((start - start.mean(0)) @ vector) ** 2, 0)
    value = np.maximum(np.abs(value), 1 / np.maximum(variance, np.finfo(dtype).tiny))
    upper = np.linalg.qr((vector / np.sqrt(value)).T, mode="r")
    root = upper.T * np.sign(np.diagonal(upper))
    return NormalMixture.of(np.zeros(1, dtype), peak[None], root[None].astype(dtype))


def worthwhile(approximations: list[NormalMixture], height: np.ndarray) -> list[NormalMixture]:
    """The Laplace approximations that may hold a part of the evidence, given their peaks' heights.

    The Laplace evidence of a peak may be wrong by 30 nats.
    """
    log_det = [np.log(np.diagonal(each.whitening[0])).sum() for each in approximations]
    log_evidence = height - np.array(log_det)
    is_enough = log_evidence > log_evidence.max(initial=-np.inf) - 30
    return [each for each, enough in zip(approximations, is_enough, strict=True) if enough]


def batch_and_match(
    rng_key: Any, start: NormalMixture, target: Callable, arrays: Any, num_points: int
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
    rng, family = generator(rng_key), NormalSummary(start.mean.shape[1])
    best, log_evidence, component, bound, spent = start, -np.inf, start, -np.inf, 0
    for _ in range(15):
        z = family.draws(rng, component, num_points).astype(component.mean.dtype)
        value, score = with_scores(z, arrays, target)
        log_weight = value - family.log_densities(component, z)
        spent += GRADIENT * num_points
        if not log_weight.mean() > bound + 0.1:
            break
        bound = float(log_weight.mean())
        log_evidence = float(np.logaddexp.reduce(log_weight) - np.log(num_points))
        best, component = component, score_matched(component, z, score)
    return best, log_evidence, spent


def is_within(z: Float[np.ndarray, " size"], component: NormalMixture) -> bool:
    """Whether a vector is within about two standard deviations of a Normal, in each direction."""
    away = component.whitening[0] @ (z - component.mean[0])
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
        at_centre = [family.log_densities(each, own.mean)[0] for each in (own, *others)]
        if log_share[number] > -7 and max(at_centre[1:], default=-np.inf) < at_centre[0] - 0.7:
            kept.append(int(number))
    kept = kept[:num_places]
    rest = family.empty(num_places - len(kept))
    parts = [found[number] for number in kept]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts, rest)
    weight = log_share[kept] - np.logaddexp.reduce(log_share[kept])
    log_weight = np.concatenate([weight, rest.log_weight])
    return whole._replace(log_weight=log_weight.astype(rest.log_weight.dtype))


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
