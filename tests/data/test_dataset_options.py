"""Tests of options and enums of input."""

import copy
import subprocess
import sys

import pytest

import mpistrat.data as data


def test_input_context():
    context = data.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(16) == 4
    with pytest.raises(ValueError, match="18 is not a multiple of the 4"):
        context.get_per_replica_batch_size(18)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 4)
    assert repr(data.InputContext()) == (
        "InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)"
    )
    with pytest.raises(AttributeError):
        context.input_pipeline_id = 0


def test_input_options():
    options = data.InputOptions()
    assert tuple(options) == (True, data.InputReplicationMode.PER_WORKER, False, 1)
    assert data.InputOptions(False).experimental_fetch_to_device is False
    assert options == data.InputOptions(True)
    assert data.InputReplicationMode("PER_REPLICA") is data.InputReplicationMode.PER_REPLICA


def test_policies_have_the_values_of_tf():
    assert {p.name: p.value for p in data.AutoShardPolicy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert data.SHARD_HINT == -1
    assert data.AUTOTUNE == -1


def test_distribute_options():
    options = data.Options()
    distribute = options.experimental_distribute
    assert distribute.auto_shard_policy is data.AutoShardPolicy.AUTO
    assert distribute.num_devices is None
    distribute.auto_shard_policy = data.AutoShardPolicy.OFF
    distribute.num_devices = 2
    assert repr(options) == ("Options(experimental_distribute=DistributeOptions(auto_shard_policy=OFF, num_devices=2))")
    assert copy.deepcopy(options) == options != data.Options()
    with pytest.raises(AttributeError):
        distribute.auto_shard = 1
    with pytest.raises(AttributeError):
        options.experimental_distribution = 1
    with pytest.raises(TypeError, match="AutoShardPolicy"):
        distribute.auto_shard_policy = "DATA"
    with pytest.raises(TypeError, match="num_devices"):
        distribute.num_devices = 1.5


def test_options_merge_and_are_copied():
    first, second = data.Options(), data.Options()
    first.experimental_distribute.num_devices = 3
    second.experimental_distribute.auto_shard_policy = data.AutoShardPolicy.DATA
    dataset = data.Dataset.range(3).with_options(first).with_options(second).batch(2)
    first.experimental_distribute.num_devices = 4
    merged = dataset.options().experimental_distribute
    assert (merged.num_devices, merged.auto_shard_policy) == (3, data.AutoShardPolicy.DATA)
    dataset.options().experimental_distribute.num_devices = 9
    assert dataset.options().experimental_distribute.num_devices == 3


def test_importing_loads_neither_h5py_nor_mpi():
    code = (
        "import sys, mpistrat.data as d; d.Dataset, d.DistributedDataset, d.DataFileError;"
        "print([m for m in ('h5py', 'mpi4py.MPI', 'cupy', 'optree') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads_and_is_documented():
    for name in data.__all__:
        value = getattr(data, name)
        assert name in ("AUTOTUNE", "SHARD_HINT", "INFINITE_CARDINALITY") or value.__doc__
