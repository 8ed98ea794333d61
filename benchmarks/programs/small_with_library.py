"""Small work with the library: the loop of the main example, and single calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import small_digits as digits

import mpistrat
from mpistrat.values import ReduceOp

if TYPE_CHECKING:
    from small_digits import Call, Work

_RATE = 0.003
_SUM = ReduceOp.SUM


def ways(work: Work) -> dict[str, Call]:
    """Return the calls of all cases. Each takes the number of repetitions, and returns the last result."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    one = np.ones(1, np.float32)
    with strategy.scope():
        mean = mpistrat.metrics.Mean()

    # Each case repeats its call in a loop of its own, as by hand: a function in between costs up to 3 us, cold.
    def reduce(value: np.ndarray) -> Call:
        def times(k: int) -> Any:
            for _ in range(k):
                result = strategy.reduce(_SUM, value, axis=None)
            return result

        return times

    def update_state(k: int) -> None:
        for _ in range(k):
            mean.update_state(work.values)

    def result(k: int) -> Any:
        for _ in range(k):
            result = mean.result()
        return result

    def run(k: int) -> None:
        for _ in range(k):
            strategy.run(_nothing)

    def all_reduce(value: Any) -> Call:
        def times(k: int) -> Any:
            replica = mpistrat.get_replica_context()
            assert replica is not None
            for _ in range(k):
                result = replica.all_reduce(_SUM, value)
            return result

        return in_replica(times)

    def in_replica(times: Call) -> Call:
        return lambda k: strategy.run(times, (k,))

    return {
        "loop, data in memory": _loop(strategy, _in_memory, work),
        "loop, data in HDF5 files": _loop(strategy, _in_files, work),
        "Adam, 6 variables": _step(strategy, mpistrat.optimizers.Adam(_RATE), work.few),
        "Adam, 200 variables": _step(strategy, mpistrat.optimizers.Adam(_RATE), work.many),
        "SGD, 6 variables": _step(strategy, mpistrat.optimizers.SGD(_RATE), work.few),
        "SGD, 200 variables": _step(strategy, mpistrat.optimizers.SGD(_RATE), work.many),
        "reduce of one float": reduce(one),
        "reduce of 64 KiB": reduce(work.array),
        "all_reduce of 60 arrays": all_reduce(work.arrays),
        "all_reduce of a number": all_reduce(3),
        "run": run,
        "update_state": in_replica(update_state),
        "result": result,
    }


def _nothing() -> None:
    pass


def _step(strategy: Any, optimizer: Any, gradients: Sequence[np.ndarray]) -> Call:
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones_like(gradient)) for gradient in gradients]

    def steps(k: int) -> None:
        for _ in range(k):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def times(k: int) -> list[Any]:
        strategy.run(steps, (k,))
        return variables  # not their arrays: the time of making these is that of the loops

    return times


def _in_memory(work: Work) -> Any:
    return mpistrat.data.Dataset.from_arrays(tuple(digits.random_digits()))


def _in_files(work: Work) -> Any:
    return mpistrat.data.Dataset.from_hdf5(work.folder / "train-*.h5", ("images", "labels"))


def _loop(strategy: Any, dataset_of: Callable[[Work], Any], work: Work) -> Call:
    """Return the main example without its progress bar, from the variables to the losses of the epochs."""

    def train(k: int) -> list[float]:
        options = mpistrat.data.Options()
        options.experimental_distribute.auto_shard_policy = mpistrat.data.AutoShardPolicy.DATA
        training = dataset_of(work).with_options(options).shuffle(seed=0).batch(digits.BATCH)
        training = training.map(lambda images, labels: (digits.scaled(images), labels))
        training = strategy.experimental_distribute_dataset(training)
        with strategy.scope():
            variables = [mpistrat.Variable(value) for value in digits.initial_weights()]
            optimizer = mpistrat.optimizers.Adam(_RATE)

        def step(batch: tuple[np.ndarray, np.ndarray]) -> tuple[float, int]:
            images, labels = map(np.asarray, batch)
            weights = [np.asarray(variable) for variable in variables]
            loss, gradients = digits.loss_and_gradients(weights, images, labels)
            replica = mpistrat.get_replica_context()
            assert replica is not None
            examples = int(replica.all_reduce("SUM", len(labels)))
            pairs = zip([gradient / examples for gradient in gradients], variables, strict=True)
            optimizer.apply_gradients(pairs)
            return loss, len(labels)

        losses = []
        for _ in range(work.epochs):
            steps = np.array([strategy.run(step, (batch,)) for batch in training])
            loss, examples = strategy.reduce("SUM", steps, axis=0)
            losses.append(float(loss / examples))
        return losses

    return train
