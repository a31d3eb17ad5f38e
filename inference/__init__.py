"""Run a kernel on a model: the driver, the protocol, and what may be asked of a model.

Importing it asks JAX for whole products of float32 matrices, unless something else was asked for (`jax_default_matmul_precision`): recent
GPUs round them to three digits by default, and log-likelihoods with them.
"""

import jax

if jax.config.jax_default_matmul_precision is None:
    jax.config.update("jax_default_matmul_precision", "highest")

from inference._store import CheckpointError
from inference.conjugate import register_conjugate
from inference.driver import Driver
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
from inference.orders import Orders, run_orders
from inference.program import Program, StructureError
from inference.protocol import Algorithm, Results
from inference.stopping import converged, settled

__all__ = [
    "Algorithm",
    "AugmentReduce",
    "CheckpointError",
    "CollapsedGibbs",
    "ConditionalGibbs",
    "CoordinateAscent",
    "DataTempering",
    "Driver",
    "ImportanceFinish",
    "LatentHistory",
    "MergedStages",
    "NestedSampler",
    "Orders",
    "ParticleFilter",
    "Program",
    "Results",
    "Staged",
    "StructureError",
    "converged",
    "register_conjugate",
    "run_orders",
    "settled",
]
