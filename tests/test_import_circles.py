"""No file of the package imports, by whatever way, a file that imports it."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mpistrat"
MIXINS_OF_DATASET = [
    *("mpistrat.data.pipeline.chain", "mpistrat.data.from_files"),
    *(f"mpistrat.data.combine.{name}" for name in ("access", "methods", "sequential")),
]


def module_of(path: Path, root: Path) -> str:
    name = ".".join([root.name, *path.relative_to(root).with_suffix("").parts])
    return name.removesuffix(".__init__")


def imports(root: Path) -> dict[str, set[str]]:
    """Of each module of a package, those that it imports: at its top, in functions, and for type checkers.

    ``from package import name`` imports the module of that name if there is one, else the package itself.
    """
    paths = {module_of(path, root): path for path in root.rglob("*.py")}
    return {module: set(imported(path, module, set(paths))) - {module} for module, path in paths.items()}


def imported(path: Path, module: str, modules: set[str]) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*up, *([node.module] if node.module else [])])
            found += [name if (name := f"{origin}.{alias.name}") in modules else origin for alias in node.names]
    return [name for name in found if name in modules]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports, the first module also the last; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.full
def test_no_circle():
    graph = imports(PACKAGE)
    assert "mpistrat.runtime.topology" in graph["mpistrat.strategy.extended"]
    # The classes that give a dataset its methods name it as what these return, for type checkers alone.
    for mixin in MIXINS_OF_DATASET:
        graph[mixin].remove("mpistrat.data.dataset")
    assert circle(graph) == []


def test_circles_are_found(tmp_path):
    """In functions, under TYPE_CHECKING, by relative imports and by a package that gives names."""
    package = tmp_path / "p"
    (package / "room").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B\n",
        "b.py": "def f():\n    import p.c\n",
        "c.py": "from .room import name\n",
        "room/__init__.py": "from .d import name\n",
        "room/d.py": "name = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    graph = imports(package)
    assert graph["p.c"] == {"p.room"}
    assert graph["p.room"] == {"p.room.d"}
    assert circle(graph) == []
    (package / "room" / "d.py").write_text("def name():\n    from .. import a\n")
    assert set(circle(imports(package))) == {"p.a", "p.b", "p.c", "p.room", "p.room.d"}
