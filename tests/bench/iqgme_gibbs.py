"""Variational Bayes against Gibbs sampling of iQGME, as in Figure 3.10 of the thesis: area, CPU
seconds of a sweep, number of sweeps.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    export JAX_COMPILATION_CACHE_DIR=COMPILED JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    python -m tests.bench.iqgme_gibbs RESULTS.jsonl --splits 1 --figure FIGURE.png     # goes on where it stopped
    python -m tests.bench.iqgme_gibbs RESULTS.jsonl --table

A quarter of the entries is missing; splits are those of `iqgme_single`. Variational Bayes ends
where the bound gains less than a share of 1e-6, the sampler makes 1000 sweeps and then 500 draws,
both as in the thesis. Seconds of a sweep leave compiling out: they are the CPU seconds of a fit
less those of one of a few sweeps, over the sweeps between. Beside that, how long the sampler would
take to 400 effective draws of the log joint, and of the number of experts: its sweeps before the
first draw, and as many after it as that takes at the rate of its 500 draws. One chain cannot see
experts that it never visits.
"""

import argparse
import json
import warnings
from pathlib import Path
from time import process_time

import arviz as az
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from gallery import IQGMEClassifier
from gallery.datasets import load
from tests.bench.iqgme_tasks import rows_of

MISSING, SHARES, WANTED = 0.25, (0.1, 0.3, 0.5, 0.7, 0.9), 400
BURN_IN, DRAWS, FEW = 1000, 500, 5
METHODS = ("vb", "gibbs")


def classifier(method, sweeps=None):
    if method == "vb":
        return IQGMEClassifier(max_iter=sweeps or 500, random_state=0)
    before, draws = (sweeps, sweeps) if sweeps else (BURN_IN, DRAWS)
    return IQGMEClassifier(inference="gibbs", max_iter=before, num_samples=draws, random_state=0)


def fitted(method, x, y, sweeps=None):
    """The model, and the CPU seconds of its fit."""
    start = process_time()
    return classifier(method, sweeps).fit(x, y), process_time() - start


def effective(model):
    """Draws that are worth as much as independent ones, of the log joint and of the number of
    experts; None where it never changes.
    """
    stats = model.posterior_["sample_stats"].dataset
    each = {name: stats[name].values.astype(float) for name in ("lp", "num_groups")}
    return {
        name: float(az.ess(values)) if values.std() > 0 else None for name, values in each.items()
    }


def measured(method, x, y, train, test):
    fitted(method, x[train], y[train], FEW)  # compiles what the cache is to keep
    _, few_seconds = fitted(method, x[train], y[train], FEW)
    model, seconds = fitted(method, x[train], y[train])
    sweep = (seconds - few_seconds) / (model.n_iter_ - FEW * (1 if method == "vb" else 2))
    start = process_time()
    area = roc_auc_score(y[test], model.predict_proba(x[test])[:, 1])
    row = {
        "auc": area,
        "seconds": seconds,
        "sweep": sweep,
        "sweeps": model.n_iter_,
        "predicting": process_time() - start,
    }
    if method == "gibbs":
        number = model.posterior_["sample_stats"].dataset["num_groups"].values.ravel()
        row |= {"ess": effective(model), "experts": np.bincount(number, minlength=21).tolist()}
    else:
        row["experts"] = model.n_experts_
    return row


def cell(name, share, split):
    """x with holes, y, and which rows to learn from and to predict."""
    data, rng = load(name), np.random.default_rng([split, int(100 * MISSING), int(100 * share)])
    x = np.where(rng.random(data["x"].shape) < MISSING, np.nan, data["x"])
    return (
        x,
        data["y"],
        *train_test_split(
            np.arange(len(x)), train_size=share, stratify=data["y"], random_state=split
        ),
    )


def run(path, splits, sets, shares, methods):
    """A line of the file for each method, cell and split that it lacks."""
    done = {(row["data"], row["share"], row["split"], row["method"]) for row in rows_of(path)}
    for split in range(splits):
        for name, share in ((name, share) for name in sets for share in shares):
            x, y, train, test = cell(name, share, split)
            for method in (each for each in methods if (name, share, split, each) not in done):
                row = {
                    "data": name,
                    "share": share,
                    "split": split,
                    "method": method,
                    **measured(method, x, y, train, test),
                }
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def by_cell(path):
    """{(data, share): {method: rows}}"""
    found = {}
    for row in rows_of(path):
        found.setdefault((row["data"], row["share"]), {}).setdefault(row["method"], []).append(row)
    return dict(sorted(found.items()))


def mean(rows, name):
    return np.mean([row[name] for row in rows])


def to_wanted(rows, name):
    """CPU seconds to the wanted number of effective draws; where the number never changed there
    is no telling.
    """
    if any(row["ess"][name] is None for row in rows):
        return "never changed"
    return f"{np.mean([(BURN_IN + WANTED * DRAWS / row['ess'][name]) * row['sweep'] for row in rows]):.0f}"


def experts(rows):
    """Their number in the posterior, all splits together."""
    count = np.sum([row["experts"] for row in rows], 0)
    return ", ".join(
        f"{k}: {share:.2f}" for k, share in enumerate(count / count.sum()) if share >= 0.01
    )


def table(path):
    """Means over splits."""
    heads = [
        "data",
        "share",
        "splits",
        "AUC, VB",
        "AUC, Gibbs",
        "ms a sweep, VB",
        "Gibbs",
        "sweeps, VB",
        "Gibbs",
        "s in sweeps, VB",
        "Gibbs",
    ]
    heads += ["to ESS 400 of log joint", "of experts", "experts, VB", "posterior"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for (name, share), cell in by_cell(path).items():
        if set(cell) < set(METHODS):
            continue
        vb, gibbs = (cell[method] for method in METHODS)
        told = [f"{mean(rows, 'auc'):.3f}" for rows in (vb, gibbs)]
        told += [f"{1000 * mean(rows, 'sweep'):.1f}" for rows in (vb, gibbs)] + [
            f"{mean(rows, 'sweeps'):.0f}" for rows in (vb, gibbs)
        ]
        told += [
            f"{np.mean([row['sweep'] * row['sweeps'] for row in rows]):.1f}" for rows in (vb, gibbs)
        ]
        told += [
            to_wanted(gibbs, "lp"),
            to_wanted(gibbs, "num_groups"),
            f"{mean(vb, 'experts'):.1f}",
            experts(gibbs),
        ]
        print(f"| {name} | {share:g} | {len(gibbs)} | " + " | ".join(told) + " |")


def figure(path, target, name="ionosphere"):
    """The three panels of Figure 3.10, of one data set."""
    import matplotlib.pyplot as plt

    cells = {
        share: cell
        for (data, share), cell in by_cell(path).items()
        if data == name and len(cell) == len(METHODS)
    }
    panels = {
        "auc": "area under the curve",
        "sweep": "CPU seconds of a sweep",
        "sweeps": "number of sweeps",
    }
    plot, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, (quantity, label) in zip(axes, panels.items(), strict=True):
        for method, mark in zip(METHODS, "os", strict=True):
            axis.plot(
                list(cells),
                [mean(cell[method], quantity) for cell in cells.values()],
                f"{mark}-",
                label=method,
            )
        axis.set(
            xlabel="share of rows for training",
            ylabel=label,
            yscale="log" if quantity == "sweeps" else "linear",
        )
    axes[0].legend()
    plot.savefig(target, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=["ionosphere", "wdbc"])
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    if not told.table:
        run(told.results, told.splits, told.sets, told.shares, told.methods)
    table(told.results)
    if told.figure:
        figure(told.results, told.figure)


if __name__ == "__main__":
    main()
