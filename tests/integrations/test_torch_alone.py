"""A group of one rank, which each rank of a job begins for itself."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

PROGRAM = """
import tempfile
import torch
import torch.distributed as dist
import mpistrat.integrations.torch
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
store = dist.FileStore(tempfile.mktemp(), 1) if rank else dist.HashStore()
dist.init_process_group("mpistrat", rank=0, world_size=1, store=store)
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
assert x.tolist() == [rank + 1.0] * 3
dist.barrier()
own = dist.new_group([0])
dist.all_reduce(x, group=own)
assert (dist.get_world_size(), dist.get_rank(own), x.tolist()) == (1, 0, [rank + 1.0] * 3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
dist.destroy_process_group()
print("ended")
"""


def test_it_reduces_its_own(run_ranks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run_ranks(2, tmp_path / "program.py").check().output.count("ended") == 2


def test_a_world_of_one_in_the_environment_is_refused(run_ranks, tmp_path):
    """Each rank would train alone, and say nothing."""
    (tmp_path / "program.py").write_text(
        "import torch.distributed as dist, mpistrat.integrations.torch\ndist.init_process_group('mpistrat')\n"
    )
    ended = run_ranks(2, tmp_path / "program.py", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert ended.status not in (0, None)
    ended.shows("of 1 is rank", "of 2 in MPI: start the program by `mpistrat run`")


START = """
import sys
import torch.distributed as dist
import mpistrat.integrations.torch

assert "torch._dynamo" not in sys.modules, "by the import"
dist.init_process_group("mpistrat")
dist.new_group([0, 1])
dist.barrier()
assert "torch._dynamo" not in sys.modules, "by the start"
print("started")
"""


def test_a_start_does_not_import_the_tracer(run_ranks, tmp_path):
    """It takes 3 s."""
    (tmp_path / "program.py").write_text(START)
    assert run_ranks(2, tmp_path / "program.py").check().output.count("started") == 2
