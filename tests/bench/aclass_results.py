"""AClass, the paper's figures 4 to 8 and the bars: the particle filter next to the literal one and
to its peers.

    uv run python -m tests.bench.aclass_results bars                 # errors where a bar is known, and on tables with real missing cells
    uv run python -m tests.bench.aclass_results density -o FOLDER    # figures 4 and 5: groups recovered, KL to the truth
    uv run python -m tests.bench.aclass_results errors -o FOLDER     # figures 6 to 8: error against training rows, by missing share

Each prints a markdown table; with `-o` the figures are drawn as well. A fit compiles the same
programs as the one before it: `JAX_COMPILATION_CACHE_DIR=FOLDER` keeps them. `-n 2` makes two
repetitions in place of ten.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from gallery import AClassClassifier
from inference import Driver, ParticleFilter, Program
from tests.bench.aclass_density import Fit, density_table, literal_fit, one_component
from tests.bench.aclass_peers import PEERS, error_table
from tests.bench.aclass_protocols import BARS, TABLES, Cell
from zoo.aclass import aclass

__all__ = ["classify", "filter_fit"]

COMPONENTS, SIZES = (1, 5, 10, 20, 30), (100, 300, 1000)
PROTOCOLS, TRAINING, MISSING = (
    ("synthetic", "20news_w100", "mnist_pca50"),
    (100, 500, 2000),
    (0.0, 0.25, 0.5),
)


def filter_fit(**settings: Any) -> Callable[[np.ndarray], Fit]:
    """The particle filter as a method of `density_table`."""

    def fit(x: np.ndarray) -> Fit:
        kernel, y = ParticleFilter(aclass, **settings), np.zeros(len(x), int)
        driver = Driver(kernel, num_samples=1, progress_bar=False)
        tree = driver.run(0, x, y, num_classes=1)
        program = lambda rows: Program(aclass, rows, np.zeros(len(rows), int), num_classes=1)
        density = lambda rows: np.asarray(
            kernel.log_classes(driver.states[0], driver.reading, program(rows)), float
        )[:, 0]
        return Fit(density, float(tree["sample_stats"]["num_groups"].values[0, -1]))

    return fit


def classify(x_train: Any, y_train: np.ndarray, x_test: Any, **settings: Any) -> np.ndarray:
    """The estimator as a classifier of `error_table`: rows shuffled by the protocol, everything
    else by default.
    """
    return AClassClassifier(random_state=0, **settings).fit(x_train, y_train).predict(x_test)


METHODS = {
    "one component": one_component,
    "literal, P = 40": literal_fit(40),
    "P = 1": filter_fit(num_particles=1),
    "P = 40": filter_fit(),
    "P = 40, rejuvenated": filter_fit(rejuvenate=5),
}
CLASSIFIERS = {"AClass": classify, "AClass, rejuvenated": partial(classify, rejuvenate=5), **PEERS}


def draw_density(values: dict, folder: Path) -> None:
    """Figures 4 and 5."""
    groups, axes = plt.subplots(1, len(SIZES), figsize=(10, 3.4), layout="constrained", sharey=True)
    for ax, size in zip(axes, SIZES, strict=True):
        ax.plot(COMPONENTS, COMPONENTS, color="0.7", lw=1)
        for name in METHODS:
            found = np.array([values[truth, size, name][:, 1] for truth in COMPONENTS])
            ax.errorbar(
                COMPONENTS,
                found.mean(1),
                found.std(1, ddof=1) / np.sqrt(found.shape[1]),
                label=name,
                lw=1,
                capsize=2,
            )
        ax.set(title=f"{size} rows", xlabel="groups of the truth")
    axes[0].set_ylabel("groups recovered")
    axes[0].legend(fontsize="small", frameon=False)
    groups.savefig(folder / "aclass_figure_4.png", dpi=150)
    kl, axes = plt.subplots(1, len(COMPONENTS), figsize=(13, 3.2), layout="constrained")
    for ax, truth in zip(axes, COMPONENTS, strict=True):
        for name in METHODS:
            found = np.array([values[truth, size, name][:, 0] for size in SIZES])
            ax.errorbar(
                SIZES,
                found.mean(1),
                found.std(1, ddof=1) / np.sqrt(found.shape[1]),
                label=name,
                lw=1,
                capsize=2,
            )
        ax.set(
            title=f"{truth} group{'s' * (truth > 1)}",
            xlabel="training rows",
            xscale="log",
            ylim=(0, None),
        )
    axes[0].set_ylabel("KL to the truth (nats)")
    axes[0].legend(fontsize="small", frameon=False)
    kl.savefig(folder / "aclass_figure_5.png", dpi=150)


def draw_errors(losses: dict, protocol: str, path: Path) -> None:
    """One of figures 6 to 8."""
    figure, axes = plt.subplots(
        1, len(MISSING), figsize=(10, 3.4), layout="constrained", sharey=True
    )
    for ax, missing in zip(axes, MISSING, strict=True):
        for name in CLASSIFIERS:
            found = np.array([losses[Cell(protocol, size, missing), name] for size in TRAINING])
            ax.errorbar(
                TRAINING,
                found.mean(1),
                found.std(1, ddof=1) / np.sqrt(found.shape[1]),
                label=name,
                lw=1,
                capsize=2,
            )
        ax.set(title=f"{missing:.0%} missing", xlabel="training rows", xscale="log")
    axes[0].set(ylabel="0-1 loss", ylim=(0, None))  # of all, once all is drawn
    axes[0].legend(fontsize="small", frameon=False)
    figure.suptitle(protocol)
    figure.savefig(path, dpi=150)


def main(what: str, folder: Path | None, repetitions: int) -> None:
    """One of the three tables, and its figures."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    if what == "bars":
        error_table(CLASSIFIERS, dict.fromkeys([*BARS, *map(Cell, TABLES)]), repetitions)
    elif what == "density":
        values = density_table(METHODS, COMPONENTS, SIZES, repetitions)
        if folder:
            draw_density(values, folder)
    elif what == "errors":
        for number, protocol in enumerate(PROTOCOLS, 6):
            losses = error_table(
                CLASSIFIERS,
                [Cell(protocol, n, missing) for missing in MISSING for n in TRAINING],
                repetitions,
            )
            if folder:
                draw_errors(losses, protocol, folder / f"aclass_figure_{number}.png")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    words = sys.argv[1:]
    after = lambda flag, default: words[words.index(flag) + 1] if flag in words else default
    target = after("-o", None)
    main(words[0] if words else "", None if target is None else Path(target), int(after("-n", 10)))
