"""The environments of real tasks of Slurm 22.05, recorded on three nodes ``node0..2`` with two GPUs each, or four.

One folder a launch, one file a task, named after its rank. What cannot be of interest was left out.
"""

from pathlib import Path

FOLDERS = Path(__file__).parent / "environments"


def recorded(folder: str, rank: int) -> dict[str, str]:
    """The environment of a task."""
    lines = (FOLDERS / folder / f"{rank}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)
