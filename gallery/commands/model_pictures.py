"""Pictures of single models: a completed matrix, and classes with rejected points."""

from typing import Any

import numpy as np
import xarray as xr

from gallery.commands.predictive import entries_link, predicted_entries

__all__ = ["is_history", "plot_history", "plot_matrix"]

MOST_ITEMS = 200  # rows or columns of a matrix that is shown
MOST_ENTRIES = 4000  # dots
INK, QUIET = "#4477aa", "0.7"


def plot_matrix(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot the number of components, observed entries against posterior means, a small matrix.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    given = tree["constant_data"].to_dataset()
    row, column, value = (
        *(given[name].values for name in ("row", "column")),
        entries_link(tree).decoded(tree["observed_data"].to_dataset()["y"].values),
    )
    rank = tree["posterior"].to_dataset()["rank"].values.astype(int)
    shape = row.max() + 1, column.max() + 1
    is_small = max(shape) <= MOST_ITEMS
    figure, axes = plt.subplots(
        1, 2 + is_small, figsize=(10.0 if is_small else 7.0, 3.4), layout="constrained"
    )
    counts = np.bincount(rank.ravel()) / rank.size
    axes[0].bar(np.arange(len(counts)), counts, color=INK)
    axes[0].set(
        xlabel="rank",
        ylabel="posterior probability",
        xlim=(np.flatnonzero(counts)[0] - 0.9, len(counts) - 0.1),
    )
    some = np.random.default_rng(0).permutation(len(value))[:MOST_ENTRIES]
    mean, _ = predicted_entries(tree, row[some], column[some])
    axes[1].plot(value[some], value[some], color=QUIET, lw=1)
    axes[1].plot(value[some], mean, ".", color=INK, ms=3)
    axes[1].set(xlabel="observed entry", ylabel="its posterior mean")
    if is_small:
        every = np.indices(shape).reshape(2, -1)
        image = axes[2].imshow(
            predicted_entries(tree, *every)[0].reshape(shape),
            aspect="auto",
            interpolation="nearest",
        )
        axes[2].set(xlabel="column", ylabel="row")
        figure.colorbar(image, ax=axes[2], label="posterior mean")
    for axis in (axes[0].xaxis, *((axes[2].xaxis, axes[2].yaxis) if is_small else ())):
        axis.set_major_locator(MaxNLocator(integer=True))
    return figure, "" if len(some) == len(value) else f": {len(some)} of {len(value)} entries"


def is_history(tree: xr.DataTree) -> bool:
    """Return whether a run holds functions of the classes, and rejected points."""
    return {"function", "rejected", "num_rejected"} <= set(map(str, tree["posterior"].data_vars))


def plot_history(tree: xr.DataTree) -> tuple[Any, str]:
    """Plot the rows by most probable class, the rejected points of one draw, and their number.

    Returns:
        The figure, and a note for its title.
    """
    import matplotlib.pyplot as plt

    posterior, observed = tree["posterior"].to_dataset(), tree["observed_data"].to_dataset()
    x, last = observed["x"].values, posterior.isel(chain=0, draw=-1)
    function = posterior["function"].transpose("chain", "draw", "row", ...).values
    share = np.exp(function - np.logaddexp.reduce(function, axis=-1, keepdims=True)).mean((0, 1))
    across = (0, 1) if x.shape[1] > 1 else (0, 0)
    rejected = last["rejected"].values[: int(last["num_rejected"])]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.0, 3.8), layout="constrained", width_ratios=(1.4, 1)
    )
    left.plot(*rejected[:, across].T, ".", color=QUIET, ms=3, label="rejected, in one draw")
    best, known = (
        share.argmax(1),
        observed["y"].values >= 0 if "y" in observed else np.zeros(len(x), bool),
    )
    names = [
        str(name)
        for name in (
            posterior["class"].values if "class" in posterior.coords else range(share.shape[1])
        )
    ]
    for code, name in enumerate(names):
        mine = best == code
        left.scatter(
            *x[mine][:, across].T,
            s=12,
            color=f"C{code}",
            alpha=share[mine, code],
            label=f"class {name}",
        )
        left.scatter(
            *x[mine & known][:, across].T,
            s=45,
            facecolors="none",
            edgecolors="black",
            linewidths=0.9,
        )
    features = (
        tree["constant_data"].coords["feature"].values
        if "feature" in tree["constant_data"].coords
        else range(x.shape[1])
    )
    left.set(
        xlabel=f"{features[across[0]]} (standard deviations)",
        ylabel=f"{features[across[1]]}; circles: labelled",
    )
    left.legend(frameon=False, fontsize="small")
    for chain, path in enumerate(posterior["num_rejected"].transpose("chain", "draw").values):
        right.plot(path, lw=0.8, label=f"chain {chain}")
    right.set(xlabel="draw", ylabel="rejected points", ylim=(0, None))
    right.legend(frameon=False, fontsize="small")
    return figure, ""
