"""What a run found, in a few lines, in the names of its columns, classes, rows and tasks.

Lines describe what the tree holds: draws, labels and standardised features. They depend on the
names of the posterior's dimensions and variables, not on the name of a model.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from gallery._dataset import Dataset
from gallery.commands.inputs import saved_data
from gallery.tables import indicators

__all__ = [
    "MOST",
    "Contrasts",
    "aligned",
    "class_contrasts",
    "contrasts",
    "findings",
    "likeliest_draw",
]

DRAWS = ("chain", "draw")
MOST = 6  # classes, clusters
TOP = 3  # columns of each
MOST_LABELS = 10**7  # that are counted


def findings(tree: xr.DataTree) -> list[str]:
    """Return the lines about a run of `zoo fit`.

    Groups of draws that switch labels are counted and sorted by size in each draw; nothing is
    averaged over draws by its label.

    Args:
        tree: the run, with draws.
    """
    data, posterior = saved_data(tree), tree["posterior"].to_dataset()
    found = []
    dims = {str(name): values.dims[2:] for name, values in posterior.data_vars.items()}
    if "entries" in tree.attrs:
        found += _rank(posterior) + _effects(tree, posterior)
    if "expert" in posterior.dims and dims.get("z") == ("row",):
        found += [_shares(posterior, "expert")]
    if dims.get("beta") == ("cluster",) and dims.get("gamma") == ("cluster", "class"):
        found += _clusters(tree, data)
    if dims.get("num_rejected") == ():
        mean = float(posterior["num_rejected"].mean())
        found.append(f"rejected points: {mean:.1f}, the mean over draws")
    if (apart := class_contrasts(tree)) is not None:
        found += _classes(tree, posterior, data, apart)
    return found


class Contrasts(NamedTuple):
    """What tells the classes apart: a number for each class and column, far from 0 where it does.

    Classes are the first ones, as many as the lines about a run name.
    """

    title: str  # what the largest numbers are
    what: str  # what each number is
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray  # [class, column]; NaN where a class has no entry

    def furthest(self, count: int | None = None) -> list[str]:
        """Return the columns with the largest absolute numbers of any class, the largest first."""
        if not self.columns:
            return []
        order = np.argsort(np.nanmin(-abs(self.values), axis=0), kind="stable")
        return [self.columns[i] for i in order[:count]]


def class_contrasts(tree: xr.DataTree) -> Contrasts | None:
    """Return what tells the classes of a run apart, or None where it has no classes of rows.

    The numbers are the posterior means of linear weights, where the model has some, else
    differences of the means of columns.

    Args:
        tree: a run of `zoo fit`.
    """
    if "arrays" not in tree.attrs:  # a driver's own tree, which names no columns
        return None
    data, posterior = saved_data(tree), tree["posterior"].to_dataset()
    if not {"x", "y"} <= set(data.arrays) or not data.class_names:
        return None
    classes = data.class_names[:MOST]
    if "weights" in posterior and posterior["weights"].dims[2:] == ("class", "feature"):
        weights = posterior["weights"].mean(DRAWS).values[: len(classes)]
        return Contrasts(
            "largest weights", "weights of the columns", classes, data.feature_names, weights
        )
    y = np.asarray(data["y"])
    x, y = np.asarray(data["x"], float)[y != -1], y[y != -1]
    each = [dict(contrasts(x, y == code, data)) for code in range(len(classes))]
    columns = tuple(dict.fromkeys(name for found in each for name in found))
    values = [[found.get(name, np.nan) for name in columns] for found in each]
    title = "mean furthest from the other classes, in sd"
    what = "mean less that of the other classes, in sd"
    return Contrasts(title, what, classes, columns, np.array(values))


def contrasts(x: np.ndarray, members: np.ndarray, data: Dataset) -> list[tuple[str, float]]:
    """Return by how much the mean of each column differs between some rows and the others.

    Args:
        x: features [row, feature], texts as codes.
        members: whether each row is one of them, [row].
        data: names of the columns and of their texts.

    Returns:
        Name of each column that varies, each text being a column of 0 and 1, and its difference in
        standard deviations.
    """
    found = []
    for label, values in indicators(x, data.feature_names, data.categories):
        known = ~np.isnan(values)
        inside, outside = values[known & members], values[known & ~members]
        spread = values[known].std() if known.any() else 0.0
        if len(inside) and len(outside) and spread > 0:
            found.append((label, float((inside.mean() - outside.mean()) / spread)))
    return found


def likeliest_draw(tree: xr.DataTree) -> xr.Dataset:
    """Return the draw of the highest likelihood; the last one of a run that has no likelihoods."""
    posterior = tree["posterior"].to_dataset()
    if "log_likelihood" not in tree.children:
        return posterior.isel(dict.fromkeys(DRAWS, -1))
    each = tree["log_likelihood"].to_dataset()
    total: Any = sum(
        values.sum([dim for dim in values.dims if dim not in DRAWS])
        for values in each.data_vars.values()
    )
    return posterior.isel(total.argmax(DRAWS))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return cells below each other; the first line is the title."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in lines
    ]


def _classes(
    tree: xr.DataTree, posterior: xr.Dataset, data: Dataset, apart: Contrasts
) -> list[str]:
    """A line for each class: its labelled rows, its groups, and the columns that tell it apart."""
    y = np.asarray(data["y"])
    labelled = y != -1
    z = json.loads(tree.attrs["partition"])[0] if "partition" in tree.attrs else None
    lines = []
    for code, name in enumerate(apart.classes):
        members = y == code
        cells = [name, f"{members.sum() / labelled.sum():.0%}"]
        if z in posterior:
            has_rows = members.any()
            counts = _num_distinct(posterior[z], members) if has_rows else np.zeros(1)
            cells.append(_likely(counts))
        pairs = zip(apart.columns, apart.values[code].tolist(), strict=True)
        cells.append(_largest(pair for pair in pairs if np.isfinite(pair[1])))
        lines.append(cells)
    rows = "rows" if labelled.all() else "labelled rows"
    title = ["class", rows, *(["groups"] if z in posterior else []), apart.title]
    return [*aligned([title, *lines]), *_more(data.class_names, "classes")]


def _clusters(tree: xr.DataTree, data: Dataset) -> list[str]:
    """A line for each cluster in the draw of the highest likelihood, the largest cluster first."""
    draw = likeliest_draw(tree)
    share, of_class = draw["beta"].values, draw["gamma"].values
    order = np.argsort(-share, kind="stable")
    has_mean = "mu" in draw and draw["mu"].shape == (len(share), len(data.feature_names))
    names = data.class_names or tuple(map(str, range(of_class.shape[1])))
    lines = [["cluster", "rows", "class", *(["mean furthest from 0, in sd"] if has_mean else [])]]
    for number, cluster in enumerate(order[:MOST]):
        best = int(of_class[cluster].argmax())
        cells = [
            str(number),
            f"{share[cluster]:.0%}",
            f"{names[best]} {of_class[cluster, best]:.0%}",
        ]
        if has_mean:
            means = draw["mu"].values[cluster].tolist()
            cells.append(_largest(zip(data.feature_names, means, strict=True)))
        lines.append(cells)
    return [*aligned(lines), *_more(share, "clusters")]


def _shares(posterior: xr.Dataset, noun: str) -> str:
    """How many groups have rows, and the rows that the largest have."""
    labels, size = _labels(posterior["z"]), posterior.sizes[noun]
    counts = np.stack([np.bincount(row.astype(int), minlength=size) for row in labels])
    shares = np.sort(counts / labels.shape[1], axis=1)[:, ::-1].mean(0)
    text = ", ".join(f"{share:.0%}" for share in shares[:MOST] if share >= 0.005)
    return f"{noun}s in use: {_likely((counts > 0).sum(1))} of {size}; shares of rows {text}"


def _rank(posterior: xr.Dataset) -> list[str]:
    return [f"rank: {_likely(posterior['rank'].values)}"] if "rank" in posterior else []


def _effects(tree: xr.DataTree, posterior: xr.Dataset) -> list[str]:
    """The largest effects that are two posterior standard deviations from 0, in the unit of the
    entries.
    """
    scale = float(tree.attrs.get("scale", 1.0))
    categories = json.loads(tree.attrs["categories"])
    found = []
    for dim, item in zip(("row", "column"), json.loads(tree.attrs["entries"]), strict=True):
        name = f"{dim}_weights"
        if name not in posterior or posterior[name].shape[-1] != 1:
            continue
        draws = scale * posterior[name][..., 0]
        mean, std = (each.values for each in (draws.mean(DRAWS), draws.std(DRAWS)))
        names = categories.get(item) or list(map(str, range(len(mean))))
        pairs = zip(names, mean.tolist(), strict=True)
        known = [
            pair for pair, is_known in zip(pairs, abs(mean) > 2 * std, strict=True) if is_known
        ]
        found.append(f"effects of {item}: {_largest(known) or 'none is clearly different from 0'}")
    return found


def _num_distinct(labels: xr.DataArray, members: np.ndarray) -> np.ndarray:
    """The number of distinct labels among some rows, [draw]."""
    ordered = np.sort(_labels(labels)[:, members], axis=1)
    return 1 + (np.diff(ordered, axis=1) != 0).sum(1)


def _labels(labels: xr.DataArray) -> np.ndarray:
    """Labels [draw, row]; of a long run and many rows, those of some draws, evenly spaced."""
    every = labels.transpose("chain", "draw", ...).values.reshape(-1, labels.shape[-1])
    return every[:: 1 + every.size // MOST_LABELS]


def _likely(counts: Any) -> str:
    """The most frequent of some counts, and in which share of the draws."""
    values, times = np.unique(np.asarray(counts).astype(int), return_counts=True)
    best = int(times.argmax())
    return f"{values[best]} ({times[best] / times.sum():.0%} of draws)"


def _largest(pairs: Iterable[tuple[str, float]]) -> str:
    ordered = sorted(pairs, key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{name} {value:+.2g}" for name, value in ordered[:TOP])


def _more(items: Sequence[Any] | np.ndarray, noun: str) -> list[str]:
    return [f"... and {len(items) - MOST} more {noun}"] if len(items) > MOST else []
