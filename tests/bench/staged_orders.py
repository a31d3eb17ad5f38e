"""How many clusters are found, on mixtures of one to six of them, 500 rows in the plane with two
classes:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    python -m tests.bench.staged_orders RESULTS.jsonl     # goes on where it stopped
    python -m tests.bench.staged_orders RESULTS.jsonl --table
    python -m tests.bench.staged_orders OTHERS.jsonl --first 15 --seeds 3 4     # the first rows in a call of their own

Centres of clusters are Normal with a deviation of 3, at least 3 from each other; deviations of rows
lie between .5 and 1, shares are Dirichlet(5), and each cluster has one class nine times in ten.
`StagedMixtureClassifier` by default, but for `max_order=8`. With `--first` the first rows are
learned from by one call of `partial_fit`, and the others by another.
"""

import argparse
import json
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from gallery import StagedMixtureClassifier

ORDERS = (1, 2, 3, 4, 5, 6, 2, 3, 4, 5)  # the truth of each table
ROWS, APART = 500, 3.0


def table(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels of a mixture of `ORDERS[seed]` clusters."""
    rng, order = np.random.default_rng(seed), ORDERS[seed]
    centre = 3 * rng.normal(size=(order, 2))
    while (
        order > 1
        and min(np.linalg.norm(centre[i] - centre[j]) for i in range(order) for j in range(i))
        < APART
    ):
        centre = 3 * rng.normal(size=(order, 2))
    scale, share, usual = (
        rng.uniform(0.5, 1, (order, 2)),
        rng.dirichlet(np.full(order, 5.0)),
        rng.integers(2, size=order),
    )
    cluster = rng.choice(order, ROWS, p=share)
    x = centre[cluster] + scale[cluster] * rng.normal(size=(ROWS, 2))
    return x, np.where(rng.random(ROWS) < 0.9, usual[cluster], 1 - usual[cluster])


def found(seed: int, first: int) -> dict[str, Any]:
    """Probabilities of the orders, and what they took."""
    before, (x, y), fitted = (
        process_time(),
        table(seed),
        StagedMixtureClassifier(max_order=8, random_state=seed),
    )
    if first:
        for rows in (slice(first), slice(first, None)):
            fitted.partial_fit(x[rows], y[rows], classes=[0, 1])
    else:
        fitted.fit(x, y)
    probabilities = dict(
        zip(map(int, fitted.orders_), map(float, fitted.order_posterior_), strict=True)
    )
    return {"seed": seed, "probabilities": probabilities, "cpu_seconds": process_time() - before}


def lines(results: list[dict[str, Any]]) -> list[str]:
    """A line of markdown for each table."""
    told = ["| clusters | most probable | probabilities above .01 | CPU s |", "|---|---|---|---|"]
    for each in results:
        shares = {int(order): share for order, share in each["probabilities"].items()}
        above = ", ".join(
            f"{order}: {share:.2f}" for order, share in shares.items() if share > 0.01
        )
        told.append(
            f"| {ORDERS[each['seed']]} | {max(shares, key=lambda order: shares[order])} | {above} "
            f"| {each['cpu_seconds']:.0f} |"
        )
    return told


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--first", type=int, default=0, help="rows of a call of their own")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(len(ORDERS)), help="tables")
    told = parser.parse_args()
    read = lambda: (
        [json.loads(line) for line in told.results.read_text().splitlines()]
        if told.results.exists()
        else []
    )
    done = {each["seed"] for each in read()}
    for seed in () if told.table else sorted(set(told.seeds) - done):
        line = json.dumps(found(seed, told.first))
        with told.results.open("a") as file:
            file.write(line + "\n")
    print(*lines(sorted(read(), key=lambda each: each["seed"])), sep="\n")


if __name__ == "__main__":
    main()
