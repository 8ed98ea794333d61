"""Tests lie where the code lies that they test."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "mpistrat"
# Folders that are about more than one room, or about a machine.
OTHERS = {"benchmarks", "cluster", "conformance", "documentation", "fakes", "faults", "gpu", "ranks", "slurm"}
MOST_FILES = 16


def folders(path: Path) -> set[str]:
    return {each.name for each in path.iterdir() if each.is_dir() and any(each.rglob("*.py"))}


@pytest.mark.parametrize("place", [TESTS, TESTS / "ranks"], ids=["tests", "ranks"])
def test_folders_are_named_after_rooms(place):
    assert folders(place) - OTHERS <= folders(PACKAGE)


def test_every_room_has_a_folder():
    addresses = {"experimental", "optimizers", "tpu"}  # of names that are tested where they are made
    assert folders(PACKAGE) - addresses <= folders(TESTS) | folders(TESTS / "ranks")


def test_folders_are_small():
    counts = {
        str(folder.relative_to(TESTS)): len(list(folder.glob("*.py")))
        for folder in (TESTS, *filter(Path.is_dir, TESTS.rglob("*")))
    }
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}
