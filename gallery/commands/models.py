"""Models and kernels by the names that a person types."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import zoo

__all__ = [
    "find_model",
    "in_precision",
    "kernel_name",
    "kernel_options",
    "make_kernel",
    "some",
    "unknown",
]

DEFAULTS: dict[str, dict[str, Any]] = {
    "ConditionalGibbs": {"num_births": 1.0},  # few sweeps must do
    "ParticleFilter": {"num_particles": 200},
    "AugmentReduce": {"posterior": True},  # a point has no summary
    "NestedSampler": {"num_live": 100, "num_sweeps": 2.0},
    "Staged": {"num_live": 100, "num_sweeps": 2.0, "tolerance": 0.01, "track_modes": True},
    "DataTempering": {"num_particles": 200},
}
DOUBLE = ("CoordinateAscent", "LatentHistory")
MANY = 500_000  # entries from which on single precision is enough


def find_model(name: str) -> zoo.Entry:
    """A model of the zoo."""
    if name not in zoo.names():
        raise ValueError(unknown("model", name, zoo.names()))
    return zoo.load(name)


def kernel_name(entry: zoo.Entry, name: str | None) -> str:
    """The card's own spelling of a kernel; its first one if none is named."""
    kernels = entry.card.kernels
    for kernel in kernels:
        if name is None or kernel.lower() == name.lower():
            return kernel
    raise ValueError(
        unknown(f"kernel of {entry.name}", str(name), [kernel.lower() for kernel in kernels])
    )


def kernel_options(name: str) -> dict[str, Any]:
    """What a kernel may be told beside its model, with the command's defaults: numbers, texts,
    true or false.
    """
    parameters = inspect.signature(_MADE.get(name) or _class(name)).parameters.values()
    options = {
        p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)
    }
    return options | DEFAULTS.get(name, {})


def make_kernel(name: str, model: Callable, **options: Any) -> Any:
    """A kernel on a model."""
    return (_MADE.get(name) or _class(name))(model, **options)


def in_precision(kernel: str, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Float64 for the kernels that need it; for one of them only where the data are not many."""
    import jax
    import numpy as np

    size = max((np.size(value) for value in arguments.values()), default=0)
    return jax.enable_x64(kernel in DOUBLE or (kernel == "ConditionalGibbs" and size < MANY))


def some(items: Sequence[str], most: int = 40) -> str:
    """The first of many names."""
    return ", ".join(items[:most]) + (
        f", ... {len(items) - most} more" if len(items) > most else ""
    )


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not there: close matches, then all."""
    known = list(known)
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return (
        f"no {what} {name!r}; {hint}there {'is' if len(known) == 1 else 'are'} "
        f"{', '.join(known) or 'none'}"
    )


def _svi(model: Callable, learning_rate: float = 0.01) -> Any:
    """Of a mean-field normal distribution, by Adam."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    return SVI(model, AutoNormal(model), Adam(learning_rate), Trace_ELBO())


def _latent_history(model: Callable, max_capacity: int = 4096) -> Any:
    """With NUTS for what belongs to no history."""
    from gallery.archipelago import sampler

    return sampler(max_capacity, model)


def _class(name: str) -> Any:
    """A kernel's class, imported now."""
    if name not in _WHERE:
        known = ", ".join([*_WHERE, *_MADE])
        raise ValueError(
            f"kernel {name!r}: the command does not build it yet, only {known}; run it with "
            "inference.Driver."
        )
    return getattr(import_module(_WHERE[name]), name)


_MADE: dict[str, Callable] = {"SVI": _svi, "LatentHistory": _latent_history}
_OURS = (
    "AugmentReduce",
    "CollapsedGibbs",
    "ConditionalGibbs",
    "CoordinateAscent",
    "DataTempering",
    "NestedSampler",
    "ParticleFilter",
    "Staged",
)
_WHERE = dict.fromkeys(_OURS, "inference") | {"NUTS": "numpyro.infer"}
