"""Scores on held-out rows: of a second fit, to the other rows, and of a baseline.

The saved run is of all rows. What its model predicts is scored by a second fit to four fifths of
them, next to a baseline of scikit-learn on the same split. The split is the same for every model,
kernel and seed, so that `zoo compare` can score several runs on the same rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from gallery._dataset import Dataset
from gallery._links import Ordered
from gallery.commands.inputs import Inputs, has_real_entries, read_inputs
from gallery.commands.kernels import command_of
from gallery.commands.predict import predictions
from gallery.commands.predictive import (
    entries_link,
    log_scores_of_levels,
    predicted_entries,
)
from inference import Program

__all__ = [
    "FEWEST",
    "Split",
    "held_out_text",
    "measures",
    "scored",
    "share_to_hold_out",
    "split",
    "without_held_out",
]

FEWEST = 5  # held-out rows; fewer tell nothing
MOST_LEVELS = 20  # different values of entries, up to which none is held out whole
MOST_SECONDS = 60.0  # a fit that took longer is repeated only where `--test` asks for it
MOST_PRODUCTS = 10**8  # rows x features x classes of logistic regression


class Split(NamedTuple):
    """A data set without the rows, or entries, that are held out, and these."""

    train: Dataset
    test: Dataset
    rows: np.ndarray  # indices of the held-out rows


def share_to_hold_out(asked: float | None, inputs: Inputs, seconds: float) -> tuple[float, str]:
    """Return the share of the rows to hold out, or 0 and the reason why a person gets no score.

    Args:
        asked: the argument of `--test`; None where it was not given.
        inputs: those of the fit.
        seconds: what the fit took.
    """
    if asked is not None:
        return asked, ""
    share = command_of(inputs.kernel).held_out
    if split(inputs.data, share or 0.2) is None:
        return 0.0, ""
    if not share:
        reason = f"{inputs.kernel} is not run twice unasked"
    elif seconds > MOST_SECONDS:
        reason = f"the fit took {seconds:.0f} s, and is not run twice unasked"
    else:
        return share, ""
    return 0.0, f"no held-out score: {reason}; `zoo fit ... --test 0.2` asks for it"


def split(data: Dataset, share: float) -> Split | None:
    """Hold out a share of the labelled rows, or of the entries of a matrix.

    Every class, of every task, keeps a row; so does every row and column of a matrix an entry, and
    every level, such as a number of stars. The classes have their shares of the held-out rows.

    Returns:
        None where there are no labels, a single class, or fewer than five rows to hold out.
    """
    arrays = data.arrays
    if {"rows", "cols", "values"} <= set(arrays):
        target, keys = arrays["values"], [arrays["rows"], arrays["cols"]]
        if len(np.unique(target)) <= MOST_LEVELS:
            keys.append(target)
        labelled = np.arange(len(target))
    elif "x" in arrays and _is_classes(arrays.get("y")):
        target = arrays["y"]
        labelled = np.flatnonzero(target != -1)
        of_task = (np.asarray(arrays.get("task", np.zeros(len(target)))), target)
        keys = [np.unique(of_task, axis=1, return_inverse=True)[1]]
        if len(np.unique(target[labelled])) < 2:
            return None
    else:
        return None
    order = np.random.default_rng(0).permutation(labelled)
    firsts = [np.unique(key[order], return_index=True)[1] for key in keys]
    free = np.delete(order, np.unique(np.concatenate(firsts)))
    count = min(int(share * len(labelled)), len(free))
    if count < FEWEST:
        return None
    if len(keys) == 1:
        free = free[np.argsort(keys[0][free], kind="stable")]
    rows = np.sort(free[((np.arange(count) + 0.5) * len(free) / count).astype(int)])
    rest = np.delete(np.arange(len(target)), rows)
    return Split(_rows_of(data, rest, len(target)), _rows_of(data, rows, len(target)), rows)


def without_held_out(inputs: Inputs, parts: Split) -> Inputs:
    """Return the inputs of a second fit, which learns from all but the held-out rows.

    Entries that are held out are masked, so that shapes and compiled programs are those of the
    first fit.

    Args:
        inputs: of the first fit.
        parts: the split.
    """
    found, every = read_inputs(inputs.request, parts.train), inputs.arguments
    if "counts" not in every:
        return found
    cells = lambda row, column: np.asarray(row, np.int64) * every["shape"][1] + column
    held_out = cells(parts.test["rows"], parts.test["cols"])
    counts = ~np.isin(cells(every["row"], every["column"]), held_out)
    value = np.zeros(len(counts), found.arguments["value"].dtype)
    value[counts] = found.arguments["value"]  # both are sorted by row and column
    same = {name: every[name] for name in ("row", "column")}
    return found._replace(arguments=found.arguments | same | {"value": value, "counts": counts})


def scored(tree: xr.DataTree, inputs: Inputs, parts: Split) -> xr.Dataset:
    """Return what a run, and a baseline, say of held-out rows: a few numbers a row.

    Args:
        tree: the run on `parts.train`.
        inputs: those of this run.
        parts: the split.

    Returns:
        `y`, `predicted` (the most probable class, or the mean of an entry) and `log_score`, the
        log probability of `y`; the latter two with the prefix `baseline_` as well. `log_score` of
        real entries is the normal log density of their predicted mean and deviation; that of levels
        is their log probability, and the baseline rounds a Normal to levels. Counts have none.
        Cost: a prediction for each held-out row.
    """
    test = parts.test.arrays
    if "values" in test:
        of = f"{len(inputs.data['values']) + len(parts.rows)} entries"
        name, columns = "additive effects", _scored_entries(tree, inputs, parts)
    else:
        of = f"{len(inputs.data['y']) + len(parts.rows)} rows"
        assert inputs.features is not None
        z = inputs.features.standardise(test["x"])
        by_row = {key: test[key] for key in ("task",) if "task" in tree.attrs}
        name, of_baseline = _classified(inputs, parts, z)
        columns = _of_classes(test["y"], predictions(tree, {"x": z} | by_row)[0], "") | _of_classes(
            test["y"], of_baseline, "baseline_"
        )
    return xr.Dataset(
        {key: ("row", values) for key, values in columns.items()},
        coords={"row": parts.rows},
        attrs={"baseline": name, "of": of},
    )


def measures(held_out: xr.Dataset, prefix: str = "") -> dict[str, float]:
    """Return accuracy, or RMSE for entries, and the mean log score where there is one.

    Args:
        held_out: of `scored`.
        prefix: "" for the run, "baseline_" for the baseline.
    """
    y, predicted = held_out["y"].values, held_out[f"{prefix}predicted"].values
    found = (
        {"accuracy": float(np.mean(predicted == y))}
        if held_out["y"].dtype.kind in "iu"
        else {"RMSE": float(np.sqrt(np.mean((predicted - y) ** 2)))}
    )
    if f"{prefix}log_score" in held_out:
        found["log score"] = float(held_out[f"{prefix}log_score"].mean())
    return found


def held_out_text(runs: Mapping[str, xr.Dataset]) -> str:
    """Return the scores of some runs on the same held-out rows, and of the baseline, as a table.

    Args:
        runs: name of a run -> its group `held_out`.
    """
    first = next(iter(runs.values()))
    title = f"scores on {first.sizes['row']} of {first.attrs['of']}, by a fit to the others"
    each = {name: measures(held_out) for name, held_out in runs.items()}
    each[str(first.attrs["baseline"])] = measures(first, "baseline_")
    names = list(dict.fromkeys(name for values in each.values() for name in values))
    lines = [title + "".join(f"{name:>11}" for name in names)]
    for who, values in each.items():
        cells = [f"{values[name]:.3f}" if name in values else "" for name in names]
        lines.append(
            f"  {who:<{len(title) - 2}}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()
        )
    return "\n".join(lines)


def _is_classes(y: Any) -> bool:
    return y is not None and y.ndim == 1 and y.dtype.kind in "iu"


def _rows_of(data: Dataset, rows: np.ndarray, size: int) -> Dataset:
    """The data set of these rows; arrays that are not by row stay whole."""
    from dataclasses import replace

    arrays = {
        name: values[rows] if np.ndim(values) and len(values) == size else values
        for name, values in data.arrays.items()
    }
    return replace(data, arrays=arrays)


def _of_classes(y: np.ndarray, probabilities: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore"):  # a class of probability 0
        log_score = np.log(probabilities[np.arange(len(y)), y])
    found = {"predicted": probabilities.argmax(1), "log_score": log_score}
    return ({} if prefix else {"y": y}) | {prefix + name: each for name, each in found.items()}


def _scored_entries(tree: xr.DataTree, inputs: Inputs, parts: Split) -> dict[str, np.ndarray]:
    from scipy.stats import norm

    places = parts.test["rows"], parts.test["cols"]
    y = np.asarray(parts.test["values"], float)
    mean, std = predicted_entries(tree, *places)
    additive, error = _additive_effects(parts)
    found = {"y": y, "predicted": mean, "baseline_predicted": additive}
    if isinstance(link := entries_link(tree), Ordered):
        return found | {
            "log_score": log_scores_of_levels(tree, *places, y),
            "baseline_log_score": _log_share_of_normal(np.array(link.levels), y, additive, error),
        }
    if not has_real_entries(Program(inputs.entry.model, **inputs.arguments)):
        return found
    return found | {
        "log_score": norm.logpdf(y, mean, std),
        "baseline_log_score": norm.logpdf(y, additive, error),
    }


def _additive_effects(parts: Split) -> tuple[np.ndarray, float]:
    """The baseline of entries, effects of rows and of columns, and its error across five folds."""
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    places = lambda data: np.stack([data["rows"], data["cols"]], axis=1)
    known, values = places(parts.train), np.asarray(parts.train["values"], float)
    additive = make_pipeline(OneHotEncoder(handle_unknown="ignore"), Ridge())
    folds = KFold(min(5, len(values)), shuffle=True, random_state=0)
    error = float(np.std(values - cross_val_predict(additive, known, values, cv=folds)))
    return additive.fit(known, values).predict(places(parts.test)), error


def _log_share_of_normal(
    levels: Float[np.ndarray, " level"],
    y: Float[np.ndarray, " entry"],
    mean: Float[np.ndarray, " entry"],
    std: float,
) -> Float[np.ndarray, " entry"]:
    """Log probability that a Normal rounds to the level y; it rounds to the nearest level."""
    from scipy.stats import norm

    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    place = np.searchsorted(levels, y)
    low, high = ((edges[place + i] - mean) / std for i in (0, 1))
    # of the side on which the difference of two probabilities is not rounded to 0
    low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)
    return np.log(norm.cdf(high) - norm.cdf(low))


def _classified(inputs: Inputs, parts: Split, z: np.ndarray) -> tuple[str, np.ndarray]:
    """The baseline of classes, on standardised features; texts are columns of 0 and 1."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    y = parts.train["y"]
    known = y != -1
    classes = np.unique(y[known])
    name, classifier = (
        ("logistic regression", LogisticRegression(max_iter=1000))
        if known.sum() * z.shape[1] * len(classes) <= MOST_PRODUCTS
        else ("naive Bayes", GaussianNB(var_smoothing=0.1))
    )
    texts = _texts(inputs.data)
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), texts),
        remainder=SimpleImputer(keep_empty_features=True),
    )
    fitted = make_pipeline(columns, classifier).fit(inputs.arguments["x"][known], y[known])
    probabilities = np.zeros((len(z), int(max(y.max(), parts.test["y"].max())) + 1))
    probabilities[:, classes] = fitted.predict_proba(z)
    return name, probabilities


def _texts(data: Dataset) -> Sequence[int]:
    return [i for i, name in enumerate(data.feature_names) if name in data.categories]
