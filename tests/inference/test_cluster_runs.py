"""Orders, parts and replicates of a test as tasks of a cluster of two processes, whose workers are
killed.
"""

import os
import signal

import jax
import numpy as np
import pytest
import xarray as xr

from diagnostics.calibration import on_host, sbc, with_kernel
from inference import Driver, Interrupted, MergedStages, Orders, Program, Staged
from inference.distributions import Zeta
from inference.run import cluster as _cluster
from tests.inference import models
from tests.inference.importance import ImportanceSampling
from tests.inference.nests import line
from tests.inference.run.test_cluster import (
    assert_same,
    kill_worker,
    meanwhile,
    wait_for_steps,
)
from tests.inference.stages import X as ROWS
from tests.inference.stages import Y as VALUES
from tests.inference.test_orders import X, Y, polynomial

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("x64", "numpyro_promotion")]


def orders(checkpoint=None, **settings):
    own = {"progress_bar": False, "num_samples": 1, "save_every": 0.0, "checkpoint": checkpoint}
    kernel = lambda model: ImportanceSampling(model, 300, batch_size=2000)
    return Orders(polynomial, Zeta(), kernel=kernel, most=3, settings=own, **settings)


def parts():
    return [lambda i=i: (ROWS[i::2], VALUES[i::2]) for i in (0, 1)]


def merged(checkpoint=None, **settings):
    how = {"num_samples": 20, "progress_bar": False, "save_every": 0.0, "checkpoint": checkpoint}
    part = Driver(Staged(line, num_stages=1, num_live=100), **how)
    return MergedStages.of(part, 0, parts(), **settings)


@pytest.fixture(scope="module")
def orders_of_one_process():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return orders().run(0, X, Y)


def assert_same_orders(found, wanted):
    xr.testing.assert_equal(found["orders"].dataset, wanted["orders"].dataset)
    for name in wanted.children.keys() - {"orders"}:
        assert_same(found[name], wanted[name])


def test_a_worker_is_killed_in_an_order(client, tmp_path, orders_of_one_process):
    kill = lambda: kill_worker(client, 0, tmp_path / "order_1", 10)
    with meanwhile(kill) as known:
        found = orders(tmp_path, cluster=client).run(0, X, Y)
    assert_same_orders(found, orders_of_one_process)
    attrs = found["order_1"].attrs
    assert attrs["steps_run"] == attrs["steps"] - known[0] < attrs["steps"]


def test_ctrl_c_in_an_order(client, tmp_path, orders_of_one_process, monkeypatch):
    """A run in one process goes on."""
    monkeypatch.setattr(_cluster, "POLL", 0.05)
    press = lambda: (wait_for_steps(tmp_path / "order_1", 10), os.kill(os.getpid(), signal.SIGINT))
    with meanwhile(press), pytest.raises(Interrupted, match="SIGINT") as caught:
        orders(tmp_path, cluster=client).run(0, X, Y)
    assert caught.value.tree.attrs["steps"] >= 10
    assert_same_orders(orders(tmp_path).run(0, X, Y), orders_of_one_process)


def test_a_worker_is_killed_in_a_part(client, tmp_path):
    kill = lambda: kill_worker(client, 1, tmp_path / "part_1", 1)
    with meanwhile(kill):
        found = merged(tmp_path, cluster=client)
    for one, other in zip(found.parts, merged().parts, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    found.read(Program(line, ROWS, VALUES))  # the rows of all parts


@pytest.mark.parametrize("runs_on_host", [False, True], ids=["compiled", "on the host"])
def test_replicates_of_a_calibration(runs_on_host, client):
    importance = ImportanceSampling(models.normal_mean, 4)
    fit = with_kernel(importance, None, 7)
    if runs_on_host:
        driver = Driver(importance, num_samples=7, progress_bar=False)
        fit = on_host(lambda key, program: driver.run(key, **program.arguments))
    how = {"num_replicates": 4, "batch_size": 2}
    run = lambda **more: sbc(models.normal_mean, fit, models.Y.astype(float), **how, **more)
    here, there = run(), run(cluster=client)
    np.testing.assert_equal(there.ranks, here.ranks)
