"""Simulation-based calibration and Geweke's joint-distribution test, for any kernel.

Both test whether a sampler draws from the posterior of its model. Both compare with the joint
distribution p(values) p(data | values), which the model draws exactly. Both end in ranks that are
independent between replicates, and uniform if the sampler is correct. `Calibration` tests rank
uniformity by exact ECDF bands.

`sbc`, simulation-based calibration, draws values and data from the joint, fits the data, and ranks
the values among the L draws of the fit. Given the data, the values and independent draws of the
posterior are exchangeable. The test covers all of a user's run, warm-up included. It also fails for
correlated draws, which must be thinned. The log likelihood is ranked beside the latent sites: a fit
that ignores its data gives uniform ranks to every function of the values alone (Talts et al. 2018;
Modrak et al. 2023).

`geweke`, the joint-distribution test, is replicated here. Each replicate starts at a draw of the
joint. Then it draws new data given the values and moves the values by the kernel given the data,
`num_steps` times. Both steps leave the joint invariant. So the end of the chain has exactly the
distribution of its start, however slowly the kernel mixes and whether or not it is reversible. The
end is ranked among independent draws of the joint. The values are taken after the kernel's last
move and before new data, so that a kernel that ignores its data is detected. Geweke's (2004) own
form compares averages along one chain by an estimate of their error, which is not exact. Gandy and
Scott (2021) rank a state of the chain among the others. This is exact too, but it runs the kernel
backwards, which rules out Gibbs sweeps in a fixed order.

Säilynoja, Bürkner and Vehtari (2022) for the bands, computed exactly in `_calibration_band`. The
power against known bugs, and the rate of false alarms, are in tests/bench/calibration.md.
"""

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from diagnostics._calibration_batches import PREFIX, Plan, check_count, compiled, one_by_one
from diagnostics._calibration_joint import Joint, Values
from diagnostics._calibration_result import Calibration, plot_calibration_ecdf
from inference import Algorithm, Program
from inference.run.cluster import submitted
from inference.run.svi import StochasticVI

__all__ = ["Calibration", "geweke", "on_host", "plot_calibration_ecdf", "sbc", "with_kernel"]

Quantities = Callable[[Program, Values], Mapping[str, Array]]
Fit = Callable[[Array, Program], Any]
Maker = MCMCKernel | SVI | Algorithm | Callable[[Any], MCMCKernel | SVI | Algorithm]


def sbc(
    model: Callable,
    fit: Fit,
    *args: Any,
    rng_key: int | Array = 0,
    num_replicates: int = 200,
    quantities: Quantities | None = None,
    data: Mapping[str, str] | None = None,
    alpha: float = 0.01,
    folder: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    cluster: Any = None,
    **kwargs: Any,
) -> Calibration:
    """Test a fit by simulation-based calibration.

    Cost: `num_replicates` fits, divided among JAX's devices. A CPU is one device unless
    `numpyro.set_host_device_count(n)` makes it n, before JAX is first used.

    Args:
        model: the model.
        fit: `(rng_key, program) -> {site: [draw, ...]}` in JAX, such as `with_kernel(...)`, which
            is compiled once for the replicates of a batch; or `on_host(fit)`, a function that
            returns a DataTree.
        *args: arguments of the model; of the data only the shapes matter.
        rng_key: a seed or a key.
        num_replicates: number of simulated data sets.
        quantities: `(program, values) -> {name: array}`, what is ranked. None: every element of
            every latent site, and the log likelihood. Give it where label switching makes elements
            not identified.
        data: observed site -> the argument that holds its data. None: the argument that equals it.
        alpha: probability that a correct fit fails.
        folder: keeps each batch of replicates. The same test with the same folder runs only the
            rest, also for a larger `num_replicates` with the same `batch_size`. A fit on the host
            is identified by its name alone.
        batch_size: replicates that run together; None: 100, or one on the host.
        cluster: a `dask.distributed.Client`, or the address of a scheduler: each batch is a task
            there, which compiles for itself. The ranks are the same.
        **kwargs: arguments of the model. One with a name of this list must go by position.

    Returns:
        The ranks and their test.
    """
    joint = Joint(Program(model, *args, **kwargs), data)
    spread = None if cluster is None else partial(submitted, cluster)
    plan = Plan("sbc", joint, rng_key, num_replicates, alpha, folder, batch_size, spread)
    measure = quantities or _elements

    def ranked(rng_key, values, drawn, fitted):
        program = joint.given(drawn)
        fitted = {
            name: jnp.asarray(fitted[name]).astype(values[name].dtype)
            for name in joint.program.latent
            if name in fitted
        }
        if quantities is None and (
            missing := [name for name in joint.program.latent if name not in fitted]
        ):
            raise ValueError(
                f"fit: it returned no draws of site {missing[0]!r}. Give `quantities` that do "
                "without them."
            )
        truth = measure(program, {name: values[name] for name in fitted})
        return _ranks(rng_key, truth, jax.vmap(lambda draw: measure(program, draw))(fitted))

    def replicate(rng_key):
        draw_key, fit_key, rank_key = random.split(rng_key, 3)
        values, drawn = draw(draw_key)
        return rank(rank_key, values, drawn, flat(fit(fit_key, joint.given(drawn))))

    if isinstance(fit, _HostFit):
        draw, rank = jax.jit(joint.draw), jax.jit(ranked) if joint.is_traceable else ranked
        flat = lambda tree: _flat_draws(tree, joint.program)
        name = getattr(fit.fit, "__qualname__", type(fit.fit).__qualname__)
        return one_by_one(plan, replicate, name, lambda values: measure(joint.program, values))
    draw, rank, flat = joint.draw, ranked, lambda draws: draws
    return compiled(plan, replicate)


def geweke(
    model: Callable,
    kernel: Maker,
    *args: Any,
    rng_key: int | Array = 0,
    num_replicates: int = 200,
    num_steps: int = 10,
    sweeps: int = 2,
    num_forward: int = 63,
    functions: Quantities | None = None,
    data: Mapping[str, str] | None = None,
    alpha: float = 0.01,
    folder: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    cluster: Any = None,
    **kwargs: Any,
) -> Calibration:
    """Test a Markov kernel by Geweke's joint-distribution test, in a replicated form.

    Whenever the data change, the kernel starts at the current values by `init` without warm-up, so
    its step size must be set by hand. Cost of a replicate: `num_steps` times `sweeps` moves, and
    `num_forward` draws of the joint.

    Args:
        model: the model.
        kernel: a NumPyro `MCMCKernel`, or a function of the model that makes one, such as `NUTS`.
        *args: arguments of the model; of the data only the shapes matter.
        rng_key: a seed or a key.
        num_replicates: number of chains.
        num_steps: draws of new data in each replicate. Errors of the kernel accumulate until the
            chain has forgotten its start; more steps than that are wasted.
        sweeps: moves of the kernel between two draws of data. From 2 on, the state that a kernel
            carries from one move to the next is tested as well.
        num_forward: independent draws of the joint, among which the end of a chain is ranked.
        functions: `(program, values) -> {name: array}`, what is ranked. None: the elements of the
            latent sites, their distance to the median, the product of the centred means of each
            pair of sites, the log likelihood and the log joint.
        data: as in `sbc`.
        alpha: as in `sbc`.
        folder: as in `sbc`.
        batch_size: as in `sbc`.
        cluster: as in `sbc`.
        **kwargs: arguments of the model. One with a name of this list must go by position.

    Returns:
        The ranks and their test.
    """
    joint = Joint(Program(model, *args, **kwargs), data)
    spread = None if cluster is None else partial(submitted, cluster)
    plan = Plan("geweke", joint, rng_key, num_replicates, alpha, folder, batch_size, spread)
    for name, value in (("num_steps", num_steps), ("sweeps", sweeps), ("num_forward", num_forward)):
        check_count(name, value)
    move = _transition(kernel, joint, sweeps)
    measure = functions or (
        lambda program, values: {
            **_elements(program, values),
            "log_joint": program.log_joint(values),
        }
    )

    def replicate(rng_key):
        joint_key, chain_key, rank_key = random.split(rng_key, 3)

        def step(state, step_key):
            values, _ = state
            data_key, move_key = random.split(step_key)
            drawn = joint.draw_data(data_key, values)
            return (move(move_key, joint.given(drawn), values), drawn), None

        # the first draw is the start of the chain
        drawn = jax.vmap(joint.draw)(random.split(joint_key, num_forward + 1))
        end, _ = jax.lax.scan(
            step, jax.tree.map(lambda each: each[0], drawn), random.split(chain_key, num_steps)
        )
        both = jax.tree.map(lambda one, many: many.at[0].set(one), end, drawn)
        found = jax.vmap(lambda values, drawn: dict(measure(joint.given(drawn), values)))(*both)
        if functions is None:
            found |= _second_moments({name: both[0][name] for name in joint.program.latent})
        return _ranks(
            rank_key,
            {name: x[0] for name, x in found.items()},
            {name: x[1:] for name, x in found.items()},
        )

    return compiled(plan, replicate)


def with_kernel(kernel: Maker, num_warmup: int | None, num_samples: int, thinning: int = 1) -> Fit:
    """Make a fit for `sbc` by one chain of a NumPyro `MCMCKernel`, by an `SVI` or an `Algorithm`.

    Args:
        kernel: the kernel, or a function of the model that makes it, such as `NUTS`.
        num_warmup: steps before the first draw; the largest number of steps for an algorithm.
        num_samples: moves after the warm-up.
        thinning: every `thinning`-th move is kept; thin until draws are nearly independent.

    Returns:
        The fit, a function of a key and a program that returns draws [draw, ...] of each site.
    """
    check_count("thinning", thinning)
    check_count("num_samples", num_samples // thinning)

    def fit(rng_key: Array, program: Program) -> Values:
        own = _made(kernel, program.model)
        if isinstance(own, StochasticVI) and num_warmup is None:
            raise ValueError("num_warmup: SVI does not end by itself; give the number of steps.")
        if isinstance(own, Algorithm):
            return _run_algorithm(own, rng_key, program, num_warmup, num_samples)
        state = _started(own, rng_key, program, num_warmup or 0, None)
        moved = lambda _, at: own.sample(at, program.args, program.kwargs)

        def record(state, count):  # the warm-up is part of the scan, so moves are compiled once
            state = jax.lax.fori_loop(0, count, moved, state)
            return state, _values_of(own, state, program)

        counts = jnp.full(num_samples // thinning, thinning, jnp.int32)
        return jax.lax.scan(record, state, counts.at[0].add(num_warmup or 0))[1]

    return fit


class _HostFit(NamedTuple):
    """A fit that runs one replicate after the other; see `on_host`."""

    fit: Callable[[Array, Program], xr.DataTree]

    def __call__(self, rng_key: Array, program: Program) -> xr.DataTree:
        """Run the fit."""
        return self.fit(rng_key, program)


def on_host(fit: Callable[[Array, Program], xr.DataTree]) -> _HostFit:
    """Mark a fit for `sbc` that JAX cannot trace.

        driver = lambda model: Driver(NUTS(model), num_warmup=300, num_samples=300)
        on_host(lambda key, program: driver(program.model).run(key, **program.arguments))

    Replicates run one after the other, compilation included.

    Args:
        fit: `(rng_key, program) -> DataTree`; all chains of its posterior are ranked together.
    """
    return _HostFit(fit)


def _elements(program: Program, values: Values) -> Values:
    """The values themselves, and the log likelihood."""
    terms = program.log_likelihood(values).values()
    return {**values, "log_likelihood": sum((jnp.sum(term) for term in terms), jnp.zeros(()))}


def _second_moments(values: Values) -> Values:
    """Distances of elements to their median, and products of sites, [draw, ...].

    Medians and means are symmetric functions of all draws, so draws stay exchangeable.
    """
    middle = lambda x: jnp.sort(x, axis=0)[len(x) // 2]
    floats = {name: x for name, x in values.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    found = {f"|{name} - median|": jnp.abs(x - middle(x)) for name, x in floats.items()}
    means = {
        name: jnp.mean(x.reshape(len(x), -1).astype(jnp.result_type(float)), axis=1)
        for name, x in values.items()
    }
    centred = [(name, mean - jnp.mean(mean)) for name, mean in means.items()]
    pairs = [(one, other) for i, one in enumerate(centred) for other in centred[i + 1 :]]
    return found | {f"{one} * {other}": x * y for (one, x), (other, y) in pairs}


def _ranks(rng_key: Array, first: Mapping[str, Array], others: Mapping[str, Array]) -> Values:
    """Rank of each quantity among the other draws [draw, ...], and the number of those draws.

    Ties are broken at random. The rank is -1 where a value is NaN.
    """
    found = {}
    for place, (name, many) in enumerate(others.items()):
        many, one = jnp.asarray(many), jnp.asarray(first[name])
        ties = jnp.sum(many == one[None], axis=0, dtype=jnp.int32)
        extra = random.randint(random.fold_in(rng_key, place), ties.shape, 0, ties + 1, jnp.int32)
        rank = jnp.sum(many < one[None], axis=0, dtype=jnp.int32) + extra
        bad = jnp.isnan(many).any(axis=0) | jnp.isnan(one)
        found[PREFIX + name] = jnp.where(bad, jnp.full_like(rank, -1), rank)
    return {"num_draws": jnp.asarray(len(many), jnp.int32), **found}


def _transition(
    kernel: Maker, joint: Joint, sweeps: int
) -> Callable[[Array, Program, Values], Values]:
    """`sweeps` moves of the kernel from given values, as a pure function."""
    values, drawn = joint.draw(random.key(0))
    latent, program = joint.program.latent, joint.given(drawn)

    def values_at(start):
        own = _chain(kernel, program.model)
        found = _values_of(own, _started(own, random.key(1), program, 0, start), program)
        if missing := [name for name in latent if name not in found]:
            raise ValueError(
                f"kernel: {type(own).__name__} holds no value of site {missing[0]!r}; the test "
                f"needs all of {list(latent)}."
            )
        return {
            name for name in latent if np.allclose(found[name], values[name], rtol=1e-3, atol=1e-5)
        }

    free = program.unconstrain(values)
    # sites that the kernel initialises by constrained values; HMC takes unconstrained ones
    constrained = values_at(values)
    mixed = lambda values, free: {
        name: values[name] if name in constrained else free[name] for name in latent
    }
    if wrong := [name for name in latent if name not in values_at(mixed(values, free))]:
        raise ValueError(
            f"kernel: {type(_chain(kernel, program.model)).__name__} does not start from a given "
            f"{wrong[0]!r} (`init_params`), which this test needs. Use sbc."
        )

    def move(rng_key: Array, program: Program, values: Values) -> Values:
        own = _chain(kernel, program.model)
        start = mixed(values, program.unconstrain(values))
        state = _started(own, rng_key, program, 0, start)
        state = jax.lax.fori_loop(
            0, sweeps, lambda _, at: own.sample(at, program.args, program.kwargs), state
        )
        found = _values_of(own, state, program)
        return {name: jnp.asarray(found[name]).astype(values[name].dtype) for name in values}

    return move


def _made(kernel: Maker, model: Any) -> MCMCKernel | Algorithm:
    """A copy of the kernel, for `init` may bind traced values to it."""
    made = (
        copy.deepcopy(kernel) if isinstance(kernel, MCMCKernel | SVI | Algorithm) else kernel(model)
    )
    if isinstance(made, SVI):
        return StochasticVI(made)
    if not isinstance(made, MCMCKernel | Algorithm):
        raise TypeError(
            f"kernel: found {type(made).__name__}, wanted an MCMCKernel, an SVI, an Algorithm or a "
            "function of the model."
        )
    return made


def _chain(kernel: Maker, model: Any) -> MCMCKernel:
    made = _made(kernel, model)
    if not isinstance(made, MCMCKernel):
        raise TypeError(
            f"kernel: {type(made).__name__} is no Markov chain, which the joint-distribution test "
            "needs. Use sbc."
        )
    return made


def _started(
    kernel: MCMCKernel, rng_key: Array, program: Program, num_warmup: int, start: Values | None
) -> Any:
    state = kernel.init(
        rng_key, num_warmup, start, model_args=program.args, model_kwargs=program.kwargs
    )
    return jax.tree.map(jnp.asarray, state)


def _values_of(kernel: MCMCKernel, state: Any, program: Program) -> Values:
    return kernel.postprocess_fn(program.args, program.kwargs)(getattr(state, kernel.sample_field))


def _run_algorithm(
    algorithm: Algorithm, rng_key: Array, program: Program, num_steps: int | None, num_draws: int
) -> Values:
    if type(algorithm).needs_host is not Algorithm.needs_host:
        name = type(algorithm).__name__
        raise TypeError(
            f"kernel: {name} needs the host between steps, so replicates cannot be compiled; "
            "use on_host(fit)."
        )
    init_key, step_key, draw_key = random.split(rng_key, 3)
    reading, data = algorithm.read(program)
    state = jax.tree.map(jnp.asarray, algorithm.init(init_key, reading, data))
    goes_on = lambda at: (
        ~algorithm.finished(at[0]) & ((num_steps is None) | (at[1] < (num_steps or 0)))
    )
    one = lambda state, count: algorithm.step(
        random.fold_in(step_key, count), state, reading, data
    )[0]
    state, _ = jax.lax.while_loop(
        goes_on, lambda at: (one(*at), at[1] + 1), (state, jnp.zeros((), jnp.int32))
    )
    return algorithm.draw(draw_key, state, reading, data, num_draws)


def _flat_draws(tree: xr.DataTree, program: Program) -> dict[str, np.ndarray]:
    posterior = tree["posterior"].to_dataset()
    found = {
        name: posterior[name.replace("/", ".")]
        for name in program.latent
        if name.replace("/", ".") in posterior
    }
    arrays = {name: values.transpose("chain", "draw", ...).values for name, values in found.items()}
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
