"""Verdicts of single checks, the report that collects them, and readers of trees."""

from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

__all__ = [
    "EARLY",
    "Report",
    "Verdict",
    "attribute",
    "each_of",
    "early_end",
    "finite_draws",
    "group_of",
    "identified",
    "label",
    "not_finite",
    "some",
]

MARKS = {True: "yes", False: "NO", None: "?"}
EARLY = {
    "SIGINT": "Ctrl-C",
    "SIGTERM": "a signal",
    "max_time": "its time limit",
    "checkpoint": "a failed checkpoint",
    "stop rule failed": "a stop rule that raised an error",
}


class Verdict(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool | None  # None: the tree lacks what the check needs, or the figure cannot pass or fail
    figures: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Report:
    """All checks of a run, and whether to trust it.

    A run is trusted when no check failed and every decisive check could be made. Each kind of run
    has its own decisive checks. A check that the tree does not allow never counts as passed.
    """

    kind: str  # "chains", "variational", "smc" or "nested"
    title: str
    verdicts: list[Verdict]
    decisive: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> Verdict:
        """Return the verdict of this name."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise KeyError(f"{name!r}: this report has {[verdict.name for verdict in self.verdicts]}.")

    @property
    def conclusion(self) -> str:
        """ "trusted", "not trusted" (a check failed) or "undecided"."""
        if any(verdict.ok is False for verdict in self.verdicts):
            return "not trusted"
        return "undecided" if self.unknown else "trusted"

    @property
    def trusted(self) -> bool:
        """Whether no check failed and every decisive one was made."""
        return self.conclusion == "trusted"

    @property
    def unknown(self) -> list[str]:
        """Decisive checks that could not be made."""
        return [
            verdict.name
            for verdict in self.verdicts
            if verdict.name in self.decisive and verdict.ok is None
        ]

    @property
    def text(self) -> str:
        """One page: the conclusion, then each verdict with its figures and its reason."""
        lines = [self.headline, self.title, ""]
        for name, ok, figures, reason in self.verdicts:
            shown = ", ".join(f"{key} {_number(value)}" for key, value in figures.items())
            lines += [f"  {MARKS[ok]:>3}  {name:<20} {shown}".rstrip()]
            lines += [f"{'':28}{line}" for line in wrap(reason, 88)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists for JSON; NaN and infinity become strings."""
        verdicts = [
            verdict._asdict() | {"figures": {k: _plain(v) for k, v in verdict.figures.items()}}
            for verdict in self.verdicts
        ]
        answer = {"conclusion": self.conclusion, "trusted": self.trusted, "unknown": self.unknown}
        return {"kind": self.kind, "title": self.title, **answer, "verdicts": verdicts}

    def __str__(self) -> str:
        return self.text

    @property
    def headline(self) -> str:
        """The conclusion, and the checks that it rests on, in one line."""
        failed = [verdict.name for verdict in self.verdicts if verdict.ok is False]
        if failed:
            return f"NOT TRUSTED: {', '.join(failed)}."
        if self.unknown:
            return f"UNDECIDED: nothing failed, but not checked: {', '.join(self.unknown)}."
        passed = [verdict.name for verdict in self.verdicts if verdict.name in self.decisive]
        return f"TRUSTED: nothing failed. Passed: {', '.join(passed)}."


def group_of(tree: xr.DataTree, name: str) -> xr.Dataset:
    """Return a group as a dataset, an empty one where the tree has none."""
    return tree.children[name].to_dataset() if name in tree.children else xr.Dataset()


def attribute(tree: xr.DataTree, name: str) -> Any:
    """Return a scalar attribute of a run as a float; None where the tree has none."""
    value = tree.attrs.get(name)
    return None if value is None or np.ndim(value) > 0 else float(value)


def each_of(tree: xr.DataTree, name: str) -> np.ndarray:
    """Return an attribute of every replicate, [replicate]; empty where the tree has none."""
    value = tree.attrs.get(f"{name}_of_replicates", tree.attrs.get(name))
    return np.array([]) if value is None else np.atleast_1d(np.asarray(value, float))


def identified(tree: xr.DataTree) -> tuple[xr.Dataset, list[str]]:
    """Return the identified variables of the posterior, and the names of the others.

    Label switching and arbitrary signs of factors make variables not identified. Such a variable
    has a true `attrs["not_identified"]`, or its name is in the group `not_identified`.
    """
    posterior = group_of(tree, "posterior")
    group = set(map(str, group_of(tree, "not_identified").data_vars))
    left_out = [
        str(name)
        for name, values in posterior.data_vars.items()
        if values.attrs.get("not_identified") or name in group
    ]
    return posterior.drop_vars(left_out), left_out


def not_finite(draws: xr.Dataset) -> dict[str, int]:
    """Return the number of NaN or infinite values of each variable that has some."""
    counts = {
        str(name): int((~np.isfinite(values)).sum()) for name, values in draws.data_vars.items()
    }
    return {name: count for name, count in counts.items() if count}


def finite_draws(tree: xr.DataTree) -> Verdict:
    """Check that every draw is finite."""
    posterior = group_of(tree, "posterior")
    if bad := not_finite(posterior):
        return Verdict(
            "draws",
            False,
            bad,
            f"NaN or infinite draws of {some(list(bad))}: a density overflows, or a site is "
            "undefined.",
        )
    if not posterior.data_vars:
        where = "; the draws so far are in `unfinished`" if "unfinished" in tree.children else ""
        return Verdict("draws", None, {}, f"No posterior in the tree{where}.")
    return Verdict("draws", True, {"a replicate": posterior.sizes["draw"]}, "All finite.")


def early_end(tree: xr.DataTree) -> Verdict:
    """Check that the run was not stopped early."""
    ended = str(tree.attrs.get("ended", ""))
    figures = {"steps": int(tree.attrs["steps"])} if "steps" in tree.attrs else {}
    if not ended:
        return Verdict(
            "ended",
            None,
            figures,
            'attrs["ended"] is not in the tree, so it is not known why the run ended.',
        )
    if ended in EARLY:
        return Verdict(
            "ended",
            False,
            figures,
            f"Ended early, by {EARLY[ended]}: resume it from its checkpoint, or `Driver.extend` "
            "it.",
        )
    return Verdict("ended", True, figures, f"Ended as asked ({ended}).")


def label(values: xr.DataArray, flat_index: int) -> str:
    """Return the name of one element, such as theta[3, 2]."""
    if not values.ndim:
        return str(values.name)
    index = np.unravel_index(flat_index, values.shape)
    where = (str(values[dim].values[i]) for dim, i in zip(values.dims, index, strict=True))
    return f"{values.name}[{', '.join(where)}]"


def some(names: list[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _number(value: Any) -> str:
    if isinstance(value, list | tuple | np.ndarray):
        return "[" + ", ".join(_number(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
