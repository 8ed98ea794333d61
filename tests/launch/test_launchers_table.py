"""The table of the launchers' variables is the only place that names them."""

import ast
from pathlib import Path

from mpistrat.cluster_resolver import resolve
from mpistrat.launch.launch import launcher_variables, started_tasks, without_launcher
from mpistrat.launch.launchers import FUJITSU, JSRUN, LAUNCHERS, MPIRUN, PALS

ROOT = Path(__file__).parents[2] / "mpistrat"
NUMBERS = {
    name
    for each in LAUNCHERS
    for names in (each.rank, each.size, each.local_rank, each.local_size, each.node)
    for name in names
}


def test_no_other_file_names_them():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in ROOT.rglob("*.py")
        if path.name != "launchers.py"
        if any(map(path.read_text().__contains__, NUMBERS))  # to parse all files takes 4 s
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in NUMBERS
    ]
    assert not found


def test_all_that_reads_the_table_understands_each_launcher():
    for launcher in LAUNCHERS:
        environ = dict.fromkeys(launcher.rank[:1], "1") | dict.fromkeys(launcher.size[:1], "2")
        assert launcher_variables(environ) == environ
        if not launcher.size:
            continue
        assert started_tasks(environ) == (2, launcher.size[0])
        if launcher is not JSRUN:  # which is looked for in jobs of LSF alone
            step = {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2"}
            assert resolve({**environ, **step}).task_id == 1


def test_another_job_can_be_started_from_a_rank():
    for launcher in LAUNCHERS:
        environ = dict.fromkeys((*launcher.rank, *launcher.size), "1")
        left = without_launcher({**environ, "HOME": "/"})
        if launcher in MPIRUN and launcher is not PALS:
            environ = dict.fromkeys(FUJITSU.size, "1") if launcher is FUJITSU else {}  # the variable of its job stays
        assert left == {**environ, "HOME": "/"}


def test_a_rank_of_each_launcher_ends_the_job_on_errors(run_alone):
    """Once the package is imported, whichever variables number the rank."""
    for launcher in LAUNCHERS:
        if launcher.size:
            environ = {launcher.rank[0]: "1", launcher.size[0]: "2"}
            code = "import sys, mpistrat; print('own hook', sys.excepthook is not sys.__excepthook__)"
            run_alone("-c", code, **environ).check().shows("own hook True")
