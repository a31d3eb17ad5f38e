"""Kernels by the names that a person types.

A kernel is a class in `inference/kernels/*/kernel.py`, an entry point `zoo.kernels` of another
package, or one of NumPyro's. What the command sets for it is its class' own `command`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # loads JAX
    from inference.run.command import Command

__all__ = [
    "command_of",
    "in_precision",
    "kernel_names",
    "kernel_options",
    "make_kernel",
    "module_file",
]

NUMPYRO = ("NUTS", "SVI")
_FOLDERS = Path(__file__).parents[2] / "inference" / "kernels"
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)
_BASES = {"Algorithm", "GibbsBlock", "MCMCKernel"}


def kernel_names() -> tuple[str, ...]:
    """Return the names of all kernels that the command can build."""
    return (*NUMPYRO, *_modules(), *_entry_points())


def command_of(kernel: str) -> "Command":
    """Return what the command sets for a kernel; the defaults for one that it cannot build."""
    from inference.run.command import Command

    if kernel == "SVI":
        return Command(driver={"num_warmup": 5000})
    own = _class(kernel) if kernel in kernel_names() else None
    return getattr(own, "command", Command())


def kernel_options(kernel: str) -> dict[str, Any]:
    """Return the arguments of a kernel that are numbers, texts, true or false, with defaults."""
    return {
        p.name: p.default
        for p in inspect.signature(_builder(kernel)).parameters.values()
        if isinstance(p.default, bool | int | float | str)
    } | dict(command_of(kernel).options)


def make_kernel(name: str, model: Callable, **options: Any) -> Any:
    """Build a kernel on a model."""
    return _builder(name)(model, **options)


def in_precision(kernel: str, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Enable float64 where the kernel wants it for arguments of this size."""
    import jax
    import numpy as np

    size = max((np.size(value) for value in arguments.values()), default=0)
    return jax.enable_x64(size < command_of(kernel).double_below)


def module_file(name: str) -> Path | None:
    """Return the file of a kernel's class; None for one of NumPyro's, or an unknown name."""
    if point := _entry_points().get(name):
        spec = find_spec(point.module)
        return Path(spec.origin) if spec and spec.origin else None
    is_class = re.compile(rf"^class {name}\(", re.MULTILINE)
    paths = sorted(_FOLDERS.glob("*/*.py"))
    return next((path for path in paths if is_class.search(path.read_text("utf-8"))), None)


def _modules() -> dict[str, str]:
    """The classes of kernels in their folders, and the modules that have them; none is imported.

    A kernel derives from one of the protocols, or its folder has its name.
    """
    return {
        name: f"inference.kernels.{path.parent.name}.kernel"
        for path in sorted(_FOLDERS.glob("*/kernel.py"))
        for name, bases in _CLASS.findall(path.read_text("utf-8"))
        if _BASES & set(re.findall(r"\w+", bases))
        or name.lower() == path.parent.name.replace("_", "")
    }


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="zoo.kernels")}


def _class(name: str) -> Any:
    if name in NUMPYRO:
        return getattr(import_module("numpyro.infer"), name)
    if module := _modules().get(name):
        return getattr(import_module(module), name)
    if point := _entry_points().get(name):
        return point.load()
    raise ValueError(
        f"kernel {name!r}: the command cannot build it, only {', '.join(kernel_names())}; run it "
        "with inference.Driver."
    )


def _builder(name: str) -> Any:
    """A kernel's class, or a function that builds the kernel on a model."""
    return {"SVI": _svi, "LatentHistory": _latent_history}.get(name) or _class(name)


def _svi(model: Callable, learning_rate: float = 0.01) -> Any:
    """SVI with a mean-field normal guide, optimised by Adam."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    return SVI(model, AutoNormal(model), Adam(learning_rate), Trace_ELBO())


def _latent_history(model: Callable, max_capacity: int = 4096) -> Any:
    """`LatentHistory` for the rejected points, NUTS for the sites that it leaves."""
    from gallery.archipelago import sampler

    return sampler(max_capacity, model)
