"""AClass, how fast it learns: the particle filter against the literal one, and against itself on
more rows.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.aclass_speed                    # the ratios
    uv run python -m tests.bench.aclass_speed --linear [FOLDER]  # to a million rows; drawn into the
    folder

Rows per CPU second of learning, 40 particles, 100 binary features. Both filters learn the same rows
in the same run; ours is timed on an update by rows that it has room for, so that nothing is
compiled, and its compilation is a column of its own.
"""

import statistics
import sys
from pathlib import Path
from time import process_time

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from inference import Driver, ParticleFilter
from tests.bench.aclass_density import Mixture
from tests.bench.aclass_literal import AClass, points_per_second, streams
from zoo.aclass import aclass

__all__ = ["rows_per_second"]

ROUNDS = 5
SIZES = (1_000, 10_000, 100_000, 1_000_000)
MANY = 100_000  # rows beside which a second of compilation is little
REPEATED = 20  # times that the rows of a stream follow each other in a timed update


def rows_per_second(
    x: np.ndarray, y: np.ndarray, *, keep_assignments: bool = False, rounds: int = ROUNDS
) -> tuple[float, float]:
    """Rows per CPU second of an update, the median over rounds; and the seconds that compilation
    took.
    """
    driver = Driver(
        ParticleFilter(aclass, keep_assignments=keep_assignments), num_samples=1, progress_bar=False
    )
    rows = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y), "num_classes": int(y.max()) + 1}
    seconds = driver.run(0, **rows).attrs["compile_time"]
    speeds = []
    for _ in range(rounds):
        session = driver._last.session  # ty: ignore[unresolved-attribute]
        compiled, started = set(session.compiled), process_time()
        driver.update(**rows)
        if set(session.compiled) == compiled or len(y) >= MANY:  # else it made room, and compiled
            speeds.append(len(y) / (process_time() - started))
    return statistics.median(speeds), seconds


def ratios() -> None:
    """A row for each stream of the literal filter's own benchmark."""
    print(
        "| data, 100 features, 40 particles | literal, rows/CPU s | particle filter | ratio | "
        "compilation, s |\n|---|---|---|---|---|"
    )
    for name, (x, y) in streams().items():
        literal = points_per_second(AClass(y.max() + 1), x, y, predict=False)
        ours, compiled = rows_per_second(np.tile(x, (REPEATED, 1)), np.tile(y, REPEATED))
        print(
            f"| {name} | {literal:.0f} | {ours:.0f} | {ours / literal:.0f} | {compiled:.1f} |",
            flush=True,
        )


def linear(folder: Path | None) -> None:
    """The same mixture, more and more rows; drawn into the folder, where there is one."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    print("| rows | rows/CPU s | with assignments kept |\n|---|---|---|")
    mixture, speeds = Mixture.draw(np.random.default_rng(0), 20, 100), []
    for size in SIZES:
        x, y = mixture.sample(np.random.default_rng(1), size), np.zeros(size, int)
        found = [
            rows_per_second(x, y, keep_assignments=keep, rounds=3 if size < max(SIZES) else 1)[0]
            for keep in (False, True)
        ]
        print(f"| {size} | {found[0]:.0f} | {found[1]:.0f} |", flush=True)
        speeds.append(found)
    if folder:
        figure, ax = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
        ax.loglog(
            SIZES,
            np.divide(SIZES, np.transpose(speeds)).T,
            "o-",
            label=["without assignments", "assignments kept"],
        )
        ax.loglog(
            SIZES,
            np.divide(SIZES, speeds[0][0]),
            color="0.7",
            lw=1,
            zorder=0,
            label="in proportion to the rows",
        )
        ax.set(xlabel="rows", ylabel="CPU seconds")
        ax.legend(fontsize="small", frameon=False)
        figure.savefig(folder / "aclass_speed.png", dpi=150)


if __name__ == "__main__":
    if "--linear" in sys.argv:
        linear(next(map(Path, sys.argv[sys.argv.index("--linear") + 1 :]), None))
    else:
        ratios()
