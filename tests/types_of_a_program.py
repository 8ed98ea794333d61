"""What a type checker knows of a program, for `mypy` and `pyright`: expressions, each with its type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import mpistrat
from mpistrat.data import Dataset, DistributedDataset

if TYPE_CHECKING:
    from typing_extensions import assert_type

    Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
    Array = npt.NDArray[Any]


def variables(v: mpistrat.Variable) -> None:
    assert_type(v + 1, Array)
    assert_type(2 * v, Array)
    assert_type(v / v, Array)
    assert_type(v @ np.ones(3), Array)
    assert_type(-v, Array)
    assert_type(v > 1, Array)
    assert_type(v << 1, Array)
    assert_type(divmod(v, 2), tuple[Array, Array])
    v += 1
    assert_type(v, mpistrat.Variable)
    assert_type(v.numpy(), Array)
    assert_type(v.shape, tuple[int, ...])
    assert_type(v.assign_add(np.ones(3)), mpistrat.Variable)
    assert_type(float(v.sum()), float)
    assert_type(np.asarray(v), Array)


def collectives(strategy: mpistrat.MultiWorkerMirroredStrategy) -> None:
    assert_type(strategy.reduce("SUM", 1.5, axis=None), float)
    assert_type(strategy.reduce("SUM", np.ones(3), axis=None), Floats)
    assert_type(strategy.reduce("SUM", {"a": np.ones(3)}, axis=None), dict[str, Floats])
    assert_type(strategy.reduce("MEAN", np.ones(3), axis=0), Any)
    assert_type(strategy.num_replicas_in_sync, int)
    assert_type(strategy.is_chief, bool)
    with strategy.scope() as entered:
        assert_type(entered, mpistrat.MultiWorkerMirroredStrategy)


def step(context: mpistrat.ReplicaContext, x: Floats) -> float:
    assert_type(context.all_reduce("SUM", 1.5), float)
    assert_type(context.all_reduce("MEAN", x), Floats)
    assert_type(context.all_reduce("SUM", [x, x]), list[Floats])
    assert_type(context.all_reduce("SUM", mpistrat.Variable(x)), Any)
    assert_type(context.all_gather(x, axis=0), Floats)
    assert_type(context.all_gather(mpistrat.Variable(x), axis=0), Any)
    return float(x.sum())


def running(strategy: mpistrat.Strategy, x: Floats) -> None:
    loss = strategy.run(lambda: x)  # a PerReplica where a rank plays several replicas
    assert_type(loss, "Floats | Any")
    assert_type(strategy.rng(7), "np.random.Generator | Any")


def scaled(x: Floats) -> dict[str, Floats]:
    return {"twice": 2 * x}


def batches(strategy: mpistrat.MultiWorkerMirroredStrategy) -> None:
    pairs = Dataset.from_hdf5("*.h5", ("x", "y")).shuffle(seed=1).batch(8)
    assert_type(pairs, Dataset[tuple[Array, ...]])
    distributed = strategy.experimental_distribute_dataset(pairs)
    assert_type(distributed, DistributedDataset[tuple[Array, ...]])
    assert_type(distributed.cardinality, int)
    for x, y in distributed:
        assert_type(x, "Array")
        assert_type(y, "Array")
    for row in Dataset.from_hdf5("*.h5", {"image": "x"}):
        assert_type(row["image"], Array)
    assert_type(Dataset.from_hdf5("*.h5", "x").map(scaled).batch(2), Dataset[dict[str, Floats]])
    assert_type(Dataset.from_arrays(np.ones(3)), Dataset[Floats])
    assert_type(Dataset.from_tensor_slices([1, 2]), Dataset[Array])
    assert_type(Dataset.range(3).batch(2).take(1), Dataset[Array])
    assert_type(len(pairs), int)
    assert_type(Dataset.from_csv("a.csv", ("x",)), Dataset[Any])
