"""Small programs about optimizers, in the manner of `scenarios`.

``expected_optimizers.json`` has the recorded answers of TensorFlow 2.21 with Keras. They need a world of two replicas.
``w.optimizers`` is ``mpistrat.optimizers``, and ``w.apply(optimizer, pairs, **options)`` calls ``apply_gradients``.

Gradients are clipped after they are summed over the replicas, as Keras 2 does. Keras 3 clips those of each replica.
"""

OPTIMIZERS = {}


def scenario(fn):
    OPTIMIZERS[fn.__name__] = fn
    return fn


def rows(w, s, values, dtype="float32"):
    return s.experimental_distribute_values_from_function(lambda c: w.array(values[c.replica_id_in_sync_group], dtype))


def rounded(x):
    if isinstance(x, (list, tuple)):
        return [rounded(y) for y in x]
    return round(x, 4) if isinstance(x, float) else x


def steps(w, optimizer, gradients, start=(0.0, 0.0)):
    """Weights after each step; ``gradients[step][replica]`` is a vector of two."""
    with w.sync.scope():
        v = w.Variable(w.array(start, "float32"))
        made = optimizer()
    out = []
    for g in gradients:
        w.sync.run(lambda x: w.apply(made, [(x, v)]), args=(rows(w, w.sync, g),))
        out.append(rounded(w.py(v)))
    return [out, int(w.py(made.iterations))]


@scenario
def gradients_are_summed(w):
    return steps(w, lambda: w.optimizers.SGD(0.5), [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]])


@scenario
def momentum_over_replicas(w):
    return steps(w, lambda: w.optimizers.SGD(0.5, momentum=0.9), [[[1.0, 2.0], [3.0, 4.0]]] * 3)


@scenario
def reduced_gradients_are_not_summed_again(w):
    with w.sync.scope():
        v, optimizer = w.Variable(w.array([0.0, 0.0], "float32")), w.optimizers.SGD(0.5)

    def fn(x):
        total = w.dist.get_replica_context().all_reduce("SUM", x)
        w.apply(optimizer, [(total, v)], experimental_aggregate_gradients=False)

    w.sync.run(fn, args=(rows(w, w.sync, [[1.0, 2.0], [3.0, 4.0]]),))
    return [w.py(v), w.each(w.sync, w.sync.run(lambda: v.read_value() * 1.0))]


@scenario
def clipnorm_is_of_the_sum(w):
    return steps(w, lambda: w.optimizers.SGD(1.0, clipnorm=1.0), [[[3.0, 4.0], [0.0, 0.5]]])


@scenario
def clipvalue_is_of_the_sum(w):
    return steps(w, lambda: w.optimizers.SGD(1.0, clipvalue=1.0), [[[3.0, -4.0], [3.0, 0.5]]])


@scenario
def global_clipnorm_is_of_the_sum(w):
    with w.sync.scope():
        v, u = (w.Variable(w.array(z, "float32")) for z in ([0.0, 0.0], [0.0]))
        optimizer = w.optimizers.SGD(1.0, global_clipnorm=1.0)
    a, b = rows(w, w.sync, [[2.0, 0.0], [0.0, 0.5]]), rows(w, w.sync, [[2.0], [0.0]])
    w.sync.run(lambda x, y: w.apply(optimizer, [(x, v), (y, u)]), args=(a, b))
    return rounded([w.py(v), w.py(u)])


@scenario
def gradients_are_accumulated(w):
    return steps(
        w,
        lambda: w.optimizers.SGD(1.0, gradient_accumulation_steps=2),
        [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]], [[8.0, 8.0], [8.0, 8.0]]],
    )


@scenario
def accumulated_gradients_are_averaged_summed_clipped(w):
    return steps(
        w,
        lambda: w.optimizers.SGD(1.0, gradient_accumulation_steps=2, clipnorm=1.0),
        [[[6.0, 8.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]],
    )


@scenario
def optimizers_refuse(w):
    o = w.optimizers
    return [
        w.raises(lambda: o.SGD(1.0, clipnorm=1.0, clipvalue=1.0)),
        w.raises(lambda: o.SGD(1.0, clipnorm=1.0, global_clipnorm=1.0)),
        w.raises(lambda: o.SGD(1.0, gradient_accumulation_steps=1)),
    ]


@scenario
def weight_decay_is_not_summed(w):
    return steps(w, lambda: w.optimizers.SGD(1.0, weight_decay=0.1), [[[1.0, 2.0], [3.0, 4.0]]], start=(1.0, -1.0))
