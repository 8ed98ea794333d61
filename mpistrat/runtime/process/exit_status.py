"""What a program that was told to stop, and has saved, says with its exit status."""

from __future__ import annotations

# Slurm has taken the job back into its queue.
DONE = 0
# Whoever started it may start it again: it goes on where it was.
RESTART = 42
# It shall stay away, as SIGTERM (15) said. A shell gives a program that this signal ended the same status.
STAY_AWAY = 128 + 15
# It has got nowhere, and would get nowhere again.
NO_PROGRESS = 1
