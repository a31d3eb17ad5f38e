"""`zoo list`, `zoo show`, `zoo data`: the models and the data sets."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import zoo
from gallery.commands.models import find_model, some
from gallery.commands.request import check_writable

__all__ = ["data", "list_models", "show"]

WIDTH = 100


def list_models(args: Any) -> int:
    """Print a line for each model."""
    rows = []
    for name in zoo.names():
        try:
            card = find_model(name).card
        # a file that is being written must not hide other models
        except Exception as error:
            rows.append((name, f"cannot be read: {type(error).__name__}: {error}"))
            continue
        rows.append((name, card.title, ", ".join(card.kernels)))
    _print_columns(rows)
    return 0


def show(args: Any) -> int:
    """Print a model's card, and its sites with their priors as a trace shows them."""
    from gallery.commands.priors import site_lines

    entry = find_model(args.model)
    card = entry.card
    print(f"{entry.name}: {card.title}")
    _print_wrapped(card.paper + (f", doi {card.doi}" if card.doi else ""))
    print("\nSites")
    for line, words in site_lines(entry):
        print(f"  {line}")
        if words:
            _print_wrapped(words, "      ")
    for title, items in (("Data sets", card.data), ("Kernels", card.kernels)):
        if items:
            print(f"\n{title}: {', '.join(items)}")
    if card.edits:
        print(
            f"\nEdits to try, in zoo/{entry.name}.py or as arguments in Python; numbers and names "
            "of functions by --option as well"
        )
        for edit in card.edits:
            _print_wrapped(edit, "    ", "  - ")
    return 0


def data(args: Any) -> int:
    """Print a line for each data set, or all about one, which `-o` writes to a file."""
    from gallery.datasets import describe, load, names
    from gallery.tables import write_csv

    if args.name is None:
        if args.output is not None:
            raise ValueError(f"-o {args.output}: say which data set")
        _print_columns(
            [(name, describe(name).title, describe(name).where.split()[0]) for name in names()]
        )
        print(
            "\nOptions of those that are generated: gallery.datasets.load(name, ...). Your own: "
            "zoo fit MODEL --data table.csv"
        )
        return 0
    if args.output is not None:
        check_writable(Path(args.output), "-o", args.force)
    summary, found = describe(args.name), load(args.name)  # before the first line: it may fail
    if args.output is not None:
        write_csv(found, args.output)
        print(f"saved {args.output}: {len(found.x)} rows")
        return 0
    print(f"{summary.name}: {summary.title}")
    for title, words in (
        ("From", summary.where),
        ("Licence", summary.licence),
        ("Cite", summary.citation),
    ):
        if words:
            _print_wrapped(words, "  ", f"{title}: ")
    _print_wrapped(found.description)
    print("\nArrays")
    _print_columns(
        [
            (f"  {name}", str(list(array.shape)), str(array.dtype))
            for name, array in found.arrays.items()
        ]
    )
    for title, items in (("Features", found.feature_names), ("Classes", found.class_names)):
        if items:
            _print_wrapped(some(items), "  ", f"{title}: ")
    return 0


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    most = max(map(len, rows))
    widths = [
        max(len(row[column]) for row in rows if len(row) == most or not column)
        for column in range(most)
    ]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        )


def _print_wrapped(text: str, indent: str = "", first: str | None = None) -> None:
    for line in wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent
    ):
        print(line)
