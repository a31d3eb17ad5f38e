"""Learning tables in stages, against all rows at once, and against classifiers of scikit-learn:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with plotnine python -m tests.bench.staged_tables diamonds --stages 25 --order 3
    uv run python -m tests.bench.staged_tables digits --stages 10 --order 3
    uv run python -m tests.bench.staged_tables synthetic --stages 20 --order 4 [--rows 100000]
    [--walkers 0] [--seeds 0 1]

`diamonds`, 53,940 stones with five cuts, come with plotnine; `digits`, the first eight principal
components, with scikit-learn; `synthetic` are rows of four clusters in ten dimensions with two
classes. All rows at once are NUTS from the highest posterior mode that k-means, ten mixtures of
scikit-learn and classes dealt out to clusters lead to, with the curvature there as its mass, and a
bridge from a Student's t of that curvature for the evidence, times the number of ways to name
clusters. A line a method: the log-evidence less that of all rows and its claimed error, the mean
log density of rows held out less that of all rows, how much of what all rows say lies in 90 %
intervals, log score and accuracy for the classes of rows held out, likelihoods of a row in millions
(a gradient counts as three), and CPU seconds with compilation. Another seed deals the rows out to
the stages in another order.
"""

import argparse
from collections.abc import Callable
from itertools import product
from math import lgamma
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, log_likelihood
from scipy.optimize import brentq, minimize
from scipy.special import logsumexp
from scipy.stats import multivariate_t
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture

from inference import DataTempering, Driver, Program, Staged
from inference.reading.density import Split
from tests.bench.staged import Draws, Learned, told
from zoo.staged_learning import family

DRAWS, WARMUP, TAIL, BATCHES, HELD_OUT, STARTS, DEALT = 1000, 100, 50, 10, 4000, 10, 100
# rows, classes, and how many of the rows are learned from
Table = tuple[np.ndarray, np.ndarray, int]


def diamonds(num_rows: int) -> Table:
    """Logarithms of carat and price, depth and table; the cut.

    Each anywhere in what was rounded off: a cluster that narrows down on one value of a rounded
    column has a density without bound but its prior's, and there would all of the evidence be.
    """
    from plotnine.data import diamonds as stones  # ty: ignore[import-not-found]  # brought by `uv run --with`

    within = np.random.default_rng(0).uniform(-0.5, 0.5, (4, len(stones)))
    unit = {"carat": 0.01, "depth": 0.1, "table": 1.0, "price": 1.0}
    carat, depth, table, price = (
        stones[name] + unit[name] * noise for name, noise in zip(unit, within, strict=True)
    )
    x = np.stack([np.log(carat), depth, table, np.log(price)], 1)
    return x, np.asarray(stones.cut.cat.codes), min(num_rows, 50_000)


def digits(num_rows: int) -> Table:
    """The first eight principal components, of equal variance."""
    from gallery.datasets import load

    data = load("digits")
    return PCA(8, whiten=True).fit_transform(data.x), data.y, min(num_rows, 1400)


def synthetic(num_rows: int) -> Table:
    """Four clusters that overlap; each has one class nine times in ten."""
    r = np.random.default_rng(5)
    centre, scale, usual = (
        0.7 * r.normal(size=(4, 10)),
        r.uniform(0.5, 1, (4, 10)),
        np.array([0, 1, 0, 1]),
    )
    k = r.choice(4, num_rows + HELD_OUT, p=[0.4, 0.3, 0.2, 0.1])
    y = np.where(r.random(len(k)) < 0.9, usual[k], 1 - usual[k])
    return centre[k] + scale[k] * r.normal(size=(len(k), 10)), y, num_rows


TABLES: dict[str, Callable[[int], Table]] = {
    "diamonds": diamonds,
    "digits": digits,
    "synthetic": synthetic,
}
PEERS = {
    "logistic regression": lambda: LogisticRegression(max_iter=1000),
    "quadratic discriminant": QuadraticDiscriminantAnalysis,
    "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0),
}


class Told(NamedTuple):
    """The log probabilities of held-out rows and of their classes, [draw, row]."""

    of_rows: np.ndarray
    of_classes: np.ndarray


def asked(model: Callable, draws: Draws, x: np.ndarray, y: np.ndarray) -> Told:
    """What draws say of rows held out."""
    each = log_likelihood(model, draws, x, y, parallel=False)
    return Told(np.asarray(each["x"] + each["y"]), np.asarray(each["y"]))


def start(split: Split, found: np.ndarray, x: np.ndarray, y: np.ndarray) -> jax.Array:
    """Rows that are put together, as clusters in unconstrained space."""
    parts = [found == k for k in range(found.max() + 1)]
    shares = np.stack([np.bincount(y[part], minlength=y.max() + 1) + 1.0 for part in parts])
    values = {
        "beta": np.array([part.mean() for part in parts]),
        "gamma": shares / shares.sum(1, keepdims=True),
        "mu": np.stack([x[part].mean(0) for part in parts]),
        "sigma": np.stack([x[part].std(0) + 0.01 for part in parts]),
    }
    return ravel_pytree(split.program.unconstrain(jax.tree.map(jnp.asarray, values)))[0]


def groupings(order: int, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """By k-means, by mixtures from other beginnings, and by classes; those with rows in all
    groups.
    """
    mixture = lambda seed: GaussianMixture(
        order, covariance_type="diag", init_params="random_from_data", random_state=seed
    )
    dealt = lambda seed: np.random.default_rng(seed).integers(order, size=y.max() + 1)[y]
    found = [
        KMeans(order, n_init=5, random_state=0).fit_predict(x),
        *(mixture(seed).fit_predict(x) for seed in range(STARTS)),
    ]
    found += [dealt(seed) for seed in range(DEALT)] if len(np.unique(y)) >= order else []
    whole = [each for each in found if len(np.unique(each)) == order]
    if not whole:
        raise ValueError(f"order: no start has rows in all of {order} clusters; give fewer.")
    return whole


def all_rows(model: Callable, order: int, x: np.ndarray, y: np.ndarray) -> Learned:
    """NUTS in the best arrangement of clusters that some starts lead to, and the evidence."""
    split = Split(Program(model, x, y))
    potential = lambda z: -sum(split.densities(z))
    slope = jax.jit(jax.value_and_grad(potential))
    in_numpy = lambda z: tuple(np.asarray(each, float) for each in slope(jnp.asarray(z)))
    climb = lambda z, steps: minimize(
        in_numpy, z, jac=True, method="L-BFGS-B", options={"maxiter": steps}
    )
    begun = [climb(start(split, found, x, y), 100) for found in groupings(order, x, y)]
    ended = climb(min(begun, key=lambda each: each.fun).x, 2000)
    mode, climbed = ended.x, ended.nfev + sum(each.nfev for each in begun)
    # one at a time: all rows are in each
    row = lambda e: jax.jvp(jax.grad(potential), (jnp.asarray(mode),), (e,))[1]
    curvature = np.asarray(jax.lax.map(row, jnp.eye(split.size)))
    covariance = np.linalg.inv(curvature)
    kernel = NUTS(
        potential_fn=potential,
        inverse_mass_matrix=jnp.asarray(covariance),
        adapt_mass_matrix=False,
        dense_mass=True,
    )
    chain = MCMC(kernel, num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False)
    chain.run(random.key(0), init_params=jnp.asarray(mode), extra_fields=("num_steps",))
    z = np.asarray(chain.get_samples())
    log_evidence, error = evidence(
        lambda z: -potential(z), z, multivariate_t(mode, covariance, df=TAIL, seed=0)
    )
    # those of the warm-up are not told
    steps = float(chain.get_extra_fields()["num_steps"].mean()) * (DRAWS + WARMUP)
    draws = {
        name: np.asarray(value) for name, value in jax.vmap(split.values)(jnp.asarray(z)).items()
    }
    return Learned(
        draws,
        log_evidence + lgamma(order + 1),
        error,
        (3 * (climbed + steps + split.size) + DRAWS) * len(x),
    )


def evidence(log_joint: Callable, z: np.ndarray, proposal: Any) -> tuple[float, float]:
    """The log-evidence around some draws, and its error, by a bridge from the proposal."""
    of_all = lambda z: (
        np.asarray(jax.lax.map(jax.jit(log_joint), jnp.asarray(z))) - proposal.logpdf(z)
    )
    ratio = np.stack([of_all(z), of_all(proposal.rvs(len(z)))])
    parts = [bridged(part) for part in np.array_split(ratio, BATCHES, axis=1)]
    return bridged(ratio), float(np.std(parts, ddof=1) / np.sqrt(BATCHES))


def bridged(log_ratio: np.ndarray) -> float:
    """The logarithm of a constant, by Meng and Wong's bridge, from the ratios [2, draw] at draws
    and at offers.
    """
    difference = lambda log_z: (
        logsumexp(log_ratio[1] - np.logaddexp(log_ratio[1], log_z))
        - logsumexp(-np.logaddexp(log_ratio[0], log_z))
        - log_z
    )
    return brentq(difference, log_ratio.min() - 1, log_ratio.max() + 1)


def methods(model: Callable, given: Any) -> dict[str, Any]:
    """Kernels that learn in stages."""
    return {
        "stages": lambda: Staged(
            model, num_stages=given.stages, num_live=given.points, num_walkers=given.walkers
        ),
        "data tempering (IBIS)": lambda: DataTempering(
            model, num_stages=given.stages, num_particles=2 * given.points
        ),
    }


def line(
    name: str, best: Learned, ideal: Told, found: Learned, mine: Told, correct: Any, seconds: float
) -> str:
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
    """The accuracy of the most probable class under the mean over draws."""
    each = [asked(model, draws, x, np.full(len(y), code)).of_classes for code in range(y.max() + 1)]
    return float((logsumexp(each, axis=1).argmax(0) == y).mean())


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--stages", type=int, default=25)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument(
        "--points", type=int, default=50, help="live points; half as many as particles"
    )
    parser.add_argument(
        "--walkers", type=int, help="that explore each stage; left out: as `Staged` has them"
    )
    parser.add_argument(
        "--methods", nargs="*", default=["stages"], help="stages, data tempering (IBIS)"
    )
    parser.add_argument("--rows", type=int, default=100_000, help="at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    x, y, count = TABLES[given.table](given.rows)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order].astype(int)
    x = (x - x[:count].mean(0)) / x[:count].std(0)
    x, new_x, y, new_y = x[:count], x[count:], y[:count], y[count:]
    print(
        "| method | log Z | claimed | held out | in 90 % | log score | accuracy | 1e6 likelihoods "
        "| CPU s |\n|" + "---|" * 9
    )
    for name, make in PEERS.items():
        started, fitted = process_time(), make().fit(x, y)
        own = np.log(
            np.maximum(fitted.predict_proba(new_x)[np.arange(len(new_y)), new_y], 1e-9)
        ).mean()
        correct = fitted.score(new_x, new_y)
        print(
            f"| {name} | | | | | {own:.4f} | {correct:.3f} | | {process_time() - started:.0f} |",
            flush=True,
        )
    model = family(given.order, num_classes=int(y.max()) + 1)
    started = process_time()
    best = all_rows(model, given.order, x, y)
    seconds, ideal = process_time() - started, asked(model, best.draws, new_x, new_y)
    print(
        line(
            "all rows at once",
            best,
            ideal,
            best,
            ideal,
            accuracy(model, best.draws, new_x, new_y),
            seconds,
        )
    )
    print(
        f"\nlog Z {best.log_evidence:.2f}, held out "
        f"{(logsumexp(ideal.of_rows, axis=0) - np.log(DRAWS)).mean():.4f}\n",
        flush=True,
    )
    for name, seed in product(given.methods, given.seeds):
        started = process_time()
        found = told(
            Driver(methods(model, given)[name](), num_samples=DRAWS, progress_bar=False).run(
                seed, x, y
            ),
            len(x),
        )
        seconds, mine = process_time() - started, asked(model, found.draws, new_x, new_y)
        print(
            line(
                name, best, ideal, found, mine, accuracy(model, found.draws, new_x, new_y), seconds
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
