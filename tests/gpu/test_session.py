"""The session on a GPU, rehearsed: what it leaves where steps fail, and where time runs out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "session.sh"
FIGURES = ROOT / "tests" / "gpu" / "figures.py"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(bool(os.environ.get("MPISTRAT_TEST_GPU")), reason="is one itself")


@pytest.fixture
def session(tmp_path):
    """``session(seconds, *parts)``: its exit status, what it printed, and the figures by name."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("the kernels of the stand-in need a C++ compiler")
    folder = tmp_path / "out"

    def run(seconds, *parts):
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "fakes"), "MPISTRAT_TEST_GPU": ""}
        environ |= {"SESSION_STEPS": str(tmp_path / "steps"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        environ |= {"TIMES": "20", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", str(SCRIPT), str(folder), str(seconds), *parts]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
        return ended.returncode, ended.stdout + ended.stderr, figures_in(folder)

    run.folder = folder
    return run


def figures_in(folder):
    return {each["what"]: each for each in json.loads((folder / "figures.json").read_text())}


@pytest.mark.full
def test_what_fails_does_not_end_the_rest(session):
    status, output, figures = session(90, "sanitize", "growth")
    if shutil.which("compute-sanitizer") is None:
        assert status == 1, output
        assert "memcheck       exit 127" in output
        assert "racecheck      exit 127" in output
        assert figures["compute-sanitizer, memcheck"]["why"] == "not measured"
    assert "growth         exit   0" in output
    grown = figures["growth of memory by pinned"]
    assert grown["figure"]["times"] == 20
    assert grown["met"] is None  # too few
    assert "was not tried" in figures["growth of memory by gpu_direct"]["why"]
    assert sorted(each.name for each in session.folder.iterdir()) == ["figures.json", "log.txt", "summary.txt"]
    status, output, figures = session(9, "job")
    assert status == 1
    assert "job-cpu        exit   -    0 s  not begun: no time was left" in output
    assert figures["growth of memory by pinned"] == grown  # kept
    lines = (session.folder / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["memcheck", "racecheck", "growth", "job-cpu", "job-cuda"]
    assert "pinned, 20 times, rank 1" in (session.folder / "log.txt").read_text()


def test_its_arguments(tmp_path):
    for arguments in ([], [tmp_path], [tmp_path, "soon"], [tmp_path, "0", "look"], [tmp_path, "9", "luck"]):
        environ = {**os.environ, "SESSION_STEPS": str(tmp_path)}
        ended = subprocess.run(["bash", SCRIPT, *arguments], env=environ, capture_output=True, text=True, timeout=20)
        assert ended.returncode == 2
        assert "look test bench growth job more direct sanitize" in ended.stderr


@pytest.mark.parametrize("well", [True, False])
def test_figures(run_alone, tmp_path, well):
    """What is to be shown is shown by what the steps leave, or is not."""
    steps = tmp_path / "steps"

    def write(name, content):
        path = steps / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def bench(**seconds):
        return [
            {"way": way, "bytes": nbytes, "seconds": each * nbytes}
            for way, each in seconds.items()
            for nbytes in (MIB, 64 * MIB, 256 * MIB)
        ]

    for name in ("tests-1", "tests-2", "tests-4", "commands", "direct-tests"):
        write(f"{name}.txt", "70 passed in 3.1s\n" if well else "FAILED tests/x.py::test_y\n1 failed, 69 passed\n")
        write(f"{name}.status", "0" if well else "1")
    slow = 4.0 if well else 1.2
    write("bench-2.json", bench(**{"mpistrat, pinned": 1.0, "unpinned copy and one call": slow}))
    write("direct-bench.json", bench(**{"mpistrat, pinned": 1.0, "one call on device pointers": slow}))
    share = 0.9 if well else 0.7
    write("bandwidth.json", {"a copy on the GPU": 4e12, "pack 1 arrays": 3.8e12, "pack 64 arrays": share * 4e12})
    write("bandwidth.status", "0")
    write("growth.json", {"pinned": {"times": 10_000, "grew": not well}})
    write("job-cpu/history.json", {"accuracy": 0.95})
    write("job-cuda/history.json", {"accuracy": 0.949 if well else 0.5})
    write("memcheck.txt", f"========= ERROR SUMMARY: {0 if well else 3} errors\n")
    write("racecheck.txt", f"========= RACECHECK SUMMARY: {0 if well else 2} hazards displayed\n")
    run_alone(FIGURES, steps, tmp_path).check()
    figures = figures_in(tmp_path)
    measured = {what for what, each in figures.items() if each["met"] is not None}
    assert measured == {
        *("tests-1", "tests-2", "tests-4", "commands", "direct-tests", "kernels: pack"),
        f"pinned against 'unpinned copy and one call', bench-2, {64 * MIB} bytes",
        f"pinned against 'one call on device pointers', direct-bench, {64 * MIB} bytes",
        "growth of memory by pinned",
        "main job: accuracy on the host, and on the GPU",
        *("compute-sanitizer, memcheck", "compute-sanitizer, racecheck"),
    }
    assert {figures[what]["met"] for what in measured} == {well}
    assert figures["kernels: pack"]["figure"]["share"] == share
    assert figures["kernels: update"]["why"] == "not measured"
    if well:
        write("bandwidth.status", "124")  # stopped: the rest might have been worse
        run_alone(FIGURES, steps, tmp_path).check()
        assert figures_in(tmp_path)["kernels: pack"]["met"] is None
