"""Which of Archipelago's predictions is the better calibrated: with where a new row lies as
evidence, or without, as in the paper.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.archipelago_calibration

Data are drawn from the model itself, parameters included, so that of the exact posterior's
forecasts the right ones have the better log score, and of rows that are given a probability this
share is of the class. Rows come as the process makes them; the first are learned from, with some of
their labels, the rest are forecast. All data sets run at once with the same capacity, which is to
be enough for each: to leave out those that want more would select among them. Hence a process that
ends sooner than by default.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import NUTS, Gibbs

from inference import LatentHistory, Program
from zoo.archipelago import archipelago, predict, simulate

NUM_SETS, NUM_ROWS, NUM_NEW, LABELLED = 600, 5, 12, 0.6
OPTIONS = {"amplitude": dist.LogNormal(0.8, 0.3), "lengthscale": dist.LogNormal(-0.3, 0.3)}
GIVEN = {"num_classes": 2, "capacity": 48, "persistence": 0.7, **OPTIONS}
WARMUP, DRAWS, THINNING = 80, 200, 1
BINS = np.linspace(0, 1, 6)


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Rows and classes of all data sets."""
    found = [
        simulate(
            random.key(seed),
            NUM_ROWS + NUM_NEW,
            labelled=1.0,
            persistence=GIVEN["persistence"],
            **OPTIONS,
        )
        for seed in range(NUM_SETS)
    ]
    return np.stack([each["x"] for each in found]), np.stack([each["y"] for each in found])


def forecasts(x: Array, y: Array, x_new: Array) -> tuple[Array, Array]:
    """Probabilities of the second class, [set, row, without or with the evidence], and whether a
    history was cut off.
    """
    history, field = (
        ["num_rejected", "rejected", "rejected_noise"],
        ["noise", "amplitude", "lengthscale"],
    )
    nuts = NUTS(
        archipelago,
        step_size=0.15,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        max_tree_depth=4,
    )
    kernel = Gibbs([(LatentHistory(archipelago), [*history, *field]), (nuts, None)])
    state = kernel.init(random.key(0), 0, None, (x[0], y[0]), GIVEN)

    def one(given: tuple[Array, ...]) -> tuple[Array, Array]:
        key, x, y, x_new = given
        program = Program(archipelago, x, y, **GIVEN)
        sweep = lambda _, at: kernel.sample(at, (x, y), GIVEN)
        blocks = [
            block._replace(rng_key=random.fold_in(key, i))
            for i, block in enumerate(state.block_states)
        ]
        warm = jax.lax.fori_loop(
            0, WARMUP, sweep, state._replace(rng_key=key, block_states=tuple(blocks))
        )

        def draw(at, _):
            at = jax.lax.fori_loop(0, THINNING, sweep, at)
            values = {**program.constrain(at.z), **at.block_states[0].values}
            return at, ({**values, **program.deterministics(values)}, at.block_states[0].full)

        _, (draws, full) = jax.lax.scan(draw, warm, None, DRAWS)
        both = [
            predict(key, draws, x, x_new, knows_density=knows, **OPTIONS)[:, 1]
            for knows in (False, True)
        ]
        return jnp.stack(both, -1), jnp.any(full)

    keys = random.split(random.key(1), len(x))
    return jax.jit(lambda given: jax.lax.map(one, given, batch_size=50))((keys, x, y, x_new))


def main() -> None:
    """Prints the two tables."""
    jax.config.update("jax_enable_x64", True)
    x, y = drawn()
    known = np.random.default_rng(0).random((NUM_SETS, NUM_ROWS)) < LABELLED
    rows = x[:, :NUM_ROWS], np.where(known, y[:, :NUM_ROWS], -1), x[:, NUM_ROWS:]
    chance, is_full = map(np.asarray, forecasts(*map(jnp.asarray, rows)))
    if is_full.any():
        raise SystemExit(
            f"{is_full.sum()} of {NUM_SETS} data sets want more than {GIVEN['capacity']} slots"
        )
    truth = y[:, NUM_ROWS:, None]
    score = np.mean(np.log(np.where(truth, chance, 1 - chance)), axis=1)
    gain = score[:, 1] - score[:, 0]
    print(
        f"{NUM_SETS} data sets; mean log score without {score[:, 0].mean():.4f}, with "
        f"{score[:, 1].mean():.4f}:"
    )
    print(f"{gain.mean():+.4f} ± {gain.std(ddof=1) / np.sqrt(len(gain)):.4f}\n")
    print(
        "| chance of the second class | rows, without | their share | rows, with | their share "
        "|\n|---|---|---|---|---|"
    )
    for low, high in pairwise(BINS):
        told = []
        for which in range(2):
            here = (chance[..., which] >= low) & (chance[..., which] < high)
            told.append(
                f"{here.sum()}, mean {chance[..., which][here].mean():.3f} | "
                f"{truth[..., 0][here].mean():.3f}"
            )
        print(f"| {low:.1f} to {high:.1f} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
