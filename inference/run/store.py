"""Where the records of a run are kept: in memory, or in a checkpoint folder.

A checkpoint folder survives a kill at any moment. It holds

    run.json     what the run is: model, data, settings, versions (compared before a resume)
    state.npz    the commit: states of all chains, counters, and the records after the last full
                 block
    draws.zarr   full blocks of records, opened lazily by the returned tree

Blocks are written before the commit and never changed after it. A kill between the two leaves
blocks that the commit does not know, and the next run writes them again. `state.npz` is replaced by
an atomic rename, so a commit is never half written.
"""

import fcntl
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np
import xarray as xr
import zarr

from inference.program.compiling import as_numpy

__all__ = ["CheckpointError", "Commit", "Store", "concatenate"]

BLOCK_BYTES = 4 * 2**20  # of the widest variable
OURS = (".lock", "run.partial", "command.json")  # what a folder may hold before its run begins

Records = dict[str, dict[str, np.ndarray]]  # group -> variable -> [record, chain, ...]


class CheckpointError(OSError):
    """A checkpoint could not be used or written; `tree` holds what a run had drawn until then."""

    tree: xr.DataTree | None = None


class Commit(NamedTuple):
    """Where a run stands: all that is needed to go on, beside the records."""

    states: Any  # of all chains
    steps: int  # kernel steps taken, warm-up included
    records: int  # records taken
    ended: str  # why the run ended, "" while it is under way
    seconds: float  # spent until now


class Store:
    """Records of a run. With a folder, only those since the last full block are also in memory.

    Args:
        folder: the checkpoint folder; None keeps all records in memory.
        record_dim: name of the dimension of records.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, record_dim: str):
        self.folder = None if folder is None else Path(folder)
        self.record_dim = record_dim
        self.pending: list[Records] = []  # since the last full block
        self.blocked = 0  # records in full blocks
        # records that can be read from zarr: the full blocks, and the rest once the run has ended
        self.readable = 0
        self.waiting_bytes = 0  # of records that wait for the disk
        self.arrays: dict[str, dict[str, zarr.Array]] = {}

    @contextmanager
    def opened(self, identity: Callable[[], dict[str, Any]]) -> Generator[None]:
        """Locks the folder for one run; refuses that of another run, and one that is not writable.

        Args:
            identity: function that returns everything that determines the draws of the run.
        """
        if self.folder is None:
            yield
            return
        name, path = repr(str(self.folder)), self.folder / "run.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / ".lock", "w")  # noqa: SIM115 (held for the whole run)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: cannot write in {name} ({error.strerror}); name another folder."
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"checkpoint: another process runs in {name}; name another folder."
                ) from error
            if path.exists():
                with _undamaged(path):
                    there = json.loads(path.read_text())
                _refuse_another_run(path, there, identity())
            elif any(other.name not in OURS for other in self.folder.iterdir()):
                raise CheckpointError(
                    f"checkpoint: {name} holds files that are no checkpoint; name another folder."
                )
            else:
                with _written(path) as file:
                    file.write(json.dumps(identity(), indent=1).encode())
            yield

    def load(self, states: Any) -> Commit | None:
        """The last commit, or None.

        Args:
            states: states of the run; those of the commit get their structure and types.
        """
        if self.folder is None or not (path := self.folder / "state.npz").exists():
            return None
        with _undamaged(path), np.load(path) as file:
            like, form = jax.tree.flatten(states)
            leaves = [_as_leaf(file[f"leaf_{i}"], leaf) for i, leaf in enumerate(like)]
            tail: Records = {}
            for key in (k for k in file.files if k.startswith("tail/")):
                _, group, name = key.split("/", 2)
                tail.setdefault(group, {})[name] = file[key]
            self.blocked = self.readable = int(file["blocked"])
            self.pending = [tail] if tail else []
            commit = Commit(
                jax.tree.unflatten(form, leaves),
                int(file["steps"]),
                int(file["records"]),
                str(file["ended"]),
                float(file["seconds"]),
            )
        if self.blocked:
            self._open_arrays(self.folder)
        return commit

    def append(self, records: Records) -> None:
        """Keeps the records of one chunk; they are on disk after the next `save`."""
        self.pending.append(records)
        if self.folder is not None:
            self.waiting_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(records))

    def save(self, commit: Commit) -> None:
        """Commits to the folder: full blocks to zarr, the rest with the state.

        A run that ends is readable as a whole in zarr.
        """
        if self.folder is None:
            return
        path = self.folder / "state.npz"
        with _written(path) as file:
            tail = (
                self._write_blocks(self.folder, concatenate(self.pending)) if self.pending else {}
            )
            self.pending = [tail] if tail else []
            self.waiting_bytes = 0
            self.readable = self.blocked
            if commit.ended and _length(tail):
                self._resize_and_write(self.folder, tail, self.blocked)
                self.readable += _length(tail)
            leaves = enumerate(map(as_numpy, jax.tree.leaves(commit.states)))
            tails = {
                f"tail/{group}/{name}": value
                for group, names in tail.items()
                for name, value in names.items()
            }
            counters = commit._asdict() | {"blocked": self.blocked}
            del counters["states"]
            saved = tails | {f"leaf_{i}": leaf for i, leaf in leaves}
            np.savez(file, allow_pickle=False, **saved, **counters)

    def dataset(self, group: str) -> xr.Dataset:
        """Variables [chain, record, ...] of a group: lazily from disk, then those in memory."""
        on_disk = xr.Dataset()
        if self.folder is not None and self.readable and self.arrays.get(group):
            on_disk = xr.open_zarr(
                self.folder / "draws.zarr", group=group, consolidated=False, chunks=None
            ).isel({self.record_dim: slice(0, self.readable)})
        if self.readable != self.blocked or not self.pending:  # nothing is in memory alone
            return on_disk
        self.pending = [concatenate(self.pending)]
        names = self.pending[0].get(group, {})
        if on_disk and not _length({group: names}):
            return on_disk
        in_memory = xr.Dataset(
            {
                name: (self._dims(name, value), np.swapaxes(value, 0, 1))
                for name, value in names.items()
            }
        )
        return xr.concat([on_disk, in_memory], dim=self.record_dim) if on_disk else in_memory

    def in_memory(self) -> "Store":
        """The same records in memory, for updates; the folder keeps what it holds."""
        if self.folder is None:
            return self
        store = Store(None, self.record_dim)
        groups = {*self.arrays, *(group for part in self.pending for group in part)}
        store.append(
            {
                group: {
                    str(name): np.swapaxes(values.values, 0, 1)
                    for name, values in self.dataset(group).data_vars.items()
                }
                for group in groups
            }
        )
        return store

    def _dims(self, name: str, value: np.ndarray) -> list[str]:
        """Dimensions of a variable until the tree names them after the model's plates."""
        return ["chain", self.record_dim, *(f"{name}_dim_{i}" for i in range(value.ndim - 2))]

    def _write_blocks(self, folder: Path, records: Records) -> Records:
        """Writes all full blocks; returns what is left over, which goes into the commit."""
        block = self._block(records)
        full = _length(records) // block * block
        part = lambda where: jax.tree.map(lambda value: value[where], records)
        if full:
            self._resize_and_write(folder, part(slice(0, full)), self.blocked)
            self.blocked += full
        return part(slice(full, None))

    def _resize_and_write(self, folder: Path, records: Records, start: int) -> None:
        if not self.arrays:
            self._create_arrays(folder, records)
        for group, names in records.items():
            for name, value in names.items():
                array = self.arrays[group][name]
                # the array grows with the state
                inner = tuple(map(max, array.shape[2:], value.shape[2:]))
                array.resize((array.shape[0], start + len(value), *inner))
                array[
                    (slice(None), slice(start, start + len(value)), *map(slice, value.shape[2:]))
                ] = np.swapaxes(value, 0, 1)

    def _create_arrays(self, folder: Path, records: Records) -> None:
        root = zarr.open_group(folder / "draws.zarr", mode="w")  # nothing in it is committed yet
        block = self._block(records)
        for group, names in records.items():
            inside = root.create_group(group)
            for name, value in names.items():
                inside.create_array(
                    name,
                    shape=(value.shape[1], 0, *value.shape[2:]),
                    chunks=(value.shape[1], block, *value.shape[2:]),
                    dtype=value.dtype,
                    dimension_names=self._dims(name, value),
                )
        self._open_arrays(folder)

    def _open_arrays(self, folder: Path) -> None:
        root = zarr.open_group(folder / "draws.zarr", mode="r+")
        self.arrays = {name: dict(group.arrays()) for name, group in root.groups()}

    def _block(self, records: Records) -> int:
        """Records in a block: a function of the shapes at the start, the same in every run."""
        if self.arrays:
            return next(iter(next(iter(self.arrays.values())).values())).chunks[1]
        widest = max(value[:1].nbytes for value in jax.tree.leaves(records))
        return int(np.clip(BLOCK_BYTES // max(widest, 1), 1, 10_000))


@contextmanager
def _undamaged(path: Path) -> Generator[None]:
    """Raises CheckpointError where a file cannot be parsed: it was changed after it was written."""
    try:
        yield
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(
            f"checkpoint: {str(path)!r} is damaged ({error}); name another folder, or remove "
            "this one."
        ) from error


@contextmanager
def _written(path: Path) -> Generator[Any]:
    """Yields a file that takes the place of `path` once it is complete, by an atomic rename."""
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: cannot write in {str(path.parent)!r} ({error.strerror or error}); "
            "what was drawn is in `.tree` of this error."
        ) from error


def concatenate(parts: list[Records], axis: int = 0) -> Records:
    """Records of several chunks, or of several chains, as one.

    Where a state has grown between them, the smaller arrays are padded by zeros at the end.

    Args:
        parts: records of the same variables.
        axis: 0 for chunks, 1 for chains.
    """
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: _concatenated(arrays, axis), *parts)


def _concatenated(arrays: tuple[np.ndarray, ...], axis: int) -> np.ndarray:
    sizes = np.max([array.shape for array in arrays], axis=0)
    missing = [[int(n - m) for n, m in zip(sizes, array.shape, strict=True)] for array in arrays]
    for each in missing:
        each[axis] = 0
    return np.concatenate(
        [
            np.pad(array, [(0, n) for n in each]) if any(each) else array
            for array, each in zip(arrays, missing, strict=True)
        ],
        axis,
    )


def _refuse_another_run(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    if not isinstance(there, dict) or not {*there} & {*here}:
        raise CheckpointError(
            f"checkpoint: {str(path)!r} is damaged (it names no run); name another folder, or "
            "remove this one."
        )
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    if names:
        lines = "; ".join(f"{n}: {there.get(n)!r} there, {here.get(n)!r} here" for n in names)
        raise CheckpointError(
            f"checkpoint: {str(path.parent)!r} holds another run ({lines}). Name another folder, "
            "or remove this one."
        )


def _length(records: Records) -> int:
    return len(next(iter(jax.tree.leaves(records)), ()))


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(like))
    return jax.numpy.asarray(array.view(like.dtype) if array.dtype.kind == "V" else array)
