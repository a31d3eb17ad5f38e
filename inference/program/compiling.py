"""Hash traced code, and remember what was compiled from it in this process.

    once(function, *arguments)(*arguments)       compiles fast, to slower code: for a handful of
                                                 calls
    compiled(function, *arguments)(*arguments)   compiles as `jax.jit` does: for code that runs
                                                 longer than it compiles
    built(function, arguments, options)          compiles the same, with constants in the code, and
                                                 with donated arguments
    traced_once(function)                        traces a function once for the same shapes
    trace_hash(jaxpr)                            hash of traced code
    model_hash(program)                          hash of all terms of a model
    data_hash(value)                             hash of a tree of arrays

`jax.jit` compiles a function that is made anew in each call, such as a lambda in a method, anew in
each call. `once`, `compiled` and `built` trace it, and look for code that was compiled from the
same trace for arguments of the same types. A function at the level of a module needs none of them:
`jax.jit` remembers it, and does not trace it again.

Hashes are the same in every process. A checkpoint may be resumed only by the program that wrote it.
Source text does not tell: a comment changes it, an edited helper in another file does not. The text
of a jaxpr does not tell either: independent equations stand in the order in which Python met them,
and the order of a set of names depends on Python's hash seed. So `trace_hash` hashes the data flow:
the hash of a value is that of its operation and of the operation's inputs. Local names, memory
addresses and line numbers do not count.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro.distributions import Distribution
from platformdirs import user_cache_path

__all__ = [
    "QUICKLY",
    "as_numpy",
    "built",
    "compiled",
    "data_hash",
    "is_arrays",
    "is_traced",
    "keep_programs",
    "make_room",
    "model_hash",
    "once",
    "trace_hash",
    "traced_once",
]

# options of a compiler that is faster, and whose code is slower
QUICKLY = {"xla_backend_optimization_level": 0}
BUILT: dict[Any, Any] = {}  # compiled code, the most recently used at the end
MOST_BUILT = 32
# files of Linux: the memory maps of this process, one a line, and their largest number
MAPS = Path("/proc/self/maps")
MOST_MAPS = Path("/proc/sys/vm/max_map_count")


def once(function: Callable, *arguments: Any) -> Callable:
    """Compiles a function for a handful of calls: `compiled` with a faster compiler, slower code.

    Args:
        function: a function of arrays.
        *arguments: arrays, or trees of them, of the shapes and types that it will be called with.
    """
    return compiled(function, *arguments, options=QUICKLY)


def compiled(
    function: Callable, *arguments: Any, options: dict[str, Any] | None = None
) -> Callable:
    """Compiles a function for arguments like these, unless equal code was compiled before.

    Arrays that the function closes over become arguments of the compiled code, so that other data
    of the same shapes need no other code. Inside of other traced code it returns the function.

    Args:
        function: a function of arrays.
        *arguments: arrays, or trees of them, of the shapes and types that it will be called with.
        options: options of the compiler.

    Cost: one trace; where no equal code is remembered, one compilation.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    given = (closed.consts, jax.tree.leaves(arguments))
    if is_traced(given):
        return function
    code = jax.jit(
        lambda consts, leaves: eval_jaxpr(closed.jaxpr, consts, *leaves), keep_unused=True
    )
    lower = lambda: code.lower(*given)
    found = _remembered(closed, (), given, options, lower, knows_constants=False)
    return lambda *given: jax.tree.unflatten(
        jax.tree.structure(shapes), found(closed.consts, jax.tree.leaves(given))
    )


def built(
    function: Callable,
    arguments: tuple,
    options: dict[str, Any] | None = None,
    *,
    donated: tuple[int, ...] = (),
    is_kept: bool = True,
) -> Any:
    """Compiles a function, unless equal code with equal constants was compiled before.

    Args:
        function: a function of arrays. Those that it closes over are constants of the code.
        arguments: its arguments, or their shapes and types.
        options: options of the compiler.
        donated: indices of the arguments whose memory it may reuse.
        is_kept: whether the code is remembered; not if its constants are large.
    """
    traced = jax.jit(function, donate_argnums=donated, keep_unused=True).trace(*arguments)
    if not is_kept:
        return traced.lower().compile(compiler_options=options)
    form = (donated, traced.out_tree)
    return _remembered(traced.jaxpr, form, arguments, options, traced.lower, knows_constants=True)


def traced_once(function: Callable) -> Callable:
    """The function, which JAX traces once for arguments of the same shapes, inside of other code.

    Args:
        function: a function of arrays, whose code becomes a part of the code that calls it.
    """
    return jax.jit(function, inline=True)


def _remembered(
    closed: ClosedJaxpr,
    form: tuple,
    arguments: tuple,
    options: dict[str, Any] | None,
    lower: Callable,
    *,
    knows_constants: bool,
) -> Any:
    """The code remembered for a trace and all else that the compiler reads; compiles it if new.

    Functions of the host count by their `id`. They are kept alive beside the code, since a new
    function may get the `id` of one that was deleted.
    """
    functions: list[Any] = []
    leaves, tree = jax.tree.flatten(arguments)
    key = (
        trace_hash(closed, functions, knows_constants=knows_constants),
        form,
        tree,
        tuple(leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves),
        str(options),
        jax.config.jax_default_device,
        jax.config.jax_enable_x64,
    )
    BUILT[key] = BUILT.pop(key, None) or (lower().compile(compiler_options=options), functions)
    if len(BUILT) > MOST_BUILT:
        del BUILT[next(iter(BUILT))]
    return BUILT[key][0]


def keep_programs() -> None:
    """Turns on JAX's persistent compilation cache, in the user's cache folder.

    A second process then loads what the first has compiled. A cache that JAX has been told to use
    (`JAX_COMPILATION_CACHE_DIR`), or not to use (`JAX_ENABLE_COMPILATION_CACHE=false`), stays so.
    """
    if jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir is None:
        folder = user_cache_path("bayes-model-zoo") / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def make_room() -> None:
    """Clears JAX's caches once compiled code takes half of the memory maps of this process.

    JAX keeps thousands of compiled programs, each in some hundred maps. Linux gives a process
    65 530, and without this it would die after a hundred fits.
    """
    if MAPS.exists() and 2 * MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()):
        jax.clear_caches()


def is_traced(tree: Any) -> bool:
    """Whether a leaf of a tree is a tracer, which has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def is_arrays(value: Any) -> bool:
    """Whether an argument is an array, or a tree of arrays, that JAX can trace."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype != object for leaf in leaves
    )


def as_numpy(leaf: Any) -> np.ndarray:
    """The NumPy array of an array; of a JAX key, its data."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def data_hash(value: Any) -> str:
    """Hash of a tree: type, shape and bytes of its arrays, `repr` of its other leaves."""
    return _hash_tree(value, _hash_leaf)


def model_hash(program: Any, *, knows_data: bool = False) -> str:
    """Hash of all log probabilities and deterministic values, as functions of latent values.

    A model that must look at its data (at which entries are missing, say) is hashed with their
    values. The hash does not see what `jax.pure_callback` computes.

    Args:
        program: a `Program`.
        knows_data: whether values of arrays among the arguments count; else only their shapes do.
    """
    shapes = program.latent_shapes() | jax.eval_shape(program.some_indices)
    data = {name: value for name, value in program.arguments.items() if is_arrays(value)}

    def terms(values, data):
        seen = program.with_arguments(**data) if data else program
        return seen.log_probs(values), seen.deterministics(values)

    traced = jax.make_jaxpr(terms, return_shape=True)
    try:
        closed, found = traced(shapes, {} if knows_data else data)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        closed, found = traced(shapes, {})
    return _sha(trace_hash(closed), str(jax.tree.structure((shapes, found))), repr(program.dims))


def trace_hash(
    closed: ClosedJaxpr, functions: list[Any] | None = None, *, knows_constants: bool = True
) -> str:
    """Hash of what a closed jaxpr computes: operations with settings, constants, types of inputs.

    Args:
        closed: the traced code.
        functions: a list to which the functions that the code calls, such as functions of the host,
            are appended; they then count by their identity. None: they count by their type alone,
            since identities differ between processes.
        knows_constants: whether values of constants count; else they are inputs, before the others.
    """
    return _Flow(functions).of_jaxpr(closed, knows_constants)


class _Flow:
    """Hashes of a jaxpr and of the jaxprs inside of it."""

    def __init__(self, functions: list[Any] | None):
        self.functions = functions
        self.inner: dict[int, str] = {}

    def of_jaxpr(self, closed: Any, knows_constants: bool = True) -> str:
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        consts = getattr(closed, "consts", ())
        pairs = zip(jaxpr.constvars, consts, strict=True) if consts and knows_constants else ()
        known = {variable: f"{data_hash(const)} {variable.aval}" for variable, const in pairs}
        inputs = [each for each in (*jaxpr.constvars, *jaxpr.invars) if each not in known]
        known |= {variable: f"input {i}" for i, variable in enumerate(inputs)}
        read = lambda atom: (
            data_hash(atom.val) + str(atom.aval) if isinstance(atom, Literal) else known[atom]
        )
        effects = []
        # names, and rules of derivatives, which the trace has applied already
        ignored = ("name", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")
        for equation in jaxpr.eqns:
            settings = {k: value for k, value in equation.params.items() if k not in ignored}
            in_force = equation.ctx  # JAX's settings at this equation
            found = _sha(
                f"{equation.primitive.name} {in_force.compute_type} "
                f"{in_force.threefry_partitionable} {in_force.xla_metadata}",
                _hash_tree(settings, self.of_setting),
                *map(read, equation.invars),
            )
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
            return _hash_leaf(value)
        if self.functions is None:
            return type(value).__name__
        self.functions.append(value)
        return str(id(value))


def _hash_tree(value: Any, hash_leaf: Callable[[Any], str]) -> str:
    leaves, form = jax.tree.flatten(value, lambda node: isinstance(node, Distribution))
    return _sha(_without_addresses(str(form)), *map(hash_leaf, leaves))


def _hash_leaf(leaf: Any) -> str:
    if isinstance(leaf, Distribution):  # as a tree its fields have the order of a set of names
        kind = type(leaf)
        names = (*kind.gather_pytree_data_fields(), *kind.gather_pytree_aux_fields())
        return _sha(kind.__qualname__, data_hash({name: vars(leaf).get(name) for name in names}))
    if not hasattr(leaf, "__array__"):
        return _without_addresses(repr(leaf))
    array = as_numpy(leaf)
    content = repr(array.tolist()) if array.dtype.hasobject else array.tobytes()
    return _sha(str(array.dtype), str(array.shape), content)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _sha(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        # lengths keep ("ab", "c") apart from ("a", "bc")
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
