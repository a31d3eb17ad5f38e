"""Is this posterior right, and which model is better: everything that is said about the DataTree of a run.

Names are looked up when they are used, so that `import diagnostics` costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagnostics.compare import compare
    from diagnostics.partitions import (
        CredibleBall,
        PartitionEstimate,
        coclustering,
        credible_ball,
        distances,
        expected_loss,
        num_groups,
        point_estimate,
    )
    from diagnostics.pictures import plot_ancestry, plot_calibration, plot_decision_regions, plot_elbo, plot_evidence, plot_partition
    from diagnostics.report import Report, Verdict, report
    from diagnostics.scores import accuracy, auc, brier, calibration_curve, expected_calibration_error, log_score, perplexity

WHERE = {
    "compare": ("compare",),
    "partitions": (
        "CredibleBall",
        "PartitionEstimate",
        "coclustering",
        "credible_ball",
        "distances",
        "expected_loss",
        "num_groups",
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
    "report": (
        "Report",
        "Verdict",
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
    "log_score",
    "num_groups",
    "perplexity",
    "plot_ancestry",
    "plot_calibration",
    "plot_decision_regions",
    "plot_elbo",
    "plot_evidence",
    "plot_partition",
    "point_estimate",
    "report",
]


class _Face(ModuleType):
    """The package. `report` and `compare` are its functions, also after the modules of these names were imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        for module, names in WHERE.items():
            if name in names:
                return getattr(import_module(f"diagnostics.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Face
