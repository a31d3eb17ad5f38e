"""Run a kernel on a model: the driver, the protocol of kernels, and what may be asked of a model.

A name is imported when it is first used, so that one kernel does not wait for the others.

Importing this package asks JAX for whole products of float32 matrices, unless something else was
asked for (`jax_default_matmul_precision`): recent GPUs round them to three digits by default, and
log-likelihoods with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
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
    from inference.program.program import Program
    from inference.program.sites import StructureError
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

_MODULES = {
    "Algorithm": "run.protocol",
    "AugmentReduce": "kernels.augment_reduce.kernel",
    "CheckpointError": "run.store",
    "CollapsedGibbs": "kernels.collapsed_gibbs.kernel",
    "ConditionalGibbs": "kernels.conditional_gibbs.kernel",
    "CoordinateAscent": "kernels.coordinate_ascent.kernel",
    "DataTempering": "kernels.tempering.kernel",
    "Driver": "run.driver",
    "ImportanceFinish": "kernels.nested.importance_finish",
    "LatentHistory": "kernels.latent_history.kernel",
    "MergedStages": "kernels.staged.merge",
    "NestedSampler": "kernels.nested.kernel",
    "Orders": "orders",
    "ParticleFilter": "kernels.particle_filter.kernel",
    "Program": "program.program",
    "Results": "run.protocol",
    "Staged": "kernels.staged.kernel",
    "StructureError": "program.sites",
    "converged": "run.stopping",
    "register_conjugate": "reading.conjugate.table",
    "run_orders": "orders",
    "settled": "run.stopping",
}

if jax.config.jax_default_matmul_precision is None:
    jax.config.update("jax_default_matmul_precision", "highest")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
