"""Partitioners give the answers of those of TensorFlow."""

import json
from pathlib import Path

import pytest
from conformance.storage import CENTRAL, PARTITIONERS

import mpistrat

EXPECTED = json.loads((Path(__file__).parent / "expected_storage.json").read_text())


class World:
    """What a program about partitioners is given."""

    dist = mpistrat

    def shape(self, *sizes):
        return sizes

    def raises(self, fn):
        try:
            fn()
        except Exception as error:
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return None


def test_every_answer_has_a_program():
    assert {*PARTITIONERS, *CENTRAL} == set(EXPECTED)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_answer(name):
    assert json.loads(json.dumps(PARTITIONERS[name](World()))) == EXPECTED[name]
