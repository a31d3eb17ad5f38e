"""`zoo plot`, and the picture of `zoo fit --plot`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from gallery.commands.model_pictures import is_history, plot_history, plot_matrix
from gallery.commands.request import check_picture
from gallery.commands.runs import main_variables, open_run, select

__all__ = ["draw", "plot"]

# kind -> scalars that one picture holds, and inches for each
ROWS = {"trace_dist": (8, 1.35), "dist": (12, 0.6), "forest": (30, 0.32), "rank": (12, 0.6)}


def plot(args: Any) -> int:
    """Save a picture of a saved run."""
    path = Path(args.output or Path(args.run).with_suffix(".png"))
    check_picture(path, "-o")
    tree = open_run(args.run)
    draw(tree, path, args.kind, select(tree, args.var_names))
    print(f"saved {path}")
    return 0


def draw(
    tree: xr.DataTree, path: Path, kind: str | None = None, names: list[str] | None = None
) -> None:
    """Draw a picture of a run into a file.

    Args:
        tree: a run.
        path: the file; its ending is the format.
        kind: None: the first of elbo, evidence, partition, matrix, history that the run has, else
            trace_dist.
        names: variables; None: the main ones.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else xr.Dataset()
    # kind -> whether the run has it, and the function that draws it
    own: dict[str, tuple[bool, Callable[[], tuple[Any, str]]]] = {
        "elbo": ("elbo" in stats, lambda: _elbo(tree)),
        "evidence": ("insertion_rank" in stats, lambda: _evidence(tree)),
        "partition": ("partition" in tree.attrs, lambda: _partition(tree)),
        "matrix": ("entries" in tree.attrs, lambda: plot_matrix(tree)),
        "history": (is_history(tree), lambda: plot_history(tree)),
    }
    kind = kind or next((name for name, (is_there, _) in own.items() if is_there), "trace_dist")
    if kind in ("matrix", "history") and not own[kind][0]:
        raise ValueError(
            f"--kind {kind}: {tree.attrs.get('model', 'the model')} has none. Choose another kind"
        )
    wanted = {"energy": "energy", "elbo": "elbo", "evidence": "insertion_rank"}
    if kind in wanted and wanted[kind] not in stats:
        found = ", ".join(map(str, stats.data_vars)) or "none"
        raise ValueError(
            f"--kind {kind}: the run has no such statistic; it has {found}. Choose another kind"
        )
    with plt.rc_context({"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9}):
        figure, note = (
            own[kind][1]() if kind in own else _by_arviz(tree, kind, names or main_variables(tree))
        )
        data = f" on {tree.attrs['data']}" if tree.attrs.get("data") else ""
        figure.suptitle(
            f"{tree.attrs.get('model') or 'a model'}{data}, {tree.attrs.get('kernel', '')}{note}",
            fontsize=10,
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _by_arviz(tree: xr.DataTree, kind: str, names: list[str]) -> tuple[Any, str]:
    """ArviZ's picture of the run, and a note for the title where some scalars are left out."""
    import arviz as az
    from arviz_base.labels import NoVarLabeller

    if kind == "energy":
        size, note, shown = (6.0, 4.0), "", tree
    else:
        limit, inches = ROWS[kind]
        elements, total = _elements(tree["posterior"].to_dataset(), names, limit)
        groups = {"posterior": elements.to_dataset()} | {
            name: group.to_dataset()
            for name, group in tree.children.items()
            if name == "sample_stats"
        }
        shown = xr.DataTree.from_dict(groups)
        rows = elements.sizes["quantity"]
        size = (9.0, 1.0 + inches * max(rows, 2))
        note = "" if rows == total else f": {rows} of {total} quantities"
    options: dict[str, Any] = {"figure_kwargs": {"figsize": size, "layout": "constrained"}}
    if kind != "energy":
        options |= {"labeller": NoVarLabeller()}
    options |= {
        "trace_dist": {"compact": False},
        "forest": {"labels": ["quantity"]},
        "dist": {"col_wrap": 3},
        "rank": {"col_wrap": 3},
    }.get(kind, {})
    drawn = getattr(az, f"plot_{kind}")(shown, backend="matplotlib", **options)
    figure = drawn.get_viz("figure")
    if kind == "trace_dist":
        _label_rows(figure)
    return figure, note


def _label_rows(figure: Any) -> None:
    """Move the name of a scalar above its density, where a long name has room."""
    traces = [axes for axes in figure.axes if axes.get_xlabel() == "Draw"]
    for axes in figure.axes:
        if axes in traces:
            axes.set_ylabel("")
            axes.set_xlabel("draw" if axes is traces[-1] else "")
        else:
            axes.set_title(axes.get_xlabel(), loc="left")
            axes.set_xlabel("")


def _elbo(tree: xr.DataTree) -> tuple[Any, str]:
    import matplotlib.pyplot as plt

    from diagnostics import plot_elbo

    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    plot_elbo(tree, ax=axes)
    return figure, ""


def _evidence(tree: xr.DataTree) -> tuple[Any, str]:
    """The growth of the log-evidence, and the insertion ranks of new points, which are uniform
    in a correct run.
    """
    import matplotlib.pyplot as plt

    from diagnostics import plot_evidence, report

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.0, 4.0), width_ratios=(1.5, 1), layout="constrained"
    )
    plot_evidence(tree, ax=left)
    ranks = tree["sample_stats"]["insertion_rank"].transpose("chain", ...).values
    size = int(np.max(tree.attrs.get("num_live_of_replicates", tree.attrs.get("num_live"))))
    for chain, each in enumerate(ranks.reshape(len(ranks), -1)):
        seen = np.cumsum(np.bincount(each[each >= 0], minlength=size)) / max(1, (each >= 0).sum())
        right.plot(
            np.arange(1, size + 1),
            seen - np.arange(1, size + 1) / size,
            lw=1,
            label=f"replicate {chain}",
        )
    right.axhline(0, color="0.3", lw=1, ls="--")
    p = report(tree)["insertion ranks"].figures.get("p", np.nan)
    right.set(
        xlabel="insertion rank among the live points",
        ylabel="share at or below it, minus uniform",
        title=f"p = {p:.2g}",
    )
    right.legend(frameon=False, fontsize="small")
    return figure, ""


def _partition(tree: xr.DataTree) -> tuple[Any, str]:
    """The co-clustering matrix, the number of groups, and the effective sample size of particles
    at each row.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    from diagnostics import num_groups, partition_of, plot_partition

    labels = partition_of(tree)
    every = labels.transpose("chain", "draw", ...)
    rows, draws = every.shape[-1], every.shape[0] * every.shape[1]
    some = every[:, :: -(-draws // 400), :: -(-rows // 600)]  # as many as a picture can show
    figure = plt.figure(figsize=(10.0, 4.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    plot_partition(some, ax=figure.add_subplot(grid[:, 0]))
    counts, stats = num_groups(labels), tree["sample_stats"].to_dataset()
    over = figure.add_subplot(grid[0, 1] if "ess" in stats else grid[:, 1])
    over.bar(counts["groups"], counts, color="#4477aa")
    over.set(
        xlabel="groups of all classes",
        ylabel="posterior probability",
        xlim=(np.flatnonzero(counts)[0] + 0.4, len(counts) + 0.6),
    )
    over.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "ess" in stats:
        below = figure.add_subplot(grid[1, 1])
        for chain, path in enumerate(stats["ess"].transpose("chain", ...).values):
            below.plot(path, lw=1, label=f"replicate {chain}")
        below.set(xlabel="row", ylabel="effective particles", ylim=(0, None))
        below.legend(frameon=False, fontsize="small", ncols=2)
    return figure, "" if some.shape[-1] == rows else f": {some.shape[-1]} of {rows} rows"


def _elements(posterior: xr.Dataset, names: Sequence[str], limit: int) -> tuple[xr.DataArray, int]:
    """Up to `limit` labelled scalars (chain, draw, quantity), and the number of all scalars.

    Small variables are shown whole. Of larger ones, the elements with the largest
    |mean| / standard deviation are shown.
    """
    each = {name: list(_scalars(posterior[name])) for name in names}
    chosen: dict[str, xr.DataArray] = {}
    for place, name in enumerate(sorted(each, key=lambda name: len(each[name]))):
        share = (limit - len(chosen)) // (len(each) - place) or (1 if len(chosen) < limit else 0)
        scalars = each[name]
        if len(scalars) > share:
            far = np.argsort([-_distance(values) for _, values in scalars], kind="stable")[:share]
            scalars = [scalars[i] for i in sorted(far)]
        chosen |= dict(scalars)
    stacked = np.stack([values.values for values in chosen.values()], axis=-1)
    coords = {dim: posterior[dim].values for dim in ("chain", "draw")} | {"quantity": list(chosen)}
    return xr.DataArray(stacked, coords, ("chain", "draw", "quantity"), "shown"), sum(
        map(len, each.values())
    )


def _scalars(values: xr.DataArray) -> Iterator[tuple[str, xr.DataArray]]:
    """The elements of a variable with their labels, such as weight[alcohol, class_0]."""
    inner = [dim for dim in values.dims if dim not in ("chain", "draw")]
    flat = values.transpose("chain", "draw", *inner)
    for index in np.ndindex(*(values.sizes[dim] for dim in inner)):
        where = [str(values[dim].values[i]) for dim, i in zip(inner, index, strict=True)]
        element = flat[(..., *index)] if index else flat
        yield (
            f"{values.name}[{', '.join(where)}]" if where else str(values.name),
            element.reset_coords(drop=True),
        )


def _distance(values: xr.DataArray) -> float:
    deviation = float(values.std())
    return abs(float(values.mean())) / deviation if deviation else 0.0
