"""Checks of Markov chains. Every statistic is ArviZ's; here are the limits, and the words."""

import re
import warnings

import numpy as np
import xarray as xr

from diagnostics._verdict import Verdict, early_end, group_of, identified, label, not_finite, some

__all__ = ["DECISIVE", "chain_verdicts"]

DECISIVE = ("draws", "R-hat", "bulk ESS", "tail ESS")
RHAT, ESS_A_CHAIN, DRAWS, BFMI = 1.01, 100, 100, 0.3
# of the other chains, on average: by chance alone one that moves as they do then stands still once
# in e^20
MOVES = 20


def chain_verdicts(tree: xr.DataTree) -> list[Verdict]:
    """All checks of a run of chains."""
    posterior = group_of(tree, "posterior")
    if not posterior.data_vars:
        return [
            Verdict("draws", False, {}, "The posterior has no variables: nothing was recorded."),
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
    moved = _that_moved(finite)
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
    """`lp` of every block beside the posterior: it does not change with labels or signs, so it
    always has an R-hat.
    """
    stats = _blocks(tree, "lp")
    return draws.assign({name: values for name, values in stats.items() if name not in draws})


def _blocks(tree: xr.DataTree, name: str) -> dict[str, xr.DataArray]:
    """A statistic of each block of a kernel: `name` of the first, `name_1` of the second, ..."""
    stats = group_of(tree, "sample_stats")
    return {
        str(key): stats[key] for key in stats.data_vars if re.fullmatch(rf"{name}(_\d+)?", str(key))
    }


def _that_moved(draws: xr.Dataset) -> dict[str, xr.DataArray]:
    """Elements that took two values at least, stacked along "element": a correlation matrix has
    a diagonal of ones.
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
    if figures["a chain"] < DRAWS:
        return Verdict(
            "draws",
            False,
            figures,
            f"Fewer than {DRAWS} draws a chain: too few for any figure below.",
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
            "No identified quantity that moves is in the tree: record invariant ones "
            "(`numpyro.deterministic`)." + beside
        )
        return Verdict("R-hat", None, {}, reason)
    if next(iter(moved.values())).sizes["chain"] < 2:
        return Verdict(
            "R-hat", None, {}, "One chain cannot disagree: run at least two, better four." + beside
        )
    with warnings.catch_warnings():
        # a stuck chain: R-hat is infinite
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)
        found = {name: az.rhat(values).fillna(np.inf) for name, values in moved.items()}
    value, worst = _worst(found, largest=True)
    if value < RHAT:
        return Verdict(
            "R-hat",
            True,
            {"largest": value, "of": worst},
            f"Rank R-hat below {RHAT} for every quantity.{beside}",
        )
    over = [name for name, values in found.items() if (values >= RHAT).any()]
    reason = (
        f"Rank R-hat reaches {RHAT} for {some(over)}: the chains have not found the same "
        f"distribution.{beside}"
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
        return Verdict(name, None, {}, "No identified quantity that moves is in the tree.")
    wanted = ESS_A_CHAIN * group_of(tree, "posterior").sizes["chain"]
    what = "means and medians" if method == "bulk" else "interval ends"
    ok = least[0] >= wanted
    reason = f"At least {wanted} ({ESS_A_CHAIN} a chain): {what} and R-hat itself are reliable."
    if not ok:
        reason = (
            f"Below {wanted} ({ESS_A_CHAIN} a chain): {what} of {least[1]} are not reliable. "
            "Draw more, or reparametrise."
        )
    return Verdict(name, ok, {"least": least[0], "of": least[1]}, reason)


def _movement(finite: xr.Dataset, moved: dict[str, xr.DataArray]) -> Verdict:
    """What stands still in a chain: a fault where the other chains say that it moves, a remark
    where nothing can be said.
    """
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
            "Nothing ever moved: every proposal was refused.",
        )
    stuck: dict[int, str] = {}
    rare: list[str] = []
    for name, values in moved.items():
        is_stuck, is_rare = _still(values.values)
        stuck |= {int(chain): name for chain in np.flatnonzero(is_stuck.any(axis=1))}
        rare += values["element"].values[is_rare.any(axis=0)].tolist()
    if stuck:
        where = ", ".join(map(str, sorted(stuck)))
        reason = (
            f"In chain {where} something never moved that moves in others "
            f"({some(sorted(set(stuck.values())))})."
        )
        return Verdict("movement", False, {"stuck chains": sorted(stuck)}, reason)
    said = []
    if rare:
        said.append(
            f"{some(rare)} never moved in one chain, and so seldom in the others that this says "
            "nothing: a rare event."
        )
    if constant:
        said.append(
            f"Constant over all draws: {some(constant)}. Right if the model fixes it, and "
            "unchecked here."
        )
    if said:
        figures = {
            name: _first(found) for name, found in (("rare", rare), ("constant", constant)) if found
        }
        return Verdict("movement", None, figures, " ".join(said))
    return Verdict("movement", True, {}, "Every variable moves in every chain.")


def _still(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[chain, element]: stands still although the others move `MOVES` times on average, or
    elsewhere; stands still otherwise.
    """
    moves = (values[:, 1:] != values[:, :-1]).sum(axis=1)
    frozen = moves == 0
    others = (moves.sum(axis=0) - moves) / max(len(moves) - 1, 1)
    place = values[:, 0]
    lowest, highest = (
        np.where(frozen, place, np.inf).min(axis=0),
        np.where(frozen, place, -np.inf).max(axis=0),
    )
    is_stuck = frozen & ((others >= MOVES) | (lowest < highest))
    return is_stuck, frozen & ~is_stuck


def _constant(values: xr.DataArray, moved: xr.DataArray | None) -> list[str]:
    """The name of a variable that never moves, or the elements of it that do not."""
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
            f"`{', '.join(bad)}` holds NaN: what diverged cannot be counted.",
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
            "own."
            if len(each) > 1
            else ""
        )
        reason = (
            "The sampler left regions that it could not follow: the draws miss them. Raise "
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
            "Other blocks change the energy between the moves of this one: the figure means "
            "nothing.",
        )
    if not np.isfinite(stats["energy"]).all():
        return Verdict(
            name,
            False,
            not_finite(stats[["energy"]]),
            "The energy is NaN or infinite: the integrator has lost its way.",
        )
    with warnings.catch_warnings():
        # an energy that stands still
        warnings.filterwarnings("ignore", "(divide by zero|invalid value)", RuntimeWarning)
        least = float(
            az.bfmi(xr.DataTree.from_dict({"sample_stats": stats[["energy"]].astype(float)}))[
                "energy"
            ].min(skipna=False)
        )
    if least >= BFMI:
        return Verdict(name, True, {"least": least}, f"At least {BFMI} in every chain.")
    reason = (
        f"Below {BFMI}: the momentum explores the energy too slowly; tails are heavy. "
        "Reparametrise."
    )
    return Verdict(
        name,
        False,
        {"least": least},
        "The energy stands still in a chain." if np.isnan(least) else reason,
    )


def _time(tree: xr.DataTree, least: tuple[float, str] | None) -> Verdict:
    name = "time an effective draw"
    if least is None or not least[0] or "sampling_time" not in tree.attrs:
        return Verdict(
            name, None, {}, 'attrs["sampling_time"] or the effective draws are not in the tree.'
        )
    seconds = float(tree.attrs["sampling_time"])
    return Verdict(
        name,
        None,
        {"seconds": seconds / least[0]},
        f"{seconds:.3g} s over the least bulk ESS; a cost, not a judgement.",
    )
