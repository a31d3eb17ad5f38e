"""Hashes that tell whether two programs are the same model on the same data, across processes.

A checkpoint may be resumed only by the program that wrote it. Source text is a poor witness: a comment changes it, an edited
helper in another file does not. So the model is hashed as the compiler sees it: the StableHLO text of all its terms, in which
every constant is spelled out and no local name, memory address or line number occurs.
"""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["data_hash", "is_arrays", "model_hash"]

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def model_hash(program) -> str:
    """Hash of every log probability and deterministic value as functions of the latent values and, where possible, of the data.

    Arrays among the arguments are inputs of the hashed computation, so that the hash does not know them. A model that must look
    at them (say, at which entries are missing) is hashed with them inside. What a function of the host computes, by
    `jax.pure_callback`, is not seen.
    """
    shapes = {name: _shape(program.sites[name]) for name in program.latent}
    batches = {name: plate.subsample_size for name, plate in program.plates.items() if plate.subsample_size < plate.size}
    shapes |= {name: jax.ShapeDtypeStruct((size,), jnp.arange(1).dtype) for name, size in batches.items()}
    data = {name: value for name, value in program.arguments.items() if is_arrays(value)}

    def terms(values, data):
        seen = program.with_arguments(**data)
        trace = seen.trace(values)
        return seen.log_probs(values), {name: trace[name]["value"] for name in seen.deterministic}

    lower = lambda data: jax.jit(terms).trace(shapes, data).lower(lowering_platforms=("cpu",)).as_text()
    try:
        text = lower(data)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        text = lower({})
    return _sha(text, repr(program.dims))


def data_hash(value: Any) -> str:
    """Hash of an argument: type, shape and bytes of its arrays, `repr` without addresses of anything else."""
    leaves, tree = jax.tree.flatten(value)
    return _sha(ADDRESS.sub("", str(tree)), *(part for leaf in leaves for part in _parts(leaf)))


def _parts(leaf) -> tuple[str | bytes, ...]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not hasattr(leaf, "__array__"):
        return (ADDRESS.sub("", repr(leaf)),)
    array = np.asarray(leaf)
    content = repr(array.tolist()) if array.dtype.hasobject else array.tobytes()
    return str(array.dtype), str(array.shape), content


def is_arrays(value) -> bool:
    """Whether an argument is an array, or a tree of them, that JAX can trace."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype != object for leaf in leaves)


def _shape(site) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(site.shape, site.dtype)


def _sha(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)  # lengths keep ("ab", "c") apart from ("a", "bc")
    return digest.hexdigest()
