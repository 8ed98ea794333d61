"""The check that all processes are one MPI job."""

from __future__ import annotations

import re

from mpistrat.cli.check.checks.finding import START, CheckedJob, Finding, Severity
from mpistrat.runtime.agreement.operation import ranks_in_words

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_AT_MOST = 6


def judge(job: CheckedJob) -> Finding:
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
    return lines if len(lines) <= _AT_MOST else [*lines[:_AT_MOST], f"... and {len(lines) - _AT_MOST} other problems"]


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
