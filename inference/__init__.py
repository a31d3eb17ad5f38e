"""Run a kernel on a model: the driver, the protocol, and what may be asked of a model.

Importing it asks JAX for whole products of float32 matrices, unless something else was asked for
(`jax_default_matmul_precision`): recent GPUs round them to three digits by default, and
log-likelihoods with them.
"""

import jax

if jax.config.jax_default_matmul_precision is None:
    jax.config.update("jax_default_matmul_precision", "highest")

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
from inference.orders import Orders, run_orders
from inference.program.program import Program, StructureError
from inference.reading.conjugate.table import register_conjugate
from inference.run.driver import Driver
from inference.run.protocol import Algorithm, Results
from inference.run.stopping import converged, settled
from inference.run.store import CheckpointError

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
