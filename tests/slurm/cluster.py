"""A real Slurm of several nodes on this machine, which is gone when the test run is.

Each node has a `slurmd`; `slurmctld` and `munged` are on node0.
The GPUs are devices like /dev/null: Slurm deals them out and sets ``CUDA_VISIBLE_DEVICES``, and there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import namespaces

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix2", "libfaketime", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "srun", "scontrol", "munged", "ip", "nsenter", "unshare")
LIBRARIES = ("*/pmix2/lib/libpmix.so.2", "*/faketime/libfaketime.so.1")
CORES = 8
GPUS = 2

CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until its credential has expired: 120 s unless said otherwise. A slurmstepd with PMIx
# that is killed while its rank is in MPI_Finalize tries for 32 s to reach the others, and has the socket that the
# requeued step wants. And no job starts on a machine that stands still for longer than this.
AuthInfo=socket={directory}/munge/socket,cred_expire=40
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
# The time in which a cancelled job can save.
KillWait=30
# What a machine that stands still for some time would exceed.
MessageTimeout=60
TCPTimeout=10
SlurmdTimeout=300
BatchStartTimeout=120
# Tests ask for jobs that have ended long ago.
MinJobAge=36000
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

# A job of the first partition makes room for one of the second, and has five minutes to leave.
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=node3 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=node3 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""

# That of Slurm 22.05 may die when two steps start at the same moment. Its jobs do not die with it.
SLURMD = """
while :; do
    slurmd -D -N node{i} >/dev/null 2>&1
    echo "slurmd of node{i} ended with status $?"
    sleep 1
done >{directory}/log/ended.node{i} 2>&1 &
"""

PREPARE = f"""
mkdir state spool log munge dev tmp pmix
head -c 64 /dev/urandom >munge/key
chmod 600 munge/key
for i in $(seq 0 {GPUS - 1}); do mknod -m 666 dev/nvidia$i c 1 3; done
# The plugin of Slurm opens libpmix.so, and only the development package has that name.
for library in /usr/lib/*/pmix2/lib; do
    cp -a "$library/." pmix
    ln -sf libpmix.so.2 pmix/libpmix.so
    mount --bind pmix "$library"
done
"""


def missing() -> str | None:
    """What this machine lacks to run one, if anything."""
    release = Path("/etc/os-release")
    if not re.search(r"^ID(_LIKE)?=.*debian", release.read_text() if release.exists() else "", re.MULTILINE):
        return "needs Debian or one of its relatives"
    if shutil.which("apt-get") is None:
        return "needs apt-get"
    return namespaces.missing()


def install() -> None:
    """Have the packages.

    Raises
    ------
    RuntimeError
        If apt-get fails twice.
    """
    if all(map(shutil.which, PROGRAMS)) and all(list(Path("/usr/lib").glob(each)) for each in LIBRARIES):
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


class Cluster(namespaces.Nodes):
    """Slurm with nodes node0, node1, ..., of `CORES` cores and `GPUS` GPUs each. A context manager.

    Parameters
    ----------
    nodes : int
    more : str
        Further lines of its configuration.
    """

    name = "Slurm"
    prepare = PREPARE

    def __init__(self, nodes: int = 3, more: str = ""):
        super().__init__(nodes)
        self._more = more

    def __enter__(self) -> Cluster:
        install()
        return super().__enter__()

    def run(
        self, *command: str | Path, node: int = 0, cwd: Path | None = None, limit: float = 120, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node; standard output and error come as one text."""
        place = ("env", "-C", str(cwd)) if cwd else ()
        environ = {"SLURM_CONF": f"{self.directory}/slurm.conf", **environ}
        return self.run_on(node, *place, *map(str, command), limit=limit, environ=environ)

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

    def lose(self, node: int) -> None:
        """End all processes of a node, and take its link away."""
        found = self.run(
            "sh", "-c", "grep -l . /proc/[0-9]*/comm; readlink /proc/self/ns/net", node=node
        ).stdout.split()
        *processes, network = found
        own = [each.split("/")[2] for each in processes]
        holder = str(self._holders[node])
        script = f"""
            for number in {" ".join(own)}; do
                [ "$(readlink /proc/$number/ns/net)" = "{network}" ] && [ $number != {holder} ] && echo $number
            done | xargs kill -KILL
        """
        self.cut(node)
        self.shared("sh", "-c", script)

    def logs(self) -> str:
        """The last lines of what the daemons wrote."""
        files = sorted(self.seen.glob("log/*")) if self._first.poll() is None else []
        return "\n".join("\n".join([str(f), *f.read_text().splitlines()[-30:]]) for f in files)

    def _start(self) -> None:
        self._namespace = self.process_namespace
        directory, last = self.directory, self.nodes - 1
        gpus = f"{directory}/dev/nvidia[0-{GPUS - 1}]"
        self.write("cgroup.conf", "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        self.write("gres.conf", f"NodeName=node[0-{last}] Name=gpu Type=fake File={gpus}\n")
        text = CONFIGURATION.format(directory=directory, last=last, cores=CORES, gpus=GPUS)
        self.write("slurm.conf", text + self._more)
        munge = directory / "munge"
        paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        namespaces.checked(self.run("munged", *(f"--{name}={munge / file}" for name, file in paths.items())))
        namespaces.checked(self.run("slurmctld"))
        for i in range(self.nodes):
            self.shared("mkdir", *(str(directory / kind / f"node{i}") for kind in ("spool", "tmp")))
            namespaces.checked(self.run("sh", "-c", SLURMD.format(directory=directory, i=i), node=i))
        namespaces.wait_for(self._all_idle, "all nodes to be idle", 120)

    def _all_idle(self) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(self.nodes)
