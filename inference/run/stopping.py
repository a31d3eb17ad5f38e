"""When a run ends before its budget: predicates over the tree so far.

A predicate is any function `tree -> bool`. It is asked at fixed numbers of records (each a quarter
more than the last), so that a run which is stopped and resumed ends where an uninterrupted one
does.
"""

from collections.abc import Callable

import numpy as np
import xarray as xr

__all__ = ["StopRule", "converged", "settled"]

StopRule = Callable[[xr.DataTree], bool]


def converged(
    rhat: float = 1.01, ess: float = 400.0, var_names: list[str] | None = None
) -> StopRule:
    """True when every quantity of the posterior has rank R-hat below `rhat`, and bulk and tail ESS
    above `ess`.

    `var_names` picks the sites; leave out those that are not identified, such as labels of
    components. An element that never moved, such as the diagonal of a correlation matrix, is not
    counted.
    """
    if rhat <= 1.0:
        raise ValueError(f"converged: rhat must be above 1, got {rhat}.")

    def rule(tree: xr.DataTree) -> bool:
        import arviz as az

        if "posterior" not in tree:
            raise ValueError(
                "converged: this run has no draws before its end; `settled` judges an algorithm "
                "that is no chain."
            )
        posterior = tree["posterior"].dataset
        posterior = (posterior[var_names] if var_names else posterior).map(
            lambda values: values.astype(float)
        )
        if posterior.sizes.get("draw", 0) < 4:
            return False
        moved = {
            name: (values.std(("chain", "draw")) > 0).values
            for name, values in posterior.data_vars.items()
        }
        worst = _elements(az.rhat(posterior), moved)
        least = np.concatenate(
            [_elements(az.ess(posterior, method=method), moved) for method in ("bulk", "tail")]
        )
        return bool(worst.size and np.all(worst < rhat) and np.all(least > ess))  # a NaN is neither

    return rule


def settled(name: str = "elbo", tolerance: float = 1e-4, window: int = 100) -> StopRule:
    """True when the mean of `sample_stats[name]` over the last `window` steps exceeds that of the
    window before by less than `tolerance`, relative to its size, in every replicate.
    """

    def rule(tree: xr.DataTree) -> bool:
        stats = tree["sample_stats"].dataset
        if name not in stats:
            raise ValueError(
                f"settled: this run records no {name!r}; it records "
                f"{sorted(map(str, stats.data_vars))}."
            )
        trace = stats[name].transpose("chain", ...).values
        if trace.shape[1] < 2 * window:
            return False
        last, before = trace[:, -window:].mean(1), trace[:, -2 * window : -window].mean(1)
        return bool(np.all(last - before < tolerance * np.abs(last)))

    return rule


def _elements(values: xr.Dataset, moved: dict) -> np.ndarray:
    return np.concatenate([values[name].values[moved[name]].ravel() for name in moved])
