"""Several nodes on this machine, with links of limited bandwidth, which are gone when the test run is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Also for what is started by hand, and for what the nodes run.
sys.path.insert(0, str(Path(__file__).parents[1]))
import namespaces

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
MTU = 9000
# Ethernet, IP, and TCP with time stamps. A packet that the kernel has not cut up yet counts, and has, one.
HEADER = 14 + 20 + 32
MARGIN = 1.01  # bytes that a reduction may send, as a multiple of the least that it has to

# What mpirun starts its daemons with: as ssh, in an environment that inherits nothing.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
target=$(cat {directory}/$1) || exit 255
shift
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec nsenter --target="$target" --net --uts --ipc --mount --wdns=/ \\
    env -i HOME="$HOME" SHELL=/bin/sh TMPDIR={directory} PATH=$path /bin/sh -c "$*"
"""


def missing() -> str | None:
    """What this machine lacks to run one, if anything."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (iproute2 and util-linux)"
    return namespaces.missing("ip", "link", "add", "type", "veth")


class Started:
    """A program under mpirun.

    Its output, and errors, go to a file: a pipe stays open for as long as a daemon lives that was cut off.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path):
        self._output = output
        with open(output, "w") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """What came so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str, limit: float) -> None:
        """Wait until a text is in the output."""
        self.wait_until(lambda: text in self.output(), text, limit)

    def wait_until(self, condition: Callable[[], bool], what: str, limit: float) -> None:
        """Wait until something is so."""
        try:
            namespaces.wait_for(condition, what, limit)
        except TimeoutError as error:
            raise TimeoutError(f"{error}, in vain:\n{self.output()}") from None

    def wait(self, limit: float) -> int | None:
        """The exit status of mpirun; None if it has none by then."""
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None


class Cluster(namespaces.Nodes):
    """Nodes node0, node1, ..., each with a link of ``rate`` to all others. A context manager.

    Parameters
    ----------
    nodes : int
    rate : str
        Of each link in each direction, as ``tc`` takes it.

    Attributes
    ----------
    mpirun : str
        The one beside this Python.
    hydra : bool
        Whether that is MPICH's.
    """

    name = "network"
    mtu = MTU

    def __init__(self, nodes: int, rate: str = "1gbit"):
        super().__init__(nodes)
        self.rate = rate
        self.mpirun = str(Path(sys.executable).with_name("mpirun"))
        said = subprocess.run([self.mpirun, "--version"], capture_output=True, text=True, check=True).stdout
        self.hydra = "HYDRA" in said
        self._started = 0

    def start(
        self, ranks: Sequence[int], *arguments: str | Path, options: Sequence[str] = (), **environ: str
    ) -> Started:
        """Start this Python on the first nodes, so many ranks on each."""
        command = [*self.on(0), *self._mpirun(ranks, options, environ), sys.executable]
        self._started += 1
        # Numbers of processes repeat: what one cluster leaves in /tmp would be in the way of the next.
        environ = {**environ, "TMPDIR": str(self.directory)}
        return Started([*command, *map(str, arguments)], environ, self.directory / f"output{self._started}")

    def run(
        self, ranks: Sequence[int], *arguments: str | Path, limit: float = 200, **environ: str
    ) -> tuple[int | None, str]:
        """The exit status, None if it was stopped at its limit, and the output of a program."""
        started = self.start(ranks, *arguments, **environ)
        status = started.wait(limit)
        if status is None:
            self.clear()
            started.wait(10)
        return status, started.output()

    def clear(self) -> None:
        """Kill what runs on the nodes."""
        while numbers := self.processes():
            self.shared("sh", "-c", f"kill -KILL {' '.join(map(str, numbers))} || :")
            time.sleep(0.05)

    def power_off(self, node: int) -> None:
        """Let a node go silent as without power: its ranks are killed, and its link is cut.

        All is stopped first: on a busy machine its ranks would go on for seconds. Its daemon is only stopped: mpirun
        would notice the end of the program that stands in for ssh.
        """
        running = self.processes()
        files = [f"/proc/{number}/ns/uts" for number in (self._holders[node], *running)]
        said = self.shared("sh", "-c", f"for file in {' '.join(files)}; do readlink $file || echo; done")
        own, *others = said.split("\n")
        there = [number for number, found in zip(running, others, strict=False) if found == own]
        ranks = [number for number in there if running[number].startswith("python")]
        self.shared("sh", "-c", f"kill -STOP {' '.join(map(str, there))} || :")
        self.cut(node)
        self.shared("sh", "-c", f"kill -KILL {' '.join(map(str, ranks))} || :")

    def processes(self) -> dict[int, str]:
        """What runs on the nodes: the numbers of processes, as they are inside, and their names."""
        said = self.shared("ps", "-e", "-o", "pid=,comm=")
        found = {int(number): name for number, name in (line.split(None, 1) for line in said.splitlines())}
        own = {1, *self._holders}
        return {number: name for number, name in found.items() if number not in own and name != "ps"}

    def _start(self) -> None:
        self.write("ssh", AGENT.format(directory=self.directory))
        self.shared("chmod", "755", f"{self.directory}/ssh")
        for i, holder in enumerate(self._holders):
            self.write(f"node{i}", str(holder))
            self.limit(i, self.rate)

    def _mpirun(self, ranks: Sequence[int], options: Sequence[str], environ: dict[str, str]) -> list[str]:
        """The command that starts these ranks on the first nodes, up to their program."""
        separator = ":" if self.hydra else " slots="
        self.write("hostfile", "".join(f"node{i}{separator}{n}\n" for i, n in enumerate(ranks) if n))
        agent, hostfile, n = f"{self.directory}/ssh", f"{self.directory}/hostfile", str(sum(ranks))
        names = ["PATH", "PYTHONPATH", *environ]
        # The nodes share the cores, so none binds, and who waits gives way.
        if self.hydra:
            # UCX would see that the nodes are one machine, and leave the network out.
            words = f"-launcher ssh -launcher-exec {agent} -f {hostfile} -iface eth0 -bind-to none -n {n}"
            words += f" -genv UCX_TLS tcp,self -genv MPIR_CVAR_POLLS_BEFORE_YIELD 1 -genvlist {','.join(names)}"
            return [self.mpirun, *options, *words.split()]
        words = f"--allow-run-as-root --prtemca plm_ssh_agent {agent} --hostfile {hostfile} -n {n}"
        words += " --map-by slot:oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --mca osc ^ucx"
        return [self.mpirun, *options, *words.split(), *(word for name in names for word in ("-x", name))]


def main() -> int:
    """``python tests/cluster/nodes.py 2,2,2,2 1gbit benchmarks/communication/allreduce.py``: by hand."""
    ranks, rate, *arguments = sys.argv[1:]
    with Cluster(len(ranks.split(",")), rate) as cluster:
        status, output = cluster.run([int(n) for n in ranks.split(",")], *arguments, limit=600)
    print(output, end="")
    return 1 if status is None else status


if __name__ == "__main__":
    sys.exit(main())
