"""Checks of nested samplers."""

import json
import warnings

import numpy as np
import xarray as xr

from diagnostics._evidence import complete, finite_evidence, finite_likelihood, steps_taken
from diagnostics._psis import good_k, psis
from diagnostics._verdict import Verdict, attribute, each_of, finite_draws, group_of

__all__ = ["DECISIVE", "error_against_spread", "insertion_rank_test", "nested_verdicts", "walks"]

DECISIVE = ("draws", "log-evidence", "insertion ranks", "effective draws", "ended", "importance")
ALPHA, DRAWS = 0.01, 100
LEFT = 0.35  # correlation of a new point with its origin, in the worst replicate
LEAST_ESS = 50  # importance draws: the spread of the weights of fewer is no error
NO_WEIGHT = 700.0  # nats below the largest weight: as good as none
# nats a summary: with 2.3 each, in fifty stages of diamonds, 3 % of new numbers were in intervals
# of 90 %
MOST_LOST = 1.0
LEAST_ERROR = 1e-12  # a claimed error of zero: any spread is beyond it


def nested_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a nested sampler."""
    finite = [finite_draws(tree), finite_evidence(tree), *finite_likelihood(tree)]
    own = [
        _insertion(tree),
        walks(tree),
        _information(tree),
        error_against_spread(tree),
        _effective(tree),
    ]
    if len(each_of(tree, "summary_loss")):
        own.append(_summaries(tree))
    elif len(_nested_errors(tree)):
        own.append(_importance(tree))
    return [*finite, *own, complete(tree)]


def insertion_rank_test(ranks: np.ndarray, num_live: int) -> float:
    """p-value of the ranks at which new points were inserted among `num_live` live ones, [step];
    they are uniform on 0..n-1.

    A Kolmogorov-Smirnov test over the whole run, and one over each stretch of `num_live` steps (a
    fault may be brief) with p = 1 - (1 - min p)^k; the smaller of the two, doubled. Negative and
    NaN ranks are steps without an insertion. Conservative, for ranks are discrete. Fowlie, Handley
    and Su (2020), MNRAS 497; cost: a sort.
    """
    ranks = np.asarray(ranks, float).ravel()
    ranks = ranks[np.isfinite(ranks) & (ranks >= 0)].astype(int)
    if not len(ranks):
        return float("nan")
    if ranks.max() >= num_live:
        raise ValueError(
            f"insertion_rank: the largest is {ranks.max()}, among num_live={num_live} points it is "
            f"at most {num_live - 1}."
        )
    stretches = [ranks[i : i + num_live] for i in range(0, len(ranks) - num_live + 1, num_live)]
    rolling = (
        1 - (1 - min(_uniform_p(part, num_live) for part in stretches)) ** len(stretches)
        if len(stretches) > 1
        else 1.0
    )
    whole = _uniform_p(ranks, num_live)
    return min(1.0, 2 * min(whole, rolling) if len(stretches) > 1 else whole)


def _uniform_p(ranks: np.ndarray, num_live: int) -> float:
    from scipy.stats import kstwo

    seen = np.cumsum(np.bincount(ranks, minlength=num_live)) / len(ranks)
    gap = np.max(np.abs(seen - np.arange(1, num_live + 1) / num_live))
    return float(kstwo.sf(gap, len(ranks))) if gap > 0 else 1.0


def _num_live(tree: xr.DataTree) -> int | None:
    stats = group_of(tree, "sample_stats")
    if len(recorded := each_of(tree, "num_live")):
        return int(recorded.max())
    if "num_live" in stats:
        return int(stats["num_live"].max())
    settings = json.loads(str(tree.attrs.get("kernel_settings", "{}")))
    found = [value for key, value in settings.items() if key.endswith(".num_live")]
    return int(found[0]) if found else None


def _insertion(tree: xr.DataTree) -> Verdict:
    name, size = "insertion ranks", _num_live(tree)
    ranks = group_of(tree, "sample_stats")["insertion_rank"].transpose("chain", "step", ...).values
    if size is None:
        return Verdict(
            name, None, {}, 'attrs["num_live"] is not in the tree: ranks mean nothing without it.'
        )
    taken = [each[:steps] for each, steps in zip(ranks, steps_taken(tree), strict=True)]
    found = np.array([insertion_rank_test(each, size) for each in taken])
    known = found[~np.isnan(found)]
    if not known.size:
        return Verdict(name, None, {}, "No step of any replicate has a rank.")
    p = min(1.0, float(known.min()) * len(known))
    figures = {"p": p, "insertions": int(sum((each >= 0).sum() for each in taken))}
    if not p >= ALPHA:
        reason = (
            "New points are not drawn uniformly from the prior above the limit: the evidence "
            "is biased. More steps a point."
        )
        return Verdict(name, False, figures, reason)
    if without := np.flatnonzero(np.isnan(found)).tolist():
        return Verdict(
            name,
            None,
            figures | {"without ranks": without},
            "Uniform where there are ranks; some replicates have none.",
        )
    return Verdict(
        name,
        True,
        figures,
        f"Uniform (Kolmogorov-Smirnov, whole run and stretches, p >= {ALPHA:g}).",
    )


def walks(tree: xr.DataTree) -> Verdict:
    """Whether new points forget where their walks began.

    Squared distances grow as 1 - c, with c the correlation that is left: half of the steps over all
    of them is (1 - sqrt(c)) / (1 - c), which tells c, however far apart points are.
    """
    name, stats = "walks", group_of(tree, "sample_stats")
    if "halfway" not in stats:
        return Verdict(
            name,
            None,
            {},
            "`halfway` is not in sample_stats: nothing says how far new points are from their "
            "origins.",
        )
    each = stats["halfway"].transpose("chain", "step").values
    taken = [row[:steps] for row, steps in zip(each, steps_taken(tree), strict=True)]
    least = min((row.mean() for row in taken if len(row)), default=np.nan)
    left = float(np.clip(1 / least - 1, 0, 1) ** 2) if least > 0 else float("nan")
    figures = {"correlation": left}
    if not left <= LEFT:
        reason = (
            "New points are too near to where their walks began: the evidence is off by more "
            "than is claimed. More steps a point."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name,
        True,
        figures,
        f"New points forget where their walks began (correlation at most {LEFT:g}).",
    )


def _nested_errors(tree: xr.DataTree) -> np.ndarray:
    """[replicate]: claimed errors of live points alone, of runs in stages or finished by
    importance sampling; empty for others.
    """
    nested, lost = each_of(tree, "nested_log_evidence_se"), each_of(tree, "nested_summary_error")
    return np.sqrt(np.maximum(nested**2 - lost**2, 0)) if len(lost) else nested


def _information(tree: xr.DataTree) -> Verdict:
    each, size, nested = each_of(tree, "information"), _num_live(tree), _nested_errors(tree)
    claimed = nested if len(nested) else each_of(tree, "log_evidence_se")
    if not len(each) or size is None:
        return Verdict(
            "information", None, {}, 'attrs["information"] or attrs["num_live"] is not in the tree.'
        )
    if not np.isfinite(each).all():
        return Verdict("information", False, {"nats": each}, "The information is not finite.")
    expected = float(np.sqrt(max(each.mean(), 0.0) / size))
    figures = {"nats": float(each.mean()), "error it implies": expected}
    if not len(claimed) or len(each) != len(claimed):
        return Verdict(
            "information",
            None,
            figures,
            "No error of the log-evidence in the tree to compare with sqrt(H / n).",
        )
    if not np.isfinite(claimed).all():
        return Verdict(
            "information",
            None,
            figures,
            "Unknown: no error of the log-evidence is claimed, as of a run that was ended early.",
        )
    if not expected / 3 <= claimed.mean() <= 3 * max(expected, 1e-300):
        reason = (
            f"The claimed error {claimed.mean():.3g} is over three times away from "
            "sqrt(information / live points)."
        )
        return Verdict("information", False, figures, reason)
    return Verdict(
        "information",
        True,
        figures | {"claimed": float(claimed.mean())},
        "The claimed error is that of sqrt(information / live points).",
    )


def error_against_spread(tree: xr.DataTree) -> Verdict:
    """Chi-squared of the replicates' log-evidences about their weighted mean, with the errors
    that they claim.
    """
    from scipy.stats import chi2

    name, each, errors = (
        "evidence error",
        each_of(tree, "log_evidence"),
        each_of(tree, "log_evidence_se"),
    )
    if len(each) < 2 or len(errors) != len(each):
        figures = (
            {"claimed": attribute(tree, "log_evidence_se")}
            if attribute(tree, "log_evidence_se") is not None
            else {}
        )
        return Verdict(
            name,
            None,
            figures,
            "Needs two replicates, each with its error: run with num_chains above 1.",
        )
    if not (np.isfinite(each).all() and np.isfinite(errors).all()):
        return Verdict(
            name,
            None,
            {"claimed": errors},
            "Unknown: a log-evidence or its claimed error is not finite.",
        )
    weights = 1 / np.maximum(errors, LEAST_ERROR) ** 2
    centre = np.sum(weights * each) / np.sum(weights)
    p = float(chi2.sf(np.sum(weights * (each - centre) ** 2), len(each) - 1))
    figures = {"claimed": float(errors.mean()), "spread": float(np.std(each, ddof=1)), "p": p}
    if not p >= ALPHA:
        reason = (
            "Replicates differ by more than the error that they claim: it is too small, or "
            "modes were missed. More points."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, "Replicates differ as much as the claimed error says, or less."
    )


def _effective(tree: xr.DataTree) -> Verdict:
    """Kish's (sum w)^2 / sum w^2 over all weighted particles of a replicate, summed over
    replicates.
    """
    from scipy.special import logsumexp

    particles = group_of(tree, "particles")
    if "log_weight" not in particles:
        return Verdict(
            "effective draws",
            None,
            {},
            "The group `particles` with `log_weight` is not in the tree.",
        )
    weights = particles["log_weight"].transpose("chain", ...).values
    weights = weights.reshape(len(weights), -1)
    with warnings.catch_warnings():
        # no weight at all: NaN, and it fails below
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)
        total = float(
            np.sum(np.exp(2 * logsumexp(weights, axis=1) - logsumexp(2 * weights, axis=1)))
        )
    if not total >= DRAWS:
        return Verdict(
            "effective draws",
            False,
            {"count": total},
            f"Fewer than {DRAWS}: the equally weighted posterior repeats few points.",
        )
    return Verdict(
        "effective draws",
        True,
        {"count": total},
        f"At least {DRAWS} distinct points carry the posterior.",
    )


def _summaries(tree: xr.DataTree) -> Verdict:
    """Of a kernel that learns in stages: how far its summaries are from what stages have found,
    and the last one from all rows.
    """
    name, worst, left = (
        "summaries",
        float(each_of(tree, "summary_loss").max()),
        each_of(tree, "nats_left"),
    )
    figures = {"nats each": worst, "limit": MOST_LOST}
    if weighed := left[~np.isnan(left)].tolist():
        figures["nats left"] = max(weighed)
    if not worst <= MOST_LOST:
        reason = (
            "What a stage hands to the next is too far from what it has found: the posterior is "
            "off as well. Allow more clumps "
            "(num_clumps), more live points (num_live), or fewer stages."
        )
        return Verdict(name, False, figures, reason)
    if np.isinf(each_of(tree, "log_evidence_se")).any():
        reason = (
            "Some rows lead to where the summary of those before says nothing, and what these said "
            "is forgotten: the posterior is that of "
            "the last rows, and the evidence may be anything. Learn from all rows at once."
        )
        return Verdict(name, False, figures, reason)
    if not max(weighed, default=0.0) <= MOST_LOST:
        reason = (
            "What was found is too far from the posterior of all rows: it has lost what these "
            "say. Allow more clumps, or fewer parts."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, "What a stage hands to the next says nearly what it has found."
    )


def _importance(tree: xr.DataTree) -> Verdict:
    """Of a nested sampler that was finished by importance sampling: effective draws and Pareto
    k-hat of the weights, of the worst replicate. Both see heavy tails of the weights, and neither a
    mode where no draw is: of that points of the nested sampling tell.
    """
    from scipy.special import logsumexp

    name = "importance"
    if not np.isfinite(each_of(tree, "log_evidence_se")).all():
        return Verdict(
            name,
            None,
            {},
            "No importance draws in some replicate, or weights without a sum: see the other "
            "checks.",
        )
    weights = (
        group_of(tree, "particles")["log_weight"]
        .transpose("chain", "particle")
        .values.astype(float)
    )
    least = float(np.exp(2 * logsumexp(weights, axis=1) - logsumexp(2 * weights, axis=1)).min())
    lifted = np.maximum(weights, weights.max(axis=1, keepdims=True) - NO_WEIGHT)
    # NaN stays NaN
    khat = float(
        psis(xr.DataArray(lifted, dims=("chain", "particle")), dims=("particle",))[1].values.max()
    )
    limit = good_k(weights.shape[1])
    missed = float(each_of(tree, "missed").max())
    figures = {"effective": least, "k-hat": khat, "limit": limit, "missed": missed}
    if missed**2 > 1 / least:
        reason = (
            f"A share {missed:.2g} of the posterior, as points of the nested sampling have it, "
            "lies where no draw is to be expected. The "
            "claimed error has it, the draws have not. Allow more clumps (num_clumps), or draw "
            "more (num_draws)."
        )
        return Verdict(name, False, figures, reason)
    if least >= LEAST_ESS and khat <= limit:
        return Verdict(
            name,
            True,
            figures,
            "Importance weights are well behaved: the claimed error is that of their mean.",
        )
    what = (
        f"Fewer than {LEAST_ESS} effective draws"
        if least < LEAST_ESS and not khat > limit
        else "Importance weights have heavy tails"
    )
    reason = (
        f"{what}: the clumps miss the posterior, and the claimed error of log_evidence is not to "
        "be believed. Allow more clumps "
        "(num_clumps), draw more (num_draws), or read nested_log_evidence with "
        "nested_log_evidence_se instead."
    )
    return Verdict(name, False, figures, reason)
