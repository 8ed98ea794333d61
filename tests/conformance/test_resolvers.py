"""Programs that use cluster resolvers give the recorded answers of TensorFlow."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from conformance.scenarios import RESOLVER_SCENARIOS

import mpistrat
import mpistrat.cluster_resolver

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())


class World:
    """The argument ``w`` of a scenario."""

    dist = mpistrat
    ClusterSpec = mpistrat.cluster_resolver.ClusterSpec

    def raises(self, fn):
        try:
            fn()
        except Exception as error:
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return None

    @contextlib.contextmanager
    def environ(self, **variables):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            yield


@pytest.mark.parametrize("name", RESOLVER_SCENARIOS)
def test_answer(name):
    before = dict(os.environ)
    answer = json.loads(json.dumps(RESOLVER_SCENARIOS[name](World())))
    assert answer == EXPECTED[name]
    assert dict(os.environ) == before
