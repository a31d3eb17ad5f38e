"""`zoo new`: the files of a new model, or of a new kernel, ready to run and to be edited.

They are copies of whole ones that the project keeps, prints and tests as examples, under a new
name. In the copies no test is marked as slow.
"""

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zoo

__all__ = ["new"]

ROOT = Path(__file__).parents[2]
TEXT = "gallery/pages/text"
MODEL = {  # example -> its place under a new name
    f"{TEXT}/mine.py": "zoo/{name}.py",
    "tests/zoo/test_mine.py": "tests/zoo/test_{name}.py",
    f"{TEXT}/mine_page.py": "gallery/pages/{name}.py",
}
KERNEL = {
    "tests/inference/importance.py": "inference/kernels/{name}/kernel.py",
    "tests/inference/test_importance.py": "tests/inference/kernels/{name}/test_kernel.py",
}

OWN_IMPORTS = re.compile(r"(?:^from (?:diagnostics|gallery|inference|tests|zoo)\b[^\n]*\n)+", re.M)


def new(args: Any) -> int:
    """Write the files of a new model, or of a new kernel, into the checkout of the project."""
    root = Path(args.output or ROOT).resolve()
    if missing := [path for path in [*MODEL, *KERNEL] if not (root / path).is_file()]:
        raise ValueError(
            f"new: {root} has no {missing[0]}; wanted a clone of the project, which has the tests "
            "as well: clone it, or name it by -o FOLDER. A model can also be a file of its own: "
            "zoo fit mymodel.py:model"
        )
    _check_name(args.name)
    files = _kernel(root, args.name) if args.kernel else _model(root, args.name)
    if there := [path for path in files if (root / path).exists()]:
        raise ValueError(f"new: {root / there[0]} exists; choose another name, or remove it")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    [test] = [path for path in files if Path(path).name.startswith("test_")]
    fit = (
        f"zoo fit mymodel.py:model --data table.csv --kernel {_class_name(args.name).lower()}"
        if args.kernel
        else f"zoo fit {args.name} --data table.csv"
    )
    print(f"Edit them. Then: uv run pytest {test}; uv run {fit}")
    return 0


def _check_name(name: str) -> None:
    is_word = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*", name) and not keyword.iskeyword(
        name
    )
    if not is_word or name in ("card", "mine"):
        raise ValueError(
            f"new {name!r}: wanted words of small letters with underscores between them, such as "
            "hidden_markov; card and mine are taken"
        )


def _model(root: Path, name: str) -> Mapping[str, str]:
    if name in zoo.names():
        raise ValueError(f"new: there is a model {name!r}; choose another name")
    changes = {rf"{TEXT.replace('/', '.')}\.mine": f"zoo.{name}", "mine": name}
    return _copies(root, MODEL, name, changes)


def _kernel(root: Path, name: str) -> Mapping[str, str]:
    class_name = _class_name(name)
    for path in sorted((root / "inference").rglob("*.py")):
        if re.search(rf"^class {class_name}\b", path.read_text(encoding="utf-8"), re.M):
            raise ValueError(
                f"new: {path.relative_to(root)} has a class {class_name}; choose another name"
            )
    changes = {
        r"tests\.inference\.importance": f"inference.kernels.{name}.kernel",
        "ImportanceSampling": class_name,
    }
    files = _copies(root, KERNEL, name, changes)
    what = (
        f'"""{class_name}: say in a line what the algorithm does.\n\nkernel   `{class_name}`\n"""\n'
    )
    return files | {
        f"inference/kernels/{name}/__init__.py": what,
        f"tests/inference/kernels/{name}/__init__.py": "",
    }


def _copies(
    root: Path, places: Mapping[str, str], name: str, changes: Mapping[str, str]
) -> dict[str, str]:
    """Place -> text of an example, with other words."""
    found = {}
    for example, place in places.items():
        text = (root / example).read_text(encoding="utf-8").replace("@pytest.mark.slow\n", "")
        text = re.sub(r"\n\n`zoo new [^\n]*\n(?=\"\"\")", "", text)  # what it says of itself
        for word, other in changes.items():
            text = re.sub(rf"\b{word}\b", other, text)
        text = OWN_IMPORTS.sub(lambda match: "".join(sorted(match[0].splitlines(True))), text)
        found[place.format(name=name)] = text
    return found


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
