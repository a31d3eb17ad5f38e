"""Every system of the zoo next to what scikit-learn has for the same rows, in one table:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.overview > tests/bench/README.md
    uv run python -m tests.bench.overview wine --splits 3                # one data set

All methods see the same splits. The first method is the zoo's, at its defaults, the second its own
special case where it has one; the others are at their defaults, or tuned by a three-fold search for
the log score. The difference is a method's log score less that of the zoo's, or for ratings the
zoo's error less the method's: mean and standard error over the splits, positive where the method is
better. Each method has a process of its own: CPU seconds are those of a split, compiling included,
memory is the most that the process had, libraries included.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import root_mean_squared_error
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.svm import SVC

import gallery
from gallery.datasets import load

__all__ = ["TASKS", "Task"]


class Split(NamedTuple):
    """What is learned from, what is predicted; labels are -1 where unknown."""

    x: Any
    y: np.ndarray
    new_x: Any
    new_y: np.ndarray


class Task(NamedTuple):
    """Data, what is done with them, and who does it: the first is the zoo's."""

    words: str
    page: str
    split: Callable[[int], Split]  # of a seed
    methods: dict[str, Callable[[], Any]]


def cut(
    x: Any,
    y: Any,
    num_train: int,
    seed: int,
    missing: float = 0.0,
    num_test: int | None = 1000,
) -> Split:
    """Some rows to learn from, others to predict, and holes in both."""
    rng = np.random.default_rng(seed)
    y, x = np.asarray(y), np.asarray(x, float)
    order = rng.permutation(len(y))
    x = np.where(rng.random(x.shape) < missing, np.nan, x) if missing else x
    train, test = order[:num_train], order[num_train:][:num_test]
    return Split(x[train], y[train], x[test], y[test])


def signs(x: np.ndarray) -> np.ndarray:
    """Whether an entry is above its column's mean; columns that vary."""
    return (x > x.mean(0))[:, x.std(0) > 0].astype(float)


def digits(num_train: int, seed: int, missing: float, *, as_signs: bool) -> Split:
    """Images of 64 pixels; as numbers without those that are hardly ever inked."""
    x, y = load_digits(return_X_y=True)
    return cut(signs(x) if as_signs else x[:, x.mean(0) > 1], y, num_train, seed, missing)


def documents(num_train: int, missing: float, seed: int) -> Split:
    """20 Newsgroups, 100 words."""
    data = load("20news_w100")
    return cut(data["x"], data["y"], num_train, seed, missing)


def votes(seed: int) -> Split:
    """House votes with half of what is left missing."""
    data = load("house_votes")
    return cut(data["x"], data["y"], 217, seed, 0.5)


def components(num_train: int, seed: int) -> Split:
    """MNIST, signs of 50 principal components."""
    data = load("mnist_pca50")
    return cut(data["x"], data["digit"], num_train, seed)


def three_columns(loader: Callable[..., Any], columns: list[int], num: int, seed: int) -> Split:
    """A table of scikit-learn, of which some columns are used."""
    x, y = loader(return_X_y=True)
    return cut(x[:, columns], y, num, seed)


def pinwheel(seed: int) -> Split:
    """Two labels a class."""
    data = load("pinwheel", num_classes=5, num_per_class=72)
    whole = cut(data.x, data.y, 60, seed)
    known = np.concatenate([np.flatnonzero(whole.y == label)[:2] for label in range(5)])
    return whole._replace(y=np.where(np.isin(np.arange(60), known), whole.y, -1))


def ionosphere(missing: float, seed: int) -> Split:
    """A tenth of the rows."""
    data = load("ionosphere")
    return cut(data["x"], data["y"], 35, seed, missing)


def landmine(num_rows: int, seed: int) -> Split:
    """Some rows of each task to learn from; the last column is the task."""
    data, rng = load("landmine"), np.random.default_rng(seed)
    task = np.asarray(data["task"])
    x = np.column_stack([data["x"], task])
    train = np.concatenate(
        [rng.permutation(np.flatnonzero(task == one))[:num_rows] for one in np.unique(task)]
    )
    rest = np.setdiff1d(np.arange(len(task)), train)
    return Split(x[train], data["y"][train], x[rest], data["y"][rest])


def mnist(seed: int) -> Split:
    """Images of 784 pixels."""
    data, rng = load("mnist"), np.random.default_rng(seed)
    rows = rng.permutation(len(data["y_train"]))[:20_000]
    x, y = data["x_train"][rows].reshape(20_000, -1) / 255.0, data["y_train"][rows]
    return Split(x, y, data["x_test"].reshape(10_000, -1) / 255.0, data["y_test"])


def movielens(number: int, seed: int) -> Split:
    """Ratings to learn from, as many to predict."""
    data, rng = load("movielens_1m"), np.random.default_rng(seed)
    order = rng.permutation(len(data["values"]))
    entries = np.column_stack([data["rows"], data["cols"]])
    train, test = order[:number], order[-20_000:]
    values = data["values"].astype(float)
    return Split(entries[train], values[train], entries[test], values[test])


class OfTasks:
    """A multi-task classifier where the last column is the task."""

    def __init__(self, method: Any):
        self.method = method

    def fit(self, x, y):
        self.method.fit(x[:, :-1], y, x[:, -1].astype(int))
        return self

    def predict_proba(self, x):
        return self.method.predict_proba(x[:, :-1], x[:, -1].astype(int))


class EachTask(OfTasks):
    """A classifier of its own for each task; the share of the labels where there is one class."""

    def fit(self, x, y):
        self.fits = {}
        for task in np.unique(x[:, -1]):
            rows = x[:, -1] == task
            share = y[rows].mean()
            fit = (
                self.method().fit(x[rows, :-1], y[rows])
                if 0 < share < 1
                else (y.mean() + share) / 2
            )
            self.fits[task] = fit
        return self

    def predict_proba(self, x):
        found = np.zeros(len(x))
        for task, fit in self.fits.items():
            rows = x[:, -1] == task
            if rows.any():
                found[rows] = fit if np.isscalar(fit) else fit.predict_proba(x[rows, :-1])[:, 1]
        return np.column_stack([1 - found, found])


class Entries:
    """`BSVDCompleter` where rows are (user, film)."""

    def __init__(self, **settings: Any):
        self.settings = settings

    def fit(self, x, y):
        self.model = gallery.BSVDCompleter((6040, 3952), random_state=0, **self.settings)
        self.model.fit((x[:, 0], x[:, 1], y))
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


def filled(method: Any) -> Any:
    """Standardised columns, with means where something is missing."""
    return make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), method)


def tuned(method: Callable[[], Any], **grid: Any) -> Any:
    """The best of a grid by three-fold log score, with its settings named by their last step."""
    step = method()
    name = step.steps[-1][0] + "__" if hasattr(step, "steps") else ""
    grid = {name + key: values for key, values in grid.items()}
    return GridSearchCV(step, grid, cv=3, scoring="neg_log_loss")


linear = lambda: filled(LogisticRegression(max_iter=2000))
forest = lambda: filled(RandomForestClassifier(random_state=0))
machine = lambda: filled(SVC(probability=True, random_state=0))
boosted = lambda: HistGradientBoostingClassifier(random_state=0)
process = lambda: filled(GaussianProcessClassifier(random_state=0))
RIVALS: dict[str, Callable[[], Any]] = {
    "logistic regression": linear,
    "logistic regression, tuned": partial(tuned, linear, C=[0.01, 0.1, 1.0, 10.0]),
    "random forest": forest,
    "random forest, tuned": partial(
        tuned, forest, min_samples_leaf=[1, 3, 10], max_features=["sqrt", 0.5]
    ),
    "support vectors": machine,
    "support vectors, tuned": partial(
        tuned, machine, C=[0.1, 1.0, 10.0], gamma=[0.003, 0.01, 0.03]
    ),
    "gradient boosting": boosted,
    "gradient boosting, tuned": partial(
        tuned, boosted, learning_rate=[0.03, 0.1], max_leaf_nodes=[4, 31]
    ),
}
BERNOULLI = {"AClassClassifier": lambda: gallery.AClassClassifier(random_state=0)}
ONE_GROUP = {
    "AClass, one group a class": lambda: gallery.AClassClassifier(
        1, num_orders=1, max_groups=1, random_state=0
    )
}
ACLASS = BERNOULLI | ONE_GROUP | RIVALS
IQGME = {"IQGMEClassifier": lambda: gallery.IQGMEClassifier(random_state=0)}
PROCESS = {"Gaussian process": process}
STAGED = {
    "StagedMixtureClassifier": lambda: gallery.StagedMixtureClassifier(random_state=0),
    "quadratic discriminant": lambda: filled(QuadraticDiscriminantAnalysis(reg_param=0.01)),
    "Gaussian naive Bayes": lambda: GaussianNB(),
}
TASKED = {
    "MultiTaskIQGMEClassifier": lambda: OfTasks(gallery.MultiTaskIQGMEClassifier(random_state=0)),
    "logistic regression, a task": lambda: EachTask(linear),
    "logistic regression, pooled": linear,
    "gradient boosting, pooled": boosted,
}
NAIVE = {
    "Bernoulli naive Bayes": lambda: make_pipeline(
        SimpleImputer(strategy="most_frequent"), BernoulliNB()
    )
}
TASKS: dict[str, Task] = {
    "digits, signs": Task(
        "500 images, complete", "aclass", partial(digits, 500, missing=0, as_signs=True), ACLASS
    ),
    "digits, signs, half": Task(
        "500 images, half of the entries missing",
        "aclass",
        partial(digits, 500, missing=0.5, as_signs=True),
        ACLASS,
    ),
    "digits, half": Task(
        "500 images, half of the entries missing",
        "aclass",
        partial(digits, 500, missing=0.5, as_signs=False),
        ACLASS,
    ),
    "votes, half": Task("217 people, half of the entries missing", "aclass", votes, ACLASS),
    "20 Newsgroups, half": Task(
        "1000 documents, half of the entries missing",
        "aclass",
        partial(documents, 1000, 0.5),
        ACLASS | NAIVE,
    ),
    "MNIST, signs": Task(
        "1000 images by 50 components", "aclass", partial(components, 1000), ACLASS
    ),
    "Ionosphere, quarter": Task(
        "35 rows, a quarter of the entries missing",
        "iqgme",
        partial(ionosphere, 0.25),
        IQGME | RIVALS | PROCESS,
    ),
    "Ionosphere, half": Task(
        "35 rows, half of the entries missing",
        "iqgme",
        partial(ionosphere, 0.5),
        IQGME | RIVALS | PROCESS,
    ),
    "Landmine, 20": Task("29 tasks of 20 rows", "iqgme", partial(landmine, 20), TASKED),
    "Landmine, 100": Task("29 tasks of 100 rows", "iqgme", partial(landmine, 100), TASKED),
    "iris": Task(
        "75 rows, petals", "staged", partial(three_columns, load_iris, [2, 3], 75), STAGED
    ),
    "breast cancer": Task(
        "285 rows, three columns",
        "staged",
        partial(three_columns, load_breast_cancer, [0, 1, 4], 285),
        STAGED,
    ),
    "wine": Task(
        "89 rows; alcohol, flavanoids and colour",
        "staged",
        lambda seed: cut(load("wine").x[:, [0, 6, 9]], load("wine").y, 89, seed),
        STAGED,
    ),
    "pinwheel": Task(
        "60 rows, 10 of them labelled",
        "archipelago",
        pinwheel,
        {
            "ArchipelagoClassifier": lambda: gallery.ArchipelagoClassifier(random_state=0),
            "Gaussian process": lambda: Labelled(process()),
            "label spreading": lambda: make_pipeline(StandardScaler(), LabelSpreading()),
        },
    ),
    "MNIST": Task(
        "20 000 images, 10 classes",
        "augment_reduce",
        mnist,
        {
            "AugmentReduceClassifier": lambda: gallery.AugmentReduceClassifier(random_state=0),
            "logistic regression": lambda: LogisticRegression(max_iter=200),
        },
    ),
    "MovieLens, 20 000": Task(
        "20 000 ratings",
        "bsvd",
        partial(movielens, 20_000),
        {
            "BSVDCompleter": Entries,
            "additive, shrunk": lambda: make_pipeline(
                OneHotEncoder(handle_unknown="ignore"), Ridge(5.0)
            ),
        },
    ),
}


def scored(model: Any, split: Split) -> tuple[float, float]:
    """Error and log score; of ratings the root mean square and its negative."""
    if not hasattr(model, "predict_proba"):
        error = root_mean_squared_error(split.new_y, model.predict(split.new_x))
        return error, -error
    proba = model.predict_proba(split.new_x)
    of_truth = proba[np.arange(len(proba)), split.new_y.astype(int)]
    return np.mean(proba.argmax(1) != split.new_y), np.mean(np.log(np.maximum(of_truth, 1e-12)))


def measured(task: Task, method: str, num_splits: int) -> dict[str, Any]:
    """Errors and log scores of a method, by split, CPU seconds of each, and memory."""
    found, started = [], process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what did not converge shows in the table
        for seed in range(num_splits):
            split = task.split(seed)
            found.append(scored(task.methods[method]().fit(split.x, split.y), split))
    return {
        "error": [float(error) for error, _ in found],
        "score": [float(score) for _, score in found],
        "seconds": (process_time() - started) / num_splits,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def row(first: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The cells of a method, its log scores paired with those of the first."""
    difference = np.subtract(found["score"], first["score"])
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.nan
    return [
        f"{np.mean(found['error']):.3f}",
        f"{np.mean(found['score']):.3f}",
        "" if found is first else f"{difference.mean():+.3f} ± {error:.3f}",
        f"{found['seconds']:.1f}",
        f"{found['gib']:.2f}",
    ]


def page(names: list[str], num_splits: int) -> None:
    """Prints the page."""
    shown = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    usage, _, words = (__doc__ or "").partition("\n\n")[2].partition("\n\n")
    print(f"# Every system next to its peers\n\n{usage}\n")
    print(
        f"Commit {commit}, {date.today()}, {num_splits} splits, one core of {platform.machine()} "
        f"({platform.system()}), Python {platform.python_version()}.\n\n{words.strip()}\n"
    )
    print("| data | method | error | log score | difference | CPU s | memory, GiB |")
    print("|" + "---|" * 7)
    for name in names:
        task, first = TASKS[name], None
        for method in task.methods:
            command = [sys.executable, "-m", "tests.bench.overview", name, "--method", method]
            done = subprocess.run(
                [*command, "--splits", str(num_splits)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            what = (
                f"{name}: {task.words}, [{task.page}.md]({task.page}.md)" if first is None else ""
            )
            first = first or found
            print(" | ".join(["", what, method, *row(first, found), ""]).strip(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overview")
    parser.add_argument("names", nargs="*", metavar="DATA", help="default: all")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        print(json.dumps(measured(TASKS[args.names[0]], args.method, args.splits)))
    else:
        page(args.names or list(TASKS), args.splits)
