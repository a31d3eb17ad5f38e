"""Gradient steps of which rows without a gradient know nothing.

An optimiser is a pair `init(values)`, `update(slopes, state, values) -> (moves, state)` as optax has it, for slopes of a loss. It is valid
on some rows only if a zero slope moves nothing, now and later: those without momentum, such as `optax.sgd` and `optax.adagrad`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from inference.kernels._touched_rows import Asked

__all__ = ["Adagrad", "Adaptive", "check_lazy", "update_rows"]


class AdaptiveState(NamedTuple):
    """What `Adaptive` remembers."""

    count: Array
    square: Any  # running mean of squared slopes


class Adaptive(NamedTuple):
    """The step sizes of Kucukelbir et al. (2017), between RMSProp and Adagrad: rate_t t^(-1/2) slope / (1 + sqrt(square)),

    square <- 0.1 slope^2 + 0.9 square, and slope^2 at first.
    """

    rate: float = 0.02
    decay: float = 0.9  # of the rate, every so many steps
    decay_every: int = 2000

    def init(self, values: Any) -> AdaptiveState:
        """Nothing seen."""
        return AdaptiveState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, values))

    def update(self, slopes: Any, state: AdaptiveState, values: Any = None) -> tuple[Any, AdaptiveState]:
        """Moves down the slopes."""
        count = state.count + 1
        rate = self.rate * self.decay ** (state.count // self.decay_every).astype(float) / jnp.sqrt(count.astype(float))
        seen = lambda slope, square: jnp.where(square == 0, slope**2, 0.1 * slope**2 + 0.9 * square)
        square = jax.tree.map(seen, slopes, state.square)
        move = lambda slope, square: (-rate * slope / (1 + jnp.sqrt(square))).astype(slope.dtype)
        return jax.tree.map(move, slopes, square), AdaptiveState(count, square)


class Adagrad(NamedTuple):
    """Steps of Duchi et al. (2011): rate slope / sqrt(sum of squared slopes). What a slope is divided by hardly depends on that slope, so
    noise does not draw a fit away from where slopes are 0 on average; with `Adaptive`, whose mean forgets, it does."""

    rate: float = 0.1

    def init(self, values: Any) -> Any:
        """Nothing seen."""
        return jax.tree.map(jnp.zeros_like, values)

    def update(self, slopes: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        """Moves down the slopes."""
        square = jax.tree.map(lambda slope, square: square + slope**2, slopes, state)
        return jax.tree.map(lambda slope, square: -self.rate * slope / jnp.sqrt(square + 1e-12), slopes, square), square


def update_rows(optimizer: Any, asked: Asked, slopes: Any, state: Any, values: Any) -> tuple[Any, Any]:
    """The values and the state of a site after a step on the rows that were asked for; nothing else is read or written.

    :param slopes: [request, ...], those of the same row equal.
    """
    by_row = {leaf.shape for leaf in jax.tree.leaves(values)}
    is_by_row = lambda leaf: jnp.shape(leaf) in by_row
    rows = jax.tree.map(asked.gather, values)
    some = jax.tree.map(lambda leaf: asked.gather(leaf) if is_by_row(leaf) else leaf, state)
    moves, new = optimizer.update(slopes, some, rows)
    put = lambda whole, part: asked.scatter(whole, part) if is_by_row(whole) else part
    moved = jax.tree.map(lambda row, move: row + move, rows, moves)
    return jax.tree.map(asked.scatter, values, moved), jax.tree.map(put, state, new)


def check_lazy(optimizer: Any) -> None:
    """Refuses an optimiser that goes on moving where the slope is zero."""
    value = jnp.ones(2)
    state = optimizer.init(value)
    for slope in (jnp.ones(2), jnp.array([0.0, 1.0])):
        moves, state = optimizer.update(slope, state, value)
    if float(moves[0]) != 0:
        raise ValueError(
            f"optimizer: it moves a row whose slope is 0 (by {float(moves[0]):.2g}), so it must see all rows at every step. Wanted one "
            "without momentum and weight decay, such as optax.adagrad or optax.sgd."
        )
