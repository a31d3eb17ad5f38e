"""`zoo fit` and `zoo resume`."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr

import zoo
from gallery._dataset import Dataset
from gallery.commands import options
from gallery.commands.entries import entry_start, entry_unit, takes_entries
from gallery.commands.inputs import bind, read_data, scale_features
from gallery.commands.models import find_model, in_precision, kernel_name, make_kernel, some
from gallery.commands.request import Request, check_picture, check_writable, is_table, keep, recall
from gallery.commands.runs import (
    annotate,
    main_variables,
    num_draws,
    open_run,
    save,
    scores_text,
    summary_text,
)

__all__ = ["fit", "resume"]

# for `zoo compare` and ArviZ's predictive checks
GROUPS = ("log_likelihood", "log_prior", "posterior_predictive")
MOST = 10**8  # numbers in a group
# what these groups need is integrated out, or large
MARGINAL = ("AugmentReduce", "ParticleFilter", "CollapsedGibbs", "CoordinateAscent")
ROWS = 12  # of the summary
EXIT = {"SIGINT": 130, "SIGTERM": 143}


def fit(args: Any) -> int:
    """Fit a model to data, save the run."""
    request = Request.of(args)
    check_writable(Path(request.output), "-o", args.force)
    return _run(request, None if args.checkpoint is None else Path(args.checkpoint))


def resume(args: Any) -> int:
    """Go on with a fit that was stopped or killed; a finished one is saved again."""
    folder = Path(args.folder)
    request = recall(folder)
    output = Path(request.output)
    check_writable(output, "-o", force=not output.exists() or _is_of(output, request))
    return _run(request, folder)


def _is_of(path: Path, request: Request) -> bool:
    """Whether a file is what this very request has saved before."""
    return open_run(path).attrs.get("command") == request.to_json()


def _run(request: Request, folder: Path | None) -> int:
    from inference import CheckpointError, Driver

    started = perf_counter()
    entry = find_model(request.model)
    kernel = kernel_name(entry, request.kernel)
    told = options.split(options.parse(request.options), entry.model, kernel)
    if request.plot:
        check_picture(Path(request.plot), "--plot")
    data = read_data(request, entry.model)
    scaling = scale_features(data, request.raw)
    arguments = bind(entry.model, entry.name, data, scaling, told.model)
    unit = entry_unit(entry.model, arguments, request.raw)
    arguments |= {} if unit is None else {"value": (arguments["value"] - unit.shift) / unit.scale}
    start = _start_of(kernel, entry.model, told.driver["num_chains"], arguments)
    groups = () if kernel in MARGINAL or _size(arguments, told.driver) > MOST else GROUPS
    driver = Driver(
        make_kernel(kernel, entry.model, **told.kernel),
        **told.driver,
        checkpoint=folder,
        groups=groups,
    )
    if folder is not None:
        keep(request, folder)
    print(
        _headline(entry, data, kernel, told.driver, request.seed),
        *_columns(data, request),
        sep="\n",
        flush=True,
    )
    try:
        with in_precision(kernel, arguments):
            tree = driver.run(request.seed, init_params=start, **arguments)
    except CheckpointError as error:
        if error.tree is not None and num_draws(error.tree):
            save(
                annotate(error.tree, request, data, scaling, arguments, unit), Path(request.output)
            )
            error.add_note(f"saved {_short(request.output)}")
        raise
    if num_draws(tree):
        tree = annotate(tree, request, data, scaling, arguments, unit)
        save(tree, Path(request.output))
    return _tell(tree, request, folder, perf_counter() - started)


def _start_of(
    kernel: str, model: Callable, num_chains: int, arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Where the chains start, where a draw from the prior would be a bad place."""
    if kernel == "ConditionalGibbs" and takes_entries(model):
        return entry_start(model, num_chains, dict(arguments))
    if kernel != "LatentHistory":
        return None
    from gallery.archipelago import start
    from zoo.archipelago import process

    defaults = {name: each.default for name, each in inspect.signature(model).parameters.items()}
    given = {
        name: arguments.get(name, defaults.get(name))
        for name in ("x", "y", "num_classes", "capacity")
    }
    of_process = {
        name: value
        for name, value in arguments.items()
        if name in inspect.signature(process).parameters and name not in given
    }
    return start(num_chains, **given, **of_process)


def _size(arguments: dict[str, Any], settings: dict[str, Any]) -> int:
    """Observations at all draws."""
    rows = max(
        (
            len(value)
            for value in arguments.values()
            if isinstance(value, np.ndarray) and value.ndim
        ),
        default=0,
    )
    return rows * settings["num_samples"] * settings["num_chains"]


def _headline(
    entry: zoo.Entry, data: Dataset, kernel: str, settings: dict[str, Any], seed: int
) -> str:
    sizes = [f"{len(data.feature_names)} features"] if data.feature_names else []
    sizes += [f"{len(data.class_names)} classes"] if data.class_names else []
    rows = [
        f"{len(data.arrays[name])} {words}"
        for name, words in {"y": "rows", "values": "entries"}.items()
        if name in data.arrays
    ]
    plan = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"{entry.name} on {data.name} ({', '.join(rows + sizes)}): {kernel}, {plan}, seed {seed}"


def _columns(data: Dataset, request: Request) -> list[str]:
    """How a table of one's own was read: what may have been meant otherwise."""
    x, y = data.arrays.get("x"), data.arrays.get("y")
    if not is_table(request.data) or x is None or y is None:
        return []
    names = [(name, data.categories.get(name)) for name in data.feature_names]
    numbers = [name for name, texts in names if not texts]
    found = [f"numbers: {some(numbers, 8)}"] if numbers else []
    categories = [f"{name} ({len(texts)})" for name, texts in names if texts]
    found += [f"texts: {some(categories, 8)}"] if categories else []
    missing, unlabelled = (
        int(np.isnan(x).sum()),
        int((y == -1).sum()) if data.class_names else int(np.isnan(y).sum()),
    )
    found += [f"{missing} cells empty"] if missing else []
    found += [f"{unlabelled} rows without {data.target_name!r}"] if unlabelled else []
    return [
        f"read {'; '.join(found)}; {data.target_name!r} is "
        + ("the class" if data.class_names else "a quantity")
    ]


def _tell(tree: xr.DataTree, request: Request, folder: Path | None, seconds: float) -> int:
    """The summary, what was saved, why it ended; the exit code."""
    ended = str(tree.attrs["ended"])
    again = (
        f"; go on with: zoo resume {folder}"
        if folder is not None and ended not in ("budget", "finished")
        else ""
    )
    if not num_draws(tree):
        text = (
            f"ended by {ended} before the first draw, after {tree.attrs['steps']} steps: "
            f"nothing to save{again}"
        )
        if ended not in EXIT:
            raise ValueError(text)
        print(text)
        return EXIT[ended]
    print(summary_text(tree, main_variables(tree), limit=ROWS))
    if scores := scores_text(tree):
        print(scores)
    if request.plot:
        from gallery.commands.pictures import draw

        draw(tree, Path(request.plot))
    chains, draws = tree["posterior"].sizes["chain"], tree["posterior"].sizes["draw"]
    picture = f" and {_short(request.plot)}" if request.plot else ""
    print(
        f"saved {_short(request.output)}{picture}: {chains} chains of {draws} draws, "
        f"{tree.attrs['steps_run']} steps in {seconds:.1f} s"
    )
    if ended not in ("budget", "finished"):
        print(f"ended early by {ended}{again}")
    return EXIT.get(ended, 0)


def _short(path: str) -> str:
    """Relative to the working folder, where the file is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
