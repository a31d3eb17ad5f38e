"""AUC of iQGME among common factors on tables of more columns than rows, against SVMs that fill
them in first:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    JAX_COMPILATION_CACHE_DIR=COMPILED
    python -m tests.bench.iqgme_factors RESULTS.jsonl --splits 10     # goes on where it stopped
    python -m tests.bench.iqgme_factors RESULTS.jsonl --table

Pixels of 120 images of two digits of MNIST, 2 and 7 or 2 and 8, others for each split; the columns
that differ between images, 500 to 550. Entries are removed at random, or the left or right half of
an image, as when one of two sensors was not there. Half of the images are for training, the rest
for testing; every method sees the same ones. The SVM (RBF) takes C and gamma by three folds.
"""

import argparse
import json
import resource
import warnings
from pathlib import Path
from time import process_time

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from gallery import IQGMEClassifier
from gallery.datasets import load
from tests.bench.iqgme_tasks import rows_of

ROWS = 120
PAIRS = {"2 or 7": (2, 7), "2 or 8": (2, 8)}
CELLS = [(pair, kind, 0.5) for pair in PAIRS for kind in ("0.25", "0.5", "0.75", "half")]
GRID = {"svc__C": [0.1, 1, 10, 100], "svc__gamma": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]}


def filled(imputer, classifier):
    return make_pipeline(imputer, StandardScaler(), classifier)


def searched(imputer):
    return GridSearchCV(filled(imputer, SVC()), GRID, scoring="roc_auc", cv=3)


METHODS = {
    "iQGME": lambda: IQGMEClassifier(10, n_factors=20, random_state=0),
    "SVM, mean": lambda: searched(SimpleImputer(keep_empty_features=True)),
    "SVM, kNN": lambda: searched(KNNImputer(keep_empty_features=True)),
    "LR, mean": lambda: filled(
        SimpleImputer(keep_empty_features=True), LogisticRegression(C=0.01, max_iter=2000)
    ),
    "HistGB": lambda: HistGradientBoostingClassifier(random_state=0),
}


def images(pair: str, kind: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels with holes, of some images; and whether each is the second digit."""
    data, rng = load("mnist"), np.random.default_rng(split)
    chosen = np.concatenate(
        [
            rng.choice(np.flatnonzero(data["y_train"] == digit), ROWS // 2, replace=False)
            for digit in PAIRS[pair]
        ]
    )
    x = np.asarray(data["x_train"][chosen], float).reshape(ROWS, -1)
    column = np.arange(x.shape[1]) % 28
    if kind == "half":
        lost = rng.integers(0, 3, ROWS)[:, None]  # the left, the right, or nothing
        holes = ((lost == 0) & (column < 14)) | ((lost == 1) & (column >= 14))
    else:
        holes = rng.random(x.shape) < float(kind)
    kept = x.std(0) > 0
    return np.where(holes, np.nan, x)[:, kept], np.arange(ROWS) >= ROWS // 2


def run(path: Path, splits: int, methods: list[str]) -> None:
    """A line of the file for each method, cell and split that it lacks."""
    done = {
        (row["data"], row["missing"], row["share"], row["split"], row["method"])
        for row in rows_of(path)
    }
    for split in range(splits):
        for pair, kind, share in CELLS:
            left = [name for name in methods if (pair, kind, share, split, name) not in done]
            if not left:
                continue
            x, y = images(pair, kind, split)
            train, test = train_test_split(
                np.arange(ROWS), train_size=share, stratify=y, random_state=split
            )
            for name in left:
                start, model = process_time(), METHODS[name]().fit(x[train], y[train])
                score = (
                    model.predict_proba(x[test])[:, 1]
                    if hasattr(model, "predict_proba")
                    else model.decision_function(x[test])
                )
                row = {
                    "data": pair,
                    "missing": kind,
                    "share": share,
                    "split": split,
                    "method": name,
                    "columns": x.shape[1],
                }
                row |= {
                    "auc": roc_auc_score(y[test], score),
                    "seconds": round(process_time() - start, 1),
                }
                # the most so far, of all methods
                row["gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def table(path: Path) -> None:
    """Means over splits; of peers, in parentheses, what iQGME is above them over the same
    splits, and its standard error.
    """
    rows = rows_of(path)
    print(
        "| images | missing | training share | splits | "
        + " | ".join(METHODS)
        + " |\n|"
        + "---|" * (4 + len(METHODS))
    )
    for cell in CELLS:
        auc: dict[str, dict[int, float]] = {name: {} for name in METHODS}
        for row in rows:
            if (row["data"], row["missing"], row["share"]) == cell:
                auc[row["method"]][row["split"]] = row["auc"]
        if not auc["iQGME"]:
            continue
        told = [f"{np.mean(list(auc['iQGME'].values())):.3f}"]
        for name in list(METHODS)[1:]:
            both = sorted(set(auc["iQGME"]) & set(auc[name]))
            gap = np.array([auc["iQGME"][split] - auc[name][split] for split in both])
            error = f" ± {gap.std(ddof=1) / np.sqrt(len(gap)):.3f}" if len(gap) > 1 else ""
            told.append(
                f"{np.mean([auc[name][split] for split in both]):.3f} ({gap.mean():+.3f}{error})"
                if both
                else "-"
            )
        print(
            f"| {cell[0]} | {cell[1]} | {cell[2]:g} | {len(auc['iQGME'])} | "
            + " | ".join(told)
            + " |"
        )
    for name in METHODS:
        seconds = [row["seconds"] for row in rows if row["method"] == name]
        print(
            f"{name}: {np.median(seconds):.1f} CPU s a fit and prediction (median of "
            f"{len(seconds)})"
            if seconds
            else f"{name}: -"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.simplefilter("ignore", RuntimeWarning)
    table(told.results) if told.table else run(told.results, told.splits, told.methods)


if __name__ == "__main__":
    main()
