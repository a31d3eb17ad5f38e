"""What runs that estimate an evidence have in common: did they finish, is the evidence a number,
how many steps did each take.
"""

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, attribute, each_of, early_end, group_of

__all__ = ["complete", "finite_evidence", "finite_likelihood", "num_particles", "steps_taken"]


def complete(tree: xr.DataTree) -> Verdict:
    """Whether the run read all of its data, or all of its evidence: a part of either is no
    answer.
    """
    ended = early_end(tree)
    if not ended.ok or tree.attrs["ended"] == "finished":
        return ended
    way = {"budget": "its budget (num_warmup)", "stop": "its stop rule"}.get(
        str(tree.attrs["ended"]), f"{tree.attrs['ended']!r}"
    )
    return ended._replace(
        ok=False, reason=f"Ended by {way} before it had finished: part of the evidence is missing."
    )


def finite_evidence(tree: xr.DataTree) -> Verdict:
    """Whether the log-evidence of the run, and of every replicate, is a number."""
    name, each, whole = (
        "log-evidence",
        each_of(tree, "log_evidence"),
        attribute(tree, "log_evidence"),
    )
    if whole is None:
        return Verdict(name, None, {}, 'attrs["log_evidence"] is not in the tree.')
    bad = np.flatnonzero(~np.isfinite(each)).tolist()
    if bad or not np.isfinite(whole):
        reason = "Not finite: no particle explains some of the data, or a density overflows."
        return Verdict(name, False, {"of the run": whole, "replicates": bad}, reason)
    return Verdict(name, True, {"of the run": whole}, "Finite in every replicate.")


def finite_likelihood(tree: xr.DataTree) -> list[Verdict]:
    """Whether the likelihood was NaN where walks came to; nothing of kernels that do not count
    it.
    """
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
            "Unknown: it was NaN at some parameters, which count as impossible. If they are "
            "not, the evidence is too small."
        )
        return [Verdict("likelihood", None, figures, reason)]
    return [
        Verdict("likelihood", True, figures, "A number, or impossible, wherever walks have looked.")
    ]


def steps_taken(tree: xr.DataTree) -> np.ndarray:
    """[replicate]: steps until it had finished; from then on it repeats its last row until all
    others have, too.
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
    """Particles of a filter, where the tree shows them."""
    particles, stats = group_of(tree, "particles"), group_of(tree, "sample_stats")
    if "log_weight" in particles:
        return int(particles["log_weight"].transpose("chain", ...).shape[-1])
    return (
        int(stats["ancestor"].transpose("chain", "step", ...).shape[-1])
        if "ancestor" in stats
        else None
    )
