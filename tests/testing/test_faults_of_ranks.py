"""Faults of one rank of three: the test with the fault fails, names rank and line, and all other tests pass."""

import re
import textwrap
import xml.etree.ElementTree
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

HEAD = """
import os, signal, sys, time, warnings
import pytest
pytestmark = pytest.mark.ranks(3)
"""


class Fault(NamedTuple):
    """The code of a test that goes wrong on rank 1, with ``LINE`` where it does, and what its failure shows."""

    code: str
    shown: str
    ends: bool = False  # the job
    found: bool = True  # whether the line is
    mark: str = ""


# Or with others, which a launcher may kill before the session looks.
ENDED = r"ranks? ([02], )*1(, 2)? of 3 ha(s|ve) ended"
ANY_ENDED = r"ranks? [0-2](, [0-2])* of 3 ha(s|ve) ended"
FAULTS = {
    "assertion": Fault("assert comm.rank != 1  # LINE", "failed on rank 1 of 3: assert 1 != 1"),
    "assertion_that_others_wait_for": Fault(
        "if rank == 1: raise KeyError('lost')  # LINE\ncomm.Barrier()",
        "rank 1 of 3: failed: KeyError: 'lost'",
        ends=True,
    ),
    "sys_exit": Fault("if rank == 1: sys.exit(3)  # LINE", "failed on rank 1 of 3: SystemExit: 3"),
    "os_exit": Fault("if rank == 1: os._exit(3)\ncomm.Barrier()", ENDED, ends=True, found=False),
    "os_exit_0": Fault("if rank == 1: os._exit(0)\ncomm.Barrier()", ENDED, ends=True, found=False),
    "abort": Fault("if rank == 1: comm.Abort(7)\ncomm.Barrier()", ANY_ENDED, ends=True, found=False),
    "SIGSEGV": Fault("if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)  # LINE\ncomm.Barrier()", ENDED, ends=True),
    "SIGKILL": Fault(
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncomm.Barrier()", ENDED, ends=True, found=False
    ),
    "collective": Fault("if rank == 1: time.sleep(99)  # LINE\ncomm.Barrier()", "rank 1 of 3: at ", ends=True),
    "recv": Fault("if rank == 1: comm.recv(source=2, tag=9)  # LINE", "rank 1 of 3: at ", ends=True),
    "endless_loop": Fault("while rank == 1: pass  # LINE", "rank 1 of 3: at ", ends=True),
    "long_output": Fault("print('x' * 10_000_000)\nassert rank != 1  # LINE", "failed on rank 1 of 3: assert 1 != 1"),
    "skip": Fault("if rank == 1: pytest.skip('not here')", "skipped on rank 1 of 3", found=False),
    "xfail": Fault("if rank == 1: pytest.xfail('only here')", "xfailed on rank 1 of 3", found=False),
    "warning": Fault(
        "warnings.simplefilter('error')\nif rank == 1: warnings.warn('careful')  # LINE",
        "failed on rank 1 of 3: UserWarning: careful",
    ),
    "xfail_strict": Fault(
        "assert rank == 1", "failed on rank 1 of 3: [XPASS(strict)]", found=False, mark="xfail(strict=True)"
    ),
    "timeout": Fault(
        "if rank == 1: time.sleep(99)  # LINE",
        "failed on rank 1 of 3: Failed: Timeout",
        mark="timeout(2, method='signal')",
    ),
    "recursion": Fault(
        "def deeper(): deeper()  # LINE\nif rank == 1: deeper()", "failed on rank 1 of 3: RecursionError"
    ),
    "error_of_two_lines": Fault(
        "if rank == 1: raise ValueError('first\\nsecond \\udc80')  # LINE", "failed on rank 1 of 3: ValueError: first"
    ),
    "unprintable_error_that_others_wait_for": Fault(
        "if rank == 1: raise OSError('no file \\udc80')  # LINE\ncomm.Barrier()",
        "rank 1 of 3: failed: OSError: no file",
        ends=True,
    ),
    "interrupt": Fault(
        "if rank == 1: raise KeyboardInterrupt  # LINE", "rank 1 of 3: ended: KeyboardInterrupt", ends=True
    ),
    "pytest_exit": Fault(
        "if rank == 1: pytest.exit('no more')  # LINE", "rank 1 of 3: ended: _pytest.outcomes.Exit: no more", ends=True
    ),
    "SIGABRT": Fault("if rank == 1: os.abort()  # LINE\ncomm.Barrier()", ENDED, ends=True),
    "module_fixture": Fault("", "failed in setup on rank 1 of 3: OSError: no module"),
    "fixture": Fault("", "failed in setup on rank 1 of 3: OSError: no resource"),
    "teardown": Fault("", "failed in teardown on rank 1 of 3: OSError: still in use"),
}
FIXTURES = """
@pytest.fixture
def broken_fixture(rank):
    if rank == 1: raise OSError("no resource")  # LINE of fixture
@pytest.fixture
def broken_teardown(rank):
    yield
    if rank == 1: raise OSError("still in use")  # LINE of teardown
@pytest.fixture(scope="module")
def broken_module_fixture(rank):
    if rank == 1: raise OSError("no module")  # LINE of module_fixture
"""
# Collected by the ranks, each in its way.
DIFFERENT = {
    "test_import.py": HEAD
    + "if os.environ.get('{rank}') == '1': raise ImportError('only here')\ndef test_import(): pass\n",
    "test_parametrize.py": HEAD
    + "RANK = int(os.environ.get('{rank}', 0))\n"
    + "@pytest.mark.parametrize('each', [7, 8 if RANK == 1 else 9])\ndef test_parametrize(each): pass\n",
}


def source(*names: str) -> str:
    """The text of a test file with some faults, and tests that pass before and after each of them."""
    text = HEAD + FIXTURES
    for name in names:
        fixture = f", broken_{name}" if not FAULTS[name].code else ""
        code = textwrap.indent(FAULTS[name].code or "pass", "    ")
        text += f"@pytest.mark.{FAULTS[name].mark}\n" * bool(FAULTS[name].mark)
        text += f"def test_{name}(comm, rank{fixture}):\n{code}\n"
        text += f"def test_after_{name}(comm):\n    assert comm.allreduce(1) == 3\n"
    return text


def line_of(name: str, text: str) -> int:
    lines = text.splitlines()
    marked = f"# LINE of {name}"
    if FAULTS[name].code:
        marked, start = "# LINE", next(i for i, line in enumerate(lines) if line.startswith(f"def test_{name}("))
    else:
        start = 0
    return next(i for i, line in enumerate(lines[start:], start + 1) if marked in line)


def results(path) -> dict[str, str]:
    """The failure of each test of a JUnit report by its name; empty if it passed."""
    cases = xml.etree.ElementTree.parse(path).iter("testcase")
    return {
        case.get("name", ""): "\n".join(
            f"{bad.get('message')}\n{bad.text}" for bad in case if bad.tag in ("failure", "error")
        )
        for case in cases
    }


OPTIONS = ("-p", "no:cacheprovider", "--ranks-timeout=6", "--ranks-patience=2", "--junitxml=report.xml")


def check(name: str, found: str, text: str, file: str = "test_it.py") -> None:
    fault = FAULTS[name]
    assert re.search(fault.shown, found) if fault.shown in (ENDED, ANY_ENDED) else fault.shown in found
    if fault.found:
        number = line_of(name, text)
        assert f"{file}:{number}" in found or f'{file}", line {number}' in found, found


@pytest.fixture(scope="module")
def outside(run_alone, tmp_path_factory):
    """The results of all faults in one session that no launcher has started."""
    from mpistrat.launch.launchers import HYDRA, OPEN_MPI

    folder = tmp_path_factory.mktemp("outside")
    text = source(*FAULTS)
    (folder / "test_it.py").write_text(text)
    family = run_alone("-c", "from mpi4py import MPI; print(MPI.Get_library_version())").output
    rank = (OPEN_MPI if "Open MPI" in family else HYDRA).rank[0]
    for name, content in DIFFERENT.items():
        (folder / name).write_text(content.format(rank=rank))
    ended = run_alone("-m", "pytest", *OPTIONS, limit=380, cwd=folder)
    assert ended.status == 1, ended
    return results(folder / "report.xml"), text


@pytest.mark.mpich
@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_one_rank_of_a_job(outside, name):
    found, text = outside
    check(name, found[f"test_{name}[ranks3]"], text)
    assert found[f"test_after_{name}[ranks3]"] == ""


@pytest.mark.mpich
def test_different_collection_of_a_job(outside):
    found, _ = outside
    assert "rank 1 of 3 did not collect this test" in found["test_import[ranks3]"]
    assert "ImportError: only here" in found["test_import[ranks3]"]
    assert "rank 1 of 3 did not collect this test" in found["test_parametrize[9-ranks3]"]
    assert found["test_parametrize[7-ranks3]"] == ""


@pytest.mark.mpich
def test_faults_under_a_launcher_that_do_not_end_the_job(run_ranks, tmp_path):
    names = [name for name, fault in FAULTS.items() if not fault.ends]
    text = source(*names)
    (tmp_path / "test_it.py").write_text(text)
    ended = run_ranks(3, "-m", "pytest", *OPTIONS, limit=200, cwd=tmp_path)
    assert ended.status == 1, ended
    found = results(tmp_path / "report.xml")
    for name in names:
        check(name, found[f"test_{name}[ranks3]"], text)
        assert found[f"test_after_{name}[ranks3]"] == ""


@pytest.mark.mpich
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.ends])
def test_fault_under_a_launcher_ends_the_job(run_ranks, tmp_path, name):
    text = source(name)
    (tmp_path / "test_it.py").write_text(text)
    ended = run_ranks(3, "-m", "pytest", *OPTIONS, limit=60, cwd=tmp_path)
    assert ended.status not in (0, None), ended
    ended.shows(f"test_{name}[ranks3]", "test_it.py")
    if name.startswith("os_exit"):
        ended.shows("rank 1 of 3: ended by os._exit")
    if FAULTS[name].found:
        output = re.sub(r"rank 1 (was killed|\(.*\) ended)", "rank 1 of 3 has ended", ended.output)
        check(name, output, text)
