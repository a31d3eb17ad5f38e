"""Where the records of a run are kept: in memory, or in a checkpoint folder that survives a kill at
any moment.

A checkpoint folder holds

    run.json     what the run is: model, data, settings, versions (compared before a resume)
    state.npz    the commit: states of all chains, counters, and the records after the last full
                 block
    draws.zarr   full blocks of records, opened lazily by the returned tree

Blocks are written before the commit and never touched after it: a kill between the two leaves
blocks that the commit does not know, and the next run writes them again. `state.npz` is replaced by
an atomic rename. So what is committed is whole.
"""

import fcntl
import json
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np
import xarray as xr
import zarr
from jax import random

from inference.program.compiling import as_numpy

__all__ = [
    "CheckpointError",
    "Commit",
    "FolderStore",
    "MemoryStore",
    "as_dataset",
    "concatenate",
    "dims_of",
    "write_atomically",
]

BLOCK_BYTES = 4 * 2**20
OURS = (".lock", "run.partial", "command.json")  # what a folder may hold before its run begins

Records = dict[str, dict[str, np.ndarray]]  # group -> variable -> [record, chain, ...]


class CheckpointError(OSError):
    """A checkpoint could not be used or written; `tree` holds what was drawn, where a run was
    under way.
    """

    tree: xr.DataTree | None = None


class Commit(NamedTuple):
    """Where a run stands. Everything needed to go on beside the records."""

    states: Any  # of all chains
    steps: int  # kernel steps taken, warm-up included
    records: int  # records taken
    ended: str  # why the run ended, "" while it is under way
    seconds: float  # spent until now


class MemoryStore:
    """Records in host memory."""

    waiting_bytes = 0  # nothing ever waits for the disk

    def __init__(self, record_dim: str) -> None:
        self.record_dim = record_dim
        self.parts: list[Records] = []

    def opened(self, identity: Callable[[], dict[str, Any]]) -> AbstractContextManager[None]:
        """Nothing to hold, and nothing to compare."""
        return nullcontext()

    def load(self, states: Any) -> Commit | None:
        """Nothing from before."""
        return None

    def append(self, records: Records) -> None:
        """Keep the records of one chunk."""
        self.parts.append(records)

    def save(self, commit: Commit) -> None:
        """Nothing to do: memory ends with the process."""

    def in_memory(self) -> "MemoryStore":
        """It is."""
        return self

    def dataset(self, group: str) -> xr.Dataset:
        """Variables of a group, [chain, record, ...]."""
        if len(self.parts) > 1:
            self.parts = [concatenate(self.parts)]
        return (
            as_dataset(self.parts[0].get(group, {}), self.record_dim)
            if self.parts
            else xr.Dataset()
        )


class FolderStore:
    """Records on disk; only those since the last full block are also in memory."""

    def __init__(self, folder: str | os.PathLike[str], record_dim: str):
        self.folder = Path(folder)
        self.record_dim = record_dim
        self.pending: list[Records] = []  # since the last full block
        self.blocked = 0  # records in full blocks
        # records that can be read from zarr: the full blocks, and the rest once the run has ended
        self.readable = 0
        self.waiting_bytes = 0  # of records appended since the last save
        self.arrays: dict[str, dict[str, zarr.Array]] = {}

    @contextmanager
    def opened(self, identity: Callable[[], dict[str, Any]]) -> Generator[None]:
        """Hold the folder for one run; refuse the folder of another run, and one that cannot be
        written.
        """
        path = self.folder / "run.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / ".lock", "w")  # noqa: SIM115 (held for the whole run)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: cannot write in {str(self.folder)!r} ({error.strerror}); name "
                "another folder."
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"checkpoint: another process runs in {str(self.folder)!r}; name another "
                    "folder."
                ) from error
            if path.exists():
                with self._whole(path):
                    there = json.loads(path.read_text())
                _refuse_another_run(self.folder, there, identity())
            elif any(p.name not in OURS for p in self.folder.iterdir()):
                raise CheckpointError(
                    f"checkpoint: {str(self.folder)!r} holds files that are no checkpoint; name "
                    "another folder."
                )
            else:
                with self._reported():
                    write_atomically(path, json.dumps(identity(), indent=1).encode())
            yield

    def load(self, states: Any) -> Commit | None:
        """The last commit, or None; `states` shows the structure that the leaves belong to."""
        path = self.folder / "state.npz"
        if not path.exists():
            return None
        with self._whole(path), np.load(path) as file:
            leaves = [
                _as_leaf(file[f"leaf_{i}"], like) for i, like in enumerate(jax.tree.leaves(states))
            ]
            tail: Records = {}
            for key in (k for k in file.files if k.startswith("tail/")):
                _, group, name = key.split("/", 2)
                tail.setdefault(group, {})[name] = file[key]
            self.blocked, self.pending = int(file["blocked"]), [tail] if tail else []
            self.readable = self.blocked
            commit = Commit(
                jax.tree.unflatten(jax.tree.structure(states), leaves),
                int(file["steps"]),
                int(file["records"]),
                str(file["ended"]),
                float(file["seconds"]),
            )
        if self.blocked:
            self._open_arrays()
        return commit

    def append(self, records: Records) -> None:
        """Keep the records of one chunk; they are on disk after the next `save`."""
        self.pending.append(records)
        self.waiting_bytes += sum(
            value.nbytes for names in records.values() for value in names.values()
        )

    def save(self, commit: Commit) -> None:
        """Commit: full blocks to zarr, the rest with the state; a run that ends is readable as a
        whole in zarr.
        """
        with self._reported():
            tail = self._write_blocks(concatenate(self.pending)) if self.pending else {}
            self.pending = [tail] if tail else []
            self.waiting_bytes = 0
            self.readable = self.blocked
            if commit.ended and _length(tail):
                self._resize_and_write(tail, self.blocked)
                self.readable += _length(tail)
            leaves = {
                f"leaf_{i}": as_numpy(leaf) for i, leaf in enumerate(jax.tree.leaves(commit.states))
            }
            rest = {
                f"tail/{group}/{name}": value
                for group, names in tail.items()
                for name, value in names.items()
            }
            counters: dict[str, Any] = {
                "steps": commit.steps,
                "records": commit.records,
                "ended": commit.ended,
                "blocked": self.blocked,
                "seconds": commit.seconds,
            }
            with _temporary(self.folder / "state.npz") as file:
                np.savez(file, allow_pickle=False, **leaves, **rest, **counters)

    def dataset(self, group: str) -> xr.Dataset:
        """Variables of a group: lazily from disk, with the records that are only in memory
        behind them.
        """
        on_disk = xr.Dataset()
        if self.readable and self.arrays.get(group):
            on_disk = xr.open_zarr(
                self.folder / "draws.zarr", group=group, consolidated=False, chunks=None
            )
            on_disk = on_disk.isel({self.record_dim: slice(0, self.readable)})
        waiting = (
            concatenate(self.pending) if self.pending and self.readable == self.blocked else {}
        )
        if on_disk and not _length(waiting):
            return on_disk
        in_memory = as_dataset(waiting.get(group, {}), self.record_dim)
        return xr.concat([on_disk, in_memory], dim=self.record_dim) if on_disk else in_memory

    def in_memory(self) -> MemoryStore:
        """The same records for a run that goes on without the folder, which keeps what it holds."""
        store = MemoryStore(self.record_dim)
        groups = {*self.arrays, *(group for part in self.pending for group in part)}
        found = {
            group: {
                str(name): values.values for name, values in self.dataset(group).data_vars.items()
            }
            for group in groups
        }
        store.append(
            {
                group: {name: np.swapaxes(value, 0, 1) for name, value in names.items()}
                for group, names in found.items()
            }
        )
        return store

    def _write_blocks(self, records: Records) -> Records:
        """Write all full blocks; what is left over goes into the commit."""
        block = self._block(records)
        full = _length(records) // block * block
        if full:
            self._resize_and_write(_part(records, slice(0, full)), self.blocked)
            self.blocked += full
        return _part(records, slice(full, None))

    def _resize_and_write(self, records: Records, start: int) -> None:
        if not self.arrays:
            self._create_arrays(records)
        for group, names in records.items():
            for name, value in names.items():
                array = self.arrays[group][name]
                # wider, where a state has grown
                inner = tuple(map(max, array.shape[2:], value.shape[2:]))
                array.resize((array.shape[0], start + len(value), *inner))
                array[
                    (slice(None), slice(start, start + len(value)), *map(slice, value.shape[2:]))
                ] = np.swapaxes(value, 0, 1)

    def _create_arrays(self, records: Records) -> None:
        # nothing in it is committed yet
        root = zarr.open_group(self.folder / "draws.zarr", mode="w")
        block = self._block(records)
        for group, names in records.items():
            folder = root.create_group(group)
            for name, value in names.items():
                shape = (value.shape[1], 0, *value.shape[2:])
                chunks = (*shape[:1], block, *shape[2:])
                folder.create_array(
                    name,
                    shape=shape,
                    chunks=chunks,
                    dtype=value.dtype,
                    dimension_names=dims_of(name, value, self.record_dim),
                )
        self._open_arrays()

    def _open_arrays(self) -> None:
        root = zarr.open_group(self.folder / "draws.zarr", mode="r+")
        self.arrays = {name: dict(group.arrays()) for name, group in root.groups()}

    def _block(self, records: Records) -> int:
        """Records in a block: some MB of the widest variable; a function of the shapes at the
        start, so that every run agrees on it.
        """
        if self.arrays:
            return next(iter(next(iter(self.arrays.values())).values())).chunks[1]
        widest = max(value[:1].nbytes for names in records.values() for value in names.values())
        return int(np.clip(BLOCK_BYTES // max(widest, 1), 1, 10_000))

    @contextmanager
    def _whole(self, path: Path) -> Generator[None]:
        """What we wrote is whole; what somebody else changed may not be."""
        try:
            yield
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"checkpoint: {str(path)!r} is damaged ({error}); name another folder, or remove "
                "this one."
            ) from error

    @contextmanager
    def _reported(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: cannot write in {str(self.folder)!r} ({error.strerror or error}); "
                "what was drawn is in `.tree` of this error."
            ) from error


def concatenate(parts: list[Records], axis: int = 0) -> Records:
    """Records of several chunks, or of several chains, as one.

    Where a state has grown between them, the smaller ones get zeros behind.
    """
    if len(parts) == 1:
        return parts[0]
    return {
        group: {name: _joined([part[group][name] for part in parts], axis) for name in names}
        for group, names in parts[0].items()
    }


def _joined(arrays: list[np.ndarray], axis: int) -> np.ndarray:
    size = np.max([array.shape for array in arrays], axis=0)
    missing = [
        [
            (0, 0 if i == axis else int(n - m))
            for i, (m, n) in enumerate(zip(array.shape, size, strict=True))
        ]
        for array in arrays
    ]
    return np.concatenate(
        [
            np.pad(array, pads) if np.any(pads) else array
            for array, pads in zip(arrays, missing, strict=True)
        ],
        axis,
    )


def dims_of(name: str, value: np.ndarray, record_dim: str) -> list[str]:
    """Dimensions of a variable until the tree names them after the model's plates."""
    return ["chain", record_dim, *(f"{name}_dim_{i}" for i in range(value.ndim - 2))]


def as_dataset(variables: dict[str, np.ndarray], record_dim: str) -> xr.Dataset:
    """Records [record, chain, ...] as variables [chain, record, ...]."""
    return xr.Dataset(
        {
            name: (dims_of(name, value, record_dim), np.swapaxes(value, 0, 1))
            for name, value in variables.items()
        }
    )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    with _temporary(path) as file:
        file.write(content)


@contextmanager
def _temporary(path: Path) -> Generator[Any]:
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _refuse_another_run(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    if not isinstance(there, dict) or not {*there} & {*here}:
        path = str(folder / "run.json")
        raise CheckpointError(
            f"checkpoint: {path!r} is damaged (it names no run); name another folder, or remove "
            "this one."
        )
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    differ = [f"{name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in names]
    if differ:
        lines = "; ".join(differ)
        raise CheckpointError(
            f"checkpoint: {str(folder)!r} holds another run ({lines}). Name another folder, or "
            "remove this one."
        )


def _length(records: Records) -> int:
    return next((len(value) for names in records.values() for value in names.values()), 0)


def _part(records: Records, where: slice) -> Records:
    return {
        group: {name: value[where] for name, value in names.items()}
        for group, names in records.items()
    }


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return random.wrap_key_data(jax.numpy.asarray(array), impl=random.key_impl(like))
    return jax.numpy.asarray(array.view(like.dtype) if array.dtype.kind == "V" else array)
