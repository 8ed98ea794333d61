"""``mpistrat slurm``: commands for batch jobs, of which there is one, ``write``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from mpistrat.cli.run import job
from mpistrat.cli.sbatch import Resources, Script, text
from mpistrat.launch import srun_types
from mpistrat.process.files import appearing
from mpistrat.runtime.environment import rc

_COUNT = click.IntRange(min=1)


class _Pattern(click.ParamType):
    """The type of an option whose text is copied to the script. It must match a pattern."""

    def __init__(self, name: str, pattern: str, example: str):
        self.name = name
        self._pattern = re.compile(pattern)
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not self._pattern.fullmatch(value):
            self.fail(f"{value!r} is not like {self._example}", param, ctx)
        return str(value)


_NAME = _Pattern("name", r"[\w.+-]+", "gpu-short")
_TIME = _Pattern("time", r"(\d+-\d{1,2}(:\d\d){0,2}|\d+(:\d\d){0,2})", "30, 2:00:00 or 1-12")
_GPUS = _Pattern("gpus", r"(\w[\w.-]*:)?[1-9]\d{0,3}", "4 or a100:4")

# Options of each component of a heterogeneous job.
_RESOURCES = [
    click.Option(["--nodes"], type=_COUNT, default=1, show_default=True, help="Nodes."),
    click.Option(["--ntasks-per-node"], type=_COUNT, help="Ranks per node.  [default: one per GPU, or 1]"),
    click.Option(["--ntasks"], type=_COUNT, help="Total number of ranks, in place of --ntasks-per-node."),
    click.Option(["--cpus-per-task"], type=_COUNT, default=1, show_default=True, help="Cores per rank."),
    click.Option(["--gpus-per-node"], type=_GPUS, help="GPUs per node: 4, or a100:4."),
    click.Option(["--mem"], type=_Pattern("memory", r"\d+[KMGT]?", "64G"), help="Memory per node."),
    click.Option(["--partition"], type=_NAME, help="Partition of the job."),
    click.Option(
        ["--constraint"], type=_Pattern("features", r"[^\s'\"#]+", "a100|h100"), help="Features of the nodes."
    ),
]
_PASSED_ON = {"mem": "per node", "partition": "queue of the job", "constraint": "features of the nodes"}


class _Heterogeneous(click.Command):
    """A command whose arguments are divided by ``:`` into components of a heterogeneous job, as for sbatch."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.params = [*_RESOURCES, *self.params]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [option for option in self.params if getattr(option, "is_flag", False)]
        flags = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        flags.update(self.get_help_option_names(ctx))
        resources = {name for option in _RESOURCES for name in option.opts}
        components: list[list[str]] = [[]]
        general: list[str] = []
        shown: list[str] = []
        position = 0
        while position < len(args):
            name, equals, _ = args[position].partition("=")
            words = args[position : position + (1 if equals or name in flags or name == ":" else 2)]
            if name == ":":
                components.append([])
            elif name.startswith("-") and name not in ("--", "-m"):
                (components[-1] if name in resources else general).extend(words)
            else:
                break
            if name != "--out":
                shown += words
            position += len(words)
        rest = args[position:]
        if rest[:1] == ["-m"]:
            rest = ["--", *rest]  # click would look for an option -m
        ctx.meta["shown"] = [*shown, *args[position:]]
        ctx.meta["components"] = [_component(words, ctx) for words in components[:-1]]
        return super().parse_args(ctx, [*general, *components[-1], *rest])


def _component(arguments: list[str], ctx: click.Context) -> Resources:
    parser = click.Command(ctx.info_name, params=list(_RESOURCES), add_help_option=False)
    with parser.make_context(ctx.info_name, arguments, parent=ctx.parent) as inner:
        return _resources(inner.params)


def _resources(values: dict[str, Any]) -> Resources:
    """Return the resources that the options of one component give."""
    nodes, ntasks, per_node = values["nodes"], values["ntasks"], values["ntasks_per_node"]
    gpus = values["gpus_per_node"] and int(values["gpus_per_node"].rpartition(":")[2])
    if ntasks is None:
        per_node = per_node or gpus or 1
    elif per_node is not None:
        raise click.UsageError("give --ntasks or --ntasks-per-node, not both")
    elif ntasks < nodes:
        raise click.UsageError(f"--ntasks {ntasks} leaves some of --nodes {nodes} without a rank")
    at_least = per_node or -(-ntasks // nodes)
    if gpus is not None and at_least > gpus:
        raise click.UsageError(
            f"{at_least} ranks on a node cannot have a GPU each with --gpus-per-node {values['gpus_per_node']}: ask "
            "for as many GPUs as ranks, or for none"
        )
    if gpus is not None and ntasks is not None and nodes > 1:
        per_node = at_least  # the maximum: otherwise Slurm may put more ranks on a node than it has GPUs
    options = tuple(
        (f"--{name}={values[name]}", comment) for name, comment in _PASSED_ON.items() if values[name] is not None
    )
    return Resources(nodes, ntasks, per_node, values["cpus_per_task"], values["gpus_per_node"], options)


@click.group()
def command() -> None:
    """Batch scripts for SLURM.

    \b
    mpistrat slurm write --nodes 4 --ntasks-per-node 8 --time 2:00:00 prog.py
    """


@command.command(
    "write",
    cls=_Heterogeneous,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [: OPTIONS]...",
)
@click.option("--time", type=_TIME, default="1:00:00", show_default=True, help="Time limit of the job.")
@click.option("--requeue", is_flag=True, help="Signal the ranks before the limit, and let the job be requeued.")
@click.option("--farm", is_flag=True, help="Requeue a task farm that keeps its results (Executor.map with keep=).")
@click.option(
    "--elastic",
    type=click.Choice(["same", "fewer"]),
    help="Go on after a lost rank or node (ElasticLoop), with as many ranks, or on the nodes that are left.",
)
@click.option("--spare", type=click.IntRange(min=0), default=0, help="Nodes that wait for the loss of another one.")
@click.option(
    "--signal",
    type=_Pattern("signal", r"USR[12]@\d{1,5}", "USR2@120"),
    default="USR2@120",
    show_default=True,
    help="Signal, and how many seconds before the limit.",
)
@click.option(
    "--array",
    type=_Pattern("indices", r"\d[\d,:-]*(%\d+)?", "0-7"),
    help="Indices of a job array. In ARGS, %a is the index.",
)
@click.option(
    "--mpirun/--srun",
    default=lambda: rc.launcher == "mpirun",
    help="Start the ranks with mpirun in place of srun.  [default: rc.launcher, else srun]",
)
@click.option(
    "--mpi",
    type=_Pattern("type", r"\w+", "pmix"),
    help="Value of `srun --mpi=`.  [default: rc.srun_mpi, else that of the MPI library of this Python]",
)
@click.option("--python", help="The Python with mpistrat.  [default: this one]")
@click.option("--container", metavar="IMAGE", help="Run in an Apptainer image.")
@click.option("--account", type=_NAME, help="Account that is charged.")
@click.option("--job-name", type=_NAME, help="[default: that of the program]")
@click.option(
    "--sbatch",
    type=_Pattern("option", r"--?\w[\w-]*(=[^\s'\"#]+)?", "--exclusive"),
    multiple=True,
    help="Another option of sbatch: --sbatch=--exclusive. Repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path), help="A new file.  [default: standard output]")
@click.argument("arguments", metavar="PROGRAM|-m MODULE [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def write(ctx: click.Context, arguments: tuple[str, ...], out: Path | None, **values: Any) -> None:
    """Write a batch script that runs a program on the nodes of a cluster.

    \b
    mpistrat slurm write --nodes 4 --ntasks-per-node 8 --time 2:00:00 prog.py --epochs 10
    mpistrat slurm write --nodes 4 --gpus-per-node 8 --requeue --out job.sbatch prog.py
    mpistrat slurm write --ntasks 4 : --nodes 2 --gpus-per-node 4 prog.py

    Options with a name of sbatch mean the same as there; `:` separates the components of a heterogeneous
    job. The job runs in the directory where `sbatch` is called, and relative paths start there.
    """
    script = _script(ctx, arguments, values)
    if out is None:
        click.echo(text(script), nl=False)
        return
    try:
        with appearing(out, replace=False) as temporary:
            temporary.write_text(text(script), encoding="utf-8")
    except FileExistsError:
        raise click.ClickException(f"{out} exists: remove it, or choose another --out") from None
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from error
    click.echo(f"Submit it with: sbatch {shlex.quote(str(out))}", err=True)


def _script(ctx: click.Context, arguments: tuple[str, ...], values: dict[str, Any]) -> Script:
    components = [*ctx.meta["components"], _resources(values)]
    container, by_mpirun = values["container"], values["mpirun"]
    requeue, farm, elastic = values["requeue"], values["farm"], values["elastic"]
    if requeue and farm:
        raise click.UsageError("--requeue signals the ranks, and --farm the batch shell: give one of them")
    if elastic is not None and (requeue or farm):
        raise click.UsageError("--elastic requeues the job, too: omit --requeue and --farm")
    if elastic is not None and (by_mpirun or len(components) > 1 or components[0].ntasks or values["array"]):
        raise click.UsageError("--elastic takes srun, --nodes and --ntasks-per-node, and no array or `:`")
    if values["spare"] and elastic is None:
        raise click.UsageError("--spare is for --elastic")
    program = _program(arguments, container is not None)
    if by_mpirun and (requeue or container is not None or len(components) > 1):
        what = "let a signal of SLURM reach the ranks" if requeue else "start a container or a heterogeneous job"
        raise click.UsageError(f"--mpirun cannot {what}: give --srun in place of it")
    if values["array"] and len(components) > 1:
        raise click.UsageError("SLURM has no arrays of heterogeneous jobs: omit --array, or the `:`")
    signalled = requeue or farm or elastic is not None
    if signalled and _seconds(values["time"]) <= int(values["signal"].partition("@")[2]) + 60:
        raise click.UsageError(
            f"--time {values['time']} leaves nothing before --signal {values['signal']}, which may come a minute "
            "earlier: give more time, or send the signal later"
        )
    python = values["python"] or ("python3" if container is not None else sys.executable)
    stem = Path(program[0]).stem if program[0] != "-m" else program[1].rpartition(".")[2]
    name = values["job_name"] or re.sub(r"[^\w.+-]", "_", stem)
    signal, _, seconds = values["signal"].partition("@")
    words = [*ctx.meta["shown"], python, container or ""]
    if any(not word.isprintable() for word in words):
        raise click.UsageError("an argument has a line break or another character that cannot be printed")
    return Script(
        written_by=shlex.join(["mpistrat", "slurm", "write", *ctx.meta["shown"]]),
        components=components,
        name=name,
        time=values["time"],
        program=program,
        python=python,
        mpi=values["mpi"] or ("" if by_mpirun else _mpi(python, container)),
        mpirun=by_mpirun,
        array=values["array"],
        signal=(signal, int(seconds)) if signalled else None,
        farm=farm,
        elastic=elastic,
        spare=values["spare"],
        container=container,
        options=[
            *([(f"--account={values['account']}", "account that is charged")] if values["account"] else []),
            *((option, "") for option in values["sbatch"]),
        ],
    )


def _program(arguments: tuple[str, ...], elsewhere: bool) -> tuple[str, ...]:
    if not arguments or arguments == ("-m",):
        raise click.UsageError("give a program to run: `mpistrat slurm write --nodes 2 prog.py` or `-m module`")
    if arguments[0] != "-m" and not elsewhere and not Path(arguments[0]).is_file():
        raise click.UsageError(f"there is no program {arguments[0]!r} in {Path.cwd()}")
    if ":" in arguments:
        raise click.UsageError("srun takes an argument `:` for itself: the program cannot have one")
    return arguments


def _mpi(python: str, container: str | None) -> str:
    """Return the value of ``srun --mpi=``."""
    if container is not None:
        raise click.UsageError("say which MPI is in the image: --mpi pmix for Open MPI, --mpi pmi2 for MPICH")
    if rc.srun_mpi:
        return rc.srun_mpi
    family = job.library_of(python)
    plugin = srun_types.srun_plugin(family)
    if plugin is None:
        raise click.UsageError(
            f"the --mpi= for the MPI library of {python} ({family}) is not known: give --mpi; `srun --mpi=list` "
            "shows all types"
        )
    types = srun_types.offered()
    if types and plugin not in types:
        raise click.UsageError(f"{python}: {srun_types.remedy(family)}")
    return plugin


def _seconds(time: str) -> int:
    """Return the seconds of a time limit of sbatch, from minutes to days-hours:minutes:seconds."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
