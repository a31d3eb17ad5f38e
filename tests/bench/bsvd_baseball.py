"""BSVD on batters and pitchers: who hits whom, next to a shrunk additive model.

    uv run python -m tests.bench.bsvd_baseball seasons                # log likelihood of 2008 from the seasons before
    uv run python -m tests.bench.bsvd_baseball pairs                  # the ten pairs that met most in 2003 to 2007, held out
    uv run python -m tests.bench.bsvd_baseball players -o FOLDER      # Table 5.4 and Figure 5.8, from all seasons

Successes are hits, trials are plate appearances; the log likelihood is that of single plate
appearances, over pairs of players who both occur in training. `seasons 1998` looks at training from
1998 on alone.
"""

import sys
from pathlib import Path
from time import process_time

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from gallery import BSVDCompleter
from gallery.datasets import load

__all__ = ["additive", "counts", "log_likelihood"]

FIRST_SEASONS = [2007, 2003, 1998]
SETTINGS = {"link": "binomial", "num_components": 20, "random_state": 0}


def counts(first: int, last: int):
    """(batters, pitchers, hits, plate appearances) of some seasons, added up."""
    data = load("mlb_batter_pitcher")
    which = (data["year"] >= first) & (data["year"] <= last) & (data["plate_appearances"] > 0)
    width = len(data["pitcher_id"])
    pair, where = np.unique(
        data["batter"][which] * width + data["pitcher"][which], return_inverse=True
    )
    hits, trials = (
        np.bincount(where, data[name][which]).astype(int) for name in ("hits", "plate_appearances")
    )
    return *np.divmod(pair, width), hits, trials


def log_likelihood(hits: np.ndarray, trials: np.ndarray, rate: np.ndarray) -> float:
    """The log likelihood of single plate appearances."""
    return float(np.sum(hits * np.log(rate) + (trials - hits) * np.log1p(-rate)))


def additive(train, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Rates of the logit-additive model of batters and pitchers, both shrunk by the ridge that
    marginal likelihood chooses (Laplace).
    """
    row, column, hits, trials = train
    num = row.max() + 1, column.max() + 1

    def fit(ridge):
        def loss(x):
            b, p = np.split(x[1:], [num[0]])
            eta = x[0] + b[row] + p[column]
            rate = expit(eta)
            gap = trials * rate - hits
            value = (
                -np.sum(hits * eta - trials * np.logaddexp(0, eta))
                + (ridge[0] * b @ b + ridge[1] * p @ p) / 2
            )
            of_sides = (
                np.bincount(row, gap, num[0]) + ridge[0] * b,
                np.bincount(column, gap, num[1]) + ridge[1] * p,
            )
            return value, np.concatenate([[gap.sum()], *of_sides])

        start = np.zeros(1 + sum(num))
        start[0] = np.log(hits.sum() / (trials.sum() - hits.sum()))
        return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x

    ridge = np.array([100.0, 100.0])
    for _ in range(20):  # effective degrees of freedom, each side by itself
        x = fit(ridge)
        b, p = np.split(x[1:], [num[0]])
        rate = expit(x[0] + b[row] + p[column])
        curvature = [
            np.bincount(index, trials * rate * (1 - rate), size)
            for index, size in zip((row, column), num, strict=True)
        ]
        ridge = np.array(
            [
                np.sum(c / (c + r)) / max(e @ e, 1e-12)
                for c, r, e in zip(curvature, ridge, (b, p), strict=True)
            ]
        )
    return expit(x[0] + b[rows] + p[columns])


def seasons(firsts: list[int]) -> None:
    """2008 from the seasons before."""
    print(
        "| training | constant | shrunk additive | BSVD | rank, 90 % | CPU s "
        "|\n|---|---|---|---|---|---|"
    )
    for first in firsts:
        train = counts(first, 2007)
        batters, pitchers, hits, trials = counts(2008, 2008)
        seen = np.unique(train[0]), np.unique(train[1])
        known = np.isin(batters, seen[0]) & np.isin(pitchers, seen[1])
        batters, pitchers, hits, trials = (
            part[known] for part in (batters, pitchers, hits, trials)
        )
        batters, pitchers = (
            np.searchsorted(names, of) for names, of in zip(seen, (batters, pitchers), strict=True)
        )
        train = (
            *(np.searchsorted(names, of) for names, of in zip(seen, train[:2], strict=True)),
            *train[2:],
        )
        constant = log_likelihood(hits, trials, np.full(len(hits), train[2].sum() / train[3].sum()))
        peer = log_likelihood(hits, trials, additive(train, batters, pitchers))
        started = process_time()
        completer = BSVDCompleter(**SETTINGS).fit(train)
        rank = np.quantile(completer.posterior_["posterior"]["rank"], [0.05, 0.5, 0.95])
        found = log_likelihood(hits, trials, completer.predict(batters, pitchers))
        seconds = process_time() - started
        told = f"{rank[1]:.0f} ({rank[0]:.0f} to {rank[2]:.0f}) | {seconds:.0f}"
        print(
            f"| {first} to 2007 | {constant:.0f} | {peer:.0f} | {found:.0f} | {told} |", flush=True
        )


def pairs(num_pairs: int = 10) -> None:
    """The pairs that met most, predicted from all others."""
    row, column, hits, trials = counts(2003, 2007)
    row, column = (np.unique(names, return_inverse=True)[1] for names in (row, column))
    held = np.zeros(len(row), bool)
    held[np.argsort(trials)[-num_pairs:]] = True
    completer = BSVDCompleter((row.max() + 1, column.max() + 1), **SETTINGS).fit(
        (row[~held], column[~held], hits[~held], trials[~held])
    )
    mean, std = completer.predict(row[held], column[held], return_std=True)
    observed = hits[held] / trials[held]
    noise = np.sqrt(std**2 + mean * (1 - mean) / trials[held])
    print(
        "| plate appearances | observed | predicted | in its standard deviations "
        "|\n|---|---|---|---|"
    )
    for each in zip(trials[held], observed, mean, std, (observed - mean) / noise, strict=True):
        print("| {} | {:.3f} | {:.3f} ± {:.3f} | {:+.1f} |".format(*each))


def best(first: int, side: int, sign: int, num: int = 3) -> np.ndarray:
    """Players of one season with at least its median of appearances, by their share of hits."""
    season = counts(first, first)
    hits, trials = (np.bincount(season[side], part) for part in season[2:])
    often = np.flatnonzero(trials >= np.median(trials[trials > 0]))
    return often[np.argsort(-sign * hits[often] / trials[often])[:num]]


def players(folder: Path) -> None:
    """How the best of the first and of the last season would do against each other, and how sure
    that is of each batter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = load("mlb_batter_pitcher")
    first, last = int(data["year"].min()), int(data["year"].max())
    train = counts(first, last)
    names = data["batter_id"], data["pitcher_id"]
    completer = BSVDCompleter(
        tuple(map(len, names)), num_warmup=100, num_samples=150, **SETTINGS
    ).fit(train)
    batters, pitchers = (
        np.concatenate([best(year, side, sign) for year in (first, last)])
        for side, sign in ((0, 1), (1, -1))
    )
    mean, std = (
        part.reshape(6, 6)
        for part in completer.predict(
            *map(np.ravel, np.meshgrid(batters, pitchers, indexing="ij")), True
        )
    )
    title = [f"{names[1][j]}, {first if i < 3 else last}" for i, j in enumerate(pitchers)]
    print(f"| batter | {' | '.join(title)} |\n|{'---|' * 7}")
    for i, batter in enumerate(batters):
        told = " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in zip(mean[i], std[i], strict=True))
        print(f"| {names[0][batter]}, {first if i < 3 else last} | {told} |")
    trials = np.bincount(train[0], train[3], len(names[0]))
    shown = np.flatnonzero(trials > 0)
    some = np.random.default_rng(0).choice(np.unique(train[1]), 30, replace=False)
    spread = (
        completer.predict(np.repeat(shown, len(some)), np.tile(some, len(shown)), return_std=True)[
            1
        ]
        .reshape(len(shown), -1)
        .mean(1)
    )
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ax.semilogx(trials[shown], spread, ".", ms=3)
    ax.set(
        xlabel="plate appearances of a batter",
        ylabel="deviation of the probability of a hit",
        ylim=(0, None),
    )
    figure.savefig(folder / "bsvd_figure_5_8.png", dpi=150)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "players":
        players(Path(words[words.index("-o") + 1]))
    elif what == "pairs":
        pairs()
    else:
        seasons(list(map(int, words)) or FIRST_SEASONS)
