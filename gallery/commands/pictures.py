"""`zoo plot`, and the picture of `zoo fit --plot`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from gallery.commands.findings import class_contrasts
from gallery.commands.model_pictures import (
    is_history,
    is_small_matrix,
    plot_classes,
    plot_entries,
    plot_history,
    plot_matrix,
)
from gallery.commands.request import check_picture
from gallery.commands.runs import main_variables, open_run, select

__all__ = ["draw", "kinds", "plot"]


class _Scalars(NamedTuple):
    """How ArviZ's plot of the scalars of a posterior is laid out."""

    most: int  # scalars of one picture
    inches: float  # of height for each of them
    options: Mapping[str, Any] = {}


BY_SCALARS = {
    "trace_dist": _Scalars(8, 1.35, {"compact": False}),
    "trace": _Scalars(8, 1.0, {"col_wrap": 2}),
    "dist": _Scalars(12, 0.6, {"col_wrap": 3}),
    "forest": _Scalars(30, 0.32, {"labels": ["quantity"]}),
    "ridge": _Scalars(30, 0.32, {"labels": ["quantity"]}),
    "rank": _Scalars(12, 0.6, {"col_wrap": 3}),
    "rank_dist": _Scalars(8, 1.35, {"compact": False}),
    "autocorr": _Scalars(12, 0.6, {"col_wrap": 3}),
    "ess": _Scalars(12, 0.6, {"col_wrap": 3}),
    "ess_evolution": _Scalars(12, 0.6, {"col_wrap": 3}),
    "mcse": _Scalars(12, 0.6, {"col_wrap": 3}),
    "pair": _Scalars(5, 1.6),
    "parallel": _Scalars(12, 0.3, {"norm_method": "normal"}),
}
# ArviZ's plots of the observed rows -> groups of the tree that they need
BY_ROWS = {
    "ppc_dist": ("posterior_predictive",),
    "ppc_pit": ("posterior_predictive",),
    "loo_pit": ("posterior_predictive", "log_likelihood"),
    "khat": ("log_likelihood",),
}


def plot(args: Any) -> int:
    """Save a picture of a saved run."""
    run = Path(args.run)
    name = f"{run.stem}-{args.kind}.png" if args.kind else f"{run.stem}.png"
    path = Path(args.output or run.with_name(name))
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
        kind: one of `kinds`. None: what was found, by classes or by entries, else trace_dist.
        names: variables; None: the main ones.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    each = kinds(tree, names or main_variables(tree))
    known = [name for name, draws in each.items() if draws is not None]
    kind = kind or next(name for name in ("classes", "entries", "trace_dist") if name in known)
    draws = each[kind]
    if draws is None:
        raise ValueError(
            f"--kind {kind}: this run of {tree.attrs.get('model', 'a model')} has none; choose one "
            f"of {', '.join(known)}"
        )
    with plt.rc_context({"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9}):
        figure, note = draws(tree)
        data = f" on {tree.attrs['data']}" if tree.attrs.get("data") else ""
        figure.suptitle(
            f"{tree.attrs.get('model') or 'a model'}{data}, {tree.attrs.get('kernel', '')}{note}",
            fontsize=10,
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def kinds(
    tree: xr.DataTree, names: list[str]
) -> dict[str, Callable[[xr.DataTree], tuple[Any, str]] | None]:
    """Return the kinds of pictures, each with the function that draws it; None: the run has none.

    A function returns a figure, and a note for its title.

    Args:
        tree: a run.
        names: variables of the kinds that show scalars of the posterior.
    """
    stats = set(_stats(tree))
    has_partition = "partition" in tree.attrs
    own = {
        "classes": (class_contrasts(tree) is not None, plot_classes),
        "entries": ("entries" in tree.attrs, plot_entries),
        "matrix": (is_small_matrix(tree), plot_matrix),
        "history": (is_history(tree), plot_history),
        "partition": (has_partition, _partition),
        "groups": (has_partition, _groups),
        "particles": (has_partition and "ess" in stats, _particles),
        "elbo": ("elbo" in stats, partial(_by_diagnostics, "plot_elbo")),
        "evidence": ("log_evidence" in stats, partial(_by_diagnostics, "plot_evidence")),
        "insertion": ("insertion_rank" in stats, _insertion),
        "energy": ("energy" in stats, partial(_by_arviz, "energy")),
    }
    of_rows = {name: (_suits(tree, name), partial(_by_arviz, name)) for name in BY_ROWS}
    of_scalars = {name: (True, partial(_by_scalars, name, names)) for name in BY_SCALARS}
    every = own | of_scalars | of_rows
    return {name: draws if is_there else None for name, (is_there, draws) in every.items()}


def _suits(tree: xr.DataTree, kind: str) -> bool:
    """Whether the run has one observed quantity, a real one where its value is plotted."""
    needed = ("observed_data", *BY_ROWS[kind])
    if not set(needed) <= set(tree.children):
        return False
    if any(len(tree[name].data_vars) != 1 for name in needed):
        return False
    [observed] = tree["observed_data"].data_vars.values()
    return kind == "khat" or observed.dtype.kind == "f"


def _stats(tree: xr.DataTree) -> xr.Dataset:
    return tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else xr.Dataset()


def _by_arviz(kind: str, tree: xr.DataTree) -> tuple[Any, str]:
    import arviz as az

    shown = az.loo(tree, pointwise=True) if kind == "khat" else tree
    size = {"figsize": (7.0, 4.0), "layout": "constrained"}
    drawn = getattr(az, f"plot_{kind}")(shown, backend="matplotlib", figure_kwargs=size)
    return drawn.get_viz("figure"), ""


def _by_scalars(kind: str, names: list[str], tree: xr.DataTree) -> tuple[Any, str]:
    """ArviZ's picture of some scalars, and a note where others are left out."""
    import arviz as az
    from arviz_base.labels import NoVarLabeller

    most, inches, options = BY_SCALARS[kind]
    elements, total = _elements(tree["posterior"].to_dataset(), names, most)
    groups = {"posterior": elements.to_dataset(), "sample_stats": _stats(tree)}
    rows = elements.sizes["quantity"]
    drawn = getattr(az, f"plot_{kind}")(
        xr.DataTree.from_dict(groups),
        backend="matplotlib",
        labeller=NoVarLabeller(),
        figure_kwargs={"figsize": (9.0, 1.0 + inches * max(rows, 2)), "layout": "constrained"},
        **options,
    )
    figure = drawn.get_viz("figure")
    if kind == "trace_dist":
        _label_rows(figure)
    return figure, "" if rows == total else f": {rows} of {total} quantities"


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


def _by_diagnostics(function: str, tree: xr.DataTree) -> tuple[Any, str]:
    import diagnostics

    figure, axes = _panel()
    getattr(diagnostics, function)(tree, ax=axes)
    return figure, ""


def _panel(width: float = 7.0) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, 4.0), layout="constrained")


def _insertion(tree: xr.DataTree) -> tuple[Any, str]:
    """The insertion ranks of new points, which are uniform in a correct run."""
    from diagnostics import report

    figure, axes = _panel()
    ranks = tree["sample_stats"]["insertion_rank"].transpose("chain", ...).values
    size = int(np.max(tree.attrs.get("num_live_of_replicates", tree.attrs.get("num_live"))))
    for chain, each in enumerate(ranks.reshape(len(ranks), -1)):
        seen = np.cumsum(np.bincount(each[each >= 0], minlength=size)) / max(1, (each >= 0).sum())
        axes.plot(
            np.arange(1, size + 1),
            seen - np.arange(1, size + 1) / size,
            lw=1,
            label=f"replicate {chain}",
        )
    axes.axhline(0, color="0.3", lw=1, ls="--")
    p = report(tree)["insertion ranks"].figures.get("p", np.nan)
    axes.set(
        xlabel="insertion rank among the live points",
        ylabel="share at or below it, minus uniform",
        title=f"p = {p:.2g}",
    )
    axes.legend(frameon=False, fontsize="small")
    return figure, ""


def _partition(tree: xr.DataTree) -> tuple[Any, str]:
    """The co-clustering matrix."""
    from diagnostics import partition_of, plot_partition

    every = partition_of(tree).transpose("chain", "draw", ...)
    rows, draws = every.shape[-1], every.shape[0] * every.shape[1]
    some = every[:, :: -(-draws // 400), :: -(-rows // 600)]  # as many as a picture can show
    figure, axes = _panel(5.6)
    plot_partition(some, ax=axes)
    return figure, "" if some.shape[-1] == rows else f": {some.shape[-1]} of {rows} rows"


def _groups(tree: xr.DataTree) -> tuple[Any, str]:
    """The posterior of the number of groups."""
    from matplotlib.ticker import MaxNLocator

    from diagnostics import num_groups, partition_of

    counts = num_groups(partition_of(tree))
    figure, axes = _panel()
    axes.bar(counts["groups"], counts, color="#4477aa")
    axes.set(
        xlabel="groups of all classes",
        ylabel="posterior probability",
        xlim=(np.flatnonzero(counts)[0] + 0.4, len(counts) + 0.6),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, ""


def _particles(tree: xr.DataTree) -> tuple[Any, str]:
    """The effective sample size of the particles at each row."""
    figure, axes = _panel()
    for chain, path in enumerate(tree["sample_stats"]["ess"].transpose("chain", ...).values):
        axes.plot(path, lw=1, label=f"replicate {chain}")
    axes.set(xlabel="row", ylabel="effective particles", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure, ""


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
