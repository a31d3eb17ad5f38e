"""A route of `ConditionalGibbs`: which sites of a model are drawn jointly, and how.

The others are drawn one after the other.
"""

from collections.abc import Mapping
from typing import Any

from jax import Array

from inference.program.program import Program

__all__ = ["Route"]


class Route:
    """No site is drawn jointly."""

    name = "each"
    fields: tuple[str, ...] = ()  # of the kernel's state, which are recorded beside the residual
    # (what is drawn jointly, its family), for each residual of `draw`
    drawn: tuple[tuple[str, str], ...] = ()
    not_identified: tuple[str, ...] = ()  # sites whose values depend on what groups are called

    def start(self, rng_key: Array) -> dict[str, Array]:
        """Values to start from, in place of those that are drawn at random."""
        return {}

    def data(self, program: Program) -> Any:
        """The arrays that `draw` takes."""
        return None

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: Any
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """All values after a sweep over the joint sites, its residuals, and the model for the
        other sites.
        """
        return values, [], program

    def num_groups(self, values: Mapping[str, Any]) -> Array | None:
        """How many groups of a mixture have rows; None without a mixture."""
        return None
