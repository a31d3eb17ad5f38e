"""Gradient steps of which rows without a gradient know nothing.

An optimiser is a pair `init(values)`, `update(slopes, state, values) -> (moves, state)` as optax
has it, for slopes of a loss. It is valid on some rows only if a zero slope moves nothing, now and
later: those without momentum, such as `optax.sgd` and `optax.adagrad`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["Adagrad", "Adaptive", "AdaptiveState", "check_lazy", "remembered", "update_rows"]


class AdaptiveState(NamedTuple):
    """What `Adaptive` remembers."""

    count: Array
    square: Any  # running mean of squared slopes


class Adaptive(NamedTuple):
    """The step sizes of Kucukelbir et al.

    (2017), between RMSProp and Adagrad: rate_t t^(-1/2) slope / (1 + sqrt(square)),

    square <- 0.1 slope^2 + 0.9 square, and slope^2 at first.
    """

    rate: float = 0.02
    decay: float = 0.9  # of the rate, every so many steps
    decay_every: int = 2000

    def init(self, values: Any) -> AdaptiveState:
        """Nothing seen."""
        return AdaptiveState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, values))

    def update(
        self, slopes: Any, state: AdaptiveState, values: Any = None
    ) -> tuple[Any, AdaptiveState]:
        """Moves down the slopes."""
        count = state.count + 1
        rate = (
            self.rate
            * self.decay ** (state.count // self.decay_every).astype(float)
            / jnp.sqrt(count.astype(float))
        )
        seen = lambda slope, square: jnp.where(square == 0, slope**2, 0.1 * slope**2 + 0.9 * square)
        square = jax.tree.map(seen, slopes, state.square)
        move = lambda slope, square: (-rate * slope / (1 + jnp.sqrt(square))).astype(slope.dtype)
        return jax.tree.map(move, slopes, square), AdaptiveState(count, square)


class Adagrad(NamedTuple):
    """Steps of Duchi et al.

    (2011): rate slope / sqrt(sum of squared slopes). What a slope is divided by hardly depends on
    that slope, so noise does not draw a fit away from where slopes are 0 on average; with
    `Adaptive`, whose mean forgets, it does.
    """

    rate: float = 0.1

    def init(self, values: Any) -> Any:
        """Nothing seen."""
        return jax.tree.map(jnp.zeros_like, values)

    def update(self, slopes: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        """Moves down the slopes."""
        square = jax.tree.map(lambda slope, square: square + slope**2, slopes, state)
        return jax.tree.map(
            lambda slope, square: -self.rate * slope / jnp.sqrt(square + 1e-12), slopes, square
        ), square


def remembered(optimizer: Any, values: Any) -> tuple[list[Any], list[Any]]:
    """What an optimiser knows at first: of each row of `values` [row, ...], and of all together."""
    leaves, is_own = jax.tree.leaves(optimizer.init(values)), _is_of_rows(optimizer, values)
    own = [leaf for leaf, mine in zip(leaves, is_own, strict=True) if mine]
    if strange := {leaf.dtype.name for leaf in own} - {
        leaf.dtype.name for leaf in jax.tree.leaves(values)
    }:
        raise ValueError(
            f"optimizer: it remembers rows as {', '.join(strange)}; wanted the type of the values."
        )
    return own, [leaf for leaf, mine in zip(leaves, is_own, strict=True) if not mine]


def _is_of_rows(optimizer: Any, values: Any) -> list[bool]:
    """Of each array that an optimiser keeps, whether it has a row for each row of the values:
    then it grows with them.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(values)}
    longer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(leaf) + 1, *leaf.shape[1:]), leaf.dtype), values
    )
    now, then = (jax.tree.leaves(jax.eval_shape(optimizer.init, some)) for some in (values, longer))
    found = [one.shape != other.shape for one, other in zip(now, then, strict=True)]
    for leaf in (
        leaf for leaf, mine in zip(now, found, strict=True) if mine and leaf.shape not in shapes
    ):
        raise ValueError(
            f"optimizer: for values of shape {', '.join(map(str, shapes))} it keeps an array of "
            f"shape {leaf.shape}, which cannot be shared "
            "out among their rows. Wanted one that keeps arrays as large as the values, such as "
            "optax.adagrad or optax.sgd."
        )
    return found


def update_rows(
    optimizer: Any, slopes: Any, known: list[Any], common: list[Any], values: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Values of some rows [row, ...] after a step, and what the optimiser then knows of them and
    of all together.
    """
    is_own = _is_of_rows(optimizer, values)
    own, rest = iter(known), iter(common)
    structure = jax.tree.structure(jax.eval_shape(optimizer.init, values))
    state = jax.tree.unflatten(structure, [next(own if mine else rest) for mine in is_own])
    moves, new = optimizer.update(slopes, state, values)
    leaves = list(zip(is_own, jax.tree.leaves(new), strict=True))
    moved = jax.tree.map(jnp.add, values, moves)
    return (
        moved,
        [leaf for mine, leaf in leaves if mine],
        [leaf for mine, leaf in leaves if not mine],
    )


def check_lazy(optimizer: Any) -> None:
    """Refuses an optimiser that goes on moving where the slope is zero."""
    value = jnp.ones(2)
    state = optimizer.init(value)
    for slope in (jnp.ones(2), jnp.array([0.0, 1.0])):
        moves, state = optimizer.update(slope, state, value)
    if float(moves[0]) != 0:
        raise ValueError(
            f"optimizer: it moves a row whose slope is 0 (by {float(moves[0]):.2g}), so it must "
            "see all rows at every step. Wanted one "
            "without momentum and weight decay, such as optax.adagrad or optax.sgd."
        )
