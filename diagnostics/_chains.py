"""Checks of Markov chains: ArviZ's statistics, their limits, and the verdicts in words."""

import re
import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, early_end, group_of, identified, label, not_finite, some

__all__ = ["DECISIVE", "chain_verdicts"]

DECISIVE = ("draws", "R-hat", "bulk ESS", "tail ESS")
MOST_RHAT = 1.01
LEAST_ESS_PER_CHAIN = 100
LEAST_DRAWS = 100
LEAST_BFMI = 0.3


def chain_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """Return all checks of a run of chains."""
    posterior = group_of(tree, "posterior")
    if not posterior.data_vars:
        return [
            Verdict("draws", False, {}, "The posterior has no variables."),
            early_end(tree),
        ]
    if not posterior.sizes["draw"]:
        return [
            Verdict("draws", False, {"a chain": 0}, "No draws: the run ended in its warm-up."),
            early_end(tree),
        ]
    draws, left_out = identified(tree)
    invariant = _with_log_joint(draws, tree)
    finite = invariant[
        [name for name, values in invariant.data_vars.items() if np.isfinite(values).all()]
    ]
    moved = _not_constant(finite)
    bulk = _least(moved, "bulk")
    return [
        _draws(tree),
        _rhat(moved, left_out),
        _ess("bulk", bulk, tree),
        _ess("tail", _least(moved, "tail"), tree),
        _movement(finite, moved),
        _divergences(tree),
        _bfmi(tree),
        _time(tree, bulk),
        early_end(tree),
    ]


def _with_log_joint(draws: xr.Dataset, tree: xr.DataTree) -> xr.Dataset:
    """The posterior, and `lp` of every block, which label switching does not change."""
    stats = _blocks(tree, "lp")
    return draws.assign({name: values for name, values in stats.items() if name not in draws})


def _blocks(tree: xr.DataTree, name: str) -> dict[str, xr.DataArray]:
    """A statistic of each block of a kernel: `name`, `name_1`, ..."""
    stats = group_of(tree, "sample_stats")
    return {
        str(key): stats[key] for key in stats.data_vars if re.fullmatch(rf"{name}(_\d+)?", str(key))
    }


def _not_constant(draws: xr.Dataset) -> dict[str, xr.DataArray]:
    """Elements that are not constant, stacked along "element".

    Some are constant in a correct run, such as the diagonal of a correlation matrix.
    """
    found = {}
    for name, values in draws.data_vars.items():
        flat = values.astype(float).transpose("chain", "draw", ...)
        varies = (flat.max(("chain", "draw")) > flat.min(("chain", "draw"))).values.ravel()
        array = flat.values.reshape(*flat.shape[:2], -1)[..., varies]
        names = [
            label(values.isel(chain=0, draw=0, drop=True), i)
            for i in np.flatnonzero(varies).tolist()
        ]
        if names:
            found[str(name)] = xr.DataArray(
                array, dims=("chain", "draw", "element"), coords={"element": names}, name=name
            )
    return found


def _draws(tree: xr.DataTree) -> Verdict:
    posterior = group_of(tree, "posterior")
    bad = not_finite(_with_log_joint(posterior, tree))
    figures = {"chains": posterior.sizes["chain"], "a chain": posterior.sizes["draw"]}
    if bad:
        reason = (
            f"NaN or infinite draws of {some(list(bad))}: a density overflows, or a site is "
            "undefined."
        )
        return Verdict("draws", False, figures | bad, reason)
    if figures["a chain"] < LEAST_DRAWS:
        return Verdict(
            "draws",
            False,
            figures,
            f"Fewer than {LEAST_DRAWS} draws a chain: too few for the other checks.",
        )
    return Verdict("draws", True, figures, "All finite.")


def _worst(statistic: dict[str, xr.DataArray], largest: bool) -> tuple[float, str]:
    value = xr.concat(statistic.values(), "element")
    at = int(np.argmax(value.values) if largest else np.argmin(value.values))
    return float(value[at]), str(value["element"].values[at])


def _rhat(moved: dict[str, xr.DataArray], left_out: list[str]) -> Verdict:
    import arviz as az

    beside = f" Not identified, so without an R-hat: {', '.join(left_out)}." if left_out else ""
    if not moved:
        reason = (
            "The tree has no identified variable that moves: record quantities that label "
            "switching does not change, by `numpyro.deterministic`." + beside
        )
        return Verdict("R-hat", None, {}, reason)
    if next(iter(moved.values())).sizes["chain"] < 2:
        return Verdict(
            "R-hat", None, {}, "One chain has no R-hat: run at least two, better four." + beside
        )
    with warnings.catch_warnings():
        # a chain that never moves makes R-hat infinite
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)
        found = {name: az.rhat(values).fillna(np.inf) for name, values in moved.items()}
    value, worst = _worst(found, largest=True)
    if value < MOST_RHAT:
        return Verdict(
            "R-hat",
            True,
            {"largest": value, "of": worst},
            f"Rank R-hat below {MOST_RHAT} for every quantity.{beside}",
        )
    over = [name for name, values in found.items() if (values >= MOST_RHAT).any()]
    reason = (
        f"Rank R-hat reaches {MOST_RHAT} for {some(over)}: the chains have not converged to "
        f"the same distribution. Take more steps (num_warmup, num_samples).{beside}"
    )
    return Verdict("R-hat", False, {"largest": value, "of": worst}, reason)


def _least(moved: dict[str, xr.DataArray], method: str) -> tuple[float, str] | None:
    import arviz as az

    return (
        _worst(
            {name: az.ess(values, method=method).fillna(0.0) for name, values in moved.items()},
            largest=False,
        )
        if moved
        else None
    )


def _ess(method: str, least: tuple[float, str] | None, tree: xr.DataTree) -> Verdict:
    name = f"{method} ESS"
    if least is None:
        return Verdict(name, None, {}, "The tree has no identified variable that moves.")
    wanted = LEAST_ESS_PER_CHAIN * group_of(tree, "posterior").sizes["chain"]
    what = "means and medians" if method == "bulk" else "interval ends"
    ok = least[0] >= wanted
    reason = (
        f"At least {wanted} ({LEAST_ESS_PER_CHAIN} a chain): {what} and R-hat itself are reliable."
    )
    if not ok:
        reason = (
            f"Below {wanted} ({LEAST_ESS_PER_CHAIN} a chain): {what} of {least[1]} are not "
            "reliable. Draw more, or reparametrise."
        )
    return Verdict(name, ok, {"least": least[0], "of": least[1]}, reason)


def _movement(finite: xr.Dataset, moved: dict[str, xr.DataArray]) -> Verdict:
    """Variables that never move in a chain; a failure where they move in the other chains."""
    constant = [
        name
        for key, values in finite.data_vars.items()
        for name in _constant(values, moved.get(str(key)))
    ]
    if constant and not moved:
        return Verdict(
            "movement",
            False,
            {"constant": _first(constant)},
            "No variable ever moved: every proposal was rejected.",
        )
    stuck: dict[int, str] = {}
    rare: list[str] = []
    for name, values in moved.items():
        is_stuck, is_rare = _stuck(values.values)
        stuck |= {int(chain): name for chain in np.flatnonzero(is_stuck.any(axis=1))}
        rare += values["element"].values[is_rare.any(axis=0)].tolist()
    if stuck:
        where = ", ".join(map(str, sorted(stuck)))
        reason = (
            f"In chain {where} variables never moved that move in the others "
            f"({some(sorted(set(stuck.values())))})."
        )
        return Verdict("movement", False, {"stuck chains": sorted(stuck)}, reason)
    remarks = []
    if rare:
        remarks.append(
            f"{some(rare)} never moved in one chain, and rarely in the others: a rare event, which "
            "is no evidence of a fault."
        )
    if constant:
        remarks.append(
            f"Constant over all draws: {some(constant)}. Correct if the model fixes them; not "
            "checked here."
        )
    if remarks:
        figures = {
            name: _first(found) for name, found in (("rare", rare), ("constant", constant)) if found
        }
        return Verdict("movement", None, figures, " ".join(remarks))
    return Verdict("movement", True, {}, "Every variable moves in every chain.")


def _stuck(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays [chain, element]: stuck although other chains move, and constant otherwise.

    The others move 20 times on average, or chains are constant at different values. A chain that
    moves as often as they do has 0 moves with probability e^-20.
    """
    moves = (values[:, 1:] != values[:, :-1]).sum(axis=1)
    frozen = moves == 0
    others = (moves.sum(axis=0) - moves) / max(len(moves) - 1, 1)
    place = values[:, 0]
    lowest = np.where(frozen, place, np.inf).min(axis=0)
    highest = np.where(frozen, place, -np.inf).max(axis=0)
    is_stuck = frozen & ((others >= 20) | (lowest < highest))
    return is_stuck, frozen & ~is_stuck


def _constant(values: xr.DataArray, moved: xr.DataArray | None) -> list[str]:
    """The name of a variable that never moves, or of its elements that do not."""
    one = values.isel(chain=0, draw=0, drop=True)
    if moved is None:
        return [str(values.name)] if one.size else []
    if moved.sizes["element"] == one.size:
        return []
    has_moved = set(moved["element"].values.tolist())
    return [name for name in (label(one, i) for i in range(one.size)) if name not in has_moved]


def _first(names: list[str], most: int = 5) -> list[str]:
    return [*names[:most], *(["..."] if len(names) > most else [])]


def _divergences(tree: xr.DataTree) -> Verdict:
    each = {name: values.astype(float) for name, values in _blocks(tree, "diverging").items()}
    if not each:
        return Verdict("divergences", None, {}, "Not in the tree: this kernel reports none.")
    if bad := [name for name, values in each.items() if not np.isfinite(values).all()]:
        return Verdict(
            "divergences",
            False,
            {},
            f"`{', '.join(bad)}` holds NaN, so divergences cannot be counted.",
        )
    counts = {name: int(values.sum()) for name, values in each.items()}
    figures = {
        "count": sum(counts.values()),
        "percent": 100.0
        * float(np.any([values.values > 0 for values in each.values()], axis=0).mean()),
    }
    if len(each) > 1:
        figures |= counts
    if figures["count"]:
        where = (
            f" Counted in {some([name for name in counts if counts[name]])}; each block has its "
            "own count."
            if len(each) > 1
            else ""
        )
        reason = (
            "The integrator diverged in regions of high curvature, which the draws miss. Raise "
            "target_accept_prob, or reparametrise."
        )
        return Verdict("divergences", False, figures, reason + where)
    return Verdict("divergences", True, figures, "None.")


def _bfmi(tree: xr.DataTree) -> Verdict:
    import arviz as az

    stats, name = group_of(tree, "sample_stats"), "E-BFMI"
    if "energy" not in stats or stats.sizes.get("draw", 0) < 3:
        return Verdict(name, None, {}, "Not in the tree: this kernel has no energy.")
    if "energy_1" in stats or "Gibbs" in str(tree.attrs.get("kernel", "")):
        return Verdict(
            name,
            None,
            {},
            "Other blocks change the energy between moves of this one, so E-BFMI means nothing.",
        )
    if not np.isfinite(stats["energy"]).all():
        return Verdict(
            name,
            False,
            not_finite(stats[["energy"]]),
            "The energy is NaN or infinite: the integrator is unstable.",
        )
    with warnings.catch_warnings():
        # a constant energy
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)
        least = float(
            az.bfmi(xr.DataTree.from_dict({"sample_stats": stats[["energy"]].astype(float)}))[
                "energy"
            ].min(skipna=False)
        )
    if least >= LEAST_BFMI:
        return Verdict(name, True, {"least": least}, f"At least {LEAST_BFMI} in every chain.")
    reason = (
        f"Below {LEAST_BFMI}: the energy distribution is explored too slowly, as with heavy tails. "
        "Reparametrise."
    )
    return Verdict(
        name,
        False,
        {"least": least},
        "The energy is constant in a chain." if np.isnan(least) else reason,
    )


def _time(tree: xr.DataTree, least: tuple[float, str] | None) -> Verdict:
    name = "time per effective draw"
    if least is None or not least[0] or "sampling_time" not in tree.attrs:
        return Verdict(
            name, None, {}, 'attrs["sampling_time"] or the effective draws are not in the tree.'
        )
    seconds = float(tree.attrs["sampling_time"])
    return Verdict(
        name,
        None,
        {"seconds": seconds / least[0]},
        f"{seconds:.3g} s over the least bulk ESS; a cost, which is not judged.",
    )
