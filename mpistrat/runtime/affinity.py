"""The cores that a process may use, the threads that its libraries will start, and the kernels of its BLAS."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpistrat.process.own_files import level_of_program
from mpistrat.representation import grouped, ranges

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

# The libraries of the other variables fall back on OMP_NUM_THREADS.
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS")
_checked = False


def cores() -> frozenset[int] | None:
    """Return the cores that this process may use, or None where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cores_of_machine() -> int:
    """Return the number of cores of this machine or container: those of its process 1."""
    try:
        return len(os.sched_getaffinity(1))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def threads(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the largest number of threads that a variable asks for, and its name; None without such variables.

    >>> threads({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "4"})
    (4, 'MKL_NUM_THREADS')
    """
    # OMP_NUM_THREADS may be a list, for nested regions.
    texts = [(environ.get(name, "").partition(",")[0].strip(), name) for name in THREADS]
    numbers = [(int(text), name) for text, name in texts if text.isdecimal() and int(text)]
    return max(numbers, default=None)


def share_one_core(masks: Sequence[frozenset[int]], there: int) -> bool:
    """Return whether all ranks of a node share a single core, although the node has more.

    >>> share_one_core([frozenset({3})] * 2, there=8), share_one_core([frozenset({2}), frozenset({3})], there=8)
    (True, False)
    """
    return len(masks) > 1 and there > 1 and len(frozenset().union(*masks)) == 1


def advice() -> str:
    """Return the advice for ranks that share a core."""
    return (
        "under Slurm ask for cores (--cpus-per-task, and export SRUN_CPUS_PER_TASK for srun), or "
        "srun --cpu-bind=cores; with Open MPI mpirun --bind-to none, with MPICH mpiexec -bind-to core"
    )


def fight_for_cores(masks: Sequence[frozenset[int]], threads: Sequence[int]) -> bool:
    """Return whether the ranks of a node start more threads than they have cores, although one each would fit better.

    >>> two = frozenset({0, 1})
    >>> fight_for_cores([two, two], [2, 2]), fight_for_cores([two, two], [1, 1])
    (True, False)
    """
    return len(masks) > 1 and max(threads) > 1 and sum(threads) > len(frozenset().union(*masks))


def blas() -> str:
    """Return the BLAS libraries of this process, with kernels and threads: matrix products depend on them."""
    import threadpoolctl

    infos = (info for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas")
    return "; ".join(
        sorted(
            f"{info['internal_api']} {info['version']} {info.get('architecture', '')}, {info['num_threads']} thread(s)"
            for info in infos
        )
    )


def warn_if_blas_differs(topology: Topology) -> None:
    """Warn on rank 0 if matrix products have other bits on some ranks. Collective."""
    ranks = grouped((text, rank) for rank, text in enumerate(topology.all_gather_object(blas())))
    if len(ranks) > 1 and topology.rank == 0:
        kinds = ", and ".join(f"rank(s) {ranges(which)}: {text}" for text, which in ranks.items())
        warnings.warn(
            f"ranks have different BLAS libraries, kernels or numbers of threads ({kinds}), so the weights of virtual "
            "replicas depend on the number of ranks: set OPENBLAS_NUM_THREADS and OPENBLAS_CORETYPE to the same on all",
            RuntimeWarning,
            stacklevel=level_of_program(),
        )


def warn_if_few_cores(topology: Topology) -> None:
    """Warn on rank 0, once, if the ranks of its node share one core, or their threads fight for cores. Collective."""
    global _checked
    if _checked or topology.size == 1:
        return
    _checked = True
    mask = cores()
    if mask is None or topology.rank not in topology.nodes[0]:
        return

    started = threads(os.environ)
    reports = topology.node.gather((mask, len(mask) if started is None else started[0]))
    if reports is None:
        return
    masks, counts = zip(*reports, strict=True)
    text = None
    if share_one_core(masks, cores_of_machine()):
        by = "" if started is None else f", each with {started[0]} thread(s) ({started[1]})"
        text = f"all {len(masks)} ranks of this node share core {ranges(mask)} of {cores_of_machine()}{by}: {advice()}"
    elif fight_for_cores(masks, counts):
        there = len(frozenset().union(*masks))
        text = (
            f"the {len(masks)} ranks of this node start up to {sum(counts)} threads of NumPy's BLAS on {there} cores, "
            f"and a step may take many times as long: set OMP_NUM_THREADS={max(1, there // len(masks))}, or start the "
            "program by mpistrat run, which does"
        )
    if text is not None:
        warnings.warn(f"{text}. `mpistrat check` shows more", RuntimeWarning, stacklevel=level_of_program())
