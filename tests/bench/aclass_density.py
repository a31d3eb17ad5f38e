"""AClass, first experiment: the density alone, learned from mixtures of known size.

    uv run python -m tests.bench.aclass_density                 # one component, and the literal filter

The truth is a mixture with equal weights over binary features, the coins of a component drawn from
Beta(½, ½). A method is a callable `fit(x) -> Fit`: the log density that it learned, and the number
of groups that it found. Judged by

    KL(truth, learned) ≈ mean over rows x drawn from the truth of  log p(x) − log q(x)
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, xlog1py, xlogy

from tests.bench.aclass_literal import Filter, predictive_density, train_crp

__all__ = [
    "Fit",
    "Method",
    "Mixture",
    "density_table",
    "divergence",
    "literal_fit",
    "mean_and_error",
    "one_component",
]

NUM_FEATURES = 50
NUM_TEST = 1000  # rows of the Monte Carlo estimate


class Fit(NamedTuple):
    """What a method learned."""

    log_density: Callable[[np.ndarray], np.ndarray]  # of rows [row, feature]
    num_groups: float


type Method = Callable[[np.ndarray], Fit]


class Mixture(NamedTuple):
    """Components with equal weights: `coins` [component, feature] are the probabilities of a
    one.
    """

    coins: np.ndarray

    @classmethod
    def draw(
        cls, rng: np.random.Generator, num_components: int, num_features: int = NUM_FEATURES
    ) -> "Mixture":
        """Every coin from Beta(½, ½)."""
        return cls(rng.beta(0.5, 0.5, size=(num_components, num_features)))

    def sample(self, rng: np.random.Generator, num_rows: int) -> np.ndarray:
        """Rows of 0.0 and 1.0; of one seed, few rows begin many."""
        group_rng, coin_rng = rng.spawn(2)
        coins = self.coins[group_rng.integers(len(self.coins), size=num_rows)]
        return (coin_rng.random(coins.shape) < coins).astype(float)

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """The log density of complete rows [row, feature]."""
        log_component = xlogy(x[:, None], self.coins) + xlog1py(1 - x[:, None], -self.coins)
        return logsumexp(log_component.sum(-1), axis=1) - np.log(len(self.coins))


def divergence(
    truth: Mixture, log_density: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> float:
    """KL from the truth to what was learned, by the rows `x` that were drawn from the truth."""
    return float(np.mean(truth.log_density(x) - log_density(x)))


def one_component(x: np.ndarray) -> Fit:
    """Naive Bayes: independent coins, each its posterior mean under Beta(½, ½)."""
    return Fit(Mixture((0.5 + x.sum(0, keepdims=True)) / (1 + len(x))).log_density, 1)


def literal_fit(num_particles: int) -> Method:
    """The literal filter as a method."""

    def fit(x):
        density = Filter.start(num_particles)
        for row in x:
            train_crp(density, row)
        return Fit(
            lambda rows: np.array([predictive_density(density, row) for row in rows]),
            density.num_groups,
        )

    return fit


def mean_and_error(values: Iterable[float]) -> str:
    """`mean ± standard error`, with three decimals."""
    values = np.array(list(values))
    return f"{values.mean():.3f} ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}"


def density_table(
    methods: dict[str, Method],
    components=(1, 5, 10, 20, 30),
    sizes=(100, 300, 1000),
    repetitions: int = 10,
) -> dict:
    """Print KL to the truth and groups found, mean and standard error over repetitions, as a
    markdown table.

    Returns the single values, `{(components, size, method): [repetition, (KL, groups)]}`.
    """
    columns = [f"{name}: {what}" for name in methods for what in ("KL", "groups")]
    print(
        f"| components | rows | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}", flush=True
    )
    values = {}
    for num_components in components:
        for size in sizes:
            cells = []
            for name, fit in methods.items():
                found = np.array(
                    [_judge(fit, num_components, size, seed) for seed in range(repetitions)]
                )
                values[num_components, size, name] = found
                cells += [mean_and_error(column) for column in found.T]
            print(f"| {num_components} | {size} | {' | '.join(cells)} |", flush=True)
    return values


def _judge(fit: Method, num_components: int, size: int, seed: int) -> tuple[float, float]:
    """KL and groups; of one seed, every method sees the same truth and rows, and a small
    training set begins a large one.
    """
    rng = np.random.default_rng([seed, num_components])
    truth = Mixture.draw(rng, num_components)
    x_test, x_train = truth.sample(rng, NUM_TEST), truth.sample(rng, size)
    learned = fit(x_train)
    return divergence(truth, learned.log_density, x_test), learned.num_groups


if __name__ == "__main__":
    density_table(
        {"one component": one_component, "P = 1": literal_fit(1), "P = 40": literal_fit(40)},
        components=(1, 5, 20),
        repetitions=2,
    )
