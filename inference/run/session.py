"""One run under way: chunks, saves, stops; everything that is decided between two calls of the
compiled loop.

Chains that run in turn are lanes of their own: each goes through a whole chunk before the next, in
the same compiled loop, so that no step copies what the others hold, and a replicate grows when it
is full itself. Chains that run together are one lane.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock
from time import perf_counter
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.run.loop import Loop, Stepper, apart, stacked
from inference.run.stopping import StopRule
from inference.run.store import Commit, FolderStore, MemoryStore, Records, concatenate

__all__ = [
    "TURN",
    "Bar",
    "Noted",
    "Session",
    "chain_keys",
    "ctrl_c_waits",
    "figures",
    "marks",
    "others_run",
    "signals_noted",
]


class Noted(list[str]):
    """Names of signals; a Ctrl-C that is not the first raises, but where it is to wait."""

    is_to_wait = is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if not self or number != signal.SIGINT:
            self.append(signal.Signals(number).name)
        elif not self.is_to_wait:
            raise KeyboardInterrupt
        else:
            self.is_waiting = True


@contextmanager
def signals_noted() -> Generator[list[str]]:
    """Ctrl-C and SIGTERM put their name into the list, so that the run ends after its chunk; a
    second Ctrl-C raises.

    Only the main thread receives signals; elsewhere the list stays empty.
    """
    noted = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_waits() -> Generator[None]:
    """Where signals are noted, a second Ctrl-C raises when this is over."""
    noted = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(noted, Noted):
        yield
        return
    noted.is_to_wait = True
    try:
        yield
    finally:
        noted.is_to_wait = False
    if noted.is_waiting:
        raise KeyboardInterrupt


class Bar:
    """A tqdm bar over the steps of a run, with the figures that matter for its kernel."""

    def __init__(self, shown: bool, title: str, total: int | None, done: int):
        quiet = not shown or "CI" in os.environ or not sys.stderr.isatty()
        self.tqdm = None
        if not quiet:
            from tqdm.auto import tqdm

            self.tqdm = tqdm(total=total, initial=done, desc=title, leave=True, dynamic_ncols=True)

    def update(self, steps: int, phase: str, text: str) -> None:
        """Move on by `steps`."""
        if self.tqdm is not None:
            self.tqdm.set_description(phase, refresh=False)
            self.tqdm.set_postfix_str(text, refresh=False)
            self.tqdm.update(steps)

    def close(self) -> None:
        """Leave the last line standing."""
        if self.tqdm is not None:
            self.tqdm.close()


def figures(stats: dict[str, np.ndarray], divergences: int) -> str:
    """What the bar says of the records of one chunk: sampler statistics by name, else the last
    value of each scalar figure. There may be no record: where the host has done the last of a run.
    """
    shown: list[str] = []
    if "diverging" in stats:
        shown.append(f"divergences {divergences}")
    if "acceptance_rate" in stats:
        shown.append(f"acceptance {np.mean(stats['acceptance_rate']):.2f}")
    if not shown:
        shown = [
            f"{name} {_short(value[-1])}"
            for name, value in stats.items()
            if value.ndim == 2 and len(value)
        ]
    return ", ".join(shown)


def _short(value: Any) -> str:
    return f"{np.mean(value):.6g}"


MOST_UNUSED = 4  # compiled loops kept for shapes that may come back
# NumPyro's handlers are one stack for all threads, so that models run in one thread at a time
TURN = RLock()
PENDING_BYTES = 256 * 2**20  # records in memory that force a save before its time


@contextmanager
def others_run() -> Generator[None]:
    """Compiled code is running, and no model: another thread may have its turn."""
    TURN.release()
    try:
        yield
    finally:
        TURN.acquire()


class Session:
    """States, counters and records of one run; `advance` goes on from wherever they stand."""

    def __init__(
        self,
        stepper: Stepper,
        store: MemoryStore | FolderStore,
        *,
        num_warmup: int,
        thinning: int,
        chain_method: Any,
    ):
        self.stepper, self.store = stepper, store
        self.num_warmup, self.thinning, self.chain_method = num_warmup, thinning, chain_method
        # states with a leading axis: of all chains, or of one chain each, which then run in turn
        self.lanes: list[Any] = []
        self.compiled: dict[Any, Any] = {}
        self.steps = self.records = self.divergences = 0
        self.steps_run = 0  # by the last call of `advance`
        self.ended = ""
        self.seconds = self.seconds_to_compile = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Compiled code stays behind; and states become NumPy's arrays, which keep their float64
        where they are read without x64.
        """
        on_host = lambda leaf: (
            leaf if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)
        )
        return vars(self) | {"compiled": {}, "lanes": jax.tree.map(on_host, self.lanes)}

    def start(self, keys: Array, init_params: Any) -> None:
        """Initial states of all chains, one after the other: a kernel that binds values at
        `init` must not bind tracers.
        """
        each = [
            self.stepper.start(key, _of_chain(init_params, i, len(keys)))
            for i, key in enumerate(keys)
        ]
        self.lanes = (
            [stacked([one]) for one in each]
            if self.chain_method == "sequential"
            else [stacked(each)]
        )

    def resume(self) -> None:
        """From the last commit of the store, if it has one."""
        commit = self.store.load(self.lanes)
        if commit is not None:
            self.lanes, self.steps, self.records, self.ended, self.seconds = commit

    def advance(
        self,
        target: int | None,
        *,
        stop: StopRule | None,
        max_time: float | None,
        save_every: float,
        bar: bool,
        tree_so_far: Any,
    ):
        """Until `target` records are there (None: until the algorithm has finished), or
        something else ends the run.
        """
        started = saved = perf_counter()
        before = self.seconds
        self.ended, self.steps_run = "", 0
        total = None if target is None else self.num_warmup + target * self.thinning
        shown = Bar(bar, "compiling", total, self.steps)
        with signals_noted() as signals:
            try:
                while not self.ended:
                    self.ended = self._reason_to_end(target, stop, tree_so_far) or (
                        signals[0] if signals else ""
                    )
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
                # ended in the warm-up: variables of the right shape, without draws
                if self.records == 0:
                    self.store.append(
                        concatenate([self._loop(lane).nothing() for lane in self.lanes], axis=1)
                    )
                    self.seconds = before + perf_counter() - started
                self.store.save(self.commit())
            finally:
                shown.close()

    def commit(self) -> Commit:
        """Where the run stands."""
        return Commit(self.lanes, self.steps, self.records, self.ended, self.seconds)

    def each(self) -> list[Any]:
        """The state of each chain, or replicate."""
        return [one for lane in self.lanes for one in apart(lane)]

    def _reason_to_end(self, target: int | None, stop: StopRule | None, tree_so_far: Any) -> str:
        if all(self._asked("finished", lane).all() for lane in self.lanes):
            return "finished"
        if target is not None and self.records >= target and self.steps >= self.num_warmup:
            return "budget"
        asked = (
            stop is not None
            and self.steps >= self.num_warmup
            and self.records == next(m for m in marks() if m >= self.records)
        )
        if not asked or stop is None:
            return ""
        try:
            return "stop" if stop(tree_so_far()) else ""
        except Exception:
            self.ended = "stop rule failed"
            self.store.save(self.commit())
            raise

    def _chunk(self, target: int | None, shown: Bar) -> None:
        if self.steps < self.num_warmup:
            records, count = self._taken(self.num_warmup - self.steps, steps=1, recorded=False)
            taken, phase = count, "warmup"
        else:
            mark = next(m for m in marks() if m > self.records)
            limit = mark - self.records if target is None else min(mark, target) - self.records
            records, count = self._taken(limit, steps=self.thinning, recorded=True)
            self.store.append(records)
            self.records += count
            taken, phase = count * self.thinning, "sample" if self.stepper.warms_up else "steps"
        self.steps += taken
        self.steps_run += taken
        shown.update(taken, phase, self._text(records, phase))

    def _taken(self, limit: int, *, steps: int, recorded: bool) -> tuple[Records, int]:
        """Records of all lanes, as many as fit into a chunk; what has finished repeats its last
        one while others go on.
        """
        self._ask_host(0)
        size = self._loop(self.lanes[0]).size(limit, len(self.lanes), recorded)
        each = [
            self._taken_by(i, size, steps=steps, recorded=recorded) for i in range(len(self.lanes))
        ]
        count = max(count for _, count in each)
        if not recorded:
            return concatenate([records for records, _ in each], axis=1), count
        last = lambda lane: jax.tree.map(
            np.asarray, jax.vmap(self.stepper.record, (0, None))(lane, self.stepper.data)
        )
        whole = [
            records if own == count else _padded(records, last(lane), count)
            for (records, own), lane in zip(each, self.lanes, strict=True)
        ]
        return concatenate(whole, axis=1), count

    def _taken_by(self, i: int, size: int, **how: Any) -> tuple[Records, int]:
        """Records of one lane, which grows on its way."""
        parts, left = [self._loop(self.lanes[i]).nothing()], size
        while left and not self._asked("finished", self.lanes[i]).all():
            self._ask_host(i)
            loop = self._loop(self.lanes[i])
            # the states are given away, and what comes of them must not be lost
            with ctrl_c_waits(), others_run():
                self.lanes[i], records, count = loop.chunk(self.lanes[i], left, **how)
            self.stepper.bind()  # another thread may have had the kernel read other data
            parts.append(records)
            left -= count
        return concatenate(parts), size - left

    def _ask_host(self, i: int) -> None:
        """What a lane needs the host for.

        Its chains are stacked, so all of them are given to the host together.
        """
        while self._asked("needs_host", self.lanes[i]).any():
            self.lanes[i] = stacked(self.stepper.on_host(apart(self.lanes[i])))

    def _loop(self, lane: Any) -> Loop:
        """The compiled loop for a lane's shapes.

        Of shapes that no lane has any more a few are kept, for lanes grow one after the other.
        """
        key = _shapes(lane, self.stepper.data)
        if key not in self.compiled:
            used = {_shapes(other, self.stepper.data) for other in self.lanes}
            unused = [
                known for known in self.compiled if known not in used and not isinstance(known, str)
            ]
            for known in unused[:-MOST_UNUSED]:
                del self.compiled[known]
            self.compiled[key] = loop = Loop(self.stepper, lane, self.chain_method)
            self.seconds_to_compile += loop.seconds_to_compile
        return self.compiled[key]

    def _asked(self, what: str, lane: Any) -> np.ndarray:
        """`finished` or `needs_host` of each chain."""
        if what not in self.compiled:
            self.compiled[what] = jax.jit(jax.vmap(getattr(self.stepper, what)))
        return np.asarray(self.compiled[what](lane))

    def _text(self, records: Records, phase: str) -> str:
        stats = records.get("sample_stats", {})
        if phase != "warmup" and "diverging" in stats:
            self.divergences += int(stats["diverging"].sum())
        # Every chain is asked, whatever the bar shows: this is where a kernel stops a run that has
        # failed.
        said = [self.stepper.status(one) for one in self.each()] if self.stepper.warms_up else [""]
        return figures(stats, self.divergences) or said[0]


def _shapes(*trees: Any) -> tuple:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trees))


def _padded(records: Records, last: Records, count: int) -> Records:
    return jax.tree.map(
        lambda leaf, one: np.concatenate([leaf, np.repeat(one[None], count - len(leaf), axis=0)]),
        records,
        last,
    )


def marks() -> Iterator[int]:
    """Numbers of records at which a rule is asked: 100, 125, 156, ..."""
    return (int(100 * 1.25**k) for k in count())


def chain_keys(rng_key: int | Array, num_chains: int) -> Array:
    """NumPyro's own rule: one chain takes the key itself, several split it; a batch of keys, one
    a chain, is taken as it is.
    """
    if isinstance(rng_key, int | np.integer):
        if not 0 <= rng_key < 2**63:
            raise ValueError(
                f"rng_key: an integer from 0 to 2**63 - 1, or a JAX key; got {rng_key}."
            )
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
        raise ValueError(
            f"rng_key: {key.shape} keys for {num_chains} chains; give one key, or one a chain."
        )
    return key


def _of_chain(init_params: Any, chain: int, num_chains: int) -> Any:
    """With several chains `init_params` have a leading chain axis, as in NumPyro."""
    return (
        init_params
        if init_params is None or num_chains == 1
        else jax.tree.map(lambda leaf: jnp.asarray(leaf)[chain], init_params)
    )
