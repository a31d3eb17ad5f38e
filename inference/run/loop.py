"""The compiled loop over steps of a kernel, and the two families of kernels that it steps.

`Chain` has a NumPyro kernel, `Replicate` an algorithm that is no chain. Both work on the state of
*one* chain or replicate. `start` runs eagerly, once a chain, so that what a kernel stores in itself
at `init` are values, not tracers; `step`, `record`, `finished` and `needs_host` are compiled.

A call of `Loop.chunk` takes some records, each after some steps of the kernel, into preallocated
buffers [record, chain, ...]. How many records, and how many steps, are arguments of the compiled
code. So warm-up, thinning and chunks of any length share one compilation, and the records do not
depend on how a run is cut into chunks. Between two calls `Session` works on the host.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import built, is_arrays, make_room, traced_once
from inference.program.interpreting import interpreted, split
from inference.program.program import Program
from inference.run.protocol import Algorithm, GibbsBlock, Online

__all__ = [
    "CHAIN_METHODS",
    "Chain",
    "Loop",
    "Record",
    "Replicate",
    "Step",
    "Stepper",
    "alone",
    "field_at",
    "stacked",
    "unstacked",
]

Record = dict[str, dict[str, Array]]  # group of the tree -> variable -> value at one step


@jax.jit
def stacked(states: Sequence[Any]) -> Any:
    """States of chains as one tree of arrays, with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@jax.jit
def unstacked(states: Any) -> list[Any]:
    """The states of the chains that were stacked."""
    num_chains = jax.tree.leaves(states)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in range(num_chains)]


class Chain:
    """The steps of a NumPyro kernel: the key is in its state, and a record is a draw.

    Args:
        kernel: the kernel.
        args, kwargs: the model's arguments.
        num_warmup: steps that leave no record.
        extra_fields: dotted paths of fields of the state to record.
        jit_model_args: whether arrays among the model's arguments are arguments of the loop.
    """

    warms_up = True  # whether the first `num_warmup` steps leave no record
    record_dim = "draw"  # name of the dimension of records in the tree
    report = "chains"  # which checks `diagnostics.report` makes

    def __init__(
        self,
        kernel: MCMCKernel,
        args: tuple,
        kwargs: dict[str, Any],
        num_warmup: int,
        extra_fields: tuple[str, ...],
        jit_model_args: bool = False,
    ):
        self.kernel, self.args, self.kwargs, self.num_warmup = kernel, args, kwargs, num_warmup
        self.extra_fields, self.jit_model_args = extra_fields, jit_model_args
        leaves = enumerate(jax.tree.leaves((args, kwargs)))
        self._given = {i: leaf for i, leaf in leaves if jit_model_args and is_arrays(leaf)}
        self.fields: dict[str, str] = {}  # name in `sample_stats` -> path in the state
        self.asks_host = False  # whether a state may need the host before its next step
        self.data: Any = None  # arrays that `step` and `record` take
        # (kernel, what its `init` has read), of the kernel or its blocks
        self._readings: list[tuple[Any, Any]] = []
        self._begun: Callable | None = None  # the kernel's `init`, traced for the first chain

    def start(self, rng_key: Array, init_params: Any) -> Any:
        """The state of one chain before its first step; on the host."""
        state = jax.tree.map(_on_device, self._first(rng_key, init_params))
        parts = (self.kernel, *(block for block, _ in getattr(self.kernel, "blocks", ())))
        self._readings = [(part, part.reading) for part in parts if hasattr(part, "reading")]
        is_ours = isinstance(self.kernel, GibbsBlock)
        own = self.kernel.data(self.args, self.kwargs) if is_ours else None
        self.data = (own, self._given) if self._given or own is not None else None
        self.asks_host = bool(self._growing(state))
        position = getattr(state, self.kernel.sample_field)
        if init_params is not None:
            _check_start(self.kernel, position, init_params)
        fields = _statistics(state)
        default = [field for field in self.kernel.default_fields if field not in fields.values()]
        fields |= {field: field for field in default if field != self.kernel.sample_field}
        _check_fields(state, self.extra_fields)
        self.fields = fields | {field: field for field in self.extra_fields}
        return state

    @property
    def reading(self) -> Any:
        """The kernel's reading; for a kernel of blocks, that of the first block that has one."""
        return self._readings[0][1] if self._readings else None

    def bind(self) -> None:
        """Restores the reading of `start`, which another run of the kernel may have replaced."""
        for part, reading in self._readings:
            part.reading = reading

    def _first(self, rng_key: Array, init_params: Any) -> Any:
        """The kernel's first state; with `jit_model_args` by one trace for all chains."""
        init = lambda key, params: self.kernel.init(
            key, self.num_warmup, params, model_args=self.args, model_kwargs=self.kwargs
        )
        if not self.jit_model_args:
            return init(rng_key, init_params)
        self._begun = self._begun or interpreted(init, rng_key, init_params)
        state = self._begun(rng_key, init_params)
        parts = (state, *getattr(state, "block_states", ()))
        # kernels that draw from complete conditionals have no energy
        energies = [getattr(part, "potential_energy", None) for part in parts]
        is_finite = all(np.isfinite(energy).all() for energy in energies if energy is not None)
        return state if is_finite else init(rng_key, init_params)  # which raises NumPyro's error

    def step(self, state: Any, data: Any) -> Any:
        """One step. Compiled."""
        return self.kernel.sample(state, *self._arguments(state, data), **self._own(data))

    def record(self, state: Any, data: Any) -> Record:
        """What the tree records of a step. Compiled."""
        position = getattr(state, self.kernel.sample_field)
        process = self.kernel.postprocess_fn(*self._arguments(state, data), **self._own(data))
        values = process(position)
        stats = {name: field_at(path, state) for name, path in self.fields.items()}
        if "lp" in stats:
            stats["lp"] = -stats["lp"]
        return {"posterior": _named(values), "sample_stats": stats}

    @staticmethod
    def _own(data: Any) -> dict[str, Any]:
        """The arrays that the kernel takes as `data`; NumPyro's kernels take none."""
        return {} if data is None or data[0] is None else {"data": data[0]}

    def finished(self, state: Any) -> Array:
        """Always False: a chain ends by its budget, or by a stop rule. Compiled."""
        return jnp.zeros((), bool)

    def needs_host(self, state: Any) -> Array:
        """Whether the kernel, or one of its blocks, needs larger arrays; NumPyro's never do."""
        growing = self._growing(state)
        return jnp.any(
            jnp.array([False, *(kernel.needs_host(part) for _, kernel, part in growing)])
        )

    def on_host(self, states: Sequence[Any]) -> Sequence[Any]:
        """The states of all chains of a lane, with larger arrays."""
        for place, kernel, _ in self._growing(states[0]):
            if place is None:
                return kernel.on_host(states)
            new = kernel.on_host([state.block_states[place] for state in states])
            states = [
                state._replace(
                    z=state.z | getattr(block, kernel.sample_field),
                    block_states=(
                        *state.block_states[:place],
                        block,
                        *state.block_states[place + 1 :],
                    ),
                )
                for state, block in zip(states, new, strict=True)
            ]
        return states

    def _arguments(self, state: Any, data: Any) -> tuple[tuple, dict[str, Any]]:
        """The model's arguments, with the arrays of the loop and the capacity of the state."""
        args, kwargs = self.args, self.kwargs
        if data is not None and data[1]:
            leaves, form = jax.tree.flatten((args, kwargs))
            leaves = [data[1].get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(form, leaves)
        return args, kwargs | self.room(state)

    def room(self, state: Any, draw: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments of the model that set its capacity, as a state has it, or a draw.

        The capacity of a draw includes zeros that pad it at the end.
        """
        return {
            name: value
            for _, kernel, part in self._growing(state)
            for name, value in kernel.arguments(
                getattr(part, kernel.sample_field) if draw is None else draw
            ).items()
        }

    def _growing(self, state: Any) -> list[tuple[int | None, Any, Any]]:
        """(place among the blocks, kernel, its state) of each kernel whose state can grow."""
        parts: list[Any] = [(None, self.kernel, state)]
        if blocks := getattr(self.kernel, "blocks", ()):
            parts = [(i, kernel, state.block_states[i]) for i, (kernel, _) in enumerate(blocks)]
        return [part for part in parts if hasattr(part[1], "on_host")]

    def status(self, state: Any) -> str:
        """A short text for the progress bar."""
        is_full = self.asks_host and self.needs_host(state)
        return "makes room" if is_full else self.kernel.get_diagnostics_str(state)


class Step(NamedTuple):
    """State of a replicate of an algorithm."""

    state: Any
    info: Any  # what the last step reported
    rng_key: Array  # never advanced: the key of step t is fold_in(rng_key, t)
    draw_key: Array  # for the posterior draws at the end
    count: Array  # steps taken


class Replicate:
    """The steps of an algorithm that is no chain: a record is the `Info` of one step."""

    warms_up = False
    record_dim = "step"

    def __init__(self, algorithm: Algorithm, program: Program, extra_fields: tuple[str, ...]):
        self.algorithm, self.extra_fields = algorithm, extra_fields
        self.asks_host = type(algorithm).needs_host is not Algorithm.needs_host
        self.reading, self.data = algorithm.read(program)
        self.report = algorithm.report

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the traced step."""
        return {name: value for name, value in vars(self).items() if name != "_traced"}

    @cached_property
    def _traced(self) -> Callable:
        """The algorithm's step, which JAX traces once for the same shapes."""
        step = lambda key, state, data: self.algorithm.step(key, state, self.reading, data)
        return traced_once(step)

    def bind(self) -> None:
        """Does nothing: an algorithm keeps no reading in itself."""

    def start(self, rng_key: Array, init_params: Any) -> Step:
        """The state of one chain before its first step; on the host."""
        if init_params is not None:
            raise ValueError(
                f"init_params: {type(self.algorithm).__name__} is no chain and starts from its own "
                "`init`; leave it out."
            )
        init_key, step_key, draw_key = split(rng_key, 3)
        state = jax.tree.map(_on_device, self.algorithm.init(init_key, self.reading, self.data))
        _check_fields(state, self.extra_fields)
        _, info = jax.eval_shape(self._traced, step_key, state, self.data)
        info = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), info)
        return Step(state, info, step_key, draw_key, jnp.zeros((), jnp.int32))

    def updated(self, program: Program, lanes: Sequence[Any]) -> list[Any]:
        """The states of all lanes, ready to learn more data.

        Args:
            program: the model with the new rows.
            lanes: stacked states.
        """
        algorithm = self.algorithm
        if not isinstance(algorithm, Online):
            raise TypeError(
                f"update: {type(algorithm).__name__} learns from one data set; call `run` with all "
                "of the data."
            )
        reading, data = self.reading.more(program)
        updated = lambda one: one._replace(
            state=algorithm.updated(one.state, reading, data, self.data)
        )
        found = [stacked([updated(one) for one in unstacked(lane)]) for lane in lanes]
        self.reading, self.data = reading, data
        vars(self).pop("_traced", None)
        return found

    def step(self, state: Step, data: Any) -> Step:
        """One step. Compiled."""
        new, info = self._traced(random.fold_in(state.rng_key, state.count), state.state, data)
        return state._replace(state=new, info=info, count=state.count + 1)

    def record(self, state: Step, data: Any) -> Record:
        """What the tree records of a step. Compiled."""
        extra = {field: field_at(field, state.state) for field in self.extra_fields}
        return {"sample_stats": {**state.info._asdict(), **extra}}

    def finished(self, state: Step) -> Array:
        """Whether nothing is left to do. Compiled."""
        return self.algorithm.finished(state.state)

    def needs_host(self, state: Step) -> Array:
        """Whether the host is needed before the next step. Compiled."""
        return self.algorithm.needs_host(state.state)

    def on_host(self, states: Sequence[Step]) -> Sequence[Step]:
        """The states of replicates that are stacked together, after the work of the host."""
        new = self.algorithm.on_host([each.state for each in states], self.reading, self.data)
        return [each._replace(state=one) for each, one in zip(states, new, strict=True)]


def _on_device(leaf: Any) -> Array:
    """The array of JAX; from one of NumPy without a program, which `jnp.asarray` would compile."""
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)


Stepper = Chain | Replicate


def field_at(path: str, state: Any) -> Array:
    """The part of a state at a dotted path through fields, tuples and dictionaries.

    For example "block_states.0.num_steps". A JAX key is returned as its data.
    """
    for part in path.split("."):
        is_item = part.isdigit() or isinstance(state, dict)
        state = state[int(part) if part.isdigit() else part] if is_item else getattr(state, part)
    is_key = jax.dtypes.issubdtype(jnp.result_type(state), jax.dtypes.prng_key)
    return random.key_data(state) if is_key else state


def _statistics(state: Any) -> dict[str, str]:
    """ArviZ's name -> path of the statistics in a state and in the states of its blocks.

    The name of a later block's statistic gets its number.
    """
    names = {
        "diverging": "diverging",
        "energy": "energy",
        "potential_energy": "lp",
        "accept_prob": "acceptance_rate",
        "num_steps": "n_steps",
    }
    count: Counter[str] = Counter()
    found = {}
    for keys, leaf in jax.tree.leaves_with_path(state):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        is_value = any(isinstance(key, jax.tree_util.DictKey) for key in keys)  # of a site
        *parents, field = path.split(".")
        # the adaptation's own state repeats names
        if field in names and jnp.ndim(leaf) == 0 and not is_value and "adapt_state" not in parents:
            found[names[field] + (f"_{count[field]}" if count[field] else "")] = path
            count[field] += 1
    return found


def _check_fields(state: Any, paths: Sequence[str]) -> None:
    """Raises ValueError unless each path leads to an array in the state."""
    for path in paths:
        try:
            is_array = isinstance(field_at(path, state), Array)
        except (AttributeError, KeyError, IndexError, TypeError):
            is_array = False
        if not is_array:
            raise ValueError(
                f"extra_fields: {path!r} is no array in the state of this kernel, which has "
                f"{list(getattr(state, '_fields', ()))}."
            )


def _check_start(kernel: MCMCKernel, position: Any, init_params: Any) -> None:
    """Raises ValueError where a kernel ignores `init_params`, as some of NumPyro's do."""
    wanted = init_params if isinstance(init_params, dict) else _named(init_params)
    found = _named(position)
    for name, value in wanted.items():
        if name not in found or not np.allclose(np.asarray(value), np.asarray(found[name])):
            raise ValueError(
                f"init_params: {type(kernel).__name__} does not start from the given {name!r}; "
                "leave it out, or use NUTS."
            )


def _named(values: Any) -> dict[str, Array]:
    """Values by name; leaves without a name, as a potential function may have, get numbers.

    A scope's "/" would be a group in a DataTree, so it becomes a dot.
    """
    if isinstance(values, dict):
        return {name.replace("/", "."): value for name, value in values.items()}
    if hasattr(values, "_asdict"):
        return values._asdict()
    return {f"Param:{i}": leaf for i, leaf in enumerate(jax.tree.leaves(values))}


def alone(function: Callable) -> Callable:
    """Lifts a function of one chain to arrays whose leading axis is that one chain."""
    return lambda batch: jax.tree.map(
        lambda leaf: jnp.asarray(leaf)[None], function(jax.tree.map(lambda leaf: leaf[0], batch))
    )


CHAIN_METHODS = {"sequential": alone, "vectorized": jax.vmap, "parallel": alone}


class Loop:
    """The compiled loop of a stepper, and the buffers that it fills.

    Args:
        stepper: what is stepped.
        states: states of the chains, with a leading chain axis.
        chain_method: as for `Driver`.
    """

    def __init__(self, stepper: Stepper, states: Any, chain_method: str | Callable):
        started = perf_counter()
        record = jax.eval_shape(jax.vmap(stepper.record, (0, None)), states, stepper.data)
        size = max(1, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(record)))
        # 16 MiB: a chunk lasts a quarter of a second, and larger buffers would only cost copies
        self.capacity = int(np.clip(16 * 2**20 // size, 1, 2**18))
        self.buffers = jax.tree.map(
            # NumPy's zeros compile nothing
            lambda leaf: jax.device_put(np.zeros((self.capacity, *leaf.shape), leaf.dtype)),
            record,
        )
        self.stepper = stepper
        make_room()
        self.advance = _compiled_loop(stepper, chain_method, states, self.buffers)
        self.seconds_to_compile = perf_counter() - started
        self.pace = 1.0  # records, or warm-up steps, in a chunk; follows the clock

    def size(self, limit: int, num_lanes: int, recorded: bool) -> int:
        """How many records, or warm-up steps, the next chunk takes, at most `limit`."""
        most = self.capacity if recorded or self.stepper.asks_host else limit
        return int(min(limit, max(1, self.pace / num_lanes), most))

    def chunk(
        self, states: Any, size: int, *, steps: int = 1, recorded: bool = True
    ) -> tuple[Any, Any, int]:
        """Takes records until there are enough, or a state asks for the host or has finished.

        Args:
            states: states of the chains, which are donated.
            size: how many records, or warm-up steps.
            steps: steps of the kernel before each record.
            recorded: whether records are kept.

        Returns:
            The states, the records as NumPy arrays, and how many there are.
        """
        started = perf_counter()
        # one step at a time: a state then goes to the host at the same step wherever chunks end
        one_by_one = recorded or self.stepper.asks_host
        trips = (size, steps) if one_by_one else (1, size)
        states, self.buffers, done = self.advance(
            states, self.buffers, self.stepper.data, *map(np.int32, trips)
        )
        count = int(done) if one_by_one else size  # waits for the device
        if count == size:
            # a quarter of a second: short enough for the bar and Ctrl-C, long against the 0.1 ms of
            # a call
            measured = size * 0.25 / max(perf_counter() - started, 1e-6)
            # of several lanes each takes its share of the pace, so `size` is no bound on growth
            self.pace = min(measured, 10.0 * max(size, self.pace))
        kept = count if recorded else 1
        records = jax.tree.map(lambda buffer: np.asarray(buffer)[:kept].copy(), self.buffers)
        return states, records, count

    def nothing(self) -> Any:
        """No records, in the shapes and types of records."""
        return jax.tree.map(
            lambda buffer: np.zeros((0, *buffer.shape[1:]), buffer.dtype), self.buffers
        )


def _compiled_loop(
    stepper: Stepper, chain_method: str | Callable, states: Any, buffers: Any
) -> Callable:
    num_chains = jax.tree.leaves(states)[0].shape[0]
    lift: Callable = chain_method if callable(chain_method) else CHAIN_METHODS[chain_method]
    if num_chains == 1:
        lift = alone  # under vmap both branches of every `cond` would run
    finished, needs_host = lift(stepper.finished), lift(stepper.needs_host)
    # each device loops by itself, and must not end before the others
    by_device = chain_method == "parallel" and num_chains > 1

    def one_step(state: Any, data: Any) -> Any:
        # A chain never finishes, and a single replicate ends the loop when it has. One of several
        # waits for the others: by a branch, which copies the state at each step.
        if stepper.warms_up or num_chains == 1:
            return stepper.step(state, data)
        return jax.lax.cond(
            stepper.finished(state), lambda at: at, lambda at: stepper.step(at, data), state
        )

    def advance(states: Any, buffers: Any, data: Any, num_records: Array, steps: Array):
        step = lift(lambda state: one_step(state, data))
        record = lift(lambda state: stepper.record(state, data))

        def unfinished(carry):
            states, _, written, _ = carry
            goes_on = (by_device | ~jnp.all(finished(states))) & ~jnp.any(needs_host(states))
            return (written < num_records) & goes_on

        def body(carry):
            states, buffers, written, useful = carry
            useful = useful + (~jnp.all(finished(states))).astype(useful.dtype)
            states = jax.lax.fori_loop(0, steps, lambda _, s: step(s), states)
            buffers = jax.tree.map(
                lambda buffer, value: buffer.at[written].set(value), buffers, record(states)
            )
            return states, buffers, written + 1, useful

        zero = jnp.zeros((), jnp.int32)
        states, buffers, _, useful = jax.lax.while_loop(
            unfinished, body, (states, buffers, zero, zero)
        )
        return states, buffers, useful

    # The operations of an algorithm's step are short. XLA's memory-saving schedule runs them nearly
    # one after the other, so that no second thread is woken for each of them. A chain is compiled
    # as NumPyro compiles it: its draws are NumPyro's, bit for bit.
    in_order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    trip = jax.ShapeDtypeStruct((), jnp.int32)
    return built(
        _one_chain_a_device(advance, num_chains) if by_device else advance,
        (states, buffers, stepper.data, trip, trip),
        None if stepper.warms_up else in_order,
        donated=(0, 1),
        is_kept=stepper.data is not None,  # else all data are constants in the code
    )


def _one_chain_a_device(advance: Callable, num_chains: int) -> Callable:
    """Maps the loop over devices without collectives: each runs its chain at its own speed."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:num_chains]), ("chain",))
    chain, record, same = (
        jax.sharding.PartitionSpec("chain"),
        jax.sharding.PartitionSpec(None, "chain"),
        jax.sharding.PartitionSpec(),
    )

    def local(states, buffers, data, num_records, steps):
        states, buffers, count = advance(states, buffers, data, num_records, steps)
        return states, buffers, count[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(chain, record, same, same, same),
        out_specs=(chain, record, chain),
        check_vma=False,
    )

    def all_devices(states, buffers, data, num_records, steps):
        states, buffers, counts = mapped(states, buffers, data, num_records, steps)
        return states, buffers, jnp.max(counts)

    return all_devices
