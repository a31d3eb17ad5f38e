"""Nested samplers of others beside ours, on the problems of `tests.bench.nested`, in one process:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with dynesty --with blackjax --with ultranest --with nautilus-sampler --with "jaxns<3"
    \\
        python -m tests.bench.nested_peers gaussian two eggbox mixture --seeds 3

The others are no dependencies of the project; `--with` lends them to this one run. All have the
same number of live points. Ours, blackjax, dynesty and UltraNest end when these hold a hundredth of
the evidence; the rest is at its defaults (blackjax: twice as many slice steps as latent numbers, as
its documentation asks for, and a tenth of the points in a step; dynesty: random slices, for its own
choice, uniform points within ellipsoids, had not found the end of the two modes after 100 CPU
seconds; nautilus says nothing of its error, which is that of its effective draws here). Each looks
at the same compiled likelihood, read off the model; that of dynesty is called point by point, of
UltraNest and nautilus for many. A line a problem and sampler: rms of error over claimed error and
the largest of these, mean error and claimed error, evaluations of the likelihood for each effective
draw, CPU seconds of the first seed (with what it compiles) and of the others, the mass of the
smaller mode or the total variation of labellings.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from scipy.special import logsumexp

from inference import Driver, ImportanceFinish, NestedSampler, Program
from inference.reading.density import Split
from tests.bench.nested import PROBLEMS, Found, figure

TOLERANCE, PATIENCE = 0.01, 300.0  # seconds, for the one that can be told


def found_by(kernel: Any, seed: int) -> Found:
    """Ours, in the driver."""
    tree = Driver(kernel, num_samples=1, progress_bar=False).run(seed)
    points = tree["particles"].dataset.isel(chain=0)
    weight = np.exp(points["log_weight"].values - tree.attrs["log_evidence"])
    values = {str(name): each.values for name, each in points.data_vars.items()}
    attrs = tree.attrs
    return Found(
        attrs["log_evidence"],
        attrs["log_evidence_se"],
        int(attrs["num_evaluations"]),
        weight / weight.sum(),
        values,
    )


def nss(model: Callable, seed: int, num_live: int) -> Found:
    """blackjax's nested slice sampling, in the unconstrained space that ours walks in."""
    import blackjax  # ty: ignore[unresolved-import]  # brought by `uv run --with`, as the others
    from blackjax.ns.utils import finalise, log_weights  # ty: ignore[unresolved-import]

    split = Split(Program(model))
    kernel = blackjax.nss(
        lambda z: split.densities(z)[0],
        lambda z: split.densities(z)[1],
        max(5, 2 * split.size),
        num_delete=num_live // 10,
    )
    start_key, key, weight_key = random.split(random.key(seed), 3)
    state = kernel.init(jax.jit(jax.vmap(split.draw))(random.split(start_key, num_live)))
    step, dead, evaluations = jax.jit(kernel.step), [], num_live
    while state.integrator.logZ_live - state.integrator.logZ > np.log(TOLERANCE):
        key, own = random.split(key)
        state, info = step(own, state)
        walked = info.update_info
        evaluations += int(np.sum(2 + walked.num_expansions + walked.num_shrink))
        dead.append(info)
    whole = finalise(state, dead, update_info=False)
    log_weight = np.asarray(log_weights(weight_key, whole))
    each = logsumexp(log_weight, axis=0)
    mean = log_weight.mean(1)
    values = jax.jit(jax.vmap(split.values))(whole.particles.position)
    share = np.exp(mean - logsumexp(mean))
    return Found(
        each.mean(),
        each.std(),
        evaluations,
        share,
        {name: np.asarray(value) for name, value in values.items()},
    )


def by_dynesty(model: Callable, seed: int, num_live: int) -> Found:
    """dynesty's static sampler, over the unit cube."""
    import dynesty  # ty: ignore[unresolved-import]

    cube = Cube(model)
    likelihood = jax.jit(cube.log_likelihood)
    of_one = lambda u: float(likelihood(u))
    sampler = dynesty.NestedSampler(
        of_one,
        lambda u: u,
        cube.size,
        nlive=num_live,
        sample="rslice",
        rstate=np.random.default_rng(seed),
    )
    sampler.run_nested(dlogz=TOLERANCE, print_progress=False)
    told = sampler.results
    return cube.found(
        told.logz[-1], told.logzerr[-1], np.sum(told.ncall), told.logwt, told.samples_u
    )


def by_ultranest(model: Callable, seed: int, num_live: int) -> Found:
    """UltraNest's reactive sampler."""
    from ultranest import ReactiveNestedSampler  # ty: ignore[unresolved-import]

    cube = Cube(model)
    np.random.seed(seed)  # noqa: NPY002  (it has no other)
    sampler = ReactiveNestedSampler(
        [str(number) for number in range(cube.size)], cube.of_many(), lambda u: u, vectorized=True
    )
    told = sampler.run(
        min_num_live_points=num_live, frac_remain=TOLERANCE, show_status=False, viz_callback=False
    )
    points = told["weighted_samples"]
    with np.errstate(divide="ignore"):
        return cube.found(
            told["logz"],
            told["logzerr"],
            told["ncall"],
            np.log(points["weights"]),
            points["upoints"],
        )


def by_nautilus(model: Callable, seed: int, num_live: int) -> Found:
    """nautilus, whose networks bound what is left."""
    from nautilus import Sampler  # ty: ignore[unresolved-import]

    cube = Cube(model)
    sampler = Sampler(
        lambda u: u,
        cube.of_many(),
        n_dim=cube.size,
        n_live=num_live,
        vectorized=True,
        pass_dict=False,
        seed=seed,
    )
    if not sampler.run(timeout=PATIENCE):
        raise TimeoutError(f"had not ended after {PATIENCE:.0f} s")
    u, log_weight, _ = sampler.posterior()
    return cube.found(sampler.log_z, sampler.n_eff**-0.5, sampler.n_like, log_weight, u)


def by_jaxns(model: Callable, seed: int, num_live: int) -> Found:
    """jaxns' default sampler."""
    import jaxns  # ty: ignore[unresolved-import]
    from tensorflow_probability.substrates.jax import distributions as tfd  # ty: ignore[unresolved-import]

    cube = Cube(model)

    def prior():
        u = yield jaxns.Prior(tfd.Uniform(jnp.zeros(cube.size), jnp.ones(cube.size)), name="u")
        return u

    sampler = jaxns.NestedSampler(
        model=jaxns.Model(prior_model=prior, log_likelihood=cube.log_likelihood),
        num_live_points=num_live,
    )
    told = sampler.to_results(*jax.jit(sampler)(random.PRNGKey(seed)))
    count = int(told.total_num_samples)
    u, log_weight = told.samples["u"][:count], told.log_dp_mean[:count]
    return cube.found(
        told.log_Z_mean, told.log_Z_uncert, told.total_num_likelihood_evaluations, log_weight, u
    )


class Cube:
    """A model over numbers from 0 to 1."""

    def __init__(self, model: Callable):
        self.program = Program(model)
        self.values = from_cube(self.program)
        self.size = sum(
            int(np.prod(self.program.sites[name].shape)) for name in self.program.latent
        ) - ("beta" in self.program.latent)

    def log_likelihood(self, u: Any) -> jax.Array:
        """The log likelihood at one vector."""
        terms = self.program.log_likelihood(self.values(jnp.clip(u, 1e-12, 1 - 1e-12))).values()
        return jnp.asarray(sum(jnp.sum(term) for term in terms))

    def of_many(self) -> Callable:
        """The log likelihoods at vectors [point, size], as a function of them.

        It takes any number of vectors and is compiled for powers of two.
        """
        compiled = jax.jit(jax.vmap(self.log_likelihood))

        def each(u: np.ndarray) -> np.ndarray:
            more = (1 << (len(u) - 1).bit_length()) - len(u)
            return np.asarray(compiled(np.concatenate([u, np.repeat(u[:1], more, axis=0)])))[
                : len(u)
            ]

        return each

    def found(
        self, log_evidence: Any, error: Any, evaluations: Any, log_weight: Any, u: Any
    ) -> Found:
        """What a sampler says."""
        values = jax.jit(jax.vmap(self.values))(np.clip(np.asarray(u), 1e-12, 1 - 1e-12))
        share = np.exp(np.asarray(log_weight) - logsumexp(log_weight))
        each = {name: np.asarray(value) for name, value in values.items()}
        return Found(float(log_evidence), float(error), int(evaluations), share, each)


def from_cube(program: Program) -> Callable:
    """Numbers from 0 to 1 as values of the latent sites: by the quantiles of their priors, of a
    flat Dirichlet by broken sticks.
    """
    trace = program.trace({}, random.key(0))

    def values(u: Any) -> dict[str, Any]:
        found, at = {}, 0
        for name in program.latent:
            shape = program.sites[name].shape
            size = int(np.prod(shape)) - (name == "beta")
            own, at = u[at : at + size], at + size
            if name == "beta":
                # of the stick, after each break
                left = jnp.cumprod((1 - own) ** (1 / jnp.arange(size, 0, -1)))
                found[name] = jnp.concatenate([1 - left[:1], left[:-1] - left[1:], left[-1:]])
            else:
                fn = trace[name]["fn"]
                while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
                    fn = fn.base_dist
                found[name] = fn.icdf(own.reshape(shape))
        return found

    return values


SAMPLERS = {
    "ours": lambda model, seed, live: found_by(NestedSampler(model, num_live=live), seed),
    "ours, importance finish": lambda model, seed, live: found_by(
        ImportanceFinish(NestedSampler(model, num_live=live)), seed
    ),
    "blackjax nss": nss,
    "dynesty": by_dynesty,
    "UltraNest": by_ultranest,
    "nautilus": by_nautilus,
    "jaxns": by_jaxns,
}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "problems", nargs="+", choices=[name for name in PROBLEMS if name not in ("iris", "wine")]
    )
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--live", type=int, default=500)
    told = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(
        "| problem | sampler | rms z | largest | mean error | claimed | evaluations a draw | CPU "
        "s, first | others | modes |\n|" + "---|" * 10
    )
    for name in told.problems:
        model, exact = PROBLEMS[name]
        for sampler in told.samplers:
            try:
                print(
                    f"| {name} | {sampler} | {line(name, SAMPLERS[sampler], model, exact, told)} |",
                    flush=True,
                )
            except TimeoutError as late:
                print(f"| {name} | {sampler} | {late}" + " |" * 8, flush=True)


def line(name: str, sampler: Callable, model: Callable, exact: float, told: Any) -> str:
    """The cells of one problem by one sampler, for a row of the table."""
    rows = []
    for seed in range(told.seeds):
        started = process_time()
        found = sampler(model, seed, told.live)
        seconds = process_time() - started
        miss, cost = found.log_evidence - exact, found.evaluations * np.sum(found.weight**2)
        rows.append((miss / found.error, miss, found.error, cost, seconds, figure(name, found)))
    z, miss, claimed, cost, seconds, modes = np.array(rows).T
    cells = (
        f"{np.sqrt(np.mean(z**2)):.2f} | {np.abs(z).max():.2f} | {miss.mean():+.4f} | "
        f"{claimed.mean():.4f} | {cost.mean():.0f}"
    )
    later = f"{np.median(seconds[1:]):.1f}" if len(seconds) > 1 else ""
    mass = (
        ""
        if np.isnan(modes).all()
        else f"{modes.mean():.3f}, from {modes.min():.3f} to {modes.max():.3f}"
    )
    return f"{cells} | {seconds[0]:.1f} | {later} | {mass}"


if __name__ == "__main__":
    main()
