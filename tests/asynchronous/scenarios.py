"""Small programs about what a coordinator, its workers and parameter servers do, each returning a JSON-able answer.

``expected.json`` holds what TensorFlow answers. A world ``w`` gives each program its strategy and its coordinator.
"""

import os

SCENARIOS = {}


def scenario(world):
    def keep(fn):
        fn.world = world
        SCENARIOS[fn.__name__] = fn
        return fn

    return keep


@scenario("alone")
def local_server(w):
    server = w.dist.Server.create_local_server()
    definition = server.server_def
    return [definition.job_name, definition.task_index, w.jobs(server), bool(server.target)]


@scenario("alone")
def server_of_a_cluster(w):
    spec = w.ClusterSpec({"worker": ["localhost:0"]})
    server = w.dist.Server(spec, job_name="worker", start=False)  # the only task: its index may be left out
    alone = w.dist.Server(spec, start=False)  # the only job: so may its name
    return [
        server.server_def.job_name,
        server.server_def.task_index,
        w.jobs(server),
        server.server_def.protocol,
        alone.server_def.job_name,
    ]


@scenario("alone")
def server_arguments(w):
    spec = w.ClusterSpec({"worker": ["localhost:0", "localhost:1"], "ps": ["localhost:2"]})
    return [
        w.raises(lambda: w.dist.Server(spec, start=False)),
        w.raises(lambda: w.dist.Server(spec, job_name="worker", start=False)),
        w.raises(lambda: w.dist.Server("worker", start=False)),
    ]


def resolver(w, cluster, **kw):
    return w.dist.cluster_resolver.SimpleClusterResolver(w.ClusterSpec(cluster), **kw)


@scenario("alone")
def parameter_server_strategy_needs_its_jobs(w):
    ps = w.dist.ParameterServerStrategy
    return [
        w.raises(lambda: ps(resolver(w, {}))),
        w.raises(lambda: ps(resolver(w, {"worker": ["a:1"]}))),
        w.raises(lambda: ps(resolver(w, {"ps": ["a:1"]}))),
        w.raises(lambda: ps(resolver(w, {"chief": ["c:1"], "worker": ["a:1"]}))),
        w.raises(lambda: ps(resolver(w, {"chief": ["c:1", "d:1"], "worker": ["a:1"], "ps": ["b:1"]}))),
        w.raises(lambda: ps(resolver(w, {"master": ["c:1"], "worker": ["a:1"], "ps": ["b:1"]}))),
        w.raises(lambda: ps()),
    ]


@scenario("alone")
def coordinator_of_another_strategy(w):
    return w.raises(lambda: w.dist.coordinator.ClusterCoordinator(w.one))


@scenario("alone")
def same_classes_at_both_addresses(w):
    d = w.dist
    return [
        d.experimental.coordinator.ClusterCoordinator is d.coordinator.ClusterCoordinator,
        d.experimental.coordinator.RemoteValue is d.coordinator.RemoteValue,
        d.experimental.coordinator.PerWorkerValues is d.coordinator.PerWorkerValue,
        issubclass(d.experimental.ParameterServerStrategy, d.ParameterServerStrategy),
    ]


@scenario("alone")
def remote_values_are_abstract(w):
    r = w.dist.coordinator.RemoteValue()
    return [w.raises(r.fetch), w.raises(r.get)]


@scenario("alone")
def per_worker_value_takes_remote_values(w):
    return w.raises(lambda: w.dist.coordinator.PerWorkerValue((1, 2)))


@scenario("alone")
def worker_index_outside_of_a_worker(w):
    return w.raises(w.dist.coordinator.experimental_get_current_worker_index)


def ps_variable(w, value, **kw):
    with w.ps.scope():
        return w.Variable(w.array(value, "float32"), **kw)


@scenario("cluster")
def parameter_server_context(w):
    s, d = w.ps, w.dist
    with s.scope():
        inside = [
            d.has_strategy(),
            d.in_cross_replica_context(),
            d.get_replica_context() is None,
            d.get_strategy() is s,
        ]
    return [s.num_replicas_in_sync, inside, d.has_strategy()]


@scenario("cluster")
def one_coordinator_for_a_strategy(w):
    return [
        w.dist.coordinator.ClusterCoordinator(w.ps) is w.coord,
        w.coord.strategy is w.ps,
        isinstance(w.coord.schedule(w.function(lambda: 1.0)), w.dist.coordinator.RemoteValue),
    ]


@scenario("cluster")
def schedule_and_fetch(w):
    r = w.coord.schedule(
        w.function(lambda a, b: a * 10.0 + b), args=(w.array(1.0, "float32"),), kwargs={"b": w.array(2.0, "float32")}
    )
    first = r.fetch()
    listed = w.coord.schedule(w.function(lambda a: a), args=[3.0])
    return [w.py(first), w.py(r.get()), w.py(r.fetch()), w.py(listed.fetch())]


@scenario("cluster")
def schedule_of_structures(w):
    def fn(d):
        return {"sum": d["x"] + d["y"][0], "pair": (d["x"], [d["y"][1]])}

    one, two, three = (w.array(i, "int32") for i in (1, 2, 3))
    out = w.coord.schedule(w.function(fn), args=({"x": one, "y": [two, three]},)).fetch()
    pair = out["pair"]
    return [type(out).__name__, w.py(out["sum"]), type(pair).__name__, w.py(pair[0]), w.py(pair[1][0])]


@scenario("cluster")
def schedule_of_nothing(w):
    v = ps_variable(w, 0.0)

    def fn():
        v.assign(4.0)

    r = w.coord.schedule(w.function(fn))
    return [r.fetch() is None, w.py(v)]


@scenario("cluster")
def fetch_of_a_structure(w):
    r = w.coord.schedule(w.function(lambda: 1.0))
    out = w.coord.fetch({"r": r, "list": [r, 7, "text"], "none": None})
    return [w.py(out["r"]), w.py(out["list"][0]), out["list"][1:], out["none"]]


@scenario("cluster")
def schedule_refuses(w):
    f, r = w.function(lambda x: x), w.coord.schedule(w.function(lambda: 1.0))
    return [
        w.raises(lambda: w.coord.schedule(3)),
        w.raises(lambda: w.coord.schedule(f, args=1.0)),
        w.raises(lambda: w.coord.schedule(f, args=(r,))),
        w.raises(lambda: w.coord.schedule(f, args=([{"k": r}],))),
        w.raises(lambda: w.coord.schedule(f, kwargs={"x": r})),
        w.raises(w.coord.join),
    ]


@scenario("cluster")
def done_after_join(w):
    before = w.coord.done()
    for _ in range(5):
        w.coord.schedule(w.function(lambda: 1.0))
    return [before, w.coord.join(), w.coord.done(), w.coord.join()]


@scenario("cluster")
def no_update_is_lost(w):
    v, u, ones = ps_variable(w, 0.0), ps_variable(w, [0.0] * 1000), w.array([1.0] * 1000, "float32")

    def fn(x):
        v.assign_add(x)
        u.assign_add(x * ones)
        u.assign_sub(0.5 * ones)

    f = w.function(fn)
    for i in range(60):
        w.coord.schedule(f, args=(w.array(float(i % 3), "float32"),))
    w.coord.join()
    return [w.py(v), sorted(set(w.py(u)))]


@scenario("cluster")
def coordinator_and_workers_see_one_variable(w):
    v = ps_variable(w, 2.0)
    f = w.function(lambda: v.read_value() * 10.0)
    out = [w.py(w.coord.schedule(f).fetch())]
    v.assign(5.0)
    out.append(w.py(w.coord.schedule(f).fetch()))
    w.coord.schedule(w.function(lambda: (v.assign_sub(1.0), None)[1])).fetch()
    return [*out, w.py(v), w.py(v + 1.0), w.py(v.read_value())]


@scenario("cluster")
def last_assignment_stays(w):
    v = ps_variable(w, 0.0)
    f = w.function(lambda x: (v.assign(x), None)[1])
    for i in range(20):
        w.coord.schedule(f, args=(w.array(float(i + 1), "float32"),))
    w.coord.join()
    return w.py(v) in [float(i + 1) for i in range(20)]


def failing(w):
    """A function that fails where its argument is zero, else adds it to a variable and returns it."""
    v, check = ps_variable(w, 0.0), w.check

    def fn(x):
        x = check(x)
        v.assign_add(x)
        return x

    f = w.function(fn)
    return v, lambda x: w.coord.schedule(f, args=(w.array(x, "float32"),))


@scenario("cluster")
def join_reports_an_error_once(w):
    _, go = failing(w)
    r = go(0.0)
    return [
        w.raises(w.coord.join),
        w.raises(w.coord.join),
        w.coord.done(),
        w.raises(r.fetch),
        w.raises(r.get),
        w.py(go(2.0).fetch()),
    ]


@scenario("cluster")
def done_reports_an_error_once(w):
    _, go = failing(w)
    w.wait(go(0.0))
    return [w.raises(w.coord.done), w.coord.done()]


@scenario("cluster")
def schedule_reports_an_error_once(w):
    v, go = failing(w)
    w.wait(go(0.0))
    refused = w.raises(lambda: go(1.0))
    accepted = w.raises(lambda: go(2.0))
    w.coord.join()
    return [refused, accepted, w.py(v)]


@scenario("cluster")
def fetch_does_not_clear_an_error(w):
    _, go = failing(w)
    r = go(0.0)
    return [
        w.raises(r.fetch),
        w.raises(r.fetch),
        w.raises(lambda: w.coord.fetch([r])),
        w.raises(w.coord.join),
        w.raises(r.fetch),
        w.raises(w.coord.join),
    ]


@scenario("cluster")
def error_of_a_value_nobody_kept(w):
    _, go = failing(w)
    go(0.0)
    return [w.raises(w.coord.join), w.raises(w.coord.join)]


@scenario("cluster")
def what_an_error_leaves_behind(w):
    """Everything scheduled has an answer after the error: its value, the error itself, or that it was cancelled."""
    v, go = failing(w)
    results, error = [go(1.0) for _ in range(10)], None
    try:
        results.append(go(0.0))
        for _ in range(40):
            results.append(go(1.0))  # noqa: PERF401 - one of them raises
        w.coord.join()
    except Exception as e:
        error = w.name_of(e)
    states = [w.raises(r.fetch) for r in results]
    finished = states.count(None)
    w.coord.join()
    return [
        error,
        states[10],
        all(s in (None, "RuntimeError") for i, s in enumerate(states) if i != 10),
        w.py(v) >= finished,
        w.coord.done(),
    ]


@scenario("cluster")
def only_the_first_of_two_errors_is_reported(w):
    _, go = failing(w)
    try:
        rs = [go(0.0)]
        rs.append(go(0.0))
    except Exception:
        pass
    else:
        w.raises(w.coord.join)
    return [w.raises(w.coord.join), w.coord.done()]


@scenario("cluster")
def python_error_in_a_function(w):
    def fn():
        raise KeyError("lost")

    f = w.function(fn)
    return [
        w.raises(lambda: (w.coord.schedule(f), w.coord.join())),
        w.raises(w.coord.join),
        w.py(w.coord.schedule(w.function(lambda: 5.0)).fetch()),
    ]


@scenario("cluster")
def worker_index(w):
    index = w.dist.coordinator.experimental_get_current_worker_index
    f = w.function(lambda: index())
    seen = {int(w.py(w.coord.schedule(f).fetch())) for _ in range(50)}
    return seen <= {0, 1} and bool(seen)


@scenario("cluster")
def worker_index_is_that_of_the_data(w):
    """A function and the part of a per-worker value that it is given belong to the same worker."""
    index, as_float, Dataset = w.dist.coordinator.experimental_get_current_worker_index, w.as_float, w.Dataset

    def dataset_fn():
        here = as_float(index())
        return Dataset.from_tensor_slices([0.0] * 40).map(lambda x: x + here)

    it = iter(w.coord.create_per_worker_dataset(dataset_fn))
    f = w.function(lambda i: (index(), next(i)))
    out = [w.coord.schedule(f, args=(it,)).fetch() for _ in range(20)]
    return all(int(w.py(a)) == int(w.py(b)) for a, b in out)


@scenario("cluster")
def every_worker_reads_all_data(w):
    index = w.dist.coordinator.experimental_get_current_worker_index
    data = w.dataset([float(i) for i in range(50)])
    it = iter(w.coord.create_per_worker_dataset(data))
    f = w.function(lambda i: (index(), next(i)))
    out = w.coord.fetch([w.coord.schedule(f, args=(it,)) for _ in range(40)])
    seen = {0: [], 1: []}
    for a, b in out:
        seen[int(w.py(a))].append(w.py(b))
    return [
        all(sorted(x) == [float(i) for i in range(len(x))] for x in seen.values()),
        len(seen[0]) + len(seen[1]),
        isinstance(it, w.dist.coordinator.PerWorkerValue),
    ]


@scenario("cluster")
def per_worker_data_ends(w):
    dataset, f = w.dataset, w.function(lambda i: next(i))
    it = iter(w.coord.create_per_worker_dataset(lambda: dataset([1.0, 2.0])))

    def drain():
        for _ in range(5):
            w.coord.schedule(f, args=(it,))
        w.coord.join()

    return [w.raises(drain), w.raises(w.coord.join)]


@scenario("cluster")
def per_worker_iterator_on_the_coordinator(w):
    it = iter(w.coord.create_per_worker_dataset(w.dataset([1.0])))
    distributed = w.ps.experimental_distribute_dataset(w.dataset([1.0, 2.0]).batch(2))
    return [
        w.raises(lambda: next(it)),
        w.raises(lambda: w.coord.create_per_worker_dataset(7)),
        w.raises(lambda: list(distributed)),
    ]


@scenario("cluster")
def two_iterators_of_per_worker_data(w):
    data = w.coord.create_per_worker_dataset(w.dataset([float(i) for i in range(9)]))
    a, b = iter(data), iter(data)
    f = w.function(lambda i, j: next(i) - next(j))
    return sorted({w.py(w.coord.schedule(f, args=(a,), kwargs={"j": b}).fetch()) for _ in range(6)})


@scenario("cluster")
def input_context_of_a_worker(w):
    s, Dataset = w.ps, w.Dataset

    def build(context):
        return Dataset.from_tensor_slices(
            [[context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]]
        ).repeat()

    it = iter(w.coord.create_per_worker_dataset(lambda: s.distribute_datasets_from_function(build)))
    f = w.function(lambda i: next(i))
    return [w.py(w.coord.schedule(f, args=(it,)).fetch()) for _ in range(3)]


@scenario("cluster")
def distributed_dataset_on_a_worker(w):
    s, data = w.ps, w.dataset([float(i) for i in range(8)]).batch(4).repeat()
    it = iter(w.coord.create_per_worker_dataset(s.experimental_distribute_dataset(data)))
    f = w.function(lambda i: s.run(lambda x: x * 1.0, args=(next(i),)))
    return w.py(w.coord.schedule(f, args=(it,)).fetch())


@scenario("cluster")
def run_in_a_function(w):
    s, v, d = w.ps, ps_variable(w, 1.0), w.dist

    def replica(x):
        c = d.get_replica_context()
        v.assign_add(x)
        return x * 2.0 + c.num_replicas_in_sync, c.replica_id_in_sync_group

    f = w.function(lambda x: s.run(replica, args=(x,)))
    out = w.coord.schedule(f, args=(w.array(3.0, "float32"),)).fetch()
    return [w.py(out[0]), int(w.py(out[1])), w.py(v)]


@scenario("cluster")
def context_of_a_function(w):
    d, s = w.dist, w.ps

    def fn():
        here = [
            d.has_strategy(),
            d.in_cross_replica_context(),
            d.get_replica_context() is not None,
            d.get_strategy() is s,
        ]
        return [float(x) for x in here]

    def nested():
        def replica():
            here = [d.has_strategy(), d.in_cross_replica_context(), d.get_replica_context() is not None]
            return [float(x) for x in here]

        return s.run(replica)

    return [[w.py(x) for x in w.coord.schedule(w.function(g)).fetch()] for g in (fn, nested)]


@scenario("cluster")
def reduce_in_a_function(w):
    s = w.ps

    def fn(x):
        y = s.run(lambda a: a * 2.0, args=(x,))
        return (
            s.reduce("SUM", y, axis=None),
            s.reduce("MEAN", y, axis=0),
            s.reduce("SUM", y, axis=0),
            s.experimental_local_results(y)[0],
            s.gather(y, axis=0),
        )

    out = w.coord.schedule(w.function(fn), args=(w.array([1.0, 2.0, 3.0], "float32"),)).fetch()
    return [w.py(x) for x in out]


@scenario("cluster")
def run_on_the_coordinator(w):
    v, _ = ps_variable(w, 1.0), w.coord
    out = w.ps.run(lambda x: (v.assign_add(x), x * 2.0)[1], args=(w.array(3.0, "float32"),))
    return [w.py(out), w.py(w.ps.reduce("SUM", out, axis=None)), w.py(v)]


@scenario("cluster")
def schedule_in_the_scope(w):
    v = ps_variable(w, 1.0)
    f = w.function(lambda x: (v.assign_add(x), None)[1])
    with w.ps.scope():
        w.coord.schedule(f, args=(w.array(2.0, "float32"),))
        w.coord.join()
        inside = w.py(v.read_value())
    return [inside, w.py(v)]


@scenario("cluster")
def variables_are_made_on_the_coordinator(w):
    Variable, Dataset = w.Variable, w.Dataset

    def fn():
        return Variable(1.0).read_value()

    def dataset_fn():
        Variable(1.0)
        return Dataset.from_tensor_slices([1.0])

    def read():
        it = iter(w.coord.create_per_worker_dataset(dataset_fn))
        w.coord.schedule(w.function(lambda i: next(i)), args=(it,))
        w.coord.join()

    f = w.function(fn)
    return [w.raises(lambda: (w.coord.schedule(f), w.coord.join())), w.raises(w.coord.join), w.raises(read)]


@scenario("cluster")
def update_and_merge_call_in_a_function(w):
    s, d, v = w.ps, w.dist, ps_variable(w, [1.0, 2.0])

    def merge(strategy, x):
        strategy.extended.update(v, lambda a, t: a.assign_sub(t), args=(x,))

    def replica(x):
        d.get_replica_context().merge_call(merge, args=(x,))
        return x * 2.0

    f = w.function(lambda x: s.run(replica, args=(x,)))
    out = w.coord.schedule(f, args=(w.array([0.5, 0.25], "float32"),)).fetch()
    s.extended.update(v, lambda a, b: a.assign_add(b), args=(w.array([10.0, 10.0], "float32"),))
    return [w.py(out), w.py(v)]


@scenario("cluster")
def many_small_functions(w):
    f = w.function(lambda x: x * x)
    out = w.coord.fetch([w.coord.schedule(f, args=(w.array(float(i), "float32"),)) for i in range(100)])
    return [w.py(x) for x in out] == [float(i * i) for i in range(100)]


def partitioned(w, n):
    return w.ps_with(w.dist.experimental.partitioners.FixedShardsPartitioner(n))


@scenario("shards")
def round_robin(w):
    with w.ps.scope():
        vs = [w.Variable(w.array([float(i)] * (i + 1), "float32")) for i in range(5)]
    return [[w.placed(v) for v in vs], [w.py(v)[0] for v in vs]]


@scenario("shards")
def round_robin_counts_shards(w):
    with partitioned(w, 3).scope():
        vs = [w.Variable(w.array(x, "float32")) for x in (1.0, [1.0, 2.0, 3.0, 4.0, 5.0], 2.0, [1.0, 2.0], 3.0)]
    return [[w.placed(v) for v in vs], [w.parts(v) for v in vs]]


@scenario("shards")
def colocated_variables_are_not_counted(w):
    s = partitioned(w, 2)
    with s.scope():
        a, b = w.Variable(w.array(1.0, "float32")), w.Variable(w.array(2.0, "float32"))
        with s.extended.colocate_vars_with(b):
            c = w.Variable(w.array([3.0, 4.0], "float32"))
        d = w.Variable(w.array(5.0, "float32"))
    return [[w.placed(v) for v in (a, b, c, d)], w.parts(c)]


@scenario("shards")
def sizes_of_shards(w):
    out = []
    for n, rows_ in ((2, 5), (3, 10), (4, 10), (5, 13), (8, 3), (1, 4)):
        with partitioned(w, n).scope():
            out.append(w.parts(w.Variable(w.array([[float(i)] * 2 for i in range(rows_)], "float32"))))
    return out


@scenario("shards")
def sharded_variable_is_one_array(w):
    with partitioned(w, 2).scope():
        v = w.Variable(w.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32"), name="big")
    return [
        list(v.shape),
        w.py(v),
        w.py(v + 1.0),
        [x.name.split(":")[0] for x in v.variables],
        [w.py(x) for x in v],
        w.dtype_name(v),
    ]


@scenario("shards")
def slices_of_a_sharded_variable(w):
    with partitioned(w, 3).scope():
        v = w.Variable(w.array([float(i) for i in range(10)], "float32"))
    return [
        w.py(v[3]),
        w.py(v[-1]),
        w.py(v[2:8]),
        w.py(v[2:8:3]),
        w.py(v[::-1]),
        w.py(v[9:3:-2]),
        w.py(v[5:5]),
        w.py(v[...]),
        w.raises(lambda: v[10]),
        w.raises(lambda: v[-11]),
        w.raises(lambda: v[::0]),
    ]


@scenario("shards")
def assignment_to_a_sharded_variable(w):
    s = partitioned(w, 2)
    with s.scope():
        v = w.Variable(w.array([0.0] * 5, "float32"))
    x, coordinator = w.array([1.0, 2.0, 3.0, 4.0, 5.0], "float32"), w.dist.coordinator.ClusterCoordinator(s)
    v.assign(x)
    coordinator.schedule(w.function(lambda y: (v.assign_add(y), v.assign_sub(y * 0.5), None)[2]), args=(x,))
    coordinator.join()
    return [w.py(v), [w.py(p) for p in v.variables]]


@scenario("shards")
def scattered_updates_of_a_sharded_variable(w):
    with partitioned(w, 2).scope():
        v = w.Variable(w.array([[0.0, 0.0]] * 5, "float32"))
    v.scatter_add(w.slices([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], [0, 4, 0]))
    v.scatter_update(w.slices([[9.0, 9.0]], [2]))
    return [w.py(v), w.py(v.sparse_read(w.array([4, 0], "int32")))]


@scenario("shards")
def sharded_variable_read_in_a_function(w):
    s = partitioned(w, 2)
    with s.scope():
        v = w.Variable(w.array([1.0, 2.0, 3.0], "float32"))
    return w.py(w.dist.coordinator.ClusterCoordinator(s).schedule(w.function(lambda: v + 10.0)).fetch())


@scenario("shards")
def partitioner_of_a_strategy_refuses(w):
    def make(answer, value):
        def go():
            with w.ps_with(lambda shape, dtype, axis=0: answer).scope():
                w.Variable(w.array(value, "float32"))

        return go

    square = [[1.0, 2.0], [3.0, 4.0]]
    return [
        w.raises(make([1, 2], square)),
        w.raises(make([0, 1], square)),
        w.raises(make([], square)),
        w.raises(make([2, 1], square)),
        w.raises(make([7, 7], 5.0)),
        w.raises(make([9, 1], square)),
    ]


@scenario("shards")
def checkpoint_into_other_shards(w):
    values = w.array([[float(i), -float(i)] for i in range(7)], "float32")
    with partitioned(w, 2).scope():
        path = w.train.Checkpoint(v=w.Variable(values)).save(os.path.join(w.folder(), "c"))
    out = []
    for n in (3, 1):
        with partitioned(w, n).scope():
            u = w.Variable(values * 0.0)
        w.train.Checkpoint(v=u).restore(path).assert_consumed()
        out.append([w.parts(u), w.py(u) == w.py(values)])
    return out


@scenario("shards")
def variables_in_both_directions(w):
    """Restore the checkpoint of a plain variable of the coordinator into shards, and back."""
    plain = w.Variable(w.array([1.0, 2.0, 3.0], "float32"))
    path = w.train.Checkpoint(v=plain).save(os.path.join(w.folder(), "c"))
    with partitioned(w, 2).scope():
        v = w.Variable(w.array([0.0] * 3, "float32"))
    w.train.Checkpoint(v=v).restore(path).assert_consumed()
    v.assign_add(w.array([1.0, 1.0, 1.0], "float32"))
    back = w.train.Checkpoint(v=v).save(os.path.join(w.folder(), "d"))
    w.train.Checkpoint(v=plain).restore(back).assert_consumed()
    return [w.py(v), w.py(plain)]
