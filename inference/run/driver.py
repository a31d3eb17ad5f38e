"""One driver for every kernel: NumPyro's chains and SVI as they are, and every `Algorithm`.

It runs compiled chunks of steps. Between two chunks it moves the progress bar, writes the
checkpoint, asks stop rules and handles Ctrl-C. Cost over the bare compiled loop: a few milliseconds
on the host for each chunk, which takes a quarter of a second.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import xarray as xr
from numpyro.infer import SVI
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import keep_programs
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_number
from inference.run.loop import CHAIN_METHODS, Chain, Replicate, Stepper
from inference.run.protocol import Algorithm, init_strategy
from inference.run.result import GROUPS, Run, attach_tree, check_names, kernel_settings
from inference.run.session import TURN, Session, chain_keys
from inference.run.stopping import StopRule
from inference.run.store import CheckpointError, Store
from inference.run.svi import StochasticVI

__all__ = ["Driver"]


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
        progress_bar: shows a bar on a terminal; quiet in CI and in pipes.
        checkpoint: a folder. Draws go to it as they come, and a run of the same model, data and
            settings that it holds is resumed, bit for bit. None keeps everything in memory.
        save_every: seconds between two commits to the checkpoint.
        stop: a predicate over the tree so far, such as `converged()` or `settled()`.
        max_time: seconds after which the run ends with what it has. Initialisation does not count,
            and compilation is not cut short.
        extra_fields: fields of the kernel's state to record as well, dots for parts:
            "adapt_state.step_size".
        groups: groups that cost another pass through the model: "log_likelihood", "log_prior",
            "posterior_predictive", "prior" (with its "prior_predictive").
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
            # As in NumPyro, the steps that are left over from thinning come before the first draw.
            num_warmup = (self.num_warmup or 0) + self.num_samples % self.thinning
            session = Session(
                stepper,
                Store(self.checkpoint, stepper.record_dim),
                num_warmup=num_warmup if self.is_chain else 0,
                thinning=self.thinning,
                chain_method=self.chain_method,
            )
            session.start(keys, init_params)
            self._last = Run(self, program, session, keys)
            return self._advance(self._target, self.stop)

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

    def extend(self, more: int) -> xr.DataTree:
        """Goes on from where the last `run` ended; the whole equals one longer run bit for bit.

        Args:
            more: steps, a multiple of `thinning`.
        """
        self.check_precision("extend")
        if more < 1 or more % self.thinning:
            raise ValueError(
                f"extend: more must be a multiple of thinning, {self.thinning}; got {more}."
            )
        with self._turn("extend") as run:
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
        with self._turn("update") as run:
            run.update(*args, **kwargs)
            run.session.store = run.session.store.in_memory()
            self._go(run, self._target(), self.stop)

    def tree(self) -> xr.DataTree:
        """The tree of the last run and its updates, computed in the precision of the run."""
        with self._turn("tree") as run, jax.enable_x64(run.x64):
            return run.tree()

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

    def _finished_run(self, asked: str) -> Run:
        if self._last is None:
            raise ValueError(f"{asked}: nothing has run yet; call `run` first.")
        return self._last

    @contextmanager
    def _turn(self, asked: str) -> Generator[Run]:
        """Yields the last run: no other thread runs a model, and the kernel has its reading."""
        run = self._finished_run(asked)
        with TURN:
            run.stepper.bind()
            yield run

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
