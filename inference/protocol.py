"""What an algorithm that is not a chain owes the driver.

Chains are NumPyro's `MCMCKernel`s and keep NumPyro's protocol. Everything else (a particle filter, nested sampling,
coordinate ascent, stochastic variational inference) is an `Algorithm`: five pure functions of a key, a state and the
`Program`, which is the model with its arguments and every question that may be asked of it.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from jax import Array

from inference.program import Program

__all__ = ["Algorithm", "Results"]


class Results(NamedTuple):
    """What one replicate leaves behind beside its draws."""

    groups: dict[str, dict[str, Array]]  # further groups of the tree, such as weighted particles or variational parameters
    attrs: dict[str, Array]  # scalars, such as `log_evidence` and `log_evidence_se`
    dims: dict[str, tuple[str, ...]]  # names of the first dimensions of variables in `groups`


class Algorithm(ABC):
    """An inference algorithm that is not a Markov chain. Subclasses are final: they implement all five and override nothing.

    `State` and `Info` are NamedTuples of arrays. The key of step t is `fold_in(key, t)`, so a resumed run is the same run.
    """

    model: Any  # the NumPyro model that it was built on

    @abstractmethod
    def init(self, rng_key: Array, program: Program) -> Any:
        """The state before the first step. What it reads off the model it proves here, or it raises `StructureError`."""

    @abstractmethod
    def step(self, rng_key: Array, state: Any, program: Program) -> tuple[Any, Any]:
        """One sweep, one batch of data or one shrinkage: `(State, Info)`. Compiled; each field of `Info` is recorded at
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
