"""Tests run strict: no implicit promotion of dtype or rank, warnings are errors (see
pyproject.toml).

Compiled code is kept between tests, and between runs, in pytest's own cache folder; `pytest
--cache-clear` empties it.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
# before jax is imported; subprocesses inherit it
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax
import numpyro.infer  # noqa: F401 (before ArviZ, whose lazy modules would load it a second time)
import pytest
from threadpoolctl import threadpool_limits

from inference.program.compiling import make_room


def pytest_configure(config):
    """Most tests compile for longer than they run; those of the slow set run for longer, and hardly
    one compiles what another did. One process of tests has one core: with threads, small products
    of matrices wait for cores that others have.
    """
    threadpool_limits(1, user_api="blas")
    # a run in the background ignores Ctrl-C, which some tests raise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    one_thread = "--xla_cpu_multi_thread_eigen=false"
    if config.option.markexpr != "slow":
        os.environ.setdefault("XLA_FLAGS", f"{one_thread} --xla_backend_optimization_level=0")
    else:
        os.environ.setdefault("XLA_FLAGS", one_thread)
        jax.config.update("jax_enable_compilation_cache", False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test marked `slow_after(2)` runs its first two cases by default, the others with the
    slow set.
    """
    quick = Counter()
    for item in items:
        mark, name = item.get_closest_marker("slow_after"), item.nodeid.split("[")[0]
        if mark and not item.get_closest_marker("slow"):
            quick[name] += 1
            if quick[name] > mark.args[0]:
                item.add_marker("slow")


STARTED = time.monotonic()


def pytest_runtest_setup(item):
    """With ZOO_MINUTES=40 no test starts after 40 minutes: a run on a busy machine ends in time,
    and names what it left out.
    """
    minutes = float(os.environ.get("ZOO_MINUTES", "inf"))
    if time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"ZOO_MINUTES={minutes:g} were over")


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def _room_for_code():
    """The compiled code of all modules together is too much for one process."""
    yield
    make_room()


@pytest.fixture
def x64():
    """The test runs in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def numpyro_promotion():
    """NumPyro's own kernels divide floats by integers and broadcast ranks; a test that runs one
    lets them.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def client():
    """A client of two processes, for the tests marked `cluster`."""
    from dask.distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client
