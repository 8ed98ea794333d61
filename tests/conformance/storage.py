"""Small programs about partitioners and CentralStorageStrategy, in the manner of `scenarios`.

``expected_storage.json`` has the recorded answers of TensorFlow 2.21. Partitioners need no ranks. The others need a
world of two replicas, with ``w.central``, a CentralStorageStrategy, in the place of ``w.sync``, and ``w.shape(*n)``,
which makes a shape.
"""

PARTITIONERS = {}
CENTRAL = {}


def partitioners(fn):
    PARTITIONERS[fn.__name__] = fn
    return fn


def central(fn):
    CENTRAL[fn.__name__] = fn
    return fn


# --- partitioners (alone) ----------------------------------------------------------------

SHAPES = [(1,), (2,), (6, 1), (7,), (10, 3), (13, 5), (1000, 1000), (3, 1000, 1000)]


def over(w, partitioner, dtype="float32", shapes=SHAPES):
    return [list(partitioner(w.shape(*s), dtype)) for s in shapes]


@partitioners
def fixed_shards(w):
    p = w.dist.experimental.partitioners
    return [over(w, p.FixedShardsPartitioner(n)) for n in (1, 2, 5, 100)]


@partitioners
def min_size_shards(w):
    p = w.dist.experimental.partitioners
    return [
        over(w, p.MinSizePartitioner(min_shard_bytes=b, max_shards=n))
        for b, n in ((4, 2), (4, 10), (5, 10), (16, 3), (256 << 10, 8), (1 << 20, 100))
    ]


@partitioners
def min_size_defaults_to_one_shard(w):
    return over(w, w.dist.experimental.partitioners.MinSizePartitioner())


@partitioners
def max_size_shards(w):
    p = w.dist.experimental.partitioners
    return [over(w, p.MaxSizePartitioner(max_shard_bytes=b)) for b in (1, 4, 5, 16, 1024, 1 << 20)]


@partitioners
def max_size_with_a_limit(w):
    p = w.dist.experimental.partitioners
    return [over(w, p.MaxSizePartitioner(max_shard_bytes=b, max_shards=n)) for b, n in ((4, 2), (16, 3), (1 << 20, 5))]


@partitioners
def size_depends_on_the_dtype(w):
    p = w.dist.experimental.partitioners
    return [
        [list(q(w.shape(24, 2), t)) for t in ("float64", "float32", "float16", "int8", "bool", "complex64")]
        for q in (p.MinSizePartitioner(32, 100), p.MaxSizePartitioner(32))
    ]


@partitioners
def partition_along_another_axis(w):
    p = w.dist.experimental.partitioners
    return [
        list(q(w.shape(6, 4), "float32", 1))
        for q in (p.FixedShardsPartitioner(3), p.MinSizePartitioner(4, 3), p.MaxSizePartitioner(16))
    ]


@partitioners
def partitioners_refuse(w):
    p = w.dist.experimental.partitioners
    return [
        w.raises(lambda: p.MinSizePartitioner(min_shard_bytes=0)),
        w.raises(lambda: p.MinSizePartitioner(max_shards=0)),
        w.raises(lambda: p.MinSizePartitioner(bytes_per_string=0)),
        w.raises(lambda: p.MaxSizePartitioner(max_shard_bytes=0)),
        w.raises(lambda: p.MaxSizePartitioner(8, max_shards=-1)),
        w.raises(lambda: p.Partitioner()(w.shape(2), "float32")),
        w.raises(lambda: p.MinSizePartitioner(4, 4)(w.shape(2), "float32", 1)),
        isinstance(p.FixedShardsPartitioner(2), p.Partitioner),
    ]


@partitioners
def own_partitioner(w):
    class Halves(w.dist.experimental.partitioners.Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2 if i == axis else 1 for i in range(len(shape))]

    return list(Halves()(w.shape(8, 8), "float32"))


# --- CentralStorage (two) ----------------------------------------------------------------


def ids(w, s):
    """Replica i holds float32(i + 1)."""
    return s.experimental_distribute_values_from_function(lambda c: w.array(c.replica_id_in_sync_group + 1, "float32"))


def rows(w, s, values, dtype="float32"):
    return s.experimental_distribute_values_from_function(lambda c: w.array(values[c.replica_id_in_sync_group], dtype))


def central_variable(w, value, agg=None):
    kw = {"aggregation": getattr(w.Agg, agg)} if agg else {}
    with w.central.scope():
        return w.Variable(w.array(value, "float32"), **kw)


@central
def central_replicas(w):
    s = w.central
    with s.scope():
        context = [w.dist.has_strategy(), w.dist.in_cross_replica_context(), w.dist.get_strategy() is s]
    return [s.num_replicas_in_sync, len(s.extended.parameter_devices), context, s.cluster_resolver is None]


@central
def central_run_reduce_gather(w):
    s = w.central
    out = s.run(lambda x: x * 2.0, args=(ids(w, s),))
    return [
        w.each(s, out),
        w.py(s.reduce("SUM", out, axis=None)),
        w.py(s.reduce("MEAN", out, axis=None)),
        w.py(s.gather(rows(w, s, [[1.0], [2.0, 3.0]]), axis=0)),
    ]


def assigned_in_replicas(w, agg, method):
    v, x = central_variable(w, 10.0, agg), ids(w, w.central)
    w.central.run(lambda y: (getattr(v, method)(y), None)[1], args=(x,))
    return [w.py(v), w.each(w.central, w.central.run(lambda: v.read_value() * 1.0))]


@central
def central_assign_in_replicas(w):
    return [assigned_in_replicas(w, agg, "assign") for agg in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")]


@central
def central_assign_add_in_replicas(w):
    return [assigned_in_replicas(w, agg, "assign_add") for agg in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")]


@central
def central_assign_without_aggregation(w):
    return w.raises(lambda: assigned_in_replicas(w, None, "assign"))


@central
def central_assign_across_replicas(w):
    v = central_variable(w, 1.0, "SUM")
    v.assign(w.array(5.0, "float32"))
    v.assign_add(w.array(2.0, "float32"))
    v.assign_sub(w.array(1.0, "float32"))
    return [w.py(v), w.each(w.central, w.central.run(lambda: v.read_value() * 1.0))]


@central
def central_update_happens_once(w):
    v, s = central_variable(w, 1.0), w.central
    with s.scope():
        s.extended.update(v, lambda a, b: a.assign_add(b), args=(w.array(2.0, "float32"),))
        total = s.extended.reduce_to("SUM", ids(w, s), v)
        s.extended.update(v, lambda a, b: a.assign_add(b), args=(total,))
    return w.py(v)


@central
def central_four_steps_of_an_update(w):
    v, s = central_variable(w, 1.0), w.central

    def merge(strategy, gradient):
        total = strategy.extended.reduce_to("MEAN", gradient, v)
        strategy.extended.update(v, lambda a, t: a.assign_sub(t), args=(total,))

    s.run(lambda x: w.dist.get_replica_context().merge_call(merge, args=(x * 0.5,)), args=(ids(w, s),))
    return w.py(v)


@central
def central_colocation(w):
    s, v = w.central, central_variable(w, 1.0)
    with s.scope(), s.extended.colocate_vars_with(v):
        u = w.Variable(w.array(2.0, "float32"))
    with w.one.scope():
        other = w.Variable(w.array(0.0, "float32"))
    return [w.py(u), s.extended.variable_created_in_scope(v), s.extended.variable_created_in_scope(other)]


@central
def central_dataset(w):
    s, ds = w.central, w.dataset([float(i) for i in range(6)]).batch(4)
    return [w.each(s, s.run(lambda x: x * 1.0, args=(b,))) for b in s.experimental_distribute_dataset(ds)]
