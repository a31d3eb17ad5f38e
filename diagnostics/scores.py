"""Scores of predicted class probabilities: log score, Brier score, accuracy, AUC, calibration.

All take the classes `y` [row] and `probabilities` [..., row, class]. Leading dimensions, such as
chain and draw, are averaged first, which gives the score of the posterior predictive. A vector
[row] holds the probability of class 1 of two. Rows labelled -1 have no class and are left out.
Cost: the size of the array.
"""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

__all__ = [
    "accuracy",
    "auc",
    "brier",
    "calibration_curve",
    "expected_calibration_error",
    "log_score",
    "perplexity",
]


def log_score(y: Any, probabilities: Any) -> float:
    """Return the mean of log p(y_i); 0 is perfect. Good (1952).

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
    """
    classes, p = _checked(y, probabilities)
    with np.errstate(divide="ignore"):
        return float(np.mean(np.log(p[np.arange(len(p)), classes])))


def perplexity(y: Any, probabilities: Any) -> float:
    """Return exp(-log score), the equivalent number of equally likely classes; 1 is perfect.

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
    """
    return float(np.exp(-log_score(y, probabilities)))


def brier(y: Any, probabilities: Any) -> float:
    """Return the mean over rows of sum_k (p_ik - [y_i = k])^2, between 0 and 2. Brier (1950).

    For two classes this is twice the one-sided form.

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
    """
    classes, p = _checked(y, probabilities)
    return float(np.mean(np.sum((p - np.eye(p.shape[1])[classes]) ** 2, axis=1)))


def accuracy(y: Any, probabilities: Any) -> float:
    """Return the share of rows whose most probable class is correct; ties go to the first class.

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
    """
    classes, p = _checked(y, probabilities)
    return float(np.mean(p.argmax(1) == classes))


def auc(y: Any, probabilities: Any) -> float:
    """Return the area under the ROC curve by scikit-learn.

    For more than two classes it is the mean of one class against the rest, over observed classes.

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
    """
    from sklearn.metrics import roc_auc_score

    classes, p = _checked(y, probabilities)
    seen = np.unique(classes)
    if len(seen) < 2:
        raise ValueError(
            f"y: AUC needs rows of two classes at least; every row has class {seen[0]}."
        )
    if p.shape[1] == 2:
        return float(roc_auc_score(classes, p[:, 1]))
    return float(np.mean([roc_auc_score(classes == k, p[:, k]) for k in seen]))


def calibration_curve(
    y: Any,
    probabilities: Any,
    *,
    of: int | None = None,
    bins: int = 10,
    strategy: str = "uniform",
    level: float = 0.9,
):
    """Compare predicted with observed frequencies in bins of probability.

    Wilson (1927); DeGroot and Fienberg (1983).

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
        of: the predicted event is this class; None: that the most probable class is correct.
        bins: number of bins.
        strategy: "uniform" edges, or "quantile" with equal counts.
        level: of Wilson's interval.

    Returns:
        A dataset over "bin" without empty bins, with `predicted` (mean probability), `observed`
        (frequency), `lower` and `upper` (Wilson's interval of the frequency), `count`, `left` and
        `right` (edges).
    """
    from scipy.stats import binomtest

    happened, p = _event(*_checked(y, probabilities), of)
    edges = _edges(p, bins, strategy)
    # an edge belongs to the bin on its left, as in scikit-learn
    which = np.searchsorted(edges[1:-1], p)
    count = np.bincount(which, minlength=len(edges) - 1)
    kept = count > 0
    hits = np.bincount(which, weights=happened, minlength=len(count))[kept]
    mean = np.bincount(which, weights=p, minlength=len(count))[kept] / count[kept]
    pairs = zip(hits.astype(int), count[kept], strict=True)
    ends = [binomtest(int(k), int(n)).proportion_ci(level, method="wilson") for k, n in pairs]
    columns = {
        "predicted": mean,
        "observed": hits / count[kept],
        "lower": np.array([end.low for end in ends]),
        "upper": np.array([end.high for end in ends]),
        "count": count[kept],
        "left": edges[:-1][kept],
        "right": edges[1:][kept],
    }
    return xr.Dataset(
        {name: ("bin", values) for name, values in columns.items()}, attrs={"level": level}
    )


def expected_calibration_error(
    y: Any, probabilities: Any, *, of: int | None = None, bins: int = 10, strategy: str = "uniform"
) -> float:
    """Return the mean distance of observed and predicted in `calibration_curve`, by rows of bins.

    It is positive for a calibrated prediction too: a bin with n rows adds noise of order
    sqrt(p (1 - p) / n). Naeini et al. (2015).

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
        of: as in `calibration_curve`.
        bins: as in `calibration_curve`.
        strategy: as in `calibration_curve`.
    """
    curve = calibration_curve(y, probabilities, of=of, bins=bins, strategy=strategy)
    share = curve["count"] / curve["count"].sum()
    return float((share * abs(curve["observed"] - curve["predicted"])).sum())


def _checked(y: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    classes, p = np.asarray(y), np.asarray(probabilities, float)
    if p.ndim == 1:
        p = np.stack([1 - p, p], axis=-1)
    if classes.ndim != 1 or p.shape[-2] != len(classes):
        raise ValueError(
            f"probabilities: [..., row, class] for y [row]; found {p.shape} for {classes.shape}."
        )
    p = p.reshape(-1, *p.shape[-2:]).mean(0)
    if classes.dtype.kind not in "iub":
        raise ValueError(
            f"y: classes 0, 1, ..., or -1 for none; found {classes.dtype}. Encode them, with "
            "sklearn's LabelEncoder."
        )
    classes = classes.astype(int)
    kept = classes != -1
    classes, p = classes[kept], p[kept]
    if not len(classes):
        raise ValueError("y: no row has a class.")
    if classes.min() < 0 or classes.max() >= p.shape[1]:
        raise ValueError(
            f"y: classes 0 to {p.shape[1] - 1}, as many as columns of probabilities; found "
            f"{classes.min()} to {classes.max()}."
        )
    if not (np.all(p >= -1e-6) and np.allclose(p.sum(1), 1.0, atol=1e-4)):
        raise ValueError(
            "probabilities: wanted numbers from 0 on with sum 1 in each row; take exp of log "
            "probabilities first."
        )
    return classes, np.clip(p, 0.0, 1.0)


def _event(
    classes: Int[np.ndarray, " row"], p: Float[np.ndarray, "row class"], of: int | None
) -> tuple[Bool[np.ndarray, " row"], Float[np.ndarray, " row"]]:
    if of is None:
        return p.argmax(1) == classes, p.max(1)
    if not 0 <= of < p.shape[1]:
        raise ValueError(f"of: a class from 0 to {p.shape[1] - 1}, got {of}.")
    return classes == of, p[:, of]


def _edges(p: np.ndarray, bins: int, strategy: str) -> np.ndarray:
    if strategy not in (strategies := ("uniform", "quantile")):
        raise ValueError(f"strategy: {strategy!r} unknown; choose from {list(strategies)}.")
    if bins < 1:
        raise ValueError(f"bins: at least 1, got {bins}.")
    return (
        np.linspace(0, 1, bins + 1)
        if strategy == "uniform"
        else np.quantile(p, np.linspace(0, 1, bins + 1))
    )
