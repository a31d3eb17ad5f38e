"""Bad data and impossible models, found before anything is compiled for long.

The one question is whether the log joint is finite somewhere: at a start that the caller gives, at
uniform starts as NUTS takes them, or at draws from the prior. Where it is not, the message must
name the cause: a NaN in an argument, an observation outside its distribution's support, a prior
that admits nothing. What is missing on purpose (a masked entry, a distribution that takes NaN) has
a finite log probability, and so it passes.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer

from inference.program.compiling import once
from inference.program.sites import StructureError, model_name

__all__ = ["check", "named_error"]

NUM_STARTS = 10  # of each kind: uniform, prior


class _Probe(NamedTuple):
    """What one start shows, for each sample site."""

    log_probs: dict[str, Array]
    # whether a parameter of the site's distribution is NaN; a log probability may hide it
    broken: dict[str, Array]
    outside: dict[str, Array]  # [batch] of an observed site: the observation is outside the support
    values: dict[str, Array]  # the observed values at this start


def check(program, start=None) -> None:
    """Raises ValueError unless at one of its starts every term is finite and every observation in
    its support. Data that are being traced have no numbers yet, and pass.
    """
    if not program.latent:
        raise StructureError(
            f"{model_name(program.model)}: found no latent site among {list(program.sites)}, "
            "wanted one to infer."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((program.args, program.kwargs))):
        return
    first, num_starts = None, 0
    for found in _probes(program, start):
        finite = all(np.isfinite(term).all() for term in found.log_probs.values())
        if finite and not any(
            flags.any() for flags in (*found.outside.values(), *found.broken.values())
        ):
            return
        first, num_starts = first or found, num_starts + 1
    assert first is not None
    raise ValueError(_cause(program, first, num_starts))


def named_error(program, error: TypeError) -> Exception:
    """ValueError with the name of an argument that JAX takes for no array, where there is one;
    else the error itself.
    """
    for name, value in program.arguments.items():
        if found := _no_array(value):
            return ValueError(
                f"argument {name!r}: found {found}, wanted an array; numpy.asarray({name}) makes "
                "one of numbers. "
                f"{model_name(program.model)} failed with {type(error).__name__}: "
                f"{str(error).splitlines()[0]}"
            )
    return error


def _numpy_error(program, error: TypeError) -> Exception:
    """`named_error`, and the observed NumPy array where NumPyro compares one with a traced
    bound, which NumPy cannot do.
    """
    observed = [id(value) for value in program._inspection.observed.values()]
    for name, value in program.arguments.items():
        if (
            isinstance(error, jax.errors.TracerArrayConversionError)
            and isinstance(value, np.ndarray)
            and id(value) in observed
        ):
            return ValueError(
                f"argument {name!r}: found a NumPy array where NumPyro compares it with a traced "
                "value, wanted a JAX array; give "
                f"jax.numpy.asarray({name})."
            )
    return named_error(program, error)


def _no_array(value) -> str:
    """What an argument is that looks like data and that JAX cannot compute with; "" where it
    can.
    """
    if isinstance(value, jax.Array | np.generic):
        return ""
    if isinstance(value, np.ndarray):
        return "" if value.dtype.kind in "biufcV" else f"an array of {value.dtype}"
    is_list = (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, int | float | str) for entry in value)
    )
    return type(value).__name__ if is_list or hasattr(value, "__array__") else ""


def _probes(program, start):
    """What each start shows: the given one, uniform ones, and draws from the prior, should it
    have any.
    """
    draws = [program._draw_start, program._draw_prior_start]
    draws = (
        draws if start is None else [lambda rng_key: program._draw_start(rng_key, start), *draws]
    )
    for draw in draws:
        probe = None
        for rng_key in random.split(random.key(0), NUM_STARTS):
            try:
                with warnings.catch_warnings():
                    # NumPyro's, which names no site; ours does
                    warnings.filterwarnings("ignore", "Out-of-support values")
                    probe = probe or once(
                        lambda rng_key, draw=draw: _probe(program, draw(rng_key)), rng_key
                    )
                    found = jax.device_get(probe(rng_key))
            except NotImplementedError:  # a prior that cannot be drawn from
                if draw is not draws[-1]:
                    raise
                return
            except TypeError as error:
                raise _numpy_error(program, error) from error
            yield found


def _probe(program, start) -> _Probe:
    trace = program.trace(start)
    values = {name: jnp.asarray(trace[name]["value"]) for name in program.observed}
    outside = {name: ~_in_support(trace[name]["fn"], value) for name, value in values.items()}
    broken = {
        name: _has_nan(trace[name]["fn"]) for name, site in program.sites.items() if site.family
    }
    return _Probe(program.log_probs(start), broken, outside, values)


def _has_nan(fn) -> Array:
    """NumPyro's logistic log probability of a NaN logit is 0: a NaN must be caught where it
    enters.
    """
    numbers = [
        leaf
        for leaf in map(jnp.asarray, jax.tree.leaves(fn))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.array([jnp.isnan(leaf).any() for leaf in numbers]).any()


def _in_support(fn, value) -> Array:
    """Whether each observation is in the support, masked ones and NaN excepted: whether NaN is
    allowed shows in the log prob.
    """
    if isinstance(fn, dist.MaskedDistribution):
        return _in_support(fn.base_dist, value) | ~jnp.asarray(fn._mask)
    if isinstance(fn, dist.ExpandedDistribution):
        return _in_support(fn.base_dist, value)
    if isinstance(fn, dist.Independent):
        inside = _in_support(fn.base_dist, value)
        return inside.all(axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    missing = (
        jnp.isnan(value)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else jnp.zeros(value.shape, bool)
    )
    missing = missing.any(axis=tuple(range(-fn.event_dim, 0))) if fn.event_dim else missing
    return jnp.asarray(fn.support(value)) | missing


def _cause(program, found: _Probe, num_starts: int) -> str:
    """The first cause that a person can mend: data outside the support, data that are not
    numbers, then the sites themselves.
    """
    moving = {name for name, parents in program.support_parents.items() if parents}
    outside = {name: flags for name, flags in found.outside.items() if flags.any()}
    for name, flags in outside.items():
        if name not in moving:
            return (
                f"site {name!r}: {int(flags.sum())} of its observations are outside the support "
                f"{program.sites[name].support!r} of "
                f"{program.sites[name].family}; {_first_outside(program, found, name)}. "
                f"Correct the data, or observe them with a distribution that has these values."
            )
    broken = {
        name: np.asarray(term)
        for name, term in found.log_probs.items()
        if not np.isfinite(term).all()
    }
    for name in broken:
        bad = _not_numbers(found.values.get(name))
        if bad.any():
            return (
                f"site {name!r}: {int(bad.sum())} of its observations are NaN or infinite, the "
                f"first{_at(_first(bad))}"
                f"{_argument(program, found.values[name])}, and its log probability is not finite. "
                "Drop or impute them, or "
                "declare them missing: obs_mask=, numpyro.handlers.mask, or a latent site in "
                "their place."
            )
    broken |= {name: np.asarray(np.nan) for name, flag in found.broken.items() if flag}
    sites = ", ".join(
        f"{name!r} ({program.sites[name].family}: {_worst(term)})" for name, term in broken.items()
    )
    suspects = [(name, bad) for name, bad in _arrays(program) if bad.any()]
    if suspects and broken:
        name, bad = suspects[0]
        return (
            f"argument {name!r}: {int(bad.sum())} entries are NaN or infinite, the "
            f"first{_at(_first(bad))}, and the log probability "
            f"is not finite at site {sites}. Drop or impute them."
        )
    start = (
        "Where there is a start, give it: init_strategy=init_to_value(...) or init_params, and "
        "Program.check(start=...)."
    )
    for name in outside:
        return (
            f"site {name!r}: found no start, at none of {num_starts} are all its observations in "
            "the support of "
            f"{program.sites[name].family}, which depends on "
            f"{sorted(program.support_parents[name])}; "
            f"{_first_outside(program, found, name)}. {start}"
        )
    return (
        f"found no start: the log joint of {model_name(program.model)} is not finite at any of "
        f"{num_starts} starts; not finite: site "
        f"{sites}. Look for a prior scale that is zero or negative, a support that excludes the "
        f"data, or a hard constraint. {start}"
    )


def _first_outside(program, found: _Probe, name: str) -> str:
    index = _first(found.outside[name])
    return (
        "the first is "
        f"{found.values[name][index]!s}{_at(index)}{_argument(program, found.values[name])}"
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
    return (
        hasattr(leaf, "shape")
        and np.shape(leaf) == value.shape
        and np.array_equal(np.asarray(leaf), value, equal_nan=is_float)
    )


def _arrays(program):
    """Each array among the arguments, by the argument's name, with a flag where it is not a
    number.
    """
    for name, argument in program.arguments.items():
        for leaf in jax.tree.leaves(argument):
            yield name, _not_numbers(leaf)


def _not_numbers(value) -> np.ndarray:
    value = np.asarray(0.0 if value is None or not hasattr(value, "dtype") else value)
    return (
        ~np.isfinite(value)
        if np.issubdtype(value.dtype, np.inexact)
        else np.zeros(value.shape, bool)
    )


def _first(flags) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(flags)[0])


def _at(index: tuple[int, ...]) -> str:
    return f" at {index}" if index else ""


def _worst(term) -> str:
    return "NaN" if np.isnan(term).any() else "-inf" if np.isneginf(term).any() else "+inf"
