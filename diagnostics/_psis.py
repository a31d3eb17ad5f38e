"""Pareto smoothed importance sampling by ArviZ, over rows some of which ArviZ refuses."""

import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import group_of

__all__ = ["densities", "good_k", "num_high", "psis"]

FLAT = 1e-10  # log ratios that differ by less are equal: their weights are uniform


def psis(
    log_ratio: xr.DataArray, relative_ess: float = 1.0, dims: tuple[str, ...] = ("chain", "draw")
) -> tuple[xr.DataArray, xr.DataArray]:
    """Smoothed, normalised log weights and k-hat along `dims`: ArviZ's `psislw`, which takes minus the log ratio.

    ArviZ raises where the largest ratios are all the same (a masked row, a row with probability one). Such ratios are
    bounded and need no smoothing: their weights are left as they are and k-hat is -inf. Fewer than 25 draws: k-hat is inf.
    """
    import arviz as az  # noqa: F401  (registers the accessor)
    from scipy.special import logsumexp

    rest = [dim for dim in log_ratio.dims if dim not in dims]
    ordered = log_ratio.transpose(*rest, *dims)
    flat = ordered.values.reshape(-1, int(np.prod([ordered.sizes[dim] for dim in dims])))
    size = flat.shape[1]
    weights, khat = flat - logsumexp(flat, axis=1, keepdims=True), np.full(len(flat), np.inf)
    if size >= 25:
        tail = int(3 * np.sqrt(size / relative_ess) if size * relative_ess > 225 else size / 5)
        largest = np.sort(flat, axis=1)[:, -tail:]
        fits = np.ptp(largest, axis=1) > FLAT
        khat[~fits] = -np.inf
        if fits.any():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a fit that fails has k-hat NaN or inf, which is never good
                smooth, found = xr.DataArray(-flat[fits], dims=("row", "draw")).azstats.psislw(dim=["draw"], r_eff=relative_ess)
            weights[fits], khat[fits] = smooth.transpose("row", "draw").values, found.values
    shape = [ordered.sizes[dim] for dim in rest]
    k_array = xr.DataArray(khat.reshape(shape), dims=rest, coords={dim: ordered[dim] for dim in rest if dim in ordered.coords})
    return ordered.copy(data=weights.reshape(ordered.shape)).transpose(*log_ratio.dims), k_array


def good_k(draws: int) -> float:
    """The largest k-hat with which this many draws are enough: min(1 - 1 / log10 S, 0.7). Vehtari et al. (2024), JMLR 25."""
    return min(1 - 1 / np.log10(draws), 0.7) if draws > 1 else 0.0


def num_high(khat: np.ndarray, limit: float) -> int:
    """How many are above the limit, or could not be fitted."""
    return int(np.sum(~(np.asarray(khat) <= limit)))


def densities(tree: xr.DataTree) -> xr.DataArray | None:
    """log p(x, z) - log q(z) of each draw (chain, draw), from `log_prior`, `log_likelihood` and `log_q`; None where one lacks."""
    prior, likelihood, proposal = (group_of(tree, name) for name in ("log_prior", "log_likelihood", "log_q"))
    if not prior.data_vars or not likelihood.data_vars or "log_q" not in proposal:
        return None
    return _summed(prior) + _summed(likelihood) - proposal["log_q"]


def _summed(group: xr.Dataset) -> xr.DataArray:
    """Sum of every variable over all but chain and draw."""
    each = [
        values.astype(float).sum([dim for dim in values.dims if dim not in ("chain", "draw")], skipna=False)
        for values in group.data_vars.values()
    ]
    total = each[0]
    for values in each[1:]:
        total = total + values
    return total
