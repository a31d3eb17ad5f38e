"""Plots that ArviZ lacks: ELBO, evidence, ancestry, partitions, decision regions, calibration.

Each function takes `ax`, where None makes a figure, and returns the axes. None shows the figure.
Matplotlib is imported when a plot is drawn.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from diagnostics._verdict import attribute, group_of

__all__ = [
    "plot_ancestry",
    "plot_calibration",
    "plot_decision_regions",
    "plot_elbo",
    "plot_evidence",
    "plot_partition",
]

PALE = "0.82"
STRONG = "C0"


def plot_elbo(tree: xr.DataTree, *, window: int | None = None, ax: Any = None) -> Any:
    """Plot the ELBO of every replicate over the steps, and its moving average.

    The vertical range covers the 1 % and 99 % quantiles of the last four fifths of the run.

    Args:
        tree: a run with `sample_stats` `elbo` (chain, step).
        window: number of steps of the moving average; None: a fiftieth of the run.
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    trace = _over_steps(tree, "elbo", "plot_elbo").values
    window = max(trace.shape[1] // 50, 1) if window is None else window
    if not 1 <= window <= trace.shape[1]:
        raise ValueError(f"window: from 1 to the {trace.shape[1]} steps of the run, got {window}.")
    ax = _axes(ax)
    steps = np.arange(1, trace.shape[1] + 1)
    mean = np.stack(
        [np.convolve(each, np.full(window, 1 / window), mode="valid") for each in trace]
    )
    for i, (each, smooth) in enumerate(zip(trace, mean, strict=True)):
        ax.plot(steps, each, color=f"C{i % 10}", alpha=0.25, linewidth=0.7, zorder=1)
        ax.plot(
            steps[window - 1 :],
            smooth,
            color=f"C{i % 10}",
            linewidth=1.8,
            zorder=2,
            label=f"replicate {i}: {smooth[-1]:.4g}",
        )
    late = trace[:, trace.shape[1] // 5 :]
    if np.isfinite(late).any():
        low, high = np.quantile(late[np.isfinite(late)], [0.01, 0.99])
        ax.set_ylim(low - 0.5 * (high - low) - 1e-9, high + 0.5 * (high - low) + 1e-9)
    ax.set(xlabel="step", ylabel="ELBO (nats)", xlim=(0, trace.shape[1]))
    ax.legend(frameon=False, loc="lower right", fontsize="small", ncols=1 + (len(trace) - 1) // 6)
    return ax


def plot_evidence(tree: xr.DataTree, *, ax: Any = None) -> Any:
    """Plot the running log-evidence of every replicate, and the final one with two errors.

    For a nested sampler, whose `sample_stats` have `log_volume`, the horizontal axis is minus the
    log of the remaining prior volume. The filled curve is then the posterior mass. For a particle
    filter the horizontal axis is the step.

    Args:
        tree: a run with `sample_stats` `log_evidence` (chain, step).
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    running = _over_steps(tree, "log_evidence", "plot_evidence").values
    shrinks = "log_volume" in group_of(tree, "sample_stats")
    steps = np.broadcast_to(np.arange(1.0, running.shape[1] + 1), running.shape)
    along = -_over_steps(tree, "log_volume", "plot_evidence").values if shrinks else steps
    known = np.isfinite(along) & np.isfinite(running)
    if not known.any():
        raise ValueError("plot_evidence: no step of any replicate has a finite log-evidence.")
    curves = [
        (x[each], values[each]) for x, values, each in zip(along, running, known, strict=True)
    ]
    ax = _axes(ax)
    if shrinks:
        _draw_shares(ax, curves)
    for i, (x, values) in enumerate(curves):
        end = f"{values[-1]:.2f}" if values.size else "not finite"
        ax.plot(x, values, color=f"C{i % 10}", linewidth=1.6, label=f"replicate {i}: {end}")
    final = _draw_final(ax, tree)
    if shrinks:  # the first points are hundreds of nats below, and are cut off
        ends = [*(values[-1] for _, values in curves if values.size), *final]
        low = max(running[known].min(), min(ends) - 20)
        ax.set_ylim(low, max(ends) + 0.35 * (max(ends) - low) + 1e-9)  # room for the legend
    xlabel = "shrinkage $-\\log X$" if shrinks else "step"
    ax.set(
        xlabel=xlabel,
        ylabel="log-evidence so far (nats)",
        xlim=(along[known].min(), along[known].max()),
    )
    ax.legend(frameon=False, loc="upper left" if shrinks else "best", fontsize="small")
    return ax


def plot_ancestry(tree: xr.DataTree, *, chain: int = 0, ax: Any = None) -> Any:
    """Plot the ancestry of the particles of one replicate.

    Ancestors of the final particles are dark. Few dark lines at the first steps mean few distinct
    ancestors. Siblings are drawn as neighbours.

    Args:
        tree: a run with `sample_stats` `ancestor` (chain, step, particle), the index of the parent
            at the step before.
        chain: the replicate.
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    from matplotlib.collections import LineCollection

    parents = _over_steps(tree, "ancestor", "plot_ancestry").sel(chain=chain).values.astype(int)
    steps, size = parents.shape
    if steps < 2:
        raise ValueError(
            f"plot_ancestry: {steps} steps have no ancestry; wanted two at least, each after the "
            "first with its parents."
        )
    place = np.empty((steps, size))
    place[0] = np.arange(size)
    for t in range(1, steps):  # siblings are neighbours, in the order of their parents
        place[t, np.argsort(place[t - 1][parents[t]], kind="stable")] = np.arange(size)
    alive = np.ones((steps, size), bool)
    for t in range(steps - 1, 0, -1):
        alive[t - 1] = np.isin(np.arange(size), parents[t][alive[t]])
    start = np.stack(
        [
            np.repeat(np.arange(steps - 1), size),
            np.concatenate([place[t - 1][parents[t]] for t in range(1, steps)]),
        ],
        -1,
    )
    stop = np.stack([np.repeat(np.arange(1, steps), size), place[1:].ravel()], -1)
    lives = alive[1:].ravel()
    ax = _axes(ax)
    lines = np.stack([start, stop], axis=1)
    ax.add_collection(
        LineCollection(lines[~lives], colors=PALE, linewidths=0.5, label="died out", zorder=1)
    )
    ax.add_collection(
        LineCollection(
            lines[lives], colors=STRONG, linewidths=1.0, label="reaches the end", zorder=2
        )
    )
    ax.set(xlabel="step", ylabel="particle", xlim=(0, max(steps - 1, 1)), ylim=(-0.5, size - 0.5))
    ax.set_title(
        f"{int(alive[0].sum())} of {size} first particles have descendants (dark)",
        fontsize="medium",
        loc="left",
    )
    return ax


def plot_partition(labels: Any, *, estimate: Any = None, ax: Any = None) -> Any:
    """Plot the co-clustering matrix, with rows sorted by the groups of a point estimate.

    Groups are sorted by size. Rows of a group are sorted by their mean co-clustering probability
    with the group.

    Args:
        labels: draws of labels (chain, draw, row).
        estimate: labels [row] or a `PartitionEstimate`; None: the partition with the least
            expected variation of information.
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    from diagnostics.partitions import PartitionEstimate, coclustering, point_estimate

    found = point_estimate(labels) if estimate is None else estimate
    groups = np.asarray(found.labels if isinstance(found, PartitionEstimate) else found)
    together = coclustering(labels).values
    if groups.shape != (len(together),):
        raise ValueError(
            f"estimate: one label for each of the {len(together)} rows; found shape {groups.shape}."
        )
    names, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sure = np.array([together[row, groups == groups[row]].mean() for row in range(len(groups))])
    order = np.lexsort((-sure, inverse, -sizes[inverse]))
    ax = _axes(ax, (5.2, 4.6))
    image = ax.imshow(
        together[np.ix_(order, order)], cmap="Blues", vmin=0, vmax=1, interpolation="nearest"
    )
    ends = np.flatnonzero(np.diff(inverse[order])) + 1
    for low, high in zip([0, *ends], [*ends, len(order)], strict=True):
        ax.add_patch(_square(float(low) - 0.5, float(high - low)))
    middles = (np.array([0, *ends]) + np.array([*ends, len(order)]) - 1) / 2
    shown = _apart(middles, len(order) / 22)  # 22 labels fit beside each other
    ax.set_yticks(shown, [f"{names[inverse[order[int(m)]]]}" for m in shown])
    ylabel = "group of the point estimate" + (
        "" if len(shown) == len(middles) else f" ({len(middles)}; labels left out)"
    )
    ax.set(xticks=[], xlabel=f"{len(order)} rows, sorted by group", ylabel=ylabel)
    ax.figure.colorbar(
        image, ax=ax, label="probability of being together", fraction=0.046, pad=0.03
    )
    return ax


def plot_decision_regions(
    predict: Callable | Any,
    x: Any,
    y: Any = None,
    *,
    class_names: Any = None,
    resolution: int = 200,
    ax: Any = None,
) -> Any:
    """Plot the most probable class over the plane, paler where the predictive entropy is high.

    White is the largest entropy, log K. Cost: `resolution` squared predictions.

    Args:
        predict: a function from points [point, 2] to probabilities [point, class], with leading
            axes averaged; or an estimator with `predict_proba`.
        x: the data, [row, 2]; they set the range.
        y: classes of the data, -1 for none. They are values of `classes_` for an estimator, else
            0, 1, ... in the order of the columns.
        class_names: names of the columns; None: `classes_` for an estimator.
        resolution: number of points along each axis.
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    data = np.asarray(x, float)
    if data.ndim != 2 or data.shape[1] != 2:
        raise ValueError(f"x: two features, [row, 2]; found shape {data.shape}.")
    labels = getattr(predict, "classes_", None)
    low, high = np.nanmin(data, axis=0), np.nanmax(data, axis=0)
    low, high = low - 0.08 * (high - low) - 1e-9, high + 0.08 * (high - low) + 1e-9
    across, up = (np.linspace(low[i], high[i], resolution) for i in (0, 1))
    points = np.stack(np.meshgrid(across, up), -1).reshape(-1, 2)
    probabilities = np.asarray(getattr(predict, "predict_proba", predict)(points), float)
    probabilities = probabilities.reshape(-1, *probabilities.shape[-2:]).mean(0)
    classes = probabilities.shape[1]
    of = _columns(y, np.arange(classes) if labels is None else np.asarray(labels), len(data))
    names = _names(labels) if class_names is None and labels is not None else class_names
    colors = _colors(classes)
    entropy = _entropy(probabilities)
    pale = (
        np.clip(entropy / np.log(classes), 0, 1)[:, None]
        if classes > 1
        else np.zeros((len(entropy), 1))
    )
    rgb = (1 - pale) * (0.25 + 0.75 * colors[probabilities.argmax(1)]) + pale
    ax, extent = _axes(ax, (5.6, 4.6)), (low[0], high[0], low[1], high[1])
    ax.imshow(
        rgb.reshape(resolution, resolution, 3),
        extent=extent,
        origin="lower",
        aspect="auto",
        interpolation="bilinear",
        zorder=0,
    )
    _draw_borders(ax, across, up, probabilities.reshape(resolution, resolution, classes))
    _draw_points(ax, data, of, colors, names)
    _entropy_bar(ax, np.log(max(classes, 2)))
    ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax


def plot_calibration(
    y: Any,
    probabilities: Any,
    *,
    of: int | None = None,
    bins: int = 10,
    strategy: str = "uniform",
    ax: Any = None,
) -> Any:
    """Plot observed against predicted frequencies with 90 % Wilson intervals.

    Args:
        y: classes, [row].
        probabilities: predicted probabilities, [..., row, class].
        of: as in `calibration_curve`.
        bins: as in `calibration_curve`.
        strategy: as in `calibration_curve`.
        ax: axes; None makes a figure.

    Returns:
        The axes.
    """
    from diagnostics.scores import calibration_curve, expected_calibration_error

    curve = calibration_curve(y, probabilities, of=of, bins=bins, strategy=strategy)
    error = expected_calibration_error(y, probabilities, of=of, bins=bins, strategy=strategy)
    ax = _axes(ax, (4.8, 4.6))
    predicted, observed = curve["predicted"].values, curve["observed"].values
    width = (curve["right"] - curve["left"]).values
    density = curve["count"].values / np.maximum(width, 1e-9)
    heights = 0.2 * density / density.max()
    ax.bar(
        curve["left"].values,
        heights,
        width,
        align="edge",
        color=PALE,
        edgecolor="white",
        label="density of rows (scaled)",
    )
    ax.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--", label="calibrated")
    bars = np.clip(
        np.stack([observed - curve["lower"].values, curve["upper"].values - observed]), 0, None
    )
    label = f"observed, {curve.attrs['level']:.0%} interval"
    ax.errorbar(
        predicted,
        observed,
        yerr=bars,
        fmt="o-",
        color=STRONG,
        markersize=5,
        linewidth=1.2,
        capsize=2,
        label=label,
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", ylabel="observed frequency")
    ax.set_xlabel(
        "probability of the most probable class" if of is None else f"probability of class {of}"
    )
    ax.set_title(f"expected calibration error {error:.3f}", fontsize="medium")
    ax.legend(frameon=False, loc="upper left", fontsize="small")
    return ax


def _axes(ax: Any, size: tuple[float, float] = (6.4, 4.0)) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def _over_steps(tree: xr.DataTree, name: str, who: str) -> xr.DataArray:
    stats = group_of(tree, "sample_stats")
    if name not in stats or "step" not in stats[name].dims:
        raise ValueError(
            f"{who}: needs sample_stats {name!r} over (chain, step); the tree has "
            f"{sorted(map(str, stats.data_vars))}."
        )
    return stats[name].transpose("chain", "step", ...)


def _draw_final(ax: Any, tree: xr.DataTree) -> list[float]:
    """Draw the log-evidence of the run with two standard errors; returns it where it is finite."""
    final, error = attribute(tree, "log_evidence"), attribute(tree, "log_evidence_se")
    if final is None or not np.isfinite(final):
        return []
    known = error is not None and np.isfinite(error)
    early = "" if tree.attrs.get("ended", "finished") == "finished" else ", not finished"
    label = f"run: {final:.2f}" + (f" ± {error:.2g}" if known else early)
    ax.axhline(final, color="0.3", linewidth=1, linestyle="--", label=label)
    if known:
        ax.axhspan(final - 2 * error, final + 2 * error, color="0.3", alpha=0.15, linewidth=0)
    return [final]


def _draw_shares(ax: Any, curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Fill the curve of the posterior mass: increments of the evidence over the log volume."""
    beside = ax.twinx()
    for i, (x, values) in enumerate(curves):
        if len(x) < 2:
            continue
        share = np.diff(np.exp(values - values[-1])) / np.maximum(np.diff(x), 1e-12)
        beside.fill_between(x[1:], share, color=f"C{i % 10}", alpha=0.18, linewidth=0)
    beside.set_ylim(0, 2.5 * beside.get_ylim()[1])
    beside.set_yticks([])
    beside.set_ylabel("posterior mass (filled)")
    ax.set_zorder(beside.get_zorder() + 1)
    ax.patch.set_visible(False)


def _apart(places: np.ndarray, gap: float) -> list[float]:
    kept: list[float] = []
    for place in places.tolist():
        if not kept or place - kept[-1] >= gap:
            kept.append(place)
    return kept


def _square(corner: float, side: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((corner, corner), side, side, fill=False, edgecolor="C1", linewidth=1.6)


def _colors(classes: int) -> np.ndarray:
    import matplotlib as mpl

    return np.array(
        [mpl.colormaps["tab10" if classes <= 10 else "tab20"](k % 20)[:3] for k in range(classes)]
    )


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    from scipy.special import entr

    return entr(probabilities).sum(1)


def _draw_borders(
    ax: Any,
    across: Float[np.ndarray, " across"],
    up: Float[np.ndarray, " up"],
    probabilities: Float[np.ndarray, "up across class"],
) -> None:
    for k in range(probabilities.shape[-1] if probabilities.shape[-1] > 1 else 0):
        lead = probabilities[..., k] - np.delete(probabilities, k, axis=-1).max(-1)
        if lead.min() < 0 < lead.max():
            ax.contour(across, up, lead, levels=[0.0], colors="0.35", linewidths=0.8, zorder=1)


def _columns(y: Any, labels: np.ndarray, rows: int) -> np.ndarray | None:
    """The column of the class of each row, -1 for none."""
    if y is None:
        return None
    values = np.asarray(y)
    if values.shape != (rows,):
        raise ValueError(f"y: one class a row, shape ({rows},); found shape {values.shape}.")
    column = {label: k for k, label in reversed(list(enumerate(labels.tolist())))}
    found = np.array([column.get(value, -1) for value in values.tolist()], int)
    unknown = [
        value for value, k in zip(values.tolist(), found, strict=True) if k == -1 and value != -1
    ]
    if unknown:
        raise ValueError(
            f"y: {unknown[0]!r} is no class of the prediction; wanted {labels.tolist()}, or -1 for "
            "none."
        )
    return found


def _names(labels: Any) -> list[str]:
    return [
        f"class {label}" if isinstance(label, int | float) else str(label)
        for label in np.asarray(labels).tolist()
    ]


def _draw_points(
    ax: Any,
    data: Float[np.ndarray, "row 2"],
    columns: Int[np.ndarray, " row"] | None,
    colors: Float[np.ndarray, "class 3"],
    class_names: Any,
) -> None:
    of = np.full(len(data), -1) if columns is None else columns
    for k in np.unique(of):
        name = (
            "no class" if k == -1 else f"class {k}" if class_names is None else str(class_names[k])
        )
        face = "0.5" if k == -1 else colors[k]
        here = data[of == k]
        ax.scatter(
            here[:, 0],
            here[:, 1],
            s=22,
            color=[face],
            edgecolors="white",
            linewidths=0.6,
            label=name if columns is not None else "data",
            zorder=2,
        )
    ax.legend(loc="best", fontsize="small", framealpha=0.85)


def _entropy_bar(ax: Any, most: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    shades = LinearSegmentedColormap.from_list("entropy", ["0.45", "1.0"])
    ax.figure.colorbar(
        ScalarMappable(Normalize(0, most), shades),
        ax=ax,
        label="entropy of the prediction (nats)",
        fraction=0.046,
        pad=0.03,
    )
