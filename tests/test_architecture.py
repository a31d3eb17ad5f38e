"""The shape of the repository: who may import whom, and what is public."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("zoo", "inference", "diagnostics", "gallery")
PAGES = ROOT / "gallery" / "pages"  # scripts that are read, not imported
MODULES = sorted(
    path for room in ROOMS for path in (ROOT / room).rglob("*.py") if PAGES not in path.parents
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAY_IMPORT = {  # prefixes of the project's own modules that a room may import, beside itself
    "zoo": ("inference.distributions",),
    "inference": (),
    "diagnostics": (),
    "gallery": ROOMS,
}
EXCEPTIONS = {"diagnostics/calibration.py": ("inference",)}  # runs what it tests


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
    return sorted(
        name
        for name in ours
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
    )


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


def arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports, those for the type checker alone included."""
    found = {}
    for module, source in sources.items():
        whole = imports_of(source)
        found[module] = {
            name if name in sources else name.rpartition(".")[0] for name in whole
        } & set(sources) - {module}
    return found


def wrong_arrows(sources: dict[str, str]) -> list[str]:
    """Imports inside `inference` that do not run down, and modules that import each other by
    some way.
    """
    graph = arrows(sources)
    wrong = [
        f"{module} -> {other}"
        for module, others in graph.items()
        for other in others
        if runs_up(module, other)
    ]
    for module in graph:
        below, ahead = set(), list(graph[module])
        while ahead:
            if (other := ahead.pop()) not in below:
                below.add(other)
                ahead += graph[other]
        wrong += [f"{module} -> ... -> {module}"] if module in below else []
    return sorted(wrong)


def runs_up(module: str, other: str) -> bool:
    floors = [FLOORS.get(name.split(".")[1]) if "." in name else None for name in (module, other)]
    is_same_room = module.split(".")[1:2] == other.split(".")[1:2]
    return None not in floors and not is_same_room and floors[0] <= floors[1]


# of `inference`
FLOORS = {
    "maths": 0,
    "distributions": 0,
    "program": 1,
    "reading": 2,
    "run": 2,
    "kernels": 3,
    "orders": 4,
}
INFERENCE = {
    module_name(path): path.read_text()
    for path in MODULES
    if path.relative_to(ROOT).parts[0] == "inference"
}


def test_arrows_inside_inference_run_down():
    assert not wrong_arrows(INFERENCE)


@pytest.mark.parametrize(
    ("module", "line", "seen"),
    [
        (
            "inference.maths.hilbert",
            "import inference.run.driver",
            "inference.maths.hilbert -> inference.run.driver",
        ),
        (
            "inference.reading.proof",
            "from inference.run import store",
            "inference.reading.proof -> inference.run.store",
        ),
        (
            "inference.run.store",
            "from inference.run.driver import Driver",
            "inference.run.store -> ... -> inference.run.store",
        ),
    ],
)
def test_an_arrow_that_runs_up_would_be_seen(module, line, seen):
    assert seen in wrong_arrows(INFERENCE | {module: f"{INFERENCE[module]}\n{line}"})


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_listed_and_documented(path):
    module = importlib.import_module(module_name(path))
    assert module.__doc__, "a module says what it is for"
    listed = getattr(module, "__all__", [])  # a folder's `__init__` may have none
    assert len(listed) == len(set(listed)), "a name is listed once"
    defined = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    }
    own = {name for name in defined if not name.startswith("_") and callable(getattr(module, name))}
    if not path.name.startswith("_"):
        assert own <= set(listed), "list it in __all__, or begin its name with an underscore"
    for name in listed:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{module.__name__}.{name} has no docstring"


def test_an_algorithm_owes_the_driver_at_most_eight_functions():
    from inference import Algorithm

    functions = {
        name
        for each in Algorithm.__mro__[:-1]
        for name, value in vars(each).items()
        if inspect.isfunction(value)
    }
    assert functions == {
        "read",
        "init",
        "step",
        "finished",
        "draw",
        "results",
        "needs_host",
        "on_host",
    }
