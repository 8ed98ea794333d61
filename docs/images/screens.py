"""Write what a terminal shows of a hang, and of `mpistrat top`, to text files for the landing page.

python docs/images/screens.py runs the program below on four ranks, of which rank 2 stops at a file that never comes,
and keeps what is printed, with the names of folders left out.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mpistrat

HERE = Path(__file__).parent
PROGRAM = """\
import pathlib
import time

import numpy as np

import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = mpistrat.Variable(np.zeros(1000), name="weights")
    optimizer = mpistrat.optimizers.Adam(0.001)


def read(step):
    while step == 40 and strategy.comm.rank == 2 and not pathlib.Path("part-40.npy").exists():
        time.sleep(0.2)
    time.sleep(0.05)
    return np.ones(1000)


def train(rows):
    optimizer.apply_gradients([(rows, weights)])


for step in range(1000):
    strategy.run(train, args=(read(step),))
"""
COMMANDS = {"hang": "mpistrat run -n 4 train.py", "top": "mpistrat top --once"}


def capture():
    """Return what the job and `mpistrat top` print, by the name of the file."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(PROGRAM)
        environment = {**os.environ, "MPISTRAT_HANG_SECONDS": "10", "MPISTRAT_RECORD_DIR": folder}
        command = [sys.executable, "-m", "mpistrat"]
        report = Path(folder, "output")
        with report.open("w") as output:
            job = subprocess.Popen(
                [*command, "run", "-n", "4", "train.py"], cwd=folder, env=environment, stdout=output, stderr=output
            )
        try:
            end = time.monotonic() + 120
            while "This report is in" not in report.read_text() and time.monotonic() < end:
                time.sleep(0.5)
            top = subprocess.run(
                [*command, "top", str(job.pid), "--once"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
        finally:
            job.terminate()
            job.wait()
        package = Path(mpistrat.__file__).parents[1]
        # A cell of the table keeps its width.
        top = re.sub(rf"{folder}/(.*?  )", lambda cell: f"{cell[1]}{' ' * len(folder + '/')}", top)
        texts = {"hang": report.read_text().partition("This report is in")[0], "top": top}
        return {
            name: re.sub(" +$", "", text.replace(f"{folder}/", "").replace(f"{package}/", ""), flags=re.M).rstrip()
            for name, text in texts.items()
        }


if __name__ == "__main__":
    for name, text in capture().items():
        HERE.joinpath(f"{name}.txt").write_text(f"$ {COMMANDS[name]}\n{text}\n")
