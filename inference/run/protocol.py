"""The protocols of kernels: `Algorithm` with eight pure functions, NumPyro's own for chains.

Everything that is not a chain (a particle filter, nested sampling, coordinate ascent, stochastic
variational inference) is an `Algorithm`. The kernel object holds its settings and nothing else, so
that drivers and threads may share it: a run is a function of kernel, model, data and key. What a
kernel finds out about a model is a value, the *reading*, which the driver hands on together with
the data:

    reading, data = kernel.read(program)                     # once, when a run begins
    state = kernel.init(rng_key, reading, data)              # on the host
    state, info = kernel.step(rng_key, state, reading, data) # compiled, again and again

A reading is static and hashable: compiled code may depend on it. Data are arrays, which compiled
code takes as arguments.

Chains are NumPyro's `MCMCKernel`s. Those of this package are `GibbsBlock`s: each draws some sites
of a model, alone or as a block of NumPyro's `Gibbs`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import eval_context
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import is_traced, model_hash
from inference.program.program import Program
from inference.run.command import Command

__all__ = ["Algorithm", "GibbsBlock", "Online", "Reading", "Results", "init_strategy"]


class Results(NamedTuple):
    """What one replicate adds to the tree beside posterior draws and the record of its steps."""

    # further groups of the tree, such as weighted particles or variational parameters
    groups: dict[str, dict[str, Array]]
    attrs: dict[str, Any]  # scalars, such as `log_evidence` and `log_evidence_se`
    dims: dict[str, tuple[str, ...]]  # names of the first dimensions of variables in `groups`


class Algorithm(ABC):
    """An inference algorithm that is not a Markov chain.

    `State` and `Info` are NamedTuples of arrays. The key of step t is `fold_in(key, t)`, so a
    resumed run is the same run.
    """

    model: Any  # the NumPyro model that it was built on
    # the checks of `diagnostics.report`: "smc", "nested", "variational"; "": told by the tree
    report: ClassVar[str] = ""
    # whether draws are of the posterior only once the run has finished; before, the tree has them
    # in the group `unfinished`, and no evidence
    draws_at_end: ClassVar[bool] = False
    command: ClassVar[Command] = Command(driver={"num_warmup": None})

    @abstractmethod
    def read(self, program: Program) -> tuple[Any, Any]:
        """`(reading, data)`: what the kernel needs of the model, proved, and arrays for its steps.

        Raises StructureError for a model that does not fit, and ValueError for bad data, before
        anything is compiled for long.
        """

    @abstractmethod
    def init(self, rng_key: Array, reading: Any, data: Any) -> Any:
        """The state before the first step. Runs on the host, once for each replicate."""

    @abstractmethod
    def step(self, rng_key: Array, state: Any, reading: Any, data: Any, /) -> tuple[Any, Any]:
        """`(State, Info)` after one sweep, one batch of data or one shrinkage. Compiled.

        Each field of `Info` is recorded at every step under its own name in `sample_stats`, and the
        progress bar shows the scalar ones.
        """

    @abstractmethod
    def finished(self, state: Any) -> Array:
        """Whether the run is complete, a boolean scalar; always False if only a budget ends it."""

    @abstractmethod
    def draw(
        self, rng_key: Array, state: Any, reading: Any, data: Any, num_draws: int
    ) -> dict[str, Array]:
        """`num_draws` equally weighted draws of the latent sites, constrained, on a new first axis.

        A variational algorithm adds `log_q`, the log density of each draw under its approximation.
        It becomes a group of the tree, from which `diagnostics` computes Pareto k-hat of p / q.
        """

    @abstractmethod
    def results(self, state: Any, reading: Any, data: Any) -> Results:
        """What the tree holds beside draws and the record of the steps."""

    def needs_host(self, state: Any) -> Array:
        """Whether the next step needs the host, for instance for larger arrays. Compiled."""
        return jnp.zeros((), bool)

    def on_host(self, states: Sequence[Any], reading: Any, data: Any) -> Sequence[Any]:
        """The states after the work of the host, all of the same shapes.

        Args:
            states: of all replicates that are stacked together; at least one needs the host.
            reading: what `read` returned.
            data: what `read` returned.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a state asks for the host, and the kernel has no `on_host`."
        )


@runtime_checkable
class Online(Protocol):
    """An algorithm that learns from more rows after a run: `Driver.update`.

    Its readings have two methods. `reading.more(program)` returns `(reading, data)` of the program
    with the new rows: it checks that the model is the same, and does not prove it again.
    `reading.by_row(programs)` returns the names of the arguments that have an entry for each row;
    the tree then describes the rows of all programs. It returns no name where the tree describes
    the last rows only.
    """

    def updated(self, state: Any, reading: Any, data: Any, before: Any) -> Any:
        """The state, ready to learn the new `data`; `before` is the data of the previous call."""
        ...


@dataclass(frozen=True, eq=False)
class Reading:
    """The structure that `init` of a `GibbsBlock` has read off a model and proved."""

    # arguments, the form of their tree, and a hash of the model; None where arguments are traced:
    # the reading then serves one call only
    source: tuple[list[Any], Any, str] | None = field(default=None, kw_only=True)


class GibbsBlock(MCMCKernel):
    """A chain kernel; `values` of its state holds the sites that it draws, constrained."""

    model: Callable
    sample_field = "values"
    command: ClassVar[Command] = Command()
    reading: Any = None  # what `init` has read off the model

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the reading: after unpickling, `init` reads the model again."""
        return vars(self) | {"reading": None}

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """The state after another block has drawn its sites; by default it stays as it is."""
        return state

    def data(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """Arrays that `sample` and `postprocess_fn` take as `data`; None: they take none."""
        return None

    def wrap_model(self, wrapper: Callable) -> Self:
        """The same kernel on another model, without its reading.

        NumPyro's `conditioned` is not applied: `_program` itself takes the values of the other
        blocks' sites from the keyword arguments.
        """
        other = copy.copy(self)
        other.model = self.model if wrapper is conditioned else wrapper(self.model)
        return other

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """The identity, because `values` are constrained already."""
        return lambda values: values

    def _program(
        self, args: tuple, kwargs: dict[str, Any] | None
    ) -> tuple[Program, dict[str, Any]]:
        """The model with its arguments, and the values of sites that other blocks own."""
        kwargs = dict(kwargs or {})
        others = kwargs.pop(GIBBS_SITES_KWARG, {})
        return Program(self.model, *args, **kwargs), others

    def _bind(
        self, program: Program, owned: list[str], read: Callable[[], Reading], values: Any = None
    ) -> Any:
        """Sets `reading` to what `read()` finds, and returns it.

        The chains of a run share one reading. It is kept while the arguments are the same objects
        and the model has the same hash, which changes when a helper of the model is redefined.

        `values` are what `read` takes beside the program.

        Cost: one trace of the model for each call beside the reading itself.
        """
        leaves, form = jax.tree.flatten((program.arguments, owned))
        known = self.reading and self.reading.source
        has_traced = is_traced(leaves)

        def hash_of_model() -> str:
            with validation_enabled(False):  # `read` has the better errors for bad data
                return model_hash(program, knows_data=True)

        # inside of traced code what the model makes of its data is computed at once; beside traced
        # data or values each constant is so as well, and JAX compiles it by itself
        is_mixed = has_traced or is_traced(values)
        at_once = jax.ensure_compile_time_eval if is_mixed else eval_context
        with at_once() if is_traced(jnp.zeros(())) else nullcontext():
            is_same = (
                known
                and not has_traced
                and form == known[1]
                and all(map(_is_same, leaves, known[0]))
            )
            if not (is_same and hash_of_model() == known[2]):
                found = read()  # before the hash: it has the better errors for bad data
                source = None if has_traced else (leaves, form, hash_of_model())
                self.reading = replace(found, source=source)
        return self.reading


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same object, or equal texts or numbers of one type."""
    is_plain = isinstance(one, str | int | float) and type(one) is type(other)
    return one is other or (is_plain and one == other)


def init_strategy(kernel: Any) -> Callable | None:
    """NumPyro's initial strategy, such as `init_to_uniform`; None where the kernel has none.

    It is that of the kernel, of its guide, or of the first of its blocks that has one.
    """
    blocks = (block for block, _ in getattr(kernel, "blocks", ()))
    for part in (kernel, getattr(kernel, "guide", None), *blocks):
        strategy = getattr(part, "_init_strategy", None) or getattr(part, "init_loc_fn", None)
        if strategy is not None:
            return strategy
    return None
