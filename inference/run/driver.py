"""One driver for every kernel: NumPyro's chains and SVI as they are, and whatever implements
`Algorithm`.

It scans in compiled chunks and does everything else between them: the bar, the checkpoint, the stop
rules, Ctrl-C. Cost over the bare compiled loop: a few host milliseconds each quarter of a second.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from numbers import Real
from operator import index
from typing import Any

import jax
import xarray as xr
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from inference.program.program import Program
from inference.program.sites import is_whole
from inference.run import result as _outcome
from inference.run.loop import CHAIN_METHODS, stepper_of
from inference.run.protocol import Algorithm, init_strategy
from inference.run.result import GROUPS, check_names
from inference.run.session import TURN, Session, chain_keys
from inference.run.stopping import StopRule
from inference.run.store import CheckpointError, FolderStore, MemoryStore

__all__ = ["Driver"]


class Driver:
    """Runs a kernel on a model and returns an ArviZ `DataTree`.

    Names and meanings are those of `numpyro.infer.MCMC`.

    :param kernel: a NumPyro `MCMCKernel`, a NumPyro `SVI`, or an `Algorithm`, which drivers may
    share.
    :param num_warmup: steps of a chain before its first draw. For an algorithm that is no chain,
    the most steps that it may
        take; None lets it go on until it has finished.
    :param num_samples: steps of each chain after the warm-up. For an algorithm, the posterior draws
    at the end; with 0 there are none,
        nor a group `posterior`.
    :param num_chains: chains; for an algorithm, independent replicates.
    :param thinning: keep each `thinning`-th draw of a chain: `num_samples // thinning` draws are
    returned.
    :param chain_method: "sequential" (default; all chains in one loop, each in turn), "vectorized",
    "parallel" (a device a
        chain), or a transformation such as `jax.vmap`.
    :param jit_model_args: for a chain, whether arrays among the model's arguments are arguments of
    the compiled loop, and no constants
        of it: runs on other data of the same shapes are then compiled once. Not for a model that
        looks at its data, such as where they are missing.
    :param progress_bar: a live bar on a terminal; quiet in CI and in pipes.
    :param checkpoint: a folder. Draws go to it as they come, and a run of the same model, data and
    settings that it holds is
        resumed, bit for bit. None keeps everything in memory.
    :param save_every: seconds between two commits to the checkpoint.
    :param stop: a predicate over the tree so far, such as `converged()` or `settled()`.
    :param max_time: seconds after which the run ends with what it has, those of its start not
    counted. Nothing that is being compiled is
        cut short.
    :param extra_fields: fields of the kernel's state to record as well, dots for parts:
    "adapt_state.step_size".
    :param groups: groups that cost another pass through the model: "log_likelihood", "log_prior",
    "posterior_predictive",
        "prior" (with its "prior_predictive").
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
        progress_bar: bool = True,
        checkpoint: Any = None,
        save_every: float = 30.0,
        stop: StopRule | None = None,
        max_time: float | None = None,
        extra_fields: tuple[str, ...] = (),
        groups: tuple[str, ...] = (),
    ):
        self.kernel = kernel
        self.num_warmup, self.num_samples, self.num_chains, self.thinning = (
            num_warmup,
            num_samples,
            num_chains,
            thinning,
        )
        self.chain_method, self.progress_bar, self.checkpoint, self.save_every = (
            chain_method,
            progress_bar,
            checkpoint,
            save_every,
        )
        self.jit_model_args = jit_model_args
        self.stop, self.max_time, self.extra_fields, self.groups = (
            stop,
            max_time,
            tuple(extra_fields),
            tuple(groups),
        )
        self._check()
        # before `init` puts closures into the kernel
        self._settings = _outcome.kernel_settings(kernel)
        self._last: tuple[Session, _outcome.Run] | None = None

    @property
    def is_chain(self) -> bool:
        """Whether the kernel is a Markov chain, so that a record is a draw."""
        return isinstance(self.kernel, MCMCKernel)

    def run(
        self, rng_key: int | Array, *args: Any, init_params: Any = None, **kwargs: Any
    ) -> xr.DataTree:
        """Run on the model's arguments.

        :param rng_key: an integer or a JAX key.
        :param args, kwargs: the model's arguments, which are not copied: an array that is changed
        afterwards changes the data of the run.
        :param init_params: where the chains start, as NumPyro's kernels take it (unconstrained for
        HMC and NUTS), with a
            leading axis of size `num_chains` when that is above 1.
        """
        with TURN:
            return self._run(rng_key, args, kwargs, init_params)

    def _run(
        self, rng_key: int | Array, args: tuple, kwargs: dict[str, Any], init_params: Any
    ) -> xr.DataTree:
        model = getattr(self.kernel, "model", None)
        # NumPyro's SVI may hold some of the model's arguments
        kwargs = getattr(self.kernel, "static_kwargs", {}) | kwargs
        program = None if model is None else Program(model, *args, **kwargs)
        if program is not None:
            check_names(program)
            if self.is_chain and not getattr(self.kernel, "checks_itself", False):
                program.check(init_strategy(self.kernel))
        keys = chain_keys(rng_key, self.num_chains)
        stepper = stepper_of(
            self.kernel,
            program,
            args,
            kwargs,
            self.num_warmup or 0,
            self.extra_fields,
            self.jit_model_args,
        )
        store = (
            MemoryStore(stepper.record_dim)
            if self.checkpoint is None
            else FolderStore(self.checkpoint, stepper.record_dim)
        )
        # As in NumPyro, the steps that are left over from thinning come before the first draw.
        num_warmup = (
            (self.num_warmup or 0) + self.num_samples % self.thinning if self.is_chain else 0
        )
        session = Session(
            stepper,
            store,
            num_warmup=num_warmup,
            thinning=self.thinning,
            chain_method=self.chain_method,
        )
        session.start(keys, init_params)
        self._last = (session, _outcome.Run(self, program, session, keys))
        return self._advance(self._target, self.stop)

    def extend(self, more: int) -> xr.DataTree:
        """Go on from where the last `run` ended: `more` steps. Returns the whole, which equals
        one longer run bit for bit.
        """
        self.check_precision("extend")
        if more < 1:
            raise ValueError(f"extend: more must be positive, got {more}.")
        if more % self.thinning:
            raise ValueError(
                f"extend: more must be a multiple of thinning, {self.thinning}; got {more}."
            )
        with self._turn("extend") as (session, _):
            return self._advance(lambda: session.records + more // self.thinning, None)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Go on with more data, for an algorithm that learns from its rows bit by bit.

        With `ParticleFilter` the whole equals one run over all rows, bit for bit; with `Staged` and
        `DataTempering` an update is one more stage. `tree` shows it, so that a stream of single
        rows does not pay for a tree each. A checkpoint keeps the run as it was before; updates are
        in memory alone, and their data, as those of `run`, are not copied.
        """
        self.check_precision("update")
        with self._turn("update") as (session, run):
            run.update(*args, **kwargs)
            session.store = session.store.in_memory()
            self._go(session, run, self._target(), self.stop)

    def tree(self) -> xr.DataTree:
        """What the last run, with its updates, has found so far; in the precision of the run,
        whatever JAX has now.
        """
        with self._turn("tree") as (_, run), jax.enable_x64(run.x64):
            return run.tree()

    def check_precision(self, asked: str) -> None:
        """What goes on computes as what has begun: another `jax_enable_x64` than that of the run
        is refused, in words that name `asked`.
        """
        if bool(jax.config.jax_enable_x64) != (found := self._finished_run(asked)[1].x64):
            raise ValueError(
                f"{asked}: the run began with jax_enable_x64={found}, and now it is {not found}; "
                "set it back."
            )

    @property
    def states(self) -> list[Any]:
        """Where each replicate of an algorithm stands: the algorithm's own states, for its own
        methods.
        """
        run = self._finished_run("states")[1]
        with jax.enable_x64(run.x64):
            return run.replicates()

    @property
    def reading(self) -> Any:
        """What the kernel has read of the model in the last run; of an algorithm with its
        updates.
        """
        return self._finished_run("reading")[0].stepper.reading

    @property
    def data(self) -> Any:
        """The arrays that the steps of the last run, or update, take."""
        return self._finished_run("data")[0].stepper.data

    @property
    def program(self) -> Program | None:
        """The model with the data of the last run or update; None where the kernel has no model."""
        return self._finished_run("program")[1].program

    def _finished_run(self, asked: str) -> tuple[Session, _outcome.Run]:
        if self._last is None:
            raise ValueError(f"{asked}: nothing has run yet; call `run` first.")
        return self._last

    @contextmanager
    def _turn(self, asked: str) -> Generator[tuple[Session, _outcome.Run]]:
        """The last run, while no other thread runs a model and the kernel has the reading of
        this run.
        """
        session, run = self._finished_run(asked)
        with TURN:
            session.stepper.bind()
            yield session, run

    def _target(self) -> int | None:
        return self.num_samples // self.thinning if self.is_chain else self.num_warmup

    def _advance(self, target: Callable[[], int | None], stop: StopRule | None) -> xr.DataTree:
        assert self._last is not None
        session, run = self._last
        with session.store.opened(run.identity):
            session.resume()
            try:
                self._go(session, run, target(), stop)
            except CheckpointError as error:
                session.ended = "checkpoint"
                error.tree = run.tree()
                raise
            except Exception as error:
                if session.ended == "stop rule failed":
                    _outcome.keep(error, run.tree())
                raise
            return run.tree()

    def _go(
        self, session: Session, run: _outcome.Run, target: int | None, stop: StopRule | None
    ) -> None:
        settings = {
            "max_time": self.max_time,
            "save_every": self.save_every,
            "bar": self.progress_bar,
        }
        session.advance(target, stop=stop, tree_so_far=run.tree_so_far, **settings)

    def _check(self) -> None:
        if not isinstance(self.kernel, MCMCKernel | SVI | Algorithm):
            raise TypeError(
                f"kernel: {self.kernel!r} is no kernel; give a NumPyro MCMCKernel, a NumPyro SVI "
                "or an Algorithm."
            )
        if self.is_chain and getattr(self.kernel, "is_ensemble_kernel", False):
            raise TypeError(
                f"kernel: {type(self.kernel).__name__} moves all chains together; run it in "
                "numpyro.infer.MCMC."
            )
        if self.is_chain and self.num_warmup is None:
            raise ValueError("num_warmup: a chain needs it; 0 starts to keep draws at once.")
        if isinstance(self.kernel, SVI) and self.num_warmup is None:
            raise ValueError("num_warmup: SVI never ends by itself; give the number of its steps.")
        if not self.is_chain and self.thinning != 1:
            raise ValueError("thinning: only draws of a chain are thinned; leave it out.")
        if not self.is_chain and self.jit_model_args:
            raise ValueError(
                f"jit_model_args: {type(self.kernel).__name__} is no chain and sees to its data "
                "itself; leave it out."
            )
        least = (
            {"num_warmup": 0, "num_samples": self.thinning}
            if self.is_chain
            else {"num_warmup": 1, "num_samples": 0}
        )
        for name, number in (least | {"num_chains": 1, "thinning": 1}).items():
            _check_count(name, getattr(self, name), number)
        for name in ("save_every", "max_time"):
            if (value := getattr(self, name)) is not None and not (
                isinstance(value, Real) and value >= 0
            ):
                raise ValueError(f"{name}: seconds, at least 0; got {value!r}.")
        if unknown := sorted(set(self.groups) - set(GROUPS)):
            raise ValueError(f"groups: {unknown} unknown; choose from {list(GROUPS)}.")
        if self.stop is not None and not callable(self.stop):
            raise TypeError(
                f"stop: a function of the tree so far, such as converged(); got {self.stop!r}."
            )
        self.num_samples, self.num_chains, self.thinning = map(
            index, (self.num_samples, self.num_chains, self.thinning)
        )
        _check_chain_method(self.chain_method, self.num_chains)
        stays = (
            not isinstance(self.kernel, Algorithm)
            or type(self.kernel).needs_host is Algorithm.needs_host
        )
        if self.chain_method == "parallel" and not stays:
            name = type(self.kernel).__name__
            raise ValueError(
                f"chain_method: replicates of {name} go to the host together; use 'sequential' or "
                "'vectorized'."
            )


def _check_count(name: str, value: Any, least: int) -> None:
    if value is not None and (not is_whole(value) or value < least):
        raise ValueError(f"{name}: an integer, at least {least}; got {value!r}.")


def _check_chain_method(method: Any, num_chains: int) -> None:
    if not callable(method) and str(method) not in CHAIN_METHODS:
        raise ValueError(
            f"chain_method: {method!r} unknown; choose from {sorted(CHAIN_METHODS)}, or give a "
            "transformation such as jax.vmap."
        )
    devices = jax.local_device_count()
    if method == "parallel" and num_chains > devices:
        raise ValueError(
            f"chain_method: 'parallel' needs a device a chain; {num_chains} chains, {devices} "
            "devices. On a CPU call "
            f"numpyro.set_host_device_count({num_chains}) before anything else, or use "
            "'sequential' or 'vectorized'."
        )
