"""How well iQGME estimates what is missing (Figure 3.9 of the thesis): the share of entries within
one and two standard deviations.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    JAX_COMPILATION_CACHE_DIR=COMPILED python -m tests.bench.iqgme_imputation --splits 3

Of complete tables a share of the entries is removed at random; half of the rows are learned from,
with their labels, and the other half are imputed without. A Normal has .683 and .954 within one and
two of its standard deviations. Errors are root mean squares in standard deviations of the columns;
a column's mean has about 1.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, SimpleImputer
from sklearn.model_selection import train_test_split

from gallery import IQGMEClassifier
from gallery.datasets import load

CELLS = [(name, missing) for name in ("ionosphere", "wdbc") for missing in (0.25, 0.5)]


def shares(gap: np.ndarray, spread: np.ndarray) -> list[float]:
    """The shares of entries within one and two standard deviations."""
    return [float(np.mean(np.abs(gap) <= times * spread)) for times in (1, 2)]


def split_of(name: str, missing: float, seed: int) -> Iterator[tuple[list[float], list[float]]]:
    """Shares and errors, of the rows that were learned from, then of those that were not."""
    data, rng = load(name), np.random.default_rng([seed, int(100 * missing)])
    x, y = np.asarray(data.x, float), np.asarray(data.y)
    x = (x / np.where(x.std(0) > 0, x.std(0), 1))[:, x.std(0) > 0]
    holed = np.where(rng.random(x.shape) < missing, np.nan, x)
    train, test = train_test_split(np.arange(len(x)), train_size=0.5, stratify=y, random_state=seed)
    ours = IQGMEClassifier(random_state=seed).fit(holed[train], y[train])
    peers = [
        imputer.fit(holed[train])
        for imputer in (SimpleImputer(), IterativeImputer(max_iter=10, random_state=seed))
    ]
    for rows in (train, test):
        lost = np.isnan(holed[rows])
        found, spread = ours.impute(holed[rows], return_std=True)
        guesses = (found, *(peer.transform(holed[rows]) for peer in peers))
        errors = [float(np.sqrt(np.mean((guess - x[rows])[lost] ** 2))) for guess in guesses]
        yield shares((found - x[rows])[lost], spread[lost]), errors


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, default=3)
    splits = parser.parse_args().splits
    print(
        "| data | missing | rows | within one | within two | error | of column means | of an "
        "iterative imputer |"
    )
    print("|" + "---|" * 8)
    for name, missing in CELLS:
        each = [list(split_of(name, missing, seed)) for seed in range(splits)]
        for which, rows in enumerate(("learned from", "new")):
            told = [
                f"{np.mean(column):.3f}"
                for part in (0, 1)
                for column in zip(*(one[which][part] for one in each), strict=True)
            ]
            print(f"| {name} | {missing} | {rows} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
