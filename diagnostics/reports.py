"""Whether to trust a run: one page, by kind of kernel, with a reason for each verdict."""

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
    """Every check that the tree of a run allows, and what is missing for the others.

    - chains (draws, no steps): rank R-hat < 1.01, bulk and tail ESS >= 100 a chain, finite draws,
      movement, divergences of every block, E-BFMI >= 0.3 (of a kernel without blocks), time an
      effective draw;
    - variational (`sample_stats` has `elbo` over step): draws of a distribution and not of a point,
      ELBO settled, replicates agree in ELBO and means, Pareto k-hat of p / q, which is left
      undecided where it is above its limit by less than its error;
    - smc (`ess` over step): finite, finished, and replicates agree on the log-evidence; ESS path
      and resamplings, without a judgement where the best particles are kept as they are; histories
      that reach the first rows, which are never a judgement; where there is an `exponent`, in place
      of resamplings and histories, NaN, walks and evidence error as of nested samplers;
    - nested (`insertion_rank` over step): finite, finished, no likelihood that is NaN (`num_nan`,
      where it is there), insertion ranks uniform, walks long enough (`halfway`, where it is there),
      information, evidence error against the spread of replicates, effective draws; where rows came
      in stages (`summary_loss`), nats that summaries between them lose, and that are left at the
      end (`nats_left`); else, where it was finished by importance sampling
      (`nested_log_evidence_se`), effective draws and Pareto k-hat of the weights ("importance").

    What else is read, where it is there: `sample_stats` `lp`, `diverging`, `energy`, and those of
    further blocks (`lp_1`); `resampled`, `ancestor` (step, particle: the index of the parent),
    `unique_ancestors`; `num_live` as an attribute; the groups `particles` with `log_weight`,
    `ancestry` with `unique_ancestors` (row), `log_prior`, `log_likelihood`, `log_q` with `log_q`
    (chain, draw), and `log_factor` where `attrs["factors"]`, a JSON list, names factors; attributes
    `log_evidence`, `log_evidence_se`, `nested_log_evidence_se`, `nested_summary_error`,
    `information`, `summary_loss`, `nats_left` and each of them with `_of_replicates`.

    Variables that are not identified (labels of components, signs of factors) carry
    `attrs["not_identified"] = 1`, or are named in a group `not_identified`; they never get an
    R-hat, and `lp` and all other variables do.

    Vehtari et al. (2021), "Rank-normalization, folding, and localization"; Betancourt (2016) for
    E-BFMI; Yao et al. (2018) for k-hat; Fowlie et al. (2020) for insertion ranks. Cost of chains:
    ArviZ's R-hat and two ESS for each scalar in the posterior.
    """
    kind = kind_of(tree)
    _check_posterior(tree)
    verdicts, decisive = CHECKS[kind]
    return Report(kind, _title(tree, kind), verdicts(tree), decisive)


def kind_of(tree: xr.DataTree) -> str:
    """The kind of kernel that made the tree: as the kernel says in `attrs["report"]`, else read
    from the groups.
    """
    if "report" in tree.attrs:
        said = str(tree.attrs["report"])
        if said not in CHECKS:
            raise ValueError(f"attrs['report']: found {said!r}, wanted one of {sorted(CHECKS)}.")
        return said
    stats = group_of(tree, "sample_stats")
    for kind, name in (("nested", "insertion_rank"), ("variational", "elbo"), ("smc", "ess")):
        if name in stats and "step" in stats[name].dims:
            return kind
    if "posterior" in tree.children and "step" not in stats.dims:
        return "chains"
    raise ValueError(
        f"tree: its kind cannot be told; it has the groups {sorted(tree.children)} and "
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
    size = " x ".join(
        f"{posterior.sizes[dim]} {dim}s" for dim in ("chain", "draw") if dim in posterior.sizes
    )
    seconds = f", {float(attrs['sampling_time']):.3g} s" if "sampling_time" in attrs else ""
    return (
        f"{attrs.get('model') or 'a model'} by {attrs.get('kernel', 'an unnamed kernel')} "
        f"({kind}): {size or 'no draws'}{seconds}"
    )
