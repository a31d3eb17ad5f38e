"""`zoo summary`, `zoo report`, `zoo compare`, `zoo cite`: text about saved runs."""

from pathlib import Path
from typing import Any

import xarray as xr

from gallery.commands.models import find_model
from gallery.commands.runs import open_run, select, summary_text

__all__ = ["bibtex_entries", "cite", "compare", "report", "summary"]


def summary(args: Any) -> int:
    """Print means, intervals and effective sample sizes."""
    tree = open_run(args.run)
    print(summary_text(tree, select(tree, args.var_names)))
    return 0


def report(args: Any) -> int:
    """Print the verdicts of the diagnostics; return 1 where the run is not trusted."""
    from diagnostics import report as make_report

    found = make_report(open_run(args.run))
    print(found.text)
    return 1 if found.conclusion == "not trusted" else 0


def compare(args: Any) -> int:
    """Print predictive scores of several runs on the same data."""
    from diagnostics import compare as make_table

    paths = [Path(path) for path in (args.first, *args.others)]
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise ValueError(f"compare: {', '.join(names)}: a run named twice; wanted different runs")
    table = make_table({name: open_run(path) for name, path in zip(names, paths, strict=True)})
    print(table.drop(columns="unsafe").to_string(float_format="{:.2f}".format))
    for name, reasons in table["unsafe"].items():
        if reasons:
            print(f"do not rely on the rank of {name}: {reasons}")
    return 0


def cite(args: Any) -> int:
    """Print BibTeX of the model and the software of a run; BibTeX ignores the line before them."""
    tree = open_run(args.run)
    print(
        f"% Model {tree.attrs.get('model')}, kernel {tree.attrs.get('kernel')}, on "
        f"{tree.attrs.get('data', 'data of your own')}.\n"
    )
    print("\n\n".join(bibtex_entries(tree)))
    return 0


def bibtex_entries(tree: xr.DataTree) -> list[str]:
    """Return the BibTeX entries of a run without repetitions, the model's first."""
    from inference.run.citations import SOFTWARE, citations

    own = find_model(str(tree.attrs.get("model"))).card.bibtex
    of_kernel = citations(str(tree.attrs.get("kernel", "")))
    return list(dict.fromkeys([*([own] if own else []), *of_kernel, *SOFTWARE]))
