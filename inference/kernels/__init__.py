"""Inference kernels, one file a kernel."""

from inference.kernels.augment_reduce import AugmentReduce
from inference.kernels.collapsed_gibbs import CollapsedGibbs
from inference.kernels.conditional_gibbs import ConditionalGibbs
from inference.kernels.coordinate_ascent import CoordinateAscent
from inference.kernels.data_tempering import DataTempering
from inference.kernels.importance_finish import ImportanceFinish
from inference.kernels.latent_history import LatentHistory
from inference.kernels.merged_stages import MergedStages
from inference.kernels.nested_sampler import NestedSampler
from inference.kernels.particle_filter import ParticleFilter
from inference.kernels.staged import Staged
from inference.kernels.stochastic_vi import StochasticVI

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
