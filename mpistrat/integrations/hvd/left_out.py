"""Names of Horovod that are not provided, and what to use in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat import absent

_INSTEAD = {
    "elastic": "a batch script that starts the job again, and checkpoints of rank 0 (docs: It hangs, preemption)",
    "HostsUpdatedInterrupt": "a batch script that starts the job again",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm after torch.distributed.init_process_group('mpistrat')",
    "start_timeline": "`with mpistrat.experimental.trace(...)`, or `mpistrat run --trace`",
    "stop_timeline": "`with mpistrat.experimental.trace(...)`, or `mpistrat run --trace`",
    "run": "`mpistrat run -n RANKS program.py`, mpirun or srun",
    "DistributedGradientTape": "allreduce of the gradients",
}


def explained(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` whose error says what to use in place of a name of Horovod."""

    return absent.explained(module, absent.nothing, _INSTEAD)
