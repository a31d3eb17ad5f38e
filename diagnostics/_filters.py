"""Checks of particle filters and of tempered sequential Monte Carlo.

A run is judged by completion, finite values, and the agreement of independent replicates on the
log-evidence. A small effective sample size, or few distinct ancestors, is no fault by itself: both
are small for a concentrated posterior.
"""

import json

import numpy as np
import xarray as xr

from diagnostics._evidence import (
    complete,
    finite_evidence,
    finite_likelihood,
    num_particles,
    steps_taken,
)
from diagnostics._nested import enough_draws, error_against_spread, walks
from diagnostics._verdict import Verdict, each_of, finite_draws, group_of

__all__ = ["DECISIVE", "smc_verdicts"]

DECISIVE = ("draws", "log-evidence", "evidence spread", "ended")
# effective particles, or distinct ancestors: with fewer, one step alone adds more than
# 1 / sqrt(10) = 0.3 to the error of the log-evidence
LEAST_PARTICLES = 10
MOST_SPREAD = 1.0  # of the log-evidence, in nats


def smc_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """Return all checks of a particle filter or of tempered SMC.

    With tempering, particles are resampled at every step and moved by random walks. The walks are
    then checked in place of resamplings and ancestors.
    """
    finite = [finite_draws(tree), finite_evidence(tree), *finite_likelihood(tree)]
    is_tempered = "exponent" in group_of(tree, "sample_stats")
    own = (
        [walks(tree), error_against_spread(tree), _effective(tree)]
        if is_tempered
        else [_resamplings(tree), _histories(tree)]
    )
    return [*finite, _spread(tree), _ess_path(tree), *own, complete(tree)]


def _is_optimal(tree: xr.DataTree) -> bool:
    """Optimal resampling keeps the candidates of largest weight (Fearnhead and Clifford 2003)."""
    settings = json.loads(str(tree.attrs.get("kernel_settings", "{}")))
    return any(
        key.endswith("ParticleFilter.resampling") and value == "optimal"
        for key, value in settings.items()
    )


def _paths(tree: xr.DataTree, name: str) -> list[np.ndarray]:
    values = group_of(tree, "sample_stats")[name].transpose("chain", "step").values
    return [each[:steps] for each, steps in zip(values, steps_taken(tree), strict=True)]


def _ess_path(tree: xr.DataTree) -> Verdict:
    name, paths, size = "ESS path", _paths(tree, "ess"), num_particles(tree)
    every = np.concatenate(paths)
    if not len(every):
        return Verdict(name, False, {"steps": 0}, "No steps were taken.")
    if not np.isfinite(every).all():
        return Verdict(
            name,
            False,
            {"NaN or infinite": int((~np.isfinite(every)).sum())},
            "The ESS is not finite.",
        )
    worst = paths[int(np.argmin([path.min() for path in paths]))]
    step, least = int(worst.argmin()), float(worst.min())
    figures = {"least": least, "at step": step, "median": float(np.median(every))} | (
        {} if size is None else {"particles": size}
    )
    if _is_optimal(tree):
        reason = (
            'Not judged: resampling="optimal" keeps the candidates of largest weight, so that an '
            "ESS near 1 may belong to the posterior."
        )
        return Verdict(name, None, figures, reason)
    if least < LEAST_PARTICLES:
        reason = (
            f"At step {step} the ESS is below {LEAST_PARTICLES}: take more particles, or a better "
            "proposal."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, f"At least {LEAST_PARTICLES} effective particles at every step."
    )


def _effective(tree: xr.DataTree) -> Verdict:
    """Effective sample size of the last weights, which the draws are resampled by, summed over
    replicates.
    """
    count = float(sum(path[-1] for path in _paths(tree, "ess") if len(path)))
    return enough_draws(count)


def _resamplings(tree: xr.DataTree) -> Verdict:
    name, size = "resamplings", num_particles(tree)
    if "resampled" not in group_of(tree, "sample_stats"):
        return Verdict(name, None, {}, "`resampled` is not in the tree.")
    happened = [each.astype(bool) for each in _paths(tree, "resampled")]
    figures = {
        "a replicate": [int(each.sum()) for each in happened],
        "steps": max(map(len, happened)),
    }
    if _is_optimal(tree):
        return Verdict(name, None, figures, "Rows at which candidates were resampled; not judged.")
    if size is None:
        return Verdict(name, None, figures, "The number of particles is not in the tree.")
    if any(
        np.any((path < size / 10) & ~each)
        for path, each in zip(_paths(tree, "ess"), happened, strict=True)
    ):
        return Verdict(
            name,
            False,
            figures,
            "Steps with an ESS below a tenth of the particles were not followed by a resampling.",
        )
    return Verdict(name, True, figures, "Resampled at every step with uneven weights.")


def _histories(tree: xr.DataTree) -> Verdict:
    """Distinct ancestors of the final particles, which represent the posterior of early rows."""
    name, counts = "unique ancestors", _ancestors(tree)
    if not counts:
        return Verdict(
            name,
            None,
            {},
            "Neither the group `ancestry` nor `ancestor` or `unique_ancestors` over steps is in "
            "the tree.",
        )
    left = [int(each[0]) for each in counts]
    enough = [
        int(np.argmax(each >= LEAST_PARTICLES)) if (each >= LEAST_PARTICLES).any() else len(each)
        for each in counts
    ]
    figures = {"left": left}
    if not max(enough):
        return Verdict(
            name,
            True,
            figures,
            f"The final particles have at least {LEAST_PARTICLES} ancestors at the first row.",
        )
    rows = f"rows before {max(enough)}" if max(enough) < max(map(len, counts)) else "any row"
    reason = (
        f"The posterior of {rows} rests on fewer than {LEAST_PARTICLES} distinct ancestors. This "
        "affects neither the evidence nor predictions. For the partition of those rows use more "
        "particles, `rejuvenate`, or replicates."
    )
    return Verdict(
        name,
        None,
        figures,
        reason,
    )


def _ancestors(tree: xr.DataTree) -> list[np.ndarray] | None:
    """Distinct ancestors of the final particles at each row, an array for each replicate.

    The array has one entry, for the first row, where the tree has no more.
    """
    stats, recorded = group_of(tree, "sample_stats"), group_of(tree, "ancestry")
    if "unique_ancestors" in recorded:
        return list(recorded["unique_ancestors"].transpose("chain", ...).values)
    if "ancestor" in stats:
        parents = stats["ancestor"].transpose("chain", "step", ...).values.astype(int)
        return [
            _distinct(each[:steps])
            for each, steps in zip(parents, steps_taken(tree), strict=True)
            if steps
        ]
    if "unique_ancestors" in stats:
        return [path[-1:] for path in _paths(tree, "unique_ancestors") if len(path)]
    return None


def _distinct(parents: np.ndarray) -> np.ndarray:
    """Number of distinct ancestors of the last step's particles at each step, [step]."""
    alive, counts = np.arange(parents.shape[1]), [parents.shape[1]]
    for step in parents[:0:-1]:
        alive = np.unique(step[alive])
        counts.append(len(alive))
    return np.array(counts[::-1])


def _spread(tree: xr.DataTree) -> Verdict:
    each, name = each_of(tree, "log_evidence"), "evidence spread"
    if len(each) < 2:
        return Verdict(
            name,
            None,
            {},
            "Unknown without replicates: the error of the log-evidence. Run with num_chains above "
            "1.",
        )
    if not np.isfinite(each).all():
        return Verdict(name, None, {}, "Unknown: the log-evidence of a replicate is not finite.")
    sd = float(np.std(each, ddof=1))
    figures = {"sd": sd, "replicates": len(each)}
    if sd >= MOST_SPREAD:
        reason = (
            f"The standard deviation of the replicates' log-evidences is above {MOST_SPREAD:g}, "
            "too large to rank models. Take more particles."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, f"Replicates agree on the log-evidence to less than {MOST_SPREAD:g}."
    )
