"""The sites and plates of a model, read off one abstract run of it.

The run happens under `jax.eval_shape`: shapes, plates, families and supports are found, no array is
computed. The model's data stay concrete, because a model may look at them (the pattern of missing
entries, say).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.initialization import init_to_uniform

from inference.distributions import Missing

__all__ = [
    "Inspection",
    "Plate",
    "Site",
    "StructureError",
    "initial_value",
    "inspect_model",
    "is_data",
    "is_real",
    "model_name",
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
