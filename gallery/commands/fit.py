"""`zoo fit`, `zoo resume`, `zoo update` and `zoo check`."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr

from gallery._dataset import Dataset
from gallery._saving import unpacked, write_group, write_tree
from gallery.commands.findings import findings
from gallery.commands.held_out import (
    FEWEST,
    held_out_text,
    scored,
    share_to_hold_out,
    split,
    without_held_out,
)
from gallery.commands.inputs import (
    Inputs,
    read_inputs,
    saved_inputs,
    start_entries,
    takes_entries,
)
from gallery.commands.kernels import command_of, in_precision, make_kernel
from gallery.commands.model_file import errors_of, is_file
from gallery.commands.predict import saved_columns
from gallery.commands.reports import trust_text
from gallery.commands.request import (
    FILE,
    Request,
    check_distinct,
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
    open_fit,
    open_run,
    scores_text,
    summary_text,
    waiting,
    with_states,
)
from gallery.commands.wording import counted, some
from gallery.tables import read_csv, read_table

__all__ = ["check", "fit", "resume", "update"]

EXIT = {"SIGINT": 130, "SIGTERM": 143}


def fit(args: Any) -> int:
    """Fit a model to data and save the run."""
    request = Request.from_arguments(args)
    check_writable(Path(request.output), "-o", args.force)
    folder = None if args.checkpoint is None else Path(args.checkpoint)
    return _run(request, folder, args.cluster)


def resume(args: Any) -> int:
    """Continue a fit that was stopped or killed; save a finished one again."""
    from inference import salvage_checkpoint

    folder = Path(args.folder)
    request = load_request(folder)
    for each in _checkpoints(folder) if args.salvage else ():
        print(f"{each}: whole until step {salvage_checkpoint(each).steps}", flush=True)
    output = Path(request.output)
    may_replace = not output.exists() or (
        open_run(output).attrs.get("command") == request.to_json()
    )
    check_writable(output, "-o", force=may_replace)
    return _run(request, folder, args.cluster)


def update(args: Any) -> int:
    """Let a saved run learn the rows of a table beside those that it has learned, and save it."""
    started, output = perf_counter(), Path(args.output or args.run).resolve()
    check_distinct({"the table": args.table, "-o": str(output)})
    check_writable(output, "-o", force=args.force or args.output is None)
    tree = open_fit(args.run)
    kernel, is_own = str(tree.attrs.get("kernel")), is_file(str(tree.attrs.get("model")))
    if is_own or not command_of(kernel).learns_on or "states" not in tree.children:
        of = "a model file" if is_own else kernel
        raise ValueError(
            f"{args.run}: a run of {of} cannot learn more rows from its file; fit again, to a "
            "table of all rows"
        )
    try:
        steps = unpacked(tree["states"].to_dataset())
    except ValueError as error:
        raise ValueError(f"{args.run}: {error}") from error
    before = saved_inputs(tree)
    more = read_csv(
        args.table,
        target=before.data.target_name or "class",
        like=before.data,
        id_column=before.request.id,
    )
    _, scaled, _ = saved_columns(tree, args.run)
    given = {"x": scaled.standardise(more["x"]), "y": more["y"]}
    _refuse_numbers(before.data, given["x"], args.table)
    unlabelled = int((given["y"] == -1).sum())
    without = f", {unlabelled} of them without {more.target_name!r}" if unlabelled else ""
    learned = counted(int(tree.attrs["steps"]), "row")
    print(
        f"{before.entry.name} on {before.data.name}: {learned}, and "
        f"{len(given['y'])} more of {args.table}{without}",
        *_learned_twice(before, more),
        sep="\n",
        flush=True,
    )
    driver = _driver(before, max_time=None)
    with waiting("reading and compiling the model"), in_precision(before.kernel, given):
        driver.restore(tree, steps, **before.arguments)
        driver.update(**before.arguments | given)
        tree = driver.tree()
    arguments = driver.whole_program.arguments
    request = replace(before.request, output=str(output), plot=None)
    data = replace(
        before.data,
        arrays={name: arguments[name] for name in before.data.arrays},
        ids=(*before.data.ids, *more.ids),
    )
    inputs = before._replace(request=request, data=data, features=scaled, arguments=arguments)
    tree = _completed(tree, inputs, driver)
    write_tree(tree, output)
    _print_results(tree, request, None, perf_counter() - started)
    print(*findings(tree), trust_text(tree, _short(request.output)), sep="\n")
    return 0


def _learned_twice(before: Inputs, more: Dataset) -> list[str]:
    """A warning where rows of the same ids were learned already."""
    known = set(before.data.ids) - {""}
    twice = [name for name in dict.fromkeys(more.ids) if name in known]
    if not twice:
        return []
    return [
        f"warning: the run has learned rows with {len(twice)} of these values of "
        f"{before.request.id!r} before ({some(twice, 3)}); a row that is learned twice counts twice"
    ]


def _refuse_numbers(learned: Dataset, x: np.ndarray, path: str) -> None:
    """Refuse other values in columns of 0 and 1, which have a density of their own."""
    others = lambda column: set(column[~np.isnan(column)]) - {0.0, 1.0}
    for name, old, new in zip(learned.feature_names, learned["x"].T, x.T, strict=True):
        if name not in learned.categories and others(new) and not others(old):
            raise ValueError(
                f"{path}: column {name!r} has other values than the two, or the one, that the run "
                "has learned; fit again, to a table of all rows"
            )


def check(args: Any) -> int:
    """Compare all files of a checkpoint with their checksums."""
    from inference import check_checkpoint

    folder = Path(args.folder)
    if (folder / FILE).exists():
        load_request(folder)
        again = f"zoo resume {folder}"
    else:
        again = f"the same script: there is no {FILE} for `zoo resume`"
    for each in _checkpoints(folder):
        commit = check_checkpoint(each)
        ended = f"ended by {commit.ended}" if commit.ended else f"go on with: {again}"
        print(f"{each}: whole; {commit.steps} steps, {commit.records} records; {ended}")
    return 0


def _checkpoints(folder: Path) -> list[Path]:
    """The folder, or those of its chains, where they were tasks of a cluster."""
    from inference.run.store import chain_folders

    return chain_folders(folder) or [folder]


def _run(request: Request, folder: Path | None, cluster: str | None) -> int:
    try:
        return _run_and_save(request, folder, cluster)
    # a second Ctrl-C, or one before and after the run; a cluster that has gone away
    except (KeyboardInterrupt, ConnectionError) as error:
        if folder is not None and (folder / FILE).exists():
            error.add_note(f"go on with: zoo resume {folder}")
        raise


def _run_and_save(request: Request, folder: Path | None, cluster: str | None) -> int:
    from inference import CheckpointError, Interrupted

    started = perf_counter()
    if request.plot:
        check_picture(Path(request.plot), "--plot")
    inputs = read_inputs(request)
    if request.test and split(inputs.data, request.test) is None:
        raise ValueError(
            f"--test {request.test:g}: it leaves fewer than {FEWEST} labelled rows, or entries, to "
            "score, or there is a single class; give a larger share, or 0"
        )
    driver = _driver(inputs, checkpoint=folder, groups=_groups(inputs), cluster=cluster)
    if folder is not None:
        save_request(request, folder)
    print(_headline(inputs), *_columns(inputs.data, request), sep="\n", flush=True)
    try:
        with waiting("reading and compiling the model"):
            tree = _drawn(driver, inputs)
    except Interrupted as error:
        tree = error.tree
    except CheckpointError as error:
        if error.tree is not None and num_draws(error.tree):
            write_tree(annotate(error.tree, inputs), Path(request.output))
            error.add_note(f"saved {_short(request.output)}")
        raise
    if num_draws(tree):
        tree = _completed(tree, inputs, driver)
        write_tree(tree, Path(request.output))
    seconds = perf_counter() - started
    if (code := _print_results(tree, request, folder, seconds)) in EXIT.values():
        return code
    code = _print_score(inputs, seconds, cluster)
    print(*findings(tree), trust_text(tree, _short(request.output)), sep="\n")
    return code


def _driver(inputs: Inputs, **settings: Any) -> Any:
    from inference import Driver, Program

    kernel = make_kernel(inputs.kernel, inputs.entry.model, **inputs.options.kernel)
    if inputs.kernel == "ConditionalGibbs" and inputs.link is not None:
        kernel = inputs.link.kernel(kernel, Program(inputs.entry.model, **inputs.arguments))
    return Driver(kernel, **inputs.options.driver | settings)


def _drawn(driver: Any, inputs: Inputs) -> xr.DataTree:
    start = _initial_values(inputs)
    own_errors = errors_of(inputs.request.model, inputs.arguments)
    with in_precision(inputs.kernel, inputs.arguments), own_errors:
        return driver.run(inputs.request.seed, init_params=start, **inputs.arguments)


def _completed(tree: xr.DataTree, inputs: Inputs, driver: Any) -> xr.DataTree:
    """The tree with all that predictions and later commands need."""
    tree, command = annotate(tree, inputs), command_of(inputs.kernel)
    is_kept = command.predicts_by_states or command.learns_on
    return with_states(tree, driver) if is_kept else tree


def _print_score(inputs: Inputs, seconds: float, cluster: str | None) -> int:
    """Score a second fit on held-out rows, and save the score with the run; the exit code."""
    from inference import Interrupted

    request = inputs.request
    if is_file(request.model):
        return 0
    share, reason = share_to_hold_out(request.test, inputs, seconds)
    if not share:
        print(*([reason] if reason else []), sep="\n", end="\n" if reason else "", flush=True)
        return 0
    parts = split(inputs.data, share)
    assert parts is not None
    again = without_held_out(inputs, parts)
    driver = _driver(again, progress_bar=False, cluster=cluster)
    try:
        with waiting(f"second fit, without {len(parts.rows)} held-out rows"):
            second = _drawn(driver, again)
            if num_draws(second):
                found = scored(_completed(second, again, driver), again, parts)
    except Interrupted as error:
        print(f"no held-out score: its fit was ended by {error.signal}")
        return EXIT[error.signal]
    except ValueError as error:  # the run itself is saved; not every model can predict
        if request.test:
            error.add_note(f"saved {_short(request.output)}")
            raise
        print(f"no held-out score: {error}")
        return 0
    if not num_draws(second):
        print(f"no held-out score: its fit was ended by {second.attrs['ended']} before it had one")
        return 0
    write_group(found, "held_out", Path(request.output))
    print(held_out_text({inputs.entry.name: found}), flush=True)
    return 0


def _groups(inputs: Inputs) -> tuple[str, ...]:
    """Pointwise groups, for `zoo compare` and ArviZ's predictive checks; none where too large."""
    lengths = [
        len(value)
        for value in inputs.arguments.values()
        if isinstance(value, np.ndarray) and value.ndim
    ]
    settings = inputs.options.driver
    size = max(lengths, default=0) * settings["num_samples"] * settings["num_chains"]
    if command_of(inputs.kernel).is_marginal or size > 10**8:
        return ()
    return ("log_likelihood", "log_prior", "posterior_predictive")


def _initial_values(inputs: Inputs) -> Mapping[str, Any] | None:
    """Initial values of the chains where a draw from the prior would mix slowly."""
    model, num_chains = inputs.entry.model, inputs.options.driver["num_chains"]
    if inputs.kernel == "ConditionalGibbs" and takes_entries(model):
        return start_entries(model, num_chains, inputs.arguments, inputs.link)
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
    sizes = [counted(len(data.feature_names), "feature")] if data.feature_names else []
    sizes += [counted(len(data.class_names), "class", "classes")] if data.class_names else []
    words = ("entry", "entries") if "values" in data.arrays else ("row", "rows")
    arrays = [data.arrays[name] for name in ("y", "values") if name in data.arrays]
    rows = [counted(len(array), *words) for array in (arrays or list(data.arrays.values()))[:1]]
    plan = ", ".join(f"{key} {value}" for key, value in inputs.options.driver.items())
    return (
        f"{inputs.entry.name} on {data.name} ({', '.join(rows + sizes)}): {inputs.kernel}, {plan}, "
        f"seed {inputs.request.seed}"
    )


def _columns(data: Dataset, request: Request) -> list[str]:
    """How the user's own table was read, so that a misreading is seen."""
    if is_file(request.model):
        return (
            [f"read {'; '.join([data.description, *data.notes])}"] if is_table(request.data) else []
        )
    x, y = data.arrays.get("x"), data.arrays.get("y")
    if not is_table(request.data) or x is None or y is None:
        return []
    made = {f"{name}={text}" for name, texts in data.dummies.items() for text in texts}
    names = [(name, data.categories.get(name)) for name in data.feature_names if name not in made]
    numbers = [name for name, texts in names if not texts and name not in data.dates]
    found = [f"numbers: {some(numbers, 8)}"] if numbers else []
    found += [f"dates, as days: {some(list(data.dates), 8)}"] if data.dates else []
    categories = [f"{name} ({len(texts)})" for name, texts in names if texts]
    found += [f"texts: {some(categories, 8)}"] if categories else []
    dummies = [f"{name} ({len(texts)})" for name, texts in data.dummies.items()]
    found += [f"texts, each a column of 0 and 1: {some(dummies, 8)}"] if dummies else []
    # an empty cell of a text column is missing in all columns that have taken its place
    once = made - {f"{name}={texts[-1]}" for name, texts in data.dummies.items()}
    places = [name not in once for name in data.feature_names]
    missing = int(np.isnan(x[:, places]).sum())
    found += [f"{counted(missing, 'cell')} empty"] if missing else []
    unlabelled = int((y == -1).sum()) if data.class_names else int(np.isnan(y).sum())
    found += [f"{counted(unlabelled, 'row')} without {data.target_name!r}"] if unlabelled else []
    kind = "the class" if data.class_names else "a quantity"
    notes = "".join(f"; {note}" for note in data.notes)
    return [
        f"read {'; '.join(found)}; {data.target_name!r} is {kind}{_why_target(request)}{notes}",
        *_ids(data),
    ]


def _why_target(request: Request) -> str:
    """What a person may not have meant: the last column is left out, and another is the target."""
    left_out = (*request.drop, request.id)
    if request.target or not any(left_out):
        return ""
    if (last := read_table(request.data).header[-1]) not in left_out:
        return ""
    return f", because the last column, {last!r}, is left out; --target names another"


def _ids(data: Dataset) -> list[str]:
    """A warning for each column that tells nearly every row from all others, as an id does.

    Half as many texts as rows are enough, for each is a category of its own.
    """
    found = [_id(name, len(texts), len(data["x"]), 0.5) for name, texts in data.dummies.items()]
    made = {f"{name}={text}" for name, texts in data.dummies.items() for text in texts}
    for name, values in zip(data.feature_names, data["x"].T, strict=True):
        present = values[~np.isnan(values)]
        is_whole = name in data.categories or name in data.dates or (present % 1 == 0).all()
        if is_whole and name not in made:
            share = 0.5 if name in data.categories else 0.9
            found.append(_id(name, len(np.unique(present)), len(present), share))
    return [warning for warning in found if warning]


def _id(name: str, distinct: int, rows: int, share: float) -> str:
    if rows < 20 or distinct < share * rows:
        return ""
    return (
        f"warning: {name!r} has {distinct} distinct values in {rows} rows, as an id has; leave it "
        f"out by --drop {name}, or keep it beside predictions by --id {name}"
    )


def _print_results(tree: xr.DataTree, request: Request, folder: Path | None, seconds: float) -> int:
    """The summary, what was saved, and why the run ended; returns the exit code."""
    ended = str(tree.attrs["ended"])
    is_early = ended not in ("budget", "finished")
    again = "; only a fit with --checkpoint FOLDER can go on" if is_early else ""
    if is_early and folder is not None:
        again = f"; go on with: zoo resume {folder}"
    if not num_draws(tree):
        before = "its end" if "unfinished" in tree.children else "the first draw"
        text = (
            f"ended by {ended} before {before}, after {tree.attrs['steps']} steps: "
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
        f"saved {_short(request.output)}{picture}: "
        f"{counted(chains, 'chain')} of {counted(draws, 'draw')}, "
        f"{counted(int(tree.attrs['steps_run']), 'step')} in {seconds:.1f} s"
    )
    if is_early:
        print(f"ended early by {ended}{again}")
    return EXIT.get(ended, 0)


def _short(path: str) -> str:
    """Relative to the working folder, where the file is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
