"""One compiled loop with a dynamic trip count, over the chains of a lane; the host acts between its
calls.

A call takes `num_records` records, each after `steps` steps of the kernel, into preallocated
buffers [record, chain, ...]. Both numbers are arguments of the compiled function, so warm-up,
thinning and chunks of any length share one compilation, and the numbers that come out do not depend
on how a run is cut into chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.sharding import Mesh, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import built, make_room, once
from inference.program.program import Program
from inference.run.protocol import Algorithm, Online
from inference.run.svi import StochasticVI

__all__ = [
    "CHAIN_METHODS",
    "Chain",
    "Loop",
    "Record",
    "Replicate",
    "Step",
    "Stepper",
    "alone",
    "apart",
    "field_at",
    "stacked",
    "stepper_of",
]

Record = dict[str, dict[str, Array]]  # group of the tree -> variable -> value at one step


@jax.jit
def stacked(states: Sequence[Any]) -> Any:
    """States of chains as one, with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def apart(states: Any) -> list[Any]:
    """And back."""
    return _apart(states, jax.tree.leaves(states)[0].shape[0])


@partial(jax.jit, static_argnums=1)
def _apart(states: Any, num_chains: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in range(num_chains)]


STATISTICS = {  # fields of NumPyro's states -> ArviZ's names
    "diverging": "diverging",
    "energy": "energy",
    "potential_energy": "lp",
    "accept_prob": "acceptance_rate",
    "num_steps": "n_steps",
}


class Stepper(Protocol):
    """What the loop asks for."""

    warms_up: bool  # whether the first `num_warmup` steps leave no record
    record_dim: str  # what a record is in the tree: a "draw", or a "step"
    report: str  # which checks `diagnostics.report` makes
    asks_host: bool  # whether a state may need the host before its next step

    data: Any  # arrays that a step and a record read, arguments of the compiled loop

    @property
    def reading(self) -> Any:
        """What the kernel has read of the model."""
        ...

    def bind(self) -> None:
        """Gives the kernel the reading of this run."""
        ...

    def start(self, rng_key: Array, init_params: Any) -> Any:
        """The state of one chain before its first step; on the host."""
        ...

    def step(self, state: Any, data: Any) -> Any:
        """One step. Compiled."""
        ...

    def record(self, state: Any, data: Any) -> Record:
        """What a step leaves in the tree. Compiled."""
        ...

    def finished(self, state: Any) -> Array:
        """Whether nothing is left to do. Compiled."""
        ...

    def needs_host(self, state: Any) -> Array:
        """Whether the host is needed before the next step. Compiled."""
        ...

    def on_host(self, states: Sequence[Any]) -> Sequence[Any]:
        """The states of chains that are stacked together, after what they need the host for."""
        ...

    def status(self, state: Any) -> str:
        """A few words for the bar."""
        ...


class Chain:
    """A NumPyro kernel: the key lives in its state, a record is a draw."""

    warms_up = True
    record_dim = "draw"
    report = "chains"

    def __init__(
        self,
        kernel: MCMCKernel,
        args: tuple,
        kwargs: dict,
        num_warmup: int,
        extra_fields: tuple[str, ...],
        jit_model_args: bool = False,
    ):
        self.kernel, self.args, self.kwargs, self.num_warmup = kernel, args, kwargs, num_warmup
        self.extra_fields, self.jit_model_args = extra_fields, jit_model_args
        self._given = {
            i: leaf
            for i, leaf in enumerate(jax.tree.leaves((args, kwargs)))
            if jit_model_args and _is_array(leaf)
        }
        self.fields: dict[str, str] = {}  # name in `sample_stats` -> path in the state
        self.asks_host = False
        self.data: Any = None
        # (kernel, what its `init` has read), of the kernel or its blocks
        self._readings: list[tuple[Any, Any]] = []

    def start(self, rng_key: Array, init_params: Any) -> Any:
        """The state of one chain before its first step; on the host."""
        state = jax.tree.map(jnp.asarray, self._first(rng_key, init_params))
        parts = (self.kernel, *(block for block, _ in getattr(self.kernel, "blocks", ())))
        self._readings = [(part, part.reading) for part in parts if hasattr(part, "reading")]
        own = getattr(self.kernel, "data", lambda args, kwargs: None)(self.args, self.kwargs)
        self.data = (own, self._given) if self._given or own is not None else None
        self.asks_host = bool(self._growing(state))
        position = getattr(state, self.kernel.sample_field)
        _check_start(self.kernel, position, init_params)
        known = {name: path for path, name in _statistics(state)}
        default = {
            field: field
            for field in self.kernel.default_fields
            if field != self.kernel.sample_field
        }
        extra = {field: _checked_field(state, field) for field in self.extra_fields}
        self.fields = known | {k: v for k, v in default.items() if v not in known.values()} | extra
        return state

    @property
    def reading(self) -> Any:
        """What the kernel has read; of a kernel of blocks that of the first block that reads."""
        return self._readings[0][1] if self._readings else None

    def bind(self) -> None:
        """Gives the kernel back what `start` has read, where another run of the same kernel has
        read other data since.
        """
        for part, reading in self._readings:
            part.reading = reading

    def _first(self, rng_key: Array, init_params: Any) -> Any:
        """Eagerly, each operation is compiled by itself, many of them; so where a run shall
        compile little, `init` is one program.
        """
        init = lambda key, params: self.kernel.init(
            key, self.num_warmup, params, model_args=self.args, model_kwargs=self.kwargs
        )
        if not self.jit_model_args:
            return init(rng_key, init_params)
        state = once(init, rng_key, init_params)(rng_key, init_params)
        energies = [
            getattr(part, "potential_energy", None)
            for part in (state, *getattr(state, "block_states", ()))
        ]
        # exact conditionals know none
        is_finite = all(np.isfinite(energy).all() for energy in energies if energy is not None)
        return state if is_finite else init(rng_key, init_params)  # which says what is wrong

    def step(self, state: Any, data: Any) -> Any:
        """One step. Compiled."""
        own = None if data is None else data[0]
        # NumPyro's have none
        return self.kernel.sample(
            state, *self._arguments(state, data), **({} if own is None else {"data": own})
        )

    def record(self, state: Any, data: Any) -> Record:
        """What a step leaves in the tree. Compiled."""
        position = getattr(state, self.kernel.sample_field)
        values = self.kernel.postprocess_fn(*self._arguments(state, data))(position)
        stats = {name: field_at(path, state) for name, path in self.fields.items()}
        if "lp" in stats:
            stats["lp"] = -stats["lp"]
        return {"posterior": _named(values), "sample_stats": stats}

    def finished(self, state: Any) -> Array:
        """Whether nothing is left to do. Compiled."""
        return jnp.zeros((), bool)

    def needs_host(self, state: Any) -> Array:
        """Whether the kernel, or one of its blocks, needs more room; by NumPyro's protocol none
        does.
        """
        return jnp.any(
            jnp.array(
                [False, *(kernel.needs_host(part) for _, kernel, part in self._growing(state))]
            )
        )

    def on_host(self, states: Sequence[Any]) -> Sequence[Any]:
        """The states with more room: of the kernel, or of those of its blocks that can grow."""
        for place, kernel, _ in self._growing(states[0]):
            if place is None:
                return kernel.on_host(states)
            new = kernel.on_host([state.block_states[place] for state in states])
            states = [
                _with_block(state, place, kernel, block)
                for state, block in zip(states, new, strict=True)
            ]
        return states

    def _arguments(self, state: Any, data: Any) -> tuple[tuple, dict[str, Any]]:
        """Those of the model: with what the loop was given, and with as much room as the state
        has.
        """
        args, kwargs = self.args, self.kwargs
        if data is not None and data[1]:
            leaves, form = jax.tree.flatten((args, kwargs))
            args, kwargs = jax.tree.unflatten(
                form, [data[1].get(i, leaf) for i, leaf in enumerate(leaves)]
            )
        return args, kwargs | self.room(state)

    def room(self, state: Any, draw: dict[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of the model that say how much room there is: in the state, or in a draw,
        whose zeros behind are room as well.
        """
        growing = self._growing(state)
        asked = lambda kernel, part: kernel.arguments(
            getattr(part, kernel.sample_field) if draw is None else draw
        )
        return {
            name: value
            for _, kernel, part in growing
            for name, value in asked(kernel, part).items()
        }

    def _growing(self, state: Any) -> list[tuple[int | None, Any, Any]]:
        """(place among the blocks, kernel, its state) of each that can grow."""
        blocks = getattr(self.kernel, "blocks", ())
        parts = [(i, kernel, state.block_states[i]) for i, (kernel, _) in enumerate(blocks)] or [
            (None, self.kernel, state)
        ]
        return [part for part in parts if hasattr(part[1], "on_host")]

    def status(self, state: Any) -> str:
        """A few words for the bar."""
        return "makes room" if self.needs_host(state) else self.kernel.get_diagnostics_str(state)


class Step(NamedTuple):
    """State of a replicate of an algorithm."""

    state: Any
    info: Any  # what the last step reported
    rng_key: Array  # never advanced: the key of step t is fold_in(rng_key, t)
    draw_key: Array  # for the posterior draws at the end
    count: Array  # steps taken


class Replicate:
    """An algorithm that is not a chain: a record is what one step reports."""

    warms_up = False
    record_dim = "step"
    asks_host = True

    def __init__(self, algorithm: Algorithm, program: Program, extra_fields: tuple[str, ...]):
        self.algorithm, self.extra_fields = algorithm, extra_fields
        self.reading, self.data = algorithm.read(program)
        self.report = algorithm.report

    def bind(self) -> None:
        """Nothing: an algorithm keeps no reading."""

    def start(self, rng_key: Array, init_params: Any) -> Step:
        """The state of one chain before its first step; on the host."""
        if init_params is not None:
            raise ValueError(
                f"init_params: {type(self.algorithm).__name__} is no chain and starts from its own "
                "`init`; leave it out."
            )
        init_key, step_key, draw_key = random.split(rng_key, 3)
        state = jax.tree.map(jnp.asarray, self.algorithm.init(init_key, self.reading, self.data))
        for field in self.extra_fields:
            _checked_field(state, field)
        step = lambda key, state, data: self.algorithm.step(key, state, self.reading, data)
        _, info = jax.eval_shape(step, step_key, state, self.data)
        info = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), info)
        return Step(state, info, step_key, draw_key, jnp.zeros((), jnp.int32))

    def updated(self, program: Program, lanes: Sequence[Any]) -> list[Any]:
        """The states that go on with more data, which take the place of those before."""
        algorithm = self.algorithm
        if not isinstance(algorithm, Online):
            raise TypeError(
                f"update: {type(algorithm).__name__} learns from one data set; call `run` with all "
                "of the data."
            )
        reading, data = self.reading.more(program)
        go_on = lambda one: one._replace(
            state=algorithm.updated(one.state, reading, data, self.data)
        )
        found = [stacked([go_on(one) for one in apart(lane)]) for lane in lanes]
        self.reading, self.data = reading, data
        return found

    def step(self, state: Step, data: Any) -> Step:
        """One step. Compiled."""
        new, info = self.algorithm.step(
            random.fold_in(state.rng_key, state.count), state.state, self.reading, data
        )
        return state._replace(state=new, info=info, count=state.count + 1)

    def record(self, state: Step, data: Any) -> Record:
        """What a step leaves in the tree. Compiled."""
        extra = {field: field_at(field, state.state) for field in self.extra_fields}
        return {"sample_stats": {**state.info._asdict(), **extra}}

    def finished(self, state: Step) -> Array:
        """Whether nothing is left to do. Compiled."""
        return self.algorithm.finished(state.state)

    def needs_host(self, state: Step) -> Array:
        """Whether the host is needed before the next step. Compiled."""
        return self.algorithm.needs_host(state.state)

    def on_host(self, states: Sequence[Step]) -> Sequence[Step]:
        """The states of chains that are stacked together, after what they need the host for."""
        new = self.algorithm.on_host([each.state for each in states], self.reading, self.data)
        return [each._replace(state=one) for each, one in zip(states, new, strict=True)]

    def status(self, state: Step) -> str:
        """A few words for the bar."""
        return ""


def stepper_of(
    kernel: MCMCKernel | SVI | Algorithm,
    program: Program | None,
    args: tuple,
    kwargs: dict,
    num_warmup: int,
    extra_fields: tuple[str, ...],
    jit_model_args: bool,
) -> "Chain | Replicate":
    """The stepper of a kernel of either family; a chain may do without a model (NumPyro's
    `potential_fn`).
    """
    if isinstance(kernel, MCMCKernel):
        return Chain(kernel, args, kwargs, num_warmup, extra_fields, jit_model_args)
    algorithm = StochasticVI(kernel) if isinstance(kernel, SVI) else kernel
    if program is None:
        raise TypeError(
            f"kernel: {type(algorithm).__name__} has no `model`; an Algorithm keeps the model that "
            "it was built on."
        )
    return Replicate(algorithm, program, extra_fields)


def _with_block(state: Any, place: int, kernel: MCMCKernel, block: Any) -> Any:
    """A state of NumPyro's `Gibbs` with another state of one of its blocks."""
    blocks = (*state.block_states[:place], block, *state.block_states[place + 1 :])
    return state._replace(z=state.z | getattr(block, kernel.sample_field), block_states=blocks)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype != object)


def field_at(path: str, state: Any) -> Array:
    """The part of a state that a dotted path leads to, also into tuples and dictionaries:
    "block_states.0.num_steps".
    """
    for part in path.split("."):
        state = (
            state[int(part)]
            if part.isdigit()
            else state[part]
            if isinstance(state, dict)
            else getattr(state, part)
        )
    return (
        random.key_data(state)
        if jax.dtypes.issubdtype(jnp.result_type(state), jax.dtypes.prng_key)
        else state
    )


def _statistics(state: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of the known statistics of a state and of the states of its blocks; a second
    block's name gets its number.
    """
    found: dict[str, int] = {}
    for here, field in _leaves(state, path):
        if field in STATISTICS:
            count = found.get(field, 0)
            found[field] = count + 1
            yield here, STATISTICS[field] + (f"_{count}" if count else "")


def _leaves(state: Any, path: str) -> Iterator[tuple[str, str]]:
    fields = (
        state._fields
        if hasattr(state, "_fields")
        else range(len(state))
        if isinstance(state, tuple)
        else ()
    )
    for field in fields:
        value = getattr(state, field) if isinstance(field, str) else state[field]
        here = f"{path}.{field}" if path else str(field)
        if field == "adapt_state":
            continue  # the adaptation's own bookkeeping repeats these names
        if isinstance(value, tuple):
            yield from _leaves(value, here)
        elif isinstance(value, Array) and value.ndim == 0:
            yield here, str(field)


def _checked_field(state: Any, path: str) -> str:
    try:
        if not isinstance(field_at(path, state), Array):
            raise TypeError(path)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        have = list(getattr(state, "_fields", ()))
        raise ValueError(
            f"extra_fields: {path!r} is no array in the state of this kernel, which has {have}."
        ) from error
    return path


def _check_start(kernel: MCMCKernel, position: Any, init_params: Any) -> None:
    """Some NumPyro kernels ignore `init_params`; that must not pass in silence."""
    if init_params is None:
        return
    wanted = init_params if isinstance(init_params, dict) else dict(_named(init_params))
    found = _named(position)
    for name, value in wanted.items():
        if name not in found or not jnp.allclose(jnp.asarray(value), found[name]):
            raise ValueError(
                f"init_params: {type(kernel).__name__} does not start from the given {name!r}; "
                "leave it out, or use NUTS."
            )


def _named(values: Any) -> dict[str, Array]:
    """Values by name, also for kernels that are built on a potential function and move any pytree.

    A scope's "/" would be a group in a DataTree, so it becomes a dot.
    """
    if isinstance(values, dict):
        return {name.replace("/", "."): value for name, value in values.items()}
    if hasattr(values, "_asdict"):
        return values._asdict()
    return {f"Param:{i}": leaf for i, leaf in enumerate(jax.tree.leaves(values))}


BUFFER_BYTES = 16 * 2**20  # more would only be copied for nothing: a chunk is a quarter of a second
# The operations of an algorithm's step are short: the order that saves memory is nearly a chain,
# and no second thread wakes up for each of them. A chain is compiled as NumPyro compiles it, for
# its draws are NumPyro's, bit for bit.
IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# how often the host gets its turn: short for a live bar and Ctrl-C, long against the 0.1 ms of a
# call
CHUNK_SECONDS = 0.25


def alone(function: Callable) -> Callable:
    """`function` of one chain, lifted to an axis of one chain."""
    return lambda batch: jax.tree.map(
        lambda leaf: jnp.asarray(leaf)[None], function(jax.tree.map(lambda leaf: leaf[0], batch))
    )


CHAIN_METHODS = {"sequential": alone, "vectorized": jax.vmap, "parallel": alone}


class Loop:
    """The compiled loop of a stepper, and the buffers that it fills."""

    def __init__(self, stepper: Stepper, states: Any, chain_method: str | Callable):
        """`states` have a leading chain axis."""
        started = perf_counter()
        lift: Callable = chain_method if callable(chain_method) else CHAIN_METHODS[chain_method]
        num_chains = jax.tree.leaves(states)[0].shape[0]
        if num_chains == 1:
            lift = alone  # under vmap both branches of every `cond` would run
        record = jax.eval_shape(jax.vmap(stepper.record, (0, None)), states, stepper.data)
        size = max(1, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(record)))
        self.capacity = int(np.clip(BUFFER_BYTES // size, 1, 2**18))
        self.buffers = jax.tree.map(
            lambda leaf: jnp.zeros((self.capacity, *leaf.shape), leaf.dtype), record
        )
        self.stepper = stepper
        make_room()
        self.advance = _compiled(stepper, lift, chain_method, num_chains, states, self.buffers)
        self.seconds_to_compile = perf_counter() - started
        self.pace = 1.0  # records, or warm-up steps, in a chunk; follows the clock

    def size(self, limit: int, num_lanes: int, recorded: bool) -> int:
        """How many records, or warm-up steps, fit into a chunk."""
        return int(
            min(
                limit,
                max(1, self.pace / num_lanes),
                self.capacity if recorded or self.stepper.asks_host else limit,
            )
        )

    def chunk(
        self, states: Any, size: int, *, steps: int = 1, recorded: bool = True
    ) -> tuple[Any, Any, int]:
        """`size` records of `steps` steps each (or as many warm-up steps), fewer where a state asks
        for the host or has finished: states, records on the host, how many.
        """
        started = perf_counter()
        # so that a state is on the host at the same step wherever chunks end
        one_by_one = recorded or self.stepper.asks_host
        trips = (size, steps) if one_by_one else (1, size)
        states, self.buffers, done = self.advance(
            states, self.buffers, self.stepper.data, *(np.int32(n) for n in trips)
        )
        count = int(done) if one_by_one else size  # waits for the device
        if count == size:
            self._follow_the_clock(size, perf_counter() - started)
        kept = count if recorded else 1
        records = jax.tree.map(lambda buffer: np.asarray(buffer)[:kept].copy(), self.buffers)
        return states, records, count

    def nothing(self) -> Any:
        """No records, in the shapes and types of records."""
        return jax.tree.map(
            lambda buffer: np.zeros((0, *buffer.shape[1:]), buffer.dtype), self.buffers
        )

    def _follow_the_clock(self, size: int, seconds: float) -> None:
        self.pace = min(size * CHUNK_SECONDS / max(seconds, 1e-6), 10.0 * size)


def _compiled(
    stepper: Stepper, lift: Callable, chain_method: Any, num_chains: int, states: Any, buffers: Any
) -> Callable:
    finished, needs_host = lift(stepper.finished), lift(stepper.needs_host)

    # each device loops by itself, and must not end before the others
    by_device = chain_method == "parallel" and num_chains > 1

    def advance(states: Any, buffers: Any, data: Any, num_records: Array, steps: Array):
        step = lift(
            lambda state: (
                _unless_finished(stepper, state, data)
                if num_chains > 1
                else stepper.step(state, data)
            )
        )

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

    whole = _one_chain_a_device(advance, num_chains) if by_device else advance
    trip = jax.ShapeDtypeStruct((), jnp.int32)
    code, given = (
        jax.jit(whole, donate_argnums=(0, 1), keep_unused=True),
        (states, buffers, stepper.data, trip, trip),
    )
    options = None if stepper.warms_up else IN_ORDER
    return (
        code.lower(*given).compile(compiler_options=options)
        if stepper.data is None
        else built(code, given, options)
    )


def _unless_finished(stepper: Stepper, state: Any, data: Any) -> Any:
    """A replicate that has finished waits for the others.

    A single one does without: the branch would copy its state each step.
    """
    if stepper.warms_up:
        return stepper.step(state, data)  # a chain never finishes
    return jax.lax.cond(
        stepper.finished(state), lambda at: at, lambda at: stepper.step(at, data), state
    )


def _one_chain_a_device(advance: Callable, num_chains: int) -> Callable:
    """No collective inside: each device runs its own chain at its own speed."""
    mesh = Mesh(np.array(jax.local_devices()[:num_chains]), ("chain",))
    chain, record, same = PartitionSpec("chain"), PartitionSpec(None, "chain"), PartitionSpec()

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
