"""Checks of the data of a model: is its log joint finite?

`check` asks whether it is finite somewhere: at a start that the caller gives, at uniform starts as
NUTS takes them, or at draws from the prior. Where it is not, the error names the cause: a NaN in an
argument, an observation outside its distribution's support, a prior of density zero. Data that are
missing on purpose (a masked entry, a distribution that takes NaN) have a finite log probability,
and so they pass.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer

from inference.program.interpreting import interpreted
from inference.program.sites import StructureError, model_name

__all__ = ["check", "named_error"]


class _Probe(NamedTuple):
    """Log probabilities and observations at one start, by site, and what is wrong with them."""

    log_probs: dict[str, Array]
    # whether a parameter of the site's distribution is NaN, which a log probability may hide:
    # NumPyro's logistic log probability of a NaN logit is 0
    broken: dict[str, Array]
    outside: dict[str, Array]  # [batch] of an observed site: the observation is outside the support
    values: dict[str, Array]  # observed values


def check(program: Any, starts: Mapping[Callable[[Array], dict[str, Array]], int]) -> None:
    """Raises ValueError unless some start has finite terms and its observations in their supports.

    Data that are being traced have no values yet, and pass.

    Args:
        program: a `Program`.
        starts: functions of a key that draw values of its sites, and how often each is tried. The
            last one draws from the prior, and may raise NotImplementedError.
    """
    if not program.latent:
        raise StructureError(
            f"{model_name(program.model)}: found no latent site among {list(program.sites)}, "
            "wanted one to infer."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((program.args, program.kwargs))):
        return
    first, num_starts = None, 0
    for found in _probes(program, starts):
        is_finite = all(np.isfinite(term).all() for term in found.log_probs.values())
        flags = (*found.outside.values(), *found.broken.values())
        if is_finite and not any(flag.any() for flag in flags):
            return
        first, num_starts = first or found, num_starts + 1
    assert first is not None
    raise ValueError(_cause(program, first, num_starts))


def named_error(program: Any, error: TypeError) -> Exception:
    """An error that names the argument that is no array to JAX; if there is none, `error`."""
    for name, value in program.arguments.items():
        is_odd = isinstance(value, np.ndarray) and value.dtype.kind not in "biufcV"
        is_foreign = hasattr(value, "__array__") and not isinstance(
            value, jax.Array | np.ndarray | np.generic
        )
        is_list = isinstance(value, list | tuple) and bool(value)
        is_list = is_list and all(isinstance(entry, int | float | str) for entry in value)
        if is_odd or is_foreign or is_list:
            found = f"an array of {value.dtype}" if is_odd else type(value).__name__
            return ValueError(
                f"argument {name!r}: found {found}, wanted an array; numpy.asarray({name}) makes "
                f"one of numbers. {model_name(program.model)} failed with "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
    return error


def _numpy_error(program: Any, error: TypeError) -> Exception:
    """An error that names the NumPy array of data that NumPyro compared with a traced value."""
    observed = [id(value) for value in program.inspection.observed.values()]
    if isinstance(error, jax.errors.TracerArrayConversionError):
        for name, value in program.arguments.items():
            if isinstance(value, np.ndarray) and id(value) in observed:
                return ValueError(
                    f"argument {name!r}: found a NumPy array where NumPyro compares it with a "
                    f"traced value, wanted a JAX array; give jax.numpy.asarray({name})."
                )
    return named_error(program, error)


def _probes(program: Any, starts: Mapping[Callable, int]) -> Iterator[_Probe]:
    for draw, num_tries in starts.items():
        probe = None
        for rng_key in map(random.key, range(num_tries)):
            try:
                with warnings.catch_warnings():
                    # NumPyro's warning names no site; the error of `check` does
                    warnings.filterwarnings("ignore", "Out-of-support values")
                    probe = probe or interpreted(
                        lambda rng_key, draw=draw: _probe(program, draw(rng_key)), rng_key
                    )
                    found = jax.device_get(probe(rng_key))
            except NotImplementedError:  # a prior that cannot be drawn from
                if draw is not list(starts)[-1]:
                    raise
                return
            except TypeError as error:
                raise _numpy_error(program, error) from error
            yield found


def _probe(program: Any, values: dict[str, Array]) -> _Probe:
    trace = program.trace(values)
    observed = {name: jnp.asarray(trace[name]["value"]) for name in program.observed}
    outside = {name: ~_in_support(trace[name]["fn"], value) for name, value in observed.items()}
    broken = {
        name: _has_nan(trace[name]["fn"]) for name, site in program.sites.items() if site.family
    }
    return _Probe(program.log_probs(values), broken, outside, observed)


def _has_nan(fn: Any) -> Array:
    leaves = map(jnp.asarray, jax.tree.leaves(fn))
    return jnp.array([jnp.isnan(leaf).any() for leaf in leaves]).any()


def _in_support(fn: Any, value: Array) -> Array:
    """Whether each observation is in the support; true for masked ones and for NaN.

    The log probability then shows whether the distribution allows NaN.
    """
    if isinstance(fn, dist.MaskedDistribution):
        return _in_support(fn.base_dist, value) | ~jnp.asarray(fn._mask)
    if isinstance(fn, dist.ExpandedDistribution):
        return _in_support(fn.base_dist, value)
    if isinstance(fn, dist.Independent):
        inside = _in_support(fn.base_dist, value)
        return inside.all(axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    is_missing = jnp.isnan(value).any(axis=tuple(range(-fn.event_dim, 0)))
    return jnp.asarray(fn.support(value)) | is_missing


def _cause(program: Any, found: _Probe, num_starts: int) -> str:
    """The message of `check`: the first cause that a user can correct.

    Data outside a support come first, then data that are NaN or infinite, then the sites.
    """
    parents, sites = program.support_parents, program.sites
    outside = {name: flags for name, flags in found.outside.items() if flags.any()}
    for name, flags in outside.items():
        if not parents.get(name):
            return (
                f"site {name!r}: {int(flags.sum())} of its observations are outside the support "
                f"{sites[name].support!r} of {sites[name].family}; "
                f"{_first_outside(program, found, name)}. Correct the data, or observe them with a "
                "distribution that has these values."
            )
    broken = {
        name: np.asarray(term)
        for name, term in found.log_probs.items()
        if not np.isfinite(term).all()
    }
    for name in broken:
        bad = _not_finite(found.values.get(name))
        if bad.any():
            return (
                f"site {name!r}: {int(bad.sum())} of its observations are NaN or infinite, the "
                f"first{_at(_first(bad))}{_of_argument(program, found.values[name])}, and its log "
                "probability is not finite. Drop or impute them, or declare them missing: "
                "obs_mask=, numpyro.handlers.mask, or a latent site in their place."
            )
    broken |= {name: np.asarray(np.nan) for name, flag in found.broken.items() if flag}
    sign = lambda term: (
        "NaN" if np.isnan(term).any() else "-inf" if np.isneginf(term).any() else "+inf"
    )
    not_finite = ", ".join(
        f"{name!r} ({sites[name].family}: {sign(term)})" for name, term in broken.items()
    )
    for name, value in _leaves(program) if broken else ():
        bad = _not_finite(value)
        if bad.any():
            return (
                f"argument {name!r}: {int(bad.sum())} entries are NaN or infinite, the "
                f"first{_at(_first(bad))}, and the log probability is not finite at site "
                f"{not_finite}. Drop or impute them."
            )
    remedy = (
        "Where there is a start, give it: init_strategy=init_to_value(...) or init_params, and "
        "Program.check(start=...)."
    )
    for name in outside:
        return (
            f"site {name!r}: found no start, at none of {num_starts} are all its observations in "
            f"the support of {sites[name].family}, which depends on {sorted(parents[name])}; "
            f"{_first_outside(program, found, name)}. {remedy}"
        )
    return (
        f"found no start: the log joint of {model_name(program.model)} is not finite at any of "
        f"{num_starts} starts; not finite: site {not_finite}. Look for a prior scale that is zero "
        "or negative, a support that excludes the data, or a hard constraint. "
        f"{remedy}"
    )


def _first_outside(program: Any, found: _Probe, name: str) -> str:
    index, value = _first(found.outside[name]), found.values[name]
    return f"the first is {value[index]!s}{_at(index)}{_of_argument(program, value)}"


def _of_argument(program: Any, value: Any) -> str:
    """Returns " of argument NAME" for the argument that is this array; "" where none is."""
    is_float = np.issubdtype(value.dtype, np.inexact)
    found = (
        f" of argument {name!r}"
        for name, leaf in _leaves(program)
        if np.shape(leaf) == value.shape and np.array_equal(leaf, value, equal_nan=is_float)
    )
    return next(found, "")


def _leaves(program: Any) -> list[tuple[str, Any]]:
    """Arrays among the arguments, each with the name of its argument."""
    return [
        (name, leaf)
        for name, argument in program.arguments.items()
        for leaf in jax.tree.leaves(argument)
        if hasattr(leaf, "dtype")
    ]


def _not_finite(value: Any) -> np.ndarray:
    """Where an array is NaN or infinite; nowhere for integers, and for no array."""
    value = np.asarray(0 if value is None else value)
    is_float = np.issubdtype(value.dtype, np.inexact)
    return ~np.isfinite(value) if is_float else np.zeros(value.shape, bool)


def _first(flags: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(flags)[0])


def _at(index: tuple[int, ...]) -> str:
    return f" at {index}" if index else ""
