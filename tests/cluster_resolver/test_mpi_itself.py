"""The facts of the environment equal those of MPI under several ranks, and resolvers start MPI only if asked."""

import pytest

AGREE = """
import os
from mpi4py import MPI
from mpistrat.cluster_resolver import MpiClusterResolver, resolve

resolver, asked = resolve(), MpiClusterResolver(MPI.COMM_WORLD)
told, known = resolver.placement, asked.placement
for name in ("size", "rank", "local_rank", "local_size", "ranks_per_node", "node_of_rank", "nodes", "host"):
    assert getattr(told, name) == getattr(known, name), (name, told, known)
assert known.ranks_by_node == (tuple(range(3)),)
assert resolver.cluster_spec() == asked.cluster_spec()
assert asked.master() == f"grpc://{os.uname().nodename}:{8888 + known.rank}"
assert (known.gpus, known.device) == (("4", "5", "6"), f"cuda:{known.rank}")

pair = MPI.COMM_WORLD.Split(known.rank == 2)
assert MpiClusterResolver(pair).placement.size == (1 if known.rank == 2 else 2)
"""

NO_MPI = """
import sys
import mpistrat.cluster_resolver as package
for name in package.__all__:
    getattr(package, name)
package.resolve().cluster_spec()
assert "resolve" in dir(package) and callable(package.resolve)
heavy = {"mpi4py.MPI", "numpy", "optree", "h5py", "cupy", "kubernetes", "googleapiclient"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.mpich
def test_environment_and_mpi_agree(run_ranks, tmp_path):
    program = tmp_path / "agree.py"
    program.write_text(AGREE)
    run_ranks(3, program, CUDA_VISIBLE_DEVICES="4,5,6").check()


def test_resolving_starts_no_mpi(run_alone):
    run_alone("-c", NO_MPI).check()
