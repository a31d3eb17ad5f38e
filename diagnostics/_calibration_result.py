"""The result of a calibration test: ranks, p-values, a tree and a plot."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from diagnostics._calibration_band import band, holm, p_value

__all__ = ["Calibration", "plot_calibration_ecdf"]

GROUP = "prior_sbc"  # the group that ArviZ reads
YLABEL = "ECDF minus uniform"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Ranks and their test of uniformity on 0, ..., `num_draws`.

    Each scalar is tested by an exact simultaneous ECDF band. Holm's procedure combines the tests,
    so that a correct sampler fails with probability `alpha` at most.
    """

    test: str  # "sbc" or "geweke"
    model: str
    ranks: Mapping[str, np.ndarray]  # quantity -> [replicate, ...]
    num_draws: int  # ranks are among this many draws
    alpha: float

    @property
    def num_replicates(self) -> int:
        """Number of replicates."""
        return len(next(iter(self.ranks.values())))

    @cached_property
    def scalars(self) -> dict[str, np.ndarray]:
        """Ranks [replicate] of each scalar; elements have names such as "weight[2]"."""
        each = {}
        for name, values in self.ranks.items():
            for index in np.ndindex(values.shape[1:]):
                each[name + (str(list(index)) if index else "")] = values[(slice(None), *index)]
        return each

    @cached_property
    def p_values(self) -> dict[str, float]:
        """P-value of each scalar."""
        return {name: p_value(ranks, self.num_draws) for name, ranks in self.scalars.items()}

    @cached_property
    def adjusted(self) -> dict[str, float]:
        """P-values adjusted by Holm's procedure; those below `alpha` are failures."""
        return holm(self.p_values)

    @property
    def failed(self) -> list[str]:
        """Names of the scalars whose ranks are not uniform, worst first."""
        return sorted(
            (name for name, p in self.adjusted.items() if p < self.alpha),
            key=lambda name: self.p_values[name],
        )

    @property
    def passed(self) -> bool:
        """Whether no scalar failed."""
        return not self.failed

    @property
    def text(self) -> str:
        """The conclusion, then a line for each scalar, smallest p-value first."""
        conclusion = "PASSED" if self.passed else f"FAILED: {', '.join(self.failed)}"
        lines = [
            f"{self.test} of {self.model}: {self.num_replicates} replicates, ranks among "
            f"{self.num_draws}",
            conclusion,
            "",
        ]
        width = max(map(len, self.p_values))
        lines.append(f"  {'':{width}}  p-value    adjusted   mean rank / L")
        for name in sorted(self.p_values, key=lambda name: self.p_values[name]):
            mean = self.scalars[name].mean() / self.num_draws
            lines.append(
                f"  {name:{width}}  {self.p_values[name]:<9.3g}  {self.adjusted[name]:<9.3g}  "
                f"{mean:.3f}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def as_tree(self) -> xr.DataTree:
        """Return the ranks as values in (0, 1), in the group that `az.plot_ecdf_pit` reads.

        Values within the bin of a rank are drawn uniformly with a fixed seed.
        """
        rng = np.random.default_rng(0)
        variables = {}
        for quantity, ranks in self.ranks.items():
            # "/" would make a group; the driver writes "." in place of it, too
            name = quantity.replace("/", ".")
            if name in variables:
                raise ValueError(
                    f"quantity {quantity!r}: another one is {name!r} in the tree; rename one."
                )
            places = (ranks + rng.uniform(size=ranks.shape)) / (self.num_draws + 1)
            variables[name] = (
                ("chain", "draw", *(f"{name}_dim_{i}" for i in range(ranks.ndim - 1))),
                places[None],
            )
        coords = {"chain": [0], "draw": np.arange(self.num_replicates)}
        attrs = {
            "test": self.test,
            "model": self.model,
            "num_draws": self.num_draws,
            "alpha": self.alpha,
        }
        tree = xr.DataTree.from_dict({GROUP: xr.Dataset(variables, coords)})
        tree.attrs.update(attrs)
        return tree


def plot_calibration_ecdf(calibration: Calibration, **kwargs: Any) -> Any:
    """Draw ArviZ's ECDF-difference plot of each scalar, with the band of the test.

    A curve that leaves the band has failed. The band is exact and simultaneous for all scalars:
    alpha is divided by their number, the first step of Holm's procedure.

    Args:
        calibration: the result of a test.
        **kwargs: arguments of `az.plot_ecdf_pit`: `var_names`, `backend`, `figure_kwargs`, ...

    Returns:
        ArviZ's PlotCollection.
    """
    import arviz as az
    from arviz_plots.visuals import fill_between_y, set_ylim

    is_matplotlib = kwargs.get("backend", az.rcParams["plot.backend"]) == "matplotlib"
    ours = {
        "suspicious_points": False,
        "p_value_text": False,
        "remove_axis": False,
        "xlabel": {"text": "rank / L"},
    }
    ours["ylabel"] = not is_matplotlib and {"text": YLABEL}
    kwargs["visuals"] = {**ours, **kwargs.get("visuals", {})}
    if is_matplotlib and "plot_collection" not in kwargs:
        kwargs["figure_kwargs"] = {"layout": "constrained", **kwargs.get("figure_kwargs", {})}
    figure = az.plot_ecdf_pit(calibration.as_tree(), group=GROUP, **kwargs)
    if is_matplotlib:  # once for all panels: it is longer than one of them
        figure.viz["figure"].item().supylabel(YLABEL, fontsize="medium")
    size, draws = calibration.num_replicates, calibration.num_draws
    low, high = band(size, draws, calibration.alpha / len(calibration.p_values))
    at = np.arange(draws + 2) / (draws + 1)
    below, above = (np.concatenate([[0.0], count / size, [1.0]]) - at for count in (low, high))
    template = figure.viz["ecdf_lines"].dataset
    data = xr.Dataset(
        {name: xr.zeros_like(values, float) for name, values in template.data_vars.items()}
    )
    figure.map(
        fill_between_y,
        "band",
        data=data,
        x=at,
        y_bottom=below,
        y_top=above,
        color="C7",
        alpha=0.25,
        ignore_aes="all",
    )
    curves = [_farthest(ranks, draws) for ranks in calibration.scalars.values()]
    limit = 1.15 * max(-below.min(), above.max(), *curves)
    figure.map(
        set_ylim, "ylim", data=data, limits=(-limit, limit), store_artist=False, ignore_aes="all"
    )
    return figure


def _farthest(ranks: np.ndarray, num_draws: int) -> float:
    """The largest distance between the ECDF and the uniform distribution."""
    at = np.arange(1, num_draws + 1)
    return float(
        np.abs(np.searchsorted(np.sort(ranks), at) / len(ranks) - at / (num_draws + 1)).max()
    )
