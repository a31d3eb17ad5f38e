"""The rows of the weights that a step reads and moves: their layout, their optimiser, their prior.

A step that touches few of a million rows waits for memory more than it computes. So the values of a
row, the optimiser's state for it and the step that touched it last lie side by side in one array,
and a step gathers and scatters that array once.

An optimiser is a pair `init(values)`, `update(slopes, state, values) -> (moves, state)` as in
optax, for slopes of a loss. On some rows alone it is valid only if a zero slope moves nothing, now
and later: optimisers without momentum, such as `optax.sgd` and `optax.adagrad`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.reading.row_table import Index, ReducedModel, RowRequests

__all__ = [
    "Adagrad",
    "Adaptive",
    "Minibatch",
    "Row",
    "RowLayout",
    "check_lazy",
    "layouts_of",
    "minibatch_of",
    "remembered",
    "update_rows",
]

# steps are counted up to here and then from 0 again: 32-bit floats are exact so far, and rows that
# are left alone for longer are rare
MAX_STEPS = 2**24 - 1


class Adaptive(NamedTuple):
    """The step sizes of Kucukelbir et al. (2017), between RMSProp and Adagrad.

    A move is -rate_t t^(-1/2) slope / (1 + sqrt(square)), with square <- 0.1 slope^2 + 0.9 square,
    and slope^2 at first.

    Args:
        rate: of the first steps.
        decay: factor of the rate, every `decay_every` steps.
        decay_every: steps.
    """

    rate: float = 0.02
    decay: float = 0.9
    decay_every: int = 2000

    def init(self, values: Any) -> tuple[Array, Any]:
        """The state before the first step: the count of steps, and means of squared slopes."""
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, values)

    def update(
        self, slopes: Any, state: tuple[Array, Any], values: Any = None
    ) -> tuple[Any, tuple[Array, Any]]:
        """Moves down the slopes, and the next state."""
        count = state[0] + 1
        decayed = self.rate * self.decay ** (state[0] // self.decay_every).astype(float)
        rate = decayed / jnp.sqrt(count.astype(float))
        mean = lambda slope, square: jnp.where(square == 0, slope**2, 0.1 * slope**2 + 0.9 * square)
        square = jax.tree.map(mean, slopes, state[1])
        move = lambda slope, square: (-rate * slope / (1 + jnp.sqrt(square))).astype(slope.dtype)
        return jax.tree.map(move, slopes, square), (count, square)


class Adagrad(NamedTuple):
    """Adagrad (Duchi, Hazan and Singer 2011), which sums squared slopes where `Adaptive` forgets.

    A slope hardly changes its own divisor, so that noise does not bias a fit; `Adaptive` does.

    Args:
        rate: of a step, rate slope / sqrt(sum of squared slopes).
    """

    rate: float = 0.1

    def init(self, values: Any) -> Any:
        """The state before the first step."""
        return jax.tree.map(jnp.zeros_like, values)

    def update(self, slopes: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        """Moves down the slopes, and the next state."""
        square = jax.tree.map(lambda slope, square: square + slope**2, slopes, state)
        move = lambda slope, square: -self.rate * slope / jnp.sqrt(square + 1e-12)
        return jax.tree.map(move, slopes, square), square


def remembered(optimizer: Any, values: Any) -> tuple[list[Any], list[Any]]:
    """The optimiser's initial state in two lists: arrays by row of `values`, and all others."""
    own, common = _split(optimizer, values, optimizer.init(values))
    known = {leaf.dtype.name for leaf in jax.tree.leaves(values)}
    if strange := {leaf.dtype.name for leaf in own} - known:
        raise ValueError(
            f"optimizer: it remembers rows as {', '.join(strange)}; wanted the type of the values."
        )
    return own, common


def update_rows(
    optimizer: Any, slopes: Any, known: list[Any], common: list[Any], values: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Rows after a step of the optimiser, and its new state in two lists as by `remembered`.

    Args:
        optimizer: as in optax.
        slopes: a tree of arrays [row, ...].
        known: the optimiser's state of these rows.
        common: its state of all rows together.
        values: the rows before, a tree of arrays [row, ...].
    """
    own, rest = iter(known), iter(common)
    structure = jax.tree.structure(jax.eval_shape(optimizer.init, values))
    leaves = [next(own if mine else rest) for mine in _is_by_row(optimizer, values)]
    moves, new = optimizer.update(slopes, jax.tree.unflatten(structure, leaves), values)
    return jax.tree.map(jnp.add, values, moves), *_split(optimizer, values, new)


def _split(optimizer: Any, values: Any, state: Any) -> tuple[list[Any], list[Any]]:
    leaves = list(zip(_is_by_row(optimizer, values), jax.tree.leaves(state), strict=True))
    return [leaf for mine, leaf in leaves if mine], [leaf for mine, leaf in leaves if not mine]


def _is_by_row(optimizer: Any, values: Any) -> list[bool]:
    """Whether each array of the optimiser's state grows with the rows of the values."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(values)}
    longer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(leaf) + 1, *leaf.shape[1:]), leaf.dtype), values
    )
    now, then = (jax.tree.leaves(jax.eval_shape(optimizer.init, some)) for some in (values, longer))
    found = [one.shape != other.shape for one, other in zip(now, then, strict=True)]
    if strange := {leaf.shape for leaf, mine in zip(now, found, strict=True) if mine} - shapes:
        raise ValueError(
            f"optimizer: for values of shape {', '.join(map(str, shapes))} it keeps an array of "
            f"shape {min(strange)}, which cannot be shared out among their rows. Wanted one that "
            "keeps arrays as large as the values, such as optax.adagrad or optax.sgd."
        )
    return found


def check_lazy(optimizer: Any) -> None:
    """Refuses an optimiser that still moves where the slope is zero."""

    def second_move(value: Array) -> Array:
        _, state = optimizer.update(value, optimizer.init(value), value)
        return optimizer.update(jnp.array([0.0, 1.0]), state, value)[0]

    value = np.ones(2, jnp.result_type(float))
    move = float(interpreted(second_move, value)(value)[0])
    if move != 0:
        raise ValueError(
            f"optimizer: it moves a row whose slope is 0 (by {move:.2g}), so it must "
            "see all rows at every step. Wanted one without momentum and weight decay, such as "
            "optax.adagrad or optax.sgd."
        )


class Row(NamedTuple):
    """Some rows of weights with all that belongs to them; each array is [row, ...]."""

    # {"loc": ...}, and "log_scale" where weights have a distribution, of each site
    values: dict[str, Any]
    known: dict[str, list[Any]]  # the optimiser's state
    # number of the step that touched the row last, where a prior counts; None where none does
    touched: Any


class RowLayout(NamedTuple):
    """The layout of rows in an array [row, number]."""

    sites: tuple[str, ...]
    weighed: tuple[str, ...]  # of the sites, those whose prior counts
    row: Row  # shapes without the axis of rows

    def pack(self, rows: Row) -> Array:
        """Packs rows into one array [row, number]."""
        return jnp.concatenate(
            [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)], axis=1
        )

    def unpack(self, packed: Array | np.ndarray) -> Row:
        """Unpacks the rows of an array that `pack` made."""
        shapes, structure = jax.tree.flatten(self.row)
        ends = np.cumsum([0, *(int(np.prod(one.shape)) for one in shapes)])
        leaves = [
            packed[:, start:end].reshape(len(packed), *one.shape)
            for one, start, end in zip(shapes, ends, ends[1:], strict=False)
        ]
        return jax.tree.unflatten(structure, leaves)


def layouts_of(
    model: ReducedModel, optimizer: Any, weighed: tuple[str, ...], names: tuple[str, ...]
) -> tuple[RowLayout, ...]:
    """A layout for each set of sites whose rows are always requested together.

    Args:
        model: the reading.
        optimizer: of the weights.
        weighed: the sites whose prior counts.
        names: the parameters of each value: "loc", and "log_scale" of a distribution.
    """

    def rows_of(sites: tuple[str, ...]) -> Row:
        dtype = model.by_row[sites[0]].dtype
        values = {
            name: {part: jnp.zeros((1, *model.row_shapes[name]), dtype) for part in names}
            for name in sites
        }
        known = {name: remembered(optimizer, value)[0] for name, value in values.items()}
        return Row(values, known, jnp.zeros(1, dtype) if set(sites) & set(weighed) else None)

    without_rows = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return tuple(
        RowLayout(
            sites,
            tuple(name for name in sites if name in weighed),
            jax.tree.map(without_rows, jax.eval_shape(lambda sites=sites: rows_of(sites))),
        )
        for sites in model.together
    )


class Minibatch(NamedTuple):
    """Some rows of the data, some classes, and the rows of the weights that they need."""

    model: ReducedModel
    layouts: tuple[RowLayout, ...]
    program: Program
    index: Index
    state: Any  # a ReduceState
    requests: dict[str, RowRequests]
    rows: tuple[Row, ...]  # the requested ones of each layout
    # standard normal, the same for requests of the same row; nothing where the weights are a point
    noise: dict[str, Array]
    worth: Array | None = None  # importance weights of the classes; None: 1

    @property
    def parameters(self) -> dict[str, Any]:
        """{"loc": ..., "log_scale": ...} of each site: of its requested rows, or of the whole."""
        by_row = {name: value for row in self.rows for name, value in row.values.items()}
        return self.state.whole | by_row

    def sites(self, parameters: dict[str, Any]) -> dict[str, Array]:
        """A draw of each site, constrained: of its requested rows, or of the whole."""
        at = {name: own["loc"] for name, own in parameters.items()}
        for name, z in self.noise.items():
            at[name] = at[name] + jnp.exp(parameters[name]["log_scale"]) * z
        return at | {name: self.model.constrained(name, at[name]) for name in self.model.whole}

    def values(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """A draw of each site, in the form that the model takes."""
        sites = self.sites(parameters)
        return sites | {name: one.answers(sites[name]) for name, one in self.requests.items()}

    def terms(self, parameters: dict[str, Any]) -> Callable[[Array | None], tuple[Array, Array]]:
        """The log joint of each row as a function of its local site."""
        return self.model.terms(self.program, self.index, self.values(parameters), self.worth)

    def log_prior(self, parameters: dict[str, Any]) -> Array:
        """The log prior of the weights plus the entropy of q, up to a constant.

        A requested row counts for all steps since it was requested last. So on average, and in the
        sum over steps, every row counts as in the whole prior.
        """
        priors, total = self.model.priors(self.program, self.index, self.values(parameters))
        sites, count = self.sites(parameters), self.state.count + 1
        for layout, row in zip(self.layouts, self.rows, strict=True):
            for name in layout.weighed:
                requests = self.requests[name]
                prior, scale = priors[name]
                log_prob = scale * jnp.asarray(jax.vmap(prior.log_prob)(sites[name]))
                since = (count - row.touched.astype(count.dtype)) & MAX_STEPS
                steps = since.astype(float) / requests.multiplicity
                each = log_prob.reshape(len(requests.ids), -1).sum(1)
                if name in self.noise:
                    log_scale = parameters[name]["log_scale"]
                    each = each + log_scale.reshape(len(requests.ids), -1).sum(1)
                total = total + jnp.sum(steps * each)
        whole = [name for name in self.noise if name in self.model.whole]
        entropies = (jnp.sum(parameters[name]["log_scale"]) for name in whole)
        return total + sum(entropies, start=jnp.zeros(()))

    def moved(self, optimizer: Any, slopes: dict[str, Any]) -> Any:
        """The state after a step down the slopes of the parameters; q of the noise stays."""
        count, tables = self.state.count + 1, []
        whole, common = dict(self.state.whole), dict(self.state.optimizer)
        for layout, packed, row in zip(self.layouts, self.state.tables, self.rows, strict=True):
            requests, values, known = self.requests[layout.sites[0]], {}, {}
            for name in layout.sites:
                merged = jax.tree.map(requests.merged, slopes[name])
                values[name], known[name], common[name] = update_rows(
                    optimizer, merged, row.known[name], common[name], row.values[name]
                )
            touched = jax.tree.map(lambda old: jnp.full_like(old, count & MAX_STEPS), row.touched)
            tables.append(requests.scatter(packed, layout.pack(Row(values, known, touched))))
        for name, value in whole.items():
            moves, common[name] = optimizer.update(slopes[name], common[name], value)
            whole[name] = jax.tree.map(jnp.add, value, moves)
        return self.state._replace(tables=tuple(tables), whole=whole, optimizer=common, count=count)


def minibatch_of(
    reading: Any,
    program: Program,
    index: Index,
    state: Any,
    rng_key: Array | None,
    worth: Array | None = None,
) -> Minibatch:
    """The rows of the weights that the model requests at these indices.

    Args:
        reading: a `ReduceReading`.
        program: the model with its data.
        index: rows of the data and classes.
        state: a `ReduceState`.
        rng_key: for a draw of the weights; without it they are at their means.
        worth: importance weights of the classes; None: 1.
    """
    model, layouts = reading.reduced, reading.layouts
    whole = {name: model.constrained(name, state.whole[name]["loc"]) for name in model.whole}
    requests = model.requests(program, index, whole)
    for layout in layouts:
        for name in layout.sites:
            assert requests[name].ids is requests[layout.sites[0]].ids, (
                f"site {name!r}: other rows of it are requested than when the model was read"
            )
    rows = tuple(
        layout.unpack(requests[layout.sites[0]].gather(packed))
        for layout, packed in zip(layouts, state.tables, strict=True)
    )
    batch = Minibatch(model, layouts, program, index, state, requests, rows, {}, worth)
    if rng_key is None:
        return batch
    noise, own = {}, batch.parameters
    for key, name in zip(random.split(rng_key, max(len(own), 1)), own, strict=False):
        if "log_scale" in own[name]:
            z = random.normal(key, own[name]["loc"].shape)
            noise[name] = requests[name].spread(z) if name in requests else z
    return batch._replace(noise=noise)
