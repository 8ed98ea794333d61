"""Errors for names that the package does not have."""

import functools
import importlib.util
import inspect
import operator
import re
import subprocess
import sys

import pytest

import mpistrat
from mpistrat import absent, data, experimental, metrics, optimizers
from mpistrat.data import Dataset

ADVICE = [
    *((mpistrat, name, advice) for name, advice in absent.OF_DISTRIBUTE.items()),
    *((data, name, advice) for name, advice in absent.OF_DATA.items()),
    *((experimental, name, advice) for name, advice in absent.OF_EXPERIMENTAL.items()),
    *((metrics, name, advice) for name, advice in absent.OF_METRICS.items()),
    *((optimizers, name, advice) for name, advice in absent.OF_OPTIMIZERS.items()),
]


def metric(kind=metrics.Mean, **arguments):
    with mpistrat.OneDeviceStrategy("cpu:0").scope():
        return kind(**arguments)


# What has names, how an error calls it, and its table.
OBJECTS = {
    "strategy": (mpistrat.MultiWorkerMirroredStrategy, "MultiWorkerMirroredStrategy", absent.OF_STRATEGY),
    "class": (lambda: Dataset, "Dataset", absent.OF_DATASET),
    "dataset": (lambda: Dataset.range(3), "Dataset", absent.OF_DATASET),
    "distributed": (
        lambda: mpistrat.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(Dataset.range(4).batch(2)),
        "DistributedDataset",
        absent.OF_DISTRIBUTED_DATASET,
    ),
    "optimizer": (optimizers.Adam, "Adam", absent.OF_OPTIMIZER),
    "metric": (metric, "Mean", absent.OF_METRIC),
}
# The names of tf.data.Dataset (TensorFlow 2.21). Those of installed libraries are asked in tests/integrations.
TF_DATA = """
apply as_numpy_iterator batch bucket_by_sequence_length cache cardinality choose_from_datasets concatenate counter
element_spec enumerate filter fingerprint flat_map from_generator from_tensor_slices from_tensors get_single_element
group_by_window ignore_errors interleave list_files load map options padded_batch prefetch ragged_batch random range
rebatch reduce rejection_resample repeat sample_from_datasets save scan shard shuffle skip snapshot sparse_batch take
take_while unbatch unique window with_options zip
"""


@pytest.mark.parametrize(("module", "name", "advice"), ADVICE, ids=lambda x: x if isinstance(x, str) else "")
def test_advice(module, name, advice):
    with pytest.raises(AttributeError, match=re.escape(f"{module.__name__} has no {name!r}: use {advice}")):
        getattr(module, name)
    is_there(advice)


def is_there(advice):
    """What an advice names."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    objects = {"mpistrat": mpistrat, "strategy": strategy}
    for root, path in re.findall(r"\b(mpistrat|strategy)((?:\.\w+)+)", advice):
        if path.startswith(".integrations."):  # of libraries that may not be installed
            assert importlib.util.find_spec(root + path) is not None
        else:
            functools.reduce(getattr, path[1:].split("."), objects[root])
    for method in re.findall(r"get_replica_context\(\)\.(\w+)", advice):
        assert hasattr(mpistrat.ReplicaContext, method)


@pytest.mark.parametrize("what", OBJECTS)
def test_advice_of_objects(what):
    make, called, table = OBJECTS[what]
    made = make()
    for name, advice in table.items():
        with pytest.raises(AttributeError, match=re.escape(f"{called} has no {name!r}: use {advice}")):
            getattr(made, name)
        is_there(advice)
    with pytest.raises(AttributeError, match=f"^{called} has no 'bicycle'$"):
        operator.attrgetter("bicycle")(made)
    assert not hasattr(made, "__deepcopy__") or what != "dataset"


def test_every_name_of_tf_data():
    for name in TF_DATA.split():
        assert hasattr(Dataset, name) or name in absent.OF_DATASET, name


def test_arguments_of_other_optimizers():
    class Own(optimizers.SGD):
        def __init__(self, eps, **kwargs):
            super().__init__(**kwargs)
            self.eps = eps

    for name, advice in absent.OF_OPTIMIZER_ARGUMENTS.items():
        with pytest.raises(TypeError, match=re.escape(f"Adam() has no argument {name!r}: use {advice}")):
            optimizers.Adam(**{name: 0.1})
    assert Own(0.5, learning_rate=0.1).eps == 0.5
    with pytest.raises(TypeError, match="Own\\(\\) has no argument 'lr': use learning_rate="):
        Own(0.5, lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bicycle'"):
        optimizers.Adam(bicycle=1)
    assert {"learning_rate", "clipnorm", "shard_state"} <= {*inspect.signature(optimizers.Adam).parameters}


def test_arguments_of_other_metrics():
    for name, advice in absent.OF_METRIC_ARGUMENTS.items():
        with pytest.raises(TypeError, match=re.escape(f"AUC() has no argument {name!r}: use {advice}")):
            metric(metrics.AUC, **{name: True})
    with pytest.raises(TypeError, match="MeanSquaredError\\(\\) has no argument 'dtype'"):
        metric(metrics.MeanSquaredError, dtype="float32")
    for kind in (metrics.F1Score, metrics.FBetaScore):
        with pytest.raises(
            TypeError, match=f"{kind.__name__}\\(\\) needs num_classes=, the number of columns of y_true"
        ):
            metric(kind, average="macro")
    assert {"num_thresholds", "curve", "name"} <= {*inspect.signature(metrics.AUC).parameters}


def test_an_error_inside_a_property_stays_what_it_is():
    class Own(mpistrat.MultiWorkerMirroredStrategy):
        @property
        def mine(self):
            return self.comm.bicycle

    with pytest.raises(AttributeError, match="object has no attribute 'bicycle'"):
        operator.attrgetter("mine")(Own())


@pytest.mark.parametrize("module", [mpistrat, data, experimental, metrics, optimizers])
def test_a_name_that_no_library_has(module):
    with pytest.raises(AttributeError, match=f"^{module.__name__} has no 'Bicycle'$"):
        operator.attrgetter("Bicycle")(module)
    with pytest.raises(ImportError):
        exec(f"from {module.__name__} import Bicycle")


def test_a_typing_error_is_answered_by_python():
    program = "import mpistrat; mpistrat.MiroredStrategy"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Did you mean: 'MirroredStrategy'?" in done.stderr


@pytest.mark.parametrize(
    ("module", "name", "imported"),
    [("mpistrat", "MirroredStrategy", "mpistrat.strategies"), ("mpistrat.data", "Dataset", "mpistrat.data.dataset")],
)
def test_an_error_of_an_import_is_not_hidden(module, name, imported):
    program = f"""
import importlib, sys, types
class Broken(types.ModuleType):
    def __getattr__(self, name):
        raise AttributeError("the cause")
module = importlib.import_module({module!r})
sys.modules[{imported!r}] = Broken({imported!r})
module.{name}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "AttributeError: the cause"
