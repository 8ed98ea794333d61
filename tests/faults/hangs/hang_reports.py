"""The hangs of which there is a report, in the directory for reports.

``hang_reports.py DIRECTORY WAIT CALL COUNT PROCESS`` lets a process that is stopped go on, once it finds so many hangs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

PATIENCE = 120  # seconds for the report on one hang


def first_reports(directory: str | Path, wait: str, call: str = "") -> dict[tuple[str, str], str]:
    """The first report in which ranks wait in a call as ``wait`` says, of each hang, the oldest hang first.

    A rank that is late is in no such report: its hang gets another one, as long as it lasts. A hang is named by the
    communicator and the number of the call.
    """
    found: dict[tuple[str, str], str] = {}
    for path in sorted(Path(directory).glob("hang-*"), key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text()
        if re.search(rf"\b{re.escape(wait)} since .*\n  in {re.escape(call)}", text):
            _, token, number, _ = path.name.split("-", 3)
            found.setdefault((token, number), text)
    return found


def main(directory: str, wait: str, call: str, count: str, process: str) -> None:
    end = time.monotonic() + PATIENCE
    while len(first_reports(directory, wait, call)) < int(count) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(int(process), signal.SIGCONT)


if __name__ == "__main__":
    main(*sys.argv[1:])
