"""What an algorithm that is not a chain owes the driver.

Chains are NumPyro's `MCMCKernel`s and keep NumPyro's protocol. Everything else (a particle filter, nested sampling,
coordinate ascent, stochastic variational inference) is an `Algorithm`: five pure functions of a key, a state and the
`Program`, which is the model with its arguments and every question that may be asked of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from inference.program import Program

__all__ = ["Algorithm", "Results", "init_strategy"]


class Results(NamedTuple):
    """What one replicate leaves behind beside its draws."""

    groups: dict[str, dict[str, Array]]  # further groups of the tree, such as weighted particles or variational parameters
    attrs: dict[str, Any]  # scalars, such as `log_evidence` and `log_evidence_se`
    dims: dict[str, tuple[str, ...]]  # names of the first dimensions of variables in `groups`


class Algorithm(ABC):
    """An inference algorithm that is not a Markov chain: five functions to implement, and a few that an algorithm may need as well.

    `State` and `Info` are NamedTuples of arrays. The key of step t is `fold_in(key, t)`, so a resumed run is the same run.
    """

    model: Any  # the NumPyro model that it was built on

    @abstractmethod
    def init(self, rng_key: Array, program: Program) -> Any:
        """The state before the first step. What it reads off the model it proves here, or it raises `StructureError`."""

    @abstractmethod
    def step(self, rng_key: Array, state: Any, program: Any, /) -> tuple[Any, Any]:
        """One sweep, one batch of data or one shrinkage: `(State, Info)`. It is given the program, or what `data` made of it.
        Compiled; each field of `Info` is recorded at
        every step under its own name in `sample_stats`, and the progress bar shows the scalar ones."""

    @abstractmethod
    def finished(self, state: Any) -> Array:
        """Whether nothing is left to do: a boolean scalar array. A constant False means that only a budget ends the run."""

    @abstractmethod
    def draw(self, rng_key: Array, state: Any, program: Program, num_draws: int) -> dict[str, Array]:
        """`num_draws` equally weighted draws of the latent sites, constrained, along a new first axis.

        A variational algorithm adds `log_q`, the log density of each draw under its approximation: a group of its own in the
        tree, from which `diagnostics` tells how far q is from the model.
        """

    @abstractmethod
    def results(self, state: Any, program: Program) -> Results:
        """What the tree holds beside draws and the record of the steps; `Results({}, {}, {})` when there is nothing."""

    # For algorithms that read their data once, step by step.

    def check(self, program: Program) -> None:
        """Refuse bad data before anything is compiled. By default the whole log joint is evaluated."""
        program.check(init_strategy(self))

    def data(self, program: Program) -> Any:
        """Arrays that `step` is given in place of the program. The compiled loop takes them as arguments, so that other data of the
        same shapes compile nothing. None: it is given the program."""
        return None

    def updated(self, state: Any, program: Program, before: Program) -> Any:
        """The state that goes on with the data of another program than the one before, where it stopped: `Driver.update`."""
        raise TypeError(f"update: {type(self).__name__} learns from one data set; call `run` with all of the data.")

    def rows_of(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """The arguments of a run and its updates that have an entry for each row, where the tree is to tell of the rows of all of them."""
        return ()

    def rest_left(self, state: Any, program: Program) -> tuple[Any, Program | None]:
        """The state that has finished where it stands, and the program with the rows that it has taken, if any: `Driver.leave_rest`."""
        raise TypeError(f"leave_rest: {type(self).__name__} does not take its rows one by one; `extend` lets it finish.")

    # For states whose size is not known beforehand: arrays have room for some, and the host makes more.

    def is_full(self, state: Any) -> Array:
        """Whether the next step might find no room. Compiled; the loop then stops before that step."""
        return jnp.zeros((), bool)

    def grown(self, state: Any, program: Program) -> Any:
        """The same state with more room, in arrays of other shapes; called on the host while `is_full` holds."""
        raise NotImplementedError(f"{type(self).__name__} says that its state is full, and cannot grow it.")

    # For what the host does better than compiled code.

    def is_waiting(self, state: Any) -> Array:
        """Whether the host is asked for something before the next step. Compiled; the loop then stops before that step."""
        return jnp.zeros((), bool)

    def served(self, state: Any, program: Program) -> Any:
        """The same state with what it asks for, in arrays of the same shapes; called on the host while `is_waiting` holds."""
        raise NotImplementedError(f"{type(self).__name__} says that it waits, and not for what.")


def init_strategy(kernel: Any) -> Callable | None:
    """NumPyro's function for the start of each site: of the kernel, of its guide, or of the first of its blocks that has one."""
    for part in (kernel, getattr(kernel, "guide", None), *(block for block, _ in getattr(kernel, "blocks", ()))):
        strategy = getattr(part, "_init_strategy", None) or getattr(part, "init_loc_fn", None)
        if strategy is not None:
            return strategy
    return None
