"""What a person uses: data sets, estimators, the command `zoo`.

Estimators are imported when they are used, so that `import gallery` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gallery.aclass import AClassClassifier
    from gallery.archipelago import ArchipelagoClassifier
    from gallery.augment_reduce import AugmentReduceClassifier
    from gallery.bsvd import BSVDCompleter
    from gallery.iqgme import IQGMEClassifier
    from gallery.iqgme_tasks import MultiTaskIQGMEClassifier
    from gallery.staged import StagedMixtureClassifier

WHERE = {
    "AClassClassifier": "gallery.aclass",
    "ArchipelagoClassifier": "gallery.archipelago",
    "AugmentReduceClassifier": "gallery.augment_reduce",
    "BSVDCompleter": "gallery.bsvd",
    "IQGMEClassifier": "gallery.iqgme",
    "MultiTaskIQGMEClassifier": "gallery.iqgme_tasks",
    "StagedMixtureClassifier": "gallery.staged",
}

__all__ = [
    "AClassClassifier",
    "ArchipelagoClassifier",
    "AugmentReduceClassifier",
    "BSVDCompleter",
    "IQGMEClassifier",
    "MultiTaskIQGMEClassifier",
    "StagedMixtureClassifier",
]


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
