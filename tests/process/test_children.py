"""Tests of processes that run code of this package."""

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
    """In a folder that only the path of the parent has: neither its own parent nor the current one is searched."""
    packages = tmp_path / "packages"
    shutil.copytree(Path(mpistrat.__file__).parent, packages / "mpistrat")
    (packages / "mpistrat" / "shown.py").write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # -I: without the environment's paths, and without packages of the user.
    command = [sys.executable, "-I", program, packages]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    found = ended.stdout.splitlines()
    assert str(packages) in found
    assert not {"", ".", str(tmp_path)} & {*found}
