"""`--option key=value`: settings of the driver, or keyword arguments of the model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gallery.commands.models import unknown

__all__ = ["SETTINGS", "parse", "split"]

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
SVI_STEPS = 5000
WANTED: Mapping[type, str] = {int: "a whole number", float: "a number of seconds", str: "a name"}


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


def split(options: Mapping[str, Any], model: Callable, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the driver with the command's defaults, and keyword arguments of the model."""
    parameters = inspect.signature(model).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    valid = [*SETTINGS, *(name for name in parameters if name not in SETTINGS)]
    settings: dict[str, Any] = DEFAULTS | ({"num_warmup": SVI_STEPS} if kernel == "SVI" else {})
    keywords: dict[str, Any] = {}
    for key, value in options.items():
        if key in SETTINGS:
            settings[key] = _setting(key, value)
        elif key in parameters or takes_any:
            keywords[key] = value
        else:
            raise ValueError(unknown("option", key, valid))
    return settings, keywords


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _setting(key: str, value: Any) -> Any:
    kind = SETTINGS[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"--option {key}: wanted {WANTED[kind]}, found {value!r}")
    return value
