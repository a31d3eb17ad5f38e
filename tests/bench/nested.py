"""The nested sampler on seven problems of known evidence, and one of unknown, over seeds:

    OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tests.bench.nested
    gaussian two eggbox mixture --seeds 20

The seeds are replicates of one run, so that one loop is compiled for all. What the checks say, a
line a seed, then a summary: rms z (error over claimed error), the largest |z|, the mean error,
evaluations of the likelihood for each effective draw and in a run, CPU seconds a replicate with its
share of the compilation, how many reports of single seeds say TRUSTED, and the mass of the mode on
the right (`two`, `needle`, `equal`) or the total variation of the six labellings (`mixture`). With
`--finish` importance sampling from what was found comes behind, of `--draws` draws and up to
`--clumps` components in the first fit: evaluations are then those of both, and the first line says
what the draws alone cost, and their Pareto k-hat.
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
from tests.bench.overview import TASKS
from zoo.staged_learning import staged_learning


class Found(NamedTuple):
    """What a sampler says of a problem."""

    log_evidence: float
    error: float
    evaluations: int
    weight: np.ndarray  # of the particles, sum 1
    values: dict[str, np.ndarray]  # of the particles
    num_modes: int
    headline: str  # of the report


def gaussian():
    """Ten dimensions, correlations .6."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([10]).to_event(1))
    numpyro.sample(
        "y", dist.MultivariateNormal(x, 0.6 + 0.4 * jnp.eye(10)), obs=jnp.linspace(-1.0, 1.0, 10)
    )


def two():
    """Five dimensions, modes of mass .3 and .7."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([5]).to_event(1))
    centres, widths = (
        jnp.array([[-4.0], [4.0]]) * jnp.ones(5),
        jnp.array([[0.5], [0.3]]) * jnp.ones(5),
    )
    shares = dist.Categorical(probs=jnp.array([0.3, 0.7]))
    numpyro.sample(
        "y",
        dist.MixtureSameFamily(shares, dist.Normal(x[None] + centres, widths).to_event(1)),
        obs=jnp.zeros(5),
    )


def _in_four_dimensions(widths: tuple[float, float]):
    """A mode of mass .9 at -4, and one of mass .1 at 4."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([4]).to_event(1))
    centres = jnp.array([[-4.0], [4.0]]) * jnp.ones(4)
    shares = dist.Categorical(probs=jnp.array([0.9, 0.1]))
    each = dist.Normal(x[None] - centres, jnp.array(widths)[:, None] * jnp.ones(4)).to_event(1)
    numpyro.sample("y", dist.MixtureSameFamily(shares, each), obs=jnp.zeros(4))


def needle():
    """The smaller mode has a fifth of the width: one point in 625 is in it when both separate."""
    _in_four_dimensions((0.5, 0.1))


def equal():
    """The same with equal widths."""
    _in_four_dimensions((0.5, 0.5))


def eggbox():
    """Two dimensions, eighteen modes."""
    x = numpyro.sample("x", dist.Uniform(0.0, 10 * np.pi).expand([2]).to_event(1))
    log_density = (2 + jnp.cos(x[0] / 2) * jnp.cos(x[1] / 2)) ** 5
    numpyro.sample("y", dist.Delta(jnp.zeros(()), log_density=log_density), obs=jnp.zeros(()))


def mixture():
    """Three clusters in two dimensions, a hundred rows; its six labellings are alike."""
    r = np.random.default_rng(20240607)
    k = r.choice(3, 100, p=[0.5, 0.3, 0.2])
    centre, scale = (
        np.array([[-2, 0], [1.5, 1.5], [2, -2]]),
        np.array([[0.8, 1], [1, 0.6], [0.6, 0.6]]),
    )
    staged_learning(
        jnp.asarray(centre[k] + scale[k] * r.normal(size=(100, 2))), order=3, num_classes=0
    )


def iris():
    """Three clusters in four dimensions, with their classes: 32 latent numbers."""
    x, y = load_iris(return_X_y=True)
    staged_learning(jnp.asarray((x - x.mean(0)) / x.std(0)), jnp.asarray(y), order=3, num_classes=3)


def wine():
    """Four clusters of the rows that `tests.bench.overview` learns from: 35 latent numbers."""
    split = TASKS["wine"].split(0)
    staged_learning(
        jnp.asarray((split.x - split.x.mean(0)) / split.x.std(0)),
        jnp.asarray(split.y),
        order=4,
        num_classes=3,
    )


PROBLEMS: dict[str, tuple[Callable, float]] = {
    "gaussian": (gaussian, -10 * np.log(20)),
    "two": (two, -5 * np.log(20)),
    "needle": (needle, -4 * np.log(20)),
    "equal": (equal, -4 * np.log(20)),
    "eggbox": (eggbox, 235.856),  # by quadrature
    "mixture": (mixture, -350.325),  # by importance sampling, +- .0045
    "iris": (iris, -538.575),  # by importance sampling, +- .01: tests.bench.mixture_evidence
    "wine": (wine, np.nan),  # not known: what it costs
}


def ours(
    model: Callable,
    seeds: int,
    num_live: int,
    finish: dict[str, int] | None = None,
    **settings: Any,
) -> tuple[list[Found], dict[str, float]]:
    """`NestedSampler` in the driver, once for each seed in one compiled loop; with importance draws
    behind by the settings `finish`. Also what a run took: CPU seconds before the loop runs and in
    it.
    """
    sampler = NestedSampler(model, num_live=num_live, **settings)
    kernel = sampler if finish is None else ImportanceFinish(sampler, **finish)
    started = process_time()
    tree = Driver(kernel, num_samples=1, num_chains=seeds, progress_bar=False).run(0)
    seconds = process_time() - started
    if tree.attrs["ended"] != "finished":
        raise RuntimeError(f"ended by {tree.attrs['ended']} before it had finished")
    attrs = {
        name.removesuffix("_of_replicates"): np.atleast_1d(value)
        for name, value in tree.attrs.items()
        if name.endswith("replicates")
    }
    attrs = attrs or {name: np.atleast_1d(value) for name, value in tree.attrs.items()}
    ranks = tree["sample_stats"]["insertion_rank"].values
    page = report(tree)
    checks = (
        "insertion ranks p = "
        f"{min(insertion_rank_test(each, num_live) for each in ranks):.3f} at least"
    )
    print(
        f"  {checks}, walks {page['walks'].figures['correlation']:.2f} at most, compilation "
        f"{tree.attrs['compile_time']:.1f} s",
        end="",
    )
    if finish is not None:
        cost = ", ".join(f"{each:.2f}" for each in finish["num_draws"] / attrs["ess"])
        print(
            f"; of the finish {cost} draws an effective one, k-hat "
            f"{page['importance'].figures['k-hat']:.2f} at most",
            end="",
        )
    print("")
    found = []
    for chain, evidence in enumerate(attrs["log_evidence"]):
        particles = tree["particles"].dataset.isel(chain=chain)
        weight = np.exp(particles["log_weight"].values - evidence)
        known = np.isfinite(weight) & (weight > 0)  # replicates of other lengths are padded
        values = {str(name): each.values[known] for name, each in particles.data_vars.items()}
        evaluations, error = (
            int(attrs["num_evaluations"][chain]),
            float(attrs["log_evidence_se"][chain]),
        )
        one = tree.isel(chain=[chain])
        one.attrs = {
            name: value for name, value in tree.attrs.items() if not name.endswith("replicates")
        } | {name: value[chain] for name, value in attrs.items()}
        found.append(
            Found(
                float(evidence),
                error,
                evaluations,
                weight[known] / weight[known].sum(),
                values,
                int(attrs["num_modes"][chain]),
                report(one).headline,
            )
        )
    return found, {"compilation": tree.attrs["compile_time"], "all": seconds}


def figure(name: str, found: Found) -> float:
    """What is asked of the modes: the mass of the smaller one, or the total variation of the
    labellings.
    """
    if name in ("two", "needle", "equal"):
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
    parser.add_argument(
        "--apart",
        action="store_true",
        help="members without names stay in the places that they have",
    )
    parser.add_argument("--untracked", action="store_true", help="one mode only")
    parser.add_argument("--single", action="store_true", help="in float32")
    parser.add_argument("--finish", action="store_true")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--clumps", type=int, default=8)
    told = parser.parse_args()
    finish = {"num_draws": told.draws, "num_clumps": told.clumps} if told.finish else None
    jax.config.update("jax_enable_x64", not told.single)
    for name in told.problems:
        model, exact = PROBLEMS[name]
        rows = []
        runs, seconds = ours(
            model,
            told.seeds,
            told.live,
            finish,
            num_sweeps=told.sweeps,
            memory=told.memory,
            rename=not told.apart,
            track_modes=not told.untracked,
        )
        for seed, found in enumerate(runs):
            miss, cost = found.log_evidence - exact, found.evaluations * np.sum(found.weight**2)
            rows.append((miss / found.error, miss, found.error, cost, figure(name, found)))
            print(
                f"  {name} {seed}: error {miss:+.4f}, claimed {found.error:.4f}, "
                f"{found.evaluations} evaluations, {cost:.0f} a draw, "
                f"{rows[-1][-1]:.3f}, {found.num_modes} modes, {found.headline}",
                flush=True,
            )
        z, miss, claimed, cost, modes = np.array(rows).T
        print(
            f"{name}: rms z {np.sqrt(np.mean(z**2)):.2f}, largest {np.abs(z).max():.2f}, mean "
            f"error {miss.mean():+.4f}, "
            f"claimed {claimed.mean():.4f}, {cost.mean():.0f} evaluations a draw, "
            f"{np.mean([each.evaluations for each in runs]):.0f} in all, "
            f"{seconds['all'] / told.seeds:.1f} CPU s, "
            f"trusted {sum(each.headline.startswith('TRUSTED') for each in runs)}, "
            f"modes {modes.mean():.3f} +- {modes.std():.3f}, from {modes.min():.3f} to "
            f"{modes.max():.3f}"
        )


if __name__ == "__main__":
    main()
