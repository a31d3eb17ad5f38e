"""Archipelago's number of rejected points: effective draws per CPU second of `LatentHistory` beside
NUTS, and of the literal sampler.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.archipelago_speed
    uv run python -m tests.bench.archipelago_speed --growth          # time and memory by the number of points

Side by side, on the same rows of a pinwheel: with hyper-parameters that are known and the same for
both, of the paper's process, and with learned ones, where ours has an amplitude and a length scale
for each class and the literal sampler one for all, of a process that goes on after a rejection with
probability .9. Seconds are those of the sweeps that are counted, compilation and warm-up left out.
"""

import sys
from resource import RUSAGE_SELF, getrusage
from time import process_time

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.infer import NUTS, init_to_median
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from gallery.archipelago import sampler, start
from inference import Driver, LatentHistory
from tests.bench.archipelago_literal import Hyper, pinwheel_chain, trace
from tests.bench.archipelago_protocols import Cell, draw
from zoo.archipelago import archipelago


def ours(
    data: str,
    labels: int,
    learn: bool,
    persistence: float,
    num_warmup: int = 500,
    num_sweeps: int = 2000,
) -> tuple[np.ndarray, float]:
    """M after each sweep, and the CPU seconds of these sweeps."""
    x, y, *_ = draw(Cell(data, labels), seed=0)
    num_classes, hyper = int(y.max()) + 1, Hyper()
    deviation = x.std(0, ddof=1)
    known = {
        "amplitude": jnp.full(num_classes, hyper.amplitude),
        "lengthscale": jnp.full((num_classes, 1), hyper.length),
        "mean": jnp.asarray(x.mean(0)),
        "scale": jnp.asarray(deviation),
        "root": jnp.linalg.cholesky(jnp.corrcoef(x.T)),
    }
    model = archipelago if learn else handlers.condition(archipelago, known)
    kernel = sampler() if learn else LatentHistory(model)
    driver = Driver(kernel, num_warmup=num_warmup, num_samples=1, jit_model_args=True)
    given = {"num_classes": num_classes, "capacity": 64, "persistence": persistence}
    first = {
        name: values
        for name, values in start(1, x, y, num_classes, 64).items()
        if learn or name not in known
    }
    driver.run(0, jnp.asarray(x), jnp.asarray(y), init_params=first, **given)
    driver.extend(1)  # compiled now
    before = process_time()
    tree = driver.extend(num_sweeps)
    return tree.posterior["num_rejected"].values[0, -num_sweeps:], process_time() - before


def milliseconds(kernel, state, args: tuple, given: dict, num_sweeps: int = 5) -> float:
    """CPU time of a sweep, compilation left out, the median."""
    sweep, times = jax.jit(lambda state: kernel.sample(state, args, given)), []
    state = jax.block_until_ready(sweep(state))
    for _ in range(num_sweeps):
        before = process_time()
        state = jax.block_until_ready(sweep(state))
        times.append(1e3 * (process_time() - before))
    return float(np.median(times))


def growth(sizes: tuple[int, ...] = (125, 250, 500, 1000), num_classes: int = 3) -> None:
    """Prints what sweeps of the history alone, of functions and scales as well, and of NUTS
    cost, and the most memory so far.
    """
    print(
        "| points | of them rows | used slots | ms of history | of a move of it, / points^2 | ms "
        "of a sweep, / points^3 | NUTS | GiB |"
    )
    print("|" + "---|" * 8)
    for size in sizes:
        num_rows, capacity = size // 5, size - size // 5
        x = random.normal(random.key(size), (num_rows, 2))
        y = jnp.where(
            jnp.arange(num_rows) < 4 * num_classes, jnp.arange(num_rows) % num_classes, -1
        )
        values = {
            "num_rejected": 3 * capacity // 4,
            "amplitude": jnp.full(num_classes, 2.0),
            "lengthscale": jnp.full((num_classes, 1), 0.8),
        }
        base = {"mean": jnp.zeros(2), "scale": jnp.ones(2), "root": jnp.eye(2)}
        given = {"num_classes": num_classes, "capacity": capacity}
        beside, found = {**given, GIBBS_SITES_KWARG: base}, []
        for options in ({"num_steps": 0, "num_trajectories": 0}, {}):
            kernel = LatentHistory(archipelago, **options)
            found.append(
                milliseconds(
                    kernel, kernel.init(random.key(0), 0, values, (x, y), beside), (x, y), beside
                )
            )
        history = (
            random.normal(random.key(1), (capacity, 2)),
            jnp.zeros((capacity, num_classes)),
            jnp.zeros((num_rows, num_classes)),
        )
        held = values | dict(zip(("rejected", "rejected_noise", "noise"), history, strict=True))
        nuts = NUTS(
            handlers.condition(archipelago, held), init_strategy=init_to_median, max_tree_depth=4
        )
        found.append(
            milliseconds(nuts, nuts.init(random.key(0), 10, None, (x, y), given), (x, y), given)
        )
        moves = LatentHistory(archipelago).num_rounds * capacity + values["num_rejected"]
        memory = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
        told = f"{found[0]:.0f} | {1e9 * found[0] / moves / size**2:.1f}e-9"
        told += f" | {found[1]:.0f}, {1e6 * found[1] / size**3:.1f}e-6 | {found[2]:.0f}"
        print(
            f"| {size} | {num_rows} | {values['num_rejected']} | {told} | {memory:.2f} |",
            flush=True,
        )


def effective() -> None:
    """Prints the table of effective draws."""
    print(
        "| data, 4 labels a class | hyper-parameters | sampler | mean M | CPU ms a sweep | "
        "effective draws of M | per CPU second |"
    )
    print("|" + "---|" * 7)
    for data, learn in (("3 arms", False), ("5 arms", False), ("3 arms", True), ("5 arms", True)):
        persistence = 0.9 if learn else 1.0
        literal = trace(pinwheel_chain(data, 4, learn, persistence), 300, 2000)
        for name, (found, seconds) in (
            ("literal", literal),
            ("LatentHistory", ours(data, 4, learn, persistence)),
        ):
            effective = float(az.ess(found[None].astype(float)))
            told = (
                f"{found.mean():.1f} | {1e3 * seconds / len(found):.1f} | {effective:.0f} | "
                f"{effective / seconds:.2f}"
            )
            print(f"| {data} | {'learned' if learn else 'known'} | {name} | {told} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    growth() if "--growth" in sys.argv else effective()
