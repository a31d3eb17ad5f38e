"""The arguments of `zoo fit`: saved in the run, and in a checkpoint folder as `command.json`."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gallery.commands.models import parse

__all__ = [
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

    @classmethod
    def from_arguments(cls, args: Any) -> "Request":
        """Read a request off the parsed command line."""
        is_file = is_table(args.data)
        stem = (
            Path(args.data).name.removesuffix(".gz").removesuffix(".csv") if is_file else args.data
        )
        for name, value in (("target", args.target), ("task", args.task)):
            if value is not None and not is_file:
                raise ValueError(
                    f"--{name} {value}: only a CSV file needs it; the data set {args.data!r} knows "
                    "its own"
                )
        output = args.output or f"{args.model}-{stem}.nc"
        request = cls(
            model=args.model,
            data=str(Path(args.data).resolve()) if is_file else args.data,
            target=args.target,
            kernel=args.kernel,
            options=tuple(args.option),
            seed=args.seed,
            raw=args.raw,
            output=str(Path(output).resolve()),
            plot=None if args.plot is None else str(Path(args.plot).resolve()),
            task=args.task,
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
            name: value for name, value in asdict(self).items() if name not in ("output", "plot")
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
        return cls(**found | {"options": tuple(found["options"])})

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
    return data.endswith((".csv", ".csv.gz")) or os.sep in data


def save_request(request: Request, folder: Path) -> None:
    """Write `command.json` into a checkpoint folder, as a whole or not at all.

    A folder that holds another run or other files is refused.
    """
    from inference.run.store import OURS

    path = folder / FILE
    if (
        folder.is_dir()
        and not (folder / "run.json").exists()
        and any(p.name not in OURS for p in folder.iterdir())
    ):
        raise ValueError(
            f"--checkpoint {folder}: it holds files that are no checkpoint; name another folder"
        )
    if path.exists() and (folder / "run.json").exists():
        differ = request.differences(load_request(folder))
        if differ:
            raise ValueError(
                f"--checkpoint {folder}: it holds another run ({'; '.join(differ)}); name another "
                "folder, or remove this one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    # this name is one of OURS: after a kill between the next two lines the folder is still usable
    partial = folder / "run.partial"
    partial.write_text(request.to_json())
    os.replace(partial, path)


def load_request(folder: Path) -> Request:
    """Read the request that `save_request` wrote."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder}: no {FILE} in it; wanted a folder that `zoo fit --checkpoint` wrote"
        )
    try:
        return Request.from_json(path.read_text())
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: damaged ({error}); run `zoo fit ... --checkpoint {folder}` again"
        ) from error


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
