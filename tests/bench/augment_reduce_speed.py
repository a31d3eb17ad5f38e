"""Augment and reduce, what a step costs: for more and more classes, next to a plain step, a dense
optimiser and the exact softmax.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.augment_reduce_speed [--least 1000] [--most 1000000] [--features
    50,500] [--only shared,plain]

128 rows and 100 classes a step, microseconds of CPU, medians of rounds that take turns. Classes are
shared by the batch, or drawn for each row of it. The plain step is JAX as one would write it by
hand: rows gathered and scattered by `.at`, nothing read off a model, no prior, compiled as JAX
compiles by default. The NumPy step is the same, tuned: weights and squares lie in one table, whose
rows are gathered, moved and scattered once, each row once. The floor: multiplications of the same
size, and a copy of as many bytes as the rows of the weights and of their squares have.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference import AugmentReduce, Driver
from zoo.augment_reduce import augment_reduce

__all__ = ["main"]

NAMES = (
    "shared",
    "no prior",
    "plain",
    "NumPy",
    "floor",
    "of each row",
    "plain, of each row",
    "NumPy, of each row",
    "floor, of each row",
    "dense",
    "exact softmax",
)
ROWS, CLASSES, NUM_DATA, ROUNDS = 128, 100, 2000, 7
LEAST_SECONDS = 0.2  # of a timed call


def of_driver(
    x: np.ndarray, y: np.ndarray, num_classes: int, own_negatives: bool, **options
) -> Callable[[int], float]:
    """Steps of the kernel in the driver's own compiled loop."""
    driver = Driver(
        AugmentReduce(augment_reduce, own_negatives=own_negatives),
        num_warmup=1,
        num_samples=1,
        progress_bar=False,
    )
    driver.run(0, x, y, num_classes=num_classes, batch_size=ROWS, num_negatives=CLASSES, **options)
    session = driver._last.session  # ty: ignore[unresolved-attribute]
    [loop] = session.compiled.values()
    state = [session.lanes[0]]

    def run(steps: int) -> float:
        started = process_time()
        state[0], _, _ = loop.chunk(state[0], steps)
        return (process_time() - started) / steps

    return run


def plain(
    x: Array, y: Array, state: tuple[Array, ...], key: Array, own_negatives: bool = False
) -> tuple[Array, ...]:
    """One step on touched rows, by hand."""
    w, b, square_w, square_b, rate = state
    row_key, class_key = random.split(key)
    rows = random.randint(row_key, (ROWS,), 0, len(y))
    classes = random.randint(
        class_key, (CLASSES, ROWS) if own_negatives else (CLASSES, 1), 0, len(w)
    )
    z, chosen = x[rows], y[rows]
    ids = jnp.concatenate([chosen, classes.ravel()])
    scale = len(w) / CLASSES

    def gaps(w: Array, b: Array) -> Array:
        own = jnp.sum(w[:ROWS] * z, 1) + b[:ROWS]
        others = w[ROWS:].reshape(*classes.shape, -1)
        utility = jnp.einsum("srd,rd->sr", others, z) if own_negatives else others[:, 0] @ z.T
        return jnp.where(
            classes == chosen, -jnp.inf, utility + b[ROWS:].reshape(classes.shape) - own
        )

    own_rate = 0.5 * rate[rows] + 0.5 * (1 + scale * jnp.exp(gaps(w[ids], b[ids])).sum(0))
    slopes = jax.grad(
        lambda w, b: len(y) / ROWS * -jnp.sum(scale * jnp.exp(gaps(w, b)) / own_rate), (0, 1)
    )(w[ids], b[ids])
    order = jnp.argsort(ids)  # a row that is there twice moves once, by the sum of its slopes
    slot = jnp.zeros_like(ids).at[order].set(jnp.cumsum(jnp.diff(ids[order], prepend=-1) != 0) - 1)
    moved = []
    for whole, square, slope in zip((w, b), (square_w, square_b), slopes, strict=True):
        merged = jnp.zeros_like(slope).at[slot].add(slope)[slot]
        new = 0.1 * merged**2 + 0.9 * square[ids]
        moved.append(
            (
                whole.at[ids].set(whole[ids] + 0.02 * merged / (1 + jnp.sqrt(new))),
                square.at[ids].set(new),
            )
        )
    return moved[0][0], moved[1][0], moved[0][1], moved[1][1], rate.at[rows].set(own_rate)


def dense(x: Array, y: Array, state: tuple[Array, ...], key: Array) -> tuple[Array, ...]:
    """The same bound, differentiated in all weights, which an adaptive optimiser then moves."""
    w, b, square_w, square_b, rate = state
    row_key, class_key = random.split(key)
    rows, classes = (
        random.randint(row_key, (ROWS,), 0, len(y)),
        random.randint(class_key, (CLASSES,), 0, len(w)),
    )
    z, chosen = x[rows], y[rows]

    def bound(w: Array, b: Array) -> Array:
        gap = w[classes] @ z.T + b[classes][:, None] - jnp.sum(w[chosen] * z, 1) - b[chosen]
        return -jnp.sum(jnp.exp(jnp.where(classes[:, None] == chosen, -jnp.inf, gap)) / rate[rows])

    return (*_all_moved(jax.grad(bound, (0, 1))(w, b), w, b, square_w, square_b), rate)


def exact(x: Array, y: Array, state: tuple[Array, ...], key: Array) -> tuple[Array, ...]:
    """The softmax over all classes."""
    w, b, square_w, square_b, rate = state
    rows = random.randint(key, (ROWS,), 0, len(y))

    def log_likelihood(w: Array, b: Array) -> Array:
        utility = x[rows] @ w.T + b
        return jnp.sum(
            jnp.take_along_axis(utility, y[rows][:, None], 1)[:, 0]
            - jax.nn.logsumexp(utility, axis=1)
        )

    return (*_all_moved(jax.grad(log_likelihood, (0, 1))(w, b), w, b, square_w, square_b), rate)


def _all_moved(
    slopes: tuple[Array, Array], w: Array, b: Array, square_w: Array, square_b: Array
) -> tuple[Array, ...]:
    square_w, square_b = (
        0.1 * slope**2 + 0.9 * square
        for slope, square in zip(slopes, (square_w, square_b), strict=True)
    )
    move = lambda slope, square: 0.02 * slope / (1 + jnp.sqrt(square))
    return w + move(slopes[0], square_w), b + move(slopes[1], square_b), square_w, square_b


def by_hand(
    step: Callable, x: np.ndarray, y: np.ndarray, num_classes: int
) -> Callable[[int], float]:
    """Steps of a function in a compiled loop that owns its arrays."""
    zeros = (jnp.zeros(shape) for shape in ((num_classes, x.shape[1]), num_classes) * 2)
    state = [(*zeros, jnp.full(len(y), float(num_classes)))]
    z, chosen = jnp.asarray(x), jnp.asarray(y)

    @partial(jax.jit, donate_argnums=0)
    def many(state: tuple[Array, ...], steps: Array, z: Array, chosen: Array) -> tuple[Array, ...]:
        return jax.lax.fori_loop(
            0, steps, lambda t, at: step(z, chosen, at, random.fold_in(random.key(0), t)), state
        )

    def run(steps: int) -> float:
        started = process_time()
        state[0] = jax.block_until_ready(many(state[0], jnp.asarray(steps), z, chosen))
        return (process_time() - started) / steps

    return run


def by_numpy(
    x: np.ndarray, y: np.ndarray, num_classes: int, own_negatives: bool
) -> Callable[[int], float]:
    """Steps in NumPy on one table [class, 2 * (feature + 1)] of weights, biases and squares."""
    rng, half = np.random.default_rng(0), x.shape[1] + 1
    table = np.zeros((num_classes, 2 * half), np.float32)
    rate, every = np.full(len(y), num_classes, np.float32), np.pad(x, ((0, 0), (0, 1)))
    every[:, -1] = 1
    shape, scale = (
        (CLASSES, ROWS) if own_negatives else (CLASSES, 1),
        np.float32(num_classes / CLASSES),
    )

    def step() -> None:
        rows, classes = rng.integers(len(y), size=ROWS), rng.integers(num_classes, size=shape)
        z, chosen = every[rows], y[rows]
        ids, slot = np.unique(np.append(chosen, classes), return_inverse=True)
        touched = table[ids]
        value, square = touched[:, :half], touched[:, half:]
        others = value[slot[ROWS:]]
        utility = (
            (others.reshape(*shape, half) * z).sum(-1) if own_negatives else others @ z.T
        ) - np.einsum("rd,rd->r", value[slot[:ROWS]], z)
        weight = scale * np.exp(np.where(classes == chosen, -np.inf, utility))
        rate[rows] = 0.5 * rate[rows] + 0.5 * (1 + weight.sum(0))
        slope = np.float32(-len(y) / ROWS) * weight / rate[rows]
        of_others = (slope[..., None] * z).reshape(-1, half) if own_negatives else slope @ z
        parts = np.concatenate([-slope.sum(0)[:, None] * z, of_others])
        ends = np.cumsum(np.bincount(slot))
        merged = np.add.reduceat(parts[np.argsort(slot)], np.append(0, ends[:-1]))
        new = np.float32(0.1) * merged**2 + np.float32(0.9) * square
        value += np.float32(0.02) * merged / (1 + np.sqrt(new))
        square[:] = new
        table[ids] = touched

    def run(steps: int) -> float:
        started = process_time()
        for _ in range(steps):
            step()
        return (process_time() - started) / steps

    return run


def floor(num_features: int, own_negatives: bool = False) -> Callable[[int], float]:
    """What the arithmetic and the bytes of a step cost by themselves."""
    z = np.ones((ROWS, num_features), np.float32)
    w = np.ones(
        (ROWS, CLASSES, num_features) if own_negatives else (CLASSES, num_features), np.float32
    )
    slopes = np.empty_like(w)
    asked = ROWS + CLASSES * (ROWS if own_negatives else 1)
    rows, into = (np.ones((2 * asked, num_features), np.float32) for _ in range(2))

    def run(steps: int) -> float:
        started = process_time()
        for _ in range(steps):
            if own_negatives:
                gap = w @ z[:, :, None]
                np.multiply(gap, z[:, None], out=slopes)
            else:
                gap = w @ z.T
                np.matmul(gap, z)
            np.copyto(into, rows)
        return (process_time() - started) / steps

    return run


def times(runs: dict[str, Callable[[int], float]]) -> dict[str, float]:
    """Microseconds a step, medians of rounds in which all take turns."""
    counts = {
        name: max(int(LEAST_SECONDS / max(run(1), run(1), 1e-6)), 1) for name, run in runs.items()
    }
    found = [{name: run(counts[name]) for name, run in runs.items()} for _ in range(ROUNDS)]
    return {name: 1e6 * median(one[name] for one in found) for name in runs}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=float, default=1e6)
    parser.add_argument("--features", default="50,500")
    parser.add_argument("--least", type=float, default=1e3, help="classes")
    parser.add_argument(
        "--only",
        default=",".join(NAMES),
        help="columns; a million classes of 500 features take 4 GB in each of them",
    )
    told = parser.parse_args()
    names = told.only.split(",")
    print("| classes | features | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 2) + "|")
    for features in map(int, told.features.split(",")):
        for num_classes in (
            k for k in (1_000, 10_000, 100_000, 1_000_000) if told.least <= k <= told.most
        ):
            rng = np.random.default_rng(0)
            x, y = (
                rng.normal(size=(NUM_DATA, features)).astype(np.float32),
                rng.integers(0, num_classes, NUM_DATA).astype(np.int32),
            )
            made = {"no prior": partial(of_driver, x, y, num_classes, False, prior_scale=None)}
            for own_negatives, of in ((False, "shared"), (True, "of each row")):
                suffix = ", of each row" if own_negatives else ""
                made[of] = partial(of_driver, x, y, num_classes, own_negatives)
                made[f"plain{suffix}"] = partial(
                    by_hand, partial(plain, own_negatives=own_negatives), x, y, num_classes
                )
                made[f"NumPy{suffix}"] = partial(by_numpy, x, y, num_classes, own_negatives)
                made[f"floor{suffix}"] = partial(floor, features, own_negatives)
            if num_classes * features <= 5e6:
                made |= {
                    "dense": partial(by_hand, dense, x, y, num_classes),
                    "exact softmax": partial(by_hand, exact, x, y, num_classes),
                }
            runs = {name: make() for name, make in made.items() if name in names}
            found = times(runs)
            print(
                f"| {num_classes} | {features} | "
                + " | ".join(f"{found[name]:.0f}" if name in found else "" for name in names)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
