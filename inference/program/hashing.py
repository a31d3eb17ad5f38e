"""Hashes by which two programs, or the data of two programs, are known to be the same, in this
process and in any other.

    data_hash(value)        of arrays, and of trees of them
    trace_hash(jaxpr)       of traced code
    model_hash(program)     of all terms of a model

A checkpoint may be resumed only by the program that wrote it, and compiled code may serve only a
program that computes the same. Source text is a poor witness: a comment changes it, an edited
helper in another file does not. So is the text of a jaxpr: equations that do not depend on each
other stand in the order in which Python met them, and where that was the order of a set of names,
it changes with Python's hash seed. Here a value is known by the operation and the values that it
comes from, so that only the flow of the data counts. No local name, memory address or line number
does.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["data_hash", "is_arrays", "model_hash", "plain", "trace_hash"]

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
