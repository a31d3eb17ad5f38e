"""The two families behind one face: what the loop needs of a chain, and of an algorithm that is not one.

A stepper works on the state of *one* chain (or replicate). `start` runs eagerly, once a chain, so that a kernel which
binds things at `init` binds values and never tracers; `step` and `record` are compiled.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from inference.compiling import once
from inference.kernels.stochastic_vi import StochasticVI
from inference.program import Program
from inference.protocol import Algorithm

__all__ = ["Chain", "Record", "Replicate", "Stepper", "stepper_of"]

Record = dict[str, dict[str, Array]]  # group of the tree -> variable -> value at one step

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
    grows: bool  # whether a state may become full, or have room to spare

    data: Any  # arrays that a step and a record read, arguments of the compiled loop

    def start(self, rng_key: Array, init_params: Any) -> Any: ...
    def step(self, state: Any, data: Any) -> Any: ...
    def record(self, state: Any, data: Any) -> Record: ...
    def finished(self, state: Any) -> Array: ...
    def is_full(self, state: Any) -> Array: ...
    def grown(self, state: Any) -> Any: ...
    def has_spare(self, state: Any) -> Array: ...
    def shrunk(self, state: Any) -> Any: ...
    def is_waiting(self, state: Any) -> Array: ...
    def served(self, state: Any) -> Any: ...
    def status(self, state: Any) -> str: ...


class Chain:
    """A NumPyro kernel: the key lives in its state, a record is a draw."""

    warms_up = True
    record_dim = "draw"

    def __init__(
        self, kernel: MCMCKernel, args: tuple, kwargs: dict, num_warmup: int, extra_fields: tuple[str, ...], jit_model_args: bool = False
    ):
        self.kernel, self.args, self.kwargs, self.num_warmup = kernel, args, kwargs, num_warmup
        self.extra_fields, self.jit_model_args = extra_fields, jit_model_args
        self._given = {i: leaf for i, leaf in enumerate(jax.tree.leaves((args, kwargs))) if jit_model_args and _is_array(leaf)}
        self.fields: dict[str, str] = {}  # name in `sample_stats` -> path in the state
        self.grows = False
        self.data: Any = None

    def start(self, rng_key: Array, init_params: Any) -> Any:
        state = jax.tree.map(jnp.asarray, self._first(rng_key, init_params))
        own = getattr(self.kernel, "data", lambda args, kwargs: None)(self.args, self.kwargs)
        self.data = (own, self._given) if self._given or own is not None else None
        self.grows = bool(self._growing(state))
        position = getattr(state, self.kernel.sample_field)
        _check_start(self.kernel, position, init_params)
        known = {name: path for path, name in _statistics(state)}
        default = {field: field for field in self.kernel.default_fields if field != self.kernel.sample_field}
        extra = {field: _checked_field(state, field) for field in self.extra_fields}
        self.fields = known | {k: v for k, v in default.items() if v not in known.values()} | extra
        return state

    def _first(self, rng_key: Array, init_params: Any) -> Any:
        """Eagerly, each operation is compiled by itself, many of them; so where a run shall compile little, `init` is one program."""
        init = lambda key, params: self.kernel.init(key, self.num_warmup, params, model_args=self.args, model_kwargs=self.kwargs)
        if not self.jit_model_args:
            return init(rng_key, init_params)
        state = once(init, rng_key, init_params)(rng_key, init_params)
        energies = [getattr(part, "potential_energy", None) for part in (state, *getattr(state, "block_states", ()))]
        is_finite = all(np.isfinite(energy).all() for energy in energies if energy is not None)  # exact conditionals know none
        return state if is_finite else init(rng_key, init_params)  # which says what is wrong

    def step(self, state: Any, data: Any) -> Any:
        own = None if data is None else data[0]
        return self.kernel.sample(state, *self._arguments(state, data), **({} if own is None else {"data": own}))  # NumPyro's have none

    def record(self, state: Any, data: Any) -> Record:
        position = getattr(state, self.kernel.sample_field)
        values = self.kernel.postprocess_fn(*self._arguments(state, data))(position)
        stats = {name: field_at(path, state) for name, path in self.fields.items()}
        if "lp" in stats:
            stats["lp"] = -stats["lp"]
        return {"posterior": _named(values), "sample_stats": stats}

    def finished(self, state: Any) -> Array:
        return jnp.zeros((), bool)

    def is_full(self, state: Any) -> Array:
        """Whether the kernel, or one of its blocks, needs more room; by NumPyro's protocol none does."""
        return jnp.any(jnp.array([False, *(kernel.is_full(part) for _, kernel, part in self._growing(state))]))

    def grown(self, state: Any) -> Any:
        """The state with more room: of the kernel, or of those of its blocks that can grow."""
        return self._resized(state, "grown")

    def has_spare(self, state: Any) -> Array:
        """Whether all that can grow have more room than they need."""
        parts = self._growing(state)
        return jnp.all(jnp.array([bool(parts), *(kernel.has_spare(part) for _, kernel, part in parts)]))

    def shrunk(self, state: Any) -> Any:
        """The state with less room."""
        return self._resized(state, "shrunk")

    def is_waiting(self, state: Any) -> Array:
        return jnp.zeros((), bool)  # a chain has all that it needs

    def served(self, state: Any) -> Any:
        return state

    def _resized(self, state: Any, how: str) -> Any:
        for place, kernel, part in self._growing(state):
            new = getattr(kernel, how)(part)
            if place is None:
                return new
            blocks = (*state.block_states[:place], new, *state.block_states[place + 1 :])
            state = state._replace(z=state.z | getattr(new, kernel.sample_field), block_states=blocks)
        return state

    def _arguments(self, state: Any, data: Any) -> tuple[tuple, dict[str, Any]]:
        """Those of the model: with what the loop was given, and with as much room as the state has."""
        args, kwargs = self.args, self.kwargs
        if data is not None and data[1]:
            leaves, form = jax.tree.flatten((args, kwargs))
            args, kwargs = jax.tree.unflatten(form, [data[1].get(i, leaf) for i, leaf in enumerate(leaves)])
        return args, kwargs | self.room(state)

    def room(self, state: Any, draw: dict[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of the model that say how much room there is: in the state, or in a draw, whose zeros behind are room as well."""
        growing = self._growing(state)
        asked = lambda kernel, part: kernel.arguments(getattr(part, kernel.sample_field) if draw is None else draw)
        return {name: value for _, kernel, part in growing for name, value in asked(kernel, part).items()}

    def _growing(self, state: Any) -> list[tuple[int | None, Any, Any]]:
        """(place among the blocks, kernel, its state) of each that can grow."""
        blocks = getattr(self.kernel, "blocks", ())
        parts = [(i, kernel, state.block_states[i]) for i, (kernel, _) in enumerate(blocks)] or [(None, self.kernel, state)]
        return [part for part in parts if hasattr(part[1], "grown")]

    def status(self, state: Any) -> str:
        return "makes room" if self.is_full(state) else self.kernel.get_diagnostics_str(state)


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
    grows = True

    def __init__(self, algorithm: Algorithm, program: Program, extra_fields: tuple[str, ...]):
        self.algorithm, self.program, self.extra_fields = algorithm, program, extra_fields
        self.data: Any = None

    def start(self, rng_key: Array, init_params: Any) -> Step:
        if init_params is not None:
            raise ValueError(f"init_params: {type(self.algorithm).__name__} is no chain and starts from its own `init`; leave it out.")
        init_key, step_key, draw_key = random.split(rng_key, 3)
        state = jax.tree.map(jnp.asarray, self.algorithm.init(init_key, self.program))
        self.data = self.algorithm.data(self.program)
        for field in self.extra_fields:
            _checked_field(state, field)
        _, info = jax.eval_shape(lambda key, state: self.algorithm.step(key, state, self._given(self.data)), step_key, state)
        info = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), info)
        return Step(state, info, step_key, draw_key, jnp.zeros((), jnp.int32))

    def _given(self, data: Any) -> Any:
        return self.program if data is None else data

    def updated(self, program: Program, state: Step) -> Step:
        """The state that goes on with the data of another program."""
        return state._replace(state=self.algorithm.updated(state.state, program, self.program))

    def step(self, state: Step, data: Any) -> Step:
        new, info = self.algorithm.step(random.fold_in(state.rng_key, state.count), state.state, self._given(data))
        return state._replace(state=new, info=info, count=state.count + 1)

    def record(self, state: Step, data: Any) -> Record:
        extra = {field: field_at(field, state.state) for field in self.extra_fields}
        return {"sample_stats": {**state.info._asdict(), **extra}}

    def finished(self, state: Step) -> Array:
        return self.algorithm.finished(state.state)

    def is_full(self, state: Step) -> Array:
        return self.algorithm.is_full(state.state)

    def grown(self, state: Step) -> Step:
        return state._replace(state=self.algorithm.grown(state.state, self.program))

    def has_spare(self, state: Step) -> Array:
        return jnp.zeros((), bool)  # what an algorithm has found out stays

    def shrunk(self, state: Step) -> Step:
        return state

    def is_waiting(self, state: Step) -> Array:
        return self.algorithm.is_waiting(state.state)

    def served(self, state: Step) -> Step:
        return state._replace(state=self.algorithm.served(state.state, self.program))

    def status(self, state: Step) -> str:
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
    """The stepper of a kernel of either family; a chain may do without a model (NumPyro's `potential_fn`)."""
    if isinstance(kernel, MCMCKernel):
        return Chain(kernel, args, kwargs, num_warmup, extra_fields, jit_model_args)
    algorithm = StochasticVI(kernel) if isinstance(kernel, SVI) else kernel
    if program is None:
        raise TypeError(f"kernel: {type(algorithm).__name__} has no `model`; an Algorithm keeps the model that it was built on.")
    return Replicate(algorithm, program, extra_fields)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype != object)


def field_at(path: str, state: Any) -> Array:
    """The part of a state that a dotted path leads to, also into tuples and dictionaries: "block_states.0.num_steps"."""
    for part in path.split("."):
        state = state[int(part)] if part.isdigit() else state[part] if isinstance(state, dict) else getattr(state, part)
    return random.key_data(state) if jax.dtypes.issubdtype(jnp.result_type(state), jax.dtypes.prng_key) else state


def _statistics(state: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of the known statistics of a state and of the states of its blocks; a second block's name gets its number."""
    found: dict[str, int] = {}
    for here, field in _leaves(state, path):
        if field in STATISTICS:
            count = found.get(field, 0)
            found[field] = count + 1
            yield here, STATISTICS[field] + (f"_{count}" if count else "")


def _leaves(state: Any, path: str) -> Iterator[tuple[str, str]]:
    fields = state._fields if hasattr(state, "_fields") else range(len(state)) if isinstance(state, tuple) else ()
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
        raise ValueError(f"extra_fields: {path!r} is no array in the state of this kernel, which has {have}.") from error
    return path


def _check_start(kernel: MCMCKernel, position: Any, init_params: Any) -> None:
    """Some NumPyro kernels ignore `init_params`; that must not pass in silence."""
    if init_params is None:
        return
    wanted = init_params if isinstance(init_params, dict) else dict(_named(init_params))
    found = _named(position)
    for name, value in wanted.items():
        if name not in found or not jnp.allclose(jnp.asarray(value), found[name]):
            raise ValueError(f"init_params: {type(kernel).__name__} does not start from the given {name!r}; leave it out, or use NUTS.")


def _named(values: Any) -> dict[str, Array]:
    """Values by name, also for kernels that are built on a potential function and move any pytree. A scope's "/" would be a
    group in a DataTree, so it becomes a dot."""
    if isinstance(values, dict):
        return {name.replace("/", "."): value for name, value in values.items()}
    if hasattr(values, "_asdict"):
        return values._asdict()
    return {f"Param:{i}": leaf for i, leaf in enumerate(jax.tree.leaves(values))}
