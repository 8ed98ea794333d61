"""The text of a batch script. The scripts in ``slurm/`` of the source tree are made here, too."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpistrat.launch.launch import HANG, RESTART
from mpistrat.process.failure import ENDS

_THREADS = " ".join(f'{name}_NUM_THREADS="$threads"' for name in ("OMP", "OPENBLAS", "MKL"))
_MPI_ERR_UNKNOWN = 14
_COLUMN = 36  # where comments begin


@dataclass(frozen=True)
class Resources:
    """The resources of a job, or of a component of a heterogeneous job.

    ``ntasks`` is the total number of ranks. ``ntasks_per_node`` is the number per node; the maximum if ``ntasks`` is
    given too. ``cpus_per_task`` are cores per rank. ``gpus_per_node`` is a number, or a type and a number. ``options``
    are further options of sbatch, each with a comment.
    """

    nodes: int = 1
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int = 1
    gpus_per_node: str | None = None
    options: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Script:
    """A batch script that the command ``written_by`` writes.

    ``components`` has several resources for a heterogeneous job. ``time`` is the limit of the job, in a format of
    sbatch. ``program`` has the arguments of ``python``: a path, relative to the directory where ``sbatch`` is called,
    or a name without a slash, which is looked up in PATH.

    ``mpi`` is the value of ``srun --mpi=``; it is not used with ``mpirun``, which starts the ranks with mpirun.
    ``array`` has the indices of a job array. ``signal`` is what the ranks get before the time limit, and how many
    seconds before. The job can then be requeued. With ``farm`` the batch shell gets it. ``elastic``, ``"same"`` or
    ``"fewer"``, starts the ranks again after a loss, on as many nodes, of which ``spare`` more are allocated, or on the
    nodes that are left. ``container`` is an Apptainer image: a path as for ``python``, or an address such as
    ``docker://name``. ``options`` are further ones of sbatch for all components, each with a comment.
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
    farm: bool = False
    elastic: str | None = None
    spare: int = 0
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
    """Return the text of the script."""
    sections = [_head(script), _directives(script), _paths(script), _environment(script), _start(script)]
    return "\n".join(line for section in sections for line in section) + "\n"


def _head(script: Script) -> Iterator[str]:
    started = "by mpirun" if script.mpirun else "by srun"
    inside = ", in a container" if script.container is not None else ""
    program = script.program[0] if script.program[0] != "-m" else f"-m {script.program[1]}"
    yield f"""\
#!/bin/bash
# A program of mpistrat under SLURM: each task is one rank, started {started}{inside}.
#
#   sbatch THIS_FILE                         {program}
#   sbatch THIS_FILE other.py --epochs 10    another program
#   sbatch --time=10 THIS_FILE               options of sbatch override the lines below
#
# {script.written_by}
#"""


def _directives(script: Script) -> Iterator[str]:
    def line(option: str, comment: str = "") -> str:
        return f"{f'#SBATCH {option}':<{_COLUMN}}{f' # {comment}' if comment else ''}".rstrip()

    yield line(f"--job-name={script.name}", "name in squeue; %x below")
    yield line(f"--time={script.time}", "time limit; a shorter job may start earlier")
    if script.array is not None:
        yield line(f"--array={script.array}", "one job per index; append %4 to run four at a time")
        yield line("--output=%x-%A_%a.out", "output of all ranks: name, number and index of the job")
    else:
        yield line("--output=%x-%j.out", "output of all ranks: name and number of the job")
    if script.signal is not None:
        signal, seconds = script.signal
        yield line("--requeue", "the job may be requeued")
        to = "this shell" if script.farm else "the ranks"
        yield line(
            f"--signal={'B:' * script.farm}{signal}@{seconds}",
            f"signal to {to}, seconds before the limit (at most 60 s earlier)",
        )
        yield line("--open-mode=append", "all runs of the job write to one file")
    if script.elastic is not None:
        yield line("--no-kill", "the job goes on without a node that fails")
    for option, comment in script.options:
        yield line(option, comment)
    for number, component in enumerate(script.components):
        if number:
            yield line("hetjob", "the next component: its ranks follow those above")
        spare = f", {script.spare} of them spare" if script.spare else ""
        yield line(f"--nodes={component.nodes + script.spare}", f"machines{spare}")
        if component.ntasks is not None:
            yield line(f"--ntasks={component.ntasks}", "total number of ranks")
        if component.ntasks_per_node is not None:
            most = "maximum number of " if component.ntasks is not None else ""
            yield line(f"--ntasks-per-node={component.ntasks_per_node}", f"{most}ranks per node")
        yield line(f"--cpus-per-task={component.cpus_per_task}", "cores per rank; NumPy uses as many threads")
        if component.gpus_per_node is not None:
            yield line(f"--gpus-per-node={component.gpus_per_node}", "all ranks of a node see them, each uses its own")
        for option, comment in component.options:
            yield line(option, comment)
    yield ""


def _paths(script: Script) -> Iterator[str]:
    # A name without a slash is looked up in PATH.
    python = _file(script.python) if "/" in script.python else shlex.quote(script.python)
    yield "# Put `module load` for MPI and Python here: many modules fail after the next line.\nset -euo pipefail\n"
    if script.container is not None:
        yield f"image=${{IMAGE:-{_file(script.container)}}}"
    yield f"# The Python that has mpistrat{', in the image' * (script.container is not None)}."
    yield f"python=${{PYTHON:-{python}}}"
    if script.mpirun:
        yield """\
# The mpirun of this Python, else that of the modules.
PATH=$(dirname "$(command -v "$python")"):$PATH
"""
    else:
        yield f"""\
# How srun starts MPI: pmix for Open MPI, pmi2 for MPICH. `srun --mpi=list` shows all types.
mpi=${{MPISTRAT_SRUN_MPI:-{script.mpi}}}
# Other fences of SLURM's PMIx can let a rank leave MPI_Init too early, which crashes Open MPI.
export SLURM_PMIX_FENCE=${{SLURM_PMIX_FENCE:-ring}}
"""


def _file(path: str) -> str:
    """Quote a file, or the address of an image, for the shell."""
    return shlex.quote(path) if path.startswith("/") or "://" in path else f"$SLURM_SUBMIT_DIR/{shlex.quote(path)}"


def _environment(script: Script) -> Iterator[str]:
    if not script.heterogeneous:
        yield _THREADS_UNDER_MPIRUN if script.mpirun else _THREADS_UNDER_SRUN
        yield f"export {_THREADS}\n"
    yield "# Unbuffered output, and the Python stack of a rank that crashes."
    yield "export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1"
    if script.container is not None:
        yield """\
# Each rank has its own container: files of slurmd and memory of other ranks are out of reach.
export PMIX_MCA_gds=hash OMPI_MCA_smsc=^cma OMPI_MCA_btl_vader_single_copy_mechanism=none"""
    yield f"\nif [ $# -eq 0 ]; then\n    set -- {shlex.join(script.program)}\nfi"
    if script.array is not None:
        yield _INDEX_IN_ARGUMENTS
    yield ""


def _start(script: Script) -> Iterator[str]:
    if script.mpirun:
        by_mpirun = 'mpirun -n "$SLURM_NTASKS" --bind-to none "$python" "$@"'
        yield _farm(script, by_mpirun) if script.farm else f"exec {by_mpirun}"
        return
    command = '"$python" "$@"'
    if script.container is not None:
        nvidia = " --nv" if script.gpus else ""
        yield "# The container sees its own files and the directory of the job; --bind adds other directories."
        yield f'container=(apptainer exec{nvidia} --bind "$SLURM_SUBMIT_DIR" --pwd "$PWD" "$image")'
        command = f'"${{container[@]}}" {command}'
    if script.heterogeneous:
        yield f"""\
# One MPI job over all components, each with its own number of cores per rank.
command=()
for ((group = 0; group < SLURM_HET_SIZE; group++)); do
    cpus=SLURM_CPUS_PER_TASK_HET_GROUP_$group
    threads=${{!cpus:-1}}
    [ "$group" -eq 0 ] || command+=(:)
    command+=(--het-group="$group" --cpus-per-task="$threads")
    command+=(env {_THREADS})
    command+=({command})
done"""
        command = '"${command[@]}"'
    by_srun = f'srun --mpi="$mpi" --kill-on-bad-exit=1 {command}'
    if script.signal is not None:
        yield _REMOVE_MEMORY
    if script.farm:
        yield _farm(script, by_srun)
    elif script.elastic is not None:
        yield _elastic(script, command)
    elif script.signal is None:
        yield f"# If a task ends with an error, srun ends the others.\nexec {by_srun}"
    else:
        where = "in the image" if script.container is not None else "on the nodes, for example"
        yield f"""\
# If a task ends, srun ends the others after a minute, so that they can end with their own status.
status=0
srun --mpi="$mpi" --kill-on-bad-exit=0 --wait=60 {command} || status=$?
# Status {RESTART}: the ranks saved, but could not requeue the job: scontrol is missing {where}.
# Status {HANG}: a collective hung for MPISTRAT_HANG_ABORT_SECONDS, and the ranks were ended.
# Requeue after these two only: a job that was cancelled ends with another status.
if [ "$status" -eq {RESTART} ] || [ "$status" -eq {HANG} ]; then
    scontrol requeue "$SLURM_JOB_ID" || :
fi
exit "$status\""""


def _farm(script: Script, command: str) -> str:
    """Return the lines of a task farm, which goes on after the time limit."""
    assert script.signal is not None
    return f"""\
# Before the limit the job goes back into the queue. Executor.map(..., keep=FILE) has kept the results, and
# goes on with the rest. At most 100 times: calls longer than the limit would come back for ever.
again() {{
    [ "${{SLURM_RESTART_COUNT:-0}}" -ge 100 ] || scontrol requeue "$SLURM_JOB_ID" || :
}}
trap again {script.signal[0]}
{command} &
status=0
wait $! || status=$?
while kill -0 $! 2>/dev/null; do  # the signal ends a wait
    status=0
    wait $! || status=$?
done
exit "$status\""""


_THREADS_UNDER_MPIRUN = """\
# mpirun starts one daemon per node by srun. The daemon must get all cores of the node.
unset SRUN_CPUS_PER_TASK
threads=${SLURM_CPUS_PER_TASK:-1}"""
_THREADS_UNDER_SRUN = """\
# Since SLURM 22.05 srun does not inherit --cpus-per-task: without this, a rank gets one core.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
threads=$SRUN_CPUS_PER_TASK"""
_INDEX_IN_ARGUMENTS = """\
# In arguments %a is the index and %A the number of the array, as in --output.
set -- "${@//\\%a/$SLURM_ARRAY_TASK_ID}"
set -- "${@//\\%A/$SLURM_ARRAY_JOB_ID}\""""
_REMOVE_MEMORY = """\
# MPICH names the memory of a node after the job and its step. If a run was killed, its memory is still
# there, and the next run would wait for it in MPI_Init. Remove what no process has mapped.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    srun --mpi=none --ntasks="${SLURM_JOB_NUM_NODES:-1}" --ntasks-per-node=1 bash -c '
        for file in /dev/shm/mpich_*; do
            grep -qsF "$file" /proc/[0-9]*/maps || rm -f "$file"
        done' 2>/dev/null || :
fi"""

_ELASTIC = r"""
# Each run goes on from the copies that the last one left in the memory of its nodes, or from the newest file.
memory=/dev/shm/mpistrat-elastic-$UID-$SLURM_JOB_ID
export MPISTRAT_ELASTIC=$memory-${SLURM_RESTART_COUNT:-0} MPISTRAT_ELASTIC_RANKS=%(ranks)s
# Where a node is lost without a word, the other ranks wait for it, and end after so many seconds.
export MPISTRAT_HANG_ABORT_SECONDS=${MPISTRAT_HANG_ABORT_SECONDS:-300}
# A rank runs in a shell that writes its exit status to the memory of its node. Slurm kills the shells of other ranks. A
# file is locked as long as a rank or its shell lives. It appears when it is, and says "run" until the shell ends by
# itself.
export %(ends)s=$MPISTRAT_ELASTIC/ends
rank='
    mkdir -p -m 700 "$MPISTRAT_ELASTIC" && [ -O "$MPISTRAT_ELASTIC" ] || exit 1
    lock=$MPISTRAT_ELASTIC/rank-$MPISTRAT_RESTART-$$
    exec 9>"$lock.new" && flock 9 && echo run >&9 && mv "$lock.new" "$lock" || exit 1
    trap : TERM USR1 USR2  # they are for the program
    "$@"
    status=$?
    [ "$status" -eq 0 ] || echo "$status" >>"$%(ends)s"
    # A rank is lost if this shell goes on after it: where Slurm kills ranks, it kills their shells next.
    [ "$status" -ne 137 ] || { sleep 0.5 && echo lost >>"$%(ends)s"; }
    echo end 1<>"$lock"
    [ "$status" -eq %(restart)s ] || exit "$status"  # else srun would end ranks that still save
'
# What a node says of the last run: its name, and how its ranks ended.
answer='
    echo "$0" $(cat "$%(ends)s" 2>/dev/null)
    rm -f "$%(ends)s" "$MPISTRAT_ELASTIC"/rank-*
'
on_nodes() {  # COMMAND: a lost node takes 10 s. In the foreground, or the signal would reach xargs
    local command=$1
    printf '%%s\n' "${nodes[@]}" | xargs -P 64 -I{} timeout --foreground --signal=KILL 10 \
        srun --mpi=none --overlap --nodes=1 --ntasks=1 --nodelist={} bash -c "$command" {} 2>/dev/null || :
}
# With --no-kill Slurm keeps a job that has lost this node, and no script runs in it, until its time limit. So another
# node asks Slurm whether this one is down, which takes SlurmdTimeout (300 s by default), and requeues the job.
guard() {
    local node
    for node in "${nodes[@]}"; do [ "$node" = "$SLURMD_NODENAME" ] || break; done
    guard=
    [ "$node" != "$SLURMD_NODENAME" ] || return 0
    {
        sleep 10  # a slurmd of 22.05 may die when two steps start at the same moment
        exec srun --mpi=none --overlap --nodes=1 --ntasks=1 --nodelist="$node" bash -c '
            while sleep 30; do
                case $(sinfo -h -n "$0" -o %%T) in down*) scontrol requeue "$SLURM_JOB_ID" ;; esac
            done' "$SLURMD_NODENAME"
    } </dev/null &>/dev/null &
    guard=$!
}
# Once a rank of this node was killed with its shell, the step is over. But srun waits for a lost node for KillWait (30
# seconds), or longer.
end_killed() {  # STEP: the process of its srun
    local lock state over
    while sleep 1; do
        over=
        for lock in "$MPISTRAT_ELASTIC/rank-$restart"-*[0-9]; do
            [ -e "$lock" ] && flock --nonblock "$lock" true || continue 2  # a rank starts, or lives
            read -r state <"$lock"
            [ "$state" = end ] || over=yes
        done
        [ -n "$over" ] || continue  # all have ended by themselves, and others may still run
        sleep 3  # other nodes may be slower to end
        kill -KILL "$1"
        break
    done
}
trap 'on_nodes "rm -rf $memory-*"' EXIT
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A loss is a rank that a signal ended (but Ctrl-C and SIGTERM, which are for the job), a collective that hung, or a
# node without an answer. With %(unknown)s, MPI_ERR_UNKNOWN, Open MPI ends ranks that notice the loss of another one.
judge='
    { for (i = 2; i <= NF; i++)
        if ($i == "lost" || $i == %(hang)s || $i > 128 && $i != 130 && $i != 137 && $i != 143) lost = 1
        else if ($i == 137) killed = 1
        else if ($i == %(restart)s) saved = 1
        else if ($i != %(unknown)s) own = $i }
    END {
        if (lost) print "loss"
        else if (saved) print %(restart)s
        else if (own) print own
        else if (killed) print "loss"
        else print status ~ /^(0|130|143)$/ ? status : "loss" }
'
used=$((SLURM_JOB_NUM_NODES - %(spare)s))  # nodes of a run
without=0  # losses in a row without a new copy
for ((restart = 0; restart <= 100; restart++)); do
    status=0
    guard
    MPISTRAT_RESTART=$restart srun --mpi="$mpi" --overlap --kill-on-bad-exit=1 --wait=60 \
        --nodes="$used" --nodelist="$(IFS=,; echo "${nodes[*]:0:used}")" \
        --ntasks="$((used * SLURM_NTASKS_PER_NODE))" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" \
        bash -c "$rank" rank %(command)s </dev/null &
    step=$!
    end_killed "$step" 2>/dev/null &
    wait "$step" 2>/dev/null || status=$?
    kill $! 2>/dev/null || :
    [ -z "$guard" ] || kill "$guard" 2>/dev/null || :  # its node may be the lost one
    answers=$(on_nodes "$answer")
    mapfile -t nodes < <(cut -d " " -f 1 <<<"$answers" | sort -V)
    end=$(awk -v status="$status" -- "$judge" <<<"$answers")
    case $end in
    loss) ;;
    %(restart)s) break ;;  # the ranks saved after the signal before the limit
    *) exit "$end" ;;
    esac
    without=$((without + 1))
    ! compgen -G "$MPISTRAT_ELASTIC/*/$restart.*" >/dev/null || without=0
    if [ "$without" -eq 3 ]; then
        echo "gives up after 3 losses without a new copy (status $status)" >&2
        exit "$status"
    fi
    %(left)s
    echo "goes on after a loss (status $status) on $used of ${#nodes[@]} nodes" >&2
done
# Back into the queue, to go on from the newest file on other nodes.
scontrol requeue "$SLURM_JOB_ID"
exit %(restart)s
"""


def _elastic(script: Script, command: str) -> str:
    """Return the lines of a job that goes on after the loss of a rank or of a node."""
    enough = '[ "${#nodes[@]}" -ge "$used" ] || break'
    fewer = "used=$((${#nodes[@]} < used ? ${#nodes[@]} : used))"
    values = {
        "ranks": script.elastic,
        "ends": ENDS,
        "unknown": _MPI_ERR_UNKNOWN,
        "restart": RESTART,
        "hang": HANG,
        "spare": script.spare,
        "command": command,
        "left": fewer if script.elastic == "fewer" else enough,
    }
    return (_ELASTIC % values)[1:-1]
