"""The undocumented parts of Keras that this package uses. Checked at import; no other file names them.

Each is a name of a module, or an attribute of a class or of its instances, as of Keras 3.14 and 3.15.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.process.files import to_disk

try:
    import keras
except ImportError as error:
    raise ImportError("mpistrat.integrations.keras needs Keras 3: pip install keras") from error

OLDEST = (3, 14)
_NEEDED = {
    "keras.src.losses.loss": ("reduce_weighted_values", "apply_mask", "Loss"),
    "keras.src.trainers.trainer.Trainer": (
        "_symbolic_build",
        "_get_metrics_result_or_logs",
        "_flatten_metrics_in_order",
        "_aggregate_additional_loss",
    ),
    "keras.src.trainers.data_adapters": ("get_data_adapter",),
    "keras.src.trainers.data_adapters.data_adapter.DataAdapter": ("get_numpy_iterator", "num_batches"),
    "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter": ("_get_iterator",),
    "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter": ("get_numpy_iterator",),
    "keras.src.trainers.data_adapters.array_slicing": ("convert_to_sliceable", "train_validation_split"),
    "keras.src.trainers.data_adapters.data_adapter_utils": ("class_weight_to_sample_weights",),
    "keras.src.utils.python_utils": ("pythonify_logs",),
    "keras.src.saving.serialization_lib": ("_retrieve_class_or_fn",),
    "keras.src.optimizers.base_optimizer.BaseOptimizer": ("apply", "stateless_apply", "scale_loss", "build"),
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer": ("apply", "stateless_apply", "scale_loss"),
    "keras.src.layers.layer.Layer": ("_flatten_layers",),
    "keras.src.layers.normalization.batch_normalization.BatchNormalization": ("_moments",),
    "keras.src.callbacks.backup_and_restore.BackupAndRestore": ("_save_model", "_load_model"),
    "keras.src.backend.Variable": ("assign",),
}


_LEFT_OUT = "_mpistrat_left_out"  # the attribute of a model with the batches that its next epoch leaves out
_OF_ARRAYS = ("_num_samples", "_shuffle", "_inputs")  # attributes of an `ArrayDataAdapter`
# Attributes of a model, an optimizer, a layer, a layer and a variable; also a model's `_compile_loss._flat_losses`.
_OF_INSTANCES = ("_initial_epoch", "_trainable_variables", "_seed_generators", "_non_trainable_variables", "_value")


def _resolve(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(_resolve(module), name)


def _require(path: str, missing: list[str]) -> None:
    if missing:
        raise ImportError(
            f"Keras {keras.__version__} has no {', '.join(missing)} in {path}, which mpistrat.integrations.keras "
            "needs: it was written for 3.14 and 3.15; use one of these, or write the training loop with strategy.run"
        )


def _check() -> None:
    version = keras.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"mpistrat.integrations.keras needs Keras {'.'.join(map(str, OLDEST))} or newer, and this is Keras "
            f"{version}: pip install --upgrade keras"
        )
    for path, names in _NEEDED.items():
        try:
            missing = [name for name in names if not hasattr(_resolve(path), name)]
        except (ImportError, AttributeError):
            missing = list(names)
        _require(path, missing)
    adapter = _resolve("keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter")(np.zeros((1, 1)))
    _require("ArrayDataAdapter", [name for name in _OF_ARRAYS if not hasattr(adapter, name)])


_check()

_losses = _resolve("keras.src.losses.loss")
_adapters = _resolve("keras.src.trainers.data_adapters")
_slicing = _resolve("keras.src.trainers.data_adapters.array_slicing")
DataAdapter: Any = _resolve("keras.src.trainers.data_adapters.data_adapter.DataAdapter")
ArrayDataAdapter: Any = _resolve("keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter")
PyDatasetAdapter: Any = _resolve("keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter")
BatchNormalization: Any = _resolve("keras.src.layers.normalization.batch_normalization.BatchNormalization")
get_data_adapter: Callable[..., Any] = _adapters.get_data_adapter
train_validation_split: Callable[..., Any] = _slicing.train_validation_split
class_weight_to_sample_weights: Callable[..., Any] = _resolve(
    "keras.src.trainers.data_adapters.data_adapter_utils"
).class_weight_to_sample_weights
pythonify_logs: Callable[..., Any] = _resolve("keras.src.utils.python_utils").pythonify_logs
_apply_mask: Callable[..., Any] = _losses.apply_mask
BACKEND: str = keras.backend.backend()


# --- models ----------------------------------------------------------------------------


def build(model: Any, batch: Any) -> None:
    """Make all variables of a model and of its optimizer, from a batch."""
    type(model)._symbolic_build(model, data_batch=keras.tree.map_structure(with_strings, batch))


def build_to_predict(model: Any, batch: Any) -> None:
    """Make all variables of a model from a batch, whose targets and metrics are not needed."""
    if not all(layer.built for layer in layers_of(model)):
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])


def metrics_result(model: Any, logs: Any) -> Any:
    """Return the results of the model's metrics, or ``logs`` if these have other names."""
    return type(model)._get_metrics_result_or_logs(model, logs)


def flattened(model: Any, logs: Any) -> Any:
    """Return the values of logs as `train_on_batch` does."""
    return model._flatten_metrics_in_order(logs)


def initial_epoch(model: Any) -> int | None:
    """Return the epoch that a callback has set in ``on_train_begin``."""
    return model._initial_epoch


def begin(model: Any, values: dict[str, Any]) -> tuple[int, int]:
    """Return the first epoch of `fit`, given its arguments, and how many batches of it are left out."""
    return model._initial_epoch or values.get("initial_epoch") or 0, vars(model).pop(_LEFT_OUT, 0)


def begin_at(model: Any, epoch: int, batches: int) -> None:
    """Let `fit` begin with an epoch after its first batches. A callback calls this in ``on_train_begin``."""
    set_initial_epoch(model, epoch)
    object.__setattr__(model, _LEFT_OUT, batches)  # Keras' own __setattr__ tracks attributes


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Set the epoch with which `fit` begins, as a callback does."""
    model._initial_epoch = epoch


def layers_of(model: Any) -> list[Any]:
    """Return the model and all layers in it."""
    return list(model._flatten_layers())


def finish_restoring(model: Any) -> None:
    """Let layers compute what they keep beside their variables, as Keras does where it loads them."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer of `compile`, and those that are attributes of the model."""
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    return [*{id(value): value for value in values if isinstance(value, keras.optimizers.Optimizer)}.values()]


def compile_marker(model: Any) -> Any:
    """Return an object that each `compile` creates anew, so that a later `compile` can be noticed."""
    return getattr(model, "_loss_tracker", None)


def moving_statistics(model: Any) -> list[Any]:
    """Return the variables that layers update from a rank's rows, such as the mean of a batch norm."""
    return [
        variable
        for layer in layers_of(model)
        if not getattr(layer, "of_all_ranks", False)
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    ]


# Activity regularizers whose sum over the rows of a batch Keras divides by the number of rows.
_OF_ROWS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def require_supported(model: Any) -> None:
    """Raise ValueError for a model that a rank cannot compute from its rows alone."""
    if BACKEND == "torch" and model.jit_compile:
        raise ValueError(
            f"{model.name} was compiled with jit_compile=True; torch cannot compile a step that calls MPI: leave it out"
        )
    if BACKEND == "tensorflow" and any(  # elsewhere Keras raises
        isinstance(loss, keras.Loss) and loss.reduction in (None, "none") for loss in keras.tree.flatten(model.loss)
    ):
        raise ValueError(
            f"{model.name} was compiled with a loss of reduction={None!r}, whose values Keras adds up: ask for 'sum'"
        )
    for layer in layers_of(model):
        regularizer = getattr(layer, "activity_regularizer", None)
        if regularizer is not None and type(regularizer) not in _OF_ROWS:
            raise ValueError(
                f"layer {layer.path} has the activity regularizer {type(regularizer).__name__}, which may depend on "
                "all rows of a batch: on several ranks, use L1, L2 or L1L2, or add_loss with a mean over rows"
            )
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"layer {layer.path} is stateful: its state has a row for each row of the whole batch, of which a rank "
                "computes a part; train it on one rank, or with stateful=False"
            )
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"layer {layer.path} has synchronized=True, which Keras ignores over processes: use "
                "mpistrat.integrations.keras.SyncBatchNormalization"
            )


def require_losses_of_rows(model: Any) -> None:
    """Raise ValueError for a loss of Keras that combines all rows of a batch: its mean over ranks is another loss."""
    losses = keras.losses
    for entry in keras.tree.flatten(model.loss):
        loss = getattr(losses, entry, entry) if isinstance(entry, str) else entry
        kind = loss if isinstance(loss, type) else type(loss)
        axes: Any = getattr(loss, "axis", None)
        over_rows = {None, 0} & {*np.ravel(axes).tolist()}
        combines = issubclass(kind, (losses.Dice, losses.Tversky)) and over_rows
        if combines or issubclass(kind, losses.Circle) or loss in (losses.dice, losses.tversky, losses.circle):
            raise ValueError(
                f"{model.name} was compiled with the loss {getattr(loss, '__name__', kind.__name__)}, which combines "
                "all rows of a batch: the mean over ranks is another loss; give Dice and Tversky the axes of a row, "
                "such as axis=(1, 2, 3), or train on one rank"
            )


def losses_of_program(model: Any) -> list[Any]:
    """Return each loss of `compile` that is not of Keras: called with targets and outputs of the model."""
    losses: list[Any] = []
    compiled: Any = getattr(model, "_compile_loss", None)
    for entry in getattr(compiled, "_flat_losses", None) or ():
        sources = [type(entry.loss), getattr(entry.loss, "fn", type(entry.loss))]
        if not all(str(getattr(source, "__module__", "")).startswith("keras.") for source in sources):
            losses.append(single := object.__new__(type(compiled)))  # finds the targets and outputs by name or number
            vars(single).update(vars(compiled), _flat_losses=[entry._replace(loss_weights=None)])
            single.name, single._dtype = entry.loss.name, entry.loss.dtype
    return losses


def note_assignments() -> None:
    """Let variables remember that a value was assigned to them after the initial one."""
    owner = next(kind for kind in keras.Variable.__mro__ if "assign" in vars(kind))
    assign = owner.assign

    @functools.wraps(assign)
    def noted(variable: Any, value: Any) -> Any:
        variable._mpistrat_assigned = True
        return assign(variable, value)

    owner.assign = noted


def note_assigned(variables: list[Any]) -> None:
    """Let variables remember that their values are not the initial ones."""
    for variable in variables:
        variable._mpistrat_assigned = True


def assigned(variable: Any) -> bool:
    """Return whether a variable may have another value than its initial one."""
    return getattr(variable, "_mpistrat_assigned", False)


def draw_seed() -> int:
    """Return a number of NumPy's global generator, which `keras.utils.set_random_seed` seeds."""
    return int(np.random.randint(1 << 31))  # noqa: NPY002


def is_overridden(name: str, model: Any) -> bool:
    """Return whether a method of a model or an optimizer is from a class of the program, not of Keras."""
    return not getattr(type(model), name).__module__.startswith("keras.")


METHODS = ("train_step", "test_step", "_symbolic_build", "_get_metrics_result_or_logs")


def set_methods(model: Any, *methods: Callable[..., Any]) -> None:
    """Replace the methods `METHODS` of one model."""
    for name, method in zip(METHODS, methods, strict=True):
        object.__setattr__(model, name, method)


def restore_methods(model: Any) -> None:
    """Undo `set_methods`."""
    for name in METHODS:
        vars(model).pop(name, None)


# --- data ----------------------------------------------------------------------------


def first_of(adapter: Any) -> Any:
    """Return the first batch of a `PyDataset`, without a trace.

    No order is drawn, and no thread reads: batches that threads have read when Keras stops them would come twice.
    """
    state, threads = random.getstate(), adapter.enqueuer
    adapter.enqueuer = None
    try:
        return next(iter(adapter.get_numpy_iterator()))
    finally:
        adapter.enqueuer = threads
        random.setstate(state)


def with_strings(array: Any) -> Any:
    """Return an array of strings as a tensor on TensorFlow, the only backend with a type for them; else the array."""
    if BACKEND != "tensorflow" or getattr(array, "dtype", None) != np.dtype(object):
        return array
    import tensorflow as tf

    return tf.convert_to_tensor(array)


class ArrayBatches:
    """The arrays of an `ArrayDataAdapter`, of which batches are cut."""

    def __init__(self, adapter: Any):
        self.rows: int = adapter._num_samples
        self.shuffle = adapter._shuffle
        self.arrays = adapter._inputs
        self._sliceable = _slicing.convert_to_sliceable(
            self.arrays, target_backend="torch" if BACKEND == "torch" else "numpy"
        )

    def cut(self, indices: Any) -> Any:
        """Return the rows of ``indices`` of each array, as arrays that the backend takes."""

        def rows_of(sliceable: Any) -> Any:
            rows = sliceable[indices]
            if BACKEND == "torch":
                return keras.ops.convert_to_tensor(sliceable.convert_to_torch_compatible(rows))
            return with_strings(sliceable.convert_to_numpy(rows))

        return keras.tree.map_structure(lambda array: None if array is None else rows_of(array), self._sliceable)


# --- losses and optimizers -----------------------------------------------------------------


def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Return weights by a mask. Keras on PyTorch writes them in place, and the next metric would get the product."""
    if BACKEND == "torch" and sample_weight is not None and mask is not None:
        sample_weight = keras.ops.copy(sample_weight)
    return _apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


_losses.apply_mask = apply_mask


def wrap_loss_reduction(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function with which losses are reduced."""
    _losses.reduce_weighted_values = wrapper(_losses.reduce_weighted_values)


def wrap_optimizers(
    apply: Callable[[Callable[..., Any]], Callable[..., Any]], scale: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the methods with which optimizers take gradients, and with which they scale a loss."""
    for path in (
        "keras.src.optimizers.base_optimizer.BaseOptimizer",
        "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
    ):
        owner = _resolve(path)
        for name, wrapper in (("stateless_apply" if BACKEND == "jax" else "apply", apply), ("scale_loss", scale)):
            setattr(owner, name, wrapper(getattr(owner, name)))


def variables_of_gradients(optimizer: Any, variables: Any) -> list[Any]:
    """Return the variables to which a list of gradients belongs."""
    return list(variables) if variables is not None else list(optimizer._trainable_variables)


def seed_states(model: Any) -> list[Any]:
    """Return the variables that hold the states of random generators.

    After an error in a step, JAX' trainer may leave variables without a value: they are left out.
    """
    return [
        generator.state
        for layer in layers_of(model)
        for generator in getattr(layer, "_seed_generators", ())
        if hasattr(generator, "state") and generator.state._value is not None
    ]


# --- backups ---------------------------------------------------------------------------------


def replace_loaded_class(layer: type, mark: str) -> None:
    """Load ``layer`` from files in place of Keras' class of the same name, if its build configuration has ``mark``."""
    saving = _resolve("keras.src.saving.serialization_lib")
    retrieve = saving._retrieve_class_or_fn

    @functools.wraps(retrieve)
    def retrieved(*args: Any, full_config: Any, **kwargs: Any) -> Any:
        if (full_config.get("build_config") or {}).get(mark):
            return layer
        return retrieve(*args, full_config=full_config, **kwargs)

    saving._retrieve_class_or_fn = retrieved


def make_backups_atomic() -> None:
    """Let `BackupAndRestore` leave a whole backup wherever the process ends.

    Keras overwrites the weights and the epoch number of the last backup one after the other: a process that ends in
    between leaves weights with another epoch's number.
    """
    kind = keras.callbacks.BackupAndRestore
    save, load, end = kind._save_model, kind._load_model, kind.on_train_end

    def files(callback: Any) -> tuple[list[str], list[str]]:
        current = [callback._weights_path, callback._training_metadata_path]
        return current, [os.path.join(callback.backup_dir, f"next.{os.path.basename(path)}") for path in current]

    def put(callback: Any, paths: list[str], double: bool) -> None:
        (callback._weights_path, callback._training_metadata_path), callback.double_checkpoint = paths, double

    @functools.wraps(save)
    def save_whole(callback: Any) -> None:
        current, new = files(callback)
        double = callback.double_checkpoint
        if double:
            for path in filter(os.path.exists, current):
                shutil.copyfile(path, f"{path}.bkp")
        put(callback, new, False)
        try:
            save(callback)
        finally:
            put(callback, current, double)
        for path in new:
            to_disk(Path(path))
        for new_path, path in zip(new, current, strict=True):  # the first replacement makes the new backup valid
            os.replace(new_path, path)

    @functools.wraps(load)
    def load_whole(callback: Any) -> None:
        (_, metadata), (new_weights, new_metadata) = files(callback)
        if os.path.exists(new_metadata) and not os.path.exists(new_weights):  # ended between the two
            os.replace(new_metadata, metadata)
        load(callback)

    @functools.wraps(end)
    def end_whole(callback: Any, logs: Any = None) -> None:
        if callback.delete_checkpoint and os.path.isdir(callback.backup_dir):
            done = f"{os.path.normpath(callback.backup_dir)}.done"  # without weights, its epoch would mislead
            shutil.rmtree(done, ignore_errors=True)
            os.rename(callback.backup_dir, done)
            shutil.rmtree(done)
        end(callback, logs)

    def local(whole: Callable[..., Any], of_keras: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(whole)
        def call(callback: Any, *args: Any, **kwargs: Any) -> Any:  # Keras also writes to addresses
            return (of_keras if "://" in str(callback.backup_dir) else whole)(callback, *args, **kwargs)

        return call

    kind._save_model, kind._load_model = local(save_whole, save), local(load_whole, load)
    kind.on_train_end = local(end_whole, end)
