"""The sites and plates of a model; checks that refuse wrong settings.

Sites and plates are found by one abstract run of the model under `jax.eval_shape`, which finds
shapes, plates, families and supports and computes no array. The model's data stay concrete, because
a model may look at them (at which entries are missing, say).
"""

from collections.abc import Callable, Sequence
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

__all__ = [
    "Inspection",
    "Plate",
    "Site",
    "StructureError",
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
    "require",
    "unwrap",
]


class StructureError(ValueError):
    """A model is not of the structure that was asked for.

    The message names the site, what was found, what is wanted and what to try.
    """


def require(is_met: Any, message: str) -> None:
    """Raises StructureError with this message unless a condition is met."""
    if not is_met:
        raise StructureError(message)


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
