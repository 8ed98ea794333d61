"""The checks of `mpistrat check`: what each rank reports, and the verdict. A new check is a line in `CHECKS`."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from mpistrat.cli.check import network
from mpistrat.cli.check.job import START, Check, CheckedJob, CheckOptions, Finding, Severity, TimedExchange
from mpistrat.cli.run.job import shared_memory
from mpistrat.cli.table import amount
from mpistrat.launch.launch import library_family, library_name
from mpistrat.launch.launchers import SRUN
from mpistrat.launch.machine_mpi import foreign_wheel, without_library
from mpistrat.process import mpi
from mpistrat.representation import few, grouped, ranges
from mpistrat.runtime import affinity
from mpistrat.runtime.agreement.operation import ranks_in_words

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_MOST = 6  # lines of troubles
_PACKAGES = ("mpistrat", "mpi4py", "numpy", "h5py")
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_LEAST_SHARED, _SHARED_PER_RANK = 128 << 20, 32 << 20  # bytes of /dev/shm, of a node and for each of its ranks
_VISIBLE_TIMEOUT_S = 3.0  # until other nodes must see a new file
_LITTLE = 1 << 30  # bytes that a file system should have free
_ASK = (
    "ask for GPUs in the srun line too (--gpus-per-node, or --gres=gpu:N), check --gpu-bind, and do not set "
    "CUDA_VISIBLE_DEVICES by hand"
)


def judge_start(job: CheckedJob) -> Finding:
    if job.alone is not None:
        return job.alone
    if job.troubles:
        return Finding("\n".join(_troubles(job)), Severity.FIX, _advice(job))
    return Finding(f"{job.size} rank{'s' * (job.size > 1)}, one job", Severity.OK)


def _troubles(job: CheckedJob) -> list[str]:
    """Return one line per problem, with all ranks that have it."""
    by_blame = sorted(job.troubles.items(), key=lambda item: (item[1].blame, item[0]))
    # Without numbers: the same trouble has other addresses and process ids on each rank.
    groups = grouped(((trouble.blame, _NUMBERS.sub("", trouble.text)), rank) for rank, trouble in by_blame)
    lines = []
    for ranks in groups.values():
        hosts = dict.fromkeys(job.facts[rank]["host"] for rank in ranks if rank in job.facts)
        on = f" ({few([*hosts], 4)})" if hosts else ""
        lines.append(f"{ranks_in_words(ranks)}{on}: {job.troubles[ranks[0]].text}")
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"... and {len(lines) - _MOST} other problems"]


def _advice(job: CheckedJob) -> str:
    from mpistrat.launch.srun_types import srun_plugin

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
        return {**facts, "error": str(error), "remedy": without_library(os.environ)}
    found, file = describe(MPI.Get_library_version()), mpi.loaded_library()
    return {**facts, **found, "file": file, "foreign": foreign_wheel(found["family"], file, os.environ)}


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
    return len({report["library"] for report in facts.values() if "library" in report}) > 1


def judge_library(job: CheckedJob) -> Finding:
    facts = job.of("library")
    for rank, report in facts.items():
        if "error" in report:
            return Finding(
                f"rank {rank} ({job.facts[rank]['host']}) cannot load an MPI library: {report['error']}",
                Severity.FIX,
                report["remedy"],
            )
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    if mixed(facts):
        return Finding(
            _groups(job, "library", with_file=True),
            Severity.FIX,
            "the ranks load different MPI libraries: give all nodes the same environment (modules, PATH, "
            "LD_LIBRARY_PATH, the same Python)",
        )
    first = next(iter(facts.values()))
    for name in ("python", *_PACKAGES):
        if len({report[name] for report in facts.values()}) > 1:
            return Finding(f"{name}: {_groups(job, name)}", Severity.FIX, "give all ranks the same Python environment")
    levels = (report["threads"] for report in facts.values() if "threads" in report)
    level = min(levels, key=_LEVELS.index, default=None)
    text = f"{first['library']}, {first['file']}" + (f", threads {level}" if level else "")
    if first.get("foreign"):
        return Finding(text, Severity.LOOK, first["foreign"])
    if level in ("SINGLE", "FUNNELED"):
        return Finding(
            text, Severity.LOOK, "call MPI and strategies from the main thread only; is MPI4PY_RC_THREAD_LEVEL set?"
        )
    return Finding(text, Severity.OK)


def _groups(job: CheckedJob, fact: str, with_file: bool = False) -> str:
    """Return one line per value of a fact, with the ranks that have it."""
    groups = grouped(
        (f"{report[fact]} ({report['file']})" if with_file else report[fact], rank)
        for rank, report in job.of("library").items()
        if fact in report
    )
    return "\n".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in groups.items())


def compare_layout(exchange: TimedExchange, options: CheckOptions) -> Any:
    """Return the first rank where environment and MPI contradict each other, with text and cause, or None."""
    from mpistrat.cluster_resolver import resolve
    from mpistrat.cluster_resolver.compare import differences, facts_of_resolver
    from mpistrat.cluster_resolver.mpi import placement_in

    try:
        problem = differences(facts_of_resolver(resolve()), placement_in(exchange.topology))
    except (RuntimeError, ValueError) as error:
        problem = f"the environment cannot be read: {error}", "mpistrat hosts shows what is read"
    problems = exchange.gather(problem)
    if problems is None:
        return None
    return next(([rank, *texts] for rank, texts in enumerate(problems) if texts is not None), None)


def judge_layout(job: CheckedJob) -> Finding:
    nodes = job.nodes()
    counts = [len(ranks) for ranks in nodes.values()]
    per_node = f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts[:16]))
    text = f"{len(nodes)} node{'s' * (len(nodes) > 1)}, ranks: {per_node}"
    if job.exchanged.get("layout"):
        rank, contradiction, cause = job.exchanged["layout"]
        return Finding(f"{text}\nrank {rank}: {contradiction}", Severity.FIX, cause)
    if "layout" not in job.exchanged:
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
    for host, ranks in job.nodes().items():
        here = [facts[rank] for rank in ranks if rank in facts]
        if not here:
            continue
        masks = [frozenset(report["cores"]) for report in here]
        union = frozenset[int]().union(*masks)
        total = max(report["there"] for report in here)
        if affinity.share_one_core(masks, total):
            return Finding(
                f"{host}: all {len(here)} ranks share core {ranges(union)} of {total}", Severity.FIX, affinity.advice()
            )
        threads = sum(report["threads"] or len(report["cores"]) for report in here)  # else a BLAS takes all cores
        if len(here) > len(union) and not crowded:
            crowded = f"{host}: {len(here)} ranks on {len(union)} of {total} cores"
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


def judge_shared_memory(job: CheckedJob) -> Finding:
    facts = job.of("shared_memory")
    if not facts:
        return Finding("there is no /dev/shm", Severity.UNKNOWN)
    worst: tuple[float, str, int, Any] | None = None
    for host, ranks in job.nodes().items():
        here = [facts[rank] for rank in ranks if rank in facts]
        if here:
            wanted = max(_LEAST_SHARED, _SHARED_PER_RANK * len(ranks))
            least = min(here, key=lambda report: report["free"])
            if worst is None or least["free"] / wanted < worst[0]:
                worst = (least["free"] / wanted, host, wanted, least)
    assert worst is not None
    ratio, host, wanted, least = worst
    text = f"{host}: {amount(least['free'])} free of {amount(least['total'])}"
    if ratio >= 1:
        return Finding(text, Severity.OK)
    why = (
        "give the container more space (docker --shm-size=8g, or --ipc=host)"
        if least["total"] < wanted
        else "remove files that killed jobs left there"
    )
    return Finding(f"{text}; its ranks need {amount(wanted)}", Severity.FIX, why)


def look_at_gpus(options: CheckOptions) -> dict[str, Any]:
    from mpistrat.cluster_resolver import gpus, resolve

    seen = gpus.visible(os.environ)
    own = assigned = None
    with contextlib.suppress(RuntimeError, ValueError):
        placement = resolve().placement
        own = placement.gpu
        assigned = gpus.on_node(os.environ, placement.local_size)
    names = None if seen is None else _on_the_node(list(seen.ids), os.environ.get("SLURM_STEP_GPUS", ""))
    if seen is not None and names is not None and own in seen.ids:
        own = names[seen.ids.index(own)]
    return {
        "seen": names,
        "variable": "" if seen is None else f"{seen.variable}={os.environ[seen.variable]}",
        "own": own,
        "given": assigned and assigned[0],
        "there": _gpus_of_driver(),
    }


def _on_the_node(seen: list[str], of_task: str) -> list[str]:
    """Return the GPUs by their numbers on the node: with cgroups each task numbers its own GPUs from 0."""
    numbers = of_task.split(",")
    return numbers if len(numbers) == len(seen) and all(number.isdecimal() for number in (*numbers, *seen)) else seen


def _gpus_of_driver() -> int:
    """Return the number of GPUs of the driver of this node."""
    for folder, pattern in (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/sys/class/kfd/kfd", "gpu")):
        count = len(list(Path(folder).glob(pattern))) if os.path.isdir(folder) else 0
        if count:
            return count
    return 0


def judge_gpus(job: CheckedJob) -> Finding:
    facts = job.of("gpus")
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    anywhere = any(report["seen"] for report in facts.values())
    for host, ranks in job.nodes().items():
        here = {rank: facts[rank] for rank in ranks if rank in facts}
        if not here:
            continue
        assigned = max((report["given"] or 0) for report in here.values())
        blind = [rank for rank, report in here.items() if report["seen"] is not None and not report["seen"]]
        # Without a variable a rank sees all GPUs of the driver.
        blind += [rank for rank, report in here.items() if report["seen"] is None and assigned and not report["there"]]
        if blind and (assigned or anywhere):
            which = here[blind[0]]["variable"] or "CUDA_VISIBLE_DEVICES is not set"
            has = f"the job has {assigned} there" if assigned else "other ranks see some"
            return Finding(
                f"{host}: {ranks_in_words(blind)} {_see(blind)} no GPU ({which}), although {has}", Severity.FIX, _ASK
            )
        seen = {gpu for report in here.values() for gpu in report["seen"] or ()}
        if 0 < len(seen) < assigned and _numbered_anew(here):
            return Finding(
                f"{host}: each rank sees GPU {', '.join(sorted(seen))}, of {assigned} that the job has there: all the "
                "same GPUs, or each rank its own if cgroups number them from 0",
                Severity.UNKNOWN,
            )
        if seen and len(seen) < assigned:
            return Finding(
                f"{host}: its ranks see GPU {', '.join(sorted(seen))} of {assigned} that the job has there",
                Severity.FIX,
                "start one rank per GPU (--ntasks-per-node), or ask for fewer GPUs; " + _ASK,
            )
        slices = [rank for rank, report in here.items() if _several_slices(report["seen"])]
        if slices:
            return Finding(
                f"{host}: {ranks_in_words(slices)} {_see(slices)} several MIG slices, but CUDA uses the first only",
                Severity.FIX,
                "let the scheduler assign them (--gpus-per-task=1), or use SlurmClusterResolver(auto_set_gpu=True)",
            )
    shared = _shared(job, facts)
    if shared:
        return Finding(shared, Severity.LOOK, "start one rank per GPU: NCCL refuses two ranks on one GPU")
    if not anywhere:
        count = max(report["there"] for report in facts.values())
        if count and any(report["seen"] is not None for report in facts.values()):
            return Finding(f"no rank sees any of the {count} GPUs of its node", Severity.LOOK, _ASK)
        return Finding(f"{count} on a node, all visible" if count else "none", Severity.OK)
    return Finding(f"{len(next(iter(facts.values()))['seen'] or ())} visible to rank {next(iter(facts))}", Severity.OK)


def _see(ranks: list[int]) -> str:
    return "sees" if len(ranks) == 1 else "see"


def _numbered_anew(here: dict[int, Any]) -> bool:
    """Return whether all ranks number their GPUs from 0, so that numbers do not identify GPUs."""
    names = [report["seen"] for report in here.values()]
    return len(names) > 1 and all(numbers == [str(i) for i in range(len(names[0] or ()))] for numbers in names)


def _several_slices(seen: list[str] | None) -> bool:
    return len(seen or ()) > 1 and any(gpu.startswith("MIG-") for gpu in seen or ())


def _shared(job: CheckedJob, facts: dict[int, Any]) -> str:
    for host, ranks in job.nodes().items():
        users = grouped((facts[rank]["own"], rank) for rank in ranks if rank in facts)
        for gpu, several in users.items():
            if len(several) > 1 and gpu is not None:
                return f"{host}: {ranks_in_words(several)} share GPU {gpu}"
    return ""


def look_at_data(options: CheckOptions) -> dict[str, Any] | None:
    if options.data is None or not _first_on_node():
        return None
    folder = Path(options.data).absolute()
    facts: dict[str, Any] = {"folder": str(folder), "files": _file_system(folder)}
    if not folder.is_dir():
        return {**facts, "missing": True}
    # Others may write to this folder: a name that they can guess could be a link to a file of this user.
    own = folder / f".mpistrat-check-{secrets.token_hex(8)}.h5"
    try:
        descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        existing = next(folder.glob("*.h5"), None)
        facts["unwritable"] = str(error.strerror)
        return facts if existing is None else {**facts, **_locked(existing, "r")}
    try:
        with open(descriptor, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())  # NFS reports a full disk or a quota here, not at the write
        facts.update(_locked(own, "w"))
        status = os.statvfs(folder)
        facts["free"] = status.f_bavail * status.f_frsize
    except OSError as error:
        facts["unwritable"] = str(error.strerror or error)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return facts


def _first_on_node() -> bool:
    """Return whether this rank tests for its node: the first one, or every rank if that is not known."""
    from mpistrat.cluster_resolver import resolve

    try:
        return resolve().placement.local_rank in (0, None)
    except (RuntimeError, ValueError):
        return True


def _locked(path: Path, mode: str) -> dict[str, str]:
    """Open a file with h5py and a lock. Return the error, if there is one."""
    import h5py

    try:
        with h5py.File(path, mode, locking=True) as file:
            if mode == "w":
                file["x"] = 1
    except OSError as error:
        return {"lock": " ".join(str(error).split())}
    return {}


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a directory."""
    best, kind = "", "?"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text("utf-8", errors="replace").splitlines():
            _, mount, name, *_ = line.split()
            if (f"{folder}/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
                best, kind = mount, name
    return kind


def compare_data(exchange: TimedExchange, options: CheckOptions) -> list[int] | None:
    """Return the ranks that do not see a new file of rank 0 in the directory."""
    path: Path | None = None
    if exchange.rank == 0 and options.data is not None:
        path = Path(options.data).absolute() / f".mpistrat-check-{secrets.token_hex(8)}"
        try:
            path.touch(exist_ok=False)
        except OSError:
            path = None
    name = exchange.broadcast(None if path is None else str(path))
    sees = True
    if name is not None and exchange.rank in exchange.leaders:
        end = time.monotonic() + _VISIBLE_TIMEOUT_S
        while not (sees := os.path.exists(name)) and time.monotonic() < end:
            time.sleep(0.05)
    answers = exchange.gather(sees)
    if path is not None:
        path.unlink(missing_ok=True)
    return None if answers is None else [rank for rank, seen in enumerate(answers) if not seen]


def judge_data(job: CheckedJob) -> Finding:
    facts = job.of("data")
    if job.options.data is None:
        return Finding("no directory given", Severity.UNKNOWN, "mpistrat check --data DIR")
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    for rank, report in facts.items():
        label = f"{report['folder']} on {job.facts[rank]['host']} ({report['files']})"
        if report.get("missing"):
            return Finding(f"{label}: there is no such directory", Severity.FIX, "mount it on all nodes of the job")
        if "lock" in report:
            return Finding(
                f"{label}: HDF5 cannot lock files: {report['lock']}",
                Severity.FIX,
                "export HDF5_USE_FILE_LOCKING=BEST_EFFORT (or mount it with flock), and let one process write a file",
            )
        if "unwritable" in report:
            return Finding(
                f"{label}: not writable: {report['unwritable']}",
                Severity.FIX,
                "checkpoints and caches cannot be written there: use another directory, or let it be mounted "
                "read-write on the compute nodes",
            )
    blind = job.exchanged.get("data")
    if blind:
        hosts = ", ".join(job.facts[rank]["host"] for rank in blind[:4])
        return Finding(
            f"a file that rank 0 made is not seen on {hosts}",
            Severity.FIX,
            "each node has its own directory of this name: use a shared file system",
        )
    first = next(iter(facts.values()))
    text = f"{first['folder']} ({first['files']}): writable, locks work, {amount(first['free'])} free"
    if first["free"] < _LITTLE:
        return Finding(text, Severity.LOOK, "little space is left for checkpoints")
    return Finding(text, Severity.OK)


CHECKS = (
    Check("start", "one MPI job", judge_start),
    Check("library", "MPI library", judge_library, loaded_library),
    Check("layout", "ranks per node", judge_layout, exchange=compare_layout),
    Check("binding", "cores and threads", judge_binding, own_cores),
    Check("gpus", "GPUs", judge_gpus, look_at_gpus),
    Check("shared_memory", "/dev/shm", judge_shared_memory, lambda options: shared_memory()),
    Check("data", "data directory", judge_data, look_at_data, compare_data),
    Check("clocks", "clocks", network.judge_clocks, exchange=network.compare_clocks),
    Check("network", "between nodes", network.judge_network, exchange=network.measure_network),
)
