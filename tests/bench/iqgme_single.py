"""AUC of iQGME on tables with missing entries against peers that fill them in first:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    JAX_COMPILATION_CACHE_DIR=COMPILED
    python -m tests.bench.iqgme_single RESULTS.jsonl --splits 10     # goes on where it stopped
    python -m tests.bench.iqgme_single RESULTS.jsonl --table
    python -m tests.bench.iqgme_single RESULTS.jsonl --experts       # how many have rows (Figure 3.8 of the thesis)

Ionosphere and WDBC lose a share of their entries at random; "wdbc, by sensor" loses them as if its
means, errors and extremes were of three sensors, each silent for a row at once (but one of them
never is where all of them would be); horse colic and Pima lack some by nature. Of each, a share of
the rows of both classes is for training, the rest is for testing. Every method sees the same rows
and holes. The SVM (RBF) takes C and gamma by three folds. "3 experts" is the same model with three
at most: a finite mixture of experts.
"""

import argparse
import json
import warnings
from pathlib import Path
from time import process_time

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from gallery import IQGMEClassifier
from gallery.datasets import load
from tests.bench.iqgme_tasks import beside, rows_of

HOLED, SHARES = ("ionosphere", "wdbc", "wdbc, by sensor"), (0.1, 0.5, 0.9)
CELLS = [(name, missing, share) for name in HOLED for missing in (0.25, 0.5) for share in SHARES]
CELLS += [(name, 0.0, share) for name in ("horse_colic", "pima_missing") for share in SHARES]
GRID = {"svc__C": [0.1, 1, 10, 100], "svc__gamma": [0.003, 0.01, 0.03, 0.1, 0.3]}


def filled(imputer, classifier):
    return make_pipeline(imputer, StandardScaler(), classifier)


def searched(imputer):
    return GridSearchCV(filled(imputer, SVC()), GRID, scoring="roc_auc", cv=3)


METHODS = {
    "iQGME": lambda: IQGMEClassifier(random_state=0),
    "LR": lambda: filled(
        SimpleImputer(keep_empty_features=True), LogisticRegression(max_iter=2000)
    ),
    "HistGB": lambda: HistGradientBoostingClassifier(random_state=0),
    "SVM": lambda: searched(SimpleImputer(keep_empty_features=True)),
    "SVM, iterative": lambda: searched(
        IterativeImputer(max_iter=5, keep_empty_features=True, random_state=0)
    ),
    **{
        f"{count} experts": lambda count=count: IQGMEClassifier(count, random_state=0)
        for count in (2, 3, 5, 10)
    },
}


def holed(name: str, x: np.ndarray, missing: float, rng: np.random.Generator) -> np.ndarray:
    """The table without a share of its entries."""
    if not name.endswith(", by sensor"):
        return np.where(rng.random(x.shape) < missing, np.nan, x)
    silent = rng.random((len(x), 3)) < missing
    silent[np.arange(len(x)), rng.integers(0, 3, len(x))] &= ~silent.all(1)
    return np.where(silent.repeat(x.shape[1] // 3, 1), np.nan, x)


def run(path: Path, splits: int, methods: list[str], sets: list[str]) -> None:
    """A line of the file for each method, cell and split that it lacks."""
    done = {
        (row["data"], row["missing"], row["share"], row["split"], row["method"])
        for row in rows_of(path)
    }
    for split in range(splits):
        for name, missing, share in (cell for cell in CELLS if cell[0] in sets):
            data, rng = (
                load(name.split(",")[0]),
                np.random.default_rng([split, int(100 * missing), int(100 * share)]),
            )
            x = holed(name, data["x"], missing, rng)
            train, test = train_test_split(
                np.arange(len(x)), train_size=share, stratify=data["y"], random_state=split
            )
            for method in (
                each for each in methods if (name, missing, share, split, each) not in done
            ):
                start, model = process_time(), METHODS[method]().fit(x[train], data["y"][train])
                score = (
                    model.predict_proba(x[test])[:, 1]
                    if hasattr(model, "predict_proba")
                    else model.decision_function(x[test])
                )
                area, seconds = (
                    roc_auc_score(data["y"][test], score),
                    round(process_time() - start, 1),
                )
                row = {
                    "data": name,
                    "missing": missing,
                    "share": share,
                    "split": split,
                    "method": method,
                    "auc": area,
                    "seconds": seconds,
                }
                if isinstance(model, IQGMEClassifier):
                    row["experts"] = model.n_experts_
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def table(path: Path) -> None:
    """Means over splits; of peers what `beside` says."""
    rows = rows_of(path)
    peers = [
        name for name in METHODS if name != "iQGME" and any(row["method"] == name for row in rows)
    ]
    print(
        "| data | missing | training share | splits | iQGME | "
        + " | ".join(peers)
        + " |\n|"
        + "---|" * (5 + len(peers))
    )
    for name, missing, share in CELLS:
        own = [
            row
            for row in rows
            if (row["data"], row["missing"], row["share"]) == (name, missing, share)
        ]
        auc = {
            method: {row["split"]: row["auc"] for row in own if row["method"] == method}
            for method in METHODS
        }
        if mine := auc["iQGME"]:
            told = [beside(mine, auc[peer]) for peer in peers]
            print(
                f"| {name} | {missing:g} | {share:g} | {len(mine)} | "
                f"{np.mean(list(mine.values())):.3f} | " + " | ".join(told) + " |"
            )


def experts(path: Path) -> None:
    """How many experts have a row or more, over splits: extremes, quartiles and the median."""
    print(
        "| data | missing | training share | splits | least | quarter | median | three quarters | "
        "most |\n|" + "---|" * 9
    )
    for cell in CELLS:
        rows = [
            row
            for row in rows_of(path)
            if (row["data"], row["missing"], row["share"], row["method"]) == (*cell, "iQGME")
        ]
        if numbers := [row["experts"] for row in rows if "experts" in row]:
            told = (
                f"{each:g}"
                for each in (
                    *cell[1:],
                    len(numbers),
                    *np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1]),
                )
            )
            print(f"| {cell[0]} | " + " | ".join(told) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--sets", nargs="+", default=list(dict.fromkeys(name for name, *_ in CELLS))
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--experts", action="store_true")
    told = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    if told.table:
        table(told.results)
    elif told.experts:
        experts(told.results)
    else:
        run(told.results, told.splits, told.methods, told.sets)


if __name__ == "__main__":
    main()
