"""`zoo list`, `zoo show`, `zoo data`, `zoo fit MODEL --help`: models, their options, data sets."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import zoo
from gallery.commands.kernels import kernel_options
from gallery.commands.model_file import errors_of, is_file
from gallery.commands.models import (
    DRIVER_OPTIONS,
    SCALARS,
    driver_defaults,
    find_model,
    kernel_name,
    parse,
    scalar_kinds,
)
from gallery.commands.request import Request, check_writable
from gallery.commands.wording import counted, some

__all__ = ["data", "list_models", "options_text", "show"]

WIDTH = 100
BY_DATA = ("num_classes", "component")  # what the data say unless a person does


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
    """Print a model's card, and its sites with the priors of a fit by default."""
    entry = find_model(args.model)
    card, lines = entry.card, _sites(entry, args)
    print(f"{entry.name}: {card.title}")
    _print_wrapped(card.paper + (f", doi {card.doi}" if card.doi else ""))
    print("\nSites")
    for line, words in lines:
        print(f"  {line}")
        if words:
            _print_wrapped(words, "      ")
    for title, items in (("Data sets", card.data), ("Kernels", card.kernels)):
        if items:
            print(f"\n{title}: {', '.join(items)}")
    if is_file(args.model):
        print()
        _print_wrapped(f"Arguments: {inspect.signature(entry.model)}")
    if card.edits:
        print(
            f"\nEdits to try, in zoo/{entry.name}.py or as arguments in Python; numbers and names "
            "of functions by --option as well"
        )
        for edit in card.edits:
            _print_wrapped(edit, "    ", "  - ")
    return 0


def _sites(entry: zoo.Entry, args: Any) -> list[tuple[str, str]]:
    """Lines for the sites, on the data that were asked for, or on simulated ones."""
    import jax

    from gallery.commands.inputs import read_inputs
    from gallery.commands.priors import site_lines

    if args.data is None:
        with jax.enable_x64(True):  # some models refuse float32
            arguments = _data_of(entry.model, entry.simulate(jax.random.key(0)))
        arguments |= parse(args.option)
    else:
        options = tuple(args.option)
        request = Request(args.model, args.data, None, None, options, 0, False, "", None)
        arguments = read_inputs(request).arguments
    advice = f"Give what suits it: zoo show {args.model} --data t.csv, and numbers by --option."
    with errors_of(args.model, arguments, advice):
        return site_lines(entry, arguments)


def _data_of(model: Callable, simulated: Mapping[str, Any]) -> dict[str, Any]:
    """The simulated arguments that a fit takes from its data.

    A simulator may choose priors of its own, where those of the model are too wide to draw from.
    Arguments for which the model has a default are left out, so that the fit's priors are shown.
    """
    parameters = inspect.signature(model).parameters
    default = lambda name: parameters[name].default if name in parameters else None
    return {
        name: value
        for name, value in simulated.items()
        if name in BY_DATA or default(name) in (inspect.Parameter.empty, None)
    }


def options_text(model: str, kernel: str | None) -> str:
    """Return what `--option` takes for a model and a kernel: names, types and defaults.

    Args:
        model: its name.
        kernel: its name; None: the first that the model's card names.
    """
    from inference import Driver

    entry = find_model(model)
    kernel = kernel_name(entry, kernel)
    of_driver = {
        name: p.default
        for name, p in inspect.signature(Driver).parameters.items()
        if name in DRIVER_OPTIONS
    } | driver_defaults(kernel)
    parts = {
        f"of the model {model}": _model_options(entry.model),
        f"of the kernel {kernel}; those of {model} are {', '.join(entry.card.kernels)}": [
            (name, type(value).__name__, _text(value))
            for name, value in kernel_options(kernel).items()
        ],
        "of the driver": [
            (name, kind.__name__, _text(of_driver[name])) for name, kind in DRIVER_OPTIONS.items()
        ],
    }
    lines = []
    for title, rows in parts.items():
        lines += ["", f"--option KEY=VALUE, {title}:"]
        lines += _columns(
            [("  KEY", "type", "default"), *((f"  {key}", *row) for key, *row in rows)]
        )
    return "\n".join(lines)


def _model_options(model: Callable) -> list[tuple[str, str, str]]:
    """The arguments that are numbers, texts, true or false, distributions or functions."""
    from gallery.commands.inputs import functions_for

    found = []
    for name, p in inspect.signature(model).parameters.items():
        kinds = scalar_kinds(p)
        default = "from the data" if name in BY_DATA else _text(p.default)
        if isinstance(p.default, SCALARS):
            found.append((name, type(p.default).__name__, default))
        elif inspect.isfunction(p.default):
            names = ", ".join(functions_for(p, model))
            found.append((name, "function", f"{default}; there are {names}"))
        elif kinds:
            found.append((name, kinds[0].__name__, default))
        elif p.default not in (p.empty, None):  # a distribution, in whose place a number may stand
            found.append((name, "float", f"drawn from a {type(p.default).__name__}"))
        elif p.kind is p.VAR_KEYWORD:
            found.append(("...", "", "others, which the model passes on"))
    return found


def _text(default: Any) -> str:
    if inspect.isfunction(default):
        return default.__name__
    return "none" if default is None or default is inspect.Parameter.empty else str(default)


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
        print(f"saved {args.output}: {counted(len(found.x), 'row')}")
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


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    most = max(map(len, rows))
    widths = [
        max(len(row[column]) for row in rows if len(row) == most or not column)
        for column in range(most)
    ]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    print(*_columns(rows), sep="\n")


def _print_wrapped(text: str, indent: str = "", first: str | None = None) -> None:
    for line in wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent
    ):
        print(line)
