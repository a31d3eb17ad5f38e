"""Which model is better: ELPD, evidence and held-out score of several runs on the same data, in
one table.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from diagnostics._comparison_evidence import evidence_columns
from diagnostics._comparison_rows import ROW, check_same_data, held_out_rows, joined
from diagnostics._psis import densities, good_k, lacking, num_high, psis
from diagnostics._verdict import group_of

__all__ = ["compare"]

DRAWS = 100  # distinct ones, for an ELPD that another run would give again


def compare(trees: dict[str, xr.DataTree], test: dict[str, Any] | None = None) -> Any:
    """A pandas table of the models, best first, with a column `unsafe` that says why a model's
    place is not to be relied on.

    - `elpd`, `se`, `elpd_diff`, `dse`, `p`, `weight`: `az.compare` by PSIS-LOO on the joined
      `log_likelihood` of all observed sites; the difference to the best with its standard error.
      `high_k`: rows whose k-hat is too high.
    - `log_evidence`: the run's attribute; `log_evidence_se`: the larger of the error that its
      replicates show and that which they claim. `log_bayes_factor`, `log_bayes_factor_se`: against
      the highest evidence; the errors of independent runs add in squares. An error estimated from n
      replicates is taken times Student's quantile with n - 1 degrees of freedom.
    - `test_score`: sum over held-out rows of log mean_draws p(row). `test_diff`, `test_dse`: the
      difference to the best, and its standard error over rows.

    A tie is marked on both sides. Other doubts: rows whose average rests on few draws, draws that
    are few distinct points, draws of an approximation that nothing corrects, and evidences of runs
    that ended early or are not finite.

    Columns that no run can fill are left out. Sorted by ELPD where every run has a log-likelihood,
    else by log-evidence, else by held-out score: by the first that every run has.

    :param trees: name of a model -> tree of its run. All must observe the same data.
    :param test: name of a model -> pointwise log-likelihood of held-out rows, (chain, draw,
    row...): an array, or a tree with
        a group `log_likelihood`, whose sites are matched by its `observed_data`. -inf is a row that
        a draw rules out.

    With a group `log_q` beside `log_prior` (see `report`), draws of a variational run are weighted
    to the posterior as `az.loo_approximate_posterior` does it. Vehtari, Gelman and Gabry (2017);
    Magnusson et al. (2019). Cost: one Pareto fit for each row and model.
    """
    import pandas as pd

    _check_names(trees, test)
    check_same_data(trees)
    parts = [_elpd(trees), evidence_columns(trees), _held_out(trees, test)]
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
    """The first column that every run has."""
    key = next(
        (
            name
            for name in ("elpd", "log_evidence", "test_score")
            if name in table and table[name].notna().all()
        ),
        None,
    )
    if key is None:
        raise ValueError(
            "trees: nothing to rank by. Every run needs the group `log_likelihood` "
            "(`Driver(groups=('log_likelihood',))`), "
            f"or every one a log-evidence, or every one a `test`; found {_inventory(trees)}. "
            "Without these, compare forecasts "
            "of the same new rows, by `diagnostics.log_score` and its like (at the command line: "
            "`zoo predict` by each run)."
        )
    return key


Part = tuple[Any, dict[str, list[str]]]  # columns of some models, and reasons to doubt them


def _elpd(trees: dict[str, xr.DataTree]) -> Part:
    import arviz as az
    import pandas as pd

    found = joined(
        {name: tree for name, tree in trees.items() if group_of(tree, "log_likelihood").data_vars}
    )
    if not found:
        return pd.DataFrame(index=list(trees)), {}
    corrections = {name: _correction(trees[name]) for name in found}
    # of high k-hat and of vanishing stacking weights; the column says both
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each = {
            name: _loo(trees[name], values, corrections[name][0]) for name, values in found.items()
        }
        table = az.compare(each, round_to="none")
    table = table[["elpd", "se", "elpd_diff", "dse", "p", "weight"]].astype(float)
    if next(iter(found.values())).sizes[ROW] < 2:
        table[["se", "dse"]] = np.nan  # nothing to take a standard deviation of
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
    """On both sides of each difference to the best that is within two standard errors of zero,
    or has no error.
    """
    best = str(apart.index[apart.argmax()])
    for name in map(str, apart.index):
        size = f"({apart[name]:.3g} +- {error[name]:.3g})"
        if name != best and np.isnan(error[name]):
            reasons[name].append(
                f"{what} below that of {best} by what has no standard error ({apart[name]:.3g})"
            )
        elif name != best and not -apart[name] > 2 * error[name]:
            reasons[name].append(f"{what} within two standard errors of the best, {best} {size}")
            reasons[best].append(f"{what} of {name} within two standard errors {size}")


def _held_out(trees: dict[str, xr.DataTree], test: dict[str, Any] | None) -> Part:
    import pandas as pd
    from scipy.special import logsumexp

    if not test:
        return pd.DataFrame(index=list(trees)), {}
    found = held_out_rows(test)
    count = lambda values: np.log(values.shape[0] * values.shape[1])
    with np.errstate(divide="ignore"):  # the log of zero: every draw rules the row out
        rows = {
            name: logsumexp(values, axis=(0, 1)) - count(values) for name, values in found.items()
        }
    best = max(rows, key=lambda name: rows[name].sum())
    with np.errstate(invalid="ignore"):  # rows that both rule out
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


def _test_faults(values: np.ndarray, score: np.ndarray) -> list[str]:
    """Rows of probability zero, and rows whose mean over draws has a Pareto k-hat that is too
    high.
    """
    impossible = int(np.sum(np.isneginf(score)))
    found = [f"{impossible} held-out rows that every draw rules out"] if impossible else []
    _, khat = psis(xr.DataArray(values[..., np.isfinite(score)], dims=("chain", "draw", ROW)))
    few = num_high(khat.values, good_k(values.shape[0] * values.shape[1]))
    return [
        *found,
        *([f"{few} held-out rows whose average rests on a few draws (k-hat)"] if few else []),
    ]


def _loo(tree: xr.DataTree, log_likelihood: xr.DataArray, correction: xr.DataArray | None) -> Any:
    """PSIS-LOO by ArviZ; the relative efficiency is that of the likelihoods, which labels and
    signs do not touch.
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
    """log p - log q of the draws of an approximation, where it can be had; else what is to be
    said of them.
    """
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
            "infinite: nothing corrects them"
        ]
    return found.drop_vars(("chain", "draw"), errors="ignore"), []


def _few_points(tree: xr.DataTree, log_likelihood: xr.DataArray) -> list[str]:
    """Draws that repeat a few points, as a guide of one point and weights that collapsed leave
    them.
    """
    posterior = group_of(tree, "posterior")
    floats = [values for values in posterior.data_vars.values() if values.dtype.kind == "f"]
    each = _distinct(log_likelihood)
    if max(each) == 1:  # or a likelihood that knows no parameters
        each = np.max([_distinct(values) for values in floats], axis=0) if floats else each
    count, size = sum(each), log_likelihood.sizes["chain"] * log_likelihood.sizes["draw"]
    # a few states of discrete sites may be all that there are
    if count >= DRAWS or (posterior.data_vars and not floats):
        return []
    if max(each) == 1 and size > len(each):
        return ["all draws of a chain are one point: a point mass is no posterior"]
    return [f"its {size} draws are {count} distinct points: too few for an ELPD"]


def _distinct(values: xr.DataArray) -> list[int]:
    """How many draws of each chain differ, told by their sums."""
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
