"""Archipelago's number of rejected points: effective draws per CPU second of `LatentHistory` beside NUTS, and of the literal sampler.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.archipelago_speed

Side by side, on the same rows of a pinwheel: with hyper-parameters that are known and the same for both, and with learned ones, where ours
has an amplitude and a length scale for each class and the literal sampler one for all. Seconds are those of the sweeps that are counted,
compilation and warm-up left out.
"""

from time import process_time

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from gallery.archipelago import sampler, start
from inference import Driver, LatentHistory
from tests.bench.archipelago_literal import Hyper, pinwheel_chain, trace
from tests.bench.archipelago_protocols import Cell, draw
from zoo.archipelago import archipelago


def ours(data: str, labels: int, learn: bool, num_warmup: int = 500, num_sweeps: int = 2000) -> tuple[np.ndarray, float]:
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
    given = {"num_classes": num_classes, "capacity": 64, "init_params": start(1, len(x), num_classes)}
    driver.run(0, jnp.asarray(x), jnp.asarray(y), **given)
    driver.extend(1)  # compiled now
    before = process_time()
    tree = driver.extend(num_sweeps)
    return tree.posterior["num_rejected"].values[0, -num_sweeps:], process_time() - before


def main() -> None:
    """Prints the table."""
    jax.config.update("jax_enable_x64", True)
    print("| data, 4 labels a class | hyper-parameters | sampler | mean M | CPU ms a sweep | effective draws of M | per CPU second |")
    print("|" + "---|" * 7)
    for data in ("3 arms", "5 arms"):
        for learn in (False, True):
            literal = trace(pinwheel_chain(data, 4, learn), 300, 2000)
            for name, (found, seconds) in (("literal", literal), ("LatentHistory", ours(data, 4, learn))):
                effective = float(az.ess(found[None].astype(float)))
                told = f"{found.mean():.1f} | {1e3 * seconds / len(found):.1f} | {effective:.0f} | {effective / seconds:.2f}"
                print(f"| {data} | {'learned' if learn else 'known'} | {name} | {told} |", flush=True)


if __name__ == "__main__":
    main()
