"""Models whose arguments are traced: a kernel that reads a model by running it reads one with stand-ins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from inference.program import Program

__all__ = ["is_traced", "stand_in"]


def is_traced(tree: Any) -> bool:
    """Whether a tree holds values that are not known yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def stand_in(program: Program) -> Program:
    """The program with numbers in place of traced arguments, of their shapes and inside of every support: 1 for floats, 0 for integers."""
    inside = lambda leaf: np.full(leaf.shape, jnp.issubdtype(leaf.dtype, jnp.inexact), leaf.dtype)
    fill = lambda leaf: inside(leaf) if isinstance(leaf, Tracer) else leaf
    traced = {name: jax.tree.map(fill, value) for name, value in program.arguments.items() if is_traced(value)}
    return program.with_arguments(**traced) if traced else program
