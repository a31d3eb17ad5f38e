"""`zoo summary`, `zoo report`, `zoo compare`, `zoo cite`: text about saved runs."""

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import xarray as xr

from gallery.commands.held_out import held_out_text, measures
from gallery.commands.model_file import is_file
from gallery.commands.models import find_model
from gallery.commands.runs import open_run, select, summary_text

__all__ = ["bibtex_entries", "cite", "compare", "report", "summary", "trust_text"]


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


def trust_text(tree: xr.DataTree, path: str) -> str:
    """Return whether to trust a run, and where not, what its first failed check advises.

    Args:
        tree: the run.
        path: of its file, for `zoo report`.
    """
    from diagnostics import report as make_report

    found = make_report(tree)
    if found.trusted:
        return fill(found.headline, 100)
    failed = [verdict for verdict in found.verdicts if verdict.ok is False]
    advice = failed[0] if failed else found[found.unknown[0]]
    return fill(f"{found.headline} {advice.reason} More: zoo report {path}", 100)


def compare(args: Any) -> int:
    """Print predictive scores of several runs on the same data."""
    paths = [Path(path) for path in (args.first, *args.others)]
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise ValueError(f"compare: {', '.join(names)}: a run named twice; wanted different runs")
    trees = {name: open_run(path) for name, path in zip(names, paths, strict=True)}
    held_out = _held_out(trees)
    if len({"levels" in tree.attrs for tree in trees.values()}) > 1:  # densities, probabilities
        scores = ("log_score", "baseline_log_score")
        held_out = {
            name: each.drop_vars(scores, errors="ignore") for name, each in held_out.items()
        }
    if held_out:
        print(held_out_text(held_out))
    has_scores = all("log_score" in scores for scores in held_out.values())
    if not has_scores and _are_coded_apart(trees):
        first = min(held_out, key=lambda name: measures(held_out[name])["RMSE"])
        print(
            f"best by RMSE: {first}; the runs code the entries differently, so that their log "
            "likelihoods are not comparable"
        )
        return 0
    table = _table(trees, held_out if has_scores else {})
    print(table.drop(columns="unsafe").to_string(float_format="{:.2f}".format))
    for name, reasons in table["unsafe"].items():
        if reasons:
            print(f"do not rely on the rank of {name}: {reasons}")
    return 0


def _table(trees: dict[str, xr.DataTree], held_out: dict[str, xr.Dataset]) -> Any:
    from diagnostics import compare as make_table

    test = {name: scores["log_score"].values for name, scores in held_out.items()}
    try:
        return make_table(trees, test=test)
    except ValueError as error:
        models = [str(tree.attrs.get("model")) for tree in trees.values()]
        if _held_out(trees) or any(map(is_file, models)):
            raise
        unscored = [name for name, tree in trees.items() if "held_out" not in tree]
        what = (
            f"and there is no held-out score of {', '.join(unscored)}; fit again with --test 0.2"
            if unscored
            else "and their held-out scores are of different rows; fit to the same table"
        )
        raise ValueError(f"compare: nothing ranks all runs, {what}") from error


def _are_coded_apart(trees: dict[str, xr.DataTree]) -> bool:
    """Whether runs of the same entries observe them in other units, or as levels."""
    codes = [
        tuple(np.ravel(tree.attrs.get(name, ())).tolist() for name in ("levels", "shift", "scale"))
        for tree in trees.values()
    ]
    return any(code != codes[0] for code in codes)


def _held_out(trees: dict[str, xr.DataTree]) -> dict[str, xr.Dataset]:
    """The scores of all runs, if they are of the same rows; else none."""
    found = {
        name: tree["held_out"].to_dataset() for name, tree in trees.items() if "held_out" in tree
    }
    first = next(iter(found.values()), xr.Dataset())
    is_common = len(found) == len(trees) and all(
        scores["y"].equals(first["y"]) for scores in found.values()
    )
    return found if is_common else {}


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
    from gallery.commands.citations import SOFTWARE, citations

    own = find_model(str(tree.attrs.get("model"))).card.bibtex
    of_kernel = citations(str(tree.attrs.get("kernel", "")))
    return list(dict.fromkeys([*([own] if own else []), *of_kernel, *SOFTWARE]))
