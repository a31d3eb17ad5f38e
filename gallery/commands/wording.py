"""Lists of names, and errors that name the closest of them."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["counted", "some", "unknown"]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return "1 row", "2 rows"; the plural is given where it does not end in s alone."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def some(items: Sequence[str], most: int = 40) -> str:
    """Return the first names, and how many more there are."""
    more = f", ... {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name: close matches, then all known names."""
    known = list(known)
    plain = lambda text: text.replace("_", "")
    begun = [each for each in known if plain(each).startswith(plain(name))]
    close = list(dict.fromkeys([*difflib.get_close_matches(name, known), *begun[:3]]))
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return (
        f"no {what} {name!r}; {hint}there {'is' if len(known) == 1 else 'are'} "
        f"{', '.join(known) or 'none'}"
    )
