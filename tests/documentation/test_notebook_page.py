"""The cells of the page about notebooks run: four engines of ipyparallel are the ranks of one job."""

import os
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"
CELLS = re.compile(r"<!-- not run: needs ipyparallel -->\n```python\n(.*?)```|```text\n(%%px\n.*?)```", re.DOTALL)

NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
try:
    for cell in {cells!r}:
        shell.run_cell(cell).raise_error()
finally:
    shell.run_cell("cluster.stop_cluster_sync()")
"""


@pytest.mark.timeout(200)
@pytest.mark.full
def test_cells_run_on_four_engines(run_alone, tmp_path):
    pytest.importorskip("ipyparallel")
    cells = [python or px for python, px in CELLS.findall(PAGE.read_text())]
    assert len(cells) == 3
    environ = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        **dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "HOME"), str(tmp_path)),
    }
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK.format(cells=cells))
    ended = run_alone(program, limit=150, cwd=tmp_path, **environ).check()
    assert len(re.findall(r"Out\[\d:\d+\]: .*\b6\b", ended.output)) == 4, str(ended)
    ended.shows("[15.0, 15.0, 15.0, 15.0]")
