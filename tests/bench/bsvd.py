"""BSVD on ratings, next to what others reach on the same entries.

    OMP_NUM_THREADS=1 uv run python -m tests.bench.bsvd movielens                     # Marlin's weak protocol, three partitions
    OMP_NUM_THREADS=1 uv run --with myfm --with smurff --with "setuptools<80" python -m
    tests.bench.bsvd peers
    OMP_NUM_THREADS=1 uv run python -m tests.bench.bsvd sizes -o FOLDER               # Figures 5.6, 5.7: by the share that is learned from
    OMP_NUM_THREADS=1 uv run python -m tests.bench.bsvd ranks 0.2                     # the rank after each 20 sweeps, from 0 and from 20

Ratings: of 5000 users, chosen at random, one rating each is held out and the others are learned
from (Marlin 2004). For `sizes` a share of all ratings, chosen at random, is learned from, and some
of the others are predicted.

`-n 1` looks at one partition in place of three; words after `movielens` name some of `CODES`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from gallery import BSVDCompleter
from gallery.datasets import load
from inference import ConditionalGibbs, Driver
from zoo.bsvd import bsvd

__all__ = ["ratings"]

ENTRY = ("rows", "cols", "values")
SHARES = (0.1, 0.25, 0.5, 0.9)


def ratings(seed: int):
    """(rows, columns, values) to learn from, and the same held out."""
    data, rng = load("movielens_1m"), np.random.default_rng(seed)
    user = data["rows"]
    users = rng.choice(user.max() + 1, 5000, replace=False)
    first = np.searchsorted(user, np.arange(user.max() + 2))
    test = np.array([rng.integers(first[each], first[each + 1]) for each in users])
    keep = np.isin(user, users)
    keep[test] = False
    return [tuple(data[name][which] for name in ENTRY) for which in (keep, test)]


def features() -> dict[str, np.ndarray]:
    """The features of users (gender, age and occupation) and of movies (genres)."""
    data = load("movielens_1m")
    one_hot = lambda codes: (codes[:, None] == np.unique(codes)).astype(float)
    of_users = [
        data["user_is_male"][:, None].astype(float),
        one_hot(data["user_age"]),
        one_hot(data["user_occupation"]),
    ]
    return {
        "row_features": np.concatenate(of_users, axis=1),
        "column_features": data["movie_genres"],
    }


def scores(values: np.ndarray, mean: np.ndarray, interval: np.ndarray | None = None) -> str:
    """RMSE, NMAE of real and of rounded predictions, and how many values are inside the
    interval.
    """
    mean = np.clip(mean, 1, 5)
    error = lambda guess: np.mean(np.abs(values - guess)) / 1.6
    inside = (
        ""
        if interval is None
        else f" | {np.mean((interval[0] <= values) & (values <= interval[1])):.3f}"
    )
    return (
        f"{np.sqrt(np.mean((values - mean) ** 2)):.4f} | {error(mean):.4f} | "
        f"{error(np.round(mean)):.4f}{inside}"
    )


def log_score(values: np.ndarray, drawn: np.ndarray) -> float:
    """Mean log probability of the level that was seen, by draws rounded to levels; half a draw
    more for each level.
    """
    hits = np.sum(np.clip(np.round(drawn), 1, 5) == values, axis=0)
    return float(np.mean(np.log((hits + 0.5) / (len(drawn) + 2.5))))


def movielens(num_partitions: int, names: list[str]) -> None:
    """Some of `CODES`, on each partition."""
    print(
        "| partition | features | RMSE | NMAE | NMAE, rounded | in the 90 % interval | log score | "
        "rank, 90 % | CPU s |"
    )
    print("|" + "---|" * 9)
    for seed in range(num_partitions):
        train, test = ratings(seed)
        for name in names:
            print(
                f"| {seed} | {name} | {learned(train, test, seed, **CODES[name]()).cells} |",
                flush=True,
            )


class Learned(NamedTuple):
    """What BSVD reaches."""

    rmse: float
    rank: np.ndarray  # quantiles .05, .5, .95
    cells: str  # of a table


def learned(train, test, seed: int, **options) -> Learned:
    """On the ratings `test`, of `train`, and the CPU seconds that took."""
    started = process_time()
    settings = {"num_components": 40, "num_warmup": 60, "num_samples": 150, "random_state": seed}
    completer = BSVDCompleter((6040, 3952), **settings, **options).fit(train)
    seconds = process_time() - started
    rows, columns, values = test
    drawn = completer.sample(rows, columns, 1000)
    rank = np.quantile(completer.posterior_["posterior"]["rank"], [0.05, 0.5, 0.95])
    mean = completer.predict(rows, columns)
    found = scores(values, mean, np.quantile(drawn, [0.05, 0.95], axis=0))
    cells = (
        f"{found} | {log_score(values, drawn):.4f} | {rank[1]:.0f} ({rank[0]:.0f} to "
        f"{rank[2]:.0f}) | {seconds:.0f}"
    )
    return Learned(float(np.sqrt(np.mean((values - np.clip(mean, 1, 5)) ** 2))), rank, cells)


def sizes(num_selections: int, folder: Path, num_test: int = 20_000) -> None:
    """By the share of all ratings that is learned from, with learned factors."""
    folder.mkdir(parents=True, exist_ok=True)
    data, results = load("movielens_1m"), []
    print(
        "| selection | share | RMSE | NMAE | NMAE, rounded | in the 90 % interval | log score | "
        "rank, 90 % | CPU s |\n|" + "---|" * 9
    )
    for seed in range(num_selections):
        order = np.random.default_rng(seed).permutation(len(data["values"]))
        for share in SHARES:
            number = round(share * len(order))
            train, test = (
                tuple(data[name][np.sort(which)] for name in ENTRY)
                for which in (order[:number], order[-num_test:])
            )
            results.append((share, learned(train, test, seed, learn_factors=True)))
            print(f"| {seed} | {share} | {results[-1][1].cells} |", flush=True)
    drawn(results, folder)


def drawn(results: list[tuple[float, Learned]], folder: Path) -> None:
    """Figures 5.6 and 5.7, of pairs of a share and what was learned from it."""
    share, error = np.array([(share, each.rmse) for share, each in results]).T
    low, rank, high = np.stack([each.rank for _, each in results], axis=1)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(100 * share, error, "o")
    left.set(xlabel="ratings learned from (%)", ylabel="RMSE")
    right.errorbar(100 * share, rank, (rank - low, high - rank), fmt="o", capsize=3)
    right.set(xlabel="ratings learned from (%)", ylabel="rank, 90 % interval", ylim=(0, None))
    right.yaxis.get_major_locator().set_params(integer=True)
    figure.savefig(folder / "bsvd_figures_5_6_and_5_7.png", dpi=150)


def ranks(share: float, num_sweeps: int = 160, every: int = 20) -> None:
    """The rank on a share of the first partition, from two starts, with a birth in each sweep."""
    (rows, columns, values), _ = ratings(0)
    keep = np.sort(np.random.default_rng(0).permutation(len(rows))[: round(share * len(rows))])
    values = ((values[keep] - values[keep].mean()) / values[keep].std()).astype(np.float32)
    data = {
        "row": rows[keep],
        "column": columns[keep],
        "value": values,
        "shape": (6040, 3952),
        "num_components": 40,
    }
    print(
        f"| from | {' | '.join(map(str, range(every, num_sweeps + 1, every)))} | CPU s "
        f"|\n|{'---|' * (num_sweeps // every + 2)}"
    )
    for start in (0, 20):
        started, kernel = process_time(), ConditionalGibbs(bsvd, route="crossed", num_births=1)
        driver = Driver(kernel, num_warmup=0, num_samples=num_sweeps, progress_bar=False)
        tree = driver.run(7, init_params={"z": (np.arange(40) < start).astype(np.int32)}, **data)
        found = tree["posterior"]["rank"].values[0, every - 1 :: every]
        print(
            f"| {start} | {' | '.join(f'{rank:.0f}' for rank in found)} | "
            f"{process_time() - started:.0f} |",
            flush=True,
        )


# Features and missingness are those of Table 5.2; the others are links and priors beyond it.
CODES: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {},
    "features": features,
    "missingness": lambda: {"missingness": 10},
    "all": lambda: {**features(), "missingness": 10},
    "none, learned factors": lambda: {"learn_factors": True},
    "all, learned factors": lambda: {**features(), "missingness": 10, "learn_factors": True},
    "none, ordered probit": lambda: {"link": "ordered"},
}


def peers(num_partitions: int) -> None:
    """myFM and smurff on the same partitions."""
    import myfm  # ty: ignore[unresolved-import]
    import smurff  # ty: ignore[unresolved-import]
    from scipy.sparse import coo_matrix, csr_matrix

    print("| partition | peer | RMSE | NMAE | NMAE, rounded | CPU s |\n|---|---|---|---|---|---|")
    for seed in range(num_partitions):
        train, test = ratings(seed)
        place = lambda rows, columns, _: csr_matrix(
            (
                np.ones(2 * len(rows)),
                (np.tile(np.arange(len(rows)), 2), np.r_[rows, 6040 + columns]),
            )
        )
        started = process_time()
        model = myfm.MyFMRegressor(rank=20).fit(
            place(*train), train[2], n_iter=150, n_kept_samples=120, group_shapes=[6040, 3952]
        )
        print(
            f"| {seed} | myFM | {scores(test[2], model.predict(place(*test)))} | "
            f"{process_time() - started:.0f} |",
            flush=True,
        )
        matrix = lambda rows, columns, values: coo_matrix(
            (values, (rows, columns)), shape=(6040, 3952)
        )
        started = process_time()
        session = smurff.TrainSession(
            num_latent=20,
            burnin=30,
            nsamples=120,
            num_threads=1,
            verbose=0,
            seed=1,
            priors=["normal", "normal"],
        )
        session.addTrainAndTest(matrix(*train), matrix(*test), smurff.FixedNoise(1.5))
        found = {tuple(map(int, each.coords)): each.pred_avg for each in session.run()}
        mean = np.array(
            [found[place] for place in zip(test[0].tolist(), test[1].tolist(), strict=True)]
        )
        print(
            f"| {seed} | smurff | {scores(test[2], mean)} | {process_time() - started:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    number = int(words[words.index("-n") + 1]) if "-n" in words else 3
    if what == "movielens":
        movielens(number, [word for word in words if word in CODES] or list(CODES))
    elif what == "sizes":
        sizes(number, Path(words[words.index("-o") + 1]))
    elif what == "ranks":
        ranks(float(words[0]))
    else:
        peers(number)
