"""Compiled code that is remembered in this process, and how much of it.

    once(function, *arguments)(*arguments)       compiles quickly, to code that is some times
                                                 slower: for a handful of calls
    compiled(function, *arguments)(*arguments)   compiles as `jax.jit` does: for code that takes
                                                 longer to run than to compile
    built(jitted, arguments, options)            of what `jax.jit` has returned with settings of its
                                                 own, such as donated arguments

A function that is made anew in each call, such as a lambda in a method, is compiled anew by
`jax.jit`. These three trace it, and look for code that was compiled from the same trace
(`trace_hash`) for arguments of the same types. A function at the level of a module, whose static
arguments are hashable, needs none of them: `jax.jit` remembers it, and does without the trace.

JAX keeps the code of thousands of programs, each in some hundred maps of memory, of which Linux
gives a process 65 530: a process of a hundred fits would die without a word. `make_room` sees to
that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr

from inference.program.hashing import trace_hash

__all__ = ["built", "compiled", "is_traced", "make_room", "once"]

BUILT: dict[Any, Any] = {}
MOST_BUILT = 32
# of Linux; others have no such limit
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
QUICKLY = {"xla_backend_optimization_level": 0}


def once(function: Callable, *arguments: Any) -> Callable:
    """`compiled` for a handful of calls: it takes less time to compile, and more to run."""
    return compiled(function, *arguments, options=QUICKLY)


def compiled(
    function: Callable, *arguments: Any, options: dict[str, Any] | None = None
) -> Callable:
    """The function, compiled for arguments like these.

    The data that it closes over become arguments of the code: as its constants they would be copied
    several times, and other data would be another program. Within other code it becomes a part of
    that.

    :param options: the compiler's.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    given, functions = (closed.consts, jax.tree.leaves(arguments)), []
    if is_traced(given):
        return function
    code = jax.jit(
        lambda consts, leaves: eval_jaxpr(closed.jaxpr, consts, *leaves), keep_unused=True
    )
    key = trace_hash(closed, functions, knows_constants=False)
    found = _remembered(key, functions, given, options, lambda: code.lower(*given))
    return lambda *given: jax.tree.unflatten(
        jax.tree.structure(shapes), found(closed.consts, jax.tree.leaves(given))
    )


def built(jitted: Any, arguments: tuple, options: dict[str, Any] | None) -> Any:
    """What was jitted, with `keep_unused`, compiled with the compiler's options.

    Its constants count: with others it is another program.
    """
    traced, functions = jitted.trace(*arguments), []
    is_donated = tuple(info.donated for info in jax.tree.leaves(traced.args_info))
    key = trace_hash(traced.jaxpr, functions), is_donated, traced.out_tree
    return _remembered(key, functions, arguments, options, traced.lower)


def _remembered(
    key: Any,
    functions: list[Any],
    arguments: tuple,
    options: dict[str, Any] | None,
    lower: Callable,
) -> Any:
    """Compiled code, by the trace, the forms and places of the arguments, and whatever else of
    JAX's settings the compiler reads. Functions that the trace knows by identity are kept, lest
    another one get the same.
    """
    leaves, form = jax.tree.flatten(arguments)
    places = tuple(leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves)
    key = key, form, places, str(options), jax.config.jax_default_device, jax.config.jax_enable_x64
    BUILT[key] = BUILT.pop(key, None) or (lower().compile(compiler_options=options), functions)
    if len(BUILT) > MOST_BUILT:
        del BUILT[next(iter(BUILT))]  # the one that was not asked for the longest
    return BUILT[key][0]


def make_room() -> None:
    """Lets go of JAX's compiled code where it has taken half of the maps of memory that the
    process may have.
    """
    if MAPS.exists() and 2 * MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()):
        jax.clear_caches()


def is_traced(tree: Any) -> bool:
    """Whether a tree holds values that are not known yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))
