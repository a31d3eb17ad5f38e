"""A hash of a traced function that every process gives alike.

The text of a jaxpr will not do: equations that do not depend on each other stand in the order in which Python met them, and where
that was the order of a set of names, it changes with Python's hash seed. Here a value is known by the operation and the values
it comes from, so that only the flow of the data counts.
"""

import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from inference._store import plain

__all__ = ["sha", "sha_of_jaxpr"]


def sha(arrays: list[Any]) -> str:
    """Of the types, shapes and bytes of arrays, PRNG keys included."""
    digest = hashlib.sha256()
    for array in map(plain, arrays):
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def sha_of_jaxpr(closed: ClosedJaxpr) -> str:
    """Of what a closed jaxpr computes: its operations, their settings and its constants, not the names or places of its equations."""
    return _of_flow(closed.jaxpr, [sha([const]) for const in closed.consts])


def _of_flow(jaxpr: Jaxpr, consts: list[str]) -> str:
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= {variable: _of_text(f"input {i} {variable.aval}") for i, variable in enumerate(jaxpr.invars)}
    effects = []

    def read(atom: Any) -> str:
        return _of_text(f"{atom.aval} {sha([atom.val])}") if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        settings = {name: _of_setting(value) for name, value in equation.params.items() if name != "name"}
        found = _of_text(f"{equation.primitive.name} {sorted(settings.items())} {[read(atom) for atom in equation.invars]}")
        known |= {variable: _of_text(f"{found} {i}") for i, variable in enumerate(equation.outvars)}
        effects += [found] if equation.effects else []
    return _of_text(f"{[read(atom) for atom in jaxpr.outvars]} {effects}")


def _of_setting(value: Any) -> str:
    if isinstance(value, ClosedJaxpr):
        return sha_of_jaxpr(value)
    if isinstance(value, Jaxpr):
        return _of_flow(value, [f"const {i}" for i in range(len(value.constvars))])
    if isinstance(value, np.ndarray | jax.Array):
        return sha([value])
    if isinstance(value, list | tuple):
        return str([_of_setting(item) for item in value])
    if isinstance(value, dict | frozenset | set):
        items = value.items() if isinstance(value, dict) else value
        return str(sorted(_of_setting(item) for item in items))
    if callable(value):  # the rules of a derivative: they are applied by now
        return "function"
    return re.sub("0x[0-9a-f]+", "", str(value))


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
