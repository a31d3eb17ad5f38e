"""Log-evidences of several runs: Bayes factors and their errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from diagnostics._verdict import attribute, each_of

__all__ = ["evidence_columns", "uncertainty"]

ERRORS = 2.0  # a Bayes factor differs from 1 by this many known standard errors at least


def evidence_columns(trees: Mapping[str, xr.DataTree]) -> tuple[Any, dict[str, list[str]]]:
    """Make a table of evidences and of Bayes factors against the highest.

    Args:
        trees: name of a model -> tree of its run.

    Returns:
        A data frame, and the doubts about each model.
    """
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
    reasons = {name: _faults(trees[name], value[name], errors[name][0]) for name in value}
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
            within = f"({factor:.3g} +- {se:.3g}; wanted {many:.3g} errors)"
            reasons[name].append(f"log Bayes factor within its error of the best, {best} {within}")
            reasons[best].append(f"log Bayes factor of {name} within its error {within}")
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
    """Student's quantile of the same probability as `ERRORS` for a known error, with Welch's
    degrees of freedom.
    """
    from scipy.stats import norm, t

    variances = np.array([one[0], other[0]]) ** 2
    doubt = np.sum(variances**2 / np.array([one[1], other[1]]))
    return float(t.ppf(norm.cdf(ERRORS), np.sum(variances) ** 2 / doubt)) if doubt > 0 else ERRORS


def _faults(tree: xr.DataTree, value: float, error: float) -> list[str]:
    ended = str(tree.attrs.get("ended", "finished"))
    found = (
        []
        if ended == "finished"
        else [f"its run ended by {ended!r} before it had finished: part of its evidence is missing"]
    )
    if not np.isfinite(value):
        return [*found, "its log-evidence is not finite"]
    return found if np.isfinite(error) else [*found, "its log-evidence has no error"]
