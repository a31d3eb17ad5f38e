"""Checks of variational runs: the ELBO, agreement of replicates, and the distance from q to the model."""

import numpy as np
import xarray as xr

from diagnostics._psis import densities, good_k, psis
from diagnostics._verdict import Verdict, early_end, group_of, identified, label

__all__ = ["DECISIVE", "elbo_settled", "pareto_k", "variational_verdicts"]

DECISIVE = ("ELBO settled", "Pareto k-hat")
NATS, RELATIVE = 0.1, 1e-4  # a gain below 0.1 nat, or below 1e-4 of the ELBO, changes nothing that anyone reads
AGREE_NATS, AGREE_RELATIVE, AGREE_SDS = 1.0, 1e-3, 0.25


def variational_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a variational run."""
    trace = group_of(tree, "sample_stats")["elbo"].transpose("chain", "step").values.astype(float)
    return [_finite(tree), elbo_settled(trace), _same_elbo(trace), _same_means(tree), _khat(tree), early_end(tree)]


def elbo_settled(trace: np.ndarray) -> Verdict:
    """Gain of the last quarter of the trace [replicate, step] over the quarter before, against the noise of the trace.

    The noise of a step is read from successive differences, var = mean((e_t - e_{t-1})^2) / 2 (von Neumann 1941), which a slow
    trend does not inflate. Settled: |gain| <= max(0.1 nat, 1e-4 |ELBO|, 3 standard errors), in every replicate.
    """
    if not np.isfinite(trace).all():
        return Verdict("ELBO settled", False, {"NaN or infinite": int((~np.isfinite(trace)).sum())}, "The ELBO is not finite.")
    if trace.shape[1] < 8:
        return Verdict("ELBO settled", False, {"steps": trace.shape[1]}, "Fewer than 8 steps: nothing can be said.")
    quarter = trace.shape[1] // 4
    last, before = trace[:, -quarter:], trace[:, -2 * quarter : -quarter]
    gain = last.mean(1) - before.mean(1)
    error = np.sqrt(2 * _noise_variance(trace[:, -2 * quarter :]) / quarter)
    tolerance = np.maximum(NATS, RELATIVE * np.abs(last.mean(1)))
    worst = int(np.argmax(np.abs(gain) / np.maximum(tolerance, 3 * error)))
    figures = {"gain": gain[worst], "error": error[worst], "tolerance": tolerance[worst]}
    if np.any(np.abs(gain) > np.maximum(tolerance, 3 * error)):
        way = "still rises" if gain[worst] > 0 else "falls"
        return Verdict(
            "ELBO settled", False, figures, f"The ELBO {way} over the last half of the run: take more steps, or a smaller step size."
        )
    if np.any(3 * error > 10 * tolerance):
        return Verdict("ELBO settled", None, figures, "Too noisy to say: take more steps or more particles an estimate.")
    return Verdict("ELBO settled", True, figures, "The last quarter gained nothing that matters over the quarter before.")


def pareto_k(tree: xr.DataTree) -> tuple[np.ndarray, float] | None:
    """Pareto k-hat of the weights p(x, z) / q(z) for each replicate, and the limit min(1 - 1 / log10 S, 0.7).

    Needs the groups `log_prior`, `log_likelihood` and `log_q` with `log_q` (chain, draw), the density of the same constrained
    draws. None where one is missing. Yao et al. (2018), "Yes, but did it work?"; Vehtari et al. (2024), PSIS.
    """
    ratio = densities(tree)
    return None if ratio is None else (psis(ratio, dims=("draw",))[1].values, good_k(ratio.sizes["draw"]))


def _finite(tree: xr.DataTree) -> Verdict:
    posterior = group_of(tree, "posterior")
    bad = [str(name) for name, values in posterior.data_vars.items() if not np.isfinite(values).all()]
    if bad:
        return Verdict("draws", False, {}, f"NaN or infinite draws of {', '.join(bad)}.")
    if not posterior.data_vars:
        return Verdict("draws", None, {}, "No posterior in the tree.")
    return Verdict("draws", True, {"a replicate": posterior.sizes["draw"]}, "All finite.")


def _noise_variance(trace: np.ndarray) -> np.ndarray:
    return np.mean(np.diff(trace, axis=1) ** 2, axis=1) / 2


def _same_elbo(trace: np.ndarray) -> Verdict:
    name = "replicates: ELBO"
    if len(trace) < 2:
        return Verdict(name, None, {"replicates": 1}, "One replicate: local optima cannot show. Run several with num_chains.")
    quarter = max(trace.shape[1] // 4, 1)
    ends = trace[:, -quarter:].mean(1)
    error = np.sqrt(_noise_variance(trace[:, -quarter:]).max() / quarter) if quarter > 1 else 0.0
    spread = float(np.ptp(ends))
    limit = max(AGREE_NATS, AGREE_RELATIVE * float(np.abs(ends).max()), 4 * float(error))
    figures = {"spread": spread, "limit": limit, "best": float(ends.max())}
    if not spread <= limit:  # a NaN is not below
        return Verdict(name, False, figures, "Replicates end at different ELBOs: local optima. Keep the best, and start from more points.")
    return Verdict(name, True, figures, "All replicates end at the same ELBO.")


def _same_means(tree: xr.DataTree) -> Verdict:
    """Largest distance of a replicate's posterior mean from the mean of all, in standard deviations within a replicate."""
    name = "replicates: means"
    draws, left_out = identified(tree)
    draws = draws.astype(float)
    if draws.sizes.get("chain", 0) < 2 or not draws.data_vars:
        return Verdict(name, None, {}, "Needs two replicates and a quantity that is identified.")
    beside = f" Not identified, so not compared: {', '.join(left_out)}." if left_out else ""
    largest, of = -1.0, ""
    for key, values in ((key, values) for key, values in draws.data_vars.items() if values.size):
        apart = xr.DataArray(abs(values.mean("draw") - values.mean(("chain", "draw")))).max("chain")
        sd = np.sqrt(values.var("draw").mean("chain"))
        ratio = xr.where(apart > 0, apart / np.maximum(sd, 1e-300), 0.0).rename(key)
        if float(ratio.max()) > largest:
            largest, of = float(ratio.max()), label(ratio, int(ratio.values.argmax()))
    limit = AGREE_SDS + 4 / np.sqrt(draws.sizes["draw"])
    if not largest <= limit:
        return Verdict(
            name, False, {"furthest": largest, "of": of}, f"Means of replicates are over {limit:.2f} sd apart: local optima.{beside}"
        )
    return Verdict(name, True, {"furthest": largest, "of": of}, f"Means agree within {limit:.2f} sd.{beside}")


def _khat(tree: xr.DataTree) -> Verdict:
    found = pareto_k(tree)
    if found is None:
        missing = [group for group in ("log_prior", "log_likelihood", "log_q") if group not in tree.children]
        reason = f"Not in the tree: {', '.join(missing or ['log_q'])}. Nothing here compares q with the model itself."
        return Verdict("Pareto k-hat", None, {}, reason)
    khat, limit = found
    worst = float(np.max(khat))  # NaN stays NaN
    figures = {"largest": worst, "limit": limit}
    if not worst <= limit:
        reason = "q is far from the posterior: importance weights have no usable mean. Use a richer guide, or NUTS."
        return Verdict("Pareto k-hat", False, figures, reason)
    return Verdict("Pareto k-hat", True, figures, "Importance weights from q to the model are well behaved.")
