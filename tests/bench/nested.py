"""The nested sampler on five problems whose evidence is known, over seeds:

    OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tests.bench.nested gaussian two eggbox mixture --seeds 20

A line a seed, then a summary: rms z (error over claimed error), the largest |z|, the mean error, evaluations of the likelihood for each
effective draw, CPU seconds of a run with its compilation, and the mass of the smaller mode (`two`) or the total variation of the six
labellings (`mixture`). With `--finish` importance sampling from what was found comes behind, of `--draws` draws and up to `--clumps`
clumps: evaluations are then those of both, and each line says what the draws alone cost, their Pareto k-hat, and what nested sampling
had found.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.datasets import load_iris

from diagnostics import insertion_rank_test, report
from inference import Driver, ImportanceFinish, NestedSampler
from zoo.staged_learning import staged_learning


class Found(NamedTuple):
    """What a sampler says of a problem."""

    log_evidence: float
    error: float
    evaluations: int
    weight: np.ndarray  # of the particles, sum 1
    values: dict[str, np.ndarray]  # of the particles


def gaussian():
    """Ten dimensions, correlations .6."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([10]).to_event(1))
    numpyro.sample("y", dist.MultivariateNormal(x, 0.6 + 0.4 * jnp.eye(10)), obs=jnp.linspace(-1.0, 1.0, 10))


def two():
    """Five dimensions, modes of mass .3 and .7."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([5]).to_event(1))
    centres, widths = jnp.array([[-4.0], [4.0]]) * jnp.ones(5), jnp.array([[0.5], [0.3]]) * jnp.ones(5)
    shares = dist.Categorical(probs=jnp.array([0.3, 0.7]))
    numpyro.sample("y", dist.MixtureSameFamily(shares, dist.Normal(x[None] + centres, widths).to_event(1)), obs=jnp.zeros(5))


def eggbox():
    """Two dimensions, eighteen modes."""
    x = numpyro.sample("x", dist.Uniform(0.0, 10 * np.pi).expand([2]).to_event(1))
    log_density = (2 + jnp.cos(x[0] / 2) * jnp.cos(x[1] / 2)) ** 5
    numpyro.sample("y", dist.Delta(jnp.zeros(()), log_density=log_density), obs=jnp.zeros(()))


def mixture():
    """Three clusters in two dimensions, a hundred rows; its six labellings are alike."""
    r = np.random.default_rng(20240607)
    k = r.choice(3, 100, p=[0.5, 0.3, 0.2])
    centre, scale = np.array([[-2, 0], [1.5, 1.5], [2, -2]]), np.array([[0.8, 1], [1, 0.6], [0.6, 0.6]])
    staged_learning(jnp.asarray(centre[k] + scale[k] * r.normal(size=(100, 2))), order=3, num_classes=0)


def iris():
    """Three clusters in four dimensions, with their classes: 32 latent numbers."""
    x, y = load_iris(return_X_y=True)
    staged_learning(jnp.asarray((x - x.mean(0)) / x.std(0)), jnp.asarray(y), order=3, num_classes=3)


PROBLEMS: dict[str, tuple[Callable, float]] = {
    "gaussian": (gaussian, -10 * np.log(20)),
    "two": (two, -5 * np.log(20)),
    "eggbox": (eggbox, 235.856),  # by quadrature
    "mixture": (mixture, -350.325),  # by importance sampling, +- .0045
    "iris": (iris, -538.575),  # by importance sampling, +- .01: tests.bench.mixture_evidence
}


def ours(model: Callable, seed: int, num_live: int, finish: dict[str, int] | None = None, **settings: Any) -> Found:
    """`NestedSampler` in the driver; with importance draws behind by the settings `finish`."""
    sampler = NestedSampler(model, num_live=num_live, **settings)
    kernel = sampler if finish is None else ImportanceFinish(sampler, **finish)
    tree = Driver(kernel, num_samples=1, progress_bar=False).run(seed)
    if tree.attrs["ended"] != "finished":
        raise RuntimeError(f"ended by {tree.attrs['ended']} before it had finished")
    p = insertion_rank_test(tree["sample_stats"]["insertion_rank"].values[0], num_live)
    page = report(tree)
    left = page["walks"].figures["correlation"]
    checks = f"modes {tree.attrs['num_modes']:.0f}, insertion ranks p = {p:.3f}, walks {left:.2f}"
    print(f"  {checks}, compilation {tree.attrs['compile_time']:.1f} s", end="")
    if finish is not None:
        attrs, khat = tree.attrs, page["importance"].figures["k-hat"]
        before = f"nested {attrs['nested_log_evidence']:.3f} +- {attrs['nested_log_evidence_se']:.3f}"
        print(f", {finish['num_draws'] / attrs['ess']:.2f} evaluations a draw of the finish, k-hat {khat:.2f}, {before}", end="")
    particles = tree["particles"].dataset.isel(chain=0)
    weight = np.exp(particles["log_weight"].values - tree.attrs["log_evidence"])
    values = {str(name): each.values for name, each in particles.data_vars.items()}
    evaluations = int(tree.attrs["num_evaluations"])
    return Found(tree.attrs["log_evidence"], tree.attrs["log_evidence_se"], evaluations, weight / weight.sum(), values)


def figure(name: str, found: Found) -> float:
    """What is asked of the modes: the mass of the smaller one, or the total variation of the labellings."""
    if name == "two":
        return float(found.weight[found.values["x"][:, 0] > 0].sum())
    if name == "mixture":
        labelling = np.argsort(found.values["mu"][:, :, 0], 1) @ [9, 3, 1]
        shares = [found.weight[labelling == each].sum() for each in np.unique(labelling)]
        return float(np.abs(np.array(shares) - 1 / 6).sum() / 2 + (6 - len(shares)) / 12)
    return float("nan")


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="+", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--live", type=int, default=500)
    parser.add_argument("--sweeps", type=float, default=3.0)
    parser.add_argument("--memory", type=float, default=0.25)
    parser.add_argument("--finish", action="store_true")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--clumps", type=int, default=8)
    told = parser.parse_args()
    finish = {"num_draws": told.draws, "num_clumps": told.clumps} if told.finish else None
    jax.config.update("jax_enable_x64", True)
    for name in told.problems:
        model, exact = PROBLEMS[name]
        rows = []
        for seed in range(told.seeds):
            started = process_time()
            found = ours(model, seed, told.live, finish, num_sweeps=told.sweeps, memory=told.memory)
            seconds = process_time() - started
            miss, cost = found.log_evidence - exact, found.evaluations * np.sum(found.weight**2)
            rows.append((miss / found.error, miss, found.error, cost, seconds, figure(name, found)))
            print(
                f"  {name} {seed}: error {miss:+.4f}, claimed {found.error:.4f}, {cost:.0f} a draw, {seconds:.1f} s, {rows[-1][-1]:.3f}",
                flush=True,
            )
        z, miss, claimed, cost, seconds, modes = np.array(rows).T
        print(
            f"{name}: rms z {np.sqrt(np.mean(z**2)):.2f}, largest {np.abs(z).max():.2f}, mean error {miss.mean():+.4f}, "
            f"claimed {claimed.mean():.4f}, {cost.mean():.0f} evaluations a draw, {np.median(seconds):.1f} CPU s, "
            f"modes {modes.mean():.3f} +- {modes.std():.3f}, from {modes.min():.3f} to {modes.max():.3f}"
        )


if __name__ == "__main__":
    main()
