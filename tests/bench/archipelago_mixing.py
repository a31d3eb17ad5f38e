"""How well Archipelago's sampler mixes: four chains on the pinwheel of five arms, and the
autocorrelation of M (Figure 4).

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.archipelago_mixing -o FOLDER --draws 4000

The chains start with scales drawn from the prior, so that they are apart, and with other rejected
points.
"""

import argparse
from pathlib import Path
from time import process_time

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax

from gallery.archipelago import sampler, start
from inference import Driver
from tests.bench.archipelago_protocols import Cell, draw

LAGS = 100
CHAINS, WARMUP = 4, 300


def main(folder: Path, num_draws: int) -> None:
    """Prints a table and draws the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y, *_ = draw(Cell("5 arms", 4), seed=0)
    started, driver = (
        process_time(),
        Driver(
            sampler(),
            num_warmup=WARMUP,
            num_samples=num_draws,
            num_chains=CHAINS,
            jit_model_args=True,
        ),
    )
    with jax.enable_x64(True):
        first = {
            name: values
            for name, values in start(CHAINS, x, y, 5, 64).items()
            if name not in ("amplitude", "lengthscale")
        }
        tree = driver.run(
            0, jnp.asarray(x), jnp.asarray(y), num_classes=5, capacity=64, init_params=first
        )
    print(
        f"{CHAINS} chains of {WARMUP} + {num_draws} sweeps: {process_time() - started:.0f} CPU s\n"
    )
    posterior, unlabelled = tree["posterior"], np.flatnonzero(y < 0)[:20]
    found = {
        "M": posterior["num_rejected"].values[..., None].astype(float),
        "log joint": tree["sample_stats"]["lp"].values[..., None],
        "log amplitude": np.log(posterior["amplitude"].values),
        "log length scale": np.log(posterior["lengthscale"].values[..., 0]),
        "20 probabilities": softmax(posterior["function"].values[:, :, unlabelled], axis=-1)[
            ..., 0
        ],
    }
    print("| quantity | largest R-hat | fewest effective draws |\n|---|---|---|")
    for name, values in found.items():
        each = np.moveaxis(values, -1, 0)
        print(
            f"| {name} | {max(float(az.rhat(one)) for one in each):.3f} | "
            f"{min(float(az.ess(one)) for one in each):.0f} |"
        )
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for chain in found["M"][..., 0]:
        axes.plot(_autocorrelation(chain), lw=1)
    axes.axhline(0, color="0.7", lw=0.8, zorder=0)
    axes.set(xlabel="lag (sweeps)", ylabel="autocorrelation of M")
    figure.savefig(folder / "archipelago_mixing.png", dpi=150)


def _autocorrelation(chain: np.ndarray) -> np.ndarray:
    apart = chain - chain.mean()
    return np.array(
        [np.mean(apart[: len(apart) - lag] * apart[lag:]) for lag in range(LAGS + 1)]
    ) / np.mean(apart**2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", type=Path, required=True, help="folder of the picture")
    parser.add_argument("--draws", type=int, default=4000, help="of each chain")
    given = parser.parse_args()
    main(given.o, given.draws)
