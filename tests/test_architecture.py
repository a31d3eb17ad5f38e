"""The shape of the repository: who may import whom, what is public, how long a module may be."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("zoo", "inference", "diagnostics", "gallery")
PAGES = ROOT / "gallery" / "pages"  # scripts that are read, not imported
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if PAGES not in path.parents)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAY_IMPORT = {  # prefixes of the project's own modules that a room may import, beside itself
    "zoo": ("inference.distributions",),
    "inference": (),
    "diagnostics": (),
    "gallery": ROOMS,
}
EXCEPTIONS = {"diagnostics/calibration.py": ("inference",)}  # runs what it tests
MOST_LINES = 400


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> set[str]:
    """Full names of everything that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def forbidden(room: str, file: str, source: str) -> list[str]:
    allowed = (room, *MAY_IMPORT[room], *EXCEPTIONS.get(file, ()))
    ours = [name for name in imports_of(source) if name.split(".")[0] in ROOMS]
    return sorted(name for name in ours if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_between_rooms(path):
    file = path.relative_to(ROOT)
    assert not forbidden(file.parts[0], str(file), path.read_text())


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("zoo", "from inference import Driver"),
        ("zoo", "import gallery.datasets"),
        ("inference", "from zoo import names"),
        ("diagnostics", "def f():\n    from inference.program.program import Program"),
    ],
)
def test_a_forbidden_arrow_would_be_seen(room, line):
    assert forbidden(room, f"{room}/new.py", line)


def test_the_one_allowed_arrow_out_of_the_zoo():
    assert not forbidden("zoo", "zoo/new.py", "from inference.distributions import CRP")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_imported_from_this_repository(room):
    """`inference` and `diagnostics` are also names of unrelated packages."""
    assert Path(importlib.import_module(room).__file__) == ROOT / room / "__init__.py"


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_long(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_listed_and_documented(path):
    module = importlib.import_module(module_name(path))
    assert module.__doc__, "a module says what it is for"
    assert len(module.__all__) == len(set(module.__all__)), "a name is listed once"
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    own = {name for name in defined if not name.startswith("_") and callable(getattr(module, name))}
    if not path.name.startswith("_"):
        assert own <= set(module.__all__), "list it in __all__, or begin its name with an underscore"
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{module.__name__}.{name} has no docstring"
