"""The backend "mpistrat" of ``torch.distributed``: importing this package registers it.

``torch.distributed.init_process_group("mpistrat")`` then works under any MPI launcher, without an address, a port, a
rank or a size: MPI knows these.

Examples
--------
>>> import mpistrat.integrations.torch  # doctest: +SKIP
>>> torch.distributed.init_process_group("mpistrat")  # doctest: +SKIP
>>> model = torch.nn.parallel.DistributedDataParallel(model)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import inspect
import os
from datetime import timedelta
from typing import Any

try:
    import torch
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError as error:
    raise ImportError("mpistrat.integrations.torch needs PyTorch: pip install torch") from error

from mpistrat.collectives import CommunicationOptions
from mpistrat.integrations.torch.collectives import GroupCollectives
from mpistrat.integrations.torch.new_groups import communicator
from mpistrat.integrations.torch.process_group import ProcessGroup
from mpistrat.integrations.torch.samplers import BatchSampler, CountedLoader, Sampler
from mpistrat.integrations.torch.shared_buckets import SharedBuckets, reduce_in_place
from mpistrat.integrations.torch.store import MpiStore
from mpistrat.integrations.torch.store import register as _register_rendezvous
from mpistrat.integrations.torch.work import Done, PendingWork, keep_handles
from mpistrat.process.own_files import skip_in_call_sites

__all__ = [
    "BACKEND",
    "BatchSampler",
    "CountedLoader",
    "MpiStore",
    "ProcessGroup",
    "Sampler",
    "SharedBuckets",
    "reduce_in_place",
]

BACKEND = "mpistrat"


def _process_group(described: Any, options: CommunicationOptions | None) -> ProcessGroup:
    """Return the process group that torch asks for. Collective over its ranks."""
    timeout: timedelta = described.timeout
    return ProcessGroup(communicator(described), described.group_id, timeout, options)


def _leave_untraced(*kinds: type) -> None:
    """Keep the methods of classes, and what they call, from being traced.

    The tracer also sees methods that the C++ part of torch calls while compiled code runs, such as the broadcasts of
    `DistributedDataParallel`. It refuses attributes of a process group.
    """
    # `torch.compiler.disable` does the same, but it imports the tracer (3 s at the start) and wraps each method.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for kind in kinds:
        for method in vars(kind).values():
            # Private methods are called by others only, and what these call is not traced either.
            if inspect.isfunction(method) and not method.__name__.startswith("_"):
                method._torchdynamo_disable = True  # type: ignore[attr-defined]  # in traced code
                set_code_exec_strategy(method.__code__, skip)  # called by C++


def _record_itself() -> None:
    """Keep torch's flight recorder, since torch 2.15, from groups of this backend: they have a record of their own.

    The recorder asks the C++ part of a group for its backend, and raises where the group is one in Python.
    """
    module = importlib.import_module("torch.distributed.distributed_c10d")
    recorded: set[str] = getattr(module, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(BACKEND)


# torch moves what it sends to a device of the backend: without a GPU it found no driver where "cuda" was registered.
torch.distributed.Backend.register_backend(
    BACKEND, _process_group, extended_api=True, devices=["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
)
_record_itself()
keep_handles()
_leave_untraced(GroupCollectives, ProcessGroup, Done, PendingWork)
_register_rendezvous()
skip_in_call_sites(os.path.dirname(torch.__file__))
