"""Finding a data set's file: the folder that `ZOO_DATA` names, the cache, the public source.

All three hold `<folder>/<file>`. Whatever is read is checked against the sha256 of its content, so
that a corrupt copy is an error and never data. A download is parsed, written under a temporary name
in the cache, read back, checked, and only then renamed: a process killed on the way leaves no
entry. Where there is no network, the raw file may be put into the folder by hand.
"""

import csv
import gzip
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "CorruptDataError",
    "DataNotFoundError",
    "RawFile",
    "Source",
    "cache_folder",
    "content_hash",
    "fetch",
]

Arrays = dict[str, np.ndarray]


class DataNotFoundError(FileNotFoundError):
    """No copy, and no way to the source; the message says where to get the file and where to put
    it.
    """


class CorruptDataError(ValueError):
    """A file is not what it should be; the message names it and the remedy."""


@dataclass(frozen=True)
class RawFile:
    """A file at its public source, with mirrors, and its checksum, compared before it is parsed."""

    name: str
    urls: tuple[str, ...]
    # pooch's form: sha256, or "md5:..."; None where it is not known, for lines of plain text only,
    # whose content is compared after they are parsed
    known_hash: str | None = None


@dataclass(frozen=True)
class Source:
    """A downloadable data set: where it lies, how its bytes become arrays, and what must be said
    about it.
    """

    name: str
    title: str
    path: str  # <folder>/<file> in ZOO_DATA and in the cache
    # `content_hash` of the arrays; more than one where two recipes are sound
    contents: tuple[str, ...]
    raw: tuple[RawFile, ...]
    parse: Callable[[Mapping[str, bytes]], Arrays] | None
    view: Callable[[Mapping[str, np.ndarray]], dict[str, Any]]
    description: str
    licence: str
    citation: str
    url: str
    base: "Source | None" = None  # the set that this one is computed from, by `derive`
    derive: Callable[[Mapping[str, np.ndarray]], Arrays] | None = None


def cache_folder() -> Path:
    """The user's cache folder for data sets."""
    import pooch

    return Path(pooch.os_cache("bayes-model-zoo"))


def content_hash(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over the sorted names, with each array's dtype, shape and values in row order.

    Values are little-endian bytes, all NaN alike and minus zero as zero; texts are UTF-8 with a
    zero byte after each.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        if array.dtype.kind == "U":
            kind, values = "text", "".join(f"{text}\0" for text in array.ravel()).encode()
        else:
            array = (
                np.where(np.isnan(array), np.nan, array + 0.0) if array.dtype.kind == "f" else array
            )
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            kind, values = array.dtype.str, array.tobytes()
        digest.update(f"{name} {kind} {array.shape}\n".encode())
        digest.update(values)
    return digest.hexdigest()


def fetch(source: Source) -> Arrays:
    """The stored arrays of a data set, from the first place that has them."""
    folders = _folders()
    for folder in folders:
        path = folder / source.path
        if path.is_file():
            advice = (
                "delete it and load again"
                if folder == folders[-1]
                else "replace it with a good copy, or unset ZOO_DATA"
            )
            return _checked(source, lambda path=path: _read(path), str(path), advice)
    if source.base is not None and source.derive is not None:
        base, derive = fetch(source.base), source.derive
        arrays = _checked(
            source,
            lambda: derive(base),
            f"what was computed from {source.base.name!r}",
            "report it",
        )
    else:
        arrays = _from_raw(source, folders)
    _store(source, arrays, folders[-1] / source.path)
    return arrays


def _folders() -> list[Path]:
    """Where to look, in order; the last one is the cache."""
    named = os.environ.get("ZOO_DATA")
    if not named:
        return [cache_folder()]
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataNotFoundError(
            f"ZOO_DATA={named!r}: no such folder; name a folder of data sets, or unset ZOO_DATA"
        )
    return [folder, cache_folder()]


def _from_raw(source: Source, folders: list[Path]) -> Arrays:
    """The arrays from raw files, put there by hand or downloaded into a temporary folder of the
    cache.
    """
    parse, cache = source.parse, folders[-1]
    if parse is None:
        raise TypeError(f"source {source.name!r} has neither a parser nor a base")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as scratch:
        raw = {file.name: _raw_bytes(source, file, folders, Path(scratch)) for file in source.raw}
    advice = "the source may have changed: " + _by_hand(source, folders)
    return _checked(source, lambda: parse(raw), f"the download {', '.join(raw)}", advice)


def _raw_bytes(source: Source, file: RawFile, folders: list[Path], scratch: Path) -> bytes:
    import pooch

    for folder in folders:
        path = (folder / source.path).parent / file.name
        if path.is_file():
            if file.known_hash and not pooch.hashes.hash_matches(path, file.known_hash):
                raise CorruptDataError(
                    f"{path}: its checksum is not {file.known_hash}; get it again from "
                    f"{' or '.join(file.urls)}"
                )
            return path.read_bytes()
    failures = []
    for url in file.urls:
        try:
            return Path(
                pooch.retrieve(url, known_hash=file.known_hash, fname=file.name, path=scratch)
            ).read_bytes()
        except OSError as error:  # no network, no such file, a server that refuses
            failures.append((url, error, False))
        except ValueError as error:  # pooch: the checksum differs
            failures.append((url, error, True))
    reasons = "; ".join(f"{url}: {type(error).__name__}: {error}" for url, error, _ in failures)
    if any(corrupt for _, _, corrupt in failures):
        raise CorruptDataError(
            f"data set {source.name!r}: corrupt download, nothing was kept ({reasons}). "
            f"{_by_hand(source, folders)}"
        )
    raise DataNotFoundError(
        f"data set {source.name!r}: there is no copy in "
        f"{' or '.join(str(folder / source.path) for folder in folders)}, and it "
        f"could not be downloaded ({reasons}). {_by_hand(source, folders)}"
    )


def _by_hand(source: Source, folders: list[Path]) -> str:
    target = (folders[-1] / source.path).parent
    files = "; ".join(f"{file.name} from {' or '.join(file.urls)}" for file in source.raw)
    return (
        f"By hand: get {files}; put it into {target}, or set ZOO_DATA to a folder that holds "
        f"{source.path}"
    )


def _checked(source: Source, make: Callable[[], Arrays], what: str, advice: str) -> Arrays:
    """The arrays, if they can be read and their content is the one expected."""
    try:
        arrays = make()
    # a damaged archive fails in any of zipfile, zlib, struct, numpy, h5py, scipy
    except Exception as error:
        raise CorruptDataError(
            f"data set {source.name!r}: {what} cannot be read ({type(error).__name__}: {error}); "
            f"{advice}"
        ) from error
    found = content_hash(arrays)
    if found not in source.contents:
        wanted = " or ".join(digest[:12] for digest in source.contents)
        raise CorruptDataError(
            f"data set {source.name!r}: {what} has content {found[:12]}..., wanted {wanted}...; "
            f"{advice}"
        )
    return arrays


def _read(path: Path) -> Arrays:
    if path.suffix == ".npz":
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return {"header": np.array(header), "cells": np.array(rows)}


def _write(file: io.BufferedIOBase, suffix: str, arrays: Arrays) -> None:
    if suffix == ".npz":
        np.savez_compressed(file, **arrays)  # ty: ignore[invalid-argument-type]
        return
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([arrays["header"].tolist(), *arrays["cells"].tolist()])
    file.write(gzip.compress(text.getvalue().encode()))


def _store(source: Source, arrays: Arrays, path: Path) -> None:
    """Writes under a temporary name, reads back, checks, renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = ".npz" if path.suffix == ".npz" else ".csv.gz"
    handle, name = tempfile.mkstemp(prefix=".unfinished-", suffix=suffix, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, suffix, arrays)
            file.flush()
            os.fsync(file.fileno())
        _checked(
            source,
            lambda: _read(temporary),
            f"what was written to {temporary}",
            "is the disk full or faulty?",
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
