"""Models and kernels by the names that a person types."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import zoo

__all__ = ["find_model", "in_precision", "kernel_name", "kernel_options", "make_kernel", "unknown"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "SVI": {"learning_rate": 0.01},
    "ParticleFilter": {"num_particles": 200},
    "AugmentReduce": {"posterior": True},  # a point has no summary
}
DOUBLE = ("CoordinateAscent",)


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
    raise ValueError(unknown(f"kernel of {entry.name}", str(name), [kernel.lower() for kernel in kernels]))


def kernel_options(name: str) -> dict[str, Any]:
    """What a kernel may be told beside its model, with the command's defaults: numbers, texts, true or false."""
    parameters = inspect.signature(_class(name)).parameters.values()
    options = {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}
    return options | DEFAULTS.get(name, {})


def make_kernel(name: str, model: Callable, **options: Any) -> Any:
    """A kernel on a model."""
    if name == "SVI":
        return _svi(model, **options)
    return _class(name)(model, **options)


def in_precision(kernel: str) -> AbstractContextManager[Any]:
    """Float64 for the kernels that need it."""
    import jax

    return jax.enable_x64(kernel in DOUBLE)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not there: close matches, then all."""
    known = list(known)
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"no {what} {name!r}; {hint}there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"


def _svi(model: Callable, learning_rate: float) -> Any:
    """Of a mean-field normal distribution, by Adam."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    return SVI(model, AutoNormal(model), Adam(learning_rate), Trace_ELBO())


def _class(name: str) -> Any:
    """A kernel's class, imported now."""
    if name not in _WHERE:
        raise ValueError(f"kernel {name!r}: the command does not build it yet, only {', '.join(_WHERE)}; run it with inference.Driver.")
    return getattr(import_module(_WHERE[name]), name)


_WHERE = {"NUTS": "numpyro.infer", "SVI": "numpyro.infer"}
_WHERE |= dict.fromkeys(("AugmentReduce", "CollapsedGibbs", "CoordinateAscent", "NestedSampler", "ParticleFilter"), "inference")
