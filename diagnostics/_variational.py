"""Checks of variational runs: the ELBO, agreement of replicates, and Pareto k-hat of p / q."""

import numpy as np
import xarray as xr

from diagnostics._psis import LEAST, densities, good_k, lacking, psis, tail_size
from diagnostics._verdict import Verdict, early_end, finite_draws, group_of, identified, label, some

__all__ = ["DECISIVE", "elbo_settled", "pareto_k", "variational_verdicts"]

DECISIVE = ("draws", "ELBO settled", "Pareto k-hat")


def variational_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """Return all checks of a variational run."""
    trace = group_of(tree, "sample_stats")["elbo"].transpose("chain", "step").values.astype(float)
    return [
        _draws(tree),
        elbo_settled(trace),
        _same_elbo(trace),
        _same_means(tree),
        _khat(tree),
        early_end(tree),
    ]


def elbo_settled(trace: np.ndarray) -> Verdict:
    """Check that the last quarter of the ELBO trace gains nothing over the quarter before.

    The ELBO has settled when |gain| <= max(tolerance, 3 standard errors) in every replicate. The
    tolerance is 0.1 nat; for large ELBOs, whose rounding errors are larger, 1e-4 |ELBO|, at most
    one nat. The variance of the noise is mean((e_t - e_{t-1})^2) / 2, from successive differences
    (von Neumann 1941), which a slow trend does not inflate.

    Coordinate ascent that stops by itself may have jumped in its last quarter, by a merge. So a
    trace without noise has also settled when each of its last four steps gains no more than the
    tolerance over the steps of a quarter, which is the same slope.

    Args:
        trace: ELBO, [replicate, step].
    """
    if not np.isfinite(trace).all():
        return Verdict(
            "ELBO settled",
            False,
            {"NaN or infinite": int((~np.isfinite(trace)).sum())},
            "The ELBO is not finite.",
        )
    if trace.shape[1] < 8:
        return Verdict(
            "ELBO settled",
            False,
            {"steps": trace.shape[1]},
            "Fewer than 8 steps are too few to judge.",
        )
    quarter = trace.shape[1] // 4
    gain, error = _gain(trace, quarter)
    tolerance = np.clip(1e-4 * np.abs(trace[:, -quarter:].mean(1)), 0.1, 1.0)
    late_gain = max(quarter, 10) * np.abs(np.diff(trace[:, -5:])).max(1)
    at_rest = late_gain <= tolerance
    gain, error = np.where(at_rest, late_gain, gain), np.where(at_rest, 0.0, error)
    worst = int(np.argmax(np.abs(gain) / np.maximum(tolerance, 3 * error)))
    figures = {"gain": gain[worst], "error": error[worst], "tolerance": tolerance[worst]}
    if np.any(np.abs(gain) > np.maximum(tolerance, 3 * error)):
        way = "still rises" if gain[worst] > 0 else "falls"
        return Verdict(
            "ELBO settled",
            False,
            figures,
            f"The ELBO {way} over the last half of the run: take more steps (num_warmup), or a "
            "smaller step size for SVI.",
        )
    if np.any(3 * error > 10 * tolerance):
        return Verdict(
            "ELBO settled",
            None,
            figures,
            "Too noisy to judge: take more steps, or more particles for each estimate.",
        )
    return Verdict(
        "ELBO settled",
        True,
        figures,
        "The last quarter gained no more than the tolerance over the quarter before.",
    )


def _gain(trace: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Gain of the last `window` steps over as many before them, and its standard error, both
    [replicate].
    """
    last, before = trace[:, -window:], trace[:, -2 * window : -window]
    return last.mean(1) - before.mean(1), np.sqrt(
        2 * _noise_variance(trace[:, -2 * window :]) / window
    )


def pareto_k(tree: xr.DataTree) -> tuple[np.ndarray, float] | None:
    """Return Pareto k-hat of the importance weights p(x, z) / q(z), and its limit.

    Yao et al. (2018), "Yes, but did it work?"; Vehtari et al. (2024), PSIS.

    Args:
        tree: a run with the groups `log_prior`, `log_likelihood` and `log_q` with `log_q`
            (chain, draw), and `log_factor` where the model has factors.

    Returns:
        k-hat of each replicate, and the limit min(1 - 1 / log10 S, 0.7) for S draws; None where a
        group is missing.
    """
    ratio = densities(tree)
    return (
        None
        if ratio is None
        else (psis(ratio, dims=("draw",))[1].values, good_k(ratio.sizes["draw"]))
    )


def _draws(tree: xr.DataTree) -> Verdict:
    """Finite draws that are not one point, as those of the guide `AutoDelta` are."""
    found = finite_draws(tree)
    points = _points(tree)
    if not found.ok or points is None:
        return found
    if points["replicates"]:
        reason = (
            "All draws are one point: a point mass is no posterior. Use a guide with a width, "
            "such as AutoNormal."
        )
        return found._replace(ok=False, figures={"replicates": points["replicates"]}, reason=reason)
    if points["sites"]:
        reason = (
            f"All draws of {some(points['sites'])} are one point: a point estimate, on which the "
            "other sites are conditioned."
        )
        return found._replace(ok=None, figures={"constant": points["sites"]}, reason=reason)
    return found


def _points(tree: xr.DataTree) -> dict[str, list] | None:
    """Replicates whose draws are all equal, and latent float sites that are constant in some
    replicate; None for a single draw.
    """
    posterior, latent = group_of(tree, "posterior"), group_of(tree, "log_prior")
    floats = [str(name) for name, values in posterior.data_vars.items() if values.dtype.kind == "f"]
    if posterior.sizes.get("draw", 0) < 2 or not floats:
        return None
    constant = {str(name): _is_constant(values) for name, values in posterior.data_vars.items()}
    replicates = np.flatnonzero(np.all(list(constant.values()), axis=0)).tolist()
    return {
        "replicates": replicates,
        "sites": [name for name in floats if name in latent and constant[name].any()],
    }


def _is_constant(values: xr.DataArray) -> np.ndarray:
    array = values.transpose("chain", "draw", ...).values
    return (array == array[:, :1]).reshape(len(array), -1).all(axis=1)


def _noise_variance(trace: np.ndarray) -> np.ndarray:
    return np.mean(np.diff(trace, axis=1) ** 2, axis=1) / 2


def _same_elbo(trace: np.ndarray) -> Verdict:
    name = "replicates: ELBO"
    if len(trace) < 2:
        return Verdict(
            name,
            None,
            {"replicates": 1},
            "One replicate does not show local optima. Run several with num_chains.",
        )
    quarter = max(trace.shape[1] // 4, 1)
    ends = trace[:, -quarter:].mean(1)
    error = np.sqrt(_noise_variance(trace[:, -quarter:]).max() / quarter) if quarter > 1 else 0.0
    spread = float(np.ptp(ends))
    limit = max(1.0, 4 * float(error))  # nats
    figures = {"spread": spread, "limit": limit, "best": float(ends.max())}
    if not spread <= limit:  # a NaN is not below
        return Verdict(
            name,
            False,
            figures,
            "Replicates end at different ELBOs: local optima. Keep the best, and start from more "
            "points.",
        )
    return Verdict(name, True, figures, "All replicates end at the same ELBO.")


def _same_means(tree: xr.DataTree) -> Verdict:
    """Largest distance of a replicate's posterior mean from the mean of all, divided by the
    standard deviation within replicates.
    """
    name = "replicates: means"
    draws, left_out = identified(tree)
    whole = {key for key, values in draws.data_vars.items() if values.dtype.kind in "iub"}
    draws = draws.astype(float)
    if draws.sizes.get("chain", 0) < 2 or not draws.data_vars:
        return Verdict(name, None, {}, "Needs two replicates and a quantity that is identified.")
    beside = f" Not identified, so not compared: {', '.join(left_out)}." if left_out else ""
    largest, of = -1.0, ""
    for key, values in ((key, values) for key, values in draws.data_vars.items() if values.size):
        apart = xr.DataArray(abs(values.mean("draw") - values.mean(("chain", "draw")))).max("chain")
        # at least half a step for integers
        sd = np.maximum(np.sqrt(values.var("draw").mean("chain")), 0.5 if key in whole else 0.0)
        rounding = 1e-12 * abs(values).max(("chain", "draw"))  # of the mean of a constant
        ratio = xr.where(apart > rounding, apart / np.maximum(sd, 1e-300), 0.0).rename(key)
        if float(ratio.max()) > largest:
            largest, of = float(ratio.max()), label(ratio, int(ratio.values.argmax()))
    limit = 0.25 + 4 / np.sqrt(draws.sizes["draw"])
    if not largest <= limit:
        return Verdict(
            name,
            False,
            {"furthest": largest, "of": of},
            f"Means of replicates are over {limit:.2f} sd apart: local optima.{beside}",
        )
    return Verdict(
        name, True, {"furthest": largest, "of": of}, f"Means agree within {limit:.2f} sd.{beside}"
    )


def _khat(tree: xr.DataTree) -> Verdict:
    """k-hat is an estimate with an error near (1 + limit) / sqrt(tail draws); above the limit by
    less than that, it is undecided.
    """
    name, found = "Pareto k-hat", pareto_k(tree)
    if found is None:
        return Verdict(
            name,
            None,
            {},
            f"Not in the tree: {', '.join(lacking(tree))}. No other check compares q with the "
            "model.",
        )
    draws = group_of(tree, "posterior").sizes.get("draw", 0)
    if draws < LEAST:
        return Verdict(
            name,
            None,
            {"draws": draws},
            f"Fewer than {LEAST} draws are too few to fit a tail: draw more (num_samples).",
        )
    khat, limit = found
    worst = float(np.max(khat))  # NaN stays NaN
    figures = {"largest": worst, "limit": limit}
    if (points := _points(tree)) and points["replicates"]:
        return Verdict(
            name,
            False,
            figures,
            "All draws are one point: a point mass has no importance weights.",
        )
    if np.isnan(worst):
        return Verdict(
            name,
            False,
            figures,
            "No k-hat: log p or log q of a draw is NaN or infinite, or nearly all of them are "
            "zero.",
        )
    figures["error"] = error = (1 + limit) / np.sqrt(tail_size(draws))
    if worst <= limit:
        return Verdict(
            name, True, figures, "Importance weights from q to the posterior are well behaved."
        )
    if worst <= limit + error:
        return Verdict(
            name,
            None,
            figures,
            "Above the limit by less than its error: undecided. Draw more (num_samples), "
            "or use NUTS.",
        )
    reason = (
        "q is far from the posterior: the mean of importance weights is not reliable. Use a richer "
        "guide, or NUTS."
    )
    return Verdict(name, False, figures, reason)
