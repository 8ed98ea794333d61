"""Environments of real tasks of Slurm 22.05, recorded on three nodes ``node0..2`` with two or four GPUs each.

There is one folder per launch and one file per task, named after its rank. Unrelated variables were left out.
"""

from pathlib import Path

FOLDERS = Path(__file__).parent / "environments"


def recorded(folder: str, rank: int) -> dict[str, str]:
    """Return the environment of a task."""
    lines = (FOLDERS / folder / f"{rank}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)
