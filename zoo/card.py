"""The card of a model: its paper and the meaning of its sites, in words.

A card never states a prior. Priors are read off a trace, so they stay correct when a model is
edited.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Card"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The description of a model.

    Args:
        title: what the model is, in one line.
        paper: authors, year, title, venue.
        sites: the meaning of each latent and observed site.
        doi: the bare DOI, without an address in front.
        bibtex: the whole BibTeX entry.
        data: names of data sets that the model is meant for, the main one first.
        kernels: names of kernels that fit it, the default first.
        edits: changes worth trying, and their effects.
    """

    title: str
    paper: str
    sites: Mapping[str, str]
    doi: str = ""
    bibtex: str = ""
    data: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("NUTS",)
    edits: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("title", "paper", "doi", "bibtex"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(
                    f"Card {name}: found {type(getattr(self, name)).__name__}, wanted a text."
                )
        for name in ("title", "paper"):
            if not getattr(self, name).strip():
                raise ValueError(f"Card {name}: it is empty; every model has one.")
        if not isinstance(self.sites, Mapping) or not self.sites:
            raise ValueError(
                "Card sites: none; wanted {site: what it means}, a line for each site of the model."
            )
        empty = [name for name, words in self.sites.items() if not str(words).strip()]
        if empty:
            raise ValueError(f"Card sites: no words for {', '.join(map(repr, empty))}.")
        for name in ("data", "kernels", "edits"):
            _check_texts(name, getattr(self, name))
        if not self.kernels:
            raise ValueError(
                "Card kernels: none; name at least the one that fits the model by default."
            )
        if self.doi.startswith(("http", "doi:")):
            raise ValueError(f"Card doi: found {self.doi!r}, wanted the bare DOI, 10.…/….")


def _check_texts(name: str, value: object) -> None:
    """Refuse a single text, which would be iterated letter by letter."""
    if not isinstance(value, tuple) or not all(
        isinstance(item, str) and item.strip() for item in value
    ):
        raise TypeError(
            f"Card {name}: found {value!r}, wanted a tuple of texts; one text is (text,)."
        )
