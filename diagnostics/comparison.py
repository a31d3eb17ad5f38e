"""Which model is better: ELPD, evidence and held-out score of several runs on the same data, in one table."""

import warnings
from typing import Any

import numpy as np
import xarray as xr

from diagnostics._psis import densities, good_k, num_high, psis
from diagnostics._verdict import attribute, group_of

__all__ = ["compare"]

ROW = "observation"


def compare(trees: dict[str, xr.DataTree], test: dict[str, Any] | None = None) -> Any:
    """A pandas table of the models, best first, with a column `unsafe` that says why a model's place is not to be relied on.

    - `elpd`, `se`, `elpd_diff`, `dse`, `p`, `weight`: `az.compare` by PSIS-LOO on the joined `log_likelihood` of all observed
      sites; the difference to the best with its standard error. `high_k`: rows whose k-hat is too high.
    - `log_evidence`, `log_evidence_se`: the run's attributes. `log_bayes_factor`, `log_bayes_factor_se`: against the highest
      evidence; the errors of independent runs add in squares.
    - `test_score`: sum over held-out rows of log mean_draws p(row). `test_diff`, `test_dse`: the difference to the best, and
      its standard error over rows.

    Columns that no run can fill are left out. Sorted by ELPD where every run has a log-likelihood, else by log-evidence, else by
    held-out score: by the first that every run has.

    :param trees: name of a model -> tree of its run. All must observe the same data.
    :param test: name of a model -> pointwise log-likelihood of held-out rows, (chain, draw, row...): an array, or a tree with
        a group `log_likelihood`.

    With a group `log_q` beside `log_prior` (see `report`), draws of a variational run are weighted to the posterior
    as `az.loo_approximate_posterior` does it. Vehtari, Gelman and Gabry (2017); Magnusson et al. (2019).
    Cost: one Pareto fit for each row and model.
    """
    import pandas as pd

    _check_names(trees, test)
    _check_same_data(trees)
    parts = [_elpd(trees), _evidence(trees), _held_out(trees, test)]
    table = pd.concat([columns for columns, _ in parts], axis=1).reindex(list(trees))
    key = next((name for name in ("elpd", "log_evidence", "test_score") if name in table and table[name].notna().all()), None)
    if key is None:
        raise ValueError(
            "trees: nothing to rank by. Every run needs the group `log_likelihood` (`Driver(groups=('log_likelihood',))`), "
            f"or every one a log-evidence, or every one a `test`; found {_inventory(trees)}."
        )
    table = table.sort_values(key, ascending=False)
    table.insert(0, "rank", range(len(table)))
    table["unsafe"] = ["; ".join(reason for _, reasons in parts for reason in reasons.get(name, ())) for name in table.index]
    if (doubted := table.index[table["unsafe"] != ""]).size:
        warnings.warn(f"The ranking is unsafe: {doubted[0]}: {table['unsafe'][doubted[0]]}. See the column `unsafe`.", stacklevel=2)
    return table


Part = tuple[Any, dict[str, list[str]]]  # columns of some models, and reasons to doubt them


def _elpd(trees: dict[str, xr.DataTree]) -> Part:
    import arviz as az
    import pandas as pd

    joined = _joined({name: tree for name, tree in trees.items() if group_of(tree, "log_likelihood").data_vars})
    if not joined:
        return pd.DataFrame(index=list(trees)), {}
    reasons: dict[str, list[str]] = {name: [] for name in joined}
    with warnings.catch_warnings():  # of high k-hat and of vanishing stacking weights; the column says both
        warnings.simplefilter("ignore")
        each = {name: _loo(trees[name], values) for name, values in joined.items()}
        table = az.compare(each, round_to="none")
    table = table[["elpd", "se", "elpd_diff", "dse", "p", "weight"]].astype(float)
    table["high_k"] = [num_high(each[str(name)].pareto_k.values, each[str(name)].good_k) for name in table.index]
    for name, found in reasons.items():
        row = table.loc[name]
        if row["high_k"]:
            found.append(f"{int(row['high_k'])} rows with k-hat above {each[name].good_k:.2f}: their ELPD is unreliable")
        if row["elpd_diff"] < 0 and -row["elpd_diff"] < 2 * row["dse"]:
            found.append(f"ELPD within two standard errors of the best ({row['elpd_diff']:.1f} +- {row['dse']:.1f})")
        if _is_variational(trees[name]) and densities(trees[name]) is None:
            found.append("draws of an approximation, not of the posterior, and no `log_q` in the tree to correct them")
    return table, reasons


def _evidence(trees: dict[str, xr.DataTree]) -> Part:
    import pandas as pd

    value = {name: attribute(tree, "log_evidence") for name, tree in trees.items()}
    value = {name: number for name, number in value.items() if number is not None}
    if not value:
        return pd.DataFrame(index=list(trees)), {}
    error = {name: attribute(trees[name], "log_evidence_se") for name in value}
    table = pd.DataFrame({"log_evidence": value, "log_evidence_se": pd.Series(error, dtype=float)})
    best = table["log_evidence"].idxmax()
    table["log_bayes_factor"] = table["log_evidence"] - table["log_evidence"][best]
    table["log_bayes_factor_se"] = np.where(
        table.index == best, 0.0, np.sqrt(table["log_evidence_se"] ** 2 + float(table["log_evidence_se"][best]) ** 2)
    )
    reasons: dict[str, list[str]] = {}
    for name, row in table.iterrows():
        factor, se = row["log_bayes_factor"], row["log_bayes_factor_se"]
        if not np.isfinite(row["log_evidence"]):
            reasons[str(name)] = ["its log-evidence is not finite"]
        elif not np.isfinite(row["log_evidence_se"]):
            reasons[str(name)] = ["its log-evidence has no error"]
        elif name != best and not -factor >= 2 * se:
            reasons[str(name)] = [f"log Bayes factor within two errors of the best ({factor:.1f} +- {se:.1f})"]
    return table, reasons


def _held_out(trees: dict[str, xr.DataTree], test: dict[str, Any] | None) -> Part:
    import pandas as pd
    from scipy.special import logsumexp

    if not test:
        return pd.DataFrame(index=list(trees)), {}
    joined = {name: _test_rows(name, values) for name, values in test.items()}
    first = next(iter(joined))
    for name, values in joined.items():
        if values.shape[-1] != joined[first].shape[-1]:
            raise ValueError(f"test: {first!r} has {joined[first].shape[-1]} held-out rows, {name!r} has {values.shape[-1]}.")
    rows = {name: logsumexp(values, axis=(0, 1)) - np.log(values.shape[0] * values.shape[1]) for name, values in joined.items()}
    best = max(rows, key=lambda name: rows[name].sum())
    apart = {name: values - rows[best] for name, values in rows.items()}
    table = pd.DataFrame(
        {
            "test_score": {name: values.sum() for name, values in rows.items()},
            "test_diff": {name: values.sum() for name, values in apart.items()},
            "test_dse": {
                name: np.sqrt(len(values)) * np.std(values, ddof=1) if len(values) > 1 else np.nan for name, values in apart.items()
            },
        }
    )
    reasons: dict[str, list[str]] = {name: [] for name in joined}
    for name, values in joined.items():
        if few := _few_draws(values):
            reasons[name].append(f"{few} held-out rows whose average rests on a few draws (k-hat)")
        if name != best and not -table["test_diff"][name] >= 2 * table["test_dse"][name]:
            reasons[name].append(f"held-out score within two standard errors of the best ({table['test_diff'][name]:.1f})")
    return table, reasons


def _loo(tree: xr.DataTree, log_likelihood: xr.DataArray) -> Any:
    """PSIS-LOO by ArviZ; the relative efficiency is that of the likelihoods, which labels and signs do not touch."""
    import arviz as az

    correction, relative = densities(tree), 1.0
    if not _is_variational(tree) and log_likelihood.sizes["draw"] >= 4:
        likelihood = np.exp(log_likelihood - log_likelihood.max(("chain", "draw")))
        relative = float(az.ess(likelihood, method="mean", relative=True).clip(1e-3, 1.0).mean())
    weights, khat = psis(
        (0.0 if correction is None else correction.drop_vars(("chain", "draw"), errors="ignore")) - log_likelihood, relative
    )
    data = xr.DataTree.from_dict({"posterior": group_of(tree, "posterior"), "log_likelihood": log_likelihood.to_dataset(name="joined")})
    return az.loo(data, pointwise=True, reff=relative, log_weights=weights.transpose(*log_likelihood.dims), pareto_k=khat)


def _is_variational(tree: xr.DataTree) -> bool:
    return "elbo" in group_of(tree, "sample_stats")


def _joined(trees: dict[str, xr.DataTree]) -> dict[str, xr.DataArray]:
    """All observed sites of each tree side by side (chain, draw, observation), in the order of the first tree's data."""
    found, first = {}, None
    for name, tree in trees.items():
        sites = _matched(first, tree) if first is not None else list(group_of(tree, "log_likelihood").data_vars)
        first = tree if first is None else first
        parts = [_flat(group_of(tree, "log_likelihood")[site], tree) for site in sites]
        found[name] = xr.DataArray(np.concatenate(parts, axis=-1), dims=("chain", "draw", ROW))
        if not np.isfinite(found[name]).all():
            raise ValueError(f"trees[{name!r}]: its log-likelihood has NaN or infinite values; sites {list(map(str, sites))}.")
    sizes = {name: values.sizes[ROW] for name, values in found.items()}
    for name, size in sizes.items():
        if size != next(iter(sizes.values())):
            other = next(iter(sizes))
            raise ValueError(f"trees: {other!r} has {sizes[other]} log-likelihood terms, {name!r} has {size}: ELPD needs the same rows.")
    return found


def _flat(values: xr.DataArray, tree: xr.DataTree) -> np.ndarray:
    """(chain, draw, everything else), without the entries that were not observed (NaN in the data)."""
    array = values.astype(float).transpose("chain", "draw", ...).values
    observed = group_of(tree, "observed_data")
    data = observed[values.name].values if values.name in observed else None
    flat = array.reshape(*array.shape[:2], -1)
    if data is not None and data.dtype.kind == "f" and data.shape == array.shape[2:]:
        flat = flat[..., ~np.isnan(data.ravel())]
    return flat


def _matched(first: xr.DataTree, tree: xr.DataTree) -> list[Any]:
    """The sites of `tree` in the order in which `first` has the same data; by name where there are no data."""
    sites, mine, theirs = (
        list(group_of(tree, "log_likelihood").data_vars),
        group_of(tree, "observed_data"),
        group_of(first, "observed_data"),
    )
    wanted = [theirs[site].values for site in group_of(first, "log_likelihood").data_vars if site in theirs]
    left, order = [site for site in sites if site in mine], []
    for values in wanted:
        same = [site for site in left if _equal(mine[site].values, values)]
        order += same[:1]
        left = [site for site in left if site not in same[:1]]
    return order + [site for site in sites if site not in order]


def _check_same_data(trees: dict[str, xr.DataTree]) -> None:
    """Every tree observes the arrays that the first observes, whatever the sites are called."""
    holders = {name: group_of(tree, "observed_data") for name, tree in trees.items() if "observed_data" in tree.children}
    first = next(iter(holders), None)
    for name, data in holders.items():
        left = [values.values for values in data.data_vars.values()]
        for site, values in holders[str(first)].data_vars.items():
            at = next((i for i, other in enumerate(left) if _equal(other, values.values)), None)
            if at is None:
                raise _other_data(str(first), holders[str(first)], name, data, str(site))
            del left[at]
        if left:
            raise _other_data(str(first), holders[str(first)], name, data, "a further site")


def _other_data(first: str, mine: xr.Dataset, name: str, theirs: xr.Dataset, site: str) -> ValueError:
    shapes = [{str(key): values.shape for key, values in data.data_vars.items()} for data in (mine, theirs)]
    why = "the values differ" if sorted(map(str, shapes[0].values())) == sorted(map(str, shapes[1].values())) else "the shapes differ"
    return ValueError(
        f"trees: {first!r} and {name!r} observe different data ({why} at {site}): {first!r} has {shapes[0]}, {name!r} has {shapes[1]}. "
        "Only runs on the same data can be compared."
    )


def _check_names(trees: dict[str, xr.DataTree], test: dict[str, Any] | None) -> None:
    if not trees:
        raise ValueError("trees: empty; give a dict of name -> tree.")
    if wrong := {name: type(tree).__name__ for name, tree in trees.items() if not isinstance(tree, xr.DataTree)}:
        raise TypeError(f"trees: a dict of name -> DataTree; found {wrong}.")
    if test is not None and (unknown := sorted(set(test) - set(trees))):
        raise ValueError(f"test: {unknown} are not among the trees {list(trees)}.")


def _test_rows(name: str, values: Any) -> np.ndarray:
    if isinstance(values, xr.DataTree):
        return _joined({name: values})[name].values
    array = np.asarray(values.transpose("chain", "draw", ...) if isinstance(values, xr.DataArray) else values, float)
    if array.ndim < 3 or not np.isfinite(array).all():
        bad = int(np.sum(~np.isfinite(array)))
        raise ValueError(f"test[{name!r}]: finite log-likelihoods (chain, draw, row); found shape {array.shape}, {bad} not finite.")
    return array.reshape(*array.shape[:2], -1)


def _few_draws(values: np.ndarray) -> int:
    """Rows whose mean over draws has a Pareto k-hat that is too high."""
    _, khat = psis(xr.DataArray(values, dims=("chain", "draw", ROW)))
    return num_high(khat.values, good_k(values.shape[0] * values.shape[1]))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    floats = one.dtype.kind == "f" and other.dtype.kind == "f"
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=floats))


def _inventory(trees: dict[str, xr.DataTree]) -> dict[str, list[str]]:
    return {name: [*tree.children, *(["log_evidence"] if "log_evidence" in tree.attrs else [])] for name, tree in trees.items()}
