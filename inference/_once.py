"""Code that is compiled for a call or two."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr

from inference._built import built

__all__ = ["once"]


def once(function: Callable, *arguments: Any) -> Callable:
    """Compiled, for arguments like these, quickly and to slow code. The data that the function closes over become arguments of the code:
    as its constants they would be copied several times."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    code = jax.jit(lambda data, leaves: eval_jaxpr(closed.jaxpr, data, *leaves), keep_unused=True)
    compiled = built(code.lower(closed.consts, jax.tree.leaves(arguments)), {"xla_backend_optimization_level": 0})
    return lambda *given: jax.tree.unflatten(jax.tree.structure(shapes), compiled(closed.consts, jax.tree.leaves(given)))
