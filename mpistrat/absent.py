"""Names of other libraries that this one does not have, and what to use in their place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_END = "nothing: MPI ends with the program"
_ALL_REDUCE = "strategy.all_reduce(), or mpistrat.get_replica_context().all_reduce() in a replica function"
_ALL_GATHER = "strategy.gather(), or mpistrat.get_replica_context().all_gather() in a replica function"
_LOOP = "a loop over strategy.experimental_distribute_dataset(dataset) that calls strategy.run(step, args=(batch,))"
_GRADIENTS = "gradients of torch, JAX or TensorFlow, and optimizer.apply_gradients() in strategy.run()"
_SAVE = "mpistrat.training.save() and mpistrat.training.load()"
_FILES = "mpistrat.data.Dataset.from_hdf5(), from_parquet(), from_csv() or from_npy(), which take patterns of names"
_OWN = "a subclass of mpistrat.optimizers.Optimizer, with the rule in update()"
_STATE = "mpistrat.training.save() and load() of optimizer.variables"


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """Return what to use in place of each name. A row has names and what to use, where ``*`` stands for the name."""
    return {name: instead.replace("*", name) for names, instead in rows for name in names.split()}


# Names of tf.distribute, Horovod or torch.distributed -> what to use.
OF_DISTRIBUTE = _table(
    ("AUTOTUNE Dataset Options", "mpistrat.data.*"),
    (
        "CommunicationImplementation CommunicationOptions PreemptionCheckpointHandler TerminationConfig ValueContext",
        "mpistrat.experimental.*",
    ),
    ("Optimizer SGD Adam AdamW", "mpistrat.optimizers.*"),
    ("SlurmClusterResolver TFConfigClusterResolver", "mpistrat.cluster_resolver.*"),
    ("init init_process_group", "strategy = mpistrat.MultiWorkerMirroredStrategy(); MPI knows the ranks"),
    ("shutdown destroy_process_group", _END),
    ("rank get_rank", "strategy.comm.rank"),
    ("size get_world_size", "strategy.num_replicas_in_sync"),
    ("local_rank", 'device="cuda" of a strategy, which gives each rank of a node its own GPU'),
    ("allreduce all_reduce grouped_allreduce reduce", _ALL_REDUCE),
    ("allgather all_gather gather", _ALL_GATHER),
    ("reducescatter reduce_scatter", "mpistrat.get_replica_context().experimental_reduce_scatter()"),
    ("broadcast", "strategy.broadcast()"),
    ("scatter", "strategy.scatter()"),
    ("barrier", "strategy.barrier()"),
    (
        "DistributedOptimizer DistributedGradientTape DistributedDataParallel",
        "mpistrat.optimizers: apply_gradients() sums the gradients of all replicas",
    ),
    ("DistributedSampler", "strategy.experimental_distribute_dataset()"),
    (
        "broadcast_parameters broadcast_variables",
        "mpistrat.Variable: in strategy.scope() it starts with the value of replica 0",
    ),
    ("broadcast_object", "strategy.broadcast_object()"),
    ("allgather_object", "strategy.gather_object()"),
    ("keras", f"`import mpistrat.integrations.keras`, after which Keras' fit() works in strategy.scope(); or {_LOOP}"),
    ("Executor", "mpistrat.coordinator.*"),
    ("losses", f"a loss of your own, divided by the global number of rows, and {_GRADIENTS}"),
    ("GradientTape", _GRADIENTS),
    ("save load saved_model", _SAVE),
    ("train", "mpistrat.training, with Checkpoint, CheckpointManager and latest_checkpoint"),
    ("horovod hvd", "mpistrat.integrations.hvd, which has Horovod's names"),
    ("torch", "mpistrat.integrations.torch, which registers the backend 'mpistrat'"),
    ("distribute", "mpistrat itself: it has the names of tf.distribute"),
    ("is_initialized", "nothing: a strategy starts MPI when it is made"),
    ("local_size", "len() of the ranks of one node in strategy.extended.engine.topology.nodes"),
    ("device", 'device="cuda" of a strategy'),
    ("function py_function numpy_function map_fn while_loop cond", "plain Python in strategy.run(): nothing is traced"),
    (
        "Tensor constant convert_to_tensor zeros ones reduce_mean reduce_sum cast stack concat float32 "
        "float64 int32 int64 random math io",
        "NumPy: a function of a replica takes and returns arrays",
    ),
    (
        "Module nn DataParallel FullyShardedDataParallel ddp new_group send recv isend irecv all_to_all "
        "alltoall ProcessGroup",
        "torch.distributed itself, after import mpistrat.integrations.torch and init_process_group('mpistrat')",
    ),
)
# Names of tf.data or torch.utils.data -> what to use.
OF_DATA = _table(
    ("TFRecordDataset", "mpistrat.data.Dataset.from_hdf5() or from_parquet()"),
    ("TextLineDataset", "mpistrat.data.Dataset.from_text()"),
    ("IterDataPipe", "mpistrat.data.Dataset.from_iterable()"),
    ("CsvDataset", "mpistrat.data.Dataset.from_csv()"),
    ("FixedLengthRecordDataset", "mpistrat.data.Dataset.from_sequence() of a numpy.memmap"),
    ("Iterator NumpyIterator", "iter() of a dataset"),
    ("IteratorSpec DatasetSpec", "mpistrat.data.Dataset.element_spec"),
    ("ThreadingOptions", "mpistrat.data.Dataset.map() with num_parallel_calls="),
    ("experimental", "mpistrat.data itself, which has AutoShardPolicy and the formats of files"),
    ("DataLoader", "mpistrat.data.Dataset"),
    ("from_hdf5 from_arrays from_csv from_npy from_parquet from_zarr", "mpistrat.data.Dataset.*()"),
    ("TensorDataset", "mpistrat.data.Dataset.from_arrays()"),
    ("MapDataPipe", "mpistrat.data.Dataset.from_sequence()"),
    ("DataChunk default_collate Sampler SequentialSampler BatchSampler", "mpistrat.data.Dataset.batch()"),
    ("StackDataset", "mpistrat.data.Dataset.zip()"),
    ("ConcatDataset ChainDataset", "mpistrat.data.Dataset.concatenate()"),
    ("Subset", "mpistrat.data.Dataset.skip() and take()"),
    ("random_split", "mpistrat.data.Dataset.shuffle() with a seed, then take() and skip()"),
    ("get_worker_info", "nothing: mpistrat.data.Dataset.map() with seed= gives each row a generator"),
    ("default_convert", "mpistrat.data.Dataset.map()"),
    ("RandomSampler SubsetRandomSampler", "mpistrat.data.Dataset.shuffle()"),
    ("WeightedRandomSampler", "mpistrat.data.Dataset.sample() with weights"),
    ("DistributedSampler", "strategy.experimental_distribute_dataset()"),
)
# Names of tf.distribute.experimental -> what to use.
OF_EXPERIMENTAL: dict[str, str] = {}
# Names of a strategy of tf.distribute, or of a communicator -> what to use.
OF_STRATEGY = _table(
    ("map starmap submit imap", "mpistrat.coordinator.Executor().map() for many independent calls"),
    ("rank Get_rank", "strategy.comm.rank"),
    ("size num_replicas num_ranks world_size", "strategy.num_replicas_in_sync"),
    ("distribute shard", "strategy.experimental_distribute_dataset() of a mpistrat.data.Dataset"),
    ("Get_size", "strategy.comm.size"),
    ("local_rank", 'device="cuda" of the strategy, which gives each rank of a node its own GPU'),
    ("device", 'device="cuda" of the strategy'),
    ("devices", "strategy.extended.worker_devices"),
    ("allreduce", _ALL_REDUCE),
    ("allgather", _ALL_GATHER),
    ("bcast", "strategy.broadcast() or strategy.broadcast_object()"),
    ("alltoall send recv", "strategy.comm, the communicator of mpi4py"),
    ("Barrier wait", "strategy.barrier()"),
    ("fit compile evaluate predict", _LOOP),
    ("save load", _SAVE),
    ("initialize", "nothing: a strategy starts MPI when it is made"),
    ("finalize shutdown", _END),
    ("experimental_run", "strategy.run()"),
    ("make_input_fn_iterator", "strategy.distribute_datasets_from_function()"),
    ("make_dataset_iterator", "iter(strategy.experimental_distribute_dataset(dataset))"),
    ("experimental_make_numpy_dataset", "mpistrat.data.Dataset.from_tensor_slices()"),
    ("configure update_config_proto", "nothing: there is no session; leave it out"),
)
# Methods of tf.data.Dataset or of torch's datasets and loaders -> what to use.
OF_DATASET = _table(
    ("apply", "the call itself: fn(dataset)"),
    ("as_numpy_iterator", "iter(dataset): its elements are NumPy arrays"),
    ("choose_from_datasets", "mpistrat.data.Dataset.sample_from_datasets(), or zip() and map()"),
    ("counter", "mpistrat.data.Dataset.range() or enumerate()"),
    ("fingerprint", "mpistrat.data.Dataset.options() and element_spec, which say what differs"),
    ("get_single_element", "next(iter(dataset))"),
    ("ignore_errors", "mpistrat.data.Dataset.filter() for bad rows: an error of a file is never skipped"),
    ("list_files from_files", _FILES),
    ("from_numpy", "mpistrat.data.Dataset.from_arrays()"),
    ("mean sum min max std histogram", "NumPy for each batch in a loop, and strategy.reduce() after it"),
    ("load", "mpistrat.data.Dataset.from_hdf5()"),
    ("save", "mpistrat.data.write_hdf5()"),
    ("snapshot", "mpistrat.data.Dataset.cache() with a folder"),
    ("random", "strategy.rng(), or mpistrat.data.Dataset.range() and map()"),
    ("rebatch", "mpistrat.data.Dataset.batch() once: a batch is divided over the replicas"),
    ("rejection_resample", "mpistrat.data.Dataset.sample() with weights"),
    ("ragged_batch sparse_batch", "mpistrat.data.Dataset.padded_batch()"),
    ("unique", "mpistrat.data.Dataset.filter() of rows that you know to be new"),
    ("group_by_window", "mpistrat.data.Dataset.bucket_by_sequence_length() or window()"),
    ("collate_fn", "mpistrat.data.Dataset.map() after batch()"),
    ("num_workers", "mpistrat.data.Dataset.map() with workers=, and prefetch()"),
    ("dataset", "the dataset itself: batch() makes batches"),
    ("sampler", "strategy.experimental_distribute_dataset()"),
)
# Methods of tf.data.Dataset, called on a dataset that is distributed already -> what to use.
OF_DISTRIBUTED_DATASET = _table(
    (
        "map filter shuffle batch repeat take skip prefetch cache enumerate zip",
        "the method of the dataset, before it is distributed",
    )
)
# Metrics of Keras -> what to use.
OF_METRICS = _table(
    (
        "KLDivergence Poisson CategoricalHinge Hinge SquaredHinge LogCoshError CosineSimilarity "
        "MeanSquaredLogarithmicError MeanMetricWrapper MeanRelativeError MeanTensor binary_crossentropy "
        "categorical_crossentropy sparse_categorical_crossentropy kl_divergence poisson categorical_hinge "
        "hinge squared_hinge mean_absolute_error mean_absolute_percentage_error mean_squared_error "
        "mean_squared_logarithmic_error binary_accuracy categorical_accuracy sparse_categorical_accuracy "
        "top_k_categorical_accuracy sparse_top_k_categorical_accuracy binary_focal_crossentropy "
        "categorical_focal_crossentropy huber log_cosh",
        "mpistrat.metrics.Mean of the values that you compute for each row",
    ),
    (
        "OneHotIoU OneHotMeanIoU",
        "mpistrat.metrics.ConfusionMatrix, whose entries are counts, or a subclass of mpistrat.metrics.Metric",
    ),
    (
        "PrecisionAtRecall RecallAtPrecision SensitivityAtSpecificity SpecificityAtSensitivity",
        "mpistrat.metrics.Precision and Recall with thresholds=, or a subclass of mpistrat.metrics.Metric",
    ),
    (
        "pearson_correlation concordance_correlation PearsonCorrelation ConcordanceCorrelation",
        "mpistrat.metrics.Sum of the moments that it needs, or a subclass of mpistrat.metrics.Metric",
    ),
    ("get serialize deserialize", "the class itself"),
)
# Methods of a metric of Keras -> what to use.
OF_METRIC = _table(
    ("merge_state", "one metric that all replicas update: result() has the counts of all"),
    ("dtype", "numpy.float64, in which metrics count"),
    ("from_config", "the class itself, with the arguments of get_config()"),
    ("stateless_update_state stateless_result stateless_reset_state", "update_state(), result() and reset_state()"),
)
# Arguments of a metric of Keras -> what to use.
OF_METRIC_ARGUMENTS = _table(
    ("dtype", "nothing: metrics count in float64"),
    ("from_logits", "probabilities, as 1 / (1 + numpy.exp(-y_pred))"),
    ("multi_label num_labels label_weights", "a metric for each label, on a column of y_true and y_pred"),
    ("num_regressors", "result(), and correct it for the number of regressors"),
)
# Optimizers of Keras or torch -> what to use.
OF_OPTIMIZERS = _table(
    ("Adadelta Adafactor Adamax Ftrl Lion Muon Nadam NAdam RAdam ASGD Rprop SparseAdam LBFGS ScheduleFreeAdamW", _OWN),
    ("Lamb", f"mpistrat.optimizers.LARS, or {_OWN}"),
    ("LossScaleOptimizer", "float32 weights: the scale of a loss is yours to choose"),
    ("lr_scheduler", "mpistrat.optimizers.schedules"),
    ("MultiOptimizer OptimizerMap", "an optimizer for each group of variables"),
    ("swa_utils", "use_ema=True of an optimizer"),
    ("swap_in_optimizer_params_and_state", _STATE),
    ("legacy", "the optimizer itself"),
    ("get serialize deserialize", "the class itself"),
)
# Methods of an optimizer of Keras, torch or Horovod -> what to use.
OF_OPTIMIZER = _table(
    (
        "minimize step apply update_step aggregate_gradients synchronize stateless_apply",
        "optimizer.apply_gradients(zip(gradients, variables)) in strategy.run()",
    ),
    ("compute_gradients", _GRADIENTS),
    ("zero_grad", "nothing: gradients are arguments of apply_gradients(), and are not kept"),
    ("state_dict load_state_dict get_weights set_weights weights save_own_variables load_own_variables state", _STATE),
    ("param_groups add_param_group", "an optimizer for each group of variables"),
    ("lr", "optimizer.learning_rate"),
    ("get_slot", "optimizer.variables, which has the slots of each variable"),
    ("from_config", "the class itself, with the arguments of get_config()"),
    ("scale_loss scale", "the loss itself, and float32 weights"),
    ("exclude_from_weight_decay", "an optimizer without weight_decay for these variables"),
    ("add_variable add_variable_from_reference add_optimizer_variables", "slots of a subclass"),
    ("assign assign_add assign_sub", "the method of the variable"),
    (
        "register_step_pre_hook register_step_post_hook register_state_dict_pre_hook "
        "register_state_dict_post_hook register_load_state_dict_pre_hook register_load_state_dict_post_hook",
        "a function around apply_gradients(), save() or load()",
    ),
    ("set_backward_passes_per_step", "gradient_accumulation_steps= of an optimizer"),
)
# Arguments of an optimizer of Keras or torch -> what to use.
OF_OPTIMIZER_ARGUMENTS = _table(
    ("lr", "learning_rate="),
    ("decay", "learning_rate=mpistrat.optimizers.schedules.InverseTimeDecay(...)"),
    ("betas", "beta_1= and beta_2="),
    ("eps", "epsilon="),
    ("alpha", "rho="),
    ("params", "apply_gradients(zip(gradients, variables))"),
    ("clip_norm", "clipnorm="),
    ("loss_scale_factor", "a scaled loss of your own"),
    ("jit_compile", "nothing: leave it out"),
)


def explained(module: str, find: Callable[[str], Any], instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` of a module whose error says what to use in place of a missing name.

    ``find`` is the ``__getattr__`` that loads the names of the module. ``instead`` maps missing names to what to use.
    """

    def __getattr__(name: str) -> Any:
        try:
            return find(name)
        except AttributeError:
            if name in dir(sys.modules[module]):  # raised by the file that has the name, or by its imports
                raise
            advice = f": use {instead[name]}" if name in instead else ""
        # Python suggests a similar name if the error has the module and the name.
        raise AttributeError(f"{module} has no {name!r}{advice}", name=name, obj=sys.modules[module])

    return __getattr__


def nothing(name: str) -> NoReturn:
    """Raise AttributeError: the ``find`` of a module that loads no names later."""
    raise AttributeError(name)


def of_object(obj: Any, name: str, instead: Mapping[str, str]) -> Any:
    """Raise an error that says what to use in place of a missing name. For ``__getattr__`` of an object."""
    kind = obj if isinstance(obj, type) else type(obj)
    if not isinstance(obj, type) and any(name in vars(base) for base in kind.__mro__):
        return object.__getattribute__(obj, name)  # a property whose own AttributeError brought us here
    advice = f": use {instead[name]}" if name in instead else ""
    raise AttributeError(f"{kind.__name__} has no {name!r}{advice}", name=name, obj=obj)


def explain_arguments(init: Callable[..., None], instead: Mapping[str, str]) -> Callable[..., None]:
    """Return an ``__init__`` whose error says what to use in place of an argument that it does not have."""
    import inspect  # a late import: takes 4 ms

    parameters = inspect.signature(init).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return init  # it passes **kwargs on to a constructor that is explained itself
    names = {parameter.name for parameter in parameters}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - names:
            if name not in instead:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
            raise TypeError(f"{type(self).__name__}() has no argument {name!r}: use {instead[name]}")
        init(self, *args, **kwargs)

    return __init__
