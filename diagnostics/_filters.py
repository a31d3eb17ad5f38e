"""Checks of particle filters (SMC), and of particles that go from one distribution to the next by
exponents.

What decides: the run finished, its numbers are finite, and independent replicates agree on the
log-evidence. Few effective particles, and few histories among them, are no fault by themselves: a
posterior that is concentrated has few.
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
from diagnostics._nested import error_against_spread, walks
from diagnostics._verdict import Verdict, each_of, finite_draws, group_of

__all__ = ["DECISIVE", "smc_verdicts"]

DECISIVE = ("draws", "log-evidence", "evidence spread", "ended")
# of particles or of histories: below, one step alone adds 1 / sqrt(10) = 0.3 to the error of the
# log-evidence
FEWEST = 10
SPREAD = 1.0


def smc_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a particle filter.

    Of particles that are resampled at every step and walk, histories say nothing, and walks do.
    """
    finite = [finite_draws(tree), finite_evidence(tree), *finite_likelihood(tree)]
    is_tempered = "exponent" in group_of(tree, "sample_stats")
    own = (
        [walks(tree), error_against_spread(tree)]
        if is_tempered
        else [_resamplings(tree), _histories(tree)]
    )
    return [*finite, _spread(tree), _ess_path(tree), *own, complete(tree)]


def _keeps_the_best(tree: xr.DataTree) -> bool:
    """Whether the resampling keeps the best candidates as they are, with their weights
    (Fearnhead and Clifford 2003).
    """
    settings = json.loads(str(tree.attrs.get("kernel_settings", "{}")))
    return any(
        key.endswith("ParticleFilter.resampling") and value == "optimal"
        for key, value in settings.items()
    )


def _paths(tree: xr.DataTree, name: str) -> list[np.ndarray]:
    """A statistic over the steps that each replicate took."""
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
    if _keeps_the_best(tree):
        reason = (
            'No judgement: resampling="optimal" keeps the best candidates as they are, so that '
            "an ESS near 1 may be the posterior's own."
        )
        return Verdict(name, None, figures, reason)
    if least < FEWEST:
        reason = (
            f"At step {step} fewer than {FEWEST} particles carry the weight: more particles, "
            "or a better proposal."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(name, True, figures, f"At least {FEWEST} effective particles at every step.")


def _resamplings(tree: xr.DataTree) -> Verdict:
    name, size = "resamplings", num_particles(tree)
    if "resampled" not in group_of(tree, "sample_stats"):
        return Verdict(name, None, {}, "`resampled` is not in the tree.")
    happened = [each.astype(bool) for each in _paths(tree, "resampled")]
    figures = {
        "a replicate": [int(each.sum()) for each in happened],
        "steps": max(map(len, happened)),
    }
    if _keeps_the_best(tree):
        return Verdict(
            name, None, figures, "Rows at which candidates had to be left to chance; no judgement."
        )
    if size is None:
        return Verdict(name, None, figures, "How many particles there are is not in the tree.")
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
    return Verdict(name, True, figures, "Resampled wherever the weights had become uneven.")


def _histories(tree: xr.DataTree) -> Verdict:
    """How many ancestors the particles of the end have: what is said of the first rows rests on
    those.
    """
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
        int(np.argmax(each >= FEWEST)) if (each >= FEWEST).any() else len(each) for each in counts
    ]
    figures = {"left": left}
    if not max(enough):
        return Verdict(
            name, True, figures, f"At least {FEWEST} histories reach back to the first row."
        )
    rows = f"rows before {max(enough)}" if max(enough) < max(map(len, counts)) else "any row"
    reason = (
        f"What is said of {rows} rests on fewer than {FEWEST} histories. That is no fault of "
        "the evidence or of predictions; for the "
    )
    return Verdict(
        name,
        None,
        figures,
        reason + "partition of those rows use more particles, `rejuvenate`, or replicates.",
    )


def _ancestors(tree: xr.DataTree) -> list[np.ndarray] | None:
    """For each replicate [row]: distinct ancestors there of the particles of the end; [0] alone
    where only those are known.
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
    """[step]: how many particles of that step the particles of the last step come from."""
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
            "Unknown without replicates: how far the log-evidence may be off. Run with num_chains "
            "above 1.",
        )
    if not np.isfinite(each).all():
        return Verdict(name, None, {}, "Unknown: the log-evidence of a replicate is not finite.")
    sd = float(np.std(each, ddof=1))
    figures = {"sd": sd, "replicates": len(each)}
    if sd >= SPREAD:
        reason = (
            f"Log-evidences of replicates spread by over {SPREAD:g}: one of them cannot rank "
            "models. More particles."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, f"Replicates agree on the log-evidence to less than {SPREAD:g}."
    )
