"""`--option key=value`: settings of the driver or of the kernel, or keyword arguments of the
model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gallery.commands.models import kernel_options, unknown

__all__ = ["SETTINGS", "Options", "checked", "parse", "split"]

SETTINGS: Mapping[str, type] = {  # of inference.Driver
    "num_warmup": int,
    "num_samples": int,
    "num_chains": int,
    "thinning": int,
    "max_time": float,
    "save_every": float,
    "chain_method": str,
}
DEFAULTS = {"num_warmup": 500, "num_samples": 1000, "num_chains": 4}
OF_KERNELS: Mapping[str, Mapping[str, int | None]] = {  # None: it ends by itself
    "SVI": {"num_warmup": 5000},
    "AugmentReduce": {"num_warmup": 5000},
    "ParticleFilter": {"num_warmup": None},
    "NestedSampler": {"num_warmup": None, "num_chains": 2},  # each is a whole run
    "Staged": {"num_warmup": None, "num_chains": 2},
    "DataTempering": {"num_warmup": None, "num_chains": 2},
    "CoordinateAscent": {"num_chains": 1, "num_samples": 200},
    "ConditionalGibbs": {"num_chains": 2, "num_warmup": 200, "num_samples": 300},
    "LatentHistory": {"num_chains": 1, "num_warmup": 300, "num_samples": 400},
}
WANTED: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a name",
    bool: "true or false",
}


class Options(NamedTuple):
    """Keyword arguments of each."""

    driver: dict[str, Any]
    kernel: dict[str, Any]
    model: dict[str, Any]


def parse(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as a dictionary; a value is an int, a float, true or false, else text."""
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
    """What is told to the driver, to the kernel, and to the model, with the command's defaults."""
    parameters, known = inspect.signature(model).parameters, kernel_options(kernel)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    valid = list(dict.fromkeys([*SETTINGS, *known, *parameters]))
    found = Options({**DEFAULTS, **OF_KERNELS.get(kernel, {})}, dict(known), {})
    for key, value in options.items():
        if key in SETTINGS:
            found.driver[key] = checked(key, value, SETTINGS[key])
        elif key in known:
            found.kernel[key] = checked(key, value, type(known[key]))
        elif key in parameters or takes_any:
            found.model[key] = value
        else:
            raise ValueError(unknown("option", key, valid))
    return found._replace(
        driver={key: value for key, value in found.driver.items() if value is not None}
    )


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def checked(key: str, value: Any, kind: type) -> Any:
    """The value, if it is of the kind; a whole number is a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"--option {key}: wanted {WANTED[kind]}, found {value!r}")
    return value
