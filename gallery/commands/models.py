"""Models, kernels and `--option key=value`, by the names that a person types."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import zoo
from gallery.commands import model_file
from gallery.commands.wording import unknown

__all__ = [
    "DRIVER_OPTIONS",
    "KERNELS",
    "NONE",
    "KernelDefaults",
    "Options",
    "defaults_of",
    "driver_defaults",
    "find_model",
    "in_precision",
    "kernel_name",
    "kernel_options",
    "make_kernel",
    "parse",
    "split",
]

DRIVER_OPTIONS: Mapping[str, type] = {
    "num_warmup": int,
    "num_samples": int,
    "num_chains": int,
    "thinning": int,
    "max_time": float,
    "save_every": float,
    "chain_method": str,
}
DRIVER_DEFAULTS = {"num_warmup": 500, "num_samples": 1000, "num_chains": 4}
NONE: Mapping[str, Any] = MappingProxyType({})


class KernelDefaults(NamedTuple):
    """What the command sets unless `--option` says otherwise."""

    options: Mapping[str, Any] = NONE  # of the kernel
    driver: Mapping[str, int | None] = NONE  # num_warmup None: the kernel ends by itself
    module: str = "inference"
    is_double: bool = False
    test: float = 0.0  # share of the rows that a second fit, if it is cheap, holds out


KERNELS = {
    # a point estimate has no summary
    "AugmentReduce": KernelDefaults({"posterior": True}, {"num_warmup": 5000}, test=0.2),
    "CollapsedGibbs": KernelDefaults(),
    "ConditionalGibbs": KernelDefaults(
        {"num_births": 1.0},
        {"num_chains": 2, "num_warmup": 200, "num_samples": 300},
        test=0.2,
    ),
    "CoordinateAscent": KernelDefaults(
        driver={"num_chains": 1, "num_samples": 200}, is_double=True, test=0.2
    ),
    "DataTempering": KernelDefaults({"num_particles": 200}, {"num_warmup": None, "num_chains": 2}),
    "NestedSampler": KernelDefaults(
        {"num_live": 100, "num_sweeps": 2.0}, {"num_warmup": None, "num_chains": 2}
    ),
    "ParticleFilter": KernelDefaults(
        {"num_particles": 200, "shuffle": True}, {"num_warmup": None}, test=0.2
    ),
    "Staged": KernelDefaults(
        {"num_live": 100, "num_sweeps": 2.0, "tolerance": 0.01, "track_modes": True},
        {"num_warmup": None, "num_chains": 2},
    ),
    "NUTS": KernelDefaults(module="numpyro.infer"),
    "SVI": KernelDefaults(driver={"num_warmup": 5000}),
    "LatentHistory": KernelDefaults(
        driver={"num_chains": 1, "num_warmup": 300, "num_samples": 400}, is_double=True
    ),
}


def find_model(name: str) -> zoo.Entry:
    """Return a model of the zoo, or of a file, `mymodel.py:model`, which any kernel may fit."""
    if model_file.is_file(name):
        entry = model_file.load(name)
        kernels = tuple(dict.fromkeys([*entry.card.kernels, "NUTS", *KERNELS, *_new_kernels()]))
        return entry._replace(card=replace(entry.card, kernels=kernels))
    if name not in zoo.names():
        raise ValueError(unknown("model", name, zoo.names()))
    return zoo.load(name)


def _new_kernels() -> list[str]:
    """Kernels that are not in `KERNELS`: a class that has its folder's name, in `kernel.py`, and
    entry points of other packages.
    """
    spec = find_spec("inference")  # without importing it
    assert spec is not None
    assert spec.origin is not None
    found = {
        "".join(part.capitalize() for part in path.parent.name.split("_")): path.read_text()
        for path in sorted(Path(spec.origin).parent.glob("kernels/*/kernel.py"))
    }
    of_folders = [name for name, text in found.items() if f"class {name}(" in text]
    return [name for name in (*of_folders, *_entry_points()) if name not in KERNELS]


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="zoo.kernels")}


def defaults_of(kernel: str) -> KernelDefaults:
    """Return what the command sets for a kernel; one that is not in `KERNELS` has few defaults."""
    if kernel in KERNELS:
        return KERNELS[kernel]
    from inference import Algorithm

    made = _kernel_class(kernel)
    is_algorithm = inspect.isclass(made) and issubclass(made, Algorithm)  # it ends by itself
    return KernelDefaults(driver={"num_warmup": None} if is_algorithm else NONE)


def kernel_name(entry: zoo.Entry, name: str | None) -> str:
    """Return the name of a kernel as the model's card spells it; the card's first one for None."""
    kernels = entry.card.kernels
    for kernel in kernels:
        if name is None or kernel.lower() == name.lower():
            return kernel
    raise ValueError(
        unknown(f"kernel of {entry.name}", str(name), [kernel.lower() for kernel in kernels])
    )


def make_kernel(name: str, model: Callable, **options: Any) -> Any:
    """Build a kernel on a model."""
    return _kernel_class(name)(model, **options)


def in_precision(kernel: str, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Enable float64 for the kernels that need it.

    `ConditionalGibbs` gets it below 500,000 entries; with more, float32 is accurate enough.
    """
    import jax
    import numpy as np

    size = max((np.size(value) for value in arguments.values()), default=0)
    is_small_gibbs = kernel == "ConditionalGibbs" and size < 500_000
    return jax.enable_x64(defaults_of(kernel).is_double or is_small_gibbs)


class Options(NamedTuple):
    """Keyword arguments of the driver, the kernel and the model."""

    driver: dict[str, Any]
    kernel: dict[str, Any]
    model: dict[str, Any]


def parse(texts: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` texts; a value is an int, a float, true or false, else a text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ValueError(f"--option {text!r}: wanted key=value")
        if key in found:
            raise ValueError(f"--option {key}: given twice, {found[key]!r} and {value!r}")
        found[key] = _value(value)
    return found


def split(options: Mapping[str, Any], model: Callable, kernel: str) -> Options:
    """Divide options among driver, kernel and model, and add the command's defaults.

    A kernel takes those of its keyword arguments that are numbers, texts, true or false.
    """
    known = kernel_options(kernel)
    parameters = inspect.signature(model).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = Options(driver_defaults(kernel), dict(known), {})
    for key, value in options.items():
        if key in DRIVER_OPTIONS:
            found.driver[key] = _checked(key, value, DRIVER_OPTIONS[key])
        elif key in known:
            found.kernel[key] = _checked(key, value, type(known[key]))
        elif key in parameters or takes_any:
            found.model[key] = value
        else:
            raise ValueError(
                unknown("option", key, dict.fromkeys([*DRIVER_OPTIONS, *known, *parameters]))
            )
    return found._replace(
        driver={key: value for key, value in found.driver.items() if value is not None}
    )


def driver_defaults(kernel: str) -> dict[str, Any]:
    """Return the driver's arguments that the command sets unless `--option` says otherwise."""
    return {**DRIVER_DEFAULTS, **defaults_of(kernel).driver}


def kernel_options(kernel: str) -> dict[str, Any]:
    """Return the arguments of a kernel that are numbers, texts, true or false, with defaults."""
    return {
        p.name: p.default
        for p in inspect.signature(_kernel_class(kernel)).parameters.values()
        if isinstance(p.default, bool | int | float | str)
    } | dict(defaults_of(kernel).options)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(key: str, value: Any, kind: type) -> Any:
    """Refuse a value of another kind; a whole number is a float too."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted: Mapping[type, str] = {
            int: "a whole number",
            float: "a number",
            str: "a name",
            bool: "true or false",
        }
        raise ValueError(f"--option {key}: wanted {wanted[kind]}, found {value!r}")
    return value


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


def _kernel_class(name: str) -> Any:
    """A kernel's class, or a function that builds the kernel on a model."""
    if name in (made := {"SVI": _svi, "LatentHistory": _latent_history}):
        return made[name]
    known = [*KERNELS, *_new_kernels()]
    if name not in known:
        raise ValueError(
            f"kernel {name!r}: the command cannot build it, only {', '.join(known)}; run it with "
            "inference.Driver."
        )
    if name not in KERNELS and name in (points := _entry_points()):
        return points[name].load()
    return getattr(import_module(KERNELS.get(name, KernelDefaults()).module), name)
