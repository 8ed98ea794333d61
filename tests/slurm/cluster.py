"""A real Slurm of several nodes on this machine, which is gone when the test run is.

All of it is one process tree in namespaces of its own. A node has a host name, an address, shared memory and
a `slurmd`; `slurmctld` and `munged` are on node0. The nodes reach each other over a bridge that leads nowhere
else. The first process reads from a pipe of this one: when that closes, however this process ends, the kernel
kills the others, and with the last of them go the network, the mounts and the files, which are in memory.
The GPUs are devices like /dev/null: Slurm deals them out and sets ``CUDA_VISIBLE_DEVICES``, and there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix2", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "srun", "scontrol", "munged", "ip", "nsenter", "unshare")
CORES = 8
GPUS = 2
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until its credential has expired: 120 s unless said otherwise.
AuthInfo=socket={directory}/munge/socket,cred_expire=5
# Nothing that needs cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# Believe the numbers of cores below, whatever the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=3
MessageTimeout=20
SlurmdTimeout=60
InactiveLimit=0
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
# The PMIx plugin names its directory after the step alone: one for each node.
TmpFS={directory}/tmp/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld
SlurmdLogFile={directory}/log/slurmd.%n
NodeName=node[0-{last}] CPUs={cores} RealMemory=1024 Gres=gpu:fake:{gpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""

# Run once in the namespaces that all nodes share.
PREPARE = """
set -eu
mount -t tmpfs -o mode=755 tmpfs {directory}
cd {directory}
mkdir state spool log munge dev tmp pmix
head -c 64 /dev/urandom >munge/key
chmod 600 munge/key
for i in $(seq 0 {last_gpu}); do mknod -m 666 dev/nvidia$i c 1 3; done
# The plugin of Slurm opens libpmix.so, and only the development package has that name.
for library in /usr/lib/*/pmix2/lib; do
    cp -a "$library/." pmix
    ln -sf libpmix.so.2 pmix/libpmix.so
    mount --bind pmix "$library"
done
ip link add bridge type bridge stp_state 0
ip link set lo up
ip link set bridge up
"""

# Run in the namespaces of a node, which last as long as the process that this becomes.
NODE = """
set -eu
hostname node{i}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {directory}/hosts /etc/hosts
ip link set lo up
echo $$
exec sleep infinity
"""


def missing() -> str | None:
    """What this machine lacks to run one, if anything."""
    if os.geteuid() != 0:
        return "needs root"
    release = Path("/etc/os-release")
    if not re.search(r"^ID(_LIKE)?=.*debian", release.read_text() if release.exists() else "", re.MULTILINE):
        return "needs Debian or one of its relatives"
    if shutil.which("apt-get") is None:
        return "needs apt-get"
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACES, "true"], check=False).returncode != 0:
        return "needs leave to make namespaces"
    return None


def install() -> None:
    """Have the packages.

    Raises
    ------
    RuntimeError
        If apt-get fails twice.
    """
    if all(map(shutil.which, PROGRAMS)) and list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so.2")):
        return
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    steps = [*apt, "install", "--no-install-recommends", *PACKAGES], [*apt, "update"]
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (steps[0], steps[1], steps[0]):
        ended = subprocess.run(
            step,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if step is steps[0] and ended.returncode == 0:
            return
    raise RuntimeError(f"apt-get could not install {' '.join(PACKAGES)}:\n{ended.stdout}")


class Cluster:
    """Slurm with nodes node0, node1, ..., of `CORES` cores and `GPUS` GPUs each. A context manager.

    Attributes
    ----------
    directory : Path
        Where its files are, as its own processes see it.
    """

    def __init__(self, nodes: int = 3):
        self.nodes = nodes

    def __enter__(self) -> Cluster:
        install()
        self.directory = Path(tempfile.mkdtemp(prefix="mpistrat-slurm-"))
        self._keepers: list[subprocess.Popen[str]] = []
        self._first = subprocess.Popen(
            [
                *NAMESPACES,
                *("env", "--ignore-signal=CHLD", "cat"),  # which makes the kernel bury adopted processes
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._start()
        except BaseException as error:
            log = self.logs()
            self.__exit__()
            raise RuntimeError(f"Slurm did not start: {error}\n{log}") from error
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
        self.directory.rmdir()

    def run(
        self, *command: str | Path, node: int = 0, cwd: Path | None = None, limit: float = 120, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node; standard output and error come as one text."""
        return self._shared(
            *self._enter(node),
            *(("env", "-C", str(cwd)) if cwd else ()),
            *map(str, command),
            limit=limit,
            environ={"SLURM_CONF": f"{self.directory}/slurm.conf", **environ},
        )

    def processes(self) -> list[int]:
        """The processes of the cluster that are still there, by the numbers that they have outside of it."""
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{entry}/ns/pid") == self._namespace:
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def logs(self) -> str:
        """The last lines of what the daemons wrote."""
        files = sorted(self._seen.glob("log/*")) if self._first.poll() is None else []
        return "\n".join("\n".join([str(f), *f.read_text().splitlines()[-30:]]) for f in files)

    @property
    def _seen(self) -> Path:
        """The directory as its own processes see it, from here."""
        return Path(f"/proc/{self._first.pid}/root{self.directory}")

    def _start(self) -> None:
        first = f"/proc/{self._first.pid}/ns"
        self._wait_for(
            lambda: os.readlink(f"{first}/net") != os.readlink("/proc/self/ns/net"), "a network", 10
        )
        self._wait_for(lambda: os.path.exists(f"{first}/pid_for_children"), "a first process", 10)
        self._namespace = os.readlink(f"{first}/pid_for_children")
        self._inside = ["nsenter", f"--target={self._first.pid}", "--mount", "--net", "--ipc"]
        self._inside.append(f"--pid={first}/pid_for_children")
        directory, last = self.directory, self.nodes - 1
        self._check(self._shared("sh", "-c", PREPARE.format(directory=directory, last_gpu=GPUS - 1)))
        hosts = "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(self.nodes))
        gpus = f"{directory}/dev/nvidia[0-{GPUS - 1}]"
        files = {
            "hosts": f"127.0.0.1 localhost\n{hosts}",
            "cgroup.conf": "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n",
            "gres.conf": f"NodeName=node[0-{last}] Name=gpu Type=fake File={gpus}\n",
            "slurm.conf": CONFIGURATION.format(directory=directory, last=last, cores=CORES, gpus=GPUS),
        }
        for name, text in files.items():
            (self._seen / name).write_text(text)
        self._holders = [self._hold(i) for i in range(self.nodes)]
        munge = directory / "munge"
        paths = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self._check(self.run("munged", *(f"--{name}={munge / file}" for name, file in paths.items())))
        self._check(self.run("slurmctld"))
        for i in range(self.nodes):
            self._check(self.run("mkdir", directory / f"spool/node{i}", directory / f"tmp/node{i}"))
            self._check(self.run("slurmd", "-N", f"node{i}", node=i))
        self._wait_for(self._all_idle, "all nodes to be idle", 30)

    def _hold(self, i: int) -> str:
        """Make a node; returns the number, inside, of the process that keeps it."""
        self._check(self._shared("ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", f"end{i}"))
        script = NODE.format(i=i, directory=self.directory)
        process = subprocess.Popen(
            [*self._inside, "unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", script],
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
        self._check(self._shared("ip", "link", "set", f"end{i}", "netns", holder, "name", "eth0"))
        self._check(self._shared("ip", "link", "set", f"port{i}", "master", "bridge", "up"))
        for words in (f"addr add 10.77.0.{i + 1}/24 dev eth0", "link set eth0 up"):
            self._check(self._shared("nsenter", f"--target={holder}", "--net", "ip", *words.split()))
        return holder

    def _enter(self, node: int) -> list[str]:
        return ["nsenter", f"--target={self._holders[node]}", "--net", "--uts", "--ipc", "--mount"]

    def _shared(
        self, *command: str, limit: float = 30, environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces that all nodes share."""
        return subprocess.run(
            [*self._inside, *command],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )

    def _all_idle(self) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(self.nodes)

    @staticmethod
    def _check(ended: subprocess.CompletedProcess[str]) -> None:
        if ended.returncode != 0:
            raise RuntimeError(f"{ended.args}: {ended.stdout}")

    @staticmethod
    def _wait_for(condition: Callable[[], bool], what: str, limit: float) -> None:
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {limit} s for {what}")
            time.sleep(0.05)
