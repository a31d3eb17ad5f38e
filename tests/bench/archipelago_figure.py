"""Archipelago's Figure 3 anew: pinwheels with one label a class; modes of ours, modes of a softmax
GP, entropy of ours.

export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
uv run python -m tests.bench.archipelago_figure -o FOLDER              # archipelago_figure_3.png
uv run python -m tests.bench.archipelago_figure -o FOLDER "5 arms"     # this row alone
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from tests.bench.archipelago_peers import PEERS
from tests.bench.archipelago_protocols import Cell, Draw, draw
from tests.bench.archipelago_results import archipelago

ROWS = ("3 arms", "4 arms", "5 arms")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # Okabe and Ito's
POINTS = 80  # of the grid, a side


def grid(x: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """Places all over the plane of the data, row by row, and its extent."""
    middle, reach = (x.max(0) + x.min(0)) / 2, 0.65 * np.ptp(x, axis=0).max()
    along = [np.linspace(each - reach, each + reach, POINTS) for each in middle]
    places = np.stack(np.meshgrid(*along), -1).reshape(-1, 2)
    return places, (along[0][0], along[0][-1], along[1][0], along[1][-1])


def draw_row(axes: np.ndarray, data: str, seed: int = 0) -> None:
    """Three panels of one pinwheel."""
    rows = draw(Cell(data, labels=1), seed)
    places, extent = grid(rows.x)
    ours, softmax = (
        method(rows.x, rows.y, places, seed) for method in (archipelago, PEERS["softmax GP"])
    )
    entropy = -np.sum(ours * np.log2(np.maximum(ours, 1e-300)), axis=1)
    show = {"origin": "lower", "extent": extent, "interpolation": "nearest"}
    palette = ListedColormap(COLOURS[: ours.shape[1]])
    for axis, p in zip(axes[:2], (ours, softmax), strict=True):
        axis.imshow(
            p.argmax(1).reshape(POINTS, POINTS),
            cmap=palette,
            vmin=-0.5,
            vmax=ours.shape[1] - 0.5,
            alpha=0.45,
            **show,
        )
    image = axes[2].imshow(
        entropy.reshape(POINTS, POINTS), cmap="gray_r", vmin=0, vmax=np.log2(ours.shape[1]), **show
    )
    axes[2].figure.colorbar(image, ax=axes[2], label="bits", fraction=0.046)
    for axis in axes:
        scatter(axis, rows)
    axes[0].set_ylabel(data)


def scatter(axis: Axes, rows: Draw) -> None:
    """The data: dots, and a cross for each label in the colour of its class."""
    hidden = rows.y < 0
    axis.scatter(*rows.x[hidden].T, s=12, c="black", linewidths=0.5, edgecolors="white")
    axis.scatter(*rows.x[~hidden].T, s=110, c="white", marker="X", linewidths=0)
    axis.scatter(
        *rows.x[~hidden].T,
        s=60,
        c=[COLOURS[y] for y in rows.y[~hidden]],
        marker="X",
        linewidths=0.6,
        edgecolors="black",
    )
    axis.set_xticks([])
    axis.set_yticks([])


def main(words: list[str]) -> None:
    """The command line."""
    names = [word for word in words if word in ROWS] or list(ROWS)
    if "-o" not in words or len(words) != 2 + sum(word in ROWS for word in words):
        raise SystemExit(f"{__doc__}\nrows: {', '.join(ROWS)}")
    folder = Path(words[words.index("-o") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 3.1 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 3, squeeze=False)
    for row, name in zip(panels, names, strict=True):
        draw_row(row, name)
    for axis, title in zip(
        panels[0],
        (
            "Archipelago: most probable class",
            "softmax GP: most probable class",
            "Archipelago: entropy",
        ),
        strict=True,
    ):
        axis.set_title(title, fontsize=10)
    figure.savefig(folder / "archipelago_figure_3.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1:])
