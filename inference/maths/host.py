"""What work on the host takes: arrays of either kind, random numbers by NumPy, chunks of rows.

States are arrays of JAX in compiled code, and of NumPy between two calls of it, where an operation
of JAX would be a program of its own.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import random

__all__ = ["Array", "generator", "in_chunks", "key_data"]

Array = Any  # of JAX, or of NumPy


def generator(rng_key: Any) -> np.random.Generator:
    """NumPy's generator for a JAX key, or for the data of one; a generator is returned as it is."""
    if isinstance(rng_key, np.random.Generator):
        return rng_key
    is_key = jax.dtypes.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return np.random.default_rng(np.asarray(random.key_data(rng_key) if is_key else rng_key))


def key_data(rng: np.random.Generator) -> np.ndarray:
    """The data of a new JAX key."""
    return rng.integers(2**32, size=2, dtype=np.uint32)


def in_chunks(function: Callable, arrays: Any, size: int = 500, counts: bool = False) -> Any:
    """What a function returns for arrays of any length, by chunks of one length.

    Args:
        function: of arrays with `size` rows each; returns arrays with as many rows.
        arrays: a tree of arrays with equally many rows, one or more.
        size: rows of a chunk; the last one is filled up by copies of its last row.
        counts: whether the function takes the number of rows that are no copies as well.

    Returns:
        NumPy arrays, with the rows of all chunks.
    """
    arrays = jax.tree.map(np.asarray, arrays)
    num_rows, parts = len(jax.tree.leaves(arrays)[0]), []
    for first in range(0, num_rows, size):
        rows = np.minimum(np.arange(first, first + size), num_rows - 1)
        chunk = jax.tree.map(operator.itemgetter(rows), arrays)
        count = (np.int32(min(size, num_rows - first)),) if counts else ()
        parts.append(jax.device_get(function(chunk, *count)))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:num_rows], *parts)
