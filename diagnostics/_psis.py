"""Pareto smoothed importance sampling by ArviZ, also where ArviZ raises an error."""

import json
import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import group_of

__all__ = ["LEAST", "densities", "good_k", "lacking", "num_high", "psis", "tail_size"]

LEAST = 25  # draws; the tail has then five draws at least


def psis(
    log_ratio: xr.DataArray, relative_ess: float = 1.0, dims: tuple[str, ...] = ("chain", "draw")
) -> tuple[xr.DataArray, xr.DataArray]:
    """Smooth importance weights by ArviZ's `psislw`.

    ArviZ raises an error where the largest ratios are all equal, as for a masked row. Such ratios
    are bounded and need no smoothing. Their weights are left as they are, and k-hat is -inf.

    Args:
        log_ratio: log importance ratios.
        relative_ess: effective sample size divided by the number of draws.
        dims: dimensions of the draws.

    Returns:
        Normalised log weights, and k-hat over the other dimensions. Both are NaN where a ratio is
        NaN or infinite, or all are 0. k-hat is inf for fewer than `LEAST` draws.
    """
    import arviz as az  # noqa: F401  (registers the accessor)
    from scipy.special import logsumexp

    rest = [dim for dim in log_ratio.dims if dim not in dims]
    ordered = log_ratio.transpose(*rest, *dims)
    flat = ordered.values.reshape(-1, int(np.prod([ordered.sizes[dim] for dim in dims])))
    size = flat.shape[1]
    usable = np.isfinite(flat.max(axis=1))  # the largest of a row with a NaN is NaN
    weights, khat = np.full(flat.shape, np.nan), np.where(usable, np.inf, np.nan)
    weights[usable] = flat[usable] - logsumexp(flat[usable], axis=1, keepdims=True)
    if size >= LEAST and usable.any():
        fits = usable.copy()
        fits[usable] = (
            np.ptp(np.sort(flat[usable], axis=1)[:, -tail_size(size, relative_ess) :], axis=1)
            > 1e-10  # otherwise the tail is constant
        )
        khat[usable & ~fits] = -np.inf
        if fits.any():
            with warnings.catch_warnings():
                # a fit that fails has k-hat NaN or inf, which is above every limit
                warnings.simplefilter("ignore", RuntimeWarning)
                smooth, found = xr.DataArray(-flat[fits], dims=("row", "draw")).azstats.psislw(
                    dim=["draw"], r_eff=relative_ess
                )
            weights[fits], khat[fits] = smooth.transpose("row", "draw").values, found.values
    shape = [ordered.sizes[dim] for dim in rest]
    k_array = xr.DataArray(
        khat.reshape(shape),
        dims=rest,
        coords={dim: ordered[dim] for dim in rest if dim in ordered.coords},
    )
    return ordered.copy(data=weights.reshape(ordered.shape)).transpose(*log_ratio.dims), k_array


def tail_size(draws: int, relative_ess: float = 1.0) -> int:
    """Return how many of the largest weights the Pareto distribution is fitted to."""
    return int(3 * np.sqrt(draws / relative_ess) if draws * relative_ess > 225 else draws / 5)


def good_k(draws: int) -> float:
    """Return the limit of k-hat for S draws, min(1 - 1 / log10 S, 0.7).

    Vehtari et al. (2024), JMLR 25.
    """
    return min(1 - 1 / np.log10(draws), 0.7) if draws > 1 else 0.0


def num_high(khat: np.ndarray, limit: float) -> int:
    """Return how many k-hat are above the limit or NaN."""
    return int(np.sum(~(np.asarray(khat) <= limit)))


def densities(tree: xr.DataTree) -> xr.DataArray | None:
    """Return log p(x, z) - log q(z) of each draw.

    Groups of different draws are refused, for xarray would silently keep only common draws.

    Args:
        tree: a run with the groups `log_prior`, `log_likelihood`, `log_factor` and `log_q`.

    Returns:
        Log ratios (chain, draw); None where a group is `lacking`.
    """
    if lacking(tree):
        return None
    groups = {name: group_of(tree, name) for name in ("log_prior", "log_likelihood", "log_factor")}
    parts = {name: _summed(group) for name, group in groups.items() if group.data_vars}
    parts["log_q"] = -group_of(tree, "log_q")["log_q"].astype(float)
    first = next(iter(parts))
    for name, values in parts.items():
        for dim in ("chain", "draw"):
            mine, theirs = values[dim].values, parts[first][dim].values
            if not np.array_equal(mine, theirs):
                raise ValueError(
                    f"{name}: {len(mine)} {dim}s with coordinates {mine.tolist()[:5]}..., where "
                    f"{first} has {len(theirs)} with {theirs.tolist()[:5]}...; wanted the same "
                    "draws in both. Select draws of the whole tree, not of one group."
                )
    return sum(list(parts.values())[1:], start=parts[first])


def lacking(tree: xr.DataTree) -> list[str]:
    """Return the names of the groups that are missing for log p - log q.

    A `log_factor` is needed where `attrs["factors"]` names factors.
    """
    factors = {name.replace("/", ".") for name in json.loads(str(tree.attrs.get("factors", "[]")))}
    found = {
        name: set(map(str, group_of(tree, name).data_vars))
        for name in ("log_prior", "log_likelihood", "log_factor", "log_q")
    }
    missing = {
        "log_prior": not found["log_prior"],
        "log_likelihood": not found["log_likelihood"] and not factors,
        "log_factor": not factors <= found["log_factor"],
        "log_q": "log_q" not in found["log_q"],
    }
    return [name for name, is_missing in missing.items() if is_missing]


def _summed(group: xr.Dataset) -> xr.DataArray:
    each = [
        values.astype(float).sum(
            [dim for dim in values.dims if dim not in ("chain", "draw")], skipna=False
        )
        for values in group.data_vars.values()
    ]
    return sum(each[1:], start=each[0])
