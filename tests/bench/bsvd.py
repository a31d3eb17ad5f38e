"""BSVD on ratings and on counts, next to what others reach on the same entries.

    uv run python -m tests.bench.bsvd mlb                                            # 2008 from the seasons before
    OMP_NUM_THREADS=1 uv run python -m tests.bench.bsvd movielens                     # Marlin's weak protocol, three partitions
    OMP_NUM_THREADS=1 uv run --with myfm --with smurff --with "setuptools<80" python -m tests.bench.bsvd peers

Ratings: of 5000 users, chosen at random, one rating each is held out and the others are learned from (Marlin 2004). Counts: successes are
hits, trials are plate appearances; the log likelihood is that of single plate appearances, over pairs of players who both occur in
training.
`-n 1` looks at one partition in place of three.
"""

import sys
from time import process_time

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from gallery import BSVDCompleter
from gallery.datasets import load

__all__ = ["additive", "counts", "log_likelihood", "ratings"]

SEASONS = ((2007, 2007), (2003, 2007), (1998, 2007))


def ratings(seed: int):
    """(rows, columns, values) to learn from, and the same held out."""
    data, rng = load("movielens_1m"), np.random.default_rng(seed)
    user = data["rows"]
    users = rng.choice(user.max() + 1, 5000, replace=False)
    first = np.searchsorted(user, np.arange(user.max() + 2))
    test = np.array([rng.integers(first[each], first[each + 1]) for each in users])
    keep = np.isin(user, users)
    keep[test] = False
    return [tuple(data[name][which] for name in ("rows", "cols", "values")) for which in (keep, test)]


def features() -> dict[str, np.ndarray]:
    """Of users: gender, age and occupation; of movies: genres."""
    data = load("movielens_1m")
    one_hot = lambda codes: (codes[:, None] == np.unique(codes)).astype(float)
    of_users = [data["user_is_male"][:, None].astype(float), one_hot(data["user_age"]), one_hot(data["user_occupation"])]
    return {"row_features": np.concatenate(of_users, axis=1), "column_features": data["movie_genres"]}


def scores(values: np.ndarray, mean: np.ndarray, interval: np.ndarray | None = None) -> str:
    """RMSE, NMAE of real and of rounded predictions, and how many values are inside the interval."""
    mean = np.clip(mean, 1, 5)
    error = lambda guess: np.mean(np.abs(values - guess)) / 1.6
    inside = "" if interval is None else f" | {np.mean((interval[0] <= values) & (values <= interval[1])):.3f}"
    return f"{np.sqrt(np.mean((values - mean) ** 2)):.4f} | {error(mean):.4f} | {error(np.round(mean)):.4f}{inside}"


def movielens(num_partitions: int) -> None:
    """Codes of Table 5.2: genre and missingness of movies, meta data and missingness of users."""
    print("| partition | features | RMSE | NMAE | NMAE, rounded | in the 90 % interval | rank, 90 % | CPU s |")
    print("|" + "---|" * 8)
    for seed in range(num_partitions):
        train, (rows, columns, values) = ratings(seed)
        for name, given in {"none": {}, "all": {**features(), "missingness": 10}}.items():
            started = process_time()
            completer = BSVDCompleter((6040, 3952), num_warmup=60, num_samples=150, random_state=seed, **given).fit(train)
            seconds = process_time() - started
            drawn = completer.sample(rows, columns, 1000)
            rank = np.quantile(completer.posterior_["posterior"]["rank"], [0.05, 0.5, 0.95])
            found = scores(values, completer.predict(rows, columns), np.quantile(drawn, [0.05, 0.95], axis=0))
            print(f"| {seed} | {name} | {found} | {rank[1]:.0f} ({rank[0]:.0f} to {rank[2]:.0f}) | {seconds:.0f} |", flush=True)


def counts(first: int, last: int):
    """(batters, pitchers, hits, plate appearances) of some seasons, added up."""
    data = load("mlb_batter_pitcher")
    which = (data["year"] >= first) & (data["year"] <= last) & (data["plate_appearances"] > 0)
    width = len(data["pitcher_id"])
    pair, where = np.unique(data["batter"][which] * width + data["pitcher"][which], return_inverse=True)
    hits, trials = (np.bincount(where, data[name][which]).astype(int) for name in ("hits", "plate_appearances"))
    return *np.divmod(pair, width), hits, trials


def log_likelihood(hits: np.ndarray, trials: np.ndarray, rate: np.ndarray) -> float:
    """Of single plate appearances."""
    return float(np.sum(hits * np.log(rate) + (trials - hits) * np.log1p(-rate)))


def additive(train, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Rates of the logit-additive model of batters and pitchers, both shrunk by the ridge that marginal likelihood chooses (Laplace)."""
    row, column, hits, trials = train
    num = row.max() + 1, column.max() + 1

    def fit(ridge):
        def loss(x):
            b, p = np.split(x[1:], [num[0]])
            eta = x[0] + b[row] + p[column]
            rate = expit(eta)
            gap = trials * rate - hits
            value = -np.sum(hits * eta - trials * np.logaddexp(0, eta)) + (ridge[0] * b @ b + ridge[1] * p @ p) / 2
            of_sides = np.bincount(row, gap, num[0]) + ridge[0] * b, np.bincount(column, gap, num[1]) + ridge[1] * p
            return value, np.concatenate([[gap.sum()], *of_sides])

        start = np.zeros(1 + sum(num))
        start[0] = np.log(hits.sum() / (trials.sum() - hits.sum()))
        return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x

    ridge = np.array([100.0, 100.0])
    for _ in range(20):  # effective degrees of freedom, each side by itself
        x = fit(ridge)
        b, p = np.split(x[1:], [num[0]])
        rate = expit(x[0] + b[row] + p[column])
        curvature = [np.bincount(index, trials * rate * (1 - rate), size) for index, size in zip((row, column), num, strict=True)]
        ridge = np.array([np.sum(c / (c + r)) / max(e @ e, 1e-12) for c, r, e in zip(curvature, ridge, (b, p), strict=True)])
    return expit(x[0] + b[rows] + p[columns])


def mlb() -> None:
    """2008 from the seasons before."""
    print("| training | constant | shrunk additive | BSVD | rank, 90 % | CPU s |\n|---|---|---|---|---|---|")
    for first, last in SEASONS:
        train = counts(first, last)
        batters, pitchers, hits, trials = counts(2008, 2008)
        seen = np.unique(train[0]), np.unique(train[1])
        known = np.isin(batters, seen[0]) & np.isin(pitchers, seen[1])
        batters, pitchers, hits, trials = (part[known] for part in (batters, pitchers, hits, trials))
        batters, pitchers = (np.searchsorted(names, of) for names, of in zip(seen, (batters, pitchers), strict=True))
        train = *(np.searchsorted(names, of) for names, of in zip(seen, train[:2], strict=True)), *train[2:]
        constant = log_likelihood(hits, trials, np.full(len(hits), train[2].sum() / train[3].sum()))
        peer = log_likelihood(hits, trials, additive(train, batters, pitchers))
        started = process_time()
        completer = BSVDCompleter(link="binomial", num_components=20, random_state=0).fit(train)
        rank = np.quantile(completer.posterior_["posterior"]["rank"], [0.05, 0.5, 0.95])
        found = log_likelihood(hits, trials, completer.predict(batters, pitchers))
        seconds = process_time() - started
        told = f"{rank[1]:.0f} ({rank[0]:.0f} to {rank[2]:.0f}) | {seconds:.0f}"
        print(f"| {first} to {last} | {constant:.0f} | {peer:.0f} | {found:.0f} | {told} |", flush=True)


def peers(num_partitions: int) -> None:
    """myFM and smurff on the same partitions."""
    import myfm  # ty: ignore[unresolved-import]
    import smurff  # ty: ignore[unresolved-import]
    from scipy.sparse import coo_matrix, csr_matrix

    print("| partition | peer | RMSE | NMAE | NMAE, rounded | CPU s |\n|---|---|---|---|---|---|")
    for seed in range(num_partitions):
        train, test = ratings(seed)
        place = lambda rows, columns, _: csr_matrix(
            (np.ones(2 * len(rows)), (np.tile(np.arange(len(rows)), 2), np.r_[rows, 6040 + columns]))
        )
        started = process_time()
        model = myfm.MyFMRegressor(rank=20).fit(place(*train), train[2], n_iter=150, n_kept_samples=120, group_shapes=[6040, 3952])
        print(f"| {seed} | myFM | {scores(test[2], model.predict(place(*test)))} | {process_time() - started:.0f} |", flush=True)
        matrix = lambda rows, columns, values: coo_matrix((values, (rows, columns)), shape=(6040, 3952))
        started = process_time()
        session = smurff.TrainSession(num_latent=20, burnin=30, nsamples=120, num_threads=1, verbose=0, seed=1, priors=["normal", "normal"])
        session.addTrainAndTest(matrix(*train), matrix(*test), smurff.FixedNoise(1.5))
        found = {tuple(map(int, each.coords)): each.pred_avg for each in session.run()}
        mean = np.array([found[place] for place in zip(test[0].tolist(), test[1].tolist(), strict=True)])
        print(f"| {seed} | smurff | {scores(test[2], mean)} | {process_time() - started:.0f} |", flush=True)


if __name__ == "__main__":
    number = int(sys.argv[sys.argv.index("-n") + 1]) if "-n" in sys.argv else 3
    mlb() if sys.argv[1] == "mlb" else {"movielens": movielens, "peers": peers}[sys.argv[1]](number)
