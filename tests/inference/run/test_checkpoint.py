"""A checkpoint is whole at every moment: whatever ends a run, the resumed one equals the run
that nothing ended.
"""

import errno
import os
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
import xarray as xr
import zarr
from jax import random
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_value
from numpyro.infer.mcmc import MCMCKernel

from inference import CheckpointError, Driver, check_checkpoint, salvage_checkpoint
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
@pytest.mark.parametrize("run", ["chain"])
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
    settings = {"num_warmup": 0, "num_samples": 300, "progress_bar": False, "save_every": 0.0}
    tree = Driver(Walk(), checkpoint=tmp_path / "run", **settings).run(0)
    np.testing.assert_array_equal(
        tree.posterior["Param:0"], Driver(Walk(), **settings).run(0).posterior["Param:0"]
    )
    assert tree.posterior["Param:0"].shape == (1, 300, 2)


class Nothing(NamedTuple):
    """The record of a step that has no figures."""


class Silent(ImportanceSampling):
    """An algorithm that records nothing of its steps."""

    def step(self, rng_key, state, program, data):
        return super().step(rng_key, state, program, data)[0], Nothing()


def test_an_algorithm_without_statistics(tmp_path):
    new = lambda **more: Driver(Silent(logistic, 20), num_samples=50, **SAVING, **more)
    tree = new(checkpoint=tmp_path / "run").run(0, X, LABELS)
    xr.testing.assert_equal(
        tree.posterior.to_dataset(), new().run(0, X, LABELS).posterior.to_dataset()
    )
    assert new(checkpoint=tmp_path / "run").run(0, X, LABELS).attrs["steps_run"] == 0


def test_draws_are_opened_lazily(tmp_path, small_blocks):
    tree = chain(checkpoint=tmp_path / "run").run(0, X, LABELS)
    assert not tree.posterior["weight"].variable._in_memory


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


def flipped(path: Path, place: int) -> None:
    """One bit of a file is another one."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_block_is_seen_when_it_is_read(tmp_path, small_blocks):
    """Whatever is read without it can still be read."""
    tree = chain(checkpoint=tmp_path / "run").run(0, X, LABELS)
    flipped(tmp_path / "run" / "draws.zarr" / "posterior" / "weight" / "c" / "0" / "3" / "0", 9)
    block = zarr.open_group(tmp_path / "run" / "draws.zarr")["posterior/weight"].chunks[1]
    with pytest.raises(CheckpointError, match="weight/c/0/3/0' is damaged .* can be saved"):
        tree.posterior["weight"].load()
    sound = tree.posterior["weight"].isel(draw=slice(0, 3 * block))
    xr.testing.assert_equal(
        sound.load(), uninterrupted("chain").posterior["weight"].isel(draw=slice(0, 3 * block))
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "file", ["state.npz", "draws.zarr/posterior/scale/c/0/1", "draws.zarr/posterior/zarr.json"]
)
@pytest.mark.parametrize("deleted", [False, True])
def test_what_is_damaged_is_refused_and_salvaged(file, deleted, tmp_path, small_blocks):
    folder = tmp_path / "run"
    chain(checkpoint=folder).run(0, X, LABELS)
    steps = check_checkpoint(folder).steps
    if deleted:
        (folder / file).unlink()
    else:
        flipped(folder / file, 20)
    for ask in (
        lambda: chain(checkpoint=folder).run(0, X, LABELS),
        lambda: check_checkpoint(folder),
    ):
        with pytest.raises(CheckpointError, match=f"{file}' .*the first \\d+ steps can be saved"):
            ask()
    assert 0 < salvage_checkpoint(folder).steps <= steps
    assert_same(chain(checkpoint=folder).run(0, X, LABELS), uninterrupted("chain"))
    assert check_checkpoint(folder).steps == steps


def test_where_nothing_is_whole_nothing_is_saved(copied):
    folder = copied(num_samples=5)
    for path in folder.glob("*.npz"):
        flipped(path, 99)
    with pytest.raises(CheckpointError, match="damaged .* nothing in it can be saved"):
        check_checkpoint(folder)
    with pytest.raises(CheckpointError, match="nothing in .* can be saved"):
        salvage_checkpoint(folder)


@pytest.mark.parametrize("name", [".lock", "state.partial"])
def test_no_link_is_followed(name, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "thesis.tex")
    short = chain(checkpoint=tmp_path / "run", num_samples=5)
    if name == ".lock":
        with pytest.raises(CheckpointError, match="cannot write in .*symbolic links"):
            short.run(0, X, LABELS)
    else:
        short.run(0, X, LABELS)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


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
        if calls[0] >= 6:
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
