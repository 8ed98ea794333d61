"""The optimizers of Keras that combine the gradients of all ranks before they change the weights."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from mpistrat.engine import Engine
from mpistrat.integrations.hvd.job import ProcessSet, global_process_set
from mpistrat.integrations.hvd.reductions import Average, Op, Sum
from mpistrat.integrations.keras import hooks
from mpistrat.integrations.keras.ranks import TrainingRanks
from mpistrat.integrations.keras.step import RankStep, combine_by

# The dtypes in which gradients are sent.
Compression = types.SimpleNamespace(none=None, fp16="float16")


class _EqualWeightStep(RankStep):
    """Steps in which each rank has a batch of its own, and all weigh the same."""

    def __init__(self, engine: Engine, op: Op, factor: int, compression: str | None, sparse_as_dense: bool):
        # In place of rows of this rank and of the batch, whose ratio is the weight of the rank's gradients.
        info = [factor, engine.topology.size if op is Average else 1, 0]
        super().__init__(TrainingRanks(engine), np.array(info, np.float32))
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self.local: Sequence[Any] = ()
        self.local_weight: float = factor

    def all_reduce(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the combination of the gradients of all ranks; of local variables, the gradients of this rank."""
        if self._sparse_as_dense and hooks.BACKEND == "tensorflow":
            import tensorflow as tf

            gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        trained = hooks.variables_of_gradients(optimizer, None if hooks.BACKEND == "jax" else variables)
        alone = self.ranks.topology.size == 1
        local = [alone or any(variable is other for other in self.local) for variable in trained]
        positions = [i for i, is_local in enumerate(local) if not is_local]
        sent, like = [gradients[i] for i in positions], [variables[i] for i in positions]
        if self._compression:
            sent = [None if gradient is None else ops.cast(gradient, self._compression) for gradient in sent]
            if hooks.BACKEND == "torch":  # a rank without a gradient sends zeros of this dtype
                like = [types.SimpleNamespace(value=variable.value.half()) for variable in like]
        out = [
            ops.multiply(gradient, self.local_weight) if is_local and gradient is not None else None
            for is_local, gradient in zip(local, gradients, strict=True)
        ]
        combined = super().all_reduce(optimizer, sent, like) if positions else []
        for i, gradient in zip(positions, combined, strict=True):
            out[i] = ops.cast(gradient, variables[i].dtype) if self._compression and gradient is not None else gradient
        return out


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    local_layers: Any = (),
) -> Any:
    """Let an optimizer combine the gradients of all ranks, each of which has a batch of its own.

    It works in `fit`, `train_on_batch` and loops of your own: on PyTorch and TensorFlow in ``apply``, on JAX in
    ``stateless_apply``. A file keeps the plain optimizer.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
    name, device_dense, device_sparse, gradient_predivide_factor, num_groups, groups : optional
        Not used: gradients travel together, and are divided before they are added.
    compression : str, optional
        `Compression.none` or `Compression.fp16`.
    sparse_as_dense : bool
        Whether gradients of some rows, which TensorFlow makes, are sent as dense ones.
    op : Op
        Average or Sum.
    backward_passes_per_step : int
        After how many batches the weights change: ``gradient_accumulation_steps`` of the optimizer.
    average_aggregated_gradients : bool
        Whether the gradients of these batches are averaged, not added.
    process_set : ProcessSet
        The ranks. The optimizer of another rank stays alone.
    local_layers : Layer or sequence of Layer, optional
        Layers whose gradients are not combined.
    scale_local_gradients : bool
        Whether these are divided by the number of ranks.

    Returns
    -------
    Optimizer
        The optimizer itself.

    Raises
    ------
    ValueError
        If ``op`` is another, or the optimizer has begun, or accumulates already.

    Examples
    --------
    >>> hvd.init()  # doctest: +SKIP
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), "mse")  # doctest: +SKIP
    """
    if op not in (Average, Sum):
        raise ValueError(f"op currently only supports Average and Sum, not {op}")
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else [*(local_layers or ())]
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise ValueError(f"local_layers must be layers of Keras, not {local_layers!r}")
    passes = backward_passes_per_step
    if passes > 1:
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise ValueError(
                f"backward_passes_per_step={passes} needs a new optimizer without gradient_accumulation_steps: Keras "
                "makes room for the sums when it builds the optimizer"
            )
        optimizer.gradient_accumulation_steps = passes
    engine = Engine(process_set.topology if process_set.included() is not False else None)
    factor = 1 if average_aggregated_gradients else passes
    step = _EqualWeightStep(engine, op, factor, compression, sparse_as_dense)
    step.local = [variable for layer in layers for variable in layer.trainable_variables]
    step.local_weight = factor / (engine.topology.size if scale_local_gradients else 1)
    combine_by(optimizer, step)
    return optimizer


PartialDistributedOptimizer = DistributedOptimizer  # which takes ``local_layers``, too


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: str | None = Compression.none,
) -> Any:
    """Load a model of Keras whose optimizer combines the gradients of all ranks, as `DistributedOptimizer`.

    Parameters
    ----------
    filepath : path
    custom_optimizers : sequence of type, optional
        Classes of optimizers that the file may need.
    custom_objects : dict, optional
        Other classes and functions that it may need, by their names.
    compression : str, optional
        `Compression.none` or `Compression.fp16`.

    Returns
    -------
    keras.Model

    Examples
    --------
    >>> model = hvd.load_model("model.keras")  # doctest: +SKIP
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
