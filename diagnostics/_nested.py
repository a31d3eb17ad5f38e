"""Checks of nested samplers."""

import json
import warnings

import numpy as np
import xarray as xr

from diagnostics._evidence import complete, finite_evidence, finite_likelihood, steps_taken
from diagnostics._psis import good_k, psis
from diagnostics._verdict import Verdict, attribute, each_of, finite_draws, group_of

__all__ = [
    "DECISIVE",
    "enough_draws",
    "error_against_spread",
    "insertion_rank_test",
    "nested_verdicts",
    "walks",
]

DECISIVE = (
    "draws",
    "log-evidence",
    "insertion ranks",
    "modes",
    "effective draws",
    "ended",
    "importance",
)
ALPHA = 0.01  # p-values below it fail
LEAST_DRAWS = 100
MOST_CORRELATION = 0.35  # of a new point with the start of its random walk, in the worst replicate
LEAST_IMPORTANCE_ESS = 50  # with fewer, the spread of the weights underestimates the error
MOST_NATS_LOST = 1.0  # divergence of a summary; credible intervals lose their coverage above it


def nested_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """Return all checks of a nested sampler."""
    finite = [finite_draws(tree), finite_evidence(tree), *finite_likelihood(tree)]
    own = [
        _insertion(tree),
        walks(tree),
        *_modes(tree),
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
    """Test that the insertion ranks of new points among the live points are uniform.

    A Kolmogorov-Smirnov test over the whole run is combined with one over each of k stretches of
    `num_live` steps, for a fault may be brief: p = 1 - (1 - min p)^k. The result is the smaller of
    the two, doubled. The test is conservative, for ranks are discrete. Fowlie, Handley and Su
    (2020), MNRAS 497. Cost: a sort.

    Args:
        ranks: ranks 0 .. num_live - 1, [step]; negative or NaN at steps without an insertion.
        num_live: number of live points.

    Returns:
        The p-value; NaN where there are no ranks.
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
            name, None, {}, 'attrs["num_live"] is not in the tree; the test of ranks needs it.'
        )
    taken = [each[:steps] for each, steps in zip(ranks, steps_taken(tree), strict=True)]
    found = np.array([insertion_rank_test(each, size) for each in taken])
    known = found[~np.isnan(found)]
    if not known.size:
        return Verdict(name, None, {}, "The tree has no ranks.")
    p = min(1.0, float(known.min()) * len(known))
    figures = {"p": p, "insertions": int(sum((each >= 0).sum() for each in taken))}
    if not p >= ALPHA:
        reason = (
            "New points are not drawn uniformly from the prior above the likelihood limit, so the "
            "evidence is biased. Take more steps for each point."
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
    """Check that new points are nearly uncorrelated with the starts of their random walks.

    With c the correlation, squared distances grow as 1 - c. The squared distance after half of the
    steps, divided by that after all, is (1 - sqrt(c)) / (1 - c), which gives c at any scale.
    """
    name, stats = "walks", group_of(tree, "sample_stats")
    if "halfway" not in stats:
        return Verdict(
            name,
            None,
            {},
            "`halfway` is not in sample_stats, so the correlation of new points with the starts of "
            "their random walks is not known.",
        )
    each = stats["halfway"].transpose("chain", "step").values
    taken = [row[:steps] for row, steps in zip(each, steps_taken(tree), strict=True)]
    least = min((row.mean() for row in taken if len(row)), default=np.nan)
    correlation = float(np.clip(1 / least - 1, 0, 1) ** 2) if least > 0 else float("nan")
    figures = {"correlation": correlation}
    if not correlation <= MOST_CORRELATION:
        reason = (
            "New points are too close to the starts of their random walks, so the error of the "
            "evidence is larger than claimed. Take more steps for each point."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name,
        True,
        figures,
        f"Correlation of new points with the starts of their walks at most {MOST_CORRELATION:g}.",
    )


def _modes(tree: xr.DataTree) -> list[Verdict]:
    """Whether a mode died out; undecided then, because most that do were lower than the rest."""
    if not len(lost := each_of(tree, "num_lost_modes")):
        return []
    figures = {"found": each_of(tree, "num_modes"), "lost": int(lost.sum())}
    if lost.any():
        reason = (
            "A mode that was found had no point in the end. Most such modes are lower than the "
            "rest, and hold nothing; one that is narrow and high would be missing from the "
            "evidence and the draws. Compare with a run of more live points."
        )
        return [Verdict("modes", None, figures, reason)]
    return [Verdict("modes", True, figures, "Every mode that was found kept its points.")]


def _nested_errors(tree: xr.DataTree) -> np.ndarray:
    """Claimed errors of the live points alone, [replicate]; empty where no summary or importance
    sampling adds to them.
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
            "The tree has no error of the log-evidence to compare with sqrt(information / n).",
        )
    if not np.isfinite(claimed).all():
        return Verdict(
            "information",
            None,
            figures,
            "Unknown: the run claims no error of the log-evidence, as after an early end.",
        )
    if not expected / 3 <= claimed.mean() <= 3 * max(expected, 1e-300):
        reason = (
            f"The claimed error {claimed.mean():.3g} differs from sqrt(information / live points) "
            "by a factor of more than three."
        )
        return Verdict("information", False, figures, reason)
    return Verdict(
        "information",
        True,
        figures | {"claimed": float(claimed.mean())},
        "The claimed error agrees with sqrt(information / live points).",
    )


def error_against_spread(tree: xr.DataTree) -> Verdict:
    """Test the spread of the replicates' log-evidences against their claimed errors, by chi^2."""
    from scipy.stats import chi2

    name = "evidence error"
    each, errors = each_of(tree, "log_evidence"), each_of(tree, "log_evidence_se")
    if len(each) < 2 or len(errors) != len(each):
        claimed = attribute(tree, "log_evidence_se")
        figures = {} if claimed is None else {"claimed": claimed}
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
    weights = 1 / np.maximum(errors, 1e-12) ** 2  # any spread is too large for an error of 0
    centre = np.sum(weights * each) / np.sum(weights)
    p = float(chi2.sf(np.sum(weights * (each - centre) ** 2), len(each) - 1))
    figures = {"claimed": float(errors.mean()), "spread": float(np.std(each, ddof=1)), "p": p}
    if not p >= ALPHA:
        reason = (
            "Replicates differ by more than their claimed error: it is too small, or modes were "
            "missed. Take more live points."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, "The spread of the replicates agrees with the claimed error."
    )


def _effective(tree: xr.DataTree) -> Verdict:
    """Kish's effective sample size (sum w)^2 / sum w^2, summed over replicates."""
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
        # weights that are all 0 give NaN, which fails below
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)
        total = float(
            np.sum(np.exp(2 * logsumexp(weights, axis=1) - logsumexp(2 * weights, axis=1)))
        )
    return enough_draws(total)


def enough_draws(count: float) -> Verdict:
    """Check the effective sample size of the weights of all points.

    ArviZ's own is no use here: resampled draws are independent, but they repeat points.
    """
    reason = (
        f"At least {LEAST_DRAWS} points carry the weight of the posterior."
        if count >= LEAST_DRAWS
        else f"Fewer than {LEAST_DRAWS}: the equally weighted posterior repeats a few points."
    )
    return Verdict("effective draws", count >= LEAST_DRAWS, {"count": count}, reason)


def _summaries(tree: xr.DataTree) -> Verdict:
    """For stages: divergence of each summary from the posterior of its stage, and of the last
    one from the posterior of all rows.
    """
    name, worst = "summaries", float(each_of(tree, "summary_loss").max())
    left = each_of(tree, "nats_left")
    figures = {"nats each": worst, "limit": MOST_NATS_LOST}
    if weighed := left[~np.isnan(left)].tolist():
        figures["nats left"] = max(weighed)
    if not worst <= MOST_NATS_LOST:
        reason = (
            "The mixture that summarises a stage is too far from the posterior of that stage, so "
            "the final posterior is wrong. Allow more components (num_clumps), more live points "
            "(num_live), or fewer stages."
        )
        return Verdict(name, False, figures, reason)
    if np.isinf(each_of(tree, "log_evidence_se")).any():
        reason = (
            "The posterior of some rows lies outside of the summary of the rows before, which is "
            "lost: the final posterior is that of the last rows, and the evidence is not reliable. "
            "Learn from all rows at once."
        )
        return Verdict(name, False, figures, reason)
    if not max(weighed, default=0.0) <= MOST_NATS_LOST:
        reason = (
            "The final posterior is too far from that of all rows. Allow more components, or fewer "
            "stages."
        )
        return Verdict(name, False, figures, reason)
    return Verdict(
        name, True, figures, "The summary of each stage is close to the posterior of that stage."
    )


def _importance(tree: xr.DataTree) -> Verdict:
    """For runs finished by importance sampling: effective draws and Pareto k-hat of the weights,
    in the worst replicate.

    Both detect heavy tails of the weights. Neither detects a mode without draws, which the points
    of the nested sampling show.
    """
    from scipy.special import logsumexp

    name = "importance"
    if not np.isfinite(each_of(tree, "log_evidence_se")).all():
        return Verdict(
            name,
            None,
            {},
            "A replicate has no importance draws, or its weights have no finite sum: see the other "
            "checks.",
        )
    weights = (
        group_of(tree, "particles")["log_weight"]
        .transpose("chain", "particle")
        .values.astype(float)
    )
    least = float(np.exp(2 * logsumexp(weights, axis=1) - logsumexp(2 * weights, axis=1)).min())
    # weights more than 700 nats below the largest are raised to that: they underflow in any case
    lifted = np.maximum(weights, weights.max(axis=1, keepdims=True) - 700.0)
    # NaN stays NaN
    khat = float(
        psis(xr.DataArray(lifted, dims=("chain", "particle")), dims=("particle",))[1].values.max()
    )
    limit = good_k(weights.shape[1])
    missed = float(each_of(tree, "missed").max())
    figures = {"effective": least, "k-hat": khat, "limit": limit, "missed": missed}
    if missed**2 > 1 / least:
        reason = (
            f"A share {missed:.2g} of the posterior, estimated from the nested sampling, lies "
            "where the proposal puts no draws. The claimed error includes it, the draws do not. "
            "Allow more components (num_clumps), or draw more (num_draws)."
        )
        return Verdict(name, False, figures, reason)
    if least >= LEAST_IMPORTANCE_ESS and khat <= limit:
        return Verdict(
            name,
            True,
            figures,
            "Importance weights are well behaved: the claimed error is that of their mean.",
        )
    what = (
        f"Fewer than {LEAST_IMPORTANCE_ESS} effective draws"
        if least < LEAST_IMPORTANCE_ESS and not khat > limit
        else "Importance weights have heavy tails"
    )
    reason = (
        f"{what}: the proposal misses part of the posterior, and the claimed error of log_evidence "
        "is not reliable. Allow more components (num_clumps), draw more (num_draws), or use "
        "nested_log_evidence with nested_log_evidence_se instead."
    )
    return Verdict(name, False, figures, reason)
