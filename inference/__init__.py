"""Run a kernel on a model: the driver, the protocol of kernels, and what may be asked of a model.

A name is imported when it is first used, so that one kernel does not wait for the others.

Importing this package asks JAX for whole products of float32 matrices, unless something else was
asked for (`jax_default_matmul_precision`): recent GPUs round them to three digits by default, and
log-likelihoods with them.
"""

import re
from importlib import import_module
from pathlib import Path
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
    from inference.run.session import Interrupted
    from inference.run.stopping import converged, settled
    from inference.run.store import CheckpointError, check_checkpoint, salvage_checkpoint

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
    "Interrupted",
    "LatentHistory",
    "MergedStages",
    "NestedSampler",
    "Orders",
    "ParticleFilter",
    "Program",
    "Results",
    "Staged",
    "StructureError",
    "check_checkpoint",
    "converged",
    "register_conjugate",
    "run_orders",
    "salvage_checkpoint",
    "settled",
]

_KERNELS = Path(__file__).parent / "kernels"
_MODULES = {  # and kernels of which a folder has the name, such as `AugmentReduce`
    "Algorithm": "run.protocol",
    "CheckpointError": "run.store",
    "DataTempering": "kernels.tempering.kernel",
    "Driver": "run.driver",
    "ImportanceFinish": "kernels.nested.importance_finish",
    "Interrupted": "run.session",
    "MergedStages": "kernels.staged.merge",
    "NestedSampler": "kernels.nested.kernel",
    "Orders": "orders",
    "Program": "program.program",
    "Results": "run.protocol",
    "StructureError": "program.sites",
    "check_checkpoint": "run.store",
    "converged": "run.stopping",
    "register_conjugate": "reading.conjugate.table",
    "run_orders": "orders",
    "salvage_checkpoint": "run.store",
    "settled": "run.stopping",
}

if jax.config.jax_default_matmul_precision is None:
    jax.config.update("jax_default_matmul_precision", "highest")


def __getattr__(name: str) -> Any:
    folder = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    module = _MODULES.get(name, f"kernels.{folder}.kernel")
    if name not in _MODULES and not (name[:1].isupper() and (_KERNELS / folder).is_dir()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
