"""Checks of Markov chains. Every statistic is ArviZ's; here are the limits, and the words."""

import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, early_end, group_of, identified, label

__all__ = ["DECISIVE", "chain_verdicts"]

DECISIVE = ("draws", "R-hat", "bulk ESS", "tail ESS")
RHAT, ESS_A_CHAIN, DRAWS, BFMI = 1.01, 100, 100, 0.3


def chain_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a run of chains."""
    if not group_of(tree, "posterior").sizes.get("draw", 0):
        return [Verdict("draws", False, {"a chain": 0}, "No draws: the run ended in its warm-up."), early_end(tree)]
    draws, left_out = identified(tree)
    invariant = _with_log_joint(draws, tree)
    finite = invariant[[name for name, values in invariant.data_vars.items() if np.isfinite(values).all()]]
    moved = _that_moved(finite)
    bulk = _least(moved, "bulk")
    return [
        _draws(tree),
        _rhat(moved, left_out),
        _ess("bulk", bulk, tree),
        _ess("tail", _least(moved, "tail"), tree),
        _stuck(finite, moved),
        _divergences(tree),
        _bfmi(tree),
        _time(tree, bulk),
        early_end(tree),
    ]


def _with_log_joint(draws: xr.Dataset, tree: xr.DataTree) -> xr.Dataset:
    """`lp` beside the posterior: it does not change with labels or signs, so it always has an R-hat."""
    stats = group_of(tree, "sample_stats")
    return draws if "lp" not in stats or "lp" in draws else draws.assign(lp=stats["lp"])


def _that_moved(draws: xr.Dataset) -> dict[str, xr.DataArray]:
    """Elements that took two values at least, stacked along "element": a correlation matrix has a diagonal of ones."""
    found = {}
    for name, values in draws.data_vars.items():
        flat = values.astype(float).transpose("chain", "draw", ...)
        varies = (flat.max(("chain", "draw")) > flat.min(("chain", "draw"))).values.ravel()
        array = flat.values.reshape(*flat.shape[:2], -1)[..., varies]
        names = [label(values.isel(chain=0, draw=0, drop=True), i) for i in np.flatnonzero(varies).tolist()]
        if names:
            found[str(name)] = xr.DataArray(array, dims=("chain", "draw", "element"), coords={"element": names}, name=name)
    return found


def _draws(tree: xr.DataTree) -> Verdict:
    posterior = group_of(tree, "posterior")
    bad = {str(name): int((~np.isfinite(values)).sum()) for name, values in posterior.data_vars.items() if not np.isfinite(values).all()}
    figures = {"chains": posterior.sizes["chain"], "a chain": posterior.sizes["draw"]}
    if bad:
        return Verdict(
            "draws", False, figures | bad, f"NaN or infinite draws of {', '.join(bad)}: a density overflows, or a site is undefined."
        )
    if figures["a chain"] < DRAWS:
        return Verdict("draws", False, figures, f"Fewer than {DRAWS} draws a chain: too few for any figure below.")
    return Verdict("draws", True, figures, "All finite.")


def _worst(statistic: dict[str, xr.DataArray], largest: bool) -> tuple[float, str]:
    value = xr.concat(statistic.values(), "element")
    at = int(np.argmax(value.values) if largest else np.argmin(value.values))
    return float(value[at]), str(value["element"].values[at])


def _rhat(moved: dict[str, xr.DataArray], left_out: list[str]) -> Verdict:
    import arviz as az

    beside = f" Not identified, so without an R-hat: {', '.join(left_out)}." if left_out else ""
    if not moved:
        reason = "No identified quantity that moves is in the tree: record invariant ones (`numpyro.deterministic`)." + beside
        return Verdict("R-hat", None, {}, reason)
    if next(iter(moved.values())).sizes["chain"] < 2:
        return Verdict("R-hat", None, {}, "One chain cannot disagree: run at least two, better four." + beside)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)  # a stuck chain: R-hat is infinite
        found = {name: az.rhat(values).fillna(np.inf) for name, values in moved.items()}
    value, worst = _worst(found, largest=True)
    if value < RHAT:
        return Verdict("R-hat", True, {"largest": value, "of": worst}, f"Rank R-hat below {RHAT} for every quantity.{beside}")
    over = [name for name, values in found.items() if (values >= RHAT).any()]
    reason = f"Rank R-hat reaches {RHAT} for {_some(over)}: the chains have not found the same distribution.{beside}"
    return Verdict("R-hat", False, {"largest": value, "of": worst}, reason)


def _least(moved: dict[str, xr.DataArray], method: str) -> tuple[float, str] | None:
    import arviz as az

    return _worst({name: az.ess(values, method=method).fillna(0.0) for name, values in moved.items()}, largest=False) if moved else None


def _ess(method: str, least: tuple[float, str] | None, tree: xr.DataTree) -> Verdict:
    name = f"{method} ESS"
    if least is None:
        return Verdict(name, None, {}, "No identified quantity that moves is in the tree.")
    wanted = ESS_A_CHAIN * group_of(tree, "posterior").sizes["chain"]
    what = "means and medians" if method == "bulk" else "interval ends"
    ok = least[0] >= wanted
    reason = f"At least {wanted} ({ESS_A_CHAIN} a chain): {what} and R-hat itself are reliable."
    if not ok:
        reason = f"Below {wanted} ({ESS_A_CHAIN} a chain): {what} of {least[1]} are not reliable. Draw more, or reparametrise."
    return Verdict(name, ok, {"least": least[0], "of": least[1]}, reason)


def _stuck(finite: xr.Dataset, moved: dict[str, xr.DataArray]) -> Verdict:
    """Chains in which an element stands still while it moves in another, or in which a whole variable never moves."""
    still = [str(name) for name in finite.data_vars if name not in moved]
    chains: dict[int, str] = {}
    for name, values in moved.items():
        frozen = (values.max("draw") == values.min("draw")).any("element").values
        chains |= {int(values["chain"].values[i]): name for i in np.flatnonzero(frozen)}
    if chains:
        reason = (
            f"In chain {', '.join(map(str, chains))} something never moved that moves in others ({_some(sorted(set(chains.values())))})."
        )
        return Verdict("movement", False, {"stuck chains": sorted(chains)}, reason)
    if still and not moved:
        return Verdict("movement", False, {"constant": still}, "Nothing ever moved: every proposal was refused.")
    if still:
        return Verdict("movement", None, {"constant": still}, "Constant over all draws: right if the model fixes it, and unchecked here.")
    return Verdict("movement", True, {}, "Every variable moves in every chain.")


def _divergences(tree: xr.DataTree) -> Verdict:
    stats = group_of(tree, "sample_stats")
    if "diverging" not in stats:
        return Verdict("divergences", None, {}, "Not in the tree: this kernel reports none.")
    count = int(stats["diverging"].sum())
    figures = {"count": count, "percent": 100.0 * float(stats["diverging"].mean())}
    if count:
        reason = "The sampler left regions that it could not follow: the draws miss them. Raise target_accept_prob, or reparametrise."
        return Verdict("divergences", False, figures, reason)
    return Verdict("divergences", True, figures, "None.")


def _bfmi(tree: xr.DataTree) -> Verdict:
    import arviz as az

    stats = group_of(tree, "sample_stats")
    if "energy" not in stats or stats.sizes.get("draw", 0) < 3:
        return Verdict("E-BFMI", None, {}, "Not in the tree: this kernel has no energy.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)  # an energy that stands still
        least = float(az.bfmi(xr.DataTree.from_dict({"sample_stats": stats[["energy"]].astype(float)}))["energy"].min(skipna=False))
    if least >= BFMI:
        return Verdict("E-BFMI", True, {"least": least}, f"At least {BFMI} in every chain.")
    return Verdict(
        "E-BFMI", False, {"least": least}, f"Below {BFMI}: the momentum explores the energy too slowly; tails are heavy. Reparametrise."
    )


def _time(tree: xr.DataTree, least: tuple[float, str] | None) -> Verdict:
    name = "time an effective draw"
    if least is None or not least[0] or "sampling_time" not in tree.attrs:
        return Verdict(name, None, {}, 'attrs["sampling_time"] or the effective draws are not in the tree.')
    seconds = float(tree.attrs["sampling_time"])
    return Verdict(name, None, {"seconds": seconds / least[0]}, f"{seconds:.3g} s over the least bulk ESS; a cost, not a judgement.")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
