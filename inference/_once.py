"""Code that is compiled for a call or two."""

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["once"]


def once(function: Callable, *arguments: Any) -> Callable:
    """Compiled, for arguments like these, quickly and to slow code."""
    return jax.jit(function).lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})
