"""AUC of several tasks learned at once, against each task alone and all of them pooled:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    JAX_COMPILATION_CACHE_DIR=COMPILED
    python -m tests.bench.iqgme_tasks RESULTS.jsonl --missing 0 0.25 0.5 0.75 --sizes 20 100 300 --splits 10     # goes on where it stopped
    python -m tests.bench.iqgme_tasks RESULTS.jsonl --data letters --missing 0 0.25 0.5 --sizes 20
    40 --splits 3 python -m tests.bench.iqgme_tasks RESULTS.jsonl --table

`landmine`: 19 fields, 1-10 (foliated) and 16-24 (bare earth), as is usual. `letters`: eight pairs
of handwritten letters that are easily confused, 128 pixels. The rows of each task are cut into
`size` for training and the rest (of letters at most 300), at random, with a row or more of each
class among the former and the latter. Missing entries are removed at random from all rows. The mean
of the areas of the tasks. Peers see missing entries filled with the mean of their column; HistGB
takes them as they are.
"""

import argparse
import json
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gallery import IQGMEClassifier, MultiTaskIQGMEClassifier
from gallery.datasets import load

FIELDS = [*range(10), *range(15, 24)]
PAIRS = ("ce", "gy", "mn", "ag", "ij", "ao", "ft", "hn")  # Table 4.1 of the thesis
MOST_NEW = 300  # letters of a task that are predicted
Fitted = tuple[np.ndarray, dict[str, Any]]


def fields() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and task."""
    data = load("landmine")
    keep = np.isin(data["task"], FIELDS)
    return data["x"][keep], data["y"][keep], np.searchsorted(FIELDS, data["task"][keep])


def letters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of handwritten letters; one that is in two pairs is in two tasks."""
    data = load("letters16x8")
    parts = [
        np.flatnonzero(data["y"] == ord(letter) - ord("a")) for pair in PAIRS for letter in pair
    ]
    sizes = [len(part) for part in parts]
    return (
        data["x"][np.concatenate(parts)],
        np.repeat([0, 1] * len(PAIRS), sizes),
        np.repeat(np.repeat(range(len(PAIRS)), 2), sizes),
    )


def chosen(
    y: np.ndarray, task: np.ndarray, size: int, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training, and rows that are new: at most `most` of each task."""
    training, new = [], []
    for j in np.unique(task):
        own = np.flatnonzero(task == j)
        while True:
            first, rest = np.split(rng.permutation(own)[: size + most], [size])
            if all(0 < y[part].sum() < len(part) for part in (first, rest)):
                break
        training.append(first)
        new.append(rest)
    return np.concatenate(training), np.concatenate(new)


def logistic():
    return make_pipeline(
        SimpleImputer(keep_empty_features=True), StandardScaler(), LogisticRegression(max_iter=1000)
    )


def boosted():
    """A column that a task has no entry of stops it: such are left out."""
    return make_pipeline(VarianceThreshold(), HistGradientBoostingClassifier(random_state=0))


def pooled(make, x, y, task, new, new_task) -> Fitted:
    return make().fit(x, y).predict_proba(new)[:, 1], {}


def alone(make, x, y, task, new, new_task) -> Fitted:
    score = np.zeros(len(new))
    for j in np.unique(task):
        score[new_task == j] = (
            make().fit(x[task == j], y[task == j]).predict_proba(new[new_task == j])[:, 1]
        )
    return score, {}


def together(make, x, y, task, new, new_task) -> Fitted:
    model = make().fit(x, y, task)
    found = {
        "sweeps": model.n_iter_,
        "experts": model.n_experts_,
        "likeness": model.similarity().round(3).tolist(),
    }
    return model.predict_proba(new, new_task)[:, 1], found


DATA = {"landmine": (fields, 10**6), "letters": (letters, MOST_NEW)}
METHODS = {
    "multi-task iQGME": (together, lambda: MultiTaskIQGMEClassifier(random_state=0)),
    "multi-task iQGME, two groups": (
        together,
        lambda: MultiTaskIQGMEClassifier(2, 16, sparse=True, random_state=0),
    ),
    "multi-task iQGME, by task": (
        together,
        lambda: MultiTaskIQGMEClassifier(init="task", random_state=0),
    ),
    "multi-task iQGME, one Gaussian": (
        together,
        lambda: MultiTaskIQGMEClassifier(
            2, 10, init="task", sparse=True, precision=10.0, gate_rows=1000.0, random_state=0
        ),
    ),
    "pooled iQGME": (pooled, lambda: IQGMEClassifier(random_state=0)),
    "single-task iQGME": (alone, lambda: IQGMEClassifier(random_state=0)),
    "pooled LR": (pooled, logistic),
    "single-task LR": (alone, logistic),
    "pooled HistGB": (pooled, boosted),
    "single-task HistGB": (alone, boosted),
}


def run(
    path: Path, data: str, missing: list[float], sizes: list[int], splits: range, methods: list[str]
) -> None:
    """A line of the file for each method, cell and split that it lacks."""
    read, most = DATA[data]
    x, y, task = read()
    done = {
        tuple(row[name] for name in ("data", "missing", "size", "split", "method"))
        for row in rows_of(path)
    }
    for split in splits:
        for share in missing:
            for size in sizes:
                rng = np.random.default_rng([split, size])
                train, new = chosen(y, task, size, most, rng)
                holed = np.where(rng.random(x.shape) < share, np.nan, x)
                for method in (
                    name for name in methods if (data, share, size, split, name) not in done
                ):
                    how, make = METHODS[method]
                    start = process_time()
                    score, more = how(
                        make, holed[train], y[train], task[train], holed[new], task[new]
                    )
                    areas = [
                        roc_auc_score(y[new][task[new] == j], score[task[new] == j])
                        for j in np.unique(task)
                    ]
                    row = {
                        "data": data,
                        "missing": share,
                        "size": size,
                        "split": split,
                        "method": method,
                        "auc": float(np.mean(areas)),
                        **more,
                    }
                    with path.open("a") as file:
                        file.write(
                            json.dumps(row | {"seconds": round(process_time() - start, 1)}) + "\n"
                        )


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Those that have been written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(path: Path, ours: str) -> None:
    """Means over splits; of the others what `beside` says."""
    rows = rows_of(path)
    others = [
        name for name in METHODS if name != ours and any(row["method"] == name for row in rows)
    ]
    print(
        f"| data | missing | size | splits | {ours} | "
        + " | ".join(others)
        + " |\n|"
        + "---|" * (5 + len(others))
    )
    for data, share, size in sorted(
        {(row["data"], row["missing"], row["size"]) for row in rows if row["method"] == ours}
    ):
        own = [
            row for row in rows if (row["data"], row["missing"], row["size"]) == (data, share, size)
        ]
        cell = {
            name: {row["split"]: row["auc"] for row in own if row["method"] == name}
            for name in (ours, *others)
        }
        mine, told = cell[ours], [beside(cell[ours], cell[name]) for name in others]
        print(
            f"| {data} | {share:g} | {size} | {len(mine)} | {np.mean(list(mine.values())):.3f} | "
            + " | ".join(told)
            + " |"
        )


def beside(mine: dict[int, float], other: dict[int, float]) -> str:
    """A peer's mean; in parentheses how far ours is above it over the same splits, and its
    error; in brackets their number if fewer.
    """
    both = sorted(set(mine) & set(other))
    if not both:
        return "-"
    gap = np.array([mine[split] - other[split] for split in both])
    error = f" ± {gap.std(ddof=1) / np.sqrt(len(gap)):.3f}" if len(gap) > 1 else ""
    fewer = f" [{len(both)}]" if len(both) < len(mine) else ""
    return f"{np.mean([other[split] for split in both]):.3f} ({gap.mean():+.3f}{error}){fewer}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", choices=DATA, default="landmine")
    parser.add_argument("--missing", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 100, 300])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="split to begin with")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--ours",
        default="multi-task iQGME",
        choices=list(METHODS),
        help="the method that the table compares with others",
    )
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    if told.table:
        table(told.results, told.ours)
    else:
        run(
            told.results,
            told.data,
            told.missing,
            told.sizes,
            range(told.first, told.splits),
            told.methods,
        )


if __name__ == "__main__":
    main()
