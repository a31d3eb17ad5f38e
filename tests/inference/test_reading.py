"""Drivers that share a kernel: what each has found stays what it was, whatever another reads."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from inference._reading import Reading

from inference import DataTempering, Driver, ImportanceFinish, NestedSampler
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X = np.linspace(0.0, 2.0, 20)


def bounded(x, top=1.0):
    """The draws of a kernel that has read another bound are out of proportion."""
    level = numpyro.sample("level", dist.Uniform(0.0, top))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(level, 1.0), obs=x)


class Reader(ImportanceSampling):
    """Keeps what it has read."""

    def check(self, program):
        self.top = program.arguments["top"]
        super().check(program)

    def draw(self, rng_key, state, program, num_draws):
        return {name: value / self.top for name, value in super().draw(rng_key, state, program, num_draws).items()}

    def updated(self, state, program, before):
        if program.arguments["top"] != self.top:
            raise ValueError(f"update: top was {self.top}.")
        return state


class Outer(Reader):
    """What it keeps is in a kernel inside it."""

    def __init__(self, sampler):
        super().__init__(sampler.model, num_batches=sampler.num_batches, batch_size=sampler.batch_size)
        self.sampler = sampler

    def check(self, program):
        self.sampler.check(program)

    @property
    def top(self):
        return self.sampler.top


def reader():
    return Reader(bounded, num_batches=2, batch_size=16)


def nested():
    return NestedSampler(bounded, num_live=20, num_sweeps=1.0)


def tempering():
    return DataTempering(bounded, num_stages=1, num_particles=20, num_sweeps=1.0)


KERNELS = {
    "toy": reader,
    "inside": lambda: Outer(reader()),
    "nested": pytest.param(nested, marks=pytest.mark.slow),
    "finish": pytest.param(lambda: ImportanceFinish(nested(), num_draws=200), marks=pytest.mark.slow),
    "tempering": pytest.param(tempering, marks=pytest.mark.slow),
}


def driver_of(kernel):
    return Driver(kernel, num_samples=20, progress_bar=False)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_a_tree_is_of_its_own_run(make, bug, monkeypatch):
    """The planted bug: what has been read last serves all."""
    kernel = make()
    first, second = driver_of(kernel), driver_of(kernel)
    tree = first.run(0, X, top=3.0)
    second.run(1, X, top=30.0)
    if bug:
        monkeypatch.setattr(Reading, "recall", lambda self: None)
    again = first.tree()
    assert again["posterior"].dataset.equals(tree["posterior"].dataset) != bug


@pytest.mark.parametrize("make", [reader, pytest.param(tempering, marks=pytest.mark.slow)], ids=["toy", "tempering"])
def test_an_update_is_of_its_own_run(make):
    """Of a kernel of its own it would be the same."""
    shared = make()
    first, apart = driver_of(shared), driver_of(make())
    for driver in (first, apart):
        driver.run(0, X, top=3.0)
    driver_of(shared).run(1, X[:7], top=30.0)
    with pytest.raises(ValueError, match="update: .*top"):
        first.update(X[:5], top=30.0)
    for driver in (first, apart):
        driver.update(X[:5], top=3.0)
    xr.testing.assert_equal(first.tree()["posterior"].dataset, apart.tree()["posterior"].dataset)
    assert first.tree().attrs["log_evidence"] == apart.tree().attrs["log_evidence"]


def test_a_run_that_is_refused_leaves_the_one_before():
    driver = driver_of(reader())
    tree = driver.run(0, X, top=3.0)
    with pytest.raises(ValueError, match="site 'x'"):
        driver.run(0, np.full(5, np.nan), top=30.0)
    assert driver.kernel.top == 30.0
    xr.testing.assert_equal(driver.tree()["posterior"].dataset, tree["posterior"].dataset)


def test_readings_do_not_hold_each_other():
    """After an update: what was read before it can be let go."""
    driver = driver_of(reader())
    driver.run(0, X, top=3.0)
    driver.update(X[:5], top=3.0)
    known = [value for _, attributes in driver._last[1].reading.attributes for value in attributes.values()]
    assert known
    assert not any(isinstance(value, Reading) for value in known)
