"""Routes of `ConditionalGibbs`: which sites of a model are drawn jointly, and how.

The kernel draws the other sites one by one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from inference.program.program import Program

__all__ = ["Route"]


class Route:
    """The route "each": no site is drawn jointly."""

    name = "each"
    fields: tuple[str, ...] = ()  # of the kernel's state that are recorded, beside the residual
    # what is drawn jointly and its family, for each residual of `draw`
    drawn: tuple[tuple[str, str], ...] = ()
    not_identified: tuple[str, ...] = ()  # sites that label switching affects

    def start(self, rng_key: Array) -> dict[str, Array]:
        """Start values of some sites, in place of draws from their priors."""
        return {}

    def data(self, program: Program) -> Any:
        """The arrays that `draw` takes."""
        return None

    def seen(self, program: Program, data: Any) -> Program:
        """The model with the arrays of `data` in place of those that it was given."""
        return program

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: Any
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """Draws the sites of the route jointly.

        Args:
            rng_key: a key.
            program: the model with its data.
            values: the values of all sites.
            data: what `data` returns.

        Returns:
            All values after the draws; the residuals, which are the relative gaps between model and
            reading; and the model from which the other sites are drawn.
        """
        return values, [], program

    def recorded(
        self, values: Mapping[str, Any], log_joint: Callable
    ) -> tuple[Array | None, Array | None]:
        """The number of groups that have rows, and minus the log joint; None without a mixture."""
        return None, None
