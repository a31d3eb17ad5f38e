"""Checks of runs that estimate an evidence: particle filters (SMC) and nested sampling."""

import json
import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, attribute, each_of, early_end, group_of

__all__ = ["NESTED_DECISIVE", "SMC_DECISIVE", "insertion_rank_test", "nested_verdicts", "roots", "smc_verdicts"]

SMC_DECISIVE = ("ESS path", "unique ancestors", "ended")
NESTED_DECISIVE = ("insertion ranks", "effective draws", "ended")
FEWEST = 10  # of particles or of ancestors: below, one step alone adds 1 / sqrt(10) = 0.3 to the error of the log-evidence
SPREAD, ALPHA, DRAWS = 1.0, 0.01, 100


def smc_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a particle filter."""
    stats = group_of(tree, "sample_stats")
    size = _particles(tree, stats)
    return [_ess_path(stats, size), _resamplings(stats, size), _ancestors(stats), _spread(tree), early_end(tree)]


def nested_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a nested sampler."""
    return [_insertion(tree), _information(tree), _error_against_spread(tree), _effective(tree), _complete(tree)]


def insertion_rank_test(ranks: np.ndarray, num_live: int) -> float:
    """p-value of the ranks at which new points were inserted among `num_live` live ones, [step]; they are uniform on 0..n-1.

    A Kolmogorov-Smirnov test over the whole run, and one over each stretch of `num_live` steps (a fault may be brief) with
    p = 1 - (1 - min p)^k; the smaller of the two, doubled. Negative and NaN ranks are steps without an insertion.
    Conservative, for ranks are discrete. Fowlie, Handley and Su (2020), MNRAS 497; cost: a sort.
    """
    ranks = np.asarray(ranks, float).ravel()
    ranks = ranks[np.isfinite(ranks) & (ranks >= 0)].astype(int)
    if not len(ranks):
        return float("nan")
    if ranks.max() >= num_live:
        raise ValueError(f"insertion_rank: the largest is {ranks.max()}, among num_live={num_live} points it is at most {num_live - 1}.")
    stretches = [ranks[i : i + num_live] for i in range(0, len(ranks) - num_live + 1, num_live)]
    rolling = 1 - (1 - min(_uniform_p(part, num_live) for part in stretches)) ** len(stretches) if len(stretches) > 1 else 1.0
    whole = _uniform_p(ranks, num_live)
    return min(1.0, 2 * min(whole, rolling) if len(stretches) > 1 else whole)


def roots(parents: np.ndarray) -> np.ndarray:
    """For every step the index, at step 0, of the ancestor of each particle: [step, particle] from parents [step, particle].

    `parents[t, i]` is the index at step t - 1 of the particle that became i at step t; `parents[0]` is not read.
    """
    found = np.empty(parents.shape, int)
    found[0] = np.arange(parents.shape[1])
    for t in range(1, len(parents)):
        found[t] = found[t - 1][parents[t]]
    return found


def _uniform_p(ranks: np.ndarray, num_live: int) -> float:
    from scipy.stats import kstwo

    seen = np.cumsum(np.bincount(ranks, minlength=num_live)) / len(ranks)
    gap = np.max(np.abs(seen - np.arange(1, num_live + 1) / num_live))
    return float(kstwo.sf(gap, len(ranks))) if gap > 0 else 1.0


def _particles(tree: xr.DataTree, stats: xr.Dataset) -> int | None:
    particles = group_of(tree, "particles")
    if "log_weight" in particles:
        return int(particles["log_weight"].transpose("chain", ...).shape[-1])
    return int(stats["ancestor"].transpose("chain", "step", ...).shape[-1]) if "ancestor" in stats else None


def _ess_path(stats: xr.Dataset, size: int | None) -> Verdict:
    path = stats["ess"].transpose("chain", "step").values
    least = float(path.min())
    step = int(np.unravel_index(path.argmin(), path.shape)[1])
    figures = {"least": least, "at step": step, "median": float(np.median(path))} | ({} if size is None else {"particles": size})
    if not least >= FEWEST:
        reason = f"At step {step} fewer than {FEWEST} particles carry the weight: more particles, or a better proposal."
        return Verdict("ESS path", False, figures, reason)
    return Verdict("ESS path", True, figures, f"At least {FEWEST} effective particles at every step.")


def _resamplings(stats: xr.Dataset, size: int | None) -> Verdict:
    if "resampled" not in stats:
        return Verdict("resamplings", None, {}, "`resampled` is not in the tree.")
    happened = stats["resampled"].transpose("chain", "step").values.astype(bool)
    figures = {"a replicate": happened.sum(1).tolist(), "steps": happened.shape[1]}
    low = size is not None and (stats["ess"].transpose("chain", "step").values < size / 10)
    if np.any(low & ~happened):
        return Verdict("resamplings", False, figures, "Steps with an ESS below a tenth of the particles were not followed by a resampling.")
    return Verdict("resamplings", True if size is not None else None, figures, "Resampled wherever the weights had become uneven.")


def _ancestors(stats: xr.Dataset) -> Verdict:
    if "ancestor" in stats:
        parents = stats["ancestor"].transpose("chain", "step", ...).values.astype(int)
        counts = [len(np.unique(roots(each)[-1])) for each in parents]
    elif "unique_ancestors" in stats:
        counts = stats["unique_ancestors"].transpose("chain", "step").values[:, -1].astype(int).tolist()
    else:
        return Verdict("unique ancestors", None, {}, "Neither `ancestor` nor `unique_ancestors` is in the tree.")
    if min(counts) < FEWEST:
        reason = f"The particles share fewer than {FEWEST} histories: what they say about the first steps rests on those. More particles."
        return Verdict("unique ancestors", False, {"left": counts}, reason)
    return Verdict("unique ancestors", True, {"left": counts}, "The first steps are still told by many particles.")


def _spread(tree: xr.DataTree) -> Verdict:
    each, name = each_of(tree, "log_evidence"), "evidence spread"
    if len(each) < 2:
        return Verdict(name, None, {}, "Needs two replicates with a log-evidence: run with num_chains above 1.")
    sd = float(np.std(each, ddof=1))
    figures = {"sd": sd, "replicates": len(each)}
    if not sd < SPREAD:
        reason = f"Log-evidences of replicates spread by over {SPREAD:g}: one of them cannot rank models. More particles."
        return Verdict(name, False, figures, reason)
    return Verdict(name, True, figures, f"Replicates agree on the log-evidence to less than {SPREAD:g}.")


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
    ranks, size = group_of(tree, "sample_stats")["insertion_rank"].transpose("chain", ...).values, _num_live(tree)
    if size is None:
        return Verdict("insertion ranks", None, {}, 'attrs["num_live"] is not in the tree: ranks mean nothing without it.')
    found = [insertion_rank_test(each, size) for each in ranks]
    p = min(1.0, min(found) * len(found))
    figures = {"p": p, "insertions": int((ranks >= 0).sum())}
    if not p >= ALPHA:
        reason = "New points are not drawn uniformly from the prior above the limit: the evidence is biased. More steps a point."
        return Verdict("insertion ranks", False, figures, reason)
    return Verdict("insertion ranks", True, figures, f"Uniform (Kolmogorov-Smirnov, whole run and stretches, p >= {ALPHA:g}).")


def _information(tree: xr.DataTree) -> Verdict:
    each, claimed, size = each_of(tree, "information"), each_of(tree, "log_evidence_se"), _num_live(tree)
    if not len(each) or size is None:
        return Verdict("information", None, {}, 'attrs["information"] or attrs["num_live"] is not in the tree.')
    expected = float(np.sqrt(max(each.mean(), 0.0) / size))
    figures = {"nats": float(each.mean()), "error it implies": expected}
    if not len(claimed) or len(each) != len(claimed):
        return Verdict("information", None, figures, "No error of the log-evidence in the tree to compare with sqrt(H / n).")
    if not expected / 3 <= claimed.mean() <= 3 * max(expected, 1e-300):
        reason = f"The claimed error {claimed.mean():.3g} is over three times away from sqrt(information / live points)."
        return Verdict("information", False, figures, reason)
    return Verdict(
        "information", True, figures | {"claimed": float(claimed.mean())}, "The claimed error is that of sqrt(information / live points)."
    )


def _error_against_spread(tree: xr.DataTree) -> Verdict:
    """Chi-squared of the replicates' log-evidences about their weighted mean, with the errors that they claim."""
    from scipy.stats import chi2

    name, each, errors = "evidence error", each_of(tree, "log_evidence"), each_of(tree, "log_evidence_se")
    if len(each) < 2 or len(errors) != len(each):
        figures = {"claimed": attribute(tree, "log_evidence_se")} if attribute(tree, "log_evidence_se") is not None else {}
        return Verdict(name, None, figures, "Needs two replicates, each with its error: run with num_chains above 1.")
    weights = 1 / errors**2
    centre = np.sum(weights * each) / np.sum(weights)
    p = float(chi2.sf(np.sum(weights * (each - centre) ** 2), len(each) - 1))
    figures = {"claimed": float(errors.mean()), "spread": float(np.std(each, ddof=1)), "p": p}
    if not p >= ALPHA:
        reason = "Replicates differ by more than the error that they claim: it is too small, or modes were missed. More live points."
        return Verdict(name, False, figures, reason)
    return Verdict(name, True, figures, "Replicates differ as much as the claimed error says, or less.")


def _effective(tree: xr.DataTree) -> Verdict:
    """Kish's (sum w)^2 / sum w^2 over all weighted particles of a replicate, summed over replicates."""
    from scipy.special import logsumexp

    particles = group_of(tree, "particles")
    if "log_weight" not in particles:
        return Verdict("effective draws", None, {}, "The group `particles` with `log_weight` is not in the tree.")
    weights = particles["log_weight"].transpose("chain", ...).values
    weights = weights.reshape(len(weights), -1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # no weight at all: NaN, and it fails below
        total = float(np.sum(np.exp(2 * logsumexp(weights, axis=1) - logsumexp(2 * weights, axis=1))))
    if not total >= DRAWS:
        return Verdict(
            "effective draws", False, {"count": total}, f"Fewer than {DRAWS}: the equally weighted posterior repeats few points."
        )
    return Verdict("effective draws", True, {"count": total}, f"At least {DRAWS} distinct points carry the posterior.")


def _complete(tree: xr.DataTree) -> Verdict:
    ended = early_end(tree)
    if tree.attrs.get("ended") == "budget":
        return ended._replace(
            ok=False, reason="Stopped by its budget before it had finished: part of the evidence is missing. Raise num_warmup."
        )
    return ended
