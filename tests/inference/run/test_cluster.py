"""Chains as tasks of a cluster of two processes: whatever ends a worker, the run equals that of one
process, bit for bit.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import NUTS

from inference import CheckpointError, Driver, Interrupted, check_checkpoint, converged
from inference.run import cluster as _cluster
from tests.inference.importance import ImportanceSampling
from tests.inference.models import LABELS, X, logistic

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("numpyro_promotion")]

ROOT = Path(__file__).parents[3]
STEPS = 100 + 20_000


def chain(**settings):
    sizes = {"num_warmup": 100, "num_samples": 20_000, "num_chains": 3, "save_every": 0.0}
    return Driver(NUTS(logistic), **sizes | {"progress_bar": False} | settings)


def importance(**settings):
    sizes = {"num_samples": 50, "num_chains": 2, "progress_bar": False}
    return Driver(ImportanceSampling(logistic, 20), **sizes | settings)


@cache
def of_one_process():
    return chain().run(0, X, LABELS)


def assert_same(one: xr.DataTree, other: xr.DataTree) -> None:
    xr.testing.assert_equal(one.load(), other.load())
    mine, theirs = (
        {
            name: value
            for name, value in tree.attrs.items()
            if name != "created_at" and not name.endswith("_time") and "steps_run" not in name
        }
        for tree in (one, other)
    )
    np.testing.assert_equal(mine, theirs)


@contextmanager
def meanwhile(act):
    """Acts in another thread, once the first chain has committed some steps."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    yield found
    thread.join()


def steps_of(folder: Path) -> int:
    return check_checkpoint(folder).steps if (folder / "state.npz").exists() else 0


def wait_for_steps(folder: Path, steps: int = 200) -> None:
    started = time.monotonic()
    while steps_of(folder) < steps and time.monotonic() < started + 120:
        time.sleep(0.02)


def pid_of(client, number: int) -> int:
    """The process whose worker has a task."""
    pids = client.run(os.getpid)
    (address,) = (
        worker
        for worker, tasks in client.processing().items()
        if any(task.endswith(f"-{number}") for task in tasks)
    )
    return pids[address]


def kill_worker(client, number: int, folder: Path, steps: int) -> int:
    """Kills the worker of a task whose run has committed some steps; returns how many."""
    wait_for_steps(folder, steps)
    process = pid_of(client, number)
    os.kill(process, signal.SIGSTOP)
    committed = steps_of(folder)
    os.kill(process, signal.SIGKILL)
    return committed


def test_chains_are_those_of_one_process(client):
    tree = chain(cluster=client).run(0, X, LABELS)
    assert_same(tree, of_one_process())
    assert tree.attrs["steps_run_of_chains"] == [STEPS] * 3


def test_replicates_and_their_evidence(client, x64):
    driver = importance(cluster=client.scheduler.address)
    tree = driver.run(0, X, LABELS)
    assert_same(tree, importance().run(0, X, LABELS))
    with pytest.raises(AssertionError):
        assert_same(tree, importance().run(1, X, LABELS))
    assert driver.states[1].particles["weight"].dtype == np.float64


def test_a_worker_is_killed(client, tmp_path):
    """Only the steps after its last commit are taken again."""

    kill = lambda: kill_worker(client, 0, tmp_path / "chain_0", 10)
    with meanwhile(kill) as known:
        tree = chain(cluster=client, checkpoint=tmp_path).run(0, X, LABELS)
    assert_same(tree, of_one_process())
    assert tree.attrs["steps_run_of_chains"][0] == STEPS - known[0] < STEPS


def test_ctrl_c_and_on_in_one_process(client, tmp_path, monkeypatch):
    monkeypatch.setattr(_cluster, "POLL", 0.05)
    press = lambda: (wait_for_steps(tmp_path / "chain_0"), os.kill(os.getpid(), signal.SIGINT))
    with meanwhile(press), pytest.raises(Interrupted, match="SIGINT ended the run") as caught:
        chain(cluster=client, checkpoint=tmp_path).run(0, X, LABELS)
    posterior = caught.value.tree["posterior"].to_dataset()
    assert 0 < posterior.sizes["draw"] < 20_000
    assert caught.value.tree.attrs["ended"] == "SIGINT"
    cut = {"chain": posterior["chain"], "draw": posterior["draw"]}
    xr.testing.assert_equal(posterior, of_one_process()["posterior"].to_dataset().sel(cut))
    tree = chain(checkpoint=tmp_path).run(0, X, LABELS)
    assert_same(tree, of_one_process())
    assert 0 < tree.attrs["steps_run_of_chains"][0] < STEPS


def test_a_model_of_a_notebook(client):
    """It is pickled with its code, which workers cannot import."""
    code = {"numpyro": numpyro, "dist": dist}
    exec(
        "def model(y):\n    level = numpyro.sample('level', dist.Normal(0.0, 1.0))\n"
        "    numpyro.sample('y', dist.Normal(level, 1.0), obs=y)\n",
        code | {"__name__": "__main__"},
        found := {},
    )
    how = {"num_warmup": 20, "num_samples": 20, "num_chains": 2, "progress_bar": False}
    run = lambda **more: Driver(NUTS(found["model"]), **how, **more).run(0, 1.5)
    assert_same(run(cluster=client), run())


def test_bad_clusters_are_refused_before_any_work(client, monkeypatch):
    from dask.distributed import Client

    run = lambda cluster: importance(cluster=cluster).run(0, X, LABELS)
    with pytest.raises(TypeError, match="cluster: found 3, wanted a dask.distributed.Client"):
        run(3)
    closed = Client(client.scheduler.address, set_as_default=False)
    closed.close()
    with pytest.raises(ValueError, match="cluster: the client is closed"):
        run(closed)
    monkeypatch.setattr(_cluster, "ANSWER", 0.5)
    with pytest.raises(ConnectionError, match="no scheduler answers at 'tcp://127.0.0.1:9'"):
        run("tcp://127.0.0.1:9")
    real = importlib.metadata.version
    monkeypatch.setattr(_cluster, "PACKAGES", ("jax", "numpyro"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.1")
        with pytest.raises(ValueError, match=f"jax is {real('jax')} on worker tcp.*and 0.1 here"):
            run(client)
    monkeypatch.setattr(_cluster, "PACKAGES", ("jax", "not-installed"))
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name[0] == "n" else real(name)
    )
    with pytest.raises(ValueError, match=r"not-installed is not there on worker tcp.*and 0\.1"):
        run(client)


def test_what_cannot_run_alone_is_refused(client, tmp_path, monkeypatch):
    lock = threading.Lock()

    def locked(x, y):
        with lock:
            logistic(x, y)

    with pytest.raises(TypeError, match="cluster: the model, its arguments or the kernel cannot"):
        Driver(ImportanceSampling(locked, 20), cluster=client).run(0, X, LABELS)
    with pytest.raises(ValueError, match="stop: a rule looks at all chains"):
        chain(cluster=client, stop=converged()).run(0, X, LABELS)
    with pytest.raises(ValueError, match="chain_method: found 'vectorized'"):
        chain(cluster=client, chain_method="vectorized").run(0, X, LABELS)
    importance(checkpoint=tmp_path / "one").run(0, X, LABELS)
    with pytest.raises(CheckpointError, match="holds a run of all chains in one process"):
        importance(checkpoint=tmp_path / "one", cluster=client).run(0, X, LABELS)
    monkeypatch.chdir(tmp_path)  # workers stay in their own
    with pytest.raises(CheckpointError, match="does not see what is written into"):
        importance(checkpoint="/proc/self/cwd/own", cluster=client).run(0, X, LABELS)
    folder = tmp_path / "run"
    importance(checkpoint=folder, cluster=client).run(0, X, LABELS)
    with pytest.raises(CheckpointError, match=r"chain_0' holds another run \(data y"):
        importance(checkpoint=folder, cluster=client).run(0, X, 1 - LABELS)


@contextmanager
def started(kind: str, known: Path, *options: str):
    """A scheduler or a worker in a process of its own."""
    command = [sys.executable, "-m", "dask", kind, "--scheduler-file", str(known)]
    process = subprocess.Popen(
        [*command, "--no-dashboard", *options], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_scheduler_goes_away(tmp_path):
    """Nothing is lost: its workers save what they have, and the run goes on in one process."""
    from dask.distributed import Client

    known, folder = tmp_path / "scheduler.json", tmp_path / "run"
    with started("scheduler", known, "--port", "0") as scheduler:
        while not known.exists():
            time.sleep(0.05)
        address = json.loads(known.read_text())["address"]
        with started("worker", known, "--nthreads", "1", "--death-timeout", "30") as worker:
            with Client(address) as client:
                client.wait_for_workers(1, timeout=60)
            end = lambda: (wait_for_steps(folder / "chain_0"), scheduler.kill())
            with meanwhile(end), pytest.raises(ConnectionError, match="scheduler has gone away"):
                chain(cluster=address, checkpoint=folder).run(0, X, LABELS)
            worker.wait()
    tree = chain(checkpoint=folder).run(0, X, LABELS)
    assert_same(tree, of_one_process())
    assert 0 < tree.attrs["steps_run_of_chains"][0] < STEPS
