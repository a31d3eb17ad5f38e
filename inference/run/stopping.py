"""Rules that end a run before its budget: predicates over the tree so far.

A rule is any function `tree -> bool`. It is evaluated at fixed numbers of records (each a quarter
more than the last), so that a run that is stopped and resumed ends where an uninterrupted one
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
    """A rule: rank R-hat, and bulk and tail effective sample sizes, are good enough.

    An element that never moved, such as the diagonal of a correlation matrix, does not count.

    Args:
        rhat: the R-hat that each quantity must be below.
        ess: the effective sample sizes that each quantity must be above.
        var_names: the sites that count, None for all; leave out those that are not identified, such
            as labels of components.
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
        posterior = posterior[var_names] if var_names else posterior
        posterior = posterior.map(lambda values: values.astype(float))
        if posterior.sizes.get("draw", 0) < 4:
            return False
        moved = posterior.std(("chain", "draw")) > 0
        of_moved = lambda found: np.concatenate(
            [found[name].values[moved[name].values].ravel() for name in moved]
        )
        worst = of_moved(az.rhat(posterior))
        least = [of_moved(az.ess(posterior, method=method)) for method in ("bulk", "tail")]
        # a NaN is neither below nor above
        return bool(worst.size and np.all(worst < rhat) and np.all(np.concatenate(least) > ess))

    return rule


def settled(name: str = "elbo", tolerance: float = 1e-4, window: int = 100) -> StopRule:
    """A rule: a statistic of the steps, such as the ELBO, does not rise any more in any replicate.

    Args:
        name: the statistic, in `sample_stats`.
        tolerance: how much the mean of the last `window` steps may exceed the mean of the window
            before, relative to its size.
        window: how many steps.
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
