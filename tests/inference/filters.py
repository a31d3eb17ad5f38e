"""One table of bits, and runs of the particle filter on it by the driver, for the tests of what
the driver and the filter do together.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import xarray as xr

from inference import Driver, ParticleFilter, Program
from inference.kernels.particle_filter.kernel import FilterReading
from zoo.aclass import aclass

__all__ = [
    "LATER",
    "OPTIONS",
    "RNG",
    "X",
    "Y",
    "check_same",
    "driver",
    "kernel",
    "program",
    "put",
    "reading",
    "run",
    "values",
    "whole",
]

RNG = np.random.default_rng(0)
GROUP = RNG.integers(0, 3, 27)
X = (RNG.random((27, 3)) < np.array([0.1, 0.9, 0.5])[GROUP, None]).astype(float)
X[2, 1] = X[25, 0] = np.nan
X[5] = np.nan  # nothing is known of this row
Y = RNG.integers(0, 2, 27)
LATER = np.where(np.arange(27) == 20, -1, Y)  # the filters of the classes become one before row 20
OPTIONS = {"num_classes": 2, "alpha": 1.0, "all_labelled": False}
program = partial(Program, aclass, **OPTIONS)


@cache
def reading(**settings: Any) -> FilterReading:
    """What a filter with these settings reads of the model with these options."""
    return ParticleFilter(aclass, **settings).read(program(X, LATER))[0]


def kernel(**settings: Any) -> ParticleFilter:
    """A filter that knows the model, which is read once for all."""
    found = ParticleFilter(aclass, **{"num_particles": 8, **settings})
    known = reading(resampling=found.resampling, keep_assignments=found.keep_assignments)
    found.read = lambda program: (known, known.data(program))  # ty: ignore[invalid-assignment]
    return found


def driver(
    num_chains: int = 2,
    chain_method: str = "sequential",
    checkpoint: Any = None,
    max_time: float | None = None,
    **settings: Any,
):
    """A driver of such a filter."""
    of_run = {
        "num_chains": num_chains,
        "chain_method": chain_method,
        "checkpoint": checkpoint,
        "max_time": max_time,
    }
    return Driver(kernel(**settings), num_samples=50, progress_bar=False, **of_run)


def run(y: np.ndarray = Y, x: np.ndarray = X, **settings: Any) -> tuple[Driver, xr.DataTree]:
    """The driver after its run, and the tree."""
    this = driver(**settings)
    return this, this.run(0, x, y, **OPTIONS)


@cache
def whole(later: bool = False, **settings: Any) -> tuple[Driver, xr.DataTree]:
    """All rows at once, with room for all of their groups."""
    return run(LATER if later else Y, **settings)


def values(tree: xr.DataTree) -> dict[str, xr.DataArray]:
    """Every variable of a tree, and the evidence."""
    found = {
        f"{group.name}/{name}": value.load()
        for group in tree.children.values()
        for name, value in group.data_vars.items()
    }
    return found | {"log_evidence": xr.DataArray(tree.attrs["log_evidence"])}


def check_same(one: xr.DataTree, other: xr.DataTree, tolerance: float = 0.0) -> None:
    """Variables, dimensions, and values to within the relative tolerance; none of it for whole
    numbers.
    """
    found, wanted = values(one), values(other)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dims == wanted[name].dims
        rtol = tolerance if value.dtype.kind == "f" else 0
        np.testing.assert_allclose(value, wanted[name], rtol=rtol, err_msg=name)


def put(table: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """A copy with another entry."""
    changed = np.array(table)
    changed[index] = value
    return changed
