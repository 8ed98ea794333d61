"""How often reports of hangs name the right rank and the right cause: ``python tests/faults/hangs/causes.py``.

By default on 4 ranks of this machine; with ``--nodes`` on 4 emulated nodes of 2 ranks each, which needs root (see
``tests/cluster/nodes.py``). A cause that ends by itself is repeated in one job, any other in a job for each time.
Prints a line for each cause: right reports, repetitions, and what the others said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("hangs.py")
# What each fault of the program is reported as.
GO_ON = {
    "python": "Python code",
    "c_code": "C code",
    "sleep": "sleep",
    "stopped": "stopped",
    "lock": "lock",
    "pipe": "pipe",
    "skipped": "skipped",
}
END = {"order": "other order", "killed": "killed", "exits": "exited"}
NODE_FAULTS = {"link": "network", "node": "node"}
CAUSES = {**GO_ON, **END, **NODE_FAULTS}
LIMIT = 60  # seconds of a job, and of each repetition in it
_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "PYTHONUNBUFFERED": "1",
}


def told(text: str) -> list[tuple[str, str]]:
    """Return the ranks that are waited for, or ended first, and the cause, of each report in a text."""
    ranks = r"ranks? [\d, -]+"
    head = rf"(?:{ranks} of \d+ ha(?:s|ve) waited for ({ranks}) since|(rank \d+) of \d+ ended first)"
    found = re.findall(rf"^.*?{head}.*\n(?:  (?!cause).*\n)+  cause: ([^.]+)\.", text, re.MULTILINE)
    return [(waited_for or first, cause) for waited_for, first, cause in found]


def environ_of(name: str, folder: Path, culprit: int) -> dict[str, str]:
    """Return the variables for a job."""
    return {
        **_ENVIRON,
        "CULPRIT": str(culprit),
        "HOME": str(folder),
        "MPISTRAT_HANG_SECONDS": "1",
        "MPISTRAT_RECORD_DIR": str(folder),
        "MPISTRAT_HANG_ABORT_SECONDS": "8" if name in ("order", "exits") else "0",
    }


class OneNode:
    """Four ranks of this machine."""

    culprit = "rank 2"
    absent = NODE_FAULTS

    def run(self, names: list[str], folder: Path) -> str:
        """Return the output of a job, and of ``top --last`` after it."""
        # By names: in a thread, pytest may take away PYTEST_CURRENT_TEST between its name and its value.
        environ = {name: os.environ.get(name, "") for name in os.environ} | environ_of(names[0], folder, 2)
        command = [sys.executable, "-m", "mpistrat", "run", "-n", "4", str(PROGRAM), *names]
        output = self._said(command, environ, LIMIT * (1 + len(names)))
        if names[0] in END:
            for record in map(str, folder.glob("last-*")):
                output += self._said([sys.executable, "-m", "mpistrat", "top", "--last", record], environ, LIMIT)
        return output

    @staticmethod
    def _said(command: list[str], environ: dict[str, str], limit: float) -> str:
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        ) as process:
            try:
                return process.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                return process.communicate()[0] + "\nstopped at its limit\n"


class FourNodes:
    """Two ranks on each of four emulated nodes."""

    absent: dict[str, str] = {}

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "cluster"))
        import nodes

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.environ.update(_ENVIRON)
        self.cluster = nodes.Cluster(4)
        self.culprit = "rank 5"

    def run(self, names: list[str], folder: Path) -> str:
        """Return the output of a job, and of ``top --last`` on each node after it."""
        name = names[0]
        self.culprit = "ranks 6-7" if name in NODE_FAULTS else "rank 5"
        environ = environ_of(name, folder, 5)
        started = self.cluster.start((2, 2, 2, 2), PROGRAM, *names, options=("-wdir", str(folder)), **environ)
        try:
            if name in NODE_FAULTS:
                started.wait_for("in step\n", LIMIT)
                self.cluster.cut(3) if name == "link" else self.cluster.power_off(3)
                with contextlib.suppress(TimeoutError):
                    started.wait_until(lambda: bool(reports(folder)), "a report", LIMIT)
                return started.output()
            if started.wait(LIMIT * (1 + len(names))) is None:
                return started.output() + "\nstopped at its limit\n"
            output = started.output()
            if name in END:
                command = (sys.executable, "-m", "mpistrat", "top", "--last")
                for node in range(4):
                    output += self.cluster.run_on(node, *command, environ=environ).stdout
            return output
        finally:
            self.cluster.heal(3)
            self.cluster.clear()
            if name in NODE_FAULTS:
                time.sleep(2)  # until the bridge passes packets of that node on
            for node in range(4):
                self.cluster.run_on(node, "sh", "-c", "rm -f /dev/shm/mpistrat-record-*")


def reports(folder: Path) -> list[list[tuple[str, str]]]:
    """Return what is told by the first report on each hang. On a busy machine the start may take long."""
    first: dict[str, Path] = {}
    for path in sorted(folder.glob("hang-*"), key=lambda path: path.stat().st_mtime_ns):
        first.setdefault("-".join(path.name.split("-")[1:3]), path)
    texts = [path.read_text() for path in first.values()]
    return [told(text) for text in texts if "in the start of " not in text]


def right(where: OneNode | FourNodes, name: str, repeat: int) -> tuple[int, list[str]]:
    """Return how many reports on a cause are right, and what was said otherwise."""
    count, wrong = 0, []
    jobs = [[name] * repeat] if name in GO_ON else [[name]] * repeat
    for names in jobs:
        with tempfile.TemporaryDirectory(prefix="mpistrat-causes-") as folder:
            output = where.run(names, Path(folder))
            found = [told(output)] if name in END else reports(Path(folder))
        expected = (where.culprit, CAUSES[name])
        good = sum(expected in each[:1] or (name in END and expected in each) for each in found[: len(names)])
        count += good
        if good < len(names):
            wrong += [f"{len(found)} reports for {len(names)} hangs", str(found), output]
    return count, wrong


def measure(where: OneNode | FourNodes, names: list[str], repeat: int) -> bool:
    """Print a line for each cause. Return whether all reports are right."""
    good = True
    for name in names:
        if name in where.absent:
            continue
        began = time.monotonic()
        count, wrong = right(where, name, repeat)
        print(f"{CAUSES[name]:15} {count:3}/{repeat}   {time.monotonic() - began:5.1f} s", flush=True)
        for each in wrong:
            print("    " + each.replace("\n", "\n    "), flush=True)
        good &= count == repeat
    return good


def main() -> int:
    """Run the causes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--nodes", action="store_true", help="4 emulated nodes of 2 ranks each")
    parser.add_argument("causes", nargs="*", choices=[[], *CAUSES], default=[])
    arguments = parser.parse_args()
    names = arguments.causes or list(CAUSES)
    if not arguments.nodes:
        return 0 if measure(OneNode(), names, arguments.repeat) else 1
    where = FourNodes()
    with where.cluster:
        return 0 if measure(where, names, arguments.repeat) else 1


if __name__ == "__main__":
    sys.exit(main())
