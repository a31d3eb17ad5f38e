"""What the chain kernels have in common: each draws some sites of a model, constrained as they are, alone or as a block of `Gibbs`."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned
from numpyro.infer.mcmc import MCMCKernel

from inference.program import Program

__all__ = ["Block"]


class Block(MCMCKernel):
    """A kernel whose state has `values`: of the sites that it draws, by name."""

    model: Callable
    sample_field = "values"
    memory: ClassVar[tuple[str, ...]] = ()  # attributes that hold what `init` has read off the model, and maybe its data

    def __getstate__(self) -> dict[str, Any]:
        """What was read stays behind; `init` reads it again."""
        return self.__dict__ | dict.fromkeys(self.memory)

    def refresh(self, state: Any, model_args, model_kwargs) -> Any:
        """By default nothing of the state follows from what another kernel has moved."""
        return state

    def wrap_model(self, wrapper: Callable) -> Self:
        """The same kernel of another model. What `conditioned` gives to a model, this kernel takes itself."""
        other = copy.copy(self)
        other.model = self.model if wrapper is conditioned else wrapper(self.model)
        vars(other).update(dict.fromkeys(self.memory))
        return other

    def get_constrain_fn(self, model_args, model_kwargs) -> Callable:
        """Draws are constrained as they are."""
        return lambda values: values

    def _program(self, args: tuple, kwargs: dict[str, Any] | None) -> tuple[Program, dict[str, Any]]:
        """The model with its arguments, and the values of sites that other blocks own."""
        kwargs = dict(kwargs or {})
        others = kwargs.pop(GIBBS_SITES_KWARG, {})
        return Program(self.model, *args, **kwargs), others
