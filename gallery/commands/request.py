"""What `zoo fit` was asked for: kept in the run, and in a checkpoint folder as `command.json`,
so that it can be asked again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gallery.commands.options import parse

__all__ = [
    "Request",
    "check_distinct",
    "check_picture",
    "check_writable",
    "is_table",
    "keep",
    "recall",
]

FILE = "command.json"
MAY_DIFFER = ("num_samples", "max_time", "save_every")  # between a run and its continuation


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
    def of(cls, args: Any) -> "Request":
        """From the command line."""
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

    @property
    def data_name(self) -> str:
        """The data set's name, or the file's."""
        return Path(self.data).name if is_table(self.data) else self.data

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """From `to_json`."""
        found = json.loads(text)
        return cls(**found | {"options": tuple(found["options"])})

    def differences(self, other: "Request") -> list[str]:
        """What makes the two different runs, in words."""
        mine, theirs = (_essence(request) for request in (self, other))
        return [
            f"{key}: {theirs.get(key)!r} there, {mine.get(key)!r} here"
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        ]


def is_table(data: str) -> bool:
    """Whether `--data` means a file."""
    return data.endswith((".csv", ".csv.gz")) or os.sep in data


def keep(request: Request, folder: Path) -> None:
    """Write `command.json` into a checkpoint folder, whole or not at all.

    A folder of another run, or one that holds anything else, stays as it is.
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
        differ = request.differences(recall(folder))
        if differ:
            raise ValueError(
                f"--checkpoint {folder}: it holds another run ({'; '.join(differ)}); name another "
                "folder, or remove this one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    # one of OURS: a kill between the two lines leaves a folder that can be used
    partial = folder / "run.partial"
    partial.write_text(request.to_json())
    os.replace(partial, path)


def recall(folder: Path) -> Request:
    """The request that `keep` wrote."""
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
    """Found out before the work, not after it."""
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
    """A writable file of a kind that matplotlib can draw."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(
            f"{option} {path}: found the ending {path.suffix!r}, wanted one of {', '.join(known)}"
        )
    check_writable(path, option)


def check_distinct(paths: Mapping[str, str | None]) -> None:
    """No two options name one file, which the later would replace."""
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


def _essence(request: Request) -> dict[str, Any]:
    """What the numbers of the run depend on."""
    named = asdict(replace(request, output="", plot=None))
    options = {
        f"option {key}": value
        for key, value in parse(named.pop("options")).items()
        if key not in MAY_DIFFER
    }
    return {key: value for key, value in named.items() if key not in ("output", "plot")} | options
