"""Every system of the zoo next to what scikit-learn has for the same rows, in one table:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.overview > tests/bench/README.md
    uv run python -m tests.bench.overview wine                       # one data set

Each method has a process of its own: CPU seconds are those of its fit and its predictions,
compiling included, memory is the most that the process had, libraries included. One split of each
data set, so differences of a standard error or two are chance. What a system is for, the protocols
of its paper, and more splits are in the files beside this one.
"""

import json
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import date
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import BernoulliNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.semi_supervised import LabelSpreading

import gallery
from gallery.datasets import load

__all__ = ["TASKS", "Task"]

FILES = {
    "20 Newsgroups": "aclass",
    "wine": "staged",
    "pinwheel": "archipelago",
    "Ionosphere": "iqgme",
    "MNIST, 2 and 7": "iqgme",
    "Landmine": "iqgme",
    "MNIST": "augment_reduce",
    "MovieLens": "bsvd",
}


class Split(NamedTuple):
    """What is learned from, what is predicted; labels are -1 where unknown."""

    x: Any
    y: np.ndarray
    new_x: Any
    new_y: np.ndarray


class Task(NamedTuple):
    """Data, what is done with them, and who does it: the first is the zoo's."""

    words: str
    split: Callable[[], Split]
    methods: dict[str, Callable[[], Any]]


def cut(
    x: np.ndarray, y: np.ndarray, num_train: int, missing: float = 0.0, num_test: int | None = None
) -> Split:
    """Some rows to learn from, others to predict, and holes in both."""
    rng = np.random.default_rng(0)
    order, x = rng.permutation(len(y)), np.asarray(x, float)
    x = np.where(rng.random(x.shape) < missing, np.nan, x) if missing else x
    train, test = order[:num_train], order[num_train:][:num_test]
    return Split(x[train], y[train], x[test], y[test])


def pinwheel() -> Split:
    """Two labels a class."""
    data = load("pinwheel", num_classes=5, num_per_class=72)
    whole = cut(data.x, data.y, 60)
    known = np.concatenate([np.flatnonzero(whole.y == label)[:2] for label in range(5)])
    return whole._replace(y=np.where(np.isin(np.arange(60), known), whole.y, -1))


def two_digits() -> Split:
    """Sixty images to learn from, sixty to predict, half of the pixels lost."""
    data, rng = load("mnist"), np.random.default_rng(0)
    chosen = np.concatenate(
        [
            rng.choice(np.flatnonzero(data["y_train"] == digit), 60, replace=False)
            for digit in (2, 7)
        ]
    )
    pixels = data["x_train"][chosen].reshape(120, -1)
    return cut(pixels[:, pixels.std(0) > 0], np.repeat([0, 1], 60), 60, 0.5)


def landmine() -> Split:
    """Forty rows of each task to learn from; the last column is the task."""
    data, rng = load("landmine"), np.random.default_rng(0)
    task = np.asarray(data["task"])
    x = np.column_stack([data["x"], task])
    train = np.concatenate(
        [rng.permutation(np.flatnonzero(task == one))[:40] for one in np.unique(task)]
    )
    rest = np.setdiff1d(np.arange(len(task)), train)
    return Split(x[train], data["y"][train], x[rest], data["y"][rest])


def movielens() -> Split:
    """A fiftieth of the ratings to learn from, as many to predict."""
    data, rng = load("movielens_1m"), np.random.default_rng(0)
    order = rng.permutation(len(data["values"]))
    entries = np.column_stack([data["rows"], data["cols"]])
    train, test = order[: len(order) // 50], order[-(len(order) // 50) :]
    return Split(
        entries[train],
        data["values"][train].astype(float),
        entries[test],
        data["values"][test].astype(float),
    )


class Tasks:
    """`MultiTaskIQGMEClassifier` where the last column is the task."""

    def fit(self, x, y):
        self.model = gallery.MultiTaskIQGMEClassifier(10, 20, max_iter=1000, random_state=0).fit(
            x[:, :-1], y, x[:, -1].astype(int)
        )
        return self

    def predict_proba(self, x):
        return self.model.predict_proba(x[:, :-1], x[:, -1].astype(int))


class Entries:
    """`BSVDCompleter` where rows are (user, film)."""

    def fit(self, x, y):
        settings = {
            "num_components": 20,
            "num_warmup": 100,
            "num_samples": 200,
            "learn_factors": True,
            "random_state": 0,
        }
        self.model = gallery.BSVDCompleter((6040, 3952), **settings).fit((x[:, 0], x[:, 1], y))
        return self

    def predict(self, x):
        return self.model.predict(x[:, 0], x[:, 1])


class Labelled:
    """A supervised method, of the labelled rows alone."""

    def __init__(self, method):
        self.method = method

    def fit(self, x, y):
        self.method.fit(x[y >= 0], y[y >= 0])
        return self

    def predict_proba(self, x):
        return self.method.predict_proba(x)


def linear(**options):
    """Logistic regression of standardised columns, means where something is missing."""
    return make_pipeline(
        SimpleImputer(keep_empty_features=True),
        StandardScaler(),
        LogisticRegression(max_iter=2000, **options),
    )


BOOSTED = {"gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0)}
TASKS: dict[str, Task] = {
    "20 Newsgroups": Task(
        "500 documents of 100 words, a quarter of the entries missing",
        lambda: cut(load("20news_w100")["x"], load("20news_w100")["y"], 500, 0.25, 2000),
        {
            "AClassClassifier": lambda: gallery.AClassClassifier(random_state=0),
            "naive Bayes": lambda: make_pipeline(
                SimpleImputer(strategy="most_frequent"), BernoulliNB()
            ),
            "logistic regression": linear,
            **BOOSTED,
        },
    ),
    "wine": Task(
        "89 rows; alcohol, flavanoids and colour",
        lambda: cut(load("wine").x[:, [0, 6, 9]], load("wine").y, 89),
        {
            "StagedMixtureClassifier": lambda: gallery.StagedMixtureClassifier(random_state=0),
            "quadratic discriminant": lambda: make_pipeline(
                StandardScaler(), QuadraticDiscriminantAnalysis(reg_param=0.1)
            ),
            "logistic regression": linear,
        },
    ),
    "pinwheel": Task(
        "60 rows, 10 of them labelled",
        pinwheel,
        {
            "ArchipelagoClassifier": lambda: gallery.ArchipelagoClassifier(random_state=0),
            "Gaussian process": lambda: Labelled(
                make_pipeline(StandardScaler(), GaussianProcessClassifier(random_state=0))
            ),
            "label spreading": lambda: make_pipeline(StandardScaler(), LabelSpreading()),
        },
    ),
    "Ionosphere": Task(
        "175 rows, 34 columns, a quarter of the entries missing",
        lambda: cut(load("ionosphere")["x"], load("ionosphere")["y"], 175, 0.25),
        {
            "IQGMEClassifier": lambda: gallery.IQGMEClassifier(random_state=0),
            "logistic regression": linear,
            **BOOSTED,
        },
    ),
    "MNIST, 2 and 7": Task(
        "60 images of some 500 pixels, half of the entries missing",
        two_digits,
        {
            "IQGMEClassifier, 20 factors": lambda: gallery.IQGMEClassifier(
                10, n_factors=20, max_iter=1000, random_state=0
            ),
            "logistic regression": lambda: linear(C=0.01),
            **BOOSTED,
        },
    ),
    "Landmine": Task(
        "29 tasks of 40 rows, 9 columns",
        landmine,
        {
            "MultiTaskIQGMEClassifier": Tasks,
            "logistic regression, pooled": linear,
            "gradient boosting, pooled": BOOSTED["gradient boosting"],
        },
    ),
    "MNIST": Task(
        "20 000 images, 10 classes",
        lambda: Split(
            *(load("mnist")[name] for name in ("x_train", "y_train", "x_test", "y_test"))
        )._replace(
            x=load("mnist")["x_train"][:20_000].reshape(20_000, -1) / 255.0,
            y=load("mnist")["y_train"][:20_000],
            new_x=load("mnist")["x_test"].reshape(10_000, -1) / 255.0,
        ),
        {
            "AugmentReduceClassifier": lambda: gallery.AugmentReduceClassifier(random_state=0),
            "logistic regression": lambda: LogisticRegression(max_iter=200),
        },
    ),
    "MovieLens": Task(
        "20 000 ratings; the error is the root mean square",
        movielens,
        {
            "BSVDCompleter": Entries,
            "additive, shrunk": lambda: make_pipeline(
                OneHotEncoder(handle_unknown="ignore"), Ridge(5.0)
            ),
        },
    ),
}


def measured(task: Task, method: str) -> dict[str, Any]:
    """Error, log score, CPU seconds and memory of a method."""
    split = task.split()
    started = process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what did not converge shows in the table
        model = task.methods[method]().fit(split.x, split.y)
        if hasattr(model, "predict_proba"):
            proba = model.predict_proba(split.new_x)
            scores = {
                "error": float(np.mean(proba.argmax(1) != split.new_y)),
                "log score": float(
                    np.mean(
                        np.log(
                            np.maximum(proba[np.arange(len(proba)), split.new_y.astype(int)], 1e-12)
                        )
                    )
                ),
            }
        else:
            scores = {
                "error": float(np.sqrt(np.mean((model.predict(split.new_x) - split.new_y) ** 2)))
            }
    seconds = process_time() - started
    return {
        **scores,
        "seconds": seconds,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def table(names: list[str]) -> None:
    """Prints the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(
        "# Every system next to its peers\n\n    uv run python -m tests.bench.overview > "
        "tests/bench/README.md\n"
    )
    print(
        f"Commit {commit}, {date.today()}, one core of {platform.machine()} ({platform.system()}), "
        f"Python {platform.python_version()}."
    )
    print(
        (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip().replace("\n", " ") + "\n"
    )
    print("| data | method | error | log score | CPU s | memory, GiB | more |\n|" + "---|" * 7)
    for name in names:
        for method in TASKS[name].methods:
            command = [sys.executable, "-m", "tests.bench.overview", "--one", name, method]
            found = json.loads(
                subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True
                ).stdout.splitlines()[-1]
            )
            score = f"{found['log score']:.3f}" if "log score" in found else ""
            first = method == next(iter(TASKS[name].methods))
            what, more = (
                (f"{name}: {TASKS[name].words}", f"[{FILES[name]}.md]({FILES[name]}.md)")
                if first
                else ("", "")
            )
            print(
                f"| {what} | {method} | {found['error']:.3f} | {score} | {found['seconds']:.1f} | "
                f"{found['gib']:.2f} | {more} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(TASKS[sys.argv[2]], sys.argv[3])))
    else:
        table(sys.argv[1:] or list(TASKS))
