"""Errors are told apart by type and attribute, never by their text; objects keep the class that made them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "mpistrat"
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
# HDF5 tells why it cannot open a file in the text of an OSError alone: h5py gives it no number and no class.
OF_HDF5 = {"data/hdf5/open_file.py"}
# CPython shows a SystemExit that is not caught to no hook.
OF_CPYTHON = {"process/failure.py"}


def found(is_wrong, allowed=()):
    return [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if name not in allowed
        for node in ast.walk(tree)
        if is_wrong(node)
    ]


def is_text_of_error(node, names):
    """``str(error)`` or ``error.args[0]``, of something that an except clause caught."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(isinstance(each, ast.Name) and each.id in names for each in node.args)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "args":
        return isinstance(node.value.value, ast.Name) and node.value.value.id in names
    return False


def judges_text(handler):
    """Whether an except clause looks for words in the text of what it caught."""
    names = {handler.name}
    for node in ast.walk(handler):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in ("startswith", "endswith", "partition", "rpartition", "find", "index"):
                continue
            parts = [node.func.value]
        else:
            continue
        if any(is_text_of_error(each, names) for part in parts for each in ast.walk(part)):
            return True
    return False


def test_no_error_is_told_apart_by_its_text():
    wrong = found(lambda node: isinstance(node, ast.ExceptHandler) and judges_text(node), OF_HDF5)
    assert not wrong


def test_no_object_is_given_another_class():
    def is_wrong(node):
        targets = node.targets if isinstance(node, ast.Assign) else []
        return any(isinstance(each, ast.Attribute) and each.attr == "__class__" for each in targets)

    assert not found(is_wrong)


def test_nothing_is_found_through_the_garbage_collector():
    def is_wrong(node):
        return isinstance(node, ast.Attribute) and node.attr in ("get_referents", "get_referrers", "get_objects")

    assert not found(is_wrong, OF_CPYTHON)


@pytest.mark.parametrize(
    "text",
    [
        "'truncated' in str(error)",
        "str(error).startswith('file ')",
        "str(error.args[0]) == 'x'",
        "error.args[0].partition(': ')[0]",
    ],
)
def test_the_search_finds(text):
    (clause,) = ast.parse(f"try:\n    f()\nexcept OSError as error:\n    if {text}:\n        pass\n").body[0].handlers
    assert judges_text(clause)
