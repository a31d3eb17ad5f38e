"""The shape of the repository: who may import whom, and what is public."""

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

LONGEST_CHAIN = 11  # files, each of which imports the next

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


def longest_chain(sources: dict[str, str]) -> list[str]:
    """Modules, each of which imports the next. The package `inference` itself is none of them: it
    imports a kernel when it is asked for it.
    """
    graph = arrows({module: source for module, source in sources.items() if module != "inference"})

    @cache
    def chain(module: str) -> list[str]:
        return [module, *max(map(chain, sorted(graph[module])), key=len, default=[])]

    return max(map(chain, sorted(graph)), key=len)


def test_no_chain_of_imports_is_long():
    chain = longest_chain(INFERENCE)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_a_longer_chain_would_be_seen():
    chain = longest_chain(INFERENCE)
    longer = longest_chain(INFERENCE | {"inference.new": f"import {chain[0]}"})
    assert longer == ["inference.new", *chain]


def jits_in_functions(sources: dict[str, str]) -> list[str]:
    """Where `jax.jit` stands in the body of a function: what is made there anew is compiled anew.

    `inference.program.compiling` alone may: it remembers what it compiles.
    """
    found = set()
    for module, source in sources.items():
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                body = function.body if isinstance(function.body, list) else [function.body]
                found |= {f"{module}:{line}" for part in body for line in lines_of_jit(part)}
    return sorted(each for each in found if not each.startswith("inference.program.compiling:"))


def lines_of_jit(node: ast.AST) -> Iterator[int]:
    for part in ast.walk(node):
        is_jit = isinstance(part, ast.Attribute) and ast.unparse(part) == "jax.jit"
        if is_jit or (isinstance(part, ast.Name) and part.id == "jit"):
            yield part.lineno


def test_nothing_is_jitted_in_a_function():
    assert not jits_in_functions(INFERENCE)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import jax\n@jax.jit\ndef f(x):\n    return x", []),
        ("import jax\nf = jax.jit(g)", []),
        ("class A:\n    @jax.jit\n    def f(x):\n        return x", []),
        ("def f(x):\n    return jax.jit(g)(x)", [2]),
        (
            "def f(x):\n    @partial(jax.jit, static_argnums=0)\n    def g(x):\n        return x",
            [2],
        ),
        ("class A:\n    def f(self, x):\n        return jit(self.g)(x)", [3]),
        ("f = lambda x: jax.jit(g)(x)", [1]),
    ],
)
def test_what_is_jitted_in_a_function_would_be_seen(source, lines):
    assert jits_in_functions({"new": source}) == [f"new:{line}" for line in lines]


def docstrings_that_begin_with_of(sources: dict[str, str]) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    return [
        f"{module}: {text.splitlines()[0]}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
        and (text := ast.get_docstring(node) or "").startswith("Of ")
    ]


def test_no_docstring_begins_with_of():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in MODULES}
    assert not docstrings_that_begin_with_of(sources)


def test_a_docstring_that_begins_with_of_would_be_seen():
    source = 'class A:\n    """Office."""\n    def f(self):\n        """Of a row."""'
    assert docstrings_that_begin_with_of({"new": source}) == ["new: Of a row."]


def names_that_stand_twice(sources: dict[str, str]) -> list[str]:
    """Public classes of one name in `inference`, public functions of one name in a room.

    Each kernel's folder is a room.
    """
    count: Counter[tuple[str, ...]] = Counter()
    for module, source in sources.items():
        parts = module.split(".")
        room = ".".join(parts[1 : 3 if parts[1:2] == ["kernels"] else 2])
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                count["class", node.name] += 1
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                count["function", room, node.name] += 1
    return sorted(" ".join(name) for name, times in count.items() if times > 1)


def test_a_public_name_stands_once():
    assert not names_that_stand_twice(INFERENCE)


@pytest.mark.parametrize(
    ("module", "source", "seen"),
    [
        ("inference.maths.new", "class Driver: ...", "class Driver"),
        ("inference.run.new", "def concatenate(): ...", "function run concatenate"),
        ("inference.maths.new", "def concatenate(): ...", None),
        ("inference.kernels.new.new", "def concatenate(): ...", None),
    ],
)
def test_a_public_name_that_stands_twice_would_be_seen(module, source, seen):
    found = set(names_that_stand_twice(INFERENCE | {module: source}))
    assert found - set(names_that_stand_twice(INFERENCE)) == ({seen} if seen else set())


def modules_with_an_underscore(sources: dict[str, str]) -> list[str]:
    return [module for module in sources if module.rpartition(".")[2].startswith("_")]


def test_no_module_begins_with_an_underscore():
    assert not modules_with_an_underscore(INFERENCE)


def test_a_module_with_an_underscore_would_be_seen():
    assert modules_with_an_underscore({"inference.run._new": ""}) == ["inference.run._new"]


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
