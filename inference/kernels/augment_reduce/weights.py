"""Rows of sites that a model asks for together, side by side in one array.

A step that touches few of a million rows waits for memory more than it computes, and waits anew in
each place where it looks. So the values of a row, what the optimiser knows of it and when it was
touched last lie next to each other: a step gathers and scatters one array.

The weights that one step reads and moves, and their prior.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.augment_reduce.row_optimizer import remembered, update_rows
from inference.program.program import Program
from inference.reading.row_table import Asked, Index, ReducedModel

__all__ = ["Row", "Table", "View", "steps_since", "tables_of", "touch", "view_of"]

# a float of 32 bits counts so far; a row that was left alone for longer is as rare as it is
# harmless
STEPS = 2**24 - 1


class Row(NamedTuple):
    """What belongs to one row of a table, or to some: [row, ...] of each."""

    # {"loc": ...}, and "log_scale" where weights have a distribution, of each site
    values: dict[str, Any]
    known: dict[str, list[Any]]  # what the optimiser knows
    # the step after which the row was touched last, where a prior counts; None where none does
    touched: Any


class Table(NamedTuple):
    """Where everything is in an array [row, number]."""

    sites: tuple[str, ...]
    weighed: tuple[str, ...]  # of the sites, those whose prior counts
    row: Row  # shapes without the axis of rows

    def pack(self, rows: Row) -> Array:
        """Side by side."""
        return jnp.concatenate(
            [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)], axis=1
        )

    def unpack(self, packed: Array) -> Row:
        """Each by itself."""
        shapes, structure = jax.tree.flatten(self.row)
        ends = np.cumsum([int(np.prod(one.shape)) for one in shapes])
        pieces = jnp.split(packed, ends[:-1].tolist(), axis=1)
        leaves = [
            piece.reshape(len(packed), *one.shape)
            for piece, one in zip(pieces, shapes, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)


def tables_of(
    model: ReducedModel, optimizer: Any, weighed: tuple[str, ...], names: tuple[str, ...]
) -> tuple[Table, ...]:
    """One for all sites that are asked for the same rows.

    :param weighed: the sites whose prior counts.
    :param names: of what each value consists of.
    """
    return tuple(
        _table(model, optimizer, sites, tuple(name for name in sites if name in weighed), names)
        for sites in model.together
    )


def _table(
    model: ReducedModel,
    optimizer: Any,
    sites: tuple[str, ...],
    weighed: tuple[str, ...],
    names: tuple[str, ...],
) -> Table:
    dtype = model.by_row[sites[0]].dtype

    def one_row() -> Row:
        values = {
            name: {part: jnp.zeros((1, *model.row_shapes[name]), dtype) for part in names}
            for name in sites
        }
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


class View(NamedTuple):
    """Of some rows of the sites, as a step sees them."""

    model: ReducedModel
    tables: tuple[Table, ...]
    program: Program
    index: Index
    state: Any  # a ReduceState
    asked: dict[str, Asked]
    rows: tuple[Row, ...]  # of each table, those that were asked for
    # standard normal, the same for requests of the same row; nothing where the weights are a point
    noise: dict[str, Array]

    @property
    def parameters(self) -> dict[str, Any]:
        """Of q of each site: the rows that were asked for, or all; {"loc": ..., "log_scale":
        ...}.
        """
        return self.state.whole | {
            name: value for row in self.rows for name, value in row.values.items()
        }

    def sites(self, parameters: dict[str, Any]) -> dict[str, Array]:
        """A draw of each site: rows, or all, constrained."""
        at = {name: own["loc"] for name, own in parameters.items()}
        at |= {
            name: at[name] + jnp.exp(parameters[name]["log_scale"]) * z
            for name, z in self.noise.items()
        }
        return {
            name: self.model.constrained(name, value) if name in self.model.whole else value
            for name, value in at.items()
        }

    def values(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The same, as the model is given them."""
        return {
            name: self.asked[name].answers(value) if name in self.asked else value
            for name, value in self.sites(parameters).items()
        }

    def terms(self, parameters: dict[str, Any]) -> Callable[[Array | None], tuple[Array, Array]]:
        """The log joint of each row as a function of its own site."""
        return self.model.terms(self.program, self.index, self.values(parameters))

    def log_prior(self, parameters: dict[str, Any]) -> Array:
        """With the entropy of q, less its constant.

        A row that was asked for answers for all steps since it was asked for last: on average, and
        in the sum over steps, every row counts as it does in the whole prior.
        """
        by_row, total = self.model.priors(self.program, self.index, self.values(parameters))
        sites = self.sites(parameters)
        for name, row in (
            (name, row)
            for table, row in zip(self.tables, self.rows, strict=True)
            for name in table.weighed
        ):
            asked, log_prob = (
                self.asked[name],
                jnp.asarray(jax.vmap(by_row[name].log_prob)(sites[name])),
            )
            steps = (
                steps_since(row.touched, self.state.count + 1).astype(float) / asked.multiplicity
            )
            each = log_prob.reshape(len(asked.ids), -1).sum(1)
            if name in self.noise:
                each = each + parameters[name]["log_scale"].reshape(len(asked.ids), -1).sum(1)
            total = total + jnp.sum(steps * each)
        entropies = (
            jnp.sum(parameters[name]["log_scale"])
            for name in self.noise
            if name in self.model.whole
        )
        return total + sum(entropies, start=jnp.zeros(()))

    def moved(self, optimizer: Any, slopes: dict[str, Any]) -> Any:
        """The state after a step down the slopes of the parameters; what is known of the rows of
        the data stays.
        """
        count, tables = self.state.count + 1, []
        whole, common = dict(self.state.whole), dict(self.state.optimizer)
        for table, packed, row in zip(self.tables, self.state.tables, self.rows, strict=True):
            asked, values, known = self.asked[table.sites[0]], {}, {}
            for name in table.sites:
                merged = jax.tree.map(asked.merged, slopes[name])
                values[name], known[name], common[name] = update_rows(
                    optimizer, merged, row.known[name], common[name], row.values[name]
                )
            touched = None if row.touched is None else touch(count, row.touched)
            tables.append(asked.scatter(packed, table.pack(Row(values, known, touched))))
        for name, value in whole.items():
            moves, common[name] = optimizer.update(slopes[name], common[name], value)
            whole[name] = jax.tree.map(jnp.add, value, moves)
        return self.state._replace(tables=tuple(tables), whole=whole, optimizer=common, count=count)


def view_of(
    reading: Any, program: Program, index: Index, state: Any, rng_key: Array | None
) -> View:
    """What the model asks for at these indices, by a `ReduceReading`; without a key the weights
    are at their means.
    """
    model, tables = reading.reduced, reading.tables
    whole = {name: model.constrained(name, state.whole[name]["loc"]) for name in model.whole}
    asked = model.asked(program, index, whole)
    for name, ids in (
        (name, asked[table.sites[0]].ids) for table in tables for name in table.sites
    ):
        assert asked[name].ids is ids, (
            f"site {name!r}: it is asked for other rows than when the model was read"
        )
    rows = tuple(
        table.unpack(asked[table.sites[0]].gather(packed))
        for table, packed in zip(tables, state.tables, strict=True)
    )
    view = View(model, tables, program, index, state, asked, rows, {})
    if rng_key is None:
        return view
    noise, own = {}, view.parameters
    for key, name in zip(random.split(rng_key, max(len(own), 1)), own, strict=False):
        if "log_scale" in own[name]:
            z = random.normal(key, own[name]["loc"].shape)
            noise[name] = asked[name].spread(z) if name in asked else z
    return view._replace(noise=noise)
