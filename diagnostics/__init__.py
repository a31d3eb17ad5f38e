"""Diagnostics of runs: convergence, calibration, model comparison, partitions, scores, pictures.

Every function takes the `DataTree` of a run, or draws of it. Submodules are imported when a name is
first used, so that `import diagnostics` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagnostics.calibration import (
        Calibration,
        geweke,
        on_host,
        plot_calibration_ecdf,
        sbc,
        with_kernel,
    )
    from diagnostics.comparison import compare
    from diagnostics.partitions import (
        CredibleBall,
        PartitionEstimate,
        coclustering,
        credible_ball,
        distances,
        expected_loss,
        num_groups,
        partition_of,
        point_estimate,
    )
    from diagnostics.pictures import (
        plot_ancestry,
        plot_calibration,
        plot_decision_regions,
        plot_elbo,
        plot_evidence,
        plot_partition,
    )
    from diagnostics.reports import Report, Verdict, insertion_rank_test, kind_of, report
    from diagnostics.scores import (
        accuracy,
        auc,
        brier,
        calibration_curve,
        expected_calibration_error,
        log_score,
        perplexity,
    )

WHERE = {
    "calibration": (
        "Calibration",
        "geweke",
        "on_host",
        "plot_calibration_ecdf",
        "sbc",
        "with_kernel",
    ),
    "comparison": ("compare",),
    "partitions": (
        "CredibleBall",
        "PartitionEstimate",
        "coclustering",
        "credible_ball",
        "distances",
        "expected_loss",
        "num_groups",
        "partition_of",
        "point_estimate",
    ),
    "pictures": (
        "plot_ancestry",
        "plot_calibration",
        "plot_decision_regions",
        "plot_elbo",
        "plot_evidence",
        "plot_partition",
    ),
    "reports": (
        "Report",
        "Verdict",
        "insertion_rank_test",
        "kind_of",
        "report",
    ),
    "scores": (
        "accuracy",
        "auc",
        "brier",
        "calibration_curve",
        "expected_calibration_error",
        "log_score",
        "perplexity",
    ),
}

__all__ = [
    "Calibration",
    "CredibleBall",
    "PartitionEstimate",
    "Report",
    "Verdict",
    "accuracy",
    "auc",
    "brier",
    "calibration_curve",
    "coclustering",
    "compare",
    "credible_ball",
    "distances",
    "expected_calibration_error",
    "expected_loss",
    "geweke",
    "insertion_rank_test",
    "kind_of",
    "log_score",
    "num_groups",
    "on_host",
    "partition_of",
    "perplexity",
    "plot_ancestry",
    "plot_calibration",
    "plot_calibration_ecdf",
    "plot_decision_regions",
    "plot_elbo",
    "plot_evidence",
    "plot_partition",
    "point_estimate",
    "report",
    "sbc",
    "with_kernel",
]


def __getattr__(name: str) -> Any:
    for module, names in WHERE.items():
        if name in names:
            return getattr(import_module(f"diagnostics.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
