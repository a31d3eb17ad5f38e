"""Pictures of what a run found, in the names and units of its table.

They show classes of rows, entries of a matrix, and points that a process has rejected. What they
show depends on the names of the posterior's variables, not on the name of a model.
"""

import json
from typing import Any

import numpy as np
import xarray as xr

from gallery._dataset import Dataset
from gallery.commands.findings import (
    DRAWS,
    MOST,
    Contrasts,
    aligned,
    class_contrasts,
    likeliest_draw,
)
from gallery.commands.inputs import saved_data
from gallery.commands.predictive import entries_link, predicted_entries
from gallery.tables import indicators

__all__ = [
    "is_history",
    "is_small_matrix",
    "plot_classes",
    "plot_entries",
    "plot_history",
    "plot_matrix",
]

SIZE = (10.0, 4.3)  # inches of a picture with two panels
MOST_ITEMS = 200  # rows or columns of a matrix that is shown
MOST_ENTRIES = 4000  # dots of entries
MOST_ROWS = 4000  # dots of rows
MOST_GROUPED = 300  # rows that a partition is estimated of
MOST_DRAWS = 100  # from which it is estimated
FEWEST_GROUPED = 5  # rows of a group that gets an ellipse
MOST_TASKS = 3  # that have panels of their own
TOP = 8  # columns that are named
SURPRISES = 6  # entries that are named
INK, QUIET, PALE = "#4477aa", "0.35", "0.7"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # of MOST classes
MARKERS = "os^DvP"


def plot_classes(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot the rows of each class, and by how much columns tell the classes apart.

    The left panel has the two columns of numbers that tell the classes apart most, in their own
    units; each of a few tasks has a panel. One column of numbers is plotted against the class; of
    columns without numbers the share of each text in each class is shown. The right panel has the
    numbers that `findings` prints, of more columns.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt

    data, apart = saved_data(tree), class_contrasts(tree)
    assert apart is not None
    numbers = _telling_numbers(data, apart)
    tasks = _tasks(tree, data) if numbers else {}
    widths = [1.3 / max(1, len(tasks))] * max(1, len(tasks)) + [1.0] * bool(apart.columns)
    figure = plt.figure(figsize=SIZE, layout="constrained")
    *lefts, right = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    if apart.columns:
        _draw_contrasts(right, apart)
    else:
        lefts.append(right)
    note = ""
    if numbers:
        note = _draw_rows(lefts, tree, data, numbers, tasks)
    else:
        _draw_shares(lefts[0], data, apart)
    handles, names = lefts[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=4, frameon=False)
    return figure, note


def plot_history(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot the rows, the unlabelled ones by most probable class, and the rejected points of a draw.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt

    data, apart = saved_data(tree), class_contrasts(tree)
    assert apart is not None
    figure, axes = plt.subplots(figsize=(6.5, SIZE[1]), layout="constrained")
    note = _draw_rows([axes], tree, data, _telling_numbers(data, apart) or [0])
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure, note


def plot_entries(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot entries against their posterior means, name the most surprising, and plot the rank.

    An entry surprises by its distance from the mean, in predictive standard deviations.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    row, column, value = _entries(tree)
    posterior = tree["posterior"].to_dataset()
    some = np.sort(np.random.default_rng(0).permutation(len(value))[:MOST_ENTRIES])
    row, column, shown = row[some], column[some], value[some]
    mean, std = predicted_entries(tree, row, column)
    figure = plt.figure(figsize=SIZE, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1), height_ratios=(1.1, 1))
    left = figure.add_subplot(grid[:, 0])
    ends = [min(shown.min(), mean.min()), max(shown.max(), mean.max())]
    left.plot(ends, ends, color=PALE, lw=1, zorder=1)
    left.plot(mean, shown, ".", color=INK, ms=4, alpha=0.6, zorder=2)
    target = tree.attrs.get("target") or "entry"
    left.set(xlabel=f"predicted {target}, posterior mean", ylabel=f"observed {target}")
    surprise = (shown - mean) / np.where(std > 0, std, 1.0)
    furthest = np.argsort(-abs(surprise), kind="stable")[:SURPRISES]
    names = [_names(tree, dim, size) for dim, size in enumerate((row.max() + 1, column.max() + 1))]
    lines = [["", *json.loads(tree.attrs["entries"]), target, "predicted"]]
    for number, i in enumerate(furthest, 1):
        left.plot(mean[i], shown[i], "o", ms=7, mfc="none", mec="#cc3311", zorder=3)
        left.annotate(
            str(number),
            (mean[i], shown[i]),
            (5, 3) if surprise[i] > 0 else (5, -10),
            textcoords="offset points",
            color="#cc3311",
        )
        item = [_short(names[0][row[i]], 16), _short(names[1][column[i]], 16)]
        digits = max(0, 1 - int(np.floor(np.log10(std[i])))) if std[i] > 0 else 2
        predicted = f"{mean[i]:.{digits}f} ± {std[i]:.{digits}f}"
        lines.append([str(number), *item, f"{shown[i]:.6g}", predicted])
    beside = figure.add_subplot(grid[0, 1] if "rank" in posterior else grid[:, 1])
    beside.axis("off")
    beside.set_title(f"most surprising {target} (predicted: mean ± sd)", loc="left")
    text = "\n".join(aligned(lines))
    beside.text(0, 1, text, family="monospace", size=8, va="top", linespacing=1.4)
    if "rank" in posterior:
        rank = posterior["rank"].values.astype(int)
        counts = np.bincount(rank.ravel()) / rank.size
        below = figure.add_subplot(grid[1, 1])
        below.bar(np.arange(len(counts)), counts, color=INK)
        first = np.flatnonzero(counts)[0]
        below.set(ylabel="posterior probability", xlim=(first - 0.9, len(counts) - 0.1))
        below.set_xlabel("rank: number of components")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, "" if len(some) == len(value) else f": {len(some)} of {len(value)} entries"


def is_small_matrix(tree: xr.DataTree) -> bool:
    """Return whether a run is of a matrix, and it is small enough to be drawn."""
    if "entries" not in tree.attrs:
        return False
    row, column, _ = _entries(tree)
    return max(row.max(), column.max()) < MOST_ITEMS


def plot_matrix(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot the posterior mean of every entry of a matrix.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt

    row, column, _ = _entries(tree)
    shape = row.max() + 1, column.max() + 1
    every = np.indices(shape).reshape(2, -1)
    figure, axes = plt.subplots(figsize=(6.5, SIZE[1]), layout="constrained")
    image = axes.imshow(
        predicted_entries(tree, *every)[0].reshape(shape), aspect="auto", interpolation="nearest"
    )
    items = json.loads(tree.attrs["entries"])
    axes.set(xlabel=items[1], ylabel=items[0])
    for dim, (axis, size) in enumerate(zip((axes.yaxis, axes.xaxis), shape, strict=True)):
        places = np.unique(np.linspace(0, size - 1, 12).astype(int))
        names = _names(tree, dim, size)
        axis.set_ticks(places, [_short(names[i], 12) for i in places], fontsize="small")
    axes.tick_params(axis="x", rotation=45)
    target = tree.attrs.get("target") or "entry"
    figure.colorbar(image, ax=axes, label=f"{target}, posterior mean")
    return figure, ""


def is_history(tree: xr.DataTree) -> bool:
    """Return whether a run holds functions of the classes, and rejected points."""
    return {"function", "rejected", "num_rejected"} <= set(map(str, tree["posterior"].data_vars))


def _entries(tree: xr.DataTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and value of each observed entry, in the unit of the table."""
    given = tree["constant_data"].to_dataset()
    value = entries_link(tree).decoded(tree["observed_data"].to_dataset()["y"].values)
    return given["row"].values, given["column"].values, value


def _names(tree: xr.DataTree, dim: int, size: int) -> list[str]:
    """The names of the rows (0) or columns (1) of a matrix."""
    item = json.loads(tree.attrs["entries"])[dim]
    return json.loads(tree.attrs["categories"]).get(item) or list(map(str, range(size)))


def _telling_numbers(data: Dataset, apart: Contrasts) -> list[int]:
    """The columns of numbers, those first that tell the classes apart most."""
    x = np.asarray(data["x"], float)
    names = list(data.feature_names)
    first = [name for name in apart.furthest() if name in names]
    order = [names.index(name) for name in dict.fromkeys([*first, *names])]
    return [
        i
        for i in order
        if names[i] not in data.categories and len(np.unique(x[~np.isnan(x[:, i]), i])) > 2
    ]


def _scale(tree: xr.DataTree, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale that take standardised features back to the units of the table."""
    given = tree["constant_data"].to_dataset()
    known = {"x_mean", "x_std"} <= set(given)
    mean, std = (given["x_mean"].values, given["x_std"].values) if known else (0.0, 1.0)
    return np.broadcast_to(mean, size), np.broadcast_to(std, size)


def _tasks(tree: xr.DataTree, data: Dataset) -> dict[str, np.ndarray]:
    """Title and rows [row] of the panel of each task; empty of one task, or of too many."""
    of_row = np.asarray(data.arrays.get("task", ()))
    codes = np.unique(of_row)
    if not 1 < len(codes) <= MOST_TASKS:
        return {}
    given, column = tree["constant_data"].coords, tree.attrs.get("task", "task")
    names = given["task"].values if "task" in given else np.arange(codes[-1] + 1)
    return {f"{column} {_short(str(names[code]), 16)}": of_row == code for code in codes}


def _draw_rows(
    panels: list[Any],
    tree: xr.DataTree,
    data: Dataset,
    numbers: list[int],
    tasks: dict[str, np.ndarray] | None = None,
) -> str:
    """Draw rows in two columns, or in one by class; returns a note where some are left out."""
    x, y = np.asarray(data["x"], float), np.asarray(data["y"])
    mean, std = _scale(tree, x.shape[1])
    used = numbers[:2]
    is_plane = len(used) == 2
    known = np.flatnonzero(~np.isnan(x[:, used]).any(1))
    rows = np.sort(np.random.default_rng(0).permutation(known)[:MOST_ROWS])
    places = (x * std + mean)[rows][:, used]
    names = [_short(data.feature_names[i], 36) for i in used]
    lanes = [_short(name, 20) for name in data.class_names[:MOST]]
    if not is_plane:
        jitter = np.random.default_rng(1).uniform(-0.25, 0.25, len(rows))
        is_lane = (y[rows] >= 0) & (y[rows] < MOST)
        lanes += [] if is_lane.all() else ["no label, or other"]
        places = np.column_stack([places, np.where(is_lane, y[rows], len(lanes) - 1) + jitter])
    guess = _most_probable(tree)[rows] if is_history(tree) else None
    groups = _groups(tree, rows, places, used) if is_plane else []
    whole = "rows, in the two numbers that tell the classes apart most"
    parts = tasks or {whole if is_plane else "rows of each class": np.ones(len(x), bool)}
    for axes, (title, members) in zip(panels, parts.items(), strict=True):
        if axes is not panels[0]:
            axes.sharex(panels[0])
            axes.sharey(panels[0])
            axes.tick_params(labelleft=False)
        mine = members[rows]
        guessed = None if guess is None else guess[mine]
        _draw_points(axes, places[mine], y[rows][mine], data.class_names, guessed)
        _draw_groups(axes, groups)
        axes.set_xlabel(names[0])
        axes.set_title(title, loc="left")
        if is_history(tree):
            _draw_rejected(axes, tree, mean, std, used)
    if is_plane:
        panels[0].set_ylabel(names[1])
    else:
        panels[0].set_yticks(range(len(lanes)), lanes)
    for axis, column in zip((panels[0].xaxis, panels[0].yaxis), used, strict=False):
        if data.feature_names[column] in data.dates:
            _show_dates(axis)
    lacking = f"{len(known)} of {len(x)} rows have {' and '.join(names)}"
    notes = [lacking] if len(known) < len(x) else []
    notes += [f"{len(rows)} of {len(known)} rows shown"] if len(rows) < len(known) else []
    return ": " + ", ".join(notes) if notes else ""


def _show_dates(axis: Any) -> None:
    """Label days since 1970, which are Matplotlib's numbers of dates too, as dates."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator()
    axis.set_major_locator(locator)
    axis.set_major_formatter(ConciseDateFormatter(locator))


def _draw_rejected(
    axes: Any, tree: xr.DataTree, mean: np.ndarray, std: np.ndarray, used: list[int]
) -> None:
    """Crosses at the rejected points of the last draw; below the classes where these are lanes."""
    last = tree["posterior"].to_dataset().isel(dict.fromkeys(DRAWS, -1))
    places = (last["rejected"].values[: int(last["num_rejected"])] * std + mean)[:, used]
    if len(used) == 1:
        places = np.column_stack([places, np.full(len(places), -0.6)])
    axes.plot(*places.T, "x", color=PALE, ms=4, zorder=1, label="rejected, in one draw")


def _draw_points(
    axes: Any,
    places: np.ndarray,
    y: np.ndarray,
    names: tuple[str, ...],
    guess: np.ndarray | None,
) -> None:
    """Points by class; unlabelled ones are grey, or pale in the colour of a guess."""
    unknown, other = y < 0, y >= MOST
    for code, name in enumerate(names[:MOST]):
        style = {"marker": MARKERS[code], "color": COLOURS[code]}
        if guess is not None:
            own = places[unknown & (guess == code)]
            axes.scatter(*own.T, s=20, facecolors="none", zorder=2, alpha=0.8, **_edges(style))
        mine = places[y == code]
        axes.scatter(
            *mine.T,
            s=26 if guess is None else 50,
            linewidths=0.4,
            edgecolors="white",
            zorder=3,
            label=_short(name, 24),
            **style,
        )
    if other.any():
        label = f"{len(names) - MOST} other classes"
        axes.scatter(*places[other].T, s=14, marker="+", color=PALE, zorder=1, label=label)
    if unknown.any() and guess is None:
        axes.scatter(*places[unknown].T, s=10, color=PALE, zorder=1, label="no label")
    elif unknown.any():
        label = "no label, by most probable class"
        axes.scatter([], [], s=20, facecolors="none", edgecolors=QUIET, label=label)


def _edges(style: dict[str, str]) -> dict[str, str]:
    return {"marker": style["marker"], "edgecolors": style["color"]}


def _most_probable(tree: xr.DataTree) -> np.ndarray:
    """The most probable class of each row under the functions of the classes, [row]."""
    function = tree["posterior"]["function"].transpose("chain", "draw", "row", ...).values
    share = np.exp(function - np.logaddexp.reduce(function, axis=-1, keepdims=True))
    return share.mean((0, 1)).argmax(1)


def _draw_groups(axes: Any, groups: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Ellipses of two deviations about the groups, experts or clusters of a run."""
    circle = np.linspace(0, 2 * np.pi, 100)
    circle = 2 * np.stack([np.cos(circle), np.sin(circle)])
    for i, (noun, center, root) in enumerate(groups):
        outline = center[:, None] + root @ circle
        label = f"{noun}: mean and two sd" if i == 0 else None
        axes.plot(*outline, color=QUIET, lw=1, ls="--", zorder=4, label=label)
        axes.plot(*center, "+", color="black", ms=9, mew=1.5, zorder=5)


def _groups(
    tree: xr.DataTree, rows: np.ndarray, places: np.ndarray, used: list[int]
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Noun, centre and root of the covariance of each group in two columns.

    Clusters have means and deviations in the likeliest draw. Groups and experts, whose labels
    switch, are those of a point estimate of the partition; they have the moments of their rows.
    """
    from diagnostics import partition_of, point_estimate

    posterior = tree["posterior"].to_dataset()
    mean, std = _scale(tree, tree["constant_data"].sizes.get("feature", 0))
    form = ("chain", "draw", "cluster", "feature")
    if all(name in posterior and posterior[name].dims == form for name in ("mu", "sigma")):
        draw = likeliest_draw(tree)
        centers = (draw["mu"].values * std + mean)[:, used]
        spreads = (draw["sigma"].values * std)[:, used]
        return [
            ("cluster", center, np.diag(spread))
            for center, spread in zip(centers, spreads, strict=True)
        ]
    if "partition" in tree.attrs:
        noun, labels = "group", partition_of(tree)
    elif "expert" in posterior.dims and posterior.get("z", xr.DataArray()).dims[2:] == ("row",):
        noun, labels = "expert", posterior["z"]
    else:
        return []
    some = np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST_GROUPED])
    if len(some) < FEWEST_GROUPED:
        return []
    every = labels.astype(int).transpose("chain", "draw", ...)
    thinned = every[:, :: -(-every.shape[0] * every.shape[1] // MOST_DRAWS)]
    found = point_estimate(thinned[..., rows[some]]).labels
    members = [places[some][found == group] for group in np.unique(found)]
    return [
        (noun, mine.mean(0), _root(np.cov(mine.T)))
        for mine in members
        if len(mine) >= FEWEST_GROUPED
    ]


def _root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(values.clip(0))


def _draw_shares(axes: Any, data: Dataset, apart: Contrasts) -> None:
    """The share of each text, or of 1 in columns of 0 and 1, among the rows of each class."""
    y = np.asarray(data["y"])
    columns = dict(indicators(np.asarray(data["x"], float), data.feature_names, data.categories))
    names = apart.furthest(TOP) or list(columns)[:TOP]
    for code, label in enumerate(apart.classes):
        mine = [columns[name][y == code] for name in names]
        known = [values[~np.isnan(values)] for values in mine]
        share = [values.mean() if len(values) else np.nan for values in known]
        axes.plot(
            share, range(len(names)), MARKERS[code], color=COLOURS[code], label=_short(label, 24)
        )
    axes.set_yticks(range(len(names)), [_short(name, 28) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.set(xlabel="share of the rows of the class", xlim=(-0.03, 1.03))
    axes.set_title("how common it is in each class", loc="left")


def _draw_contrasts(axes: Any, apart: Contrasts) -> None:
    """A number for each class and each of the columns that tell the classes apart most."""
    names = apart.furthest(TOP)
    shown = apart.values[:, [apart.columns.index(name) for name in names]].T
    most = np.nanmax(abs(shown))
    axes.imshow(shown, cmap="RdBu_r", vmin=-1.7 * most, vmax=1.7 * most, aspect="auto")
    for place, value in np.ndenumerate(shown):
        if np.isfinite(value):
            axes.text(*place[::-1], f"{value:+.2g}", ha="center", va="center")
    axes.set_yticks(range(len(names)), [_short(name, 28) for name in names])
    classes = [_short(name, 14) for name in apart.classes]
    is_wide = sum(map(len, classes)) > 30
    slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_wide else {}
    axes.set_xticks(range(len(classes)), classes, **slanted)
    axes.tick_params(length=0)
    axes.set_title(apart.what, loc="right")


def _short(text: str, most: int) -> str:
    """A text, without its middle where it is too long: names often differ in their last letters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[len(text) - most + half + 1 :]}"
