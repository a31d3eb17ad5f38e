"""One driver for every kernel: NumPyro's chains and SVI as they are, and every `Algorithm`.

It runs compiled chunks of steps. Between two chunks it moves the progress bar, writes the
checkpoint, asks stop rules and handles Ctrl-C. Cost over the bare compiled loop: a few milliseconds
on the host for each chunk, which takes a quarter of a second.
"""

import json
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from signal import Signals
from time import time
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import keep_programs
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_number
from inference.run.cluster import submitted
from inference.run.loop import CHAIN_METHODS, Chain, Replicate, Stepper
from inference.run.protocol import Algorithm, init_strategy
from inference.run.result import GROUPS, Run, attach_tree, check_names, kernel_settings
from inference.run.session import (
    TURN,
    Drawn,
    Interrupted,
    Session,
    chain_keys,
    others_run,
    starts,
)
from inference.run.stopping import StopRule
from inference.run.store import STATE, CheckpointError, Store, chain_folders
from inference.run.svi import StochasticVI

__all__ = ["Driver", "each_run"]


class Driver:
    """Runs a kernel on a model and returns an ArviZ `DataTree`.

    Names and meanings are those of `numpyro.infer.MCMC`.

    Args:
        kernel: a NumPyro `MCMCKernel`, a NumPyro `SVI`, or an `Algorithm`; drivers may share it.
        num_warmup: steps of a chain before its first draw. For an algorithm that is no chain, the
            most steps that it may take; None lets it go on until it has finished.
        num_samples: steps of each chain after the warm-up. For an algorithm, the posterior draws at
            the end; with 0 there is no group `posterior`.
        num_chains: chains; for an algorithm, independent replicates.
        thinning: keeps each `thinning`-th draw of a chain, `num_samples // thinning` in all.
        chain_method: "sequential" (all chains in one loop, each in turn), "vectorized", "parallel"
            (a device a chain), or a transformation such as `jax.vmap`.
        jit_model_args: for a chain, whether arrays among the model's arguments are arguments of the
            compiled loop, not constants in it: runs on other data of the same shapes are then
            compiled once. Not for a model that needs values of its data while it is traced, such as
            which entries are missing.
        progress_bar: shows a bar on a terminal; quiet in CI and in pipes. None shows it after two
            seconds.
        checkpoint: a folder. Draws go to it as they come, and a run of the same model, data and
            settings that it holds is resumed, bit for bit. None keeps everything in memory.
        save_every: seconds between two commits to the checkpoint.
        stop: a predicate over the tree so far, such as `converged()` or `settled()`.
        max_time: seconds after which the run ends with what it has, and a warning. Initialisation
            does not count, and compilation is not cut short.
        extra_fields: fields of the kernel's state to record as well, dots for parts:
            "adapt_state.step_size".
        groups: groups that cost another pass through the model: "log_likelihood", "log_prior",
            "posterior_predictive", "prior" (with its "prior_predictive").
        cluster: a `dask.distributed.Client`, or the address of a scheduler: each chain, or
            replicate, is a task there. The tree equals that of a run without it, bit for bit on
            machines of one kind, and its draws are in memory. In `checkpoint`, on a disk that all
            workers share, each chain has a folder of its own; a run without `cluster` goes on from
            them, chain by chain. `max_time` is that of each chain. `attrs["steps_run_of_chains"]`
            has the steps of each, and `attrs["sampling_time"]` is the time of all together.
    """

    def __init__(
        self,
        kernel: MCMCKernel | SVI | Algorithm,
        *,
        num_warmup: int | None = None,
        num_samples: int = 1000,
        num_chains: int = 1,
        thinning: int = 1,
        chain_method: str | Callable = "sequential",
        jit_model_args: bool = False,
        progress_bar: bool | None = True,
        checkpoint: Any = None,
        save_every: float = 30.0,
        stop: StopRule | None = None,
        max_time: float | None = None,
        extra_fields: tuple[str, ...] = (),
        groups: tuple[str, ...] = (),
        cluster: Any = None,
    ):
        self.kernel, self.cluster = kernel, cluster
        self.num_warmup, self.num_samples, self.num_chains = num_warmup, num_samples, num_chains
        self.thinning = thinning
        self.chain_method = chain_method
        self.jit_model_args = jit_model_args
        self.progress_bar, self.checkpoint, self.save_every = progress_bar, checkpoint, save_every
        self.stop, self.max_time = stop, max_time
        self.extra_fields, self.groups = tuple(extra_fields), tuple(groups)
        self._check()
        self._settings = kernel_settings(kernel)  # before `init` puts closures into the kernel
        self._last: Run | None = None

    @property
    def is_chain(self) -> bool:
        """Whether the kernel is a Markov chain, so that a record is a draw."""
        return isinstance(self.kernel, MCMCKernel)

    def run(
        self, rng_key: int | jax.Array, *args: Any, init_params: Any = None, **kwargs: Any
    ) -> xr.DataTree:
        """Runs on the model's arguments.

        Ctrl-C and SIGTERM end the run: it saves its checkpoint and raises `Interrupted`, whose
        `tree` has what was drawn, as `tree()` of the driver has.

        Args:
            rng_key: an integer or a JAX key.
            args, kwargs: the model's arguments, which are not copied: an array that is changed
                afterwards changes the data of the run.
            init_params: where the chains start, as NumPyro's kernels take it (unconstrained for HMC
                and NUTS), with a leading axis of size `num_chains` when that is above 1.
        """
        keep_programs()
        with TURN:
            # NumPyro's SVI may hold some of the model's arguments
            kwargs = getattr(self.kernel, "static_kwargs", {}) | kwargs
            model = getattr(self.kernel, "model", None)
            program = None if model is None else Program(model, *args, **kwargs)
            if program is not None:
                check_names(program)
                if self.is_chain and not getattr(self.kernel, "checks_itself", False):
                    program.check(init_strategy(self.kernel))
            keys = chain_keys(rng_key, self.num_chains)
            stepper = self._stepper(program, args, kwargs)
            if self.cluster is not None or chain_folders(self.checkpoint):
                session = self._session(stepper, Store(None, stepper.record_dim))
                session.join(self._each_alone(stepper, keys, init_params, args, kwargs))
                self._last = Run(self, program, session, keys)
                self._tell(self._last)
                return self._tree_of(self._last)
            session = self._session(stepper, Store(self.checkpoint, stepper.record_dim))
            session.start(keys, init_params)
            self._last = Run(self, program, session, keys)
            return self._advance(self._target, self.stop)

    def _each_alone(
        self, stepper: Stepper, keys: jax.Array, init_params: Any, args: tuple, kwargs: dict
    ) -> list[Drawn | str]:
        """What each chain draws by a driver of its own: in a task of the cluster, or here in turn.

        Returns:
            What was drawn, or the signal that ended a chain before it began.
        """
        self._check_alone()
        alone = copy(self)
        alone.cluster, alone.num_chains, alone.groups, alone._last = None, 1, (), None
        if not self.is_chain:
            alone.num_samples = 0  # they are drawn at the end, from the states of all replicates
        if self.checkpoint is not None:
            alone.checkpoint = os.path.abspath(self.checkpoint)  # workers run in other folders
        common = (alone, args, kwargs)
        items = list(zip(range(len(keys)), keys, starts(init_params, len(keys)), strict=True))
        if self.cluster is None:
            found = _in_turn(common, items, self.progress_bar)
            if self.is_chain:
                stepper.start(keys[0], items[0][2])  # binds the kernel
            return found
        records = self._target()
        each = None if records is None else self._steps_without_record + records * self.thinning
        total = None if each is None else each * len(items)
        how = {"folder": alone.checkpoint, "bar": self.progress_bar, "total": total}
        with submitted(self.cluster, _drawn_alone, common, items, **how) as found:
            if self.is_chain:
                stepper.start(keys[0], items[0][2])  # binds the kernel, while workers begin
            with others_run():
                return list(found)

    def _check_alone(self) -> None:
        """Raises ValueError or CheckpointError for what chains that run alone cannot have."""
        if self.stop is not None:
            raise ValueError(
                "stop: a rule looks at all chains, and chains that run alone do not see each "
                "other; leave it out."
            )
        if self.cluster is not None and self.chain_method != "sequential":
            raise ValueError(
                f"chain_method: found {self.chain_method!r}, wanted 'sequential': with `cluster` "
                "each chain is a task."
            )
        if self.checkpoint is not None and (Path(self.checkpoint) / STATE).exists():
            raise CheckpointError(
                f"checkpoint: {str(self.checkpoint)!r} holds a run of all chains in one process; "
                "leave `cluster` out, or name another folder."
            )

    def _stepper(self, program: Program | None, args: tuple, kwargs: dict[str, Any]) -> Stepper:
        kernel, fields = self.kernel, self.extra_fields
        if isinstance(kernel, MCMCKernel):  # which may have a potential function and no model
            return Chain(kernel, args, kwargs, self.num_warmup or 0, fields, self.jit_model_args)
        algorithm = StochasticVI(kernel) if isinstance(kernel, SVI) else kernel
        if program is None:
            raise TypeError(
                f"kernel: {type(algorithm).__name__} has no `model`; an Algorithm keeps the model "
                "that it was built on."
            )
        return Replicate(algorithm, program, fields)

    def _session(self, stepper: Stepper, store: Store) -> Session:
        return Session(
            stepper,
            store,
            num_warmup=self._steps_without_record,
            thinning=self.thinning,
            chain_method=self.chain_method,
        )

    @property
    def _steps_without_record(self) -> int:
        # As in NumPyro, the steps that are left over from thinning come before the first draw.
        return (self.num_warmup or 0) + self.num_samples % self.thinning if self.is_chain else 0

    def extend(self, more: int) -> xr.DataTree:
        """Goes on from where the last `run` ended; the whole equals one longer run bit for bit.

        Args:
            more: steps, a multiple of `thinning`.
        """
        self.check_precision("extend")
        if self.cluster is not None:
            raise ValueError(
                "extend: chains on a cluster end where they end; call `run` again with more "
                "`num_samples` and the same checkpoint, which goes on."
            )
        if more < 1 or more % self.thinning:
            raise ValueError(
                f"extend: more must be a multiple of thinning, {self.thinning}; got {more}."
            )
        with self._turn(self._finished_run("extend")) as run:
            return self._advance(lambda: run.session.records + more // self.thinning, None)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Goes on with more data, for an algorithm that learns from its rows bit by bit.

        With `ParticleFilter` the whole equals one run over all rows, bit for bit; with `Staged` and
        `DataTempering` an update is one more stage. It returns nothing, so that a stream of single
        rows does not pay for a tree at each row: call `tree` for the results. Updates are kept in
        memory only; a checkpoint keeps the run as it was before them.

        Args:
            args, kwargs: the model's arguments with the new rows, which are not copied.
        """
        self.check_precision("update")
        with self._turn(self._finished_run("update")) as run:
            run.update(*args, **kwargs)
            run.session.store = run.session.store.in_memory()
            self._go(run, self._target(), self.stop)

    def restore(self, tree: xr.DataTree, steps: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """Takes up a run of an algorithm where another driver has ended it; `update` then goes on.

        If the kernels have the same settings, the whole equals one run, bit for bit. What this
        method takes may come from a file, so that the run goes on in another process.

        Args:
            tree: the tree of the other driver.
            steps: its `steps`.
            args, kwargs: the arguments of its `whole_program`.
        """
        if not isinstance(self.kernel, Algorithm):
            raise TypeError("restore: a chain goes on from its checkpoint; call `run`.")
        keep_programs()
        with TURN, jax.enable_x64(bool(tree.attrs["x64"])):
            program = Program(self.kernel.model, *args, **kwargs)
            stepper = Replicate(self.kernel, program, self.extra_fields)
            session = self._session(stepper, Store(None, stepper.record_dim))
            session.restore(steps, tree)
            keys = jax.device_put(np.array(json.loads(tree.attrs["rng_key"]), np.uint32))
            self._last = Run(self, program, session, jax.random.wrap_key_data(keys))

    def tree(self) -> xr.DataTree:
        """The tree of the last run and its updates, computed in the precision of the run."""
        return self._tree_of(self._finished_run("tree"))

    def check_precision(self, asked: str) -> None:
        """Raises ValueError if `jax_enable_x64` is not that of the last run.

        Args:
            asked: name of the method that was called, for the message.
        """
        if bool(jax.config.jax_enable_x64) != (found := self._finished_run(asked).x64):
            raise ValueError(
                f"{asked}: the run began with jax_enable_x64={found}, and now it is {not found}; "
                "set it back."
            )

    @property
    def states(self) -> list[Any]:
        """The states of an algorithm, one a replicate."""
        run = self._finished_run("states")
        with jax.enable_x64(run.x64):
            return run.replicates()

    @property
    def steps(self) -> list[Any]:
        """The states of an algorithm with their keys and counters, one a replicate."""
        run = self._finished_run("steps")
        with jax.enable_x64(run.x64):
            return run.steps()

    @property
    def reading(self) -> Any:
        """The structure that the kernel has read off the model in the last run or update."""
        return self._finished_run("reading").stepper.reading

    @property
    def data(self) -> Any:
        """The arrays that the kernel's steps take, of the last run or update."""
        return self._finished_run("data").stepper.data

    @property
    def program(self) -> Program | None:
        """The model with the data of the last run or update; None where the kernel has no model."""
        return self._finished_run("program").program

    @property
    def whole_program(self) -> Program:
        """The model with the data of the last run and its updates, as the tree describes them."""
        return self._finished_run("whole_program").whole_program

    def _finished_run(self, asked: str) -> Run:
        if self._last is None:
            raise ValueError(f"{asked}: nothing has run yet; call `run` first.")
        return self._last

    @contextmanager
    def _turn(self, run: Run) -> Generator[Run]:
        """Yields the run: no other thread runs a model, and the kernel has its reading."""
        with TURN:
            run.stepper.bind()
            yield run

    def _tree_of(self, run: Run) -> xr.DataTree:
        with self._turn(run), jax.enable_x64(run.x64):
            return run.tree()

    def _target(self) -> int | None:
        return self.num_samples // self.thinning if self.is_chain else self.num_warmup

    def _advance(self, target: Callable[[], int | None], stop: StopRule | None) -> xr.DataTree:
        run = self._finished_run("advance")
        with run.session.store.opened(run.identity):
            run.session.resume()
            try:
                self._go(run, target(), stop)
            except CheckpointError as error:
                run.session.ended = "checkpoint"
                error.tree = run.tree()
                raise
            except Exception as error:
                if run.session.ended == "stop rule failed":
                    attach_tree(error, run.tree())
                raise
            return run.tree()

    def _go(self, run: Run, target: int | None, stop: StopRule | None) -> None:
        run.session.advance(
            target,
            stop=stop,
            max_time=self.max_time,
            save_every=self.save_every,
            bar=self.progress_bar,
            tree_so_far=run.tree_so_far,
        )
        self._tell(run)

    def _tell(self, run: Run) -> None:
        """Raises Interrupted for a run that a signal has ended; warns of one out of time."""
        ended, steps = run.session.ended, run.session.steps
        if ended in Signals.__members__:
            raise Interrupted(ended, steps, lambda: self._tree_of(run))
        if ended == "max_time":
            goes_on = "`extend`" if self.cluster is None else "the same run with a checkpoint"
            warnings.warn(
                f"max_time: {self.max_time} seconds were over after {steps} steps, before the run "
                f"was complete; {goes_on} goes on.",
                stacklevel=5,
            )

    def _check(self) -> None:
        """Raises ValueError or TypeError for a wrong setting."""
        kernel, name, is_chain = self.kernel, type(self.kernel).__name__, self.is_chain
        if not isinstance(kernel, MCMCKernel | SVI | Algorithm):
            raise TypeError(
                f"kernel: {kernel!r} is no kernel; give a NumPyro MCMCKernel, a NumPyro SVI or an "
                "Algorithm."
            )
        check_whole(1, num_chains=self.num_chains, thinning=self.thinning)
        check_whole(self.thinning if is_chain else 0, num_samples=self.num_samples)
        if self.num_warmup is not None:
            check_whole(0 if is_chain else 1, num_warmup=self.num_warmup)
        max_time = 0.0 if self.max_time is None else self.max_time
        for key, value in {"save_every": self.save_every, "max_time": max_time}.items():
            check_setting(is_number(value) and value >= 0, "seconds, at least 0", **{key: value})
        method, devices = self.chain_method, jax.local_device_count()
        is_parallel = isinstance(method, str) and method == "parallel"
        unknown = sorted(set(self.groups) - set(GROUPS))
        asks_host = getattr(type(kernel), "needs_host", None) is not Algorithm.needs_host
        for is_wrong, error, message in (
            (
                is_chain and getattr(kernel, "is_ensemble_kernel", False),
                TypeError,
                f"kernel: {name} moves all chains together; run it in numpyro.infer.MCMC.",
            ),
            (
                self.num_warmup is None and not isinstance(kernel, Algorithm),
                ValueError,
                f"num_warmup: {name} needs it: it never ends by itself.",
            ),
            (
                not is_chain and self.thinning != 1,
                ValueError,
                "thinning: only draws of a chain are thinned; leave it out.",
            ),
            (
                not is_chain and self.jit_model_args,
                ValueError,
                f"jit_model_args: {name} is no chain; only chains have it. Leave it out.",
            ),
            (
                unknown,
                ValueError,
                f"groups: {unknown} unknown; choose from {list(GROUPS)}.",
            ),
            (
                self.stop is not None and not callable(self.stop),
                TypeError,
                f"stop: a function of the tree so far, such as converged(); got {self.stop!r}.",
            ),
            (
                not callable(method) and str(method) not in CHAIN_METHODS,
                ValueError,
                f"chain_method: {method!r} unknown; choose from {sorted(CHAIN_METHODS)}, or give a "
                "transformation such as jax.vmap.",
            ),
            (
                is_parallel and self.num_chains > devices,
                ValueError,
                f"chain_method: 'parallel' needs a device a chain; {self.num_chains} chains, "
                f"{devices} devices. On a CPU call numpyro.set_host_device_count({self.num_chains})"
                " before anything else, or use 'sequential' or 'vectorized'.",
            ),
            (
                is_parallel and isinstance(kernel, Algorithm) and asks_host,
                ValueError,
                f"chain_method: {name} changes all replicates together on the host, which "
                "'parallel' cannot do; use 'sequential' or 'vectorized'.",
            ),
        ):
            if is_wrong:
                raise error(message)
        # NumPy's integers become Python's
        self.num_samples, self.num_chains = int(self.num_samples), int(self.num_chains)
        self.thinning = int(self.thinning)


@contextmanager
def each_run(
    cluster: Any,
    common: tuple[tuple, dict[str, Any]],
    items: Iterable[tuple[Driver, jax.Array, tuple | Callable]],
    *,
    left: Callable[[], float | None] = lambda: None,
    folder: Any = None,
) -> Generator[Iterator[tuple[Driver, xr.DataTree]]]:
    """Runs drivers; yields an iterator over `(driver, tree)`, in order.

    On a cluster a run is a task, and all are submitted at once; here a run begins when it is asked
    for. A signal raises Interrupted, with the tree of the run that it has ended.

    Args:
        cluster: as for `Driver`; None runs them here.
        common: positional and keyword arguments of all models.
        items: driver, key, and the first positional arguments of its model, or a function that
            returns them, which is called where the driver runs.
        left: returns the seconds that are left for all runs together; None: no limit.
        folder: holds all of their checkpoints.
    """
    if cluster is None:
        yield (_run_here(*common, *item, left()) for item in items)
        return
    seconds = left()
    deadline = None if seconds is None else time() + seconds
    tasks = [(*item, deadline) for item in items]
    bar = tasks[0][0].progress_bar if tasks else False
    with submitted(cluster, _run_in_task, common, tasks, folder=folder, bar=bar) as found:
        yield _not_interrupted(found, [driver.progress_bar for driver, *_ in tasks])


def _run_here(
    args: tuple, kwargs: dict, driver: Driver, key: jax.Array, own: Any, seconds: float | None
) -> tuple[Driver, xr.DataTree]:
    driver.max_time = seconds
    return driver, driver.run(key, *(own() if callable(own) else own), *args, **kwargs)


def _run_in_task(
    args: tuple, kwargs: dict, driver: Driver, key: jax.Array, own: Any, deadline: Any, bar: Any
) -> tuple[Driver, xr.DataTree]:
    driver.progress_bar = bar
    try:
        seconds = None if deadline is None else max(0.0, deadline - time())
        return _run_here(args, kwargs, driver, key, own, seconds)
    except Interrupted as error:
        return driver, error.tree


def _not_interrupted(
    found: Iterator[tuple[Driver, xr.DataTree] | str], bars: list[bool | None]
) -> Iterator[tuple[Driver, xr.DataTree]]:
    """The results of tasks, until a signal has ended one."""
    last = xr.DataTree()
    for each, bar in zip(found, bars, strict=False):
        if isinstance(each, str):
            raise Interrupted(each, 0, lambda tree=last: tree)
        driver, last = each
        driver.progress_bar = bar
        if (ended := last.attrs["ended"]) in Signals.__members__:
            raise Interrupted(ended, last.attrs["steps"], lambda tree=last: tree)
        yield each


def _drawn_alone(
    driver: Driver, args: tuple, kwargs: dict, number: int, key: jax.Array, start: Any, bar: Any
) -> Drawn:
    """What one of several chains draws, whose checkpoint has a folder of its own."""
    own = copy(driver)
    own.progress_bar = bar
    if driver.checkpoint is not None:
        own.checkpoint = Path(driver.checkpoint) / f"chain_{number}"
    with suppress(Interrupted):
        own.run(key, *args, init_params=start, **kwargs)
    return own._finished_run("run").session.drawn()


def _in_turn(common: tuple, items: list[tuple], bar: bool | None) -> list[Drawn | str]:
    """What chains draw that run here, one after the other, until a signal ends them."""
    found: list[Drawn | str] = []
    for item in items:
        drawn = _drawn_alone(*common, *item, bar)
        found.append(drawn)
        if (ended := drawn.commit.ended) in Signals.__members__:
            return found + [ended] * (len(items) - len(found))
    return found
