"""Several nodes on this machine, which are gone when the test run is.

A node has a host name, an address, shared memory and a link of limited bandwidth to a bridge that leads
nowhere else. All processes are one tree in namespaces of its own, whose first process reads from a pipe of this one:
when that closes, however this process ends, the kernel kills the others, and with them go network and mounts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--")
MTU = 9000
# Ethernet, IP, and TCP with time stamps. A packet that the kernel has not cut up yet counts, and has, one.
HEADER = 14 + 20 + 32
# Deeper than every window of TCP: a link delays packets, and never drops them, so that counters repeat.
_QUEUE = 64 << 20
# A packet that the kernel has not cut up yet must fit, or it is cut up for this, which takes the processor.
_BURST = 128 << 10

PREPARE = """
set -eu
mount -t tmpfs -o mode=755 tmpfs {directory}
ip link add bridge mtu {mtu} type bridge stp_state 0
ip link set lo up
ip link set bridge up
"""

# Run in the namespaces of a node, which last as long as the process that this becomes.
NODE = """
set -eu
hostname node{i}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {directory}/hosts /etc/hosts
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || :
ip link set lo up
echo $$
exec sleep infinity
"""

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
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (iproute2 and util-linux)"
    trial = [*NAMESPACES, *("ip", "link", "add", "type", "veth")]
    if subprocess.run(trial, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
        return "needs leave to make namespaces and networks"
    return None


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
        try:
            _wait_for(lambda: text in self.output(), text, limit)
        except TimeoutError as error:
            raise TimeoutError(f"{error}, in vain:\n{self.output()}") from None

    def wait(self, limit: float) -> int | None:
        """The exit status of mpirun; None if it has none by then."""
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None


class Cluster:
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

    def __init__(self, nodes: int, rate: str = "1gbit"):
        self.nodes = nodes
        self.rate = rate
        self.mpirun = str(Path(sys.executable).with_name("mpirun"))
        said = subprocess.run([self.mpirun, "--version"], capture_output=True, text=True, check=True).stdout
        self.hydra = "HYDRA" in said

    def __enter__(self) -> Cluster:
        self.directory = Path(tempfile.mkdtemp(prefix="mpistrat-cluster-"))
        self._started = 0
        self._keepers: list[subprocess.Popen[str]] = []
        self._first = subprocess.Popen(
            [
                *NAMESPACES,
                *("env", "--ignore-signal=CHLD", "cat"),
            ],  # so that the kernel buries adopted processes
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._first.stdin is not None
        self._first.stdin.close()
        try:
            self._first.wait(10)
        except subprocess.TimeoutExpired:
            self._first.kill()
            self._first.wait()
        for keeper in self._keepers:
            keeper.wait()
        shutil.rmtree(self.directory)

    def start(
        self, ranks: Sequence[int], *arguments: str | Path, options: Sequence[str] = (), **environ: str
    ) -> Started:
        """Start this Python on the first nodes, so many ranks on each."""
        command = [*self._enter(0), *self._mpirun(ranks, options, environ), sys.executable]
        self._started += 1
        # Numbers of processes repeat: what one cluster leaves in /tmp would be in the way of the next.
        environ = {**environ, "TMPDIR": str(self.directory)}
        return Started([*command, *map(str, arguments)], environ, self.directory / f"output{self._started}")

    def run(
        self, ranks: Sequence[int], *arguments: str | Path, limit: float = 60, **environ: str
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
            self._shared("kill", "-KILL", *map(str, numbers))
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """What runs on the nodes: the numbers of processes, as they are inside, and their names."""
        said = self._shared("ps", "-e", "-o", "pid=,comm=").stdout
        found = {int(number): name for number, name in (line.split(None, 1) for line in said.splitlines())}
        own = {1, *self._holders}
        return {number: name for number, name in found.items() if number not in own and name != "ps"}

    def cut(self, node: int) -> None:
        """Pull the cable of a node: what others send it, and it sends them, gets lost without a word."""
        self._check(self._shared("ip", "link", "set", f"port{node}", "down"))

    def heal(self, node: int) -> None:
        """Plug it in again."""
        self._check(self._shared("ip", "link", "set", f"port{node}", "up"))

    def _start(self) -> None:
        first = f"/proc/{self._first.pid}/ns"
        own = os.readlink("/proc/self/ns/net")
        _wait_for(lambda: os.readlink(f"{first}/net") != own, "a network", 10)
        _wait_for(lambda: os.path.exists(f"{first}/pid_for_children"), "a first process", 10)
        self._inside = ["nsenter", f"--target={self._first.pid}", "--mount", "--net", "--ipc"]
        self._inside.append(f"--pid={first}/pid_for_children")
        self._check(self._shared("sh", "-c", PREPARE.format(directory=self.directory, mtu=MTU)))
        hosts = "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(self.nodes))
        self._write("hosts", f"127.0.0.1 localhost\n{hosts}")
        self._write("ssh", AGENT.format(directory=self.directory))
        self._check(self._shared("chmod", "755", f"{self.directory}/ssh"))
        self._holders = [self._hold(i) for i in range(self.nodes)]

    def _hold(self, i: int) -> int:
        """Make a node; returns the number, inside, of the process that keeps it."""
        veth = ("mtu", str(MTU), "type", "veth", "peer", "name", f"end{i}", "mtu", str(MTU))
        self._check(self._shared("ip", "link", "add", f"port{i}", *veth))
        process = subprocess.Popen(
            [*self._inside, "unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c"]
            + [NODE.format(i=i, directory=self.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            holder = process.stdout.readline().strip()
        self._keepers.append(process)
        if not holder:
            raise RuntimeError(f"node{i} could not be made")
        self._write(f"node{i}", holder)
        shape = f"root tbf rate {self.rate} burst {_BURST} limit {_QUEUE}"
        there = f"nsenter --target={holder} --net"
        for command in (
            f"ip link set end{i} netns {holder} name eth0",
            f"ip link set port{i} master bridge up",
            f"tc qdisc add dev port{i} {shape}",
            f"{there} ip addr add 10.77.0.{i + 1}/24 dev eth0",
            f"{there} ip link set eth0 up",
            f"{there} tc qdisc add dev eth0 {shape}",
        ):
            self._check(self._shared(*command.split()))
        return int(holder)

    def _mpirun(self, ranks: Sequence[int], options: Sequence[str], environ: dict[str, str]) -> list[str]:
        """The command that starts these ranks on the first nodes, up to their program."""
        separator = ":" if self.hydra else " slots="
        self._write("hostfile", "".join(f"node{i}{separator}{n}\n" for i, n in enumerate(ranks) if n))
        agent, hostfile, n = f"{self.directory}/ssh", f"{self.directory}/hostfile", str(sum(ranks))
        names = ["PATH", "PYTHONPATH", *environ]
        # The nodes share the cores, so none binds, and who waits gives way.
        if self.hydra:
            # UCX would see that the nodes are one machine, and leave the network out.
            words = f"-launcher ssh -launcher-exec {agent} -f {hostfile} -iface eth0 -bind-to none -n {n}"
            words += (
                f" -genv UCX_TLS tcp,self -genv MPIR_CVAR_POLLS_BEFORE_YIELD 1 -genvlist {','.join(names)}"
            )
            return [self.mpirun, *options, *words.split()]
        words = f"--allow-run-as-root --prtemca plm_ssh_agent {agent} --hostfile {hostfile} -n {n}"
        words += " --map-by slot:oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --mca osc ^ucx"
        return [self.mpirun, *options, *words.split(), *(word for name in names for word in ("-x", name))]

    def _write(self, name: str, text: str) -> None:
        """A file in the directory, which only the cluster's own processes see."""
        Path(f"/proc/{self._first.pid}/root{self.directory}/{name}").write_text(text)

    def _enter(self, node: int) -> list[str]:
        inside = [*self._inside, "nsenter", f"--target={self._holders[node]}"]
        return [*inside, "--net", "--uts", "--ipc", "--mount"]

    def _shared(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces that all nodes share."""
        return subprocess.run(
            [*self._inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=False,
        )

    @staticmethod
    def _check(ended: subprocess.CompletedProcess[str]) -> None:
        if ended.returncode != 0:
            raise RuntimeError(f"{ended.args}: {ended.stdout}")


def _wait_for(condition: Callable[[], bool], what: str, limit: float) -> None:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit} s for {what}")
        time.sleep(0.02)


def main() -> int:
    """``python tests/cluster/nodes.py 2,2,2,2 1gbit -m mpistrat bench allreduce``: by hand."""
    ranks, rate, *arguments = sys.argv[1:]
    with Cluster(len(ranks.split(",")), rate) as cluster:
        status, output = cluster.run([int(n) for n in ranks.split(",")], *arguments, limit=600)
    print(output, end="")
    return 1 if status is None else status


if __name__ == "__main__":
    sys.exit(main())
