"""No file reaches for a private attribute of another top-level package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "mpistrat"
# Of named tuples and of modules of Python: documented, in spite of the underscore.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_current_frames", "_exit", "_getframe"}


def room_of(path: Path) -> str:
    """The top-level package or file of a file."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def names(tree: ast.AST) -> tuple[set[str], dict[str, int]]:
    """The private names that a file makes, and those that it uses as attributes, with a line of each."""
    made: set[str] = set()
    used: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                made.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                made.add(node.attr)
            elif node.attr.startswith("_") and not node.attr.startswith("__"):
                used.setdefault(node.attr, node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            made.add(node.value)  # in __slots__
    return made, used


def foreign(trees: dict[Path, ast.AST]) -> list[str]:
    """Where a file uses a private attribute that its own top-level package does not make."""
    found = {path: names(tree) for path, tree in trees.items()}
    made = defaultdict(set)
    for path, (own, _) in found.items():
        made[room_of(path)] |= own
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, (_, used) in found.items()
        for name, line in used.items()
        if name not in made[room_of(path)] | DOCUMENTED
    ]


@pytest.mark.full
def test_no_private_attribute_of_another_room():
    assert foreign({path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}) == []


def test_a_private_attribute_of_another_room_is_found():
    trees = {
        ROOT / "strategy" / "one.py": ast.parse("class A:\n    def __init__(self):\n        self._ranks = 1"),
        ROOT / "data" / "two.py": ast.parse("def f(a):\n    return a._ranks"),
    }
    assert foreign(trees) == ["data/two.py:2: _ranks"]
