"""What it costs an order to come late, where everything is known exactly:

    python -m tests.bench.late_orders

Rows of a polynomial of six terms, with noise of .3, in random order; the prior of a term is Normal(0, 1), that of the order a zeta. The
first rows are learned from by themselves, up to where two orders in a row have odds below .5 to the best (by default it is 1e-3, and all
ten orders are tried for few rows); the others then bring orders that had not been tried, as `Orders.update` does. A line for each number of
first rows: orders that these try, the most probable order of all rows at once and its probability, and the same of the two parts; the last
figure is the logarithm of the odds of later orders to those that had been tried, less what it is for all rows at once.
"""

import jax
import numpy as np
from scipy import stats

from inference._order_summary import OrderSummary
from inference.distributions import Zeta

ROWS, MOST, NOISE, NEGLIGIBLE, UNTRIED = 200, 10, 0.3, 0.5, 0.02
TERMS = np.array([0.5, 1.0, -0.5, -1.0, 0.3, 0.8])


def log_evidence(order: int, x: np.ndarray, y: np.ndarray) -> float:
    """Of a number of terms."""
    powers = np.stack([x**power for power in range(order)], 1)
    return float(stats.multivariate_normal(np.zeros(len(x)), powers @ powers.T + NOISE**2 * np.eye(len(x))).logpdf(y))


def tried(joint: list[float]) -> int:
    """How many orders are tried, of which these are the joint densities."""
    for count in range(3, len(joint)):
        if max(joint[count - 2 : count]) < max(joint[:count]) + np.log(NEGLIGIBLE):
            return count
    return len(joint)


def line(first: int, x: np.ndarray, y: np.ndarray) -> str:
    """Of one number of first rows."""
    prior, orders = np.asarray(Zeta().log_prob(np.arange(1, MOST + 1))), np.arange(1, MOST + 1)
    of = lambda rows: prior + [log_evidence(order, x[rows], y[rows]) for order in orders]
    before, after, whole = of(slice(first)), of(slice(first, None)), of(slice(None))
    count = tried(before.tolist())
    log_family = np.logaddexp.reduce(before[:count])
    summary = OrderSummary(orders[:count], np.exp(before[:count] - log_family), UNTRIED)
    left = np.array([summary.log_prob(order) for order in orders[count:]]) - np.log1p(-summary.rest)
    found = np.concatenate([whole[:count], left + log_family + after[count:] - prior[count:]])
    share = lambda joint: np.exp(joint - np.logaddexp.reduce(joint))
    odds = lambda joint: joint[count:].max() - joint[:count].max() if count < MOST else np.nan
    best = lambda joint: f"{orders[joint.argmax()]}: {share(joint).max():.2f}"
    return f"| {first} | 1 to {count} | {best(whole)} | {best(found)} | {odds(found) - odds(whole):+.1f} |"


def main() -> None:
    """The table."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.5, 1.5, ROWS)
    y = np.stack([x**power for power in range(len(TERMS))], 1) @ TERMS + NOISE * rng.normal(size=ROWS)
    print("| first rows | orders tried | all at once | in two parts | log odds |\n|" + "---|" * 5)
    for first in (2, 3, 5, 10, 20, 50):
        print(line(first, x, y))


if __name__ == "__main__":
    main()
