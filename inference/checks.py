"""Bad data and impossible models, found before anything is compiled for long.

The one question is whether the log joint is finite somewhere. Where it is not, the message must name the cause: a NaN in an
argument, an observation outside its distribution's support, a prior that admits nothing. What is missing on purpose (a masked
entry, a distribution that takes NaN) has a finite log probability, and so it passes.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random

from inference.sites import StructureError, model_name

__all__ = ["check"]

NUM_STARTS = 10


class _Probe(NamedTuple):
    """What one start shows, for each sample site."""

    log_probs: dict[str, Array]
    broken: dict[str, Array]  # whether a parameter of the site's distribution is NaN; a log probability may hide it
    outside: dict[str, Array]  # [batch] of an observed site: the observation is outside the support
    values: dict[str, Array]  # the observed values at this start


def check(program) -> None:
    """Raises ValueError unless at one of ten starts every term is finite and every observation in its support."""
    if not program.latent:
        raise StructureError(f"{model_name(program.model)}: found no latent site among {list(program.sites)}, wanted one to infer.")
    probe = jax.jit(lambda rng_key: _probe(program, rng_key))
    for rng_key in random.split(random.key(0), NUM_STARTS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Out-of-support values")  # NumPyro's, which names no site; ours does
            found = jax.device_get(probe(rng_key))
        finite = all(np.isfinite(term).all() for term in found.log_probs.values())
        if finite and not any(flags.any() for flags in (*found.outside.values(), *found.broken.values())):
            return
    raise ValueError(_cause(program, found))


def _probe(program, rng_key: Array) -> _Probe:
    start = program.draw_initial(rng_key)
    trace = program.trace(start)
    values = {name: jnp.asarray(trace[name]["value"]) for name in program.observed}
    outside = {name: ~_in_support(trace[name]["fn"], value) for name, value in values.items()}
    broken = {name: _has_nan(trace[name]["fn"]) for name, site in program.sites.items() if site.family}
    return _Probe(program.log_probs(start), broken, outside, values)


def _has_nan(fn) -> Array:
    """NumPyro's logistic log probability of a NaN logit is 0: a NaN must be caught where it enters."""
    numbers = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(fn)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.array([jnp.isnan(leaf).any() for leaf in numbers]).any()


def _in_support(fn, value) -> Array:
    """Whether each observation is in the support, masked ones and NaN excepted: whether NaN is allowed shows in the log prob."""
    if isinstance(fn, dist.MaskedDistribution):
        return _in_support(fn.base_dist, value) | ~jnp.asarray(fn._mask)
    if isinstance(fn, dist.ExpandedDistribution):
        return _in_support(fn.base_dist, value)
    if isinstance(fn, dist.Independent):
        inside = _in_support(fn.base_dist, value)
        return inside.all(axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    missing = jnp.isnan(value) if jnp.issubdtype(value.dtype, jnp.inexact) else jnp.zeros(value.shape, bool)
    missing = missing.any(axis=tuple(range(-fn.event_dim, 0))) if fn.event_dim else missing
    return jnp.asarray(fn.support(value)) | missing


def _cause(program, found: _Probe) -> str:
    """The first cause that a person can mend: data outside the support, data that are not numbers, then the sites themselves."""
    for name, flags in found.outside.items():
        if flags.any():
            index = _first(flags)
            return (
                f"site {name!r}: {int(flags.sum())} of its observations are outside the support {program.sites[name].support!r} of "
                f"{program.sites[name].family}; the first is {found.values[name][index]!s}{_at(index)}"
                f"{_argument(program, found.values[name])}. "
                f"Correct the data, or observe them with a distribution that has these values."
            )
    broken = {name: np.asarray(term) for name, term in found.log_probs.items() if not np.isfinite(term).all()}
    for name in broken:
        bad = _not_numbers(found.values.get(name))
        if bad.any():
            return (
                f"site {name!r}: {int(bad.sum())} of its observations are NaN or infinite, the first{_at(_first(bad))}"
                f"{_argument(program, found.values[name])}, and its log probability is not finite. Drop or impute them, or "
                f"declare them missing: obs_mask=, numpyro.handlers.mask, or a latent site in their place."
            )
    broken |= {name: np.asarray(np.nan) for name, flag in found.broken.items() if flag}
    sites = ", ".join(f"{name!r} ({program.sites[name].family}: {_worst(term)})" for name, term in broken.items())
    suspects = [(name, bad) for name, bad in _arrays(program) if bad.any()]
    if suspects:
        name, bad = suspects[0]
        return (
            f"argument {name!r}: {int(bad.sum())} entries are NaN or infinite, the first{_at(_first(bad))}, and the log probability "
            f"is not finite at site {sites}. Drop or impute them."
        )
    return (
        f"the log joint of {model_name(program.model)} is not finite at any of {NUM_STARTS} starts; not finite: site {sites}. "
        f"Look for a prior scale that is zero or negative, a support that excludes the data, or a hard constraint."
    )


def _argument(program, value) -> str:
    """The argument that holds exactly this array."""
    for name, argument in program.arguments.items():
        for leaf in jax.tree.leaves(argument):
            if _same(leaf, value):
                return f" of argument {name!r}"
    return ""


def _same(leaf, value) -> bool:
    is_float = np.issubdtype(value.dtype, np.inexact)
    return hasattr(leaf, "shape") and np.shape(leaf) == value.shape and np.array_equal(np.asarray(leaf), value, equal_nan=is_float)


def _arrays(program):
    """Each array among the arguments, by the argument's name, with a flag where it is not a number."""
    for name, argument in program.arguments.items():
        for leaf in jax.tree.leaves(argument):
            yield name, _not_numbers(leaf)


def _not_numbers(value) -> np.ndarray:
    value = np.asarray(0.0 if value is None or not hasattr(value, "dtype") else value)
    return ~np.isfinite(value) if np.issubdtype(value.dtype, np.inexact) else np.zeros(value.shape, bool)


def _first(flags) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(flags)[0])


def _at(index: tuple[int, ...]) -> str:
    return f" at {index}" if index else ""


def _worst(term) -> str:
    return "NaN" if np.isnan(term).any() else "-inf" if np.isneginf(term).any() else "+inf"
