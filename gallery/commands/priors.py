"""The sites of a model with their distributions, read off a trace, for `zoo show`.

A constant parameter is printed as its number, the value of another site as the name of that site,
and a computed parameter as f(the sites that it depends on).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import distributions as dist
from numpyro.ops.provenance import eval_provenance

import zoo
from inference import Program
from inference.program.sites import unwrap

__all__ = ["site_lines"]


def site_lines(entry: zoo.Entry, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each site of the model, and the card's description.

    Args:
        entry: the model.
        arguments: those that it is traced with.
    """
    with jax.enable_x64(True):  # some models refuse float32
        program = Program(entry.model, **arguments)
        values = program.draw_initial(random.key(1))
        trace, sources = program.trace(values), _sources(program)
    lines = []
    for name, site in program.sites.items():
        dims = f" [{', '.join(site.dims)}]" if site.dims else ""
        own = {parameter: found for (at, parameter), found in sources.items() if at == name}
        is_computed = trace[name]["type"] == "deterministic"
        text = (
            f"= f({', '.join(own[''])})"
            if is_computed
            else f"~ {_distribution(trace[name]['fn'], own, values)}"
        )
        observed = ", observed" if site.kind == "observed" else ""
        lines.append((f"{name}{dims} {text}{observed}", entry.card.sites.get(name, "")))
    return lines


def _sources(program: Program) -> dict[tuple[str, str], list[str]]:
    """(site, parameter of its distribution) -> the latent sites that the parameter depends on;
    (site, "") for a deterministic site.
    """

    def answers(**values: Array) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, message in program.trace(values).items():
            if message["type"] == "deterministic":
                found[f"{name}\n"] = message["value"]
            elif message["type"] == "sample" and name in program.sites:
                found |= {
                    f"{name}\n{parameter}": jnp.asarray(value)
                    for parameter, value in _parameters(message["fn"]).items()
                }
        return found

    shapes = {
        name: jax.ShapeDtypeStruct(program.sites[name].shape, program.sites[name].dtype)
        for name in program.latent
    }
    found = {}
    for key, names in eval_provenance(answers, **shapes).items():
        name, _, parameter = key.partition("\n")
        found[name, parameter] = [site for site in program.latent if site in names]
    return found


def _parameters(fn: Any) -> dict[str, Any]:
    """Parameters of the distribution, without its wrappers."""
    base = unwrap(fn)
    return {name: vars(base)[name] for name in base.arg_constraints if name in vars(base)}


def _distribution(fn: Any, sources: dict[str, list[str]], values: dict[str, Array]) -> str:
    if isinstance(unwrap(fn), dist.Unit):
        return "factor"
    texts = [
        f"{name}={_in_words(value, sources.get(name, []), values)}"
        for name, value in _parameters(fn).items()
    ]
    return f"{type(unwrap(fn)).__name__}({', '.join(texts)})"


def _in_words(value: Any, sites: list[str], values: dict[str, Array]) -> str:
    array = np.asarray(value)
    if len(sites) == 1 and _is_copy(array, np.asarray(values[sites[0]])):
        return sites[0]
    if sites:
        return f"f({', '.join(sites)})"
    if array.size and (array == array.flat[0]).all():
        return f"{array.flat[0]:g}"
    return f"array{list(array.shape)}"


def _is_copy(array: np.ndarray, value: np.ndarray) -> bool:
    """Whether a parameter is the value of a site, possibly broadcast."""
    try:
        return bool((array == np.broadcast_to(value, array.shape)).all())
    except ValueError:
        return False
