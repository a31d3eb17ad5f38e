"""BSVD on matrices of known rank: what it recovers, which rank it finds, and how few entries it
needs if it may choose them.

    uv run python -m tests.bench.bsvd_recovery recovery   # Figures 5.2, 5.3: noise-free matrices
                                                          recovered, by rank and observed entries
    uv run python -m tests.bench.bsvd_recovery rank       # 20 dB: the 90 % interval of the rank,
                                                          from two starts
    uv run python -m tests.bench.bsvd_recovery active     # Figures 5.4, 5.5: entries needed, chosen
                                                          by chance, deviation, pivoted Cholesky

Matrices are 50 x 50, products of two factors with independent standard Normal entries. All cells
are entries of the model, and `counts` says which are observed, so that one compiled sweep serves
every matrix; the trials of a row of a table go through it together, in float64. `-n 2` makes two
trials in place of ten; numbers before it, as in `rank 9 10`, are the ranks to look at, of
`recovery` and `rank`.
"""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from gallery._suggest import most_informative
from inference import ConditionalGibbs
from zoo.bsvd import bsvd

__all__ = ["Matrices", "Sampler", "draw_matrices"]

SIZE = 50
NUM_COMPONENTS = 50
NUCLEAR = {  # matrices of 10 recovered by the smallest nuclear norm
    **{(2, 0.3): 2, (2, 0.5): 10, (2, 0.7): 10},
    **{(5, 0.3): 0, (5, 0.5): 7, (5, 0.7): 10},
    **{(10, 0.3): 0, (10, 0.5): 0, (10, 0.7): 9},
}


class Sampler:
    """Chains of BSVD on matrices of one size, a chain each."""

    def __init__(
        self, a: float = 1.0, b: float = 1.0, size: int = SIZE, num_components: int = NUM_COMPONENTS
    ):
        row, column = (index.ravel() for index in np.indices((size, size)))
        zero = jnp.zeros(size * size)
        places = {"row": row, "column": column, "shape": (size, size)}
        self.arguments = {
            **places,
            "value": zero,
            "counts": zero == 0,
            "num_components": num_components,
            "a": a,
            "b": b,
        }
        self.kernel = ConditionalGibbs(bsvd, route="crossed")
        self.start = self.kernel.init(random.key(0), 0, None, (), self.arguments)
        self.data = self.kernel.data((), self.arguments)
        self._many = jax.jit(jax.vmap(self._run, in_axes=(0, 0, 0, None)), static_argnums=3)

    def states(self, num_matrices: int, num_on: int, seed: int = 0):
        """As many states, with so many components switched on."""
        states = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_matrices, *leaf.shape)), self.start
        )
        width = self.arguments["num_components"]
        on = jnp.broadcast_to(jnp.arange(width) < num_on, (num_matrices, width))
        values = {**states.values, "z": on.astype(states.values["z"].dtype)}
        return states._replace(values=values, rng_key=random.split(random.key(seed), num_matrices))

    def _run(self, state, value, counts, num_sweeps):
        data = {
            **self.data,
            "arguments": {**self.data["arguments"], "value": value, "counts": counts},
        }

        def sweep(state, _):
            state = self.kernel.sample(state, (), self.arguments, data)
            values = state.values
            eta = (values["u"] * (values["s"] * values["z"])) @ values["v"].T + values["intercept"]
            eta = eta + values["row_weights"] + values["column_weights"].T
            return state, {
                "eta": eta.ravel(),
                "rank": jnp.sum(values["z"]),
                "alpha": values["alpha"],
            }

        return jax.lax.scan(sweep, state, length=num_sweeps)

    def run(self, states, values: np.ndarray, counts: np.ndarray, num_sweeps: int):
        """States and draws {eta [matrix, draw, cell], rank, alpha} after more sweeps; `values`,
        `counts` are [matrix, cell].
        """
        mean = np.average(values, axis=1, weights=counts)[:, None]
        scale = np.sqrt(np.average((values - mean) ** 2, axis=1, weights=counts))[:, None]
        states, draws = self._many(
            states, jnp.asarray((values - mean) / scale), jnp.asarray(counts), num_sweeps
        )
        draws = {name: np.asarray(draw) for name, draw in draws.items()}
        return states, draws | {
            "eta": draws["eta"] * scale[..., None] + mean[..., None],
            "alpha": draws["alpha"] / scale**2,
        }


class Matrices:
    """The truth, and what is seen of it."""

    def __init__(self, truth: np.ndarray, seen: np.ndarray):
        self.truth, self.seen = truth, seen

    def error(self, found: np.ndarray) -> np.ndarray:
        """Relative, of each matrix."""
        return np.linalg.norm(found - self.truth, axis=1) / np.linalg.norm(self.truth, axis=1)


def draw_matrices(rank: int, num: int, decibel: float | None = None, seed: int = 0) -> Matrices:
    """`num` matrices, as rows; without noise where `decibel` is None."""
    rng = np.random.default_rng([seed, rank])
    left, right = rng.normal(size=(2, num, SIZE, rank))
    truth = (left @ right.transpose(0, 2, 1)).reshape(num, -1)
    noise = (
        0
        if decibel is None
        else np.sqrt(np.mean(truth**2, axis=1, keepdims=True) / 10 ** (decibel / 10))
    )
    return Matrices(truth, truth + noise * rng.normal(size=truth.shape))


def some_cells(num: int, share: float, seed: int = 0) -> np.ndarray:
    """Which cells are observed, [matrix, cell]."""
    rng = np.random.default_rng([seed, 1])
    return np.array([rng.permutation(SIZE * SIZE) < round(share * SIZE * SIZE) for _ in range(num)])


def recovery(num: int, ranks: list[int]) -> None:
    """Matrices of `num` recovered to 1e-3, for three priors."""
    print(
        "| rank | observed | nuclear norm, of 10 | a = 1, b = 1 | a = 1, b = 10 | a = 10, b = 1 "
        "|\n|---|---|---|---|---|---|"
    )
    samplers = [Sampler(a, b) for a, b in ((1.0, 1.0), (1.0, 10.0), (10.0, 1.0))]
    for (rank, share), nuclear in NUCLEAR.items():
        if rank not in ranks:
            continue
        matrices, counts = draw_matrices(rank, num), some_cells(num, share)
        found = []
        for sampler in samplers:
            states, _ = sampler.run(sampler.states(num, 10), matrices.seen, counts, 400)
            _, draws = sampler.run(states, matrices.seen, counts, 100)
            found.append(int(np.sum(matrices.error(draws["eta"].mean(1)) < 1e-3)))
        print(f"| {rank} | {share} | {nuclear} | {' | '.join(map(str, found))} |", flush=True)


def rank(num: int, ranks: list[int]) -> None:
    """Posterior of the rank with noise, from two starts."""
    print(
        "| rank | inside the 90 % interval, from 0 | from 20 | mean rank, from 0 | from 20 "
        "|\n|---|---|---|---|---|"
    )
    sampler = Sampler()
    for true in ranks:
        matrices, counts = draw_matrices(true, num, 20.0), some_cells(num, 0.7)
        inside, means = [], []
        for num_on in (0, 20):
            states, _ = sampler.run(sampler.states(num, num_on), matrices.seen, counts, 300)
            _, draws = sampler.run(states, matrices.seen, counts, 200)
            low, high = np.quantile(draws["rank"], [0.05, 0.95], axis=1)
            inside.append(int(np.sum((low <= true) & (true <= high))))
            means.append(draws["rank"].mean())
        print(
            f"| {true} | {inside[0]} of {num} | {inside[1]} of {num} | {means[0]:.2f} | "
            f"{means[1]:.2f} |",
            flush=True,
        )


def chosen(
    method: str, draws: dict[str, np.ndarray], counts: np.ndarray, n: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """The next n cells of each matrix."""
    for eta, alpha, is_seen in zip(draws["eta"], draws["alpha"], counts, strict=True):
        left = np.flatnonzero(~is_seen)
        if method == "by chance":
            yield rng.choice(left, n, replace=False)
        else:
            yield left[
                most_informative(
                    eta[:, left],
                    float(np.mean(1 / alpha)),
                    n,
                    is_correlated=method == "pivoted Cholesky",
                )
            ]


def active(num: int, step: int = 50) -> None:
    """Entries until the error is below a tenth, median of the trials."""
    methods = ("by chance", "largest deviation", "pivoted Cholesky")
    print(f"| noise | rank | {' | '.join(methods)} |\n|{'---|' * (2 + len(methods))}")
    sampler = Sampler(num_components=20)
    for decibel in (None, 20.0, 10.0):
        for true in (1, 5, 10):
            matrices, needed = draw_matrices(true, num, decibel), []
            for method in methods:
                rng, counts = np.random.default_rng(0), some_cells(num, step / SIZE**2)
                states, first = sampler.states(num, 3), np.full(num, SIZE**2)
                while counts[0].sum() < SIZE**2 and (first == SIZE**2).any():
                    states, _ = sampler.run(states, matrices.seen, counts, 60)
                    states, draws = sampler.run(states, matrices.seen, counts, 100)
                    is_good = matrices.error(draws["eta"].mean(1)) < 0.1
                    first = np.where(is_good, np.minimum(first, counts.sum(1)), first)
                    for is_seen, cells in zip(
                        counts, chosen(method, draws, counts, step, rng), strict=True
                    ):
                        is_seen[cells] = True
                needed.append(f"{np.median(first):.0f}")
            print(
                f"| {'none' if decibel is None else f'{decibel:.0f} dB'} | {true} | "
                f"{' | '.join(needed)} |",
                flush=True,
            )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    what, *words = sys.argv[1:]
    before, number = (
        (words[: words.index("-n")], int(words[words.index("-n") + 1]))
        if "-n" in words
        else (words, 10)
    )
    if what == "active":
        active(number)
    else:
        {"recovery": recovery, "rank": rank}[what](
            number, list(map(int, before)) or list(range(1, 11))
        )
