"""A checkpoint is whole at every moment: whatever ends a run, the resumed one equals the run
that nothing ended.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
import xarray as xr
from jax import random
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_value
from numpyro.infer.mcmc import MCMCKernel

from inference import CheckpointError, Driver
from inference.run import store as _store
from tests.inference.importance import ImportanceSampling
from tests.inference.models import LABELS, X, Y, logistic, normal_mean

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


SAVING = {"progress_bar": False, "save_every": 0.0}


def chain(**settings):
    return Driver(
        NUTS(logistic),
        **{"num_warmup": 30, "num_samples": 200, "num_chains": 2, **SAVING, **settings},
    )


def svi(**settings):
    kernel = SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(0.02), Trace_ELBO())
    return Driver(kernel, **{"num_warmup": 300, "num_samples": 50, **SAVING, **settings})


def importance(**settings):
    return Driver(
        ImportanceSampling(logistic, 200),
        **{"num_samples": 50, "num_chains": 2, **SAVING, **settings},
    )


RUNS = {"chain": chain, "svi": svi, "importance": importance}


def assert_same(one: xr.DataTree, other: xr.DataTree) -> None:
    for group in ("posterior", "sample_stats"):
        xr.testing.assert_equal(one[group].to_dataset().load(), other[group].to_dataset().load())


@cache
def uninterrupted(name):
    return RUNS[name]().run(0, X, LABELS)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder and the tree of a chain that has ended, by its settings."""

    @cache
    def of(**settings):
        folder = tmp_path_factory.mktemp("ended") / "run"
        return folder, chain(checkpoint=folder, **settings).run(0, X, LABELS)

    return of


@pytest.fixture
def copied(ended, tmp_path):
    """A copy of such a folder."""
    return lambda **settings: shutil.copytree(ended(**settings)[0], tmp_path / "run")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few records, so that a short run writes many."""
    monkeypatch.setattr(_store, "BLOCK_BYTES", 200)


class Killed(BaseException):
    """Stands for the moment at which a process dies: nothing in the project may catch it."""


def die_at(monkeypatch, owner, name: str, call: int) -> None:
    """The `call`-th call of a function that touches the disk never returns."""
    original, calls = getattr(owner, name), [0]

    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("run", RUNS)
def test_checkpointed_run_equals_one_in_memory(run, tmp_path, small_blocks):
    tree = RUNS[run](checkpoint=tmp_path / "run").run(0, X, LABELS)
    assert_same(tree, uninterrupted(run))


DEATHS = [
    (os, "replace", 4),
    (os, "fsync", 5),
    (np, "savez", 3),
    (_store.Store, "_resize_and_write", 3),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("owner", "name", "call"), DEATHS)
@pytest.mark.parametrize("run", ["chain", "importance"])
def test_death_inside_a_save_loses_nothing(
    run, owner, name, call, tmp_path, small_blocks, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        die_at(patch, owner, name, call)
        with pytest.raises(Killed):
            RUNS[run](checkpoint=folder).run(0, X, LABELS)
    assert_same(RUNS[run](checkpoint=folder).run(0, X, LABELS), uninterrupted(run))


@pytest.mark.slow
def test_a_store_that_forgets_its_tail_would_be_caught(tmp_path, small_blocks, monkeypatch):
    """The planted bug of the tests above: blocks are trusted beyond the commit."""
    folder = tmp_path / "run"
    load = _store.Store.load

    def careless(store, states):
        commit = load(store, states)
        store.pending = store.pending and [jax.tree.map(lambda value: value[:0], store.pending[0])]
        return commit

    with monkeypatch.context() as patch:
        die_at(patch, np, "savez", 6)
        with pytest.raises(Killed):
            chain(checkpoint=folder).run(0, X, LABELS)
    monkeypatch.setattr(_store.Store, "load", careless)
    with pytest.raises(AssertionError):
        assert_same(chain(checkpoint=folder).run(0, X, LABELS), uninterrupted("chain"))


def test_a_finished_run_is_read_and_not_run_again(ended, copied):
    _, first = ended()
    again = chain(checkpoint=copied()).run(0, X, LABELS)
    assert first.attrs["steps_run"] == 230
    assert again.attrs["steps_run"] == 0
    assert_same(first, again)


def test_more_samples_extend_a_finished_run(tmp_path, small_blocks):
    chain(checkpoint=tmp_path / "run", num_samples=77).run(0, X, LABELS)
    tree = chain(checkpoint=tmp_path / "run").run(0, X, LABELS)
    assert tree.attrs["steps_run"] == 123
    assert_same(tree, uninterrupted("chain"))


def test_fewer_samples_than_a_finished_run_holds_are_refused_or_cut(copied):
    tree = chain(checkpoint=copied(), num_samples=50).run(0, X, LABELS)
    assert tree.posterior.sizes["draw"] == 200  # nothing that was drawn is thrown away


class WalkState(NamedTuple):
    at: jax.Array
    rng_key: jax.Array


class Walk(MCMCKernel):
    """A kernel without a model and without statistics, on a plain array."""

    sample_field = "at"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return WalkState(jnp.zeros(2), rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, key = random.split(state.rng_key)
        return WalkState(0.5 * state.at + random.normal(key, (2,)), rng_key)


def test_a_kernel_without_model_and_statistics(tmp_path, small_blocks):
    settings = {"num_warmup": 0, "num_samples": 300, "progress_bar": False}
    tree = Driver(Walk(), checkpoint=tmp_path / "run", **settings).run(0)
    np.testing.assert_array_equal(
        tree.posterior["Param:0"], Driver(Walk(), **settings).run(0).posterior["Param:0"]
    )
    assert tree.posterior["Param:0"].shape == (1, 300, 2)


def test_draws_are_opened_lazily(tmp_path, small_blocks):
    tree = chain(checkpoint=tmp_path / "run").run(0, X, LABELS)
    assert not tree.posterior["weight"].variable._in_memory


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("when", ["warmup", "sampling"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_return_what_was_drawn(number, when, tmp_path):
    settings = {"num_samples": 10**7} if when == "sampling" else {"num_warmup": 10**7}
    driver = chain(checkpoint=tmp_path / "run", **settings)
    threading.Thread(target=_send_when_compiled, args=(driver, number), daemon=True).start()
    tree = driver.run(0, X, LABELS)
    assert tree.attrs["ended"] == signal.Signals(number).name
    assert (tree.posterior.sizes["draw"] > 0) == (when == "sampling")
    if when == "sampling":
        drawn = tree.posterior.to_dataset().load().isel(draw=slice(0, 100))
        xr.testing.assert_equal(
            drawn, chain(num_samples=100).run(0, X, LABELS).posterior.to_dataset()
        )


def _send_when_compiled(driver: Driver, number: int) -> None:
    while driver._last is None or driver._last.session.steps < 500:
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def test_another_run_is_refused_with_what_differs(copied):
    folder = copied(num_samples=5)
    other = LABELS.copy()
    other[0] = 1 - other[0]
    with pytest.raises(CheckpointError, match="holds another run .*data y"):
        chain(checkpoint=folder).run(0, X, other)
    with pytest.raises(CheckpointError, match="rng_key"):
        chain(checkpoint=folder).run(1, X, LABELS)
    with pytest.raises(CheckpointError, match="num_warmup: 30 there, 31 here"):
        chain(checkpoint=folder, num_warmup=31).run(0, X, LABELS)
    with pytest.raises(CheckpointError, match=r"NUTS.target_accept_prob: 0.8 there, 0.9 here"):
        Driver(
            NUTS(logistic, target_accept_prob=0.9), num_warmup=30, num_chains=2, checkpoint=folder
        ).run(0, X, LABELS)
    with pytest.raises(CheckpointError, match="x64: False there, True here"), jax.enable_x64(True):
        chain(checkpoint=folder).run(0, X, LABELS)


def test_an_edited_model_is_refused(tmp_path):
    chain = lambda model: Driver(
        NUTS(model), num_warmup=5, num_samples=5, progress_bar=False, checkpoint=tmp_path / "run"
    )
    chain(lambda y: normal_mean(y, 2.0)).run(0, Y)
    chain(lambda y: normal_mean(y, 2.0)).run(0, Y)
    with pytest.raises(CheckpointError, match="model: "):
        chain(lambda y: normal_mean(y, 3.0)).run(0, Y)


@pytest.mark.slow
def test_another_learning_rate_is_refused(tmp_path):
    for rate, refused in ((0.02, False), (0.02, False), (0.03, True)):
        kernel = SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(rate), Trace_ELBO())
        driver = Driver(
            kernel, num_warmup=5, num_samples=5, progress_bar=False, checkpoint=tmp_path / "run"
        )
        if not refused:
            driver.run(0, X, LABELS)
            continue
        with pytest.raises(CheckpointError, match="step of the kernel"):
            driver.run(0, X, LABELS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["start", "table", "guide"])
def test_settings_that_hide_in_closures_are_seen(name, tmp_path):
    def kernel(value):
        if name == "start":
            return NUTS(normal_mean, init_strategy=init_to_value(values={"mu": value}))
        table = jnp.linspace(0.01, 0.02, 6) * value
        rate = (lambda step: table[jnp.minimum(step, 5)]) if name == "table" else 0.01
        return SVI(
            normal_mean,
            AutoNormal(normal_mean, init_scale=value if name == "guide" else 0.1),
            numpyro.optim.Adam(rate),
            Trace_ELBO(),
        )

    run = lambda value: Driver(
        kernel(value), num_warmup=5, num_samples=5, progress_bar=False, checkpoint=tmp_path / "run"
    ).run(0, Y)
    run(1.0)
    run(1.0)
    with pytest.raises(CheckpointError, match="holds another run"):
        run(1.5)


@pytest.mark.parametrize(
    ("name", "text"), [("run.json", "{"), ("run.json", "{}"), ("run.json", "3"), ("state.npz", "{")]
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(name, text, copied):
    folder = copied(num_samples=5)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name}' is damaged"):
        chain(checkpoint=folder).run(0, X, LABELS)


def test_a_folder_of_somebody_elses_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="holds files that are no checkpoint"):
        chain(checkpoint=tmp_path).run(0, X, LABELS)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_two_processes_cannot_share_a_folder(tmp_path):
    store = _store.Store(tmp_path / "run", "draw")
    with store.opened(lambda: {}), pytest.raises(CheckpointError, match="another process runs"):
        chain(checkpoint=tmp_path / "run").run(0, X, LABELS)


def test_an_unwritable_folder_is_an_error_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write in .*file"):
        chain(checkpoint=tmp_path / "file" / "run").run(0, X, LABELS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("owner", ["savez", "zarr"])
def test_a_full_disk_is_an_error_that_carries_the_draws(owner, tmp_path, small_blocks, monkeypatch):
    original, calls = (np.savez if owner == "savez" else _store.Store._resize_and_write), [0]

    def full(*args, **kwargs):
        calls[0] += 1
        if calls[0] >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(
            *((np, "savez") if owner == "savez" else (_store.Store, "_resize_and_write")),
            full,
        )
        with pytest.raises(CheckpointError, match="No space left on device.*`.tree`") as caught:
            chain(checkpoint=tmp_path / "run").run(0, X, LABELS)
    drawn = caught.value.tree.posterior.to_dataset().load()
    assert drawn.sizes["draw"] > 0
    xr.testing.assert_equal(
        drawn,
        uninterrupted("chain").posterior.to_dataset().isel(draw=slice(0, drawn.sizes["draw"])),
    )
    assert_same(chain(checkpoint=tmp_path / "run").run(0, X, LABELS), uninterrupted("chain"))


VICTIM = textwrap.dedent(
    """
    import sys
    from inference.run import store as _store
    from tests.inference.run import test_checkpoint as here
    _store.BLOCK_BYTES = 2000
    here.RUNS[sys.argv[1]](checkpoint=sys.argv[2], **here.LONG[sys.argv[1]]).run(0, here.X, here.LABELS)
    """
)
# longer than twelve killed lives
LONG = {"chain": {"num_samples": 200_000}, "svi": {"num_warmup": 3_000_000}}


@pytest.mark.slow
@pytest.mark.parametrize("run", LONG)
def test_random_kills_change_nothing(run, tmp_path):
    """At least ten random SIGKILLs a kernel, then one run to the end: equal, bit for bit, to a
    run that nobody killed.
    """
    rng = np.random.default_rng(0)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-c", VICTIM, run, str(tmp_path / "run")]
    kills = 0
    for attempt in range(30):
        process = subprocess.Popen(command, cwd=Path(__file__).parents[3], env=environment)
        state = tmp_path / "run" / "state.npz"
        before = state.stat().st_mtime_ns if state.exists() else 0
        anytime = attempt % 3 == 2  # also while it imports, compiles or reads the checkpoint
        while (
            not anytime
            and process.poll() is None
            and (not state.exists() or state.stat().st_mtime_ns == before)
        ):
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 6.0) if anytime else rng.uniform(0.0, 0.4))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if kills == 12:
            break
    assert kills == 12
    resumed = RUNS[run](checkpoint=tmp_path / "run", **LONG[run])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_store, "BLOCK_BYTES", 2000)
        assert_same(resumed.run(0, X, LABELS), RUNS[run](**LONG[run]).run(0, X, LABELS))
