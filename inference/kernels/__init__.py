"""Inference kernels, a folder a kernel: `kernel.py` has the class, and each `__init__.py` says
which file does what.
"""

from inference.kernels.augment_reduce.kernel import AugmentReduce
from inference.kernels.collapsed_gibbs.kernel import CollapsedGibbs
from inference.kernels.conditional_gibbs.kernel import ConditionalGibbs
from inference.kernels.coordinate_ascent.kernel import CoordinateAscent
from inference.kernels.latent_history.kernel import LatentHistory
from inference.kernels.nested.importance_finish import ImportanceFinish
from inference.kernels.nested.kernel import NestedSampler
from inference.kernels.particle_filter.kernel import ParticleFilter
from inference.kernels.staged.kernel import Staged
from inference.kernels.staged.merge import MergedStages
from inference.kernels.tempering.kernel import DataTempering
from inference.run.svi import StochasticVI

__all__ = [
    "AugmentReduce",
    "CollapsedGibbs",
    "ConditionalGibbs",
    "CoordinateAscent",
    "DataTempering",
    "ImportanceFinish",
    "LatentHistory",
    "MergedStages",
    "NestedSampler",
    "ParticleFilter",
    "Staged",
    "StochasticVI",
]
