"""The sites and plates of a model, read off one abstract run of it.

The run happens under `jax.eval_shape`: shapes, plates, families and supports are found, no array is
computed. The model's data stay concrete, because a model may look at them (the pattern of missing
entries, say).
"""

import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import constraints
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

WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution, Missing)


class StructureError(ValueError):
    """The model is not what was asked of it; the message names the site, what it is, what was
    wanted and what to try.
    """


class Plate(NamedTuple):
    """A plate as declared."""

    size: int  # rows that the plate stands for
    subsample_size: int  # rows of it that a run of the model sees
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
    # class of the distribution under its wrappers; that of None for numpyro.deterministic
    distribution: type = type(None)


def is_real(site: Site) -> bool:
    """Whether it may be any number, or a vector of any."""
    support = site.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


class Inspection(NamedTuple):
    """What one abstract run shows."""

    sites: dict[str, Site]  # samples and deterministics, in the order of the trace
    plates: dict[str, Plate]
    # value of each observed site; a tracer of the finished run where the model computes it
    observed: dict[str, Any]


def inspect_model(model: Callable, args: tuple, kwargs: dict) -> Inspection:
    """Runs the model abstractly; what is not an array leaves the run by side effect."""
    found = Inspection({}, {}, {})

    def run(rng_key):
        started = handlers.substitute(handlers.seed(model, rng_key), substitute_fn=initial_value)
        for name, message in handlers.trace(started).get_trace(*args, **kwargs).items():
            if message["type"] == "plate":
                found.plates[name] = Plate(message["args"][0], len(message["value"]), None)
            if message["type"] in ("sample", "deterministic"):
                found.sites[name] = _site(message)
                _place(found.plates, message)
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


def initial_value(message, radius: float = 2.0):
    """Substitutes a uniform start in unconstrained space, at most `radius` from 0; None, and so
    a prior draw, where there is none.
    """
    if (
        message["type"] != "sample"
        or message["is_observed"]
        or isinstance(unwrap(message["fn"]), dist.Delta)
    ):
        return None
    try:
        return init_to_uniform(message, radius=radius)
    # the two by which NumPyro says that a support has no transform
    except (NotImplementedError, ValueError):
        return None


def is_data(message) -> bool:
    """Whether a site of a trace holds data, or held them before `numpyro.handlers.uncondition`
    took them away.
    """
    is_sample = message["type"] == "sample" and not isinstance(unwrap(message["fn"]), dist.Unit)
    return is_sample and bool(message["is_observed"] or message["infer"].get("was_observed"))


def model_name(model) -> str:
    """The name by which an error calls the model."""
    return getattr(model, "__name__", type(model).__name__)


def unwrap(distribution):
    """The distribution under Independent, Expanded, Masked and Missing."""
    while isinstance(distribution, WRAPPERS):
        distribution = distribution.base_dist
    return distribution


def _place(plates: dict[str, Plate], message) -> None:
    for frame in message["cond_indep_stack"]:
        if plates[frame.name].dim is None:
            plates[frame.name] = plates[frame.name]._replace(dim=frame.dim)


def _site(message) -> Site:
    name, value = message["name"], message["value"]
    frames = sorted(message["cond_indep_stack"], key=lambda frame: frame.dim)
    plates = tuple(frame.name for frame in frames)
    dtype, shape = jnp.result_type(value), jnp.shape(value)  # the type first: it refuses a list
    if message["type"] == "deterministic":
        dims = _dims(name, shape, frames, max((-frame.dim for frame in frames), default=0), ())
        return Site(name, "deterministic", "", shape, dtype, 0, plates, None, False, dims)
    fn = message["fn"]
    dims = _dims(
        name, shape, frames, len(shape) - fn.event_dim, message["infer"].get("event_dims", ())
    )
    kind, base, support = _kind(message), type(unwrap(fn)), _abstract(fn.support)
    return Site(
        name,
        kind,
        base.__name__,
        shape,
        dtype,
        fn.event_dim,
        plates,
        support,
        fn.support.is_discrete,
        dims,
        base,
    )


def _kind(message) -> str:
    base = unwrap(message["fn"])
    if isinstance(base, dist.Unit):
        return "factor"
    if message["is_observed"]:
        return "observed"
    return "deterministic" if isinstance(base, dist.Delta) else "latent"


def _dims(
    name: str, shape: tuple[int, ...], frames, batch_ndim: int, event_dims
) -> tuple[str, ...]:
    """Plates by their position and size, then the given names in order, then ArviZ's default."""
    plates = {batch_ndim + frame.dim: frame for frame in frames}
    given = list(event_dims)
    dims = []
    for axis, size in enumerate(shape):
        if axis in plates and plates[axis].size == size:
            dims.append(plates[axis].name)
        else:
            dims.append(given.pop(0) if given else f"{name}_dim_{axis}")
    if given:
        raise ValueError(
            f"site {name!r}: event_dims {list(event_dims)} names more dimensions than plates leave "
            f"of its shape {shape}."
        )
    return tuple(dims)


def _abstract(support):
    """The constraint, its traced bounds replaced by their shapes, so that no tracer outlives the
    run.
    """
    shape = lambda leaf: (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer) else leaf
    )
    return jax.tree.map(shape, support)


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


def is_whole(value: Any) -> bool:
    """Whether it is an integer; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number, infinite or NaN as well; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_between(value: Any, low: float, high: float) -> bool:
    """Whether it is a number above the one and below the other."""
    return is_number(value) and low < value < high


def check_setting(is_fine: bool, wanted: str, /, **setting: Any) -> None:
    """Refuses a setting, by its name and what was wanted."""
    for name, value in setting.items():
        if not is_fine:
            raise ValueError(f"{name}: found {value!r}, wanted {wanted}.")


def check_whole(least: int, /, **settings: Any) -> None:
    """Refuses settings that are no integers, or too small."""
    for name, value in settings.items():
        check_setting(
            is_whole(value) and value >= least, f"an integer, at least {least}", **{name: value}
        )
