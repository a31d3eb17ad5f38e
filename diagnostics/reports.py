"""The report of a run: all checks for its kind of kernel, with a reason for each verdict."""

from collections.abc import Callable

import xarray as xr

from diagnostics import _chains, _filters, _nested, _variational
from diagnostics._nested import insertion_rank_test
from diagnostics._verdict import Report, Verdict, group_of

__all__ = ["Report", "Verdict", "insertion_rank_test", "kind_of", "report"]

CHECKS: dict[str, tuple[Callable[[xr.DataTree], list[Verdict]], tuple[str, ...]]] = {
    "chains": (_chains.chain_verdicts, _chains.DECISIVE),
    "variational": (_variational.variational_verdicts, _variational.DECISIVE),
    "smc": (_filters.smc_verdicts, _filters.DECISIVE),
    "nested": (_nested.nested_verdicts, _nested.DECISIVE),
}


def report(tree: xr.DataTree) -> Report:
    """Make every check that the tree of a run allows, and say what is missing for the others.

    The checks depend on the kind of the run:

    - chains (draws without steps): rank R-hat < 1.01, bulk and tail ESS >= 100 a chain, finite
      draws, movement, divergences of every block, E-BFMI >= 0.3 for a kernel without blocks, and
      the time per effective draw.
    - variational (`sample_stats` has `elbo` over step): draws are not one point, the ELBO has
      settled, replicates agree in ELBO and means, Pareto k-hat of p / q. A k-hat above its limit by
      less than its error is undecided.
    - smc (`ess` over step): finite values, completion, agreement of replicates on the log-evidence.
      ESS path and resamplings are not judged with optimal resampling. The ancestors of the first
      rows are never judged. With tempering (`exponent`), likelihoods, random walks,
      the evidence error and effective draws are checked in place of resamplings and ancestors.
    - nested (`insertion_rank` over step): finite values, completion, no likelihood NaN (`num_nan`),
      uniform insertion ranks, random walks long enough (`halfway`), information, evidence error
      against the spread of replicates, effective draws. Undecided where a mode died out
      (`num_lost_modes`). For runs in stages (`summary_loss`), the divergence of each stage's
      summary, and of the last one from the posterior of all rows (`nats_left`). For runs finished
      by importance sampling (`nested_log_evidence_se`), effective draws and Pareto k-hat of the
      importance weights.

    Other inputs, where the tree has them: `sample_stats` `lp`, `diverging`, `energy`, and those of
    further blocks (`lp_1`); `resampled`, `ancestor` (step, particle: the index of the parent),
    `unique_ancestors`; the groups `particles` with `log_weight`, `ancestry` with `unique_ancestors`
    (row), `log_prior`, `log_likelihood`, `log_q` with `log_q` (chain, draw), and `log_factor` where
    the JSON list `attrs["factors"]` names factors; the attributes `num_live`, `log_evidence`,
    `log_evidence_se`, `nested_log_evidence_se`, `nested_summary_error`, `information`,
    `num_modes`, `num_lost_modes`, `summary_loss`, `nats_left` and each of them with
    `_of_replicates`.

    Variables that are not identified, by label switching or arbitrary signs, have no R-hat. They
    carry `attrs["not_identified"] = 1`, or are named in a group `not_identified`.

    Vehtari et al. (2021), "Rank-normalization, folding, and localization"; Betancourt (2016) for
    E-BFMI; Yao et al. (2018) for k-hat; Fowlie et al. (2020) for insertion ranks. Cost for chains:
    ArviZ's R-hat and two ESS for each scalar in the posterior.

    Args:
        tree: the run.

    Returns:
        The report; `print` shows it, `conclusion` is the answer.
    """
    kind = kind_of(tree)
    _check_posterior(tree)
    verdicts, decisive = CHECKS[kind]
    return Report(kind, _title(tree, kind), verdicts(tree), decisive)


def kind_of(tree: xr.DataTree) -> str:
    """Return the kind of a run: "chains", "variational", "smc" or "nested".

    The kernel writes it into `attrs["report"]`. Without this attribute the groups tell.

    Args:
        tree: the run.
    """
    if "report" in tree.attrs:
        kind = str(tree.attrs["report"])
        if kind not in CHECKS:
            raise ValueError(f"attrs['report']: found {kind!r}, wanted one of {sorted(CHECKS)}.")
        return kind
    stats = group_of(tree, "sample_stats")
    for kind, name in (("nested", "insertion_rank"), ("variational", "elbo"), ("smc", "ess")):
        if name in stats and "step" in stats[name].dims:
            return kind
    if "posterior" in tree.children and "step" not in stats.dims:
        return "chains"
    raise ValueError(
        f"tree: its kind is not known; it has the groups {sorted(tree.children)} and "
        f"sample_stats {sorted(map(str, stats.data_vars))}. "
        "Wanted: a posterior without steps (chains), or over step `elbo` (variational), `ess` "
        "(SMC) or `insertion_rank` (nested)."
    )


def _check_posterior(tree: xr.DataTree) -> None:
    for name, values in group_of(tree, "posterior").data_vars.items():
        if not {"chain", "draw"} <= set(values.dims):
            raise ValueError(
                f"posterior: {name!r} has the dimensions {list(values.dims)}; wanted chain and "
                "draw among them. Give a single chain "
                f"its dimension by `expand_dims('chain')`."
            )
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"posterior: {name!r} holds {values.dtype}; wanted numbers. Drop it, or keep it in "
                "another group."
            )


def _title(tree: xr.DataTree, kind: str) -> str:
    attrs = tree.attrs
    posterior = group_of(tree, "posterior")
    sizes = [(dim, posterior.sizes[dim]) for dim in ("chain", "draw") if dim in posterior.sizes]
    size = " x ".join(f"{number} {dim}{'s' * (number != 1)}" for dim, number in sizes)
    seconds = f", {float(attrs['sampling_time']):.3g} s" if "sampling_time" in attrs else ""
    return (
        f"{attrs.get('model') or 'a model'} by {attrs.get('kernel', 'an unnamed kernel')} "
        f"({kind}): {size or 'no draws'}{seconds}"
    )
