"""One run under way: everything that is decided between two calls of the compiled loop.

These are chunks, saves to the checkpoint, stop rules, signals and the progress bar. Ctrl-C and
SIGTERM end a run after its chunk, not in the middle of it.

A lane is a group of chains that the compiled loop advances together. With "sequential" each chain
is a lane of its own: it goes through a whole chunk before the next one, in the same compiled loop.
So no step copies the states of other chains, and the arrays of a replicate grow only when it is
full itself. With any other `chain_method` all chains are one lane.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.program.compiling import compiled
from inference.run.loop import Chain, Loop, Stepper, stacked, unstacked
from inference.run.stopping import StopRule
from inference.run.store import Commit, Records, Store, concatenate

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

# NumPyro's handlers are one stack for all threads: models run in one thread at a time
TURN = threading.RLock()


class Noted(list[str]):
    """A signal handler, and the list of the names of the signals that it got.

    A second Ctrl-C raises KeyboardInterrupt: at once, or at the end of `ctrl_c_waits`.
    """

    is_to_wait = False
    is_waiting = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handles a signal."""
        if not self or number != signal.SIGINT:
            self.append(signal.Signals(number).name)
        elif not self.is_to_wait:
            raise KeyboardInterrupt
        else:
            self.is_waiting = True


@contextmanager
def signals_noted() -> Generator[list[str]]:
    """Puts the names of Ctrl-C and SIGTERM into the list that it yields; a second Ctrl-C raises.

    Only the main thread receives signals: elsewhere the list stays empty.
    """
    noted = Noted()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, noted) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_waits() -> Generator[None]:
    """Delays the KeyboardInterrupt of a second Ctrl-C to the end of this context."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    noted = handler if isinstance(handler, Noted) else Noted()
    noted.is_to_wait = True
    try:
        yield
    finally:
        noted.is_to_wait = False
    if noted.is_waiting:
        raise KeyboardInterrupt


class Bar:
    """A tqdm bar over the steps of a run, on a terminal; quiet in CI and in pipes."""

    def __init__(self, shown: bool, total: int | None, done: int):
        self.tqdm = None
        if shown and "CI" not in os.environ and sys.stderr.isatty():
            from tqdm.auto import tqdm

            self.tqdm = tqdm(total=total, initial=done, desc="compiling", dynamic_ncols=True)

    def update(self, steps: int, phase: str, text: str) -> None:
        """Moves on by `steps`."""
        if self.tqdm is not None:
            self.tqdm.set_description(phase, refresh=False)
            self.tqdm.set_postfix_str(text, refresh=False)
            self.tqdm.update(steps)

    def close(self) -> None:
        """Closes the bar; its last line stays on the terminal."""
        if self.tqdm is not None:
            self.tqdm.close()


def figures(stats: dict[str, np.ndarray], divergences: int) -> str:
    """What the bar shows: divergences and acceptance, else the last value of each scalar figure.

    Args:
        stats: statistics of one chunk, [record, chain, ...]. There is no record where the host has
            taken the last step of a run.
        divergences: how many there were in the whole run.
    """
    shown = [f"divergences {divergences}"] if "diverging" in stats else []
    if "acceptance_rate" in stats:
        shown.append(f"acceptance {np.mean(stats['acceptance_rate']):.2f}")
    return ", ".join(shown) or ", ".join(
        f"{name} {np.mean(value[-1]):.6g}"
        for name, value in stats.items()
        if value.ndim == 2 and len(value)
    )


@contextmanager
def others_run() -> Generator[None]:
    """Lets another thread run a model, while compiled code runs in this one."""
    TURN.release()
    try:
        yield
    finally:
        TURN.acquire()


class Session:
    """States, counters and records of one run; `advance` goes on from wherever they stand.

    Args:
        stepper: what is stepped.
        store: where records go.
        num_warmup: steps without a record.
        thinning: steps before each record.
        chain_method: as for `Driver`.
    """

    def __init__(
        self,
        stepper: Stepper,
        store: Store,
        *,
        num_warmup: int,
        thinning: int,
        chain_method: Any,
    ):
        self.stepper, self.store = stepper, store
        self.num_warmup, self.thinning, self.chain_method = num_warmup, thinning, chain_method
        self.lanes: list[Any] = []  # states with a leading chain axis
        self.compiled: dict[Any, Loop] = {}  # by shapes
        self.questions: dict[Any, Any] = {}  # compiled `finished` and `needs_host`
        self.steps = self.records = self.divergences = 0
        self.steps_run = 0  # by the last call of `advance`
        self.ended = ""
        self.seconds = self.seconds_to_compile = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without compiled code; states as NumPy arrays, to keep float64."""
        on_host = lambda leaf: (
            leaf if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)
        )
        return vars(self) | {
            "compiled": {},
            "questions": {},
            "lanes": jax.tree.map(on_host, self.lanes),
        }

    def start(self, keys: Array, init_params: Any) -> None:
        """Initial states of all chains, eagerly and one after the other.

        Args:
            keys: a key for each chain.
            init_params: of the one chain, or of several with a leading chain axis, as in NumPyro.
        """
        own = lambda i: (
            init_params
            if init_params is None or len(keys) == 1
            else jax.tree.map(lambda leaf: jnp.asarray(leaf)[i], init_params)
        )
        states = [self.stepper.start(key, own(i)) for i, key in enumerate(keys)]
        lanes = [[one] for one in states] if self.chain_method == "sequential" else [states]
        self.lanes = [stacked(lane) for lane in lanes]

    def resume(self) -> None:
        """Goes back to the last commit of the store, if it has one."""
        commit = self.store.load(self.lanes) or self.commit()
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
    ) -> None:
        """Takes chunks until there are `target` records, or something else ends the run.

        Args:
            target: how many records; None goes on until the algorithm has finished.
            stop: rule that ends the run early.
            max_time: seconds after which the run ends.
            save_every: seconds between two commits to the store.
            bar: whether a progress bar is shown.
            tree_so_far: function that returns the tree for `stop`.
        """
        started = saved = perf_counter()
        before = self.seconds
        self.ended, self.steps_run = "", 0
        total = None if target is None else self.num_warmup + target * self.thinning
        shown = Bar(bar, total, self.steps)
        with signals_noted() as signals:
            try:
                while not self.ended:
                    self.ended = self._reason_to_end(target, stop, tree_so_far) or "".join(
                        signals[:1]
                    )
                    if self.ended:
                        break
                    self._chunk(target, shown)
                    now = perf_counter()
                    self.seconds = before + now - started
                    is_full = self.store.waiting_bytes > 256 * 2**20  # saves early, to free memory
                    if max_time is not None and now - started > max_time:
                        self.ended = "max_time"
                    elif now - saved > save_every or is_full:
                        self.store.save(self.commit())
                        saved = perf_counter()
                # ended in the warm-up: variables of the right shape, without draws
                if self.records == 0:
                    nothing = [self._loop(lane).nothing() for lane in self.lanes]
                    self.store.append(concatenate(nothing, axis=1))
                    self.seconds = before + perf_counter() - started
                self.store.save(self.commit())
            finally:
                shown.close()

    def commit(self) -> Commit:
        """Where the run stands."""
        return Commit(self.lanes, self.steps, self.records, self.ended, self.seconds)

    def each(self) -> list[Any]:
        """The state of each chain, or replicate."""
        return [one for lane in self.lanes for one in unstacked(lane)]

    def _reason_to_end(self, target: int | None, stop: StopRule | None, tree_so_far: Any) -> str:
        if all(self._of_each("finished", lane).all() for lane in self.lanes):
            return "finished"
        if target is not None and self.records >= target and self.steps >= self.num_warmup:
            return "budget"
        is_mark = self.records == next(m for m in marks() if m >= self.records)
        if stop is None or self.steps < self.num_warmup or not is_mark:
            return ""
        try:
            return "stop" if stop(tree_so_far()) else ""
        except Exception:
            self.ended = "stop rule failed"
            self.store.save(self.commit())
            raise

    def _chunk(self, target: int | None, shown: Bar) -> None:
        if self.steps < self.num_warmup:
            phase = "warmup"
            records, taken = self._take(self.num_warmup - self.steps, steps=1, recorded=False)
        else:
            phase = "sample" if self.stepper.warms_up else "steps"
            mark = next(m for m in marks() if m > self.records)
            limit = mark - self.records if target is None else min(mark, target) - self.records
            records, num_records = self._take(limit, steps=self.thinning, recorded=True)
            self.store.append(records)
            self.records += num_records
            taken = num_records * self.thinning
        self.steps += taken
        self.steps_run += taken
        stats = records.get("sample_stats", {})
        if phase != "warmup" and "diverging" in stats:
            self.divergences += int(stats["diverging"].sum())
        # Each chain is asked, whatever the bar shows: here a kernel stops a run that has failed.
        status = (
            [self.stepper.status(one) for one in self.each()]
            if isinstance(self.stepper, Chain)
            else []
        )
        shown.update(taken, phase, figures(stats, self.divergences) or "".join(status[:1]))

    def _take(self, limit: int, *, steps: int, recorded: bool) -> tuple[Records, int]:
        """Records of all lanes, as many as fit into a chunk.

        A lane that has finished repeats its last record while others go on.
        """
        self._ask_host(0)
        size = self._loop(self.lanes[0]).size(limit, len(self.lanes), recorded)
        each = [
            self._take_lane(i, size, steps=steps, recorded=recorded) for i in range(len(self.lanes))
        ]
        most = max(count for _, count in each)
        whole = [
            self._repeat_last(records, lane, most - count) if recorded and count < most else records
            for (records, count), lane in zip(each, self.lanes, strict=True)
        ]
        return concatenate(whole, axis=1), most

    def _repeat_last(self, records: Records, lane: Any, times: int) -> Records:
        last = jax.vmap(self.stepper.record, (0, None))(lane, self.stepper.data)
        repeated = lambda leaf: np.repeat(np.asarray(leaf)[None], times, axis=0)
        return concatenate([records, jax.tree.map(repeated, last)])

    def _take_lane(self, i: int, size: int, **how: Any) -> tuple[Records, int]:
        """Records of one lane, whose arrays may grow between two calls of the loop."""
        parts, left = [self._loop(self.lanes[i]).nothing()], size
        while left and not self._of_each("finished", self.lanes[i]).all():
            self._ask_host(i)
            loop = self._loop(self.lanes[i])
            # the old states are donated, so an interrupt must not lose the new ones
            with ctrl_c_waits(), others_run():
                self.lanes[i], records, num_records = loop.chunk(self.lanes[i], left, **how)
            self.stepper.bind()  # another thread may have had the kernel read other data
            parts.append(records)
            left -= num_records
        return concatenate(parts), size - left

    def _ask_host(self, i: int) -> None:
        """Calls `on_host` on a lane while one of its chains needs the host.

        The chains of a lane are stacked, so `on_host` gets all of them.
        """
        while self._of_each("needs_host", self.lanes[i]).any():
            self.lanes[i] = stacked(self.stepper.on_host(unstacked(self.lanes[i])))

    def _loop(self, lane: Any) -> Loop:
        """The compiled loop for a lane's shapes.

        The last four loops whose shapes no lane has now are kept as well: lanes grow one after the
        other, and the next one may come to these shapes.
        """
        key = _shapes(lane, self.stepper.data)
        if key not in self.compiled:
            used = [_shapes(other, self.stepper.data) for other in self.lanes]
            for known in [known for known in self.compiled if known not in used][:-4]:
                del self.compiled[known]
            self.compiled[key] = loop = Loop(self.stepper, lane, self.chain_method)
            self.seconds_to_compile += loop.seconds_to_compile
        return self.compiled[key]

    def _of_each(self, question: str, lane: Any) -> np.ndarray:
        """`finished` or `needs_host` of each chain."""
        places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(lane)]
        key = (question, *_shapes(lane), *places)
        if key not in self.questions:
            self.questions[key] = compiled(jax.vmap(getattr(self.stepper, question)), lane)
        return np.asarray(self.questions[key](lane))


def _shapes(*trees: Any) -> tuple:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trees))


def marks() -> Iterator[int]:
    """Numbers of records at which a stop rule is evaluated: 100, 125, 156, ..."""
    return (int(100 * 1.25**k) for k in count())


def chain_keys(rng_key: int | Array, num_chains: int) -> Array:
    """A key for each chain, by NumPyro's own rule: one chain takes the key, several split it.

    Args:
        rng_key: an integer, a key, or a batch of keys, one a chain, which is taken as it is.
        num_chains: how many chains.
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
