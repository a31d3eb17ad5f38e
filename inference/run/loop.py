"""One compiled loop with a dynamic trip count, over the chains of a lane; the host acts between its
calls.

A call takes `num_records` records, each after `steps` steps of the kernel, into preallocated
buffers [record, chain, ...]. Both numbers are arguments of the compiled function, so warm-up,
thinning and chunks of any length share one compilation, and the numbers that come out do not depend
on how a run is cut into chunks.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from inference.program.compiling import built, make_room
from inference.run.steppers import Stepper

__all__ = ["CHAIN_METHODS", "Loop", "alone"]

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
