"""What ``packaging/wheelhouse`` gathers is installed, and trains, on a machine without network."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "-"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_installs_and_trains_without_network(tmp_path):
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "MPISTRAT_"))
    }

    def run(*command, **more):
        done = subprocess.run(command, env={**environ, **more}, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        subprocess.run([*ALONE, "true"], check=True)
        alone = ALONE
    except (OSError, subprocess.CalledProcessError):  # no leave to: pip still gets no index
        alone = []
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    said = run(ROOT / "packaging" / "wheelhouse", "wheels", PYTHON=sys.executable, **index)
    made, install = (line.replace("ENV", "environment") for line in said.splitlines()[-2:])
    for command in (made, install):
        run(*alone, *shlex.split(command), PIP_NO_COMPILE="0")  # pip reads 0 as "do not compile"
    program = ROOT / "docs" / "examples" / "train_digits.py"
    said = run(*alone, "environment/bin/mpistrat", "run", "-n", "2", program, "--epochs", "1")
    assert "accuracy" in said
    where = run("environment/bin/python", "-c", "import mpistrat; print(mpistrat.__file__)")
    assert str(tmp_path) in where
