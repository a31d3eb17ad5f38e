"""The arguments of `zoo fit`: saved in the run, and in a checkpoint folder as `command.json`."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gallery.commands import model_file
from gallery.commands.models import parse
from gallery.tables import stem_of

__all__ = [
    "FILE",
    "Request",
    "check_distinct",
    "check_picture",
    "check_writable",
    "is_table",
    "load_request",
    "save_request",
]

FILE = "command.json"


@dataclass(frozen=True)
class Request:
    """The arguments of `zoo fit`; paths are absolute."""

    model: str
    data: str  # a name, or a file
    target: str | None
    kernel: str | None
    options: tuple[str, ...]
    seed: int
    raw: bool
    output: str
    plot: str | None
    task: str | None = None
    drop: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    id: str | None = None
    dummies: bool = False  # columns of 0 and 1 take the place of texts
    test: float | None = None  # share of the rows to hold out; None: the kernel's default

    @classmethod
    def from_arguments(cls, args: Any) -> "Request":
        """Read a request off the parsed command line."""
        is_file = is_table(args.data)
        stem = stem_of(args.data) if is_file else args.data
        for name in ("target", "task", "drop", "columns", "id"):
            if (value := getattr(args, name)) and not is_file:
                raise ValueError(
                    f"--{name} {value if isinstance(value, str) else ','.join(value)}: only a CSV "
                    f"file needs it; the data set {args.data!r} knows its own"
                )
        is_own = model_file.is_file(args.model)
        for name in ("task", "test") if is_own else ():
            if (value := getattr(args, name)) is not None:
                raise ValueError(
                    f"--{name} {value}: only models of the zoo take it, found the model file "
                    f"{args.model}; leave it out"
                )
        called = model_file.stem(args.model) if is_own else args.model
        output = args.output or f"{called}-{stem}.nc"
        request = cls(
            model=model_file.resolved(args.model) if is_own else args.model,
            data=str(Path(args.data).resolve()) if is_file else args.data,
            target=args.target,
            kernel=args.kernel,
            options=tuple(args.option),
            seed=args.seed,
            raw=args.raw,
            output=str(Path(output).resolve()),
            plot=None if args.plot is None else str(Path(args.plot).resolve()),
            task=args.task,
            drop=tuple(args.drop),
            columns=tuple(args.columns),
            id=args.id,
            dummies=args.dummies,
            test=args.test,
        )
        check_distinct(
            {
                "--data": request.data if is_file else None,
                "-o": request.output,
                "--plot": request.plot,
            }
        )
        return request

    def _settings(self) -> dict[str, Any]:
        """What the draws depend on; a continued run may have other limits."""
        named = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("output", "plot", "test")
        }
        limits = ("num_samples", "max_time", "save_every")
        options = {
            f"option {key}": value
            for key, value in parse(named.pop("options")).items()
            if key not in limits
        }
        return named | options

    @property
    def data_name(self) -> str:
        """Name of the data set or of the file."""
        return Path(self.data).name if is_table(self.data) else self.data

    def to_json(self) -> str:
        """Return the request as text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Read a request from the text of `to_json`."""
        found = json.loads(text)
        several = ("options", "drop", "columns")
        return cls(**found | {name: tuple(found.get(name, ())) for name in several})

    def differences(self, other: "Request") -> list[str]:
        """Describe what makes the other request a different run."""
        mine, theirs = self._settings(), other._settings()
        return [
            f"{key}: {theirs.get(key)!r} there, {mine.get(key)!r} here"
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        ]


def is_table(data: str) -> bool:
    """Return whether `--data` names a file."""
    return data.endswith((".csv", ".csv.gz", ".parquet")) or os.sep in data


def save_request(request: Request, folder: Path) -> None:
    """Write `command.json` into a checkpoint folder, as a whole or not at all.

    A folder that holds another run or other files is refused.
    """
    from inference.run.store import STATE, chain_folders, is_foreign, written

    path = folder / FILE
    if folder.is_dir() and is_foreign(folder):
        raise ValueError(
            f"--checkpoint {folder}: it holds files that are no checkpoint; name another folder"
        )
    if path.exists() and ((folder / STATE).exists() or chain_folders(folder)):
        differ = request.differences(load_request(folder))
        if differ:
            raise ValueError(
                f"--checkpoint {folder}: it holds another run ({'; '.join(differ)}); name another "
                "folder, or remove this one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        signed = asdict(request) | {"checksum": _checksum(request)}
        file.write(json.dumps(signed, indent=1).encode())


def _checksum(request: Request) -> str:
    return hashlib.sha256(request.to_json().encode()).hexdigest()


def load_request(folder: Path) -> Request:
    """Read the request that `save_request` wrote."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder}: no {FILE} in it; wanted a folder that `zoo fit --checkpoint` wrote"
        )
    try:
        found = json.loads(path.read_text())
        checksum = found.pop("checksum")
        request = Request.from_json(json.dumps(found))
        if _checksum(request) != checksum:
            raise ValueError("its checksum is another one")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: damaged ({error}); remove it, and run `zoo fit ... --checkpoint {folder}` "
            "again, which goes on"
        ) from error
    return request


def check_writable(path: Path, option: str, force: bool = True) -> None:
    """Refuse a path that cannot be written to, before any work is done."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not force:
        raise ValueError(
            f"{option} {path}: the file exists; name another, or give --force to replace it"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write there; name another")


def check_picture(path: Path, option: str) -> None:
    """Refuse a path that cannot be written to, or a format that matplotlib does not know."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(
            f"{option} {path}: found the ending {path.suffix!r}, wanted one of {', '.join(known)}"
        )
    check_writable(path, option)


def check_distinct(paths: Mapping[str, str | None]) -> None:
    """Refuse two options that name the same file."""
    options: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        where = str(Path(path).resolve())
        if where in options:
            raise ValueError(
                f"{options[where]} and {option} {path}: the same file; name two different ones"
            )
        options[where] = option
