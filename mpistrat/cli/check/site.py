"""``mpistrat check --site``: the text of a site file, of what this machine and this environment say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from mpistrat.cli.run import job
from mpistrat.launch.srun_types import srun_plugin
from mpistrat.process import files
from mpistrat.runtime import environment
from mpistrat.runtime.environment import RuntimeOptions, rc

_OF_ONE_JOB = ("elastic", "restart", "roles", "site", "trace")
_SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "SCRATCHDIR")  # as centres call it


def text() -> str:
    """Return the text of a site file. Options that nothing has set are comments."""
    found = _found()
    lines = [
        "# The site file of mpistrat: defaults for all users of this machine, in TOML.",
        f"# It is {RuntimeOptions.site.default}, or the file that {RuntimeOptions.site.variable} names.",
        "",
    ]
    for option in environment.options():
        if option.attribute not in _OF_ONE_JOB:
            is_set = option.origin(rc) != "default"
            value = getattr(rc, option.attribute)
            off = "" if is_set or option.attribute in found else "# "
            shown = _toml(value if is_set else found.get(option.attribute, value))
            lines.append(f"{off}{option.attribute} = {shown}  # {option.values}")
    for verdict in _verdicts():
        operations = ", ".join(f"{_toml(name)} = {_toml(result)}" for name, result in verdict["operations"].items())
        lines += ["", f"[[{environment.GPU_VERDICTS}]]", f"for = {_toml(verdict['for'])}"]
        lines.append(f"operations = {{{operations}}}")
    return "\n".join(lines) + "\n"


def _found() -> dict[str, str]:
    """Return values of options that the machine tells."""
    found = {"scratch": next((f"${name}" for name in _SCRATCH if name in os.environ), "")}
    if shutil.which("srun"):
        found["launcher"] = "srun"
        try:
            found["srun_mpi"] = srun_plugin(job.library_of(sys.executable)) or ""
        except click.ClickException as error:
            click.echo(f"srun_mpi is left out: {error.message}", err=True)
    return {name: value for name, value in found.items() if value}


def _verdicts() -> Iterator[dict[str, Any]]:
    """Yield what ``mpistrat check --gpu-direct`` has found for this user, or the site file has already."""
    own = files.cache_path("gpu-direct", []).parent.glob("gpu-direct-*.json")
    verdicts = [
        *(json.loads(path.read_text()) for path in sorted(own)),
        *environment.site_file().get(environment.GPU_VERDICTS, ()),
    ]
    yield from {json.dumps(verdict["for"]): verdict for verdict in reversed(verdicts)}.values()


def _toml(value: Any) -> str:
    """Return a value of TOML, whose texts, numbers and arrays are those of JSON."""
    if value is None:
        value = "auto"
    return json.dumps(sorted(value) if isinstance(value, frozenset) else value)
