"""Random generators of replicas: their recipe, their independence of the layout, and their state."""

import json

import numpy as np
import pytest
from layouts import on_nodes

import mpistrat


def test_the_recipe(strategy):
    """NumPy alone makes the same stream: from the seed and the number of the replica."""
    rank = strategy.extended.engine.topology.rank
    child = np.random.SeedSequence(42).spawn(rank + 1)[rank]
    expected = np.random.Generator(np.random.PCG64(child)).random(5).tolist()
    assert strategy.rng(42).random(5).tolist() == expected
    assert strategy.run(lambda: strategy.rng(42).random(5).tolist()) == expected
    assert strategy.rng([42, 7]).random(5).tolist() != expected
    assert len({tuple(each) for each in strategy.comm.allgather(expected)}) == strategy.num_replicas_in_sync


@pytest.mark.ranks(min=4, max=4)
def test_nodes_do_not_matter():
    drawn = [
        mpistrat.MultiWorkerMirroredStrategy(comm=on_nodes(layout)).rng(1).random(3).tolist()
        for layout in ("0000", "0011", "0101")
    ]
    assert drawn[0] == drawn[1] == drawn[2]


def test_the_state_continues_the_stream(strategy):
    rng = strategy.rng(3)
    rng.normal(size=7)
    state = json.loads(json.dumps(rng.bit_generator.state))
    expected = rng.normal(size=5).tolist()
    again = strategy.rng(0)
    again.bit_generator.state = state
    assert again.normal(size=5).tolist() == expected


def test_misuse(strategy):
    for seed in (None, 1.5, "a", [], [1.5]):
        with pytest.raises(TypeError, match="seed must be an int"):
            strategy.rng(seed)
    with pytest.raises(ValueError, match="must not be negative"):
        strategy.rng(-1)
