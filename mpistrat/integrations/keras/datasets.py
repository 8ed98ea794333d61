"""Datasets of `mpistrat.data` as the input of Keras: each rank reads its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from mpistrat.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, DistributedDataset, InputOptions
from mpistrat.engine import Engine
from mpistrat.integrations.keras import hooks, host_calls

_ON_HOST = InputOptions(experimental_fetch_to_device=False)  # Keras copies batches to its device
_KEPT = "_mpistrat_keras"  # the attribute of a dataset that keeps its `_Distributed`


class _Distributed:
    """What a dataset is over the ranks of an engine: if it trains again, it goes on with its next epoch.

    The dataset keeps it, so that both end together: a dictionary of all would hold the dataset by its value.
    """

    def __init__(self, dataset: Dataset, engine: Engine):
        self.of, self.engine = dataset, engine
        self.made = DistributedDataset(dataset, engine.topology, _ON_HOST, replicas=engine.replicas)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copies of the dataset in other processes have none


def is_dataset(x: Any) -> bool:
    """Return whether an input is a dataset of `mpistrat.data`."""
    return isinstance(x, (Dataset, DistributedDataset))


class BatchesOfRank:
    """The batches of a rank, in the place of an adapter of Keras.

    ``values`` are the arguments of `fit`, or of a method like it. Raise ValueError if they have targets or weights
    beside the dataset, or no number of steps for an endless one.
    """

    batch_size = None

    def __init__(self, values: dict[str, Any], steps: int | None, engine: Engine):
        for name in ("y", "sample_weight"):
            if values.get(name) is not None:
                raise ValueError(
                    f"{name} was given beside a dataset: let its elements be (x, y) or (x, y, sample_weight)"
                )
        x = values["x"]
        if isinstance(x, Dataset):
            kept = vars(x).get(_KEPT)
            if kept is None or kept.of is not x or kept.engine is not engine:  # copy.copy shares attributes
                kept = vars(x)[_KEPT] = _Distributed(x, engine)
            x = kept.made
        if x.cardinality == INFINITE_CARDINALITY and not steps:
            raise ValueError("the dataset has no end: give the number of steps of an epoch, such as steps_per_epoch")
        self._dataset = x
        self._class_weight = values.get("class_weight")
        self.num_batches: int | None = x.cardinality if x.cardinality >= 0 else None

    def on_epoch_begin(self) -> None:
        """Do nothing, as the batches of an epoch begin when they are read."""

    on_epoch_end = on_epoch_begin

    def begin_at(self, epoch: int) -> None:
        """Let the next epoch be that of a number."""
        state = self._dataset.state()
        start = {name: 0 for name in ("position", "step") if name in state}
        self._dataset.restore({**state, **start, "epoch": epoch})

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Yield the batches of an epoch as ``(x, y, sample_weight)``, with as many of these as there are."""
        batches = iter(self._dataset)
        while True:
            if self._dataset.cardinality == UNKNOWN_CARDINALITY:
                host_calls.wait()  # its ranks talk at each batch, after the collectives of steps
            try:
                x, y, weight = keras.utils.unpack_x_y_sample_weight(next(batches))
            except StopIteration:
                return
            if self._class_weight is not None and y is not None:
                if weight is not None:
                    raise ValueError("give class_weight or the sample weights of a dataset, not both")
                weight = hooks.class_weight_to_sample_weights(y, self._class_weight)
            yield keras.utils.pack_x_y_sample_weight(x, y, weight)
