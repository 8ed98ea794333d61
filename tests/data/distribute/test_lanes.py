"""Tests of lanes: the same batches for any number of ranks, and files of its own for each rank."""

import itertools
import json
import logging
import os
import re
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpistrat.data import AUTOTUNE, AutoShardPolicy, Dataset, Options
from mpistrat.data.distribute.autoshard import divide
from mpistrat.data.distribute.state import Position, resumed, state_of
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.lanes import LaneOrder, Lanes
from mpistrat.replicas import ReplicaGroup
from tests.data.distribute.test_state import Files, batches, divided, flat, joined
from tests.selection import core

MANY = settings(max_examples=40)
LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any)
SMALL = Blocks(3, 8, np.zeros(1, np.int64))


class FewAtOnce(Files):
    """Files of which few are read side by side, in small blocks, as if their rows were large."""

    most = 4096

    def side_by_side(self):
        return self.most

    def agree(self, ranks):
        pass


def made(lengths, seed, batch, drop=False, turns=1, skipped=0, taken=-1, most=4096):
    source = FewAtOnce(lengths)
    source.most = most
    dataset = Dataset(source).shuffle(seed=seed).map(lambda x: x)
    return dataset.repeat(turns).skip(skipped).take(taken).batch(batch, drop)


def numbers(division, epoch):
    """Return the numbers of the rows of an epoch."""
    (reading,) = division.readings
    return np.concatenate([row for step in range(division.steps) for row in reading.of_step(step, epoch)])


@MANY
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    batch=st.integers(1, 40),
    replicas=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    drop=st.booleans(),
    turns=st.integers(1, 3),
    skipped=st.integers(0, 30),
    taken=st.sampled_from([-1, 37]),
    most=st.sampled_from([2, 3, 7, 4096]),
    other=st.none() | st.integers(1, 40),
    data=st.data(),
)
def test_any_ranks_have_the_same_batches_and_go_on_from_any_step(
    lengths, seed, batch, replicas, drop, turns, skipped, taken, most, other, data
):
    epoch = data.draw(st.integers(0, 3))
    dataset = made(lengths, seed, batch, drop, turns, skipped, taken, most)
    ways = [divided(dataset, "AUTO", n) for n in (1, *replicas)]
    serial, first, second = (joined([batches(each, epoch) for each in way]) for way in ways)
    assert serial == first == second
    assert len({each.steps for way in ways for each in way}) == 1
    if not drop and skipped == 0 and taken < 0:
        assert sorted(flat(serial)) == sorted([*range(sum(lengths))] * turns)
    assert len({*flat(serial)}) * turns >= len(flat(serial))

    # From any step on other ranks; with another size of batches, too: the rows that follow have the same order.
    step = data.draw(st.integers(0, ways[1][0].steps))
    state = json.loads(json.dumps(state_of(ways[1][-1], Position(ways[1][-1], epoch, step))))
    size = other or batch
    again = divided(made(lengths, seed, size, drop, turns, skipped, taken, most), "AUTO", replicas[1])
    if again[0].name != state["policy"]:  # batches of one row
        with pytest.raises(ValueError, match="policy"):
            resumed(again[0], state)
        return
    places = [resumed(each, state) for each in again]
    rest = joined([batches(place.division, epoch) for _, place in places])
    if other is None:
        assert rest == serial[step:]
    whole = made(lengths, seed, batch, False, turns, skipped, taken, most)
    left = flat(joined([batches(divided(whole, "AUTO", 1)[0], epoch)]))[state["position"] :]
    assert flat(rest) == left[: len(flat(rest))]
    assert len(left) - len(flat(rest)) < (size if drop else 1)
    twice = [state_of(division, place) for division, place in places]
    assert twice[0].get("lanes") == state.get("lanes")  # of the epoch, not of the new batch size
    following = joined([batches(division, epoch + 1) for division, _ in places])
    fresh = divided(made(lengths, seed, size, drop, turns, skipped, taken, most), "AUTO", 1)
    assert following == joined([batches(fresh[0], epoch + 1)])


@MANY
@given(
    lengths=st.lists(st.integers(0, 50), min_size=2, max_size=60).filter(lambda x: sum(map(bool, x)) > 1),
    seed=st.integers(0, 99),
    batch=st.integers(8, 64),
    replicas=st.integers(1, 8),
    most=st.sampled_from([8, 4096]),
)
@example([1, 46, 0, 26, 0, 32, 50, 50, 50, 50], 0, 38, 2, 8)
def test_a_rank_reads_its_part_of_the_files(lengths, seed, batch, replicas, most):
    order = np.repeat(np.arange(len(lengths)), lengths)
    ways = divided(made(lengths, seed, batch, most=most), "AUTO", replicas)
    files = [{*order[numbers(each, 0)].tolist()} for each in ways]
    if replicas == 1 or ways[0].lanes is None:
        return
    count = ways[0].lanes.number
    # Two neighbours share a file, and a lane where its rows are not those of one rank alone.
    apart = batch % count == 0 and (batch == count or count % replicas == 0)
    shared = 1 if apart else 1 + len(lengths) / count
    # At each border a file more where turns of a lane differ by a row, and the last batch has other borders.
    assert sum(map(len, files)) <= sum(map(bool, lengths)) + (replicas - 1) * (shared + 4), (files, count)


def test_equal_files_are_opened_by_their_rank():
    for replicas in (1, 2, 3, 4, 8):
        ways = divided(made([40] * 500, 3, 96), "AUTO", replicas)
        assert ways[0].lanes == Lanes(96, 96)
        for each in ways:
            rows = numbers(each, 1)
            assert len({*(rows // 40).tolist()}) <= -(-500 // replicas) + 2


def test_epochs_differ_and_rows_of_sorted_files_are_mixed():
    """Files of one row of each class: no batch may have the same class from all lanes."""
    starts = np.arange(0, 6401, 100)
    for blocks in (Blocks(1, 1, starts), Blocks(64, 8, starts), Blocks(10**6, 8, starts)):
        order = LaneOrder(blocks, Lanes(64, 64))
        epochs = [order(np.arange(6400), 5, epoch) for epoch in range(2)]
        for each in epochs:
            assert sorted(each.tolist()) == [*range(6400)]
            classes = (each % 100).reshape(100, 64)
            assert min(len({*row}) for row in classes.tolist()) > 25  # 47 of 100 on average
        assert (epochs[0] != epochs[1]).mean() > 0.9
        assert (order(np.arange(6400), 6, 0) != epochs[0]).mean() > 0.9


def test_blocks_of_large_files_come_in_any_order_and_one_after_another():
    """So a few large files are mixed, and a block is read once."""
    order = LaneOrder(Blocks(10, 8, np.array([0, 1000, 2005, 3000])), Lanes(3, 3))
    rows = order(np.arange(3000), 5, 0)
    assert sorted(rows.tolist()) == [*range(3000)]
    first = rows[:300] // 10
    assert np.median(np.abs(np.diff(np.sort(np.unique(first))))) > 1  # 30 of 300 blocks, not neighbours
    where = np.argsort(rows)  # where each row comes
    for begin, stop in ((0, 1000), (1000, 2000), (2005, 2995)):  # without the smaller last blocks
        spans = np.ptp(where[begin:stop].reshape(-1, 10), axis=1)
        assert np.mean(spans <= 3 * 2 * 26) > 0.9  # but for those that a turn or a border of lanes cuts


def test_rows_meet_all_rows_in_time():
    """Each pair of files is in one lane as often as by chance, and a row has any step."""
    starts = np.arange(0, 161, 10)
    order = LaneOrder(Blocks(10**6, 8, starts), Lanes(8, 8))
    steps = np.zeros((160, 20))
    for epoch in range(400):  # 2 ms each
        rows = order(np.arange(160), 1, epoch)
        steps[rows, np.arange(160) // 8] += 1
    assert abs(steps.mean() - 20) < 1e-9
    assert steps.min() > 3  # the standard deviation is 4.4; of 3,200 numbers
    assert steps.max() < 41


@pytest.mark.parametrize(
    ("change", "lengths", "batch", "why"),
    [
        (lambda d: d.shuffle(seed=1), [9, 1, 5], 4, None),
        (lambda d: d.map(lambda x: x).shuffle(seed=1).repeat(2).take(9).skip(1), [9, 1, 5], 4, None),
        (lambda d: d.shuffle(seed=1), [9], 4, ""),
        (lambda d: d.shuffle(seed=1), [0, 9, 0], 4, ""),
        (lambda d: d.shuffle(seed=1), [9, 1, 5], 1, "room for one file"),
        (lambda d: d, [9, 1, 5], 4, "read in order"),
        (lambda d: d.take(8).shuffle(seed=1), [9, 1, 5], 4, r"take\(8\) stands before"),
        (lambda d: d.shuffle(seed=1).shard(2, 0), [9, 1, 5], 4, r"shard\(2, 0\) follows"),
        (lambda d: d.shuffle(seed=1).shuffle(seed=2), [9, 1, 5], 4, r"shuffle\(seed=2\) follows"),
        (lambda d: d.shuffle(seed=1, mode="exact"), [9, 1, 5], 4, "exact"),
    ],
)
def test_which_datasets_have_lanes(change, lengths, batch, why, caplog):
    with caplog.at_level(logging.INFO, "mpistrat.data"):
        found = [divided(change(Dataset(Files(lengths))).batch(batch), "AUTO", n)[0] for n in (1, 3)]
    assert [each.name for each in found] == ["AUTO" if why is None else "DATA"] * 2
    for each in found:
        assert (each.lanes is None) == (why is not None)
        assert bool(why) == bool(each.why)
    if why:
        assert len(caplog.messages) == 2
        assert all(re.search(why, each) for each in caplog.messages)
    else:
        assert not caplog.messages


def test_without_a_shuffle_batches_are_those_of_the_undistributed_dataset():
    dataset = Dataset(Files([7, 3, 9, 5])).batch(4)
    expected = [each.tolist() for each in dataset]
    for n in (1, 2, 3, 5):
        assert joined([batches(each, 0) for each in divided(dataset, "AUTO", n)]) == expected


def test_a_state_of_another_policy_or_that_was_edited_is_refused():
    dataset = made([9, 4, 7], 1, 4)
    (mine,), (other,) = divided(dataset, "AUTO", 1), divided(dataset, "DATA", 1)
    state = state_of(mine, Position(mine, 0, 2))
    assert state["lanes"] == [4, 3]
    with pytest.raises(ValueError, match="policy is DATA, but here it is AUTO"):
        resumed(mine, state_of(other, Position(other, 0, 2)))
    with pytest.raises(ValueError, match="policy is AUTO, but here it is DATA"):
        resumed(other, state)
    with pytest.raises(TypeError, match=r"'lanes'\] is missing"):
        resumed(mine, {name: value for name, value in state.items() if name != "lanes"})
    for wrong in ([], [4], [4, 0], [3, 4], [4, 2.0], ["4", 3], [2**63, 3], [10**6, 5000], [4, True]):
        with pytest.raises(TypeError, match="lanes are"):
            resumed(mine, {**state, "lanes": wrong})


def test_file_says_once_that_it_depends_on_the_ranks(caplog):
    from mpistrat.data.distribute import autoshard

    autoshard._say_that_files_depend_on_replicas.cache_clear()
    dataset = made([9, 4, 7], 1, 4)
    divided(dataset, "FILE", 1)
    assert not caplog.messages
    for _ in range(2):
        divided(dataset, "FILE", 2)
    (message,) = caplog.messages
    assert "depend on the number of replicas" in message
    assert "AutoShardPolicy.AUTO" in message


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    first = 0
    for number in range(40):
        rows = int(random.integers(1, 20))
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            file["y"] = np.arange(first, first + rows)
            file["small"] = np.repeat(np.arange(first, first + rows, dtype="f4")[:, None], 5, 1)
            file["large"] = np.repeat(np.arange(first, first + rows, dtype="f4")[:, None], 5000, 1)
            file.create_dataset("packed", data=file["small"], chunks=(4, 5), maxshape=(None, 5), compression="gzip")
        first += rows
    return tmp_path


def divided_files(dataset, replicas=1, rank=0):
    ready = dataset.definition.ready()
    group = ReplicaGroup(SimpleNamespace(size=replicas, rank=rank))
    return divide(AutoShardPolicy.AUTO, ready.source, ready.transforms, group, False)


@pytest.mark.parametrize("memory", [1 << 30, 1 << 10])
@pytest.mark.parametrize("name", core(["small", "large", "packed"], "small"))
def test_files_of_lanes_are_read_by_one_rank_each(folder, name, memory, monkeypatch):
    """Rows that fit in memory, that do not, that are large, and that are decoded."""
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **kw: opened.append(str(path)) or real(path, *more, **kw))
    options = Options()
    options.shuffle_memory = memory
    dataset = Dataset.from_hdf5(str(folder / "*.h5"), ("y", name)).shuffle(seed=2).batch(16).with_options(options)
    expected = None
    for replicas in (1, 2, 4):
        parts, files = [], []
        for rank in range(replicas):
            mine = divided_files(dataset, replicas, rank)
            assert mine.lanes == Lanes(16, 16)
            opened.clear()
            found = flat(mine.batches(0, 0, 4))
            files.append({each for each in opened if each.endswith(".h5")})
            for y, x in found:
                assert (x == y[:, None]).all()
            parts.append([y.tolist() for y, _ in found])
            # And the next epoch, in which it has other files.
            again = flat(y.tolist() for y, _ in flat(mine.batches(0, 1, 4)))
            assert sorted(again) != sorted(flat(parts[-1])) or replicas == 1
        whole = joined(parts)
        expected = expected or whole
        assert whole == expected
        assert sorted(flat(whole)) == [*range(len(flat(whole)))]
        assert sum(map(len, files)) <= 40 + 3 * (replicas - 1)


@pytest.mark.full
@pytest.mark.parametrize("batch", [64, 256])
def test_a_shuffle_without_memory_opens_short_files_about_twice(tmp_path, monkeypatch, batch):
    rows = np.arange(1500 * 8 * 9.0).reshape(1500, 8, 9)
    for number, values in enumerate(rows):
        np.save(tmp_path / f"{number:04}.npy", values)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **kw: opened.append(str(path)) or real(path, *more, **kw))
    options = Options()
    options.shuffle_memory = 0
    mine = divided_files(Dataset.from_npy(str(tmp_path / "*.npy")).shuffle(seed=2).batch(batch).with_options(options))
    opened.clear()
    found = np.concatenate(flat(mine.batches(0, 0, mine.prefetch_sizes(AUTOTUNE)[1])))
    np.testing.assert_array_equal(found[found[:, 0].argsort()], rows.reshape(-1, 9))
    assert 1500 <= len([each for each in opened if each.endswith(".npy")]) <= 2.3 * 1500


def test_large_chunks_leave_fewer_lanes(tmp_path):
    for number in range(12):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            for name, rows in ("x", 64), ("y", 1):
                ones = np.ones((64, 1 << 14), "f4")
                file.create_dataset(name, data=ones, chunks=(rows, 1 << 14), compression="gzip")

    def lanes(name):
        return divided_files(Dataset.from_hdf5(str(tmp_path / "*.h5"), name).shuffle(seed=1).batch(64)).lanes

    assert lanes("x") == (64, 6)  # of 4 MiB: half of the memory for decoded chunks
    assert lanes("y") == (64, 12)


def test_policies_of_one_replica_are_those_of_many():
    """The decision must not depend on the replicas."""
    for lengths, batch in itertools.product(([1, 1], [50, 1, 1], [3] * 30), (2, 3, 64)):
        names = {
            divide(
                AutoShardPolicy.AUTO,
                Files(lengths),
                made(lengths, 1, batch).definition.transforms,
                ReplicaGroup(SimpleNamespace(size=n, rank=n - 1)),
                False,
            ).lanes
            for n in (1, 2, 7, 64)
        }
        assert len(names) == 1
        assert None not in names
