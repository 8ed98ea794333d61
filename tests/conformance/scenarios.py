"""Small programs against the API of ``tf.distribute``. Each returns an answer that JSON can hold.

``expected.json`` has the recorded answers of TensorFlow 2.21 with two replicas. One answer is this package's own:
a replica that assigns to a mirrored variable without aggregation raises here, and diverges in TensorFlow.

Every program takes one argument, the *world* ``w``, which hides the differences between the packages:

``w.dist``                the module that holds the API (``tf.distribute`` or ``mpistrat``)
``w.sync``                a synchronous strategy with two replicas
``w.other``               a second strategy object with two replicas
``w.one``                 a one-device strategy
``w.Variable``            the variable constructor; ``w.Sync`` / ``w.Agg`` its two enums
``w.array(x, dtype)``     an array of the implementation
``w.py(x)``               a plain Python number or list from an array or variable
``w.each(s, value)``      plain values of *all* replicas, in replica order
``w.dataset(x)``          a dataset of the rows of ``x``, with ``.batch(n, drop_remainder=False)``
``w.raises(fn)``          the name of the builtin exception that ``fn()`` raises, or ``None``
``w.environ(**kw)``       a context manager that sets environment variables; ``None`` removes one
``w.ClusterSpec``         the constructor of cluster specifications
``w.end``                 the exception type(s) that end a ``DistributedIterator``

A replica function is called once per replica, in any process. It must pass on what it sees by its return value only.
"""

SCENARIOS = {}
RESOLVER_SCENARIOS = {}  # programs that read only the environment and need one replica


def scenario(fn):
    SCENARIOS[fn.__name__] = fn
    return fn


def resolver_scenario(fn):
    RESOLVER_SCENARIOS[fn.__name__] = fn
    return fn


def where(w):
    """Return the answers to three questions about the context, at the place of the call."""
    d = w.dist
    return [d.has_strategy(), d.in_cross_replica_context(), d.get_replica_context() is not None]


# --- contexts ---------------------------------------------------------------------------


@scenario
def outside_any_strategy(w):
    d = w.dist
    ctx = d.get_replica_context()
    return [
        where(w),
        d.get_strategy().num_replicas_in_sync,
        ctx.num_replicas_in_sync,
        w.py(ctx.replica_id_in_sync_group),
    ]


@scenario
def inside_scope(w):
    with w.sync.scope():
        return [where(w), w.dist.get_strategy() is w.sync, w.dist.get_replica_context() is None]


@scenario
def inside_run(w):
    def fn():
        has, cross, replica = where(w)
        return w.array([has, cross, replica, w.dist.get_strategy() is w.sync], "int32")

    return w.each(w.sync, w.sync.run(fn))


@scenario
def inside_merge_call(w):
    def merge(strategy):
        has, cross, replica = where(w)
        return w.array([has, cross, replica, strategy is w.sync], "int32")

    def fn():
        return w.dist.get_replica_context().merge_call(merge)

    return w.each(w.sync, w.sync.run(fn))


@scenario
def inside_update(w):
    with w.sync.scope():
        v = w.Variable(w.array(1.0, "float32"))

    seen = []

    def fn(local):
        seen.append(
            [w.dist.in_cross_replica_context(), w.dist.get_replica_context() is None, w.dist.get_strategy() is w.sync]
        )
        local.assign(local + 1.0)

    with w.sync.scope():
        w.sync.extended.update(v, fn)
    return [seen[0], w.py(v)]


@scenario
def scope_of_same_strategy_nests(w):
    with w.sync.scope():
        with w.sync.scope():
            inner = where(w)
        return [inner, where(w)]


@scenario
def scope_of_other_strategy_does_not_nest(w):
    def fn():
        with w.sync.scope(), w.other.scope():
            pass

    return w.raises(fn)


@scenario
def set_strategy_and_reset(w):
    d = w.dist
    d.experimental_set_strategy(w.one)
    try:
        inside = [where(w), d.get_strategy() is w.one]
    finally:
        d.experimental_set_strategy(None)
    return [inside, where(w)]


@scenario
def reduce_inside_run_is_an_error(w):
    def fn():
        x = w.array(1.0, "float32")
        return w.array(w.raises(lambda: w.sync.reduce("SUM", x, axis=None)) == "RuntimeError", "int32")

    return w.each(w.sync, w.sync.run(fn))


@scenario
def scope_inside_run_of_other_is_an_error(w):
    def fn():
        def enter():
            with w.other.scope():
                pass

        return w.array(w.raises(enter) == "RuntimeError", "int32")

    return w.each(w.sync, w.sync.run(fn))


@scenario
def replica_ids(w):
    def fn():
        ctx = w.dist.get_replica_context()
        return w.array([w.py(ctx.replica_id_in_sync_group), ctx.num_replicas_in_sync], "int32")

    return w.each(w.sync, w.sync.run(fn))


@scenario
def replica_context_knows_its_strategy(w):
    def fn():
        ctx = w.dist.get_replica_context()
        return w.array([ctx.strategy is w.sync], "int32")

    return w.each(w.sync, w.sync.run(fn))


# --- run: unwrapping and merging ---------------------------------------------------------


def ids(w, s):
    """Return a per-replica value: replica i holds float32(i + 1)."""
    return s.experimental_distribute_values_from_function(lambda c: w.array(c.replica_id_in_sync_group + 1, "float32"))


@scenario
def run_unwraps_arguments(w):
    x = ids(w, w.sync)
    return w.each(w.sync, w.sync.run(lambda a, k: a * 10 + k, args=(x,), kwargs={"k": w.array(3.0, "float32")}))


@scenario
def run_unwraps_nested_arguments(w):
    x = ids(w, w.sync)
    out = w.sync.run(lambda t: {"sum": t["a"] + t["b"][0]}, args=({"a": x, "b": [x]},))
    return w.each(w.sync, out["sum"])


@scenario
def run_returns_nested_structure(w):
    x = ids(w, w.sync)
    out = w.sync.run(lambda a: (a, {"twice": a * 2}), args=(x,))
    return [type(out).__name__, w.each(w.sync, out[0]), w.each(w.sync, out[1]["twice"])]


@scenario
def run_of_none_is_none(w):
    return w.sync.run(lambda: None) is None


@scenario
def error_in_replica_function_reaches_caller(w):
    def fn():
        raise KeyError("lost")

    return w.raises(lambda: w.sync.run(fn))


@scenario
def merge_call_sums_over_replicas(w):
    def merge(strategy, three_plus_id):
        return strategy.reduce("SUM", three_plus_id, axis=None)

    def fn(three):
        ctx = w.dist.get_replica_context()
        v = three + w.array(w.py(ctx.replica_id_in_sync_group), "float32")
        s = ctx.merge_call(merge, args=(v,))
        return s + v

    return w.each(w.sync, w.sync.run(fn, args=(w.array(3.0, "float32"),)))


@scenario
def merge_call_passes_plain_arguments_through(w):
    def merge(strategy, flag, x, scale=1.0):
        return strategy.reduce("SUM", x, axis=None) * scale if flag == "go" else None

    def fn(x):
        return w.dist.get_replica_context().merge_call(merge, args=("go", x), kwargs={"scale": 2.0})

    return w.each(w.sync, w.sync.run(fn, args=(ids(w, w.sync),)))


@scenario
def two_merge_calls_in_one_run(w):
    def total(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    def fn(x):
        ctx = w.dist.get_replica_context()
        a = ctx.merge_call(total, args=(x,))
        return ctx.merge_call(total, args=(a * x,))

    return w.each(w.sync, w.sync.run(fn, args=(ids(w, w.sync),)))


# --- reductions and gathers --------------------------------------------------------------


@scenario
def reduce_sum_scalar(w):
    return w.py(w.sync.reduce(w.dist.ReduceOp.SUM, ids(w, w.sync), axis=None))


@scenario
def reduce_mean_scalar(w):
    return w.py(w.sync.reduce(w.dist.ReduceOp.MEAN, ids(w, w.sync), axis=None))


@scenario
def reduce_op_as_string(w):
    x = ids(w, w.sync)
    return [
        w.py(w.sync.reduce("sum", x, axis=None)),
        w.py(w.sync.reduce("MEAN", x, axis=None)),
        w.raises(lambda: w.sync.reduce("MAX_OF_ALL", x, axis=None)),
    ]


def ragged(w, s):
    """Return a per-replica value: replica 0 holds rows [[1, 2]], replica 1 holds [[3, 4], [5, 6]]."""
    rows = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]
    return s.experimental_distribute_values_from_function(
        lambda c: w.array(rows[c.replica_id_in_sync_group], "float32")
    )


def square(w, s):
    """Return a per-replica value: replica i holds [[i, i + 1], [i + 2, i + 3]]."""
    return s.experimental_distribute_values_from_function(
        lambda c: w.array(
            [
                [c.replica_id_in_sync_group, c.replica_id_in_sync_group + 1],
                [c.replica_id_in_sync_group + 2, c.replica_id_in_sync_group + 3],
            ],
            "float32",
        )
    )


@scenario
def reduce_keeps_shape_without_axis(w):
    return w.py(w.sync.reduce("SUM", square(w, w.sync), axis=None))


@scenario
def reduce_sum_over_axis_0(w):
    return w.py(w.sync.reduce("SUM", square(w, w.sync), axis=0))


@scenario
def reduce_mean_over_axis_0(w):
    return w.py(w.sync.reduce("MEAN", square(w, w.sync), axis=0))


@scenario
def reduce_mean_over_ragged_rows_weighs_examples(w):
    return w.py(w.sync.reduce("MEAN", ragged(w, w.sync), axis=0))


@scenario
def reduce_sum_over_axis_1(w):
    return w.py(w.sync.reduce("SUM", square(w, w.sync), axis=1))


@scenario
def reduce_keeps_integers(w):
    x = w.sync.experimental_distribute_values_from_function(
        lambda c: w.array([c.replica_id_in_sync_group + 1, 7], "int64")
    )
    return w.py(w.sync.reduce("SUM", x, axis=None))


@scenario
def gather_rows(w):
    return w.py(w.sync.gather(square(w, w.sync), axis=0))


@scenario
def gather_columns(w):
    return w.py(w.sync.gather(square(w, w.sync), axis=1))


@scenario
def gather_ragged_rows(w):
    return w.py(w.sync.gather(ragged(w, w.sync), axis=0))


@scenario
def all_reduce_sum_and_mean(w):
    def fn(x):
        ctx = w.dist.get_replica_context()
        return ctx.all_reduce(w.dist.ReduceOp.SUM, x), ctx.all_reduce(w.dist.ReduceOp.MEAN, x)

    out = w.sync.run(fn, args=(ids(w, w.sync),))
    return [w.each(w.sync, out[0]), w.each(w.sync, out[1])]


@scenario
def all_reduce_of_a_structure(w):
    def fn(x):
        ctx = w.dist.get_replica_context()
        out = ctx.all_reduce("SUM", {"a": x, "b": [x * 2, x * 3]})
        return out["a"], out["b"][0], out["b"][1]

    out = w.sync.run(fn, args=(ids(w, w.sync),))
    return [w.each(w.sync, o) for o in out]


@scenario
def all_gather_rows(w):
    def fn(x):
        return w.dist.get_replica_context().all_gather(x, axis=0)

    return w.each(w.sync, w.sync.run(fn, args=(square(w, w.sync),)))


@scenario
def all_gather_ragged_rows(w):
    def fn(x):
        return w.dist.get_replica_context().all_gather(x, axis=0)

    return w.each(w.sync, w.sync.run(fn, args=(ragged(w, w.sync),)))


@scenario
def gather_inside_run_is_an_error(w):
    def fn():
        x = w.array([1.0], "float32")
        return w.array(w.raises(lambda: w.sync.gather(x, axis=0)) == "RuntimeError", "int32")

    return w.each(w.sync, w.sync.run(fn))


# --- distributed values ------------------------------------------------------------------


@scenario
def values_from_function(w):
    def make(c):
        return w.array([c.replica_id_in_sync_group, c.num_replicas_in_sync], "int32")

    return w.each(w.sync, w.sync.experimental_distribute_values_from_function(make))


@scenario
def local_results_is_a_tuple(w):
    out = w.sync.experimental_local_results(ids(w, w.sync))
    return [type(out).__name__, isinstance(ids(w, w.sync), w.dist.DistributedValues)]


@scenario
def local_results_of_a_plain_value(w):
    out = w.sync.experimental_local_results(3)
    return [type(out).__name__, len(out), out[0]]


# --- variables ---------------------------------------------------------------------------


def make_variable(w, value, sync=None, agg=None):
    kw = {}
    if sync:
        kw["synchronization"] = getattr(w.Sync, sync)
    if agg:
        kw["aggregation"] = getattr(w.Agg, agg)
    with w.sync.scope():
        return w.Variable(w.array(value, "float32"), **kw)


def assign_in_replicas(w, v, method="assign"):
    def fn():
        i = w.py(w.dist.get_replica_context().replica_id_in_sync_group)
        getattr(v, method)(w.array(i + 1, "float32"))

    w.sync.run(fn)


def read_in_replicas(w, v):
    return w.each(w.sync, w.sync.run(lambda: v.read_value() * 1.0))


@scenario
def mirrored_starts_equal(w):
    v = make_variable(w, 5.0)
    return [w.py(v), read_in_replicas(w, v)]


@scenario
def mirrored_assign_across_replicas(w):
    v = make_variable(w, 5.0)
    v.assign(w.array(2.0, "float32"))
    v.assign_add(w.array(3.0, "float32"))
    v.assign_sub(w.array(1.0, "float32"))
    return [w.py(v), read_in_replicas(w, v)]


@scenario
def mirrored_assign_in_replica_sum(w):
    v = make_variable(w, 0.0, agg="SUM")
    assign_in_replicas(w, v)
    return read_in_replicas(w, v)


@scenario
def mirrored_assign_in_replica_mean(w):
    v = make_variable(w, 0.0, agg="MEAN")
    assign_in_replicas(w, v)
    return read_in_replicas(w, v)


@scenario
def mirrored_assign_add_in_replica_sum(w):
    v = make_variable(w, 10.0, agg="SUM")
    assign_in_replicas(w, v, "assign_add")
    return read_in_replicas(w, v)


@scenario
def mirrored_assign_sub_in_replica_mean(w):
    v = make_variable(w, 10.0, agg="MEAN")
    assign_in_replicas(w, v, "assign_sub")
    return read_in_replicas(w, v)


@scenario
def mirrored_assign_in_replica_first_only(w):
    v = make_variable(w, 0.0, agg="ONLY_FIRST_REPLICA")
    assign_in_replicas(w, v)
    return read_in_replicas(w, v)


@scenario
def mirrored_assign_in_replica_without_aggregation(w):
    v = make_variable(w, 0.0)
    return w.raises(lambda: assign_in_replicas(w, v))


@scenario
def sync_on_read_sum(w):
    v = make_variable(w, 0.0, "ON_READ", "SUM")
    assign_in_replicas(w, v)
    return [read_in_replicas(w, v), w.py(v.read_value())]


@scenario
def sync_on_read_mean(w):
    v = make_variable(w, 0.0, "ON_READ", "MEAN")
    assign_in_replicas(w, v)
    assign_in_replicas(w, v, "assign_add")
    return [read_in_replicas(w, v), w.py(v.read_value())]


@scenario
def sync_on_read_first_only(w):
    v = make_variable(w, 0.0, "ON_READ", "ONLY_FIRST_REPLICA")
    assign_in_replicas(w, v)
    return [read_in_replicas(w, v), w.py(v.read_value())]


@scenario
def sync_on_read_assign_across_replicas_sum(w):
    v = make_variable(w, 0.0, "ON_READ", "SUM")
    v.assign(w.array(8.0, "float32"))
    return [read_in_replicas(w, v), w.py(v.read_value())]


@scenario
def sync_on_read_assign_across_replicas_mean(w):
    v = make_variable(w, 0.0, "ON_READ", "MEAN")
    v.assign(w.array(8.0, "float32"))
    return [read_in_replicas(w, v), w.py(v.read_value())]


@scenario
def variable_knows_its_kind(w):
    v = make_variable(w, [1.0, 2.0], "ON_READ", "SUM")
    return [v.synchronization.name, v.aggregation.name, list(v.shape), bool(v.trainable)]


@scenario
def created_in_scope(w):
    v = make_variable(w, 0.0)
    with w.other.scope():
        u = w.Variable(w.array(0.0, "float32"))
    return [w.sync.extended.variable_created_in_scope(v), w.sync.extended.variable_created_in_scope(u)]


# --- extended ----------------------------------------------------------------------------


@scenario
def reduce_to_a_variable(w):
    v = make_variable(w, 0.0)
    with w.sync.scope():
        out = w.sync.extended.reduce_to("SUM", ids(w, w.sync), v)
    return w.each(w.sync, out)


@scenario
def batch_reduce_to_variables(w):
    v, u = make_variable(w, 0.0), make_variable(w, [0.0, 0.0])
    a = ids(w, w.sync)
    b = w.sync.experimental_distribute_values_from_function(
        lambda c: w.array([c.replica_id_in_sync_group, 10.0], "float32")
    )
    with w.sync.scope():
        out = w.sync.extended.batch_reduce_to("MEAN", [(a, v), (b, u)])
    return [w.each(w.sync, o) for o in out]


@scenario
def update_a_variable_with_mirrored_gradient(w):
    v = make_variable(w, [1.0, 1.0])
    g = w.sync.experimental_distribute_values_from_function(
        lambda c: w.array([c.replica_id_in_sync_group, 2.0], "float32")
    )
    with w.sync.scope():
        total = w.sync.extended.reduce_to("SUM", g, v)
        w.sync.extended.update(
            v, lambda var, grad, rate: var.assign_sub(rate * grad), args=(total,), kwargs={"rate": 0.5}
        )
    return read_in_replicas(w, v)


@scenario
def the_four_steps_of_an_update(w):
    v = make_variable(w, 1.0)

    def merge(strategy, grad):
        total = strategy.extended.reduce_to("SUM", grad, v)
        strategy.extended.update(v, lambda var, t: var.assign_sub(t), args=(total,))

    w.sync.run(lambda x: w.dist.get_replica_context().merge_call(merge, args=(x * 0.25,)), args=(ids(w, w.sync),))
    return read_in_replicas(w, v)


@scenario
def value_container_finds_the_variable(w):
    v = make_variable(w, 0.0)
    local = w.sync.experimental_local_results(v)[0]
    return w.sync.extended.value_container(local) is v


@scenario
def colocated_variables(w):
    with w.sync.scope():
        v = w.Variable(w.array(1.0, "float32"))
        with w.sync.extended.colocate_vars_with(v):
            u = w.Variable(w.array(2.0, "float32"))
        w.sync.extended.update(v, lambda a, b: a.assign_add(b), args=(u,))
    return [w.py(v), w.py(u)]


# --- input -------------------------------------------------------------------------------


def rows_of(w, s, batch):
    return w.each(s, s.run(lambda x: x * 1.0, args=(batch,)))


@scenario
def global_batch_is_split_over_replicas(w):
    ds = w.dataset([float(i) for i in range(8)]).batch(4)
    return [rows_of(w, w.sync, b) for b in w.sync.experimental_distribute_dataset(ds)]


@scenario
def odd_global_batch(w):
    ds = w.dataset([float(i) for i in range(6)]).batch(3)
    return [rows_of(w, w.sync, b) for b in w.sync.experimental_distribute_dataset(ds)]


@scenario
def last_partial_batch(w):
    ds = w.dataset([float(i) for i in range(7)]).batch(4)
    return [rows_of(w, w.sync, b) for b in w.sync.experimental_distribute_dataset(ds)]


@scenario
def last_batch_too_small_for_every_replica(w):
    ds = w.dataset([float(i) for i in range(5)]).batch(4)
    return [rows_of(w, w.sync, b) for b in w.sync.experimental_distribute_dataset(ds)]


@scenario
def drop_remainder(w):
    ds = w.dataset([float(i) for i in range(7)]).batch(4, drop_remainder=True)
    return [rows_of(w, w.sync, b) for b in w.sync.experimental_distribute_dataset(ds)]


@scenario
def reduce_mean_over_a_partial_batch(w):
    ds = w.dataset([float(i) for i in range(7)]).batch(4)
    out = []
    for b in w.sync.experimental_distribute_dataset(ds):
        per = w.sync.run(lambda x: x * 1.0, args=(b,))
        out.append(w.py(w.sync.reduce("MEAN", per, axis=0)))
    return out


@scenario
def iterator_ends(w):
    ds = w.dataset([1.0, 2.0]).batch(2)
    it = iter(w.sync.experimental_distribute_dataset(ds))
    first = rows_of(w, w.sync, next(it))
    try:
        it.get_next()
        ended = False
    except w.end:
        ended = True
    return [first, ended]


@scenario
def get_next_as_optional(w):
    ds = w.dataset([1.0, 2.0]).batch(2)
    it = iter(w.sync.experimental_distribute_dataset(ds))
    a, b = it.get_next_as_optional(), it.get_next_as_optional()
    return [bool(w.py(a.has_value())), rows_of(w, w.sync, a.get_value()), bool(w.py(b.has_value()))]


@scenario
def two_epochs_are_equal(w):
    dist = w.sync.experimental_distribute_dataset(w.dataset([float(i) for i in range(4)]).batch(2))
    return [[rows_of(w, w.sync, b) for b in dist] for _ in range(2)]


@scenario
def per_replica_batch_size(w):
    d = w.dist
    c = d.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    return [
        c.get_per_replica_batch_size(16),
        w.raises(lambda: c.get_per_replica_batch_size(18)),
        c.num_input_pipelines,
        c.input_pipeline_id,
        c.num_replicas_in_sync,
    ]


@scenario
def options_have_their_defaults(w):
    o = w.dist.InputOptions()
    return [
        o.experimental_fetch_to_device,
        o.experimental_replication_mode.name,
        o.experimental_place_dataset_on_device,
        o.experimental_per_replica_buffer_size,
    ]


# --- the default and the one-device strategy ---------------------------------------------


@scenario
def default_strategy_reduces_to_itself(w):
    s = w.dist.get_strategy()
    x = s.run(lambda a: a * 2, args=(w.array([1.0, 3.0], "float32"),))
    return [w.py(s.reduce("SUM", x, axis=None)), w.py(s.reduce("MEAN", x, axis=0)), s.num_replicas_in_sync]


@scenario
def default_replica_context_reduces_to_itself(w):
    ctx = w.dist.get_replica_context()
    return [
        w.py(ctx.all_reduce("SUM", w.array(4.0, "float32"))),
        w.py(ctx.merge_call(lambda s, x: x * 2, args=(w.array(4.0, "float32"),))),
    ]


@scenario
def one_device_strategy(w):
    s = w.one
    with s.scope():
        v = w.Variable(w.array(3.0, "float32"), aggregation=w.Agg.SUM)

    def fn():
        v.assign_add(w.array(1.0, "float32"))
        return v.read_value() * 2

    out = s.run(fn)
    return [s.num_replicas_in_sync, w.py(v), w.py(s.reduce("SUM", out, axis=None))]


@scenario
def one_device_dataset_is_not_split(w):
    ds = w.dataset([1.0, 2.0, 3.0]).batch(2)
    return [rows_of(w, w.one, b) for b in w.one.experimental_distribute_dataset(ds)]


# --- enums -------------------------------------------------------------------------------


@scenario
def reduce_op_values(w):
    op = w.dist.ReduceOp
    out = [op.SUM.name, op.MEAN.name]
    out += [op.from_variable_aggregation(w.Agg.SUM).name, op.from_variable_aggregation(w.Agg.MEAN).name]
    out.append(w.raises(lambda: op.from_variable_aggregation(w.Agg.NONE)))
    return out


@scenario
def enum_members(w):
    return [
        sorted(m.name for m in w.Sync),
        sorted(m.name for m in w.Agg),
        sorted(m.name for m in w.dist.InputReplicationMode),
        sorted(m.name for m in w.dist.ReduceOp),
    ]


# --- cluster resolvers -------------------------------------------------------------------


@resolver_scenario
def simple_resolver(w):
    r = w.dist.cluster_resolver
    spec = r.SimpleClusterResolver(
        w.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]}), task_type="worker", task_id=1
    )
    return [spec.cluster_spec().as_dict(), spec.task_type, spec.task_id, spec.master("worker", 0), spec.rpc_layer]


@resolver_scenario
def cluster_spec_questions(w):
    c = w.ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "c:3"}})
    return [
        sorted(c.jobs),
        c.num_tasks("worker"),
        c.task_indices("ps"),
        c.task_address("ps", 3),
        c.job_tasks("worker"),
        w.raises(lambda: c.num_tasks("chief")),
        c.as_dict() == c.as_dict(),
        bool(w.ClusterSpec({})),
    ]


@resolver_scenario
def tf_config_resolver(w):
    r = w.dist.cluster_resolver
    with w.environ(
        TF_CONFIG='{"cluster": {"worker": ["h0:22", "h1:22"], "chief": ["h2:22"]},'
        ' "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}'
    ):
        c = r.TFConfigClusterResolver()
        return [c.cluster_spec().as_dict(), c.task_type, c.task_id, c.master(), c.rpc_layer, c.environment]


@resolver_scenario
def tf_config_absent(w):
    with w.environ(TF_CONFIG=None):
        c = w.dist.cluster_resolver.TFConfigClusterResolver()
        return [c.cluster_spec().as_dict(), c.task_type, c.task_id, c.master()]


@resolver_scenario
def union_of_resolvers(w):
    r = w.dist.cluster_resolver
    a = r.SimpleClusterResolver(w.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    b = r.SimpleClusterResolver(w.ClusterSpec({"worker": ["b:1"], "ps": ["p:1"]}))
    u = r.UnionResolver(a, b)
    return [u.cluster_spec().as_dict(), u.task_type, u.task_id, w.raises(lambda: r.UnionResolver("x"))]


SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "tux[07-08]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "17",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


@resolver_scenario
def slurm_two_nodes(w):
    with w.environ(**SLURM):
        c = w.dist.cluster_resolver.SlurmClusterResolver(
            jobs={"ps": 1, "worker": 3}, port_base=8888, gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
        )
        spec = c.cluster_spec().as_dict()
        return [spec, list(c.get_task_info()), c.task_type, c.task_id, c.master("worker", 0)]


@resolver_scenario
def slurm_default_jobs(w):
    with w.environ(**SLURM):
        c = w.dist.cluster_resolver.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False)
        return [c.cluster_spec().as_dict(), list(c.get_task_info())]


@resolver_scenario
def slurm_uneven_tasks(w):
    with w.environ(
        **{
            **SLURM,
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            "SLURM_STEP_NODELIST": "n[1-2,9]",
            "SLURM_PROCID": "4",
        }
    ):
        c = w.dist.cluster_resolver.SlurmClusterResolver(
            port_base=7000, gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
        )
        return [c.cluster_spec().as_dict(), list(c.get_task_info())]


@resolver_scenario
def slurm_jobs_must_add_up(w):
    with w.environ(**SLURM):
        return w.raises(
            lambda: w.dist.cluster_resolver.SlurmClusterResolver(
                jobs={"worker": 3}, gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
            ).cluster_spec()
        )


@resolver_scenario
def slurm_sets_visible_devices(w):
    import os

    with w.environ(**SLURM):
        c = w.dist.cluster_resolver.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1, auto_set_gpu=True)
        c.cluster_spec()
        return os.environ["CUDA_VISIBLE_DEVICES"]
