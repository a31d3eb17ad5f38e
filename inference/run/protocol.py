"""What an algorithm that is not a chain owes the driver: eight pure functions.

Chains are NumPyro's `MCMCKernel`s and keep NumPyro's protocol. Everything else (a particle filter,
nested sampling, coordinate ascent, stochastic variational inference) is an `Algorithm`. The kernel
object holds its settings and nothing else, so that drivers and threads may share it: a run is a
function of kernel, model, data and key. What a kernel finds out about a model is a value, the
*reading*, which the driver hands on together with the data:

    reading, data = kernel.read(program)                     # once, when a run begins
    state = kernel.init(rng_key, reading, data)              # on the host
    state, info = kernel.step(rng_key, state, reading, data) # compiled, again and again

A reading is static and hashable: compiled code may depend on it. Data are arrays, which compiled
code takes as arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from inference.program.program import Program

__all__ = ["Algorithm", "Online", "Results", "init_strategy"]


class Results(NamedTuple):
    """What one replicate leaves behind beside its draws."""

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
    # the checks of its runs: "smc", "nested" or "variational"; else `diagnostics.report` finds out
    report: ClassVar[str] = ""

    @abstractmethod
    def read(self, program: Program) -> tuple[Any, Any]:
        """What the kernel needs of the model, proved, and the arrays that its steps take:
        `(reading, data)`.

        Bad data and models that do not fit are refused here, before anything is compiled for long:
        `StructureError` or `ValueError`.
        """

    @abstractmethod
    def init(self, rng_key: Array, reading: Any, data: Any) -> Any:
        """The state before the first step. Runs on the host, once for each replicate."""

    @abstractmethod
    def step(self, rng_key: Array, state: Any, reading: Any, data: Any, /) -> tuple[Any, Any]:
        """One sweep, one batch of data or one shrinkage: `(State, Info)`.

        Compiled. Each field of `Info` is recorded at every step under its own name in
        `sample_stats`, and the progress bar shows the scalar ones.
        """

    @abstractmethod
    def finished(self, state: Any) -> Array:
        """Whether nothing is left to do: a boolean scalar array.

        A constant False means that only a budget ends the run.
        """

    @abstractmethod
    def draw(
        self, rng_key: Array, state: Any, reading: Any, data: Any, num_draws: int
    ) -> dict[str, Array]:
        """`num_draws` equally weighted draws of the latent sites, constrained, along a new first
        axis.

        A variational algorithm adds `log_q`, the log density of each draw under its approximation:
        a group of its own in the tree, from which `diagnostics` tells how far q is from the model.
        """

    @abstractmethod
    def results(self, state: Any, reading: Any, data: Any) -> Results:
        """What the tree holds beside draws and the record of the steps; `Results({}, {}, {})`
        when there is nothing.
        """

    def needs_host(self, state: Any) -> Array:
        """Whether the next step needs something that compiled code cannot do, such as arrays
        with more room. Compiled.
        """
        return jnp.zeros((), bool)

    def on_host(self, states: Sequence[Any], reading: Any, data: Any) -> Sequence[Any]:
        """The states of all replicates that are stacked together, of which at least one needs
        the host; returned in equal shapes.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a state asks for the host, and the kernel has no `on_host`."
        )


@runtime_checkable
class Online(Protocol):
    """An algorithm that learns from more rows after a run: `Driver.update`.

    Its readings have two methods. `reading.more(program)` returns `(reading, data)` of the program
    with the new rows: it checks that the model is the same, and does not prove it again.
    `reading.by_row(programs)` names the arguments that have an entry for each row, when the tree is
    to tell of the rows of all programs; it names none when the tree is to tell of the last rows
    alone.
    """

    def updated(self, state: Any, reading: Any, data: Any, before: Any) -> Any:
        """The state that goes on with `data`; `before` is the data of the call before."""
        ...


def init_strategy(kernel: Any) -> Callable | None:
    """NumPyro's function for the start of each site: of the kernel, of its guide, or of the
    first of its blocks that has one.
    """
    for part in (
        kernel,
        getattr(kernel, "guide", None),
        *(block for block, _ in getattr(kernel, "blocks", ())),
    ):
        strategy = getattr(part, "_init_strategy", None) or getattr(part, "init_loc_fn", None)
        if strategy is not None:
            return strategy
    return None
