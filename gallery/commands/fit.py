"""`zoo fit` and `zoo resume`."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr

from gallery._dataset import Dataset
from gallery.commands.inputs import Inputs, read_inputs, start_entries, takes_entries
from gallery.commands.models import in_precision, make_kernel, some
from gallery.commands.request import (
    Request,
    check_picture,
    check_writable,
    is_table,
    load_request,
    save_request,
)
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

# these kernels integrate sites out, so their draws have no pointwise densities
MARGINAL = ("AugmentReduce", "ParticleFilter", "CollapsedGibbs", "CoordinateAscent")
EXIT = {"SIGINT": 130, "SIGTERM": 143}


def fit(args: Any) -> int:
    """Fit a model to data and save the run."""
    request = Request.from_arguments(args)
    check_writable(Path(request.output), "-o", args.force)
    return _run(request, None if args.checkpoint is None else Path(args.checkpoint))


def resume(args: Any) -> int:
    """Continue a fit that was stopped or killed; save a finished one again."""
    folder = Path(args.folder)
    request = load_request(folder)
    output = Path(request.output)
    may_replace = not output.exists() or (
        open_run(output).attrs.get("command") == request.to_json()
    )
    check_writable(output, "-o", force=may_replace)
    return _run(request, folder)


def _run(request: Request, folder: Path | None) -> int:
    from inference import CheckpointError, Driver

    started = perf_counter()
    if request.plot:
        check_picture(Path(request.plot), "--plot")
    inputs = read_inputs(request)
    settings = inputs.options.driver
    driver = Driver(
        make_kernel(inputs.kernel, inputs.entry.model, **inputs.options.kernel),
        **settings,
        checkpoint=folder,
        groups=_groups(inputs),
    )
    start = _initial_values(inputs)
    if folder is not None:
        save_request(request, folder)
    print(_headline(inputs), *_columns(inputs.data, request), sep="\n", flush=True)
    try:
        with in_precision(inputs.kernel, inputs.arguments):
            tree = driver.run(request.seed, init_params=start, **inputs.arguments)
    except CheckpointError as error:
        if error.tree is not None and num_draws(error.tree):
            save(annotate(error.tree, inputs), Path(request.output))
            error.add_note(f"saved {_short(request.output)}")
        raise
    if num_draws(tree):
        tree = annotate(tree, inputs)
        save(tree, Path(request.output))
    return _print_results(tree, request, folder, perf_counter() - started)


def _groups(inputs: Inputs) -> tuple[str, ...]:
    """Pointwise groups, for `zoo compare` and ArviZ's predictive checks; none where too large."""
    lengths = [
        len(value)
        for value in inputs.arguments.values()
        if isinstance(value, np.ndarray) and value.ndim
    ]
    settings = inputs.options.driver
    size = max(lengths, default=0) * settings["num_samples"] * settings["num_chains"]
    if inputs.kernel in MARGINAL or size > 10**8:
        return ()
    return ("log_likelihood", "log_prior", "posterior_predictive")


def _initial_values(inputs: Inputs) -> Mapping[str, Any] | None:
    """Initial values of the chains where a draw from the prior would mix slowly."""
    model, num_chains = inputs.entry.model, inputs.options.driver["num_chains"]
    if inputs.kernel == "ConditionalGibbs" and takes_entries(model):
        return start_entries(model, num_chains, inputs.arguments)
    if inputs.kernel != "LatentHistory":
        return None
    from gallery.archipelago import start
    from zoo.archipelago import process

    parameters = inspect.signature(model).parameters
    given = {
        name: inputs.arguments.get(name, parameters[name].default if name in parameters else None)
        for name in ("x", "y", "num_classes", "capacity")
    }
    of_process = {
        name: value
        for name, value in inputs.arguments.items()
        if name in inspect.signature(process).parameters and name not in given
    }
    return start(num_chains, **given, **of_process)


def _headline(inputs: Inputs) -> str:
    data = inputs.data
    sizes = [f"{len(data.feature_names)} features"] if data.feature_names else []
    sizes += [f"{len(data.class_names)} classes"] if data.class_names else []
    rows = [
        f"{len(data.arrays[name])} {words}"
        for name, words in {"y": "rows", "values": "entries"}.items()
        if name in data.arrays
    ]
    plan = ", ".join(f"{key} {value}" for key, value in inputs.options.driver.items())
    return (
        f"{inputs.entry.name} on {data.name} ({', '.join(rows + sizes)}): {inputs.kernel}, {plan}, "
        f"seed {inputs.request.seed}"
    )


def _columns(data: Dataset, request: Request) -> list[str]:
    """How the user's own table was read, so that a misreading is seen."""
    x, y = data.arrays.get("x"), data.arrays.get("y")
    if not is_table(request.data) or x is None or y is None:
        return []
    names = [(name, data.categories.get(name)) for name in data.feature_names]
    numbers = [name for name, texts in names if not texts]
    found = [f"numbers: {some(numbers, 8)}"] if numbers else []
    categories = [f"{name} ({len(texts)})" for name, texts in names if texts]
    found += [f"texts: {some(categories, 8)}"] if categories else []
    missing = int(np.isnan(x).sum())
    found += [f"{missing} cells empty"] if missing else []
    unlabelled = int((y == -1).sum()) if data.class_names else int(np.isnan(y).sum())
    found += [f"{unlabelled} rows without {data.target_name!r}"] if unlabelled else []
    kind = "the class" if data.class_names else "a quantity"
    return [f"read {'; '.join(found)}; {data.target_name!r} is {kind}"]


def _print_results(tree: xr.DataTree, request: Request, folder: Path | None, seconds: float) -> int:
    """The summary, what was saved, and why the run ended; returns the exit code."""
    ended = str(tree.attrs["ended"])
    is_early = ended not in ("budget", "finished")
    again = f"; go on with: zoo resume {folder}" if folder is not None and is_early else ""
    if not num_draws(tree):
        text = (
            f"ended by {ended} before the first draw, after {tree.attrs['steps']} steps: "
            f"nothing to save{again}"
        )
        if ended not in EXIT:
            raise ValueError(text)
        print(text)
        return EXIT[ended]
    print(summary_text(tree, main_variables(tree), limit=12))
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
    if is_early:
        print(f"ended early by {ended}{again}")
    return EXIT.get(ended, 0)


def _short(path: str) -> str:
    """Relative to the working folder, where the file is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
