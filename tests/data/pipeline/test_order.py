"""Tests of the order of a shuffled epoch."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import Dataset
from mpistrat.data.rows import blocks
from mpistrat.data.rows.blocks import BlockOrder, Blocks
from mpistrat.data.rows.permutation import Feistel, round_keys

fast = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def starts(sizes):
    return np.concatenate([[0], np.cumsum(sizes)])


@fast
@given(st.integers(0, 600), st.integers(0, 5), st.none() | st.integers(0, 2**40))
def test_feistel_permutes(n, seed, tweak):
    permuted = Feistel(n, round_keys(seed))(np.arange(n), tweak)
    assert sorted(permuted.tolist()) == list(range(n))


def test_every_tweak_has_its_permutation():
    numbers, tweaks = np.tile(np.arange(50), 4), np.repeat(np.arange(4), 50)
    together = Feistel(50, round_keys(1))(numbers, tweaks).reshape(4, 50)
    for tweak, permuted in enumerate(together):
        assert permuted.tolist() == Feistel(50, round_keys(1))(np.arange(50), tweak).tolist()
    assert len({tuple(each) for each in together.tolist()}) == 4


def test_feistel_is_pinned():
    # A change here changes every seeded run of every user.
    assert Feistel(10, round_keys(7, 0))(np.arange(10)).tolist() == FEISTEL
    order = BlockOrder(40, Blocks(4, 2, starts([21, 19])))
    assert order(np.arange(12), 3, 1).tolist() == BLOCKS


FEISTEL = [5, 2, 3, 0, 1, 7, 6, 8, 9, 4]
BLOCKS = [2, 14, 12, 3, 0, 15, 13, 1, 16, 28, 27, 25]


def test_a_place_holds_any_number_equally_often():
    """Pearson's statistic of 16 numbers at 16 places, over many keys: mean 225, standard deviation 21."""
    keys = 4000
    counts = np.zeros((16, 16))
    for key in range(keys):
        counts[np.arange(16), Feistel(16, round_keys(key))(np.arange(16))] += 1
    expected = keys / 16
    assert ((counts - expected) ** 2 / expected).sum() < 225 + 6 * 21


@fast
@given(
    files=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    rows=st.integers(1, 9),
    window=st.integers(1, 9),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_block_order_permutes_and_stays_in_its_windows(files, rows, window, seed, epoch):
    n = sum(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_FEWEST", 0)  # permute few blocks as blocks, too
        order = BlockOrder(n, Blocks(rows, window, starts(files)))
    found = order(np.arange(n), seed, epoch)
    assert sorted(found.tolist()) == list(range(n))
    some = np.arange(0, n, 3)
    assert order(some[::-1], seed, epoch).tolist() == found[::3][::-1].tolist()
    k = 0
    while k < n:
        stop, spans = order.spans(k, seed, epoch)
        assert k < stop <= k + rows * window
        announced = [row for first, last in spans.tolist() for row in range(first, last)]
        assert announced == sorted(found[k:stop].tolist())
        # At most one run per block of the window, and one per file that a block of rests spans.
        assert len(spans) <= window + len(files)
        k = stop


def test_a_million_million_rows():
    n = 10**12 + 7
    order = BlockOrder(n, Blocks.of(48 << 10, 32, np.array([0, n // 3, n])))
    found = order(np.arange(n - 4096, n), 1, 0)
    assert len(np.unique(found)) == 4096
    assert 0 <= found.min() <= found.max() < n
    assert len(np.unique(found // 32)) < 5 * 64


@pytest.mark.full
@pytest.mark.parametrize("files", [1, 1000])
def test_memory_does_not_grow_with_the_number_of_rows(files):
    """Memory is needed only for the numbers of one call and the description of the files."""
    peaks = []
    for exponent in (6, 9, 12):
        n = 10**exponent
        order = BlockOrder(n, Blocks.of(48 << 10, 32, np.arange(files + 1) * (n // files)))
        order(np.arange(4096), 0, 0)
        tracemalloc.start()
        for epoch in range(2):
            for first in (*range(0, 40 * 4096, 4096), n - 4096):
                order(np.arange(first, first + 4096), 1, epoch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 1 << 20
    assert max(peaks) < 1.2 * min(peaks)


def test_blocks_are_whole_chunks_of_a_mebibyte_and_a_half():
    assert Blocks.of(48 << 10, 0, starts([100]))[:2] == (32, 32)
    assert Blocks.of(48 << 10, 20, starts([100]))[:2] == (40, 25)
    assert Blocks.of(8 << 20, 0, starts([100]))[:2] == (1, 8)
    assert Blocks.of(1 << 10, 100_000, starts([100]))[:2] == (100_000, 8)
    assert Blocks.of(0, 0, starts([100])).window == 32


def test_few_rows_and_rows_in_memory_are_permuted_as_a_whole():
    found = BlockOrder(64, Blocks(8, 2, starts([64])))(np.arange(64), 0, 0)
    assert (np.abs(np.diff(found)) > 16).any()
    (batch,) = Dataset.from_arrays(np.arange(5000)).shuffle(seed=0).batch(5000)
    assert abs(batch[:500].mean() - 2500) < 300


def test_modes():
    for mode in ("block", "exact"):
        (batch,) = Dataset.range(99).shuffle(seed=1, mode=mode).batch(99)
        assert sorted(batch.tolist()) == list(range(99))
    with pytest.raises(ValueError, match="'block' or 'exact', not 'none'"):
        Dataset.range(3).shuffle(mode="none")
    assert str(Dataset.range(3).shuffle(seed=1, mode="exact")) == (
        "<Dataset: range(0, 3), shuffle(seed=1, mode='exact')>"
    )


@pytest.mark.parametrize("take", [None, 900])
def test_windows_are_announced_before_their_rows_are_read(take):
    announced, asked = [], []

    class Spied(type(Dataset.range(1).definition.source)):
        def blocks(self):
            return Blocks(5, 8, starts([333, 667]))

        def advise(self, spans):
            announced.append([row for first, last in spans.tolist() for row in range(first, last)])

        def read(self, rows):
            known = {row for window in announced for row in window}
            assert known.issuperset(rows.tolist())
            asked.extend(rows.tolist())
            return super().read(rows)

    dataset = Dataset(Spied(range(1000))).shuffle(seed=1)
    dataset = (dataset if take is None else dataset.take(take)).batch(7)
    plan = dataset.definition.ready().plan
    for epoch in range(2):
        announced.clear()
        asked.clear()
        for step in range(len(dataset)):
            plan.element(step, epoch)
            # Rows are announced one window ahead, and no further.
            assert sum(map(len, announced)) - len(asked) <= 2 * 40 + 7
        told = [row for window in announced for row in window]
        assert len(told) == len(set(told)) == (1000 if take is None else 960)  # each window once
        assert len(asked) == (take or 1000)
