"""Merges of experts: the bound at truncation 20 next to the best number of experts from 1 to 20.

    python -m tests.bench.iqgme_merges                     # all sets
    python -m tests.bench.iqgme_merges "wine, 0 or 1"

Each number of experts is one ascent without merges, from k-means of so many groups; the other
experts are closed. "Sweeps" and "seconds" are those of a fit whose code is compiled already, and of
the same fit without merges. The log score is the mean log probability of the class of the rows that
were not fitted, by the default and by one expert, with the standard error of the difference.
"""

import argparse
import warnings
from time import process_time
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning

from gallery import IQGMEClassifier
from gallery._labels import coded
from gallery._local_experts import FARTHEST
from gallery.datasets import load
from gallery.generators import three_gaussians
from inference import Program
from inference.kernels.coordinate_ascent.kernel import MixtureAscent
from inference.kernels.coordinate_ascent.posterior import factors_of
from inference.kernels.coordinate_ascent.start import STARTS, kmeans, start_sums
from inference.program.interpreting import interpreted

Table = tuple[np.ndarray, np.ndarray]


def of_classes(table: Any, *classes: int) -> Table:
    kept = np.isin(table.target, classes)
    return table.data[kept], table.target[kept]


def holed(x: np.ndarray) -> np.ndarray:
    return np.where(np.random.default_rng(0).random(x.shape) < 0.25, np.nan, x)


def sets() -> dict[str, tuple[Table, int]]:
    """The rows of each set, and how many of them are fitted."""
    pima, ionosphere, horse = map(load, ("pima_missing", "ionosphere", "horse_colic"))
    cancer, told = load_breast_cancer(), three_gaussians(num_rows=600, seed=1)
    return {
        "pima, 77 rows": ((pima.x, pima.y), 77),
        "pima, 500 rows": ((pima.x, pima.y), 500),
        "ionosphere, 105 rows": ((ionosphere.x, ionosphere.y), 105),
        "breast cancer, 114 rows": ((cancer.data, cancer.target), 114),
        "breast cancer, a quarter missing": ((holed(cancer.data), cancer.target), 284),
        "horse colic": ((horse.x, horse.y), 250),
        "iris, 1 or 2": (of_classes(load_iris(), 1, 2), 77),
        "wine, 0 or 1": (of_classes(load_wine(), 0, 1), 100),
        "digits, 3 or 8": (of_classes(load_digits(), 3, 8), 200),
        "three Gaussians, a quarter missing": ((holed(told.x), told.y), 300),
    }


class Plain:
    """Ascents without merges from few groups, on the rows of an estimator."""

    def __init__(self, model: IQGMEClassifier, x: np.ndarray, y: np.ndarray):
        self.kernel, own = model._driver.kernel, model._standardiser.standardise_kept(x, FARTHEST)
        self.program = Program(model._model, own, coded(y)[1], **model._settings)
        self.reading, self.data = self.kernel.read(self.program)
        self.ascend = jax.jit(self._ascend)

    def _ascend(self, state: Any, data: Any) -> Any:
        goes_on = lambda state: ~self.kernel.finished(state) & (state.step < 500)
        sweep = lambda state: self.reading.moved(jax.random.key(0), state, data)
        return jax.lax.while_loop(goes_on, sweep, state)

    def state(self, num: int) -> Any:
        """The end of an ascent from so many groups."""
        reading, rng = self.reading, np.random.default_rng(0)
        start = reading.start(rng, "kmeans", self.data)
        with patch.dict(STARTS, kmeans=lambda points, _, rng: kmeans(points, num, rng)):
            sums, _ = start_sums(reading.rows, reading.statistics, reading.found, 1, "kmeans", rng)
        given = (self.data.prior, sums, np.int32(num))
        first = lambda prior, sums, num: factors_of(
            reading.found, reading.shape, prior, sums, is_held=True, num_open=num
        )
        factors = interpreted(first, *given)(*given)
        start = start._replace(factors=factors, sums=None, trial=None)
        return self.ascend(jax.device_put(start), self.data)


def log_score(log_proba: np.ndarray, y: np.ndarray) -> np.ndarray:
    return log_proba[np.arange(len(y)), coded(y)[1]]


def line(name: str, x: np.ndarray, y: np.ndarray, num: int) -> str:
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:num], order[num:]

    def fitted() -> tuple[IQGMEClassifier, float]:
        IQGMEClassifier(random_state=0).fit(x[train], y[train])  # compiles
        start = process_time()
        return IQGMEClassifier(random_state=0).fit(x[train], y[train]), process_time() - start

    with patch.object(MixtureAscent, "merges", False):
        before, seconds_before = fitted()
    model, seconds = fitted()
    score = log_score(model.predict_log_proba(x[test]), y[test])
    with jax.enable_x64(True):
        plain = Plain(model, x[train], y[train])
        ends = [plain.state(count) for count in range(1, 21)]
    bounds = np.array([float(end.elbo) for end in ends])
    best = int(bounds.argmax())
    model._state = jax.device_get(ends[0])
    model._learn_rows(
        plain.kernel,
        plain.reading,
        ((plain.reading.rows.features, coded(y[train])[1]), model._settings),
    )
    gain = score - log_score(model.predict_log_proba(x[test]), y[test])
    return (
        f"| {name} | {num}, {x.shape[1]} | {before.elbo_:.1f} ({before.n_experts_}) | "
        f"{bounds[best]:.1f} ({best + 1}) | {model.elbo_:.1f} ({model.n_experts_}) | "
        f"{model.elbo_ - bounds[best]:+.1f} | {before.n_iter_}, {model.n_iter_} | "
        f"{seconds_before:.1f}, {seconds:.1f} | {score.mean():.3f} | "
        f"{gain.mean():+.3f} ± {gain.std() / np.sqrt(len(gain)):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = sets()
    parser.add_argument("sets", nargs="*", default=list(tables))
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(
        "| data | rows, columns | bound at 20 without merges (experts) | best of 1 to 20 without "
        "merges (experts) | bound at 20 (experts) | above the best | sweeps without, with | "
        "seconds without, with | log score | above one expert |\n|" + "---|" * 10
    )
    for name in parser.parse_args().sets:
        (x, y), num = tables[name]
        print(line(name, np.asarray(x, float), np.asarray(y), num), flush=True)


if __name__ == "__main__":
    main()
