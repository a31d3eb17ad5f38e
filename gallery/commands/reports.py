"""`zoo summary`, `zoo report`, `zoo compare`: what there is to say of a saved run."""

from pathlib import Path
from typing import Any

from gallery.commands.runs import open_run, select, summary_text

__all__ = ["compare", "report", "summary"]


def summary(args: Any) -> int:
    """Means, intervals, effective sample sizes."""
    tree = open_run(args.run)
    print(summary_text(tree, select(tree, args.var_names)))
    return 0


def report(args: Any) -> int:
    """The verdict of the diagnostics; exit code 1 where the run is not to be trusted."""
    from diagnostics import report as report_of

    found = report_of(open_run(args.run))
    print(found.text)
    return 1 if found.conclusion == "not trusted" else 0


def compare(args: Any) -> int:
    """Predictive scores of several runs of the same data."""
    from diagnostics import compare as table_of

    paths = [Path(path) for path in (args.first, *args.others)]
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise ValueError(f"compare: {', '.join(names)}: a run named twice; wanted different runs")
    table = table_of({name: open_run(path) for name, path in zip(names, paths, strict=True)})
    print(table.drop(columns="unsafe").to_string(float_format="{:.2f}".format))
    for name, reasons in table["unsafe"].items():
        if reasons:
            print(f"do not rely on the place of {name}: {reasons}")
    return 0
