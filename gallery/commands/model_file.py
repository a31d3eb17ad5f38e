"""A model of one's own: a function in a Python file, named `mymodel.py:model`.

The file is run as it stands now, not as Python has kept it, so that an edit is seen at once. It
imports files beside it, as a script does.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import zoo
from gallery.commands.wording import unknown

__all__ = [
    "MATRIX",
    "RESPONSE",
    "check_unchanged",
    "errors_of",
    "is_file",
    "load",
    "resolved",
    "short",
    "source_hash",
    "stem",
]

MATRIX, RESPONSE = ("x", "X"), ("y", "Y")  # arguments for all features, and for the target


class _FileCard(zoo.Card):
    """What a file without a `CARD` says of its model: a title, and no words for the sites."""

    def __post_init__(self) -> None:
        pass


def is_file(name: str) -> bool:
    """Return whether the name of a model is that of a file."""
    return name.endswith(".py") or ".py:" in name


def resolved(name: str) -> str:
    """Return the name with the whole path of its file."""
    path, function = _parts(name)
    return f"{path}:{function}"


def short(name: str) -> str:
    """Return the name without the folder of its file."""
    path, function = _parts(name)
    return f"{path.name}:{function}"


def stem(name: str) -> str:
    """Return what the file of a run is called after its model."""
    path, function = _parts(name)
    return f"{path.stem}-{function}"


def _parts(name: str) -> tuple[Path, str]:
    path, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    return Path(path).expanduser().resolve(), function


def _source(path: Path) -> str:
    if not path.is_file():
        raise ValueError(
            f"model file {path}: no such file; wanted a Python file with a model in it, as in "
            "mymodel.py:model"
        )
    return path.read_text(encoding="utf-8")


def source_hash(name: str) -> str:
    """Return the hash of the model's file."""
    return hashlib.sha256(_source(_parts(name)[0]).encode()).hexdigest()


def check_unchanged(attrs: Mapping[Any, Any]) -> None:
    """Refuse a run of a model file that has gone, or that is another one than at the fit.

    Files that the model's file imports are not looked at.

    Args:
        attrs: of the run.
    """
    name = str(attrs.get("model"))
    if "source" in attrs and source_hash(name) != attrs["source"]:
        raise ValueError(
            f"model file {_parts(name)[0]}: it has changed since the run, whose draws belong to "
            "the former model; fit again, or undo the change"
        )


def load(name: str) -> zoo.Entry:
    """Run a model's file and return the model, `CARD` and `simulate` of the file where it has them.

    Without `simulate`, simple arguments stand in for data: `x` a matrix of four rows, names in
    upper case and those that begin with `num_` the number four, others four ones.

    Args:
        name: `FILE.py:FUNCTION`.
    """
    path, function = _parts(name)
    module = _module(path, _source(path))
    models = {
        each: value
        for each, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == str(path) and not each.startswith("_")
    }
    if not function:
        first = next(iter(models), "model")
        raise ValueError(
            f"model file {path.name}: found no name of a function behind it, wanted one of "
            f"{', '.join(models) or 'its functions, of which it has none'}; for example "
            f"{path.name}:{first}"
        )
    if not hasattr(module, function):
        raise ValueError(f"model file {path.name}: {unknown('function', function, models)}")
    model = getattr(module, function)
    if not callable(model) or inspect.isclass(model):
        raise ValueError(
            f"model {short(name)}: found {type(model).__name__}, wanted a function of NumPyro "
            f"primitives; there are {', '.join(models) or 'none'}"
        )
    words = inspect.getdoc(model) or ""
    card = getattr(module, "CARD", None)
    if not isinstance(card, zoo.Card):
        title = next(iter(words.splitlines()), "") or "a model without a docstring"
        card = _FileCard(title=title, paper=str(path), sites={})
    simulate = getattr(module, "simulate", None) or _stand_ins(model)
    return zoo.Entry(short(name), model, simulate, card)


@lru_cache(maxsize=16)
def _module(path: Path, source: str) -> ModuleType:
    """The module of a file, run from its text: Python's own cache may be older than an edit."""
    module = ModuleType(str(path))
    module.__file__ = str(path)
    sys.modules[str(path)] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except SyntaxError as error:
        raise ValueError(
            f"model file {path.name}, line {error.lineno}: {error.msg}; correct it"
        ) from error
    except Exception as error:
        raise ValueError(
            f"model file {path.name}{_line_in(path, error)}: running the file raised "
            f"{_first_line(error)}; correct it"
        ) from error
    return module


def _stand_ins(model: Callable) -> Callable[..., dict[str, Any]]:
    """A simulator for want of a better one."""

    def simulate(rng_key: Any) -> dict[str, Any]:
        import jax

        def stand_in(name: str) -> Any:
            if name in MATRIX:
                return jax.random.normal(rng_key, (4, 2))
            is_count = (name.isupper() and name not in RESPONSE) or name.startswith("num_")
            return 4 if is_count else np.ones(4, int)

        return {
            p.name: stand_in(p.name)
            for p in inspect.signature(model).parameters.values()
            if (p.default is p.empty or (p.name in RESPONSE and p.default is None))
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }

    return simulate


@contextmanager
def errors_of(name: str, arguments: Mapping[str, Any], advice: str = "") -> Generator[None]:
    """Errors that a model file raises become one sentence, with its line and its arguments.

    Args:
        name: of the model; errors of models of the zoo stay as they are.
        arguments: what it is called with.
        advice: what to try.
    """
    try:
        yield
    except Exception as error:
        from inference import StructureError

        is_said = isinstance(error, StructureError) or not is_file(name)
        if is_said or not (line := _line_in(_parts(name)[0], error)):
            raise
        given = ", ".join(map(_described, arguments, arguments.values()))
        raise ValueError(
            f"model {short(name)}{line}: {_first_line(error)}; it was called with "
            f"{given or 'no arguments'}. {advice or 'Change the model, or its arguments.'}"
        ) from error


def _line_in(path: Path, error: Exception) -> str:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return f", line {lines[-1]}" if lines else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


def _described(name: str, value: Any) -> str:
    is_array = hasattr(value, "shape") and value.shape
    return f"{name} {list(value.shape)}" if is_array else f"{name}={value!r}"
