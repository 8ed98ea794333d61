"""Programs about batch normalization, summaries and logical devices, in the manner of `scenarios`.

``expected_layers.json`` has the recorded answers of TensorFlow 2.21 and of Keras 2. Those of `LAYERS` need two
replicas. Those of `LOGICAL` need no ranks, and ``w.logical(n)``, a replica of n logical devices.
"""

LAYERS = {}
LOGICAL = {}


def layers(fn):
    LAYERS[fn.__name__] = fn
    return fn


def logical(fn):
    LOGICAL[fn.__name__] = fn
    return fn


# --- batch normalization (two) -----------------------------------------------------------

EVEN = [[[1.0, 10.0], [3.0, 20.0]], [[5.0, 60.0], [7.0, 30.0]]]
UNEVEN = [[[1.0, 10.0]], [[3.0, 20.0], [5.0, 60.0], [8.0, 30.0]]]
EMPTY = [[], [[3.0, 20.0], [5.0, 60.0], [8.0, 30.0]]]


def of_replicas(w, values, width):
    return w.sync.experimental_distribute_values_from_function(
        lambda context: w.rows(values[context.replica_id_in_sync_group], width)
    )


def norm_step(w, values, layer=None, width=2, **options):
    """One training step: ``[y, dx, dgamma, dbeta]`` of every replica, and what the layer then remembers."""
    layer = layer or w.batch_norm(w.sync, width, **options)
    gradients = [[[0.5 * (i + 1) * (j + 1) for j in range(width)] for i in range(len(v))] for v in values]
    args = of_replicas(w, values, width), of_replicas(w, gradients, width)
    out = w.sync.run(lambda x, gradient: w.norm_and_gradients(layer, x, gradient), args=args)
    return [[w.each(w.sync, each) for each in out], w.norm_state(w.sync, layer)]


def rounded(x):
    return [rounded(y) for y in x] if isinstance(x, (list, tuple)) else round(x, 4)


@layers
def sync_batch_norm(w):
    return rounded(norm_step(w, EVEN, synchronized=True))


@layers
def sync_batch_norm_of_uneven_batches(w):
    return rounded(norm_step(w, UNEVEN, synchronized=True))


@layers
def sync_batch_norm_with_an_empty_replica(w):
    return rounded(norm_step(w, EMPTY, synchronized=True))


@layers
def plain_batch_norm_is_local(w):
    return rounded(norm_step(w, EVEN, synchronized=False))


@layers
def sync_batch_norm_options(w):
    options = norm_step(w, EVEN, synchronized=True, momentum=0.5, epsilon=0.1)
    return rounded([options, norm_step(w, EVEN, synchronized=True, center=False, scale=False)[0][0]])


@layers
def sync_batch_norm_remembers(w):
    layer = w.batch_norm(w.sync, 2, synchronized=True, momentum=0.5)
    states = [norm_step(w, values, layer=layer)[1] for values in (EVEN, UNEVEN)]
    inference = w.sync.run(lambda x: w.norm_inference(layer, x), args=(of_replicas(w, EVEN, 2),))
    return rounded([states, w.each(w.sync, inference)])


# --- summaries (two) ---------------------------------------------------------------------


@layers
def summaries_come_from_the_first_replica(w):
    numbers = w.sync.experimental_distribute_values_from_function(
        lambda context: w.array(context.replica_id_in_sync_group + 1, "float32")
    )
    return w.summaries(w.sync, lambda write, x: write("loss", x, 3), numbers)


# --- logical devices (alone) -------------------------------------------------------------


@logical
def assign_to_logical_device(w):
    s, x = w.logical(2), w.array([[1.0, 2.0]], "float32")
    assign = s.experimental_assign_to_logical_device
    wrong = [w.raises(lambda device=device: assign(x, device)) for device in (2, -1)]
    return [w.py(assign(x, 0)), w.py(assign(x, 1)), *wrong]


@logical
def split_to_logical_devices(w):
    s = w.logical(4)
    x = w.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], "float32")
    split = s.experimental_split_to_logical_devices
    wrong = [w.raises(lambda tiles=tiles: split(x, tiles)) for tiles in ([4], [4, 1], [2, 1], [2, 4])]
    return [w.py(split(x, [2, 2])), w.py(split(x, [1, 4])), *wrong]


@logical
def replicate_to_logical_devices(w):
    return w.py(w.logical(2).experimental_replicate_to_logical_devices(w.array([1.0, 2.0], "float32")))
