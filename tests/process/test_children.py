"""Tests of processes that run code of this package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mpistrat

PROGRAM = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from mpistrat.process import children
shown = subprocess.run(children.running("mpistrat.shown"), check=True, capture_output=True, text=True)
print(shown.stdout, end="")
"""


def test_the_package_of_the_parent_is_found_and_nothing_beside_it(tmp_path):
    """In a folder that only the path of the parent has: neither its own parent nor the current one is searched.

    Also where the process knows another copy of the package, as an installed one is beside a clone.
    """
    packages = tmp_path / "packages"
    shutil.copytree(Path(mpistrat.__file__).parent, packages / "mpistrat")
    (packages / "mpistrat" / "shown.py").write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    other = tmp_path / "other"
    (other / "mpistrat").mkdir(parents=True)
    (other / "mpistrat" / "__init__.py").touch()
    # -I: without the environment's paths, which the process of the package has, and without packages of the user.
    command = [sys.executable, "-I", program, packages]
    environ = {**os.environ, "PYTHONPATH": str(other)}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ)
    assert ended.returncode == 0
    found = ended.stdout.splitlines()
    assert str(packages) in found
    assert not {"", ".", str(tmp_path)} & {*found}
