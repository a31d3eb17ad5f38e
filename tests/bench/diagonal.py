"""What a row costs in the mixture of `zoo.staged_learning`, its clusters NumPyro's independent
Normals and ours:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    python -m tests.bench.diagonal

Nanoseconds a row, of the log density and of its gradient at thirty vectors side by side, medians of
seven.
"""

from collections.abc import Callable
from time import process_time
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array, random

from inference import Program
from inference.distributions import DiagonalNormal
from inference.reading.density import Split
from zoo.staged_learning import family

VECTORS, REPEATS, ROUNDS = 30, 20, 7
# rows, features, clusters
SHAPES = ((100, 2, 3), (500, 2, 3), (1000, 4, 3), (500, 10, 4), (5000, 10, 4))
KINDS: dict[str, Callable] = {
    "NumPyro": lambda mu, sigma: dist.Normal(mu, sigma).to_event(1),
    "ours": DiagonalNormal,
}


def seconds(function: Callable, z: Array) -> float:
    """The median processor time of one call, in seconds."""
    compiled, taken = jax.jit(function), []
    jax.block_until_ready(compiled(z))
    for _ in range(ROUNDS):
        started = process_time()
        for _ in range(REPEATS):
            jax.block_until_ready(compiled(z))
        taken.append((process_time() - started) / REPEATS)
    return float(np.median(taken))


def costs(kind: Callable, rows: int, features: int, clusters: int) -> tuple[float, float]:
    """The processor times of a density and of a gradient for one row, in nanoseconds."""
    r = np.random.default_rng(0)
    cluster: Any = lambda at: kind(at.where(0.0, 3.0), at.width(-0.5, 0.6))
    split = Split(
        Program(
            family(clusters, cluster=cluster),
            r.normal(size=(rows, features)),
            r.integers(2, size=rows),
        )
    )
    z = jax.vmap(split.draw)(random.split(random.key(0), VECTORS))
    density = lambda z: sum(split.densities(z))
    ways = jax.vmap(density), jax.vmap(jax.grad(density))
    value, gradient = (1e9 * seconds(way, z) / VECTORS / rows for way in ways)
    return value, gradient


def main() -> None:
    """The table."""
    jax.config.update("jax_enable_x64", True)
    print(
        "| rows | features | clusters | density, NumPyro | ours | gradient, NumPyro | ours |\n|"
        + "---|" * 7
    )
    for shape in SHAPES:
        (value, gradient), (our_value, our_gradient) = (
            costs(kind, *shape) for kind in KINDS.values()
        )
        print(
            "|",
            " | ".join(map(str, shape)),
            f"| {value:.0f} | {our_value:.0f} | {gradient:.0f} | {our_gradient:.0f} |",
        )


if __name__ == "__main__":
    main()
