"""Nodes that are namespaces of this machine, for the tests that need several, and are gone when the test run is.

All of them are one process tree. A node has a host name, an address, shared memory and a link to a bridge that leads
nowhere else. The first process reads from a pipe of this one: when that closes, however this process ends, the kernel
kills the others, and with the last of them go the network, the mounts and the files, which are in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

Self = TypeVar("Self", bound="Nodes")
_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--")
# Deeper than every window of TCP: a link delays packets, and never drops them, so that counters repeat.
_QUEUE = 64 << 20
# A packet that the kernel has not cut up yet must fit, or it is cut up for this, which takes the processor.
_BURST = 128 << 10

# Run once in the namespaces that all nodes share.
_PREPARE = """
set -eu
mount -t tmpfs -o mode=755 tmpfs {directory}
ip link add bridge mtu {mtu} type bridge stp_state 0
ip link set lo up
ip link set bridge up
cd {directory}
"""

# Run in the namespaces of a node, which last as long as the process that this becomes.
_NODE = """
set -eu
hostname node{i}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {directory}/hosts /etc/hosts
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || :
ip link set lo up
echo $$
exec sleep infinity
"""


def missing(*trial: str) -> str | None:
    """Why this machine cannot make nodes, or run this command where it makes them; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("unshare") is None:
        return "needs unshare (util-linux)"
    ended = subprocess.run([*_UNSHARE, *(trial or ("true",))], capture_output=True, check=False)
    return "needs leave to make namespaces" if ended.returncode else None


def wait_for(condition: Callable[[], bool], what: str, limit: float) -> None:
    """Wait until something is so, or raise TimeoutError."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit} s for {what}")
        time.sleep(0.02)


class Nodes:
    """Nodes node0, node1, ... A context manager.

    Parameters
    ----------
    nodes : int

    Attributes
    ----------
    directory : Path
        Where their files are, as their own processes see it.
    """

    name = "nodes"
    mtu = 1500
    prepare = ""  # more for the shell, in the directory and with the namespaces that all nodes share

    def __init__(self, nodes: int):
        self.nodes = nodes

    def __enter__(self: Self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix=f"mpistrat-{self.name.lower()}-"))
        self._keepers: list[subprocess.Popen[str]] = []
        self._holders: list[int] = []
        self._first = subprocess.Popen(
            [*_UNSHARE, *("env", "--ignore-signal=CHLD", "cat")],  # so the kernel buries adopted processes
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._begin()
            self._start()
        except BaseException as error:
            log = self.logs()
            self.__exit__()
            raise RuntimeError(f"{self.name} did not start: {error}\n{log}") from error
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

    def logs(self) -> str:
        """What they wrote, for a text about what went wrong."""
        return ""

    def cut(self, node: int) -> None:
        """Pull the cable of a node: what others send it, and it sends them, gets lost without a word."""
        self.shared("ip", "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """Plug it in again, and let the nodes forget that they could not reach each other: they would for seconds."""
        self.shared("ip", "link", "set", f"port{node}", "up")
        for holder in self._holders:
            self.shared("nsenter", f"--target={holder}", "--net", "ip", "neigh", "flush", "all")

    def limit(self, node: int, rate: str) -> None:
        """Give the link of a node a bandwidth in each direction, as ``tc`` takes it."""
        shape = f"root tbf rate {rate} burst {_BURST} limit {_QUEUE}"
        self.shared(*f"tc qdisc replace dev port{node} {shape}".split())
        there = f"nsenter --target={self._holders[node]} --net"
        self.shared(*f"{there} tc qdisc replace dev eth0 {shape}".split())

    def on(self, node: int) -> list[str]:
        """What a command on a node begins with."""
        inside = ["nsenter", f"--target={self._holders[node]}", "--net", "--uts", "--ipc", "--mount"]
        return [*self._inside, *inside]

    def run_on(
        self, node: int, *command: str, limit: float = 120, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node; standard output and error come as one text."""
        return self._ended([*self.on(node), *command], limit, environ)

    def shared(self, *command: str) -> str:
        """What a command says in the namespaces that all nodes share; RuntimeError if it fails."""
        return checked(self._ended([*self._inside, *command], 120, None))

    def write(self, name: str, text: str) -> None:
        """A file in the directory, which only their own processes see."""
        (self.seen / name).write_text(text)

    @property
    def seen(self) -> Path:
        """The directory as their own processes see it, from here."""
        return Path(f"/proc/{self._first.pid}/root{self.directory}")

    @property
    def process_namespace(self) -> str:
        """The namespace that all of their processes are in."""
        return os.readlink(f"/proc/{self._first.pid}/ns/pid_for_children")

    def _start(self) -> None:
        """What comes when the nodes are there."""

    def _begin(self) -> None:
        first = f"/proc/{self._first.pid}/ns"
        own = os.readlink("/proc/self/ns/net")
        wait_for(lambda: os.readlink(f"{first}/net") != own, "a network", 60)
        wait_for(lambda: os.path.exists(f"{first}/pid_for_children"), "a first process", 60)
        self._inside = ["nsenter", f"--target={self._first.pid}", "--mount", "--net", "--ipc"]
        self._inside.append(f"--pid={first}/pid_for_children")
        self.shared("sh", "-c", _PREPARE.format(directory=self.directory, mtu=self.mtu) + self.prepare)
        hosts = "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(self.nodes))
        self.write("hosts", f"127.0.0.1 localhost\n{hosts}")
        for i in range(self.nodes):
            self._holders.append(self._hold(i))

    def _hold(self, i: int) -> int:
        """Make a node; returns the number, inside, of the process that keeps it."""
        mtu = ("mtu", str(self.mtu))
        self.shared("ip", "link", "add", f"port{i}", *mtu, "type", "veth", "peer", "name", f"end{i}", *mtu)
        process = subprocess.Popen(
            [*self._inside, "unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c"]
            + [_NODE.format(i=i, directory=self.directory)],
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
        there = f"nsenter --target={holder} --net"
        for command in (
            f"ip link set end{i} netns {holder} name eth0",
            f"ip link set port{i} master bridge up",
            f"{there} ip addr add 10.77.0.{i + 1}/24 dev eth0",
            f"{there} ip link set eth0 up",
        ):
            self.shared(*command.split())
        return int(holder)

    def _ended(
        self, command: list[str], limit: float, environ: Mapping[str, str] | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )


def checked(ended: subprocess.CompletedProcess[str]) -> str:
    """What a command that has to succeed said."""
    if ended.returncode != 0:
        raise RuntimeError(f"{ended.args}: {ended.stdout}")
    return ended.stdout
