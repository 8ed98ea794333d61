"""Ranks that reduce different values, or make different collectives: all raise, then all goes on."""

import itertools

import every_way
import numpy as np
import pytest
from every_way import all_reduce, rows_of, ways
from mpi4py import MPI

import mpistrat
from mpistrat.runtime.agreement.operation import MismatchError, ValueMismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def named(error):
    """Every rank is named, with what it did and where."""
    text = str(error)
    assert f"rank {RANK}:" in text
    assert __file__ in text or every_way.__file__ in text  # where the calls are
    ranks = text.split("\n", 1)[1]
    for rank in range(SIZE):
        assert str(rank) in ranks or "-" in ranks
    return True


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "value",
    [
        lambda: np.ones(3 + RANK),
        lambda: np.ones((3, 1)[RANK % 2 :]),
        lambda: np.ones(3, ["f4", "f8"][RANK % 2]),
        lambda: np.ones(3, ["i8", "f8"][RANK % 2]),
        lambda: [np.ones(3)] * (1 + RANK),
        lambda: {"ab"[RANK % 2]: 1.0, "c": np.ones(2 + RANK)},
        lambda: [1.0, None] if RANK == 0 else [1.0, 2.0],
        lambda: [np.ones(3), np.ones(2)][:: 1 - 2 * (RANK % 2)],
    ],
)
def test_different_values(strategy, in_step, value):
    for way in (
        ways(strategy, "SUM", value())
        if not isinstance(value(), (list, dict))
        else [lambda: strategy.reduce("SUM", value(), axis=None), lambda: all_reduce(strategy, "SUM", value())]
    ):
        with pytest.raises(ValueMismatchError) as caught:
            way()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, MismatchError)
        assert named(caught.value)


@pytest.mark.ranks(min=2)
def test_dicts_with_different_keys(strategy, in_step):
    """Gradients of one key must not be added to those of another."""
    with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
        strategy.reduce("SUM", {"ab"[RANK % 2]: 1.0}, axis=None)


@pytest.mark.ranks(min=2)
def test_different_numbers_of_rows(strategy, in_step):
    """The error names the calls that take such values."""
    for rows, advised in ((np.ones((2 + RANK, 3)), True), (np.ones((2, 3 + RANK)), False), (np.ones(RANK + 1), True)):
        with pytest.raises(ValueMismatchError) as caught:
            strategy.reduce("SUM", rows, axis=None)
        assert ("reduce(..., axis=0)" in str(caught.value)) is advised
    with pytest.raises(ValueMismatchError, match="except the lengths along the axis"):
        strategy.gather(np.ones((3 + RANK, 2)), axis=1)
    assert strategy.gather(np.ones((3 + RANK, 2)), axis=0).shape == (3 * SIZE + SIZE * (SIZE - 1) // 2, 2)


@pytest.mark.ranks(min=2)
def test_different_ops(strategy, in_step):
    with pytest.raises(ValueMismatchError) as caught:
        strategy.reduce(["SUM", "MEAN"][RANK % 2], 1.0, axis=None)
    assert named(caught.value)
    assert "SUM" in str(caught.value)
    assert "MEAN" in str(caught.value)


CALLS = {
    "reduce": lambda strategy: strategy.reduce("SUM", 1.0, axis=None),
    "gather": lambda strategy: strategy.gather(np.ones(2), 0),
    "broadcast": lambda strategy: strategy.extended.broadcast_to(1.0, "cpu:0"),
    "barrier": lambda strategy: strategy.barrier(),
    "agree": lambda strategy: strategy.agree(True),
    "sparse": lambda strategy: strategy.reduce("SUM", rows_of(0), axis=None),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(CALLS, 2)))
def test_different_collectives(strategy, in_step, one, other):
    for last in (SIZE - 1, 0):
        with pytest.raises(MismatchError) as caught:
            CALLS[one if last == RANK else other](strategy)
        assert named(caught.value)
        if {one, other} != {"reduce", "sparse"}:  # dense and sparse values of one reduction
            assert not isinstance(caught.value, ValueError)
            assert "different collectives" in str(caught.value)


@pytest.mark.ranks(min=2)
def test_different_strategies_on_the_same_ranks(strategy, in_step):
    """They share the ranks' one sequence: a mix-up is seen, not computed with."""
    other = mpistrat.MirroredStrategy()
    with pytest.raises(MismatchError):
        CALLS["barrier"](other) if RANK else CALLS["reduce"](strategy)


def test_after_an_error_all_goes_on(strategy):
    for _ in range(20):
        if SIZE > 1:
            with pytest.raises(ValueError):
                strategy.reduce("SUM", np.ones(1 + RANK), axis=None)
        assert strategy.reduce("SUM", 1, axis=None) == SIZE
        with pytest.raises(TypeError):
            strategy.reduce("SUM", True, axis=None)
