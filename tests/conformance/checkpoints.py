"""Programs written against ``tf.train``, with two replicas. ``expected_checkpoints.json`` has TensorFlow's answers."""

import os
from unittest import mock

CHECKPOINTS = {}


def scenario(program):
    CHECKPOINTS[program.__name__] = program
    return program


def variable(w, value, strategy=None, sync="AUTO", agg="NONE"):
    with (strategy or w.sync).scope():
        return w.Variable(w.array(value, "float32"), synchronization=w.Sync[sync], aggregation=w.Agg[agg])


def names(paths):
    return [os.path.basename(path) for path in paths]


@scenario
def checkpoint_and_restore(w):
    v = variable(w, [1.0, 2.0])
    checkpoint = w.train.Checkpoint(v=v)
    first = checkpoint.save(os.path.join(w.folder(), "model"))
    v.assign(w.array([7.0, 7.0], "float32"))
    second = checkpoint.save(first[: -len("-1")])
    checkpoint.restore(first)
    return [*names([first, second]), w.py(v), int(w.py(checkpoint.save_counter))]


@scenario
def write_does_not_count(w):
    v = variable(w, 1.0)
    checkpoint = w.train.Checkpoint(v=v)
    path = checkpoint.write(os.path.join(w.folder(), "plain"))
    v.assign(w.array(2.0, "float32"))
    checkpoint.read(path).assert_consumed()
    return [os.path.basename(path), w.py(v), int(w.py(checkpoint.save_counter))]


@scenario
def restore_before_the_variable_exists(w):
    path = w.train.Checkpoint(v=variable(w, 5.0)).save(os.path.join(w.folder(), "c"))
    later = w.train.Checkpoint()
    status = later.restore(path)
    missing = w.raises(status.assert_consumed)
    later.v = variable(w, 0.0)
    status.assert_consumed()
    return [missing, w.py(later.v)]


@scenario
def restore_statuses(w):
    path = w.train.Checkpoint(a=variable(w, 1.0), b=variable(w, 2.0)).save(os.path.join(w.folder(), "c"))
    less = w.train.Checkpoint(a=variable(w, 0.0))
    more = w.train.Checkpoint(a=variable(w, 0.0), b=variable(w, 0.0), c=variable(w, 9.0))
    other = w.train.Checkpoint(z=variable(w, 3.0))
    out = []
    for checkpoint in (less, more, other):
        status = checkpoint.restore(path)
        checks = (
            status.assert_consumed,
            status.assert_existing_objects_matched,
            status.assert_nontrivial_match,
            status.expect_partial,
        )
        out.append([w.raises(check) for check in checks])
    return [out, w.py(less.a), w.py(more.b), w.py(more.c), w.py(other.z)]


@scenario
def restore_of_nothing(w):
    v = variable(w, 1.0)
    checkpoint = w.train.Checkpoint(v=v)
    status = checkpoint.restore(None)
    missing = os.path.join(w.folder(), "none-1")
    return [
        w.py(v),
        w.raises(status.assert_consumed),
        w.raises(status.assert_existing_objects_matched),
        w.raises(lambda: checkpoint.restore(missing)),
        w.raises(lambda: checkpoint.read(missing)),
    ]


@scenario
def restore_of_another_shape(w):
    path = w.train.Checkpoint(v=variable(w, [1.0, 2.0])).save(os.path.join(w.folder(), "c"))
    longer = variable(w, [1.0, 2.0, 3.0])
    return w.raises(lambda: w.train.Checkpoint(v=longer).restore(path))


@scenario
def checkpoint_of_structures(w):
    def build(value):
        return w.train.Checkpoint(
            list=[variable(w, value), variable(w, value + 1)],
            dict={"k": variable(w, value + 2)},
            inner=w.train.Checkpoint(v=variable(w, value + 3)),
        )

    path = build(1.0).save(os.path.join(w.folder(), "c"))
    c = build(0.0)
    c.restore(path).assert_consumed()
    return [w.py(c.list[0]), w.py(c.list[1]), w.py(c.dict["k"]), w.py(c.inner.v)]


@scenario
def checkpoint_between_strategies(w):
    """Summed copies (10, 20) are 30 to one replica; 30 of one replica are 15 for each of two."""
    v = variable(w, 0.0, sync="ON_READ", agg="SUM")
    w.sync.run(lambda: v.assign(w.array(10.0 * (w.replica() + 1), "float32")) and None)
    path = w.train.Checkpoint(v=v).save(os.path.join(w.folder(), "c"))
    u = variable(w, 0.0, w.one, "ON_READ", "SUM")
    w.train.Checkpoint(v=u).restore(path)
    t = variable(w, 0.0, sync="ON_READ", agg="SUM")
    w.train.Checkpoint(v=t).restore(path)
    m = variable(w, 0.0, sync="ON_READ", agg="MEAN")
    w.train.Checkpoint(v=m).restore(path)
    return [
        w.py(u),
        w.py(t),
        w.each(w.sync, w.sync.run(lambda: t.read_value() * 1.0)),
        w.each(w.sync, w.sync.run(lambda: m.read_value() * 1.0)),
    ]


@scenario
def checkpoint_of_an_optimizer(w):
    def train(count, path=None, save=None):
        with w.sync.scope():
            v, optimizer = w.Variable(w.array([1.0], "float32")), w.optimizers.SGD(0.5, momentum=0.9)
            optimizer.build([v])
        c = w.train.Checkpoint(v=v, optimizer=optimizer)
        if path:
            c.restore(path).assert_existing_objects_matched()

        def step():
            w.apply(optimizer, [(w.array([w.replica() + 1.0], "float32"), v)])

        for _ in range(count):
            w.sync.run(step)
        value = [round(float(x), 4) for x in w.py(v)]
        return [value, int(w.py(optimizer.iterations)), c.save(save) if save else None]

    path = train(2, save=os.path.join(w.folder(), "c"))[2]
    return [train(4)[:2], train(2, path)[:2]]


@scenario
def manager_keeps_the_last(w):
    v, folder = variable(w, 0.0), w.folder()
    manager = w.train.CheckpointManager(w.train.Checkpoint(v=v), folder, max_to_keep=2)
    for i in range(4):
        v.assign(w.array(float(i), "float32"))
        manager.save()
    kept = names(manager.checkpoints)
    again = w.train.CheckpointManager(w.train.Checkpoint(v=v), folder, max_to_keep=2)
    latest = names([manager.latest_checkpoint, w.train.latest_checkpoint(folder)])
    return [kept, *latest, names(again.checkpoints), w.stored(folder)]


@scenario
def manager_keeps_one_an_hour(w):
    """Saved every 20 minutes; what leaves the last two stays if it is an hour after what stayed before."""
    with mock.patch("time.time", return_value=1_000_000.0) as now:
        manager = w.train.CheckpointManager(
            w.train.Checkpoint(v=variable(w, 0.0)), w.folder(), max_to_keep=2, keep_checkpoint_every_n_hours=1
        )
        for _ in range(10):
            now.return_value += 1200.0
            manager.save()
        return [names(manager.checkpoints), w.stored(manager.directory)]


@scenario
def manager_restores_or_initializes(w):
    v, folder, calls = variable(w, 0.0), w.folder(), []

    def init():
        calls.append(1)
        v.assign(w.array(3.0, "float32"))

    def manager():
        return w.train.CheckpointManager(w.train.Checkpoint(v=v), folder, max_to_keep=None, init_fn=init)

    first = manager()
    out = [first.restore_or_initialize(), w.py(v), first.latest_checkpoint]
    first.save()
    v.assign(w.array(8.0, "float32"))
    path = manager().restore_or_initialize()
    return [*out, os.path.basename(path), w.py(v), len(calls)]


@scenario
def manager_names_and_intervals(w):
    with w.sync.scope():
        step = w.Variable(w.array(0, "int64"), trainable=False)
    manager = w.train.CheckpointManager(
        w.train.Checkpoint(v=variable(w, 0.0)),
        w.folder(),
        max_to_keep=3,
        checkpoint_name="net",
        step_counter=step,
        checkpoint_interval=2,
    )
    out = []
    for i in range(6):
        step.assign(w.array(i, "int64"))
        path = manager.save(check_interval=i != 5)
        out.append(path and os.path.basename(path))
    again = manager.save(check_interval=False)  # nothing was done since
    step.assign(w.array(9, "int64"))
    numbered = manager.save(checkpoint_number=40)
    return [out, again, os.path.basename(numbered), manager.checkpoint_interval]


@scenario
def manager_refuses(w):
    def make(**options):
        checkpoint, folder = w.train.Checkpoint(v=variable(w, 0.0)), w.folder()
        return lambda: w.train.CheckpointManager(checkpoint, folder, **options)

    refused = ({"max_to_keep": 0}, {"max_to_keep": -1}, {"max_to_keep": 1, "checkpoint_interval": 2})
    return [*(w.raises(make(**options)) for options in refused), w.train.latest_checkpoint(w.folder())]


@scenario
def checkpoint_of_an_iterator(w):
    dataset = w.distributed([float(i) for i in range(5)])
    it = iter(dataset)
    seen = [w.py(next(it)), w.py(next(it))]
    path = w.train.Checkpoint(it=it).save(os.path.join(w.folder(), "c"))
    seen.append(w.py(next(it)))
    fresh = iter(dataset)
    w.train.Checkpoint(it=fresh).restore(path)
    return [seen, [w.py(x) for x in fresh]]
