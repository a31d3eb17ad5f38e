"""Does a sampler draw from the posterior of its model? Two tests that need nothing but the model,
for any kernel.

Both compare with the joint distribution p(values) p(data | values), which the model draws exactly,
and both end in ranks that are independent between replicates and uniform if the sampler is right.
`Calibration` tests them by exact ECDF bands.

`sbc`, simulation-based calibration: draw values and data from the joint, fit the data, rank the
values among the L draws of the fit. Values and independent draws of the posterior are exchangeable
given the data. It sees all that a user's run does, warm-up included, and so it also fails for draws
that are correlated: thin them. The log likelihood is ranked beside the latent sites: a fit that
ignores its data gives uniform ranks to every function of the values alone (Talts et al. 2018;
Modrak et al. 2023).

`geweke`, the joint-distribution test, in a replicated form: start at a draw of the joint; draw new
data given the values and move the values by the kernel given the data, `num_steps` times. Both
leave the joint as it is, so the end of the chain has exactly the distribution of the start,
*however slowly the kernel mixes and whether or not it is reversible*. Its end is ranked among
independent draws of the joint. Geweke's (2004) own form compares averages along one chain by an
estimate of their error, which is not exact. Gandy and Scott (2021) rank a state of the chain among
the others, which is exact too, but they must run the kernel backwards: that rules out every Gibbs
sweep in a fixed order. Ranks among fresh draws ask nothing of the kernel, and a chain of many steps
adds up what is wrong with each. The values are taken after the kernel's last move and before new
data, so that a kernel that ignores its data is seen.

Säilynoja, Bürkner and Vehtari (2022) for the bands, computed exactly in `_calibration_band`. How
many replicates see which bug, and how often a right kernel fails: tests/bench/calibration.md.
"""

import copy
import os
from collections.abc import Callable, Mapping
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
    **kwargs: Any,
) -> Calibration:
    """Simulation-based calibration of `fit` on the model's arguments; the data among them only lend
    their shape.

    :param fit: `(rng_key, program) -> {site: [draw, ...]}` in JAX, such as `with_kernel(...)`:
    compiled once, and mapped over the
        replicates of a batch. Or `on_host(fit)`, a function that returns a DataTree.
    :param quantities: `(program, values) -> {name: array}`, what is ranked. None: every element of
    every latent site, and the
        log likelihood. Give it where elements are not identified (labels of components).
    :param data: observed site -> the argument that holds its data. None: the argument that equals
    them.
    :param alpha: the rate at which a right fit fails.
    :param folder: keeps each batch of replicates; the same test with the same folder runs only what
    is left, also for a larger
        `num_replicates` in batches of the same size. A fit on the host is known to it by its name
        alone, its quantities by what they compute.
    :param batch_size: replicates that run together; 100 unless told, one on the host.

    A model argument that has the name of one of these goes by position. Cost: `num_replicates`
    fits, shared out among JAX's devices. A CPU is one device unless
    `numpyro.set_host_device_count(n)` makes it n, before JAX is first used.
    """
    joint = Joint(Program(model, *args, **kwargs), data)
    plan = Plan("sbc", joint, rng_key, num_replicates, alpha, folder, batch_size)
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
    **kwargs: Any,
) -> Calibration:
    """Joint-distribution test of a Markov kernel on the model's arguments; the data among them only
    lend their shape.

    The kernel is started anew (`init` with no warm-up, at the current values) whenever the data
    change: set its step size by hand.

    :param kernel: a NumPyro `MCMCKernel`, or a function of the model that makes one (`NUTS`, say).
    :param num_steps: draws of new data in each replicate. An error of the kernel adds up until the
    chain of values and data has
        forgotten its start; more steps than that only cost time.
    :param sweeps: moves of the kernel between two draws of data. From 2 on, what a kernel carries
    from one move to the next is
        tested as well.
    :param num_forward: independent draws of the joint that the end of each chain is ranked among.
    :param functions: `(program, values) -> {name: array}`, what is ranked. None: the elements of
    the latent sites, their distance to
        the median, the product of the centred means of each two sites, the log likelihood and the
        log joint.

    The others are those of `sbc`. Cost a replicate: `num_steps` times `sweeps` moves, and
    `num_forward` draws of the joint; replicates are shared out among JAX's devices
    (`numpyro.set_host_device_count(n)` makes n of a CPU).
    """
    joint = Joint(Program(model, *args, **kwargs), data)
    plan = Plan("geweke", joint, rng_key, num_replicates, alpha, folder, batch_size)
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

        # the first is the start of the chain
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
    """A fit for `sbc` by one chain of a NumPyro `MCMCKernel`, by an `SVI` or an `Algorithm`; the
    numbers mean what they mean to `Driver`.

    :param kernel: the kernel, or a function of the model that makes it (`NUTS`, say).
    :param num_warmup: steps before the first draw; of an algorithm, the most that it takes.
    :param num_samples: moves after the warm-up, of which each `thinning`-th is kept; thin until the
    draws are nearly independent.
    """
    check_count("thinning", thinning)
    check_count("num_samples", num_samples // thinning)

    def fit(rng_key: Array, program: Program) -> Values:
        own = _made(kernel, program.model)
        if isinstance(own, StochasticVI) and num_warmup is None:
            raise ValueError("num_warmup: SVI never ends by itself; give the number of its steps.")
        if isinstance(own, Algorithm):
            return _run_algorithm(own, rng_key, program, num_warmup, num_samples)
        state = _started(own, rng_key, program, num_warmup or 0, None)
        moved = lambda _, at: own.sample(at, program.args, program.kwargs)

        def record(state, count):  # one body for the warm-up and the rest: it is compiled once
            state = jax.lax.fori_loop(0, count, moved, state)
            return state, _values_of(own, state, program)

        counts = jnp.full(num_samples // thinning, thinning, jnp.int32)
        return jax.lax.scan(record, state, counts.at[0].add(num_warmup or 0))[1]

    return fit


class _HostFit(NamedTuple):
    """A fit that is run for one replicate after the other; see `on_host`."""

    fit: Callable[[Array, Program], xr.DataTree]

    def __call__(self, rng_key: Array, program: Program) -> xr.DataTree:
        """The fit itself."""
        return self.fit(rng_key, program)


def on_host(fit: Callable[[Array, Program], xr.DataTree]) -> _HostFit:
    """Marks a fit for `sbc` that cannot be traced: `(rng_key, program) -> DataTree`, such as

        on_host(lambda key, program: Driver(NUTS(program.model), num_warmup=300,
        num_samples=300).run(key, **program.arguments))

    All chains and draws of the tree's posterior are ranked together. Cost: each replicate in turn,
    compilation included.
    """
    return _HostFit(fit)


def _elements(program: Program, values: Values) -> Values:
    """The values themselves, and how well they explain the data."""
    terms = program.log_likelihood(values).values()
    return {**values, "log_likelihood": sum((jnp.sum(term) for term in terms), jnp.zeros(()))}


def _second_moments(values: Values) -> Values:
    """Spread of each element, and products of sites, [draw, ...]; centred by a symmetric function
    of all draws, which keeps them exchangeable.
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
    """Rank of each quantity among the others [draw, ...], ties broken at random; -1 where one is
    NaN. And how many others there are.
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
    # the sites whose values the kernel takes so; HMC takes unconstrained ones
    as_they_are = values_at(values)
    mixed = lambda values, free: {
        name: values[name] if name in as_they_are else free[name] for name in latent
    }
    if wrong := [name for name in latent if name not in values_at(mixed(values, free))]:
        raise ValueError(
            f"kernel: {type(_chain(kernel, program.model)).__name__} does not start from a given "
            f"{wrong[0]!r} (`init_params`), so it "
            f"cannot be moved from it. Use sbc."
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
    """A kernel of one's own: what it binds at `init` must not outlive a trace."""
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
            "moves. Use sbc."
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
    """Constrained values of a state."""
    return kernel.postprocess_fn(program.args, program.kwargs)(getattr(state, kernel.sample_field))


def _run_algorithm(
    algorithm: Algorithm, rng_key: Array, program: Program, num_steps: int | None, num_draws: int
) -> Values:
    if type(algorithm).needs_host is not Algorithm.needs_host:
        name = type(algorithm).__name__
        raise TypeError(
            f"kernel: {name} needs the host between steps, which compiled replicates lack; use "
            "on_host(fit)."
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
    """Draws of the latent sites, [draw, ...], all chains together."""
    posterior = tree["posterior"].to_dataset()
    found = {
        name: posterior[name.replace("/", ".")]
        for name in program.latent
        if name.replace("/", ".") in posterior
    }
    arrays = {name: values.transpose("chain", "draw", ...).values for name, values in found.items()}
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
