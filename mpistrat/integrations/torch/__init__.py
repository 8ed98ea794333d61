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

import os
from datetime import timedelta
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("mpistrat.integrations.torch needs PyTorch: pip install torch") from error

from mpistrat.collectives import CommunicationOptions
from mpistrat.integrations.torch.communicators import communicator
from mpistrat.integrations.torch.process_group import ProcessGroup
from mpistrat.integrations.torch.rendezvous import register as _register_rendezvous
from mpistrat.integrations.torch.shared_buckets import SharedBuckets, reduce_in_place
from mpistrat.integrations.torch.store import MpiStore
from mpistrat.runtime.agreement.operation import skip_in_call_sites

__all__ = ["BACKEND", "MpiStore", "ProcessGroup", "SharedBuckets", "reduce_in_place"]

BACKEND = "mpistrat"


def _process_group(described: Any, options: CommunicationOptions | None) -> ProcessGroup:
    """Return the process group that torch asks for. Collective over its ranks."""
    comm = communicator(described.global_ranks_in_group, described.group_rank, described.group_size)
    timeout: timedelta = described.timeout
    return ProcessGroup(comm, described.group_id, timeout, options)


torch.distributed.Backend.register_backend(
    BACKEND, _process_group, extended_api=True, devices=["cpu", "cuda"]
)
_register_rendezvous()
skip_in_call_sites(os.path.dirname(torch.__file__))
