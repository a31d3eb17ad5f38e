"""The sites and plates of a model; checks that refuse bad data and wrong settings.

Sites and plates are found by one abstract run of the model under `jax.eval_shape`, which finds
shapes, plates, families and supports and computes no array. The model's data stay concrete, because
a model may look at them (at which entries are missing, say).

`check` asks whether the log joint is finite somewhere: at a start that the caller gives, at uniform
starts as NUTS takes them, or at draws from the prior. Where it is not, the error names the cause: a
NaN in an argument, an observation outside its distribution's support, a prior of density zero.
Data that are missing on purpose (a masked entry, a distribution that takes NaN) have a finite log
probability, and so they pass.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform

from inference.distributions.missing import Missing
from inference.program.compiling import once

__all__ = [
    "Inspection",
    "Plate",
    "Site",
    "StructureError",
    "check",
    "check_setting",
    "check_whole",
    "entry_support",
    "initial_value",
    "inspect_model",
    "is_between",
    "is_data",
    "is_number",
    "is_real",
    "is_whole",
    "model_name",
    "named_error",
    "unwrap",
]


class StructureError(ValueError):
    """A model is not of the structure that was asked for.

    The message names the site, what was found, what is wanted and what to try.
    """


class Plate(NamedTuple):
    """A plate as declared."""

    size: int  # rows of the whole plate
    subsample_size: int  # those of them that a run of the model sees
    dim: int | None  # its dimension at the first site inside it, negative; None without a site


class Site(NamedTuple):
    """A site of the trace, without its values."""

    name: str
    kind: str  # "latent", "observed", "deterministic" or "factor"
    family: str  # name of the distribution's class under its wrappers; "" for numpyro.deterministic
    shape: tuple[int, ...]  # batch and event dimensions
    dtype: Any
    event_dim: int  # trailing dimensions of one event
    plates: tuple[str, ...]  # outermost first
    # constraint; bounds that the model computes are jax.ShapeDtypeStruct. None for
    # numpyro.deterministic
    support: Any
    is_discrete: bool
    dims: tuple[str, ...]  # a name for each dimension
    # class of the distribution under its wrappers; type(None) for numpyro.deterministic
    distribution: type = type(None)


class Inspection(NamedTuple):
    """Sites, plates and data of a model, from one abstract run (`jax.eval_shape`)."""

    sites: dict[str, Site]  # samples and deterministics, in the order of the trace
    plates: dict[str, Plate]
    # value of each observed site; a tracer of the finished run where the model computes it
    observed: dict[str, Any]


def inspect_model(model: Callable, args: tuple, kwargs: dict[str, Any]) -> Inspection:
    """Sites, plates and observed values of a model, by one abstract run on its arguments."""
    found = Inspection({}, {}, {})

    def run(rng_key: Array) -> None:
        started = handlers.substitute(handlers.seed(model, rng_key), substitute_fn=initial_value)
        for name, message in handlers.trace(started).get_trace(*args, **kwargs).items():
            if message["type"] == "plate":
                found.plates[name] = Plate(message["args"][0], len(message["value"]), None)
            if message["type"] in ("sample", "deterministic"):
                found.sites[name] = _site(message)
                for frame in message["cond_indep_stack"]:
                    plate = found.plates[frame.name]
                    if plate.dim is None:
                        found.plates[frame.name] = plate._replace(dim=frame.dim)
                if found.sites[name].kind == "observed":
                    found.observed[name] = message["value"]

    try:
        jax.eval_shape(run, random.key(0))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(
            f"{model_name(model)} needs a number where JAX traces. What depends on the data alone: "
            "compute it with numpy."
        )
        raise
    return found


def initial_value(message: dict[str, Any], radius: Any = 2.0) -> Array | None:
    """A start of a latent site, uniform in unconstrained space; None to draw it from its prior.

    Args:
        message: the site, as NumPyro's handlers pass it.
        radius: largest distance from 0 in unconstrained space; None for 0 itself, without a draw.
    """
    if message["type"] != "sample" or message["is_observed"]:
        return None
    fn = message["fn"]
    if isinstance(unwrap(fn), dist.Delta) or fn.support.is_discrete:
        return None
    try:
        if radius is not None:
            return init_to_uniform(message, radius=radius)
        transform = dist.biject_to(fn.support)
        return transform(jnp.zeros(transform.inverse_shape(fn.shape())))
    # by these two NumPyro says that a support has no transform
    except (NotImplementedError, ValueError):
        return None


def is_data(message: dict[str, Any]) -> bool:
    """Whether a site of a trace holds data, or did before `numpyro.handlers.uncondition`."""
    is_sample = message["type"] == "sample" and not isinstance(unwrap(message["fn"]), dist.Unit)
    return is_sample and bool(message["is_observed"] or message["infer"].get("was_observed"))


def entry_support(support: Any) -> Any:
    """The constraint of one entry of an array."""
    while isinstance(support, dist.constraints.independent):
        support = support.base_constraint
    return support


def is_real(site: Site) -> bool:
    """Whether the support of a site is all real numbers, or all vectors of them."""
    return entry_support(site.support) is dist.constraints.real


def model_name(model: Any) -> str:
    """The name of a model in error messages."""
    return getattr(model, "__name__", type(model).__name__)


def unwrap(distribution: Any) -> Any:
    """The distribution under Independent, Expanded, Masked and Missing."""
    while isinstance(
        distribution,
        dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution | Missing,
    ):
        distribution = distribution.base_dist
    return distribution


def _site(message: dict[str, Any]) -> Site:
    name, value = message["name"], message["value"]
    dtype = jnp.result_type(value)  # before the shape: it refuses a list
    shape = jnp.shape(value)
    frames = sorted(message["cond_indep_stack"], key=lambda frame: frame.dim)
    plates = tuple(frame.name for frame in frames)
    if message["type"] == "deterministic":
        dims = _dims(name, shape, frames, max((-frame.dim for frame in frames), default=0), ())
        return Site(name, "deterministic", "", shape, dtype, 0, plates, None, False, dims)
    fn = message["fn"]
    base = type(unwrap(fn))
    kinds = {
        "factor": issubclass(base, dist.Unit),
        "observed": message["is_observed"],
        "deterministic": issubclass(base, dist.Delta),
        "latent": True,
    }
    # no tracer outlives the run: bounds that the model computes are replaced by their shapes
    shape_of = lambda leaf: (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer) else leaf
    )
    event_dims = message["infer"].get("event_dims", ())
    return Site(
        name=name,
        kind=next(kind for kind, is_kind in kinds.items() if is_kind),
        family=base.__name__,
        shape=shape,
        dtype=dtype,
        event_dim=fn.event_dim,
        plates=plates,
        support=jax.tree.map(shape_of, fn.support),
        is_discrete=fn.support.is_discrete,
        dims=_dims(name, shape, frames, len(shape) - fn.event_dim, event_dims),
        distribution=base,
    )


def _dims(
    name: str, shape: tuple[int, ...], frames: Sequence[Any], batch_ndim: int, event_dims: Any
) -> tuple[str, ...]:
    """Names of dimensions: plates by position and size, then the given names, then ArviZ's own."""
    known = {
        axis: frame.name
        for frame in frames
        if 0 <= (axis := batch_ndim + frame.dim) < len(shape) and frame.size == shape[axis]
    }
    free = [axis for axis in range(len(shape)) if axis not in known]
    if len(event_dims) > len(free):
        raise ValueError(
            f"site {name!r}: event_dims {list(event_dims)} names more dimensions than plates leave "
            f"of its shape {shape}."
        )
    known |= zip(free, event_dims, strict=False)
    return tuple(known.get(axis, f"{name}_dim_{axis}") for axis in range(len(shape)))


# Settings of kernels and of the driver.


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, Python's or NumPy's; a bool does not count."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, infinite and NaN included; a bool does not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_between(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number above `low` and below `high`."""
    return is_number(value) and low < value < high


def check_setting(is_fine: bool, wanted: str, /, **setting: Any) -> None:
    """Raises ValueError unless a setting is fine.

    Args:
        is_fine: whether it is.
        wanted: what is wanted, for the message.
        **setting: its name and value.
    """
    for name, value in setting.items():
        if not is_fine:
            raise ValueError(f"{name}: found {value!r}, wanted {wanted}.")


def check_whole(least: int, /, **settings: Any) -> None:
    """Raises ValueError unless all settings are integers, at least `least`."""
    for name, value in settings.items():
        is_fine = is_whole(value) and value >= least
        check_setting(is_fine, f"an integer, at least {least}", **{name: value})


# Data and model: is the log joint finite?


class _Probe(NamedTuple):
    """Log probabilities and observations at one start, by site, and what is wrong with them."""

    log_probs: dict[str, Array]
    # whether a parameter of the site's distribution is NaN, which a log probability may hide:
    # NumPyro's logistic log probability of a NaN logit is 0
    broken: dict[str, Array]
    outside: dict[str, Array]  # [batch] of an observed site: the observation is outside the support
    values: dict[str, Array]  # observed values


def check(program: Any, starts: Sequence[Callable[[Array], dict[str, Array]]]) -> None:
    """Raises ValueError unless some start has finite terms and its observations in their supports.

    Data that are being traced have no values yet, and pass.

    Args:
        program: a `Program`.
        starts: functions of a key that draw values of its sites. The last one draws from the prior,
            and may raise NotImplementedError.
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


def _probes(program: Any, starts: Sequence[Callable]) -> Iterator[_Probe]:
    for draw in starts:
        probe = None
        for rng_key in random.split(random.key(0), 10):
            try:
                with warnings.catch_warnings():
                    # NumPyro's warning names no site; the error of `check` does
                    warnings.filterwarnings("ignore", "Out-of-support values")
                    probe = probe or once(
                        lambda rng_key, draw=draw: _probe(program, draw(rng_key)), rng_key
                    )
                    found = jax.device_get(probe(rng_key))
            except NotImplementedError:  # a prior that cannot be drawn from
                if draw is not starts[-1]:
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
