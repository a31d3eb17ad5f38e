"""The zoo of models: one file for each paper, found by its name.

    zoo.names()                      names of the models; imports nothing
    entry = zoo.load("batting")      entry.model, entry.simulate, entry.card

A file `zoo/batting.py` defines `CARD`, the model `batting`, a function with the name of its file,
and `simulate(rng_key, ...)`. The latter returns keyword arguments of the model, with data that are
drawn from the model; where features may be missing, it has the argument `missing`, the share of
them that are NaN. Another package adds such a module by an entry point:

    [project.entry-points."zoo.models"]
    batting = "their_package.batting"
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NamedTuple

from zoo.card import Card

__all__ = ["Card", "Entry", "load", "names"]


class Entry(NamedTuple):
    """A model with its simulator and its card."""

    name: str
    model: Callable[..., Any]
    simulate: Callable[..., dict[str, Any]]
    card: Card

    @property
    def takes_missing(self) -> bool:
        """Whether the features of the model may be missing."""
        return "missing" in inspect.signature(self.simulate).parameters

    @classmethod
    def of(cls, module: ModuleType) -> "Entry":
        """Return the entry that a model's module defines."""
        name = module.__name__.rpartition(".")[2]
        missing = [needed for needed in ("CARD", name, "simulate") if not hasattr(module, needed)]
        if missing:
            raise ValueError(
                f"{module.__name__} defines no {', '.join(missing)}; a model's module defines "
                f"CARD, the model {name} and simulate."
            )
        if not isinstance(module.CARD, Card):
            raise ValueError(
                f"{module.__name__}.CARD: found {type(module.CARD).__name__}, wanted zoo.Card."
            )
        return cls(name, getattr(module, name), module.simulate, module.CARD)


def names() -> tuple[str, ...]:
    """Return the names of all models, by their files and entry points; imports nothing."""
    return tuple(sorted({*_files(), *_entry_points()}))


def _files() -> set[str]:
    found = {module.name for module in pkgutil.iter_modules(__path__)} - {"card"}
    return {name for name in found if not name.startswith("_")}


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="zoo.models")}


def load(name: str) -> Entry:
    """Import a model.

    Args:
        name: one of `names()`.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names())
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"no model {name!r}; {hint}there are {', '.join(names()) or 'none yet'}.")
    is_file = name in _files()  # it comes before an entry point of its name
    module = importlib.import_module(f"zoo.{name}") if is_file else _entry_points()[name].load()
    return Entry.of(module)
