"""One run under way: chunks, saves, stops; everything that is decided between two calls of the compiled loop."""

from collections.abc import Iterator
from itertools import count
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference._loop import Loop
from inference._progress import Bar, figures
from inference._signals import signals_noted
from inference._steppers import Stepper
from inference._store import Commit, FolderStore, MemoryStore, Records
from inference.stopping import StopRule

__all__ = ["Session", "chain_keys"]

PENDING_BYTES = 256 * 2**20  # records in memory that force a save before its time


class Session:
    """States, counters and records of one run; `advance` goes on from wherever they stand."""

    def __init__(self, stepper: Stepper, store: MemoryStore | FolderStore, *, num_warmup: int, thinning: int, chain_method: Any):
        self.stepper, self.store = stepper, store
        self.num_warmup, self.thinning, self.chain_method = num_warmup, thinning, chain_method
        self.loop: Loop | None = None
        self.states: Any = None
        self.steps = self.records = self.divergences = 0
        self.steps_run = 0  # by the last call of `advance`
        self.ended = ""
        self.seconds = self.seconds_to_compile = 0.0

    def start(self, keys: Array, init_params: Any) -> None:
        """Initial states of all chains, one after the other: a kernel that binds values at `init` must not bind tracers."""
        each = [self.stepper.start(key, _of_chain(init_params, i, len(keys))) for i, key in enumerate(keys)]
        self.states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def resume(self) -> None:
        """From the last commit of the store, if it has one."""
        commit = self.store.load(self.states)
        if commit is not None:
            self.states, self.steps, self.records, self.ended, self.seconds = commit

    def advance(self, target: int | None, *, stop: StopRule | None, max_time: float | None, save_every: float, bar: bool, tree_so_far: Any):
        """Until `target` records are there (None: until the algorithm has finished), or something else ends the run."""
        started = saved = perf_counter()
        before = self.seconds
        self.ended, self.steps_run = "", 0
        total = None if target is None else self.num_warmup + target * self.thinning
        shown = Bar(bar, "compiling", total, self.steps)
        with signals_noted() as signals:
            try:
                while not self.ended:
                    self.ended = self._reason_to_end(target, stop, tree_so_far) or (signals[0] if signals else "")
                    if self.ended:
                        break
                    self._chunk(target, shown)
                    now = perf_counter()
                    self.seconds = before + now - started
                    if max_time is not None and now - started > max_time:
                        self.ended = "max_time"
                    elif now - saved > save_every or self.store.waiting_bytes > PENDING_BYTES:
                        self.store.save(self.commit())
                        saved = perf_counter()
                if self.records == 0:  # ended in the warm-up: variables of the right shape, without draws
                    self.store.append(self._compiled().nothing())
                self.store.save(self.commit())
            finally:
                shown.close()

    def go_on(self, states: Any, data: Any) -> None:
        """With other data, and states that know of them; what is compiled serves on where no shape has changed."""
        shapes = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
        if shapes((states, data)) != shapes((self.states, self.stepper.data)):
            self.loop = None
        self.states, self.stepper.data = states, data

    def commit(self) -> Commit:
        """Where the run stands."""
        return Commit(self.states, self.steps, self.records, self.ended, self.seconds)

    def _reason_to_end(self, target: int | None, stop: StopRule | None, tree_so_far: Any) -> str:
        if bool(jnp.all(jax.vmap(self.stepper.finished)(self.states))):
            return "finished"
        if target is not None and self.records >= target and self.steps >= self.num_warmup:
            return "budget"
        asked = stop is not None and self.steps >= self.num_warmup and self.records == next(m for m in marks() if m >= self.records)
        if not asked or stop is None:
            return ""
        try:
            return "stop" if stop(tree_so_far()) else ""
        except Exception:
            self.ended = "stop rule failed"
            self.store.save(self.commit())
            raise

    def _chunk(self, target: int | None, shown: Bar) -> None:
        self._make_room()
        loop = self._compiled()
        if self.steps < self.num_warmup:
            self.states, records, count = loop.chunk(self.states, self.num_warmup - self.steps, recorded=False)
            taken, phase = count, "warmup"
        else:
            mark = next(m for m in marks() if m > self.records)
            limit = mark - self.records if target is None else min(mark, target) - self.records
            self.states, records, count = loop.chunk(self.states, limit, steps=self.thinning)
            self.store.append(records)
            self.records += count
            taken, phase = count * self.thinning, "sample" if self.stepper.warms_up else "steps"
        self.steps += taken
        self.steps_run += taken
        shown.update(taken, phase, self._text(records, phase))

    def _make_room(self) -> None:
        """Replicates are stacked, so all grow when one is full."""
        while bool(jnp.any(jax.vmap(self.stepper.is_full)(self.states))):
            each = [self.stepper.grown(jax.tree.map(lambda leaf, i=i: leaf[i], self.states)) for i in range(self.num_chains)]
            self.states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
            self.loop = None

    @property
    def num_chains(self) -> int:
        """Chains, or replicates."""
        return jax.tree.leaves(self.states)[0].shape[0]

    def _compiled(self) -> Loop:
        if self.loop is None:
            self.loop = Loop(self.stepper, self.states, self.chain_method)
            self.seconds_to_compile = self.loop.seconds_to_compile
        return self.loop

    def _text(self, records: Records, phase: str) -> str:
        stats = records.get("sample_stats", {})
        if phase != "warmup" and "diverging" in stats:
            self.divergences += int(stats["diverging"].sum())
        return figures(stats, self.divergences) or self.stepper.status(jax.tree.map(lambda leaf: leaf[0], self.states))


def marks() -> Iterator[int]:
    """Numbers of records at which a rule is asked: 100, 125, 156, ..."""
    return (int(100 * 1.25**k) for k in count())


def chain_keys(rng_key: int | Array, num_chains: int) -> Array:
    """NumPyro's own rule: one chain takes the key itself, several split it; a batch of keys, one a chain, is taken as it is."""
    if isinstance(rng_key, int | np.integer):
        if not 0 <= rng_key < 2**63:
            raise ValueError(f"rng_key: an integer from 0 to 2**63 - 1, or a JAX key; got {rng_key}.")
        key = random.key(int(rng_key))
    elif jax.dtypes.issubdtype(getattr(rng_key, "dtype", None), jax.dtypes.prng_key):
        key = rng_key
    elif getattr(rng_key, "dtype", None) == np.uint32:
        key = random.wrap_key_data(jnp.asarray(rng_key))  # a raw key, as NumPyro still accepts it
    else:
        raise TypeError(f"rng_key: an integer or a JAX key; got {rng_key!r}.")
    if key.ndim == 0:
        return key[None] if num_chains == 1 else random.split(key, num_chains)
    if key.shape != (num_chains,):
        raise ValueError(f"rng_key: {key.shape} keys for {num_chains} chains; give one key, or one a chain.")
    return key


def _of_chain(init_params: Any, chain: int, num_chains: int) -> Any:
    """With several chains `init_params` have a leading chain axis, as in NumPyro."""
    return init_params if init_params is None or num_chains == 1 else jax.tree.map(lambda leaf: jnp.asarray(leaf)[chain], init_params)
