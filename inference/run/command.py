"""What a kernel says of itself to a command line."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Command"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class Command(NamedTuple):
    """What the command line sets for a kernel unless told otherwise, and what it does with a run.

    A kernel has it as its class attribute `command`.
    """

    options: Mapping[str, Any] = _NONE  # arguments of the kernel
    driver: Mapping[str, int | None] = _NONE  # of `Driver`; num_warmup None: it ends by itself
    # float64 where no argument of the model has as many numbers; infinity: always
    double_below: float = 0.0
    held_out: float = 0.0  # share of the rows without which a second fit, if it is cheap, is made
    # whether predictions need the final states, which are then saved with the run
    predicts_by_states: bool = False
    learns_on: bool = False  # whether saved states can learn more rows
    is_marginal: bool = False  # whether it sums sites out, so that draws have no pointwise density
