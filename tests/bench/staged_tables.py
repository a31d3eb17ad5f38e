"""Learning real tables in stages, against all rows at once, and against classifiers of scikit-learn:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with plotnine python -m tests.bench.staged_tables diamonds --stages 25 --order 3
    uv run python -m tests.bench.staged_tables digits --stages 10 --order 5

`diamonds`, 53,940 stones with five cuts, come with plotnine; `digits`, the first eight principal components, with scikit-learn. All rows at
once are NUTS from the clusters of k-means, and importance sampling for the evidence, from a Student's t fitted to its draws, times the
number of ways to name clusters. A line a method: the log-evidence less that of all rows and its claimed error, the mean log density of rows
held out less that of all rows, how much of what all rows say lies in 90 % intervals, log score and accuracy for the classes of rows held
out, likelihoods of a row in millions (a gradient counts as three), and CPU seconds with compilation.
"""

import argparse
from collections.abc import Callable
from math import lgamma
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, log_likelihood
from scipy.special import logsumexp
from scipy.stats import multivariate_t
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from inference import DataTempering, Driver, Program, Staged
from inference.split import Split
from tests.bench.staged import Draws, Learned, told
from zoo.staged_learning import family

DRAWS, WARMUP, TAIL, OFFERS = 500, 500, 10, 2000
Table = tuple[np.ndarray, np.ndarray, int]  # rows, classes, and how many of the rows are learned from


def diamonds() -> Table:
    """Logarithms of carat and price, depth and table; the cut."""
    from plotnine.data import diamonds as stones  # ty: ignore[unresolved-import]  # brought by `uv run --with`

    x = np.stack([np.log(stones.carat), stones.depth, stones.table, np.log(stones.price)], 1)
    return x, np.asarray(stones.cut.cat.codes), 50_000


def digits() -> Table:
    """The first eight principal components, of equal variance."""
    from gallery.datasets import load

    data = load("digits")
    return PCA(8, whiten=True).fit_transform(data.x), data.y, 1400


TABLES: dict[str, Callable[[], Table]] = {"diamonds": diamonds, "digits": digits}
PEERS = {
    "logistic regression": lambda: LogisticRegression(max_iter=1000),
    "quadratic discriminant": QuadraticDiscriminantAnalysis,
    "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0),
}


class Told(NamedTuple):
    """Of rows held out, [draw, row]."""

    of_rows: np.ndarray
    of_classes: np.ndarray


def asked(model: Callable, draws: Draws, x: np.ndarray, y: np.ndarray) -> Told:
    """What draws say of rows held out."""
    each = log_likelihood(model, draws, x, y, parallel=False)
    return Told(np.asarray(each["x"] + each["y"]), np.asarray(each["y"]))


def all_rows(model: Callable, order: int, x: np.ndarray, y: np.ndarray) -> Learned:
    """NUTS in unconstrained space, in the arrangement of the clusters that k-means finds, and the evidence."""
    split = Split(Program(model, x, y))
    found = KMeans(order, n_init=5, random_state=0).fit_predict(x)
    shares = np.stack([np.bincount(y[found == k], minlength=y.max() + 1) + 1.0 for k in range(order)])
    start = {
        "beta": np.bincount(found, minlength=order) / len(x),
        "gamma": shares / shares.sum(1, keepdims=True),
        "mu": np.stack([x[found == k].mean(0) for k in range(order)]),
        "sigma": np.stack([x[found == k].std(0) for k in range(order)]),
    }
    z = ravel_pytree(split.program.unconstrain(jax.tree.map(jnp.asarray, start)))[0]
    log_joint = lambda z: sum(split.densities(z))
    chain = MCMC(NUTS(potential_fn=lambda z: -log_joint(z)), num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False)
    chain.run(random.key(0), init_params=z, extra_fields=("num_steps",))
    z = np.asarray(chain.get_samples())
    away = np.cov(z.T)
    offers = multivariate_t(z.mean(0), away, df=TAIL, seed=0).rvs(OFFERS)
    log_weight = np.asarray(jax.lax.map(jax.jit(log_joint), jnp.asarray(offers))) - multivariate_t(z.mean(0), away, df=TAIL).logpdf(offers)
    weight = np.exp(log_weight - log_weight.max())
    log_evidence = np.log(weight.mean()) + log_weight.max() + lgamma(order + 1)
    error = weight.std() / weight.mean() / np.sqrt(OFFERS)
    steps = float(chain.get_extra_fields()["num_steps"].mean()) * (DRAWS + WARMUP)  # those of the warm-up are not told
    draws = {name: np.asarray(value) for name, value in jax.vmap(split.values)(jnp.asarray(z)).items()}
    return Learned(draws, log_evidence, error, (3 * steps + OFFERS) * len(x))


def methods(model: Callable, given: Any) -> dict[str, Any]:
    """Kernels that learn in stages."""
    return {
        "stages": lambda: Staged(model, num_stages=given.stages, num_live=given.points),
        "data tempering (IBIS)": lambda: DataTempering(model, num_stages=given.stages, num_particles=2 * given.points),
    }


def line(name: str, best: Learned, ideal: Told, found: Learned, mine: Told, correct: Any, seconds: float) -> str:
    """A row of the table."""
    score = lambda each: (logsumexp(each, axis=0) - np.log(len(each))).mean()
    low, high = np.quantile(mine.of_rows, [0.05, 0.95], axis=0)
    inside = ((ideal.of_rows > low) & (ideal.of_rows < high)).mean()
    cells = (
        f"{found.log_evidence - best.log_evidence:+.2f}",
        f"{found.error:.2f}",
        f"{score(mine.of_rows) - score(ideal.of_rows):+.4f}",
        f"{inside:.2f}",
        f"{score(mine.of_classes):.4f}",
        f"{correct:.3f}",
        f"{found.evaluations / 1e6:.0f}",
        f"{seconds:.0f}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def accuracy(model: Callable, draws: Draws, x: np.ndarray, y: np.ndarray) -> float:
    """Of the most probable class, all draws together."""
    each = [asked(model, draws, x, np.full(len(y), code)).of_classes for code in range(y.max() + 1)]
    return float((logsumexp(each, axis=1).argmax(0) == y).mean())


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--stages", type=int, default=25)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--points", type=int, default=50, help="live points; half as many as particles")
    parser.add_argument("--methods", nargs="*", default=["stages"], help="stages, data tempering (IBIS)")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    x, y, count = TABLES[given.table]()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order].astype(int)
    x = (x - x[:count].mean(0)) / x[:count].std(0)
    x, new_x, y, new_y = x[:count], x[count:], y[:count], y[count:]
    print("| method | log Z | claimed | held out | in 90 % | log score | accuracy | 1e6 likelihoods | CPU s |\n|" + "---|" * 9)
    for name, make in PEERS.items():
        started, fitted = process_time(), make().fit(x, y)
        own = np.log(np.maximum(fitted.predict_proba(new_x)[np.arange(len(new_y)), new_y], 1e-9)).mean()
        correct = fitted.score(new_x, new_y)
        print(f"| {name} | | | | | {own:.4f} | {correct:.3f} | | {process_time() - started:.0f} |", flush=True)
    model = family(given.order, num_classes=int(y.max()) + 1)
    started = process_time()
    best = all_rows(model, given.order, x, y)
    seconds, ideal = process_time() - started, asked(model, best.draws, new_x, new_y)
    print(line("all rows at once", best, ideal, best, ideal, accuracy(model, best.draws, new_x, new_y), seconds))
    print(f"\nlog Z {best.log_evidence:.2f}, held out {(logsumexp(ideal.of_rows, axis=0) - np.log(DRAWS)).mean():.4f}\n", flush=True)
    for name in given.methods:
        started = process_time()
        found = told(Driver(methods(model, given)[name](), num_samples=DRAWS, progress_bar=False).run(0, x, y), len(x))
        seconds, mine = process_time() - started, asked(model, found.draws, new_x, new_y)
        print(line(name, best, ideal, found, mine, accuracy(model, found.draws, new_x, new_y), seconds), flush=True)


if __name__ == "__main__":
    main()
