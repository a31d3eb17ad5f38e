"""A small run of each kernel of this package, and of NumPyro's NUTS, Gibbs and SVI."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpyro
import pytest
import xarray as xr
from numpyro.infer import NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import zoo
from inference import (
    AugmentReduce,
    CollapsedGibbs,
    ConditionalGibbs,
    CoordinateAscent,
    DataTempering,
    Driver,
    LatentHistory,
    NestedSampler,
    ParticleFilter,
    Staged,
)
from inference.run import store as _store
from inference.run.loop import Loop
from tests.bench.same_cases import bits, choices, line_data, reals
from tests.bench.same_chains import regression
from tests.inference.histories import TOTAL, beads
from tests.inference.models import LABELS, X, logistic
from tests.inference.nests import line

aclass, iqgme = zoo.load("aclass").model, zoo.load("iqgme").model


class Case(NamedTuple):
    """The kernel, the arguments of the model, and the settings of the driver."""

    kernel: Callable[[], Any]
    args: tuple = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012


def chain(kernel: Callable[[], Any], *args: Any, draws: int = 60, **kwargs: Any) -> Case:
    return Case(kernel, args, kwargs, {"num_warmup": 8, "num_samples": draws, "num_chains": 2})


def algorithm(
    kernel: Callable[[], Any], *args: Any, steps: int | None = None, **kwargs: Any
) -> Case:
    return Case(kernel, args, kwargs, {"num_warmup": steps, "num_samples": 5})


def blocks() -> Gibbs:
    own = CollapsedGibbs(aclass, parameters=True)
    return Gibbs([(own, ["z", "share", "p"]), (NUTS(aclass), ["alpha"])])


def svi() -> SVI:
    return SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(0.02), Trace_ELBO())


def augment_reduce() -> AugmentReduce:
    return AugmentReduce(zoo.load("augment_reduce").model)


SIZES = {"noise": "gumbel", "num_classes": 8, "batch_size": 10, "num_negatives": 3}
CASES = {
    "AugmentReduce": algorithm(augment_reduce, *choices(), steps=60, **SIZES),
    "CollapsedGibbs": chain(partial(CollapsedGibbs, aclass, parameters=True), *bits()),
    "ConditionalGibbs": chain(partial(ConditionalGibbs, regression), *line_data(30)),
    # it merges groups in its last sweeps
    "CoordinateAscent": algorithm(
        partial(CoordinateAscent, iqgme), *reals(), steps=60, num_experts=4
    ),
    # its arrays grow
    "LatentHistory": chain(partial(LatentHistory, beads, capacity="room"), TOTAL, room=6),
    "NestedSampler": algorithm(partial(NestedSampler, line, num_live=50), *line_data()),
    "ParticleFilter": algorithm(partial(ParticleFilter, aclass, num_particles=20), *bits()),
    "Staged": algorithm(partial(Staged, line, num_stages=2, num_live=20), *line_data(24)),
    "DataTempering": algorithm(
        partial(DataTempering, line, num_stages=3, num_particles=40), *line_data(45)
    ),
    "NUTS": chain(partial(NUTS, logistic), X, LABELS),
    "Gibbs": chain(blocks, *bits(), alpha=numpyro.distributions.Gamma(2.0, 2.0)),
    "SVI": algorithm(svi, X, LABELS, steps=60),
}


@contextmanager
def surroundings(pace: int | None = None) -> Generator[None]:
    """Blocks of a few records; with `pace`, so many steps at most between two commits.

    A run in float64, in which NumPyro's kernels may promote types.
    """
    size = Loop.size
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.setattr(_store, "BLOCK_BYTES", 200)
        if pace is not None:
            patch.setattr(Loop, "size", lambda *args: min(pace, size(*args)))
        yield


@cache
def driver(name: str) -> Driver:
    """One driver for all runs of a case, so that its programs are compiled once."""
    case = CASES[name]
    return Driver(case.kernel(), **case.settings, progress_bar=False, save_every=0.0)


def run(name: str, folder: Path | None = None) -> xr.DataTree:
    """A run with a checkpoint in a folder, or in memory."""
    case, this = CASES[name], driver(name)
    this.checkpoint = folder
    return this.run(3, *case.args, **case.kwargs)


@cache
def uninterrupted(name: str) -> xr.DataTree:
    """The run that nothing has ended."""
    return run(name)


def is_same(name: str, tree: xr.DataTree) -> bool:
    """Whether all draws and statistics are those of the run that nothing has ended."""
    groups = {group for group in ("posterior", "sample_stats", "particles") if group in tree}
    whole = uninterrupted(name)
    return groups > {"sample_stats"} and all(
        tree[group].to_dataset().load().equals(whole[group].to_dataset()) for group in groups
    )
