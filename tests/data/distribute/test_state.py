"""Tests of divisions and states: which replica reads which rows. Pure functions, so no ranks are started."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset, DistributedDataset
from mpistrat.data.distribute.autoshard import deal, divide, imbalance
from mpistrat.data.distribute.state import Position, resumed, state_of
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import Source
from mpistrat.replicas import ReplicaGroup

many = settings(derandomize=True, database=None, deadline=None, max_examples=80)


class Files(Source):
    """Stand-in for a source of files of these lengths: rows are numbers, blocks have three rows."""

    def __init__(self, lengths, first=None):
        self.lengths = lengths
        self.first = np.cumsum([0, *lengths])[:-1] if first is None else first

    def __len__(self):
        return sum(self.lengths)

    def element_spec(self):
        return ArraySpec((), "int64")

    def read(self, rows):
        numbers = np.concatenate([f + np.arange(n) for f, n in zip(self.first, self.lengths, strict=True)])
        return numbers[rows].astype(np.int64)

    def fingerprint(self):
        return f"files {self.lengths}"

    def file_rows(self):
        return self.lengths

    def of_files(self, which):
        return Files([self.lengths[i] for i in which], [self.first[i] for i in which])

    def blocks(self):
        return Blocks(3, 8, np.cumsum([0, *self.lengths]))


def chain(lengths, batch, drop=False, seed=None, mode="block", turns=1):
    dataset = Dataset(Files(lengths))
    dataset = dataset if seed is None else dataset.shuffle(seed=seed, mode=mode)
    return dataset.repeat(turns).batch(batch, drop)


def divided(dataset, policy, replicas, balance=False):
    """Return the division of every replica."""
    peers = [ReplicaGroup(SimpleNamespace(size=replicas, rank=rank)) for rank in range(replicas)]
    return [
        divide(AutoShardPolicy[policy], dataset.definition.source, dataset.definition.transforms, peer, balance)
        for peer in peers
    ]


def batches(division, epoch, start=0):
    return [division.batch(step, epoch).tolist() for step in range(start, division.steps)]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def joined(parts):
    """Return the global batches, joined from the pieces of all replicas."""
    return [flat(pieces) for pieces in zip(*parts, strict=True)]


FILES = st.lists(st.integers(1, 40), min_size=1, max_size=12)
ORDER = {"seed": st.none() | st.integers(0, 9), "mode": st.sampled_from(["block", "exact"])}


@many
@given(
    lengths=FILES,
    replicas=st.integers(1, 8),
    batch=st.integers(1, 20),
    drop=st.booleans(),
    policy=st.sampled_from(["DATA", "FILE", "OFF", "HINT"]),
    turns=st.integers(1, 2),
    balance=st.booleans(),
    epoch=st.integers(0, 2),
    **ORDER,
)
def test_every_sample_once(lengths, replicas, batch, drop, policy, turns, balance, epoch, seed, mode):
    dataset = chain(lengths, batch, drop, seed, mode, turns)
    if policy == "FILE" and min(len(lengths), batch) < replicas:
        for rank in range(replicas):
            with pytest.raises(ValueError, match="FILE needs"):
                divide(
                    AutoShardPolicy.FILE,
                    dataset.definition.source,
                    dataset.definition.transforms,
                    ReplicaGroup(SimpleNamespace(size=replicas, rank=rank)),
                    balance,
                )
        return
    parts = [batches(each, epoch) for each in divided(dataset, policy, replicas, balance)]
    assert len({len(part) for part in parts}) == 1
    whole = sorted(list(range(sum(lengths))) * turns)
    if policy == "DATA":
        serial = joined([batches(divided(dataset, policy, 1)[0], epoch)])
        assert joined(parts) == serial
        assert serial == [x.tolist() for x in _epoch(dataset, epoch)]
        rows = [flat(joined(parts))]
    elif policy == "FILE":
        rows = [flat(joined(parts))]
        assert len(rows[0]) == len(set(rows[0])) * turns or drop
    else:
        rows = [flat(part) for part in parts]
    for each in rows:
        if not drop:
            assert sorted(each) == whole
        else:
            assert len(set(each)) * turns >= len(each) >= len(whole) - max(batch - 1, 0) * replicas


def _epoch(dataset, epoch):
    return list(dataset._plan.elements(epoch))


@pytest.mark.full
@many
@given(
    lengths=FILES,
    data=st.data(),
    drop=st.booleans(),
    turns=st.integers(1, 2),
    epoch=st.integers(0, 3),
    seed=st.none() | st.integers(0, 9),
    mode=st.sampled_from(["block", "exact"]),
)
def test_what_is_left_comes_once_with_any_replicas_and_batch(lengths, data, drop, turns, epoch, seed, mode):
    sizes = st.tuples(st.integers(1, 8), st.integers(1, 20))
    (replicas, batch), (other_replicas, other_batch) = data.draw(sizes), data.draw(sizes)
    first = divided(chain(lengths, batch, drop, seed, mode, turns), "DATA", replicas)
    step = data.draw(st.integers(0, first[0].steps))
    states = [json.loads(json.dumps(state_of(each, Position(each, epoch, step)))) for each in first]
    assert all(state == states[0] for state in states)
    before = flat(joined([batches(each, epoch)[:step] for each in first]))

    second = divided(chain(lengths, other_batch, drop, seed, mode, turns), "DATA", other_replicas)
    places = [resumed(each, states[0])[1] for each in second]
    assert {place.epoch for place in places} == {epoch}
    after = flat(joined([batches(place.division, epoch) for place in places]))
    order = [int(x[0]) for x in chain(lengths, 1, False, seed, mode, turns)._plan.elements(epoch)]
    assert before + after == order[: len(before) + len(after)]
    assert len(order) - len(before) - len(after) < (other_batch if drop else 1)

    # And once more, from the middle of what is left.
    again = data.draw(st.integers(0, places[0].division.steps))
    states = [state_of(each, replace(place, step=again)) for each, place in zip(second, places, strict=True)]
    _, place = resumed(first[0], states[0])
    left = flat(joined([batches(resumed(each, states[0])[1].division, epoch) for each in first]))
    assert left == order[place.skipped :][: len(left)]
    assert place.skipped == min(len(before) + again * other_batch, len(order))


@pytest.mark.full
@many
@given(
    lengths=FILES,
    policy=st.sampled_from(["FILE", "OFF", "HINT"]),
    replicas=st.integers(1, 6),
    data=st.data(),
    seed=st.none() | st.integers(0, 9),
)
def test_other_policies_go_on_with_the_same_numbers(lengths, policy, replicas, data, seed):
    lengths = lengths * replicas
    dataset = chain(lengths, 2 * replicas, seed=seed)
    divisions = divided(dataset, policy, replicas)
    step = data.draw(st.integers(0, divisions[0].steps))
    for each in divisions:
        _, place = resumed(each, state_of(each, Position(each, 1, step)))
        assert (place.epoch, place.step, place.skipped) == (1, step, 0)
        assert batches(place.division, 1, place.step) == batches(each, 1)[step:]
    state = state_of(divisions[0], Position(divisions[0], 1, step))
    with pytest.raises(ValueError, match=r"number of replicas is .*AutoShardPolicy\.DATA"):
        resumed(divisions[0], {**state, "replicas": replicas + 1})
    other = divided(chain(lengths, 2 * replicas + 1, seed=seed), policy, replicas)[0]
    with pytest.raises(ValueError, match="batch size is"):
        resumed(other, state)


def distributed(dataset):
    alone = SimpleNamespace(size=1, rank=0, all_gather_object=lambda x: [x])
    return DistributedDataset(dataset, alone)


def test_iterators_and_datasets_go_on():
    def made(batch=4):
        return distributed(Dataset.range(10).shuffle().batch(batch))

    first = made()
    next(iter(first))
    iterator = iter(first)
    next(iterator)
    state = json.loads(json.dumps(iterator.state()))
    assert state == first.state()
    assert (state["epoch"], state["position"]) == (1, 4)
    rest = [x.tolist() for x in iterator]
    third = [x.tolist() for x in first]

    second = made()
    iterator = iter(second)
    next(iterator)
    iterator.restore(state)
    assert iterator.state() == state
    assert [x.tolist() for x in iterator] == rest
    assert [x.tolist() for x in second] == third

    last = made(3)
    last.restore(state)
    assert last.state() == {**state, "batch": 3}
    assert flat(x.tolist() for x in last) == flat(rest)
    assert flat([x.tolist() for x in last]) == flat(third)


def test_states_at_the_ends_of_an_epoch():
    first = distributed(Dataset.range(5).batch(2))
    assert (first.state()["epoch"], first.state()["position"]) == (0, 0)
    iterator = iter(first)
    assert len(list(iterator)) == 3
    state = iterator.state()
    assert (state["epoch"], state["position"]) == (0, 5)
    first.restore(state)
    assert list(first) == []
    assert len(list(first)) == 3
    assert (first.state()["epoch"], first.state()["position"]) == (2, 0)  # that epoch has ended


def test_endless_and_batches_that_move():
    endless = distributed(Dataset.range(5).shuffle(seed=1).repeat().batch(4))
    iterator = iter(endless)
    kept = [next(iterator).tolist() for _ in range(3)]
    state = iterator.state()
    assert state["position"] == 12
    expected = next(iterator).tolist()
    endless.restore(state)
    assert next(iter(endless)).tolist() == expected
    assert kept[0] != expected
    moved = distributed(Dataset.range(9).batch(2).shuffle(seed=2).repeat(2))
    iterator = iter(moved)
    next(iterator)
    state = iterator.state()
    assert (state["step"], "position" in state) == (1, False)
    rest = [x.tolist() for x in iterator]
    moved.restore(state)
    assert [x.tolist() for x in moved] == rest
    with pytest.raises(ValueError, match=r"batch size is 2, but here it is 3.* before batch\(\)"):
        distributed(Dataset.range(9).batch(3).shuffle(seed=2).repeat(2)).restore(state)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Dataset.range(11).shuffle(seed=1).batch(4), r"a state of range\(0, 10\), but this is range\(0, 11\)"),
        (Dataset.range(10).shuffle(seed=2).batch(4), "seed of shuffle number 0 is 1, but here it is 2"),
        (Dataset.range(10).batch(4), "pipeline"),
        (Dataset.range(10).shuffle(seed=1, mode="exact").batch(4), "pipeline"),
        (Dataset.range(10).shuffle(seed=1).take(8).batch(4), r"pipeline is .* but here it is .*take\(8\)"),
    ],
)
def test_states_of_something_else(other, text):
    state = distributed(Dataset.range(10).shuffle(seed=1).batch(4)).state()
    with pytest.raises(ValueError, match=text):
        distributed(other).restore(state)


def test_no_state_at_all():
    one = distributed(Dataset.range(10).batch(4))
    with pytest.raises(TypeError, match=r"what state\(\) returned"):
        one.restore({"epoch": 3})
    with pytest.raises(TypeError, match=r"\['seeds', 'source'\] is missing"):
        one.restore({name: value for name, value in one.state().items() if name not in ("seeds", "source")})
    with pytest.raises(ValueError, match="version 99"):
        one.restore({**one.state(), "version": 99})
    with pytest.raises(ValueError, match="policy is FILE"):
        one.restore({**one.state(), "policy": "FILE"})


SEEDED = Dataset.range(10).shuffle(seed=1).batch(4)


@pytest.mark.parametrize(
    ("dataset", "place", "most"),
    [
        (SEEDED, "position", "an epoch has 10 rows"),
        (Dataset.range(10).repeat(2).batch(4, drop_remainder=True), "position", "an epoch has 20 rows"),
        (Dataset.range(10).repeat().batch(4), "position", "more than 4611686018427387904 cannot be numbered"),
        (Dataset.range(9).batch(2).shuffle(seed=2), "step", "an epoch has 5 steps"),
    ],
)
def test_places_that_no_epoch_has(dataset, place, most):
    one = distributed(dataset)
    state = one.state()
    limit = int(next(word for word in most.split() if word.isdigit()))
    one.restore({**state, place: limit})
    if "epoch" in most:
        assert list(one) == []
    for value in (limit + 1, 2**70):
        with pytest.raises(ValueError, match=rf"its {place} is {value}, and {most}; give what state"):
            one.restore({**state, place: value})
    with pytest.raises(ValueError, match=f"{place} is -1, which is below 0"):
        one.restore({**state, place: -1})
    for value in ("3", 3.0, None, True, [3]):
        with pytest.raises(TypeError, match=rf"what state\(\) returned: {place} is "):
            one.restore({**state, place: value})
    other = {"step": "position", "position": "step"}[place]
    with pytest.raises(TypeError, match=f"'{place}' is missing"):
        one.restore({other if name == place else name: value for name, value in state.items()})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("epoch", 1.0, TypeError),
        ("epoch", -1, ValueError),
        ("epoch", 2**70, ValueError),
        ("epoch", False, TypeError),
        ("policy", 3, TypeError),
        ("replicas", "2", TypeError),
        ("batch", "4", TypeError),
        ("pipeline", "batch", TypeError),
        ("seeds", 1, TypeError),
        ("seeds", ["1"], TypeError),
        ("seeds", [1, 2], TypeError),
        ("seeds", [], TypeError),
        ("source", [], TypeError),
        ("source", None, TypeError),
    ],
)
def test_states_of_wrong_types(name, value, error):
    one = distributed(SEEDED)
    with pytest.raises(error, match=r"what state\(\) returned: "):
        one.restore({**one.state(), name: value})
    assert one.state()["epoch"] == 0


@many
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_balanced_files(lengths, replicas):
    for balance in (False, True):
        shares = deal(lengths, replicas, balance)
        assert sorted(flat(shares)) == list(range(len(lengths)))
        assert [bool(share) for share in shares].count(True) == min(replicas, len(lengths))
    if len(lengths) >= replicas:
        longest = max(sum(lengths[i] for i in share) for share in shares)
        least = max(max(lengths), sum(lengths) / replicas)
        assert longest <= (4 / 3) * least + max(lengths) * (longest > least) / 3 or longest <= 2 * least
        assert imbalance(lengths, replicas, True) == pytest.approx(longest * replicas / sum(lengths) - 1)


def test_lognormal_files_are_balanced():
    lengths = np.ceil(np.random.default_rng(0).lognormal(5, 1, 4096)).astype(int).tolist()
    assert imbalance(lengths, 64, balance=False) > 0.2
    assert imbalance(lengths, 64, balance=True) < 0.001


def test_balance_is_an_option():
    dataset = chain([9, 1, 1, 7], 2)
    options = dataset.options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
    options.experimental_distribute.balance = True
    assert dataset.with_options(options).options().experimental_distribute.balance
    assert "balance=True" in repr(options)
    with pytest.raises(TypeError, match="balance"):
        options.experimental_distribute.balance = 1
    balanced = divided(dataset, "FILE", 2, balance=True)
    assert [each.steps for each in balanced] == [9, 9]
    with pytest.raises(ValueError, match="policy is FILE, balanced, but here it is FILE;"):
        resumed(divided(dataset, "FILE", 2)[0], state_of(balanced[0], Position(balanced[0], 0)))
    assert [each.steps for each in divided(dataset, "FILE", 2)] == [10, 10]
