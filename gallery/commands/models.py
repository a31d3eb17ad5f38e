"""Models and `--option key=value`, by the names that a person types."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, get_args

import zoo
from gallery.commands import model_file
from gallery.commands.kernels import command_of, kernel_names, kernel_options
from gallery.commands.wording import unknown

__all__ = [
    "DRIVER_OPTIONS",
    "NONE",
    "SCALARS",
    "Options",
    "driver_defaults",
    "find_model",
    "is_setting",
    "kernel_name",
    "parse",
    "scalar_kinds",
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
SCALARS = (bool, int, float, str)
NONE: Mapping[str, Any] = MappingProxyType({})


def find_model(name: str) -> zoo.Entry:
    """Return a model of the zoo, or of a file, `mymodel.py:model`, which any kernel may fit."""
    if model_file.is_file(name):
        entry = model_file.load(name)
        kernels = tuple(dict.fromkeys([*entry.card.kernels, "NUTS", *kernel_names()]))
        return entry._replace(card=replace(entry.card, kernels=kernels))
    if name not in zoo.names():
        raise ValueError(unknown("model", name, zoo.names()))
    return zoo.load(name)


def kernel_name(entry: zoo.Entry, name: str | None) -> str:
    """Return the name of a kernel as the model's card spells it; the card's first one for None."""
    kernels = entry.card.kernels
    for kernel in kernels:
        if name is None or kernel.lower() == name.lower():
            return kernel
    raise ValueError(
        unknown(f"kernel of {entry.name}", str(name), [kernel.lower() for kernel in kernels])
    )


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
            own = [name for name, p in parameters.items() if is_setting(p)]
            raise ValueError(unknown("option", key, dict.fromkeys([*DRIVER_OPTIONS, *known, *own])))
    return found._replace(
        driver={key: value for key, value in found.driver.items() if value is not None}
    )


def scalar_kinds(p: inspect.Parameter) -> list[type]:
    """Return the types of numbers, texts, true and false that an argument is annotated with."""
    members = get_args(p.annotation) if isinstance(p.annotation, UnionType) else ()
    return [kind for kind in SCALARS if kind in (p.annotation, *members)]


def is_setting(p: inspect.Parameter) -> bool:
    """Return whether an argument of a model has a default or a plain type, as data have not."""
    return p.default not in (p.empty, None) or bool(scalar_kinds(p))


def driver_defaults(kernel: str) -> dict[str, Any]:
    """Return the driver's arguments that the command sets unless `--option` says otherwise."""
    return {**DRIVER_DEFAULTS, **command_of(kernel).driver}


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
