"""Models and kernels by the names that a person types."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import zoo

__all__ = ["DEMO", "find_model", "kernel_name", "make_kernel", "model_names", "unknown"]

DEMO = "demo"
LEARNING_RATE = 0.01  # of Adam, for SVI


def model_names() -> tuple[str, ...]:
    """The zoo's models, then the demonstration."""
    return (*zoo.names(), DEMO)


def find_model(name: str) -> zoo.Entry:
    """A model of the zoo, or the demonstration."""
    if name not in model_names():
        raise ValueError(unknown("model", name, model_names()))
    if name == DEMO:
        from gallery import demo

        return zoo.Entry.of(demo)
    return zoo.load(name)


def kernel_name(entry: zoo.Entry, name: str | None) -> str:
    """The card's own spelling of a kernel; its first one if none is named."""
    kernels = entry.card.kernels
    for kernel in kernels:
        if name is None or kernel.lower() == name.lower():
            return kernel
    raise ValueError(unknown(f"kernel of {entry.name}", str(name), [kernel.lower() for kernel in kernels]))


def make_kernel(name: str, model: Callable) -> Any:
    """A kernel on a model, with the kernel's own defaults."""
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r}: the command does not build it yet, only {', '.join(_KERNELS)}; run it with inference.Driver.")
    return _KERNELS[name](model)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not there: close matches, then all."""
    known = list(known)
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"no {what} {name!r}; {hint}there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"


def _nuts(model: Callable) -> Any:
    from numpyro.infer import NUTS

    return NUTS(model)


def _svi(model: Callable) -> Any:
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    return SVI(model, AutoNormal(model), Adam(LEARNING_RATE), Trace_ELBO())


_KERNELS = {"NUTS": _nuts, "SVI": _svi}
