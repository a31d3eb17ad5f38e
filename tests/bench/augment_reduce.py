"""Augment and reduce next to its rivals: the synthetic experiment of section 4.1, and the data sets
of the paper that are at hand.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.augment_reduce synthetic [--steps 100000] [--rate 0.02] [--decay
    0.9] [--adagrad 0.1] uv run python -m tests.bench.augment_reduce mnist|bibtex|omniglot [--steps
    N] [--seeds 3] [--prior SCALE] [--methods A,B] [-o FOLDER]

All methods share rows, negatives, optimiser (the paper's) and start (weights 0.1 N(0, 1)). Test log
likelihoods are exact: the softmax, or equation 5 by quadrature. The bound is over all rows and
classes, at the end.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from time import process_time
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from gallery.datasets import load
from inference import Driver, Program
from inference.kernels.augment_reduce.weights import Adagrad, Adaptive
from tests.bench.augment_reduce_rivals import METHODS
from zoo.augment_reduce import augment_reduce

__all__ = ["log_probs", "main", "table_data"]

SETTINGS = {  # the paper's: rows and classes of a step, steps
    "mnist": (500, 1, 35_000),
    "bibtex": (488, 20, 5_000),
    "omniglot": (541, 50, 45_000),
}


def table_data(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features and classes, to learn from and to be tested on, as the paper has them; classes
    that are never seen are left out.
    """
    data = load(name)
    if name == "omniglot":  # four of the twenty drawers of each letter are kept
        x, y, is_test = data["x"].reshape(len(data["x"]), -1), data["y"], data["drawer"] > 16
    elif name == "mnist":
        x = np.concatenate([data["x_train"], data["x_test"]]).reshape(-1, 784)
        y, is_test = np.concatenate([data["y_train"], data["y_test"]]), np.arange(70_000) >= 60_000
    else:
        x, y, is_test = bibtex(data)
    classes, codes = np.unique(y[~is_test], return_inverse=True)
    known = is_test & np.isin(y, classes)
    scale = np.float32(x.max())
    x = x.astype(np.float32) / scale
    return (
        x[~is_test],
        codes.astype(np.int32),
        x[known],
        np.searchsorted(classes, y[known]).astype(np.int32),
    )


def bibtex(data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first label of each entry, as Titsias (2016) has it; entries without one are left out."""
    parts = []
    for part in ("train", "test"):
        starts = data[f"x_{part}_indptr"]
        x = np.zeros((len(starts) - 1, int(data["num_features"])), np.float32)
        x[np.repeat(np.arange(len(x)), np.diff(starts)), data[f"x_{part}_indices"]] = 1
        starts, labels = data[f"labels_{part}_indptr"], data[f"labels_{part}_indices"]
        has = np.flatnonzero(np.diff(starts))
        parts.append((x[has], np.array([labels[starts[i] : starts[i + 1]].min() for i in has])))
    (x, y), (x_test, y_test) = parts
    return (
        np.concatenate([x, x_test]),
        np.concatenate([y, y_test]),
        np.arange(len(y) + len(y_test)) >= len(y),
    )


def log_probs(x: np.ndarray, values: dict, noise: str, num_classes: int) -> np.ndarray:
    """The log probability of each class, read off the model."""

    @jax.jit
    def of(x, values):
        program = Program(
            augment_reduce,
            x,
            np.zeros(len(x), np.int32),
            num_classes=num_classes,
            noise=noise,
            augmented=False,
        )
        return program.trace(values)["y"]["fn"].log_probs

    rows = max(2_000_000 // num_classes, 1)
    return np.concatenate(
        [np.asarray(of(x[start : start + rows], values)) for start in range(0, len(x), rows)]
    )


class Fit(NamedTuple):
    """What a fit leaves."""

    values: dict[str, Any]  # of the weights
    bounds: np.ndarray  # estimate of each step, of all rows
    seconds: float  # CPU of a step


def fitted(method: str, seed: int, steps: int, prior: float | None, optimizer: Any, **told) -> Fit:
    """By the kernel in the driver; what compiles is not timed."""
    kernel_class, model, noise = METHODS[method]
    driver = Driver(
        kernel_class(model, init_scale=0.1, optimizer=optimizer),
        num_warmup=1,
        num_samples=1,
        progress_bar=False,
    )
    driver.run(seed, **told, noise=noise, prior_scale=prior)
    driver.extend(1)
    started = process_time()
    tree = driver.extend(steps - 2)
    seconds = (process_time() - started) / (steps - 2)
    values = {
        name: value["loc"]
        for name, value in driver.kernel.values(driver.states[0], driver.reading).items()
    }
    return Fit(values, tree["sample_stats"].dataset["elbo"].values[0], seconds)


def on_data(
    name: str,
    steps: int | None,
    seeds: int,
    prior: float | None,
    methods: list[str],
    optimizer: Any,
    folder: Path | None,
) -> None:
    """A row for each method: means over seeds; and a picture of the bounds."""
    x, y, x_test, y_test = table_data(name)
    rows, negatives, paper_steps = SETTINGS[name]
    steps, num_classes = steps or paper_steps, int(y.max()) + 1
    told = {
        "x": x,
        "y": y,
        "num_classes": num_classes,
        "batch_size": rows,
        "num_negatives": negatives,
    }
    kind = "maximum likelihood" if prior is None else f"prior scale {prior:g}"
    print(
        f"{name}: {x.shape} and {x_test.shape[0]}, K = {num_classes}, {steps} steps of "
        f"{paper_steps}, {seeds} seeds, {kind}\n"
    )
    print(
        "| method | bound a row, last steps | train log likelihood | test log likelihood | "
        "accuracy | CPU ms a step |\n" + 6 * "|---" + "|"
    )
    curves = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for method in methods:
        found = []
        for seed in range(seeds):
            fit = fitted(method, seed, steps, prior, optimizer, **told)
            test = log_probs(x_test, fit.values, METHODS[method][2], num_classes)
            some = np.random.default_rng(0).choice(len(x), min(len(x), 5000), replace=False)
            train = log_probs(x[some], fit.values, METHODS[method][2], num_classes)[
                np.arange(len(some)), y[some]
            ].mean()
            own = test[np.arange(len(y_test)), y_test].mean()
            found.append(
                (
                    fit.bounds[-500:].mean() / len(x),
                    train,
                    own,
                    (test.argmax(1) == y_test).mean(),
                    1e3 * fit.seconds,
                )
            )
            curves.setdefault(method, (fit.bounds / len(x), fit.seconds))
        columns = list(zip(*found, strict=True))
        entries = [
            f"{mean(column):.4g}" + (f" ± {stdev(column):.1g}" if seeds > 1 and place < 4 else "")
            for place, column in enumerate(columns)
        ]
        print(f"| {method} | " + " | ".join(entries) + " |", flush=True)
        if folder is not None:
            picture(curves).savefig(folder / f"augment_reduce_{name}.png", dpi=150)


def picture(curves: dict[str, tuple[np.ndarray, float]], points: int = 100) -> Figure:
    """Bound of a row against CPU seconds, means over a hundredth of the steps."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for method, (bounds, seconds) in curves.items():
        if method == "sampled softmax":  # which has no bound
            continue
        parts = np.array_split(bounds, points)
        axes.plot(
            seconds * np.cumsum([len(part) for part in parts]),
            [part.mean() for part in parts],
            label=method,
            lw=1.2,
        )
    last = [bounds[-len(bounds) // 2 :].mean() for bounds, _ in curves.values()]
    axes.set(
        xscale="log",
        xlabel="CPU seconds",
        ylabel="bound on the log likelihood of a row (nats)",
        ylim=(2.5 * min(last), 0),
    )
    axes.legend(frameon=False, fontsize="small")
    return figure


def synthetic(steps: int, optimizer: Any) -> None:
    """Section 4.1: p proportional to u^2, no features."""
    rng = np.random.default_rng(0)
    p = rng.uniform(size=10_000) ** 2
    drawn = rng.choice(10_000, 300_000, p=p / p.sum())
    classes, y = np.unique(drawn, return_inverse=True)
    counts, truth = np.bincount(y), p[classes] / p[classes].sum()
    told = {
        "x": np.zeros((len(y), 1), np.float32),
        "y": y.astype(np.int32),
        "num_classes": len(classes),
    }
    best, error = (
        float((counts * np.log(counts / len(y))).sum()),
        abs(counts / len(y) - truth).mean(),
    )
    print(
        f"{len(classes)} classes; maximum log likelihood {best:.4e}, its mean error {error:.2e}; "
        f"{steps} steps\n"
    )
    print("| method | bound | log likelihood | mean absolute error of p |\n|---|---|---|---|")
    for method in ("A&R softmax", "OVE"):
        fit = fitted(method, 0, steps, None, optimizer, **told, batch_size=500, num_negatives=100)
        found = log_probs(np.zeros((1, 1), np.float32), fit.values, "gumbel", len(classes))[0]
        print(
            f"| {method} | {fit.bounds[-500:].mean():.4e} | {(counts * found).sum():.4e} | "
            f"{abs(np.exp(found) - truth).mean():.2e} |",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["synthetic", *SETTINGS])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prior", type=float)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--rate",
        type=float,
        default=Adaptive().rate,
        help="of the weights, at first; the paper's is 0.02",
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=Adaptive().decay,
        help="of the rate, every 2000 steps; the paper's is 0.9",
    )
    parser.add_argument(
        "--adagrad", type=float, help="Adagrad with this rate, in place of the paper's steps"
    )
    parser.add_argument("-o", dest="folder", type=Path, help="where a picture of the bounds goes")
    told = parser.parse_args()
    optimizer = Adaptive(told.rate, told.decay) if told.adagrad is None else Adagrad(told.adagrad)
    if told.what == "synthetic":
        synthetic(told.steps or 100_000, optimizer)
    else:
        on_data(
            told.what,
            told.steps,
            told.seeds,
            told.prior,
            told.methods.split(","),
            optimizer,
            told.folder,
        )


if __name__ == "__main__":
    main()
