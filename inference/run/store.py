"""Where the records of a run are kept: in memory, or in a checkpoint folder.

A checkpoint folder survives a kill at any moment, and damage to its files is seen. It holds

    state.npz     the commit: what the run is, states of all chains, counters, the records after the
                  last full block, and a checksum of each block; at its end a checksum of all this
    state-N.npz   earlier commits, each after twice as many steps N as the one before
    draws.zarr    full blocks of records, opened lazily by the returned tree

or, of a run whose chains were tasks of a cluster, such a folder for each of them:

    chain_0, chain_1, ...

Blocks are written before the commit that names them and never changed after it. A kill between the
two leaves blocks that the commit does not know, and the next run writes them again. `state.npz` is
replaced by an atomic rename, so a commit is never half written. Where a file is damaged,
`salvage_checkpoint` goes back to the newest commit that is whole with all its blocks.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr
import zarr
from zarr.codecs import ZstdCodec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import LocalStore

from inference.program.compiling import as_numpy

__all__ = [
    "Blocks",
    "CheckpointError",
    "Commit",
    "Store",
    "chain_folders",
    "check_checkpoint",
    "concatenate",
    "is_foreign",
    "salvage_checkpoint",
    "written",
]

BLOCK_BYTES = 4 * 2**20  # of the widest variable
STATE, DRAWS = "state.npz", "draws.zarr"
# what a folder may hold before the first commit
OURS = (".lock", "state.partial", "command.json", "command.partial")
DIGEST_BYTES = hashlib.sha256().digest_size

Records = dict[str, dict[str, np.ndarray]]  # group -> variable -> [record, chain, ...]


class CheckpointError(OSError):
    """A checkpoint could not be used or written; `tree` holds what a run had drawn until then."""

    tree: xr.DataTree | None = None


class _DamageError(Exception):
    """A file of a checkpoint cannot be read, or was changed after it was written."""


class Commit(NamedTuple):
    """Where a run stands: all that is needed to go on, beside the records."""

    states: Any  # of all chains
    steps: int  # kernel steps taken, warm-up included
    records: int  # records taken
    ended: str  # why the run ended, "" while it is under way
    seconds: float  # spent until now


class Blocks(LocalStore):
    """The files of `draws.zarr`. A block is compared with its checksum when it is read.

    zarr's own documents, `zarr.json`, are read from memory.
    """

    def __init__(self, root: Path, *, read_only: bool = False):
        super().__init__(root, read_only=read_only)
        self.documents: dict[str, str] = {}
        self.checksums: dict[str, int] = {}

    def with_read_only(self, read_only: bool = False) -> "Blocks":
        """The same files and checksums."""
        other = Blocks(self.root, read_only=read_only)
        other.documents, other.checksums = self.documents, self.checksums
        return other

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        """The content of a file; None where there is none and none was written."""
        make = (prototype or default_buffer_prototype()).buffer.from_bytes
        if key in self.documents:
            return make(self.documents[key].encode())
        if key not in self.checksums:
            return None
        with _undamaged(self.root.parent):
            return make(_block(self.root / key, self.checksums[key]))

    async def set(self, key: str, value: Buffer) -> None:
        """Writes a file, and keeps the document, or the checksum of the block."""
        await super().set(key, value)
        if key.endswith("zarr.json"):
            self.documents[key] = value.to_bytes().decode()
        else:
            self.checksums[key] = zlib.crc32(value.as_numpy_array())


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
        self.block = 0  # records in a block; 0 before the first record
        self.kept = -1  # steps of the last of the earlier commits
        self.blocks = Blocks((self.folder or Path()) / DRAWS)
        self.arrays: dict[str, Any] = {}  # of zarr, by "group/variable"
        self.identity: dict[str, Any] = {}  # what the run is
        self.found: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None  # in `state.npz`

    @contextmanager
    def opened(self, identity: Callable[[], dict[str, Any]]) -> Generator[None]:
        """Locks the folder for one run; refuses that of another run, and one that is not writable.

        The blocks that it holds are read once, and compared with their checksums.

        Args:
            identity: function that returns everything that determines the draws of the run.
        """
        if self.folder is None:
            yield
            return
        with _locked(self.folder):
            if is_foreign(self.folder):
                raise CheckpointError(
                    f"checkpoint: {str(self.folder)!r} holds files that are no checkpoint; name "
                    "another folder."
                )
            self.found, self.identity = None, identity()
            if {other.name for other in self.folder.iterdir()} - {*OURS}:
                with _undamaged(self.folder):
                    self.found = (_read if self.arrays else _checked)(self.folder / STATE)
                _refuse_another_run(self.folder, self.found[0]["identity"], self.identity)
            yield

    def load(self, states: Any) -> Commit | None:
        """The last commit, or None.

        Args:
            states: states of the run; those of the commit get their structure and types.
        """
        if self.folder is None or self.found is None:
            return None
        (record, found), self.found = self.found, None
        like, form = jax.tree.flatten(states)
        leaves = [_as_leaf(found[f"leaf_{i}"], leaf) for i, leaf in enumerate(like)]
        tail: Records = {}
        for key in (key for key in found if key.startswith("tail/")):
            _, group, name = key.split("/", 2)
            tail.setdefault(group, {})[name] = found[key]
        self.pending = [tail] if tail else []
        self.blocked = self.readable = record["blocked"]
        self.block = record["block"]
        kept = map(_steps_of, _commits(self.folder))
        self.kept = max(steps for steps in kept if steps <= record["steps"])
        self.blocks.documents.update(record["documents"])
        self.blocks.checksums.update(record["checksums"])
        if self.blocked:
            self._open_arrays()
        counters = {name: record[name] for name in Commit._fields[1:]}
        return Commit(jax.tree.unflatten(form, leaves), **counters)

    def append(self, records: Records) -> None:
        """Keeps the records of one chunk; full blocks are written at once."""
        self.pending.append(records)
        if self.folder is None:
            return
        size = lambda value: value.itemsize * int(np.prod(value.shape[1:]))
        widest = max([1, *map(size, jax.tree.leaves(records))])
        # a function of the shapes at the start, the same in every run
        self.block = self.block or int(np.clip(BLOCK_BYTES // widest, 1, 10_000))
        if sum(map(_length, self.pending)) >= self.block:
            with _writing(self.folder):
                self._write_blocks()

    def save(self, commit: Commit) -> None:
        """Commits to the folder: the records after the last full block with the state.

        A run that ends is readable as a whole in zarr.
        """
        if self.folder is None:
            return
        tail = concatenate(self.pending) if self.pending else {}
        self.pending, self.readable = [tail] if tail else [], self.blocked
        with _writing(self.folder):
            if commit.ended and _length(tail):
                self._resize_and_write(tail, self.blocked)
                self.readable += _length(tail)
        in_blocks = lambda key: int(key.split("/")[4]) * self.block < self.blocked
        checksums = {k: v for k, v in self.blocks.checksums.items() if in_blocks(k)}
        record = commit._replace(states=None)._asdict() | {
            "blocked": self.blocked,
            "block": self.block,
            "identity": self.identity,
            "documents": self.blocks.documents if self.blocked else {},
            "checksums": checksums,
        }
        arrays = {f"leaf_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(commit.states))}
        arrays |= {
            f"tail/{group}/{name}": value
            for group, names in tail.items()
            for name, value in names.items()
        }
        path = self.folder / STATE
        with written(path) as file:
            np.savez(
                file,
                allow_pickle=False,
                record=np.array(json.dumps(record).encode()),
                **{name: as_numpy(value) for name, value in arrays.items()},
            )
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())
        if commit.steps > 2 * self.kept:
            with written(path.with_name(f"state-{commit.steps}.npz")) as file:
                file.write(path.read_bytes())
            self.kept = commit.steps

    def dataset(self, group: str) -> xr.Dataset:
        """Variables [chain, record, ...] of a group: lazily from disk, then those in memory."""
        on_disk = xr.Dataset()
        names_on_disk = [name for name in self.arrays if name.startswith(f"{group}/")]
        if self.readable and names_on_disk:
            on_disk = xr.open_zarr(self.blocks, group=group, consolidated=False, chunks=None)
            on_disk = on_disk[[name.removeprefix(f"{group}/") for name in names_on_disk]]
            on_disk = on_disk.isel({self.record_dim: slice(0, self.readable)})
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
        groups = {name.split("/")[0] for name in self.arrays}
        store.append(
            {
                group: {
                    str(name): np.swapaxes(values.values, 0, 1)
                    for name, values in self.dataset(group).data_vars.items()
                }
                for group in groups.union(*self.pending)
            }
        )
        return store

    def _dims(self, name: str, value: np.ndarray) -> list[str]:
        """Dimensions of a variable until the tree names them after the model's plates."""
        return ["chain", self.record_dim, *(f"{name}_dim_{i}" for i in range(value.ndim - 2))]

    def _write_blocks(self) -> None:
        """Writes all full blocks, one by one, and keeps a copy of what is left over."""
        records = concatenate(self.pending)
        full = _length(records) // self.block * self.block
        part = lambda first, last: jax.tree.map(lambda value: value[first:last], records)
        for start in range(0, full, self.block):
            self._resize_and_write(part(start, start + self.block), self.blocked + start)
        self.pending = [jax.tree.map(np.copy, part(full, None))]
        self.blocked += full
        self.readable = self.blocked

    def _resize_and_write(self, records: Records, start: int) -> None:
        if not self.arrays:
            self._create_arrays(records)
        for group, names in records.items():
            for name, value in names.items():
                array = self.arrays[f"{group}/{name}"]
                # the array grows with the state
                inner = tuple(map(max, array.shape[2:], value.shape[2:]))
                array.resize((array.shape[0], start + len(value), *inner))
                array[
                    (slice(None), slice(start, start + len(value)), *map(slice, value.shape[2:]))
                ] = np.swapaxes(value, 0, 1)

    def _create_arrays(self, records: Records) -> None:
        self.blocks.documents.clear()
        root = zarr.open_group(self.blocks, mode="w")  # nothing in it is committed yet
        for group, names in records.items():
            inside = root.create_group(group)
            for name, value in names.items():
                inside.create_array(
                    name,
                    shape=(value.shape[1], 0, *value.shape[2:]),
                    chunks=(value.shape[1], self.block, *value.shape[2:]),
                    dtype=value.dtype,
                    compressors=ZstdCodec(checksum=True),  # for those who read without `Blocks`
                    dimension_names=self._dims(name, value),
                )
        self._open_arrays()

    def _open_arrays(self) -> None:
        root = zarr.open_group(self.blocks, mode="r+")
        names = [key.removesuffix("/zarr.json") for key in self.blocks.documents]
        self.arrays = {name: root[name] for name in names if name.count("/") == 1}


def chain_folders(folder: str | os.PathLike[str] | None) -> list[Path]:
    """The folders of single chains, by number; none where all chains are in one checkpoint."""
    found = [] if folder is None else Path(folder).glob("chain_*")
    number = lambda path: path.name.removeprefix("chain_")
    return sorted((path for path in found if number(path).isdigit()), key=lambda p: int(number(p)))


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds files, and no checkpoint."""
    if chain_folders(folder):
        return False
    names = {path.name for path in folder.iterdir()} - {*OURS}
    return bool(names and not names & {STATE, DRAWS} and not _commits(folder)[1:])


def check_checkpoint(folder: str | os.PathLike[str]) -> Commit:
    """The last commit of a checkpoint, without states, after a comparison of all checksums.

    A damaged file is a CheckpointError, which says what can be saved. Cost: all files are read.

    Args:
        folder: the checkpoint folder; nothing in it is changed, and a run may go on in it.
    """
    with _undamaged(Path(folder)):
        newest, *earlier = _commits(Path(folder))
        record, _ = _checked(newest)
        for path in earlier:
            _read(path)
    return Commit(None, **{name: record[name] for name in Commit._fields[1:]})


def salvage_checkpoint(folder: str | os.PathLike[str]) -> Commit:
    """Goes back to the newest commit that is whole with all its blocks, and returns it.

    The next run takes the steps after it again, and draws the same.

    Args:
        folder: the checkpoint folder.
    """
    folder = Path(folder)
    with _locked(folder):
        path = _whole(folder)
        if path is None:
            raise CheckpointError(f"checkpoint: nothing in {str(folder)!r} can be saved.")
        if path.name != STATE:
            with written(folder / STATE) as file:
                file.write(path.read_bytes())
        for key, document in _read(folder / STATE)[0]["documents"].items():
            where = folder / DRAWS / key
            where.parent.mkdir(parents=True, exist_ok=True)
            with written(where) as file:
                file.write(document.encode())
        for other in _commits(folder)[1:]:
            try:
                _read(other)
            except _DamageError:
                other.unlink()
    return check_checkpoint(folder)


@contextmanager
def written(path: Path) -> Generator[Any]:
    """Yields a file that takes the place of `path` once it is complete, by an atomic rename."""
    partial = path.with_suffix(".partial")
    with _writing(path.parent):
        partial.unlink(missing_ok=True)  # also where it is a link, which is not followed
        with open(partial, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    """Raises CheckpointError where a file cannot be written."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: cannot write in {str(folder)!r} ({error.strerror or error}); "
            "what was drawn is in `.tree` of this error."
        ) from error


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Makes the folder, and keeps other processes out of it."""
    name = repr(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a", opener=_no_link)  # noqa: SIM115 (held for the whole run)
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
        yield


@contextmanager
def _undamaged(folder: Path) -> Generator[None]:
    """Raises CheckpointError where a file is damaged, and says what can be saved."""
    try:
        yield
    except _DamageError as error:
        rescue = "nothing in it can be saved: name another folder, or remove this one"
        if path := _whole(folder):
            steps = _read(path)[0]["steps"]
            rescue = (
                f"the first {steps} steps can be saved, by `zoo resume --salvage {folder}` or "
                f"`inference.salvage_checkpoint({str(folder)!r})`"
            )
        raise CheckpointError(f"checkpoint: {error}; {rescue}.") from error


def _whole(folder: Path) -> Path | None:
    """The newest commit that is whole with all its blocks."""
    for path in _commits(folder):
        with suppress(_DamageError):
            _with_blocks(path)
            return path
    return None


def _commits(folder: Path) -> list[Path]:
    """The files of all commits, the newest first."""
    return [folder / STATE, *sorted(folder.glob("state-*.npz"), key=_steps_of, reverse=True)]


def _steps_of(path: Path) -> int:
    """The number in the name of an earlier commit, else -1."""
    number = path.stem.removeprefix("state-")
    return int(number) if number.isdigit() else -1


def _checked(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record and the arrays of a commit, whose blocks and documents of zarr are whole."""
    found = _with_blocks(path)
    for key, document in found[0]["documents"].items():
        where = path.parent / DRAWS / key
        try:
            there = json.loads(_content(where))
        except ValueError:
            there = {}
        # after a kill the shape may be that of more records
        if there | {"shape": None} != json.loads(document) | {"shape": None}:
            raise _DamageError(f"{str(where)!r} is damaged (it is not what was written)")
    return found


def _with_blocks(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record and the arrays of a commit, whose blocks are whole."""
    found = _read(path)
    for key, checksum in found[0]["checksums"].items():
        _block(path.parent / DRAWS / key, checksum)
    return found


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record and the arrays of a commit."""
    data = _content(path)
    if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise _DamageError(f"{str(path)!r} is damaged (its checksum is another one)")
    with np.load(BytesIO(data)) as file:
        arrays = dict(file)
    return json.loads(arrays.pop("record").item()), arrays


def _block(path: Path, checksum: int) -> bytes:
    """The content of a block; _DamageError where its checksum is another one."""
    content = _content(path)
    if zlib.crc32(content) != checksum:
        raise _DamageError(f"{str(path)!r} is damaged (its checksum is another one)")
    return content


def _content(path: Path) -> bytes:
    """The content of a file, which is no link."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            return file.read()
    except OSError as error:
        raise _DamageError(f"{str(path)!r} cannot be read ({error.strerror})") from error


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


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


def _refuse_another_run(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    if names:
        lines = "; ".join(f"{n}: {there.get(n)!r} there, {here.get(n)!r} here" for n in names)
        raise CheckpointError(
            f"checkpoint: {str(folder)!r} holds another run ({lines}). Name another folder, or "
            "remove this one."
        )


def _length(records: Records) -> int:
    return len(next(iter(jax.tree.leaves(records)), ()))


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(like))
    return jax.numpy.asarray(array.view(like.dtype) if array.dtype.kind == "V" else array)
