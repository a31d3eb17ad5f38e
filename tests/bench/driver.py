"""What the driver costs over a bare `lax.scan`, next to NumPyro's own MCMC with its bar, in one
run.

    uv run python tests/bench/driver.py

One kernel, whose step takes about the stated time. Each round times the three in turn, without
their compilation; the ratios are medians over rounds, so that a machine whose speed drifts does not
matter. Driver: bar on a (pretended) terminal, checkpoint with its last save, the tree, defaults
otherwise.
"""

import contextlib
import io
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from inference import Driver

ROUNDS = 5
SECONDS = 6.0  # of the bare scan, a round


class State(NamedTuple):
    z: Array  # position
    rng_key: Array


class Busy(MCMCKernel):
    """A random walk whose step also does `work` small matrix products."""

    sample_field = "z"

    def __init__(self, work: int):
        self.work = work

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return State(jnp.zeros(10), rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, noise_key = random.split(state.rng_key)
        # of the state, or the compiler would do the work once for all steps
        matrix = jnp.eye(32) + 1e-3 * jnp.tanh(state.z[0])
        product = jax.lax.fori_loop(0, self.work, lambda _, m: m @ matrix / 1.01, matrix)
        return State(
            0.9 * state.z + random.normal(noise_key, (10,)) + 1e-20 * product[0, 0], rng_key
        )


class Terminal(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        return True


def bare_scan(kernel: Busy, steps: int):
    """The compiled scan that nothing can beat."""

    def run(state):
        def body(state, _):
            state = kernel.sample(state, (), {})
            return state, state.z

        return jax.lax.scan(body, state, length=steps)

    return jax.jit(run).lower(kernel.init(random.key(0), 0, None, (), {})).compile()


class Cost(NamedTuple):
    wall: float
    cpu: float  # of all threads; what other processes on the machine take does not count


def timed(function: Callable[[], Any], steps: int) -> Cost:
    """Seconds a step."""
    wall, cpu = perf_counter(), process_time()
    jax.block_until_ready(function())
    return Cost((perf_counter() - wall) / steps, (process_time() - cpu) / steps)


def draws_of(mcmc: MCMC):
    mcmc.run(random.key(0))
    return mcmc.get_samples()


def one_row(work: int) -> str:
    kernel = Busy(work)
    start = kernel.init(random.key(0), 0, None, (), {})
    probe = bare_scan(kernel, 2000)
    steps = min(
        int(SECONDS / min(timed(partial(probe, start), 2000).wall for _ in range(3))), 1_000_000
    )
    scan = bare_scan(kernel, steps)
    few = min(steps, 20_000)  # NumPyro's bar costs a Python step a step: fewer tell as much
    costs: dict[str, list[Cost]] = {"scan": [], "driver": [], "mcmc": []}
    for _ in range(ROUNDS):
        costs["scan"].append(timed(partial(scan, start), steps))
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(
                kernel, num_warmup=0, num_samples=100, checkpoint=os.path.join(folder, "run")
            )
            driver.run(0)  # compiles
            costs["driver"].append(timed(lambda driver=driver: driver.extend(steps), steps))
        mcmc = MCMC(kernel, num_warmup=0, num_samples=few)
        mcmc.run(random.key(0))  # compiles
        costs["mcmc"].append(timed(partial(draws_of, mcmc), few))
    cells = [f"{1e6 * statistics.median(cost.wall for cost in costs['scan']):.1f}"]
    for name in ("driver", "mcmc"):
        for clock in ("wall", "cpu"):
            pairs = zip(costs[name], costs["scan"], strict=True)
            cells.append(
                f"{statistics.median(getattr(one, clock) / getattr(scan, clock) for one, scan in pairs):.3f}"
            )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    os.environ.pop("CI", None)
    print("| scan, µs a step | Driver / scan, wall | CPU | numpyro.infer.MCMC / scan, wall | CPU |")
    print("|---|---|---|---|---|")
    for work in (0, 10, 70):
        with contextlib.redirect_stderr(Terminal()):
            row = one_row(work)
        print(row, flush=True)
