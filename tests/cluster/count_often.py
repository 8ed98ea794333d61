"""Count calls on four nodes while workers are killed, many times: ``python tests/cluster/count_often.py [RUNS]``.

Not a test: 25 runs take ten minutes. Each one is ``count_once.py`` with another seed.
"""

import sys
from pathlib import Path

from nodes import Cluster

PROGRAM = Path(__file__).with_name("count_once.py")


def main() -> int:
    """Return how many runs failed, and print the line of each one."""
    failed = 0
    with Cluster(4) as cluster:
        for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 25):
            started = cluster.start(
                [2, 2, 2, 2], PROGRAM, "--seed", str(seed), *sys.argv[2:], options=["--with-ft", "ulfm"]
            )
            status = started.wait(180)
            lines = started.output().splitlines()
            shown = [line for line in lines if line.startswith("seed")]
            print(*(lines if status else shown), f"status {status}", sep="\n", flush=True)
            failed += status != 0
            cluster.clear()
    return failed


if __name__ == "__main__":
    sys.exit(main())
