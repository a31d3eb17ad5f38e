"""Figures 4.3 to 4.6 of the thesis from the results of `tests.bench.iqgme_tasks`:

    python -m tests.bench.iqgme_tasks_figure RESULTS.jsonl FIGURE.png

Above, the area by rows to learn from, a panel for each share of missing entries; below, how alike
tasks are by their experts, the mean over the splits of the largest size. Fields of landmine stand
in the order of the thesis: ten with leaves, then nine of bare earth.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tests.bench.iqgme_tasks import METHODS, rows_of

OURS = "multi-task iQGME"


def curves(ax, rows):
    """The mean over splits of each method that has every size of ours, and its standard error."""
    sizes = sorted({row["size"] for row in rows if row["method"] == OURS})
    for method in METHODS:
        areas = [
            [row["auc"] for row in rows if (row["method"], row["size"]) == (method, size)]
            for size in sizes
        ]
        if all(areas):
            error = [
                np.std(each, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0.0
                for each in areas
            ]
            width = 2 if method == OURS else 1
            ax.errorbar(
                sizes,
                [np.mean(each) for each in areas],
                error,
                label=method,
                marker="o",
                markersize=3,
                lw=width,
            )
    ax.set(xlabel="rows of a task to learn from", xticks=sizes)


def likeness(ax, rows):
    """The matrix, and its image."""
    largest = max(row["size"] for row in rows if row["method"] == OURS)
    each = np.mean(
        [row["likeness"] for row in rows if (row["method"], row["size"]) == (OURS, largest)], 0
    )
    num_tasks = np.arange(len(each))
    ax.set(xlabel=f"task, {largest} rows each", xticks=num_tasks[::3], yticks=num_tasks[::3])
    ax.set(xticklabels=num_tasks[::3] + 1, yticklabels=num_tasks[::3] + 1)
    return ax.imshow(each, vmin=0, vmax=1, interpolation="nearest")


def main(results: Path, target: Path) -> None:
    rows = rows_of(results)
    shares = sorted({row["missing"] for row in rows})
    figure = Figure(figsize=(3.2 * len(shares), 6.4), layout="constrained")
    above, below = figure.subplots(2, len(shares), squeeze=False, sharey="row")
    for share, top, bottom in zip(shares, above, below, strict=True):
        own = [row for row in rows if row["missing"] == share]
        curves(top, own)
        top.set(title=f"{share:.0%} missing", ylim=(0.5, 0.8))
        image = likeness(bottom, own)
    above[0].set(ylabel="AUC, mean over tasks")
    below[0].set(ylabel="task")
    figure.colorbar(image, ax=below[-1], label="similarity")
    figure.legend(
        *above[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
