"""``mpistrat info``: what is installed, which MPI is used, and how ranks communicate."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
from typing import Any

import click

from mpistrat.cli import table
from mpistrat.cli.check.checks import installed_version, thread_level
from mpistrat.cli.run import job
from mpistrat.launch.launch import launcher_variables
from mpistrat.launch.machine_mpi import machine_mpi
from mpistrat.process import mpi
from mpistrat.representation import ranges
from mpistrat.runtime import affinity, environment
from mpistrat.runtime.topology import Topology
from mpistrat.version import __version__

_FILTERS = {"gzip": 1, "shuffle": 2, "fletcher32": 3, "szip": 4, "lzf": 32000}
# Names of distributions; the first is shown.
_PACKAGES = (
    *(["numpy"], ["mpi4py"], ["h5py"]),
    ["cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"],
    *(["torch"], ["jax"], ["tensorflow", "tensorflow-cpu"], ["keras"]),
)
_CHOICES = ("MPI4PY_MPIABI", "MPI4PY_LIBMPI")  # of the library that mpi4py loads; the first wins
_DEFAULT = " (default)"
_THREADS = re.compile(r"(OMP|OPENBLAS|MKL|BLIS|NUMEXPR)_NUM_THREADS$")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Show options that have their defaults, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all options.")
def info(everything: bool, as_json: bool) -> None:
    """Show what is installed, which MPI is used, how ranks communicate, and which options were changed.

    \b
    mpistrat info
    mpistrat run -n 4 -m mpistrat info --all
    """
    machine = machine_mpi(os.environ)
    library = {"of this machine": machine.name if machine else "none known"}
    library |= {name: os.environ[name] for name in _CHOICES if name in os.environ}
    report: dict[str, dict[str, Any]] = {"versions": _versions(), "MPI": library, "ranks": {}}
    rank, algorithms = _mpi(report["MPI"], report["ranks"])
    if rank != 0:
        return
    report["HDF5"] = _hdf5()
    report["machine"] = _machine()
    report["launcher"] = dict(launcher_variables(os.environ)) or {"variables": "none: not started by one"}
    report["options"] = _options()
    if as_json:
        click.echo(json.dumps({**report, "all-reduce": algorithms}, indent=2))
        return
    from rich.markup import escape

    if not everything:
        changed = {name: value for name, value in report["options"].items() if not value.endswith(_DEFAULT)}
        left = len(report["options"]) - len(changed)
        report["options"] = {**changed, "defaults": f"{left} options: see mpistrat info --all"}
    rows = table.grid("part", "fact", "value")
    for number, (title, section) in enumerate(report.items()):
        if number:
            rows.add_row()
        for first, (name, value) in zip([title, *[""] * len(section)], section.items(), strict=False):
            rows.add_row(first, name, escape(table.printable(table.text_of(value))))
    table.console().print(rows)
    click.echo(f"\nall-reduce\n{algorithms}")


def _options() -> dict[str, str]:
    """Return the options of ``mpistrat.rc``, and variables ``MPISTRAT_*`` that are not options."""
    rc, values = environment.rc, {}
    for option in environment.options():
        try:
            value = getattr(rc, option.attribute)
        except environment.OptionError as error:
            values[option.attribute] = f"not usable: {error}"
            continue
        shown = " ".join(sorted(value)) if isinstance(value, frozenset) else table.text_of(value)
        values[option.attribute] = f"{shown or 'none'} ({option.origin(rc)})"
    known = {option.variable for option in environment.options()}
    unknown = sorted(name for name in os.environ if name.startswith("MPISTRAT_") and name not in known)
    return {**values, "not options": " ".join(unknown)} if unknown else values


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "mpistrat": __version__}
    for name, *others in _PACKAGES:
        versions[name] = next(filter(None, map(installed_version, (name, *others))), "not installed")
    return versions


def _mpi(library: dict[str, Any], ranks: dict[str, Any]) -> tuple[int, str]:
    """Fill in the facts of MPI. Return the rank of this process and the table of algorithms."""
    try:
        MPI = mpi.start()
    except (ImportError, RuntimeError) as error:  # libmpi is missing, or each task is a job of its own
        library["library"] = f"not usable: {error}"
        return 0, "not available without MPI"
    from mpistrat.collectives.algorithms.choose import Choice

    try:
        topology = Topology.of(MPI.COMM_WORLD)
    except ValueError as error:  # an option is invalid, or differs between ranks
        ranks["ranks"] = f"not usable: {error}"
        return MPI.COMM_WORLD.rank, "none"
    choice = Choice.of(topology)
    choice.load_measured_costs(topology)
    library["library"] = MPI.Get_library_version().rstrip("\0").partition("\n")[0]
    library["file"] = mpi.loaded_library()
    library["standard"] = ".".join(map(str, MPI.Get_version()))
    library["threads"] = thread_level(MPI)
    per_node = [len(node) for node in topology.nodes]
    ranks["ranks"] = topology.size
    ranks["nodes"] = len(topology.nodes)
    ranks["ranks per node"] = per_node[0] if len(set(per_node)) == 1 else per_node
    ranks["devices"] = _devices()
    ranks["arrays on GPUs"], ranks["device pointers"] = _routes(topology)
    return topology.rank, choice.describe() if topology.size > 1 else "one rank: nothing to exchange"


def _routes(topology: Any) -> tuple[str, str]:
    """Return the route of arrays on GPUs with the reasons against others, and the operations on device pointers."""
    from mpistrat.cluster_resolver.own_device import own_device
    from mpistrat.collectives.gpu.all_reduce import obstacles
    from mpistrat.collectives.gpu.pointers import Refusals

    try:
        device = own_device(topology, "cuda").use()
    except RuntimeError as error:
        return f"none ({error})", "none"
    if topology.size == 1:
        return "one rank: nothing to exchange", "none"
    verdicts = obstacles(topology, device)
    chosen = next(name for name, text in verdicts.items() if not text)
    reasons = "; ".join([chosen, *(f"not {name}: {text}" for name, text in verdicts.items() if text)])
    pointers = topology.slot(Refusals)[device.index]
    moved = " ".join(name for name, text in pointers.items() if not text)
    refused = dict.fromkeys(text for text in pointers.values() if text)
    return reasons, "; ".join([moved or "none", *refused])


def _devices() -> str:
    """Return the GPUs of this node as text, or the reason why it has no usable GPU."""
    from mpistrat.arrays.device import bounds, cupy_for, gpu_count

    try:
        count = gpu_count("a GPU")
        runtime = cupy_for("a GPU").cuda.runtime
        names = [f"{runtime.getDeviceProperties(gpu)['name'].decode()} ({bounds(gpu)})" for gpu in range(count)]
    except RuntimeError as error:  # also errors of CUDA
        return f"cpu ({error})"
    return ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names))


def _hdf5() -> dict[str, Any]:
    try:
        import h5py
    except ImportError as error:
        return {"library": f"not usable: {error}"}
    filters = [name for name, code in _FILTERS.items() if h5py.h5z.filter_avail(code)]
    plugins = importlib.util.find_spec("hdf5plugin") is not None
    return {
        "library": h5py.version.hdf5_version,
        "mpio": bool(h5py.get_config().mpi),
        "filters": " ".join(filters),
        "more filters": "with `import hdf5plugin`" if plugins else "hdf5plugin is not installed",
    }


def _machine() -> dict[str, Any]:
    shared = job.shared_memory()
    facts: dict[str, Any] = {
        "host": platform.node(),
        "cores": job.cores(),
        "affinity": ranges(affinity.cores() or ()) or "unknown",
        "/dev/shm free": "none" if shared is None else table.amount(shared["free"]),
    }
    threads = {name: value for name, value in sorted(os.environ.items()) if _THREADS.match(name)}
    facts["BLAS"] = affinity.blas() or "does not tell"
    return {**facts, **(threads or {"threads": "no *_NUM_THREADS set: every rank may use all cores"})}
