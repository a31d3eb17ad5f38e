"""Rows of sites that a model asks for together, side by side in one array.

A step that touches few of a million rows waits for memory more than it computes, and waits anew in each place where it looks. So the values
of a row, what the optimiser knows of it and when it was touched last lie next to each other: a step gathers and scatters one array.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inference.kernels._lazy_updates import remembered
from inference.kernels._reduced_model import ReducedModel

__all__ = ["Row", "Table", "steps_since", "tables_of", "touch"]

STEPS = 2**24 - 1  # a float of 32 bits counts so far; a row that was left alone for longer is as rare as it is harmless


class Row(NamedTuple):
    """What belongs to one row of a table, or to some: [row, ...] of each."""

    values: dict[str, Any]  # {"loc": ...}, and "log_scale" where weights have a distribution, of each site
    known: dict[str, list[Any]]  # what the optimiser knows
    touched: Any  # the step after which the row was touched last, where a prior counts; None where none does


class Table(NamedTuple):
    """Where everything is in an array [row, number]."""

    sites: tuple[str, ...]
    weighed: tuple[str, ...]  # of the sites, those whose prior counts
    row: Row  # shapes without the axis of rows

    def pack(self, rows: Row) -> Array:
        """Side by side."""
        return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)], axis=1)

    def unpack(self, packed: Array) -> Row:
        """Each by itself."""
        shapes, structure = jax.tree.flatten(self.row)
        ends = np.cumsum([int(np.prod(one.shape)) for one in shapes])
        pieces = jnp.split(packed, ends[:-1].tolist(), axis=1)
        leaves = [piece.reshape(len(packed), *one.shape) for piece, one in zip(pieces, shapes, strict=True)]
        return jax.tree.unflatten(structure, leaves)


def tables_of(model: ReducedModel, optimizer: Any, weighed: tuple[str, ...], names: tuple[str, ...]) -> tuple[Table, ...]:
    """One for all sites that are asked for the same rows.

    :param weighed: the sites whose prior counts.
    :param names: of what each value consists of.
    """
    return tuple(_table(model, optimizer, sites, tuple(name for name in sites if name in weighed), names) for sites in model.together)


def _table(model: ReducedModel, optimizer: Any, sites: tuple[str, ...], weighed: tuple[str, ...], names: tuple[str, ...]) -> Table:
    dtype = model.by_row[sites[0]].dtype

    def one_row() -> Row:
        values = {name: {part: jnp.zeros((1, *model.row_shapes[name]), dtype) for part in names} for name in sites}
        known = {name: remembered(optimizer, value)[0] for name, value in values.items()}
        return Row(values, known, jnp.zeros(1, dtype) if weighed else None)

    of_row = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return Table(sites, weighed, jax.tree.map(of_row, jax.eval_shape(one_row)))


def touch(count: Array, like: Array) -> Array:
    """The mark of rows that were touched in the step after which `count` are done."""
    return jnp.broadcast_to((count & STEPS).astype(like.dtype), like.shape)


def steps_since(touched: Array, count: Array) -> Array:
    """Steps from the mark of a row until `count` are done."""
    return (count - touched.astype(count.dtype)) & STEPS
