"""The rows of a rank: a contiguous part of each batch of Keras; of a dataset of `mpistrat.data` its own rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from mpistrat.arrays import arrays
from mpistrat.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, DistributedDataset, InputOptions
from mpistrat.data.rows.lanes import piece
from mpistrat.engine import Engine
from mpistrat.integrations.keras import hooks, step
from mpistrat.integrations.keras.hooks import BACKEND
from mpistrat.integrations.keras.ranks import DIGESTS, digest

_ON_HOST = InputOptions(experimental_fetch_to_device=False)  # Keras copies batches to its device
_KEPT = "_mpistrat_keras"  # the attribute of a dataset that keeps its `_Distributed`
_flatten = keras.tree.flatten


class _Distributed:
    """A dataset distributed over the ranks of an engine. Further training goes on with its next epoch.

    An attribute of the dataset holds it, so that both end together: a dictionary would keep the dataset alive.
    """

    def __init__(self, dataset: Dataset[Any], engine: Engine):
        self.dataset, self.engine = dataset, engine
        self.distributed = DistributedDataset(dataset, engine.topology, _ON_HOST, replicas=engine.replicas)

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
            if kept is None or kept.dataset is not x or kept.engine is not engine:  # copy.copy shares attributes
                kept = vars(x)[_KEPT] = _Distributed(x, engine)
            x = kept.distributed
        if x.cardinality == INFINITE_CARDINALITY and not steps:
            raise ValueError("the dataset has no end: give the number of steps of an epoch, such as steps_per_epoch")
        self._dataset = x
        self._class_weight = values.get("class_weight")
        self.num_batches: int | None = x.cardinality if x.cardinality >= 0 else None

    def on_epoch_begin(self) -> None:
        """Do nothing, as the batches of an epoch begin when they are read."""

    on_epoch_end = on_epoch_begin

    def begin_at(self, epoch: int) -> None:
        """Let the next epoch be number ``epoch``."""
        state = self._dataset.state()
        start = {name: 0 for name in ("position", "step") if name in state}
        self._dataset.restore({**state, **start, "epoch": epoch})

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Yield the batches of an epoch as ``(x, y, sample_weight)``, with as many of these as there are."""
        batches = iter(self._dataset)
        while True:
            if self._dataset.cardinality == UNKNOWN_CARDINALITY:
                step.wait_for_host()  # its ranks communicate at each batch, which must follow the collectives of steps
            try:
                x, y, weight = keras.utils.unpack_x_y_sample_weight(next(batches))
            except StopIteration:
                return
            if self._class_weight is not None and y is not None:
                if weight is not None:
                    raise ValueError("give class_weight or the sample weights of a dataset, not both")
                weight = hooks.class_weight_to_sample_weights(y, self._class_weight)
            yield keras.utils.pack_x_y_sample_weight(x, y, weight)


class PartsOfRank(hooks.DataAdapter):
    """A rank's part of each batch of ``source``: Keras' adapter of the whole input, or a rank's own batches.

    With ``with_info`` each batch comes as ``(batch, info)``, see `RankStep`. ``info`` has a digest of arrays only if
    ``marked``, and of other sources always. Arrays are shuffled by the seed and the number of the epoch alone. When the
    first batches are read, ``begin()`` returns the first epoch, and how many batches of it are left out. ``seen`` is a
    digest of the batches of this epoch so far. Without ``with_info``, ``rows`` has this rank's number of rows in each
    batch. ``note(rows)`` is called for each batch.
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        size: int,
        with_info: bool = True,
        seed: int = 0,
        marked: bool = False,
        begin: Callable[[], tuple[int, int]] | None = None,
        note: Callable[[int], Any] = int,
    ):
        self.source, self.rank, self.size = source, rank, size
        self.with_info, self.seed, self.marked = with_info, seed, marked
        self.seen = 0
        self.rows: list[int] = []
        self._begin, self._note = begin, note
        self._epoch: Iterator[int] | None = None
        self._seen: list[Any] = []
        self._sliced = hooks.ArrayBatches(source) if isinstance(source, hooks.ArrayDataAdapter) else None

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays that batches are cut from, on the host; none if the source makes its batches."""
        inputs = [array for array in _flatten(self._sliced.arrays) if array is not None] if self._sliced else []
        # Tensors of PyTorch may be on a GPU, record gradients or have bfloat16, which NumPy refuses.
        return [arrays.to_host(array) if hasattr(array, "detach") else np.asarray(array) for array in inputs]

    @property
    def num_batches(self) -> int | None:
        """The number of batches, if it is known."""
        return self.source.num_batches

    @property
    def batch_size(self) -> int | None:
        """The number of rows of a whole batch, if it is known."""
        return self.source.batch_size

    def on_epoch_begin(self) -> None:
        """Call the method of the source."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the method of the source."""
        self.source.on_epoch_end()

    def first(self) -> Any:
        """Return a batch, which comes again when the batches are read."""
        if self._sliced:
            return self._sliced.cut(slice(0, min(self.source.batch_size, self._sliced.rows)))
        if isinstance(self.source, hooks.PyDatasetAdapter):  # which can be read again
            return hooks.first_of(self.source)
        if not self._seen:
            self._iterator = iter(self.source.get_numpy_iterator())
            self._seen.append(next(self._iterator))
        return _with_a_row(self._seen[0]) if isinstance(self.source, BatchesOfRank) else self._seen[0]

    def own_rows(self, batch: Any) -> Any:
        """Return the rows of this rank of a batch from `first`."""
        own = isinstance(self.source, BatchesOfRank)
        return batch if own else cut(batch, *piece(len(_flatten(batch)[0]), self.size, self.rank))

    def get_numpy_iterator(self) -> _Batches:
        """Return the batches of an epoch, whatever the backend: arrays of NumPy, or tensors of PyTorch."""
        return _Batches(self)

    get_jax_iterator = get_torch_dataloader = get_tf_dataset = get_numpy_iterator

    def batches(self) -> Iterator[Any]:
        """Yield the parts of an epoch."""
        self.seen = 0
        self.rows.clear()
        left_out = 0
        if self._epoch is None:
            first, left_out = self._begin() if self._begin is not None else (0, 0)
            self._epoch = itertools.count(first)
            if first and isinstance(self.source, BatchesOfRank):  # a callback has restored the model
                self._seen = []
                self.source.begin_at(first)
        if isinstance(self.source, BatchesOfRank):
            yield from self._own_batches(left_out)
            return
        batches = self._cut_arrays() if self._sliced else self._cut_batches()
        for rows, mark, cut in itertools.islice(batches, left_out, None):
            first, last = piece(rows, self.size, self.rank)
            own = last - first
            self._count(own, mark)
            if not own:  # the backend needs a row: one of another rank stands in, with weight 0
                first, last = 0, 1
            part = cut(first, last)
            yield (part, np.array([own, rows, mark], np.float32)) if self.with_info else part

    def _count(self, own: int, mark: int) -> None:
        self.seen = (31 * self.seen + mark + 1) % DIGESTS
        if not self.with_info:
            self.rows.append(own)
        self._note(own)

    def _own_batches(self, left_out: int) -> Iterator[Any]:
        """Yield batches that are this rank's alone. Their ``info`` has a shape of its own, as `RankStep` reads it."""
        for batch in itertools.islice(self._of_source(), left_out, None):
            own = len(_flatten(batch)[0])
            self._count(own, 0)
            part = cut(_with_a_row(batch), 0, max(own, 1))
            yield (part, {"own": np.array([own], np.float32)}) if self.with_info else part

    def _of_source(self) -> Iterator[Any]:
        """Yield the batches of an epoch of the source, with arrays on the host."""
        batches = self._iterator if self._seen else iter(self.source.get_numpy_iterator())
        first, self._seen = self._seen, []
        return itertools.chain(first, batches)

    def _cut_arrays(self) -> Iterator[tuple[int, int, Callable[[int, int], Any]]]:
        assert self._sliced is not None
        arrays, size = self._sliced, self.source.batch_size
        assert self._epoch is not None
        random = np.random.default_rng((self.seed, next(self._epoch)))
        order = random.permutation(arrays.rows) if arrays.shuffle else None
        if arrays.shuffle == "batch":
            order = np.arange(arrays.rows)
            for start in range(0, arrays.rows, size):
                random.shuffle(order[start : start + size])

        def cut_from(start: int, first: int, last: int) -> Any:
            rows = slice(start + first, start + last)
            return arrays.cut(rows if order is None else order[rows])

        mark = sum(map(digest, self.arrays)) % DIGESTS if self.marked else 0
        for start in range(0, arrays.rows, size):
            yield min(size, arrays.rows - start), mark, functools.partial(cut_from, start)

    def _cut_batches(self) -> Iterator[tuple[int, int, Callable[[int, int], Any]]]:
        for batch in self._of_source():
            leaves = [leaf for leaf in _flatten(batch) if leaf is not None]
            for leaf in leaves:
                if not isinstance(leaf, np.ndarray):
                    raise TypeError(
                        f"a batch holds a {type(leaf).__name__}, of which ranks cannot take rows: give dense arrays"
                    )
            yield len(leaves[0]), sum(map(digest, leaves)) % DIGESTS, functools.partial(cut, batch)


def _with_a_row(batch: Any) -> Any:
    """Return a batch as arrays on the host. If it has no rows, a row of zeros stands in, with weight 0."""

    def on_host(leaf: Any) -> Any:
        array = arrays.to_host(leaf)
        return array if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else on_host(leaf), batch)


def cut(batch: Any, first: int, last: int) -> Any:
    """Return rows of a batch, as arrays that the backend takes."""
    native = keras.ops.convert_to_tensor if BACKEND == "torch" else hooks.with_strings
    return keras.tree.map_structure(lambda array: None if array is None else native(array[first:last]), batch)


class _Batches:
    """The batches of one epoch.

    The first is read when it is asked for: Keras makes the iterator of an epoch before the last one has ended.
    """

    def __init__(self, parts: PartsOfRank):
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        batches = self._parts.batches()
        return _TensorFlowBatches(batches) if BACKEND == "tensorflow" else batches


class _TensorFlowBatches:
    """An iterator that ends with OutOfRangeError, since TensorFlow's trainer takes ``StopIteration`` for a step."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches

    def __iter__(self) -> _TensorFlowBatches:
        return self

    def __next__(self) -> Any:
        import tensorflow as tf

        try:
            return next(self._batches)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "the input has ended") from None
