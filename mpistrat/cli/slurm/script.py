"""The text of a batch script. Those in ``slurm/`` of the source tree come from here, too."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpistrat.runtime.process.exit_status import RESTART

_THREADS = " ".join(f'{name}_NUM_THREADS="$threads"' for name in ("OMP", "OPENBLAS", "MKL"))
_COLUMN = 36  # of the comments


@dataclass(frozen=True)
class Resources:
    """What a job asks for, or a component of a heterogeneous one.

    Attributes
    ----------
    nodes : int
    ntasks : int or None
        Ranks in all.
    ntasks_per_node : int or None
        Ranks on each node; beside ``ntasks`` the most.
    cpus_per_task : int
        Cores of a rank.
    gpus_per_node : str or None
        A number, or a kind and a number.
    options : sequence of tuple of str
        Further options of sbatch, and a comment for each.
    """

    nodes: int = 1
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int = 1
    gpus_per_node: str | None = None
    options: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Script:
    """A batch script.

    Attributes
    ----------
    written_by : str
        The command that makes this script.
    components : sequence of Resources
        One, or those of a heterogeneous job.
    name : str
        Of the job.
    time : str
        The limit of the job, in a form that sbatch takes.
    program : sequence of str
        The arguments of Python.
    python : str
        A path, relative to the directory where ``sbatch`` is called if it is not absolute, or a bare name
        that is looked up in PATH.
    mpi : str
        What ``srun --mpi=`` gets; not used with ``mpirun``.
    mpirun : bool
        Start the ranks with mpirun.
    array : str or None
        The indices of a job array.
    signal : tuple of (str, int), or None
        Signal that the ranks get before the limit, and how many seconds before it. Makes the job one that can
        be requeued.
    container : str or None
        Image of Apptainer; a path as ``python``, or an address such as ``docker://name``.
    options : sequence of tuple of str
        Further options of sbatch for all components, and a comment for each.
    """

    written_by: str
    components: Sequence[Resources]
    name: str
    time: str
    program: Sequence[str]
    python: str
    mpi: str
    mpirun: bool = False
    array: str | None = None
    signal: tuple[str, int] | None = None
    container: str | None = None
    options: Sequence[tuple[str, str]] = ()

    @property
    def heterogeneous(self) -> bool:
        """Whether the job has several components."""
        return len(self.components) > 1

    @property
    def gpus(self) -> bool:
        """Whether the job has GPUs."""
        return any(component.gpus_per_node for component in self.components)


def text(script: Script) -> str:
    """The script, to its last line break."""
    parts = [_head(script), _directives(script), _places(script), _environment(script), _start(script)]
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(script: Script) -> Iterator[str]:
    started = "by mpirun" if script.mpirun else "by srun"
    inside = ", in a container" if script.container is not None else ""
    yield "#!/bin/bash"
    yield f"# A program of mpistrat under SLURM: each task is one rank, started {started}{inside}."
    yield "#"
    program = script.program[0] if script.program[0] != "-m" else f"-m {script.program[1]}"
    yield f"#   {'sbatch THIS_FILE':<40} {program}"
    yield f"#   {'sbatch THIS_FILE other.py --epochs 10':<40} another program"
    yield f"#   {'sbatch --time=10 THIS_FILE':<40} options of sbatch win over the lines below"
    yield "#"
    yield f"# {script.written_by}"
    yield "#"


def _directives(script: Script) -> Iterator[str]:
    def line(option: str, comment: str = "") -> str:
        return f"{f'#SBATCH {option}':<{_COLUMN}}{f' # {comment}' if comment else ''}".rstrip()

    yield line(f"--job-name={script.name}", "what squeue calls it; %x below")
    yield line(f"--time={script.time}", "the limit; a job that asks for less starts earlier")
    if script.array is not None:
        yield line(f"--array={script.array}", "a job for each index; `%4` behind it: four at a time")
        yield line("--output=%x-%A_%a.out", "what all ranks print: name, number and index of the job")
    else:
        yield line("--output=%x-%j.out", "what all ranks print: name and number of the job")
    if script.signal is not None:
        signal, seconds = script.signal
        yield line("--requeue", "the job may go back into the queue")
        yield line(
            f"--signal={signal}@{seconds}", "ranks get it so many seconds before the limit, or 60 more"
        )
        yield line("--open-mode=append", "all runs of the job write into one file")
    for option, comment in script.options:
        yield line(option, comment)
    for number, component in enumerate(script.components):
        if number:
            yield line("hetjob", "the next component: its ranks follow those above")
        yield line(f"--nodes={component.nodes}", "machines")
        if component.ntasks is not None:
            yield line(f"--ntasks={component.ntasks}", "ranks in all")
        if component.ntasks_per_node is not None:
            most = "the most " if component.ntasks is not None else ""
            yield line(f"--ntasks-per-node={component.ntasks_per_node}", f"{most}ranks on a node")
        yield line(
            f"--cpus-per-task={component.cpus_per_task}", "cores of a rank: so many threads has its NumPy"
        )
        if component.gpus_per_node is not None:
            yield line(
                f"--gpus-per-node={component.gpus_per_node}",
                "all ranks of a node see them, each takes its own",
            )
        for option, comment in component.options:
            yield line(option, comment)
    yield ""


def _places(script: Script) -> Iterator[str]:
    yield "# `module load` what your site's MPI and Python need here: many modules fail after the next line."
    yield "set -euo pipefail"
    yield ""
    if script.container is not None:
        yield f"image=${{IMAGE:-{_file(script.container)}}}"
        yield "# The Python that has mpistrat, in the image."
    else:
        yield "# The Python that has mpistrat."
    yield f"python=${{PYTHON:-{_program(script.python)}}}"
    if script.mpirun:
        yield "# Its own mpirun, else the one of the modules."
        yield 'PATH=$(dirname "$(command -v "$python")"):$PATH'
    else:
        yield "# How srun tells a rank who it is: pmix for Open MPI, pmi2 for MPICH. `srun --mpi=list` shows them."
        yield f"mpi=${{MPISTRAT_SRUN_MPI:-{script.mpi}}}"
        yield "# The other fences of its PMIx let a rank leave MPI_Init too early at times, and Open MPI crashes then."
        yield "export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}"
    yield ""


def _program(path: str) -> str:
    """A program for the shell: a bare name is looked up in PATH."""
    return _file(path) if "/" in path else shlex.quote(path)


def _file(path: str) -> str:
    """A file, or the address of an image, for the shell."""
    return (
        shlex.quote(path)
        if path.startswith("/") or "://" in path
        else f"$SLURM_SUBMIT_DIR/{shlex.quote(path)}"
    )


def _environment(script: Script) -> Iterator[str]:
    if not script.heterogeneous:
        if script.mpirun:
            yield "# mpirun starts one daemon on each node by srun, which must get all cores of the node."
            yield "unset SRUN_CPUS_PER_TASK"
            yield "threads=${SLURM_CPUS_PER_TASK:-1}"
        else:
            yield "# srun does not inherit --cpus-per-task since SLURM 22.05, and a rank would get one core."
            yield "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"
            yield "threads=$SRUN_CPUS_PER_TASK"
        yield f"export {_THREADS}"
        yield ""
    yield "# Output as it comes, and the Python stack of a rank that crashes."
    yield "export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1"
    if script.container is not None:
        yield "# A container of each rank: no files of slurmd, and no reads in the memory of other ranks."
        yield "export PMIX_MCA_gds=hash OMPI_MCA_smsc=^cma OMPI_MCA_btl_vader_single_copy_mechanism=none"
    yield ""
    yield "if [ $# -eq 0 ]; then"
    yield f"    set -- {shlex.join(script.program)}"
    yield "fi"
    if script.array is not None:
        yield "# In an argument %a is the index, and %A the number of the array, as in --output."
        yield 'set -- "${@//\\%a/$SLURM_ARRAY_TASK_ID}"'
        yield 'set -- "${@//\\%A/$SLURM_ARRAY_JOB_ID}"'
    yield ""


def _start(script: Script) -> Iterator[str]:
    if script.mpirun:
        yield 'exec mpirun -n "$SLURM_NTASKS" --bind-to none "$python" "$@"'
        return
    command = '"$python" "$@"'
    if script.container is not None:
        nvidia = " --nv" if script.gpus else ""
        yield "# The image sees the directory of the job beside its own files; --bind adds further ones."
        yield f'container=(apptainer exec{nvidia} --bind "$SLURM_SUBMIT_DIR" --pwd "$PWD" "$image")'
        command = f'"${{container[@]}}" {command}'
    if script.heterogeneous:
        yield "# One job of MPI over all components, each with its own number of cores."
        yield "command=()"
        yield "for ((group = 0; group < SLURM_HET_SIZE; group++)); do"
        yield "    cpus=SLURM_CPUS_PER_TASK_HET_GROUP_$group"
        yield "    threads=${!cpus:-1}"
        yield '    [ "$group" -eq 0 ] || command+=(:)'
        yield '    command+=(--het-group="$group" --cpus-per-task="$threads")'
        yield f"    command+=(env {_THREADS})"
        yield f"    command+=({command})"
        yield "done"
        command = '"${command[@]}"'
    if script.signal is None:
        yield "# A task that ends with an error takes the others with it."
        yield f'exec srun --mpi="$mpi" --kill-on-bad-exit=1 {command}'
        return
    yield "# A task that ends takes the others with it, but leaves them a minute to end as well, and with their status."
    yield "status=0"
    yield f'srun --mpi="$mpi" --kill-on-bad-exit=0 --wait=60 {command} || status=$?'
    where = "in the image" if script.container is not None else "on the nodes, say"
    yield f"# {RESTART}: the ranks have saved, but could not requeue the job: there is no scontrol {where}."
    yield "# Not after any other status: a job that was cancelled ends with another one, and stays away."
    yield f'if [ "$status" -eq {RESTART} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID" || :'
    yield "fi"
    yield 'exit "$status"'
