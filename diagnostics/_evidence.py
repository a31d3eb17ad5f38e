"""Checks shared by particle filters and nested samplers: completion, finite evidence, steps."""

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, attribute, each_of, early_end, group_of

__all__ = ["complete", "finite_evidence", "finite_likelihood", "num_particles", "steps_taken"]


def complete(tree: xr.DataTree) -> Verdict:
    """Check that the run finished; before that, part of the evidence is missing."""
    ended = early_end(tree)
    if not ended.ok or tree.attrs["ended"] == "finished":
        return ended
    way = {"budget": "its budget (num_warmup)", "stop": "its stop rule"}.get(
        str(tree.attrs["ended"]), f"{tree.attrs['ended']!r}"
    )
    return ended._replace(
        ok=False,
        reason=f"Ended by {way} before it had finished: there is no evidence yet, and the draws "
        "are not of the posterior. `Driver.extend` goes on.",
    )


def finite_evidence(tree: xr.DataTree) -> Verdict:
    """Check that the log-evidence of the run and of every replicate is finite."""
    name, each = "log-evidence", each_of(tree, "log_evidence")
    whole = attribute(tree, "log_evidence")
    if "unfinished" in tree.children:
        return Verdict(name, None, {}, "Unknown before the end of the run.")
    if whole is None:
        return Verdict(name, None, {}, 'attrs["log_evidence"] is not in the tree.')
    bad = np.flatnonzero(~np.isfinite(each)).tolist()
    if bad or not np.isfinite(whole):
        reason = "Not finite: every particle gives some data probability 0, or a density overflows."
        return Verdict(name, False, {"of the run": whole, "replicates": bad}, reason)
    return Verdict(name, True, {"of the run": whole}, "Finite in every replicate.")


def finite_likelihood(tree: xr.DataTree) -> list[Verdict]:
    """Check that no likelihood was NaN; no verdict where the kernel does not count NaN."""
    stats = group_of(tree, "sample_stats")
    if "num_nan" not in stats:
        return []
    count = [
        [
            int(each[:steps].sum())
            for each, steps in zip(
                stats[of].transpose("chain", "step").values, steps_taken(tree), strict=True
            )
        ]
        for of in ("num_nan", "evaluations")
    ]
    figures = {"NaN": sum(count[0]), "evaluations": sum(count[1])}
    if figures["NaN"]:
        reason = (
            "NaN at some parameters, which were given likelihood 0. If that is wrong, the evidence "
            "is too small."
        )
        return [Verdict("likelihood", None, figures, reason)]
    return [Verdict("likelihood", True, figures, "Never NaN.")]


def steps_taken(tree: xr.DataTree) -> np.ndarray:
    """Return the number of steps of each replicate, [replicate].

    A replicate that has finished repeats its last row until all others have finished.
    """
    stats = group_of(tree, "sample_stats")
    over = [
        values.transpose("chain", "step", ...).values
        for values in stats.data_vars.values()
        if "step" in values.dims
    ]
    is_new = np.zeros(over[0].shape[:2], bool)
    is_new[:, :1] = True
    for values in over:
        now, before = values[:, 1:], values[:, :-1]
        same = (now == before) | ((now != now) & (before != before))  # NaN repeats NaN
        is_new[:, 1:] |= ~same.all(axis=tuple(range(2, same.ndim)))
    return np.array([np.flatnonzero(each)[-1] + 1 if each.size else 0 for each in is_new])


def num_particles(tree: xr.DataTree) -> int | None:
    """Return the number of particles of a filter; None where the tree does not show it."""
    particles, stats = group_of(tree, "particles"), group_of(tree, "sample_stats")
    if "log_weight" in particles:
        return int(particles["log_weight"].transpose("chain", ...).shape[-1])
    return (
        int(stats["ancestor"].transpose("chain", "step", ...).shape[-1])
        if "ancestor" in stats
        else None
    )
