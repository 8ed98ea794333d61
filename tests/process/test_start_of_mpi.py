"""How this library starts MPI: as mpi4py does by its options, in the sight of tools, and once."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import mpi4py
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.full

# Loads the MPI library by the path in LIBMPI, so it need not be linked to it.
TOOL = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *next(const char *name) {
  printf("the tool sees %s\n", name + 1);
  fflush(stdout);
  return dlsym(dlopen(getenv("LIBMPI"), RTLD_NOW), name);
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  return ((int (*)(int *, char ***, int, int *))next("PMPI_Init_thread"))(argc, argv, required, provided);
}

int MPI_Finalize(void) { return ((int (*)(void))next("PMPI_Finalize"))(); }
"""

PROGRAM = """
import os, sys, threading
import mpi4py

if "LD_PRELOAD" not in os.environ:
    mpi4py.profile(sys.argv[1])
for option in sys.argv[2:]:
    setattr(mpi4py.rc, *option.split("="))

import mpistrat
from mpistrat.process import mpi

def find_library():
    paths = (line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line)
    os.environ["LIBMPI"] = next(paths)

mpi.around_start(lambda: find_library() or threading.Lock())
threads = [threading.Thread(target=mpi.start) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
MPI = mpi.start()
handlers = MPI.COMM_WORLD.Get_errhandler(), MPI.COMM_SELF.Get_errhandler()
levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
print("level", levels[MPI.Query_thread()], "raises", handlers == (MPI.ERRORS_RETURN, MPI.ERRORS_RETURN))
sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("tool") / "tool.so"
    source = path.with_suffix(".c")
    source.write_text(TOOL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


@pytest.mark.mpich
@pytest.mark.parametrize(
    ("options", "told", "finalized"),
    [
        ([], "level MULTIPLE raises True", 1),
        (["initialize=no", "threads=no"], "level SINGLE raises True", 1),
        (["finalize=no", "thread_level=serialized", "errors=fatal"], "level SERIALIZED raises False", 0),
    ],
)
def test_tools_see_one_start_and_one_end(run_alone, tool, options, told, finalized):
    ended = run_alone("-c", PROGRAM, tool, *options)
    assert ended.output.count("the tool sees MPI_Init_thread") == 1, str(ended)
    assert ended.output.count("the tool sees MPI_Finalize") == finalized, str(ended)
    ended.shows(told)


@pytest.mark.mpich
def test_a_preloaded_tool_sees_one_start_and_one_end(run_alone, tool):
    """Its functions come before those of the library, also for mpi4py, whatever their ABI."""
    ended = run_alone("-c", PROGRAM, tool, LD_PRELOAD=str(tool)).check()
    assert ended.output.count("the tool sees MPI_Init_thread") == 1, str(ended)
    assert ended.output.count("the tool sees MPI_Finalize") == 1, str(ended)
    ended.shows("level MULTIPLE raises True")


# Another library in the process, as of a profiler for another ABI, which was loaded after mpi4py.
OTHER = r"""
#include <stdio.h>

int MPI_Abi_get_version(int *major, int *minor) { *major = 9; *minor = 0; return 0; }

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  printf("the other library starts\n");
  return 1;
}
"""

PROGRAM_WITH_OTHER = """
import ctypes, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
print("ranks", strategy.num_replicas_in_sync, "level", MPI.Query_thread() == MPI.THREAD_MULTIPLE)
"""


@pytest.mark.mpich
def test_library_of_another_abi_does_not_start(run_alone, tmp_path):
    path = tmp_path / "other.so"
    path.with_suffix(".c").write_text(OTHER)
    subprocess.run(
        [shutil.which("cc") or pytest.skip("no C compiler"), "-shared", "-fPIC", "-o", path, path.with_suffix(".c")],
        check=True,
    )
    ended = run_alone("-c", PROGRAM_WITH_OTHER, path).check()
    assert "the other library starts" not in ended.output
    ended.shows("ranks 1 level True")


OF_RECORD = """
import mpistrat
from mpi4py import MPI
from mpistrat.record import flight_record, read

strategy = mpistrat.MultiWorkerMirroredStrategy()
record = read.parse(flight_record.current().contents())
print("record of rank", record.rank, "of", record.size, "launched with others", bool(record.launch))
"""


@pytest.mark.mpich
def test_the_record_has_the_ranks_that_mpi_counts(run_alone):
    """A task of MPICH that is alone, inside a job of Open MPI."""
    if not MPI.Get_library_version().startswith("MPICH"):
        pytest.skip("needs a library that has another launcher than the job around it")
    outer = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "1"}
    run_alone("-c", OF_RECORD, **outer).check().shows("record of rank 0 of 1 launched with others False")


IN_RANK = """
import subprocess, sys
from mpistrat.runtime import topology
from mpistrat.launch import launch
from mpistrat.process import mpi
from mpistrat.record import flight_record

launch.check_wheel = lambda *arguments: None  # the variables are not those of a true launch
try:
    mpi.start()
except launch.AloneError:
    pass
print(sys.argv[1], "keeps a record", flight_record.current() is not None, flush=True)
if sys.argv[1] == "rank":
    subprocess.run(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", sys.argv[2], "child"], check=True)
"""


@pytest.mark.mpich
def test_a_process_that_a_rank_starts_is_not_taken_for_the_rank(run_alone):
    launched = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = run_alone("-c", IN_RANK, "rank", IN_RANK, **launched).check()
    ended.shows("rank keeps a record True", "child keeps a record False")


def test_without_a_library():
    program = """
import sys
class NoLibrary:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")
sys.meta_path.insert(0, NoLibrary())
import mpistrat
mpistrat.MultiWorkerMirroredStrategy()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "RuntimeError: mpi4py finds no MPI library (cannot load MPI library): load the module" in done.stderr


@pytest.mark.parametrize(
    ("environ", "why", "told"),
    [
        ({}, "libmpi.so.12", "MPI4PY_LIBMPI={file}, whose name is not libmpi.so.12"),
        ({"MPI4PY_MPIABI": "mpich"}, "libmpi.so.12", "MPI4PY_MPIABI=mpich, so it ignores MPI4PY_LIBMPI={file}"),
    ],
)
def test_a_library_of_another_name(environ, why, told, run_alone, tmp_path):
    """Cray's: mpi4py's own file is linked to the name of MPICH's, and the loader looks for that one."""
    compiler = shutil.which("cc")
    if compiler is None or not list(Path(mpi4py.__file__).parent.glob("MPI.mpich.*")):
        pytest.skip("no C compiler, or not the wheel of mpi4py")
    source, file = tmp_path / "cray.c", tmp_path / "libmpi_cray.so"
    source.write_text("int MPI_Get_version(int *major, int *minor) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{file.name}.12", "-o", file, source], check=True)
    code = "import mpistrat; mpistrat.MultiWorkerMirroredStrategy()"
    ended = run_alone("-c", code, MPI4PY_LIBMPI=str(file), LD_LIBRARY_PATH="", **environ)
    assert ended.status == 1
    ended.shows(f"ImportError: mpi4py finds no MPI library ({why}", told.format(file=file))


ALONE_AND_WRONG = """
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
strategy.run(abs, args=3)
"""


@pytest.mark.mpich
def test_tracebacks_of_one_rank_have_the_lines_of_the_program(run_alone, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ALONE_AND_WRONG)
    for options, error, lines in (
        ({}, "ValueError: args must be a tuple", 5),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "AloneError: every task", 4),
    ):
        ended = run_alone(program, **options)
        assert ended.status == 1, str(ended)
        assert error in ended.output
        assert "inside mpistrat left out; MPISTRAT_DEBUG=1 shows all)\nTraceback" in ended.output
        assert re.findall(r'  File "(.*)", line (\d+)', ended.output) == [(str(program), str(lines))]
        ended = run_alone(program, MPISTRAT_DEBUG="1", **options)
        assert "left out" not in ended.output
        assert "/mpistrat/" in ended.output
