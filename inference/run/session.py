"""One run under way: everything that is decided between two calls of the compiled loop.

These are chunks, saves to the checkpoint, stop rules, signals and the progress bar. Ctrl-C and
SIGTERM end a run after its chunk, not in the middle of it; the driver then raises `Interrupted`.

A lane is a group of chains that the compiled loop advances together. With "sequential" each chain
is a lane of its own: it goes through a whole chunk before the next one, in the same compiled loop.
So no step copies the states of other chains, and the arrays of a replicate grow only when it is
full itself. With any other `chain_method` all chains are one lane.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property, partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, random
from threadpoolctl import ThreadpoolController

from inference.program.compiling import compiled
from inference.run.loop import Chain, Loop, Stepper, stacked, unstacked
from inference.run.stopping import StopRule
from inference.run.store import Commit, Records, Store, concatenate

__all__ = [
    "TURN",
    "Bar",
    "Drawn",
    "Interrupted",
    "Noted",
    "Session",
    "chain_keys",
    "ctrl_c_waits",
    "figures",
    "marks",
    "one_lapack_thread",
    "others_run",
    "signals_noted",
    "starts",
]

# NumPyro's handlers are one stack for all threads: models run in one thread at a time
TURN = threading.RLock()
WAIT = 2.0  # seconds before a bar that is shown where a run takes long


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM has ended a run, whose checkpoint was saved before.

    Nothing has to catch it: a script then ends with 130 after Ctrl-C, and with 143 after SIGTERM.

    Args:
        name: "SIGINT" or "SIGTERM", kept as `signal`.
        steps: steps taken until then.
        computed: function that returns the tree. It is called when `tree` is first asked for, so
            that a process ends at once.
    """

    def __init__(self, name: str, steps: int, computed: Callable[[], xr.DataTree]):
        super().__init__(
            f"{name} ended the run after {steps} steps; what was drawn is in `.tree` of this error."
        )
        self.signal, self._computed = name, computed
        sys.excepthook = _ends_by_signal(sys.excepthook)

    @cached_property
    def tree(self) -> xr.DataTree:
        """What was drawn."""
        return self._computed()


def _ends_by_signal(show: Callable) -> Callable:
    """A hook for errors that nothing has caught: the process ends as the signal asks.

    Python itself does so for a KeyboardInterrupt, but not for its subclasses. An interactive
    session goes on after Ctrl-C.
    """

    def shown(kind: type, error: BaseException, trace: Any) -> None:
        show(kind, error, trace)
        is_interactive = hasattr(sys, "ps1")
        if isinstance(error, Interrupted) and (error.signal == "SIGTERM" or not is_interactive):
            sys.exit(128 + signal.Signals[error.signal])

    return shown


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

    Only the main thread receives signals: elsewhere the list stays empty. A signal that the process
    ignores, as one in the background may ignore Ctrl-C, is ignored here as well.
    """
    noted = Noted()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, noted) for number in heard}
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
    """A tqdm bar over the steps of a run, on a terminal; quiet in CI and in pipes.

    Args:
        shown: whether there is a bar; None: after `WAIT` seconds.
        total: how many steps there will be; None where this is not known.
        done: how many there were before.
    """

    signal = ""  # that ends the run, where it comes by another way than to this process

    def __init__(self, shown: bool | None, total: int | None, done: int):
        self.tqdm, self.timer = None, None
        self.total, self.done, self.lock = total, done, threading.Lock()
        if shown is False or "CI" in os.environ or not sys.stderr.isatty():
            return
        if shown:
            self._open()
        else:  # by a thread, since compilation may take longer
            self.timer = threading.Timer(WAIT, self._open)
            self.timer.daemon = True
            self.timer.start()

    def _open(self) -> None:
        from tqdm.auto import tqdm

        with self.lock:
            given = {"total": self.total, "initial": self.done, "dynamic_ncols": True}
            self.tqdm = tqdm(desc="compiling", **given)

    def update(self, steps: int, phase: str, text: str) -> None:
        """Moves on by `steps`."""
        with self.lock:
            self.done += steps
            if self.tqdm is not None:
                self.tqdm.set_description(phase, refresh=False)
                self.tqdm.set_postfix_str(text, refresh=False)
                self.tqdm.update(steps)

    def close(self) -> None:
        """Closes the bar; its last line stays on the terminal."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()
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


class Drawn(NamedTuple):
    """What the chains of a session have drawn, to be joined with those of other sessions."""

    commit: Commit
    records: Records
    steps_run: int
    seconds_to_compile: float


@contextmanager
def others_run() -> Generator[None]:
    """Lets another thread run a model, while compiled code runs in this one."""
    TURN.release()
    try:
        yield
    finally:
        TURN.acquire()


@cache
def _linked_libraries() -> ThreadpoolController:
    return ThreadpoolController()  # looks at all that are loaded, which takes milliseconds


def one_lapack_thread() -> AbstractContextManager:
    """Limits the OpenBLAS that comes with SciPy to one thread.

    XLA leaves factors of matrices and triangular systems to it. Its threads wait for each other in
    busy loops: on matrices of some hundred rows two of them take twice as long as one, and many
    times as long where another process uses the cores.
    """
    return _linked_libraries().limit(limits=1, user_api="blas")


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
        self.steps_run_of_chains: list[int] = []  # where they ran alone
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

    def drawn(self) -> Drawn:
        """What the session holds, in memory."""
        commit = self.commit()._replace(states=self.__getstate__()["lanes"])
        records = concatenate(self.store.in_memory().pending)
        return Drawn(commit, records, self.steps_run, self.seconds_to_compile)

    def join(self, each: Sequence[Drawn | str]) -> None:
        """Takes up chains that sessions of their own have drawn.

        Where chains have ended at different steps, each has as many draws as the shortest that has
        one. The records of a replicate of an algorithm end with copies of the last one, as they do
        where other replicates go on.

        Args:
            each: what was drawn, or the signal that has ended a chain before it began.
        """
        reasons = [one if isinstance(one, str) else one.commit.ended for one in each]
        drawn = [one for one in each if isinstance(one, Drawn)]
        drawn = [one for one in drawn if one.commit.records] or drawn[:1]
        counts = [one.commit.records for one in drawn]
        is_cut = self.stepper.warms_up
        count = min(counts) if is_cut else max(counts)
        places = np.arange(count)
        self.store.append(
            concatenate(
                [
                    jax.tree.map(lambda leaf, n=n: leaf[np.minimum(places, n - 1)], one.records)
                    for one, n in zip(drawn, counts, strict=True)
                ],
                axis=1,
            )
        )
        self.records = count
        self.lanes = [jax.tree.map(jax.device_put, one.commit.states[0]) for one in drawn]
        self.steps = (min if is_cut else max)(one.commit.steps for one in drawn)
        self.steps_run_of_chains = [one.steps_run for one in drawn]
        self.steps_run = max(self.steps_run_of_chains)
        self.seconds = sum(one.commit.seconds for one in drawn)
        self.seconds_to_compile = sum(one.seconds_to_compile for one in drawn)
        early = [reason for reason in reasons if reason not in ("budget", "finished")]
        self.ended = (early or sorted(reasons))[0]

    def start(self, keys: Array, init_params: Any) -> None:
        """Initial states of all chains, eagerly and one after the other.

        Args:
            keys: a key for each chain.
            init_params: of the one chain, or of several with a leading chain axis, as in NumPyro.
        """
        each = zip(keys, starts(init_params, len(keys)), strict=True)
        self._place([self.stepper.start(key, start) for key, start in each])

    def restore(self, states: Sequence[Any], tree: xr.DataTree) -> None:
        """Takes up the run of an algorithm where another session has ended it.

        Args:
            states: of all replicates, as `each` gives them.
            tree: the tree of that session.
        """
        self._place([jax.tree.map(jax.device_put, state) for state in states])
        stats = tree["sample_stats"].to_dataset()
        records = {str(name): np.swapaxes(each.values, 0, 1) for name, each in stats.items()}
        self.store.append({"sample_stats": records})
        self.steps, self.records = int(tree.attrs["steps"]), stats.sizes[self.store.record_dim]
        self.ended, self.seconds = tree.attrs["ended"], float(tree.attrs["sampling_time"])
        self.seconds_to_compile = float(tree.attrs["compile_time"])

    def _place(self, states: Sequence[Any]) -> None:
        """Divides the states of all chains into lanes."""
        lanes = [[one] for one in states] if self.chain_method == "sequential" else [states]
        self.lanes = [stacked(lane) for lane in lanes]

    def resume(self) -> None:
        """Goes back to the last commit of the store; where it has none, the start is the first."""
        if (commit := self.store.load(self.lanes)) is None:
            self.store.save(commit := self.commit())
        self.lanes, self.steps, self.records, self.ended, self.seconds = commit

    def advance(
        self,
        target: int | None,
        *,
        stop: StopRule | None,
        max_time: float | None,
        save_every: float,
        bar: bool | Callable | None,
        tree_so_far: Any,
    ) -> None:
        """Takes chunks until there are `target` records, or something else ends the run.

        Args:
            target: how many records; None goes on until the algorithm has finished.
            stop: rule that ends the run early.
            max_time: seconds after which the run ends.
            save_every: seconds between two commits to the store.
            bar: whether a progress bar is shown; None: after two seconds. Or a function of the
                total and the steps done, that returns a bar.
            tree_so_far: function that returns the tree for `stop`.
        """
        started = saved = perf_counter()
        before = self.seconds
        self.ended, self.steps_run = "", 0
        total = None if target is None else self.num_warmup + target * self.thinning
        make = bar if callable(bar) else partial(Bar, bar)
        shown = make(total, self.steps)
        with signals_noted() as signals:
            try:
                while not self.ended:
                    self.ended = (
                        self._reason_to_end(target, stop, tree_so_far)
                        or "".join(signals[:1])
                        or shown.signal
                    )
                    if self.ended:
                        break
                    self._chunk(target, shown)
                    now = perf_counter()
                    self.seconds = before + now - started
                    if max_time is not None and now - started > max_time:
                        self.ended = "max_time"
                    elif now - saved > save_every:
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
            self.records += num_records
            self.store.append(records)
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
            with ctrl_c_waits(), others_run(), one_lapack_thread():
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
        can_be_true = {
            "finished": not self.stepper.warms_up,
            "needs_host": self.stepper.asks_host,
        }
        if not can_be_true[question]:
            return np.zeros(len(jax.tree.leaves(lane)[0]), bool)
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


def starts(init_params: Any, num_chains: int) -> list[Any]:
    """The `init_params` of each chain."""
    if init_params is None or num_chains == 1:
        return [init_params] * num_chains
    return [
        jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], init_params) for i in range(num_chains)
    ]


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
