"""What a sweep of BSVD costs: next to smurff on MovieLens, and by the number of entries.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with smurff --with "setuptools<80" python -m tests.bench.bsvd_speed peer    # CPU seconds a sweep, in turn, and their ratio
    uv run python -m tests.bench.bsvd_speed linear -o FOLDER                             # 1e5 to 1e7 entries: seconds, memory, a picture
    uv run python -m tests.bench.bsvd_speed births                                       # CPU seconds of a birth, on MovieLens
    uv run python -m tests.bench.bsvd_speed fit 20000                                    # of a fit of so many ratings, and its memory

All components are there at the start (births and deaths go on). smurff's sweep is the difference of
a long run and a short one.
"""

import resource
import subprocess
import sys
from pathlib import Path
from time import process_time

import matplotlib.pyplot as plt
import numpy as np

from gallery import BSVDCompleter
from gallery.datasets import load
from tests.bench.bsvd import ratings

ROUNDS, SWEEPS = 5, 10
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)


class Sweeper:
    """A compiled sweep and the state it goes on from."""

    def __init__(
        self,
        entries: tuple[np.ndarray, ...],
        shape: tuple[int, int],
        num_components: int,
        num_births: float | None = None,
    ):
        import jax
        import jax.numpy as jnp

        from inference import ConditionalGibbs
        from zoo.bsvd import bsvd

        row, column, value = (np.asarray(each) for each in entries)
        value = ((value - value.mean()) / value.std()).astype(np.float32)
        arguments = {
            "row": jnp.asarray(row, jnp.int32),
            "column": jnp.asarray(column, jnp.int32),
            "value": jnp.asarray(value),
        }
        settings = {"shape": shape, "num_components": num_components}
        kernel = ConditionalGibbs(bsvd, route="crossed", num_births=num_births)
        start = {"z": jnp.ones(num_components, jnp.int32)}
        self.state = kernel.init(jax.random.key(0), 0, start, (), arguments | settings)
        self.data = kernel.data((), arguments | settings)
        # the data are arguments
        none = {name: np.zeros(each.shape, each.dtype) for name, each in arguments.items()}
        step = lambda state, data: kernel.sample(state, (), none | settings, data)
        self.step = jax.jit(step).lower(self.state, self.data).compile()
        self.memory = self.step.memory_analysis().temp_size_in_bytes / len(row)  # an entry
        self.seconds(1)

    def seconds(self, sweeps: int) -> float:
        """CPU seconds a sweep."""
        started = process_time()
        for _ in range(sweeps):
            self.state = self.step(self.state, self.data)
        self.state.residual.block_until_ready()
        return (process_time() - started) / sweeps


def smurff_seconds(train, test, num_components: int, sweeps: int) -> float:
    """CPU seconds a sweep of smurff's BPMF."""
    import smurff  # ty: ignore[unresolved-import]
    from scipy.sparse import coo_matrix

    matrix = lambda rows, columns, values: coo_matrix(
        (values.astype(float), (rows, columns)), shape=(6040, 3952)
    )

    def run(number: int) -> float:
        started = process_time()
        settings = {"num_threads": 1, "verbose": 0, "seed": 1, "priors": ["normal", "normal"]}
        session = smurff.TrainSession(
            num_latent=num_components, burnin=1, nsamples=number, **settings
        )
        session.addTrainAndTest(matrix(*train), matrix(*test), smurff.FixedNoise(1.5))
        session.run()
        return process_time() - started

    return (run(1 + sweeps) - run(1)) / sweeps


def peer() -> None:
    """Medians over rounds in which the two take turns."""
    train, test = ratings(0)
    print("| components | smurff, CPU s a sweep | BSVD | ratio |\n|---|---|---|---|")
    for num_components in (20, 50):
        sweeper = Sweeper(train, (6040, 3952), num_components)
        pairs = np.array(
            [
                (smurff_seconds(train, test, num_components, SWEEPS), sweeper.seconds(SWEEPS))
                for _ in range(ROUNDS)
            ]
        )
        theirs, ours = np.median(pairs, axis=0)
        print(
            f"| {num_components} | {theirs:.3f} | {ours:.3f} | "
            f"{np.median(pairs[:, 1] / pairs[:, 0]):.2f} |",
            flush=True,
        )


def births() -> None:
    """CPU seconds of a birth or death, tried twice in each sweep and not at all, in turn."""
    train, _ = ratings(0)
    without, twice = (Sweeper(train, (6040, 3952), 50, number) for number in (0, 2))
    pairs = np.array([(without.seconds(3), twice.seconds(3)) for _ in range(ROUNDS)])
    ratio = (pairs[:, 1] - pairs[:, 0]) / 2 / pairs[:, 0]
    print(
        "| sweep without births, CPU s | a birth, in sweeps | bytes an entry, without | with "
        "|\n|---|---|---|---|"
    )
    print(
        f"| {np.median(pairs[:, 0]):.3f} | {np.median(ratio):.2f} | {without.memory:.0f} | "
        f"{twice.memory:.0f} |"
    )


def one_size(num_entries: int) -> None:
    """Seconds a sweep and the peak of memory, on entries at random places."""
    rng = np.random.default_rng(0)
    shape = num_entries // 150, num_entries // 250
    cells = np.unique(rng.integers(0, shape[0] * shape[1], num_entries))
    entries = (
        *(place.astype(np.int32) for place in np.divmod(cells, shape[1])),
        rng.normal(size=len(cells)).astype(np.float32),
    )
    del cells
    seconds = Sweeper(entries, shape, 50).seconds(3)
    print(len(entries[0]), seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def linear(folder: Path) -> None:
    """A process for each size, so that each has a peak of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    print(
        "| entries | rows + columns | CPU s a sweep | µs an entry | peak memory, GiB "
        "|\n|---|---|---|---|---|"
    )
    found = []
    for size in SIZES:
        command = [sys.executable, "-m", "tests.bench.bsvd_speed", "one", str(size)]
        entries, seconds, memory = map(
            float,
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(),
        )
        found.append((entries, seconds, memory))
        print(
            f"| {entries:.0f} | {size // 150 + size // 250} | {seconds:.3f} | "
            f"{1e6 * seconds / entries:.2f} | {memory:.2f} |",
            flush=True,
        )
    entries, seconds, memory = np.array(found).T
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.loglog(entries, seconds, "o-", label="BSVD, 50 components")
    left.loglog(entries, seconds[-1] * entries / entries[-1], color="0.7", lw=1, label="linear")
    left.set(xlabel="entries", ylabel="CPU seconds a sweep")
    left.legend(frameon=False)
    right.semilogx(entries, memory, "o-")
    right.set(xlabel="entries", ylabel="peak memory (GiB)", ylim=(0, None))
    figure.savefig(folder / "bsvd_linear.png", dpi=150)


def fit(num_entries: int) -> None:
    """CPU seconds, peak memory and predictions of `BSVDCompleter` at its defaults."""
    data, rng = load("movielens_1m"), np.random.default_rng(0)
    order = rng.permutation(len(data["rows"]))
    some, others = (
        tuple(data[name][which] for name in ("rows", "cols", "values"))
        for which in (order[:num_entries], order[num_entries : num_entries + 20_000])
    )
    started = process_time()
    completer = BSVDCompleter((6040, 3952), random_state=0).fit(some)
    seconds = process_time() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    mean, std = completer.predict(*others[:2], return_std=True)
    error = others[2] - np.clip(mean, 1, 5)
    inside = np.mean(np.abs(others[2] - mean) < 1.645 * std)
    print(
        "| CPU s of the fit | peak memory, GiB | RMSE | in the 90 % interval | rank "
        "|\n|---|---|---|---|---|\n"
        f"| {seconds:.0f} | {memory:.1f} | {np.sqrt(np.mean(error**2)):.3f} | {inside:.3f} | "
        f"{completer.rank_} |"
    )


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one_size(int(sys.argv[2]))
    elif sys.argv[1] == "fit":
        fit(int(sys.argv[2]))
    elif sys.argv[1] == "births":
        births()
    elif sys.argv[1] == "linear":
        linear(Path(sys.argv[sys.argv.index("-o") + 1]))
    else:
        peer()
