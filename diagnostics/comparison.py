"""Model comparison: ELPD, evidence and held-out scores of several runs on the same data."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from diagnostics._comparison_rows import ROW, difference_of_data, held_out_rows, joined
from diagnostics._psis import densities, good_k, lacking, num_high, psis
from diagnostics._verdict import attribute, each_of, group_of

__all__ = ["compare", "uncertainty"]

LEAST_DISTINCT_DRAWS = 100  # with fewer, an ELPD is not reproducible
ERRORS = 2.0  # a Bayes factor differs from 1 by this many known standard errors at least


def compare(trees: dict[str, xr.DataTree], test: dict[str, Any] | None = None) -> Any:
    """Compare models by ELPD, evidence and held-out score.

    The columns of the table:

    - `elpd`, `se`, `elpd_diff`, `dse`, `p`, `weight`: `az.compare` by PSIS-LOO on the
      `log_likelihood` of all observed sites together. `high_k`: number of rows with a high k-hat.
    - `log_evidence`: the run's attribute. `log_evidence_se`: the larger of the error estimated from
      replicates and the error that they claim. `log_bayes_factor`, `log_bayes_factor_se`: against
      the highest evidence, with errors added in squares. An error estimated from n replicates is
      multiplied by Student's quantile with n - 1 degrees of freedom.
    - `test_score`: sum over held-out rows of log mean_draws p(row). `test_diff`, `test_dse`: the
      difference to the best, and its standard error over rows.
    - `unsafe`: reasons why the rank of a model is unreliable. These are ties, which are marked on
      both sides, rows whose average rests on few draws, few distinct draws, uncorrected draws of an
      approximation, and evidences of runs that ended early or are not finite.

    Columns that no run can fill are left out. Models are sorted by held-out score where `test` has
    every run, else by ELPD where every run has a log-likelihood, else by log-evidence. With a group
    `log_q` beside `log_prior` (see `report`), draws of a variational run are weighted to the
    posterior as in `az.loo_approximate_posterior`. Vehtari, Gelman and Gabry (2017); Magnusson et
    al. (2019). Cost: one Pareto fit for each row and model.

    Args:
        trees: name of a model -> tree of its run. All must observe the same data. Those that do
            not, such as a model of the classes and one of the features too, are compared by `test`
            alone, which must have every run.
        test: name of a model -> pointwise log-likelihood of held-out rows: an array (chain, draw,
            row...), or a tree with the groups `log_likelihood` and `observed_data`; or the log
            predictive probability of each row, an array (row). A draw that gives a row probability
            0 has -inf.

    Returns:
        A pandas data frame, a row for each model, the best first.
    """
    import pandas as pd

    _check_names(trees, test)
    difference = difference_of_data(trees)
    if difference is not None and set(test or ()) != set(trees):
        raise difference
    of_fits = [_elpd(trees), _evidence(trees)] if difference is None else []
    parts = [*of_fits, _held_out(trees, test)]
    table = pd.concat([columns for columns, _ in parts], axis=1).reindex(list(trees))
    key = _key(table, trees)
    table = table.sort_values(
        key, ascending=False, key=lambda column: column.where(np.isfinite(column))
    )
    table.insert(0, "rank", range(len(table)))
    table["unsafe"] = [
        "; ".join(reason for _, reasons in parts for reason in reasons.get(name, ()))
        for name in table.index
    ]
    if (doubted := table.index[table["unsafe"] != ""]).size:
        warnings.warn(
            f"The ranking is unsafe: {doubted[0]}: {table['unsafe'][doubted[0]]}. See the column "
            "`unsafe`.",
            stacklevel=2,
        )
    return table


def _key(table: Any, trees: dict[str, xr.DataTree]) -> str:
    key = next(
        (
            name
            for name in ("test_score", "elpd", "log_evidence")
            if name in table and table[name].notna().all()
        ),
        None,
    )
    if key is None:
        raise ValueError(
            "trees: nothing to rank by. Every run needs the group `log_likelihood` "
            "(`Driver(groups=('log_likelihood',))`), "
            f"or every one a log-evidence, or every one a `test`; found {_inventory(trees)}. "
            "Without these, compare predictions of the same new rows by `diagnostics.log_score` "
            "and others (at the command line: `zoo predict` by each run)."
        )
    return key


Part = tuple[Any, dict[str, list[str]]]  # columns, and the doubts about each model


def _elpd(trees: dict[str, xr.DataTree]) -> Part:
    import arviz as az
    import pandas as pd

    found = joined(
        {name: tree for name, tree in trees.items() if group_of(tree, "log_likelihood").data_vars}
    )
    if not found:
        return pd.DataFrame(index=list(trees)), {}
    corrections = {name: _correction(trees[name]) for name in found}
    # ArviZ warns of high k-hat and of vanishing stacking weights; the table shows both
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each = {
            name: _loo(trees[name], values, corrections[name][0]) for name, values in found.items()
        }
        table = az.compare(each, round_to="none")
    table = table[["elpd", "se", "elpd_diff", "dse", "p", "weight"]].astype(float)
    if next(iter(found.values())).sizes[ROW] < 2:
        table[["se", "dse"]] = np.nan  # a single row has no standard deviation
    table["high_k"] = [
        num_high(each[str(name)].pareto_k.values, each[str(name)].good_k) for name in table.index
    ]
    reasons = {name: _few_points(trees[name], values) for name, values in found.items()}
    for name, doubts in reasons.items():
        if table["high_k"][name] and not doubts:
            limit = each[name].good_k
            doubts.append(
                f"{int(table['high_k'][name])} rows with k-hat above {limit:.2f}: their ELPD is "
                "unreliable"
            )
        doubts += corrections[name][1]
    _mark_ties(reasons, table["elpd_diff"], table["dse"], "ELPD")
    return table, reasons


def _mark_ties(reasons: dict[str, list[str]], apart: Any, error: Any, what: str) -> None:
    """Mark models whose difference to the best has no standard error, or is at most two of them.

    In the second case the best is marked as well.
    """
    best = str(apart.index[apart.argmax()])
    for name in map(str, apart.index):
        size = f"({apart[name]:.3g} +- {error[name]:.3g})"
        if name != best and np.isnan(error[name]):
            reasons[name].append(
                f"{what} below that of {best} by {apart[name]:.3g}, which has no standard error"
            )
        elif name != best and not -apart[name] > 2 * error[name]:
            reasons[name].append(f"{what} within two standard errors of the best, {best} {size}")
            reasons[best].append(f"{what} of {name} within two standard errors {size}")


def _evidence(trees: Mapping[str, xr.DataTree]) -> Part:
    """Evidences and Bayes factors against the highest."""
    import pandas as pd

    value = {name: attribute(tree, "log_evidence") for name, tree in trees.items()}
    value = {name: number for name, number in value.items() if number is not None}
    if not value:
        return pd.DataFrame(index=list(trees)), {}
    errors = {name: uncertainty(trees[name]) for name in value}
    table = pd.DataFrame(
        {
            "log_evidence": value,
            "log_evidence_se": {name: error for name, (error, _) in errors.items()},
        },
        dtype=float,
    )
    reasons = {name: _evidence_doubts(trees[name], value[name], errors[name][0]) for name in value}
    finite = {name: number for name, number in value.items() if np.isfinite(number)}
    if not finite:
        return table.assign(log_bayes_factor=np.nan, log_bayes_factor_se=np.nan), reasons
    best = max(finite, key=lambda name: finite[name])
    table["log_bayes_factor"] = table["log_evidence"] - table["log_evidence"][best]
    table["log_bayes_factor_se"] = np.hypot(
        table["log_evidence_se"], float(table["log_evidence_se"][best])
    )
    table.loc[best, "log_bayes_factor_se"] = 0.0
    for name in finite:
        factor, se = table["log_bayes_factor"][name], table["log_bayes_factor_se"][name]
        many = _quantile(errors[name], errors[best])
        if name != best and np.isfinite(se) and not -factor > many * se:
            size = f"{factor:.3g} +- {se:.3g}, not {many:.3g} standard errors below 0"
            reasons[name].append(f"its log Bayes factor against the best, {best}, is {size}")
            reasons[best].append(f"the log Bayes factor of {name} against it is {size}")
    return table, reasons


def uncertainty(tree: xr.DataTree) -> tuple[float, float]:
    """Return the standard error of the log-evidence, and its degrees of freedom.

    For n replicates it is the larger of two errors: the estimate from their spread, with n - 1
    degrees of freedom, and the claimed error sqrt(mean se^2 / n), which counts as known.
    """
    stated, each = attribute(tree, "log_evidence_se"), each_of(tree, "log_evidence")
    stated = np.nan if stated is None else stated
    if len(each) < 2:
        return stated, np.inf
    claims = (
        each_of(tree, "log_evidence_se")
        if "log_evidence_se_of_replicates" in tree.attrs
        else np.zeros(1)
    )
    claimed = float(np.sqrt(np.mean(claims**2) / len(each)))
    return (claimed, np.inf) if claimed > stated else (stated, len(each) - 1.0)


def _quantile(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The quantile of Student's t of the same probability as `ERRORS` has for a known error.

    Its degrees of freedom are Welch's.
    """
    from scipy.stats import norm, t

    variances = np.array([one[0], other[0]]) ** 2
    doubt = np.sum(variances**2 / np.array([one[1], other[1]]))
    return float(t.ppf(norm.cdf(ERRORS), np.sum(variances) ** 2 / doubt)) if doubt > 0 else ERRORS


def _evidence_doubts(tree: xr.DataTree, value: float, error: float) -> list[str]:
    ended = str(tree.attrs.get("ended", "finished"))
    found = (
        []
        if ended == "finished"
        else [f"its run ended by {ended!r} before it had finished: part of its evidence is missing"]
    )
    if not np.isfinite(value):
        return [*found, "its log-evidence is not finite"]
    return found if np.isfinite(error) else [*found, "its log-evidence has no error"]


def _held_out(trees: dict[str, xr.DataTree], test: dict[str, Any] | None) -> Part:
    import pandas as pd
    from scipy.special import logsumexp

    if not test:
        return pd.DataFrame(index=list(trees)), {}
    found = held_out_rows(test)
    count = lambda values: np.log(values.shape[0] * values.shape[1])
    with np.errstate(divide="ignore"):  # log 0: every draw gives the row probability 0
        rows = {
            name: logsumexp(values, axis=(0, 1)) - count(values) for name, values in found.items()
        }
    best = max(rows, key=lambda name: rows[name].sum())
    with np.errstate(invalid="ignore"):  # rows of probability 0 in both
        apart = {name: values - rows[best] for name, values in rows.items()}
        table = pd.DataFrame(
            {
                "test_score": {name: values.sum() for name, values in rows.items()},
                "test_diff": {name: values.sum() for name, values in apart.items()},
                "test_dse": {name: _error_of_sum(values) for name, values in apart.items()},
            }
        )
    reasons = {name: _test_faults(values, rows[name]) for name, values in found.items()}
    is_finite = np.isfinite(table["test_score"])
    if is_finite.any():
        _mark_ties(
            reasons, table["test_diff"][is_finite], table["test_dse"][is_finite], "held-out score"
        )
    return table, reasons


def _error_of_sum(values: np.ndarray) -> float:
    return (
        float(np.sqrt(len(values)) * np.std(values, ddof=1))
        if len(values) > 1 and np.isfinite(values).all()
        else float("nan")
    )


def _test_faults(
    values: Float[np.ndarray, "chain draw row"], score: Float[np.ndarray, " row"]
) -> list[str]:
    impossible = int(np.sum(np.isneginf(score)))
    found = [f"{impossible} held-out rows have probability 0 in every draw"] if impossible else []
    if values.shape[:2] == (1, 1):  # the draws were averaged before
        return found
    _, khat = psis(xr.DataArray(values[..., np.isfinite(score)], dims=("chain", "draw", ROW)))
    few = num_high(khat.values, good_k(values.shape[0] * values.shape[1]))
    return [
        *found,
        *([f"{few} held-out rows whose average rests on a few draws (k-hat)"] if few else []),
    ]


def _loo(tree: xr.DataTree, log_likelihood: xr.DataArray, correction: xr.DataArray | None) -> Any:
    """PSIS-LOO by ArviZ, with the relative efficiency of the likelihoods.

    Label switching does not change the likelihoods.
    """
    import arviz as az

    relative = 1.0
    if not _is_variational(tree) and log_likelihood.sizes["draw"] >= 4:
        likelihood = np.exp(log_likelihood - log_likelihood.max(("chain", "draw")))
        relative = float(az.ess(likelihood, method="mean", relative=True).clip(1e-3, 1.0).mean())
    weights, khat = psis((0.0 if correction is None else correction) - log_likelihood, relative)
    data = xr.DataTree.from_dict(
        {
            "posterior": group_of(tree, "posterior"),
            "log_likelihood": log_likelihood.to_dataset(name="joined"),
        }
    )
    return az.loo(
        data,
        pointwise=True,
        reff=relative,
        log_weights=weights.transpose(*log_likelihood.dims),
        pareto_k=khat,
    )


def _correction(tree: xr.DataTree) -> tuple[xr.DataArray | None, list[str]]:
    """log p - log q of the draws of an approximation; or the doubts, where the tree lacks it."""
    if not _is_variational(tree):
        return None, []
    if missing := lacking(tree):
        return None, [
            f"draws of an approximation, not of the posterior, and no `{', '.join(missing)}` in "
            "the tree to correct them"
        ]
    found = densities(tree)
    if found is None or not np.isfinite(found.max(skipna=False)):
        return None, [
            "draws of an approximation, not of the posterior, and their densities are NaN or "
            "infinite, so they are not corrected"
        ]
    return found.drop_vars(("chain", "draw"), errors="ignore"), []


def _few_points(tree: xr.DataTree, log_likelihood: xr.DataArray) -> list[str]:
    """The doubt that draws repeat a few points, as a list; empty where they do not.

    A point estimate gives such draws, or a collapse of the importance weights.
    """
    posterior = group_of(tree, "posterior")
    floats = [values for values in posterior.data_vars.values() if values.dtype.kind == "f"]
    each = _distinct(log_likelihood)
    if max(each) == 1:  # the likelihood may be constant
        each = np.max([_distinct(values) for values in floats], axis=0) if floats else each
    count, size = sum(each), log_likelihood.sizes["chain"] * log_likelihood.sizes["draw"]
    # a posterior of discrete sites may have only a few states
    if count >= LEAST_DISTINCT_DRAWS or (posterior.data_vars and not floats):
        return []
    if max(each) == 1 and size > len(each):
        return ["all draws of a chain are one point: a point mass is no posterior"]
    return [f"its {size} draws are {count} distinct points: too few for an ELPD"]


def _distinct(values: xr.DataArray) -> list[int]:
    """Number of distinct draws of each chain, compared by their sums."""
    sums = values.sum([dim for dim in values.dims if dim not in ("chain", "draw")]).transpose(
        "chain", "draw"
    )
    return [len(np.unique(chain)) for chain in sums.values]


def _is_variational(tree: xr.DataTree) -> bool:
    return "elbo" in group_of(tree, "sample_stats")


def _check_names(trees: dict[str, xr.DataTree], test: dict[str, Any] | None) -> None:
    if not isinstance(trees, Mapping) or isinstance(trees, xr.DataTree):
        raise TypeError(f"trees: a dict of name -> DataTree; found {type(trees).__name__}.")
    if not trees:
        raise ValueError("trees: empty; give a dict of name -> tree.")
    if wrong := {
        name: type(tree).__name__
        for name, tree in trees.items()
        if not isinstance(tree, xr.DataTree)
    }:
        raise TypeError(f"trees: a dict of name -> DataTree; found {wrong}.")
    if test is not None and (unknown := sorted(set(test) - set(trees))):
        raise ValueError(f"test: {unknown} are not among the trees {list(trees)}.")


def _inventory(trees: dict[str, xr.DataTree]) -> dict[str, list[str]]:
    return {
        name: [*tree.children, *(["log_evidence"] if "log_evidence" in tree.attrs else [])]
        for name, tree in trees.items()
    }
