"""``mpistrat run``: start a Python program on this machine, one process per rank."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import click

from mpistrat.cli.run import running_job
from mpistrat.cli.run.elastic import run_elastic
from mpistrat.cli.run.job import Job, Machine, find, plan
from mpistrat.cli.run.streams import RANK
from mpistrat.launch.launch import without_launcher
from mpistrat.runtime.environment import VERIFIED, RuntimeOptions

_WITH_VALUE = ("-n", "-np", "--mpi", "--output", "--elastic", "--restarts", "--min-ranks", "--trace")


class _PythonLike(click.Command):
    """A command that gives all arguments after the program, or after ``-m module``, to the program, as Python does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        position = 0
        while position < len(args):
            word = args[position]
            if word.startswith("-m") and not word.startswith("--"):
                position += 2 if word == "-m" else 1
                args = [*args[:position], "--", *args[position:]]
                break
            if word == "--" or not word.startswith("-"):
                break
            if word == "--elastic" and args[position + 1 : position + 2] not in (["same"], ["fewer"]):
                args = [*args[:position], "--elastic=same", *args[position + 1 :]]  # click would take the program
            position += 2 if word in _WITH_VALUE else 1
        return super().parse_args(ctx, args)


@click.command(cls=_PythonLike, context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option("-n", "-np", "ranks", type=click.IntRange(min=1), help="Ranks.  [default: one per core]")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich"]), help="Refuse to use another MPI than this.")
@click.option("--output", metavar="FILE", help="Write the output of each rank to a file of its own: log.%(rank)d.")
@click.option("--tag", is_flag=True, help="Begin each line with the number of its rank.")
@click.option("--bind", is_flag=True, help="Bind each rank to a core.")
@click.option("--ft", is_flag=True, help="Go on when a rank is lost, by ULFM: a coordinator goes on without a worker.")
@click.option(
    "--elastic",
    type=click.Choice(["same", "fewer"]),
    help="Go on when a rank is lost, from copies in memory (`ElasticLoop`), with the same number of ranks or fewer.",
)
@click.option(
    "--restarts", type=click.IntRange(min=0), default=100, help="The most times that --elastic goes on.  [default: 100]"
)
@click.option(
    "--min-ranks", type=click.IntRange(min=1), default=1, help="The fewest ranks of --elastic fewer.  [default: 1]"
)
@click.option(
    "--standby", is_flag=True, help="Keep the ranks of the next run of --elastic ready, with its imports done."
)
@click.option("--trace", metavar="DIR", help="Trace all ranks, for `mpistrat trace DIR`.")
@click.option("--debug", is_flag=True, help="Make all checks that cost time: MPISTRAT_DEBUG=1.")
@click.option("--verify", is_flag=True, help="Find values that a fault has changed: MPISTRAT_VERIFY=copies,sums.")
@click.option("--dry-run", is_flag=True, help="Show the command and the environment, and why; start nothing.")
@click.argument("arguments", metavar="[PROGRAM] [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    ranks: int | None,
    module: str | None,
    mpi: str | None,
    output: str | None,
    tag: bool,
    bind: bool,
    ft: bool,
    elastic: str | None,
    restarts: int,
    min_ranks: int,
    standby: bool,
    trace: str | None,
    debug: bool,
    verify: bool,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Start a Python program on this machine, one process per rank.

    \b
    mpistrat run -n 4 train.py --epochs 10
    mpistrat run -n 4 -m mypackage.train --epochs 10

    `python train.py` in place of `train.py` means the same: the Python of this command runs it.

    Standard input goes to rank 0, and signals go to the ranks. The exit status is that of the first rank
    that failed, and 128 + signal if it was killed.
    """
    if module is not None:
        program = ["-m", module, *arguments]
    elif arguments and _names_python(arguments[0], ctx):
        program = list(arguments[1:])
        if not program:
            raise click.UsageError("give a program after `python`", ctx)
    elif arguments:
        if not Path(arguments[0]).exists():
            raise click.UsageError(f"there is no program {arguments[0]!r} in {Path.cwd()}", ctx)
        program = list(arguments)
    else:
        raise click.UsageError("give a program to run: `mpistrat run -n 4 prog.py` or `-m module`", ctx)
    if output is not None:
        if tag:
            raise click.UsageError("give --tag or --output: a file of one rank needs no tags", ctx)
        if output.count(RANK) != 1 or "%" in output.replace(RANK, ""):
            raise click.UsageError(f"--output {output}: give one {RANK}, as in log.{RANK}, and no other %", ctx)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    if standby and (elastic is None or (program[0] != "-m" and program[0].startswith("-"))):
        raise click.UsageError("--standby needs --elastic, and a program without options of Python", ctx)
    launcher = find(mpi)
    if ft and not launcher.can_survive:
        raise click.UsageError(
            f"--ft needs ULFM, which Open MPI 5 has, and {launcher.path} belongs to {launcher.family} "
            f"{'.'.join(map(str, launcher.version))}",
            ctx,
        )
    environ = without_launcher(os.environ)
    # Open MPI fails with an internal error where HOME is not set, as in some containers and cron jobs.
    home = os.path.expanduser("~")
    environ.setdefault("HOME", home if os.path.isabs(home) else "/")
    if debug:
        environ[RuntimeOptions.debug.variable] = "1"
    if verify:
        environ[RuntimeOptions.verify.variable] = ",".join(VERIFIED)
    if trace is not None:
        environ[RuntimeOptions.trace.variable] = _writable(trace)
    here = Machine.here()

    def job_of(ranks: int) -> Job:
        return plan(launcher, ranks, [sys.executable, *program], here, environ, bind=bind, tag=tag, survives=ft)

    ranks = ranks or here.cores
    if dry_run:
        _show(job_of(ranks))
        return
    sys.stdout.flush()
    if elastic is not None:
        again = elastic == "fewer", restarts, min_ranks
        sys.exit(run_elastic(job_of, ranks, environ, *again, output, tag=tag, standby=standby))
    sys.exit(running_job.run(job_of(ranks), environ, output, tag=tag).status)


def _names_python(argument: str, ctx: click.Context) -> bool:
    """Return whether an argument is the Python of this command, as mpirun takes it before a program.

    Raise UsageError if it is the path of another Python: the ranks need the one that has mpistrat.
    """
    path = Path(argument)
    if not re.fullmatch(r"python(3(\.\d+)?)?", path.name):
        return False
    if path.parent != Path() and path.parent.resolve() != Path(sys.executable).parent.resolve():
        raise click.UsageError(
            f"{argument} is another Python than {sys.executable}, which runs this command: leave it out, or start "
            f"{argument} -m mpistrat run",
            ctx,
        )
    return True


def _writable(directory: str) -> str:
    """Return the absolute path of a directory, which is made if it does not exist."""
    path = Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except OSError as error:
        raise click.UsageError(f"--trace {directory} cannot be written: {error.strerror}") from None


def _show(job: Job) -> None:
    click.echo(shlex.join([*job.command, *job.program]))
    width = max(len(f"{name}={value}") for name, value, _ in job.settings)
    for name, value, reason in job.settings:
        click.echo(f"{f'{name}={value}':<{width}}  # {reason}")
    removed = sorted(os.environ.keys() - without_launcher(os.environ).keys())
    for name in removed:
        click.echo(f"{f'-u {name}':<{width}}  # of the MPI job that this process is in")
