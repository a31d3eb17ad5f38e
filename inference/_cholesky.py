"""The Cholesky factors that a function takes on its way.

A model that makes functions of noise by the factor of their covariance has both at hand, but returns neither; to find the factor from
values alone takes as many of them as there is noise, and the covariance a product of matrices more.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import eval_jaxpr

__all__ = ["with_factors"]


def with_factors(function: Callable, *arguments: Any) -> tuple[Any, list[tuple[Array, Array]]]:
    """What a function returns, and each matrix that `jnp.linalg.cholesky` is given, with its factor; within loops and compiled functions
    they are not seen.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    pairs = [(step.invars[0], step.outvars[0]) for step in closed.jaxpr.eqns if step.params.get("name") == "cholesky"]
    wanted = [*closed.jaxpr.outvars, *(each for pair in pairs for each in pair)]
    found = eval_jaxpr(closed.jaxpr.replace(outvars=wanted), closed.consts, *jax.tree.leaves(arguments))
    rest = found[len(closed.jaxpr.outvars) :]
    result = jax.tree.unflatten(jax.tree.structure(shapes), found[: len(closed.jaxpr.outvars)])
    return result, list(zip(rest[::2], rest[1::2], strict=True))
