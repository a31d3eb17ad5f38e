"""What the driver costs over a bare `lax.scan`, next to NumPyro's own MCMC with its bar, in one run.

    uv run python tests/bench/driver.py

One kernel, whose step takes about the stated time. Each round times the three in turn; the ratios are medians over rounds,
so that a machine whose speed drifts does not matter. Driver: bar on a (pretended) terminal, checkpoint, defaults otherwise.
"""

import contextlib
import io
import os
import statistics
import tempfile
from functools import partial
from time import perf_counter
from typing import NamedTuple

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
        matrix = jnp.eye(32) + 1e-3 * jnp.tanh(state.z[0])  # of the state, or the compiler would do the work once for all steps
        product = jax.lax.fori_loop(0, self.work, lambda _, m: m @ matrix / 1.01, matrix)
        return State(0.9 * state.z + random.normal(noise_key, (10,)) + 1e-20 * product[0, 0], rng_key)


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


def timed(function) -> float:
    started = perf_counter()
    jax.block_until_ready(function())
    return perf_counter() - started


def draws_of(mcmc: MCMC):
    mcmc.run(random.key(0))
    return mcmc.get_samples()


def one_row(work: int) -> str:
    kernel = Busy(work)
    probe = bare_scan(kernel, 2000)
    start = kernel.init(random.key(0), 0, None, (), {})
    each = min(timed(lambda: probe(start)) for _ in range(3)) / 2000
    steps = int(SECONDS / each)
    scan = bare_scan(kernel, steps)
    times: dict[str, list[float]] = {"scan": [], "driver": [], "mcmc": []}
    few = min(steps, int(SECONDS / (each + 250e-6)))  # NumPyro's bar costs that much a step: fewer steps tell as much
    for _ in range(ROUNDS):
        times["scan"].append(timed(lambda: scan(start)) / steps)
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(kernel, num_warmup=0, num_samples=steps, checkpoint=os.path.join(folder, "run"))
            tree = driver.run(0)
            times["driver"].append((tree.attrs["sampling_time"] - tree.attrs["compile_time"]) / steps)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=few)
        mcmc.run(random.key(0))  # compiles
        times["mcmc"].append(timed(partial(draws_of, mcmc)) / few)
    ratio = lambda name: statistics.median(a / b for a, b in zip(times[name], times["scan"], strict=True))
    return f"| {1e6 * statistics.median(times['scan']):.1f} | {ratio('driver'):.3f} | {ratio('mcmc'):.2f} |"


if __name__ == "__main__":
    os.environ.pop("CI", None)
    print("| scan, µs a step | driver with bar and checkpoint / scan | numpyro.infer.MCMC with bar / scan |")
    print("|---|---|---|")
    for work in (0, 10, 30):
        with contextlib.redirect_stderr(Terminal()):
            row = one_row(work)
        print(row, flush=True)
