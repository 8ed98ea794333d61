"""Draw a terminal with a hang report and one with `mpistrat top`, as svg files for a light and a dark page.

python docs/images/screens.py runs the program below on four ranks, of which rank 2 stops at a file that never comes,
and draws what is printed, with the names of folders left out.
"""

import html
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
COLUMNS, SIZE, LEADING = 118, 13, 18
THEMES = {"light": ("#f6f8fa", "#1f2328", "#1a7f37"), "dark": ("#161b22", "#e6edf3", "#3fb950")}


def capture():
    """Return what the job and `mpistrat top` print, by the name of the picture."""
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
                env={**environment, "COLUMNS": str(COLUMNS)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
        finally:
            job.terminate()
            job.wait()
        package = Path(mpistrat.__file__).parents[1]
        # A cell of the table keeps its width.
        top = re.sub(rf"{folder}/([^│]*)│", lambda cell: f"{cell[1]}{' ' * len(folder + '/')}│", top)
        texts = {"hang": report.read_text().partition("This report is in")[0], "top": top}
        return {
            name: text.replace(f"{folder}/", "").replace(f"{package}/", "").rstrip() for name, text in texts.items()
        }


def draw(command, text, theme):
    """Return a picture of a terminal, in which long lines go on in the next one."""
    ground, ink, prompt = THEMES[theme]
    lines = text.splitlines()
    columns = max(map(len, lines)) if lines[0].startswith("┏") else COLUMNS  # a table is not folded
    lines = [line[i : i + columns] for line in lines for i in range(0, max(len(line), 1), columns)]
    advance = 0.6 * SIZE  # of each letter, whatever font there is
    width, height = round(columns * advance) + 40, LEADING * (len(lines) + 1) + 36
    font = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{font}" font-size="{SIZE}" role="img">',
        f"<title>{html.escape(command)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{ground}"/>',
    ]
    for number, line in enumerate([f"$ {command}", *lines]):
        if line.strip():
            color, length = prompt if number == 0 else ink, round(len(line) * advance, 1)
            parts.append(
                f'<text x="20" y="{30 + LEADING * number}" fill="{color}" textLength="{length}" '
                f'xml:space="preserve">{html.escape(line, quote=False)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def lines_of(picture):
    """Return the lines of a picture after the command."""
    return [html.unescape(line) for line in re.findall(r'preserve">(.*)</text>', picture)[1:]]


if __name__ == "__main__":
    for name, text in capture().items():
        command = "mpistrat run -n 4 train.py" if name == "hang" else "mpistrat top"
        for theme in THEMES:
            HERE.joinpath(f"{name}-{theme}.svg").write_text(draw(command, text, theme))
