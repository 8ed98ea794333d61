"""A rank that leaves or fails before it has started MPI, which the others wait in."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault
OPEN_MPI = Path(sys.executable).with_name("ompi_info").exists()

LEAVES = """
import os, sys
import mpistrat

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if rank == int(sys.argv[1]):
    sys.exit()
mpistrat.MultiWorkerMirroredStrategy().barrier()
"""


@pytest.mark.mpich
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_is_named(run_ranks, tmp_path, rank):
    (tmp_path / "program.py").write_text(LEAVES)
    ended = run_ranks(
        3,
        tmp_path / "program.py",
        str(rank),
        MPISTRAT_HANG_SECONDS="1",
        MPISTRAT_HANG_ABORT_SECONDS="5",
        MPISTRAT_RECORD_DIR=str(tmp_path),
    )
    assert ended.status != 0, str(ended)
    ended.shows(f" waited for rank {rank} since", "has ended before its first strategy", "cause: ended early.")


ROLES = """
import os
import sys
import mpistrat

resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs={jobs})
if resolver.task_type != "chief":
    mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    sys.exit()
{fails}
"""
FAILS = {
    "error": ("{'chief': 1, 'ps': 1, 'worker': 1}", "raise ValueError('on purpose')", "ValueError: on purpose\n"),
    "roles": (
        "{'chief': 1, 'worker': 2}",
        "mpistrat.ParameterServerStrategy(resolver)",
        "ValueError: the cluster needs a ps; it has chief=1, worker=2\n",
    ),
    "status": ("{'chief': 1, 'ps': 1, 'worker': 1}", "sys.exit('no configuration')", "no configuration\n"),
}


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH cannot go on without a rank")
@pytest.mark.parametrize("name", FAILS)
def test_a_rank_that_fails_ends_a_job_that_survives_losses(run_alone, tmp_path, name):
    jobs, fails, last = FAILS[name]
    program = tmp_path / "program.py"
    program.write_text(ROLES.format(jobs=jobs, fails=fails))
    ended = run_alone("-m", "mpistrat", "run", "--ft", "-n", "3", program)
    assert ended.status == 1, str(ended)
    # Open MPI 5.0 itself may crash while it ends such a job, in ompi_comm_revoke_local, and says so in many lines.
    noise = "[warn] Epoll", f"[{os.uname().nodename}:"
    told = [line for line in ended.output.splitlines(keepends=True) if not line.startswith(noise)]
    assert last in told[-2:], str(ended)
