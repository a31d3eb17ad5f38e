"""The zoo: one file a paper, found by its name.

    zoo.names()                      names of the models, nothing is imported
    entry = zoo.load("batting")      entry.model, entry.simulate, entry.card

A file `zoo/batting.py` defines `CARD`, the model `batting` (the function is named as its file) and
`simulate(rng_key, ...)`, which returns the model's keyword arguments with data drawn from the
model.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from zoo.card import Card

__all__ = ["Card", "Entry", "load", "names"]


class Entry(NamedTuple):
    """A model with all that belongs to it."""

    name: str
    model: Callable[..., Any]
    simulate: Callable[..., dict[str, Any]]
    card: Card

    @classmethod
    def of(cls, module: ModuleType) -> "Entry":
        """The entry that a model's module defines."""
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
    """Every model, found by its file; nothing is imported."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if name != "card" and not name.startswith("_")))


def load(name: str) -> Entry:
    """A model by name, imported now."""
    if name not in names():
        close = difflib.get_close_matches(name, names())
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"no model {name!r}; {hint}there are {', '.join(names()) or 'none yet'}.")
    return Entry.of(importlib.import_module(f"zoo.{name}"))
