"""A program on some of its rows, for readers that prove what they read on a few."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array

from inference.program import Program
from inference.sites import StructureError

__all__ = ["arguments_by_row", "num_entries", "on_rows"]


def num_entries(value: Any) -> int | None:
    """Of an array or what NumPy makes one of; None of a number, and of what is no array, such as a tuple of unlike ones."""
    try:
        return len(value) if np.ndim(value) else None
    except ValueError:
        return None


def arguments_by_row(program: Program, num_rows: int) -> dict[str, np.ndarray]:
    """The arrays among the arguments that have an entry for each row."""
    is_by_row = lambda value: isinstance(value, np.ndarray | Array) and value.shape[:1] == (num_rows,)
    return {name: np.asarray(value) for name, value in program.arguments.items() if is_by_row(value)}


def on_rows(program: Program, z: str, by_row: Mapping[str, Any], chosen: np.ndarray) -> Program:
    """With the chosen rows of the arguments `by_row`; refused where `z` then has not that many rows."""
    some = program.with_arguments(**{name: value[chosen] for name, value in by_row.items()})
    size = len(chosen)
    cut = f"when the arguments {sorted(by_row)} are cut to {size} rows; wanted a model whose number of rows follows from its data."
    try:
        found = some.sites[z].shape
    except (TypeError, ValueError) as error:
        error.add_note(f"site {z!r}: the model does not run {cut}")
        raise
    if found != (size,):
        num_rows = program.sites[z].shape[0]
        raise StructureError(f"site {z!r}: {found[0]} rows remain of {num_rows} {cut} Take it from the length of an argument.")
    return some
