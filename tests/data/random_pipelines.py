"""Random pipelines: beside tf.data or plain lists, and on several ranks, resumed on others, beside one process.

By hand: ``python -m tests.data.random_pipelines 500 1000`` runs 500 of each kind, from seed 1000 on.
"""

import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpistrat.data import AutoShardPolicy, Dataset, DistributedDataset, Options
from tests.data.conftest import run
from tests.data.distribute.test_state import Files, flat


class Verb(NamedTuple):
    """One method: how it is called here, what it does to a list, and how tf.data is called (None: as here)."""

    draw: Callable
    ours: Callable
    lists: Callable
    tf: Callable | None = None
    of_numbers: bool = False
    """Whether it needs rows with numbers. tf.data has no such methods, and gets the list."""


def small(r, rows):
    return r.randint(1, 4)


def in_turn(rows, made, cycle, block):
    """Return what tf.data's interleave gives."""
    source, slots, at, taken = iter(rows), [None] * cycle, 0, 0
    ended = False
    while not ended or any(slot is not None for slot in slots):
        if slots[at] is not None:
            found = next(slots[at], None)
            if found is not None:
                yield found
                taken += 1
                if taken < block:
                    continue
            else:
                slots[at] = None
        elif not ended:
            row = next(source, None)
            ended = row is None
            slots[at] = None if ended else iter(made(row))
            continue
        at, taken = (at + 1) % cycle, 0


def windows(rows, size, shift, stride, drop):
    cut = [rows[first : first + size * stride : stride] for first in range(0, len(rows), shift)]
    return [sum(each) for each in cut if len(each) == size or not drop]


def scanned(rows, state):
    found = []
    for x in rows:
        found.append(state + x)
        state = state * 2 % 11 + x
    return found


def bucketed(rows, bound, a, b, drop, full=False):
    held, found = ([], []), []

    def told(number):
        batch = held[number]
        longest = bound - 1 if full else max(x % 7 for x in batch)
        found.append(sum(x * (x % 7) for x in batch) * 100 + len(batch) * 10 + longest)
        batch.clear()

    for x in rows:
        number = int(x % 7 >= bound)
        held[number].append(x)
        if len(held[number]) == (a, b)[number]:
            told(number)
    for number in (0, 1):
        if held[number] and not drop:
            told(number)
    return found


def our_buckets(d, bound, a, b, drop, **more):
    rows = d.map(lambda x: np.full(x % 7, x))
    made = rows.bucket_by_sequence_length(len, [bound], [a, b], drop_remainder=drop, **more)
    return made.map(lambda x: np.array([x.sum() * 100 + x.shape[0] * 10 + x.shape[1]])).unbatch()


def verbs(tf=None):
    """Return the methods by name. All keep elements that are single integers."""

    def tf_window(d, size, shift, stride, drop):
        return d.window(size, shift, stride, drop).flat_map(lambda rows: rows.batch(size)).map(tf.reduce_sum)

    def tf_buckets(d, bound, a, b, drop, **more):
        rows = d.map(lambda x: tf.fill([x % 7], x))
        sizes = {"bucket_boundaries": [bound], "bucket_batch_sizes": [a, b], "drop_remainder": drop}
        made = rows.bucket_by_sequence_length(lambda x: tf.shape(x)[0], padded_shapes=[None], **sizes, **more)
        return made.map(lambda x: tf.reduce_sum(x) * 100 + tf.shape(x, tf.int64)[0] * 10 + tf.shape(x, tf.int64)[1])

    def counted(kind):
        return lambda n: lambda x: kind.range(int(x) % (n + 1) if kind is Dataset else x % (n + 1)).map(lambda y: y + x)

    def in_list(n):
        return lambda x: [y + x for y in range(x % (n + 1))]

    here, there = counted(Dataset), counted(tf and tf.data.Dataset)
    full = {"pad_to_bucket_boundary": True}

    def batches(rows, n, drop):
        return rows[: len(rows) // n * n] if drop else rows

    def remainder(n):
        return lambda x: x % n == 0

    return {
        "map": Verb(small, lambda d, n: d.map(lambda x: x * 3 + n), lambda rows, n: [x * 3 + n for x in rows]),
        "take": Verb(lambda r, _: r.randint(-1, 20), lambda d, n: d.take(n), lambda a, n: a if n < 0 else a[:n]),
        "skip": Verb(lambda r, _: r.randint(0, 5), lambda d, n: d.skip(n), lambda rows, n: rows[n:]),
        "shard": Verb(small, lambda d, n: d.shard(n, n - 1), lambda rows, n: rows[n - 1 :: n]),
        "repeat": Verb(lambda r, _: r.randint(0, 2), lambda d, n: d.repeat(n), lambda rows, n: rows * n),
        "unbatch": Verb(
            lambda r, _: (r.randint(1, 4), r.random() < 0.5),
            lambda d, n, drop: d.batch(n, drop).map(lambda x: x + 1).unbatch(),
            lambda rows, n, drop: [x + 1 for x in batches(rows, n, drop)],
        ),
        "rebatch": Verb(small, lambda d, n: d.batch(n).unbatch(), lambda rows, n: rows),
        "window": Verb(
            lambda r, _: (*(r.randint(1, 4) for _ in range(3)), r.random() < 0.5),
            lambda d, *a: d.window(*a).map(lambda x: x.sum()),
            windows,
            tf_window,
        ),
        "flat_map": Verb(
            small,
            lambda d, n: d.flat_map(here(n)),
            lambda rows, n: [y for x in rows for y in in_list(n)(x)],
            lambda d, n: d.flat_map(there(n)),
        ),
        "interleave": Verb(
            lambda r, _: [r.randint(1, 4) for _ in range(3)],
            lambda d, n, *a: d.interleave(here(n), *a),
            lambda rows, n, *a: [*in_turn(rows, in_list(n), *a)],
            lambda d, n, *a: d.interleave(there(n), *a),
        ),
        "scan": Verb(
            small,
            lambda d, n: d.scan(np.int64(n), lambda s, x: (s * 2 % 11 + x, s + x)),
            lambda rows, n: scanned(rows, n),
        ),
        "take_while": Verb(
            lambda r, _: r.randint(2, 40),
            lambda d, n: d.take_while(lambda x: x < n),
            lambda rows, n: [*itertools.takewhile(lambda x: x < n, rows)],
        ),
        "filter": Verb(small, lambda d, n: d.filter(remainder(n)), lambda rows, n: [*filter(remainder(n), rows)]),
        "enumerate": Verb(
            small,
            lambda d, n: d.enumerate(n).map(lambda k, x: k + x),
            lambda rows, n: [k + x for k, x in enumerate(rows, n)],
        ),
        "concatenate": Verb(
            small,
            lambda d, n: d.concatenate(Dataset.range(n)),
            lambda rows, n: rows + [*range(n)],
            lambda d, n: d.concatenate(tf.data.Dataset.range(n)),
        ),
        "zip": Verb(
            lambda r, _: r.randint(0, 30),
            lambda d, n: Dataset.zip(d, Dataset.range(100, 100 + n)).map(lambda a, b: a + b),
            lambda rows, n: [a + b for a, b in zip(rows, range(100, 100 + n), strict=False)],
            lambda d, n: tf.data.Dataset.zip((d, tf.data.Dataset.range(100, 100 + n))).map(lambda a, b: a + b),
        ),
        "cache": Verb(lambda r, _: (), lambda d: d.cache(), lambda rows: rows),
        "buckets": Verb(
            lambda r, _: (r.randint(1, 7), r.randint(1, 4), r.randint(1, 4), r.random() < 0.5),
            our_buckets,
            bucketed,
            tf_buckets,
        ),
        "full buckets": Verb(
            lambda r, _: (r.randint(1, 4), r.randint(1, 4)),
            lambda d, a, b: our_buckets(d.map(lambda x: x % 5), 5, a, b, False, **full),
            lambda rows, a, b: bucketed([x % 5 for x in rows], 5, a, b, False, True),
            lambda d, a, b: tf_buckets(d.map(lambda x: x % 5), 5, a, b, False, **full),
        ),
        "filter by": Verb(
            small,
            lambda d, n: d.filter(remainder(n), by=lambda x: x),
            lambda rows, n: [*filter(remainder(n), rows)],
            of_numbers=True,
        ),
        "select": Verb(
            lambda r, rows: [[r.randrange(-len(rows), len(rows)) for _ in range(r.randint(0, 20)) if rows]],
            lambda d, indices: d.select(indices),
            lambda rows, indices: [rows[k] for k in indices],
            of_numbers=True,
        ),
        "slice": Verb(
            lambda r, _: [slice(r.randint(-9, 9), r.choice([None, r.randint(-9, 20)]), r.choice([1, 2, 3, -1, -2]))],
            lambda d, cut: d[cut],
            lambda rows, cut: rows[cut],
            of_numbers=True,
        ),
    }


def drawn(r, d, rows, table, more=()):
    """Return a pipeline, its rows as a list (None once they are not known), and its description."""
    chain = []
    for _ in range(r.randint(1, 4)):
        name = r.choice([*table, *more])
        if name in table:
            verb = table[name]
            if verb.of_numbers and d.definition.streamed:
                continue
            length = range(len(d)) if rows is None and verb.of_numbers else rows
            values = verb.draw(r, length)
            values = [values] if isinstance(values, int) else [*values]
            try:
                d = verb.ours(d, *values)
            except ValueError as error:  # by seeds before it, each epoch has other elements
                if more and "call filter" in str(error):
                    continue
                raise
            rows = None if rows is None else verb.lists(rows, *values)
        else:
            values = [r.randint(0, 99)]
            try:
                d, rows = more[name](r, d, *values), None
            except (TypeError, ValueError):  # such as a split after repeat()
                continue
        chain.append((name, *values))
    return d, rows, chain


def beside_others(seed, tf=None):
    """Compare a pipeline with tf.data and plain lists: batches of two epochs, length, elements by number, a fold."""
    r, table = random.Random(seed), verbs(tf)
    n = r.randint(0, 25)
    d, rows, chain = drawn(r, Dataset.range(n), [*range(n)], table)
    size, drop = r.randint(1, 4), r.random() < 0.3
    expected = [rows[k : k + size] for k in range(0, len(rows), size)]
    if drop and expected and len(expected[-1]) < size:
        expected.pop()
    if tf is not None:
        theirs, known = tf.data.Dataset.range(n), [*range(n)]
        for name, *values in chain:
            verb = table[name]
            known = verb.lists(known, *values)
            theirs = (
                tf.data.Dataset.from_tensor_slices(np.array(known, np.int64))
                if verb.of_numbers
                else (verb.tf or verb.ours)(theirs, *values)
            )
        got = [x.tolist() for x in theirs.batch(size, drop).as_numpy_iterator()]
        assert got == expected, ("the list differs from tf.data", seed, n, chain, size)
    batches = d.batch(size, drop)
    for epoch in range(2):
        assert [x.tolist() for x in batches] == expected, (seed, epoch, n, chain, size)
    folded = 0
    for x in rows:
        folded = folded * 2 % 101 + x
    assert int(d.reduce(np.int64(0), lambda s, x: s * 2 % 101 + x)) == folded, (seed, n, chain)
    if not d.definition.streamed:
        assert (len(d), len(batches)) == (len(rows), len(expected)), (seed, n, chain)
        assert [int(d[k]) for k in range(-len(rows), len(rows))] == 2 * rows, (seed, n, chain)


ORDERS = {
    "shuffle": lambda r, d, seed: d.shuffle(r.randint(2, 9), seed=seed, reshuffle_each_iteration=r.random() < 0.7),
    "exact": lambda r, d, seed: d.shuffle(9, seed=seed, mode="exact"),
    "split": lambda r, d, seed: d.split([0.5, 0.3, 0.2], seed)[r.randrange(3)],
    "split by": lambda r, d, seed: d.split([0.6, 0.4], seed, by=lambda x: x % 5)[r.randrange(2)],
    "folds": lambda r, d, seed: d.k_folds(3, seed)[r.randrange(3)][r.randrange(2)],
    "sample": lambda r, d, seed: d.sample(by=lambda x: x % 3, seed=seed),
    "sample once": lambda r, d, seed: d.sample(lambda x: 1 + x % 3, False, seed),
    "mix": lambda r, d, seed: Dataset.sample_from_datasets([d, Dataset.range(9)], [0.7, 0.3], seed),
    "noise": lambda r, d, seed: d.map(lambda x, rng: x + rng.integers(9), seed=seed),
}


def on_ranks(seed):
    """Compare a pipeline on several ranks with one process, and what is left after a resume on other ranks.

    Return whether there was anything to compare.
    """

    def made(batch=None):
        """Return the pipeline as another process makes it, and its list."""
        r = random.Random(seed)
        lengths = [r.randint(0, 20) for _ in range(r.randint(1, 5))]
        source = Dataset(Files(lengths)) if r.random() < 0.5 and any(lengths) else Dataset.range(sum(lengths))
        shuffled = r.random() < 0.4  # then files have lanes, unless another order follows
        source = source.shuffle(9, r.randint(0, 99)) if shuffled else source
        d, rows, chain = drawn(r, source, None if shuffled else [*range(sum(lengths))], verbs(), ORDERS)
        options = Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy[r.choice(["AUTO", "DATA"])]
        size, drop = r.randint(2, 9), r.random() < 0.2  # a batch of one row has no lanes
        if r.random() < 0.2:
            return d.batch(batch or size, drop).map(lambda x: x + 1).with_options(options), None, (lengths, chain, drop)
        return d.batch(batch or size, drop).with_options(options), rows, (lengths, chain, drop)

    def whole(pieces):
        assert len({len(each) for each in pieces}) == 1, "ranks made different numbers of steps"
        return [[x for piece in step for x in piece] for step in zip(*pieces, strict=True)]

    def checked(results):
        for each in results:
            if isinstance(each, Exception):
                raise each
        return results

    def epochs(peer):
        distributed = DistributedDataset(made()[0], peer)
        return [[x.tolist() for x in distributed] for _ in range(2)]

    try:
        d, rows, (lengths, chain, drop) = made()
        serial = [[x.tolist() for x in d] for _ in range(2)]
    except ValueError as error:  # a part of too few elements, or draws of none
        if re.search("has no elements|one of them above 0|without replacement", str(error)):
            return False
        raise
    if not flat(serial[0]):  # a stream has no structure then, and ranks without rows raise in the next epoch
        return False
    if rows is not None and not drop:
        assert [x for batch in serial[0] for x in batch] == rows, (seed, lengths, chain)
    ranks = [random.Random(seed + 1).randint(1, 4), random.Random(seed + 2).randint(1, 4)]
    found = checked(run(ranks[0], epochs))
    (lanes,) = checked(
        run(1, lambda peer: "no lanes=" not in (text := repr(DistributedDataset(d, peer))) and "lanes=" in text)
    )
    if lanes:
        alone = checked(run(1, epochs))
        cut = drop or any(name in ("take", "skip") for name, *_ in chain)  # in another order of the rows
        for ours, theirs in zip(alone[0], serial, strict=True):
            assert [*map(len, ours)] == [*map(len, theirs)], (seed, lengths, chain)
            assert cut or sorted(flat(ours)) == sorted(flat(theirs)), (seed, lengths, chain)
        serial = alone[0]
    for epoch in range(2):
        assert whole([each[epoch] for each in found]) == serial[epoch], (seed, lengths, chain, ranks, epoch)
    stop = random.Random(seed + 3).randint(0, len(serial[0]))
    size = None if drop or lanes else random.Random(seed + 4).randint(2, 9)

    def stopped(peer):
        iterator = iter(DistributedDataset(made()[0], peer))
        begun = [x.tolist() for x in itertools.islice(iterator, stop)]
        return begun, json.dumps(iterator.state())

    def resumed(peer):
        distributed = DistributedDataset(made(size)[0], peer)
        distributed.restore(json.loads(told))
        return [[x.tolist() for x in distributed] for _ in range(2)]

    begun = checked(run(ranks[0], stopped))
    told = begun[0][1]
    assert {each[1] for each in begun} == {told}, (seed, "states differ between ranks")
    rest = checked(run(ranks[1], resumed))
    for epoch in range(2):
        expected = serial[epoch][stop if epoch == 0 else 0 :]
        got = whole([each[epoch] for each in rest])
        assert flat(got) == flat(expected), (seed, lengths, chain, ranks, stop, epoch)
    return True


def main(count, first):
    try:
        tf = importlib.import_module("tensorflow")
    except ImportError:
        tf = None
    for what, call in (("beside others", lambda seed: beside_others(seed, tf)), ("on ranks", on_ranks)):
        wrong = empty = 0
        for seed in range(first, first + count):
            try:
                empty += call(seed) is False
            except Exception as error:
                wrong += 1
                print(f"{what}, seed {seed}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        print(f"{what}: {count - empty} pipelines, {wrong} differ", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
