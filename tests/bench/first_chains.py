"""CPU seconds of a first NUTS run through `Driver`, next to `numpyro.infer.MCMC`.

    python -m tests.bench.first_chains [models] [--repeats 3]

Each run is a process of its own, on one core, with an empty compilation cache; imports are apart.
`MCMC` and `Driver` take turns, and who begins alternates. Columns: medians of the CPU seconds, the
median of the ratios of the pairs, and whether the draws are the same, bit for bit.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

if "--child" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 5))
NOISE = RNG.normal(size=100)
UNIFORM = RNG.uniform(size=100)
WALK = np.cumsum(RNG.normal(size=100)) / 10
LINE = np.linspace(0, 1, 30)
TWO = np.append(RNG.normal(-2, 1, 40), RNG.normal(2, 1, 60))
STEPS = {"num_warmup": 500, "num_samples": 500, "progress_bar": False}


def eight_schools():
    """A hierarchy of Normals."""
    effects = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effect", dist.Normal(theta, errors), obs=effects)


def autoregression():
    """An AR(1) process by NumPyro's scan."""
    slope = numpyro.sample("slope", dist.Uniform(-1, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(before, now):
        numpyro.sample("y", dist.Normal(slope * before, scale), obs=now)
        return now, None

    scan(step, jnp.zeros(()), jnp.asarray(WALK))


def gaussian_process():
    """A squared-exponential kernel with noise."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.LogNormal(-1, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    gap = (LINE[:, None] - LINE) / length
    covariance = scale * jnp.exp(-(gap**2) / 2) + (noise**2 + 1e-5) * jnp.eye(30)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(30), covariance), obs=jnp.sin(6 * LINE))


def regression():
    """Linear regression."""
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([5]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    y = jnp.asarray(X @ np.arange(5.0) + NOISE)
    numpyro.sample("y", dist.Normal(jnp.asarray(X) @ weights, scale), obs=y)


def classification():
    """Logistic regression."""
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([5]).to_event(1))
    y = jnp.asarray((1 / (1 + np.exp(-X.sum(1))) > UNIFORM).astype(int))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(X) @ weights), obs=y)


def mixture():
    """Two Normals with a Dirichlet weight."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 3).expand([2]).to_event(1))
    parts = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 1.0))
    with numpyro.plate("row", 100):
        numpyro.sample("y", parts, obs=jnp.asarray(TWO))


MODELS = {
    model.__name__: model
    for model in (
        eight_schools,
        autoregression,
        gaussian_process,
        regression,
        classification,
        mixture,
    )
}


def child(name: str, way: str) -> None:
    """Runs NUTS one way, and prints what it took, and a hash of the draws, as JSON."""
    import arviz  # noqa: F401
    import xarray as xr

    from inference import Driver

    begun = process_time()
    if way == "mcmc":
        mcmc = MCMC(NUTS(MODELS[name]), **STEPS)
        mcmc.run(jax.random.key(0))
        draws = jax.device_get(mcmc.get_samples())
    else:
        tree = Driver(NUTS(MODELS[name]), **STEPS).run(jax.random.key(0))
        assert isinstance(tree, xr.DataTree)
        draws = {k: v.values[0] for k, v in tree["posterior"].dataset.data_vars.items()}
    cpu = process_time() - begun
    content = b"".join(np.ascontiguousarray(draws[k]).tobytes() for k in sorted(draws))
    print(json.dumps({"cpu": cpu, "draws": hashlib.sha256(content).hexdigest()}))


def _run(name: str, way: str) -> dict[str, Any]:
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.bench.first_chains", "--child", name, way]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    print(f"{'model':>18}{'MCMC':>8}{'Driver':>8}{'ratio':>8}  same draws")
    for name in args.models or MODELS:
        found: dict[str, list[dict[str, Any]]] = {"mcmc": [], "driver": []}
        for repeat in range(args.repeats):
            for way in list(found)[:: 1 if repeat % 2 else -1]:
                found[way].append(_run(name, way))
        mcmc, driver = ([each["cpu"] for each in found[way]] for way in found)
        ratio = statistics.median(b / a for a, b in zip(mcmc, driver, strict=True))
        same = len({each["draws"] for runs in found.values() for each in runs}) == 1
        print(
            f"{name:>18}{statistics.median(mcmc):8.2f}{statistics.median(driver):8.2f}{ratio:8.2f}"
            f"  {'yes' if same else 'NO'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
