"""Ways to learn in stages, against all rows at once, on rows of a mixture of three clusters with
two classes:

    OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tests.bench.staged
    --rows 1000 --stages 10

What is exact comes from Gibbs chains and importance sampling (`tests.bench.mixture_evidence`). A
line a method: the log-evidence less the exact one and its claimed error, the mean log density of
500 rows held out less that of the exact posterior, how much of the exact posterior lies in 90 %
intervals (of the log densities of rows held out, which do not depend on the names of clusters),
likelihoods of a row in millions, and CPU seconds with compilation.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from numpyro.distributions import MultivariateNormal
from scipy.special import logsumexp
from sklearn.cluster import KMeans

from inference import DataTempering, Driver, MergedStages, NestedSampler, Program, Staged
from inference.reading.density import Split
from tests.bench import mixture_evidence as exact
from zoo.staged_learning import family

CLASSES, HELD_OUT, WORKERS, DRAWS = 2, 500, 4, 1000
STEPS, AT_ONCE = 2000, 16  # of streaming VB
MODEL = family(exact.ORDER, num_classes=CLASSES)
Draws = dict[str, np.ndarray]


class Learned(NamedTuple):
    """What a method says."""

    draws: Draws
    log_evidence: float
    error: float
    evaluations: float  # of one row


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Three clusters in the plane, in which classes have other shares."""
    r = np.random.default_rng(3)
    k = r.choice(3, count, p=[0.5, 0.3, 0.2])
    centre, scale = (
        np.array([[-1.5, 0], [1, 1], [1.5, -1.5]]),
        np.array([[0.8, 0.9], [0.8, 0.6], [0.6, 0.6]]),
    )
    return centre[k] + scale[k] * r.normal(size=(count, 2)), (
        r.random(count) < np.array([0.1, 0.6, 0.9])[k]
    ).astype(int)


def log_densities(draws: Draws, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[draw, row]."""
    told = exact.Rows(x, y, CLASSES, 0)
    each = zip(draws["beta"], draws["mu"], draws["sigma"], draws["gamma"], strict=True)
    one = lambda beta, mu, sigma, gamma: (
        np.log(beta) + exact.log_claims(told, mu[None], np.log(sigma)[None], np.log(gamma)[None])[0]
    )
    return np.array([logsumexp(one(*values), axis=1) for values in each])


def reference(x: np.ndarray, y: np.ndarray) -> Learned:
    """Draws of a Gibbs chain from the exact posterior, and the log-evidence."""
    told, r, m = exact.Rows(x, y, CLASSES, 0), np.random.default_rng(0), exact.ORDER
    start = KMeans(m, n_init=5, random_state=0).fit_predict(x)
    z = exact.chain(told, r, start)
    log_evidence, error, _ = exact.evidence(told, r, z)
    ratio, mu, s, classes = np.split(
        z[:: max(1, len(z) // DRAWS)], np.cumsum([m - 1, 2 * m, 2 * m]), axis=1
    )
    gamma = np.exp(exact.log_share(classes.reshape(-1, m, CLASSES - 1)))
    draws = {
        "beta": np.exp(exact.log_share(ratio)),
        "mu": mu.reshape(-1, m, 2),
        "sigma": np.exp(s).reshape(-1, m, 2),
        "gamma": gamma,
    }
    return Learned(draws, log_evidence, error, np.nan)


def driven(make: Callable) -> Callable:
    """A kernel in the driver."""

    def learn(x: np.ndarray, y: np.ndarray, stages: int, points: int) -> Learned:
        return told(
            Driver(make(stages, points), num_samples=DRAWS, progress_bar=False).run(0, x, y), len(x)
        )

    return learn


def staged(**settings: Any) -> Callable:
    """Learning in stages."""
    return driven(
        lambda stages, points: Staged(MODEL, num_stages=stages, num_live=points, **settings)
    )


def told(tree: Any, num_rows: int) -> Learned:
    """What is in a tree."""
    posterior = tree["posterior"].dataset.isel(chain=0)
    draws = {name: posterior[name].values for name in ("beta", "mu", "sigma", "gamma")}
    of_rows = tree.attrs.get(
        "num_row_evaluations", tree.attrs.get("num_evaluations", np.nan) * num_rows
    )
    return Learned(draws, tree.attrs["log_evidence"], tree.attrs["log_evidence_se"], float(of_rows))


def apart(x: np.ndarray, y: np.ndarray, stages: int, points: int) -> Learned:
    """Workers that learn from rows of their own, and are put together."""
    parts = []
    for own in np.array_split(np.arange(len(x)), WORKERS):
        driver = Driver(
            Staged(MODEL, num_stages=max(1, stages // WORKERS), num_live=points),
            num_samples=1,
            progress_bar=False,
        )
        driver.run(len(parts), x[own], y[own])
        parts.append(driver)
    return told(
        Driver(MergedStages(parts), num_samples=DRAWS, progress_bar=False).run(0, x, y), len(x)
    )


def streaming(x: np.ndarray, y: np.ndarray, stages: int, points: int) -> Learned:
    """Variational Bayes by a Normal with all correlations, which is the prior of the next stage;
    its bound for the evidence.
    """
    parts = np.array_split(np.random.default_rng(0).permutation(len(x)), stages)
    splits = [Split(Program(MODEL, x[part], y[part])) for part in parts]
    z = jax.vmap(splits[0].draw)(random.split(random.key(9), 200))
    q: Any = (z[jnp.argmax(sum(jax.vmap(splits[0].densities)(z)))], -jnp.eye(splits[0].size))
    before, bound = None, 0.0
    for number, split in enumerate(splits):
        q, gained = ascended(split, before, q, random.key(number))
        before, bound = normal(q), bound + gained
    assert before is not None
    draws = {
        name: np.asarray(value)
        for name, value in jax.vmap(splits[0].values)(
            before.sample(random.key(5), (DRAWS,))
        ).items()
    }
    # a gradient costs about three
    return Learned(draws, bound, np.nan, 3.0 * STEPS * AT_ONCE * len(x))


def normal(q: Any) -> MultivariateNormal:
    """The multivariate Normal of a mean and a triangle with log scales on its diagonal."""
    return MultivariateNormal(
        q[0], scale_tril=jnp.tril(q[1], -1) + jnp.diag(jnp.exp(jnp.diagonal(q[1])))
    )


def ascended(
    split: Split, before: MultivariateNormal | None, q: Any, rng_key: jax.Array
) -> tuple[Any, float]:
    """After the rows of a stage, and its bound; without `before` the prior is the model's."""
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, STEPS))

    def loss(q, key):
        z = normal(q).rsample(key, (AT_ONCE,))
        log_prior, log_likelihood = jax.vmap(split.densities)(z)
        log_prior = log_prior if before is None else before.log_prob(z)
        return jnp.mean(normal(q).log_prob(z) - log_prior - log_likelihood)

    def turn(carry, key):
        q, state = carry
        value, gradient = jax.value_and_grad(loss)(q, key)
        change, state = optimiser.update(gradient, state)
        return (optax.apply_updates(q, change), state), value

    (q, _), values = jax.jit(lambda q, keys: jax.lax.scan(turn, (q, optimiser.init(q)), keys))(
        q, random.split(rng_key, STEPS)
    )
    return q, -float(values[-200:].mean())


METHODS = {
    "all rows at once": driven(lambda stages, points: NestedSampler(MODEL, num_live=points)),
    "stages": staged(),
    "stages, whatever is lost": staged(most_lost=np.inf),
    "stages, not explored": staged(num_walkers=0),
    "stages, clumps in code space, whatever is lost": staged(summary="code", most_lost=np.inf),
    f"{WORKERS} workers, merged": apart,
    "data tempering (IBIS)": driven(
        lambda stages, points: DataTempering(MODEL, num_stages=stages, num_particles=2 * points)
    ),
    "streaming VB": streaming,
}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=10)
    parser.add_argument(
        "--points", type=int, default=100, help="live points; half as many as particles"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    x, y = rows(given.rows + HELD_OUT)
    x, new_x, y, new_y = x[: given.rows], x[given.rows :], y[: given.rows], y[given.rows :]
    best = reference(x, y)
    ideal = log_densities(best.draws, new_x, new_y)
    score = lambda found: (logsumexp(found, axis=0) - np.log(len(found))).mean()
    print(f"exact: log Z {best.log_evidence:.2f} ± {best.error:.2f}, held out {score(ideal):.4f}\n")
    print(
        "| method | log Z | claimed | held out | in 90 % | 1e6 likelihoods | CPU s |\n|"
        + "---|" * 7
    )
    for name in given.methods:
        started = process_time()
        found = METHODS[name](x, y, given.stages, given.points)
        seconds, mine = process_time() - started, log_densities(found.draws, new_x, new_y)
        low, high = np.quantile(mine, [0.05, 0.95], axis=0)
        inside, off = (
            ((ideal > low) & (ideal < high)).mean(),
            found.log_evidence - best.log_evidence,
        )
        cells = (
            f"{off:+.2f} | {found.error:.2f} | {score(mine) - score(ideal):+.4f} | "
            f"{inside:.2f} | {found.evaluations / 1e6:.0f}"
        )
        print(f"| {name} | {cells} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
