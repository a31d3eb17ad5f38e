"""CPU seconds of a sweep of `CoordinateAscent` beside an iteration of scikit-learn's
BayesianGaussianMixture, on one core:

    OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tests.bench.iqgme_speed

scikit-learn has no missing entries: its time is that of complete data. Both fit a Dirichlet process
mixture of 20 Gaussians, no labels.

    python -m tests.bench.iqgme_speed --rows 10000 100000 1000000      # by batches: seconds of a step, and memory, as rows grow
"""

import resource
import subprocess
import sys
import warnings
from time import process_time

import jax
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture

from inference import CoordinateAscent, Program
from zoo.iqgme import iqgme

SIZES = ((10_000, 30), (100_000, 20))
NUM_EXPERTS = 20


def data(num_rows: int, num_features: int, missing: float) -> np.ndarray:
    """Ten clusters; holes at random."""
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(10, num_features))
    x = centre[rng.integers(0, 10, num_rows)] + 0.5 * rng.normal(size=(num_rows, num_features))
    x[rng.random(x.shape) < missing] = np.nan
    return x


def seconds_of_peer(x: np.ndarray, few: int = 2, many: int = 12) -> float:
    """The seconds of one iteration of the peer: the difference of two fits."""
    times = []
    for number in (few, many):
        peer = BayesianGaussianMixture(
            n_components=NUM_EXPERTS, max_iter=number, tol=0.0, init_params="random", random_state=0
        )
        start = process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            peer.fit(x)
        times.append(process_time() - start)
    return (times[1] - times[0]) / (many - few)


def seconds_of_sweep(x: np.ndarray, dtype: str, repeats: int = 10) -> float:
    """The seconds of one compiled sweep, the least of three."""
    program, kernel = (
        Program(iqgme, x, num_experts=NUM_EXPERTS, expert=None, alpha=1.0),
        CoordinateAscent(iqgme, init="random", dtype=dtype),
    )
    reading, rows = kernel.read(program)
    state = kernel.init(jax.random.key(0), reading, rows)
    sweeps = jax.jit(
        lambda state, rows: jax.lax.fori_loop(
            0, repeats, lambda _, at: kernel.step(jax.random.key(0), at, reading, rows)[0], state
        )
    )
    jax.block_until_ready(sweeps(state, rows))
    times = []
    for _ in range(3):
        start = process_time()
        jax.block_until_ready(sweeps(state, rows))
        times.append((process_time() - start) / repeats)
    return min(times)


def batches(
    num_rows: int, num_features: int = 20, batch_size: int = 8192, steps: int = 100
) -> None:
    """A line of the table: of labelled rows, a quarter of whose entries are missing."""
    x = data(num_rows, num_features, 0.25)
    y = (np.nan_to_num(x[:, 0]) > 0).astype(int)
    program, kernel = (
        Program(iqgme, x, y, num_experts=NUM_EXPERTS),
        CoordinateAscent(iqgme, batch_size=batch_size),
    )
    start = process_time()
    reading, rows = kernel.read(program)
    state = kernel.init(jax.random.key(0), reading, rows)
    read = process_time() - start
    turn = lambda rows: lambda i, at: kernel.step(jax.random.key(i), at, reading, rows)[0]
    advance = jax.jit(lambda state, rows: jax.lax.fori_loop(0, steps, turn(rows), state))
    state = jax.block_until_ready(advance(state, rows))
    start = process_time()
    jax.block_until_ready(advance(state, rows))
    seconds, memory = (
        (process_time() - start) / steps,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    print(f"| {num_rows} | {read:.0f} s | {seconds:.3f} s | {memory:.2f} GiB |", flush=True)


def main() -> None:
    """A table; each row in one run."""
    if "--rows" in sys.argv:
        print(
            "| rows | reading them, and the start | step of 8192 rows | most memory "
            "|\n|---|---|---|---|",
            flush=True,
        )
        # a process each: memory is the most that it ever had
        for number in sys.argv[sys.argv.index("--rows") + 1 :]:
            subprocess.run(
                [sys.executable, "-m", "tests.bench.iqgme_speed", "--one", number], check=True
            )
        return
    if "--one" in sys.argv:
        return batches(int(sys.argv[-1]))
    sizes = SIZES[:1] if "--quick" in sys.argv else SIZES
    print(
        "| rows, features | scikit-learn, complete | dtype | sweep, complete | ratio | sweep, 25 % "
        "missing | ratio |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        peer = seconds_of_peer(data(*size, 0.0))
        for dtype in ("float64", "float32"):
            whole, holed = (
                seconds_of_sweep(data(*size, missing), dtype) for missing in (0.0, 0.25)
            )
            ratios = f"{whole:.3f} s | {whole / peer:.2f} | {holed:.3f} s | {holed / peer:.2f}"
            print(f"| {size[0]}, {size[1]} | {peer:.3f} s | {dtype} | {ratios} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
