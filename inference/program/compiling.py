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

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = [
    "built",
    "compiled",
    "data_hash",
    "is_arrays",
    "is_traced",
    "make_room",
    "model_hash",
    "once",
    "plain",
    "trace_hash",
]

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# names, and rules of derivatives: what is traced has used them
IGNORED = ("name", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")


def data_hash(value: Any) -> str:
    """Hash of a value: type, shape and bytes of its arrays, `repr` without addresses of anything
    else.
    """
    return _of_tree(value, _of_leaf)


def model_hash(program) -> str:
    """Hash of every log probability and deterministic value as functions of the latent values and,
    where possible, of the data.

    Arrays among the arguments are inputs of the hashed computation, so that the hash does not know
    them. A model that must look at them (say, at which entries are missing) is hashed with them
    inside. What a function of the host computes, by `jax.pure_callback`, is not seen.
    """
    shapes = {
        name: jax.ShapeDtypeStruct(program.sites[name].shape, program.sites[name].dtype)
        for name in program.latent
    }
    batches = {
        name: plate.subsample_size
        for name, plate in program.plates.items()
        if plate.subsample_size < plate.size
    }
    shapes |= {
        name: jax.ShapeDtypeStruct((size,), jnp.arange(1).dtype) for name, size in batches.items()
    }
    data = {name: value for name, value in program.arguments.items() if is_arrays(value)}

    def terms(values, data):
        seen = program.with_arguments(**data)
        trace = seen.trace(values)
        return seen.log_probs(values), {name: trace[name]["value"] for name in seen.deterministic}

    traced = jax.make_jaxpr(terms, return_shape=True)
    try:
        closed, found = traced(shapes, data)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        closed, found = traced(shapes, {})
    return _sha(trace_hash(closed), str(jax.tree.structure((shapes, found))), repr(program.dims))


def trace_hash(
    closed: ClosedJaxpr, functions: list[Any] | None = None, *, knows_constants: bool = True
) -> str:
    """Hash of what a closed jaxpr computes: its operations with their settings, its constants, and
    the types of its inputs.

    :param functions: takes what is called while the code runs, such as functions of the host, which
    then count by their identity. None:
        they count by their type alone, as identities are others in another process.
    :param knows_constants: whether the values of constants count; else they are inputs, before the
    others.
    """
    return _Flow(functions).of_jaxpr(closed, knows_constants)


class _Flow:
    """Hashes of a jaxpr and of those inside of it."""

    def __init__(self, functions: list[Any] | None):
        self.functions, self.inner = functions, {}

    def of_jaxpr(self, closed: Any, knows_constants: bool = True) -> str:
        jaxpr, consts = (
            closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed,
            getattr(closed, "consts", ()),
        )
        pairs = zip(jaxpr.constvars, consts, strict=True) if consts and knows_constants else ()
        known = {variable: f"{data_hash(const)} {variable.aval}" for variable, const in pairs}
        inputs = [
            variable for variable in (*jaxpr.constvars, *jaxpr.invars) if variable not in known
        ]
        known |= {variable: f"input {i}" for i, variable in enumerate(inputs)}
        effects = []

        def read(atom: Any) -> str:
            return (
                data_hash(atom.val) + str(atom.aval) if isinstance(atom, Literal) else known[atom]
            )

        for equation in jaxpr.eqns:
            settings = {
                name: value for name, value in equation.params.items() if name not in IGNORED
            }
            at = equation.ctx  # settings of JAX that were in force
            context = (
                f"{equation.primitive.name} {at.compute_type} {at.threefry_partitionable} "
                f"{at.xla_metadata}"
            )
            found = _sha(context, _of_tree(settings, self.of_setting), *map(read, equation.invars))
            known |= {
                variable: f"{found} {i} {variable.aval}"
                for i, variable in enumerate(equation.outvars)
            }
            effects += [found] if equation.effects else []
        return _sha(
            str([str(variable.aval) for variable in inputs]),
            str([read(atom) for atom in jaxpr.outvars]),
            *effects,
        )

    def of_setting(self, value: Any) -> str:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            self.inner[id(value)] = self.inner.get(id(value)) or self.of_jaxpr(value)
            return self.inner[id(value)]
        if isinstance(value, frozenset | set):
            return str(sorted(map(self.of_setting, value)))
        if not callable(value) or isinstance(value, type):
            return _of_leaf(value)
        if self.functions is not None:
            self.functions.append(value)
        return type(value).__name__ if self.functions is None else str(id(value))


def is_arrays(value) -> bool:
    """Whether an argument is an array, or a tree of them, that JAX can trace."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype != object for leaf in leaves
    )


def plain(leaf: Any) -> np.ndarray:
    """An array as NumPy holds it; of a key, its data."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _of_tree(value: Any, of_leaf: Callable[[Any], str]) -> str:
    leaves, form = jax.tree.flatten(value)
    return _sha(ADDRESS.sub("", str(form)), *map(of_leaf, leaves))


def _of_leaf(leaf: Any) -> str:
    if not hasattr(leaf, "__array__"):
        return ADDRESS.sub("", repr(leaf))
    array = plain(leaf)
    return _sha(
        str(array.dtype),
        str(array.shape),
        repr(array.tolist()) if array.dtype.hasobject else array.tobytes(),
    )


def _sha(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        # lengths keep ("ab", "c") apart from ("a", "bc")
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


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
