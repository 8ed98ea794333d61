"""What the tests on several nodes share: the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nodes
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[nodes.Cluster]:
    """Four nodes."""
    lacking = nodes.missing()
    if lacking is not None:
        pytest.skip(f"a cluster of its own {lacking}")
    with pytest.MonkeyPatch.context() as patch, nodes.Cluster(4, rate="4gbit") as started:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield started
